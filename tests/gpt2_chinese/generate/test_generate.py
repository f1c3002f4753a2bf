"""Generation: greedy as Hugging Face, with the cache as without, and each way of drawing against its definition."""

from __future__ import annotations

import pytest
import torch

from gpt2_chinese.errors import UserError
from gpt2_chinese.generate.decoding import generate, window_start
from gpt2_chinese.generate.kv_cache import Cached, Plain
from gpt2_chinese.generate.sampling import Sampling, generator_of, keep_top_k, keep_top_p, penalise_repetition
from gpt2_chinese.model.config import ModelConfig
from gpt2_chinese.model.gpt2 import GPT2LMHeadModel


@pytest.fixture
def model() -> GPT2LMHeadModel:
    torch.manual_seed(4)
    made = GPT2LMHeadModel(ModelConfig(n_layer=2, n_embd=32, n_head=2, n_positions=24, vocab_size=50)).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return made


PROMPTS = [[3, 1, 4, 1], [5, 9, 2, 6]]
RAGGED = [[3, 1, 4, 1, 5, 9, 2], [6], [5, 3, 5], [8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2, 6]]
GREEDY = Sampling(greedy=True)
WILD = Sampling(temperature=1.3, top_k=30, top_p=0.95, repetition_penalty=1.2)


def hugging_faces(model: GPT2LMHeadModel):
    transformers = pytest.importorskip("transformers")
    keys = {k: v for k, v in model.config.to_dict().items() if v is not None}
    theirs = transformers.GPT2LMHeadModel(transformers.GPT2Config(**keys)).eval()
    theirs.load_state_dict(model.state_dict())
    return theirs


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_greedy_is_hugging_faces(model: GPT2LMHeadModel, penalty: float, cache: bool) -> None:
    prompts = torch.tensor(PROMPTS)
    wanted = hugging_faces(model).generate(
        prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=18, do_sample=False,
        repetition_penalty=penalty, pad_token_id=0, eos_token_id=None,
    )  # fmt: skip
    sampling = Sampling(greedy=True, repetition_penalty=penalty)
    assert generate(model, PROMPTS, 18, sampling, cache=cache) == wanted[:, 4:].tolist()


@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_greedy_with_an_end_is_hugging_faces(model: GPT2LMHeadModel, penalty: float) -> None:
    theirs = hugging_faces(model)
    sampling, ended = Sampling(greedy=True, repetition_penalty=penalty), 0
    free = generate(model, RAGGED, 10, sampling)
    for prompt, row in zip(RAGGED, free, strict=True):
        end, ids = row[4], torch.tensor([prompt])
        out = theirs.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=10, do_sample=False,
                              repetition_penalty=penalty, pad_token_id=0, eos_token_id=end)  # fmt: skip
        wanted = out[0, len(prompt) :].tolist()
        ended += wanted[-1] == end
        assert generate(model, [prompt], 10, sampling, end_id=end)[0] == wanted[: wanted.index(end)]
    assert ended == len(RAGGED)


def draw(model: GPT2LMHeadModel, prompts: list[list[int]], length: int, seed: int, **how) -> list[list[int]]:
    generators = [generator_of(seed, i, 0) for i in how.pop("numbers", range(len(prompts)))]
    return generate(model, prompts, length, how.pop("sampling", WILD), generators, **how)


def test_seeds_decide_and_rows_differ(model: GPT2LMHeadModel) -> None:
    same = PROMPTS[:1] * 4
    assert draw(model, same, 10, 1) == draw(model, same, 10, 1) != draw(model, same, 10, 2)
    assert len({tuple(row) for row in draw(model, same, 10, 1)}) == 4, "a batch is no copy of one sample"


def test_seeds_give_texts_of_their_own() -> None:
    drawn = {
        tuple(torch.empty(3).exponential_(generator=generator_of(seed, i, j)).tolist())
        for seed in range(8) for i in range(8) for j in range(8)
    }  # fmt: skip
    assert len(drawn) == 512


@pytest.mark.parametrize("sampling", [GREEDY, WILD], ids=["greedy", "drawn"])
@pytest.mark.parametrize("end_id", [None, 7])
def test_the_cache_changes_no_id_within_the_context_and_beyond(model: GPT2LMHeadModel, sampling, end_id) -> None:
    with_cache, without = (
        draw(model, RAGGED, 70, 5, sampling=sampling, cache=cache, end_id=end_id) for cache in (True, False)
    )
    assert with_cache == without
    assert max(map(len, with_cache)) == 70 or end_id is not None


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("sampling", [GREEDY, WILD], ids=["greedy", "drawn"])
def test_a_batch_of_any_lengths_gives_the_results_of_each_alone(model: GPT2LMHeadModel, sampling, cache: bool) -> None:
    together = draw(model, RAGGED, 40, 3, sampling=sampling, cache=cache, end_id=11)
    for i, prompt in enumerate(RAGGED):
        assert draw(model, [prompt], 40, 3, sampling=sampling, numbers=[i], end_id=11)[0] == together[i]
    assert len({len(row) for row in together}) > 1 or sampling.greedy, "some end early, the others go on"


def test_logits_with_the_cache_are_those_without_at_every_step(model: GPT2LMHeadModel) -> None:
    cached, plain, rows = Cached(model, 24), Plain(model), [list(row) for row in RAGGED]
    for step in range(12):
        assert (cached(rows) - plain(rows)).abs().max() < 1e-5
        rows = [[*row, (7 * step + 3 * i) % 50] for i, row in enumerate(rows)]
    kept = [3, 1]
    cached.keep(kept)
    rows = [[*rows[i][:-1], 13] for i in kept]
    assert (cached(rows) - plain(rows)).abs().max() < 1e-5
    rows = [[1, 2, 3], [4, 5]]  # a continuation of nothing: read anew
    assert (cached(rows) - plain(rows)).abs().max() < 1e-5


def test_the_cache_reads_a_token_not_the_text(model: GPT2LMHeadModel) -> None:
    read = []
    model.transformer.wte.register_forward_hook(lambda _, inputs, __: read.append(inputs[0].shape[1]))
    generate(model, [[1] * 4], 44, GREEDY)
    # a text of 4 grows to the context of 24, goes on from 13 (its last half and one) to 24, and so on
    assert read == [4, *[1] * 20, 13, *[1] * 11, 13, *[1] * 10]


@pytest.mark.parametrize("context", [1, 2, 3, 4, 7, 24])
def test_the_window_is_never_longer_than_the_context_and_drops_half(context: int) -> None:
    starts = [window_start(length, context) for length in range(1, 5 * context + 5)]
    assert starts[:context] == [0] * context
    for length, start in enumerate(starts, start=1):
        assert min(length, context // 2 + 1) <= length - start <= context
    assert sorted(set(starts)) == list(range(0, max(starts) + 1, context - context // 2))


def test_beyond_the_context_it_goes_on_from_the_last_half(model: GPT2LMHeadModel) -> None:
    ids = list(PROMPTS[0])
    (row,) = generate(model, PROMPTS[:1], 60, GREEDY)
    for new in row:
        start = window_start(len(ids), 24)
        assert model(torch.tensor([ids[start:]]))[0, -1].argmax() == new
        ids.append(new)


def test_a_prompt_longer_than_the_context_is_continued(model: GPT2LMHeadModel) -> None:
    long = [i * 7 % 50 for i in range(61)]
    assert draw(model, [long, [1]], 30, 1) == draw(model, [long, [1]], 30, 1, cache=False)


def countdown(ids: torch.Tensor) -> torch.Tensor:
    """Always follows an id with the one below it."""
    return torch.nn.functional.one_hot((ids - 1).clamp(min=0), 10).float() * 100


def test_a_row_ends_before_its_end_and_the_others_go_on() -> None:
    seen = []
    rows = generate(countdown, [[3], [6]], 20, GREEDY, end_id=0, cache=False, on_token=lambda i, t: seen.append((i, t)))
    assert rows == [[2, 1], [5, 4, 3, 2, 1]]
    assert seen == [(0, 2), (1, 5), (0, 1), (1, 4), (1, 3), (1, 2), (1, 1)]
    assert generate(countdown, [[3]], 2, GREEDY, forbidden=(2,), cache=False)[0][0] != 2


def test_logits_that_are_not_finite_are_refused(model: GPT2LMHeadModel) -> None:
    with torch.no_grad():
        model.transformer.ln_f.weight[3] = torch.nan
    with pytest.raises(UserError, match="not finite"):
        generate(model, PROMPTS, 3, Sampling())


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
    seen = torch.zeros_like(logits, dtype=torch.bool).scatter(1, ids, True)
    assert torch.equal(penalise_repetition(logits, seen, 1.4), wanted)


def test_drawing_follows_the_distribution() -> None:
    def fixed(ids: torch.Tensor) -> torch.Tensor:
        return LOGITS[:1, None].expand(ids.shape[0], ids.shape[1], -1)

    generators = [generator_of(0, i, 0) for i in range(20_000)]
    rows = generate(fixed, [[0]] * 20_000, 1, Sampling(temperature=0.5), generators, cache=False)
    counts = torch.tensor(rows).flatten().bincount(minlength=5) / 20_000
    expected = (LOGITS[0] / 0.5).softmax(-1)
    assert (counts - expected).abs().max() < 0.01


@pytest.mark.parametrize(
    "change, line",
    [
        ({"temperature": 0.0}, "--temperature 0.0 is out of range"),
        ({"temperature": float("nan")}, "--temperature nan is out of range"),
        ({"top_k": -1}, "--top-k -1 is out of range"),
        ({"top_p": 1.5}, "--top-p 1.5 is out of range"),
        ({"repetition_penalty": float("inf")}, "--repetition-penalty inf is out of range"),
    ],
)
def test_numbers_out_of_range(change: dict, line: str) -> None:
    with pytest.raises(UserError, match=line):
        Sampling(**change).check()
