"""Checkpoints that ranks write in parts, through torch.distributed.checkpoint (DCP): any chapter goes on from them.

    checkpoints/step_000200/parts/      written by a chapter whose ranks hold parts of the model
        .metadata, __0_0.distcp ...     'model.NAME', 'exp_avg.NAME', 'exp_avg_sq.NAME' under their whole shapes, fp32
        state.json                      {"steps": {NAME: number of updates}, ...}

Tensors are read one by one, when they are asked for. Each chapter chooses which rank writes what:

    parts = {"model.h.0.weight": Part((4, 6), {(0, 3): its right half}), "exp_avg.h.0.weight": ...}
    run.save_parts(step, parts, steps)
    run.finish(lambda file: write_whole(file, weights, ranks))
"""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from durable.boxes import boxes
from durable.distributed_checkpoint import Reader, last_line, quiet
from gpt2_chinese.checkpoint.host_copy import HostCopy
from gpt2_chinese.checkpoint.model_state import is_finite
from gpt2_chinese.distributed.ranks import Ranks
from gpt2_chinese.errors import RunError, UserError

KINDS = ("exp_avg.", "exp_avg_sq.")
CODES = "8-bit codes"    # of a moment that only pstar can read
Offsets = tuple[int, ...]


# ---- reading ----------------------------------------------------------------------------------------------------------


class Tensors(Mapping[str, torch.Tensor]):
    """Some tensors of such a folder, by name.

    Args:
        reader: of the folder.
        names: name in this mapping -> name in the checkpoint.
        more: tensors that are not in the files.
    """

    def __init__(self, reader: Reader, names: dict[str, str], more: dict[str, torch.Tensor]):
        self._reader, self._names, self._more = reader, names, more
        self._known = reader.read_metadata().state_dict_metadata

    def __getitem__(self, name: str) -> torch.Tensor:
        if self._names.get(name) == CODES:
            raise RunError("the checkpoint's optimizer states are in 8 bits, which only chapter 07 with --backend pstar "
                           "reads: resume it there, or give --init-from for its weights alone")
        if name in self._more:
            return self._more[name]
        there = self._names[name]
        wanted = {there: torch.empty(self._known[there].size)}
        with quiet():
            dcp.load(wanted, storage_reader=self._reader, no_dist=True)
        return wanted[there]

    @property
    def in_codes(self) -> bool:
        """True when some of them are 8-bit codes, which __getitem__ refuses."""
        return CODES in self._names.values()

    def __iter__(self) -> Iterator[str]:
        return iter([*self._names, *self._more])

    def __len__(self) -> int:
        return len(self._names) + len(self._more)


def read_parts(folder: Path) -> tuple[Tensors, Tensors]:
    """(weights, moments) as checkpoint.load gives them. Raises UserError for a folder that is none of these."""
    try:
        reader = Reader(folder)
        known = reader.read_metadata().state_dict_metadata
        steps = json.loads((folder / "state.json").read_text(encoding="utf-8"))["steps"]
    except (OSError, ValueError, KeyError, pickle.UnpicklingError) as error:
        raise UserError(f"checkpoint {folder} cannot be read: {error}") from None
    weights = {name: "model." + name for name in steps}
    moments = {kind + name: kind + name for name in steps for kind in KINDS if kind + name in known}
    moments |= {kind + name: CODES for name in steps for kind in KINDS if f"{kind[:-1]}_codes.{name}" in known}
    counts = {f"step.{name}": torch.tensor(float(number)) for name, number in steps.items()}
    return Tensors(reader, weights, {}), Tensors(reader, moments, counts)


# ---- writing ----------------------------------------------------------------------------------------------------------


class Part:
    """This rank's part of one tensor, as boxes, which DCP asks for one by one.

    Args:
        shape: of the whole tensor.
        boxes: offsets in the whole tensor -> the values there, of as many dimensions, on any device, of any dtype; stored
            as float32. Several ranks may give the same box; one of them writes it. Otherwise boxes must not overlap, and
            together they are the whole tensor. A rank without a part of the tensor gives no box.
    """

    def __init__(self, shape: tuple[int, ...] | torch.Size, boxes: Mapping[Offsets, torch.Tensor]) -> None:
        self.shape, self.boxes = torch.Size(shape), dict(boxes)

    @classmethod
    def run(cls, shape: tuple[int, ...] | torch.Size, start: int, values: torch.Tensor) -> Part:
        """A run of the flattened tensor: the elements from `start` on, values (n,), as flat shards hold them."""
        found = {}
        for box in boxes(shape, start, values.numel()):
            found[box.offsets], values = values[: box.numel].view(box.sizes), values[box.numel :]
        return cls(shape, found)

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        kind, properties = WriteItemType.SHARD, TensorProperties(dtype=torch.float32)
        items = []
        for offsets, values in self.boxes.items():
            chunk = ChunkStorageMetadata(torch.Size(offsets), values.shape)
            index = MetadataIndex(name, torch.Size(offsets))
            items.append(WriteItem(index, kind, tensor_data=TensorWriteData(chunk, properties, self.shape)))
        return items


def copied(parts: Mapping[str, Part], copy: HostCopy) -> dict[str, Part]:
    """The same parts in host memory, valid until the next call with this `copy`."""
    flat = {f"{name} {offsets}": values for name, part in parts.items() for offsets, values in part.boxes.items()}
    held = copy.take(flat)
    return {name: Part(part.shape, {offsets: held[f"{name} {offsets}"] for offsets in part.boxes})
            for name, part in parts.items()}  # fmt: skip


class _Planner(dcp.DefaultSavePlanner):
    """DCP's planner for Parts."""

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        values = self.state_dict[index.fqn].boxes[tuple(index.offset)]
        plain = values.device.type == "cpu" and values.dtype == torch.float32 and values.is_contiguous()
        if plain and values.untyped_storage().nbytes() == values.nbytes and not values.requires_grad:
            return values
        return values.detach().to("cpu", torch.float32).contiguous().clone()  # a view would be stored with its base


def write_parts(folder: Path, parts: Mapping[str, Part], steps: Mapping[str, int], ranks: Ranks) -> None:
    """Writes parts/ of a checkpoint, for `read_parts`; all ranks call together, see `Run.save_parts`.

    Args:
        folder: does not exist yet, on a disk that all ranks share.
        parts: this rank's parts, by 'model.NAME', 'exp_avg.NAME' and 'exp_avg_sq.NAME'.
        steps: NAME -> number of updates; all names on rank 0; ignored on other ranks.
        ranks: all of them.

    Raises:
        RunError: on all ranks, if a number on any rank is not finite; nothing is written.
        OSError: on all ranks, if one of them could not write.
    """
    wrong = [name for name, part in parts.items() if not all(map(is_finite, part.boxes.values()))]
    if ranks.max(bool(wrong)):
        raise RunError(f"{wrong[0] if wrong else 'another rank'} holds numbers that are not finite: it is not saved")
    if ranks.is_main:
        folder.mkdir(parents=True)
    ranks.barrier()
    try:
        with quiet():
            dcp.save(dict(parts), storage_writer=dcp.FileSystemWriter(folder), planner=_Planner(False, False),
                     process_group=ranks.group, no_dist=ranks.group is None)  # fmt: skip
    except CheckpointException as error:  # not a subclass of Exception; holds the tracebacks of all ranks
        rank, failure = min(error.failures.items())
        raise OSError(f"rank {rank}: {last_line(failure[0])}") from None
    if ranks.is_main:
        (folder / "state.json").write_text(json.dumps({"steps": dict(steps)}), encoding="utf-8")
    ranks.barrier()


def write_whole(file: Path, weights: Mapping[str, Part], ranks: Ranks) -> None:
    """Writes plain weights from parts, for `Run.finish`; all ranks call together. They exchange the parts through the disk.

    Args:
        file: the path of model.safetensors, in an existing folder.
        weights: this rank's parts, by NAME.
        ranks: all of them.
    """
    folder = file.with_name("parts.tmp")
    write_parts(folder, {"model." + name: part for name, part in weights.items()}, {}, ranks)
    if ranks.is_main:
        from safetensors.torch import save_file

        reader = Reader(folder)
        names = {name.removeprefix("model."): name for name in reader.read_metadata().state_dict_metadata}
        save_file(dict(Tensors(reader, names, {})), file, metadata={"format": "pt"})
        file.chmod(folder.stat().st_mode & 0o666)  # safetensors lets only the owner read its files
        shutil.rmtree(folder)
    ranks.barrier()
