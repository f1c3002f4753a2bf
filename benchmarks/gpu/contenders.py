"""The contenders of benchmarks/gpu/models.py: each makes its model on one device and returns one training step.

pstar       16-bit parameters, states in near or far, as there is room
plain       torch.autocast over fp32 parameters, fused AdamW: everything on the device
fsdp2       fully_shard with CPUOffloadPolicy: fp32 parameters and moments in host memory, AdamW of the CPU, bf16 computation

pstar-NAME, plain-compiled   the same with one thing changed: VARIANTS, and torch.compile of every block

All recompute blocks in backward if work["recompute"] is true, clip at a global norm of 1, and read the same batches.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import end_with_parent
from torch.utils.checkpoint import checkpoint

from gpt2_chinese.model.config import ModelConfig
from gpt2_chinese.model.gpt2 import GPT2LMHeadModel

ADAM = {"lr": 1e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
CLIP = 1.0

Step = Callable[[torch.Tensor, torch.Tensor], dict[str, float]]
"""From (inputs, targets), each (batch, length) int64 on the device, to the step's numbers: at least its loss."""


def make_model(work: dict[str, Any]) -> GPT2LMHeadModel:
    """work: the arguments of ModelConfig under "model", and "recompute"."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(ModelConfig(**work["model"]))
    if work["recompute"]:
        for block in model.transformer.h:
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    return model


def pstar(work: dict[str, Any], device: torch.device) -> Step:
    """work["near_memory"]: bytes of the device for chunks and activations together; work["config"]: more keys."""
    import pstar

    near = {"near_memory": work["near_memory"], "near_budget": work["near_memory"]} if work["near_memory"] else {}
    keys = {"optimizer": {"type": "AdamW", "params": ADAM}, "bf16": {"enabled": True}, "gradient_clipping": CLIP}
    model, optimizer = pstar.initialize_engine(lambda: make_model(work), 0, keys | near | work["config"], device=device)
    links = model._store.links
    queues = {"far to near": links._in, "near to far": links._out}

    def step(inputs: torch.Tensor, targets: torch.Tensor) -> dict[str, float]:
        busy = {way: queue.busy_s for way, queue in queues.items()}
        moved = model.ledger.moved_bytes.copy()
        optimizer.zero_grad()
        loss = model(inputs, targets)
        model.backward(loss)
        optimizer.step()
        told = {"loss": float(loss.detach()), "waited": model.ledger.step_copy_waited_s, "chunks": model.near.peak_bytes}
        for way, queue in queues.items():
            took = queue.busy_s - busy[way]
            told[f"{way} bytes"] = model.ledger.step_bytes[way]
            told[f"{way} speed"] = (model.ledger.moved_bytes[way] - moved[way]) / took if took else 0.0
        return told

    return step


VARIANTS: dict[str, dict[str, Any]] = {
    "pstar-all": {"near_budget": "100%"},
    "pstar-all-compiled": {"near_budget": "100%", "compile": "block"},
    "pstar-25": {"near_budget": "25%"},
    "pstar-25-no-prefetch": {"near_budget": "25%", "prefetch": 0},
    "pstar-25-early": {"near_budget": "25%", "speculative_update": True},
    "pstar-25-overlap": {"near_budget": "25%", "overlap_update": True},
    "pstar-25-stream": {"near_budget": "25%", "far_states": "stream"},
}
"""Names of pstar with keys of its configuration; the budget counts the bytes of all model data."""


def variant(keys: dict[str, Any], work: dict[str, Any], device: torch.device) -> Step:
    return pstar(work | {"near_memory": None, "config": work["config"] | keys}, device)


def plain(work: dict[str, Any], device: torch.device, compiled: bool = False) -> Step:
    with device:
        model = make_model(work)
    if compiled:
        for block in model.transformer.h:
            block.compile()
    optimizer = torch.optim.AdamW(model.parameters(), **ADAM, fused=True)
    return functools.partial(_torch_step, model, optimizer, device)


def fsdp2(work: dict[str, Any], device: torch.device) -> Step:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    place, backend = Path(work["folder"]) / f"meet.{os.getpid()}", "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, f"file://{place}", rank=0, world_size=1)
    with torch.device("meta"):
        model = make_model(work)
    how = {"mesh": init_device_mesh(device.type, (1,)), "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}
    if device.type == "cuda":
        how["offload_policy"] = CPUOffloadPolicy()
    for block in model.transformer.h:
        fully_shard(block, **how)
    fully_shard(model, **how)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for name, param in model.named_parameters():
            local = param.to_local()
            local.fill_(float("ln_" in name)) if param.dim() == 1 else local.normal_(0.0, 0.02)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAM, fused=True)
    return functools.partial(_torch_step, model, optimizer, None)


def _torch_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, autocast: torch.device | None,
                inputs: torch.Tensor, targets: torch.Tensor) -> dict[str, float]:
    optimizer.zero_grad()
    with torch.autocast(autocast.type if autocast else "cpu", torch.bfloat16, enabled=autocast is not None):
        loss = model(inputs, targets)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    optimizer.step()
    return {"loss": float(loss.detach())}


CONTENDERS: dict[str, Callable[[dict[str, Any], torch.device], Step]] = {
    "pstar": pstar, "plain": plain, "fsdp2": fsdp2, "plain-compiled": functools.partial(plain, compiled=True),
    **{name: functools.partial(variant, keys) for name, keys in VARIANTS.items()}}


def work_on(name: str, work: dict[str, Any], pipe: Any) -> None:
    """Runs in a separate process: receives numbers of steps, sends each step's seconds and numbers, or an error's line.

    Progress and tracebacks are printed to stderr. work["cap"]: bytes of the GPU that this process may use, or None.
    """
    end_with_parent()
    with contextlib.suppress(OSError):    # if the host's memory is full, the system ends this process and no other
        Path("/proc/self/oom_score_adj").write_text("900")
    try:
        device, begin, available = torch.device(work["device"]), time.perf_counter(), work["alone"] and _available()
        if device.type == "cpu":
            torch.set_num_threads(1)
        elif work.get("cap"):
            if name.startswith("pstar"):    # as the engine does itself where it is the first to ask CUDA
                from pstar.memory.segments import grow_segments

                grow_segments()
            torch.cuda.set_per_process_memory_fraction(work["cap"] / torch.cuda.mem_get_info(device)[1], device)
        step = CONTENDERS[name](work, device)
        _tell(f"{name}: ready after {time.perf_counter() - begin:.0f} s")
        generator, shape = torch.Generator().manual_seed(1), (work["batch"], work["seq_len"] + 1)
        while (number := pipe.recv()) is not None:
            told = []
            for _ in range(number):
                tokens = torch.randint(0, work["model"]["vocab_size"], shape, generator=generator)
                inputs, targets = tokens[:, :-1].to(device), tokens[:, 1:].contiguous().to(device)
                begin = time.perf_counter()
                one = step(inputs, targets)    # the loss comes back to the host ...
                if device.type == "cuda":
                    torch.cuda.synchronize()    # ... before the update is done
                told.append(one | {"seconds": time.perf_counter() - begin} | _peaks(device, available))
                _tell(f"{name}: a step of {told[-1]['seconds']:.1f} s, loss {one['loss']:.3f}")
            pipe.send(told)
    except EOFError:    # the benchmark has ended
        return
    except Exception as error:    # out of memory, most likely: that is a result
        traceback.print_exc()
        pipe.send(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}")


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _peaks(device: torch.device, available: int) -> dict[str, int]:
    """Bytes that torch's allocator gave at most, that it took from the GPU at most, and of host memory that are no longer
    available: `available` were at the start, 0 for no count. Pinned memory is in no count of a process."""
    on_gpu = device.type == "cuda"
    return {"peak": torch.cuda.max_memory_allocated() if on_gpu else 0,
            "reserved": torch.cuda.max_memory_reserved() if on_gpu else 0,
            **({"host": available - _available()} if available else {})}


def _available() -> int:
    """Bytes of the machine's memory that programs can still take; 0 where the system does not count them."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return 0
