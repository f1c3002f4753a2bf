"""The pages of basics: every program runs, is short, and prints what the page shows; the pictures show the same."""

from __future__ import annotations

import re

import pytest

from tests.docs.pages import LANGUAGES, ROOT

PROGRAMS = {path.stem: path.read_text(encoding="utf-8") for path in (ROOT / "docs/programs").glob("*.py")}
PAGES = {path: path.read_text(encoding="utf-8") for path in ROOT.glob("docs/*/basics/*.md")}
LONGER = {"profile_ddp": 42}  # lines; it has two variants and a profiler
WHOLE = [1111, 2222, 3333, 4444]
# The correct result of each collective by rank: computed here, not by the programs.
AFTER = {
    "broadcast": [[1, 2, 3, 4]] * 4,
    "reduce": [WHOLE, [], [], []],
    "all_reduce": [WHOLE] * 4,
    "gather": [[1, 2, 3, 4], [], [], []],
    "all_gather": [[1, 2, 3, 4]] * 4,
    "scatter": [[n] for n in (1, 2, 3, 4)],
    "reduce_scatter": [[n] for n in WHOLE],
    "all_to_all": [[n * 10**rank for rank in range(4)] for n in (1, 2, 3, 4)],
    "send_recv": [[1, 2, 3, 4]] * 4,
}


@pytest.fixture(scope="module")
def docs():
    """docs/generate/build.py, with the modules that it imports."""
    from docs.generate import build

    return build


@pytest.fixture(scope="module")
def said(docs) -> dict[str, str]:
    """The output of all programs: two starts, and three programs in their own process, once for all tests of a checkout."""
    return docs.programs.outputs()


def test_every_program_is_on_a_page_with_its_output() -> None:
    for language in LANGUAGES:
        text = "\n".join(page for path, page in PAGES.items() if language in path.parts)
        assert sorted(re.findall(r'"file/docs/programs/(\w+)\.py\.md"', text)) == sorted(PROGRAMS)
        assert sorted(re.findall(r'"ran/(\w+)\.md"', text)) == sorted(PROGRAMS)


@pytest.mark.parametrize("name", sorted(PROGRAMS))
def test_a_program_has_few_lines(docs, name: str) -> None:
    assert docs.programs.command_of(name)
    lines = [line for line in PROGRAMS[name].splitlines()[1:] if line.strip()]
    assert len(lines) <= LONGER.get(name, 15)


@pytest.mark.parametrize("name", AFTER)
def test_a_collective_gives_the_result_of_its_definition(docs, said: dict[str, str], name: str) -> None:
    after = [[int(cell) for cell in cells] for _, cells in docs.collectives.rows_of(said[name])]
    assert after == AFTER[name]


def test_every_collective_has_a_picture_of_its_output(docs, said: dict[str, str]) -> None:
    assert set(docs.collectives.KINDS) == set(AFTER)
    for language in LANGUAGES:
        words = docs.Words(language)
        for name in AFTER:
            drawn = re.findall(r">(\d+)</text>", docs.collectives.collective(words, name, said[name]))
            rows = docs.collectives.rows_of(said[name])
            assert drawn == [cell for both in rows for cells in both for cell in cells]
        assert docs.collectives.barrier(words, said["barrier"]).count("<rect") > 8


def test_a_first_rank_that_arrives_late_is_drawn_without_a_label(docs) -> None:
    said = "rank 0: arrives after 0.1 s, goes on after 0.9 s\nrank 1: arrives after 0.9 s, goes on after 0.9 s\n"
    assert docs.collectives.barrier(docs.Words("en"), said).count(">at work<") == 1


def test_output_that_is_no_collective_is_not_drawn(docs) -> None:
    for wrong in ("rank 1: [1] -> [1]\n", "rank 0: [1] -> [1]\nTraceback\n", "rank 0: 1 -> 1\n"):
        with pytest.raises(SystemExit, match="no rows"):
            docs.collectives.rows_of(wrong)


def test_all_wait_at_a_barrier_for_the_last(said: dict[str, str]) -> None:
    times = (re.findall(rf"{word} after ([\d.]+) s", said["barrier"]) for word in ("arrives", "on"))
    arrive, leave = (list(map(float, found)) for found in times)
    assert len(arrive) == 4 and min(leave) >= max(arrive) >= 0.9


def test_launchers_tell_each_process_its_number(said: dict[str, str]) -> None:
    for name, num_ranks in (("hello", 4), ("launcher", 2)):
        expected = [f"rank {rank} of {num_ranks}, told " for rank in range(num_ranks)]
        lines = said[name].splitlines()
        assert [line.partition("{")[0] for line in lines] == expected
        assert all(f"'WORLD_SIZE': '{num_ranks}'" in line for line in lines)


def test_the_other_programs_print_the_numbers_of_the_pages(docs, said: dict[str, str]) -> None:
    assert "= 0.0" in said["order"] and "= 1.0" in said["order"]
    apart = [float(number) for number in re.findall(r"difference (\S+)", said["order"])]
    assert len(apart) == 2 and all(1e-9 < number < 1e-6 for number in apart)
    assert re.findall(r"(\d\.\d)", said["mean_of_means"]) == ["5.0", "6.0", "5.0"]
    assert "no 3 blocks side by side, though 6 of 12 are free" in said["holes"]
    assert re.findall(r"(\d\.\d)$", said["masters"], re.MULTILINE) == ["1.0", "2.0"]
    assert "fp16:              0.0\n" in said["underflow"] and " inf " in said["underflow"]
    kept = float(re.search(r"([\d.]+) per token", said["saved"])[1])
    assert 4 * sum(docs.basics.KEPT.values()) <= kept < 4 * sum(docs.basics.KEPT.values()) * 1.01
    peaks = [int(number) for number in re.findall(r"^ *(\d+) MiB", said["peak"], re.MULTILINE)]
    assert len(peaks) == 4 and peaks == sorted(peaks) and peaks[2] > peaks[1]
    assert len(re.findall(r"\d\.\d s$", said["start_cost"], re.MULTILINE)) == 3
