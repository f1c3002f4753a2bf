"""Ways to break an input, decided by a seed; and the check that a reader ends in time, well or with a clear error."""

from __future__ import annotations

import copy
import json
import random
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from tests.limits import limited

SECONDS = 60  # a case takes milliseconds, on a busy machine a second
DEEP = "[" * 20_000 + "]" * 20_000
DEEP_MARK = "@deep@"  # json.dumps cannot write it
SNIPPETS = [
    *(b"\0", b"\xff\xfe", b"\xef\xbb\xbf", b"\\ud800", b"\\", b'"', b"[", b"]", b"{", b"}", b",", b":", b"\n", b"\r"),
    *(b"\x1b[2J", b"NaN", b"-Infinity", b"1e999", b"-1", b"9" * 5000, b"null", b"true", DEEP.encode()),
    *("中文".encode("gb18030"), "中文".encode("utf-16"), "\u2028\u0085".encode(), "９".encode(), b"// why\n", b"/* */"),
]  # fmt: skip
ODD = [
    *(None, True, False, -1, 0, 1, 7, 2**31, 2**63, 10**30, 10**400, -(10**400), 0.5, 1e308, -1e-308, DEEP_MARK),
    *("", " ", "\0", "\ud800", "中" * 5000, "[UNK]", "1", "nan", [], {}, [[]], [None], {"": ""}, [1, "a"], ["a", 1]),
    *(float("nan"), float("inf"), float("-inf")),
]  # fmt: skip


def break_bytes(rng: random.Random, content: bytes) -> bytes:
    """One to four flips, deletions, insertions, repetitions or cuts."""
    broken = bytearray(content)
    for _ in range(rng.randint(1, 4)):
        at, length = rng.randrange(len(broken) + 1), rng.choice((1, 1, 2, 5, 40))
        match rng.randrange(6):
            case 0 if at < len(broken):
                broken[at] ^= 1 << rng.randrange(8)
            case 1:
                del broken[at : at + length]
            case 2:
                broken[at:at] = rng.randbytes(length)
            case 3:
                broken[at:at] = broken[at : at + length] * 2
            case 4 if rng.random() < 0.3:
                del broken[at:]
            case _:
                broken[at:at] = rng.choice(SNIPPETS)
    return bytes(broken)


def break_json(rng: random.Random, value: Any) -> bytes:
    """One or two nodes swapped for something odd, removed or renamed."""
    value = copy.deepcopy(value)
    for _ in range(rng.randint(1, 2)):
        keys = [(holder, holder if isinstance(holder, dict) else range(len(holder))) for holder in _holders(value)]
        nodes = [(holder, key) for holder, of_it in keys for key in of_it]
        if not nodes:
            break
        holder, key = rng.choice(nodes)
        match rng.randrange(5):
            case 0:
                del holder[key]
            case 1 if isinstance(holder, dict):
                holder[rng.choice(["", "\ud800", key + "_", key.upper(), "extra"])] = holder.pop(key)
            case _:
                holder[key] = copy.deepcopy(rng.choice(ODD))
    text = json.dumps(value, ensure_ascii=rng.random() < 0.5).replace(f'"{DEEP_MARK}"', DEEP)
    return text.encode("utf-8", "surrogatepass")


def _holders(value: Any) -> Iterator[dict | list]:
    if isinstance(value, dict | list) and value:
        yield value
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _holders(inner)


class TooLong(BaseException):
    """A case takes longer than SECONDS."""


def in_time() -> AbstractContextManager[None]:
    """Raises TooLong in its block after SECONDS."""
    return limited(SECONDS, TooLong())


def judge(
    cases: int, one: Callable[[random.Random], object], clear: tuple[type[BaseException], ...]
) -> dict[str, int]:
    """Runs `one(random.Random(seed))` for many seeds; each must end in time, well or with one of the errors `clear`.

    Returns:
        how many ended well ("good") and how many with an error ("refused").

    Raises:
        AssertionError: names the seed of the first case that did not, and what happened.
    """
    ended = {"good": 0, "refused": 0}
    for seed in range(cases):
        try:
            with in_time():
                one(random.Random(seed))
            ended["good"] += 1
        except clear as error:
            assert str(error).strip() and len(str(error)) < 20_000, f"seed {seed}: says {str(error)[:100]!r}"
            ended["refused"] += 1
        except KeyboardInterrupt:
            raise
        except BaseException:  # a panic of a library in Rust is no Exception
            raise AssertionError(f"seed {seed}:\n{traceback.format_exc(limit=-6)[-3000:]}") from None
    return ended
