"""The state of a plain model and its AdamW, as tensors by name, which checkpoints and final/ store."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from gpt2_chinese.errors import RunError, UserError

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

BYTES_PER_NUMBER = 4  # all numbers are stored as float32


def check_finite(tensors: Mapping[str, Tensor]) -> None:
    """Raises RunError for the first tensor with a number that is not finite: such a model cannot learn, and is not saved."""
    for name, tensor in tensors.items():
        if not is_finite(tensor):
            raise RunError(f"{name} holds numbers that are not finite: it is not saved")


def is_finite(tensor: Tensor) -> bool:
    """True if all numbers are finite.

    In host memory by numpy: in the background torch would start a second team of threads, too many for the cores.
    """
    import numpy
    import torch

    flat = tensor.detach().reshape(-1)
    if flat.device.type != "cpu" or flat.dtype != torch.float32:
        return bool(torch.isfinite(flat).all())
    return all(numpy.isfinite(piece.numpy()).all() for piece in flat.split(1 << 20))


def save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Writes tensors of any device and dtype to a safetensors file, as float32. Raises OSError."""
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    plain = {name: tensor.detach().to("cpu", torch.float32).contiguous() for name, tensor in tensors.items()}
    try:
        save_file(plain, path, metadata={"format": "pt"})
    except SafetensorError as error:  # which is no OSError
        raise OSError(f"{path.name}: {error}") from None
    umask = os.umask(0)  # the umask can only be read by setting it
    os.umask(umask)
    path.chmod(0o666 & ~umask)  # safetensors makes files that only their owner may read


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """The parameters of a plain model by name, a tied one once: an argument of `save` and `export_final`."""
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def load_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Copies weights into a plain model, in place.

    Raises:
        UserError: names or shapes differ; all differences in one line.
    """
    import torch

    own = dict(model.named_parameters())
    wrong = [f"{name} is missing" for name in own if name not in weights]
    wrong += [f"{name} is unknown" for name in weights if name not in own]
    wrong += [
        f"{name} is {tuple(weights[name].shape)} instead of {tuple(own[name].shape)}"
        for name in own
        if name in weights and weights[name].shape != own[name].shape
    ]
    if wrong:
        raise UserError(f"the weights do not fit the model: {'; '.join(wrong)}")
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(weights[name])


def adamw_moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The state of torch.optim.AdamW by parameter name: exp_avg.NAME, exp_avg_sq.NAME, step.NAME."""
    import torch

    moments = {}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            moments[f"{key}.{name}"] = torch.as_tensor(value, dtype=torch.float32)
    return moments


def load_adamw_moments(model: nn.Module, optimizer: torch.optim.Optimizer, moments: Mapping[str, Tensor]) -> None:
    """Sets the state of torch.optim.AdamW from the result of `adamw_moments`."""
    for name, parameter in model.named_parameters():
        if f"step.{name}" not in moments:
            continue  # AdamW had never updated this parameter
        optimizer.state[parameter] = {
            "step": moments[f"step.{name}"].clone(),
            "exp_avg": moments[f"exp_avg.{name}"].to(parameter, copy=True),
            "exp_avg_sq": moments[f"exp_avg_sq.{name}"].to(parameter, copy=True),
        }
