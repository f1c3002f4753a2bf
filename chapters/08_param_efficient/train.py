"""Chapter 08: a trained model learns another kind of text. Few parameters are trained, the base is frozen.

bash chapters/08_param_efficient/train.sh                          # LoRA; the base is trained first, once
bash chapters/08_param_efficient/train.sh --method qlora --bits 4
bash chapters/08_param_efficient/train.sh --method full --recompute every:2
bash chapters/08_param_efficient/train.sh --init-from runs/00_single --kind comments --merge
bash chapters/08_param_efficient/train.sh --help
"""
# ruff: noqa: E402, I001

PARENT = "02_ddp"

# -- settings: a wrong flag ends the program here, before torch is loaded ----------------------------------------------
from gpt2_chinese import resolve
from adapt_settings import Settings

settings = resolve(Settings.from_command_line(__file__, __doc__))

import torch
from adapt import adapt, decoded, final_writer, in_few_bits, load_base
from data_parallel import SmallReplica
from report import Report

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

# -- the technique: the base's weights, frozen; a few new parameters; fewer activations; one small all-reduce ----------
load_base(model, settings)
report = Report(model, settings, ranks)  # what the base can do
model, trained = adapt(model, settings)  # trained: all that a checkpoint holds
activations = recompute(model, settings.recompute, settings.offload_activations)
tile_loss(model, settings.loss_tiles)  # head and loss by tiles of tokens, to save memory
replica = SmallReplica(model, ranks.group)

# -- optimizer ---------------------------------------------------------------------------------------------------------
optimizer = in_few_bits(adamw(model, settings), settings)
scaler = grad_scaler(ranks.device, settings.precision)
run.resume(trained, optimizer, scaler)

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

    replica.wait()  # from here on all ranks hold the same gradients: they clip, skip and step alike
    scaler.unscale_(optimizer)
    grad_norm = clip_gradients(model, settings.clip_grad_norm)
    scaler.step(optimizer)
    scaler.update()

    run.log(step, loss=ranks.mean(loss), lr=lr, grad_norm=grad_norm, in_sync=model, **replica.step_scalars())
    if run.evaluate_now(step):
        run.log_evaluation(step, evaluate_model(model, valid, ranks, settings.precision))
    if run.save_now(step):
        run.save(step, weights_of(trained), adamw_moments(trained, decoded(optimizer)),
                 {"scaler": scaler.state_dict(), "adapt": report.facts()})

# -- end ---------------------------------------------------------------------------------------------------------------
run.finish(final_writer(model, settings, ranks), **report.ending(model, activations, optimizer, train, replica))
