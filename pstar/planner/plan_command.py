"""`pstar plan`: whether a model fits on a machine, in which mode, with which chunk size, and how fast."""

import argparse
import json
from dataclasses import replace
from typing import Any

from pstar.errors import ConfigError
from pstar.layout.layout import CODE_BLOCK
from pstar.memory.tier import format_bytes, parse_bytes
from pstar.planner import layouts_command
from pstar.planner.early_updates import predict_early
from pstar.planner.gpt_shape import MODELS, find_model, parse_trainable
from pstar.planner.machines import MACHINES, Machine, find_machine
from pstar.planner.paper import ASSUMPTIONS, paper_rows
from pstar.planner.predict import PRECISIONS, Job, Prediction, predict, what_would_fit
from pstar.planner.speeds import measure_here

MOST = 10**9    # GPUs, sequences, tokens: more would not fit into a float, squared and multiplied
MODE_WORDS = {
    "near": "near: all model data stay on the GPU",
    "hybrid": "hybrid: parameters stay near, optimizer states near as far as there is room",
    "far": "far: optimizer states in host memory, parameters travel",
    "full": "full: near is filled with optimizer states because far is too small, parameters travel",
    "disk": "disk: model data that host memory cannot hold are on disk",
}


def add_parser(commands: Any) -> None:
    """Adds the command to `commands`, the result of ArgumentParser.add_subparsers."""
    parser = commands.add_parser("plan", help="whether a model fits on a machine, in which mode, and how fast",
                                 description="Computes whether a GPT fits on a machine, in which mode, with how many bytes "
                                 "and how fast; no weights are allocated.")
    parser.add_argument("--model", default="gpt2", help=f"{', '.join(MODELS)}; LAYERSxHIDDEN[xHEADS]; or a config.json "
                        "(default: gpt2)")
    parser.add_argument("--trainable", default="all", help="all; or lora:RANK: the model is frozen, and each linear "
                        "layer of a block gets two trained matrices of that rank (default: all)")
    parser.add_argument("--machine", default="h200", help=f"{', '.join(MACHINES)}; or a JSON file (default: h200)")
    parser.add_argument("--gpus", type=int, help="GPUs of all nodes together (default: the machine's; 8 with --layouts)")
    parser.add_argument("--gpu-memory", help="memory of one GPU, such as 80GiB (default: the machine's, or --gpu's)")
    parser.add_argument("--host-memory", help="memory of one node, such as 128GiB (default: the machine's; "
                        "512GiB with --layouts)")
    parser.add_argument("--disk", help="disk of one node, such as 1TiB; 0 for none (default: the machine's)")
    parser.add_argument("--batch", type=int, default=1, help="sequences of a micro-step on one GPU (default: 1)")
    parser.add_argument("--seq-len", type=int, help="tokens of a sequence (default: all positions of the model)")
    parser.add_argument("--micro-steps", type=int, default=1, help="micro-steps of a step, to save memory (default: 1)")
    parser.add_argument("--precision", choices=PRECISIONS, help="format of the products (default: bf16, or fp16 "
                        "where the GPUs have no bf16)")
    parser.add_argument("--state-bits", type=int, choices=(8, 32), default=32,
                        help="bits of each of Adam's moments (default: 32)")
    parser.add_argument("--frozen-bits", type=int, choices=(4, 8, 32), default=32,
                        help="bits of frozen matrices except on the GPU; for --trainable lora:RANK (default: 32, no codes)")
    parser.add_argument("--recompute", action=argparse.BooleanOptionalAction, default=True,
                        help="compute activations again in backward (default: on)")
    parser.add_argument("--offload-activations", action=argparse.BooleanOptionalAction, default=False,
                        help="keep activations in host memory until backward (default: off)")
    parser.add_argument("--near-states", choices=("margin", "fill"), default="margin",
                        help="optimizer states on the GPU: in addition to all parameters, or instead of some "
                        "(default: margin)")
    parser.add_argument("--chunk-size", default="auto", help="elements of a chunk, or auto: least waste (default: auto)")
    parser.add_argument("--measure", action="store_true", help="take the speeds of link, GPU memory and host Adam from this "
                        "machine, measured now, instead of the table's")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--paper", action="store_true", help="print the largest models next to the published ones")
    layouts_command.add_flags(parser)
    parser.set_defaults(defaults=vars(parser.parse_args([])))


def run(arguments: argparse.Namespace) -> int:
    """Prints the answer. Returns 0 if the model fits, 1 if it does not. Raises ConfigError for bad input."""
    layouts_command.refuse_other_flags(arguments, arguments.defaults)
    if arguments.layouts:
        found = layouts_command.answer_of(arguments)
        print(json.dumps(layouts_command.as_json(found), indent=2) if arguments.json else layouts_command.as_text(found))
        return 0 if found.best else 1
    if arguments.paper:
        rows = paper_rows()
        print(json.dumps({"rows": rows, "assumptions": ASSUMPTIONS}, indent=2) if arguments.json else paper_table(rows))
        return 0
    for flag in ("gpus", "batch", "seq_len", "micro_steps"):
        if (getattr(arguments, flag) or 0) > MOST:
            raise ConfigError(f"--{flag.replace('_', '-')} {getattr(arguments, flag)}: give at most {MOST}")
    machine = _machine(arguments)
    shape = replace(find_model(arguments.model), lora_rank=parse_trainable(arguments.trainable))
    seq_len = shape.positions if arguments.seq_len is None else arguments.seq_len
    if arguments.model.lower().replace("x", "").isdecimal() and seq_len > shape.positions:
        shape = replace(shape, positions=seq_len)    # LAYERSxHIDDEN does not say how many positions there are
    precision = arguments.precision or ("bf16" if machine.has_bf16 else "fp16")
    machine = _measured(machine, precision, arguments.state_bits) if arguments.measure else machine
    if arguments.frozen_bits != 32 and not shape.lora_rank:
        raise ConfigError(f"--frozen-bits {arguments.frozen_bits}: nothing is frozen; give --trainable lora:RANK too")
    chunk = arguments.chunk_size
    if chunk != "auto" and not (chunk.isdecimal() and len(chunk) < 19):
        raise ConfigError(f"--chunk-size {chunk}: give a positive number of elements, or auto")
    job = Job(arguments.batch, seq_len, precision, arguments.recompute, arguments.micro_steps,
              chunk if chunk == "auto" else int(chunk), offload_activations=arguments.offload_activations,
              near_states=arguments.near_states, state_bits=arguments.state_bits, frozen_bits=arguments.frozen_bits)
    answer = predict(shape, machine, job)
    print(json.dumps(as_json(answer), indent=2) if arguments.json else table(answer))
    return 0 if answer.fits else 1


def _machine(arguments: argparse.Namespace) -> Machine:
    machine = find_machine(arguments.machine)
    changes: dict[str, Any] = {}
    if arguments.gpus is not None:
        changes |= {"num_gpus": arguments.gpus, "gpu_link_bytes_per_s": machine.speeds.gpu_link_bytes_per_s
                    or machine.speeds.link_bytes_per_s}
        if arguments.gpus >= 1 and arguments.gpus % machine.nodes:
            raise ConfigError(f"--gpus {arguments.gpus}: {machine.name} has {machine.nodes} nodes; give a multiple")
    for name, text in (("gpu_bytes", arguments.gpu_memory), ("host_bytes", arguments.host_memory),
                       ("disk_bytes", arguments.disk)):
        if text is not None:
            changes[name] = 0 if name == "disk_bytes" and text == "0" else parse_bytes(text, 0)
    if changes.get("disk_bytes") and not machine.speeds.disk_bytes_per_s:
        changes["disk_bytes_per_s"] = 1e9
    return machine.changed(**changes)


def _measured(machine: Machine, precision: str, state_bits: int) -> Machine:
    """The machine with speeds of link, GPU memory and host Adam that are measured on the machine that runs this."""
    speeds = measure_here(precision, state_bits)
    return machine.changed(
        link_bytes_per_s=speeds.link_bytes_per_s, gpu_memory_bytes_per_s=speeds.gpu_memory_bytes_per_s,
        host_adam_params_per_s=speeds.host_adam_params_per_s,
        source=f"{machine.source}; link, GPU memory and host Adam: measured here, now".lstrip("; "))


def as_json(answer: Prediction) -> dict[str, Any]:
    """The prediction as plain values: bytes, seconds, and the engine's configuration for it."""
    layout, early = answer.layout, predict_early(answer)
    return {
        "fits": answer.fits, "mode": answer.mode, "model": vars(answer.shape), "parameters": answer.num_params,
        "trained_parameters": answer.shape.num_trained, "frozen_bytes": answer.frozen_bytes,
        "machine": answer.machine.name, "job": vars(answer.job), "chunk_elems": layout.chunk_elems,
        "groups": len(layout.groups), "utilisation": layout.utilisation, "groups_updated_near": answer.near_groups,
        "near_bytes": answer.near_bytes, "near_budget": answer.near_budget, "activation_bytes": answer.activation_bytes,
        "gpu_peak_bytes": answer.gpu_peak_bytes, "far_bytes": answer.far_bytes, "far_room": answer.far_room,
        "offloaded_bytes": answer.offloaded_bytes, "disk_bytes": answer.disk_bytes, "disk_room": answer.disk_room,
        "short_of": answer.short_of, "moved_bytes": answer.moved, "seconds": answer.seconds,
        "tokens_per_s": answer.tokens_per_s, "adam": answer.adam.where if answer.adam else None,
        "speculative_update": vars(early) if early is not None else None,
        "configuration": configuration(answer), "would_fit": [] if answer.fits else what_would_fit(answer),
    }


def configuration(answer: Prediction) -> dict[str, Any]:
    """The engine's configuration for this plan; empty if it does not fit."""
    if not answer.fits:
        return {}
    precision = {answer.job.precision: {"enabled": True}} if answer.job.precision != "fp32" else {}
    offload = {"offload_activations": True} if answer.job.offload_activations else {}
    states = {"near_states": "fill"} if answer.job.near_states == "fill" else {}
    if answer.job.state_bits != 32:
        states["optimizer"] = {"params": {"state_bits": answer.job.state_bits}}
    if answer.job.frozen_bits != 32:
        states["frozen_bits"] = answer.job.frozen_bits
    return precision | offload | states | {
        "default_chunk_size": answer.layout.chunk_elems, "near_budget": answer.near_budget, "far_budget": answer.far_room,
        "gradient_accumulation_steps": answer.job.micro_steps,
    }


def table(answer: Prediction) -> str:
    """The prediction as text."""
    shape, machine, job, layout = answer.shape, answer.machine, answer.job, answer.layout
    costs, frozen = job.costs, answer.frozen_bytes
    a_parameter = f"{costs.total} bytes a parameter"
    if frozen:
        a_parameter = f"{costs.total} bytes a trained parameter, {costs.param} a frozen one"
        if costs.in_codes:
            a_parameter += f", {costs.block_bytes} for {CODE_BLOCK} in codes"
    rows = [
        ("model", f"{shape.layers} layers of width {shape.hidden}, {answer.num_params:,} parameters"
                  + (f", {shape.num_trained:,} of them trained (LoRA of rank {shape.lora_rank})" if frozen else "")),
        ("machine", f"{machine.name}: {machine.num_gpus} x {format_bytes(machine.gpu_bytes)} GPU, {machine.nodes} x "
                    f"{format_bytes(machine.host_bytes)} host"
                    + (f", {machine.nodes} x {format_bytes(machine.disk_bytes)} disk" if machine.disk_bytes else "")),
        ("job", f"{job.batch} x {job.seq_len} tokens a GPU, {job.micro_steps} micro-step(s), {job.precision} "
                f"({a_parameter}{', 8-bit states' if job.state_bits == 8 else ''}), "
                f"{'full recomputation' if job.recompute else 'no recomputation'}"
                + (", activations offloaded" if job.offload_activations else "")),
        ("chunks", f"{layout.chunk_elems:,} elements, {len(layout.groups)} groups of {layout.num_ranks}, "
                   f"{layout.utilisation:.1%} used"),
        ("answer", f"fits, {MODE_WORDS[answer.mode]}" if answer.mode else "does not fit: "
                   + ", ".join(f"{format_bytes(miss)} more {tier} a rank" for tier, miss in answer.short_of.items())),
    ]
    if not answer.fits:
        rows += [("would fit", words) for words in what_would_fit(answer)] or [("would fit", "nothing that was tried")]
    rows += [
        ("GPU peak", f"{format_bytes(answer.near_bytes)} model data + {format_bytes(answer.activation_bytes)} activations + "
                     f"{format_bytes(machine.gpu_bytes - machine.usable_gpu_bytes)} reserve"),
        *([("frozen", f"{format_bytes(frozen)} of all ranks, copied from the host and never back")] if frozen else []),
        ("host peak", f"{format_bytes(answer.far_bytes)} of {format_bytes(answer.far_room)} a rank"
                      + (f", {format_bytes(answer.offloaded_bytes)} activations when forward ends" if job.offload_activations
                         else "")),
    ]
    if machine.disk_bytes or answer.disk_bytes:
        rows.append(("disk peak", f"{format_bytes(answer.disk_bytes)} of {format_bytes(answer.disk_room)} a rank"))
    if answer.fits:
        seconds = answer.seconds
        rows.append(("Adam", f"{answer.near_groups} groups near, {len(layout.trained) - answer.near_groups} far"
                     + (f", these by {answer.adam.where} (host {answer.adam.host_seconds:.3g} s, streamed "
                        f"{answer.adam.stream_seconds:.3g} s)" if answer.near_groups < len(layout.trained) else "")))
        rows += [(f"moved, {kind}", f"{format_bytes(count)} a rank and step")
                 for kind, count in answer.moved.items() if count]
        rows += [
            ("forward, backward", f"{seconds['passes']:.3g} s: the longest of compute {seconds['compute']:.3g}"
                                  + (f" + offload {seconds['offload']:.3g}" if job.offload_activations else "") + ", link "
                                  f"{seconds['link']:.3g}, collectives {seconds['collectives']:.3g}"),
            ("update", f"{seconds['update']:.3g} s: the longest of near {seconds['adam near']:.3g}, far "
                       f"{seconds['adam far']:.3g}, disk {seconds['disk']:.3g}"),
            ("step", f"{seconds['step']:.3g} s, {answer.tokens_per_s:,.0f} tokens/s on all GPUs"),
            *_speculative_row(answer),
            ("configuration", json.dumps(configuration(answer))),
        ]
    return _aligned(rows) + f"\n\nFigures of the machine: {machine.source or 'as given'}."


def _speculative_row(answer: Prediction) -> list[tuple[str, str]]:
    """What speculative_update would bring; no row if there is nothing to update early."""
    early = predict_early(answer)
    if early is None:
        return []
    words = f"{early.step_seconds:.3g} s a step with a log of {format_bytes(early.log_bytes)} a rank for {early.share:.0%}"
    pays = (f"pays while less than {early.worth_below:.0%} of the steps are clipped or skipped" if early.worth_below >= 0.01
            else "does not pay here")
    return [("speculative_update", f"{words} of what the host updates: {pays}")]


def paper_table(rows: list[dict[str, object]]) -> str:
    """Largest models in billions of parameters, as text."""
    head = ("machine", "16 bit", "PatrickStar (published)", "pstar", "pstar, states near by margin only",
            "DeepSpeed (published)", "ZeRO-Offload's layout", "data parallel, 16 to 18 bytes")
    lines = [head]
    for row in rows:
        lines.append((row["machine"], row["precision"], f"{row['published']:.0f}", f"{row['patrickstar']:.1f}",
                      f"{row['patrickstar-margin']:.1f}", row["published DeepSpeed"], f"{row['zero-offload']:.1f}",
                      f"{row['ddp']:.2f} to {row['ddp-fp32-grads']:.2f}"))
    widths = [max(len(str(line[column])) for line in lines) for column in range(len(head))]
    text = ["  ".join(str(cell).ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    return "\n".join(["Largest model, billions of parameters", "", *text, "", *ASSUMPTIONS,
                      "Published: Fang et al., IEEE TPDS 2023 (arXiv 2108.05818), and the README of Tencent/PatrickStar."])


def _aligned(rows: list[tuple[str, str]]) -> str:
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name.ljust(width)}  {value}" for name, value in rows)
