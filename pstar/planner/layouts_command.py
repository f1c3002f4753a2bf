"""`pstar plan --layouts`: which technique trains a model fastest on a cluster, why others do not fit, and the command."""

import argparse
from dataclasses import replace
from math import isfinite
from typing import Any

from pstar.errors import ConfigError
from pstar.memory.tier import format_bytes, parse_bytes
from pstar.planner.course_commands import LIBRARIES, command_of, library_of, runs_here
from pstar.planner.gpt_shape import find_model
from pstar.planner.gpus import GIB, GPUS, REACHED_FLOPS, cluster_of
from pstar.planner.layout_memory import Layout, LayoutJob
from pstar.planner.layouts import Answer, Candidate, Refusal, plan_layouts, technique_of

FLAGS = ("gpu", "nodes", "link", "node_link", "fraction", "vocab_size", "global_batch")
"""Flags that only --layouts takes. SHARED ones are for both; all others of `pstar plan` are not for --layouts."""
SHARED = ("model", "gpus", "gpu_memory", "host_memory", "seq_len", "precision", "json", "layouts", "command")
TECHNIQUE_WORDS = {
    "ddp": "data parallel (DDP)", "zero1": "ZeRO stage 1", "zero2": "ZeRO stage 2", "zero3": "ZeRO stage 3",
    "offload": "ZeRO-Offload", "tensor": "tensor parallel", "pipeline": "pipeline", "3d": "tensor x pipeline",
    "context": "context parallel", "pstar": "PatrickStar",
}  # fmt: skip
REASON_WORDS = {
    "one_gpu": "there is one GPU, so nothing to share",
    "batch": "the global batch cannot be divided among so many replicas",
    "heads": "no number above 1 divides both the heads and the GPUs of a node",
    "layers": "no number above 1 divides both the layers and the GPUs",
    "heads_layers": "the heads and a node's GPUs, or the layers and all GPUs, have no common divisor",
    "length": "the sequence is not a multiple of twice as many ranks",
}
NOTE_WORDS = {
    "cut_vocabulary": "the run has the course's own vocabulary (--vocab), whose size --tp must divide",
    "order": "chapter 05 numbers data parallel ranks last; the times here are for Megatron's order, pipeline ranks last",
    "nodes": "start the line on each node with its own --node-rank; node1 is the first node's address",
}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds --layouts and the flags of a cluster."""
    parser.add_argument("--layouts", action="store_true", help="rank all layouts over a cluster: data, tensor, pipeline and "
                        "context parallel, ZeRO, recomputation, offload, pstar; the flags below apply only to it")
    parser.add_argument("--gpu", help=f"kind of GPU: {', '.join(GPUS)} (default: h100)")
    parser.add_argument("--nodes", type=int, help="nodes, each with the same number of GPUs (default: 1)")
    parser.add_argument("--link", type=float, help="GB/s each way that a GPU reaches to others of its node "
                        "(default: 0.8 of the data sheet)")
    parser.add_argument("--node-link", type=float, help="GB/s each way that a node reaches to others (default: 0.8 of the "
                        "usual server's adapters)")
    parser.add_argument("--fraction", type=float, help=f"share of a GPU's peak that its products reach (default: "
                        f"{REACHED_FLOPS})")
    parser.add_argument("--vocab-size", type=int, help="tokens of the vocabulary (default: the model's, 50257)")
    parser.add_argument("--global-batch", type=int, help="sequences of one step on all GPUs (default: 64)")


def refuse_other_flags(arguments: argparse.Namespace, defaults: dict[str, Any]) -> None:
    """Raises ConfigError for a flag of the other kind of plan, which would be ignored. defaults: of all flags."""
    for name, value in vars(arguments).items():
        wrong = name not in (*FLAGS, *SHARED) if arguments.layouts else name in FLAGS
        if wrong and name in defaults and value != defaults[name]:
            flag = "--" + name.replace("_", "-")
            raise ConfigError(f"{flag} is not for --layouts; leave one of them out" if arguments.layouts
                              else f"{flag} is for --layouts only; add it, or leave {flag} out")


def answer_of(arguments: argparse.Namespace) -> Answer:
    """The answer for the flags. Raises ConfigError for bad input."""
    for flag in ("link", "node_link", "fraction"):
        value = getattr(arguments, flag)
        if value is not None and not (isfinite(value) and value > 0):
            raise ConfigError(f"--{flag.replace('_', '-')} {value}: give a number above 0")
    for flag in ("gpus", "nodes", "vocab_size", "global_batch", "seq_len"):
        value = getattr(arguments, flag)
        if value is not None and not 1 <= value <= 10**9:
            raise ConfigError(f"--{flag.replace('_', '-')} {value}: give a whole number of at least 1")
    shape = find_model(arguments.model)
    seq_len = shape.positions if arguments.seq_len is None else arguments.seq_len
    if arguments.model.lower().replace("x", "").isdecimal() and seq_len > shape.positions:
        shape = replace(shape, positions=seq_len)    # LAYERSxHIDDEN does not say how many positions there are
    if arguments.vocab_size is not None:
        shape = replace(shape, vocab=arguments.vocab_size)
    kind = "h100" if arguments.gpu is None else arguments.gpu.lower()
    cluster = cluster_of(
        kind, 8 if arguments.gpus is None else arguments.gpus, arguments.nodes or 1,
        512 * GIB if arguments.host_memory is None else parse_bytes(arguments.host_memory, 0),
        fraction=REACHED_FLOPS if arguments.fraction is None else arguments.fraction,
        gpu_gib=None if arguments.gpu_memory is None else parse_bytes(arguments.gpu_memory, 0) / GIB,
        link_gb_s=arguments.link, node_link_gb_s=arguments.node_link)  # fmt: skip
    precision = arguments.precision or ("bf16" if GPUS[kind].has_bf16 else "fp16")
    batch = 64 if arguments.global_batch is None else arguments.global_batch
    return plan_layouts(cluster, LayoutJob(shape, seq_len, batch, precision))


def as_json(answer: Answer) -> dict[str, Any]:
    """The answer as JSON's types; docs/assets/tools/layouts_model.js makes the same."""
    found: dict[str, Any] = {
        "parameters": answer.job.shape.num_params, "tried": answer.tried, "fitting": answer.fitting,
        "rows": [_row(answer, candidate) for candidate in answer.rows],
        "refusals": [_refusal(refusal) for refusal in answer.refusals],
    }  # fmt: skip
    if answer.best:
        best, here = answer.best, answer.here
        instead = None if runs_here(best.layout) else here
        command = command_of(answer.cluster, answer.job, (instead or best).layout)
        found["command"] = {
            "chapter": command.chapter, "lines": list(command.lines), "runs": runs_here(best.layout),
            "library": library_of(best.layout), "notes": list(command.notes),
            "instead": _row(answer, instead) if instead else None}  # fmt: skip
    return found


def _row(answer: Answer, candidate: Candidate) -> dict[str, Any]:
    layout, need = candidate.layout, candidate.need
    return {
        "technique": technique_of(layout), "layout": vars(layout) | {"micro_batches": layout.micro_batches(answer.job)},
        "step_s": candidate.step, "seconds": candidate.seconds, "tokens_per_s": answer.tokens_per_s(candidate),
        "mfu": answer.mfu(candidate), "device_bytes": need.device, "device_room": need.device_room,
        "host_bytes": need.host, "host_room": need.host_room, "kinds": need.kinds,
    }  # fmt: skip


def _refusal(refusal: Refusal) -> dict[str, Any]:
    found: dict[str, Any] = {"technique": refusal.technique, "reason": refusal.reason}
    if refusal.nearest:
        found |= {"layout": vars(refusal.nearest.layout), "missing_bytes": refusal.missing, "term": refusal.term,
                  "term_bytes": refusal.term_bytes}  # fmt: skip
    return found


# ---- as text


def layout_words(layout: Layout, micros: int | None = None) -> str:
    """A layout in one line."""
    names = (("data", layout.data), ("tensor", layout.tensor), ("pipeline", layout.pipeline), ("context", layout.context))
    parts = [f"{name} {ranks}" for name, ranks in names if ranks > 1] or ["1 GPU"]
    words = [" x ".join(parts)] + ([f"ZeRO {layout.zero}"] if layout.zero else [])
    words += ["states on the host"] * layout.offload + ["pstar"] * layout.pstar
    words += ["all chunks on each node"] * (layout.replicas > 1) + ["recomputation"] * layout.recompute
    words.append(f"micro-batches of {layout.micro_batch}" + ("" if micros is None else f", {micros} a step"))
    return ", ".join(words)


def as_text(answer: Answer) -> str:
    """What the terminal shows: the best layout in a sentence, a table, why not the others, the command."""
    job, cluster, found = answer.job, answer.cluster, as_json(answer)
    lines = [f"{job.shape.layers} layers of width {job.shape.hidden}, {found['parameters']:,} parameters, {job.precision}; "
             f"{job.batch} sequences of {job.seq_len} tokens a step; {cluster.gpus} GPU(s) of "
             f"{format_bytes(cluster.gpu_bytes)} in {cluster.nodes} node(s); {answer.tried:,} layouts, "
             f"{answer.fitting:,} fit", ""]  # fmt: skip
    if answer.best:
        best = answer.best
        name = TECHNIQUE_WORDS[technique_of(best.layout)]
        lines += [f"Take {name} ({layout_words(best.layout, best.layout.micro_batches(job))}): {best.step:.3g} s a step, "
                  f"{answer.tokens_per_s(best):,.0f} tokens/s, MFU {answer.mfu(best):.1%}, "
                  f"{format_bytes(best.need.device)} of {format_bytes(best.need.device_room)} a GPU.", "", *_table(answer)]
    else:
        lines.append("Nothing fits.")
    lines += [""] * bool(answer.refusals) + [f"not {words}" for words in map(refusal_words, answer.refusals)]
    if answer.best:
        command = found["command"]
        if not command["runs"]:
            lines += ["", "No program of the course runs this layout" + _instead(answer, bool(command["lines"]))]
        lines += ["", *command["lines"], "", f"In production: {LIBRARIES[command['library']]}."]
        lines += [f"Note: {NOTE_WORDS[note]}." for note in command["notes"]]
    return "\n".join(lines)


def _instead(answer: Answer, has_command: bool) -> str:
    """What the printed command runs where no chapter runs the best layout."""
    if answer.here:
        layout = answer.here.layout
        return (f". The fastest that a chapter runs: {TECHNIQUE_WORDS[technique_of(layout)]} "
                f"({layout_words(layout, layout.micro_batches(answer.job))}), {answer.here.step:.3g} s a step:")
    return "; the nearest does not fit by this count:" if has_command else ", and none comes near."


def refusal_words(refusal: Refusal) -> str:
    """Why a technique does not work, in one line."""
    name = TECHNIQUE_WORDS[refusal.technique]
    if refusal.nearest is None:
        return f"{name}: {REASON_WORDS[refusal.reason]}"
    where = {"device": "GPU memory", "host": "host memory"}[refusal.reason]
    term = refusal.term.removeprefix("host_").replace("optimizer", "optimizer states")
    return (f"{name}: {format_bytes(refusal.missing)} more {where} a rank, where it comes nearest "
            f"({layout_words(refusal.nearest.layout)}); {term} alone take {format_bytes(refusal.term_bytes)}")


def _table(answer: Answer) -> list[str]:
    head = ("technique", "layout", "s a step", "tokens/s", "MFU", "GPU", "host", "waits for")
    rows = [head]
    for candidate in answer.rows:
        need, waits = candidate.need, {k: v for k, v in candidate.seconds.items() if k not in ("compute", "update")}
        longest = max(waits, key=lambda part: waits[part])
        rows.append((TECHNIQUE_WORDS[technique_of(candidate.layout)],
                     layout_words(candidate.layout, candidate.layout.micro_batches(answer.job)), f"{candidate.step:.3g}",
                     f"{answer.tokens_per_s(candidate):,.0f}", f"{answer.mfu(candidate):.1%}", format_bytes(need.device),
                     format_bytes(need.host), f"{longest} {waits[longest] / candidate.step:.0%}" if waits[longest] else "-"))
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
