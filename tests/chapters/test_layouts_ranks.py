"""Bytes of `pstar plan --layouts` against the tensors that the chapters hold: within 5 % for every layout that runs here.

1 to 4 processes: chapters 00, 02, 04 (O2), 05 (tensor, pipeline, data), 06 (stages 1 to 3, with and without offload) and 07.
A case trains a few steps with the chapter's technique, then adds up the storages of parameters, gradients and states while
the gradients are there: the moment that the plan counts. Chapter 06's ledger and the engine's tiers count for themselves.
"""

from __future__ import annotations

import itertools
import shlex
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import pstar
from gpt2_chinese.distributed.ranks import Ranks
from gpt2_chinese.model.config import PRESETS, ModelConfig
from gpt2_chinese.model.gpt2 import GPT2LMHeadModel
from gpt2_chinese.run.resolve import resolve
from gpt2_chinese.settings import Settings
from pstar.planner.course_commands import CONFIGS, command_of
from pstar.planner.gpt_shape import GptShape
from pstar.planner.gpus import cluster_of
from pstar.planner.layout_memory import Layout, LayoutJob, activations, need_of, rank_bytes
from pstar.planner.layouts import layouts_of
from tests.chapters.technique import ROOT, technique

SHAPE = GptShape(4, 64, 4, vocab=512, positions=32)
BATCH, STEPS = 12, 2
MODEL_DATA = ("parameters", "gradients", "optimizer")


def gpt2(shape: GptShape = SHAPE) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(ModelConfig(shape.layers, shape.hidden, shape.heads, shape.positions, shape.vocab))


def tokens(rows: int) -> torch.Tensor:
    return torch.arange(rows * SHAPE.positions).view(rows, -1) % SHAPE.vocab


def ranks_of(rank: int, num_ranks: int) -> Ranks:
    return Ranks(rank, num_ranks, rank, torch.device("cpu"), dist.group.WORLD if num_ranks > 1 else None)


def held(tensors: Any) -> int:
    """Bytes of the storages, each once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t is not None}
    return sum(storages.values())


def held_by(model: torch.nn.Module, optimizer: torch.optim.Optimizer, masters: Any = ()) -> dict[str, int]:
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    states = [state[kind] for state in optimizer.state.values() for kind in ("exp_avg", "exp_avg_sq")]
    states += [p for p in masters if p.untyped_storage().data_ptr() not in own]
    return {"parameters": held(model.parameters()), "gradients": held(p.grad for p in model.parameters()),
            "optimizer": held(states)}  # fmt: skip


def single(rank: int, num_ranks: int, layout: Layout, precision: str) -> dict[str, int]:
    """Chapter 00, and 02 with several ranks."""
    model = gpt2()
    optimizer = torch.optim.AdamW(model.parameters())
    settings = SimpleNamespace(backend="own", variant="bucket", bucket_mb=1.0, timeline=None)
    replica = technique("02_ddp", "ddp").replicate(model, dist.group.WORLD if num_ranks > 1 else None, settings)
    for _ in range(STEPS):
        optimizer.zero_grad()
        rows = tokens(BATCH // num_ranks)
        replica(rows, rows).backward()
        replica.wait()
        optimizer.step()
    return held_by(model, optimizer)


def mixed(rank: int, num_ranks: int, layout: Layout, precision: str) -> dict[str, int]:
    """Chapter 04 at O2; each rank holds the same, so one process shows it."""
    amp = technique("04_apex", "amp")
    settings = SimpleNamespace(apex=False, backend="own", half=precision, loss_scale="1", scale_window=9, lr=1e-3,
                               weight_decay=0.1, opt_level="O2")  # fmt: skip
    model = gpt2()
    masters, scaler = amp.initialize(model, SimpleNamespace(max=lambda value: value), settings)
    optimizer = amp.optimizer_for(masters, settings)
    for _ in range(STEPS):
        optimizer.zero_grad()
        rows = tokens(BATCH // layout.data)
        scaler.scale(model(rows, rows)).backward()
        gradients = held(p.grad for p in model.parameters())
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
    return held_by(model, optimizer, masters.parameters()) | {"gradients": gradients}


def model_parallel(rank: int, num_ranks: int, layout: Layout, precision: str) -> dict[str, int]:
    """Chapter 05."""
    mesh = technique("05_model_parallel", "mesh").Mesh(ranks_of(rank, num_ranks), layout.tensor, layout.pipeline)
    settings = SimpleNamespace(sequence_parallel=False, activation_checkpointing=False, backend="own", schedule="1f1b",
                               virtual_stages=1, timeline=None, precision=precision, seed=1,
                               model=SimpleNamespace(n_embd=SHAPE.hidden))  # fmt: skip
    model = gpt2()
    parallel = technique("05_model_parallel", "parallel").ModelParallel(model, mesh, settings)
    optimizer, micros = torch.optim.AdamW(model.parameters()), BATCH // (layout.data * layout.micro_batch)
    rows = tokens(layout.micro_batch)
    batches = SimpleNamespace(micro_batches=lambda step: [(rows, rows)] * micros, weight=lambda step, targets: 1 / micros)
    for step in range(STEPS):
        optimizer.zero_grad()
        parallel.train(step, batches, torch.amp.GradScaler("cpu", enabled=False))
        optimizer.step()
    found = held_by(model, optimizer)
    mesh.close()
    return found


def zero(rank: int, num_ranks: int, layout: Layout, precision: str) -> dict[str, int]:
    """Chapter 06: what its ledger saw after backward."""
    settings = SimpleNamespace(zero_stage=layout.zero, offload="optimizer" if layout.offload else "none", loss_scale=None,
                               precision=precision, backend="own", activation_checkpointing=False)  # fmt: skip
    sharded, scaler = technique("06_zero", "zero").shard(gpt2(), ranks_of(rank, num_ranks), settings)
    sharded.optimizer = optimizer = torch.optim.AdamW(sharded.parameters())
    rows = tokens(BATCH // num_ranks)
    for _ in range(STEPS):
        optimizer.zero_grad()
        scaler.scale(sharded(rows, rows)).backward()
        sharded.wait()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    seen, found = sharded.ledger.states["after backward"], {}
    for kind, size in seen.items():
        where, _, name = kind.rpartition(" ")
        key = ("host_" if where else "") + ("optimizer" if name in ("masters", "moments") else name)
        found[key] = found.get(key, 0) + size
    return found


CHAPTERS = {"00": single, "02": single, "04": mixed, "05": model_parallel, "06": zero}
CASES = [
    ("00", Layout(micro_batch=BATCH), "fp32"),
    *(("04", Layout(data=n, micro_batch=BATCH // n), "bf16") for n in (1, 4)),
    *(("02", Layout(data=n, micro_batch=BATCH // n), "fp32") for n in (2, 3, 4)),
    *(("05", Layout(data=d, tensor=t, pipeline=p, micro_batch=1), "fp32")
      for d, t, p in itertools.product((1, 2, 4), repeat=3) if d * t * p <= 4 and t * p > 1),
    *(("06", Layout(data=n, zero=stage, offload=offload, micro_batch=BATCH // n), precision)
      for n, stage, offload, precision in itertools.product((2, 3, 4), (1, 2, 3), (False, True), ("fp32", "bf16"))),
    *(("06", Layout(data=1, zero=2, offload=True, micro_batch=BATCH), precision) for precision in ("fp32", "bf16")),
]  # fmt: skip
QUICK = {("00", 1, 1, 1, 0), ("05", 1, 2, 2, 0), ("05", 2, 2, 1, 0), ("06", 2, 1, 1, 2), ("06", 2, 1, 1, 3)}


def is_quick(chapter: str, layout: Layout, precision: str) -> bool:
    key = chapter, layout.data, layout.tensor, layout.pipeline, layout.zero
    return key in QUICK and (precision == "bf16" or chapter < "06") and not layout.offload


def words(case: tuple[str, Layout, str]) -> str:
    chapter, it, precision = case
    split = f"d{it.data}t{it.tensor}p{it.pipeline}"
    return f"{chapter}-{split}-zero{it.zero}{'-offload' * it.offload}-{precision}"


@pytest.mark.parametrize("case", [
    pytest.param(case, id=words(case), marks=() if is_quick(*case) else pytest.mark.deep) for case in CASES])  # fmt: skip
def test_model_data_take_the_planned_bytes(ranks, case: tuple[str, Layout, str]) -> None:
    chapter, layout, precision = case
    num_ranks = 1 if chapter == "04" else layout.data * layout.tensor * layout.pipeline
    job = LayoutJob(SHAPE, SHAPE.positions, BATCH, precision)
    results = ranks(num_ranks).run(CHAPTERS[chapter], layout, precision)
    for rank, measured in enumerate(results):
        stage = rank // layout.tensor % layout.pipeline    # chapter 05: (data, pipeline, tensor)
        planned = rank_bytes(job, layout, stage)
        where = ("", "host_") if layout.offload else ("",)
        for kind in (prefix + kind for prefix in where for kind in MODEL_DATA):
            assert measured.get(kind, 0) == pytest.approx(planned[kind], rel=0.05), (rank, kind)
        total = sum(planned[prefix + kind] for prefix in ("", "host_") for kind in MODEL_DATA)
        assert sum(measured.values()) == pytest.approx(total, rel=0.05), rank


DEEPER = replace(SHAPE, layers=19)
"""For chapter 07. The plan counts no padding of chunks: 7 to 12 % of SHAPE, at most 3 % here, 1 % of GPT-2's real sizes."""


def engine(rank: int, num_ranks: int, precision: str, near: str) -> dict[str, int]:
    """Chapter 07: model data after backward, each block counted once, and the most bytes of chunks near and far."""
    config = {"bf16": {"enabled": precision == "bf16"}, "near_budget": near,
              "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}  # fmt: skip
    model, optimizer = pstar.initialize_engine(lambda: gpt2(DEEPER), rank, config, device="cpu")
    rows, whole = tokens(BATCH // num_ranks), 0
    for _ in range(STEPS):
        optimizer.zero_grad()
        model.backward(model(rows, rows))
        # One process with all near keeps autograd's own gradients: near's ledger has them, no block does.
        whole = model.near.used_bytes if num_ranks == 1 and near == "100%" else model.model_data_bytes
        optimizer.step()
    return {"whole": whole, "near": model.near.peak_bytes, "far": model.far.peak_bytes, "budget": model.near.budget_bytes}


@pytest.mark.parametrize("num_ranks, precision", [
    pytest.param(n, precision, marks=() if (n, precision) == (1, "bf16") else pytest.mark.deep)
    for n in (1, 2, 3, 4) for precision in ("fp32", "bf16")])  # fmt: skip
@pytest.mark.parametrize("near", ["100%", "40%"])
def test_pstar_takes_the_planned_bytes(ranks, num_ranks: int, precision: str, near: str) -> None:
    """With room for everything near, and with room for some optimizer states. Gathered parameters are no model data."""
    job = LayoutJob(DEEPER, DEEPER.positions, BATCH, precision)
    layout = Layout(data=num_ranks, pstar=True, micro_batch=BATCH // num_ranks)
    kept = activations(job, layout, 0)
    for measured in ranks(num_ranks).run(engine, precision, near):
        cluster = cluster_of("h100", num_ranks, gpu_gib=(measured["budget"] + kept + 2**30) / 0.95 / 2**30)
        need = need_of(cluster, job, layout)
        planned = sum(need.kinds[prefix + kind] for prefix in ("", "host_") for kind in MODEL_DATA)
        assert measured["whole"] == pytest.approx(planned, rel=0.05)
        assert need.device - kept <= measured["budget"]
        if num_ranks == 1 and near == "100%":
            assert measured["near"] == pytest.approx(need.device - kept, rel=0.05)
            assert measured["far"] == pytest.approx(need.host, rel=0.05), "copies of the parameters"


SETTINGS = {"00_single": None, "02_ddp": "ddp_settings", "04_apex": "amp_settings", "05_model_parallel": "parallel_settings",
            "06_zero": "zero_settings", "07_patrickstar": "engine_settings"}  # fmt: skip


@pytest.mark.parametrize("chapter", SETTINGS)
def test_the_printed_command_is_one_that_the_chapter_takes(chapter: str, tmp_path: Path) -> None:
    """The chapter's own settings read and check the flags of every layout that it runs, once for each number of splits."""
    shape, seen = GptShape(4, 128, 4, vocab=3980, positions=128), set()
    for num_ranks, precision in itertools.product((1, 2, 4), ("fp32", "bf16")):
        cluster, job = cluster_of("a100-80", num_ranks), LayoutJob(shape, 128, 24, precision)
        for layout in layouts_of(cluster, job):
            command = command_of(cluster, job, layout)
            key = replace(layout, micro_batch=1), precision
            if command.chapter != chapter or not command.runs or key in seen:
                continue
            seen.add(key)
            bash, script, *flags = shlex.split(command.lines[-1])
            assert (bash, script) == ("bash", f"chapters/{chapter}/train.sh")
            module = SETTINGS[chapter]
            kind = Settings if module is None else technique(chapter, module).Settings
            program = str(ROOT / script.replace(".sh", ".py"))    # without the flag it would find a run of its user
            settings = resolve(kind.from_command_line(program, "", [*flags, "--output-dir", str(tmp_path)]))
            assert settings.batch_size == 24 and settings.grad_accum == layout.micro_batches(job)
            assert settings.nproc == num_ranks and settings.precision == precision
            if chapter == "05_model_parallel":
                assert (settings.tp, settings.pp, settings.num_replicas) == (layout.tensor, layout.pipeline, layout.data)
    assert len(seen) >= 2


def test_the_names_of_configurations_are_the_course_s() -> None:
    assert {(c.n_layer, c.n_embd, c.n_head, c.n_positions): name for name, c in PRESETS.items()} == CONFIGS
