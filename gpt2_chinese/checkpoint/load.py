"""What a run begins with: the state of a checkpoint, or weights from anywhere (--init-from)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpt2_chinese.checkpoint.step_folder import read_checkpoint
from gpt2_chinese.checkpoint.trained_model import read_weights

if TYPE_CHECKING:
    from torch import Tensor


def load(path: Path) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor], dict[str, Any]]:
    """Weights, moments and state of a checkpoint, on the CPU; those of parts/ are read when they are asked for.

    A file instead of a folder holds weights to begin with (--init-from): no moments, and a state of step 0.

    Raises:
        UserError: the checkpoint is damaged, or the file does not fit.
    """
    return initial_state(path) if path.is_file() else read_checkpoint(path)


def initial_state(file: Path) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Any]]:
    """The same for weights to begin with. Weights are float32."""
    return {name: tensor.float() for name, tensor in read_weights(file).items()}, {}, {"step": 0, "tokens": 0, "extra": {}}
