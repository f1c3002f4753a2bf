"""Text from what chapter 08 trained: a base with its adapter, or a plain model.

bash chapters/08_param_efficient/generate.sh --prompt 今天天气 --num 3
bash chapters/08_param_efficient/generate.sh --adapter runs/08_param_efficient/final --prompt 今天天气
bash chapters/08_param_efficient/generate.sh --model runs/00_single --bits 4         # the blocks' weights in NF4

An adapter names its base. --bits keeps the weights of the blocks in int8 or NF4, and says how many bytes that saves. The
other flags are those of the other chapters.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from gpt2_chinese.checkpoint.trained_model import pick_device
from gpt2_chinese.errors import UserError
from gpt2_chinese.files import kind
from gpt2_chinese.generate.__main__ import main


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags that the other chapters lack."""
    parser.add_argument("--adapter", help="final/ of a run of this chapter, or a folder that PEFT saved")
    parser.add_argument("--base", help="the base of the adapter (default: the one that it names)")
    parser.add_argument("--bits", type=int, choices=(8, 4), help="bits of a weight of the blocks (default: as trained)")


def load(a: argparse.Namespace) -> tuple[Any, Any]:
    """The model and vocabulary of the flags. Raises UserError."""
    if a.adapter is not None and kind(Path(a.adapter) / "adapter_config.json", f"--adapter {a.adapter}") != "file":
        raise UserError(f"--adapter {a.adapter} has no adapter_config.json: give final/ of a run of chapter 08")
    from adapt import load_adapted, quantise  # late: flags are checked before torch is loaded
    from quantize import weight_bytes

    device = pick_device(a.device)
    model, vocabulary = load_adapted(a.adapter or a.model, "cpu", a.vocab, a.base)
    if a.bits is not None:
        before = weight_bytes(model)
        quantise(model, a.bits)
        after = weight_bytes(model)
        line = f"note: {a.bits} bits: {after:,} bytes of weights instead of {before:,}, {after / before:.0%}"
        print(line, file=sys.stderr, flush=True)
    return model.to(device).eval(), vocabulary


if __name__ == "__main__":
    main(load=load, description=__doc__, add_flags=add_flags)
