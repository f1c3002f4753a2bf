"""Data parallel by Horovod (Sergeev and Del Balso 2018): an optimizer that averages the gradients of all ranks.

    backward   h.3 -> h.2 -> h.1 -> h.0 -> embeddings       a hook hands each gradient to Horovod's background thread
                 \\      \\      \\      \\        \\
    Horovod       | gradients ready on all ranks, up to --fusion-mb, in one message: ring all-reduce |
                                                             \\
    program                                                   synchronize() -> clip -> step, without synchronizing again

Ranks need not compute their gradients in the same order: each gradient has a name, rank 0 collects which ones each rank has
ready, and Horovod reduces only those that all ranks have. The other all-reduces of 2018 could not do that.

Three common mistakes, avoided here (chapters/04_apex/mistakes measures the effect of each):
  - clipping before synchronize() clips gradients while the background thread averages them;
  - step() also synchronizes: after synchronize() call it inside skip_synchronize(), or all gradients are averaged twice;
  - with accumulation Horovod must know the number of backward passes before a reduction, or it refuses the second one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import horovod.torch as hvd
import torch
from torch import nn

from gpt2_chinese.checkpoint.load import load
from gpt2_chinese.checkpoint.model_state import adamw_moments, load_adamw_moments, load_weights, weights_of
from gpt2_chinese.data.batches import Batches
from gpt2_chinese.distributed.horovod_ranks import HorovodRanks
from gpt2_chinese.evaluate.loss import evaluate_model
from gpt2_chinese.model.gpt2 import GPT2LMHeadModel
from gpt2_chinese.model.recomputation import recompute
from gpt2_chinese.model.tiled_loss import tile_loss
from gpt2_chinese.run.optim import adamw, autocast, clip_gradients, learning_rate, set_learning_rate
from gpt2_chinese.run.run import Run

if TYPE_CHECKING:
    from horovod_settings import Settings


def distribute(optimizer: torch.optim.Optimizer, model: nn.Module, settings: Settings) -> Any:
    """Wraps `optimizer` in Horovod's DistributedOptimizer; it must be fresh, because its state is not copied.

    Args:
        optimizer: updates the model's parameters.
        model: its parameters' names become the names of the messages.
        settings: has grad_accum, compression.
    """
    return hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        backward_passes_per_step=settings.grad_accum,
        compression=hvd.Compression.fp16 if settings.compression == "fp16" else hvd.Compression.none,
    )


def broadcast(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Gives all ranks rank 0's weights and optimizer state, bit for bit.

    A fresh optimizer has no state. Horovod must not broadcast it: to create state it would take a step with zero gradients.
    That counts as a step and applies weight decay (the loss is 1e-4 off from the first step on).
    """
    hvd.broadcast_parameters(dict(model.named_parameters()), root_rank=0)
    if optimizer.state:
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)


# ---- elastic ----------------------------------------------------------------------------------------------------------


def train_elastically(settings: Settings, ranks: HorovodRanks) -> None:
    """The loop of train.py as a function that Horovod calls again, with the last committed state, when a worker is lost.

    The global batch does not change: the remaining ranks take larger parts of it, so the curve stays that of chapter 00.
    On each remaining rank the collective raises. hvd.elastic.run catches the error, restores the last commit, joins the
    remaining ranks, and calls `loop` again. Rank 0 may then be another process, which continues the run's files.
    """
    torch.manual_seed(settings.seed)
    model = GPT2LMHeadModel(settings.model).to(ranks.device)
    recompute(model, settings.recompute)
    tile_loss(model, settings.loss_tiles)
    optimizer = distribute(adamw(model, settings), model, settings)
    moments = {}
    if settings.resume_from:
        weights, moments, _ = load(settings.resume_from)
        load_weights(model, weights)
    if not moments:
        moments = {}
        for name, parameter in model.named_parameters():  # Horovod must find a state: see broadcast()
            zeros = torch.zeros_like(parameter)
            moments |= {f"step.{name}": torch.zeros(()), f"exp_avg.{name}": zeros, f"exp_avg_sq.{name}": zeros}
    load_adamw_moments(model, optimizer, moments)

    @hvd.elastic.run
    def loop(state: hvd.elastic.TorchState) -> Run:
        ranks = HorovodRanks.now(next(model.parameters()).device)
        run = Run(settings, ranks, first_step=state.step + 1)
        train, valid = Batches.of(settings, ranks)
        for step in run.steps():
            lr = learning_rate(step, settings)
            set_learning_rate(optimizer, lr)
            optimizer.zero_grad()
            loss = torch.zeros((), device=ranks.device)
            for inputs, targets in train.micro_batches(step):
                with autocast(ranks.device, settings.precision):
                    micro_loss = model(inputs, targets) * train.weight(step, targets) / settings.grad_accum
                micro_loss.backward()
                loss += micro_loss.detach()
            optimizer.synchronize()
            grad_norm = clip_gradients(model, settings.clip_grad_norm)
            with optimizer.skip_synchronize():
                optimizer.step()
            run.log(step, loss=ranks.mean(loss), lr=lr, grad_norm=grad_norm, in_sync=model, workers=ranks.num_ranks)
            if run.evaluate_now(step):
                run.log_evaluation(step, evaluate_model(model, valid, ranks, settings.precision))
            if run.save_now(step):
                run.save(step, weights_of(model), adamw_moments(model, optimizer))
            ranks.barrier()  # no rank commits the step before rank 0, which may die, has written its row
            state.step = step
            state.commit()  # losing a worker discards at most the step under way
        return run

    loop(hvd.elastic.TorchState(model=model, optimizer=optimizer, step=settings.resume_step)).finish(weights_of(model))
