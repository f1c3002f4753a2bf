"""The parts of NVIDIA Apex that remain in 2026: FusedAdam and FusedLayerNorm. Each replaces many kernels by one.

NVIDIA removed apex.amp and apex.parallel in May 2025; amp.py shows how apex.amp worked. The package `apex` on the package
index is another project. NVIDIA ships Apex only in its containers and in its repository.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

WHERE = "NVIDIA's containers have it, and its repository on GitHub (NVIDIA/apex) says how to build it"


def why_not(device: str = "auto") -> str | None:
    """The reason why Apex cannot be used on this machine, or None. Imports neither Apex nor torch."""
    spec = importlib.util.find_spec("apex")
    if spec is None:
        return f"NVIDIA Apex is not installed; {WHERE}"
    folders = [Path(place) for place in spec.submodule_search_locations or ()]
    if not any((folder / "optimizers" / "fused_adam.py").exists() for folder in folders):
        return f"the package apex that is installed here is another project, not NVIDIA's; {WHERE}"
    if importlib.util.find_spec("amp_C") is None:
        return f"NVIDIA Apex is installed without its CUDA extensions; {WHERE}"
    return "Apex's kernels need a GPU, leave out --device cpu" if device == "cpu" else None


def fused_adam(masters: Any, settings: Any) -> Any:
    """FusedAdam with the groups and hyperparameters of the AdamW that all chapters use.

    FusedAdam counts steps per group, checkpoints per parameter: two hooks around its step translate.
    """
    from apex.optimizers import FusedAdam

    from gpt2_chinese.run.optim import weight_decay_groups

    groups = weight_decay_groups(masters, settings.weight_decay)
    optimizer = FusedAdam(groups, lr=settings.lr, betas=(0.9, 0.95), eps=1e-8, adam_w_mode=True)

    def count_in(opt: Any, *_: Any) -> None:
        for group in opt.param_groups:
            steps = [int(opt.state[p]["step"]) for p in group["params"] if "step" in opt.state.get(p, {})]
            if steps:
                group["step"] = steps[0]

    def count_out(opt: Any, *_: Any) -> None:
        for group in opt.param_groups:
            for parameter in group["params"]:
                if parameter in opt.state:
                    opt.state[parameter]["step"] = float(group["step"])

    optimizer.register_step_pre_hook(count_in)
    optimizer.register_step_post_hook(count_out)
    return optimizer


def fuse_norms(model: Any) -> None:
    """Replaces every LayerNorm by FusedLayerNorm, with the same weights."""
    from apex.normalization import FusedLayerNorm
    from torch import nn

    for parent in list(model.modules()):
        for name, norm in list(parent.named_children()):
            if type(norm) is nn.LayerNorm:
                fused = FusedLayerNorm(norm.normalized_shape, eps=norm.eps)
                fused.weight, fused.bias = norm.weight, norm.bias
                setattr(parent, name, fused)
