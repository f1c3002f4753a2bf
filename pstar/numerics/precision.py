"""The fp32 master of a parameter, which the optimizer updates, and the dtype with which the model computes.

| compute | parameter | optimizer states | bytes a parameter, gradient included |
|---|---|---|---|
| fp32 | its own master | both moments | 4 + 4 + 8 |
| bf16 | the master's high half | the low half, both moments | 2 + 2 + 2 + 8 |
| fp16 | the master, rounded | the master, both moments | 2 + 2 + 4 + 8 |

With state_bits 8 a moment takes 1 byte in place of 4, and every 2,048 elements of a parameter share two fp32 scales
(Dettmers et al. 2022): 10, 8 and 10 bytes a parameter, and the scales.

bf16 has fp32's exponent, so a master can be split into two halves without loss (see kernels.split_master). fp16 has not, so
it needs a whole master (Micikevicius et al. 2018). With 16 bit, gradients summed in fp32 take 2 bytes more a parameter.

A frozen parameter has no states: 4 bytes in fp32, 2 in 16 bit. It is stored in the dtype in which the model computes,
because no update ever needs the digits beyond it. Its 16 bits are those of a trained parameter with the same value: for a
forward it makes no difference whether a parameter is frozen.
"""

from collections.abc import Mapping
from typing import Any

import torch

from pstar.kernels import QUANT_BLOCK, AdamUpdate, code_tables, decode, encode, join_master, split_master

PARAM, EXP_AVG, EXP_AVG_SQ, LOW, MASTER = "param", "exp_avg", "exp_avg_sq", "low", "master"
SCALES = "scales"
"""Of 8-bit moments: fp32, (2 * blocks,): those of the first moment, then those of the second."""

Buffers = Mapping[str, torch.Tensor]
"""Equal runs of elements by kind: PARAM, and each of a Precision's states."""


class Precision:
    """One of the layouts above.

    Args:
        name: fp32, bf16 or fp16.
        frozen: whether the parameters are never updated: they have no states.
        state_bits: 32, or 8 for moments in codes.
    """

    def __init__(self, name: str, frozen: bool = False, state_bits: int = 32):
        self.name, self.state_bits = name, state_bits
        self.param_dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[name]
        master = {"fp32": {}, "bf16": {LOW: torch.int16}, "fp16": {MASTER: torch.float32}}[name]
        moment = torch.uint8 if state_bits == 8 else torch.float32
        scales = {SCALES: torch.float32} if state_bits == 8 else {}
        self.states: dict[str, torch.dtype] = {} if frozen else {EXP_AVG: moment, EXP_AVG_SQ: moment} | master | scales
        """The optimizer's states, by kind."""

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of buffers of a parameter, the parameter itself first."""
        return (PARAM, *self.states)

    @property
    def state_bytes(self) -> int:
        """Bytes of one element's states, without scales."""
        return sum(dtype.itemsize for kind, dtype in self.states.items() if kind != SCALES)

    @property
    def scale_bytes(self) -> int:
        """Bytes of the scales of one block of QUANT_BLOCK elements."""
        return 2 * self.states[SCALES].itemsize if SCALES in self.states else 0

    @staticmethod
    def numel_of(kind: str, numel: int, blocks: int) -> int:
        """Elements of the buffer of a kind, for parameters of numel elements in so many blocks."""
        return 2 * blocks if kind == SCALES else numel

    @staticmethod
    def part_of(buffers: Buffers, part: slice, blocks: slice) -> dict[str, torch.Tensor]:
        """Views of a run of elements in the buffers of a piece; of scales, (2, number of blocks)."""
        return {kind: buffer.view(2, -1)[:, blocks] if kind == SCALES else buffer[part] for kind, buffer in buffers.items()}

    def read_moment(self, kind: str, buffers: Buffers) -> torch.Tensor:
        """A copy of a run's moments in fp32, (N,). buffers: from part_of; the scales may be on another device."""
        if SCALES not in self.states:
            return buffers[kind].clone()
        codes, second = buffers[kind], kind == EXP_AVG_SQ
        scales = buffers[SCALES][int(second)].to(codes.device)
        return decode(codes, code_tables(codes.device)[2 * second], scales, QUANT_BLOCK)

    def write_moment(self, kind: str, values: torch.Tensor, buffers: Buffers, scales: torch.Tensor | None = None) -> None:
        """Writes fp32 moments, (N,), of a run that begins with a block. buffers: from part_of.

        scales: (blocks,), those with which the values were decoded, so that they get the same codes. None: computed here.
        """
        if SCALES not in self.states:
            buffers[kind].copy_(values)
            return
        codes, second = buffers[kind], kind == EXP_AVG_SQ
        place = buffers[SCALES][int(second)]
        if scales is not None:
            place.copy_(scales)
        its_scales = place.to(codes.device)    # near or far, as the codes; `place` itself if it is there
        encode(values.to(codes.device), code_tables(codes.device)[2 * second + 1], codes, its_scales, QUANT_BLOCK,
               keep_scales=scales is not None)
        if its_scales is not place:
            place.copy_(its_scales)

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
            places = (buffers[PARAM], buffers.get(LOW))
            high, low = (place if place is not None and place.device == values.device and place.is_contiguous() else
                         torch.empty_like(values, dtype=dtype)
                         for place, dtype in zip(places, (torch.bfloat16, torch.int16), strict=True))
            split_master(values.contiguous(), high, low)    # a frozen parameter too: .to(bfloat16) rounds ties to even
            for place, made in zip(places, (high, low), strict=True):
                if place is not None and place is not made:
                    place.copy_(made)
            return
        buffers[PARAM].copy_(values)
        if MASTER in self.states:
            buffers[MASTER].copy_(values)

    def update(self, grad: torch.Tensor, buffers: Buffers, **fields: Any) -> AdamUpdate:
        """The kernels' view of one Adam update; fields are the others of AdamUpdate. buffers: from part_of."""
        given = dict(buffers)
        if SCALES in given:
            fields |= {"scales": tuple(given.pop(SCALES))}
        if MASTER in given:
            fields |= {"copy16": given[PARAM]}
            given[PARAM] = given.pop(MASTER)
        return AdamUpdate(grad=grad, **given, **fields)
