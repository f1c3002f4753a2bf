"""Prints the header of a run: the model, the corpus, the batch, the steps, one row each."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from gpt2_chinese.files import display

if TYPE_CHECKING:
    from gpt2_chinese.distributed.ranks import Ranks
    from gpt2_chinese.settings import Settings

Rows = list[tuple[str, Any]]


def print_header(settings: Settings, ranks: Ranks, more: Rows) -> None:
    """Prints the header of a run; `more` are rows to add at the end."""
    model = settings.model
    tokens, valid = settings.train_tokens, settings.valid_tokens
    per_step = settings.batch_size * settings.seq_len
    each = settings.batch_size // (settings.num_replicas * settings.grad_accum)
    shape = f"{model.n_layer} layers, {model.n_embd} wide, {model.n_head} heads, context {model.n_positions}"
    unknown = f"{tokens.unknown_rate:.2%} in training, {valid.unknown_rate:.2%} in validation"
    parts = _count(settings.num_replicas, "rank" if settings.num_replicas == ranks.num_ranks else "replica")
    split = f"{parts} x {_count(settings.grad_accum, 'micro-batch')} x {each}"
    passes = settings.max_steps * per_step / len(tokens)
    schedule = f"peak lr {settings.lr:g} after {settings.warmup_steps} steps of warm-up"
    comment = [("comment", " ".join(settings.comment.split()))] if settings.comment else []
    rows: Rows = [
        *comment,
        ("model", f"{_name(settings.model_config)}: {shape}, {model.num_parameters():,} parameters"),
        ("corpus", f"{len(tokens):,} tokens to train on, {len(valid):,} to evaluate on"),
        (
            "vocabulary",
            f"{settings.vocab_size:,} entries, ln = {math.log(settings.vocab_size):.2f}; unknown {unknown}",
        ),
        (
            "layout",
            f"{settings.vocabulary.layout} (profile {settings.vocab_profile}), "
            f"{tokens.characters_per_token:.2f} characters per token",
        ),
        *_data_rows(settings),
        ("batch", f"{settings.batch_size} sequences of {settings.seq_len} tokens a step = {split}"),
        ("steps", f"{settings.max_steps}, {passes:.1f} passes over the corpus; {schedule}"),
        (
            "computing",
            f"{settings.precision} on {settings.device}, {_count(torch.get_num_threads(), 'thread')} per rank",
        ),
        *more,
    ]
    print(f"{settings.chapter}")
    print_rows(rows)
    if tokens.unknown_rate > 0.01:
        print("  warning: over 1 % of the tokens are unknown; cache/make_vocab.sh makes a vocabulary")
    print(flush=True)


def _data_rows(settings: Settings) -> Rows:
    """Rows for documents and sources, where they are not the default."""
    found: Rows = []
    mix = settings.train_rows if hasattr(settings.train_rows, "shares") else None
    if settings.documents == "mask":
        found.append(("documents", "attention and positions end with a document"))
    elif settings.documents == "pack":
        packed = [settings.train_rows] if mix is None else mix.rows
        cut, whole = (sum(getattr(rows, name) for rows in packed) for name in ("num_cut", "num_documents"))
        padding = 1 - sum(rows.num_ids for rows in packed) / (sum(map(len, packed)) * settings.seq_len)
        what = f"{whole:,} in {sum(map(len, packed)):,} windows, {padding:.2%} of them padding; {cut:,} longer than a window"
        found.append(("documents", f"{what}; attention and positions end with a document"))
    if mix is not None:
        passes = mix.epochs(settings.seed, settings.max_steps * settings.batch_size)
        shares = zip(mix.names, mix.shares, strict=True)
        found.append(("sources", ", ".join(f"{name} {share:.1%} ({passes[name]:.1f} epochs)" for name, share in shares)))
    return found


def print_rows(rows: Rows) -> None:
    """Prints (name, value) rows in two columns."""
    width = max(len(str(name)) for name, _ in rows)
    for name, value in rows:
        print(f"  {name!s:<{width}}  {value}")


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}{'es' if what.endswith('h') else 's'}"


def _name(model_config: str) -> str:
    return model_config if not os.path.exists(model_config) else str(display(Path(model_config)))
