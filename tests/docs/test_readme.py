"""The READMEs: their commands and their program run; their generated parts are up to date."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest

from tests.docs import pages
from tests.docs.pages import ROOT

READMES = {"en": ROOT / "README.md", "zh": ROOT / "README.zh.md"}
TEXTS = {language: path.read_text(encoding="utf-8") for language, path in READMES.items()}
# Flags for a run of seconds; the rest of the command does not change.
SHORT = "--max-steps 2 --batch-size 4 --seq-len 32"
FIRST = "--valid-data data/valid/comments.json"
NOT_RUN = {
    "bash tests/run.sh": "it is running",
    "bash docs/serve.sh": "it does not end; its parts are run by the fixture `site`",
    "pip install -e .": "it would change the environment; tests of the set-up and of the extras hold it",
    "apt-get install git python3-venv": "it would change the machine; tests/fresh runs it in a new Debian",
    **dict.fromkeys((
        "mkdir -p runs",
        "docker build -t gpt2-chinese .",
        'docker run --rm -v "$PWD/runs:/course/runs" gpt2-chinese',
        "apptainer build gpt2-chinese.sif apptainer.def",
        "apptainer run --bind runs:/course/runs gpt2-chinese.sif",
    ), "there may be no Docker and no Apptainer; tests/fresh compares their files, and takes their steps in a new Debian"),
    "conda env create -f environment.yml": "there may be no conda; tests/scripts/test_environment.py holds the file",
}


@pytest.fixture(scope="module")
def build():
    from docs.generate import build

    return build


def commands() -> list[str]:
    return [line.split("  #")[0].strip() for line in pages.commands(TEXTS["en"])]


def test_both_have_the_same_commands_and_program() -> None:
    assert [c.split("#")[0] for c in pages.commands(TEXTS["en"])] == [c.split("#")[0] for c in pages.commands(TEXTS["zh"])]
    assert program("en") == program("zh")


def program(language: str) -> str:
    (code,) = re.findall(r"```python\n(.*?)```", TEXTS[language], re.DOTALL)
    return code


def test_the_two_commands_come_first() -> None:
    for text in TEXTS.values():
        first = [line.split("  #")[0].strip() for line in pages.SHELL_BLOCK.search(text)[2].splitlines()]
        assert first == ["bash chapters/07_patrickstar/train.sh", "bash tests/run.sh"]


def test_the_readme_requires_the_space_and_python_of_the_set_up() -> None:
    free = re.search(r"FREE_BYTES_NEEDED = (\d+) \* 2\*\*30", (ROOT / "scripts/setup_environment.py").read_text())[1]
    oldest = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"].removeprefix(">=")
    for text in TEXTS.values():
        assert f"{free} GiB" in text and f"Python {oldest}" in text


def test_the_commands_run(shell, tmp_path: Path) -> None:
    """Runs the commands one after the other, for two steps and with the reader's folders in a temporary one."""
    corpus = tmp_path / "mine/corpus"
    corpus.mkdir(parents=True)
    for part in ("train", "valid"):
        items = json.loads((ROOT / "data" / part / "news.json").read_text(encoding="utf-8"))
        (corpus / f"{part}.json").write_text(json.dumps(items[:300], ensure_ascii=False), encoding="utf-8")
    ran = []
    for command in commands():
        if command in NOT_RUN:
            continue
        line = command.replace("mine/", f"{tmp_path}/mine/").replace("runs/mine", f"{tmp_path}/run")
        if "train.sh" in line:
            line += f" {SHORT}" + ("" if "--output-dir" in line else f" {FIRST} --output-dir {tmp_path}/first")
        shell(line)
        ran.append(command)
    assert len(ran) == 6 and (tmp_path / "first/final/model.safetensors").exists()
    assert (tmp_path / "run/final/vocab.txt").read_bytes() == (tmp_path / "mine/vocab.txt").read_bytes()


def losses_of(code: str) -> list[float]:
    """Runs the program in this process and returns the losses of its loop."""
    names: dict[str, object] = {}
    exec(compile(code, "README.md", "exec"), names)
    assert len(names["weights"]) == 6
    return names["losses"]


def test_the_program_for_a_module_of_ones_own_runs(capsys: pytest.CaptureFixture) -> None:
    losses = losses_of(program("en"))
    assert losses[-1] < losses[0] / 5
    said = capsys.readouterr().out
    assert "model data" in said and "far to near" in said


def test_a_program_that_does_not_learn_is_found(capsys: pytest.CaptureFixture) -> None:
    losses = losses_of(program("en").replace("    model.backward(loss)\n", ""))
    assert not losses[-1] < losses[0] / 5


@pytest.mark.parametrize("language", READMES)
def test_generated_parts_are_up_to_date(build, language: str) -> None:
    fresh = build.readme.generated(build.Words(language), language)
    assert build.readme.filled(TEXTS[language], fresh) == TEXTS[language], "renew: python -m docs.generate --readme"
    assert set(build.readme.regions(TEXTS[language])) == {*fresh, "output"}


def unchanging(said: str) -> list[str]:
    """The lines that do not depend on the run's length: the model, the chunks, and the names of the table's rows."""
    rows = re.findall(r"^  (\S.*?)  +(\S.*)$", said, re.MULTILINE)
    same = ("model", "chunks", "model data", "budgets", "Adam", "gather", "reduce")
    return [f"{name}: {value if name in same else ''}" for name, value in rows if not name.startswith("「")]


@pytest.mark.parametrize("language", READMES)
def test_the_captured_run_is_the_output_of_the_command_now(build, language: str) -> None:
    """Compares with chapter 07's committed capture; test_captures.py compares that with a new run."""
    captured = build.readme.regions(TEXTS[language])["output"]
    now = build.captures.captured("07_patrickstar")["said"]
    assert unchanging(captured) == unchanging(now), "renew: python -m docs.generate --capture"
    assert captured.count("「") >= 3 and "step 800/800" in captured and "torch" in captured.splitlines()[-1]


def test_an_outdated_part_and_an_outdated_run_are_found(build) -> None:
    fresh = build.readme.generated(build.Words("en"), "en")
    outdated = TEXTS["en"].replace("pstar/ ", "pstarr/ ")
    assert build.readme.filled(outdated, fresh) != outdated
    captured = build.readme.regions(TEXTS["en"])["output"]
    assert unchanging(captured) != unchanging(captured.replace("in 4 groups", "in 5 groups"))
    assert unchanging(captured) != unchanging(captured.replace("  gather ", "  gathered "))


def test_an_excerpt_keeps_the_first_and_the_last_line_of_progress(build) -> None:
    said = "setup: x\nhead\nstep 1/9: a\nstep 2/9: b\nstep 4: validation\nstep 9/9: c\nstep 9: validation\nTo go on:\nend\n"
    shown = ["head", "step 1/9: a", "...", "step 9/9: c", "step 9: validation", "To go on:", "end"]
    assert build.readme.excerpt(said).splitlines() == shown
    with pytest.raises(SystemExit, match="not come to its end"):
        build.readme.excerpt(said.replace("To go on:", ""))
