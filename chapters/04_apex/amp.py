"""Mixed precision from first principles (Micikevicius et al. 2018), with the optimization levels that NVIDIA Apex had.

    level   weights            products        norms, softmax, loss   optimizer works on     what it is
    O0      fp32               fp32            fp32                   the weights            the baseline
    O1      fp32               16 bit          fp32                   the weights            casts by operation
    O2      16 bit, norms fp32 16 bit          norms and loss fp32    fp32 copies (masters)  "almost 16 bit"
    O3      16 bit             16 bit          16 bit, loss fp32      the weights            the floor, not a way to train

16 bit is bf16 (8 bits of exponent, 8 of precision) or fp16 (5 and 11). Below 6e-8 fp16 is zero, and many gradients are
smaller. So the loss is multiplied by a scale before backward and the gradients are divided by it after; when the scale is
too large, one of them is infinite, the step is skipped and the scale halved (dynamic), and after a number of good steps
doubled. A weight in 16 bit does not change at all by less than 1/256 (bf16) or 1/2048 (fp16) of itself: hence the masters.

The order that must hold, in every step (the folder mistakes/ shows what happens otherwise):

    scale -> backward -> average over the ranks -> unscale, into the masters -> is all finite, on all ranks? -> clip -> step

Use, the same for `--backend torch` (torch.autocast and GradScaler, levels O0 and O1):

    masters, scaler = initialize(model, ranks, settings)      # model computes in 16 bit from here on
    optimizer = optimizer_for(masters, settings)
    scaler.scale(model(inputs, targets)).backward()
    scaler.unscale_(optimizer); clip(masters); scaler.step(optimizer); scaler.update()
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from gpt2_chinese.errors import fail
from gpt2_chinese.run.optim import adamw

HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}
FIRST_SCALE = 2.0**16  # of dynamic scaling: too large on purpose, the first steps find the right one
LARGEST_SCALE = 2.0**24
BACKOFF, GROWTH = 0.5, 2.0
PATIENCE = 20  # steps skipped in a row, after which a run has no hope
O3_EPS = 1e-4  # Adam's 1e-8 is zero in fp16, and so are squares of small gradients: 0 / 0

# O1: matrix products gain speed and lose little in 16 bit; sums over many elements, exponentials and losses lose much.
# Everything else takes what it is given, and torch gives the wider type to a sum of both.
TO_HALF = {
    F.linear, F.conv1d, F.bilinear, F.scaled_dot_product_attention, torch.matmul, torch.mm, torch.mv, torch.bmm,
    torch.addmm, torch.baddbmm, torch.einsum, Tensor.matmul, Tensor.__matmul__, Tensor.mm, Tensor.bmm, Tensor.addmm,
}  # fmt: skip
TO_FLOAT = {
    F.layer_norm, torch.layer_norm, F.group_norm, F.softmax, torch.softmax, Tensor.softmax, F.log_softmax,
    torch.log_softmax, Tensor.log_softmax, F.cross_entropy, F.nll_loss, F.mse_loss, F.kl_div, torch.exp, Tensor.exp,
    torch.log, Tensor.log, torch.pow, Tensor.pow, torch.norm, Tensor.norm, torch.sum, Tensor.sum, torch.mean, Tensor.mean,
    torch.var, Tensor.var, torch.cumsum, Tensor.cumsum, torch.logsumexp, Tensor.logsumexp,
}  # fmt: skip


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
        _convert(model, half, keep_norms=True)
    if level == "O3":
        _convert(model, half, keep_norms=False)
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


# ---- casts ------------------------------------------------------------------------------------------------------------


class CastByOperation(TorchFunctionMode):
    """While it is entered, every call of torch sees its floating tensors in the type that suits the operation (O1).

    A weight is cast once for all its uses: the tied embedding is used twice, and so backward adds up one gradient for it.
    """

    def __init__(self, half: torch.dtype) -> None:
        super().__init__()
        self.half = half
        self._cast_weights: dict[Tensor, Tensor] = {}

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        dtype = self.half if func in TO_HALF else torch.float32 if func in TO_FLOAT else None
        if dtype is not None:
            args, kwargs = self._cast(args, dtype), self._cast(kwargs, dtype)
        return func(*args, **kwargs)

    def _cast(self, value: Any, dtype: torch.dtype) -> Any:
        """`value` with all floating tensors in it as `dtype`; float64 and integers stay what they are."""
        if isinstance(value, Tensor):
            if value.dtype == dtype or value.dtype not in (torch.float16, torch.bfloat16, torch.float32):
                return value
            if not value.is_leaf or not value.requires_grad:
                return value.to(dtype)
            if value not in self._cast_weights:
                self._cast_weights[value] = value.to(dtype)
            return self._cast_weights[value]
        if isinstance(value, list | tuple):
            return type(value)(self._cast(item, dtype) for item in value)
        if isinstance(value, dict):
            return {key: self._cast(item, dtype) for key, item in value.items()}
        return value


def within(context: Callable[[], Any], forward: Callable) -> Callable:
    """`forward`, each call of it inside a context of its own."""

    @functools.wraps(forward)
    def casting(*args: Any, **kwargs: Any) -> Any:
        with context():
            return forward(*args, **kwargs)

    return casting


def _is_norm(module: nn.Module) -> bool:
    return type(module).__name__.endswith("LayerNorm")  # Apex's FusedLayerNorm is no nn.LayerNorm


def _convert(model: nn.Module, half: torch.dtype, keep_norms: bool) -> None:
    """Rounds the weights to 16 bit in place, so that ties stay tied; norms that are kept see fp32 and give 16 bit.

    For the mean and variance of a row are sums over the whole width of the model.
    """
    for module in model.modules():
        if keep_norms and _is_norm(module):
            module.register_forward_pre_hook(lambda _, args: tuple(arg.float() for arg in args))
            module.register_forward_hook(lambda _, args, output: output.to(half))
        else:
            for parameter in module.parameters(recurse=False):
                parameter.data = parameter.data.to(half)


class Masters:
    """fp32 copies of 16-bit weights (O2). An update too small for 16 bit adds up here until it is large enough there.

    Looks like a module to what asks for parameters only: the optimizer, clipping, checkpoints.
    """

    def __init__(self, model: nn.Module) -> None:
        # (name, weight of the model, master); a weight that stays fp32 is its own master
        self._rows: list[tuple[str, nn.Parameter, nn.Parameter]] = []
        for name, weight in model.named_parameters():
            norm = _is_norm(model.get_submodule(name.rpartition(".")[0]))
            self._rows.append((name, weight, weight if norm else nn.Parameter(weight.detach().clone())))

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(name in the model, master), fp32."""
        return ((name, master) for name, _, master in self._rows)

    def parameters(self) -> Iterator[nn.Parameter]:
        """The masters, fp32."""
        return (master for _, _, master in self._rows)

    def take_gradients(self) -> None:
        """Moves the gradients of the model to the masters, as fp32."""
        for _, weight, master in self._rows:
            if master is not weight:
                master.grad = None if weight.grad is None else weight.grad.float()
                weight.grad = None

    @torch.no_grad()
    def write_back(self) -> None:
        """Rounds the masters into the model."""
        for _, weight, master in self._rows:
            if master is not weight:
                weight.copy_(master)


# ---- loss scaling -----------------------------------------------------------------------------------------------------


class LossScaler:
    """Scales the loss, unscales the gradients, and skips the step when one of them is not finite, on all ranks alike.

    Args:
        scale: "dynamic", or a fixed number; 1 neither scales nor looks for overflows.
        window: good steps after which a dynamic scale is doubled.
        largest_of_all: a number to the largest of all ranks' numbers. After the reduction all ranks hold the same
            gradients; to ask nevertheless costs one number, and ranks that disagree would drift apart in silence.
        masters: the model, or Masters.
    """

    def __init__(self, scale: str | float, window: int, largest_of_all: Callable[[float], float], masters: Any) -> None:
        self.dynamic = scale == "dynamic"
        self.value = FIRST_SCALE if self.dynamic else float(scale)
        self.window, self.largest_of_all, self.masters = window, largest_of_all, masters
        self.num_skipped = 0  # in the whole run
        self._skipped_in_a_row = self._good_in_a_row = 0
        self._overflow = False

    def is_enabled(self) -> bool:
        """False where there is nothing to scale."""
        return self.dynamic or self.value != 1.0

    def scale(self, loss: Tensor) -> Tensor:
        """The loss to call backward on."""
        return loss * self.value if self.is_enabled() else loss

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divides the gradients by the scale, in fp32 where there are masters. After the reduction, before clipping."""
        if isinstance(self.masters, Masters):
            self.masters.take_gradients()
        if not self.is_enabled():
            return
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        torch._foreach_mul_(gradients, 1.0 / self.value)
        finite = torch.stack([torch.isfinite(gradient).all() for gradient in gradients]).all()
        self._overflow = self.largest_of_all(float(not finite)) > 0

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """One step of the optimizer, or none after an overflow."""
        if self._overflow:
            return
        optimizer.step()
        self.write_back()

    def update(self) -> None:
        """Sets the scale for the next step; ends a run that only skips."""
        if not self.is_enabled():
            return
        if self._overflow:
            self.num_skipped += 1
            self._skipped_in_a_row += 1
            self._good_in_a_row = 0
        else:
            self._skipped_in_a_row = 0
            self._good_in_a_row += 1
        if self._skipped_in_a_row == PATIENCE:
            self._give_up()
        if self.dynamic and self._overflow:
            self.value *= BACKOFF
        elif self.dynamic and self._good_in_a_row == self.window:
            self.value, self._good_in_a_row = min(self.value * GROWTH, LARGEST_SCALE), 0
        self._overflow = False

    def _give_up(self) -> None:
        if self.dynamic:
            fail(f"{PATIENCE} steps in a row were skipped, down to a loss scale of {self.value:g}: the loss itself is not "
                 "finite, try a smaller --lr or --half bf16")  # fmt: skip
        fail(f"--loss-scale {self.value:g} is too large: {PATIENCE} steps in a row were skipped because gradients "
             "overflowed, so nothing is learned; give a smaller one, or dynamic")  # fmt: skip

    def write_back(self) -> None:
        """After weights were changed from outside: the model follows the masters."""
        if isinstance(self.masters, Masters):
            self.masters.write_back()

    def metrics(self) -> dict[str, float]:
        """For the row of a step: the scale that the NEXT step uses, and how many were skipped so far."""
        return {"loss_scale": self.value, "skipped_steps": self.num_skipped}

    def state_dict(self) -> dict[str, float]:
        """JSON-ready."""
        return {"scale": self.value, "good_in_a_row": self._good_in_a_row, "num_skipped": self.num_skipped}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Goes on from a checkpoint; a fixed scale is what the flag says, not what it was."""
        if self.dynamic and "good_in_a_row" in state:
            self.value, self._good_in_a_row = float(state["scale"]), int(state["good_in_a_row"])
            self.num_skipped = int(state["num_skipped"])
