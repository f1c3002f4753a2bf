"""A step that saves against one that does not, with and without --async-save. One process.

bash benchmarks/async_save.sh                # about two minutes
bash benchmarks/async_save.sh --quick        # a small model, to see that it runs

The loop of chapter 00 on random tokens takes two steps in each turn: one that ends with no save, an ordinary save or a save
in the background, and the next one, during which a save in the background is written. Then it waits for that save. The three
take turns, in an order that rotates. A ratio is the median over the rounds of the ratio to the step without a save in the
SAME round.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from command_line import at_least, parser_of, publish, set_missing
from facts import bullets, processor, versions, when_and_how
from turns import in_turns

from durable.cores import num_cores

HERE = Path(__file__).resolve().parent
SIZES = {
    "tiny": {"n_layer": 4, "n_embd": 128, "n_head": 4, "n_positions": 128, "vocab_size": 3980, "batch": 24},
    "wide": {"n_layer": 4, "n_embd": 256, "n_head": 4, "n_positions": 128, "vocab_size": 21128, "batch": 8},
}
SMALL = {"small": {"n_layer": 2, "n_embd": 32, "n_head": 2, "n_positions": 32, "vocab_size": 500, "batch": 4}}
HOWS = {"none": "no save", "ordinary": "a save", "background": "a save with --async-save"}
WARM_UP_STEPS = 3
GOAL = 1.05


class Loop:
    """Chapter 00's loop, and a folder for each way to save."""

    def __init__(self, size: dict[str, int], folder: Path) -> None:
        import torch

        from gpt2_chinese.distributed.ranks import Ranks
        from gpt2_chinese.model.config import ModelConfig
        from gpt2_chinese.model.gpt2 import GPT2LMHeadModel
        from gpt2_chinese.run.resolve import resolve
        from gpt2_chinese.run.saving import Saving
        from gpt2_chinese.settings import Settings

        torch.manual_seed(0)
        shape = (size["batch"], size["n_positions"] + 1)
        self.tokens = torch.randint(0, size["vocab_size"], shape)
        config = ModelConfig(**{key: value for key, value in size.items() if key != "batch"})
        self.model = GPT2LMHeadModel(config)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.num_bytes = 12 * sum(p.numel() for p in self.model.parameters())
        program, self.number, self.savings = str(HERE.parent / "chapters/00_single/train.py"), 0, {}
        for how, flags in (("ordinary", []), ("background", ["--async-save"])):
            given = ["--output-dir", str(folder / how), "--keep-last", "1", *flags]
            settings = resolve(Settings.from_command_line(program, "", given))
            settings.model = config
            self.savings[how] = Saving(settings, Ranks(), lambda: None, print)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(self.tokens[:, :-1], self.tokens[:, 1:]).backward()
        self.optimizer.step()
        self.number += 1

    def turn(self, how: str) -> tuple[float, float]:
        """Seconds of a step that saves in this way, and of the next one."""
        from gpt2_chinese.checkpoint.model_state import adamw_moments, weights_of

        begin = time.perf_counter()
        self.step()
        if how != "none":
            moments = adamw_moments(self.model, self.optimizer)
            self.savings[how].save(self.number, weights_of(self.model), moments, None, lambda: None)
        saved = time.perf_counter()
        self.step()
        end = time.perf_counter()
        if how != "none":
            self.savings[how].settle()
        return saved - begin, end - saved


def table(name: str, size: dict[str, Any], rounds: int) -> list[str]:
    turns: dict[str, list[tuple[float, float]]] = {how: [] for how in HOWS}
    with tempfile.TemporaryDirectory() as folder:
        loop = Loop(size, Path(folder))
        for _ in range(WARM_UP_STEPS):
            loop.step()
        for how in ("ordinary", "background"):  # the first copy in the background takes new memory
            loop.turn(how)
        for how in in_turns(list(HOWS), rounds):
            turns[how].append(loop.turn(how))
    about = f"{size['n_layer']} layers, {size['n_embd']} wide, vocabulary {size['vocab_size']}, batch {size['batch']} x " \
            f"{size['n_positions']} tokens"
    lines = [f"## {name}: {about}, {loop.num_bytes / 1e6:,.0f} MB a checkpoint", "",
             "| the step ends with | step, s | against no save | next step, s | against no save |",
             "|---|---:|---:|---:|---:|"]  # fmt: skip
    for how, about in HOWS.items():
        cells = []
        for part in (0, 1):
            ours, theirs = ([turn[part] for turn in turns[each]] for each in (how, "none"))
            ratio = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
            cells += [f"{statistics.median(ours):.3f}", f"{ratio:.2f}"]
        lines.append(f"| {about} | {' | '.join(cells)} |")
    return [*lines, ""]


def parse(argv: list[str]) -> argparse.Namespace:
    """Parses the command line; an error prints one line and exits with status 2."""
    parser = parser_of("async_save.sh", __doc__)
    parser.add_argument("--quick", action="store_true", help="a small model, 2 rounds")
    parser.add_argument("--rounds", type=at_least(1), help="interleaved rounds (default: 12; with --quick 2)")
    parser.add_argument("--results", type=Path, default=HERE / "results", help="where to write")
    options = parser.parse_args(argv)
    set_missing(options, rounds=(12, 2))
    return options


def main(argv: list[str]) -> int:
    """Measures and writes async_save.md."""
    options = parse(argv)
    sys.path.insert(0, str(HERE.parent))
    tables = [table(name, size, options.rounds) for name, size in (SMALL if options.quick else SIZES).items()]
    text = "\n".join([
        "# A step that saves", "",
        f"- work: chapter 00's loop, fp32, AdamW; one process of {num_cores()} thread(s) on {num_cores()} cores "
        f"({processor()})",
        f"- versions: {versions()}",
        f"- rounds: {options.rounds}, interleaved; goal: with --async-save at most {GOAL} of no save",
        *bullets(when_and_how("async_save.sh", argv)), "", *(line for lines in tables for line in lines),
    ])  # fmt: skip
    publish(text, options.results / "async_save.md")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
