"""Checkpoints of which every rank writes and reads its part, through torch.distributed.checkpoint (DCP).

    PATH/
        .metadata, __0_0.distcp, __1_0.distcp ...   DCP's own format: 'model.NAME' (the fp32 master), 'exp_avg.NAME' and
                                                    'exp_avg_sq.NAME' under their whole shapes, 'buffer.NAME.RANK' and random
                                                    states, which differ between ranks. 8-bit moments: 'exp_avg_codes.NAME'
                                                    in the parameter's shape, 'exp_avg_scale.NAME' with one fp32 number for
                                                    each 2,048 elements, and the same with 'exp_avg_sq'
        state.json                                  counts of updates, hyper-parameters, the loss scale, the caller's JSON
        manifest.json                               size and SHA-256 of each file above

Chunks hold a parameter as runs of its flattened elements. DCP knows boxes: in n dimensions a run is at most 2n - 1 boxes
(durable.boxes). So an engine with another number of ranks, chunk size, ownership, precision or state_bits can read its part,
and so can DCP's tools. No rank ever holds more than one group of chunks in addition to its part.

Complete or absent: written to a staging folder, flushed, renamed. DCP reads a flipped byte without an error, hence the
manifest. The metadata are a pickle: the reader allows only the classes that it needs, so a checkpoint cannot run code.
"""

import copy
import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from durable.boxes import Box, boxes
from durable.distributed_checkpoint import ForeignClass, Reader, last_line, quiet
from durable.files import flush
from durable.folders import digest, first_damage, put_in_place
from pstar.checkpoint.state import PREFIXES, SCALE_PREFIXES, frozen_bits, read_codes, read_piece, write_span
from pstar.comm.collectives import Collectives
from pstar.errors import CheckpointError
from pstar.kernels import code_tables, decode
from pstar.layout.layout import STATE_BLOCK, Group, Span, num_blocks
from pstar.memory.accelerator import is_accelerator, random_state
from pstar.memory.tier import Ledger
from pstar.numerics.precision import EXP_AVG, EXP_AVG_SQ, PARAM, SCALES
from pstar.optim.chunked_adam import ChunkedAdam

NAMES = PREFIXES | {PARAM: "model."}
CODES = {EXP_AVG: "exp_avg_codes.", EXP_AVG_SQ: "exp_avg_sq_codes."}
BUFFER = "buffer."
MANIFEST, STATE = "manifest.json", "state.json"
FORMAT = 1
Writer = Callable[[Path, Any], None]


class Part:
    """This rank's part of one tensor of the checkpoint. DCP asks for its boxes one by one.

    Args:
        shape: of the whole tensor.
        spans: this rank's runs of its flattened elements.
        read: from a span to its values, (span.numel,); None for a tensor to be loaded.
        dtype: of the values.
        finite: whether NaN and infinity are refused when saving.
    """

    def __init__(self, shape: torch.Size, spans: list[Span], read: Callable[[Span], torch.Tensor] | None = None,
                 dtype: torch.dtype = torch.float32, finite: bool = True):
        self._shape, self._read, self._dtype, self._finite = shape, read, dtype, finite
        self._boxes = {box.offsets: (box, span) for span in spans for box in boxes(shape, span.param_offset, span.numel)}
        self._loaded: dict[tuple[int, ...], torch.Tensor] = {}

    def size(self) -> torch.Size:
        """The shape of the whole tensor; DCP compares it with the saved one."""
        return self._shape

    def _meta(self, box: Box) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        properties = TensorProperties(dtype=self._dtype)
        return [WriteItem(MetadataIndex(name, torch.Size(box.offsets)), WriteItemType.SHARD,
                          tensor_data=TensorWriteData(self._meta(box), properties, self._shape))
                for box, _ in self._boxes.values()]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [self._meta(box) for box, _ in self._boxes.values()]

    def copied(self) -> "Part":
        """The same with values that stay as they are now."""
        values = {span: self._read(span).to("cpu", copy=True) for _, span in self._boxes.values()}
        return Part(self._shape, list(values), values.__getitem__, self._dtype, self._finite)

    def at(self, index: MetadataIndex) -> torch.Tensor:
        """The box with this index: its values, or the memory to load them into."""
        offsets = tuple(index.offset)
        box, span = self._boxes[offsets]
        if self._read is not None:
            first = box.start - span.param_offset
            values = self._read(span)[first : first + box.numel].view(box.sizes)
            if self._finite and not torch.isfinite(values).all():
                raise CheckpointError(f"{index.fqn} holds numbers that are not finite: it is not saved")
            return values
        if offsets not in self._loaded:
            self._loaded[offsets] = torch.empty(box.sizes, dtype=self._dtype, device="cpu")
        return self._loaded[offsets]

    def loaded(self, span: Span) -> torch.Tensor:
        """The loaded values of a span, (span.numel,)."""
        found = [(box.start, self._loaded[offsets]) for offsets, (box, own) in self._boxes.items() if own == span]
        return torch.cat([values.flatten() for _, values in sorted(found, key=lambda pair: pair[0])])


class SavePlanner(dcp.DefaultSavePlanner):
    """DCP's planner for state with Parts."""

    def lookup_object(self, index: MetadataIndex) -> Any:
        """The tensor to write."""
        found = self.state_dict.get(index.fqn)
        return found.at(index) if isinstance(found, Part) else super().lookup_object(index)


class LoadPlanner(dcp.DefaultLoadPlanner):
    """The same for reading."""

    def set_up_planner(self, state_dict: dict, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        """Keeps the Parts: DCP's planner would replace them by None."""
        self.original_state_dict = self.state_dict = state_dict
        self.metadata, self.is_coordinator = metadata, is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        """The tensor to read into."""
        found = self.state_dict.get(index.fqn)
        return found.at(index) if isinstance(found, Part) else super().lookup_tensor(index)


def save_sharded(optimizer: ChunkedAdam, path: Path, extra: dict[str, Any], buffers: Mapping[str, torch.Tensor]) -> None:
    """Writes the checkpoint; every rank calls it. Moves no block and changes no number.

    Args:
        optimizer: with its chunks.
        path: the new folder, on a file system that all ranks share. It may replace an older checkpoint, but nothing else.
        extra: JSON content of the caller: schedulers' states, the position in the data.
        buffers: by name, this rank's own: running statistics differ from rank to rank.

    Raises:
        CheckpointError: on all ranks, if one of them could not write. No staging folder is left, and `path` is as before.
    """
    _write(_parts(optimizer, buffers), _state_of(optimizer) | {"extra": extra}, optimizer.chunks.collectives, path)


def copy_sharded(optimizer: ChunkedAdam, extra: dict[str, Any], buffers: Mapping[str, torch.Tensor]) -> Writer:
    """Copies this rank's part into host memory; every rank calls it. Returns a function that writes the copy as save_sharded
    does, while training goes on in another thread. Every rank calls that with the path and a gloo process group that no
    other thread uses (None: one process).
    """
    state = copy.deepcopy(_state_of(optimizer) | {"extra": extra})
    parts = {name: part.copied() for name, part in _parts(optimizer, buffers).items()}
    return lambda path, group: _write(parts, state, Collectives(group, Ledger(), through_memory=False), path)


def _write(parts: dict[str, Part], state: dict[str, Any], ranks: Collectives, path: Path) -> None:
    """Writes a checkpoint, as save_sharded says. state: on rank 0 the content of state.json."""
    staging = path.with_name(f"{path.name}.tmp{ranks.from_rank_0(os.getpid())}")

    def begin() -> None:
        if ranks.rank == 0:
            json.dumps(state)    # content that is not JSON raises here, before anything is written
            if path.exists() and not (path / MANIFEST).is_file() and not (path.is_dir() and not any(path.iterdir())):
                raise CheckpointError(f"{path} exists and is no checkpoint: it is not replaced; give another name")
            shutil.rmtree(staging, ignore_errors=True)
            staging.mkdir(parents=True)

    def write_parts() -> None:
        writer, planner = dcp.FileSystemWriter(staging), SavePlanner(False, False)
        with quiet():
            dcp.save(parts, storage_writer=writer, planner=planner, no_dist=ranks.alone,
                     process_group=ranks.host_group)

    def write_state() -> list[str]:
        if ranks.rank == 0:
            (staging / STATE).write_text(json.dumps(state), encoding="utf-8")
        return sorted(file.name for file in staging.iterdir()) if ranks.rank == 0 else []

    def seal(digests: list[dict[str, dict]]) -> None:
        if ranks.rank == 0:
            manifest = {name: value for each in digests for name, value in each.items()}
            (staging / MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
            for name in (STATE, MANIFEST, "."):
                flush(staging / name)
            put_in_place(staging, path, staging.with_name(f"{staging.name}.old"))

    try:
        _together(ranks, f"make {staging}", begin)
        _together(ranks, "write its part of the checkpoint", write_parts)
        names = ranks.from_rank_0(_together(ranks, f"write {staging / STATE}", write_state))
        mine = names[ranks.rank :: ranks.num_ranks]
        digests = _together(ranks, "read the checkpoint back", lambda: {name: digest(staging / name) for name in mine})
        digests = ranks.from_all(digests)
        _together(ranks, f"finish {path}", lambda: seal(digests))
    finally:
        if ranks.rank == 0:
            shutil.rmtree(staging, ignore_errors=True)


def _state_of(optimizer: ChunkedAdam) -> dict[str, Any]:
    """The JSON content of state.json but for the caller's; every rank calls it."""
    outside, ranks = optimizer.outside, optimizer.chunks.collectives
    own_steps = {outside.own_key(name) if name in outside.params else name: n for name, n in optimizer.steps.items()}
    steps = {name: n for each in ranks.from_all(own_steps) for name, n in each.items()}
    groups = [{key: float(value) if isinstance(value, torch.Tensor) else value for key, value in group.items()
               if key != "params"} for group in optimizer.param_groups]
    return {"format": FORMAT, "precision": optimizer.precision.name, "frozen_bits": frozen_bits(optimizer),
            "scaler": optimizer.scaler.state(), "groups": groups, "num_ranks": ranks.num_ranks, "steps": steps}


def load_sharded(optimizer: ChunkedAdam, path: Path, buffers: Mapping[str, torch.Tensor],
                 verify: bool = True) -> dict[str, Any]:
    """Reads a checkpoint at any number of ranks, chunk size, ownership and precision; returns what the caller had added.

    Frozen matrices in codes are saved decoded, and have the same codes when they are encoded again.

    Each rank reads by itself, one group of chunks at a time. Random states are restored on ranks that were there; ranks that
    were not there take the buffers of rank 0. verify: compare the files with their checksums first.

    Raises:
        CheckpointError: damaged, of another model, of other frozen_bits (8 and 4), or no checkpoint.
    """
    chunks = optimizer.chunks
    ranks = chunks.collectives
    _together(ranks, f"read {path}", lambda: _verify(path, ranks.rank, ranks.num_ranks, verify))
    state = json.loads((path / STATE).read_text(encoding="utf-8"))
    reader = Reader(path)
    known = names_in(reader)
    outside = optimizer.outside
    own_keys = {name: outside.own_key(name) if name in outside.params else name for name in optimizer.steps}
    shapes = chunks.parameters.shapes | outside.shapes    # nothing is saved of a parameter without elements
    missing = [key for name, key in own_keys.items() if shapes[name].numel() and NAMES[PARAM] + key not in known]
    if missing or state["format"] != FORMAT:
        raise CheckpointError(f"{path} is of another model (it has no {', '.join(missing[:3])}) or of another version")
    saved_bits, bits = state.get("frozen_bits", 32), frozen_bits(optimizer)    # older checkpoints have none
    if saved_bits != bits and 32 not in (saved_bits, bits):
        raise CheckpointError(f"{path} was saved with frozen_bits {saved_bits}, this engine has {bits}: its frozen matrices "
                              f"would be rounded a second time; give {saved_bits}, or 32 to keep them as they are")
    for name in outside.params:
        whole = Span(own_keys[name], 0, 0, outside.shapes[name].numel())
        kinds = (PARAM,) if name in outside.frozen else NAMES
        for (kind, _), (values, scales) in _load_spans(reader, known, path, [(outside.shapes[name], whole)], kinds):
            outside.write(kind, name, values.view(outside.shapes[name]), scales)
    for group in chunks.layout.groups:
        spans = [(chunks.parameters.shapes[span.name], span) for span in group.spans(ranks.piece)]
        kinds = (PARAM,) if group.frozen else NAMES    # a checkpoint of a run that trained it has moments as well
        loaded = _load_spans(reader, known, path, spans, kinds)
        chunks.unsharding.drop_gathered(group.index)
        for (kind, span), (values, scales) in loaded:
            write_span(optimizer, kind, group.index, span, values, scales)
    for name, buffer in buffers.items():
        key = next((key for key in (f"{BUFFER}{name}.{ranks.rank}", f"{BUFFER}{name}.0") if key in known), None)
        if key is not None:    # older checkpoints have none
            values = torch.empty(buffer.shape, dtype=buffer.dtype, device="cpu")
            _read(reader, {key: values}, path)
            buffer.copy_(values)
    optimizer.steps.update({name: int(state["steps"].get(key, 0)) for name, key in own_keys.items()
                            if not optimizer.is_frozen(name)})
    if optimizer.precision.name == "fp16" and state["precision"] == "fp16":
        optimizer.scaler.load(state["scaler"])
    if len(state["groups"]) == len(optimizer.param_groups):
        for group, saved in zip(optimizer.param_groups, state["groups"], strict=True):    # a scheduler goes on from this lr
            group.update({key: tuple(value) if isinstance(value, list) else value for key, value in saved.items()})
    for name, (get, put) in _random_states(chunks.parameters.device).items():
        key = f"random.{name}.{ranks.rank}"
        if key in known and state["num_ranks"] == ranks.num_ranks:
            values = torch.empty_like(get())
            _read(reader, {key: values}, path)
            put(values)
    return state["extra"]


def _load_spans(reader: Reader, known: set[str], path: Path, spans: Iterable[tuple[torch.Size, Span]],
                kinds: Iterable[str]) -> list[tuple[tuple[str, Span], tuple[torch.Tensor, torch.Tensor | None]]]:
    """((kind, span), (fp32 values (span.numel,), scales)) of each span and kind that the checkpoint has, read at once.

    spans: with the shape of the whole parameter. scales: of the blocks that the span meets, if the moment is in codes.
    """
    parts: dict[tuple[str, Span], dict[str, tuple[Part, Span]]] = {}
    for shape, span in spans:
        for kind in kinds:
            if NAMES[kind] + span.name in known:
                parts[kind, span] = {NAMES[kind] + span.name: (Part(shape, [span]), span)}
            elif kind in CODES and CODES[kind] + span.name in known:
                blocks = _blocks_of(span)
                parts[kind, span] = {
                    CODES[kind] + span.name: (Part(shape, [span], dtype=torch.uint8), span),
                    SCALE_PREFIXES[kind] + span.name: (Part(torch.Size([num_blocks(shape.numel())]), [blocks]), blocks)}
    _read(reader, {name: part for each in parts.values() for name, (part, _) in each.items()}, path)
    found = []
    for (kind, span), each in parts.items():
        values, *scales = (part.loaded(its_span) for part, its_span in each.values())
        if scales:    # a span of fp32 moments may begin inside a block
            by_element = scales[0].repeat_interleave(STATE_BLOCK)[span.param_offset % STATE_BLOCK :]
            values = decode(values, code_tables(values.device)[2 * (kind == EXP_AVG_SQ)], by_element, 1)
        found.append(((kind, span), (values, scales[0] if scales else None)))
    return found


def _blocks_of(span: Span) -> Span:
    """The blocks of STATE_BLOCK elements that a span meets, as a run of the parameter's scales."""
    first = span.param_offset // STATE_BLOCK
    return Span(span.name, 0, first, num_blocks(span.param_offset + span.numel) - first)


def names_in(reader: Reader) -> set[str]:
    """The names of all that a checkpoint holds. Raises CheckpointError for metadata that name what does not belong there."""
    try:
        return set(reader.read_metadata().state_dict_metadata)
    except ForeignClass as error:
        raise CheckpointError(f"the checkpoint's metadata name {error.name}, which does not belong there: refused") from None


def _read(reader: Reader, tensors: dict[str, Any], path: Path) -> None:
    """Fills tensors and Parts, by name. Raises CheckpointError."""
    try:
        with quiet():
            dcp.load(tensors, storage_reader=reader, planner=LoadPlanner(False, False), no_dist=True)
    except (Exception, CheckpointException) as error:    # a ValueError for a shape, an OSError of the disk
        raise CheckpointError(f"{path} cannot be read into this model: {last_line(error)}") from error


def _parts(optimizer: ChunkedAdam, buffers: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Everything this rank has, by name, read when it is written: one piece of a group at a time."""
    chunks = optimizer.chunks
    rank, found, last = chunks.collectives.rank, {}, {}
    in_codes = SCALES in optimizer.precision.states

    def piece(read: Callable, kind: str, group: int) -> torch.Tensor:
        if last.get(read) is None or last[read][0] != (kind, group):
            last[read] = (kind, group), read(optimizer, kind, group).cpu()
        return last[read][1]

    def reader(read: Callable, kind: str, group: int) -> Callable[[Span], torch.Tensor]:
        return lambda span: piece(read, kind, group)[span.part]

    for group in chunks.layout.groups:
        for kind in (PARAM,) if group.frozen else NAMES:
            for span in group.spans(chunks.collectives.piece):    # one a parameter
                shape = chunks.parameters.shapes[span.name]
                if in_codes and kind in CODES:
                    found[CODES[kind] + span.name] = Part(shape, [span], reader(read_codes, kind, group.index), torch.uint8)
                else:
                    found[NAMES[kind] + span.name] = Part(shape, [span], reader(read_piece, kind, group.index))
        if in_codes and not group.frozen:
            found |= _scale_parts(optimizer, group)
    outside = optimizer.outside
    for name in outside.params:
        mine = {NAMES[kind]: values for kind, values in outside.read(name).items()}
        for kind, (codes, scales) in outside.read_codes(name).items():
            del mine[NAMES[kind]]
            mine |= {CODES[kind]: codes, SCALE_PREFIXES[kind]: scales}
        for prefix, values in mine.items():    # the same on all ranks: rank 0 writes it; else each its own
            whole = [Span(name, 0, 0, values.numel())] if rank == 0 or len(outside.keys(name)) > 1 else []
            key = prefix + outside.own_key(name)
            found[key] = Part(values.shape, whole, lambda _, v=values: v.reshape(-1), values.dtype)
    for name, buffer in buffers.items():    # a mask may hold infinities
        whole, flat = Span(name, 0, 0, buffer.numel()), buffer.detach().cpu().reshape(-1)
        found[f"{BUFFER}{name}.{rank}"] = Part(buffer.shape, [whole], lambda _, v=flat: v, buffer.dtype, finite=False)
    for name, (get, _) in _random_states(chunks.parameters.device).items():
        state = get()
        whole = Span(name, 0, 0, state.numel())
        found[f"random.{name}.{rank}"] = Part(state.shape, [whole], lambda _, state=state: state, torch.uint8)
    return found


def _scale_parts(optimizer: ChunkedAdam, group: Group) -> dict[str, Part]:
    """The scales of this rank's part of a group, by name."""
    rows, found = read_codes(optimizer, SCALES, group.index).cpu().view(2, -1), {}
    shapes = optimizer.chunks.parameters.shapes
    for prefix, row in zip(SCALE_PREFIXES.values(), rows, strict=True):
        for span in group.spans(optimizer.chunks.collectives.piece):
            whole = torch.Size([num_blocks(shapes[span.name].numel())])
            found[prefix + span.name] = Part(whole, [_blocks_of(span)], lambda _, own=row[span.blocks]: own)
    return found


def _random_states(device: torch.device) -> dict[str, tuple[Callable, Callable]]:
    """Name -> how to get and how to put the state of each of torch's generators that this rank uses."""
    states = {"cpu": (torch.get_rng_state, torch.set_rng_state)}
    if is_accelerator(device):
        states[device.type] = random_state(device)
    return states


def _together(ranks: Any, what: str, act: Callable[[], Any]) -> Any:
    """All ranks act, without collectives of their own; when one fails all raise the same CheckpointError, and none waits."""
    said, result, ctrl_c = None, None, False
    try:
        result = act()
    except (Exception, CheckpointException) as error:    # DCP's own is no Exception, and may hold a KeyboardInterrupt
        said = last_line(error)
        ctrl_c = any(isinstance(inner, KeyboardInterrupt) for inner, _ in getattr(error, "failures", {}).values())
    failed = [(rank, line) for rank, line in enumerate(ranks.from_all(said)) if line]
    if ctrl_c:
        raise KeyboardInterrupt
    if failed:
        raise CheckpointError(f"rank {failed[0][0]} could not {what}: {failed[0][1]}")
    return result


def _verify(path: Path, rank: int, num_ranks: int, checksums: bool) -> None:
    """Raises CheckpointError for a manifest or, with checksums, a file that is damaged; the ranks share the files."""
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        if not {STATE, ".metadata"} <= set(manifest):
            raise ValueError("a manifest that vouches for nothing")
        wrong = first_damage(path, dict(sorted(manifest.items())[rank::num_ranks])) if checksums else None
    except (OSError, ValueError, AttributeError):
        raise CheckpointError(f"{path} is no complete checkpoint: its {MANIFEST} is missing or unreadable") from None
    if wrong:
        raise CheckpointError(f"{path} is damaged: {wrong[0]} does not match its checksum")
