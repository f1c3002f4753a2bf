"""On a GPU, with --deterministic: not one bit depends on the run, nor on where chapter 07 places its chunks."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.chapters.program import Chapter

FLAGS = ("--device", "cuda", "--nproc", 1, "--deterministic", "--max-steps", 8, "--eval-every", 100, "--save-every", 100,
         "--lr", "1e-2")  # fmt: skip


def losses(folder: Path, name: str, *flags: object) -> list[float]:
    folder.mkdir()
    chapter = Chapter(name, folder)
    chapter.train(*FLAGS, *flags)
    return chapter.losses()


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_gpu_gives_the_same_bits_again_and_in_every_placement(tmp_path: Path, precision: str) -> None:
    runs = 2 * [("00_single",)] + [("07_patrickstar", "--near-budget", budget) for budget in ("auto", "60%", "min")]
    with ThreadPoolExecutor(len(runs)) as pool:
        found = list(pool.map(lambda number: losses(tmp_path / str(number), *runs[number], "--precision", precision),
                              range(len(runs))))
    assert found[0] == found[1]
    assert found[2] == found[3] == found[4]
