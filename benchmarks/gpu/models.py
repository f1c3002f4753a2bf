"""GPT-2 of several sizes on one GPU: pstar against plain PyTorch if everything fits, against FSDP2 if it does not.

    python benchmarks/gpu/models.py --billions 1.5                 # against plain PyTorch, interleaved
    python benchmarks/gpu/models.py --billions 7 --batch 16        # against FSDP2 with parameters in host memory
    python benchmarks/gpu/models.py --billions 17 --only pstar     # the largest: does it train five steps?
    python benchmarks/gpu/models.py --billions 7 --only pstar --cap 24    # as on a GPU of 24 GB
    python benchmarks/gpu/models.py --billions 0.5 --batch 4 --no-recompute --only plain,pstar-all,pstar-25    # variants
    python benchmarks/gpu/models.py --quick --device cpu           # a toy, to see that it runs

One size a command, each in less than ten minutes. Each contender has a separate process. If all fit into the GPU together
(up to 2 billion), they work in turns, in an order that rotates; otherwise one after the other. The first steps are not
counted: pstar records the first. Rows are kept in benchmarks/results/gpu_models.json, and the page gpu_models.md shows all
of them; with --cap, gpu_curve.json and gpu_curve.md. Goals: 0.95 of plain PyTorch; the near peak within 2 % of the planner's
prediction; copies at 0.8 of a pinned copy's speed on this machine (copies are timed from when the GPU may begin them, so
the speed is a lower bound).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parents[1])]
import contenders  # noqa: E402
import torch  # noqa: E402
from command_line import parser_of  # noqa: E402
from common import check_device, facts_of, name_of  # noqa: E402
from facts import bullets  # noqa: E402
from processes import started  # noqa: E402
from turns import in_turns  # noqa: E402

VOCAB, SEQ_LEN, WARM_UP_STEPS = 21128, 1024, 5
WIDTHS = ((3.0, 1600, 64), (9.0, 4096, 128), (1000.0, 5120, 128))
"""(largest number of billion parameters, width, width of a head)"""
FSDP2_BYTES = 16
"""Bytes of host memory a parameter: fp32 parameters, gradients and moments."""
TOGETHER = 2.0
"""Billions of parameters up to which all contenders are alive at once."""
QUICK = {"n_embd": 64, "n_head": 4, "n_positions": 64, "vocab_size": 300}
COLUMNS = ("size", "who", "batch", "GPU, GB", "tokens/s", "of plain", "TFLOP/s, 6N", "TFLOP/s, 8N", "peak, GiB",
           "predicted, GiB", "reserved, GiB", "host, GiB", "in, GB a step", "out, GB a step", "in, GB/s", "out, GB/s",
           "waiting, s", "loss")  # fmt: skip
MEMORY_IS_FULL = ("not tried", "its process was killed", "BudgetError", "MemoryError", "out of memory", "allocate memory")
"""In the line of a contender that has too little memory, which is a result."""
TITLES = {"models": "Models on a GPU", "curve": "Models on a part of a GPU"}


def toy_of(billions: float) -> dict[str, int]:
    """ModelConfig's arguments of a toy with more layers for more billions."""
    return {"n_layer": 1 + int(billions // 5), **QUICK}


def model_of(billions: float) -> dict[str, int]:
    """ModelConfig's arguments of a GPT-2 of about `billions` parameters; the width determines the depth."""
    width, head = next((width, head) for most, width, head in WIDTHS if billions <= most)
    layers = max(1, round((billions * 1e9 - (VOCAB + SEQ_LEN) * width) / (12 * width**2 + 13 * width)))
    return {"n_layer": layers, "n_embd": width, "n_head": width // head, "n_positions": SEQ_LEN, "vocab_size": VOCAB}


def predicted(work: dict[str, Any], host_bytes: int) -> tuple[int, int, dict[str, int]]:
    """The planner's prediction, before a model is made: (parameters, peak bytes near with activations, missing bytes by
    tier)."""
    from pstar.planner.gpt_shape import GptShape
    from pstar.planner.machines import Machine, MachineSpeeds, Reserves
    from pstar.planner.predict import Job, predict

    model = work["model"]
    shape = GptShape(model["n_layer"], model["n_embd"], model["n_head"], model["vocab_size"], model["n_positions"])
    machine = Machine("this one", 1, work["near_memory"], host_bytes, MachineSpeeds(1e9, 1e9, 1e9, 1e9),
                      reserves=Reserves(0, 0.0, 0, 0))  # fmt: skip
    near_states = work["config"].get("near_states", "margin")
    job = Job(work["batch"], work["seq_len"], "bf16", recompute=work["recompute"], near_states=near_states,
              chunk_elems=work["config"].get("default_chunk_size", "auto"))  # fmt: skip
    answer = predict(shape, machine, job)
    return answer.num_params, answer.near_bytes + answer.activation_bytes, answer.short_of


def pinned_copy(device: torch.device, num_bytes: int = 2**30) -> dict[str, float]:
    """Bytes a second of one large copy in each direction; empty without a GPU."""
    if device.type != "cuda":
        return {}
    host, found = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True), {}
    near = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    for way, target, source in (("in", near, host), ("out", host, near)):
        times = []
        for _ in range(5):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            target.copy_(source, non_blocking=True)
            torch.cuda.synchronize()
            times.append(time.perf_counter() - begin)
        found[way] = num_bytes / statistics.median(times)
    del near, target, source    # frees the memory for the contenders
    torch.cuda.empty_cache()
    return found


def is_memory(line: str) -> bool:
    """Whether the line of a contender that failed says that memory was too small."""
    return any(words in line for words in MEMORY_IS_FULL)


def hopeless(name: str, num_params: int, short_of: dict[str, int], host_bytes: int, cap: float = 0, gpu_bytes: int = 0
             ) -> str | None:
    """The reason not to try a contender, or None: one that takes all host memory may crash the machine."""
    if gpu_bytes and cap * 1e9 > gpu_bytes:
        return f"not tried: this GPU has {gpu_bytes / 1e9:.0f} GB"
    if name == "pstar" and short_of:
        return "not tried: " + ", ".join(f"{miss / 2**30:.1f} GiB too little {tier}" for tier, miss in short_of.items())
    if name == "fsdp2" and FSDP2_BYTES * num_params > 0.95 * host_bytes:
        return f"not tried: needs {FSDP2_BYTES * num_params / 2**30:.0f} GiB of host memory"
    return None


class Alive:
    """A contender's process."""

    def __init__(self, name: str, work: dict[str, Any], error: str | None = None):
        self.name, self.told, self.error, self._process = name, [], error, None
        if error:
            return
        context = multiprocessing.get_context("spawn")
        self._process, self._pipe = started(context, contenders.work_on, name, work)

    def run(self, steps: int) -> list[dict]:
        """Seconds and numbers of each step; an empty list after an error."""
        if self.error:
            return []
        with contextlib.suppress(OSError):    # one that has ended already may have said why
            self._pipe.send(steps)
        try:
            answer = self._pipe.recv()
        except (EOFError, OSError):
            answer = "its process was killed: host memory is full, most likely"
        if isinstance(answer, str):
            self.error = answer
            return []
        return answer

    def close(self) -> None:
        if self._process is not None:
            with contextlib.suppress(OSError):
                self._pipe.send(None)
            self._process.join(60)


def measure(names: dict[str, str | None], work: dict[str, Any], rounds: int, together: bool) -> list[Alive]:
    """Runs the contenders {name: the reason not to try it, or None}. In each round every contender makes one step, whose
    numbers are appended to its `told`."""
    groups = [list(names)] if together else [[name] for name in names]
    done = []
    for group in groups:
        alive = []
        for name in group:    # one after the other: processes that draw their weights at the same time share the cores
            alive.append(Alive(name, work, names[name]))
            alive[-1].run(WARM_UP_STEPS)
        for one in in_turns(alive, rounds):
            one.told += one.run(1)
        for one in alive:
            one.close()
        done += alive
    return done


def row(one: Alive, base: Alive | None, work: dict[str, Any], num_params: int, near_peak: int) -> dict[str, str]:
    """One contender's cells by column; the reason if it failed."""
    cells = {"size": f"{num_params / 1e9:.2f} billion", "who": one.name, "batch": f"{work['batch']} x {work['seq_len']}"}
    if work["cap"]:
        cells["GPU, GB"] = f"{work['cap'] / 1e9:.3g}"
    if one.error or not one.told:
        return cells | {"tokens/s": one.error or "nothing"}
    median = {key: statistics.median(each[key] for each in one.told) for key in one.told[0]}
    tokens = work["batch"] * work["seq_len"] / median["seconds"]
    cells |= {"tokens/s": f"{tokens:,.0f}", "TFLOP/s, 6N": f"{6 * num_params * tokens / 1e12:.1f}",
              "loss": f"{one.told[-1]['loss']:.3f}"}
    for column in ("peak", "reserved", "host"):
        if column in one.told[0]:
            cells[f"{column}, GiB"] = f"{max(each[column] for each in one.told) / 2**30:.2f}"
    if work["recompute"]:
        cells["TFLOP/s, 8N"] = f"{8 * num_params * tokens / 1e12:.1f}"
    if base is not None and base.told and len(base.told) == len(one.told):
        ratios = [b["seconds"] / a["seconds"] for a, b in zip(one.told, base.told, strict=True)]
        cells["of plain"] = f"{statistics.median(ratios):.2f}"
    if one.name == "pstar":    # the prediction is for the whole of near
        cells["predicted, GiB"] = f"{near_peak / 2**30:.2f}"
    if "waited" in median:
        cells["waiting, s"] = f"{median['waited']:.3f}"
        for short, way in (("in", "far to near"), ("out", "near to far")):
            cells[f"{short}, GB a step"] = f"{median[f'{way} bytes'] / 1e9:.2f}"
            cells[f"{short}, GB/s"] = f"{median[f'{way} speed'] / 1e9:.1f}" if median[f"{way} bytes"] else ""
    return cells


def page(runs: dict[str, dict], name: str = "models") -> str:
    """All runs, the smallest model first, each with its machine and versions. Columns that no row has are left out."""
    columns = [column for column in COLUMNS if any(column in cells for run in runs.values() for cells in run["rows"])]
    lines = [f"# {TITLES[name]}", "",
             "tokens/s: median over the steps after the first ones. 6N and 8N: operations a token, the second "
             "with a block's forward done twice. Peak: what torch's allocator gave at most, predicted by "
             "the planner before anything was made; reserved: what it took from the GPU. Host: memory that the process took "
             "of the machine. GB/s: of pstar's copies, from when the GPU may begin them.", ""]
    size = None
    for run in sorted(runs.values(), key=lambda run: (run["params"], run.get("cap") or 0)):
        if size != (size := run["params"]):
            lines += [f"## {size / 1e9:.2f} billion parameters", ""]
        lines += [*run["about"], "", f"| {' | '.join(columns)} |", "|---|---|" + "---:|" * (len(columns) - 2)]
        lines += [f"| {' | '.join(cells.get(column, '') for column in columns)} |" for cells in run["rows"]]
        lines.append("")
    return "\n".join(lines)


def parse(argv: list[str]) -> argparse.Namespace:
    """Parses the command line; an error prints one line and exits with status 2."""
    parser = parser_of("models.py", __doc__)
    parser.add_argument("--billions", type=float, default=1.5, help="parameters (default: 1.5)")
    parser.add_argument("--batch", type=int, default=8, help="sequences of a step (default: 8)")
    parser.add_argument("--rounds", type=int, default=5, help="steps that are counted (default: 5)")
    parser.add_argument("--only", help=f"of {', '.join(contenders.CONTENDERS)}, with commas between (default: pstar and "
                        "the one that it is compared with at this size)")
    parser.add_argument("--no-recompute", action="store_true", help="keep all activations")
    parser.add_argument("--near-memory", help="of the GPU, for pstar (default: 90%% of what is free)")
    parser.add_argument("--cap", type=float, help="GB of the GPU that each process may use (default: all)")
    parser.add_argument("--until-it-fails", action="store_true", help="too little memory is a result, with status 0")
    parser.add_argument("--config", type=json.loads, default={}, help="more of pstar's configuration, as JSON")
    parser.add_argument("--device", default="cuda", help="cuda or cpu (default: cuda)")
    parser.add_argument("--quick", action="store_true", help="a toy model")
    parser.add_argument("--results", type=Path, default=HERE.parent / "results", help="where to write")
    options = parser.parse_args(argv)
    usual = "pstar,plain" if options.billions <= TOGETHER else "pstar,fsdp2"
    options.only = [name.strip() for name in (options.only or usual).split(",")]
    if wrong := [name for name in options.only if name not in contenders.CONTENDERS]:
        parser.error(f"--only {','.join(wrong)}: not known; choose from {', '.join(contenders.CONTENDERS)}")
    for name in ("batch", "rounds", "billions", "cap"):
        if getattr(options, name) is not None and getattr(options, name) <= 0:
            parser.error(f"--{name} must be above 0")
    check_device(parser, options.device, "--quick --device cpu")
    return options


def near_memory_of(options: argparse.Namespace, free: int) -> int:
    """Bytes of the GPU for pstar's chunks and activations."""
    from pstar.memory.tier import parse_bytes

    if options.near_memory:
        return parse_bytes(options.near_memory, free)
    room = 0.9 * (min(free, options.cap * 1e9) if options.cap else free)
    return int(room / (len(options.only) if together(options) and options.device == "cuda" else 1))


def together(options: argparse.Namespace) -> bool:
    """Whether all contenders are alive at once."""
    return options.quick or options.billions <= TOGETHER


def about_of(work: dict[str, Any], options: argparse.Namespace, host_bytes: int, argv: list[str]) -> list[str]:
    """The facts above a table. Measures the speed of a pinned copy."""
    model, link = work["model"], pinned_copy(torch.device(work["device"]))
    return [f"- model: {model['n_layer']} layers, {model['n_embd']} wide, {model['n_head']} heads, vocabulary "
            f"{model['vocab_size']}, length {model['n_positions']}; "
            f"{'blocks recomputed in backward' if work['recompute'] else 'all activations kept'}; pstar: "
            f"{work['near_memory'] / 2**30:.1f} GiB near, {json.dumps(options.config)}",
            f"- machine: {name_of(options.device)}, {host_bytes / 2**30:.0f} GiB of host memory"
            + "".join(f", a pinned copy {way} {speed / 1e9:.1f} GB/s" for way, speed in link.items()),
            *bullets(facts_of("models.py", argv))]


def keep(results: Path, name: str, key: str, run: dict) -> str:
    """Adds a run to those on disk; writes the page of all and returns it."""
    results.mkdir(parents=True, exist_ok=True)
    kept = results / f"gpu_{name}.json"
    runs = json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else {}
    runs[key] = run
    kept.write_text(json.dumps(runs, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    text = page(runs, name)
    (results / f"gpu_{name}.md").write_text(text, encoding="utf-8")
    return text


def main(argv: list[str]) -> int:
    """Measures, writes, prints. Returns 1 if pstar did not train, or with --until-it-fails, if another error than too little
    memory ended a contender."""
    options = parse(argv)
    device = "cuda:0" if options.device == "cuda" else options.device
    model = toy_of(options.billions) if options.quick else model_of(options.billions)
    host_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    free, total = torch.cuda.mem_get_info() if options.device == "cuda" else (2**26, 0)
    with tempfile.TemporaryDirectory(prefix="models_") as folder:
        work = {"model": model, "batch": options.batch, "seq_len": model["n_positions"],
                "near_memory": near_memory_of(options, free), "cap": options.cap and int(options.cap * 1e9),
                "recompute": not options.no_recompute, "config": options.config, "device": device, "folder": folder,
                "alone": not together(options)}
        num_params, near_peak, short_of = predicted(work, host_bytes)
        about = about_of(work, options, host_bytes, argv)
        tried = {name: hopeless(name, num_params, short_of, host_bytes, options.cap or 0, total) for name in options.only}
        done = measure(tried, work, options.rounds, together(options))
    base = next((one for one in done if one.name == "plain"), None)
    rows = [row(one, base if one is not base and together(options) else None, work, num_params, near_peak) for one in done]
    run = {"params": num_params, "cap": options.cap, "about": about, "rows": rows}
    key = " ".join(map(str, filter(None, (num_params, *options.only, options.cap))))
    print(keep(options.results, "curve" if options.cap else "models", key, run), end="")
    if options.until_it_fails:
        return int(any(one.error and not is_memory(one.error) for one in done))
    return int(any(one.name == "pstar" and (one.error or not one.told) for one in done))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
