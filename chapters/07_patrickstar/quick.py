"""What each optimisation of pstar brings: a table and a figure in three minutes. One process, random data, no corpus.

bash chapters/07_patrickstar/quick.sh                    # about three minutes on two quiet cores
bash chapters/07_patrickstar/quick.sh --rounds 3         # fewer rounds: sooner, and less certain
bash chapters/07_patrickstar/quick.sh --near 50%         # more room near

A GPT-2 trains whose model data (weights, gradients, Adam's states) are larger than near. `all as set` has pstar's settings
with near_states fill. Every other variant changes what its name says. Without a GPU near is host memory with a budget, and
copies take as long as over a link whose transfers of a step take half as long as its computation (simulated_link); one core
computes and one copies. All variants take steps in turns, in an order that rotates, so other programs slow all of them.
A ratio compares two variants in the same round; the table has the medians over the rounds.

All variants compute the same losses, bit for bit, except 8-bit states.
"""

from __future__ import annotations

import shlex
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from durable.cores import num_cores
from gpt2_chinese.errors import UserError, command_parser, exit_on_user_error

SIZE = {"n_layer": 6, "n_embd": 256, "n_head": 4, "n_positions": 64, "vocab_size": 1024}
TINY = {"n_layer": 4, "n_embd": 64, "n_head": 2, "n_positions": 16, "vocab_size": 256}
BATCH, WARM_UP, TIMED, ROOM = 4, 3, 2, "60%"
LINK = 0.5
"""Seconds that the transfers of a step take, in seconds that it computes."""
BASE = "all as set"
ADAM = {"lr": 1e-3, "weight_decay": 0.1}


@dataclass
class Variant:
    """One setting that differs, and what was measured with it."""

    name: str
    keys: dict[str, Any] = field(default_factory=dict)
    about: str = ""
    checkpointing: bool = False
    tiled: bool = False
    rounds: list[dict[str, float]] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)


def variants(size: dict[str, int], disk: str, device: str) -> list[Variant]:
    """All variants, the common settings first. disk: a folder for the variant that uses one."""
    tile = tile_elems(size)
    host = {"optimizer": {"params": ADAM | {"use_hybrid_adam": False}}}
    stream = Variant("far_states stream", {"far_states": "stream"}, "states in far are updated near, and copied back")
    return [*(
        Variant(BASE, about="prefetch 2, eviction by next use, updates by the host"),
        Variant("near_budget 100%", {"near_budget": "100%"}, "everything fits: nothing is copied"),
        Variant("prefetch 0", {"prefetch": 0}, "copies begin only when a module needs them"),
        Variant("eviction_policy lru", {"eviction_policy": "lru"}, "the least recently used chunk leaves"),
        Variant("eviction_policy fifo", {"eviction_policy": "fifo"}, "the chunk that came first leaves"),
        Variant("overlap_update", {"overlap_update": True}, "updates in far run during the next forward"),
        Variant("offload_activations", {"offload_activations": True}, "activations wait in host memory"),
        Variant("recomputation", {}, "blocks keep their input, backward computes the rest again", checkpointing=True),
        Variant("tiling, smaller chunks", {"default_chunk_size": tile},
                f"linear layers and chunks of at most {tile:,}", tiled=True),
        Variant("state_bits 8", {"optimizer": {"params": ADAM | {"state_bits": 8}}},
                "8-bit states: 6 bytes a parameter less, other rounding"),
        Variant("disk_path, far_budget min", {"disk_path": disk, "far_budget": "min"},
                "host memory has the least that works, the disk the rest"),
        Variant(f"near {ROOM}", {"near_budget": ROOM}, "room for states: hybrid Adam updates some groups near"),
        Variant(f"near {ROOM}, near_states margin", {"near_budget": ROOM, "near_states": "margin"},
                "states near only in addition to all parameters"),
        Variant(f"near {ROOM}, use_hybrid_adam false", {"near_budget": ROOM} | host, "every update is computed by the host"),
    ), *([stream] if device != "cpu" else [])]


def tile_elems(size: dict[str, int]) -> int:
    """Elements of a tile: a sixth of a layer."""
    return 2 * size["n_embd"] ** 2


class Trainer:
    """An engine with the settings of one variant, and its random batch."""

    def __init__(self, variant: Variant, size: dict[str, int], keys: dict[str, Any], device: str):
        import torch

        import pstar

        def build() -> torch.nn.Module:
            from types import SimpleNamespace

            from recompute import build_model

            from gpt2_chinese.model.config import ModelConfig

            torch.manual_seed(0)
            found = build_model(SimpleNamespace(model=ModelConfig(**size), loss_tiles="none",
                                                activation_checkpointing=variant.checkpointing))
            if variant.tiled:
                with warnings.catch_warnings():    # the head shares the embedding's table, and stays whole
                    warnings.simplefilter("ignore")
                    pstar.tile_linears(found, tile_elems(size))
            return found

        config = {"optimizer": {"type": "AdamW", "params": ADAM}, "near_states": "fill"} | keys | variant.keys
        plan = pstar.plan_engine(build, config, device=device)
        self.variant, self.least_near = variant, plan.least_near
        self.model, self.optimizer = pstar.initialize_engine(build, 0, config, device=device)
        shape = (BATCH, size["n_positions"] + 1)
        tokens = torch.randint(0, size["vocab_size"], shape, generator=torch.Generator().manual_seed(1)).to(device)
        self.inputs, self.targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def step(self, watch: Any = None) -> None:
        """One training step; `watch` is a context in which forward and backward run."""
        from contextlib import nullcontext

        self.optimizer.zero_grad()
        with watch or nullcontext():
            loss = self.model(self.inputs, self.targets)
            self.model.backward(loss)
        self.optimizer.step()
        self.variant.losses.append(float(loss.detach()))

    def warm_up(self) -> None:
        """The first step is traced and the second follows the trace; one more counts the bytes of activations."""
        from pstar.memory.activation_peak import LiveBytes

        for _ in range(WARM_UP):
            self.step()
        model = self.model
        live = LiveBytes(lambda address: model.near.holds(address) or model.far.holds(address))
        self.step(live)
        self.variant.facts |= {"activations": live.take_peak(), "chunks near": model.near.peak_bytes,
                               "least near": self.least_near}

    def turn(self) -> None:
        """Adds a round: the means over TIMED steps. One step before them is not timed: it ends what others began."""
        self.step()
        begin = time.perf_counter()
        told = []
        for _ in range(TIMED):
            self.step()
            told.append(self.model.step_scalars())
        means = {key: sum(each[key] for each in told) / TIMED for key in told[0]}
        self.variant.rounds.append(means | {"seconds": (time.perf_counter() - begin) / TIMED})


def link_speed(size: dict[str, int], near: str, device: str) -> float:
    """Bytes a second with which a step's transfers, in the busier direction, take LINK times its computation."""
    probes = [Trainer(Variant(BASE), size, {"near_budget": near}, device) for near in ("100%", near)]
    for probe in probes:
        for _ in range(WARM_UP):
            probe.step()
    for _ in range(2):
        for probe in probes:
            probe.turn()
    compute = min(each["seconds"] for each in probes[0].variant.rounds)
    last = probes[1].variant.rounds[-1]
    moved = max(last["far_to_near_bytes"], last["near_to_far_bytes"])
    if not moved:
        raise UserError(f"--near {near}: nothing is copied, because everything fits: give less")
    return moved / (LINK * compute)


def check_losses(found: list[Variant]) -> None:
    """Writes into each variant's facts by how much its losses differ from those of the common settings, at most."""
    for variant in found:
        pairs = list(zip(variant.losses, found[0].losses, strict=False))
        variant.facts["gap"] = max(abs(mine / other - 1) for mine, other in pairs)


def measure(found: list[Variant], size: dict[str, int], keys: dict[str, Any], device: str, rounds: int | None,
            until: float) -> list[Variant]:
    """Fills the rounds of the variants, and returns those that this near budget has room for.

    rounds: how many; None for as many as end before the time `until`, at least one.
    """
    import pstar

    trainers = []
    for variant in found:
        try:
            trainers.append(Trainer(variant, size, keys, device))
        except pstar.BudgetError as error:
            if variant is found[0]:
                raise
            print(f"  left out: {variant.name}: {error}", flush=True)
            continue
        trainers[-1].warm_up()
        print(f"  ready: {variant.name}: {variant.about}", flush=True)
    number, began = 0, time.perf_counter()
    while number < rounds if rounds else not number or time.perf_counter() + (time.perf_counter() - began) / number < until:
        start = number % len(trainers)
        for trainer in trainers[start:] + trainers[:start]:
            trainer.turn()
        number += 1
        print(f"  round {number}: {trainers[0].variant.rounds[-1]['seconds']:.3f} s a step of '{BASE}'", flush=True)
    measured = [trainer.variant for trainer in trainers]
    check_losses(measured)
    return measured


def parse(argv: list[str]) -> Any:
    """The flags. Raises UserError for a wrong one."""
    parser = command_parser("quick.sh", __doc__)
    parser.add_argument("--minutes", type=float, default=3.0, help="end after so many, start included (default: 3)")
    parser.add_argument("--rounds", type=int, help="so many rounds, however long they take (default: what --minutes allows)")
    parser.add_argument("--near", default="20%", help="near budget: a share of all model data, or bytes (default: 20%%)")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"), help="where near is (default: auto)")
    parser.add_argument("--tiny", action="store_true", help="a very small model, to see that it runs")
    parser.add_argument("--output-dir", type=Path, default=Path("runs/07_quick"),
                        help="folder of quick.md and quick.png (default: runs/07_quick)")
    options = parser.parse_args(argv)
    if not 0 < options.minutes <= 1000:
        raise UserError(f"--minutes {options.minutes:g}: give a number above 0, up to 1000")
    if options.rounds is not None and options.rounds < 1:
        raise UserError(f"--rounds {options.rounds}: give at least 1")
    try:
        options.output_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=options.output_dir):
            pass
    except OSError as error:
        raise UserError(f"--output-dir {options.output_dir}: cannot be written: {error.strerror}") from error
    return options


def fallen_away(device: str) -> list[str]:
    """What this machine lacks, one line each."""
    import importlib.util

    from pstar.kernels import cpu

    lacks = []
    if device == "cpu":
        lacks.append("no GPU: near is host memory with a budget, and the link is simulated")
    if device == "cpu" and num_cores() < 2:
        lacks.append("one core: copies and computation share it, so little can be hidden")
    if not cpu.paths():
        lacks.append("no C++ compiler: Adam runs on torch operations, with the same bits and more time")
    if importlib.util.find_spec("matplotlib") is None:
        lacks.append("no matplotlib: the table is written, the figure is not")
    return lacks


def main(argv: list[str]) -> int:
    """Measures, prints the table and writes the files. Exit status 1 if losses differ that must not."""
    began = time.perf_counter()
    options = parse(argv)
    import quick_page
    import torch

    import pstar

    if options.device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: torch finds no GPU here; leave the flag out")
    device = "cuda" if options.device != "cpu" and torch.cuda.is_available() else "cpu"
    lacks, size = fallen_away(device), TINY if options.tiny else SIZE
    torch.set_num_threads(max(1, num_cores() - 1))
    long = f"{options.rounds} round(s)" if options.rounds else f"about {options.minutes:g} minutes"
    print("\n".join([f"what each optimisation brings: {long}", *(f"  {line}" for line in lacks)]), flush=True)
    layer = 12 * size["n_embd"] ** 2 + 13 * size["n_embd"]
    keys: dict[str, Any] = {"near_budget": options.near, "default_chunk_size": layer}
    with tempfile.TemporaryDirectory(dir=options.output_dir) as disk:
        found = variants(size, disk, device)
        try:
            if device == "cpu":
                keys["simulated_link"] = link_speed(size, options.near, device)
            found = measure(found, size, keys, device, options.rounds, began + 60 * options.minutes)
        except pstar.PstarError as error:
            raise UserError(f"--near {options.near}: {error}") from error
    command = shlex.join(["bash", "chapters/07_patrickstar/quick.sh", *argv])
    print(quick_page.write(options.output_dir, found, quick_page.facts(size, BATCH, keys, TIMED, device, lacks, command)))
    wrong = [each.name for each in found if each.facts["gap"] and each.name != "state_bits 8"]
    if wrong:
        print(f"error: the losses of {', '.join(wrong)} differ from those of {BASE}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    with exit_on_user_error():
        raise SystemExit(main(sys.argv[1:]))
