"""Processes that share a corpus: the bytes of one process, its errors, and what a stopped command leaves to the next."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from gpt2_chinese.data import token_parts, token_shards, token_workers
from gpt2_chinese.data.token_cache import load_tokens
from gpt2_chinese.errors import UserError
from gpt2_chinese.locks import is_held
from tests.limits import HANGS_S, wait_until

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """Nine files, of which three are a group: 24 to 60 paragraphs each."""
    folder = tmp_path / "files"
    folder.mkdir()
    for name in range(9):
        items = [f"第{i}段，hello今天的天气{'很' * name}好，我们走了{i * 7}步。" for i in range(24 + 4 * name)]
        (folder / f"{name}.json").write_text(json.dumps(items, ensure_ascii=False), encoding="utf-8")
    return folder


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small groups, which two processes share from the first byte on."""
    monkeypatch.setattr(token_parts, "GROUP_BYTES", 5000)
    monkeypatch.setattr(token_shards, "PARALLEL_BYTES", 0)
    monkeypatch.setattr(token_shards, "num_cores", lambda: 2)


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.suffix != ".lock"}


def test_groups_are_consecutive_files_of_about_a_size(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = sorted(files.iterdir())
    sizes = [file.stat().st_size for file in given]
    monkeypatch.setattr(token_parts, "GROUP_BYTES", 5000)
    groups = token_parts.file_groups(given)
    assert sum(groups, []) == given and len(groups) > 3
    for group in groups[:-1]:
        group_sizes = [sizes[given.index(file)] for file in group]
        assert sum(group_sizes[:-1]) < 5000 <= sum(group_sizes)


@pytest.mark.parametrize("profile", ["gpt2_chinese", "uer"])
def test_two_processes_write_the_bytes_of_one(
    files: Path, vocab: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small: None, profile: str
) -> None:
    found, said = [], []
    real = token_workers.tokenise_in_processes
    monkeypatch.setattr(token_shards, "tokenise_in_processes", lambda *given: said.append(given[1]) or real(*given))
    for least in (0, 1 << 40):
        monkeypatch.setattr(token_shards, "PARALLEL_BYTES", least)
        monkeypatch.setenv("GPT2_CHINESE_CACHE", str(tmp_path / f"cache{least}"))
        tokens = load_tokens(files, vocab, profile)
        found.append((content(tmp_path / f"cache{least}"), tokens.documents, tokens.characters, tokens.unknown))
    assert found[0] == found[1] and said == [2]
    assert found[0][1] == sum(24 + 4 * name for name in range(9))


def test_the_first_wrong_file_is_named_and_nothing_is_left(
    files: Path, vocab: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small: None
) -> None:
    monkeypatch.setenv("GPT2_CHINESE_CACHE", str(tmp_path / "cache"))
    (files / "2.json").write_text('["好", 3]', encoding="utf-8")
    (files / "3.json").write_text('["好" "好"]', encoding="utf-8")
    (files / "7.json").write_text("{}", encoding="utf-8")
    with pytest.raises(UserError, match="2.json: item 2 is no string"):
        load_tokens(files, vocab)
    assert content(tmp_path / "cache") == {}


def test_of_two_errors_the_one_of_the_first_group_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Group 1 fails while group 0 is under way; then group 0 fails, and no other group is begun."""
    failed, begun = threading.Event(), []

    def group_of(worker, number, progress):
        begun.append(number)
        if number == 0:
            assert failed.wait(HANGS_S)
        failed.set()
        raise UserError(f"group {number}")

    monkeypatch.setattr(token_workers, "start_worker", lambda *_, **__: None)
    monkeypatch.setattr(token_workers, "end_workers", lambda workers: None)
    monkeypatch.setattr(token_workers, "_group_of", group_of)
    job = token_parts.Job(Path(), "", [[]] * 9, None, None)
    with pytest.raises(UserError, match="group 0"):
        token_workers.tokenise_in_processes(job, 2, lambda count: None, None)
    assert sorted(begun) == [0, 1]


def test_a_worker_that_dies_is_one_line(
    files: Path, vocab: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small: None
) -> None:
    monkeypatch.setenv("GPT2_CHINESE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(token_workers, "_PROGRAM", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    with pytest.raises(UserError, match=r"ended by itself with status -9: is there enough memory\? The same command"):
        load_tokens(files, vocab)


# its workers make the first two groups, then wait until a file exists
WAITING = """
import sys
from gpt2_chinese.data import token_parts, token_shards, token_workers
from gpt2_chinese.tokens import main
token_parts.GROUP_BYTES, token_shards.PARALLEL_BYTES, token_shards.num_cores = 5000, 0, lambda: 2
token_workers._PROGRAM = '''
import os, time
from gpt2_chinese.data import token_workers
real = token_workers.tokenise_group
def tokenise_group(job, number, *rest):
    end = time.monotonic() + 600  # for a test that fails meanwhile
    if number > 1:
        open(f"{os.environ['GO']}-awaited-{os.getpid()}", "x").close()
    while number > 1 and not os.path.exists(os.environ["GO"]) and time.monotonic() < end:
        time.sleep(0.02)
    return real(job, number, *rest)
token_workers.tokenise_group = tokenise_group
token_workers.work()
'''
main(["--corpus", sys.argv[1]])
"""


def test_a_stopped_command_leaves_its_finished_parts_and_no_process(
    files: Path, vocab: Path, tmp_path: Path, small: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Ctrl-C ends the workers. After a kill they keep the lock until they end; the next command resumes."""
    cache, go = tmp_path / "cache", tmp_path / "go"
    monkeypatch.setenv("GPT2_CHINESE_CACHE", str(cache))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "GO": str(go)}

    def awaited() -> list[Path]:
        return list(tmp_path.glob("go-awaited-*"))

    for number in (signal.SIGINT, signal.SIGKILL):
        with subprocess.Popen([sys.executable, "-c", WAITING, str(files)], env=environment, stderr=subprocess.PIPE,
                              stdout=subprocess.DEVNULL, text=True) as command:  # fmt: skip
            wait_until(lambda: len(awaited()) == 2, "two workers that wait", lambda: command.poll() is None)
            assert len(list(cache.glob("*.parts/*.json"))) == 2, "the first two groups"
            for file in awaited():
                file.unlink()
            command.send_signal(number)
            if number == signal.SIGKILL:
                assert command.wait(HANGS_S) == -signal.SIGKILL
                (lock,) = cache.glob("*.lock")
                assert is_held(lock), "the workers may still write"
                go.touch()
            else:
                assert command.wait(HANGS_S) == 130
                assert command.stderr.read() == "\ninterrupted: the same command resumes with what is not done\n"
                (lock,) = cache.glob("*.lock")
                assert not is_held(lock), "no worker is left"
    wait_until(lambda: not is_held(lock), "the end of the workers")
    capsys.readouterr()
    ids = load_tokens(files, vocab).ids
    assert "tokenising resumed after an interruption: " in capsys.readouterr().out
    monkeypatch.setattr(token_shards, "PARALLEL_BYTES", 1 << 40)
    monkeypatch.setenv("GPT2_CHINESE_CACHE", str(tmp_path / "calm"))
    assert (load_tokens(files, vocab).ids == ids).all()
