"""Checkpoints under kills, bit flips, truncations and full disks: complete ones stay, damaged ones are not loaded."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from gpt2_chinese.checkpoint import find, sharded, step_folder
from gpt2_chinese.checkpoint.load import load
from gpt2_chinese.checkpoint.sealed_folder import damage, seal
from gpt2_chinese.distributed.ranks import Ranks
from gpt2_chinese.errors import RunError, UserError
from tests.limits import HANGS_S

ROUNDS = 200
WRITER = """
import os, random, signal, sys, time, torch
from pathlib import Path
from gpt2_chinese.checkpoint import find
from gpt2_chinese.checkpoint import step_folder
from gpt2_chinese.checkpoint.load import load
import safetensors.torch
folder, rounds = Path(sys.argv[1]), int(sys.argv[2])
draw = random.Random(7)
torch.set_num_threads(1)

def write(first, said):
    for step in range(first, first + 1000):
        weights = {"a": torch.full((50,), float(step))}
        step_folder.save(folder, step, weights, {"step.a": torch.tensor(1.0)}, {"model": {}})
        step_folder.prune(folder, step, 2)
        os.write(said, step.to_bytes(4, "big"))

last = 0
for number in range(rounds):
    hear, said = os.pipe()
    # every other writer begins at a step that is complete, and replaces it
    child = os.fork()
    if child == 0:
        write(max(1, last + number % 2), said)
    os.close(said)
    heard = b""
    for _ in range(draw.randrange(4)):  # by saves, not by time: a busy machine is killed as late as an idle one
        heard += os.read(hear, 4)
    time.sleep(draw.uniform(0, 0.01))  # and then anywhere in the next save
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    while piece := os.read(hear, 4096):
        heard += piece
    os.close(hear)
    announced = int.from_bytes(heard[-4:], "big") if heard else last
    found = find.newest_complete(folder)
    if found is None:
        assert last == announced == 0
        continue
    weights, _, state = load(found)
    assert state["step"] >= max(last, announced), (state["step"], last, announced, os.listdir(folder))
    assert torch.equal(weights["a"], torch.full((50,), float(state["step"])))
    last = state["step"]
print("last", last)
"""

EVERY_KILL = """
import os, shutil, signal, sys, torch
from pathlib import Path
from gpt2_chinese.checkpoint import find
from gpt2_chinese.checkpoint import step_folder
from gpt2_chinese.checkpoint.load import load
import safetensors.torch
CHANGES = {"open", "os.mkdir", "os.remove", "os.rename", "os.rmdir"}
stride = int(sys.argv[2])
torch.set_num_threads(1)

def save(folder, value, die_at):
    # whether a process that replaces step 5 is killed before its die_at-th change of the folder, or comes to its end
    child = os.fork()
    if child == 0:
        left = die_at
        def count(event, _):
            nonlocal left
            left -= event in CHANGES
            if left == 0 and event in CHANGES:
                os.kill(os.getpid(), signal.SIGKILL)
        sys.addaudithook(count)
        os.fsync = lambda _: None  # a kill loses nothing that was written; only a machine that loses power does
        step_folder.save(folder, 5, {"a": torch.full((50,), value)}, {"step.a": torch.tensor(1.0)}, {"model": {}})
        step_folder.prune(folder, 5, 1)
        os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])

def value_in(folder):
    return float(load(find.newest_complete(folder))[0]["a"][0])

first = Path(sys.argv[1]) / "first"
save(first, 1.0, 0)
states, kills = {(): first}, 0
for before in (queue := [first]):  # grows while new states are found
    was, die_at, killed = value_in(before), 0, True
    while killed:
        die_at += 1 if before == first else stride
        after = Path(sys.argv[1]) / f"{len(states)}.{die_at}"
        shutil.copytree(before, after)
        killed = save(after, was + 1, die_at)
        kills += killed
        assert value_in(after) in ((was, was + 1) if killed else (was + 1,)), (before, die_at, os.listdir(after))
        # the next writer removes unfinished folders
        left = tuple(sorted(str(f.relative_to(after)) for f in after.rglob("*") if ".tmp" not in str(f)))
        if left not in states:
            states[left] = after
            queue.append(after)
        else:
            shutil.rmtree(after)
print(f"states {len(states)} kills {kills}")
"""


@pytest.mark.parametrize("stride, least", [(4, (5, 50)), pytest.param(1, (5, 100), marks=pytest.mark.deep)])
def test_a_kill_before_every_change_of_the_disk(tmp_path: Path, stride: int, least: tuple[int, int]) -> None:
    """Kills again from every state that a kill leaves, until no new state comes: there, in the quick command, before every
    fourth change. The checkpoint found is always complete, and leftovers never stop a save."""
    command = [sys.executable, "-c", EVERY_KILL, str(tmp_path), str(stride)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANGS_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "damaged" not in done.stdout, done.stdout
    states, kills = (int(number) for number in done.stdout.split()[1::2])
    assert states > least[0] and kills > least[1], done.stdout


@pytest.mark.deep
def test_two_hundred_kills_while_saving(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WRITER, str(tmp_path), str(ROUNDS)], capture_output=True, text=True, timeout=HANGS_S
    )
    assert done.returncode == 0, done.stdout + done.stderr
    last = int(done.stdout.split()[-1])
    assert last >= ROUNDS, f"the kills came before the saves: {done.stdout}"
    assert "damaged" not in done.stdout, "a kill never leaves a damaged folder under the name of a checkpoint"


def written(folder: Path, step: int, value: float = 1.0) -> Path:
    weights = {"a": torch.full((40,), value), "b": torch.zeros(3)}
    moments = {"exp_avg.a": torch.ones(40), "exp_avg_sq.a": torch.ones(40), "step.a": torch.tensor(3.0)}
    return step_folder.save(folder, step, weights, moments, {"model": {"n_layer": 2}})


def written_in_parts(folder: Path, step: int) -> Path:
    staging = step_folder.begin(folder, step, 0)
    names = ("model.a", "exp_avg.a", "exp_avg_sq.a")
    whole = {name: sharded.Part((4, 6), {(0, 0): torch.randn(4, 6)}) for name in names}
    sharded.write_parts(staging / find.PARTS, whole, {"a": 1}, Ranks())
    return step_folder.complete(staging, step, {"model": {}})


def harmed(content: bytes, draw: random.Random) -> bytes:
    """One bit flipped, or cut somewhere."""
    if draw.random() < 0.3:
        return content[: draw.randrange(len(content))]
    at = draw.randrange(len(content))
    return content[:at] + bytes([content[at] ^ 1 << draw.randrange(8)]) + content[at + 1 :]


@pytest.mark.parametrize("write", [written, written_in_parts])
def test_two_hundred_flips_and_cuts_are_never_loaded(tmp_path: Path, write, capsys: pytest.CaptureFixture[str]) -> None:
    older, newer = write(tmp_path, 1), write(tmp_path, 2)
    draw, files = random.Random(3), sorted(f for f in newer.rglob("*") if f.is_file())
    for number in range(ROUNDS):
        file = files[number % len(files)]
        content = file.read_bytes()
        file.write_bytes(harmed(content, draw))
        capsys.readouterr()
        if damage(newer) is None:  # at most a bit of the manifest's white space, which changes no entry
            assert file.name == "manifest.json" and json.loads(file.read_text()) == json.loads(content)
        else:
            assert find.newest_complete(tmp_path) == older
            assert capsys.readouterr().out.count(f"passing over the damaged checkpoint {newer}") == 1
            with pytest.raises(UserError, match="cannot be used"):
                load(newer)
        file.write_bytes(content)
    assert find.newest_complete(tmp_path) == newer


@pytest.mark.parametrize(
    ("manifest", "said"),
    [
        ({}, "missing or unreadable"),
        ({"files": {}}, "does not list config.json"),
        ({"files": {"../1/config.json": None}}, "outside of the folder"),
        ({"files": {"/etc/hostname": None}}, "outside of the folder"),
        ({"files": {"state.json": None, "config.json": None}}, "does not list model.safetensors"),
        ([], "missing or unreadable"),
    ],
)
def test_incomplete_or_foreign_manifests_count_as_damage(tmp_path: Path, manifest, said: str) -> None:
    path = written(tmp_path, 2)
    if "files" in manifest:
        entries = json.loads((path / "manifest.json").read_text())["files"]
        manifest["files"] = {name: entries.get(name) for name in manifest["files"]}
        digest = __import__("hashlib").sha256(json.dumps(manifest["files"], sort_keys=True).encode())
        manifest["sha256"] = digest.hexdigest()
    (path / "manifest.json").write_text(json.dumps(manifest))
    assert said in damage(path)


def test_files_that_are_not_listed_are_not_read(tmp_path: Path) -> None:
    path = written(tmp_path, 2)
    (path / "parts").mkdir()
    (path / "parts" / ".metadata").write_bytes(b"no metadata")
    assert torch.equal(load(path)[0]["a"], torch.ones(40))


def test_a_state_without_a_step_is_damage(tmp_path: Path) -> None:
    path = written(tmp_path, 2)
    (path / "state.json").write_text("[]")
    seal(path)
    assert damage(path) is not None


def test_keep(tmp_path: Path) -> None:
    for step in range(1, 6):
        written(tmp_path, step)
    (tmp_path / "step_000004" / "config.json").write_text("{}")
    step_folder.prune(tmp_path, 5, 2)
    assert {f.name for f in tmp_path.iterdir()} == {"step_000005", "step_000004", "step_000003"}, "4 does not count"
    written(tmp_path, 1)  # after --resume of an older one
    step_folder.prune(tmp_path, 1, 1)
    assert {f.name for f in tmp_path.iterdir()} == {"step_000005", "step_000001"}, "what was just written stays"
    (tmp_path / "step_000005").rename(tmp_path / "step_000005.old")
    assert find.newest_complete(tmp_path) == tmp_path / "step_000005.old"
    written(tmp_path, 5)
    step_folder.prune(tmp_path, 5, 0)
    assert {f.name for f in tmp_path.iterdir()} == {"step_000005", "step_000001"}, "0 keeps all but leftovers"


def steps_in(folder: Path) -> set[int]:
    return {step for step, _ in find.candidates(folder)}


def test_keep_every(tmp_path: Path) -> None:
    for step in range(1, 13):
        written(tmp_path, step)
        step_folder.prune(tmp_path, step, 2, 4)
    assert steps_in(tmp_path) == {4, 8, 11, 12}, "the newest two count 12"
    (tmp_path / "step_000012" / "config.json").write_text("{}")
    written(tmp_path, 13)
    step_folder.prune(tmp_path, 13, 2, 4)
    assert steps_in(tmp_path) == {4, 8, 11, 12, 13}, "a damaged one does not count"
    written(tmp_path, 3)  # after --resume of an older one
    step_folder.prune(tmp_path, 3, 1, 4)
    assert steps_in(tmp_path) == {3, 4, 8, 12, 13}


RETENTION = """
import sys, shutil, torch
from pathlib import Path
from gpt2_chinese.checkpoint import find, step_folder
from gpt2_chinese.checkpoint.load import load
from gpt2_chinese.checkpoint.sealed_folder import damage
from tests.gpt2_chinese.killed import killed_before
import safetensors.torch
torch.set_num_threads(1)
base = Path(sys.argv[1])

def save(folder, step):
    step_folder.save(folder, step, {"a": torch.full((50,), float(step))}, {"step.a": torch.tensor(1.0)}, {"model": {}})
    step_folder.prune(folder, step, 1, 4)

def steps(folder):
    return {step for step, path in find.candidates(folder) if damage(path) is None}

for step in (4, 5, 6):
    save(base / "before", step)
assert steps(base / "before") == {4, 6}
number, killed = 0, True
while killed:
    number += 1
    folder = base / str(number)
    shutil.copytree(base / "before", folder)
    killed = killed_before(number, lambda: save(folder, 7))
    assert steps(folder) in (({4, 6}, {4, 6, 7}, {4, 7}) if killed else ({4, 7},)), (number, steps(folder))
    newest = load(find.newest_complete(folder))
    assert newest[2]["step"] == max(steps(folder)) and newest[0]["a"][0] == max(steps(folder))
    save(folder, 8)
    assert steps(folder) == {4, 8} and len(list(folder.iterdir())) == 2
print("kills", number - 1)
"""


def test_a_kill_before_every_change_of_the_disk_while_old_ones_are_removed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", RETENTION, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANGS_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "damaged" not in done.stdout and int(done.stdout.split()[-1]) > 12, done.stdout


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_are_not_saved(tmp_path: Path, value: float) -> None:
    kept = written(tmp_path, 1)
    with pytest.raises(RunError, match="a holds numbers that are not finite"):
        written(tmp_path, 2, value)
    staging = step_folder.begin(tmp_path, 2, 0)
    with pytest.raises(RunError, match=r"model\.a holds numbers that are not finite"):
        sharded.write_parts(staging / "parts", {"model.a": sharded.Part((2,), {(0,): torch.full((2,), value)})}, {}, Ranks())
    assert find.newest_complete(tmp_path) == kept


@contextmanager
def mounted(tmp_path: Path, options: str):
    """A small file system of its own; skipped where this user may not mount one."""
    folder = tmp_path / "mounted"
    folder.mkdir()
    try:
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "survival", folder], capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("may not mount a file system here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def test_a_full_disk_is_reported_before_anything_is_written(tmp_path: Path) -> None:
    with mounted(tmp_path, "size=3m") as folder:
        kept = written(folder, 1)
        with pytest.raises(RunError, match=rf"no room to write {folder}: 5\.0 MB needed, 3\.\d MB free"):
            step_folder.save(folder, 2, {"a": torch.zeros(1_000_000)}, {}, {"model": {}})
        assert [f.name for f in folder.iterdir()] == ["step_000001"]
        assert find.newest_complete(folder) == kept


def test_a_disk_that_fills_up_during_a_save_leaves_older_checkpoints_whole(tmp_path: Path) -> None:
    with mounted(tmp_path, "size=20m,nr_inodes=14") as folder:  # room for bytes, not for files
        kept = written(folder, 1)
        with pytest.raises(OSError, match="[Nn]o space left"):
            for step in (2, 3):
                written(folder, step)
        assert find.newest_complete(folder).name in ("step_000001", "step_000002") and damage(kept) is None
        shutil.rmtree(find.newest_complete(folder))
