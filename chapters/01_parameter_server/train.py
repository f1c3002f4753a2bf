"""Chapter 01: a parameter server. Rank 0 owns weights and optimizer, the others pull weights and push gradients.

bash chapters/01_parameter_server/train.sh                         # two processes
bash chapters/01_parameter_server/train.sh --nproc 4 --mode async --staleness 2
bash chapters/01_parameter_server/train.sh --help
"""
# ruff: noqa: E402, I001

PARENT = "00_single"

# -- settings: a wrong flag ends the program here, before torch is loaded ----------------------------------------------
from gpt2_chinese import resolve
from server_settings import Settings

settings = resolve(Settings.from_command_line(__file__, __doc__))

import torch
from server import parameter_server

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

# -- the technique: rank 0 serves the weights, and only rank 0 will update them ----------------------------------------
server = parameter_server(model, ranks, settings)

# -- optimizer ---------------------------------------------------------------------------------------------------------
optimizer = adamw(model, settings)
scaler = grad_scaler(ranks.device, settings.precision)
run.resume(model, optimizer if server.is_server else None, scaler)

# -- the loop ----------------------------------------------------------------------------------------------------------
for step in run.steps():
    lr = learning_rate(step, settings)
    set_learning_rate(optimizer, lr)
    optimizer.zero_grad()

    loss = torch.zeros((), device=ranks.device)
    for inputs, targets in server.work(step, train.micro_batches(step)):
        with autocast(ranks.device, settings.precision):
            micro_loss = server(inputs, targets) * train.weight(step, targets) / settings.grad_accum
        scaler.scale(micro_loss).backward()
        loss += micro_loss.detach()

    server.push(step, loss, meet=run.evaluate_now(step) or run.save_now(step))
    grad_norm = None
    if server.is_server:
        scaler.unscale_(optimizer)
        grad_norm = clip_gradients(model, settings.clip_grad_norm)
        scaler.step(optimizer)
        scaler.update()
    server.pull(scaler)

    replica = model if settings.mode == "sync" else None  # asynchronous workers may hold older weights
    run.log(step, loss=server.loss, lr=lr, grad_norm=grad_norm, in_sync=replica, **server.step_scalars())
    if run.evaluate_now(step):
        run.log_evaluation(step, evaluate_model(model, valid, ranks, settings.precision))
    if run.save_now(step):
        run.save(step, weights_of(model), adamw_moments(model, optimizer), {"scaler": scaler.state_dict()})

# -- end ---------------------------------------------------------------------------------------------------------------
run.finish(weights_of(model), table=server.table())
