"""Mixed precision from first principles (Micikevicius et al. 2018), with the optimization levels that NVIDIA Apex had.

    level   weights            products        norms, softmax, loss   optimizer works on     what it is
    O0      fp32               fp32            fp32                   the weights            the baseline
    O1      fp32               16 bit          fp32                   the weights            casts by operation
    O2      16 bit, norms fp32 16 bit          norms and loss fp32    fp32 copies (masters)  "almost 16 bit"
    O3      16 bit             16 bit          16 bit, loss fp32      the weights            the floor, not a way to train

16 bit is bf16 (8 bits of exponent, 8 of precision) or fp16 (5 and 11). Here a level is chosen and applied; its parts are
casts.py (what computes in 16 bit), masters.py (fp32 copies of rounded weights) and loss_scaler.py (small gradients in fp16).

The order that must hold, in every step (the folder mistakes/ shows what happens otherwise):

    scale -> backward -> average over the ranks -> unscale, into the masters -> is all finite, on all ranks? -> clip -> step

Use, the same for `--backend torch` (torch.autocast and GradScaler, levels O0 and O1):

    masters, scaler = initialize(model, ranks, settings)      # model computes in 16 bit from here on
    optimizer = optimizer_for(masters, settings)
    scaler.scale(model(inputs, targets)).backward()
    scaler.unscale_(optimizer); clip(masters); scaler.step(optimizer); scaler.update()
"""

from __future__ import annotations

from typing import Any

import torch
from casts import HALF, CastByOperation, round_weights, within
from loss_scaler import LossScaler
from masters import Masters
from torch import nn

from gpt2_chinese.run.optim import adamw

O3_EPS = 1e-4  # Adam's 1e-8 is zero in fp16, and so are squares of small gradients: 0 / 0


def initialize(model: nn.Module, ranks: Any, settings: Any) -> tuple[Any, Any]:
    """Makes `model` compute as the settings say, in place.

    Args:
        model: with fp32 weights, on its device.
        ranks: `max` is asked whether any rank found an overflow.
        settings: opt_level, half, loss_scale ("dynamic" or a number), scale_window, backend.

    Returns:
        masters: what the optimizer, clipping and checkpoints take: the model itself, or its fp32 copies (O2).
        scaler: with scale, unscale_, step, update, metrics, state_dict, load_state_dict, as torch's GradScaler.
    """
    if settings.apex:
        from apex_fused import fuse_norms

        fuse_norms(model)
    if settings.backend == "torch":
        import torch_amp

        return torch_amp.initialize(model, settings)
    level, half = settings.opt_level, HALF[settings.half]
    masters: Any = model
    if level == "O1":
        model.forward = within(lambda: CastByOperation(half), model.forward)
    if level == "O2":
        masters = Masters(model)  # before the weights are rounded
        round_weights(model, half, keep_norms=True)
    if level == "O3":
        round_weights(model, half, keep_norms=False)
    return masters, LossScaler(settings.loss_scale, settings.scale_window, ranks.max, masters)


def optimizer_for(masters: Any, settings: Any) -> torch.optim.Optimizer:
    """AdamW of all chapters, or Apex's FusedAdam, for the weights that the level gives the optimizer."""
    if settings.apex:
        from apex_fused import fused_adam

        return fused_adam(masters, settings)
    optimizer = adamw(masters, settings)
    if settings.opt_level == "O3" and settings.half == "fp16":
        for group in optimizer.param_groups:
            group["eps"] = O3_EPS
    return optimizer
