"""Chapter 04: mixed precision. Products in 16 bit, sums in 32, and a scaled loss so that small gradients survive.

bash chapters/04_apex/train.sh                                     # two processes, O2 in bf16
bash chapters/04_apex/train.sh --half fp16                         # with a dynamic loss scale; slow on a CPU
bash chapters/04_apex/train.sh --opt-level O1 --backend torch --comm horovod
bash chapters/04_apex/train.sh --help
"""
# ruff: noqa: E402, I001

PARENT = "02_ddp"

# -- settings: a wrong flag ends the program here, before torch is loaded ----------------------------------------------
from gpt2_chinese import resolve
from amp_settings import Settings

settings = resolve(Settings.from_command_line(__file__, __doc__))

import torch
from amp import initialize, optimizer_for
from comm import replicate

from gpt2_chinese import (
    Batches, Run, evaluate_model, launch, learning_rate, set_learning_rate,
    GPT2LMHeadModel, recompute, tile_loss,
    clip_gradients, adamw_moments, weights_of,
)  # fmt: skip

# -- launch ------------------------------------------------------------------------------------------------------------
ranks = launch(settings, "horovodrun" if settings.comm == "horovod" else "torchrun")
run = Run(settings, ranks)

# -- data: the batches of a step depend on the seed and the GLOBAL batch size alone ------------------------------------
train, valid = Batches.of(settings, ranks)

# -- model: the seed decides the weights -------------------------------------------------------------------------------
torch.manual_seed(settings.seed)
model = GPT2LMHeadModel(settings.model).to(ranks.device)
recompute(model, settings.recompute)  # what backward computes again, to save memory
tile_loss(model, settings.loss_tiles)  # head and loss by tiles of tokens, to save memory

# -- the technique: the model computes in 16 bit; masters are the weights that the optimizer updates -------------------
masters, scaler = initialize(model, ranks, settings)
replica = replicate(model, ranks, settings)

# -- optimizer ---------------------------------------------------------------------------------------------------------
optimizer = optimizer_for(masters, settings)
run.resume(masters, optimizer, scaler)
scaler.write_back()  # copy the masters to the model, rounded

# -- the loop ----------------------------------------------------------------------------------------------------------
for step in run.steps():
    lr = learning_rate(step, settings)
    set_learning_rate(optimizer, lr)
    optimizer.zero_grad()

    loss = torch.zeros((), device=ranks.device)
    for number, (inputs, targets) in enumerate(train.micro_batches(step), start=1):
        with replica.no_sync(number < settings.grad_accum):  # reduce once a step, in the last micro-batch
            micro_loss = replica(inputs, targets) * train.weight(step, targets) / settings.grad_accum
            scaler.scale(micro_loss).backward()
        loss += micro_loss.detach()

    replica.wait()  # from here on all ranks hold the same gradients: they clip, skip and step alike
    scaler.unscale_(optimizer)
    grad_norm = clip_gradients(masters, settings.clip_grad_norm)
    scaler.step(optimizer)
    scaler.update()

    run.log(step, loss=ranks.mean(loss), lr=lr, grad_norm=grad_norm, in_sync=model, **scaler.metrics())
    if run.evaluate_now(step):
        run.log_evaluation(step, evaluate_model(model, valid, ranks))
    if run.save_now(step):
        run.save(step, weights_of(masters), adamw_moments(masters, optimizer), {"scaler": scaler.state_dict()})

# -- end ---------------------------------------------------------------------------------------------------------------
run.finish(weights_of(masters), table=replica.close())
