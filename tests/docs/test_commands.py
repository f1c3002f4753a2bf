"""A test runs every command on a page, or this file gives the reason why not. The chapters' commands run shortened."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.chapters.horovod import needs_horovod
from tests.docs import pages, test_production, test_readme
from tests.docs.pages import ROOT

CHAPTERS = sorted(ROOT.glob("docs/en/chapters/*.md"))
OTHERS = sorted(set(ROOT.glob("docs/en/**/*.md")) - set(CHAPTERS) - set(test_production.PAGES))
SHORT = ("--max-steps 2 --warmup-steps 1 --batch-size 12 --seq-len 16 --eval-every 2 --device cpu "
         "--valid-data data/valid/comments.json")  # fmt: skip
REASONS = {  # pattern for the beginning of a command -> why no test runs it
    r"salloc|MASTER_ADDR=\S+.* srun|srun": "a Slurm cluster: by hand only, as scripts/train.sbatch, docs/captured/slurm.log",
    r"bash chapters/\w+/train\.sh .*--model-config small": "its model is for a GPU; the flags are held against --help",
    r"bash tests/run\.sh": "it is running",
    r"bash chapters/07_patrickstar/quick\.sh": "three minutes; tests/chapters/test_07_quick.py runs it with --tiny",
    r"bash benchmarks/": "minutes; tests/benchmarks and tests/chapters run them with --quick",
    r"bash scripts/python\.sh benchmarks/gpu/": "needs a GPU; tests/benchmarks runs all of them with toys on a CPU",
    r"pip install -e|conda env": "they change the environment; tests of the set-up and the extras hold them",
    r"docker |apptainer |mkdir -p runs$": "tests/fresh compares their files, and takes their steps in a new Debian",
    r"source \.venv/bin/activate": "there may be no .venv; test_setup.py makes one",
    r"pip install horovod": "the mistake that the sentence is about",
    r"bash docs/serve\.sh": "it does not end",
    r"bash scripts/tensorboard\.sh": "it does not end; test_what_a_program_prints_at_its_end runs it with --inspect",
    r"pstar (trace|plan|config)$": "the name in a sentence; docs/generate/ and tests/pstar run them",
    r"bash scripts/pstar\.sh (config (my_\w+\.json|FILE)|plan --state-bits 8)$": "tests/pstar gives them a file and a model",
    r"bash scripts/pstar\.sh plan --machine yard --model 18B --host-memory 360GB":
        "test_the_plan_with_another_amount_of_host_memory_prints_an_answer runs it",
    r"bash scripts/pstar\.sh plan --layouts": "test_the_ranking_of_layouts_on_its_page_prints_an_answer runs it",
    r"bash scripts/python\.sh -m gpt2_chinese\.corpora convert INPUT": "a pattern; tests/gpt2_chinese/corpora runs it",
    r"bash scripts/python\.sh chapters/04_apex/mistakes/":
        "chapters/test_04_apex.py runs the mistakes, shortened by what they import",
    r"accelerate launch": "tests/chapters/test_accelerate.py runs both, shortened",
    r"bash chapters/02_ddp/train\.sh --nproc 2$": "the same as without the flag, which the chapter's page has",
    r"bash cache/make_vocab\.sh check --vocab mine": "its folder is the reader's; test_make_vocab.py runs it",
}  # fmt: skip


def reason(command: str) -> str:
    """Why a command is not run, "" if it is run."""
    return next((why for pattern, why in REASONS.items() if re.match(pattern, command)), "")


def commands_of(page: Path) -> list[str]:
    """The commands of a page without their comments."""
    return [re.split(r"\s+#", line)[0].strip() for line in pages.commands(page.read_text(encoding="utf-8"))]


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory, shell) -> Callable[..., str]:
    """reader(command, flags) runs a command in a folder like the repository; its runs/ belongs to the tests.

    Chapter 00's programs are forked, those of the deep cases start from nothing.
    """
    folder = tmp_path_factory.mktemp("reader")
    from docs.generate.recorded import timed

    timed.reader_in(folder)
    tokens = str(folder / "tokens")

    def run(command: str, flags: str = "", status: int = 0) -> str:
        nothing = "chapters/00_single" not in command
        return shell(f"{timed.here(command)} {flags}", folder, status, nothing, GPT2_CHINESE_CACHE=tokens)

    return run


def marks(chapter: str) -> list[pytest.MarkDecorator]:
    """Only chapter 00's commands run in the quick command."""
    return [needs_horovod] * ("horovod" in chapter) + [pytest.mark.deep] * (chapter != "00_single")


@pytest.mark.parametrize("page", [pytest.param(p, id=p.stem, marks=marks(p.stem)) for p in CHAPTERS])
def test_the_commands_of_a_chapter_run(reader, page: Path) -> None:
    ran = [command for command in commands_of(page) if not reason(command)]
    for command in ran:
        if "exercise.sh" in command:
            assert "is yours to write" in reader(command, status=1)
            continue
        short = SHORT if "train.sh" in command else "--length 8" if "generate.sh" in command else ""
        if "08_param_efficient/train.sh" in command:  # its base needs all kinds of text
            short = f"{SHORT.partition(' --valid-data')[0]} --base-steps 2"
        if "ds_config.json" in command:  # the file sets the batch
            short = re.sub(r"--batch-size \d+ ?", "", short)
        said = reader(command, short)
        assert "Traceback" not in said and (not short or "今天天气" in said or "\nDone.\n" in said), said
    assert sum("train.sh" in command for command in ran) >= 2 and any("generate.sh" in command for command in ran)


def test_every_command_of_other_pages_is_run_by_a_test_or_has_a_reason() -> None:
    """seen.py has the commands of production/. test_readme.py runs those that start.md and index.md share with a README."""
    by_readme = set(test_readme.commands()) - set(test_readme.NOT_RUN)
    here = {command for page in CHAPTERS for command in commands_of(page)}
    for page in OTHERS:
        left = {c for c in commands_of(page) if not reason(c)} - by_readme - here
        assert not left, f"{page.relative_to(ROOT)}: {left}"


def test_the_plan_with_another_amount_of_host_memory_prints_an_answer(capsys) -> None:
    from pstar.cli import main

    (command,) = [c for c in commands_of(ROOT / "docs/en/engine/index.md") if "360GB" in c]
    assert main(command.split()[2:]) == 0 and "335.3 GiB host" in capsys.readouterr().out


def test_the_ranking_of_layouts_on_its_page_prints_an_answer(capsys) -> None:
    from pstar.cli import main

    (command,) = [c for c in commands_of(ROOT / "docs/en/which.md") if "--layouts" in c]
    assert main(command.split()[2:]) == 0
    said = capsys.readouterr().out
    assert "train.sh" in said and "ZeRO" in said, said


def test_no_program_of_an_environment_is_on_the_path(shell) -> None:
    names = ("python", "pytest", "tensorboard", "pstar", "torchrun", "mkdocs", "bash")
    found = shell(f"for name in {' '.join(names)}; do command -v $name || true; done")
    assert len(found.splitlines()) == 1 and found.strip().endswith("/bash"), found


def test_tensorboard_without_a_run_is_one_line(shell) -> None:
    assert "error: which run? bash scripts/tensorboard.sh runs/" in shell("bash scripts/tensorboard.sh --port 0", status=2)
    assert "error: there is no folder runs/none" in shell("bash scripts/tensorboard.sh runs/none", status=2)


def test_every_reason_is_needed() -> None:
    every = [command for page in [*CHAPTERS, *OTHERS] for command in commands_of(page)]
    for pattern, why in REASONS.items():
        assert any(re.match(pattern, command) for command in every), why


def test_without_its_program_a_command_fails(reader) -> None:
    with pytest.raises(AssertionError, match="status 2"):
        reader("bash chapters/02_ddp/train.sh --max-steps 2 --bucket-mb 0")


def test_what_a_program_prints_at_its_end_runs_in_a_new_shell(shell, tmp_path: Path) -> None:
    """`To go on:` names two commands. With --inspect TensorBoard prints what it finds in the folder, and ends."""
    short = f"{SHORT} --output-dir '{tmp_path}/run'"
    said = shell(f"bash chapters/00_single/train.sh {short}", from_nothing=True)
    printed = dict(re.findall(r"^  (curves|more text) +(bash .+)$", said.partition("To go on:")[2], re.MULTILINE))
    assert set(printed) == {"curves", "more text"} and f"{tmp_path}/run" in printed["curves"]
    assert "loss" in shell(f"{printed['curves']} --inspect")
    assert "今天天气" in shell(f"{printed['more text']} --length 8")


def test_commands_for_readers_without_a_gpu_were_timed_and_are_short() -> None:
    from docs.generate import build
    from docs.generate.recorded import timed

    with pytest.MonkeyPatch.context() as patch:
        for page in CHAPTERS:
            assert " seconds, on " in timed.line(build.Words("en"), page.stem)
            assert set(timed.commands(page.stem)) <= set(commands_of(page))
            times = timed.stored()[page.stem]["seconds"].values()
            assert len(times) >= 3 and max(times) < timed.LIMIT_S
        patch.setattr(timed, "commands", lambda chapter: ["bash chapters/02_ddp/train.sh --max-steps 5000"])
        with pytest.raises(SystemExit, match="have changed since they were timed"):
            timed.line(build.Words("en"), "02_ddp")
