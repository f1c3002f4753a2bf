"""The two engines of this chapter: own_engine.py with chunks.py, or pstar, the engine for production.

The loop of train.py is the same for both. This file holds the differences: how to make them, and how to save their state.
With chunks.py the only process writes the whole state; with pstar each rank writes its part.
"""

from __future__ import annotations

from typing import Any

from own_engine import ChunkedAdamW, ChunkedModel
from recompute import build_model

import pstar
from gpt2_chinese import PARTS, Ranks, Run, weight_decay_groups


def into_chunks(settings: Any, ranks: Ranks) -> tuple[Any, Any]:
    """(model, optimizer): builds the model of `settings` and moves its weights, gradients and moments into chunks."""
    if settings.backend == "own":
        module = build_model(settings)
        model = ChunkedModel(module, settings.chunk_elems, settings.near_bytes, ranks.device, settings.grad_accum)
        groups = weight_decay_groups(module, settings.weight_decay)
        return model, ChunkedAdamW(model, groups, settings.lr, settings.clip_grad_norm)
    return pstar.initialize_engine(
        lambda: build_model(settings), ranks.local_rank, settings.engine_config(), device=ranks.device, group=ranks.group,
        param_groups=lambda module: weight_decay_groups(module, settings.weight_decay),
    )  # fmt: skip


def resume(model: Any, run: Run) -> None:
    """Loads the run's checkpoint, of either engine or of another chapter. Without a checkpoint it does nothing."""
    if isinstance(model, ChunkedModel):
        run.resume_parts(model.data.load_state)
    elif run.resume_from is not None and (run.resume_from / PARTS / "manifest.json").exists():  # pstar's own
        model.load_checkpoint(run.resume_from / PARTS, verify=False)  # resolve has; each rank reads its own part
    else:
        run.resume_parts(model.load_state)


def save(model: Any, run: Run, step: int) -> None:
    """Writes the checkpoint of a step."""
    if isinstance(model, ChunkedModel):
        run.save(step, *model.data.gather_state())
    else:
        run.save_by(step, model.save_checkpoint, model.copy_checkpoint)


def finish(model: Any, run: Run) -> None:
    """Writes final/ and prints the closing summary."""
    weights = model.data.gather_state()[0] if isinstance(model, ChunkedModel) else model.export_weights
    run.finish(weights, table=model.memory_table())
