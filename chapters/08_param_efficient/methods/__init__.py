"""Parameter-efficient methods, each in one file, applied to a GPT-2 that does not know it.

All have one shape:

    freeze     requires_grad = False for every parameter of the base
    insert     replace a child module by a wrapper that holds it as `base_layer`
    train      the parameters that require grad; nothing else gets a gradient or an optimizer state
    export     a small file in PEFT's format, or a plain model into which the method was merged

Each file imports only from files above it:

    spec.py          which method, its numbers, what is refused (no torch)
    counts.py        which parameters each method trains, and how many (no torch)
    wrap.py          freeze, find layers, replace them
    lora.py          W + s B A                        dora.py      magnitude and direction
    ia3.py           rescaled activations             bitfit.py    the biases
    adapter.py       two small layers after attention and MLP (Houlsby)
    virtual.py       positions before the text        prompt.py    as embeddings     prefix.py  as keys and values
    apply.py         apply_method, trained_parameters, merge, unmerge, merged_weights
    peft_config.py   adapter_config.json (no torch)   peft_format.py   save_adapter, load_adapter

Usage:

    from methods.spec import MethodSpec
    from methods import apply_method, load_adapter, merged_weights, save_adapter, trained_parameters

    apply_method(model, MethodSpec("lora", rank=8))
    optimizer = AdamW(trained_parameters(model).values())
    ...
    save_adapter(folder, model, spec, base="runs/base/final")

Importing this package imports nothing else, so that `methods.spec` answers a wrong flag before torch is loaded.
"""

from importlib import import_module
from typing import Any

_NAMES = {
    "spec": ("METHODS", "MODULES", "MethodSpec"),
    "counts": ("trained_rows",),
    "apply": ("apply_method", "merge", "merged_weights", "trained_parameters", "unmerge"),
    "peft_format": ("load_adapter", "save_adapter"),
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names}
__all__ = sorted(_HOMES)  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    """A name of _NAMES, from its module."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
