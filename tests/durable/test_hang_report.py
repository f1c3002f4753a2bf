"""Who waits for whom, as functions of what ranks answer."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from dataclasses import asdict
from typing import Any
from unittest import mock

from durable import hang_report
from durable.calls import Call, Messages, name_next, name_of
from tests.limits import HANGS_S

NOW = 1000.0


def answer(rank: int, *recent: Call, waiting: int = 0, at: str = "x.py:1 in f") -> dict[str, Any]:
    """The answer of a rank whose last `waiting` calls are under way."""
    calls = [asdict(call) for call in recent]
    groups = {call.group for call in recent}
    numbers = {group: max(call.number for call in recent if call.group == group) for group in groups}
    return {"rank": rank, "num_ranks": 3, "host": "h", "pid": 10 + rank, "time": NOW, "recent": calls, "at": at,
            "waiting": calls[len(calls) - waiting :] if waiting else [], "numbers": numbers, "stacks": []}  # fmt: skip


def collective(number: int, what: str = "", group: str = "0", ranks: tuple[int, ...] = (0, 1, 2), **more: Any) -> Call:
    return Call("all_reduce", what, group, ranks, number, NOW - 100 + number, **more)


def judged(*answers: dict[str, Any]) -> dict[str, Any]:
    """The verdict, after a way through JSON as in a file or the store."""
    return hang_report.judge({a["rank"]: json.loads(json.dumps(a)) for a in answers}, 3)


def test_a_rank_that_has_not_answered_is_missing():
    found = judged(*(answer(rank, collective(7, "bucket 1"), waiting=1) for rank in (0, 2)))
    assert (found["missing"], found["silent"]) == ([1], [1])
    assert found["line"] == ("the job hangs: rank 0 has been in all_reduce 7 (bucket 1) for 93 s; rank 1 is missing and has "
                             "not answered: it is stopped, gone or out of reach")  # fmt: skip


def test_a_rank_that_waits_itself_is_no_cause():
    """Rank 2 waits for rank 0, which waits for rank 1, which computes."""
    zero = answer(0, collective(3, group="pair", ranks=(0, 1)), waiting=1)
    found = judged(zero, answer(1, at="x.py:9 in compute"), answer(2, collective(5), waiting=1))
    assert found["missing"] == [1]
    assert found["line"] == ("the job hangs: rank 0 has been in all_reduce 3 for 97 s; rank 1 is missing: it is in no "
                             "collective, at x.py:9 in compute")  # fmt: skip


def test_ranks_that_wait_in_a_circle_are_all_missing():
    def pair(a: int, b: int) -> Call:
        return collective(1, group=f"{a}{b}", ranks=(a, b))

    found = judged(*(answer(r, pair(r, (r + 1) % 3), waiting=1) for r in range(3)))
    assert found["missing"] == [0, 1, 2] and "it is in all_reduce 1, at x.py:1 in f" in found["line"]


def test_a_call_under_way_that_waits_for_nobody_is_no_wait():
    """Rank 1 has begun the sum that all have begun, and sleeps before it begins the next one."""
    both = collective(1), collective(2)
    found = judged(*(answer(r, *both, waiting=2 if r else 1) for r in (0, 2)), answer(1, both[0], waiting=1))
    assert found["missing"] == [1]


def test_ranks_in_different_operations_are_told_apart_although_nobody_is_missing():
    found = judged(*(answer(r, collective(4, "bucket 1" if r else "bucket 0"), waiting=1) for r in range(3)))
    assert found["missing"] == [] and "differ from number 4 on: all_reduce 4 (bucket 0) on rank 0, all_" in found["line"]


def test_what_the_source_knows_counts():
    found = judged(answer(0, collective(1, missing=(2,)), waiting=1), answer(1), answer(2, collective(1)))
    assert found["missing"] == [2]


def test_a_name_belongs_to_the_next_call_alone():
    name_next("bucket 0")
    at = hang_report.time.time_ns()
    assert name_of(at, at - 10**9) == "bucket 0" and name_of(at + 1, at) == ""


def test_a_message_is_under_way_until_its_wait_ends():
    messages = Messages()
    with messages("receive", "weights", 2):
        [call] = messages.waiting()
        assert (str(call), call.missing) == ("receive (weights)", (2,))
    assert messages.waiting() == [] and messages.recent() == [call]


class Broken:
    """A source that fails."""

    def is_moving(self) -> bool:
        return False

    def waiting(self) -> list[Call]:
        raise KeyError("a group that is gone")

    recent = waiting


def test_a_source_that_fails_does_not_stop_the_report():
    found = hang_report.own_answer(0, 1, [Broken(), Messages()])
    assert found["errors"] == ["KeyError: 'a group that is gone'"] and found["waiting"] == []
    assert found["at"] and found["pid"] > 0


class Silent:
    """A store that does not answer until it is told to."""

    def __init__(self) -> None:
        self.questions, self.may_answer = 0, threading.Event()

    def check(self, keys: list[str]) -> bool:
        self.questions += 1
        return self.may_answer.wait(HANGS_S)

    set = get = check


def test_without_an_answer_of_the_store_a_rank_still_reports(tmp_path, capsys):
    """As over a link that is cut. The first question is left waiting, and no second one is asked."""
    store, messages, ended = Silent(), Messages(), threading.Event()
    ends: list[object] = []

    def end(others_wait: bool, silent: list[int]) -> None:
        ends.extend([others_wait, silent])
        ended.set()

    with mock.patch.multiple(hang_report, STORE_S=0.05, ANSWER_S=0.0), messages("receive", "weights", 1):
        watch = hang_report.Watch(store, 0, 2, 0.05, tmp_path / "new", end, [messages], "look there")
        assert ended.wait(HANGS_S)
        watch.close()
    store.may_answer.set()
    assert ends == [False, [1]] and store.questions == 1
    line = capsys.readouterr().err
    assert "error: the job hangs: rank 0 has been in receive (weights) for " in line
    assert line.endswith(f"files: {tmp_path}/new/hang-rank*.json; look there\n")
    assert json.loads((tmp_path / "new" / "hang-rank0.json").read_text())["silent"] == [1]


def test_the_seconds_of_a_stopped_process_are_no_hang(tmp_path):
    """As after Ctrl-Z and fg: all ranks were stopped, and some wait in a call that began before."""
    call = Call("receive", "weights", "messages", (1,), began=0.0, missing=(1,))
    source = mock.Mock(**{"is_moving.return_value": False, "waiting.return_value": [call]})
    watch = hang_report.Watch(mock.Mock(), 0, 2, 300, tmp_path, mock.Mock(), [source])
    watch.close()
    begin, late = watch._moved, []
    with mock.patch.object(hang_report.time, "monotonic") as clock:
        for seconds in (5, 1000, *range(1005, 1305, 5)):
            clock.return_value = begin + seconds
            late.append(watch._is_late())
    assert late == [False] * 61 + [True]


def test_a_rank_that_waits_ends_after_the_missing_one_which_keeps_its_own_status():
    """Else the launcher would send SIGTERM to the missing one, and name that signal as the cause."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(0.3)"])
    here, elsewhere = {"host": socket.gethostname(), "pid": process.pid}, {"host": "other", "pid": os.getpid()}
    hang_report._wait_until_ended([here, elsewhere])
    assert process.poll() == 0


def test_the_table_has_a_line_for_each_rank_and_names_files_that_cannot_be_read(tmp_path):
    for one in (answer(0, collective(2), waiting=1), answer(1, collective(1))):
        (tmp_path / f"hang-rank{one['rank']}.json").write_text(json.dumps(one | {"host": f"h{one['rank']}"}))
    (tmp_path / "hang-rank2.json").write_text("[1")
    reports = hang_report.read_reports(tmp_path)
    assert sorted(reports.by_rank) == [0, 1] and "hang-rank2.json: JSONDecodeError" in reports.unreadable[0]
    head, *rows = hang_report.table(reports)
    assert head.split()[:4] == ["rank", "host", "process", "is"] and len(rows) == 6
    assert rows[0].split() == ["0", "h0", "10", "all_reduce", "2", "98", "1", "2", "x.py:1", "in", "f"]
    assert rows[1].split() == ["1", "h1", "11", "no", "collective", "all_reduce", "1", "x.py:1", "in", "f"]
    assert rows[2].split() == ["2", "has", "not", "answered"] and rows[4] == "missing: rank 1, rank 2"
