"""Continues rows of ids token by token, for the generate command, the samples of a run and the tests.

Beyond the model's context there are no positions, so a row drops its beginning. A row that would outgrow the context
continues from its last half, and grows again. The ids that a model sees depend on the length of the row alone. So the cache
is built anew once every n_positions / 2 tokens, and decoding without a cache sees the same ids. A window that slid by one
id a token would change every absolute position each time, and no keys and values could be cached.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from gpt2_chinese.errors import UserError
from gpt2_chinese.generate.kv_cache import Cached, Plain
from gpt2_chinese.generate.sampling import Sampling, generator_of

OnToken = Callable[[int, int], None]


def window_start(length: int, context: int) -> int:
    """Number of first ids that a row of `length` ids has dropped, so that at most `context` are left.

    With a context of 4: length 4 -> 0, 5 -> 2, 6 -> 2, 7 -> 4: the window has 4, 3, 4, 3 ids.
    """
    hop = context - context // 2
    return max(0, -(-(length - context) // hop)) * hop


def ids_in(rows: Sequence[Sequence[int]], like: torch.Tensor) -> torch.Tensor:
    """(rows, V) bool: which ids each row contains. The shape and the device are those of `like`."""
    seen = torch.zeros_like(like, dtype=torch.bool)
    for row, ids in zip(seen, rows, strict=True):
        row[torch.tensor(ids, device=like.device)] = True
    return seen


def device_of(model: Any) -> torch.device:
    """The device of a module's parameters; the CPU for anything else."""
    parameter = next(model.parameters(), None) if isinstance(model, torch.nn.Module) else None
    return torch.device("cpu") if parameter is None else parameter.device


@torch.no_grad()
def generate(
    model: Callable[[torch.Tensor], torch.Tensor] | Any,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    sampling: Sampling,
    generators: Sequence[torch.Generator] | None = None,
    end_id: int | None = None,
    forbidden: tuple[int, ...] = (),
    cache: bool = True,
    on_token: OnToken | None = None,
) -> list[list[int]]:
    """Continues every prompt; the result does not depend on the rest of the batch, up to the last bits of fp32.

    Args:
        model: a GPT2LMHeadModel in evaluation mode; without the cache any callable from ids (B, T) to logits (B, T, V).
        prompts: rows of at least one id, of any lengths.
        max_new_tokens: how many ids to add at most.
        sampling: how each id is chosen.
        generators: the random generator of each row, on the CPU; for None those of seed 0. Sampling changes their state.
        end_id: a row ends before this id.
        forbidden: ids never chosen.
        cache: use a cache of keys and values; the ids are the same without it.
        on_token: called with (row, id) for each id as soon as it is chosen.

    Returns:
        the new ids of each row, without end_id; a row that has ended has fewer than max_new_tokens.

    Raises:
        UserError: logits that are not finite.
    """
    device = device_of(model)
    rows = [list(prompt) for prompt in prompts]
    generators = generators or [generator_of(0, i, 0) for i in range(len(rows))]
    longest = max(map(len, rows)) + max_new_tokens
    context = getattr(getattr(model, "config", None), "n_positions", longest)
    logits_after = Cached(model, longest) if cache else Plain(model, device)
    going = list(range(len(rows)))
    seen: torch.Tensor | None = None  # (rows that have not ended, V) bool
    for _ in range(max_new_tokens):
        logits = logits_after([rows[i][window_start(len(rows[i]), context) :] for i in going])
        if not logits.isfinite().all():
            raise UserError("the model gives numbers that are not finite: its weights are damaged, or its training diverged")
        if seen is None:
            seen = ids_in(rows, logits)
        chosen = sampling.choose(logits, seen, forbidden, [generators[i] for i in going])
        seen[torch.arange(len(going), device=device), chosen] = True
        kept = []
        for place, (i, token) in enumerate(zip(going, chosen.tolist(), strict=True)):
            if token == end_id:
                continue
            rows[i].append(token)
            kept.append(place)
            if on_token:
                on_token(i, token)
        if not kept:
            break
        if len(kept) < len(going):
            logits_after.keep(kept)
            going, seen = [going[place] for place in kept], seen[torch.tensor(kept, device=device)]
    return [row[len(prompt) :] for row, prompt in zip(rows, prompts, strict=True)]
