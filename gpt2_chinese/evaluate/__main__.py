"""Loss, perplexity, bits per character, questions answered and variety of text, of one model or of several side by side.

bash scripts/python.sh -m gpt2_chinese.evaluate --model runs/00_single
bash scripts/python.sh -m gpt2_chinese.evaluate --model runs/00_single --corpus data/train --by genre position --stride 64
bash scripts/python.sh -m gpt2_chinese.evaluate --model runs/00_single runs/07_patrickstar --by genre --choices --samples 4

--choices reads questions in the forms of CLUE's CHID, C3 and CMNLI, by default those of data/choices; a model answers by
likelihood. --samples generates text and measures how varied it is and how much it repeats itself.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
from pathlib import Path

from durable.printable import utf8
from gpt2_chinese.corpus import corpus_files
from gpt2_chinese.errors import UserError, command_parser, exit_on_user_error
from gpt2_chinese.evaluate.choices import ChoiceSet, read_set, set_files
from gpt2_chinese.evaluate.perplexity import KINDS, plot, short_names, write
from gpt2_chinese.evaluate.report import evaluate, print_one, print_several, write_board
from gpt2_chinese.files import check_output_file, check_output_folder, kind
from gpt2_chinese.settings import ROOT

SHIPPED = ROOT / "data" / "choices"
MOST = 10**6  # of samples and of their tokens


def _parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line, checked as far as it goes without torch. Raises UserError."""
    parser = command_parser("bash scripts/python.sh -m gpt2_chinese.evaluate", __doc__)
    add = parser.add_argument
    add("--model", required=True, nargs="+", metavar="MODEL",
        help="runs, their final/, checkpoints, or Hugging Face folders; several are compared in one table")
    add("--vocab", type=Path, help="vocab.txt or tokenizer.json (default: that of the model's folder)")
    add("--corpus", type=Path, nargs="+", default=[ROOT / "data/valid"], metavar="PATH",
        help="array-JSON files or folders of them; windows do not cross from one PATH to the next (default: shipped corpus)")
    add("--by", nargs="+", choices=KINDS, default=[], metavar="KIND",
        help="genre (one a file), folder, position (in the context), frequency (rank of the token) (default: none)")
    add("--choices", type=Path, nargs="*", metavar="PATH",
        help="questions in the form of CHID, C3 or CMNLI: files or folders (default: none; without a PATH: data/choices)")
    add("--limit", type=int, metavar="N", help="only the first N questions of each file (default: all)")
    add("--samples", type=int, default=0, metavar="N", help="texts to generate after each prompt (default: 0)")
    add("--prompt", action="append", metavar="TEXT",
        help="beginning of a text of --samples; may be repeated (default: three of the course)")
    add("--length", type=int, default=100, metavar="N", help="most new tokens of a sample (default: 100)")
    add("--seed", type=int, default=42, metavar="N", help="seed of the samples (default: 42)")
    add("--seq-len", type=int, metavar="N", help="tokens in a window (default: as the model was trained, else its context)")
    add("--stride", type=int, metavar="N", help="tokens from window to window (default: --seq-len, as in training)")
    add("--batch-size", type=int, default=8, metavar="N", help="windows computed at once (default: 8)")
    add("--precision", choices=("fp32", "bf16", "fp16"), help="dtype of matrix products (default: fp32 on CPU, bf16 on GPU)")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where to compute (default: auto)")
    add("--json", type=Path, metavar="FILE", help="also write all numbers to this file, as JSON (default: none)")
    add("--plot", type=Path, metavar="FILE.png", help="also draw the loss by position into this file (default: none)")
    add("--tensorboard", type=Path, metavar="FOLDER",
        help="also write a TensorBoard run for each model into this folder (default: none)")
    a = parser.parse_args(argv)
    _check(a)
    return a


def _check(a: argparse.Namespace) -> None:
    """Raises UserError for a number out of range, and for a file that is not there or cannot be written."""
    for name, least in (("seq_len", 1), ("stride", 1), ("batch_size", 1), ("limit", 1), ("length", 1), ("samples", 0),
                        ("seed", 0)):  # fmt: skip
        value = getattr(a, name)
        if value is not None and value < least:
            raise UserError(f"--{name.replace('_', '-')} must be at least {least}, not {value}")
    for name in ("length", "samples"):
        if getattr(a, name) > MOST:
            raise UserError(f"--{name} must be at most {MOST}, not {getattr(a, name)}")
    if a.prompt and not a.samples:
        raise UserError("--prompt is for --samples: give --samples N, too")
    if a.limit is not None and a.choices is None:
        raise UserError("--limit is for --choices: give --choices, too")
    for flag, file in (("--json", a.json), ("--plot", a.plot)):
        if file is not None:
            check_output_file(file, flag)
    if a.plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise UserError("--plot draws with matplotlib, which is not installed: pip install matplotlib, or leave --plot out")
    if a.tensorboard is not None:
        check_output_folder(a.tensorboard, "--tensorboard")
    for model in a.model:
        if kind(model, f"--model {model}") == "missing":
            raise UserError(f"--model {model} does not exist: give a run, its final/, a checkpoint or a Hugging Face folder")
    if len(set(a.model)) < len(a.model):
        raise UserError("--model names the same model twice: give each once")
    for path in a.corpus:
        corpus_files(path)


def main(argv: list[str] | None = None) -> None:
    """The command line."""
    with exit_on_user_error():
        a = _parse(argv)
        sets: list[ChoiceSet] = []
        if a.choices is not None:
            sets = [read_set(file, a.limit) for path in a.choices or [SHIPPED] for file in set_files(path)]
        names = _names(a.model)
        founds = {name: evaluate(a, path, sets) for name, path in zip(names, a.model, strict=True)}
        if len(founds) == 1:
            print_one(founds[names[0]])
        else:
            print_several(founds)
        if a.json is not None:
            whole = founds[names[0]] if len(founds) == 1 else {"models": founds}
            content = utf8(json.dumps(whole, ensure_ascii=False, indent=2, allow_nan=False)) + "\n"
            write(a.json, lambda staging: staging.write_text(content, encoding="utf-8"), "--json")
        if a.plot is not None:
            plot(founds, a.plot)
        if a.tensorboard is not None:
            write_board(founds, a.tensorboard)


def _names(models: list[str]) -> list[str]:
    """What the tables call the models: the shortest endings of their paths that differ."""
    names = short_names([Path(model) for model in models])
    return names if len(set(names)) == len(names) else models


if __name__ == "__main__":
    main()
