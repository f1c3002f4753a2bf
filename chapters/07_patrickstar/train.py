"""Chapter 07: PatrickStar. Parameters, gradients and optimizer states live in chunks that move between near and far.

bash chapters/07_patrickstar/train.sh                              # two processes, near room for a quarter of the model data
bash chapters/07_patrickstar/train.sh --nproc 1 --near-budget min
bash chapters/07_patrickstar/train.sh --help
"""
# ruff: noqa: E402, I001

PARENT = "00_single"

# -- settings: a wrong flag is answered here, before torch is loaded ---------------------------------------------------
from gpt2_chinese import resolve
from engine_settings import Settings

settings = resolve(Settings.from_command_line(__file__, __doc__))

import torch
from recompute import build_model

import pstar
from gpt2_chinese import (
    Batches, Run, evaluate_model, launch, learning_rate, load, set_learning_rate,
    PARTS, weight_decay_groups,
)  # fmt: skip

# -- launch ------------------------------------------------------------------------------------------------------------
ranks = launch(settings)

# -- model: the seed decides the weights; the technique: its weights, gradients and moments move into chunks -----------
torch.manual_seed(settings.seed)
model, optimizer = pstar.initialize_engine(
    lambda: build_model(settings), ranks.local_rank, settings.engine_config(), device=ranks.device,
    group=ranks.group, param_groups=lambda module: weight_decay_groups(module, settings.weight_decay),
)  # fmt: skip
run = Run(settings, ranks, about=model.memory_plan())

# -- data: the batches of a step depend on the seed and the GLOBAL batch size alone ------------------------------------
train, valid = Batches.of(settings, ranks)
if run.resume_from and (run.resume_from / PARTS / "manifest.json").exists():  # pstar's own
    model.load_checkpoint(run.resume_from / PARTS)  # each rank reads its own part
elif run.resume_from:
    model.load_state(*load(run.resume_from)[:2])  # another chapter's

# -- the loop ----------------------------------------------------------------------------------------------------------
for step in run.steps():
    lr = learning_rate(step, settings)
    set_learning_rate(optimizer, lr)
    optimizer.zero_grad()

    loss = torch.zeros((), device=ranks.device)
    for inputs, targets in train.micro_batches(step):
        micro_loss = model(inputs, targets)
        model.backward(micro_loss)
        loss += micro_loss.detach() / settings.grad_accum

    optimizer.step()

    run.log(step, loss=ranks.mean(loss), lr=lr, grad_norm=optimizer.grad_norm, **model.step_scalars())
    if run.evaluate_now(step):
        run.log_evaluation(step, evaluate_model(model, valid, ranks))
    if run.save_now(step):
        run.save_parts(step, model.save_checkpoint)

# -- end ---------------------------------------------------------------------------------------------------------------
run.finish(model.export_weights, table=model.memory_table())
