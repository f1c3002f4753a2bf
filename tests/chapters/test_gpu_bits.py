"""On a GPU, with --deterministic: not one bit depends on the run, nor on where chapter 07 places its chunks."""

from __future__ import annotations

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
    plain = [losses(tmp_path / f"00 {run}", "00_single", "--precision", precision) for run in range(2)]
    assert plain[0] == plain[1]
    near = [losses(tmp_path / str(number), "07_patrickstar", "--precision", precision, "--near-budget", budget)
            for number, budget in enumerate(("auto", "60%", "min"))]  # fmt: skip
    assert near[0] == near[1] == near[2]
