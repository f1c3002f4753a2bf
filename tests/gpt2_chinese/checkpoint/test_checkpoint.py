"""Checkpoints: complete or absent, checked before use, the same state back."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gpt2_chinese.checkpoint import step_folder
from gpt2_chinese.checkpoint.find import newest_complete
from gpt2_chinese.checkpoint.load import load
from gpt2_chinese.checkpoint.model_state import adamw_moments, load_adamw_moments, load_weights, weights_of
from gpt2_chinese.errors import UserError
from gpt2_chinese.model.config import ModelConfig
from gpt2_chinese.model.gpt2 import GPT2LMHeadModel
from gpt2_chinese.run.optim import weight_decay_groups
from tests.limits import HANGS_S

CONFIG = ModelConfig(n_layer=2, n_embd=16, n_head=2, n_positions=8, vocab_size=31)


def made(seed: int = 0) -> tuple[GPT2LMHeadModel, torch.optim.AdamW]:
    torch.manual_seed(seed)
    model = GPT2LMHeadModel(CONFIG)
    return model, torch.optim.AdamW(weight_decay_groups(model, 0.1), lr=1e-2)


def step(model: GPT2LMHeadModel, optimizer: torch.optim.AdamW, number: int) -> float:
    ids = torch.randint(0, 31, (4, 9), generator=torch.Generator().manual_seed(number))
    optimizer.zero_grad()
    loss = model(ids[:, :-1], ids[:, 1:])
    loss.backward()
    optimizer.step()
    return loss.item()


def save(folder: Path, number: int, model, optimizer) -> Path:
    state = {"tokens": number * 10, "model": CONFIG.to_dict(), "extra": {"note": "好"}}
    return step_folder.save(folder, number, weights_of(model), adamw_moments(model, optimizer), state)


def test_training_goes_on_bit_for_bit(tmp_path: Path) -> None:
    model, optimizer = made()
    for number in range(3):
        step(model, optimizer, number)
    path = save(tmp_path, 3, model, optimizer)
    expected = [step(model, optimizer, number) for number in range(3, 7)]

    again, fresh = made(seed=9)
    weights, moments, state = load(path)
    load_weights(again, weights)
    load_adamw_moments(again, fresh, moments)
    assert (state["step"], state["tokens"], state["extra"]) == (3, 30, {"note": "好"})
    assert [step(again, fresh, number) for number in range(3, 7)] == expected
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


def test_the_files_are_plain(tmp_path: Path) -> None:
    from safetensors import safe_open

    model, optimizer = made()
    step(model, optimizer, 0)
    path = save(tmp_path, 1, model, optimizer)
    assert path == tmp_path / "step_000001"
    names = {"model.safetensors", "optimizer.safetensors", "config.json", "state.json", "manifest.json"}
    assert {file.name for file in path.iterdir()} == names
    with safe_open(path / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert set(file.keys()) == set(model.state_dict()) - {"lm_head.weight"}
        assert all(file.get_tensor(name).dtype == torch.float32 for name in file.keys())  # noqa: SIM118
    with safe_open(path / "optimizer.safetensors", "pt") as file:
        assert {n.split(".", 1)[0] for n in file.keys()} == {"exp_avg", "exp_avg_sq", "step"}  # noqa: SIM118
    assert json.loads((path / "config.json").read_text())["n_embd"] == 16


@pytest.mark.parametrize("harm", ["flip model.safetensors", "cut optimizer.safetensors", "remove state.json",
                                  "remove manifest.json", "flip config.json", "cut manifest.json"])  # fmt: skip
def test_a_damaged_checkpoint_is_skipped_aloud(tmp_path: Path, capsys: pytest.CaptureFixture[str], harm: str) -> None:
    model, optimizer = made()
    step(model, optimizer, 0)
    older, newer = save(tmp_path, 5, model, optimizer), save(tmp_path, 10, model, optimizer)
    assert newest_complete(tmp_path) == newer
    how, name = harm.split()
    file = newer / name
    content = bytearray(file.read_bytes())
    if how == "flip":
        content[-3] ^= 1
        file.write_bytes(content)
    elif how == "cut":
        file.write_bytes(content[:-20])
    else:
        file.unlink()
    capsys.readouterr()
    assert newest_complete(tmp_path) == older
    said = capsys.readouterr().out
    assert said.count("\n") == 1 and "passing over" in said and "step_000010" in said and name in said
    with pytest.raises(UserError, match="cannot be used"):
        load(newer)
    save(tmp_path, 10, model, optimizer)
    assert newest_complete(tmp_path) == newer, "the next save replaces it"


KILLED = """
import os, shutil, signal, sys, torch
from pathlib import Path
from durable import folders
from gpt2_chinese.checkpoint import sealed_folder, step_folder
left = int(sys.argv[2])
def counted(function):
    def call(*args, **more):
        global left
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **more)
    return call
# dies before the n-th thing that touches the disk
step_folder.save_tensors = counted(step_folder.save_tensors)
for name in ("write_json", "flush"):
    setattr(sealed_folder, name, counted(getattr(sealed_folder, name)))
    setattr(step_folder, name, getattr(sealed_folder, name))
folders.flush = sealed_folder.flush
shutil.rmtree = counted(shutil.rmtree)
os.rename = counted(os.rename)
step_folder.save(Path(sys.argv[1]), 2, {"a": torch.ones(5)}, {"step.a": torch.ones(())}, {"model": {}})
print("saved")
"""


def test_a_save_killed_anywhere_leaves_the_old_or_the_new_checkpoint(tmp_path: Path) -> None:
    """Saves step 2 again and again, killed at each point in turn: a complete checkpoint stays complete."""
    for number in (1, 2):
        step_folder.save(tmp_path, number, {"a": torch.zeros(5)}, {}, {"model": {}})
    program = (
        "import os, sys\n"
        "source = sys.argv[1]\n"
        "import torch, gpt2_chinese.checkpoint.step_folder, safetensors.torch\n"
        "for n in range(40):\n"
        "    child = os.fork()\n"
        "    if child == 0:\n"
        "        sys.argv = ['x', sys.argv[2], str(n)]\n"
        "        exec(source); os._exit(0)\n"
        "    status = os.waitpid(child, 0)[1]\n"
        "    found = gpt2_chinese.checkpoint.find.newest_complete(__import__('pathlib').Path(sys.argv[2]))\n"
        "    print(status, found.name if found else None, flush=True)\n"
        "    if status == 0: break\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, KILLED, str(tmp_path)], capture_output=True, text=True, timeout=HANGS_S, check=True
    )
    lines = [line.split() for line in done.stdout.splitlines() if line != "saved"]
    assert len(lines) > 8, done.stdout + done.stderr
    assert all(status == str(signal.SIGKILL.value) for status, _ in lines[:-1]) and lines[-1][0] == "0"
    assert {found for _, found in lines} == {"step_000002", "step_000002.old"}, "between two renames it is found as .old"
    assert {folder.name for folder in tmp_path.iterdir()} == {"step_000001", "step_000002"}, "no leftovers"


def test_a_folder_without_checkpoints_has_no_newest_one(tmp_path: Path) -> None:
    assert newest_complete(tmp_path / "none") is None
    (tmp_path / "step_000007.tmp123").mkdir()
    (tmp_path / "step_abc").mkdir()
    assert newest_complete(tmp_path) is None
