"""The token cache under fire: bits inverted, files cut, processes killed, several at once."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import random
import stat
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from gpt2_chinese.data import sealed_json as sealed_module
from gpt2_chinese.data import token_parts, token_shards
from gpt2_chinese.data.sealed_json import block_digests, file_digests, sealed, unsealed
from gpt2_chinese.data.token_cache import load_tokens
from gpt2_chinese.errors import UserError
from gpt2_chinese.tokens import main
from tests.limits import HANGS_S

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GPT2_CHINESE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def content(folder: Path) -> dict[str, bytes]:
    """The files of a folder, except the locks, which stay and are empty."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.suffix != ".lock"}


def permuted(path: Path, times: int) -> Path:
    """The shipped corpus, many times over, each time in another order."""
    texts = [text for file in sorted((ROOT / "data/train").glob("*.json")) for text in json.loads(file.read_text("utf-8"))]
    path.mkdir()
    for number in range(times):
        random.Random(number).shuffle(texts)
        (path / f"{number:03d}.json").write_text(json.dumps(texts, ensure_ascii=False), encoding="utf-8")
    return path


def test_200_flips_and_cuts_are_all_seen(cache: Path, corpus: Path, vocab: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = load_tokens(corpus, vocab)
    files, wanted = content(cache), np.array(good.ids)
    chance = random.Random(7)
    built = []
    real = token_shards.tokenise
    monkeypatch.setattr("gpt2_chinese.data.token_cache.tokenise", lambda *given: built.append(1) or real(*given))
    for round_number in range(200):
        name = chance.choice(list(files))
        harmed = bytearray(files[name])
        if chance.random() < 0.7:
            harmed[chance.randrange(len(harmed))] ^= 1 << chance.randrange(8)
        else:
            del harmed[chance.randrange(len(harmed)) :]
        (cache / name).write_bytes(harmed)
        again = load_tokens(corpus, vocab)
        assert np.array_equal(again.ids, wanted) and again.unknown == good.unknown
        assert len(built) == round_number + 1, f"{name} with damage was used"
        assert content(cache) == files
    load_tokens(corpus, vocab)
    assert len(built) == 200, "an undamaged cache is used"


def test_every_single_bit_of_a_seal_counts() -> None:
    content = {"key": "a0", "count": 120, "blocks": ["ff", "0e"], "dtype": "uint16"}
    data = sealed(content)
    assert unsealed(data) == content
    for bit in range(8 * len(data)):
        harmed = bytearray(data)
        harmed[bit // 8] ^= 1 << bit % 8
        assert unsealed(bytes(harmed)) is None
    assert all(unsealed(data[:length]) is None for length in range(len(data)))
    assert unsealed(data + b" ") is None


def test_blocks_of_a_stream_are_those_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sealed_module, "BLOCK_BYTES", 16)
    for length in (0, 1, 15, 16, 17, 32, 100):
        data = random.Random(length).randbytes(length)
        (tmp_path / "x").write_bytes(data)
        for piece in (1, 7, 16, 40, 1000):
            pieces = [data[i : i + piece] for i in range(0, length, piece)]
            assert block_digests(pieces) == file_digests(tmp_path / "x")
        assert len(file_digests(tmp_path / "x")) == -(-length // 16)


def test_a_part_that_does_not_match_is_made_again_and_the_others_are_not(
    cache: Path, corpus: Path, vocab: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_parts, "PART_CHARACTERS", 300)
    monkeypatch.setattr(token_parts, "_CHARACTERS_AT_ONCE", 100)
    load_tokens(corpus, vocab)
    wanted = content(cache)
    made: list[int] = []
    real = token_parts._make
    monkeypatch.setattr(token_parts, "_make", lambda *given: made.append(int(given[0].stem[6:])) or real(*given))

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    for harm in ("none", "bin", "json", "missing"):
        for path in cache.iterdir():
            path.unlink()
        with monkeypatch.context() as patch:
            patch.setattr(token_shards, "_copied", fail)
            with pytest.raises(UserError, match="cannot be written: No space left on device"):
                load_tokens(corpus, vocab)
        (parts,) = cache.glob("*.parts")
        num_parts = len(list(parts.glob("0*.bin")))
        assert num_parts > 4 and parts.suffix == ".parts"
        target = parts / ("00000-000002.json" if harm == "json" else "00000-000002.bin")
        if harm == "missing":
            target.unlink()
        elif harm != "none":
            data = bytearray(target.read_bytes())
            data[len(data) // 2] ^= 4
            target.write_bytes(data)
        made.clear()
        load_tokens(corpus, vocab)
        assert made == [*([] if harm == "none" else [2]), num_parts], "the last finds that nothing is left"
        assert content(cache) == wanted


def test_a_corpus_that_is_wrong_or_changes_leaves_nothing(
    cache: Path, corpus: Path, vocab: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (corpus / "c.json").write_text('["好", 3]', encoding="utf-8")
    with pytest.raises(UserError, match="item 2 is no string"):
        load_tokens(corpus, vocab)
    (corpus / "c.json").write_text('["好", "\\ud83d"]', encoding="utf-8")
    with pytest.raises(UserError, match="c.json: item 2 has .* which is half a character"):
        load_tokens(corpus, vocab)
    real = token_shards.tokenise

    def meanwhile(*given):
        header = real(*given)
        (corpus / "c.json").write_text('["后来"]', encoding="utf-8")
        return header

    (corpus / "c.json").write_text('["好"]', encoding="utf-8")
    with monkeypatch.context() as patch:
        patch.setattr("gpt2_chinese.data.token_cache.tokenise", meanwhile)
        with pytest.raises(UserError, match="was changed while it was read"):
            load_tokens(corpus, vocab)
    assert content(cache) == {}
    assert load_tokens(corpus, vocab).documents == 81


def command(corpus: Path) -> list[str]:
    return [sys.executable, "-m", "gpt2_chinese.tokens", "--corpus", str(corpus)]


def environment(cache: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "GPT2_CHINESE_CACHE": str(cache)}


EVERY_KILL = """
import os, shutil, sys
from pathlib import Path
from gpt2_chinese.data import token_parts
from gpt2_chinese import tokens
from tests.gpt2_chinese.killed import killed_before
token_parts.PART_CHARACTERS, token_parts._CHARACTERS_AT_ONCE = 600, 200
corpus, folder = sys.argv[1], Path(sys.argv[2])

def content():
    return {path.name: path.read_bytes() for path in sorted(cache.iterdir()) if path.suffix != ".lock"}

def command():
    with open(folder / "said", "w") as sys.stdout:
        tokens.main(["--corpus", corpus])

cache = folder / "cache"
os.environ["GPT2_CHINESE_CACHE"] = str(cache)
assert not killed_before(0, command)
wanted, number, killed, went_on = content(), 0, True, 0
while killed:
    number += 1
    shutil.rmtree(cache)
    killed = killed_before(number, command)
    if not number % 3:  # killed again, a little earlier
        killed_before(number // 2, command)
    assert not killed_before(0, command)
    assert content() == wanted, (number, os.listdir(cache))
    went_on += "resumed after an interruption" in (folder / "said").read_text()
print(number, went_on)
"""


def test_killed_before_any_change_of_the_disk_it_goes_on(corpus: Path, tmp_path: Path) -> None:
    """Kills the real command and repeats it until it ends: the same bytes, no leftovers, and finished parts are used
    again."""
    done = subprocess.run([sys.executable, "-c", EVERY_KILL, str(corpus), str(tmp_path)], env=environment(tmp_path),
                          capture_output=True, text=True, timeout=HANGS_S)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    kills, went_on = map(int, done.stdout.split())
    assert kills > 20 and went_on > 10


MAKES_IT_WHEN_TOLD = """
import sys, time
from pathlib import Path
from gpt2_chinese import tokens
from gpt2_chinese.data import token_cache
go, real = Path(sys.argv.pop(1)), token_cache.tokenise
def tokenise(*given):
    print("at work", flush=True)
    while not go.exists():
        time.sleep(0.02)
    return real(*given)
token_cache.tokenise = tokenise
tokens.main(sys.argv[1:])
"""


def test_two_commands_at_once_give_one_right_cache(corpus: Path, tmp_path: Path) -> None:
    go, where = tmp_path / "go", environment(tmp_path / "both")
    subprocess.run(command(corpus), env=environment(tmp_path / "calm"), check=True, capture_output=True, timeout=HANGS_S)
    slow = [sys.executable, "-c", MAKES_IT_WHEN_TOLD, str(go), *command(corpus)[3:]]
    with subprocess.Popen(slow, env=where, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout.readline() == "at work\n"
        unbuffered = [sys.executable, "-u", *command(corpus)[1:]]
        with subprocess.Popen(unbuffered, env=where, stdout=subprocess.PIPE, text=True) as second:
            assert second.stdout.readline().startswith("waiting for another process")
            go.touch()
            said = [process.communicate(timeout=HANGS_S)[0].splitlines() for process in (first, second)]
    assert [first.returncode, second.returncode] == [0, 0]
    assert content(tmp_path / "both") == content(tmp_path / "calm")
    assert said[0][-1] == said[1][-1]


def test_the_command_prints_counts_speed_and_path(cache: Path, corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["--corpus", str(corpus)])
    lines = capsys.readouterr().out.splitlines()
    tokens = load_tokens(corpus, ROOT / "cache/vocab.txt")
    assert lines[0].startswith(f"{len(tokens):,} tokens of 80 documents, {tokens.characters:,} characters")
    assert "0.00% unknown" in lines[1] and "MB a minute" in lines[2] and lines[3] == str(tokens.path)
    with pytest.raises(SystemExit) as stop:
        main(["--corpus", str(corpus / "none")])
    assert stop.value.code == 2 and "does not exist" in capsys.readouterr().err


def test_files_left_by_a_kill_after_the_last_write_are_removed(tmp_path: Path) -> None:
    corpus, where = permuted(tmp_path / "corpus", 1), environment(tmp_path / "cache")
    subprocess.run(command(corpus), env=where, check=True, capture_output=True, timeout=HANGS_S)
    whole = content(tmp_path / "cache")
    (tmp_path / "cache" / next(name for name in whole if name.endswith(".bin"))).with_suffix(".parts").mkdir()
    subprocess.run(command(corpus), env=where, check=True, capture_output=True, timeout=HANGS_S)
    assert content(tmp_path / "cache") == whole


def test_a_prepared_cache_is_read_without_permission_to_write(
    cache: Path, corpus: Path, vocab: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = load_tokens(corpus, vocab)
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert load_tokens(corpus, vocab).path == made.path
    made.path.with_suffix(".parts").mkdir()
    assert load_tokens(corpus, vocab).path == made.path, "the leftovers there are not removed"
    made.path.write_bytes(b"damaged")
    with pytest.raises(UserError, match=f"no writable folder for the tokens of {corpus}: set GPT2_CHINESE_CACHE"):
        load_tokens(corpus, vocab)


def test_in_a_shared_cache_any_user_continues_files_that_another_left(
    cache: Path, corpus: Path, vocab: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks modes, and replaces files without write permission by links: the tests may run as root, who may write to
    all."""
    monkeypatch.setattr(token_parts, "PART_CHARACTERS", 300)
    monkeypatch.setattr(token_parts, "_CHARACTERS_AT_ONCE", 100)
    cache.mkdir()
    cache.chmod(0o1777)

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    before = os.umask(0o077)
    try:
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(token_shards, "_copied", killed)
            load_tokens(corpus, vocab)
    finally:
        os.umask(before)
    (parts,), (lock,) = cache.glob("*.parts"), cache.glob("*.lock")
    assert (parts.stat().st_mode & 0o777, lock.stat().st_mode & 0o777) == (0o777, 0o666)
    others = tmp_path / "others"
    others.write_text("not to be written")
    for name in ("whole.bin", "00000-000000.bin.tmp", "00000-000000.json.tmp"):
        (parts / name).unlink(missing_ok=True)
        (parts / name).symlink_to(others)
    (parts / "00000-000000.bin").unlink()
    load_tokens(corpus, vocab)
    assert others.read_text() == "not to be written" and not parts.exists()


def test_one_builder_makes_the_cache_on_disks_that_lock_only_writable_files(
    cache: Path, corpus: Path, vocab: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Simulates NFS with two threads as two machines: a lock on a folder holds on one machine only."""
    real, made = fcntl.flock, []

    def flock(handle: int, operation: int) -> None:
        if not stat.S_ISDIR(os.fstat(handle).st_mode):
            if fcntl.fcntl(handle, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
                raise OSError(errno.EBADF, "Bad file descriptor")
            real(handle, operation)

    def slowly(*given):
        made.append(given)
        time.sleep(0.3)
        return token_shards.tokenise(*given)

    monkeypatch.setattr(fcntl, "flock", flock)
    monkeypatch.setattr("gpt2_chinese.data.token_cache.tokenise", slowly)
    with ThreadPoolExecutor() as machines:
        found = [machines.submit(load_tokens, corpus, vocab) for _ in range(2)]
    assert found[0].result().path == found[1].result().path and len(made) == 1
