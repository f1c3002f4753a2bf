"""Says who waits for whom when a job hangs: one file for each rank, one line for all, and a table of the files.

Each rank has a thread that looks every few seconds at the collectives under way on its rank:

    rank 0   in all_reduce 12, bucket 3, for 300 s    notes in the job's store that the job hangs; all threads answer there
    rank 1   in no collective, its last one was 11    its thread answers, with the stack of its main thread
    rank 2   stopped by a signal                      no answer: the others say so

Until then the thread asks the store whether another rank is late, and its sources whether this rank has begun calls. Knows
no torch: the store is any object with set, get and check.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import json
import os
import socket
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from durable.calls import NUM_CALLS, Call, Source, registered
from durable.files import write_json

FILE, FILES = "hang-rank{rank}.json", "hang-rank*.json"
LONGEST_PERIOD_S = 5.0  # between two looks
STORE_S = 10.0  # how long the store may take for one question
ANSWER_S = 10.0  # how long a rank waits for the answers of others, and two of their looks more


# ---- the thread -------------------------------------------------------------------------------------------------------


class Watch:
    """The thread of a rank that reports when a collective takes longer than `after_s`, here or on another rank.

    Args:
        store: that all ranks share, this thread's own connection to it.
        rank, num_ranks: number of this rank, and of all ranks.
        after_s: seconds in one collective.
        folder: for the file of this rank.
        end: ends this rank: called with (whether others wait for this rank, the ranks that have not answered).
        sources: in addition to the registered ones.
        advice: the last words of the line: the command that prints the table.
        save_more: writes more files into the folder, each with the given name as its beginning; returns their names.
    """

    def __init__(
        self, store: Any, rank: int, num_ranks: int, after_s: float, folder: Path, end: Callable[[bool, list[int]], Any],
        sources: Sequence[Source] = (), advice: str = "",
        save_more: Callable[[Path, str], list[str]] = lambda folder, begin: [],
    ) -> None:  # fmt: skip
        self.store, self.rank, self.num_ranks, self.after_s, self.folder = store, rank, num_ranks, after_s, Path(folder)
        self.sources, self.advice, self._end, self._save_more = sources, advice, end, save_more
        self._moved = self._looked = time.monotonic()
        self._stop, self._asking, self._warned = threading.Event(), threading.Thread(), False
        self._thread = threading.Thread(target=self._run, name="hang report", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # a thread inside of the store's code would abort the process when Python ends

    @property
    def period_s(self) -> float:
        """Seconds between two looks."""
        return min(LONGEST_PERIOD_S, self.after_s / 4)

    def close(self) -> None:
        """Ends the thread."""
        self._stop.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(self.period_s + ANSWER_S)
        atexit.unregister(self.close)

    def _run(self) -> None:
        while not self._stop.wait(self.period_s):
            if self._asked("hang") or self._is_late():
                self._report()
                return

    def _is_late(self) -> bool:
        """True if this rank waits too long. Looks closely only if it has begun no call for so long."""
        now, looked = time.monotonic(), self._looked
        self._looked = now
        was_stopped = now - looked > 2 * self.period_s + STORE_S  # by Ctrl-Z, or with the whole machine
        try:
            known = self._known()
            if sum(source.is_moving() for source in known) or was_stopped:  # asks all of them
                self._moved = now
            if now - self._moved < self.after_s:
                return False
            return any(call.began < time.time() - self.after_s for source in known for call in source.waiting())
        except Exception as error:
            if not self._warned:
                print(f"\nwarning: rank {self.rank}: --hang-after cannot look: {_words(error)}", file=sys.stderr, flush=True)
            self._warned = True
            return False

    def _known(self) -> list[Source]:
        return [*registered(), *self.sources]

    # -- the store; over a link that is cut it does not answer ------------------------------------------------------------

    def _in_time(self, ask: Callable[[], Any]) -> Any:
        """What ask() returns; None if it fails, or if the store does not answer in time, this question or one before."""
        if self._asking.is_alive():
            return None
        answer: list[Any] = []

        def run() -> None:
            with contextlib.suppress(Exception):
                answer.append(ask())

        self._asking = threading.Thread(target=run, name="hang report: store", daemon=True)
        self._asking.start()
        self._asking.join(STORE_S)
        return answer[0] if answer else None

    def _asked(self, key: str) -> bool:
        """True if the store has the key."""
        return bool(self._in_time(lambda: self.store.check([f"hang report: {key}"])))

    def _tell(self, key: str, value: str = "1") -> None:
        self._in_time(lambda: self.store.set(f"hang report: {key}", value))

    def _wait_for(self, keys: Iterable[str], seconds: float) -> list[str]:
        """The keys that the store has after at most so many seconds."""
        keys, end = list(keys), time.monotonic() + seconds
        while not (all_there := all(map(self._asked, keys))) and time.monotonic() < end:
            time.sleep(0.05)
        return keys if all_there else list(filter(self._asked, keys))

    # -- the report -------------------------------------------------------------------------------------------------------

    def _report(self) -> None:
        self._tell("hang")
        patience_s = ANSWER_S + 2 * self.period_s
        own = own_answer(self.rank, self.num_ranks, self._known())
        self._tell(f"answer {self.rank}", json.dumps(own))
        answers = {self.rank: own}
        for key in self._wait_for((f"answer {rank}" for rank in range(self.num_ranks)), patience_s):
            if text := self._in_time(functools.partial(self.store.get, f"hang report: {key}")):
                answer = json.loads(text)
                answers[answer["rank"]] = answer
        found = judge(answers, self.num_ranks)
        report = {**own, "hang_after_s": self.after_s, **found, "stacks": stacks()}
        begin = FILE.format(rank=self.rank).removesuffix(".json")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            report["more_files"] = self._save_more(self.folder, begin)
            write_json(self.folder / FILE.format(rank=self.rank), report)
        except OSError as error:
            print(f"\nwarning: rank {self.rank} cannot write its report: {error}", file=sys.stderr, flush=True)
        self._tell(f"written {self.rank}")
        self._wait_for((f"written {rank}" for rank in answers), patience_s)
        if self.rank == min(answers):
            files = f"files: {self.folder / FILES}" + (f"; {self.advice}" if self.advice else "")
            print(f"\nerror: {found['line']}; {files}", file=sys.stderr, flush=True)
            self._tell("said")
        else:
            self._wait_for(["said"], patience_s)
        if self.rank not in found["missing"]:  # when the launcher sees that this rank has ended, it kills the missing ones
            _wait_until_ended([answers[rank] for rank in found["missing"] if rank in answers])
        self._end(self.rank in found["missing"], found["silent"])


def _wait_until_ended(answers: Sequence[Mapping[str, Any]]) -> None:
    """Waits ANSWER_S at most until the ranks of these answers that run on this machine have ended, with their own status."""
    deadline = time.monotonic() + ANSWER_S
    for pid in (answer["pid"] for answer in answers if answer["host"] == socket.gethostname()):
        while not _has_ended(pid) and time.monotonic() < deadline:
            time.sleep(0.05)


def _has_ended(pid: int) -> bool:
    """True if the process has ended, even if its parent has not asked for its status yet; always where /proc is missing."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def own_answer(rank: int, num_ranks: int, sources: Sequence[Source]) -> dict[str, Any]:
    """What this rank does now, JSON-ready."""
    waiting: list[Call] = []
    recent: list[Call] = []
    errors: list[str] = []
    for source in sources:
        try:
            waiting += source.waiting()
            recent += source.recent()
        except Exception as error:
            errors.append(_words(error))
    return {
        "rank": rank,
        "num_ranks": num_ranks,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "time": time.time(),
        "waiting": [asdict(call) for call in waiting],
        "recent": [asdict(call) for call in sorted(recent, key=lambda call: call.began)[-NUM_CALLS:]],
        "numbers": {group: max(c.number for c in recent if c.group == group) for group in {c.group for c in recent}},
        "at": at(),
        "errors": errors,
    }


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def at() -> str:
    """The line of the main thread, the innermost that is not of Python or of an installed package."""
    frame = sys._current_frames().get(threading.main_thread().ident)  # type: ignore[arg-type]
    innermost = frame
    while frame is not None and is_foreign(frame.f_code.co_filename):
        frame = frame.f_back
    frame = frame or innermost
    return line_of(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name) if frame else ""


def line_of(file: str, line: int, function: str) -> str:
    """A line of a program, as the table shows it."""
    return f"{Path(file).name}:{line} in {function}"


def is_foreign(file: str) -> bool:
    """True for a file of Python or of an installed package."""
    return file.startswith((sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), "<")) or "site-packages" in file


def stacks() -> list[str]:
    """The lines of the stacks of all threads of this process, the most recent call first."""
    with tempfile.TemporaryFile() as stream:
        faulthandler.dump_traceback(stream, all_threads=True)
        stream.seek(0)
        return stream.read().decode(errors="replace").splitlines()


# ---- who waits for whom: functions of the answers ------------------------------------------------------------------------


def judge(answers: Mapping[int, Mapping[str, Any]], num_ranks: int) -> dict[str, Any]:
    """The missing ranks, those that have not answered, the first call in which ranks differ, and all of it as a line."""
    silent = [rank for rank in range(num_ranks) if rank not in answers]
    under_way = [(rank, call) for rank, answer in sorted(answers.items()) for call in calls(answer["waiting"])]
    waits = [(rank, call) for rank, call in under_way if missing_in(call, answers)] or under_way
    stuck = {rank for rank, _ in waits}
    absent = {other for _, call in waits for other in missing_in(call, answers)}
    missing = absent - stuck or absent  # a rank that waits itself is no cause, unless they wait in a circle
    differs = first_difference(answers)
    if not waits:
        line = "the job hangs: no rank that has answered is in a collective"
    else:

        def distance(wait: tuple[int, Call]) -> tuple[Any, ...]:
            """Least for the call that waits for a missing rank and for the fewest others."""
            absent = set(missing_in(wait[1], answers))
            return not absent & missing, len(absent), wait[1].began, wait[0]

        rank, call = min(waits, key=distance)
        line = f"the job hangs: rank {rank} has been in {call} for {answers[rank]['time'] - call.began:.0f} s"
        line += "".join(f"; {_absence(other, answers)}" for other in sorted(missing | set(silent)))
    if differs:
        line += f"; {differs}"
    return {"missing": sorted(missing), "silent": silent, "first_difference": differs, "line": line}


def calls(entries: Iterable[Mapping[str, Any]]) -> list[Call]:
    """Calls as read from JSON."""
    listed = ("ranks", "missing")
    return [Call(**{k: tuple(v) if k in listed and v is not None else v for k, v in entry.items()}) for entry in entries]


def missing_in(call: Call, answers: Mapping[int, Mapping[str, Any]]) -> list[int]:
    """The ranks that the call waits for: those that have not answered, or have made fewer calls in its group."""
    if call.missing is not None:
        return list(call.missing)
    return [rank for rank in call.ranks if rank not in answers or answers[rank]["numbers"].get(call.group, 0) < call.number]


def _absence(rank: int, answers: Mapping[int, Mapping[str, Any]]) -> str:
    """What a missing rank does, as text."""
    if rank not in answers:
        return f"rank {rank} is missing and has not answered: it is stopped, gone or out of reach"
    answer = answers[rank]
    if answer["waiting"]:
        return f"rank {rank} is missing: it is in {calls(answer['waiting'])[0]}, at {answer['at']}"
    last = "".join(f", its last was {call}" for call in calls(answer["recent"])[-1:])
    return f"rank {rank} is missing: it is in no collective{last}, at {answer['at']}"


def first_difference(answers: Mapping[int, Mapping[str, Any]]) -> str:
    """The first call in which two ranks of a group differ, as text; "" if none does. So a skipped call is found."""
    made: dict[tuple[str, int], dict[int, Call]] = {}
    for rank, answer in answers.items():
        for call in calls(answer["recent"]):
            if call.number:
                made.setdefault((call.group, call.number), {})[rank] = call
    for (_, number), by_rank in sorted(made.items(), key=lambda item: min(call.began for call in item[1].values())):
        first, *others = sorted(by_rank)
        for other in others:
            one, two = by_rank[first], by_rank[other]
            if (one.operation, one.what) != (two.operation, two.what):
                return f"their calls differ from number {number} on: {one} on rank {first}, {two} on rank {other}"
    return ""


# ---- the table -----------------------------------------------------------------------------------------------------------


@dataclass
class Reports:
    """The files of a hang.

    Attributes:
        folder: where they are.
        by_rank: their content.
        unreadable: names of files that are no reports, with the reason.
    """

    folder: Path
    by_rank: dict[int, dict[str, Any]] = field(default_factory=dict)
    unreadable: list[str] = field(default_factory=list)


def read_reports(folder: Path) -> Reports:
    """Reads the files of a folder."""
    found = Reports(folder)
    for path in sorted(folder.glob(FILES)):
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            calls(content["waiting"]), calls(content["recent"]), content["numbers"], content["at"], content["time"]
            found.by_rank[int(content["rank"])] = content
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            found.unreadable.append(f"{path.name}: {type(error).__name__}: {error}")
    return found


def table(reports: Reports) -> list[str]:
    """The lines of the table: one for each rank, then who is missing, and where the calls began to differ."""
    answers = reports.by_rank
    num_ranks = max((answer["num_ranks"] for answer in answers.values()), default=0)
    rows: list[Sequence[str]] = [("rank", "host", "process", "is in", "seconds", "waits for", "last call", "at")]
    for rank in range(num_ranks):
        if rank not in answers:
            rows.append((str(rank), "", "", "has not answered", "", "", "", ""))
            continue
        answer = answers[rank]
        done = [call for call in calls(answer["recent"]) if call not in calls(answer["waiting"])]
        last = str(done[-1]) if done else ""
        common = [str(rank), answer["host"], str(answer["pid"])]
        waiting: list[Call | None] = list(calls(answer["waiting"])) or [None]
        for call in waiting:
            absent = " ".join(map(str, missing_in(call, answers))) if call else ""
            seconds = f"{answer['time'] - call.began:.0f}" if call else ""
            rows.append((*common, str(call or "no collective"), seconds, absent, last, answer["at"]))
    if len({answer["host"] for answer in answers.values()}) == 1:
        rows = [(rank, *others) for rank, _, *others in rows]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    found = judge(answers, num_ranks)
    lines += ["", f"missing: {', '.join(f'rank {rank}' for rank in found['missing']) or 'no rank'}"]
    if found["first_difference"]:
        lines.append(found["first_difference"])
    more = [name for answer in answers.values() for name in answer.get("more_files", [])]
    if more:
        lines.append(f"flight recorder: {', '.join(more)}")
    stacked = ", ".join(FILE.format(rank=rank) for rank in sorted(answers))
    return [*lines, f"stacks: {stacked}"]

