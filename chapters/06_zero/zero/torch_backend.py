"""ZeRO by torch: DistributedDataParallel with ZeroRedundancyOptimizer for stage 1, FSDP2 for stages 2 and 3.

    stage 1   each rank gets some whole parameters, updates them and broadcasts them
    stage 2   fully_shard(reshard_after_forward=False): gathered parameters stay from forward until their backward
    stage 3   fully_shard: gathered before use, freed after, in forward and in backward

FSDP2 keeps a parameter as a DTensor, a p-th of its rows on each rank, so the optimizer, the norm and clipping work as on
one process. With CPUOffloadPolicy, host memory holds the shards and their gradients, and the CPU does the update.
"""

from __future__ import annotations

import contextlib
import gc
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gpt2_chinese.checkpoint.model_state import load_adamw_moments, load_weights
from gpt2_chinese.checkpoint.sharded import Part, write_whole
from gpt2_chinese.run.optim import adamw, autocast, clip_gradients
from zero.units import blocks_of


def of_torch(model: nn.Module, ranks: Any, settings: Any) -> TorchZero:
    """The same as backends.shard, by torch; one process shards nothing."""
    if ranks.group is None:
        return TorchZero(model, ranks, settings)
    return Zero1(model, ranks, settings) if settings.zero_stage == 1 else Fsdp2(model, ranks, settings)


class TorchZero:
    """The methods that train.py calls, for one process."""

    def __init__(self, model: nn.Module, ranks: Any, settings: Any) -> None:
        self.model, self.forward, self.ranks, self.settings = model, model, ranks, settings
        self.optimizer: torch.optim.Optimizer | None = None
        self.num_updates = 0

    def __call__(self, *inputs: Tensor) -> Tensor:
        with autocast(self.ranks.device, self.settings.precision):
            return self.forward(*inputs)

    def no_sync(self, active: bool = True) -> contextlib.AbstractContextManager[Any]:
        """As in Sharded."""
        return contextlib.nullcontext()

    def make_optimizer(self, settings: Any) -> torch.optim.Optimizer:
        """As in Sharded."""
        self.optimizer = adamw(self.model, settings)
        return self.optimizer

    def wait(self) -> None:
        """Does nothing: backward has already waited for the reductions."""

    def publish(self) -> None:
        """Only counts: the optimizer updates the model's weights directly."""
        self.num_updates += 1

    def clip_gradients(self, max_norm: float) -> Tensor:
        """As in Sharded."""
        return clip_gradients(self.model, max_norm)

    def step_scalars(self) -> dict[str, float]:
        """Empty: torch does not report what it sends. sent_bytes in metrics.jsonl comes from the kernel's count."""
        return {}

    def load(self, weights: Mapping[str, Tensor], moments: Mapping[str, Tensor]) -> None:
        """As in Sharded."""
        load_weights(self.model, weights)
        load_adamw_moments(self.model, self.optimizer, moments)
        self.num_updates = max((int(moments[key]) for key in moments if key.startswith("step.")), default=0)

    def _states(self) -> Mapping[nn.Parameter, dict[str, Any]]:
        """The optimizer's states of those parameters whose moments this rank has."""
        return self.optimizer.state

    def _part(self, tensor: Tensor, parameter: nn.Parameter) -> Part:
        """This rank's part of a tensor that is distributed like `parameter`."""
        return Part(tensor.shape, {(0,) * tensor.dim(): tensor.detach()})

    def parts(self) -> tuple[dict[str, Part], dict[str, int]]:
        """As in Sharded."""
        parts, states = {}, self._states()
        for name, parameter in self.model.named_parameters():
            parts[f"model.{name}"] = self._part(parameter, parameter)
            for kind in ("exp_avg", "exp_avg_sq"):
                if parameter in states:
                    parts[f"{kind}.{name}"] = self._part(states[parameter][kind], parameter)
        return parts, {name: self.num_updates for name, _ in self.model.named_parameters()}

    def write_weights(self, file: Path) -> None:
        """As in Sharded."""
        write_whole(file, {name: self._part(p, p) for name, p in self.model.named_parameters()}, self.ranks)

    def close(self) -> list[tuple[str, Any]]:
        """Rows for the summary. Drops all references to the process group: its threads would abort the process at exit."""
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        states = [value for state in self._states().values() for value in state.values() if torch.is_tensor(value)]
        sizes = {"parameters": _bytes(self.model.parameters()), "gradients": _bytes(gradients), "moments": _bytes(states)}
        self.forward = self.optimizer = None
        gc.collect()
        return [(f"  {kind}", f"{size / 2**20:.2f} MiB on rank 0") for kind, size in sizes.items()]


class Zero1(TorchZero):
    """Stage 1: DistributedDataParallel, with ZeroRedundancyOptimizer around AdamW."""

    def __init__(self, model: nn.Module, ranks: Any, settings: Any) -> None:
        super().__init__(model, ranks, settings)
        devices = [ranks.device] if ranks.device.type == "cuda" else None
        self.forward = nn.parallel.DistributedDataParallel(model, device_ids=devices, process_group=ranks.group)

    def no_sync(self, active: bool = True) -> contextlib.AbstractContextManager[Any]:
        """As in Sharded."""
        return self.forward.no_sync() if active else contextlib.nullcontext()

    def make_optimizer(self, settings: Any) -> torch.optim.Optimizer:
        """As in Sharded."""
        from torch.distributed.optim import ZeroRedundancyOptimizer

        plain = adamw(self.model, settings)
        groups = [{"params": group["params"], "weight_decay": group["weight_decay"]} for group in plain.param_groups]
        self.optimizer = ZeroRedundancyOptimizer(groups, torch.optim.AdamW, process_group=self.ranks.group, lr=settings.lr,
                                                 betas=(0.9, 0.95), eps=1e-8)  # fmt: skip
        return self.optimizer

    def load(self, weights: Mapping[str, Tensor], moments: Mapping[str, Tensor]) -> None:
        """As in Sharded; a rank loads the moments of the parameters that it updates."""
        load_weights(self.model, weights)
        mine = {p for group in self.optimizer.optim.param_groups for p in group["params"]}
        for name, parameter in self.model.named_parameters():
            if f"step.{name}" in moments:
                self.num_updates = max(self.num_updates, int(moments[f"step.{name}"]))
                if parameter in mine:
                    state = {key: moments[f"{key}.{name}"].to(parameter, copy=True) for key in ("exp_avg", "exp_avg_sq")}
                    self.optimizer.optim.state[parameter] = {"step": moments[f"step.{name}"].clone(), **state}

    def _states(self) -> Mapping[nn.Parameter, dict[str, Any]]:
        return self.optimizer.optim.state


class Fsdp2(TorchZero):
    """Stages 2 and 3: fully_shard for each block, then for the parameters outside the blocks."""

    def __init__(self, model: nn.Module, ranks: Any, settings: Any) -> None:
        super().__init__(model, ranks, settings)
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

        for tensor in [*model.parameters(), *model.buffers()]:
            dist.broadcast(tensor.detach(), group=ranks.group, group_src=0)
        options: dict[str, Any] = {"mesh": DeviceMesh.from_group(ranks.group, ranks.device.type)}
        options["reshard_after_forward"] = settings.zero_stage == 3
        if settings.precision == "bf16":
            options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        pinned = ranks.device.type == "cuda"
        offload = CPUOffloadPolicy(pin_memory=pinned) if settings.offload != "none" else OffloadPolicy()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for block in blocks_of(model).values():
                fully_shard(block, offload_policy=offload, **options)
            fully_shard(model, offload_policy=offload, **options)

    def __call__(self, *inputs: Tensor) -> Tensor:
        return self.model(*inputs)

    def clip_gradients(self, max_norm: float) -> Tensor:
        """As in Sharded. full_tensor() combines the norms of the ranks' shards."""
        return super().clip_gradients(max_norm).full_tensor()

    @torch.no_grad()
    def load(self, weights: Mapping[str, Tensor], moments: Mapping[str, Tensor]) -> None:
        """As in Sharded."""
        for name, parameter in self.model.named_parameters():
            local = parameter.to_local()
            local.copy_(self._mine(weights[name], parameter))
            if f"step.{name}" in moments:
                self.num_updates = max(self.num_updates, int(moments[f"step.{name}"]))
                state = {}
                for key in ("exp_avg", "exp_avg_sq"):
                    state[key] = torch.zeros_like(parameter)
                    state[key].to_local().copy_(self._mine(moments[f"{key}.{name}"], parameter))
                self.optimizer.state[parameter] = {"step": moments[f"step.{name}"].clone(), **state}

    def parts(self) -> tuple[dict[str, Part], dict[str, int]]:
        """As in Sharded. Frees first what an evaluation has gathered, because no backward has freed it."""
        self._reshard()
        return super().parts()

    def write_weights(self, file: Path) -> None:
        """As in Sharded."""
        self._reshard()
        super().write_weights(file)

    def _reshard(self) -> None:
        for module in self.model.modules():
            if hasattr(module, "reshard"):
                module.reshard()

    def _first_row(self, parameter: nn.Parameter) -> int:
        """Each rank has the same number of rows, rounded up; the last ranks may have fewer, or none."""
        return min(parameter.shape[0], self.ranks.rank * -(-parameter.shape[0] // self.ranks.num_ranks))

    def _mine(self, whole: Tensor, parameter: nn.Parameter) -> Tensor:
        return whole[self._first_row(parameter) :][: parameter.to_local().shape[0]]

    def _part(self, tensor: Tensor, parameter: nn.Parameter) -> Part:
        local = tensor.detach().to_local()
        first = (self._first_row(parameter),) + (0,) * (tensor.dim() - 1)
        return Part(tensor.shape, {first: local} if local.numel() else {})


def _bytes(tensors: Any) -> int:
    local = (tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors)
    return sum({each.untyped_storage().data_ptr(): each.nbytes for each in local}.values())
