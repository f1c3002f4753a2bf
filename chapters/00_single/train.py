"""Chapter 00: one process, no parallelism. The curve that every other chapter must reproduce.

bash chapters/00_single/train.sh                                   # about four minutes on two cores
bash chapters/00_single/train.sh --model-config small --precision bf16
bash chapters/00_single/train.sh --help
"""
# ruff: noqa: E402, I001

PARENT = None

# -- settings: a wrong flag ends the program here, before torch is loaded ----------------------------------------------
from gpt2_chinese import resolve
from gpt2_chinese.settings import Settings

settings = resolve(Settings.from_command_line(__file__, __doc__))

import torch

from gpt2_chinese import (
    Batches, Run, evaluate_model, launch, learning_rate, set_learning_rate,
    GPT2LMHeadModel, recompute, tile_loss,
    adamw, grad_scaler,
    autocast,
    clip_gradients, adamw_moments, weights_of,
)  # fmt: skip

# -- launch ------------------------------------------------------------------------------------------------------------
ranks = launch(settings)
run = Run(settings, ranks)

# -- data: the batches of a step depend on the seed and the GLOBAL batch size alone ------------------------------------
train, valid = Batches.of(settings, ranks)

# -- model: the seed decides the weights -------------------------------------------------------------------------------
torch.manual_seed(settings.seed)
model = GPT2LMHeadModel(settings.model).to(ranks.device)
recompute(model, settings.recompute)  # what backward computes again, to save memory
tile_loss(model, settings.loss_tiles)  # head and loss by tiles of tokens, to save memory

# -- the technique: none -----------------------------------------------------------------------------------------------

# -- optimizer ---------------------------------------------------------------------------------------------------------
optimizer = adamw(model, settings)
scaler = grad_scaler(ranks.device, settings.precision)
run.resume(model, optimizer, scaler)

# -- the loop ----------------------------------------------------------------------------------------------------------
for step in run.steps():
    lr = learning_rate(step, settings)
    set_learning_rate(optimizer, lr)
    optimizer.zero_grad()

    loss = torch.zeros((), device=ranks.device)
    for inputs, targets in train.micro_batches(step):
        with autocast(ranks.device, settings.precision):
            micro_loss = model(inputs, targets) * train.weight(step, targets) / settings.grad_accum
        scaler.scale(micro_loss).backward()
        loss += micro_loss.detach()

    scaler.unscale_(optimizer)
    grad_norm = clip_gradients(model, settings.clip_grad_norm)
    scaler.step(optimizer)
    scaler.update()

    run.log(step, loss=ranks.mean(loss), lr=lr, grad_norm=grad_norm)
    if run.evaluate_now(step):
        run.log_evaluation(step, evaluate_model(model, valid, ranks, settings.precision))
    if run.save_now(step):
        run.save(step, weights_of(model), adamw_moments(model, optimizer), {"scaler": scaler.state_dict()})

# -- end ---------------------------------------------------------------------------------------------------------------
run.finish(weights_of(model))
