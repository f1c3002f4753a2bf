"""Chapter 06: ZeRO. Optimizer states, gradients and parameters are sharded over the ranks instead of repeated on each.

bash chapters/06_zero/train.sh                                     # two processes, stage 3
bash chapters/06_zero/train.sh --nproc 4 --zero-stage 2 --precision bf16
bash chapters/06_zero/train.sh --offload optimizer,params --activation-checkpointing
bash chapters/06_zero/train.sh --backend torch                     # FSDP2; with --zero-stage 1 ZeroRedundancyOptimizer
bash chapters/06_zero/train.sh --help
"""
# ruff: noqa: E402, I001

PARENT = "04_apex"

# -- settings: a wrong flag ends the program here, before torch is loaded ----------------------------------------------
from gpt2_chinese import resolve
from zero_settings import Settings

settings = resolve(Settings.from_command_line(__file__, __doc__))

import torch
from zero import shard

from gpt2_chinese import (
    Batches, Run, evaluate_model, launch, learning_rate, set_learning_rate,
    GPT2LMHeadModel, tile_loss,
)  # fmt: skip

# -- launch ------------------------------------------------------------------------------------------------------------
ranks = launch(settings)
run = Run(settings, ranks)

# -- data: the batches of a step depend on the seed and the GLOBAL batch size alone ------------------------------------
train, valid = Batches.of(settings, ranks)

# -- model: the seed decides the weights -------------------------------------------------------------------------------
torch.manual_seed(settings.seed)
model = GPT2LMHeadModel(settings.model).to(ranks.device)
tile_loss(model, settings.loss_tiles)  # head and loss by tiles of tokens, to save memory

# -- the technique: each rank keeps a share of masters and moments and, by stage, of gradients and weights -------------
sharded, scaler = shard(model, ranks, settings)

# -- optimizer ---------------------------------------------------------------------------------------------------------
optimizer = sharded.make_optimizer(settings)
run.resume_parts(sharded.load, scaler)

# -- the loop ----------------------------------------------------------------------------------------------------------
for step in run.steps():
    lr = learning_rate(step, settings)
    set_learning_rate(optimizer, lr)
    optimizer.zero_grad()

    loss = torch.zeros((), device=ranks.device)
    for number, (inputs, targets) in enumerate(train.micro_batches(step), start=1):
        with sharded.no_sync(number < settings.grad_accum):  # stages 0, 1 reduce once a step; 2, 3 each micro-batch
            micro_loss = sharded(inputs, targets) * train.weight(step, targets) / settings.grad_accum
            scaler.scale(micro_loss).backward()
        loss += micro_loss.detach()

    sharded.wait()  # from here on each rank holds the mean gradients of its share
    scaler.unscale_(optimizer)
    grad_norm = sharded.clip_gradients(settings.clip_grad_norm)
    scaler.step(optimizer)
    scaler.update()

    run.log(step, loss=ranks.mean(loss), lr=lr, grad_norm=grad_norm, in_sync=model, **scaler.metrics(),
            **sharded.step_scalars())
    if run.evaluate_now(step):
        run.log_evaluation(step, evaluate_model(model, valid, ranks))
    if run.save_now(step):
        run.save_parts(step, *sharded.parts(), {"scaler": scaler.state_dict()})

# -- end ---------------------------------------------------------------------------------------------------------------
run.finish(sharded.write_weights, table=sharded.close())
