"""The model's state as plain tensors by name, gathered from chunks and put back: any layout, any number of ranks."""

from collections.abc import Mapping

import torch

from pstar.errors import ConfigError
from pstar.kernels import join_master, split_master
from pstar.optimizer import EXP_AVG, EXP_AVG_SQ, LOW, ChunkedAdam

Tensors = dict[str, torch.Tensor]


def gather_state(optimizer: ChunkedAdam) -> tuple[Tensors, Tensors]:
    """(weights, moments) on rank 0, two empty dicts on the others. Every rank must call it.

    weights: name -> fp32 master in the parameter's shape. moments: 'exp_avg.NAME', 'exp_avg_sq.NAME' -> fp32 in the
    parameter's shape, 'step.NAME' -> number of updates, fp32 scalar, as torch.optim counts them. Moves no block.
    """
    chunks, weights, moments = optimizer.chunks, {}, {}
    for group in chunks.layout.groups:
        for kind, prefix in (("param", ""), (EXP_AVG, "exp_avg."), (EXP_AVG_SQ, "exp_avg_sq.")):
            flat = chunks.collectives.gather_on_host(_read_piece(optimizer, kind, group.index).cpu())
            for slot in group.slots if flat is not None else ():
                values = flat[slot.offset : slot.offset + slot.numel].view(chunks.shapes[slot.name]).clone()
                (moments if prefix else weights)[prefix + slot.name] = values
    if weights:
        weights = {name: weights[name] for name in chunks.params}
        moments |= {f"step.{name}": torch.tensor(float(steps)) for name, steps in optimizer.steps.items()}
    return weights, moments


@torch.no_grad()
def load_state(optimizer: ChunkedAdam, weights: Mapping[str, torch.Tensor],
               moments: Mapping[str, torch.Tensor] | None = None) -> None:
    """Puts gathered tensors back; every rank passes the same ones and takes its own pieces.

    Raises ConfigError, naming all of them, when a name is missing or a shape differs.
    """
    chunks = optimizer.chunks
    wrong = [
        f"{name}: {'missing' if name not in weights else f'{tuple(weights[name].shape)}, not {tuple(shape)}'}"
        for name, shape in chunks.shapes.items()
        if name not in weights or weights[name].shape != shape
    ]
    if wrong:
        raise ConfigError(f"the weights do not fit the model: {'; '.join(wrong)}")
    for name in chunks.shapes:
        write(optimizer, "param", name, weights[name])
        if moments:
            for kind in (EXP_AVG, EXP_AVG_SQ):
                if f"{kind}.{name}" in moments:
                    write(optimizer, kind, name, moments[f"{kind}.{name}"])
            optimizer.steps[name] = int(moments.get(f"step.{name}", torch.tensor(0.0)))


@torch.no_grad()
def write(optimizer: ChunkedAdam, kind: str, name: str, values: torch.Tensor) -> None:
    """Puts one parameter (kind 'param') or one of its moments into its place; this rank takes its own part of it.

    values: the whole tensor, in any floating dtype, on any device; stored as the fp32 master where there is one.
    """
    chunks, residency = optimizer.chunks, optimizer.residency
    group = chunks.slots[name].group
    chunks.drop_gathered(group)
    tier, data = residency.peek((kind, group))
    for span in chunks.layout.groups[group].spans(chunks.collectives.rank):
        if span.name != name:
            continue
        part = slice(span.piece_offset, span.piece_offset + span.numel)
        mine = values.reshape(-1)[span.param_offset : span.param_offset + span.numel].to(data.device, torch.float32)
        if kind == "param" and optimizer.split:
            low = residency.peek((LOW, group))[1]
            high, rest = torch.empty_like(mine, dtype=data.dtype), torch.empty_like(mine, dtype=low.dtype)
            split_master(mine.contiguous(), high, rest)
            data[part], low[part] = high, rest.to(low.device)
        else:
            data[part] = mine
    residency.mark_written((kind, group), tier)


def _read_piece(optimizer: ChunkedAdam, kind: str, group: int) -> torch.Tensor:
    """This rank's piece in fp32, (S,), a copy, wherever the block is; moves nothing."""
    residency = optimizer.residency
    _, data = residency.peek((kind, group))
    if kind == "param" and optimizer.split:
        _, low = residency.peek((LOW, group))
        return join_master(data.to(low.device), low)
    return data.to(torch.float32, copy=True)
