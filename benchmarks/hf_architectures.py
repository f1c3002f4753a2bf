"""Architectures of Hugging Face Transformers, beside plain PyTorch with the same Adam: losses and weights to the bit.

bash benchmarks/hf_architectures.sh                        # all: a few minutes
bash benchmarks/hf_architectures.sh --only image --names Vi

The architectures are those of the Auto classes in TASKS. Each is made small (hf_small.py) and trained in fp32 with
clipping, in plain PyTorch and with the engine in the least near memory that works, each in a process of its own. "Not run":
plain PyTorch cannot train it here, because it does not run in this size or needs another library. The page is printed, and
written if all architectures were asked for.
"""

from __future__ import annotations

import argparse
import copy
import multiprocessing
import os
import re
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from command_line import parser_of, publish
from facts import bullets, processor, shortened, versions, when_and_how
from hf_small import TRIED, shrink
from processes import started

from durable.cores import num_cores

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
STEPS, MOST_PARAMETERS, LIMIT_S, LONGEST = 3, 30_000_000, 120, 60
KINDS = (1, 2)
"""The labels of a batch of two pictures or sounds."""
SUFFIX = r"(For(CausalLM|MaskedLM|ConditionalGeneration|(Image|Audio|Sequence)Classification|CTC)|(With)?LMHeadModel)$"
"""The task in the name of a class."""
SAME, OTHER, NOT_RUN = "same bits", "other bits or an error", "not run"


def tokens(step: int, length: int = 16) -> Any:
    import torch

    return torch.randint(3, 90, (2, length), generator=torch.Generator().manual_seed(step))


def text(config: Any, step: int) -> dict[str, Any]:
    return {"input_ids": tokens(step), "labels": tokens(step)}


def pair(config: Any, step: int) -> dict[str, Any]:
    return {"input_ids": tokens(step), "labels": tokens(step + STEPS)}


def image(config: Any, step: int) -> dict[str, Any]:
    import torch

    size = getattr(config, "image_size", 32)
    size = max(32, size) if isinstance(size, int) else 32
    return {"pixel_values": torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(step)),
            "labels": torch.tensor(KINDS)}


def wave(config: Any, step: int) -> dict[str, Any]:
    import torch

    return {"input_values": torch.randn(2, 2000, generator=torch.Generator().manual_seed(step)), "labels": tokens(step, 5)}


def sound(config: Any, step: int) -> dict[str, Any]:
    import torch

    return wave(config, step) | {"labels": torch.tensor(KINDS)}


@dataclass(frozen=True)
class Task:
    """One of the library's Auto classes: what it is, the name of its mapping, and a batch for a configuration and a step."""

    about: str
    mapping: str
    batch: Callable[[Any, int], dict[str, Any]]

    def classes(self) -> dict[str, tuple[type, type]]:
        """{name of the model's class: (that class, the class of its configuration)}."""
        from transformers.models.auto import modeling_auto

        found = {}
        for config, model in getattr(modeling_auto, self.mapping).items():
            model = model[0] if isinstance(model, list | tuple) else model
            found[model.__name__] = (model, config)
        return found


TASKS = {
    "causal": Task("causal language models", "MODEL_FOR_CAUSAL_LM_MAPPING", text),
    "masked": Task("masked language models", "MODEL_FOR_MASKED_LM_MAPPING", text),
    "seq2seq": Task("sequence to sequence", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING", pair),
    "vision-language": Task("vision-language models, trained on text alone", "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING", text),
    "image": Task("image classifiers", "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING", image),
    "audio": Task("audio classifiers", "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING", sound),
    "speech": Task("speech recognition by CTC", "MODEL_FOR_CTC_MAPPING", wave),
}


@dataclass(frozen=True)
class Outcome:
    """Of one architecture: SAME, OTHER or NOT_RUN, and why not SAME, in one line."""

    kind: str
    why: str = ""


def model_func_of(model_class: type, config_class: type, batch: Callable[..., Any]) -> tuple[Callable[[], Any], Any]:
    """A function that makes a small model, and its configuration. Raises what plain PyTorch raised at the first try."""
    import torch

    first = None
    for widths in TRIED:
        try:
            config = config_class()
            if "CausalLM" in model_class.__name__ or model_class.__name__.endswith("LMHeadModel"):
                config.is_decoder = True
            if batch is pair and not hasattr(config, "decoder_start_token_id"):
                config.decoder_start_token_id = 1
            shrink(config, widths)
            with torch.device("meta"):
                size = sum(param.numel() for param in made(model_class, config).parameters())
            if size > MOST_PARAMETERS:
                raise ValueError(f"{size:,} parameters although made small")
            model = made(model_class, config)
            loss = model(**batch(config, 0)).loss
            loss.backward()
            if not torch.isfinite(loss):
                raise ValueError(f"the loss of plain PyTorch is {loss.item()}")
            return partial(made, model_class, config), config
        except Exception as error:    # whatever the architecture raises: the next widths may fit
            first = first or error
    raise first


def made(model_class: type, config: Any) -> Any:
    return model_class(copy.deepcopy(config))    # some classes change their configuration


def compare(model_class: type, config_class: type, batch: Callable[..., Any]) -> Outcome:
    """Trains one architecture in both ways."""
    from tests import toy

    try:
        model_func, config = model_func_of(model_class, config_class, batch)
    except Exception as error:
        return Outcome(NOT_RUN, one_line(error))
    try:
        toy.compare(model_func, lambda model, step: model(**batch(config, step)).loss, STEPS)
    except Exception as error:
        return Outcome(OTHER, one_line(error))
    return Outcome(SAME)


def one_line(error: Exception) -> str:
    """The error's class and message, without what a table in Markdown would read as its own marks."""
    line = re.sub(r"<class '[\w.]*?(\w+)'>", r"\1", " ".join(f"{type(error).__name__}: {error}".split()))
    return shortened(re.sub(r"[|`<>*]", "", line), LONGEST)


def work(model_class: type, config_class: type, batch: Callable[..., Any], pipe: Connection) -> None:
    """The process of one architecture: sends its outcome."""
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    pipe.send(compare(model_class, config_class, batch))
    pipe.close()
    os._exit(0)    # neither torch's nor the library's threads are waited for


def outcome_of(model_class: type, config_class: type, batch: Callable[..., Any]) -> Outcome:
    """The outcome that an architecture's process sends; OTHER if the process dies or takes longer than LIMIT_S."""
    context = multiprocessing.get_context("fork")    # the libraries are imported once
    process, pipe = started(context, work, model_class, config_class, batch)
    try:
        return pipe.recv() if pipe.poll(LIMIT_S) else Outcome(OTHER, f"no result after {LIMIT_S} seconds")
    except EOFError:
        process.join()
        return Outcome(OTHER, f"its process ended with status {process.exitcode}")
    finally:
        process.kill()
        process.join()


def table(outcomes: dict[str, dict[str, Outcome]]) -> list[str]:
    """Outcomes by task and model: the number of each kind, the names of those with the same bits, the others' reasons."""
    lines = ["## Counts", "", f"| architectures | in the library | {SAME} | {OTHER} | {NOT_RUN} |",
             "|---|---:|---:|---:|---:|"]  # fmt: skip
    for task, found in outcomes.items():
        kinds = [outcome.kind for outcome in found.values()]
        lines.append(f"| {TASKS[task].about} | {len(kinds)} | " + " | ".join(
            str(kinds.count(kind)) for kind in (SAME, OTHER, NOT_RUN)) + " |")  # fmt: skip
    lines += ["", "## The same bits", "", "| architectures | models |", "|---|---|"]
    for task, found in outcomes.items():
        names = dict.fromkeys(re.sub(SUFFIX, "", name) for name, outcome in found.items() if outcome.kind == SAME)
        lines.append(f"| {TASKS[task].about} | {', '.join(names) or '-'} |")
    for kind, title in ((OTHER, "Other bits or an error, and which:"), (NOT_RUN, "Not run, and why:")):
        rows = [f"- `{name}`: {outcome.why}" for found in outcomes.values() for name, outcome in found.items()
                if outcome.kind == kind]  # fmt: skip
        lines += ["", title, "", *rows] if rows else []
    return lines


def page(outcomes: dict[str, dict[str, Outcome]], argv: list[str]) -> str:
    """The page, in Markdown."""
    import transformers

    facts = [("work", f"{STEPS} steps each, fp32, one process on 1 of {num_cores()} cores ({processor()}), near_budget min"),
             ("versions", versions(transformers=transformers.__version__)),
             *when_and_how("hf_architectures.sh", argv)]  # fmt: skip
    return "\n".join(["# Architectures of Transformers", "", *bullets(facts), "", *table(outcomes), ""])


def parse(argv: list[str]) -> argparse.Namespace:
    """Parses the command line; an error prints one line and exits with status 2."""
    parser = parser_of("hf_architectures.sh", __doc__)
    parser.add_argument("--only", choices=TASKS, help="one task of the library's Auto classes (default: all)")
    parser.add_argument("--names", default="", help="models whose class begins with this (default: all)")
    parser.add_argument("--results", type=Path, default=HERE / "results", help="where to write [%(default)s]")
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    """Compares, and prints a line for each model and then the page."""
    options = parse(argv)
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    outcomes: dict[str, dict[str, Outcome]] = {}
    for task in [options.only] if options.only else TASKS:
        outcomes[task] = {}
        for name, classes in TASKS[task].classes().items():
            if not name.startswith(options.names):
                continue
            outcomes[task][name] = found = outcome_of(*classes, TASKS[task].batch)
            print(f"{task:8} {name:48} {found.kind:24} {found.why}", flush=True)
    if not any(outcomes.values()):
        print(f"error: --names {options.names}: no model's class begins with it", file=sys.stderr)
        return 2
    text = page(outcomes, argv)
    if options.only or options.names:
        print(text, end="")
    else:
        publish(text, options.results / "hf_architectures.md")
    return int(any(found.kind == OTHER for models in outcomes.values() for found in models.values()))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
