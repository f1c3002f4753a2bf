"""The Adam kernels against a float64 reference, against each other bit for bit, and against arguments they cannot take."""

from __future__ import annotations

import ctypes
import dataclasses
import math
import os
import subprocess
import sys

import pytest
import torch

from pstar.errors import ArgumentError
from pstar.kernels import (
    NORM_BLOCK,
    QUANT_BLOCK,
    AdamOptions,
    AdamUpdate,
    adam,
    adam_step,
    adam_steps,
    cpu,
    join_master,
    norm_blocks,
    split_master,
    squared_norms,
    store_squared,
    sum_blocks,
)
from pstar.kernels.quantize import code_tables, least_codes

CPU = torch.device("cpu")
FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
OPTIONS = AdamOptions(lr=1e-2, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)
NO_DECAY, WITH_L2 = dataclasses.replace(OPTIONS, weight_decay=0.0), dataclasses.replace(OPTIONS, adamw=False)
LAYOUTS = ("fp32", "bf16 copy", "fp16 copy", "shared slot", "split", "bf16", "stochastic")
ODD = torch.tensor([0.0, -0.0, 1e-45, -1e-45, 1e-40, 1.1754944e-38, 3.4028235e38, -3.4028235e38, math.inf, -math.inf,
                    math.nan, 1.0, -1.0, 65504.0, 65520.0, 6e-8, 2.9e-8, 1.00390625, 1.01171875, 1e-20])
IMPLEMENTATIONS = ["torch", *cpu.paths()]

needs_compiler = pytest.mark.skipif(not cpu.paths(), reason="no C++ compiler: the kernels run on torch operations")


def random(numel: int, seed: int, odd: bool = False) -> torch.Tensor:
    """Numbers of all magnitudes between 1e-6 and 1e6, with extreme ones between them if asked for."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(numel, generator=generator) * torch.exp(torch.randn(numel, generator=generator) * 4)
    if odd and numel:
        where = torch.randint(0, numel, (numel // 3 + 1,), generator=generator)
        values[where] = ODD[torch.randint(0, len(ODD), where.shape, generator=generator)]
    return values


def shifted(values: torch.Tensor, by: int) -> torch.Tensor:
    """The same values, `by` elements after an aligned address."""
    return torch.cat([values.new_zeros(by), values])[by:]


def make(layout: str, grad_dtype: torch.dtype, numel: int, bits: int = 32, odd: bool = False, shift: int = 0) -> AdamUpdate:
    """A run of elements in one of LAYOUTS, always the same for the same arguments."""
    master, grad = random(numel, 1, odd), shifted(random(numel, 2, odd).to(grad_dtype), shift)
    exp_avg, exp_avg_sq, places = random(numel, 3) * 1e-2, random(numel, 4).abs() * 1e-2, {}
    if bits == 8:
        blocks = -(-numel // QUANT_BLOCK)
        generator = torch.Generator().manual_seed(5)
        exp_avg, exp_avg_sq = (torch.randint(0, 256, (numel,), generator=generator).to(torch.uint8) for _ in range(2))
        places["scales"] = torch.rand(blocks, generator=generator), torch.rand(blocks, generator=generator)
    if layout in ("bf16 copy", "fp16 copy"):
        places["copy16"] = shifted(torch.zeros(numel, dtype=BF16 if layout == "bf16 copy" else FP16), shift)
    elif layout == "shared slot":
        places["copy16"] = grad
    elif layout == "split":
        places["low"] = shifted(torch.zeros(numel, dtype=torch.int16), shift)
    elif layout == "stochastic":
        places.update(seed=7, first_index=2**32 - 5)
    if layout in ("split", "bf16", "stochastic"):
        param = shifted(master.to(BF16), shift)
        if layout == "split":
            split_master(master, param, places["low"])
    else:
        param = shifted(master, shift)
    return AdamUpdate(param, grad, shifted(exp_avg, shift), shifted(exp_avg_sq, shift), step=3, options=OPTIONS, **places)


def arrays(update: AdamUpdate) -> list[torch.Tensor]:
    """All that an update may change."""
    found = [update.param, update.exp_avg, update.exp_avg_sq, update.low, update.copy16, *(update.scales or ())]
    return [tensor for tensor in found if tensor is not None]


def assert_same_bits(ours: AdamUpdate, theirs: AdamUpdate) -> None:
    """A NaN only has to be a NaN; its bits may differ."""
    for one, other in zip(arrays(ours), arrays(theirs), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(one.signbit() & ~one.isnan(), other.signbit() & ~other.isnan())


# ---- against float64


def reference(update: AdamUpdate) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """(param, exp_avg, exp_avg_sq) of the next step in float64, as the papers write it, and for each the largest number
    that took part. Where two numbers nearly cancel, the result has the error of both."""
    names, options = ("param", "grad", "exp_avg", "exp_avg_sq"), update.options
    (param, grad, exp_avg, exp_avg_sq), (beta1, beta2) = (getattr(update, name).double() for name in names), options.betas
    grad = grad * update.grad_scale
    largest_grad = grad.abs()
    if not options.adamw:
        grad = grad + options.weight_decay * param
        largest_grad = torch.maximum(largest_grad, options.weight_decay * param.abs())
    largest_avg = torch.maximum(exp_avg.abs(), (1 - beta1) * largest_grad)
    exp_avg = beta1 * exp_avg + (1 - beta1) * grad
    largest_sq = torch.maximum(exp_avg_sq, (1 - beta2) * largest_grad**2)
    exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * grad**2
    step_size = options.lr / (1 - beta1**update.step) / ((exp_avg_sq / (1 - beta2**update.step)).sqrt() + options.eps)
    decay = options.lr * options.weight_decay if options.adamw else 0.0
    largest_param = torch.maximum(param.abs(), step_size * largest_avg)
    return [param - decay * param - step_size * exp_avg, exp_avg, exp_avg_sq], [largest_param, largest_avg, largest_sq]


def units(values: torch.Tensor, exact: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
    """Errors in units in the last place of the largest number that took part."""
    largest = torch.maximum(largest, exact.abs()).float()
    unit = torch.nextafter(largest, torch.tensor(math.inf)).double() - largest.double()
    return (values.double() - exact).abs() / unit


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("adamw", [True, False])
def test_one_step_is_within_two_units_of_float64(implementation, adamw):
    """Two units, with two exceptions. The change may be as large as the parameter or larger, in first steps of one near
    zero. Then roundings of both moments, two scalars, a root and a quotient show: six units. With L2
    regularisation, the gradient is a rounded sum, and its square has that error twice: four units."""
    for step in (1, 2, 1000):
        update = dataclasses.replace(make("fp32", FP32, 50_001), step=step, options=OPTIONS if adamw else WITH_L2,
                                     grad_scale=2.0**-16)
        before, (exact, largest) = update.param.double(), reference(update)
        adam_steps([update], implementation)
        errors = units(update.param, exact[0], largest[0])
        change = torch.maximum(largest[0] * (largest[0] > before.abs()), (exact[0] - before).abs())
        assert errors[change < before.abs() / 8].max() <= 2 and errors.max() <= 6
        assert units(update.exp_avg, exact[1], largest[1]).max() <= (2 if adamw else 4)
        assert units(update.exp_avg_sq, exact[2], largest[2]).max() <= (2 if adamw else 4)


def test_denormal_zero_huge_and_not_finite_numbers():
    """Zero stays zero, what overflows is infinite, what is not a number is one at the end, neighbours are untouched."""
    for odd in ODD.tolist():
        update = make("fp32", FP32, 33)
        update.grad[16] = odd
        exact, _ = reference(update)
        adam_steps([update])
        if math.isnan(odd):
            assert update.param[16].isnan()
        elif abs(odd) < 1e18:
            assert update.param[16] == pytest.approx(exact[0][16].item(), rel=1e-6)
        else:
            assert update.exp_avg_sq[16] == math.inf
        rest = torch.arange(33) != 16
        assert torch.allclose(update.param[rest].double(), exact[0][rest], rtol=1e-6)
    nothing = AdamUpdate(torch.ones(5), *(torch.zeros(5) for _ in range(3)), step=3, options=NO_DECAY)
    adam_steps([nothing])
    assert nothing.param.tolist() == [1.0] * 5 and nothing.exp_avg_sq.tolist() == [0.0] * 5


def test_a_thousand_steps_do_not_drift():
    numel, generator = 1_031, torch.Generator().manual_seed(0)
    start, zeros = torch.randn(numel, generator=generator), torch.zeros(numel)
    runs = {each: [start.clone(), zeros.clone(), zeros.clone()] for each in IMPLEMENTATIONS}
    exact = [each.double() for each in (start, zeros, zeros)]
    for step in range(1, 1001):
        grad = torch.randn(numel, generator=generator)
        fields = {"step": step, "options": dataclasses.replace(OPTIONS, lr=1e-3)}
        for implementation, (param, exp_avg, exp_avg_sq) in runs.items():
            adam_steps([AdamUpdate(param, grad, exp_avg, exp_avg_sq, **fields)], implementation)
        exact, _ = reference(AdamUpdate(exact[0], grad, *exact[1:], **fields))
    for param, *_ in runs.values():
        assert torch.linalg.vector_norm(param - exact[0]) < 1e-6 * torch.linalg.vector_norm(exact[0])


# ---- bit for bit


@pytest.mark.pairs
@needs_compiler
@pytest.mark.parametrize("bits", [32, 8])
@pytest.mark.parametrize("grad_dtype", [FP32, FP16, BF16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_code_path_gives_the_same_bits(layout, grad_dtype, bits):
    if layout == "shared slot" and grad_dtype == FP32:
        pytest.skip("an fp32 gradient has a slot of its own")
    sizes = ((0, 0, False), (1, 0, True), (17, 1, True), (2 * QUANT_BLOCK + 5, 3, True), (9_001, 0, False))
    others = {"options": dataclasses.replace(NO_DECAY, betas=(0.3, 0.99)), "grad_scale": 0.7}
    for numel, shift, odd in sizes:
        for fields in ({}, {"options": WITH_L2}, others):
            results = {}
            for implementation in IMPLEMENTATIONS:
                results[implementation] = dataclasses.replace(make(layout, grad_dtype, numel, bits, odd, shift), **fields)
                adam_steps([results[implementation]], implementation)
            for implementation in IMPLEMENTATIONS:
                if implementation != "torch" or not (odd and bits == 8):    # there a scale is not finite
                    assert_same_bits(results[implementation], results["plain"])


@needs_compiler
@pytest.mark.parametrize("layout", LAYOUTS)
def test_torch_gives_the_same_bits_where_its_add_rounds_twice(layout, monkeypatch):
    monkeypatch.setattr(adam, "_torch_fuses_on_cpu", lambda: False)
    ours, theirs = (make(layout, BF16, 9_001, odd=True) for _ in range(2))
    adam_steps([ours], "torch")
    adam_steps([theirs], "plain")
    assert_same_bits(ours, theirs)


def test_a_sum_that_is_rounded_once_is_fmaf():
    """Among the sums are many in the middle between two fp32 numbers, where two roundings give another number."""
    fmaf = ctypes.CDLL(None).fmaf
    fmaf.argtypes, fmaf.restype = [ctypes.c_float] * 3, ctypes.c_float
    factor, values = 1 + 2**-12, random(20_000, 1, odd=True)
    start = torch.cat([random(10_000, 2, odd=True), -values[10_000:] * random(10_000, 3).round()])
    middle = torch.arange(1, 1_001) * 2.0**-12
    values, start = torch.cat([values, 1 + middle]), torch.cat([start, 2.0**24 * (1 + middle)])
    pairs = zip(values.tolist(), start.tolist(), strict=True)
    expected = torch.tensor([fmaf(value, factor, first) for value, first in pairs])
    found = adam._rounded_once(start, values, factor)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    assert not found.equal((values.double() * factor + start.double()).float())


@pytest.mark.deep
@needs_compiler
def test_all_code_paths_where_torch_has_no_vectors():
    """As on x86 without AVX2. torch reads the variable when it is imported."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "every_code_path or float64", __file__]
    done = subprocess.run(command, env=os.environ | {"ATEN_CPU_CAPABILITY": "default"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:]


@needs_compiler
@pytest.mark.parametrize("layout", ["fp32", "split", "bf16 copy"])
def test_threads_and_the_cut_into_runs_change_nothing(layout):
    whole = make(layout, BF16, 300_007)
    adam_steps([whole])
    threads = torch.get_num_threads()
    try:
        for number in (1, 2, 3, 7):
            torch.set_num_threads(number)
            parts, cut = make(layout, BF16, 300_007), (0, 1, 5_000, 150_001, 150_001, 300_007)
            runs = []
            for begin, end in zip(cut, cut[1:], strict=False):
                names = ("param", "grad", "exp_avg", "exp_avg_sq", "low", "copy16")
                own = {name: getattr(parts, name)[begin:end] for name in names if getattr(parts, name) is not None}
                runs.append(dataclasses.replace(parts, **own))
            adam_steps(runs)
            assert_same_bits(parts, whole)
    finally:
        torch.set_num_threads(threads)


def test_split_and_separate_master_are_the_same_numbers_for_a_thousand_steps():
    split, separate = make("split", BF16, 5_003), make("bf16 copy", BF16, 5_003)
    generator = torch.Generator().manual_seed(0)
    for step in range(1, 1001):
        grad = torch.randn(5_003, generator=generator).to(BF16)
        split, separate = (dataclasses.replace(each, grad=grad, step=step) for each in (split, separate))
        adam_steps([split, separate])
    assert torch.equal(join_master(split.param, split.low).view(torch.int32), separate.param.view(torch.int32))
    ties = (separate.param.view(torch.int32) & 0xFFFF) == 0x8000
    assert torch.equal(split.param[~ties], separate.copy16[~ties])
    assert torch.equal(separate.copy16, separate.param.to(BF16))


@pytest.mark.parametrize("bits", [0x7FFFFFFF, 0x7FFF8000, 0x7FC00000, 0x7F800001, -1, -0x400000])
def test_a_nan_stays_one_in_a_split_master_whatever_its_bits(bits):
    """A GPU makes 0x7FFFFFFF, which rounds to -0."""
    master = torch.tensor([1.0, 0.0, float("inf"), 3.3e38])
    master.view(torch.int32)[1] = bits
    high, low = torch.empty(4, dtype=BF16), torch.empty(4, dtype=torch.int16)
    split_master(master, high, low)
    assert high.isnan().tolist() == join_master(high, low).isnan().tolist() == [False, True, False, False]
    torch.testing.assert_close(join_master(high, low), master, rtol=0, atol=0, equal_nan=True)
    updates = []
    for implementation in IMPLEMENTATIONS:
        update = make("split", FP32, 100)
        update.grad.view(torch.int32)[7] = bits
        adam_steps([update], implementation)
        assert update.param.isnan().nonzero().tolist() == [[7]] and (update.param[7:8].view(torch.int16), update.low[7]) == (
            0x7FC0, 0), implementation    # fmt: skip
        updates.append(update)
    for update in updates[1:]:
        assert_same_bits(update, updates[0])


def test_the_16_bit_parameter_may_take_the_gradients_place():
    for dtype, name in ((BF16, "bf16 copy"), (FP16, "fp16 copy")):
        separate, shared = make(name, dtype, 9_001), make("shared slot", dtype, 9_001)
        adam_steps([separate, shared])
        torch.testing.assert_close(shared.grad, separate.copy16, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(shared.param, separate.param, rtol=0, atol=0, equal_nan=True)


# ---- options


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_stochastic_rounding_keeps_the_mean(implementation):
    """Steps of 1/20 unit: to nearest nothing ever moves; stochastically the mean moves as it should. The tolerance is
    four standard deviations of the mean of 20,000 parameters after 40 steps."""
    numel, steps, moved = 20_000, 40, {}
    for seed in (None, 1):
        zeros = torch.zeros(numel)
        update = AdamUpdate(torch.ones(numel, dtype=BF16), torch.ones(numel), zeros, zeros.clone(), step=3, seed=seed,
                            options=dataclasses.replace(NO_DECAY, eps=0.0, lr=2**-8 / 20))
        for step in range(1, steps + 1):
            adam_steps([dataclasses.replace(update, step=step, seed=None if seed is None else step)], implementation)
        moved[seed] = 1 - update.param.double().mean().item()
    assert moved[None] == 0.0
    assert moved[1] == pytest.approx(steps * 2**-8 / 20, abs=4 * 2**-8 * math.sqrt(steps / 20 / numel))


def test_the_code_of_a_moment_is_the_nearest():
    """Each value has its own code, and so have numbers that are closer to it than to its neighbours."""
    for values, boundaries, least in zip(code_tables(CPU)[::2], code_tables(CPU)[1::2], least_codes(), strict=True):
        assert (values.diff() > 0).all() and values[-1] == 1 and boundaries[-1] == math.inf
        numbers = torch.cat([values, boundaries[:-1], torch.nextafter(boundaries[:-1], torch.tensor(9.0)), random(10**6, 0)])
        numbers = numbers[numbers.abs() <= 1]
        found = least[(numbers.view(torch.int32) >> 16).to(torch.int64) & 0xFFFF].to(torch.int64)
        assert torch.equal(found + (numbers > boundaries[found]), torch.bucketize(numbers, boundaries))
        assert torch.equal(torch.bucketize(values, boundaries), torch.arange(256))


def test_8_bit_moments_follow_fp32_ones():
    """A quadratic with noisy gradients: nearly the same loss, with 2 bytes a parameter instead of 8. Seen: 6 % more."""
    numel, losses = 3 * QUANT_BLOCK + 11, {}
    for bits in (32, 8):
        update = make("fp32", FP32, numel, bits)
        update.param.copy_(torch.randn(numel, generator=torch.Generator().manual_seed(0)))
        for tensor in (update.exp_avg, update.exp_avg_sq, *(update.scales or ())):
            tensor.zero_()
        generator = torch.Generator().manual_seed(1)
        curvature = torch.logspace(-2, 1, numel)
        for step in range(1, 301):
            grad = curvature * update.param + 0.01 * torch.randn(numel, generator=generator)
            adam_step(update.param, grad, update.exp_avg, update.exp_avg_sq, scales=update.scales, step=step,
                      options=NO_DECAY)
        losses[bits] = (curvature * update.param.square()).mean().item()
    assert losses[8] == pytest.approx(losses[32], rel=0.15)


def test_scale_and_skip_are_read_when_the_kernel_runs():
    expected, update = make("split", BF16, 1_001), make("split", BF16, 1_001)
    adam_steps([dataclasses.replace(expected, grad_scale=0.25)])
    adam_steps([dataclasses.replace(update, grad_scale=torch.tensor(0.25), skip=torch.tensor(0.0))])
    assert_same_bits(update, expected)
    for implementation in IMPLEMENTATIONS:
        adam_steps([dataclasses.replace(update, skip=torch.tensor(1.0))], implementation)
    assert_same_bits(update, expected)


# ---- norms


@pytest.mark.parametrize("dtype", [FP32, FP16, BF16])
def test_squared_norm_is_the_same_in_every_implementation_and_number_of_threads(dtype):
    threads = torch.get_num_threads()
    for numel in (0, 1, 255, 256, 257, 8_192, 8_193, 3_000_017 if dtype == FP32 else 100_003):
        grad = shifted(torch.randn(numel, generator=torch.Generator().manual_seed(numel)).to(dtype), 1)
        exact = math.fsum(grad.double().square().tolist()) if numel < 10_000 else grad.double().square().sum().item()
        found = {squared_norms([grad], implementation).item() for implementation in IMPLEMENTATIONS}
        try:
            for number in (1, 3):
                torch.set_num_threads(number)
                found.add(squared_norms([grad]).item())
        finally:
            torch.set_num_threads(threads)
        assert len(found) == 1
        assert found.pop() == pytest.approx(exact, rel=1e-14)


@pytest.mark.parametrize("dtype", [FP32, FP16, BF16])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_blocks_of_a_norm_add_up_to_it_wherever_the_gradient_is_cut(implementation, dtype):
    grad = shifted(torch.randn(5 * NORM_BLOCK + 77, generator=torch.Generator().manual_seed(5)).to(dtype), 1)
    blocks = norm_blocks(grad, implementation)
    assert blocks.shape == (6,) and sum_blocks(blocks) == squared_norms([grad], implementation)[0]
    for cut in (NORM_BLOCK, 4 * NORM_BLOCK):
        parts = norm_blocks(grad[:cut], implementation), norm_blocks(grad[cut:], implementation)
        assert torch.equal(torch.cat(parts), blocks)
    assert norm_blocks(grad[:0], implementation).numel() == 0


@pytest.mark.pairs
@pytest.mark.parametrize("kept", ["in its dtype", "in fp32"])
@pytest.mark.parametrize("dtype", [FP32, FP16, BF16])
@pytest.mark.parametrize("implementation", [None, *IMPLEMENTATIONS])
def test_a_gradient_is_stored_and_squared_in_one_pass(implementation, dtype, kept):
    """The place gets the bits of copy_ and add_, the sum those of squared_norms; memory around the place stays untouched."""
    wide = FP32 if kept == "in fp32" else dtype
    for numel in (1, 255, 8_193, 100_003):
        first, second = (shifted(torch.randn(numel, generator=torch.Generator().manual_seed(seed)).to(dtype), 1)
                         for seed in (numel, numel + 1))
        memory = torch.full((numel + 2,), 7.0, dtype=wide)
        place, expected = memory[1:-1], first.to(wide, copy=True)
        squares = store_squared(place, first, implementation=implementation)
        assert torch.equal(place, expected)
        fused = implementation != "torch" and bool(cpu.paths())
        assert squares == (squared_norms([expected]).item() if fused else None)
        squares = store_squared(place, second, True, 1, implementation)
        assert torch.equal(place, expected.add_(second))
        assert squares == (squared_norms([place]).item() if fused and wide == FP32 else None)
        assert memory[0] == memory[-1] == 7.0


def test_a_gradient_that_no_kernel_takes_is_stored_by_torch():
    place = torch.zeros(30, 20)
    turned = torch.randn(20, 30, generator=torch.Generator().manual_seed(0)).t()
    assert store_squared(place, turned) is None and torch.equal(place, turned)
    assert store_squared(place, turned.to(torch.float64), True) is None
    assert torch.equal(place, turned + turned)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_squared_norm_is_not_finite_exactly_if_an_element_is_not(implementation):
    for odd in (math.inf, -math.inf, math.nan):
        for place in (0, 8_191, 8_192, 20_000):
            grad = torch.full((20_001,), 3e38)    # whose squares overflow fp32, and float64 not
            assert squared_norms([grad], implementation).isfinite().all()
            grad[place] = odd
            assert not squared_norms([grad], implementation).isfinite().any()


# ---- arguments that cannot be


def changed(**fields) -> AdamUpdate:
    return dataclasses.replace(make("fp32", FP32, 100), **fields)


BUFFER = torch.zeros(1_000)


@pytest.mark.parametrize("update, message", [
    (changed(param=torch.zeros(100, dtype=torch.float64)), "param: dtype float32 or bfloat16 expected, found"),
    (changed(param=[0.0] * 100), "param: a tensor expected, found list"),
    (changed(grad=torch.zeros(100, dtype=torch.int32)), "grad: dtype"),
    (changed(exp_avg=torch.zeros(100, dtype=BF16)), "exp_avg: dtype float32"),
    (changed(exp_avg_sq=torch.zeros(99)), r"exp_avg_sq: param's shape \(100,\) expected, found \(99,\)"),
    (changed(grad=torch.zeros(100, 1)), "grad: param's shape"),
    (changed(grad=torch.zeros(200)[::2]), "grad: a contiguous tensor"),
    (changed(grad=torch.zeros(100, device="meta")), "grad: param's device cpu expected, found meta"),
    (changed(low=torch.zeros(100, dtype=torch.int16)), "low: a bf16 param with it expected"),
    (changed(param=torch.zeros(100, dtype=BF16), copy16=torch.zeros(100, dtype=BF16)), "copy16: an fp32 param with it"),
    (changed(seed=1), "seed: a bf16 param without low"),
    (changed(scales=(torch.zeros(1), torch.zeros(1))), "exp_avg: dtype uint8"),
    (changed(exp_avg=torch.zeros(100, dtype=torch.uint8), exp_avg_sq=torch.zeros(100, dtype=torch.uint8),
             scales=(torch.zeros(1), torch.zeros(2))), r"scales\[1\]: contiguous, shape \(1,\)"),
    (changed(param=BUFFER[:100], exp_avg=BUFFER[99:199]), "exp_avg: its memory overlaps that of param"),
    (changed(param=BUFFER[:100], grad=BUFFER[:100]), "its memory overlaps that of"),
    (changed(copy16=BUFFER[:50].view(BF16), grad=BUFFER[1:51].view(BF16)), "grad: its memory overlaps that of copy16"),
    (changed(copy16=BUFFER[:50].view(FP16), grad=BUFFER[:50].view(BF16)), "its memory overlaps that of"),
    (changed(step=0), "step: an integer from 1 on"),
    (changed(options=dataclasses.replace(OPTIONS, betas=(0.9, 1.0))), "betas: two numbers"),
    (changed(options=dataclasses.replace(OPTIONS, eps=-1.0)), "eps: a number from 0 on"),
    (changed(grad_scale=torch.zeros(2)), "grad_scale: one fp32 element"),
    (changed(skip=torch.zeros(1, device="meta")), "skip: param's device"),
])
def test_an_argument_that_cannot_be_is_named(update, message):
    with pytest.raises(ArgumentError, match=message):
        adam_steps([update])


def test_a_path_that_is_not_there_is_named():
    if cpu.paths():
        with pytest.raises(ArgumentError, match="path: one of plain, avx2, avx512 expected, found 'sse9'"):
            adam_steps([make("fp32", FP32, 10)], "sse9")
    with pytest.raises(ArgumentError, match=r"grads\[1\]: a contiguous"):
        squared_norms([torch.zeros(3), torch.zeros(6)[::2]])
