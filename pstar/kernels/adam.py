"""One Adam update of a flat run of elements, with torch operations, and the split fp32 master.

Kingma and Ba 2015 (Adam), Loshchilov and Hutter 2019 (AdamW). The operations and their order are those of torch.optim's
single-tensor implementation, so that in fp32 a parameter that is whole gives the same bits as there.
"""

import torch


def adam_step(param: torch.Tensor, grad: torch.Tensor, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor, *, step: int,
              lr: float, betas: tuple[float, float], eps: float, weight_decay: float, adamw: bool = True) -> None:
    """Updates param, exp_avg and exp_avg_sq in place; all four are fp32, (N,). step counts from 1.

    weight_decay is decoupled (adamw) or added to the gradient (Adam with L2 regularisation).
    """
    beta1, beta2 = betas
    if adamw:
        param.mul_(1 - lr * weight_decay)
    elif weight_decay:
        grad = grad.add(param, alpha=weight_decay)
    exp_avg.lerp_(grad, 1 - beta1)
    exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    bias_correction1 = 1 - beta1**step
    bias_correction2_sqrt = (1 - beta2**step) ** 0.5
    denominator = (exp_avg_sq.sqrt() / bias_correction2_sqrt).add_(eps)
    param.addcdiv_(exp_avg, denominator, value=-(lr / bias_correction1))


def split_master(master: torch.Tensor, high: torch.Tensor, low: torch.Tensor) -> None:
    """Splits fp32 into the nearest bf16 (high) and the signed difference of the bit patterns (low, int16).

    The model computes with high, the optimizer with both: 4 bytes instead of the 2 + 4 of a separate master, and no
    rounding is lost. `+ 0x8000` before the shift rounds to nearest, ties away from zero; then the difference to what was
    kept lies in [-32768, 32767] and fits 16 bits.
    """
    bits = master.view(torch.int32)
    kept = (bits + 0x8000) >> 16
    low.copy_(bits - (kept << 16))
    high.view(torch.int16).copy_(kept)


def join_master(high: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """The fp32 master that split_master split, bit for bit."""
    return ((high.view(torch.int16).to(torch.int32) << 16) + low.to(torch.int32)).view(torch.float32)
