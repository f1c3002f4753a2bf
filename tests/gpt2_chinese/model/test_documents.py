"""Attention and positions that end with a document: no gradient crosses, and a document computes what it computes alone."""

from __future__ import annotations

import copy
import dataclasses
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from gpt2_chinese.data.batches import IGNORED
from gpt2_chinese.model.config import ModelConfig
from gpt2_chinese.model.documents import document_mask, document_positions, document_starts
from gpt2_chinese.model.gpt2 import GPT2LMHeadModel
from gpt2_chinese.model.recomputation import recompute

BEGIN, END, PAD = 4, 2, 0
CONFIG = ModelConfig(n_layer=3, n_embd=32, n_head=4, n_positions=32, vocab_size=50, marks=(BEGIN, END))
DOCUMENTS = [[BEGIN, 10, 11, 12, 13, END], [BEGIN, 20, 21, END], [BEGIN, 30, 31, 32, 33, 34, 35, 36, END], [BEGIN, END]]


def model_of(config: ModelConfig = CONFIG) -> GPT2LMHeadModel:
    """In float64, with weights large enough that attention is far from uniform."""
    torch.manual_seed(0)
    return GPT2LMHeadModel(dataclasses.replace(config, initializer_range=0.3)).double()


def row_of(documents: list[list[int]], length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A packed row, (1, length) ids and targets."""
    ids = [i for document in documents for i in document]
    targets = [i for document in documents for i in [*document[1:], IGNORED]]
    rest = length - len(ids)
    return torch.tensor([ids + [PAD] * rest]), torch.tensor([targets + [IGNORED] * rest])


def test_positions_begin_anew_and_the_mask_is_a_block_for_each_document() -> None:
    ids = torch.tensor([[11, 12, END, BEGIN, 13, END, BEGIN, END, PAD]])
    assert document_positions(ids, (BEGIN, END)).tolist() == [[0, 1, 2, 0, 1, 2, 0, 1, 0]]
    mask = document_mask(ids, (BEGIN, END))
    assert mask.shape == (1, 1, 9, 9)
    number = [0, 0, 0, 1, 1, 1, 2, 2, 3]
    assert mask[0, 0].tolist() == [[i >= j and number[i] == number[j] for j in range(9)] for i in range(9)]
    assert document_mask(ids, None) is None and document_positions(ids, None).tolist() == list(range(9))


def test_where_one_token_is_both_marks_a_document_begins_between_two_of_them() -> None:
    ids = torch.tensor([[10, END, END, 11, END, END, 12], [END, 10, 11, 12, END, END, 13]])
    assert document_starts(ids, (END, END)).int().tolist() == [[1, 0, 1, 0, 0, 1, 0], [1, 0, 0, 0, 0, 1, 0]]


@pytest.mark.parametrize("how", ["none", "block", "selective"])
def test_no_gradient_crosses_a_boundary(how: str) -> None:
    model = model_of()
    recompute(model, how)
    ids, _ = row_of(DOCUMENTS, 24)
    seen: list[torch.Tensor] = []

    def keep(_: object, __: object, output: torch.Tensor) -> None:
        output.retain_grad()
        seen.append(output)

    model.transformer.wte.register_forward_hook(keep)
    for first, document in zip((0, 6, 10, 19), DOCUMENTS, strict=True):
        own = slice(first, first + len(document))
        logits = model(ids)
        (logits[:, own] * torch.randn_like(logits[:, own])).sum().backward()
        grad = seen[-1].grad[0].abs().sum(-1)
        assert grad[own].min() > 0, "every position of the document has a part in its logits"
        grad[own] = 0
        assert grad.max() == 0, "exactly zero everywhere else"


def test_other_documents_change_not_one_bit_of_a_document() -> None:
    model = model_of()
    ids, _ = row_of(DOCUMENTS, 24)
    other = ids.clone()
    other[0, 1:5], other[0, 11:18] = torch.tensor([40, 41, 42, 43]), torch.arange(41, 48)
    assert torch.equal(model(ids)[0, 6:10], model(other)[0, 6:10])
    assert not torch.equal(model(ids)[0, 10:19], model(other)[0, 10:19])


@torch.no_grad()
def test_the_loss_of_a_packed_window_is_the_token_weighted_mean_of_its_documents() -> None:
    """float64 sums of 16 losses in another order, and attention over padded lengths: 1e-12."""
    model, alone = model_of(), model_of(dataclasses.replace(CONFIG, marks=None))
    ids, targets = row_of(DOCUMENTS, 24)
    total = count = 0.0
    for document in DOCUMENTS:
        own = torch.tensor([document])
        total += float(F.cross_entropy(alone(own[:, :-1])[0], own[0, 1:], reduction="sum"))
        count += len(document) - 1
    packed = F.cross_entropy(model(ids)[0], targets[0])
    assert float(packed) == pytest.approx(total / count, rel=1e-12)
    assert float(model(ids, targets)) == pytest.approx(total / count, rel=1e-6), "the model's own loss is in float32"


def test_one_document_computes_what_causal_attention_does() -> None:
    ids = torch.tensor([[BEGIN, *range(10, 30)]])
    masked, causal = model_of()(ids), model_of(dataclasses.replace(CONFIG, marks=None))(ids)
    assert torch.allclose(masked, causal, rtol=1e-12, atol=1e-12)


def test_without_marks_attention_is_the_causal_kernel_as_before() -> None:
    attend, seen = F.scaled_dot_product_attention, []

    def note(*args, **kwargs):
        seen.append((kwargs["attn_mask"], kwargs["is_causal"]))
        return attend(*args, **kwargs)

    with mock.patch.object(F, "scaled_dot_product_attention", note):
        model_of(dataclasses.replace(CONFIG, marks=None))(torch.tensor([[BEGIN, 5, END, BEGIN, 6]]))
    assert seen == [(None, True)] * 3


def test_the_marks_are_in_no_config_file() -> None:
    assert "marks" not in CONFIG.to_dict()
    config = ModelConfig.from_dict({**CONFIG.to_dict(), "marks": [1, 2]}, "x")
    assert config.marks is None and "marks" not in config.to_dict()
    assert copy.deepcopy(CONFIG).marks == (BEGIN, END)
