"""The chapters' own code as the answer to each exercise, without a second copy.

Functions are taken by name. A train.py is one straight line, so statements are taken from its loop. Wrappers change only
names and arguments.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from types import CodeType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gpt2_chinese.distributed.ranks import Ranks
from gpt2_chinese.model.gpt2 import next_token_loss
from gpt2_chinese.run import optim
from tests.chapters.technique import technique
from tests.exercises.exercise import ROOT

Names = dict[str, Any]


def _compiled(nodes: list[ast.stmt], file: str) -> CodeType:
    # compile() inherits this file's `from __future__ import annotations`: names in annotations need not exist.
    return compile(ast.Module(nodes, type_ignores=[]), str(ROOT / "chapters" / file), "exec")


def _body(file: str) -> list[ast.stmt]:
    return ast.parse((ROOT / "chapters" / file).read_text(encoding="utf-8")).body


def in_loop(file: str, first: str, last: str) -> CodeType:
    """The statements of a train.py's loop from the one that begins with `first` to the one that begins with `last`."""
    (body,) = [node.body for node in _body(file) if isinstance(node, ast.For) and "run.steps()" in ast.unparse(node.iter)]
    begins = [ast.unparse(node) for node in body]
    (start,) = [n for n, text in enumerate(begins) if text.startswith(first)]
    (end,) = [n for n, text in enumerate(begins) if text.startswith(last)]
    return _compiled(body[start : end + 1], file)


def function(file: str, name: str, names: Names) -> Callable:
    """A function of a file that cannot be imported here (it imports Horovod); `names` has everything that it calls."""
    exec(_compiled([node for node in _body(file) if getattr(node, "name", "") == name], file), names)
    return names[name]


def _run(micro_batches: list) -> Names:
    """The names that the loop of a train.py uses."""
    return {"torch": torch, "ranks": Ranks(), "autocast": optim.autocast, "clip_gradients": optim.clip_gradients, "step": 1,
            "scaler": optim.grad_scaler(torch.device("cpu"), "fp32"),
            "settings": SimpleNamespace(grad_accum=len(micro_batches), precision="fp32"),
            "train": SimpleNamespace(micro_batches=lambda step: micro_batches, weight=lambda *_: 1.0)}  # fmt: skip


def of_00() -> Names:
    def accumulate(model: nn.Module, micro_batches: list) -> Tensor:
        names = {**_run(micro_batches), "model": model}
        exec(in_loop("00_single/train.py", "loss = ", "for inputs, targets"), names)
        return names["loss"]

    return {"next_token_loss": next_token_loss, "learning_rate": optim.learning_rate, "accumulate": accumulate}


def of_01() -> Names:
    server = technique("01_parameter_server", "server")

    def synchronous_step(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, num_ranks: int) -> None:
        side = server.ParameterServer(model, rank, num_ranks, dist.group.WORLD)
        side.work(1, [])
        side.push(1, torch.zeros(()))
        if side.is_server:
            optimizer.step()
        side.pull()

    return {"mean_of": server.mean_of, "must_wait": server.must_wait, "synchronous_step": synchronous_step}


def of_02() -> Names:
    ddp, ring = technique("02_ddp", "ddp"), technique("02_ddp", "ring")
    return {"cut_into_buckets": ddp.cut_into_buckets, "ring_all_reduce": ring.ring_all_reduce}


def of_03() -> Names:
    def broadcast(hvd: Any, model: nn.Module, optimizer: Any) -> None:
        function("03_horovod/distributed_optimizer.py", "broadcast", {"hvd": hvd})(model, optimizer)

    def train_step(model: nn.Module, optimizer: Any, micro_batches: list, max_norm: float) -> tuple[Tensor, Tensor]:
        names = {**_run(micro_batches), "model": model, "optimizer": optimizer}
        names["settings"].clip_grad_norm = max_norm
        exec(in_loop("03_horovod/train.py", "optimizer.zero_grad()", "scaler.update()"), names)
        return names["loss"], names["grad_norm"]

    return {"broadcast": broadcast, "train_step": train_step}


def of_04() -> Names:
    scaling = technique("04_apex", "loss_scaler")

    def loss_scaler(window: int, largest_of_all: Callable[[float], float]) -> Any:
        return scaling.LossScaler("dynamic", window, largest_of_all, None)

    def finish_step(scaler: Any, optimizer: torch.optim.Optimizer, model: nn.Module, max_norm: float) -> Tensor:
        settings = SimpleNamespace(clip_grad_norm=max_norm)
        names = {**_run([]), "scaler": scaler, "optimizer": optimizer, "masters": model, "settings": settings}
        exec(in_loop("04_apex/train.py", "scaler.unscale_", "scaler.update()"), names)
        return names["grad_norm"]

    return {"LossScaler": loss_scaler, "finish_step": finish_step}


def of_05() -> Names:
    schedules, tensor = technique("05_model_parallel", "schedules"), technique("05_model_parallel", "tensor")

    def all_ranks() -> Any:
        return tensor.TensorGroup(dist.group.WORLD)

    return {
        "one_f_one_b": lambda rank, p, m: [(work.kind, work.micro) for work in schedules.orders("1f1b", p, m)[rank]],
        "CopyToAll": SimpleNamespace(apply=lambda x: tensor._F.apply(x, all_ranks(), "f")),
        "SumOfAll": SimpleNamespace(apply=lambda x: tensor._G.apply(x, all_ranks(), "g")),
        "ColumnParallelLinear": lambda whole, rank, p: tensor.ColumnParallelLinear(whole, all_ranks(), "column"),
        "RowParallelLinear": lambda whole, rank, p: tensor.RowParallelLinear(whole, all_ranks(), "row"),
    }


def of_06() -> Names:
    stages, units = technique("06_zero", "zero.stages012"), technique("06_zero", "zero.units")

    def pieces_of(sizes: dict[str, int], rank: int, num_ranks: int) -> list[tuple[str, int, int]]:
        parameters = {name: nn.Parameter(torch.zeros(size)) for name, size in sizes.items()}
        flat = units.flatten(parameters, num_ranks)
        unit = units.Unit(None, parameters, flat, torch.float32, (rank, num_ranks))
        return [(piece.name, piece.start, piece.numel) for piece in unit.pieces]

    class ShardedOptimizer:
        def __init__(self, model: nn.Module, make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> None:
            ranks = Ranks(dist.get_rank(), dist.get_world_size(), group=dist.group.WORLD)
            self.zero = stages.Zero012(model, ranks, SimpleNamespace(zero_stage=1, offload="none", precision="fp32"))
            self.optimizer = make_optimizer(list(self.zero.parameters()))

        def step(self) -> None:
            self.zero.wait()
            self.optimizer.step()
            self.zero.publish()

    return {"pieces_of": pieces_of, "ShardedOptimizer": ShardedOptimizer}


def of_07() -> Names:
    plan = technique("07_patrickstar", "chunk_plan")
    return {"next_use": plan.next_use, "victim": plan.victim, "count_loads": plan.count_loads}


def of_08() -> Names:
    lora, blockwise = (technique("08_param_efficient", name) for name in ("methods.lora", "quantize.blockwise"))

    class Frozen(nn.Module):
        def __init__(self, weight: Tensor, bias: Tensor) -> None:
            super().__init__()
            self.register_buffer("weight", weight)
            self.register_buffer("bias", bias)

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight + self.bias

    class LoraLinear(lora.LoraLayer):
        def __init__(self, weight: Tensor, bias: Tensor, rank: int, alpha: float) -> None:
            super().__init__(Frozen(weight, bias), lora.MethodSpec("lora", rank=rank, alpha=alpha))

        def merged_weight(self) -> Tensor:
            return self.merged_tensors()[0]

    return {"LoraLinear": LoraLinear, "quantize": blockwise.quantize_blocks, "dequantize": blockwise.dequantize_blocks}


SOLUTIONS = {"00": of_00, "01": of_01, "02": of_02, "03": of_03, "04": of_04, "05": of_05, "06": of_06, "07": of_07,
             "08": of_08}  # fmt: skip
