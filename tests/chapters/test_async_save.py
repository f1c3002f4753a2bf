"""--async-save writes the bits that an ordinary save writes, and changes no loss."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpt2_chinese.checkpoint.load import load
from tests.chapters.inside import train
from tests.chapters.program import Chapter

# The first two name the flags; .metadata has a new id in every save.
DIFFER = {"state.json", "manifest.json", "parts/.metadata", "parts/manifest.json"}
CASES = [("00_single", 1), ("02_ddp", 2), ("05_model_parallel", 2), ("06_zero", 2), ("07_patrickstar", 2)]


@pytest.mark.parametrize(("name", "nproc"), CASES)
def test_the_bits_are_those_of_an_ordinary_save(ranks, tmp_path: Path, name: str, nproc: int) -> None:
    flags = ("--max-steps", 5, "--eval-every", 100, "--save-every", 2)
    chapters = [Chapter(name, tmp_path / how) for how in ("ordinary", "background")]
    for chapter, more in zip(chapters, ([], ["--async-save"]), strict=True):
        chapter.folder.mkdir()
        train(ranks, nproc, chapter, *flags, *more)
    ordinary, background = (chapter.output / "checkpoints" for chapter in chapters)
    for step in (2, 4, 5):
        ours, theirs = (load(folder / f"step_{step:06d}") for folder in (background, ordinary))
        assert set(ours[0]) == set(theirs[0]) and set(ours[1]) == set(theirs[1]) and ours[2]["step"] == step
        for one, other in zip(ours[:2], theirs[:2], strict=True):
            assert all(one[key].equal(other[key]) for key in other)
        for file in (ordinary / f"step_{step:06d}").rglob("*"):
            written = background / file.relative_to(ordinary)
            assert written.exists()
            if file.is_file() and str(file.relative_to(ordinary / f"step_{step:06d}")) not in DIFFER:
                assert written.read_bytes() == file.read_bytes(), file
    assert chapters[0].losses() == chapters[1].losses()
