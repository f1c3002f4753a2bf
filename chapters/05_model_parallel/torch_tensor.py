"""Tensor parallel by torch: DTensor, with the plan that tensor_apply.py writes out by hand.

torch's styles support nn.Linear and nn.Embedding, so the Conv1D layers become Linear layers here. c_attn becomes three,
because q, k and v are cut separately. A checkpoint's c_attn.weight is then three transposed parameters; their places
(places.py) record this. The head gathers whole logits; torch's loss_parallel would avoid that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from places import Place
from tensor import TensorGroup
from tensor_dropout import different_dropout
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)


class SideBySide(nn.Module):
    """Linear layers q, k, v with the same input; concatenates their outputs."""

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        super().__init__()
        self.q, self.k, self.v = layers

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, C) -> (B, T, 3 C/t)"""
        return torch.cat([self.q(x), self.k(x), self.v(x)], dim=-1)


def apply_torch_tensor_parallel(model: nn.Module, group: Any, device: torch.device, sequence: bool = False) -> None:
    """Cuts a GPT2LMHeadModel in place, as in tensor_apply.py; it must be whole and equal on all ranks of the group.

    Args:
        model: the number of ranks must divide its heads, hidden width and vocabulary.
        group: the ranks that share each layer.
        device: the model is moved to it, because DTensor needs the model there.
        sequence: a rank computes norms and residuals on T/t positions, (B, T/t, C) (Korthikanti et al. 2022). The first
            block cuts them, each c_attn and c_fc gathers them, each c_proj cuts them again, and the head gathers them.
    """
    model.to(device)
    mesh, ranks = DeviceMesh.from_group(group, device.type), TensorGroup(group)
    places: dict[str, tuple[str, Place]] = {}
    stream = Shard(1) if sequence else Replicate()  # layout of the residual path
    plan: dict[str, Any] = {"transformer.wte": RowwiseParallel(input_layouts=Replicate()),
                            "lm_head": ColwiseParallel(input_layouts=stream, output_layouts=Replicate())}  # fmt: skip
    if sequence:
        cut_here = {"input_layouts": Replicate(), "desired_input_layouts": stream, "use_local_output": True}
        plan["transformer.h.0"] = PrepareModuleInput(**cut_here)
        plan["transformer.ln_f"] = SequenceParallel(use_local_output=True)

    def cut(name: str, shape: torch.Size, dim: int, whole_name: str = "", block: int = 0, num_blocks: int = 1) -> None:
        """Records the place of the parameter `name` in the whole tensor."""
        place = Place.cut(shape, dim, ranks.rank, ranks.num_ranks, num_blocks)
        place.spans, place.transposed = place.spans[block : block + 1], len(shape) == 2
        places[name] = whole_name or name, place

    for number, block in enumerate(model.transformer.h):
        prefix, attention, mlp = f"transformer.h.{number}.", block.attn, block.mlp
        name, whole = prefix + "attn.c_attn", attention.c_attn
        for part, letter in enumerate("qkv"):
            cut(f"{name}.{letter}.weight", whole.weight.shape, 1, f"{name}.weight", part, 3)
            cut(f"{name}.{letter}.bias", whole.bias.shape, 0, f"{name}.bias", part, 3)
            plan[f"{name}.{letter}"] = ColwiseParallel()
        weights, biases = whole.weight.chunk(3, dim=1), whole.bias.chunk(3)
        attention.c_attn = SideBySide([_linear(w, b) for w, b in zip(weights, biases, strict=True)])
        cut(prefix + "attn.c_proj.weight", attention.c_proj.weight.shape, 0)
        cut(prefix + "mlp.c_fc.weight", mlp.c_fc.weight.shape, 1)
        cut(prefix + "mlp.c_fc.bias", mlp.c_fc.bias.shape, 0)
        cut(prefix + "mlp.c_proj.weight", mlp.c_proj.weight.shape, 0)
        for module, child in ((attention, "c_proj"), (mlp, "c_fc"), (mlp, "c_proj")):
            layer = getattr(module, child)
            setattr(module, child, _linear(layer.weight, layer.bias))
        attention.num_heads //= ranks.num_ranks
        different_dropout(attention.c_attn, attention.c_proj, attention.dropout, ranks)
        plan |= {prefix + "attn.c_proj": RowwiseParallel(output_layouts=stream),
                 prefix + "mlp.c_fc": ColwiseParallel(input_layouts=stream),
                 prefix + "mlp.c_proj": RowwiseParallel(output_layouts=stream)}  # fmt: skip
        if sequence:
            plan |= {prefix + norm: SequenceParallel(use_local_output=True) for norm in ("ln_1", "ln_2")}
            plan[prefix + "attn.c_attn"] = PrepareModuleInput(input_layouts=stream, desired_input_layouts=Replicate())
            for dropout in (attention.resid_dropout, mlp.dropout):
                different_dropout(dropout, dropout, dropout.p, ranks, around=True)
    wte = Place.cut(model.transformer.wte.weight.shape, 0, ranks.rank, ranks.num_ranks)
    parallelize_module(model, mesh, plan)
    model.tie_weights()
    model.transformer.wte.weight.place = wte
    for name, parameter in model.named_parameters():
        if name in places:
            parameter.whole_name, parameter.place = places[name]


def _linear(weight: Tensor, bias: Tensor) -> nn.Linear:
    """A Linear made from a Conv1D's weight (in, out)."""
    layer = nn.Linear(*weight.shape, device="meta")
    layer.weight = nn.Parameter(weight.detach().t().contiguous())
    layer.bias = nn.Parameter(bias.detach().clone())
    return layer
