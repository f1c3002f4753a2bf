"""Chapter 05: model parallel. One model over several ranks: its layers in a pipeline, its matrices in slices, or both.

bash chapters/05_model_parallel/train.sh --grad-accum 4                            # a pipeline of two ranks, 1f1b
bash chapters/05_model_parallel/train.sh --tp 2 --sequence-parallel                # each layer on two ranks
bash chapters/05_model_parallel/train.sh --nproc 8 --tp 2 --pp 2 --grad-accum 4    # and the rest data parallel
bash chapters/05_model_parallel/train.sh --help
"""
# ruff: noqa: E402, I001

PARENT = "02_ddp"

# -- settings: a wrong flag ends the program here, before torch is loaded ----------------------------------------------
from gpt2_chinese import resolve
from parallel_settings import Settings

settings = resolve(Settings.from_command_line(__file__, __doc__))

import torch
from mesh import Mesh
from parallel import ModelParallel

from gpt2_chinese import (
    Batches, Run, evaluate_model, launch, learning_rate, set_learning_rate,
    GPT2LMHeadModel, tile_loss,
    adamw, grad_scaler,
)  # fmt: skip

# -- launch ------------------------------------------------------------------------------------------------------------
ranks = launch(settings)
run = Run(settings, ranks)
mesh = Mesh(ranks, settings.tp, settings.pp)

# -- data: ranks that hold parts of one model see the same batches -----------------------------------------------------
train, valid = Batches.of(settings, mesh.data)

# -- model: the seed decides the weights -------------------------------------------------------------------------------
torch.manual_seed(settings.seed)
model = GPT2LMHeadModel(settings.model)
tile_loss(model, settings.loss_tiles)  # head and loss by tiles of tokens, to save memory

# -- the technique: the model keeps only this rank's part --------------------------------------------------------------
parallel = ModelParallel(model, mesh, settings)

# -- optimizer ---------------------------------------------------------------------------------------------------------
optimizer = adamw(model, settings)
scaler = grad_scaler(ranks.device, settings.precision)
run.resume_parts(lambda weights, moments: parallel.load(optimizer, weights, moments), scaler)

# -- the loop ----------------------------------------------------------------------------------------------------------
for step in run.steps():
    lr = learning_rate(step, settings)
    set_learning_rate(optimizer, lr)
    optimizer.zero_grad()

    loss = parallel.train(step, train, scaler)  # forward and backward in the schedule's order

    scaler.unscale_(optimizer)
    grad_norm = parallel.clip_gradients(settings.clip_grad_norm)
    scaler.step(optimizer)
    scaler.update()

    run.log(step, loss=mesh.data.mean(loss), lr=lr, grad_norm=grad_norm, in_sync=model, among=mesh.data,
            **parallel.step_scalars())
    if run.evaluate_now(step):
        run.log_evaluation(step, evaluate_model(parallel, valid, mesh.data))
    if run.save_now(step):
        run.save_parts(step, *parallel.parts(optimizer), {"scaler": scaler.state_dict()})

# -- end ---------------------------------------------------------------------------------------------------------------
run.finish(parallel.write_final, table=parallel.close())
