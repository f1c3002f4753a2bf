"""Checkpoints that ranks wrote in parts, read by a chapter without ranks; loading runs no code in them."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

from durable import files
from gpt2_chinese.checkpoint import find, sealed_folder
from gpt2_chinese.checkpoint.load import load
from gpt2_chinese.checkpoint.sharded import read_parts
from gpt2_chinese.errors import RunError, UserError

TENSORS = {"model.a.weight": torch.arange(12.0).view(3, 4), "exp_avg.a.weight": torch.ones(3, 4),
           "exp_avg_sq.a.weight": torch.full((3, 4), 2.0), "model.b": torch.zeros(5), "random.cpu.0": torch.get_rng_state()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    dcp.save(dict(TENSORS), checkpoint_id=tmp_path / "parts", no_dist=True)
    (tmp_path / "parts" / "state.json").write_text(json.dumps({"steps": {"a.weight": 3, "b": 0}}))
    return tmp_path / "parts"


pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def test_weights_and_moments_by_name(folder: Path) -> None:
    weights, moments = read_parts(folder)
    assert list(weights) == ["a.weight", "b"] and len(weights) == 2
    assert torch.equal(weights["a.weight"], TENSORS["model.a.weight"])
    assert set(moments) == {"exp_avg.a.weight", "exp_avg_sq.a.weight", "step.a.weight", "step.b"}, "b has no moments"
    assert torch.equal(moments["exp_avg_sq.a.weight"], TENSORS["exp_avg_sq.a.weight"])
    assert moments["step.a.weight"] == 3 and "exp_avg.b" not in moments


def test_moments_in_8_bit_codes_are_refused_and_weights_are_read(tmp_path: Path) -> None:
    """pstar stores 8-bit moments as exp_avg_codes.NAME and their scales; no chapter but 07 can use them."""
    codes = {"exp_avg_codes.a.weight": torch.zeros(3, 4, dtype=torch.uint8), "exp_avg_scales.a.weight": torch.ones(1)}
    dcp.save({"model.a.weight": TENSORS["model.a.weight"], **codes}, checkpoint_id=tmp_path / "parts", no_dist=True)
    (tmp_path / "parts" / "state.json").write_text(json.dumps({"steps": {"a.weight": 3}}))
    weights, moments = read_parts(tmp_path / "parts")
    assert torch.equal(weights["a.weight"], TENSORS["model.a.weight"])
    with pytest.raises(RunError, match="optimizer states are in 8 bits, which only chapter 07 with --backend pstar reads"):
        moments["exp_avg.a.weight"]


def test_a_checkpoint_with_parts_is_loaded_as_any(folder: Path) -> None:
    os.makedirs(folder.parent / "step_000003")
    os.rename(folder, folder.parent / "step_000003" / find.PARTS)
    path = folder.parent / "step_000003"
    files.write_json(path / "state.json", {"step": 3})
    files.write_json(path / "config.json", {})
    sealed_folder.seal(path)
    weights, moments, state = load(path)
    assert torch.equal(weights["b"], torch.zeros(5)) and state["step"] == 3
    content = bytearray((path / "parts" / "__0_0.distcp").read_bytes())
    content[100] ^= 4
    (path / "parts" / "__0_0.distcp").write_bytes(content)
    with pytest.raises(UserError, match=r"parts/__0_0.distcp does not match its checksum"):
        load(path)


class Payload:
    def __reduce__(self):
        return os.mkdir, ("carried_out",)


def test_its_metadata_cannot_run_code(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    (folder / ".metadata").write_bytes(pickle.dumps(Payload()))
    with pytest.raises(UserError, match="posix.mkdir, which does not belong there"):
        read_parts(folder)
    assert not Path("carried_out").exists()


class Reached:
    def __init__(self, *found: object):
        self.found = found

    def __reduce__(self):
        return getattr, self.found


def test_metadata_of_an_early_python_311_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian 12's, for example, pickles an enum member as getattr(its class, its name); no other getattr is allowed."""
    monkeypatch.setattr(_MEM_FORMAT_ENCODING, "__reduce_ex__", lambda self, _: (getattr, (type(self), self.name)))
    dcp.save(dict(TENSORS), checkpoint_id=tmp_path, no_dist=True)
    (tmp_path / "state.json").write_text(json.dumps({"steps": {"a.weight": 3, "b": 0}}))
    assert b"getattr" in (tmp_path / ".metadata").read_bytes()
    assert torch.equal(read_parts(tmp_path)[0]["a.weight"], TENSORS["model.a.weight"])
    for found in ((_MEM_FORMAT_ENCODING, "__init_subclass__"), (torch.Size, "count")):
        (tmp_path / ".metadata").write_bytes(pickle.dumps(Reached(*found)))
        with pytest.raises(UserError, match="cannot be read"):
            read_parts(tmp_path)


@pytest.mark.parametrize("name", [".metadata", "state.json"])
def test_a_checkpoint_without_metadata_or_state_is_refused_in_one_line(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(UserError, match=f"cannot be read: .*{name}"):
        read_parts(folder)
