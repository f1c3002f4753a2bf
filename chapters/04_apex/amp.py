"""Mixed precision from first principles (Micikevicius et al. 2018), with the optimization levels that NVIDIA Apex had.

    level   weights            products        norms, softmax, loss   optimizer updates      remark
    O0      fp32               fp32            fp32                   the weights            the baseline
    O1      fp32               16 bit          fp32                   the weights            casts by operation
    O2      16 bit, norms fp32 16 bit          norms and loss fp32    fp32 copies (masters)  Apex: "almost FP16"
    O3      16 bit             16 bit          16 bit, loss fp32      the weights            no masters: not for training

16 bit is bf16 (8 bits of exponent, 8 of precision) or fp16 (5 and 11). This file applies a level. Its parts are casts.py
(which operations run in 16 bit), masters.py (fp32 copies of rounded weights) and loss_scaler.py (small gradients in fp16).

Every step must keep this order (the folder mistakes/ shows what happens otherwise):

    scale -> backward -> average over ranks -> unscale into the masters -> all finite, on all ranks? -> clip -> step

Usage, the same for `--backend torch` (torch.autocast and GradScaler, levels O0 and O1):

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

O3_EPS = 1e-4  # Adam's 1e-8 is zero in fp16, and so are squares of small gradients: 0 / 0 = nan


def initialize(model: nn.Module, ranks: Any, settings: Any) -> tuple[Any, Any]:
    """Changes `model` in place: it then computes at the level and in the type of the settings.

    Args:
        model: has fp32 weights and is on its device.
        ranks: `ranks.max` tells whether any rank found an overflow.
        settings: opt_level, half, loss_scale ("dynamic" or a number), scale_window, backend.

    Returns:
        masters: the weights for the optimizer, clipping and checkpoints: the model itself, or its fp32 copies (O2).
        scaler: scale, unscale_, step, update, state_dict, load_state_dict as torch's GradScaler; also metrics, write_back.
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
    """The AdamW that all chapters use, or Apex's FusedAdam, over `masters`."""
    if settings.apex:
        from apex_fused import fused_adam

        return fused_adam(masters, settings)
    optimizer = adamw(masters, settings)
    if settings.opt_level == "O3" and settings.half == "fp16":
        for group in optimizer.param_groups:
            group["eps"] = O3_EPS
    return optimizer
