"""A resume reads each file of the checkpoint once for its checksum, over the launcher and all ranks."""

from __future__ import annotations

import hashlib
import shutil
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from gpt2_chinese.checkpoint import find, sealed_folder, step_folder, verdicts
from gpt2_chinese.errors import LAUNCHED_VARIABLE
from tests.chapters.inside import on_gloo, train
from tests.chapters.program import Chapter, environment, run
from tests.limits import HANGS_S

FLAGS = ("--eval-every", 100, "--save-every", 2)
STARTED = """
import hashlib, os, sys
read = hashlib.file_digest
def noting(stream, name):
    os.write(noted, f"{stream.name}\\n".encode())
    return read(stream, name)
noted = os.open(os.environ["NOTED"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
hashlib.file_digest = noting
"""


def noting_reads(rank: int, num_ranks: int, name: str, flags: list[str]) -> list[str]:
    """A case for a `RankPool`: runs a chapter, returns the files whose checksum this rank computed."""
    read, names = hashlib.file_digest, []

    def noting(stream: Any, how: str) -> Any:
        names.append(stream.name)
        return read(stream, how)

    with mock.patch.object(hashlib, "file_digest", noting):
        on_gloo(rank, num_ranks, name, flags)
    return names


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def files_in(folder: Path) -> set[str]:
    return {str(file) for file in folder.rglob("*") if file.is_file() and file != folder / sealed_folder.MANIFEST}


def saved(ranks: Any, chapter: Chapter) -> Path:
    """A copy, at a new path, of the checkpoints of steps 2 and 4: the ranks know the files that they have written."""
    train(ranks, 2, chapter, *FLAGS, "--max-steps", 4)
    shutil.copytree(chapter.output, chapter.folder / "copy")
    return chapter.folder / "copy" / "checkpoints"


@pytest.mark.parametrize("name", ["02_ddp", "07_patrickstar"])
def test_ranks_read_each_file_once(ranks, tmp_path: Path, name: str) -> None:
    chapter = Chapter(name, tmp_path)
    folder = saved(ranks, chapter)
    flags = chapter.command(*FLAGS, "--max-steps", 5, "--nproc", 2, "--output-dir", folder.parent)[2:]
    reads = Counter(file for names in ranks(2).run(noting_reads, name, flags, timeout=HANGS_S) for file in names)
    assert {file: reads[file] for file in files_in(folder / "step_000004")} == \
        dict.fromkeys(files_in(folder / "step_000004"), 1)
    assert (folder / "step_000005").is_dir() and not (folder.parent / verdicts.FILE).exists()


def test_all_ranks_pass_over_the_checkpoint_that_rank_0_finds_damaged(ranks, tmp_path: Path) -> None:
    chapter = Chapter("02_ddp", tmp_path)
    folder = saved(ranks, chapter)
    flip(folder / "step_000004" / "model.safetensors")
    flags = chapter.command(*FLAGS, "--max-steps", 4, "--nproc", 2, "--output-dir", folder.parent)[2:]
    reads = Counter(file for names in ranks(2).run(noting_reads, "02_ddp", flags, timeout=HANGS_S) for file in names)
    assert {file: reads[file] for file in files_in(folder / "step_000002")} == \
        dict.fromkeys(files_in(folder / "step_000002"), 1)
    assert reads[str(folder / "step_000004" / "model.safetensors")] == 1
    whole = chapter.output / "checkpoints" / "step_000004" / "model.safetensors"
    assert (folder / "step_000004" / "model.safetensors").read_bytes() == whole.read_bytes(), "written again"


def test_a_launcher_tells_its_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2):
        step_folder.save(tmp_path, step, {"a": torch.ones(9)}, {"step.a": torch.ones(())}, {"model": {}})
    flip(tmp_path / "step_000002" / "model.safetensors")
    for name in ("RANK", verdicts.VARIABLE):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(sealed_folder, "_found_whole", {})
    monkeypatch.setattr(verdicts, "_shared", [])  # an earlier test may have named a folder
    assert find.newest_complete(tmp_path) == tmp_path / "step_000001"
    verdicts.hand_over()
    read = mock.Mock(side_effect=AssertionError("a rank reads a file again"))
    monkeypatch.setenv(LAUNCHED_VARIABLE, "1")
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setattr(sealed_folder, "_found_whole", {})
        monkeypatch.setattr(verdicts, "_found", {})
        with mock.patch.object(hashlib, "file_digest", read):
            assert find.newest_complete(tmp_path) == tmp_path / "step_000001"
    flip(tmp_path / "step_000001" / "model.safetensors")
    assert find.newest_complete(tmp_path) is None, "its time has changed"


@pytest.mark.deep
@pytest.mark.parametrize("name", ["02_ddp", "03_horovod", "07_patrickstar"])
def test_a_launcher_and_its_ranks_read_each_file_once(tmp_path: Path, monkeypatch, name: str) -> None:
    chapter = Chapter(name, tmp_path)
    monkeypatch.setenv("NOTED", str(tmp_path / "noted"))
    chapter.train(*FLAGS, "--max-steps", 4, "--nproc", 2)
    (tmp_path / "sitecustomize.py").write_text(STARTED)
    newest = chapter.output / "checkpoints" / "step_000004"
    given = environment() | {"PYTHONPATH": f"{tmp_path}:{environment()['PYTHONPATH']}"}
    command = chapter.command(*FLAGS, "--max-steps", 5, "--nproc", 2)
    with mock.patch("tests.chapters.program.environment", lambda: given):
        run(command)
        reads = Counter((tmp_path / "noted").read_text().splitlines())
        assert {file: reads[file] for file in files_in(newest)} == dict.fromkeys(files_in(newest), 1)
        flip(max(newest.rglob("*"), key=lambda file: file.stat().st_size))
        (tmp_path / "noted").unlink()
        said = run([*command, "--resume", str(newest)], status=2)
    reads = Counter((tmp_path / "noted").read_text().splitlines())
    assert max(reads.values()) == 1 and said.startswith(f"error: --resume {newest} cannot be used: ")
    assert "does not match its checksum" in said and said.count("\n") == 1
