"""Chapter 01: a parameter server. Rank 0 owns weights and optimizer, the others pull weights and push gradients.

bash chapters/01_parameter_server/train.sh                         # two processes
bash chapters/01_parameter_server/train.sh --nproc 4 --mode async --staleness 2
bash chapters/01_parameter_server/train.sh --help
"""
# ruff: noqa: E402, I001

PARENT = "00_single"

# -- settings: a wrong flag is answered here, before torch is loaded ---------------------------------------------------
from gpt2_chinese import resolve
from server_settings import Settings

settings = resolve(Settings.from_command_line(__file__, __doc__))

import torch
from server import parameter_server

from gpt2_chinese import (
    Batches, Run, evaluate_model, launch, learning_rate, load, set_learning_rate,
    GPT2LMHeadModel, check_in_sync,
    adamw, autocast, clip_gradients, grad_scaler,
    adamw_moments, load_adamw_moments, load_weights, weights_of,
)  # fmt: skip

# -- launch ------------------------------------------------------------------------------------------------------------
ranks = launch(settings)
run = Run(settings, ranks)

# -- data: the batches of a step depend on the seed and the GLOBAL batch size alone ------------------------------------
train, valid = Batches.of(settings, ranks)

# -- model: the seed decides the weights -------------------------------------------------------------------------------
torch.manual_seed(settings.seed)
model = GPT2LMHeadModel(settings.model).to(ranks.device)

# -- the technique: rank 0 serves the weights, and will be the only one to step them -----------------------------------
server = parameter_server(model, ranks, settings)

# -- optimizer ---------------------------------------------------------------------------------------------------------
optimizer = adamw(model, settings)
scaler = grad_scaler(ranks.device, settings.precision)
if run.resume_from:
    weights, moments, state = load(run.resume_from)
    load_weights(model, weights)
    load_adamw_moments(model, optimizer, moments if ranks.is_main else {})
    if scaler.is_enabled() and state["extra"].get("scaler"):
        scaler.load_state_dict(state["extra"]["scaler"])

# -- the loop ----------------------------------------------------------------------------------------------------------
for step in run.steps():
    lr = learning_rate(step, settings)
    set_learning_rate(optimizer, lr)
    optimizer.zero_grad()

    loss = torch.zeros((), device=ranks.device)
    for inputs, targets in server.work(step, train.micro_batches(step)):
        with autocast(ranks.device, settings.precision):
            micro_loss = server(inputs, targets) / settings.grad_accum
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

    run.log(step, loss=server.loss, lr=lr, grad_norm=grad_norm, **server.step_scalars())
    check_in_sync(model, ranks, step, settings.check_sync if settings.mode == "sync" else 0)
    if run.evaluate_now(step):
        run.log_evaluation(step, evaluate_model(model, valid, ranks, settings.precision))
    if run.save_now(step):
        run.save(step, weights_of(model), adamw_moments(model, optimizer), {"scaler": scaler.state_dict()})

# -- end ---------------------------------------------------------------------------------------------------------------
run.finish(weights_of(model), table=server.table())
