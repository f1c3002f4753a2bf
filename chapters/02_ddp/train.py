"""Chapter 02: distributed data parallel. Replicas that average their gradients while backward is still running.

bash chapters/02_ddp/train.sh                                      # two processes
bash chapters/02_ddp/train.sh --nproc 4 --variant ring
bash chapters/02_ddp/train.sh --backend torch --timeline runs/02_ddp/timeline.json
bash chapters/02_ddp/train.sh --help
"""
# ruff: noqa: E402, I001

PARENT = "00_single"

# -- settings: a wrong flag ends the program here, before torch is loaded ----------------------------------------------
from gpt2_chinese import resolve
from ddp_settings import Settings

settings = resolve(Settings.from_command_line(__file__, __doc__))

import torch
from ddp import replicate

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

# -- the technique: the same weights on every rank, gradients averaged over all of them --------------------------------
replica = replicate(model, ranks.group, settings)

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
    for number, (inputs, targets) in enumerate(train.micro_batches(step), start=1):
        with replica.no_sync(number < settings.grad_accum):  # reduce once a step, in the last micro-batch
            with autocast(ranks.device, settings.precision):
                micro_loss = replica(inputs, targets) * train.weight(step, targets) / settings.grad_accum
            scaler.scale(micro_loss).backward()
        loss += micro_loss.detach()

    replica.wait()  # from here on all ranks hold the same gradients: they clip, skip and step alike
    scaler.unscale_(optimizer)
    grad_norm = clip_gradients(model, settings.clip_grad_norm)
    scaler.step(optimizer)
    scaler.update()

    run.log(step, loss=ranks.mean(loss), lr=lr, grad_norm=grad_norm, in_sync=model, **replica.step_scalars())
    if run.evaluate_now(step):
        run.log_evaluation(step, evaluate_model(model, valid, ranks, settings.precision))
    if run.save_now(step):
        run.save(step, weights_of(model), adamw_moments(model, optimizer), {"scaler": scaler.state_dict()})

# -- end ---------------------------------------------------------------------------------------------------------------
run.finish(weights_of(model), table=replica.close())
