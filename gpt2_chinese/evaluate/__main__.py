"""Loss, perplexity, bits per character and accuracy of any model on any corpus that training takes.

python -m gpt2_chinese.evaluate --model runs/00_single
python -m gpt2_chinese.evaluate --model runs/00_single --corpus data/train data/valid --by genre position --stride 64
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
from pathlib import Path

from gpt2_chinese.corpus import corpus_files
from gpt2_chinese.errors import UserError, command_parser, exit_on_user_error
from gpt2_chinese.evaluate.perplexity import KINDS, evaluate_corpora, plot, table, write
from gpt2_chinese.settings import ROOT


def _parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line, checked as far as it goes without torch. Raises UserError."""
    parser = command_parser("python -m gpt2_chinese.evaluate", __doc__)
    add = parser.add_argument
    add("--model", required=True, help="a run, its final/, a checkpoint, or a Hugging Face folder")
    add("--vocab", type=Path, help="vocabulary (default: the model's own)")
    add("--corpus", type=Path, nargs="+", default=[ROOT / "data/valid"], metavar="PATH",
        help="array-JSON files or folders of them; windows do not cross from one PATH to the next (default: shipped corpus)")
    add("--by", nargs="+", choices=KINDS, default=[], metavar="KIND",
        help="genre (one a file), position (in the context), frequency (rank of the token in the corpus) (default: none)")
    add("--seq-len", type=int, metavar="N", help="tokens in a window (default: as the model was trained, else its context)")
    add("--stride", type=int, metavar="N", help="tokens from window to window (default: --seq-len, as in training)")
    add("--batch-size", type=int, default=8, metavar="N", help="windows at once (default: 8)")
    add("--precision", choices=("fp32", "bf16", "fp16"), help="dtype of matrix products (default: fp32 on CPU, bf16 on GPU)")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where to compute (default: auto)")
    add("--json", type=Path, metavar="FILE", help="also write all numbers there (default: none)")
    add("--plot", type=Path, metavar="FILE.png", help="also draw the loss by position (default: none)")
    a = parser.parse_args(argv)
    for name in ("seq_len", "stride", "batch_size"):
        value = getattr(a, name)
        if value is not None and value < 1:
            raise UserError(f"--{name.replace('_', '-')} must be at least 1, not {value}")
    for flag, file in (("--json", a.json), ("--plot", a.plot)):
        if file is not None and (file.is_dir() or not os.access(file.absolute().parent, os.W_OK | os.X_OK)):
            raise UserError(f"{flag} {file} cannot be written: give a file in a folder that exists and is writable")
    if a.plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise UserError("--plot draws with matplotlib, which is not installed: pip install matplotlib, or leave --plot out")
    if not Path(a.model).exists():
        raise UserError(f"--model {a.model} does not exist: give a run, its final/, a checkpoint or a Hugging Face folder")
    for path in a.corpus:
        corpus_files(path)
    return a


def main(argv: list[str] | None = None) -> None:
    """The command line."""
    with exit_on_user_error():
        a = _parse(argv)
        found = evaluate_corpora(a)
        where = f"windows of {found['seq_len']}, stride {found['stride']}, {found['precision']} on {found['device']}"
        print(f"{found['model']} on {', '.join(found['corpus'])}\n{where}\n\n{table(found)}")
        if a.json is not None:
            content = json.dumps(found, ensure_ascii=False, indent=2, allow_nan=False) + "\n"
            write(a.json, lambda staging: staging.write_text(content, encoding="utf-8"), "--json")
        if a.plot is not None:
            plot(found, a.plot)


if __name__ == "__main__":
    main()
