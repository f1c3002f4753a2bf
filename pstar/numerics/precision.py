"""The fp32 master of a parameter, which the optimizer updates, and the dtype with which the model computes.

| compute | parameter | optimizer states | bytes a parameter, gradient included |
|---|---|---|---|
| fp32 | its own master | both moments | 4 + 4 + 8 |
| bf16 | the master's high half | the low half, both moments | 2 + 2 + 2 + 8 |
| fp16 | the master, rounded | the master, both moments | 2 + 2 + 4 + 8 |

bf16 has fp32's exponent, so a master can be split into two halves without loss (see kernels.split_master). fp16 has not, so
it needs a whole master (Micikevicius et al. 2018). With 16 bit, gradients summed in fp32 take 2 bytes more a parameter.

A frozen parameter has no states: 4 bytes in fp32, 2 in 16 bit. It is stored in the dtype in which the model computes, because
no update ever needs the digits beyond it. Its 16 bits are those that a trained parameter of the same value has: for a forward
it makes no difference whether a parameter is frozen.
"""

from collections.abc import Mapping
from typing import Any

import torch

from pstar.kernels import AdamUpdate, join_master, split_master

PARAM, EXP_AVG, EXP_AVG_SQ, LOW, MASTER = "param", "exp_avg", "exp_avg_sq", "low", "master"

Buffers = Mapping[str, torch.Tensor]
"""Equal runs of elements by kind: PARAM, and each of a Precision's states."""


class Precision:
    """One of the layouts above.

    Args:
        name: fp32, bf16 or fp16.
        frozen: whether the parameters are never updated: they have no states.
    """

    def __init__(self, name: str, frozen: bool = False):
        self.name = name
        self.param_dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[name]
        master = {"fp32": {}, "bf16": {LOW: torch.int16}, "fp16": {MASTER: torch.float32}}[name]
        self.states: dict[str, torch.dtype] = {} if frozen else {EXP_AVG: torch.float32, EXP_AVG_SQ: torch.float32} | master
        """The optimizer's states, by kind."""

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of buffers of a parameter, the parameter itself first."""
        return (PARAM, *self.states)

    @property
    def state_bytes(self) -> int:
        """Bytes of one element's states."""
        return sum(dtype.itemsize for dtype in self.states.values())

    def grad_dtype(self, accumulates: bool) -> torch.dtype:
        """The dtype of gradients; gradients of several micro-steps are summed in fp32."""
        return torch.float32 if accumulates else self.param_dtype

    def read_master(self, buffers: Buffers) -> torch.Tensor:
        """A copy of the fp32 master, (N,)."""
        if MASTER in self.states:
            return buffers[MASTER].clone()
        if LOW in self.states:
            return join_master(buffers[PARAM].to(buffers[LOW].device), buffers[LOW])
        return buffers[PARAM].to(torch.float32, copy=True)    # fp32, or frozen

    def write_master(self, values: torch.Tensor, buffers: Buffers) -> None:
        """Writes fp32 values, (N,), into the parameter and its master."""
        if self.name == "bf16":
            high, low = (torch.empty_like(values, dtype=dtype) for dtype in (torch.bfloat16, torch.int16))
            split_master(values.contiguous(), high, low)    # a frozen parameter too: .to(bfloat16) rounds ties to even
            buffers[PARAM].copy_(high)
            if LOW in self.states:
                buffers[LOW].copy_(low)
            return
        buffers[PARAM].copy_(values)
        if MASTER in self.states:
            buffers[MASTER].copy_(values)

    def update(self, grad: torch.Tensor, buffers: Buffers, **options: Any) -> AdamUpdate:
        """The kernels' view of one Adam update; options are AdamUpdate's other fields."""
        given = dict(buffers)
        if MASTER in given:
            options |= {"copy16": given[PARAM]}
            given[PARAM] = given.pop(MASTER)
        return AdamUpdate(grad=grad, **given, **options)
