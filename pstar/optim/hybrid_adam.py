"""Adam and AdamW for plain tensors on any device: the fused kernels as a torch optimizer."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch

from pstar.errors import ArgumentError
from pstar.kernels import QUANT_BLOCK, AdamOptions, AdamUpdate, adam_steps, join_master, split_master

MASTERS = ("split", "separate", "none")


class HybridAdam(torch.optim.Optimizer):
    """Adam (Kingma and Ba 2015) or AdamW (Loshchilov and Hutter 2019), one pass over memory for each parameter.

    Parameters on the CPU are updated by the CPU kernel while those on CUDA devices are updated by the CUDA kernel. fp32
    parameters are updated as they are; bf16 and fp16 parameters have an fp32 master:

    | master | bytes a parameter without the gradient | |
    |---|---|---|
    | "split" | 2 + 2 + 8 | bf16: the parameter is the master's high half; fp16 gets a separate one |
    | "separate" | 2 + 4 + 8 | the same numbers, except for ties in rounding |
    | "none" | 2 + 8 | bf16 only; updates below half a unit in the last place are lost, or rounded stochastically |

    Args:
        params: as for any torch optimizer.
        lr, betas, eps, weight_decay: each parameter group may have other values.
        adamw_mode: decoupled weight decay; else weight decay is added to the gradient.
        master: see above.
        bits: 32, or 8 for block-quantised moments (Dettmers et al. 2022), 2 bytes a parameter instead of 8. Changes numbers.
        stochastic_rounding: only with master "none".
        seed: the seed of the rounding.
        implementation: None for the compiled kernels if there are any; "torch" for torch operations.
    """

    def __init__(self, params: Any, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
                 weight_decay: float = 0.0, adamw_mode: bool = True, *, master: str = "split", bits: int = 32,
                 stochastic_rounding: bool = False, seed: int = 0, implementation: str | None = None):
        if master not in MASTERS:
            raise ArgumentError(f"master: one of {', '.join(MASTERS)} expected, found {master!r}")
        if bits not in (8, 32):
            raise ArgumentError(f"bits: 8 or 32 expected, found {bits!r}")
        if stochastic_rounding and master != "none":
            raise ArgumentError(f"stochastic_rounding: master 'none' expected with it, found {master!r}")
        self.adamw_mode, self.master, self.bits = adamw_mode, master, bits
        self.stochastic_rounding, self.seed, self.implementation = stochastic_rounding, seed, implementation
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def add_param_group(self, param_group: dict) -> None:
        """As in any torch optimizer; raises ArgumentError for values that no step could use."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for name in ("lr", "eps", "weight_decay"):
            if not group[name] >= 0:
                raise ArgumentError(f"{name}: a number from 0 on expected, found {group[name]!r}")
        if not all(0 <= beta < 1 for beta in group["betas"]):
            raise ArgumentError(f"betas: two numbers in [0, 1) expected, found {group['betas']!r}")
        for param in group["params"]:
            if param.dtype not in (torch.float32, torch.bfloat16, torch.float16):
                raise ArgumentError(f"params: fp32, bf16 or fp16 expected, found {param.dtype}")
            if param.dtype == torch.float16 and self.master == "none":
                raise ArgumentError("master: fp16 parameters need one; 'none' is for bf16")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, *, grad_scale: float | torch.Tensor = 1.0,
             skip: torch.Tensor | None = None) -> Any:
        """One update of every parameter that has a gradient.

        Args:
            closure: computes the loss anew and returns it.
            grad_scale: a factor for every gradient: clip factor / loss scale. An fp32 tensor of one element is read by the
                kernels, so the host does not wait for a GPU to compute it.
            skip: an fp32 tensor of one element: if it is not 0, no tensor is written. The step is counted in any case.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        devices = {param.device for group in self.param_groups for param in group["params"]}
        scales = {each: grad_scale.to(each) if isinstance(grad_scale, torch.Tensor) else grad_scale for each in devices}
        skips = {each: None if skip is None else skip.to(each) for each in devices}
        updates = []
        for group in self.param_groups:
            options = AdamOptions(float(group["lr"]), tuple(map(float, group["betas"])), group["eps"], group["weight_decay"],
                                  self.adamw_mode)
            for param in group["params"]:
                if param.grad is not None:
                    if param.grad.is_sparse:
                        raise ArgumentError("grad: a dense gradient expected, found a sparse one")
                    updates.append(self._update(param, options, scales[param.device], skips[param.device]))
        adam_steps(updates, self.implementation)
        for update in updates:
            for tensor in (update.param, update.copy16):
                if tensor is not None:
                    torch.autograd.graph.increment_version(tensor)    # autograd does not see what kernels write
        return loss

    def _update(self, param: torch.Tensor, options: AdamOptions, grad_scale: float | torch.Tensor,
                skip: torch.Tensor | None) -> AdamUpdate:
        state = self.state[param]
        if not state:
            self._create_state(param, state)
        state["step"] += 1
        data, places = param.detach(), {}
        if "low" in state:
            places["low"] = state["low"]
        elif "master" in state:
            data, places["copy16"] = state["master"], param.detach()
        elif self.stochastic_rounding and param.dtype == torch.bfloat16:
            mixed = self.seed * 0x9E3779B1 + state["step"] * 0x85EBCA6B + state["number"] * 0xC2B2AE35
            places["seed"] = mixed & 0xFFFFFFFF
        if self.bits == 8:
            places["scales"] = state["exp_avg_scale"], state["exp_avg_sq_scale"]
        return AdamUpdate(data, param.grad.contiguous(), state["exp_avg"], state["exp_avg_sq"], step=state["step"],
                          options=options, grad_scale=grad_scale, skip=skip, **places)

    def _create_state(self, param: torch.Tensor, state: dict) -> None:
        if not param.is_contiguous():
            raise ArgumentError(f"params: contiguous tensors expected, found strides {param.stride()}")
        state["step"] = 0
        kind = torch.uint8 if self.bits == 8 else torch.float32
        for name in ("exp_avg", "exp_avg_sq"):
            state[name] = torch.zeros_like(param, dtype=kind)
            if self.bits == 8:
                state[f"{name}_scale"] = param.new_zeros(-(-param.numel() // QUANT_BLOCK), dtype=torch.float32)
        if param.dtype == torch.bfloat16 and self.master == "split":
            state["low"] = torch.zeros_like(param, dtype=torch.int16)
        elif param.dtype != torch.float32 and self.master != "none":
            state["master"] = param.detach().to(torch.float32)
        if self.stochastic_rounding:
            state["number"] = len(self.state) - 1    # so that equal parameters do not share their random numbers

    def master_of(self, param: torch.Tensor) -> torch.Tensor:
        """The fp32 value of a parameter: itself, its separate master, or joined from its halves (a copy)."""
        state = self.state.get(param, {})
        if "master" in state:
            return state["master"]
        return join_master(param.detach(), state["low"]) if "low" in state else param.detach().float()

    @torch.no_grad()
    def set_master(self, param: torch.Tensor, value: torch.Tensor) -> None:
        """Sets a parameter to an fp32 value of its shape; its master, if any, keeps the digits beyond 16 bits."""
        state = self.state[param]
        if not state:
            self._create_state(param, state)
        if "low" in state:
            split_master(value.to(param.device, torch.float32), param.detach(), state["low"])
        else:
            param.copy_(value)
            if "master" in state:
                state["master"].copy_(value)

    def load_state_dict(self, state_dict: dict) -> None:
        """As in any torch optimizer, but states keep their dtype; torch casts them to the parameter's."""
        super().load_state_dict(state_dict)
        params = [param for group in self.param_groups for param in group["params"]]
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        for number, param in zip(numbers, params, strict=True):
            for name, value in state_dict["state"].get(number, {}).items():
                own = value.detach().to(param.device, copy=True) if isinstance(value, torch.Tensor) else deepcopy(value)
                self.state[param][name] = own
