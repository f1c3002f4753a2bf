"""Checkpoints in parts: the ranks' parts of any cut are joined to the tensors that one process would have written."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from durable.boxes import boxes
from gpt2_chinese.checkpoint.sharded import Part, read_parts, write_parts, write_whole
from gpt2_chinese.distributed.ranks import Ranks


def whole() -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=draw) for name, shape in (("a", (6, 8)), ("b", (5,)), ("c", (4, 3, 2)))}


@pytest.mark.parametrize("shape", [(), (7,), (4, 6), (3, 4, 5)])
def test_a_run_is_cut_into_boxes_in_order(shape):
    tensor = torch.arange(torch.Size(shape).numel()).view(shape)
    for start in range(tensor.numel()):
        for number in range(tensor.numel() - start + 1):
            part = Part.run(shape, start, tensor.flatten()[start : start + number])
            assert len(part.boxes) == len(boxes(shape, start, number)) <= max(1, 2 * len(shape) - 1)
            for offsets, values in part.boxes.items():
                place = tuple(slice(o, o + n) for o, n in zip(offsets, values.shape, strict=True))
                assert torch.equal(tensor[place], values)
            assert sum(values.numel() for values in part.boxes.values()) == number


def write(rank: int, num_ranks: int, folder: str) -> None:
    ranks = Ranks(rank, num_ranks, group=dist.group.WORLD if num_ranks > 1 else None)
    tensors = whole()
    width = 8 // num_ranks
    columns = {(0, rank * width): tensors["a"][:, rank * width : (rank + 1) * width]}
    flat = tensors["c"].flatten()
    ends = [24 * r // num_ranks + (r > 0) * (r < num_ranks) for r in range(num_ranks + 1)]  # runs that end inside a row
    weights = {
        "a": Part((6, 8), columns),
        "b": Part((5,), {(0,): tensors["b"]}),  # the same on all ranks
        "c": Part.run((4, 3, 2), ends[rank], flat[ends[rank] : ends[rank + 1]]),
    }
    if rank == num_ranks - 1:
        weights["last"] = Part((2,), {(0,): torch.ones(2).bfloat16()})  # on this rank alone
    parts = {"model." + name: part for name, part in weights.items()}
    moments = Part((6, 8), {key: 2 * value for key, value in columns.items()})
    parts |= {"exp_avg.a": moments, "exp_avg_sq.a": moments}
    write_parts(Path(folder) / "parts", parts, {"a": 3, "b": 3, "c": 3, "last": 0}, ranks)
    write_whole(Path(folder) / "model.safetensors", weights, ranks)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_parts_of_any_cut_come_back_whole(ranks, tmp_path, num_ranks):
    ranks(num_ranks).run(write, str(tmp_path))
    weights, moments = read_parts(tmp_path / "parts")
    plain = load_file(tmp_path / "model.safetensors")
    expected = {**whole(), "last": torch.ones(2)}
    assert set(weights) == set(plain) == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(weights[name], tensor) and torch.equal(plain[name], tensor)
    assert torch.equal(moments["exp_avg.a"], 2 * expected["a"]) and moments["step.a"].item() == 3
    assert "exp_avg.b" not in moments
    assert not (tmp_path / "parts.tmp").exists() and (tmp_path / "model.safetensors").stat().st_mode & 0o044
    stored = sum(file.stat().st_size for file in (tmp_path / "parts").glob("*.distcp"))
    assert stored < 4 * (3 * 48 + 5 + 24 + 2) + 20 * 2000, "a view must not drag its base along"
