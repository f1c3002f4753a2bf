"""Chapter 08: a trained model in fewer bits. Prints what each format costs and what it leaves of the model; writes GGUF.

bash chapters/08_param_efficient/compress.sh --model runs/00_single                     # a table of all formats
bash chapters/08_param_efficient/compress.sh --model runs/00_single --formats int8 nf4 gptq
bash chapters/08_param_efficient/compress.sh --model runs/00_single --plant-outliers 4  # as in a large model
bash chapters/08_param_efficient/compress.sh --model runs/00_single --gguf model.gguf --type Q8_0
bash chapters/08_param_efficient/compress.sh --help

--model takes what generate.sh takes: a run, its final/, a checkpoint, or a Hugging Face folder. Bits a weight count the
blocks' matrices with their scales; embeddings, norms and biases stay in 32 bit, except in GGUF (quantize/gguf.py).
"""
# ruff: noqa: E402, I001

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from compress_formats import FORMATS, GGUF_TYPES, check_gguf_type, report
from durable.files import write_json
from gpt2_chinese.checkpoint.trained_model import find_weights
from gpt2_chinese.corpus import corpus_files
from gpt2_chinese.errors import UserError, command_parser, exit_on_user_error
from gpt2_chinese.files import check_output_file
from gpt2_chinese.settings import ROOT


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line, checked before torch is loaded. Raises UserError."""
    parser = command_parser("compress.sh", __doc__)
    add = parser.add_argument
    add("--model", required=True, help="a run, its final/, a checkpoint, or a Hugging Face folder")
    add("--vocab", type=Path, help="vocabulary (default: the model's own)")
    add("--formats", nargs="+", choices=tuple(FORMATS), default=list(FORMATS), metavar="FORMAT",
        help=f"{', '.join(FORMATS)} (default: all)")
    add("--valid-data", type=Path, default=ROOT / "data/valid", help="text for the perplexity (default: shipped)")
    add("--train-data", type=Path, default=ROOT / "data/train", help="text for calibration (default: shipped)")
    add("--calibration", type=int, default=32, metavar="N", help="windows of that text for GPTQ and outliers (default: 32)")
    add("--block", type=int, default=64, metavar="N", help="weights that share a scale in int4, nf4, gptq (default: 64)")
    add("--threshold", type=float, default=6.0, metavar="X", help="magnitude of an outlier column of int8 (default: 6.0)")
    add("--plant-outliers", type=int, default=0, metavar="N", help="features to scale up first, as in a large model; the "
        "function of the model stays (default: 0)")  # fmt: skip
    add("--seq-len", type=int, metavar="N", help="tokens in a window (default: as the model was trained, else its context)")
    add("--batch-size", type=int, default=8, metavar="N", help="windows at once (default: 8)")
    add("--json", type=Path, metavar="FILE", help="also write the table's numbers there (default: none)")
    add("--gguf", type=Path, metavar="FILE", help="write the model for llama.cpp, and no table (default: none)")
    add("--type", help=f"of --gguf: {', '.join(GGUF_TYPES)} (default: Q8_0)")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where to compute (default: auto)")
    a = parser.parse_args(argv)
    check(a)
    return a


def check(a: argparse.Namespace) -> None:
    """Raises UserError for values out of range, files that cannot be written, or a model that is not there."""
    for name, least in (("calibration", 1), ("block", 1), ("batch_size", 1), ("seq_len", 1), ("plant_outliers", 0)):
        value = getattr(a, name)
        if value is not None and value < least:
            raise UserError(f"--{name.replace('_', '-')} must be at least {least}, not {value}")
    if not a.threshold > 0:
        raise UserError(f"--threshold must be above 0, not {a.threshold}")
    if a.type and not a.gguf:
        raise UserError(f"--type {a.type} is for --gguf: give --gguf FILE, too")
    a.type = a.type or "Q8_0"
    check_gguf_type(a.type)
    for flag, file in (("--gguf", a.gguf), ("--json", a.json)):
        if file is not None:
            check_output_file(file, flag)
    if not Path(a.model).exists():
        raise UserError(f"--model {a.model} does not exist: give a run, its final/, a checkpoint or a Hugging Face folder")
    find_weights(a.model)
    if not a.gguf:
        corpus_files(a.valid_data)
        corpus_files(a.train_data)


def main(argv: list[str] | None = None) -> None:
    """The command line."""
    with exit_on_user_error():
        a = parse(argv)
        if a.gguf:
            print(export(a))
            return
        from compress_table import measure

        rows: list[dict[str, Any]] = measure(a)
        print(report(rows))
        if a.json:
            write_json(a.json, rows)


def export(a: argparse.Namespace) -> str:
    """Writes --gguf; returns what to print."""
    from gpt2_chinese.checkpoint.trained_model import load_model
    from quantize.gguf import write_gguf

    model, vocabulary = load_model(a.model, "cpu", a.vocab)
    num_bytes = write_gguf(a.gguf, model, vocabulary, a.type, str(a.model))
    before = 4 * sum(parameter.numel() for parameter in model.parameters())
    return f"{a.gguf}: GPT-2 as GGUF {a.type}, {num_bytes:,} bytes; in fp32 its weights are {before:,}"


if __name__ == "__main__":
    main()
