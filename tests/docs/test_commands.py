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
    r"pytest tests/exercises": "tests/exercises runs the graders, on the exercise and on its solution",
    r"bash tests/run\.sh": "it is running",
    r"bash benchmarks/": "minutes; tests/benchmarks and tests/chapters run them with --quick",
    r"python benchmarks/gpu/": "needs a GPU; tests/benchmarks runs all of them with toys on a CPU",
    r"pip install -e|conda env": "they change the environment; tests of the set-up and the extras hold them",
    r"source \.venv/bin/activate": "the environment of the tests is active; test_setup.py makes a .venv",
    r"pip install horovod": "the mistake that the sentence is about",
    r"bash docs/serve\.sh|tensorboard --logdir": "it does not end",
    r"pstar (trace|plan|config)$|pstar plan --state-bits 8$|pstar config my_config\.json|python -m pstar\.cli config$":
        "the name in a sentence; docs/generate/ and tests/pstar run them",
    r"python -m gpt2_chinese\.corpora convert INPUT": "a pattern; tests/gpt2_chinese/corpora runs it",
    r"python chapters/04_apex/mistakes/": "chapters/test_04_apex.py runs the mistakes, shortened by what they import",
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
    """reader(command, flags) runs a command in a folder like the repository; its runs/ belongs to the tests."""
    folder = tmp_path_factory.mktemp("reader")
    from docs.generate.recorded import timed

    timed.reader_in(folder)
    tokens = str(folder / "tokens")
    return lambda command, flags="": shell(f"{timed.here(command)} {flags}", cwd=folder, GPT2_CHINESE_CACHE=tokens)


def marks(chapter: str) -> list[pytest.MarkDecorator]:
    """Only chapter 00's commands run in the quick command."""
    return [needs_horovod] * ("horovod" in chapter) + [pytest.mark.deep] * (chapter != "00_single")


@pytest.mark.parametrize("page", [pytest.param(p, id=p.stem, marks=marks(p.stem)) for p in CHAPTERS])
def test_the_commands_of_a_chapter_run(reader, page: Path) -> None:
    ran = [command for command in commands_of(page) if not reason(command)]
    for command in ran:
        short = SHORT if "train.sh" in command else "--length 8" if "generate.sh" in command else ""
        if "08_param_efficient/train.sh" in command:  # its base needs all kinds of text
            short = f"{SHORT.partition(' --valid-data')[0]} --base-steps 2"
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


def test_every_reason_is_needed() -> None:
    every = [command for page in [*CHAPTERS, *OTHERS] for command in commands_of(page)]
    for pattern, why in REASONS.items():
        assert any(re.match(pattern, command) for command in every), why


def test_without_its_program_a_command_fails(reader) -> None:
    with pytest.raises(AssertionError, match="status 2"):
        reader("bash chapters/02_ddp/train.sh --max-steps 2 --bucket-mb 0")


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
