"""Chapter 08's AdamW with moments in 8 bits. Oracles: torch's AdamW, a search for the nearest code, bitsandbytes.

Tolerances are written with each test; the curve of 8 bits is held to 1 % of that of float32.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import toy
from tests.chapters.inside import train
from tests.chapters.law import SHORT, flags_of
from tests.chapters.technique import settings_error, technique
from tests.chapters.test_08_param_efficient import CHAPTER, PLAIN, Adapted, few

OWN = "adamw8bit"


def own() -> Any:
    return technique(CHAPTER, OWN)


def moment(kind: str, signed: bool, n: int) -> Tensor:
    """Numbers as training makes them: over many decades, with an outlier, zeros, or none but zeros."""
    generator = torch.Generator().manual_seed(n)
    found = torch.randn(n, generator=generator) * 10 ** (-8 * torch.rand(n, generator=generator))
    found = found if signed else found.square()
    if kind == "outlier":
        found[n // 2] = -1e4 if signed else 1e4
    if kind == "zeros":
        found[: n // 2] = 0
    return found * (kind != "nothing")


# ---- codes


@pytest.mark.parametrize("signed", [True, False])
def test_the_codes_are_bitsandbytes_values(signed) -> None:
    """Its second moment has 0 where this chapter has 1e-7. Tolerance: it computes them in float32."""
    functional = pytest.importorskip("bitsandbytes.functional")
    theirs, ours = functional.create_dynamic_map(signed), own().code_values(signed)
    assert ours.shape == theirs.shape == (256,)
    least = 0 if signed else 1
    torch.testing.assert_close(ours[least:], theirs[least:], rtol=1e-5, atol=1e-12)
    assert signed or (theirs[0] == 0 and ours[0] == pytest.approx(1e-7))


@pytest.mark.parametrize("n", [1, 2047, 2048, 5000])
@pytest.mark.parametrize("kind", ["normal", "outlier", "zeros", "nothing"])
@pytest.mark.parametrize("signed", [True, False])
def test_each_number_gets_the_nearest_code_of_its_block(signed, kind, n) -> None:
    values, numbers = own().code_values(signed), moment(kind, signed, n)
    codes, scales = own().encode(numbers, signed)
    assert codes.dtype == torch.uint8 and codes.shape == (n,) and scales.shape == (math.ceil(n / 2048),)
    for number, block in enumerate(numbers.split(2048)):
        assert scales[number].abs() == block.abs().max()
        nearest = (block[:, None] - values * scales[number]).abs().amin(1)
        got = (block - values[codes[number * 2048 :][:2048].long()] * scales[number]).abs()
        torch.testing.assert_close(got, nearest, rtol=0, atol=1e-6 * block.abs().max().item())  # products are rounded


@pytest.mark.parametrize("kind", ["normal", "outlier", "zeros", "nothing"])
@pytest.mark.parametrize("signed", [True, False])
def test_decoded_moments_get_the_same_codes_again(signed, kind) -> None:
    """So a checkpoint may hold float32 moments, and a resumed run loses no bit."""
    first = own().decode(*own().encode(moment(kind, signed, 5000), signed), signed)
    assert torch.equal(own().decode(*own().encode(first, signed), signed), first)


def test_a_small_second_moment_next_to_a_large_one_is_not_zero() -> None:
    numbers = torch.tensor([1.0, 1e-12])
    assert own().decode(*own().encode(numbers, False), False)[1] > 0


def test_what_is_not_finite_stays_visible() -> None:
    for wrong in (float("nan"), float("inf")):
        numbers = torch.tensor([1.0, wrong, 2.0])
        assert not own().decode(*own().encode(numbers, True), True).isfinite().all()


# ---- the optimizer


def make(params: Any, lr: float, weight_decay: float, betas: tuple[float, float] = (0.9, 0.999), **_: object) -> Any:
    return own().AdamW8bit([{"params": list(params), "lr": lr, "betas": betas, "eps": 1e-8, "weight_decay": weight_decay}])


def losses(monkeypatch: pytest.MonkeyPatch, num_steps: int, make: Any = None) -> list[float]:
    with monkeypatch.context() as patch:
        if make is not None:
            patch.setattr(toy, "adamw", make)
        return toy.oracle(num_steps)[0]


def test_with_moments_in_float32_it_is_torchs_adamw(monkeypatch) -> None:
    """Every tensor is small. Tolerance: the same operations in another order, float32."""
    monkeypatch.setattr(own(), "LEAST", 10**9)
    assert losses(monkeypatch, 20, make) == pytest.approx(losses(monkeypatch, 20), rel=1e-5)


@pytest.mark.parametrize("num_steps", [40, pytest.param(300, marks=pytest.mark.deep)])
def test_the_curve_stays_within_one_per_cent(monkeypatch, num_steps) -> None:
    """Moments of every tensor in 8 bits, beside bitsandbytes' on the same run (blocks of 256)."""
    optim = pytest.importorskip("bitsandbytes").optim
    monkeypatch.setattr(own(), "LEAST", 1)
    exact = losses(monkeypatch, num_steps)
    ours = losses(monkeypatch, num_steps, make)
    theirs = losses(monkeypatch, num_steps, lambda p, **options: optim.AdamW8bit(list(p), min_8bit_size=1, **options))
    assert ours == pytest.approx(exact, rel=0.01) and ours != exact
    assert theirs == pytest.approx(exact, rel=0.01)
    worst = [max(abs(a / b - 1) for a, b in zip(each, exact, strict=True)) for each in (ours, theirs)]
    print("worst, own and bitsandbytes:", worst)
    assert worst[0] <= 2 * worst[1] + 1e-4


# ---- the chapter's program


@pytest.fixture(scope="module")
def eight(ranks, tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    chapter = Adapted(tmp_path_factory.mktemp("eight"))
    train(ranks, 1, chapter, *few(), *PLAIN, "--optim", "adamw8bit")
    return chapter


@pytest.mark.parametrize("steps", [SHORT, pytest.param(300, marks=pytest.mark.deep)])
def test_a_run_stays_within_one_per_cent_of_float32(ranks, tmp_path, steps) -> None:
    runs = [Adapted(tmp_path / optim) for optim in ("adamw", "adamw8bit")]
    for chapter in runs:
        train(ranks, 1, chapter, *flags_of(steps), *PLAIN, "--optim", chapter.folder.name)
    assert runs[1].losses() == pytest.approx(runs[0].losses(), rel=0.01) and runs[1].losses() != runs[0].losses()


def test_the_report_counts_the_states_of_the_formula(eight) -> None:
    """2 bytes a number and 8 a block of 2,048, for tensors with 4,096 numbers or more."""
    sizes = [3980 * 32, 32 * 32, *[32 * 32 * 4] * 4, *[32 * 96, 32 * 32, 96, 32, 128, 32, 32, 32, 32, 32] * 2, 32, 32]
    assert sum(sizes) == eight.about["trained_parameters"]
    wanted = sum(2 * n + 8 * math.ceil(n / 2048) if n >= 4096 else 8 * n for n in sizes)
    assert eight.about["state_bytes"] == eight.about["state_bytes_formula"] == wanted
    assert own().state_bytes(sizes, "adamw") == 8 * sum(sizes)


def test_a_resumed_run_has_the_same_bits(ranks, eight, tmp_path) -> None:
    again = Adapted(tmp_path)
    train(ranks, 1, again, *few(), *PLAIN, "--optim", "adamw8bit", "--resume", eight.output / "checkpoints/step_000003")
    assert again.losses() == eight.losses()[3:]


def test_a_run_goes_on_with_the_other_optimizer(ranks, eight, tmp_path) -> None:
    """Checkpoints hold float32 moments, so it is a matter of the flag alone."""
    other = Adapted(tmp_path)
    train(ranks, 1, other, *few(), *PLAIN, "--resume", eight.output / "checkpoints/step_000003")
    assert other.losses()[0] == eight.losses()[3], "the same weights"
    assert other.losses() == pytest.approx(eight.losses()[3:], rel=0.01)


def test_another_optimizer_is_refused(tmp_path, capsys) -> None:
    said = settings_error(CHAPTER, "adapt_settings", capsys, "--optim", "sgd")
    assert "--optim: invalid choice: 'sgd'" in said
