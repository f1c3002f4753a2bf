"""The numbers of the lessons' walls and predictions, by the formulas of the course. A test compares some with other sources.

Each function returns the numbers of a chapter by name, as texts.py shows them. `answer` is what the reader predicts; the
texts show a float with three digits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from docs.generate.arithmetic import adaptation, formulas
from docs.generate.arithmetic.arithmetic import GIB, MIB, Row, bytes_text, job_of
from docs.generate.pictures.data import chapter_module
from docs.generate.recorded.measured import REPO

Numbers = dict[str, Any]

XL = {"n_layer": 48, "n_embd": 1600, "n_head": 25, "n_positions": 1024, "vocab_size": 50257}  # GPT-2's largest, 1.5 billion
OWN_BATCH = {"batch": 512, "seq_len": 1024}  # GPT-2 was trained with this
REACHED_FLOPS = 125e12  # a second: 40 % of the peak of an A100 in bf16
A100 = {"fp32": 19.5, "bf16": 312.0}  # peaks in TFLOP/s, from NVIDIA's data sheet of the A100
TOKENS = 300e9
ETHERNET_10 = 1.25e9  # bytes a second


def job(strategy: str, ranks: int, precision: str | None = None, size: str = "small", **changes: Any) -> formulas.Job:
    """A job with the chapters' defaults, except for what is given; `size` may be xl."""
    found = job_of(Row("", strategy, precision), "small" if size == "xl" else size, ranks)
    return {**found, **(XL if size == "xl" else {}), **changes}


def three(value: float) -> str:
    """A number with three digits: 3.25, 27.3, 2,072."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}" if value < 1 else f"{value:.{2 if value < 10 else 1}f}"


def state_bytes(found: formulas.Bytes) -> int:
    """Parameters, gradients and optimizer states on the device, without buffers."""
    return found["parameters"] + found["gradients"] + found["optimizer"]


def single() -> Numbers:
    """Chapter 00: what one process holds, and the logits of tiny."""
    small, tiny = job("single", 1, "fp32"), job("single", 1, "fp32", "tiny")
    logits = 4 * tiny["batch"] * tiny["seq_len"] * tiny["vocab_size"]
    states = state_bytes(formulas.states(tiny))
    return {
        "small_states": bytes_text(state_bytes(formulas.states(small))),
        "activations": bytes_text(formulas.activations(small)), "small_batch": small["batch"],
        "small_length": small["seq_len"], "states": bytes_text(states), "batch": tiny["batch"],
        "length": tiny["seq_len"], "vocabulary": f"{tiny['vocab_size']:,}", "times": f"{logits / states:.1f}",
        "answer": logits / MIB,
    }  # fmt: skip


def server() -> Numbers:
    """Chapter 01: how long one GPU computes, and what the server receives."""
    one = job("single", 1, **OWN_BATCH)
    seconds = formulas.compute_seconds(one, REACHED_FLOPS)
    days = seconds * TOKENS / (one["batch"] * one["seq_len"]) / 86400
    return {
        "batch": one["batch"], "length": f"{one['seq_len']:,}", "tflop": f"{formulas.step_flops(one) / 1e12:,.0f}",
        "reached": f"{REACHED_FLOPS / 1e12:.0f}", "share": f"{REACHED_FLOPS / 1e12 / A100['bf16']:.0%}",
        "seconds": three(seconds), "days": f"{days:.0f}", "ranks": 8, "others": 7,
        "gradients": bytes_text(4 * formulas.num_parameters(one)),
        "answer": formulas.traffic(job("server", 8))["received_gradients"] / GIB,
    }  # fmt: skip


def ring() -> Numbers:
    """Chapter 02: a server of 64 ranks, and a ring."""
    through = formulas.traffic(job("server", 64))["received_gradients"]
    sent = formulas.sent_bytes(formulas.traffic(job("ddp", 64, "fp32")))
    compute = formulas.compute_seconds(job("ddp", 64, "fp32", **OWN_BATCH), REACHED_FLOPS)
    return {
        "ranks": 64, "bytes": bytes_text(through), "seconds": three(through / ETHERNET_10), "compute": three(compute),
        "reached": f"{REACHED_FLOPS / 1e12:.0f}", "gradients": bytes_text(4 * formulas.num_parameters(job("ddp", 64))),
        "times": f"{through / sent:.0f}", "answer": sent / GIB,
    }  # fmt: skip


def fusion() -> Numbers:
    """Chapter 03: the code of chapter 02, and the turns of a ring with and without fused messages."""
    from docs.generate.lessons.links import LINKS

    model = job("ddp", 8, "fp32")
    turns, tensors = 2 * (model["ranks"] - 1), formulas.num_tensors(model)
    messages = formulas.ceil_div(4 * formulas.num_parameters(model), formulas.HOROVOD_FUSION_BYTES)
    hop = next(link.latency_us for link in LINKS if link.name.startswith("InfiniBand"))
    files = [REPO / "chapters/02_ddp" / name for name in ("ddp.py", "ring.py")]
    return {
        "lines": sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files), "ranks": model["ranks"],
        "tensors": tensors, "turns": turns, "hop": f"{hop:g}", "latency_ms": f"{tensors * turns * hop / 1000:.0f}",
        "fusion": formulas.HOROVOD_FUSION_BYTES // MIB, "messages": messages, "fused": messages * turns,
        "answer": tensors * turns,
    }  # fmt: skip


def precision() -> Numbers:
    """Chapter 04: speed and activations in fp32, and bytes per parameter at O2."""
    whole, half = (job("single", 1, kind) for kind in ("fp32", "O2"))
    return {
        "batch": whole["batch"], "length": whole["seq_len"], "activations": bytes_text(formulas.activations(whole)),
        "half": bytes_text(formulas.activations(half)), "slow": f"{A100['fp32']:g}", "fast": f"{A100['bf16']:g}",
        "times": f"{A100['bf16'] / A100['fp32']:.0f}", "fp32": sum(formulas.parameter_costs("ddp", "fp32").values()),
        "answer": sum(formulas.parameter_costs("ddp", "O2").values()),
    }  # fmt: skip


def pipeline() -> Numbers:
    """Chapter 05: the states of GPT-2 xl under DDP, and a pipeline's bubble."""
    model = job("ddp", 8, "O2", "xl")
    states, p, m, more = formulas.states(model), 4, 8, 32
    bubble = {micros: 100 * formulas.bubble_fraction("1f1b", p, micros) for micros in (1, m, more)}
    return {
        "parameters": f"{formulas.num_parameters(model):,}", "optimizer": bytes_text(states["optimizer"]),
        "states": bytes_text(state_bytes(states)), "gpu": 24, "usable": bytes_text(formulas.usable_bytes(24)), "ranks": p,
        "micros": m, "waits": p - 1, "rounds": m + p - 1, "more": more, "less_bubble": three(bubble[more]),
        "one_bubble": three(bubble[1]), "answer": bubble[m],
    }  # fmt: skip


def zero() -> Numbers:
    """Chapter 06: what tensor parallelism sends, what replicas store twice, and what each stage leaves."""
    whole = state_bytes(formulas.states(job("ddp", 8, "O2", "xl")))
    left = [state_bytes(formulas.states(job(f"zero{stage}", 8, "bf16", "xl"))) for stage in (1, 2, 3)]
    tensor, ddp = (formulas.sent_bytes(formulas.traffic(job(kind, 4))) for kind in ("tensor", "ddp"))
    return {
        "tensor": bytes_text(tensor), "ddp": bytes_text(ddp), "few": 4, "ranks": 8, "all": bytes_text(8 * whole),
        "copies": bytes_text(7 * whole), "whole": bytes_text(whole), "stage2": bytes_text(left[1]),
        "stage3": bytes_text(left[2]), "answer": left[0] / GIB,
    }  # fmt: skip


def chunks() -> Numbers:
    """Chapter 07: ZeRO on a single GPU, and the loads of a step over chunks."""
    alone = formulas.states(job("zero3", 1, "bf16", "xl"))
    moved = formulas.traffic(job("zero3_offload", 1, "bf16", "xl"))
    plan, n, room = chapter_module("07_patrickstar", "chunk_plan"), 8, 5
    return {
        "states": bytes_text(state_bytes(alone)), "gpu": 16, "usable": bytes_text(formulas.usable_bytes(16)),
        "moved": bytes_text(moved["host_out"] + moved["host_in"]), "n": n, "room": room, "every": 2 * n,
        "answer": plan.count_loads([*range(n), *reversed(range(n))], room),
    }  # fmt: skip


def adapting() -> Numbers:
    """Chapter 08: the bytes of training every parameter, and of LoRA."""
    config = adaptation.configs()["small"]
    rows = {row.method: row for row in chapter_module("08_param_efficient", "methods.counts").trained_rows(config)}
    trained = adaptation.GRADIENT + adaptation.STATES
    full = adaptation.weight_bytes(config, rows["full"]) + trained * rows["full"].count
    lora = adaptation.weight_bytes(config, rows["lora"]) + trained * rows["lora"].count
    return {
        "full": bytes_text(full), "weights": bytes_text(adaptation.weight_bytes(config, rows["full"])),
        "count": f"{rows['lora'].count:,}", "all": f"{rows['full'].count:,}", "share": f"{rows['lora'].share:.2%}",
        "lora": bytes_text(lora), "answer": full / lora,
    }  # fmt: skip


CHAPTERS: dict[str, Callable[[], Numbers]] = {
    "00_single": single, "01_parameter_server": server, "02_ddp": ring, "03_horovod": fusion, "04_apex": precision,
    "05_model_parallel": pipeline, "06_zero": zero, "07_patrickstar": chunks, "08_param_efficient": adapting,
}  # fmt: skip
