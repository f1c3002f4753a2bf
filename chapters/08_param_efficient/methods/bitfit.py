"""BitFit (Ben Zaken et al. 2022, section 3): train the biases, those of layer norms too, and nothing else.

Nothing is inserted, so there is nothing to merge: the trained model is a plain GPT-2.
"""

from __future__ import annotations

from torch import nn

from methods.spec import MethodSpec


def insert(model: nn.Module, spec: MethodSpec) -> None:
    """Every bias of the model requires grad again: of four Conv1D and two layer norms a block, and of ln_f."""
    for name, parameter in model.named_parameters():
        if name.endswith(".bias"):
            parameter.requires_grad = True
