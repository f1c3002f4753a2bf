"""The pages as written: commands and paths exist, both languages have the same pages, nothing points outside."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs import pages
from tests.docs.pages import ROOT

WRITTEN = sorted([*ROOT.glob("docs/*/**/*.md"), *ROOT.glob("README*.md"), *ROOT.glob("chapters/*/README.md"),
                  ROOT / "CONTRIBUTING.md", ROOT / "data/README.md"])  # fmt: skip
WRITTEN = [path for path in WRITTEN if "_generated" not in path.parts]
names = pytest.mark.parametrize("page", WRITTEN, ids=lambda path: str(path.relative_to(ROOT)))


@names
def test_every_command_exists(page: Path) -> None:
    problems = [one for command in pages.commands(page.read_text()) for one in pages.wrong_with_command(command)]
    assert not problems, "\n".join(["", *problems])


@names
def test_every_command_works_in_a_new_shell(page: Path) -> None:
    assert not pages.not_in_a_fresh_shell(page.read_text())


@names
def test_every_path_exists(page: Path) -> None:
    assert not pages.missing_paths(page.read_text())


@names
def test_nothing_points_to_the_authors_machine(page: Path) -> None:
    assert not pages.beyond_the_repository(page.read_text())


@names
def test_chinese_is_not_broken_into_lines(page: Path) -> None:
    if page.suffixes[0] == ".zh" or "zh" in page.parts:
        assert not pages.broken_chinese_lines(page.read_text())


def test_the_builders_of_the_site_load_nothing_from_outside() -> None:
    for path in [ROOT / "mkdocs.yml", *ROOT.glob("docs/*.*")]:
        assert not pages.beyond_the_repository(path.read_text()), path


def test_there_are_commands_to_check() -> None:
    found = [command for page in WRITTEN for command in pages.commands(page.read_text())]
    assert len(found) > 30 and "bash chapters/07_patrickstar/train.sh" in found


def test_each_chapter_has_a_page_in_both_languages() -> None:
    chapters = {path.parent.name for path in ROOT.glob("chapters/*/train.py")}
    for language in pages.LANGUAGES:
        assert {path.stem for path in ROOT.glob(f"docs/{language}/chapters/*.md")} == chapters


def test_both_languages_are_written_from_the_same_fragments() -> None:
    for page in ROOT.glob("docs/zh/**/*.md"):
        other = Path(str(page).replace("/docs/zh/", "/docs/en/"))
        wanted = [[line.strip().replace('"en/', '"zh/') for line in one.read_text().splitlines() if "--8<--" in line]
                  for one in (page, other)]  # fmt: skip
        blocks = [[c.split("#")[0].strip() for c in pages.commands(one.read_text())] for one in (page, other)]
        assert wanted[0] == wanted[1] and blocks[0] == blocks[1], page


# ---- the checks can fail


@pytest.mark.parametrize("command, complaint", [
    ("bash chapters/07_patrickstar/train.sh --near-budgett 1GiB", "--near-budgett is in no --help"),
    ("bash chapters/00_single/train.sh --near-budget 25%", "--near-budget is in no --help"),
    ("OMP_NUM_THREADS=1 bash chapters/99_none/train.sh", "there is no chapters/99_none/train.sh"),
    ("bash chapters/00_single/generate.sh --prompts 今天", "--prompts is in no --help"),
    ("srun --nodes=2 bash -c 'RANK=$SLURM_PROCID bash chapters/99_none/train.sh'", "there is no chapters/99_none/train.sh"),
    ("srun --nodes=2 bash chapters/00_single/train.sh --near 1", "--near is in no --help"),
    ("python -m pstar.none", "there is no module pstar.none"),
    ("python data/split.py a.json --trian x", "--trian is in no --help"),
    ('pip install -e ".[doc]"', "there is no extra doc"),
    ("conda env create -f environments.yml", "there is no environments.yml"),
    ("bash scripts/tensorboard.sh --port 6006", "the run's folder is missing"),
    ("bash scripts/pstar.sh configure", "no command configure"),
    ("bash scripts/pstar.sh trace profile.json --output x", "--output is in no --help"),
    ("bash scripts/python.sh data/spilt.py x", "there is no data/spilt.py"),
    ("bash scripts/torchrun.sh --nproc-per-node 2 chapters/99_none/train.py", "torchrun without a script"),
    ("pytest tests/exercise -k 02", "there is no tests/exercise"),
    ("docker push gpt2-chinese", "neither builds nor runs Dockerfile"),
    ("make all", "make is no program that the pages know"),
])  # fmt: skip
def test_a_wrong_command_is_found(command: str, complaint: str) -> None:
    text = f"Prose.\n\n```bash\n# a comment\n{command}   # why\n```\n"
    assert pages.commands(text) == [f"{command}   # why"]
    (problem,) = pages.wrong_with_command(command)
    assert complaint in problem


def test_commands_in_a_list_and_in_prose_are_seen() -> None:
    text = "1. Do\n\n    ```bash\n    bash a.sh\n    ```\n\nor `bash b.sh --x` or `bash` alone.\n\n```text\nbash c.sh\n```\n"
    assert pages.commands(text) == ["bash a.sh", "bash b.sh --x"]


def test_a_command_of_an_active_environment_is_found() -> None:
    block = "```bash\n{}\n```\nor `pstar plan`\n"
    for command in ("pytest tests", "python -m x", "tensorboard --logdir x", "pstar config", "A=1 B=\"x y\" torchrun x.py"):
        assert pages.not_in_a_fresh_shell(block.format(command))
    assert not pages.not_in_a_fresh_shell(block.format("A=1 B=\"x y\" bash x.sh"))


def test_a_wrong_path_and_a_machine_path_are_found() -> None:
    text = "See `pstar/chunk.py` and `pstar/memory/tier.py` and `mine/x`."
    assert pages.missing_paths(text) == ["there is no pstar/chunk.py"]
    assert pages.beyond_the_repository("as ../shared/design says") == ["../shared/design"]
    assert pages.beyond_the_repository("open /home/me/x.txt") == ["/home/me/x.txt"]
    assert not pages.beyond_the_repository("`docs/tmp/x` and https://example.org/home/x")


def test_a_broken_chinese_line_is_found() -> None:
    assert pages.broken_chinese_lines("第一行，\n第二行。") and not pages.broken_chinese_lines("一段。\n\n又一段 a\nb 完。")
