"""All that needs a GPU, part by part, from a checkout without installation; each part writes its table when it has it.

    bash benchmarks/gpu/run.sh                             # at most 9 minutes; call it again to go on
    bash benchmarks/gpu/run.sh --only models-7,curve       # parts, or steps of a part
    bash benchmarks/gpu/run.sh --again --only adam         # once more, though it was done
    bash benchmarks/gpu/run.sh --device cpu --toy          # tiny models, to see that all of it runs; minutes

Parts: tests, chapters, equal, adam, models, curve (parts.py says what each shows). A part is a step or several; a step is
one program. What was done is skipped by the next call. What failed leaves its output in gpu_STEP_failed.txt, is tried again
by the next call, and stops no other step. A step starts only if the time left is enough for it; the others are named at the
end.

Tables are written to benchmarks/results, and the state to runs/gpu, where git ignores it. A toy writes to --output only.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
REPO = HERE.parents[1]
sys.path[:0] = [str(HERE), str(HERE.parent), str(REPO)]
from command_line import parser_of  # noqa: E402
from common import check_device, end_with_parent  # noqa: E402
from parts import PARTS, Step, select, steps  # noqa: E402

RESULTS, STATE = HERE.parent / "results", REPO / "runs" / "gpu"
SECONDS_BETWEEN_LINES = 20
SPARE_S = 10
"""Kept of the whole time, for the tables and the summary."""
PATIENCE = 4
"""A step is ended after so many times the minutes that it should take."""


def say(line: str) -> None:
    print(f"gpu: {line}", flush=True)


@dataclass
class Memory:
    """The finished steps, written to disk after every step.

    Attributes:
        folder: of the steps' tables, logs and state.
        how: the device and size of the steps; a folder holds those of one kind only.
        steps: {name: {"result": "started", "ran" or "failed", "tries", and after its end "seconds" and "date"}}.
    """

    folder: Path
    how: str
    steps: dict[str, dict] = field(default_factory=dict)

    @property
    def file(self) -> Path:
        return self.folder / "state.json"

    def load(self) -> str | None:
        """Reads the state of earlier calls; returns their kind if it is another."""
        if not self.file.exists():
            return None
        state = json.loads(self.file.read_text(encoding="utf-8"))
        self.steps = state["steps"]
        return state["how"] if state["how"] != self.how else None

    def note(self, name: str, result: str, **more: object) -> None:
        tries = self.steps.get(name, {}).get("tries", 0) + (result == "started")
        self.steps[name] = {"result": result, "tries": tries, **more}
        text = json.dumps({"how": self.how, "steps": self.steps}, indent=1) + "\n"
        staging = self.file.with_suffix(".new")    # a call may be killed at any moment
        staging.write_text(text, encoding="utf-8")
        os.replace(staging, self.file)

    def is_done(self, name: str) -> bool:
        return self.steps.get(name, {}).get("result") == "ran"

    def tries(self, name: str) -> int:
        return self.steps.get(name, {}).get("tries", 0)


@contextlib.contextmanager
def ending(process: subprocess.Popen) -> Iterator[None]:
    """Ends the process and those that it started, whatever happens inside."""
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def run_step(step: Step, log: Path, limit_s: float) -> int | None:
    """Runs one step with its output in `log`; prints a line now and then. Returns its status; None: ended at the limit.

    The step has a process group, which ends as a whole.
    """
    begin = time.monotonic()
    next_line = begin + SECONDS_BETWEEN_LINES
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    with open(log, "w", encoding="utf-8") as output:
        process = subprocess.Popen([sys.executable, *step.command], stdout=output, stderr=subprocess.STDOUT, cwd=REPO,
                                   env=environment, process_group=0, preexec_fn=end_with_parent)
    with ending(process):
        while time.monotonic() < begin + limit_s:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.wait(timeout=min(1.0, limit_s))
            if time.monotonic() >= next_line:
                next_line += SECONDS_BETWEEN_LINES
                say(f"  {step.name}: {time.monotonic() - begin:.0f} s  {last_line(log)}"[:120])
    return None


def last_line(log: Path) -> str:
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return lines[-1].strip() if lines else ""


def carry_out(step: Step, memory: Memory, limit_s: float) -> str:
    """Runs a step and notes its result; returns it in words. The output of one that failed is kept in a file of its own."""
    begin, log = time.monotonic(), memory.folder / f"{step.name}.log"
    failed = memory.folder / f"gpu_{step.name}_failed.txt"
    memory.note(step.name, "started")
    status = run_step(step, log, limit_s)
    seconds, date = time.monotonic() - begin, datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    memory.note(step.name, "ran" if status == 0 else "failed", seconds=round(seconds, 1), date=date)
    if status == 0:
        failed.unlink(missing_ok=True)
        return f"ran in {seconds:.0f} s"
    why = f"ended at its limit of {limit_s:.0f} s" if status is None else f"failed with status {status}"
    output = hidden(log.read_text(encoding="utf-8", errors="replace"))
    failed.write_text(f"{date}: {step.name} {why}\n\n{output}", encoding="utf-8")
    return f"{why} after {seconds:.0f} s: {failed.name}"


def hidden(text: str) -> str:
    """Without the paths of this machine."""
    home = Path.home()
    return text.replace(str(REPO), ".").replace(str(home), "~" if home.name else str(home))


def publish(folder: Path, results: Path | None) -> None:
    """Copies the tables and the outputs of failed steps to the results."""
    if results is None:
        return
    results.mkdir(parents=True, exist_ok=True)
    for file in sorted(folder.glob("gpu_*")):
        shutil.copyfile(file, results / file.name)
    for old in results.glob("gpu_*_failed.txt"):
        if not (folder / old.name).exists():
            old.unlink()


def run_all(wanted: list[Step], memory: Memory, minutes: float, again: bool, results: Path | None) -> int:
    """Runs the steps that were not done, those that were tried least first; prints the summary. Returns 1 if one failed."""
    end = time.monotonic() + 60 * minutes
    told = {step.name: f"done before, {memory.steps[step.name]['date']}" for step in wanted
            if memory.is_done(step.name) and not again}
    waiting = sorted((step for step in wanted if step.name not in told), key=lambda step: memory.tries(step.name))
    status = 0
    try:
        for number, step in enumerate(waiting, 1):
            left = end - time.monotonic() - SPARE_S
            if left <= 60 * step.minutes:
                told[step.name] = f"left out: needs about {60 * step.minutes:.0f} s, {max(0, left):.0f} s were left"
                continue
            say(f"[{number}/{len(waiting)}] {step.name}; {left / 60:.1f} minutes left")
            limit = min(left, 60 * PATIENCE * step.minutes) if step.minutes else left
            told[step.name] = "interrupted"
            told[step.name] = carry_out(step, memory, limit)
            status = max(status, int(memory.steps[step.name]["result"] == "failed"))
            publish(memory.folder, results)
            say(f"  {step.name} {told[step.name]}")
    finally:
        say("summary")
        width = max(len(step.name) for step in wanted)
        for step in wanted:
            say(f"  {step.name:{width}}  {told.get(step.name, 'not begun')}")
        say(f"tables and outputs: {results or memory.folder}")
    return status


def parse(argv: list[str]) -> argparse.Namespace:
    """Parses the command line; an error prints one line and exits with status 2."""
    parser = parser_of("run.sh", __doc__)
    parser.add_argument("--minutes", type=float, default=9, help="for the whole call (default: 9)")
    parser.add_argument("--only", default=",".join(PARTS), help="parts or steps, with commas between (default: all parts)")
    parser.add_argument("--again", action="store_true", help="run what was done, too")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cuda or cpu (default: cuda)")
    parser.add_argument("--toy", action="store_true", help="tiny models")
    parser.add_argument("--output", type=Path, help="folder of the tables (default: benchmarks/results, or a new one)")
    parser.add_argument("--list", action="store_true", help="name the steps and end")
    options = parser.parse_args(argv)
    options.only = [name.strip() for name in options.only.split(",") if name.strip()]
    every = steps(options.device, options.toy, Path())
    if options.list:
        print("\n".join(step.name for step in select(every, options.only)))
        raise SystemExit(0)
    for name in options.only:
        if not select(every, [name]):
            parser.error(f"--only {name}: not known; choose from {', '.join(PARTS)}, or a step that --list names")
    if not options.minutes > 0:
        parser.error("--minutes must be above 0")
    if options.device == "cpu" and not options.toy:
        parser.error("--device cpu needs --toy: the real sizes need a GPU")
    if options.toy and options.output is not None and options.output.resolve() == RESULTS:
        parser.error("--output: a toy's numbers do not belong into benchmarks/results; give another folder")
    check_device(parser, options.device, "--device cpu --toy")
    return options


def main(argv: list[str]) -> int:
    """Runs what is left to do. Returns 1 if a step failed."""
    options = parse(argv)
    if options.toy:
        folder, results = options.output or Path(tempfile.mkdtemp(prefix="gpu_toy_")), None
    else:
        folder, results = STATE, options.output or RESULTS
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    memory = Memory(folder, f"{options.device}{' toy' if options.toy else ''}")
    if other := memory.load():
        print(f"error: {folder} has results of {other}; give another --output", file=sys.stderr)
        return 2
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))    # the step under way ends, too
    say(f"writing to {results or folder}")
    publish(folder, results)
    try:
        return run_all(select(steps(options.device, options.toy, folder), options.only), memory, options.minutes,
                       options.again, results)
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
