"""pstar's own checkpoints: every rank writes its part; runs with any number of ranks, chunk size, ownership and precision
read them.

Losses after a resume: bitwise those of the run that was not interrupted at the same number of ranks, whatever the chunk
size and the ownership. At another number of ranks, which adds gradients in another order, within 1e-6 relative.
"""

from __future__ import annotations

import json
import os
import pickle
import random
import re
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

import pstar
from durable.distributed_checkpoint import Reader
from durable.folders import digest
from tests import toy
from tests.cover import quick_only

STEPS, MORE = 3, 10


# ---- resuming


def build(config: dict):
    model, optimizer = toy.build(**config)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9)


def go_on(model, optimizer, scheduler, rank, num_ranks, steps) -> list[float]:
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = model(*toy.share(step, rank, num_ranks))
        model.backward(loss)
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    return losses


def save(rank, num_ranks, config, path):
    """Losses of the run that goes on, and what saving did to blocks and to the random state."""
    model, optimizer, scheduler = build(config)
    go_on(model, optimizer, scheduler, rank, num_ranks, range(STEPS))
    torch.manual_seed(100 + rank)
    places = {key: sorted(block.copies) for key, block in model._store.blocks.items()}
    model.save_checkpoint(path, {"step": STEPS, "scheduler": scheduler.state_dict()})
    same = places == {key: sorted(block.copies) for key, block in model._store.blocks.items()}
    losses = go_on(model, optimizer, scheduler, rank, num_ranks, range(STEPS, STEPS + MORE))
    return losses, same, torch.rand(1).item(), optimizer.loss_scale


def resume(rank, num_ranks, config, path):
    model, optimizer, scheduler = build(config)
    extra = model.load_checkpoint(path)
    scheduler.load_state_dict(extra["scheduler"])
    scale = optimizer.loss_scale
    losses = go_on(model, optimizer, scheduler, rank, num_ranks, range(extra["step"], extra["step"] + MORE))
    return losses, torch.rand(1).item(), scale, optimizer.loss_scale


def mean(results: list[tuple]) -> list[float]:
    return [sum(values) / len(values) for values in zip(*(result[0] for result in results), strict=True)]


SMALL, MIDDLE = {"default_chunk_size": 4096}, {"default_chunk_size": 12_000, "near_budget": "min"}
SHARDED = {"default_chunk_size": 6000, "ownership": "sharded"}


@pytest.fixture(scope="module")
def saved(ranks, tmp_path_factory):
    """Two ranks with parameters larger than a chunk: (folder, results of the run that went on)."""
    path = tmp_path_factory.mktemp("saved") / "checkpoint"
    results = ranks(2).run(save, SMALL, str(path))
    assert all(same for _, same, _, _ in results), "saving moves no block"
    return path, results


@pytest.mark.parametrize("case", quick_only(
    [(1, MIDDLE), (1, SHARDED), (2, SMALL), (2, MIDDLE), (2, SHARDED), (3, MIDDLE), (4, SHARDED)],
    (1, MIDDLE), (2, SMALL), (2, SHARDED), (4, SHARDED)))  # fmt: skip
def test_a_checkpoint_of_two_ranks_continues_at_any_number_of_ranks(ranks, saved, case):
    num_ranks, config = case
    path, through = saved
    results = ranks(num_ranks).run(resume, config, str(path))
    assert mean(results) == pytest.approx(mean(through), rel=0 if num_ranks == 2 else 1e-6, abs=0)
    if num_ranks == 2:
        assert [result[1] for result in results] == [result[2] for result in through], "each rank's random state is back"


@pytest.mark.parametrize("num_ranks", quick_only([1, 3, 4], 1, 3))
def test_two_ranks_resume_the_checkpoint_of_another_number_of_ranks(ranks, tmp_path, num_ranks):
    path = str(tmp_path / "checkpoint")
    through = ranks(num_ranks).run(save, SHARDED, path)
    results = ranks(2).run(resume, SMALL, path)
    assert mean(results) == pytest.approx(mean(through), rel=1e-6, abs=0)


@pytest.mark.each
@pytest.mark.parametrize("then", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("first", ["fp32", "bf16", "fp16"])
def test_it_goes_on_in_another_precision(ranks, tmp_path, first, then):
    """Same precision: bitwise. Another: the fp32 master is the same, and the first loss differs by a rounding to 16 bit."""
    fp16 = {"enabled": True, "initial_scale_power": 9}
    configs = {"fp32": {}, "bf16": {"bf16": {"enabled": True}}, "fp16": {"fp16": fp16}}
    path = str(tmp_path / "checkpoint")
    through = ranks(2).run(save, SMALL | configs[first], path)
    results = ranks(2).run(resume, MIDDLE | configs[then], path)
    if first == then:
        assert mean(results) == mean(through)
        assert [result[3] for result in results] == [result[3] for result in through], "the loss scale goes on"
    else:
        assert mean(results) == pytest.approx(mean(through), rel=1e-2)


def test_dcp_s_own_tools_read_it(saved):
    """Another program can load tensors by their names, in their whole shapes."""
    tensors = {"model.embed.weight": torch.zeros(toy.VOCAB, toy.WIDTH), "exp_avg.norm.bias": torch.zeros(toy.WIDTH)}
    with pytest.warns(UserWarning, match="in a single process"):
        dcp.load(tensors, checkpoint_id=saved[0], no_dist=True)
    assert all(tensor.abs().sum() > 0 for tensor in tensors.values())


# ---- what can be wrong


@pytest.mark.each
@pytest.mark.parametrize("name", ["state.json", ".metadata", "__0_0.distcp", "__1_0.distcp", "manifest.json"])
@pytest.mark.parametrize("how", ["flip", "cut", "remove"])
def test_a_damaged_checkpoint_is_refused(saved, tmp_path, name, how):
    path = tmp_path / "checkpoint"
    shutil.copytree(saved[0], path)
    content = bytearray((path / name).read_bytes())
    content[len(content) // 2] ^= 1
    if how == "remove":
        (path / name).unlink()
    else:
        (path / name).write_bytes(content if how == "flip" else content[:-7])
    model, _, _ = build(SMALL)
    with pytest.raises(pstar.CheckpointError, match="manifest|checksum" if name == "manifest.json" else re.escape(name)):
        model.load_checkpoint(path)


def test_two_hundred_flips_and_cuts_are_refused(saved, tmp_path):
    path, draw = tmp_path / "checkpoint", random.Random(5)
    shutil.copytree(saved[0], path)
    model, _, _ = build(SMALL)
    files = sorted(path.iterdir())
    for number in range(200):
        file = files[number % len(files)]
        content = file.read_bytes()
        at, harmed = draw.randrange(len(content)), bytearray(content)
        harmed[at] ^= 1 << draw.randrange(8)
        file.write_bytes(content[:at] if number % 3 == 0 else harmed)
        with pytest.raises(pstar.CheckpointError):
            model.load_checkpoint(path)
        file.write_bytes(content)
    (path / "manifest.json").write_text("{}")
    with pytest.raises(pstar.CheckpointError, match="no complete checkpoint"):
        model.load_checkpoint(path)


class Payload:
    def __reduce__(self):
        return os.mkdir, ("carried_out",)


def test_metadata_cannot_run_code(saved, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "checkpoint"
    shutil.copytree(saved[0], path)
    (path / ".metadata").write_bytes(pickle.dumps(Payload()))
    manifest = json.loads((path / "manifest.json").read_text())
    manifest[".metadata"] = digest(path / ".metadata")
    (path / "manifest.json").write_text(json.dumps(manifest))
    model, _, _ = build(SMALL)
    with pytest.raises(pstar.CheckpointError, match="posix.mkdir, which does not belong there"):
        model.load_checkpoint(path)
    assert not Path("carried_out").exists()


def test_metadata_of_an_early_python_311_are_read(saved, tmp_path, monkeypatch):
    """Debian 12's, for example, pickles an enum member as getattr(its class, its name); no other getattr is allowed."""
    from pstar.checkpoint.sharded import names_in

    monkeypatch.setattr(_MEM_FORMAT_ENCODING, "__reduce_ex__", lambda self, _: (getattr, (type(self), self.name)))
    known = Reader(saved[0]).read_metadata()
    (tmp_path / ".metadata").write_bytes(pickle.dumps(known))
    assert b"getattr" in (tmp_path / ".metadata").read_bytes()
    assert Reader(tmp_path).read_metadata().state_dict_metadata == known.state_dict_metadata
    monkeypatch.setattr(Payload, "__reduce__", lambda self: (getattr, (torch.Size, "count")))
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Payload()))
    with pytest.raises(pstar.CheckpointError, match="builtins.getattr, which does not belong there"):
        names_in(Reader(tmp_path))


def test_the_checkpoint_of_another_model_is_refused(saved):
    torch.manual_seed(0)
    model, _ = pstar.initialize_engine(lambda: toy.Toy(layers=4), 0, SMALL, device="cpu")
    with pytest.raises(pstar.CheckpointError, match="of another model .it has no blocks.3.norm.weight"):
        model.load_checkpoint(saved[0])


def fails_on_one(rank, num_ranks, path):
    """Rank 1 cannot write; a checkpoint that was there before stays."""
    from unittest import mock

    model, optimizer, scheduler = build(SMALL)
    model.save_checkpoint(path, {"step": 0})
    go_on(model, optimizer, scheduler, rank, num_ranks, range(1))

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    with mock.patch.object(dcp.FileSystemWriter, "write_data", full) if rank == 1 else mock.patch("os.sep", "/"):
        try:
            model.save_checkpoint(path, {"step": 1})
        except pstar.CheckpointError as error:
            return str(error), model.load_checkpoint(path), sorted(os.listdir(Path(path).parent))


def test_a_rank_that_cannot_write_fails_all_and_nothing_is_lost(ranks, tmp_path):
    for said, extra, left in ranks(2).run(fails_on_one, str(tmp_path / "checkpoint")):
        assert "No space left on device" in said and "\n" not in said
        assert extra == {"step": 0} and left == ["checkpoint"]


def test_client_state_that_is_no_json_is_refused_before_a_file_is_made(tmp_path):
    model, _, _ = build(SMALL)
    with pytest.raises(pstar.CheckpointError, match="not JSON serializable"):
        model.save_checkpoint(tmp_path / "checkpoint", {"scheduler": object()})
    assert not list(tmp_path.iterdir())


# ---- one plain file


def out_and_in(rank, num_ranks, config, path):
    model, optimizer, scheduler = build(config)
    go_on(model, optimizer, scheduler, rank, num_ranks, range(2))
    model.export_weights(path)
    weights, _ = model.gather_state()
    other, *_ = build(SHARDED)
    other.import_weights(path)
    return weights, other.gather_state()[0]


@pytest.mark.each
@pytest.mark.parametrize("config", [SMALL, MIDDLE | {"bf16": {"enabled": True}}, SHARDED | {"fp16": {"enabled": True}}])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_weights_go_out_and_in_as_one_plain_file(ranks, tmp_path, num_ranks, config):
    """The safetensors library reads the fp32 masters from the file, in the model's order; importing the file restores
    them."""
    from safetensors.torch import load_file

    path = tmp_path / "model.safetensors"
    weights, back = ranks(num_ranks).run(out_and_in, config, str(path))[0]
    read = load_file(path)
    assert read.keys() == weights.keys() == back.keys() and os.listdir(tmp_path) == [path.name]
    for name, weight in weights.items():
        assert torch.equal(read[name], weight) and torch.equal(back[name], weight)
    torch.manual_seed(0)
    plain = toy.Toy()
    plain.load_state_dict(read, strict=False)


@pytest.mark.parametrize("change, line", [
    (lambda t: t.pop("norm.bias"), "norm.bias is missing"),
    (lambda t: t.update(more=torch.zeros(1)), "more is unknown"),
    (lambda t: t.update({"norm.bias": torch.zeros(3)}), r"norm.bias is \(3,\) instead of \(48,\)"),
])  # fmt: skip
def test_weights_that_do_not_fit_are_refused_and_change_nothing(tmp_path, change, line):
    from safetensors.torch import save_file

    model, *_ = build(SMALL)
    before, _ = model.gather_state()
    other = {name: torch.zeros_like(weight) for name, weight in before.items()}
    change(other)
    save_file(other, tmp_path / "other.safetensors")
    with pytest.raises(pstar.CheckpointError, match=line):
        model.import_weights(tmp_path / "other.safetensors")
    assert all(torch.equal(weight, before[name]) for name, weight in model.gather_state()[0].items())


@pytest.mark.parametrize("content", [b"", b"no header at all", b"\xff" * 64])
def test_a_file_that_is_no_safetensors_file_is_refused(tmp_path, content):
    (tmp_path / "file").write_bytes(content)
    model, *_ = build(SMALL)
    with pytest.raises(pstar.CheckpointError, match="cannot be read"):
        model.import_weights(tmp_path / "file")


def test_an_export_that_fails_leaves_nothing(tmp_path):
    model, *_ = build(SMALL)
    with pytest.raises(pstar.CheckpointError, match="could not be written: .*No such file"):
        model.export_weights(tmp_path / "nowhere" / "model.safetensors")


# ---- parameters that stay with PyTorch


class Mixed(toy.Toy):
    """One block outside the chunks, averaged over the ranks; a norm outside, of which every rank has its own."""

    def __init__(self) -> None:
        super().__init__()
        with pstar.torch_scope():
            self.blocks[1] = toy.Block(toy.WIDTH)
        with pstar.torch_scope(do_allreduce=False):
            self.norm = torch.nn.LayerNorm(toy.WIDTH)


def with_scopes(rank, num_ranks, folder):
    def fresh():
        return toy.build(Mixed, default_chunk_size=4096)

    model, optimizer = fresh()
    toy.train(model, optimizer, 3, rank, num_ranks)
    model.save_checkpoint(f"{folder}/checkpoint")
    model.export_weights(f"{folder}/model.safetensors")
    through = toy.train(model, optimizer, 5, rank, num_ranks, first=3)
    model, optimizer = fresh()
    model.load_checkpoint(f"{folder}/checkpoint")
    back = toy.train(model, optimizer, 5, rank, num_ranks, first=3)
    model, optimizer = fresh()
    model.import_weights(f"{folder}/model.safetensors")
    return through, back, toy.train(model, optimizer, 1, rank, num_ranks, first=3)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_parameters_outside_the_chunks_are_saved_too(ranks, tmp_path, num_ranks):
    for through, back, imported in ranks(num_ranks).run(with_scopes, str(tmp_path)):
        assert back == through and imported == through[:1]
