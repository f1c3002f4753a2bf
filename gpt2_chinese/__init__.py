"""The model, the corpus, the vocabulary and the run that every chapter shares. Knows no parallelism.

    from gpt2_chinese import Batches, GPT2LMHeadModel, Run, launch

Importing the package imports nothing else: a name's module is imported when the name is asked for, because a wrong flag must
be answered before torch is loaded. Modules of the package import each other by their full names, not from here.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_NAMES = {
    "settings": ("ParallelSettings", "Settings", "flag"),
    "run.resolve": ("resolve",),
    "distributed.torchrun": ("launch",),
    "distributed.ranks": ("Ranks",),
    "data.batches": ("Batches",),
    "model.config": ("ModelConfig",),
    "model.gpt2": ("GPT2LMHeadModel", "next_token_loss"),
    "model.recomputation": ("recompute",),
    "model.tiled_loss": ("tile_loss",),
    "vocabulary.vocabulary": ("Vocabulary",),
    "run.optim": ("adamw", "autocast", "clip_gradients", "grad_scaler", "learning_rate", "set_learning_rate",
                  "weight_decay_groups"),
    "run.run": ("Run",),
    "evaluate.loss": ("evaluate_model",),
    "checkpoint.find": ("PARTS",),
    "checkpoint.model_state": ("adamw_moments", "weights_of"),
    "checkpoint.trained_model": ("load_model",),
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names}
__all__ = ["__version__", *sorted(_HOMES)]  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    """A name of _NAMES, from its module. Not kept here: what a test puts in its place there is what everybody gets."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
