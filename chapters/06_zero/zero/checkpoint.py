"""A rank's pieces on disk: taken out of a checkpoint of any chapter, and written as this rank's part of one."""

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
    """Fills masters and moments of pieces from whole tensors by name.

    Args:
        pieces: of this rank.
        names: of all parameters of the model.
        optimizer: of the pieces' masters.
        weights, moments: of a checkpoint, as Run.resume_parts hands them out.

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
    """The elements of a whole tensor that belong to a piece, laid out as its master."""
    return whole.reshape(-1)[piece.start : piece.start + piece.numel].view(piece.master.shape).clone()


def parts_of(pieces: Iterable[Piece], values: Callable[[Piece], Tensor | None]) -> dict[str, Part]:
    """What each piece holds (its values; none where they are None), at its place in the whole parameter."""
    found = ((piece, values(piece)) for piece in pieces)
    return {piece.name: Part.run(piece.shape, piece.start, run.detach().reshape(-1))
            for piece, run in found if run is not None}  # fmt: skip
