"""The tables of the pages and of the READMEs: from the repository, from pstar's own functions, and from captured runs."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import pairwise

from docs.generate.recorded import captures, measured, seen, steps
from docs.generate.recorded.measured import REPO
from docs.generate.tables import configuration, deepspeed, gpus, terms

Words = Callable[[str], str]

# Every entry of the repository and its one purpose; tests/docs checks that none is missing.
TREE = {
    "chapters/": "one program a folder: the same training, each time shared in another way",
    "gpt2_chinese/": "what all chapters share: model, corpus, vocabulary, the run; knows no parallelism",
    "pstar/": "the engine of chapter 07, for any torch.nn.Module",
    "durable/": "files and folders that are complete or absent, sharded checkpoints, hang reports; used by both packages",
    "data/": "the shipped corpus, its format, and how to split your own",
    "cache/": "the shipped vocabulary, and how to train another",
    "docs/": "the site in Chinese and English, and what makes its pages from these files",
    "tests/": "what they test, folder for folder; chapters as programs, exercises, docs, layers, the harness itself",
    "benchmarks/": "side by side with peers: what a run measured, as tables and figures",
    "scripts/": "the set-up that every start goes through",
    ".ci/": "what a CI machine calls",
    "pyproject.toml": "the three packages, the extras dev and docs, ruff, pytest",
    "constraints.txt": "the exact versions that CI runs",
    "environment.yml": "the same for conda",
    "Dockerfile": "an image with all of it, set up",
    ".dockerignore": "what the image leaves out",
    "apptainer.def": "the same image for Apptainer",
    "mkdocs.yml": "the site's frame",
    "zensical.en.yml": "the English pages for Zensical",
    "zensical.zh.yml": "the Chinese pages for Zensical",
    "CONTRIBUTING.md": "the rules, each with the test that holds it",
    "CHANGELOG.md": "what changed",
    "CITATION.cff": "how to cite this repository",
    "LICENSE": "BSD-3-Clause",
    ".gitignore": "what runs and builds leave behind",
    ".gitattributes": "the same line ends on every system",
}

# All chapters of the course; those without a train.py are shown as planned.
COURSE = {
    "00_single": ("one process, no parallelism: the curve that all others must reproduce", "python"),
    "01_parameter_server": ("data parallel through a single parameter server", "torchrun"),
    "02_ddp": ("distributed data parallel: bucketed ring all-reduce overlapped with backward", "torchrun"),
    "03_horovod": ("data parallel with real Horovod", "horovodrun"),
    "04_apex": ("mixed precision, optimization levels O0 to O3", "torchrun, horovodrun"),
    "05_model_parallel": ("layer split, pipeline, tensor parallel, and their combination with data parallel", "torchrun"),
    "06_zero": ("ZeRO stages 1, 2, 3 and offload; FSDP2 beside them", "torchrun"),
    "07_patrickstar": ("the chunk-based engine pstar", "torchrun"),
    "08_param_efficient": ("few parameters, few bits, little memory: LoRA, int8 and int4, checkpointing", "torchrun"),
}

# The example sentence for the table of profiles. Its number is one token in one profile only.
PROFILED = "2019年，今天天气很好。"

# What the rows of chapter 07's closing table mean.
MEMORY = {
    "chunks": "how the parameters are packed; the rest is padding",
    "model data": "parameters, gradients and both moments, of all processes",
    "budgets": "what each tier may hold on each process",
    "near": "bytes in use in the near tier; never above its budget",
    "far": "bytes in use in the far tier, on this process",
    "Adam": "in which tier the update of each group is computed",
    "far to near": "copied in during the last step",
    "near to far": "copied out during the last step",
    "gather": "received when groups are gathered, in the last step",
    "reduce": "received when gradients are reduced, in the last step",
}

# Facts of a measurement that are names, the same in both languages.
NAMES_ONLY = ("versions", "date", "command", "processor")
NUMBERS = re.compile(r"(?<![\w-])\d[\d,.]*(?:e-\d+)?(?!\w)|(?<=cores )\(.+\)|(?<=cores compute )\(.+\)")

# The baseline and the engine, which the tables of losses compare.
COMPARED = ("00_single", "07_patrickstar")


def table(head: Sequence[str], rows: Iterable[Sequence[object]], right: int = 0) -> str:
    """A Markdown table; the last `right` columns are aligned to the right."""
    rule = ["---"] * (len(head) - right) + ["---:"] * right
    cells = ([str(cell).replace("|", "\\|") for cell in row] for row in rows)
    return "".join(f"| {' | '.join(row)} |\n" for row in (head, rule, *cells))


def chapters(words: Words, link: str = "chapters/{}.md") -> str:
    """The table of chapters. `link` is the address of a chapter's page, with {} in place of its name."""
    rows = [(f"[{name}]({link.format(name)})", words(technique), launcher) for name, (technique, launcher) in COURSE.items()]
    return table([words(word) for word in ("chapter", "technique", "launcher")], rows)


def result(words: Words, text: str) -> str:
    """The facts and the table of a committed result in benchmarks/, without its prose."""
    rows = [line for line in text.splitlines() if line.startswith("|")]
    named = [_named(words, row) for row in rows[2:]]
    return "\n".join([*_facts(words, text), "", _head(words, rows[0]), rows[1], *named, ""])


def results(words: Words, name: str, text: str) -> str:
    """The facts and all tables of a result, each below its heading if it has one; `name` is part of the headings' ids."""
    lines = _facts(words, text)
    for before, line in pairwise(["", *text.splitlines()]):
        if line.startswith("## "):
            heading = line.removeprefix("## ")
            slug = re.sub(r"\W+", "-", heading.partition(":")[0].lower())
            lines += ["", f"### {_in_words(words, heading)} {{ #{name}-{slug} }}"]
        elif line.startswith("|"):
            lines += [_named(words, line)] if before.startswith("|") else ["", _head(words, line)]
    blocks = "\n".join(lines).split("\n\n")
    messages = re.compile(r"^\|.*`[^`\n]{80,}`", re.MULTILINE)
    return "\n\n".join(_wrapping(block) if messages.search(block) else block for block in blocks) + "\n"


def _wrapping(block: str) -> str:
    """A table whose cells are messages: their lines may break."""
    return f'<div class="messages" markdown>\n\n{block}\n\n</div>'


def _facts(words: Words, text: str) -> list[str]:
    facts = [re.fullmatch(r"- ([a-z ]+): (.*)", line) for line in text.splitlines()]
    return [f"- {words(fact[1])}{words(': ')}{fact[2] if fact[1] in NAMES_ONLY else _in_words(words, fact[2])}"
            for fact in facts if fact and not fact[1].startswith("formula")]  # fmt: skip


def _in_words(words: Words, fact: str) -> str:
    """A fact in the page's language, phrase by phrase. zh.json has {} for each number and for a processor; names stay."""
    parts = re.split(r"(; |: |, )", fact)
    return "".join(words(part) if number % 2 else _phrase(words, part) for number, part in enumerate(parts))


def _phrase(words: Words, phrase: str) -> str:
    """A phrase in the page's language: with its numbers filled in, or as it is; a name stays."""
    form = NUMBERS.sub("{}", phrase)
    known = words.known(form)
    return known.format(*NUMBERS.findall(phrase)) if known != form else words.known(phrase)


def _head(words: Words, row: str) -> str:
    cells = [words(cell.strip()) if cell.strip() else "" for cell in row.strip("|").split("|")]
    return f"| {' | '.join(cells)} |"


def _named(words: Words, row: str) -> str:
    """A row with its words in the page's language; numbers and names of libraries and settings stay."""
    cells = row.strip("|").split("|")
    for place, cell in enumerate(cells):
        name = cell.strip().strip("`")
        if name and (known := _phrase(words, name)) != name:
            cells[place] = f" {known} "
    return f"|{'|'.join(cells)}|"


def tree(words: Words) -> str:
    """The repository, one purpose per entry."""
    width = max(map(len, TREE)) + 2
    return "```text\n" + "".join(f"{path:<{width}}{words(purpose)}\n" for path, purpose in TREE.items()) + "```\n"


def circumstances(words: Words) -> str:
    """One sentence on how the numbers of the captured runs were measured."""
    return words("Measured on {date}: {steps} steps, Python {python}, torch {torch}, {cores} CPU cores.").format(
        **captures.captured(COMPARED[1]), steps=captures.STEPS) + "\n"  # fmt: skip


def losses(words: Words) -> str:
    """Losses of two chapters at a few steps, and the largest difference over all of them."""
    first, second = (captures.captured(chapter)["losses"] for chapter in COMPARED)
    rows = [(step, f"{first[step - 1]:.6f}", f"{second[step - 1]:.6f}",
             f"{abs(first[step - 1] - second[step - 1]) / first[step - 1]:.1e}")
            for step in captures.shown_steps()]  # fmt: skip
    rows.append((words("largest of all steps"), "", "", f"{captures.largest_difference(COMPARED[1]):.1e}"))
    return table([words("step"), *COMPARED, words("relative difference")], rows, right=3)


def commands(words: Words) -> str:
    """The two commands of the captured runs."""
    return "```bash\n" + "".join(f"{captures.command_of(chapter)}\n" for chapter in COMPARED) + "```\n"


def memory(words: Words) -> str:
    """The chunk memory that chapter 07 printed at the end of its captured run, each row explained."""
    said = captures.summary_rows(captures.captured("07_patrickstar")["said"])
    rows = [(f"`{name}`", value, words(MEMORY[name])) for name, value in said]
    return table([words(word) for word in ("row", "printed", "meaning")], rows)


def arithmetic(words: Words) -> str:
    """The formulas of the engine, worked for tiny with the engine's own functions, at one and two processes."""
    head = [words("what"), words("formula"), words("tiny, p = 1"), words("tiny, p = 2")]
    return table(head, [(words(what), f"`{formula}`", *values) for what, formula, *values in _worked()], right=2)


@functools.cache
def _worked() -> list[tuple[object, ...]]:
    from gpt2_chinese.model.config import PRESETS
    from gpt2_chinese.model.gpt2 import GPT2LMHeadModel
    from gpt2_chinese.vocabulary.profiles import vocabulary_size
    from pstar import plan_engine
    from pstar.layout.budget import model_data_bytes
    from pstar.memory.tier import format_bytes

    config = replace(PRESETS["tiny"], vocab_size=vocabulary_size(REPO / "cache/vocab.txt"))

    def plan(num_ranks: int, **keys: object):
        return plan_engine(lambda: GPT2LMHeadModel(config), keys, num_ranks)

    quarter = [plan(p, near_budget="25%") for p in (1, 2)]
    least = [plan(p, near_budget="min") for p in (1, 2)]
    bf16, fp16 = ([plan(p, near_budget="25%", **{kind: {"enabled": True}}) for p in (1, 2)] for kind in ("bf16", "fp16"))
    whole = [model_data_bytes(one.layout, one.costs) for one in quarter]
    received = [one.layout.total_elems * (p - 1) // p for p, one in zip((1, 2), quarter, strict=True)]

    def share(one) -> str:
        return f"{format_bytes(one.near_budget)} ({one.near_budget / model_data_bytes(one.layout, one.costs):.1%})"

    return [
        ("number of parameters", "M", *(f"{one.layout.num_params:,}" for one in quarter)),
        ("elements in a chunk, searched", "S", *(f"{one.layout.chunk_elems:,}" for one in quarter)),
        ("groups, of p pieces each", "g", *(len(one.layout.groups) for one in quarter)),
        ("elements of all chunks, with padding", "E", *(f"{one.layout.total_elems:,}" for one in quarter)),
        ("share of the chunks that holds parameters", "M / E", *(f"{one.layout.utilisation:.1%}" for one in quarter)),
        ("bytes a parameter, fp32", "4 + 4 + 4 + 4", *(one.costs.total for one in quarter)),
        ("bytes a parameter, bf16 with a split master", "2 + 2 + 2 + 4 + 4", *(one.costs.total for one in bf16)),
        ("bytes a parameter, fp16 with a separate master", "2 + 2 + 4 + 4 + 4", *(one.costs.total for one in fp16)),
        ("model data of all processes, fp32", "16·E", *map(format_bytes, whole)),
        ("model data of one process, fp32", "16·E / p", *(format_bytes(w // p) for p, w in zip((1, 2), whole, strict=True))),
        ("near budget of the chapter", "25 %", *(format_bytes(one.near_budget) for one in quarter)),
        ("the least near budget, with its own chunk size", "min", *map(share, least)),
        ("received per process and step, fp32, at most", "12·E·(p−1) / p", *(format_bytes(12 * e) for e in received)),
        ("the same where each group is gathered once", "8·E·(p−1) / p", *(format_bytes(8 * e) for e in received)),
    ]


def loads(words: Words) -> str:
    """Loads per step of a forward and a backward pass over n equal chunks, by running pstar's own schedule on numbers.

    In the last row activations take more of the room during forward. The update of all chunks has the full room again, and a
    few chunks need three blocks of states each for it.
    """
    from pstar.schedule.schedule import POLICIES, count_loads

    num_chunks = 8
    accesses: list[object] = [*range(num_chunks), *reversed(range(num_chunks))]
    rows = [(room, 2 * (num_chunks - room), *(count_loads(accesses, room, policy) for policy in POLICIES))
            for room in range(2, num_chunks + 1, 2)]  # fmt: skip
    num_chunks, most, least = 40, 45, 25
    shrinking = [most - chunk // 2 for chunk in range(num_chunks)]
    kinds, num_near = ("master", "exp_avg", "exp_avg_sq"), 5
    update = [key for chunk in range(num_chunks)
              for key in [*((kind, chunk) for kind in kinds if chunk < num_near), chunk]]  # fmt: skip
    accesses = [*range(num_chunks), *reversed(range(num_chunks)), *update]
    rooms = [*shrinking, *(least for _ in range(num_chunks)), *(most for _ in update)]
    what = words("{n} chunks, room {most} to {least}, then {most} for the update of all, with {states} blocks of states")
    rows.append((what.format(n=num_chunks, most=most, least=least, states=len(kinds) * num_near), "",
                 *(count_loads(accesses, rooms, policy, num_steps=4) for policy in POLICIES)))  # fmt: skip
    head = [words("room C, of n = 8 chunks"), "2·(n − C)", *(f"`{policy}`" for policy in POLICIES)]
    return table(head, rows, right=4)


def planned(words: Words) -> str:
    """The output of `pstar plan` for a model that is too large for a laptop's memory."""
    return asked("plan", "--model", "xl", "--machine", "cpu2")


def paper(words: Words) -> str:
    """The output of `pstar plan` for the machines of the paper."""
    return asked("plan", "--paper")


@functools.cache
def asked(*arguments: str) -> str:
    """A command of pstar in the repository's folder and its output, the same in both languages."""
    from pstar.cli import main

    with contextlib.chdir(REPO), contextlib.redirect_stdout(io.StringIO()) as said:
        main(list(arguments))
    return f"```text\n$ bash scripts/pstar.sh {' '.join(arguments)}\n{said.getvalue().rstrip()}\n```\n"


def profiled(words: Words) -> str:
    """The commands of the run whose profile is drawn, as a reader would type them."""
    return "```bash\n" + "".join(f"{line}\n" for line in measured.profile_commands()) + "```\n"


def loop(words: Words) -> str:
    """The README's program for a module of one's own, which tests/docs runs."""
    return re.search(r"```python\n.*?```\n", (REPO / "README.md").read_text(encoding="utf-8"), re.DOTALL).group()


def schedules(words: Words) -> str:
    """Chapter 05's schedules of four ranks and eight micro-batches, as the chapter's program prints them."""
    program, said = REPO / "chapters/05_model_parallel/schedules.py", []
    for name in ("naive", "gpipe", "1f1b", "interleaved"):
        command = [sys.executable, str(program), name, "4", "2" if name == "naive" else "8"]
        said.append(f"{name}\n\n{subprocess.check_output(command, text=True)}")
    return "```text\n" + "\n".join(said) + "```\n"


def profiles(words: Words) -> str:
    """One sentence with both profiles of one vocab.txt: tokens and ids."""
    from gpt2_chinese.vocabulary.profiles import PROFILES
    from gpt2_chinese.vocabulary.vocabulary import Vocabulary

    rows = []
    for profile in PROFILES:
        vocabulary = Vocabulary.load(REPO / "cache" / "vocab.txt", profile)
        ids = [vocabulary.begin_id, *vocabulary.encode(PROFILED), vocabulary.end_id]
        tokens = " ".join(f"`{vocabulary.entries[number]}`" for number in ids)
        rows.append((f"`{profile}`", tokens, " ".join(map(str, ids))))
    return f"「{PROFILED}」\n\n" + table([words(word) for word in ("profile", "tokens", "ids")], rows)


def tried(words: Words) -> str:
    """When and where the commands of the production pages ran."""
    return words("Run on {date}: Python {python}, torch {torch}, {cores} CPU cores.").format(**seen.where_and_when()) + "\n"


def glossary(words: Words) -> str:
    """All terms, sorted by English name. Each row has an anchor and begins with the name in the page's language."""
    language = 0 if words("meaning") == "meaning" else 1
    rows = []
    for term in sorted(terms.terms(), key=lambda term: term["en"].lower()):
        names = (term["en"], term["zh"])
        says = (term["says_en"], term["says_zh"])[language]
        rows.append((f'<a id="{terms.anchor(term)}"></a>**{names[language]}**', names[1 - language], says))
    return table([words(word) for word in ("term", "other language", "meaning")], rows)


def ablation_curves(words: Words) -> str:
    """The curves of the ablation if its data have them, else those of the captured runs."""
    rows = json.loads((REPO / "benchmarks/results/ablation.json").read_text(encoding="utf-8"))["rows"]
    whole = words("Training loss of each row over that of chapter 00")
    captured = words("Training loss of each chapter over that of chapter 00, from the captured runs")
    name, text = ("ablation_loss", whole) if any(row.get("losses") for row in rows) else ("curves_all", captured)
    language = "en" if words("step") == "step" else "zh"
    return f"![{text}](../_generated/figures/{name}_{language}.svg)\n"


# The colours of the site, by their names in docs/assets/tools/tools.css.
KEY = {"parameters": "parameters", "gradients": "gradients, backward", "optimizer": "optimizer states, update",
       "activations": "activations, forward", "buffers": "data, buffers, chunks", "measured": "measured here",
       "baseline": "compared with", "idle": "held by others, waiting"}  # fmt: skip


def key(words: Words) -> str:
    """The colour key of the whole site."""
    named = [f'<span><span class="kind kind-{kind}"></span>{words(text)}</span>' for kind, text in KEY.items()]
    return f'<p class="tool-legend key">{" ".join(named)}</p>\n'


TABLES: dict[str, Callable[[Words], str]] = {
    "chapters": chapters, "tree": tree, "configuration": configuration.reference, "steps": steps.view,
    "circumstances": circumstances, "losses": losses, "commands": commands, "memory": memory, "arithmetic": arithmetic,
    "loads": loads, "loop": loop, "schedules": schedules, "profiled": profiled, "planned": planned, "paper": paper,
    "profiles": profiles, "tried": tried, "glossary": glossary, "deepspeed": deepspeed.keys,
    "deepspeed_example": deepspeed.example, "gpus": gpus.gpus, "ablation_curves": ablation_curves, "key": key,
}  # fmt: skip
