"""The benchmarks of memory run and write pages with complete tables; their numbers are measured as the pages describe."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.limits import HANGS_S

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.append(str(BENCHMARKS))
import convert_memory  # noqa: E402
import disk_model  # noqa: E402
import memory_speed  # noqa: E402
import plan_memory  # noqa: E402
import tiled_loss  # noqa: E402
import tokenise_memory  # noqa: E402


def tables(page: str) -> list[list[list[str]]]:
    """The cells of each table of a page, heading row first, without the line of dashes."""
    found: list[list[list[str]]] = [[]]
    for line in page.splitlines():
        if line.startswith("|"):
            found[-1].append([cell.strip() for cell in line.strip("|").split("|")])
        elif found[-1]:
            found.append([])
    found = [table for table in found if table]
    for table in found:
        assert {len(row) for row in table} == {len(table[0])}, table
        assert all(set(cell) <= set("-:") for cell in table.pop(1))
    return found


def number(cell: str) -> float:
    return float(cell.replace(",", ""))


def run_quick(name: str, folder: Path, pages: tuple[str, ...] = ()) -> list[list[list[str]]]:
    """The tables of all pages that a benchmark writes. By default that is one page with the benchmark's name."""
    done = subprocess.run([sys.executable, str(BENCHMARKS / f"{name}.py"), "--quick", "--results", str(folder)],
                          capture_output=True, text=True, timeout=HANGS_S)
    assert done.returncode == 0, done.stderr
    texts = [(folder / f"{page}.md").read_text(encoding="utf-8") for page in pages or (name,)]
    assert done.stdout == "".join(texts)
    assert all(f"bash benchmarks/{name}.sh --quick" in text and "- versions: torch" in text for text in texts)
    return [table for text in texts for table in tables(text)]


def test_tiled_loss(tmp_path) -> None:
    (table,) = run_quick("tiled_loss", tmp_path)
    assert [row[0] for row in table[1:]] == ["plain", "plain", "pstar", "pstar"]
    assert [row[2] for row in table[1:]] == ["none", "auto"] * 2
    assert number(table[4][7]) <= tiled_loss.PEAK_GOAL
    assert table[3][7] == "1.00" and all(number(row[3]) > 0 for row in table[1:])


@pytest.mark.deep
def test_async_save(tmp_path) -> None:
    (table,) = run_quick("async_save", tmp_path)
    assert [row[0] for row in table[1:]] == ["no save", "a save", "a save with --async-save"]
    assert table[1][2] == table[1][4] == "1.00" and all(number(cell) >= 0 for row in table[1:] for cell in row[1:])


def test_memory_speed(tmp_path) -> None:
    fits, link = run_quick("memory_speed", tmp_path, ("memory_fits", "memory_link"))
    assert [row[0] for row in fits[1:]] == ["plain", "plain-kept", "pstar", "pstar, near_memory"]
    assert all(number(row[column]) > 0 for row in fits[1:] for column in (2, 3, 5, 7))
    assert [row[2] for row in link[1:]] == list(memory_speed.VARIANTS)
    assert all(number(row[column]) > 0 for row in link[1:] for column in (0, 3, 4, 5, 6, 8, 10))
    assert number(link[1][6]) == 1, "prefetch 0 against itself"


def test_only_one_table_is_renewed(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each page states its setup: the model behind the link has a smaller vocabulary and one core less."""
    monkeypatch.setattr(memory_speed, "num_cores", lambda: 2)
    monkeypatch.setattr(memory_speed, "FULL", memory_speed.FULL | {"threads": 2})
    for name in ("fits", "link"):
        monkeypatch.setattr(memory_speed, f"{name}_table", lambda size, options: [f"{options.rounds} rounds", ""])
    fits, link = (tmp_path / f"memory_{name}.md" for name in ("fits", "link"))
    assert memory_speed.main(["--rounds", "5", "--results", str(tmp_path)]) == 0
    assert memory_speed.main(["--rounds", "6", "--only", "link", "--results", str(tmp_path)]) == 0
    assert sorted(tmp_path.iterdir()) == [fits, link]
    first, second = fits.read_text(encoding="utf-8"), link.read_text(encoding="utf-8")
    assert first.startswith("# Everything fits\n") and "5 rounds" in first and "21128" in first and "2 thread(s)" in first
    assert second.startswith("# A slow link\n") and "6 rounds" in second and "4096" in second and "1 thread(s)" in second


def test_a_row_of_the_link_shows_both_directions_and_the_same_rounds() -> None:
    class Ran:
        def __init__(self, *rounds: dict):
            self.rounds = list(rounds)

    def told(seconds: float, into: float, out: float) -> dict:
        return {"seconds": seconds, "bytes in": into, "bytes out": out, "bytes": max(into, out), "waited": 0.5,
                "updated far": 2e6}

    near = {"seconds": 1.0, "forward": 0.3, "backward": 0.5}
    base, slow = Ran(near, near), Ran(told(4.0, 1e6, 2e6), told(8.0, 1e6, 2e6))
    fast = Ran(told(3.0, 2e6, 1e6), told(6.0, 2e6, 1e6))
    cells = [cell.strip() for cell in memory_speed.link_row("2", fast, base, slow, 1e6).strip("|").split("|")]
    # twice the compute time; 4.5 s against 2 s, and against backward followed by the load, 0.5 + 2
    assert cells == ["2.00", "1", "2", "2.0", "1.0", "4.500", "0.75", "0.500", "2.25", "1.88 to 2.62", "1.80",
                     "1.50 to 2.10"]
    assert memory_speed.link_row("0", slow, base, slow, 1e6).split("|")[7:9] == [" 1.00 ", "  "], "nothing is waited for"


@pytest.mark.deep
def test_disk_model(tmp_path) -> None:
    modes, memory = run_quick("disk_model", tmp_path)
    near, disk = modes[1:]
    assert near[3] == "1.00" and near[6:] == ["0"] * 5, "with everything near nothing moves"
    assert all(number(cell) > 0 for cell in disk[3:])
    interpreter, near_budget, far_budget, activations, total = map(number, memory[1][:5])
    assert abs(interpreter + near_budget + far_budget + activations - total) <= 2
    assert number(disk[4]) <= near_budget + 1 and number(disk[5]) <= far_budget + 1
    assert "`pstar plan` predicts" in (tmp_path / "disk_model.md").read_text(encoding="utf-8")


@pytest.mark.deep
def test_plan_memory(tmp_path) -> None:
    planned, counted = run_quick("plan_memory", tmp_path)
    assert len(planned) == len(counted) == 2
    assert sum(map(number, planned[1][1:5])) == pytest.approx(number(planned[1][5]), abs=0.3)
    assert number(counted[1][3]) > 0, "activations were offloaded"
    assert planned[1][6] == counted[1][7]


@pytest.mark.deep
def test_convert_memory(tmp_path) -> None:
    (conversions,) = run_quick("convert_memory", tmp_path)
    small, large = conversions[1:]
    assert 1.9 < number(small[1]) < 2.5 and 7.9 < number(large[1]) < 9
    assert number(large[2]) > 3 * number(small[2]) > 0, "nearly no item is a copy of another"
    assert number(large[5]) == pytest.approx(number(large[4]) - number(small[4]), abs=0.11)
    assert small[3] == large[3] == "1" and number(large[5]) < 4, "6 MB more of input"


def test_a_bound_is_the_longer_of_compute_and_transfer_and_of_what_can_run_at_the_same_time() -> None:
    base = {"seconds": 10.0, "forward": 3.0, "backward": 6.0}
    told = {"bytes": 80, "updated far": 40}
    assert memory_speed.bounds(base, told, 40.0) == (10.0, 10.0), "the load hides behind forward"
    assert memory_speed.bounds(base, told, 8.0) == (10.0, 6.0 + 5.0), "it is longer than forward"
    assert memory_speed.bounds(base, told, 4.0) == (20.0, 20.0) and memory_speed.bounds(base, told, 5.0) == (16.0, 16.0)


@pytest.mark.deep
def test_tokenise_memory(tmp_path) -> None:
    (table,) = run_quick("tokenise_memory", tmp_path)
    assert [row[2] for row in table[1:]] == [*tokenise_memory.METHODS] * 2
    small, large = ([number(cell) for cell in row[:2] + row[3:]] for row in (table[1], table[4]))
    assert 4 < large[0] < 5.5 and large[1] > 2 * small[1] and all(cell > 0 for cell in small + large)


def test_memory_that_grows_and_a_low_rate_are_marked() -> None:
    small = {"method": "gpt2_chinese", "bytes": 10**9, "peak": 10**8, "seconds": 10.0, "tokens": 5, "processes": 3}
    peer = {**small, "method": "encode_batch", "peak": 1}
    flat = tokenise_memory.report([small, peer, {**small, "peak": 1.2e8}, peer], [])
    assert flat.count(": yes") == 3 and "**no**" not in flat
    grown = tokenise_memory.report([small, peer, {**small, "peak": 1.3e8, "seconds": 31.0}, peer], [])
    assert grown.count("**no**") == 2


def test_losses_that_differ_end_the_program() -> None:
    class Ran:
        def __init__(self, name: str, *losses: float):
            self.name, self.losses = name, list(losses)

    memory_speed.same_losses([Ran("a", 2.0, 1.0), Ran("b", 2.0, 1.0)])
    with pytest.raises(SystemExit, match="error: step 1: b computes the loss 1.5, a 1.0"):
        memory_speed.same_losses([Ran("a", 2.0, 1.0), Ran("b", 2.0, 1.5)])


def test_a_plan_that_is_off_is_marked() -> None:
    assert plan_memory.share(104, 100) == "104.0%" and plan_memory.share(94, 100) == "94.0%, **off**"


def test_the_parameters_of_the_large_model_are_those_of_its_budgets() -> None:
    assert disk_model.num_params(disk_model.FULL) == pytest.approx(disk_model.FULL_PARAMS, rel=0.01)


@pytest.mark.parametrize("program, flags, message", [
    (memory_speed, ["--rounds", "0"], "argument --rounds: 0: give at least 1"),
    (memory_speed, ["--only", "disk"], "argument --only: invalid choice"),
    (disk_model, ["--disk-path", "no/such/folder"], "--disk-path no/such/folder: there is no such folder"),
    (disk_model, ["--runs", "0"], "argument --runs: 0: give at least 1"),
    (convert_memory, ["--quik"], "unrecognized arguments: --quik"),
    (tokenise_memory, ["--megabytes", "10", "5"], "--megabytes must be two or more numbers above 0, the smallest first"),
    (plan_memory, ["--quik"], "unrecognized arguments: --quik"),
])
def test_a_wrong_flag_is_one_line(program, flags, message, capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        program.parse(flags)
    error = capsys.readouterr().err
    assert ended.value.code == 2 and error.startswith(f"error: {message}") and error.count("\n") == 1
