"""Evaluates models one by one by the same flags, and prints the numbers: of one in full, of several side by side."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpt2_chinese.evaluate.perplexity import KINDS, aligned, evaluate_corpora, short_names, table
from gpt2_chinese.evaluate.samples import variety

if TYPE_CHECKING:
    from gpt2_chinese.evaluate.choices import ChoiceSet

NOT_COMPARABLE = "The vocabularies differ, so only bits/char compare, and accuracies."
VARIETY = ("distinct_1", "distinct_2", "distinct_3", "repetition_4")


def evaluate(a: argparse.Namespace, path: str, sets: list[ChoiceSet]) -> dict[str, Any]:
    """All numbers of one model; loads it, and forgets it at the end. Raises UserError.

    Args:
        a: the flags.
        path: the model.
        sets: questions to answer.
    """
    from gpt2_chinese.checkpoint.trained_model import find_model, load_model, pick_device

    device = pick_device(a.device)
    precision = a.precision or ("bf16" if device.type == "cuda" else "fp32")
    folder = find_model(path)
    model, vocabulary = load_model(folder, device, a.vocab)
    found = evaluate_corpora(a, folder, model, vocabulary, precision, device)
    found["vocabulary"] = vocabulary.digest
    if sets:
        from gpt2_chinese.evaluate.likelihood import answer_set

        names = short_names([each.path for each in sets])
        found["choices"] = {name: answer_set(model, vocabulary, each, a.batch_size, precision, device)
                            for name, each in zip(names, sets, strict=True)}  # fmt: skip
    if a.samples:
        found["samples"] = _samples(a, model, vocabulary)
    return found


def _samples(a: argparse.Namespace, model: Any, vocabulary: Any) -> dict[str, Any]:
    """distinct-n and repetition of --samples texts after each prompt, drawn as `generate` draws by default."""
    from gpt2_chinese.generate.sampling import Sampling
    from gpt2_chinese.generate.writer import Writer
    from gpt2_chinese.run.run import prompts_for

    sampling = Sampling(temperature=0.8, top_k=40, repetition_penalty=1.1)
    writer = Writer(model, vocabulary, a.length, a.samples, a.seed, sampling, True)
    texts = [text.text for batch in writer.texts(a.prompt or list(prompts_for(vocabulary)), a.batch_size) for text in batch]
    return variety(texts) | {"length": a.length, "seed": a.seed}


def print_one(found: dict[str, Any]) -> None:
    """Prints everything about one model."""
    where = f"windows of {found['seq_len']}, stride {found['stride']}, {found['precision']} on {found['device']}"
    print(f"{found['model']} on {', '.join(found['corpus'])}\n{where}\n\n{table(found)}")
    if choices := found.get("choices"):
        head = ("questions", "form", "items", "right", "+-", "by character", "guessing")
        print("\n" + aligned([head, *((name, one["form"], f"{one['items']:,}", f"{one['accuracy']:.1%}",
              f"{one['standard_error']:.1%}", f"{one['accuracy_per_character']:.1%}", f"{one['chance']:.1%}")
              for name, one in choices.items())]))  # fmt: skip
        if cut := sum(one["cut"] for one in choices.values()):
            print(f"note: {cut} texts are longer than the model's context, and lost their beginning")
    if samples := found.get("samples"):
        words = ", ".join(f"{_name(name)} {_share(samples[name])}" for name in VARIETY)
        print(f"\n{samples['texts']} samples of {samples['length']} tokens: {words}")


def print_several(founds: dict[str, dict[str, Any]]) -> None:
    """Prints a row for each model, and for each breakdown a column for each model."""
    first = next(iter(founds.values()))
    print(f"{', '.join(first['corpus'])}: windows of {_same(founds, 'seq_len')}, stride {_same(founds, 'stride')}, "
          f"{first['precision']} on {first['device']}\n")  # fmt: skip
    choices, samples = first.get("choices", {}), first.get("samples")
    head = ["", "loss", "perplexity", "bits/char", "top-1", *choices, *(map(_name, VARIETY) if samples else ())]
    rows = [tuple(head)]
    for name, found in founds.items():
        every = found["all"]
        row = [name, f"{every['loss']:.4f}", f"{every['perplexity']:.2f}", f"{every['bits_per_character']:.4f}",
               f"{every['accuracy']:.2%}", *(f"{found['choices'][one]['accuracy']:.1%}" for one in choices)]  # fmt: skip
        rows.append((*row, *(_share(found["samples"][key]) for key in VARIETY)) if samples else tuple(row))
    if choices:
        guessing = [f"{one['chance']:.1%}" for one in choices.values()]
        rows.append(("guessing", *[""] * 4, *guessing, *[""] * (len(head) - 5 - len(choices))))
    print(aligned(rows))
    for kind in KINDS:
        names = list(dict.fromkeys(name for found in founds.values() for name in found.get(f"by_{kind}", {})))
        if names:
            lines = [(f"perplexity by {kind}", *founds)]
            print("\n" + aligned([*lines, *((f"  {name}", *(_perplexity(found[f"by_{kind}"].get(name))
                                                          for found in founds.values())) for name in names)]))  # fmt: skip
    if len({found["vocabulary"] for found in founds.values()}) > 1:
        print(f"\nnote: {NOT_COMPARABLE}")


def write_board(founds: dict[str, dict[str, Any]], folder: Path) -> None:
    """TensorBoard's files: one run for each model, its numbers as scalars at step 0."""
    from torch.utils.tensorboard import SummaryWriter

    for name, found in founds.items():
        with SummaryWriter(str(folder / name.replace("/", "_"))) as board:
            for tag, value in scalars(found).items():
                board.add_scalar(f"evaluate/{tag}", value, 0)


def scalars(found: dict[str, Any]) -> dict[str, float]:
    """The finite numbers of a model by tag: all/loss, by_genre/news/loss, choices/cloze/accuracy, samples/distinct_1."""
    numbers: dict[str, float] = {}

    def add(tag: str, row: dict[str, Any]) -> None:
        for name, value in row.items():
            if isinstance(value, int | float) and math.isfinite(value):
                numbers[f"{tag}/{name}"] = value

    add("all", found["all"])
    for kind in KINDS:
        for name, row in found.get(f"by_{kind}", {}).items():
            add(f"by_{kind}/{name}", row)
    for name, row in found.get("choices", {}).items():
        add(f"choices/{name}", row)
    add("samples", found.get("samples", {}))
    return numbers


def _perplexity(row: dict[str, Any] | None) -> str:
    return "" if row is None else f"{row['perplexity']:.2f}"


def _share(value: float | None) -> str:
    return "none" if value is None else f"{value:.3f}"


def _name(key: str) -> str:
    return key.replace("_", "-")


def _same(founds: dict[str, dict[str, Any]], key: str) -> str:
    return " or ".join(map(str, dict.fromkeys(found[key] for found in founds.values())))
