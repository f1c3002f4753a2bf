"""Chapter 07: PatrickStar. Chunks hold parameters, gradients and optimizer states, and move between near and far memory.

bash chapters/07_patrickstar/train.sh       # near room for a quarter of the model data, on a GPU for 40% of what is free
bash chapters/07_patrickstar/train.sh --nproc 1 --near-budget min
bash chapters/07_patrickstar/train.sh --backend own --near-budget min   # chunks.py: the same losses, one process
bash chapters/07_patrickstar/train.sh --help
"""
# ruff: noqa: E402, I001

PARENT = "00_single"

# -- settings: a wrong flag ends the program here, before torch is loaded ----------------------------------------------
from gpt2_chinese import resolve
from engine_settings import Settings

settings = resolve(Settings.from_command_line(__file__, __doc__))

import torch
from backends import finish, into_chunks, resume, save

from gpt2_chinese import (
    Batches, Run, evaluate_model, launch, learning_rate, set_learning_rate,
)  # fmt: skip

# -- launch ------------------------------------------------------------------------------------------------------------
ranks = launch(settings)
run = Run(settings, ranks, header=False)

# -- data: the batches of a step depend on the seed and the GLOBAL batch size alone ------------------------------------
train, valid = Batches.of(settings, ranks)

# -- model: the seed decides the weights -------------------------------------------------------------------------------
torch.manual_seed(settings.seed)

# -- the technique: the weights of the model, their gradients and their moments move into chunks -----------------------
model, optimizer = into_chunks(settings, ranks)
run.print_header(model.memory_plan())

# -- optimizer ---------------------------------------------------------------------------------------------------------
resume(model, run)

# -- the loop ----------------------------------------------------------------------------------------------------------
for step in run.steps():
    lr = learning_rate(step, settings)
    set_learning_rate(optimizer, lr)
    optimizer.zero_grad()

    loss = torch.zeros((), device=ranks.device)
    for inputs, targets in train.micro_batches(step):
        micro_loss = model(inputs, targets) * train.weight(step, targets)
        model.backward(micro_loss)
        loss += micro_loss.detach() / settings.grad_accum

    optimizer.step()

    run.log(step, loss=ranks.mean(loss), lr=lr, grad_norm=optimizer.grad_norm, **model.step_scalars())
    if run.evaluate_now(step):
        run.log_evaluation(step, evaluate_model(model, valid, ranks))
    if run.save_now(step):
        save(model, run, step)

# -- end ---------------------------------------------------------------------------------------------------------------
finish(model, run)
