"""The model's state as plain tensors by name, gathered from chunks and put back: any layout, any number of ranks."""

import warnings
from collections.abc import Mapping

import torch

from pstar.chunks.interrupts import check, whole
from pstar.errors import ConfigError, StateError
from pstar.layout.layout import STATE_BLOCK, Group, Span, num_blocks
from pstar.memory.tier import NEAR
from pstar.numerics.precision import EXP_AVG, EXP_AVG_SQ, PARAM, SCALES, Precision
from pstar.optim.chunked_adam import ChunkedAdam

Tensors = dict[str, torch.Tensor]
SCALER = "scaler."
PREFIXES = {PARAM: "", EXP_AVG: "exp_avg.", EXP_AVG_SQ: "exp_avg_sq."}
"""Of the keys of each kind of values."""
SCALE_PREFIXES = {EXP_AVG: "exp_avg_scale.", EXP_AVG_SQ: "exp_avg_sq_scale."}
"""Of the scales of 8-bit moments."""


def warn_of_new_parameters(module: torch.nn.Module, optimizer: ChunkedAdam) -> None:
    """Warns of parameters that were put into the module after the start of the engine: nothing trains them."""
    known = set(map(id, _params(optimizer).values()))
    new = [name for name, param in module.named_parameters() if param.requires_grad and id(param) not in known]
    if new:
        names = ", ".join(new[:3]) + (", ..." if len(new) > 3 else "")
        warnings.warn(f"the engine does not train {names}: the model was changed after initialize_engine; make that change "
                      "in model_func", stacklevel=2)


def _params(optimizer: ChunkedAdam) -> dict[str, torch.nn.Parameter]:
    return optimizer.chunks.params | optimizer.outside.params


def check_names(module: torch.nn.Module, optimizer: ChunkedAdam) -> None:
    """Raises StateError if a parameter of the module is new since the start of the engine, or has another name.

    A file with the engine's values would make another model then. Parameters that the module no longer has do no harm.
    """
    ours = _params(optimizer)
    known = set(map(id, ours.values()))
    for name, param in module.named_parameters(remove_duplicate=False):
        if id(param) not in known or ours.get(name, param) is not param:
            raise StateError(f"{name} is not the parameter that the engine saves and loads under this name: the model was "
                             "changed after initialize_engine; make that change in model_func")


def gather_state(optimizer: ChunkedAdam) -> tuple[Tensors, Tensors]:
    """(weights, moments) on rank 0, two empty dicts on the others. Every rank must call it.

    weights: name -> fp32 master in the parameter's shape; of a frozen parameter the value with which the model computes,
    decoded if it is in codes (load_state finds the same codes again).
    moments, for all but frozen parameters: 'exp_avg.NAME', 'exp_avg_sq.NAME' -> fp32 in the parameter's shape, 'step.NAME'
    -> number of updates, fp32 scalar, as torch.optim counts them; in fp16 also 'scaler.KEY', the state of the loss scale,
    fp32 scalars. A parameter of which every rank has its own (torch_scope) has one NAME@RANK for each. Moves no block.

    8-bit moments are decoded; their scales are 'exp_avg_scale.NAME' and 'exp_avg_sq_scale.NAME', fp32, (blocks,), with which
    load_state finds the same codes again.
    """
    chunks, outside, found = optimizer.chunks, optimizer.outside, {kind: {} for kind in PREFIXES}
    scales: Tensors = {}
    for group in chunks.layout.groups:
        scales |= _gather_scales(optimizer, group)
        for kind in (PARAM,) if group.frozen else PREFIXES:
            flat = chunks.collectives.gather_pieces(read_piece(optimizer, kind, group.index).cpu())
            for slot in group.slots if flat is not None else ():
                values = flat[slot.offset : slot.offset + slot.numel].view(chunks.parameters.shapes[slot.name]).clone()
                found[kind][slot.name] = values
    steps = {name: torch.tensor(float(count), dtype=torch.float32, device="cpu") for name, count in optimizer.steps.items()}
    for name in outside.params:
        keys = outside.keys(name)
        count = steps.pop(name)
        for kind, values in (outside.read(name) | {"step": count}).items():
            flat = chunks.collectives.gather_on_host(values.reshape(-1)) if len(keys) > 1 else values.reshape(-1)
            for key, own in zip(keys, flat.view(len(keys), -1) if flat is not None else (), strict=False):
                (steps if kind == "step" else found[kind])[key] = own.view(values.shape).clone()
        for kind, (_, values) in outside.read_codes(name).items():
            flat = chunks.collectives.gather_on_host(values) if len(keys) > 1 else values
            for key, own in zip(keys, flat.view(len(keys), -1) if flat is not None else (), strict=False):
                scales[SCALE_PREFIXES[kind] + key] = own.clone()
    if chunks.collectives.rank != 0:
        return {}, {}
    keys_of = {name: outside.keys(name) if name in outside.params else [name] for name in optimizer.steps}
    weights = {key: found[PARAM][key] for keys in keys_of.values() for key in keys}
    order = [key for name, keys in keys_of.items() if not optimizer.is_frozen(name) for key in keys]
    moments = {PREFIXES[kind] + key: found[kind][key] for key in order for kind in (EXP_AVG, EXP_AVG_SQ)}
    moments |= {f"step.{key}": steps[key] for key in order} | scales
    if optimizer.precision.name == "fp16":
        moments |= {SCALER + key: torch.tensor(value, dtype=torch.float32, device="cpu")
                    for key, value in optimizer.scaler.state().items()}
    check()
    return weights, moments


@torch.no_grad()
def load_state(optimizer: ChunkedAdam, weights: Mapping[str, torch.Tensor],
               moments: Mapping[str, torch.Tensor] | None = None) -> None:
    """Puts gathered tensors back; every rank passes the same ones and takes its own pieces.

    Raises ConfigError, naming all of them, when a name is missing or a shape differs.
    """
    chunks, outside = optimizer.chunks, optimizer.outside
    shapes = chunks.parameters.shapes | {key: shape for name, shape in outside.shapes.items() for key in outside.keys(name)}
    wrong = [
        f"{name}: {'missing' if name not in weights else f'{tuple(weights[name].shape)}, not {tuple(shape)}'}"
        for name, shape in shapes.items()
        if name not in weights or weights[name].shape != shape
    ]
    if wrong:
        raise ConfigError(f"the weights do not fit the model: {'; '.join(wrong)}")
    for name in optimizer.steps:
        key = outside.own_key(name) if name in outside.params else name
        write(optimizer, PARAM, name, weights[key])
        if moments and not optimizer.is_frozen(name):
            for kind in (EXP_AVG, EXP_AVG_SQ):
                if f"{kind}.{key}" in moments:
                    write(optimizer, kind, name, moments[f"{kind}.{key}"], moments.get(SCALE_PREFIXES[kind] + key))
            optimizer.steps[name] = int(moments.get(f"step.{key}", 0))
    scaler = {key.removeprefix(SCALER): float(value) for key, value in (moments or {}).items() if key.startswith(SCALER)}
    if scaler:
        optimizer.scaler.load(scaler)


@torch.no_grad()
def write(optimizer: ChunkedAdam, kind: str, name: str, values: torch.Tensor, scales: torch.Tensor | None = None) -> None:
    """Puts one parameter (kind 'param') or one of its moments into its place; this rank takes its own part of it.

    values: the whole tensor, in any floating dtype, on any device; stored as the fp32 master where there is one.
    scales: of a moment that was in 8 bits, as in Precision.write_moment.

    Raises ConfigError for a weight that is not finite, where it would be encoded.
    """
    chunks = optimizer.chunks
    if name in optimizer.outside.params:
        return optimizer.outside.write(kind, name, values, scales)
    group = chunks.units.place[name][0].spec.group
    if chunks.layout.groups[group].coded and not values.isfinite().all():    # on all ranks, before any of them writes
        raise ConfigError(f"parameter {name} has values that are not finite, which frozen_bits cannot encode: give 32, or "
                          "keep the parameter with PyTorch (pstar.exclude)")
    chunks.unsharding.drop_gathered(group)
    for span in chunks.layout.groups[group].spans(chunks.collectives.piece):
        if span.name == name:
            mine = values.reshape(-1)[span.param_offset : span.param_offset + span.numel]
            first = span.param_offset // STATE_BLOCK
            its_scales = None if scales is None else scales[first : first + num_blocks(span.numel)]
            write_span(optimizer, kind, group, span, mine, its_scales)


@torch.no_grad()
@whole
def write_span(optimizer: ChunkedAdam, kind: str, group: int, span: Span, values: torch.Tensor,
               scales: torch.Tensor | None = None) -> None:
    """Puts the values of one span, (span.numel,), into this rank's piece. scales: as in Precision.write_moment."""
    check()
    optimizer.undo_early(group)
    for unit in optimizer.chunks.units.of_group[group]:
        optimizer.chunks.parameters.read_only.forget(unit)
    store, precision = optimizer.store, optimizer.precision_of(optimizer.chunks.layout.groups[group])
    kinds = precision.kinds if kind == PARAM else _kinds_of_a_moment(precision, kind)
    part, values = span.part, values.to("cpu", torch.float32)
    if store.blocks[PARAM, group].fixed:
        codes, copies = store.blocks[PARAM, group].codes, store.fixed_copies((PARAM, group))
        if codes is not None:
            codes.put(values, copies.pop(0), span.piece_offset)    # far
            values = codes.round(values, precision.param_dtype).float()
        for data in copies:
            precision.write_master(values, {PARAM: data[part]})
        return
    with store.reading([(each, group) for each in kinds]) as places:
        if kind == PARAM:
            precision.write_master(values, {each: data[part] for (each, _), (_, data) in places.items()})
        else:
            mine = precision.part_of({each: data for (each, _), (_, data) in places.items()}, part, span.blocks)
            precision.write_moment(kind, values, mine, scales)
        written = {key: tier for key, (tier, _) in places.items()}
    for key, tier in written.items():
        store.mark_written(key, tier)


def _kinds_of_a_moment(precision: Precision, kind: str) -> tuple[str, ...]:
    return (kind, SCALES) if SCALES in precision.states else (kind,)


@whole
def read_piece(optimizer: ChunkedAdam, kind: str, group: int) -> torch.Tensor:
    """This rank's piece in fp32, (S,), a copy, wherever the block is; moves nothing. Zeros between parameters."""
    check()
    optimizer.undo_early(group)
    its_group = optimizer.chunks.layout.groups[group]
    precision = optimizer.precision_of(its_group)
    kinds = precision.kinds if kind == PARAM else _kinds_of_a_moment(precision, kind)
    with optimizer.store.reading([(each, group) for each in kinds]) as places:
        data = {each: buffer for (each, _), (_, buffer) in places.items()}
        if kind == PARAM:
            codes = optimizer.store.blocks[PARAM, group].codes
            if codes is not None and places[PARAM, group][0] != NEAR:
                data[PARAM] = codes.decode(data[PARAM], torch.empty(its_group.piece_elems, dtype=precision.param_dtype,
                                                                    device="cpu"))
            return precision.read_master(data)
        if SCALES not in data:
            return data[kind].clone()
        values = torch.zeros(its_group.piece_elems, dtype=torch.float32, device=data[kind].device)
        for span in its_group.spans(optimizer.chunks.collectives.piece):
            part = span.part
            values[part] = precision.read_moment(kind, precision.part_of(data, part, span.blocks))
        return values


@whole
def read_codes(optimizer: ChunkedAdam, kind: str, group: int) -> torch.Tensor:
    """This rank's piece of an 8-bit moment as it is stored: codes, uint8, (S,); of SCALES (2 * blocks,). A copy."""
    check()
    optimizer.undo_early(group)
    with optimizer.store.reading([(kind, group)]) as places:
        return places[kind, group][1].clone()


def frozen_bits(optimizer: ChunkedAdam) -> int:
    """The bits of frozen matrices in codes; 32 if no group is coded."""
    return next((block.codes.bits for block in optimizer.store.blocks.values() if block.codes is not None), 32)


def _gather_scales(optimizer: ChunkedAdam, group: Group) -> Tensors:
    """On rank 0 the scales of each parameter of the group by SCALE_PREFIXES, (blocks,); empty without 8-bit moments."""
    ranks, found = optimizer.chunks.collectives, {}
    if group.frozen or SCALES not in optimizer.precision.states:
        return found
    flat = ranks.gather_pieces(read_codes(optimizer, SCALES, group.index).cpu())
    if flat is None:
        return found
    for piece, rows in enumerate(flat.view(ranks.num_pieces, 2, -1)):
        for span in group.spans(piece):    # pieces follow each other as the parameter's blocks do
            for prefix, row in zip(SCALE_PREFIXES.values(), rows, strict=True):
                before = found.get(prefix + span.name, row[:0])
                found[prefix + span.name] = torch.cat([before, row[span.blocks]])
    return found
