"""Loads the state that a run begins with: a checkpoint, or weights from any file (--init-from)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpt2_chinese.checkpoint.step_folder import read_checkpoint
from gpt2_chinese.checkpoint.trained_model import read_weights

if TYPE_CHECKING:
    from torch import Tensor


def load(path: Path) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor], dict[str, Any]]:
    """Weights, moments and state of a checkpoint, on the CPU. Tensors of parts/ are read when they are used.

    A file in place of a folder holds first weights only (--init-from): no moments, and the state of step 0.

    Raises:
        UserError: the checkpoint is damaged, or the file does not fit.
    """
    return initial_state(path) if path.is_file() else read_checkpoint(path)


def initial_state(file: Path) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Any]]:
    """The same for a file of first weights, which become float32."""
    return {name: tensor.float() for name, tensor in read_weights(file).items()}, {}, {"step": 0, "tokens": 0, "extra": {}}
