"""How the kernels are built: cached, without a compiler, by many at once; under sanitizers; for GPUs that are not here."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from pstar.kernels import build, cpu, cuda
from pstar.kernels import squared_norms as norms_on_cpu
from pstar.kernels.front import adam_steps
from pstar.kernels.quantize import code_tables
from tests.cover import quick_only
from tests.harness.program import run_forked
from tests.pstar.kernels.test_adam import BF16, FP16, FP32, LAYOUTS, assert_same_bits, make

HERE = Path(__file__).parent
COMPILER = build.find_compiler()
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
GPUS = ("75", "80", "90", "100")
MOST_CALLS_AN_UPDATE, MOST_CALLS_A_LAUNCH = 50, 30    # 48 and 28; 73 calls an update before it was counted
# Each kind of parameter, gradient and moment at least once.
KINDS = [(0, 0, False), (1, 1, True), (2, 2, False), (3, 2, False), (4, 0, True), (5, 1, False)]


def run_build(cache: Path, **environment: str) -> tuple[int, str]:
    """Runs build.py as the set-up does, which has no torch yet."""
    variables = {**os.environ, "PSTAR_CACHE": str(cache), **environment}
    done = subprocess.run([sys.executable, "-I", build.__file__], env=variables, capture_output=True, text=True)
    return done.returncode, done.stderr


# ---- building


@needs_compiler
def test_many_at_once_leave_one_whole_library_that_a_later_build_finds(tmp_path):
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: run_build(tmp_path), range(4)))
    assert all(status == 0 and text.count("\n") == 1 and "CPU kernels are ready" in text for status, text in results)
    library, = (path for path in tmp_path.iterdir() if path.suffix != ".lock")
    before = library.stat().st_mtime_ns
    assert run_build(tmp_path)[1].count("\n") == 1 and library.stat().st_mtime_ns == before
    assert ctypes.CDLL(str(library)).pstar_has_path(1)


@pytest.mark.parametrize("environment, why", [
    ({"CXX": "", "PATH": "/nowhere"}, "no C++ compiler found"), ({"CXX": "/not/there"}, "no C++ compiler found"),
    ({"CXX": shutil.which("false") or "false"}, "failed: status 1")])
def test_without_a_compiler_there_is_one_line_and_no_error(tmp_path, environment, why):
    status, text = run_build(tmp_path, **environment)
    assert status == 0 and text.count("\n") == 1
    assert why in text and "torch operations take over" in text
    assert [path.name for path in tmp_path.iterdir() if path.suffix != ".lock"] == []


def test_a_cache_that_others_may_write_is_refused(tmp_path):
    tmp_path.chmod(0o777)
    status, text = run_build(tmp_path)
    assert status == 0 and text.count("\n") == 1 and ("not by you alone" in text or COMPILER is None)


def test_at_first_use_the_torch_implementation_takes_over_with_one_line(tmp_path):
    code = ("import torch\nfrom pstar.kernels import AdamOptions, adam_step, squared_norms\n"
            "t = [torch.ones(9) for _ in range(4)]\n"
            "options = AdamOptions(lr=.1, betas=(.9, .99), eps=1e-8, weight_decay=0.)\n"
            "for step in (1, 2):\n    adam_step(*t, step=step, options=options)\n"
            "print(t[0].mean().item() < 1, squared_norms(t[:1]).item())")
    (tmp_path / "program.py").write_text(code)
    variables = {**os.environ, "PSTAR_CACHE": str(tmp_path), "CXX": "/not/there", "PYTHONPATH": os.pathsep.join(sys.path)}
    status, said = run_forked([sys.executable, str(tmp_path / "program.py")], variables)
    assert status == 0 and re.search("^True ", said, re.MULTILINE), said
    lines = [line for line in said.splitlines() if "pstar" in line]
    assert lines == ["pstar: no compiled CPU kernels (no C++ compiler found); torch operations take over"]


# ---- sanitizers


@needs_compiler
def test_address_and_undefined_behaviour_sanitizers_are_clean(tmp_path):
    probe = tmp_path / "probe.cpp"
    probe.write_text("int main() { return 0; }")
    flags = ["-std=c++17", "-O1", "-g", "-ffp-contract=off", "-fno-math-errno", "-fopenmp", "-Wall", "-Wextra", "-Werror",
             "-fsanitize=address,undefined", "-fno-sanitize-recover=all", f"-I{build.HERE}"]
    if subprocess.run([COMPILER, *flags, probe, "-o", tmp_path / "probe"], capture_output=True).returncode:
        pytest.skip(f"{COMPILER} has no sanitizers")
    program = tmp_path / "sanitized"
    subprocess.run([COMPILER, *flags, HERE / "sanitized_adam.cpp", "-o", program], check=True)
    # libgomp keeps its pool of threads to the end, which the leak detector takes for a leak
    done = subprocess.run([program], env={**os.environ, "ASAN_OPTIONS": "detect_leaks=0"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout == f"{len(cpu.paths()) * 6 * 3 * 2 * 6 * 2} updates\n"


# ---- CUDA, as far as it goes without a GPU


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc")
@pytest.mark.parametrize("kinds", quick_only(KINDS[1::2], KINDS[1]), ids=str)
def test_nvcc_compiles_it_for_every_gpu(kinds, tmp_path):
    defines = [f"-DPSTAR_{name}={int(kind)}" for name, kind in zip(("PARAM", "GRAD", "QUANT"), kinds, strict=True)]
    targets = [f"-gencode=arch=compute_{gpu},code=sm_{gpu}" for gpu in GPUS]
    command = ["nvcc", "-std=c++17", "-fmad=false", "-Werror=all-warnings", *defines, *targets, "-fatbin",
               build.HERE / "cuda_adam.cu", "-o", tmp_path / "adam.fatbin"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="session")
def emulator(tmp_path_factory):
    """emulator(kinds): cuda_adam.cu as a library for the CPU, compiled once."""
    if COMPILER is None:
        pytest.skip("no C++ compiler")
    folder = tmp_path_factory.mktemp("emulators")

    @functools.cache
    def compile_one(kinds):
        defines = [f"-DPSTAR_{name}={int(kind)}" for name, kind in zip(("PARAM", "GRAD", "QUANT"), kinds, strict=True)]
        target = folder / f"adam{kinds}.so"
        flags = ["-std=c++20", "-O0", "-ffp-contract=off", "-fno-strict-aliasing", "-pthread", "-fPIC", "-shared",
                 "-fsanitize=alignment", "-fsanitize-undefined-trap-on-error"]    # a GPU, too, ends at an unaligned load
        command = [COMPILER, *flags, *defines, f"-I{build.HERE}", HERE / "cuda_on_cpu.cpp", "-o", target]
        done = subprocess.run(command, capture_output=True, text=True)
        if "barrier: No such file" in done.stderr or "'barrier' file not found" in done.stderr:
            pytest.skip(f"{COMPILER} has no <barrier> of C++20")
        assert done.returncode == 0, done.stderr
        return ctypes.CDLL(str(target))

    return compile_one


@pytest.mark.parametrize("kinds", quick_only(KINDS, *KINDS[:3]), ids=str)
def test_the_cuda_kernel_run_on_the_cpu_gives_the_cpus_bits(emulator, kinds):
    """One launch of many runs, aligned, unaligned alike, unaligned differently, short and empty."""
    layout = [name for name in LAYOUTS if name != "shared slot"][kinds[0]]
    dtype, bits = (FP32, FP16, BF16)[kinds[1]], 8 if kinds[2] else 32
    shapes = [(1, 0), (7, 0), (8, 0), (2_048, 0), (2_049, 0), (4_100, 1), (3_000, 3), (5, 7), (2_047, 5)]
    ours = [make(layout, dtype, numel, bits, numel < 100, shift) for numel, shift in shapes]
    theirs = [make(layout, dtype, numel, bits, numel < 100, shift) for numel, shift in shapes]
    theirs[3].grad, ours[3].grad = (torch.cat([each, each[:1]])[1:] for each in (theirs[3].grad, ours[3].grad))    # alone
    if kinds[2]:
        for update in (theirs[2], ours[2]):
            update.exp_avg = torch.cat([update.exp_avg, update.exp_avg[:1]])[1:]
    tables = tuple(table.data_ptr() for table in code_tables(torch.device("cpu"))) if kinds[2] else None
    batch, = cuda.batches_of(ours, tables)
    emulator(kinds).emulate_adam(ctypes.byref(batch))
    adam_steps(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert_same_bits(one, other)


@pytest.mark.parametrize("kinds", [KINDS[0], KINDS[1], KINDS[2]], ids=str)
def test_the_cuda_norms_run_on_the_cpu_give_the_cpus_bits(emulator, kinds):
    dtype = (FP32, FP16, BF16)[kinds[1]]
    grads = [torch.randn(numel).to(dtype) for numel in (0, 1, 300, 8_192, 8_193, 40_000)]
    grads.append(torch.randn(9_001).to(dtype)[1:])
    results = torch.zeros(len(grads), dtype=torch.float64)
    batch, = cuda.norm_batches_of(grads)
    emulator(kinds).emulate_norms(ctypes.byref(batch), ctypes.c_void_p(results.data_ptr()))
    assert torch.equal(results, norms_on_cpu(grads))


def test_many_runs_go_into_as_few_launches_as_there_is_room():
    updates = [make("fp32", FP32, 10_000) for _ in range(60)]
    batches = cuda.batches_of(updates, None)
    assert [batch.num_chunks for batch in batches] == [28, 28, 4]
    assert [batch.first_block[batch.num_chunks] for batch in batches] == [28 * 5, 28 * 5, 4 * 5]
    assert ctypes.sizeof(cuda.AdamBatch) <= 4096, "what a launch can carry"


class CountingDriver:
    """The driver, without a GPU: counts the calls."""

    def __init__(self):
        self.calls = Counter()

    def __getattr__(self, name):
        self.calls[name] += 1
        return lambda *arguments: 0


def python_calls(function) -> int:
    """Calls of Python functions and of functions in C that a call of `function` makes."""
    count = 0

    def counted(frame, event, argument):
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(counted)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


def test_calls_of_python_for_a_launch(monkeypatch):
    """The GPU waits for Python if a launch takes longer than a kernel. Counted, because seconds depend on the machine."""
    driver, stream = CountingDriver(), SimpleNamespace(cuda_stream=0)
    monkeypatch.setattr(cuda, "library", lambda: (None, driver))
    monkeypatch.setattr(cuda, "compile_cubin", lambda *_: b"code")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    cached = (cuda._context, cuda._function, cuda._module)
    for each in cached:
        each.cache_clear()

    def launch(num: int):
        updates = [make("fp32", FP32, 4_096) for _ in range(num)]
        fields = {"skip": torch.zeros(1), "grad_scale": torch.ones(1)}
        updates = [dataclasses.replace(update, **fields) for update in updates]

        def run():
            for update in updates:
                update.check()
            cuda.update_on_cuda(updates)

        return run

    try:
        launch(1)()
        driver.calls.clear()
        launch(28)()
        assert driver.calls == {"cuCtxPushCurrent_v2": 1, "cuLaunchKernel": 1, "cuCtxPopCurrent_v2": 1}
        one, all_28 = python_calls(launch(1)), python_calls(launch(28))
    finally:
        for each in cached:
            each.cache_clear()
    an_update = (all_28 - one) / 27
    assert an_update <= MOST_CALLS_AN_UPDATE and one - an_update <= MOST_CALLS_A_LAUNCH, (an_update, one - an_update)
