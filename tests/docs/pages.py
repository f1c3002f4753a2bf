"""Checks of pages. Each returns the problems it finds, so that a test can show that it finds one."""

from __future__ import annotations

import html.parser
import re
import shlex
import sys
import tomllib
from collections import Counter
from functools import cache
from pathlib import Path

from tests.harness.program import run_forked

ROOT = Path(__file__).resolve().parents[2]
LANGUAGES = ("zh", "en")
SHELL_BLOCK = re.compile(r"^( *)```(?:bash|sh)\b[^\n]*\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
OTHER_BLOCK = re.compile(r"^( *)(`{3,}).*?^\1\2", re.MULTILINE | re.DOTALL)
NAME = re.compile(r"pstar (?:config|plan|trace)")  # a command's name in a sentence
PLACES = ("chapters/", "gpt2_chinese/", "pstar/", "durable/", "data/", "cache/", "docs/", "tests/", "scripts/")
BY_SCRIPT = {"scripts/python.sh": "python", "scripts/torchrun.sh": "torchrun", "scripts/pstar.sh": "pstar"}
# First words of commands that work as they are printed: bash; what only an own environment or a cluster has.
IN_ANY_SHELL = ("bash", "source", "export", "pip", "conda", "sbatch", "salloc", "srun", "sacct", "sacctmgr", "sshare",
                "accelerate", "apt-get", "docker", "apptainer", "mkdir")
MADE = ("cache/tokens/", "docs/_generated")  # created by runs, and by building the pages


# ---- commands


def commands(text: str) -> list[str]:
    """The commands of a page: each line of its shell blocks, and inline code that begins with a program."""
    lines = [line.strip() for _, block in SHELL_BLOCK.findall(text) for line in block.splitlines()]
    prose = OTHER_BLOCK.sub("", text)
    lines += re.findall(r"`((?:bash|python|pytest|pip|conda|tensorboard|pstar) [^`\n]+)`", prose)
    return [line for line in lines if line and not line.startswith("#")]


def wrong_with_command(command: str, root: Path = ROOT) -> list[str]:
    """The names in a command that do not exist: a program, a path, a flag, an extra."""
    words = shlex.split(command, comments=True)
    while words and re.match(r"[A-Z_]+=", words[0]):
        words = words[1:]
    program, *rest = words
    if program == "bash" and rest[:1] == ["scripts/tensorboard.sh"]:  # its flags are TensorBoard's
        return [] if len(rest) > 1 and not rest[1].startswith("-") else [f"{command}: the run's folder is missing"]
    if program == "bash" and rest and rest[0] in BY_SCRIPT:
        return wrong_with_command(shlex.join([BY_SCRIPT[rest[0]], *rest[1:]]), root)
    if program in ("export", "salloc", "sacct", "sacctmgr", "sshare"):  # they start none of our programs
        return []
    if program == "srun":  # check the command that it starts in each task
        inner = next(number for number, word in enumerate(rest) if not word.startswith("-"))
        return wrong_with_command(rest[-1] if "-c" in rest[inner:] else shlex.join(rest[inner:]), root)
    if program in ("bash", "python") and rest and rest[0] != "-m":
        script, *arguments = rest
        if not (root / script).is_file():
            return [f"{command}: there is no {script}"]
        return _unknown_flags(command, arguments, script)
    if program == "python" and rest[:1] == ["-m"]:
        module = rest[1]
        file = root / module.replace(".", "/")
        if not (file.with_suffix(".py").is_file() or (file / "__main__.py").is_file()):
            return [f"{command}: there is no module {module}"]
        named = " ".join(word for word in rest[2:3] if word in ("convert", "train", "check", "export"))
        return _unknown_flags(command, rest[2:], f"-m {module} {named}".strip())
    if program == "pytest":
        return [f"{command}: there is no {word}" for word in rest if word.startswith(PLACES) and not (root / word).exists()]
    if program == "pip":
        wanted = re.findall(r"\[([\w,]+)\]", command)
        extras = tomllib.loads((root / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        return [f"{command}: there is no extra {one}" for group in wanted for one in group.split(",") if one not in extras]
    if program == "conda":
        return [f"{command}: there is no {word}" for word in rest if word.endswith(".yml") and not (root / word).is_file()]
    if program == "source":  # the only environment on the pages, made by the set-up
        return [] if rest == [".venv/bin/activate"] else [f"{command}: not .venv/bin/activate"]
    if program == "pstar":
        if rest[:1] not in ([], ["config"], ["trace"], ["plan"]):
            return [f"{command}: pstar has no command {rest[0]}"]
        return _unknown_flags(command, rest, f"-m pstar.cli {' '.join(rest[:1])}".strip())
    if program == "mkdir" or (program == "apt-get" and rest[0] == "install"):
        return []
    if program in ("docker", "apptainer"):
        recipe = "Dockerfile" if program == "docker" else "apptainer.def"
        known = rest[0] in ("build", "run") and (root / recipe).is_file()
        return [] if known else [f"{command}: neither builds nor runs {recipe}"]
    if program in ("sbatch", "torchrun", "accelerate"):
        scripts = [word for word in rest if "/" in word and not word.startswith("--")]
        return [] if scripts and (root / scripts[0]).is_file() else [f"{command}: {program} without a script that is there"]
    return [f"{command}: {program} is no program that the pages know; teach tests/docs/pages.py about it"]


def _unknown_flags(command: str, arguments: list[str], script: str) -> list[str]:
    given = [word.split("=")[0] for word in arguments if word.startswith("--")]
    known = known_flags(script) if given else None  # only with flags: some programs take no flags and would run
    return [f"{command}: {flag} is in no --help" for flag in given if known is not None and flag not in known]


@cache
def known_flags(script: str) -> set[str] | None:
    """The flags that --help lists; None for a script that hands its arguments to a known tool (pytest, mkdocs)."""
    train = re.fullmatch(r"chapters/(\w+)/train\.sh", script)
    if train:
        target = [str(ROOT / "chapters" / train[1] / "train.py")]
    elif bench := re.fullmatch(r"benchmarks/(\w+)\.sh", script):
        target = [str(ROOT / "benchmarks" / f"{bench[1]}.py")]
    elif re.fullmatch(r"chapters/\w+/\w+\.sh", script):  # chapter 08 has programs of its own for these
        own = (ROOT / script).with_suffix(".py")
        target = [str(own)] if own.is_file() else ["-m", "gpt2_chinese.generate"]
    elif script in ("tests/run.sh", "docs/build.sh", "docs/serve.sh", "docs/zensical.sh"):
        return None
    elif script == "cache/make_vocab.sh":
        return set().union(*(known_flags(f"-m gpt2_chinese.vocabulary {command}") for command in ("train", "check")))
    else:
        target = script.split() if script.startswith("-m ") else [str(ROOT / script)]
    status, said = run_forked([sys.executable, *target, "--help"], {"PYTHONPATH": str(ROOT), "PATH": ""}, ROOT)
    assert status == 0, said
    return set(re.findall(r"--[a-z][\w-]*", said))


def not_in_a_fresh_shell(text: str) -> list[str]:
    """Commands of a page whose program a new shell, without an active environment, does not find."""
    names = [command for command in commands(OTHER_BLOCK.sub("", text)) if NAME.fullmatch(command)]
    found = [re.sub(r"^(?:[A-Z_]+=(?:\"[^\"]*\"|\S*) +)+", "", command) for command in commands(text)]
    wrong = [command for command in found if command.split()[0] not in IN_ANY_SHELL]
    return list((Counter(wrong) - Counter(names)).elements())


def missing_paths(text: str, root: Path = ROOT) -> list[str]:
    """Paths of the repository in inline code that do not exist."""
    found = re.findall(r"`([\w./-]+)`", OTHER_BLOCK.sub("", text))
    ours = [path for path in found if path.startswith(PLACES) and path not in MADE]
    return [f"there is no {path}" for path in ours if not (root / path).exists()]


def beyond_the_repository(text: str) -> list[str]:
    """Paths that exist only on the author's machine."""
    return re.findall(r"\.\./shared\S*|(?<![\w.])/(?:work|home|root|tmp|Users)/\S*|\w+\.internal\b\S*", text)


def broken_chinese_lines(text: str) -> list[str]:
    """Line ends between two Chinese characters: a browser shows them as a space."""
    chinese = r"[\u3001-\u9fff\uff00-\uffef]"
    return re.findall(rf"[^\n]{{0,12}}{chinese}\n{chinese}[^\n]{{0,12}}", OTHER_BLOCK.sub("", text))


# ---- the built site


class Page(html.parser.HTMLParser):
    """The content of a built page: ids of headings in order, and the addresses that it loads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.headings: list[str] = []
        self.loads: list[str] = []
        self.language = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Records one tag; HTMLParser.feed calls it."""
        values = dict(attrs)
        if tag == "html":
            self.language = values.get("lang") or ""
        if re.fullmatch(r"h[1-6]", tag) and values.get("id"):
            self.headings.append(f"{tag} {values['id']}")
        if tag in ("img", "script", "iframe", "source") and values.get("src"):
            self.loads.append(values["src"])
        if tag == "link" and values.get("rel") in ("stylesheet", "icon", "preload") and values.get("href"):
            self.loads.append(values["href"])


def pages_of(folder: Path, language: str) -> dict[str, str]:
    """Address -> text of the built pages of a language. Chinese pages are at the root, English ones below en/."""
    base = folder / "en" if language == "en" else folder
    pages = {path.relative_to(base).as_posix(): path for path in sorted(base.rglob("index.html"))}
    return {name: path.read_text(encoding="utf-8") for name, path in pages.items()
            if language == "en" or not name.startswith("en/")}  # fmt: skip


def differences(first: dict[str, str], second: dict[str, str]) -> list[str]:
    """Pages that only one of two languages has, and pages whose headings have different ids."""
    problems = [f"{name}: in one language only" for name in sorted(first.keys() ^ second.keys())]
    for name in sorted(first.keys() & second.keys()):
        one, other = Page(first[name]).headings, Page(second[name]).headings
        if one != other:
            problems.append(f"{name}: headings {sorted(set(one) ^ set(other)) or 'in another order'}")
    return problems


def unloadable(page: Path, folder: Path) -> list[str]:
    """The addresses that a page loads from another site, or from a missing file."""
    problems = []
    for address in Page(page.read_text(encoding="utf-8")).loads:
        if re.match(r"(https?:)?//", address):
            problems.append(f"{page.relative_to(folder)} loads {address} from elsewhere")
        elif not address.startswith("data:"):
            path = address.split("?")[0].split("#")[0]
            target = folder / path.lstrip("/") if path.startswith("/") else page.parent / path
            if not target.exists():
                problems.append(f"{page.relative_to(folder)} loads {address}, which is not there")
    return problems


def example(anchor: str) -> str:
    """The first Python block of a section of the engine's page, the same text in both languages."""
    english, chinese = (_first_python_block(language, anchor) for language in ("en", "zh"))
    assert english == chinese, anchor
    return english


def _first_python_block(language: str, anchor: str) -> str:
    page = (ROOT / f"docs/{language}/engine/index.md").read_text(encoding="utf-8")
    return re.search(rf"{{ #{re.escape(anchor)} }}.*?```python\n(.*?)```", page, re.DOTALL).group(1)
