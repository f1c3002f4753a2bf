"""Generation: greedy as Hugging Face, and each way of drawing against its definition."""

from __future__ import annotations

import pytest
import torch

from gpt2_chinese.config import ModelConfig
from gpt2_chinese.generate import generate, keep_top_k, keep_top_p, penalise_repetition
from gpt2_chinese.model import GPT2LMHeadModel


@pytest.fixture
def model() -> GPT2LMHeadModel:
    torch.manual_seed(4)
    made = GPT2LMHeadModel(ModelConfig(n_layer=2, n_embd=32, n_head=2, n_positions=24, vocab_size=50)).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return made


PROMPT = torch.tensor([[3, 1, 4, 1], [5, 9, 2, 6]])


@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_greedy_is_hugging_faces(model: GPT2LMHeadModel, penalty: float) -> None:
    transformers = pytest.importorskip("transformers")
    keys = {k: v for k, v in model.config.to_dict().items() if v is not None}
    theirs = transformers.GPT2LMHeadModel(transformers.GPT2Config(**keys)).eval()
    theirs.load_state_dict(model.state_dict())
    mask = torch.ones_like(PROMPT)
    wanted = theirs.generate(
        PROMPT, attention_mask=mask, max_new_tokens=18, do_sample=False, repetition_penalty=penalty,
        pad_token_id=0, eos_token_id=None,
    )  # fmt: skip
    assert generate(model, PROMPT, 18, greedy=True, repetition_penalty=penalty) == wanted[:, 4:].tolist()


def test_seeds_decide_and_rows_differ(model: GPT2LMHeadModel) -> None:
    def draw(seed: int) -> list[list[int]]:
        return generate(model, PROMPT[:1].repeat(4, 1), 10, generator=torch.Generator().manual_seed(seed))

    assert draw(1) == draw(1) != draw(2)
    assert len({tuple(row) for row in draw(1)}) > 1, "a batch is no copy of one sample"


def test_the_window_slides_beyond_the_context(model: GPT2LMHeadModel) -> None:
    ids = PROMPT[:1]
    rows = generate(model, ids, 40, greedy=True)
    assert len(rows[0]) == 40
    for new in rows[0]:
        assert model(ids[:, -24:])[0, -1].argmax() == new
        ids = torch.cat([ids, torch.tensor([[new]])], 1)


def test_a_row_ends_before_eos_and_the_others_go_on() -> None:
    def countdown(ids: torch.Tensor) -> torch.Tensor:
        """Always follows an id with the one below it."""
        return torch.nn.functional.one_hot((ids - 1).clamp(min=0), 10).float() * 100

    assert generate(countdown, torch.tensor([[3], [6]]), 20, greedy=True, eos_id=0) == [[2, 1], [5, 4, 3, 2, 1]]
    assert generate(countdown, torch.tensor([[3]]), 2, greedy=True, forbidden=(2,))[0][0] != 2


LOGITS = torch.tensor([[0.5, 0.25, 0.15, 0.06, 0.04], [0.04, 0.5, 0.06, 0.15, 0.25]]).log()


def kept(logits: torch.Tensor) -> list[list[int]]:
    return [row.isfinite().nonzero().flatten().tolist() for row in logits]


@pytest.mark.parametrize("k, wanted", [(0, 5), (1, 1), (3, 3), (5, 5), (9, 5)])
def test_top_k(k: int, wanted: int) -> None:
    found = kept(keep_top_k(LOGITS, k))
    assert [len(row) for row in found] == [wanted] * 2
    assert found[0] == list(range(wanted))


@pytest.mark.parametrize(
    "p, first, second",
    [
        (1.0, [0, 1, 2, 3, 4], [0, 1, 2, 3, 4]),
        (0.8, [0, 1, 2], [1, 3, 4]),
        (0.7, [0, 1], [1, 4]),
        (0.1, [0], [1]),
        (1e-9, [0], [1]),
    ],
)
def test_top_p_keeps_the_fewest_that_reach_p(p: float, first: list[int], second: list[int]) -> None:
    assert kept(keep_top_p(LOGITS, p)) == [first, second]


def test_filters_are_hugging_faces() -> None:
    pytest.importorskip("transformers")
    from transformers.generation.logits_process import (
        RepetitionPenaltyLogitsProcessor,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    logits = torch.randn(6, 40, generator=torch.Generator().manual_seed(0)) * 3
    ids = torch.randint(0, 40, (6, 12), generator=torch.Generator().manual_seed(1))
    assert torch.equal(keep_top_k(logits, 7), TopKLogitsWarper(7)(ids, logits.clone()))
    assert torch.equal(keep_top_p(logits, 0.83), TopPLogitsWarper(0.83)(ids, logits.clone()))
    wanted = RepetitionPenaltyLogitsProcessor(1.4)(ids, logits.clone())
    assert torch.equal(penalise_repetition(logits, ids, 1.4), wanted)


def test_drawing_follows_the_distribution() -> None:
    def fixed(ids: torch.Tensor) -> torch.Tensor:
        return LOGITS[:1, None].expand(ids.shape[0], ids.shape[1], -1)

    many = torch.zeros(20_000, 1, dtype=torch.int64)
    rows = generate(fixed, many, 1, temperature=0.5, generator=torch.Generator().manual_seed(0))
    counts = torch.tensor(rows).flatten().bincount(minlength=5) / 20_000
    expected = (LOGITS[0] / 0.5).softmax(-1)
    assert (counts - expected).abs().max() < 0.01
