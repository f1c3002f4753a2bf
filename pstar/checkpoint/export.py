"""Exports and imports weights as one plain file, one group of chunks at a time: no rank holds a second copy of the model.

The file is a safetensors file: 8 bytes with the length of a JSON header, the header with each tensor's dtype, shape and
offset, then the tensors. The library writes one from tensors that are all in memory at once. Here they come group by group:
the header, which follows from the shapes, is written first, then each tensor at its offset. The library reads the result.
"""

import json
import os
from collections.abc import Iterator
from math import prod
from pathlib import Path

import torch

from pstar.checkpoint.state import read_piece, write
from pstar.chunks.interrupts import check
from pstar.errors import CheckpointError
from pstar.numerics.precision import PARAM
from pstar.optim.chunked_adam import ChunkedAdam


def header_of(shapes: dict[str, torch.Size]) -> tuple[bytes, dict[str, int]]:
    """(the bytes before the first tensor, where each tensor begins in the file) for fp32 tensors in this order."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    places, end = {}, 0
    for name, shape in shapes.items():
        places[name] = end
        end += 4 * prod(shape)
        entries[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [places[name], end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)    # tensors begin at a multiple of 8
    begin = len(text).to_bytes(8, "little") + text
    return begin, {name: len(begin) + place for name, place in places.items()}


def export_weights(optimizer: ChunkedAdam, path: Path) -> None:
    """Writes the fp32 masters as a safetensors file; every rank calls it; rank 0 writes a staging file and renames it.

    Raises CheckpointError on all ranks when rank 0 cannot write.
    """
    ranks, said, file = optimizer.chunks.collectives, None, None
    begin, places = header_of(_shapes(optimizer))
    staging = path.with_name(f"{path.name}.tmp{os.getpid()}")
    try:
        for tensors in _on_rank_0(optimizer):
            if ranks.rank != 0 or said:
                continue    # after an error rank 0 still receives, so that the other ranks can go on
            try:
                if file is None:
                    file = staging.open("wb")
                    file.write(begin)
                for name, values in tensors.items():
                    file.seek(places[name])
                    file.write(values.contiguous().numpy())
            except OSError as error:
                said = str(error)
        if file is not None:
            try:
                file.flush()
                os.fsync(file.fileno())
                file.close()
                if said is None:
                    os.replace(staging, path)
            except OSError as error:
                said = said or str(error)
    finally:
        if file is not None:
            staging.unlink(missing_ok=True)
    if said := ranks.from_rank_0(said):
        raise CheckpointError(f"the weights could not be written: {said}")
    check()


def _shapes(optimizer: ChunkedAdam) -> dict[str, torch.Size]:
    """The shape of every tensor of the file, in the model's order. Parameters that differ by rank have one for each."""
    in_chunks, outside = optimizer.chunks.parameters.shapes, optimizer.outside
    return {key: in_chunks[name] if name in in_chunks else outside.shapes[name] for name in optimizer.steps
            for key in (outside.keys(name) if name in outside.params else [name])}


def _on_rank_0(optimizer: ChunkedAdam) -> Iterator[dict[str, torch.Tensor]]:
    """Yields (name -> flat fp32 master) of a group of chunks, or of a parameter outside them; empty on other ranks."""
    ranks = optimizer.chunks.collectives
    for group in optimizer.chunks.layout.groups:
        flat = ranks.gather_pieces(read_piece(optimizer, PARAM, group.index).cpu())
        yield {} if flat is None else {s.name: flat[s.offset : s.offset + s.numel] for s in group.slots}
    outside = optimizer.outside
    for name in outside.params:
        keys, own = outside.keys(name), outside.read(name)[PARAM].reshape(-1)
        flat = ranks.gather_on_host(own) if len(keys) > 1 else own
        yield {} if flat is None else dict(zip(keys, flat.view(len(keys), -1), strict=True))


def import_weights(optimizer: ChunkedAdam, path: Path) -> None:
    """Reads a safetensors file of any floating dtype; each rank reads by itself, one tensor at a time, and takes its part.

    Raises CheckpointError, naming all of them, for names that are missing, unknown or of another shape; nothing is changed.
    """
    from safetensors import safe_open  # late: training works without the package, as on a bare machine with a GPU

    shapes, outside = _shapes(optimizer), optimizer.outside
    try:
        with safe_open(path, "pt") as file:
            names = set(file.keys())
            wrong = [f"{name} is missing" for name in shapes if name not in names]
            wrong += [f"{name} is unknown" for name in sorted(names - set(shapes))]
            for name in shapes.keys() & names:
                if (found := tuple(file.get_slice(name).get_shape())) != tuple(shapes[name]):
                    wrong.append(f"{name} is {found} instead of {tuple(shapes[name])}")
            if wrong:
                raise CheckpointError(f"the weights in {path} do not fit the model: {'; '.join(wrong)}")
            for name in optimizer.steps:
                key = outside.own_key(name) if name in outside.params else name
                write(optimizer, PARAM, name, file.get_tensor(key))
    except CheckpointError:
        raise
    except Exception as error:    # for another kind of file the library raises a class of its own
        raise CheckpointError(f"{path} cannot be read: {error}") from None
