"""`--loss-tiles` in the chapters: the curve of chapter 00, and logits that are never whole, in training and in evaluations.

Tolerance: 1e-6 of the norm for one loss and its gradients in fp32; a tile's products have other shapes, so the library may
add in another order. 1e-4 relative for curves of 12 steps, as in test_law_of_the_curve.py.
"""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import pstar
from gpt2_chinese.evaluate.loss import evaluate_model
from gpt2_chinese.model.gpt2 import GPT2LMHeadModel
from gpt2_chinese.model.loss_tiles import num_tiles
from gpt2_chinese.model.tiled_loss import TiledLoss, tile_loss
from gpt2_chinese.run.optim import autocast
from tests.chapters.inside import train
from tests.chapters.law import SHORT, assert_same_curve, flags_of
from tests.chapters.program import Chapter
from tests.chapters.technique import settings_error, technique
from tests.chapters.test_08_recompute import batch, build
from tests.cover import quick_only

CHAPTERS = {"00": ("00_single", ()), "01": ("01_parameter_server", ()), "02": ("02_ddp", ()),
            "02 torch": ("02_ddp", ("--backend", "torch")), "04": ("04_apex", ("--opt-level", "O0")),
            "05": ("05_model_parallel", ("--grad-accum", 2)), "05 torch": ("05_model_parallel", ("--backend", "torch")),
            "06 stage 1": ("06_zero", ("--zero-stage", 1)), "06 stage 2": ("06_zero", ("--zero-stage", 2)),
            "06 stage 3": ("06_zero", ("--zero-stage", 3)), "06 FSDP2": ("06_zero", ("--backend", "torch")),
            "07": ("07_patrickstar", ("--near-budget", "min")), "07 own": ("07_patrickstar", ("--backend", "own")),
            "08": ("08_param_efficient", ("--method", "full", "--init-from", "random", "--kind", "all"))}  # fmt: skip
CASES = [(name, nproc, tiles) for name in CHAPTERS for nproc, tiles in ((1, "auto"), (2, 3), (3, "auto"))
         if nproc == 1 or (name not in ("00", "07 own", "05 torch") and (name, nproc) != ("05", 3))]  # fmt: skip


class LargestTensor(TorchDispatchMode):
    """Records the most rows of a tensor whose last dimension is the vocabulary; the transposed head is none of them."""

    def __init__(self, model: GPT2LMHeadModel) -> None:
        super().__init__()
        self.shape, self.most = (model.config.n_embd, model.config.vocab_size), 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.shape[-1:] == self.shape[1:] and result.shape != self.shape:
            self.most = max(self.most, result.numel() // self.shape[1])
        return result


def gradients(model: GPT2LMHeadModel, precision: str = "fp32") -> dict[str, torch.Tensor]:
    with autocast(torch.device("cpu"), precision):
        loss = model(*batch())
    loss.backward()
    return {"loss": loss.detach(), **{name: p.grad for name, p in model.named_parameters()}}


def assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], rel: float) -> None:
    assert found.keys() == expected.keys()
    for name in expected:
        assert (found[name] - expected[name]).norm() <= rel * expected[name].norm(), name


@pytest.mark.parametrize("tiles", ["1", "2", "7", "auto", "100000"])
def test_loss_and_gradients_are_those_of_whole_logits(tiles) -> None:
    model = build()
    tile_loss(model, tiles)
    assert model.lm_head.weight is model.transformer.wte.weight
    assert_close(gradients(model), gradients(build()), 1e-6)


def test_the_courses_own_tiles_are_those_of_the_engine() -> None:
    """Written twice, because neither package imports the other: the same bits."""
    hidden, weight = torch.randn(39, 16, requires_grad=True), torch.randn(61, 16, requires_grad=True)
    targets = torch.randint(0, 61, (39,))
    targets[5:9] = -100
    results = []
    for loss in (TiledLoss.apply(hidden, weight, targets, 4, True), pstar.tiled_loss(hidden, weight, targets, tiles=4)):
        results.append([loss, *torch.autograd.grad(loss, [hidden, weight])])
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*results, strict=True))


@pytest.mark.parametrize("level, backend, half", [("O1", "own", "bf16"), ("O1", "own", "fp16"), ("O2", "own", "bf16"),
                                                  ("O3", "own", "fp16"), ("O1", "torch", "bf16")])  # fmt: skip
def test_under_mixed_precision_products_are_in_16_bit(level, backend, half) -> None:
    """Both compute in 16 bit, so they differ by its roundings: 2**-8 in bf16 at each of a few operations."""
    settings = SimpleNamespace(opt_level=level, half=half, loss_scale="1", scale_window=1, backend=backend, apex=False)
    results = []
    for tiles in ("none", "3"):
        model = build()
        tile_loss(model, tiles)
        technique("04_apex", "amp").initialize(model, SimpleNamespace(max=lambda x: x), settings)
        results.append({name: value.float() for name, value in gradients(model).items()})
    assert_close(results[1], results[0], 0.02)
    assert results[1]["loss"].item() == pytest.approx(results[0]["loss"].item(), rel=2**-8)


def test_a_small_loss_scale_loses_no_gradient_in_fp16() -> None:
    """Divided by the number of tokens before the loss is scaled, gradients of a mean would be zeros in fp16."""
    hidden = torch.randn(4096, 8, dtype=torch.float16, requires_grad=True)
    weight, targets = torch.randn(500, 8).half() * 1e-3, torch.randint(0, 500, (4096,))
    (TiledLoss.apply(hidden, weight, targets, 3, True) * 65536).backward()
    assert (hidden.grad == 0).float().mean() < 0.01


def test_no_tensor_holds_all_logits_in_training_or_evaluation() -> None:
    model = build()
    tile_loss(model, "5")
    inputs, targets = batch()
    with LargestTensor(model) as largest:
        model(inputs, targets).backward()
        with torch.no_grad():
            model(inputs, targets, True)
    assert largest.most == -(-inputs.numel() // 5)
    with LargestTensor(model) as largest:
        build()(inputs, targets)
    assert largest.most == inputs.numel()


def test_the_last_stage_of_a_pipeline_never_holds_all_logits() -> None:
    model = build()
    tile_loss(model, "5")
    stage = technique("05_model_parallel", "pipeline").cut_into_stages(model, 0, 1)[0]
    inputs, targets = batch()
    with LargestTensor(model) as largest:
        stage(inputs, targets).backward()
        with torch.no_grad():
            model.lm_head(stage(inputs), targets, scores=True)
    assert largest.most == -(-inputs.numel() // 5)


def test_an_evaluation_by_tiles_counts_the_same() -> None:
    inputs, targets = batch()
    targets[1, -4:] = -100
    batches = SimpleNamespace(device=torch.device("cpu"), eval_batches=lambda: [(inputs, targets)] * 2)
    results = []
    for tiles in ("none", "3"):
        model = build()
        tile_loss(model, tiles)
        results.append(evaluate_model(model, batches, SimpleNamespace(sum=lambda total: total)))
    assert results[1] == pytest.approx(results[0], rel=1e-6)


@pytest.mark.parametrize("case", quick_only(CASES, ("00", 1, "auto"), ("02", 2, 3), ("05", 2, 3), ("06 stage 3", 2, 3),
                                            ("06 FSDP2", 2, 3), ("07", 2, 3), ("07 own", 1, "auto")))  # fmt: skip
def test_it_follows_the_curve(ranks, curve, tmp_path, case) -> None:
    name, nproc, tiles = case
    program, flags = CHAPTERS[name]
    chapter = Chapter(program, tmp_path)
    train(ranks, nproc, chapter, *flags_of(SHORT), *flags, "--loss-tiles", tiles)
    assert_same_curve(chapter.metrics(), curve(SHORT), rel=1e-4)
    assert json.loads((chapter.output / "config.json").read_text())["loss_tiles"] == str(tiles)


def test_08_predicts_the_bytes_that_it_keeps_with_tiles() -> None:
    kept = technique("08_param_efficient", "kept_activations")
    model = build()
    tile_loss(model, "3")
    counted, addresses = 0, {p.data_ptr() for p in model.parameters()}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal counted
        if tensor.untyped_storage().data_ptr() not in addresses:
            addresses.add(tensor.untyped_storage().data_ptr())
            counted += tensor.untyped_storage().nbytes()
        return tensor

    inputs, targets = batch()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(inputs, targets)
    assert counted == kept.kept_bytes(model.config, *inputs.shape, kept.Plan.of("none", model.config.n_layer), True)


def test_auto_makes_tiles_of_as_many_tokens_as_the_model_is_wide() -> None:
    assert [num_tiles("auto", *case) for case in ((4096, 256), (4097, 256), (100, 256), (1, 1))] == [16, 17, 1, 1]
    assert [num_tiles(7, tokens, 256) for tokens in (4096, 3)] == [7, 3]


def test_a_wrong_value_is_one_line(capsys) -> None:
    for value in ("0", "-1", "few", "1.5"):
        said = settings_error("00_single", None, capsys, f"--loss-tiles={value}")
        assert said == f"error: --loss-tiles {value}: give none, auto, or a number of tiles of at least 1\n"
    said = settings_error("05_model_parallel", "parallel_settings", capsys, "--loss-tiles", "auto", "--tp", 2)
    assert said == "error: --loss-tiles auto needs --tp 1: the ranks of --tp 2 divide the logits\n"
    said = settings_error("05_model_parallel", "parallel_settings", capsys, "--loss-tiles", "4", "--backend", "torch")
    assert said == "error: --loss-tiles 4 needs --backend own: torch's pipeline makes whole logits\n"
    said = settings_error("08_param_efficient", "adapt_settings", capsys, "--loss-tiles", "2", "--backend", "peft")
    assert said.startswith("error: --loss-tiles 2 needs --backend own: ")
