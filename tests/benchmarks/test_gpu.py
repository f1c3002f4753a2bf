"""The benchmark of models on a GPU, here with a toy on a CPU: every contender trains, and a failure has its own row."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parents[2] / "benchmarks" / "gpu"
sys.path[:0] = [str(HERE), str(HERE.parent)]
import equal  # noqa: E402
import models  # noqa: E402


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, Path]:
    folder = tmp_path_factory.mktemp("gpu")
    flags = ["--quick", "--device", "cpu", "--rounds", "2", "--results", str(folder)]
    return models.main([*flags, "--only", "pstar,plain,fsdp2"]), folder


@pytest.mark.deep
def test_all_train_the_same_work(run: tuple[int, Path]) -> None:
    status, folder = run
    (entry,) = json.loads((folder / "gpu_models.json").read_text()).values()
    rows = {cells["who"]: cells for cells in entry["rows"]}
    assert status == 0 and list(rows) == ["pstar", "plain", "fsdp2"]
    losses = [float(cells["loss"]) for cells in rows.values()]
    assert max(losses) - min(losses) < 0.1 < losses[0], "one vocabulary, the same batches, and bf16"
    assert abs(losses[0] - losses[1]) <= 0.002, "and the same start"
    assert float(rows["pstar"]["of plain"]) > 0 and "of plain" not in rows["plain"]
    assert rows["pstar"]["predicted, GiB"] and rows["pstar"]["TFLOP/s, 8N"]


@pytest.mark.deep
def test_the_page_is_made_of_all_runs_and_names_no_folder(run: tuple[int, Path]) -> None:
    _, folder = run
    text = (folder / "gpu_models.md").read_text()
    assert "| pstar | 8 x 64 |" in text and "`python benchmarks/gpu/models.py --quick" in text
    runs = json.loads((folder / "gpu_models.json").read_text())
    other = {"params": 7 * 10**9, "about": ["- model: another"], "rows": [{"size": "7.00 billion", "who": "fsdp2"}]}
    page = models.page({"b": other, **runs})
    assert page.index("0.00 billion") < page.index("## 7.00 billion") and page.count("| who |") == 2


@pytest.mark.deep
def test_a_model_that_cannot_train_has_a_row_with_the_reason(tmp_path: Path) -> None:
    flags = ["--quick", "--device", "cpu", "--rounds", "1", "--only", "pstar", "--results", str(tmp_path)]
    assert models.main([*flags, "--near-memory", "1000"]) == 1
    assert "| not tried: 0.0 GiB too little near |" in (tmp_path / "gpu_models.md").read_text()
    assert models.main([*flags, "--config", '{"far_budget": 1000}']) == 1
    text = (tmp_path / "gpu_models.md").read_text()
    assert "BudgetError: far budget 1000" in text and "or a disk_path |" in text


def test_a_run_that_would_take_all_memory_is_not_tried() -> None:
    assert models.hopeless("fsdp2", 13 * 10**9, {}, 128 * 2**30) == "not tried: needs 194 GiB of host memory"
    assert models.hopeless("fsdp2", 7 * 10**9, {}, 128 * 2**30) is None
    assert models.hopeless("pstar", 7 * 10**9, {"far": 2**31}, 128 * 2**30) == "not tried: 2.0 GiB too little far"


def test_a_part_that_the_gpu_does_not_have_is_not_tried() -> None:
    assert models.hopeless("pstar", 10**9, {}, 2**40, 80, 48 * 10**9) == "not tried: this GPU has 48 GB"
    assert models.hopeless("pstar", 10**9, {}, 2**40, 40, 48 * 10**9) is None


@pytest.mark.parametrize("line, full", [
    ("OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", True),
    ("AcceleratorError: CUDA error: out of memory", True), ("not tried: 2.0 GiB too little far", True),
    ("RuntimeError: [enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory", True),
    ("its process was killed: host memory is full, most likely", True), ("BudgetError: far budget 1000", True),
    ("RuntimeError: Expected all tensors to be on the same device", False), ("TypeError: no message", False),
])  # fmt: skip
def test_too_little_memory_is_a_result_and_another_error_is_not(line, full) -> None:
    assert models.is_memory(line) == full


def test_other_numbers_are_found(monkeypatch, capsys) -> None:
    """equal.py with a placement that is none: it has another learning rate."""
    shape = {"n_layer": 1, "n_embd": 16, "n_head": 2, "n_positions": 8, "vocab_size": 50}
    monkeypatch.setattr(equal, "PLACEMENTS", {"all": {"near_budget": "100%"}, "min": {"near_budget": "min"},
                                              "other": {"optimizer": {"params": {"lr": 2e-3}}}})
    lines, wrong = equal.compare(shape, models.torch.device("cpu"))
    assert wrong == 2 and ["off by" in line for line in lines] == [False, False, True] * 2
    assert all(line.endswith("| equal | equal |") for line in lines if "| other |" not in line)
    assert all("differ** |" in line for line in lines if "| other |" in line)


@pytest.mark.parametrize("billions", [1.5, 7, 13, 17])
def test_a_model_has_about_as_many_parameters_as_it_is_called(billions: float) -> None:
    work = {"model": models.model_of(billions), "batch": 1, "seq_len": 1024, "near_memory": 10**12, "recompute": True}
    num_params, peak, short_of = models.predicted(work | {"config": {}}, 10**12)
    assert abs(num_params / 1e9 - billions) < 0.12 and peak > 14 * num_params * 0.99 and not short_of


@pytest.mark.parametrize("flags, message", [
    (["--only", "deepspeed"], "--only deepspeed: not known; choose from pstar, plain, fsdp2"),
    (["--rounds", "0"], "--rounds must be above 0"),
    (["--config", "{"], "argument --config: invalid loads value"),
    (["--cap", "-1"], "--cap must be above 0"),
    ([], "--device cuda needs a GPU that torch can use"),
])  # fmt: skip
def test_a_wrong_flag_is_one_line(flags, message, capsys, monkeypatch) -> None:
    monkeypatch.setattr(models.torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as ended:
        models.parse(flags)
    assert ended.value.code == 2 and capsys.readouterr().err.startswith(f"error: {message}")
