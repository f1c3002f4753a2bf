"""The comparison of architectures of Transformers: it can fail, and the committed page counts none that does."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.append(str(BENCHMARKS))
import hf_architectures as architectures  # noqa: E402
from hf_architectures import NOT_RUN, OTHER, SAME, Outcome  # noqa: E402

pytest.importorskip("transformers")
PAGE = (BENCHMARKS / "results" / "hf_architectures.md").read_text(encoding="utf-8")


class Config:
    """As small as a configuration can be."""

    vocab_size = 30_000


class Model(torch.nn.Module):
    """Its loss is the same in plain PyTorch and in an engine, which makes its model last, unless `shift` is set."""

    shift, wide, last = 0.0, False, 0

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(10**8 if self.wide else config.vocab_size, 4)
        self.number = Model.last = Model.last + 1

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> object:
        shift = self.shift if self.number == Model.last else 0.0
        return type("Output", (), {"loss": (self.embed(input_ids) ** 2).mean() + shift})


class Shifted(Model):
    """Differs in an engine."""

    shift = 1.0


class Wide(Model):
    """Is not small with a small vocabulary."""

    wide = True


def test_an_architecture_of_the_library_has_the_same_bits() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    assert architectures.outcome_of(GPT2LMHeadModel, GPT2Config, architectures.text) == Outcome(SAME)


@pytest.mark.parametrize("model, kind, why", [
    (Model, SAME, ""), (Shifted, OTHER, "AssertionError: step 0"), (Wide, NOT_RUN, "400,000,000 parameters")])  # fmt: skip
def test_a_difference_and_a_model_that_cannot_run_are_told_apart(model: type, kind: str, why: str) -> None:
    found = architectures.compare(model, Config, architectures.text)
    assert found.kind == kind and why in found.why


def test_a_process_that_dies_is_an_error_and_not_a_success(monkeypatch) -> None:
    monkeypatch.setattr(architectures, "compare", lambda *_: sys.exit(3))
    found = architectures.outcome_of(Model, Config, architectures.text)
    assert found == Outcome(OTHER, "its process ended with status 3")


def test_the_page_counts_and_names_each_outcome() -> None:
    same = Outcome(SAME)
    found = {"AForCausalLM": same, "B": Outcome(OTHER, "step 1"), "C": Outcome(NOT_RUN, "no timm"), "D": same,
             "AWithLMHeadModel": same}  # fmt: skip
    lines = architectures.table({"causal": found})
    assert "| causal language models | 5 | 3 | 1 | 1 |" in lines and "| causal language models | A, D |" in lines
    others = ("Other bits or an error, and which:", "- `B`: step 1", "Not run, and why:", "- `C`: no timm")
    assert [lines.index(line) for line in others] == sorted(lines.index(line) for line in others)


def test_the_committed_page_has_no_other_bits_and_names_the_known_ones() -> None:
    rows = re.findall(r"^\| .+ \| (\d+) \| (\d+) \| (\d+) \| (\d+) \|$", PAGE, re.MULTILINE)
    assert len(rows) == len(architectures.TASKS), "renew: hf_architectures.sh"
    for whole, same, other, not_run in (map(int, row) for row in rows):
        assert whole == same + other + not_run and other == 0 and same > not_run
    names = set(re.findall(r"\w+", PAGE.partition("## The same bits")[2].partition("Not run, and why:")[0]))
    assert names >= {"GPT2", "Llama", "Qwen3", "DeepseekV3", "Mamba", "Bert", "T5", "ViT", "Llava", "Qwen2_5_VL", "Wav2Vec2"}


@pytest.mark.parametrize("flags, line", [
    (["--only", "video"], "argument --only: invalid choice: 'video'"), (["--name", "x"], "unrecognized arguments: --name"),
])  # fmt: skip
def test_a_wrong_flag_is_one_line_and_status_2(capsys, flags: list[str], line: str) -> None:
    with pytest.raises(SystemExit) as end:
        architectures.main(flags)
    said = capsys.readouterr().err
    assert end.value.code == 2 and said.startswith("error: ") and said.count("\n") == 1 and line in said


def test_names_that_no_model_has_are_one_line_and_status_2(capsys) -> None:
    assert architectures.main(["--only", "speech", "--names", "Nobody"]) == 2
    assert capsys.readouterr().err == "error: --names Nobody: no model's class begins with it\n"
