"""Mixed precision in forty lines of plain PyTorch, for any number of ranks in one process: the engine must give its bits.

The master is fp32. The model computes with the rounded master (fp16: to even, bf16: ties away from zero, as in a split
master). Each rank's gradients are in 16 bit, summed over micro-steps in fp32. The mean over ranks divides first and adds in
fp32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pstar.numerics.grad_norm import clip_grad_norm_
from tests import toy


@dataclass
class Result:
    losses: list[float]
    """The mean over the ranks, for each step."""
    trace: list[tuple[float, bool]]
    """(loss scale of a step, whether the step was skipped)."""
    norms: list[float]
    masters: dict[str, torch.Tensor]


def mixed_reference(num_steps: int, fp16: dict | None, num_micros: int = 1, num_ranks: int = 1, model_func=toy.Toy,
                    bad: tuple[int, int] | None = None) -> Result:
    """Trains. fp16: the configuration's section, None for bf16. bad: (step, rank) with an infinite loss."""
    torch.manual_seed(0)
    model = model_func()
    masters = {name: param.detach().clone().requires_grad_() for name, param in model.named_parameters()}
    adamw = toy.adamw(masters.values(), lr=toy.LR, weight_decay=toy.WEIGHT_DECAY)
    half = torch.float16 if fp16 else torch.bfloat16
    model = model.to(half)
    fp16 = {"loss_scale": 0, "initial_scale_power": 16, "loss_scale_window": 1000, "hysteresis": 2,
            "consecutive_hysteresis": False, "min_loss_scale": 1} | (fp16 or {"loss_scale": 1})
    scale = fp16["loss_scale"] or 2.0 ** fp16["initial_scale_power"]
    good, left, result = 0, fp16["hysteresis"], Result([], [], [], masters)
    for step in range(num_steps):
        _round_masters(model, masters, half)
        total, mean = 0.0, {}
        for rank in range(num_ranks):
            summed: dict[str, torch.Tensor] = {}
            for micro in range(num_micros):
                model.zero_grad()
                loss = model(*toy.share(step, rank, num_ranks, micro, num_micros))
                loss = loss * float("inf") if bad == (step, rank) else loss
                total += (loss / num_micros).item() / num_ranks
                ((loss / num_micros if num_micros > 1 else loss) * scale).backward()
                for name, param in model.named_parameters():
                    grad = param.grad if num_micros == 1 else param.grad.float()
                    summed[name] = summed[name] + grad if name in summed else grad.clone()
            for name, grad in summed.items():
                part = (grad / num_ranks).float() if num_ranks > 1 else grad.float()
                mean[name] = mean[name] + part if name in mean else part
        for name, master in masters.items():
            rounded = mean[name] if num_micros > 1 else mean[name].to(half).float()
            master.grad = rounded / scale
        norm = clip_grad_norm_(masters.values(), toy.CLIP)
        overflow = not bool(norm.isfinite())
        if not overflow:
            adamw.step()
        result.losses.append(total)
        result.trace.append((scale, overflow))
        result.norms.append(norm.item())
        if fp16["loss_scale"]:
            continue
        good = 0 if overflow else good + 1
        if overflow and left > 1:
            left -= 1
        elif overflow:
            scale = max(scale / 2, fp16["min_loss_scale"])
        elif good % fp16["loss_scale_window"] == 0:
            scale, left = scale * 2, fp16["hysteresis"]
        elif fp16["consecutive_hysteresis"]:
            left = fp16["hysteresis"]
    return result


@torch.no_grad()
def _round_masters(model: torch.nn.Module, masters: dict[str, torch.Tensor], half: torch.dtype) -> None:
    for name, param in model.named_parameters():
        if half == torch.float16:
            param.copy_(masters[name])
        else:
            bits = masters[name].detach().view(torch.int32)
            param.copy_((((bits + 0x8000) >> 16) << 16).view(torch.float32))
