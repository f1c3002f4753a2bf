"""benchmarks/gpu/run.sh: what it does first, again, later and never; and all of it with toys, where nothing is installed."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.benchmarks import bare
from tests.harness.pool import start_process
from tests.limits import HANGS_S, wait_until

REPO = Path(__file__).parents[2]
HERE = REPO / "benchmarks" / "gpu"
sys.path[:0] = [str(HERE), str(HERE.parent)]
import cuda_tests  # noqa: E402
import parts  # noqa: E402
import run_parts  # noqa: E402
from parts import Step  # noqa: E402
from run_parts import Memory, run_all  # noqa: E402

FOREVER_S = 10 * HANGS_S    # longer than a test waits for the end of a process


def step(name: str, code: str = "", minutes: float = 0.0) -> Step:
    """A program without torch."""
    return Step(name, ("-S", "-c", code), minutes)


@pytest.fixture
def memory(tmp_path: Path) -> Memory:
    return Memory(tmp_path, "cpu toy")


def again(memory: Memory) -> Memory:
    """As the next call reads it."""
    found = Memory(memory.folder, memory.how)
    assert found.load() is None
    return found


def writes(folder: Path, name: str) -> str:
    """Code that appends a name to a file."""
    return f"open({str(folder / 'order')!r}, 'a').write('{name} ')\n"


# ---- one call and the next


def test_a_failure_stops_nothing_and_what_was_done_is_skipped(memory, tmp_path, capsys):
    wanted = [step("tests", writes(tmp_path, "tests") + "int('nothing')"), step("adam", writes(tmp_path, "adam"))]
    assert run_all(wanted, memory, 9, False, None) == 1
    assert (tmp_path / "order").read_text() == "tests adam "
    text = (tmp_path / "gpu_tests_failed.txt").read_text()
    assert "tests failed with status 1" in text and "Traceback" in text and "invalid literal for int()" in text
    assert re.search(r"  tests  failed with status 1 after \d+ s: gpu_tests_failed.txt\n.*  adam   ran in",
                     capsys.readouterr().out, re.S)

    repaired = [step("tests", writes(tmp_path, "tests")), wanted[1], step("equal", writes(tmp_path, "equal"))]
    assert run_all(repaired, again(memory), 9, False, None) == 0
    assert (tmp_path / "order").read_text() == "tests adam equal tests ", "what was never tried comes first"
    assert "adam   done before, 20" in capsys.readouterr().out and not (tmp_path / "gpu_tests_failed.txt").exists()
    assert run_all(repaired, again(memory), 9, True, None) == 0
    assert (tmp_path / "order").read_text().split()[4:] == ["adam", "equal", "tests"], "--again runs all of them"


def test_a_step_for_which_the_time_is_too_short_is_left_out_and_named(memory, capsys):
    assert run_all([step("models-17", "int('nothing')", 5), step("adam")], memory, 1, False, None) == 0
    out = capsys.readouterr().out
    assert re.search(r"  models-17  left out: needs about 300 s, \d+ s were left\n.*  adam       ran in", out, re.S)
    assert "models-17" not in again(memory).steps


def test_a_step_that_hangs_is_ended_with_its_children(memory, tmp_path, capsys, monkeypatch):
    note = tmp_path / "child"
    code = ("import os, subprocess, sys, time\n"
            f"sleep = [sys.executable, '-S', '-c', 'import time; time.sleep({FOREVER_S})']\n"
            f"child = subprocess.Popen(sleep)\nopen('{note}.new', 'w').write(str(child.pid))\n"
            f"os.rename('{note}.new', '{note}')\nprint('working', flush=True)\ntime.sleep({FOREVER_S})")

    class Clock:
        """An hour passes when the child is there."""

        monotonic = staticmethod(lambda: time.monotonic() + 3600 * note.exists())

    monkeypatch.setattr(run_parts, "time", Clock)
    assert run_all([step("equal", code), step("adam")], memory, 9, False, None) == 1
    assert "  adam   left out" in capsys.readouterr().out
    assert "equal ended at its limit" in (tmp_path / "gpu_equal_failed.txt").read_text()
    assert_ends(int(note.read_text()))


def hang(log: str, note: str) -> None:
    """A call with a step that hangs; the step's process number is written to note."""
    code = f"import os, time\nopen({note!r} + '.new', 'w').write(str(os.getpid()))\nos.rename({note!r} + '.new', {note!r})\n"
    run_parts.run_step(step("equal", f"{code}time.sleep({FOREVER_S})"), Path(log), FOREVER_S)


def test_a_step_ends_with_a_call_that_is_killed(tmp_path):
    note = tmp_path / "note"
    call = start_process(hang, str(tmp_path / "log"), str(note))
    wait_until(note.exists, "the step has begun", call.is_alive)
    call.kill()
    call.join()
    assert_ends(int(note.read_text()))


def assert_ends(pid: int) -> None:
    """Waits for the end of a process, which its parent may not have read yet."""
    status = Path(f"/proc/{pid}/stat")

    def ended() -> bool:
        try:
            return status.read_text().rpartition(")")[2].split()[0] == "Z"
        except (FileNotFoundError, ProcessLookupError):
            return True

    wait_until(ended, f"process {pid} has ended")


def test_a_call_that_is_ended_says_so_and_the_next_one_goes_on(memory, capsys, monkeypatch):
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        with pytest.raises(SystemExit):
            ends = step("equal", "import os, time\nos.kill(os.getppid(), 15)\ntime.sleep(99)")
            run_all([step("adam"), ends, step("tests")], memory, 9, False, None)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert re.search(r"adam   ran in .*equal  interrupted\n.*tests  not begun\n", capsys.readouterr().out, re.S)
    found = again(memory)
    assert found.is_done("adam") and not found.is_done("equal") and found.tries("equal") == 1


def test_tables_are_published_after_each_step_and_name_no_folder_of_this_machine(memory, tmp_path):
    results, state = tmp_path / "results", Memory(tmp_path / "state", "cuda")
    state.folder.mkdir()
    table = f"open({str(state.folder / 'gpu_adam.md')!r}, 'w').write('table')"
    looks = f"import os, sys\nsys.exit(sorted(os.listdir({str(results)!r})) != ['gpu_adam.md'])"
    fails = f"raise OSError({str(REPO / 'x')!r})"
    assert run_all([step("adam", table), step("equal", looks), step("tests", fails)], state, 9, False, results) == 1
    assert sorted(file.name for file in results.iterdir()) == ["gpu_adam.md", "gpu_tests_failed.txt"]
    assert str(REPO) not in (results / "gpu_tests_failed.txt").read_text()
    assert run_all([step("tests")], again(state), 9, False, results) == 0
    assert [file.name for file in results.iterdir()] == ["gpu_adam.md"]


# ---- the command line and the list of steps


@pytest.mark.parametrize("flags, message", [
    (["--device", "cpu"], "--device cpu needs --toy: the real sizes need a GPU"),
    (["--toy", "--device", "cpu", "--output", str(HERE.parent / "results")], "--output: a toy's numbers do not belong"),
    (["--only", "models,fast"], "--only fast: not known; choose from tests, chapters, equal, adam, models, curve, or a"),
    (["--only", "mod"], "--only mod: not known"),
    (["--minutes", "0"], "--minutes must be above 0"),
    (["--hours", "1"], "unrecognized arguments: --hours 1"),
])  # fmt: skip
def test_a_wrong_flag_is_one_line(flags, message, capsys):
    with pytest.raises(SystemExit) as ended:
        run_parts.parse(flags)
    out, err = capsys.readouterr()
    assert ended.value.code == 2 and not out and err.startswith(f"error: {message}") and err.count("\n") == 1


def test_results_of_another_kind_are_not_continued(tmp_path, capsys):
    Memory(tmp_path, "cuda").note("adam", "ran")
    assert run_parts.main(["--toy", "--device", "cpu", "--output", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"error: {tmp_path} has results of cuda; give another --output\n"


def test_the_steps_cover_all_parts_and_sizes():
    every = parts.steps("cuda", False, Path("runs"))
    names = [each.name for each in every]
    assert len(set(names)) == len(names) and {name.partition("-")[0] for name in names} == set(parts.PARTS)
    assert {each.name for each in parts.select(every, ["models-1.5", "curve"])} == {
        "models-1.5-pstar-pstar-all-plain", "models-1.5-fsdp2", "curve-1.5-8", "curve-1.5-12", "curve-7-24", "curve-7-40",
        "curve-7-80"}
    for billions in ("1.5", "7", "13", "17"):
        beside = " ".join(shlex.join(each.command) for each in parts.select(every, [f"models-{billions}"]))
        assert "pstar" in beside and "fsdp2" in beside
    assert all(0 < each.minutes <= 8 for each in every), "a call has nine minutes"
    assert all("--quick" in each.command and not each.minutes for each in parts.steps("cpu", True, Path("runs")))


def test_all_files_with_tests_that_need_a_gpu_are_found():
    found = cuda_tests.files()
    assert set(found) == {"tests/pstar/kernels/test_adam_cuda.py", "tests/pstar/memory/test_activation_peak.py",
                          "tests/pstar/test_engine_on_gpu.py", "tests/chapters/test_gpu_bits.py"}
    assert all((REPO / file).exists() for file in found)


def test_failed_and_skipped_tests_are_counted(tmp_path):
    report = tmp_path / "report.xml"
    report.write_text('<testsuites><testsuite><testcase classname="a" name="x" time="1.5"/><testcase classname="a" name="y">'
                      '<failure>no</failure></testcase><testcase classname="b" name="z"><skipped/></testcase>'
                      "</testsuite></testsuites>")
    counts, failed = cuda_tests.rows(report)
    assert failed == ["a::y"]
    assert counts == {"a": {"passed": 1, "failed": 1, "seconds": 1.5}, "b": {"skipped": 1, "seconds": 0}}


# ---- where nothing is installed


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bare.environment(tmp_path_factory.mktemp("bare"))


def documented() -> list[str]:
    """The commands of benchmarks/gpu in the pages, the changelog and the programs themselves, without a CPU's."""
    files = [*REPO.glob("*.md"), *REPO.glob("docs/*/**/*.md"), *HERE.glob("*.py"), *HERE.glob("*.sh")]
    texts = [path.read_text(encoding="utf-8") for path in files]
    found = {match.strip() for text in texts for match in re.findall(r"(?:python|bash) benchmarks/gpu/[^#`\n\[]*", text)}
    return sorted(command for command in found if "--device cpu" not in command)


def test_each_documented_command_ends_in_one_line_without_a_gpu(python, tmp_path):
    commands = documented()
    assert len(commands) >= 9 and any("run.sh" in command for command in commands)
    words = [shlex.split(command.replace("run.sh", "run_parts.py"))[1:] for command in commands]
    programs = [[str(REPO / program), *flags] for program, *flags in words]
    small = [str(HERE / "adam.py"), "--quick", "--device", "cpu", "--numel", "2000", "--rounds", "1", "--results", "."]
    *answers, last = bare.run_as_programs(python, [*programs, small], tmp_path)
    assert last[0] == 0 and last[1].startswith("# Adam on a GPU\n"), last    # and pstar is found
    for command, answer in zip(commands, answers, strict=True):
        status, out, err = answer
        assert (status, out) == (2, ""), (command, answer)
        assert re.fullmatch(r"error: --device cuda needs a GPU [^\n]*\n", err), (command, answer)


def toy(python: Path, output: Path, *flags: str) -> tuple[int, str]:
    """(status, output) of run.sh with toys, from another folder."""
    command = ["bash", HERE / "run.sh", "--toy", "--device", "cpu", "--minutes", "90", "--output", output, *flags]
    done = subprocess.run(command, cwd=output.parent, env=bare.variables() | {"PYTHON": str(python)}, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=HANGS_S * 4)
    return done.returncode, done.stdout


def test_a_part_runs_as_a_toy(python, tmp_path):
    status, text = toy(python, tmp_path / "toy", "--only", "adam")
    assert status == 0 and "adam  ran in" in text, text
    page = (tmp_path / "toy" / "gpu_adam.md").read_text()
    assert "bit for bit the CPU kernel's results" in page and page.count("\n| ") == 10 and str(tmp_path) not in page
    for fact in ("- device: ", "- versions: torch ", "- date: 20", "- command: `python benchmarks/gpu/adam.py --device cpu"):
        assert fact in page


def rows_of_models(page: str) -> bool:
    rows = {who: page.count(f"| {who} |") for who in ("pstar", "fsdp2", *parts.VARIANTS, *parts.COMPILED)}
    return rows == dict.fromkeys(rows, 1) | {"pstar": 4, "fsdp2": 4, "plain": 3, "pstar-all": 3}


HOLDS = {
    "tests": lambda page: re.search(r"\| tests.pstar.kernels.test_adam_cuda \| 0 \| 0 \| \d+ \|", page),
    "chapters": lambda page: "**" not in page and page.count("| same bits |") >= 10,
    "equal": lambda page: page.count("| equal | equal |") == 24 and "**" not in page,
    "adam": lambda page: "bit for bit the CPU kernel's results" in page,
    "models": rows_of_models,
    "curve": lambda page: re.findall(r"\| pstar \| \d+ x 64 \| (\d+) \|", page) == ["8", "12", "24", "40", "80"],
}
"""What the page of each part shows."""


@pytest.mark.deep
@pytest.mark.parametrize("part", parts.PARTS)    # all in one test took 400 s alone, and 600 s beside others
def test_all_steps_of_a_part_run_as_toys_and_only_once(part, python, tmp_path):
    before = sorted(path.name for path in (HERE.parent / "results").iterdir())
    status, text = toy(python, tmp_path / "toy", "--only", part)
    assert status == 0, text
    names = [each.name for each in parts.select(parts.steps("cpu", True, tmp_path), [part])]
    assert names and all(re.search(rf"  {re.escape(name)} +ran in", text) for name in names), text
    page = (tmp_path / "toy" / f"gpu_{part}.md").read_text()
    assert all(fact in page for fact in ("- versions: torch ", "- date: 20", "- command: `python benchmarks/gpu/"))
    assert str(tmp_path) not in page and HOLDS[part](page), page
    status, text = toy(python, tmp_path / "toy", "--only", part)
    assert status == 0 and text.count("done before") == len(names)
    assert before == sorted(path.name for path in (HERE.parent / "results").iterdir()), "a toy's numbers are no results"
    assert json.loads((tmp_path / "toy" / "state.json").read_text())["how"] == "cpu toy"
    assert not os.path.exists(REPO / "runs" / "gpu" / "state.json") or "toy" not in text
