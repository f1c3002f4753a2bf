"""Loads a rank's pieces from a checkpoint of any chapter, and prepares them as this rank's part of a new one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from gpt2_chinese.checkpoint.sharded import Part
from gpt2_chinese.errors import UserError
from zero.units import Piece


@torch.no_grad()
def load_pieces(pieces: Iterable[Piece], names: Iterable[str], optimizer: torch.optim.Optimizer,
                weights: Mapping[str, Tensor], moments: Mapping[str, Tensor]) -> None:  # fmt: skip
    """Copies this rank's elements of whole tensors into the masters and moments of its pieces.

    Args:
        pieces: the pieces of this rank.
        names: the names of all parameters of the model.
        optimizer: updates the pieces' masters.
        weights, moments: whole tensors of a checkpoint by name, as Run.resume_parts passes them.

    Raises:
        UserError: names or shapes differ.
    """
    wrong = sorted(set(names) ^ set(weights))
    for piece in pieces:
        if wrong or weights[piece.name].shape != piece.shape:
            raise UserError(f"the weights do not fit the model: {', '.join([*wrong, piece.name][:3])}")
        piece.master.copy_(_run(piece, weights[piece.name]))
        if f"step.{piece.name}" in moments:
            state = {key: _run(piece, moments[f"{key}.{piece.name}"]).to(piece.master) for key in ("exp_avg", "exp_avg_sq")}
            optimizer.state[piece.master] = {"step": moments[f"step.{piece.name}"].clone(), **state}


def _run(piece: Piece, whole: Tensor) -> Tensor:
    """The elements of a whole tensor that belong to a piece, in the shape of the piece's master."""
    return whole.reshape(-1)[piece.start : piece.start + piece.numel].view(piece.master.shape).clone()


def parts_of(pieces: Iterable[Piece], values: Callable[[Piece], Tensor | None]) -> dict[str, Part]:
    """Each piece's values with their position in the whole parameter; leaves out pieces whose values are None."""
    found = ((piece, values(piece)) for piece in pieces)
    return {piece.name: Part.run(piece.shape, piece.start, run.detach().reshape(-1))
            for piece, run in found if run is not None}  # fmt: skip
