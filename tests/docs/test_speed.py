"""basics/speed.md: its operations, its bytes and its pictures agree with torch, and each check can fail."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from gpt2_chinese.model.config import PRESETS, ModelConfig
from gpt2_chinese.run.flops import flops_per_token

SIZE = 12  # elements of a parameter: no other tensor of an update has as many
# Floating-point operations of one element: a lerp is a difference, a product and a sum.
FLOPS = {"mul": 1, "add": 1, "sub": 1, "div": 1, "sqrt": 1, "pow": 1, "sum": 1, "lerp": 3, "addcmul": 3, "addcdiv": 3}


class Counted(TorchDispatchMode):
    """Counts operations on tensors of SIZE elements, each by FLOPS; an unknown one is an error."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(args[0], torch.Tensor) and args[0].numel() == SIZE and "view" not in str(func):
            self.flops += FLOPS[func._schema.name.split("::")[1].rstrip("_")]
        return out


@pytest.fixture(scope="module")
def speed():
    from docs.generate.arithmetic import speed

    return speed


def update(decay: float) -> int:
    """Operations of one element in an update of torch's AdamW, without its kernels that fuse."""
    parameter = torch.nn.Parameter(torch.ones(SIZE))
    optimizer = torch.optim.AdamW([parameter], weight_decay=decay, foreach=False, fused=False)
    parameter.grad = torch.ones(SIZE)
    optimizer.step()  # the first update also makes the moments
    with Counted() as counted:
        optimizer.step()
    return counted.flops


def test_adam_counts_the_operations_of_torch(speed) -> None:
    assert update(0.1) == speed.ADAM_FLOPS
    assert update(0.0) == speed.ADAM_FLOPS - 1, "the count sees one operation less"


def test_a_norm_counts_its_steps(speed) -> None:
    x, gain, bias = torch.randn(SIZE), torch.randn(SIZE), torch.randn(SIZE)
    with Counted() as counted:
        apart = x - x.sum() / SIZE
        normed = apart * (apart.pow(2).sum() / SIZE + 1e-5).rsqrt() * gain + bias
    assert counted.flops == speed.NORM_FLOPS
    torch.testing.assert_close(normed, F.layer_norm(x, (SIZE,), gain, bias))


def test_a_linear_layer_counts_the_operations_of_torch(speed) -> None:
    x, weight = torch.randn(6, 4), torch.randn(5, 4)
    with FlopCounterMode(display=False) as counted:
        out = F.linear(x, weight)
    assert speed.linear(6, 4, 5, 4) == (counted.get_total_flops(), x.nbytes + weight.nbytes + out.nbytes)
    assert speed.linear(6, 4, 4, 4)[0] != counted.get_total_flops()


def kept(batch: int, length: int, width: int, heads: int, backend: SDPBackend) -> int:
    """Bytes that torch saves for the backward pass of attention; views of one memory count once."""
    q, k, v = (torch.randn(batch, heads, length, width // heads, requires_grad=True) for _ in range(3))
    saved: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with sdpa_kernel(backend), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert out.requires_grad
    return sum(saved.values())


@pytest.mark.parametrize("length", [128, 512, 1024])
@pytest.mark.parametrize("whole", [True, False])
def test_attention_keeps_the_bytes_of_the_page(speed, length: int, whole: bool) -> None:
    backends = {True: SDPBackend.MATH, False: SDPBackend.FLASH_ATTENTION}
    measured = kept(1, length, 64, 2, backends[whole])
    assert measured == speed.kept_by_attention(1, length, 64, 2, whole)
    assert measured != speed.kept_by_attention(1, length, 64, 2, not whole), "the formulas are told apart"
    assert length in speed.LENGTHS


def test_the_roof_is_the_lower_of_two_lines(speed) -> None:
    sheet = speed.GPUS[speed.MACHINE]
    for intensity in (speed.ridge(speed.MACHINE) / 2, 2 * speed.ridge(speed.MACHINE)):
        one = speed.Operation("x", "", round(1000 * intensity), 1000)
        lines = sheet.tflops * 1e12, one.flops / one.bytes * sheet.memory_gb_s * 1e9
        assert one.reaches(speed.MACHINE) == min(lines) != max(lines)
    below = {one.name: one.intensity < speed.ridge(speed.MACHINE) for one in speed.operations() if one.model != "small"}
    assert all(below.values()) and len(below) == 3, "the page says that they wait for memory"


def test_the_tables_leave_the_presets_as_they_are(speed) -> None:
    """A vocabulary that stayed in a preset would be that of every later model of the process."""
    assert "124M" in speed.step(str)
    assert all(preset.vocab_size is None for preset in PRESETS.values())


def test_the_program_counts_the_operations_of_the_formula() -> None:
    from docs.generate.recorded import programs

    said = programs.outputs()["mfu"]
    flops = float(re.search(r"([\d.]+) GFLOP in [\d.]+ s is \d+ GFLOP/s", said)[1])
    assert f"{24 * 128 * flops_per_token(ModelConfig(vocab_size=4096), 128) / 1e9:.1f}" == f"{flops:.1f}"
    assert re.search(r"so MFU is \d+%", said)


@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_pictures_show_each_operation_and_the_links(speed, language: str) -> None:
    from docs.generate import build

    drawn = build.roofline.drawn(build.Words(language))
    assert drawn["basics_roofline"].count("<circle") == len(speed.operations())
    assert drawn["basics_node"].count(">GPU<") == 8
    for svg in drawn.values():
        root = ElementTree.fromstring(svg)
        assert root.get("viewBox").split()[2] == "440" and 'font-size="14"' in svg
        if language == "zh":
            assert not re.search("linear|memory|peak|network", "".join(root.itertext()))
