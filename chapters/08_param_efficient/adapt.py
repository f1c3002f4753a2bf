"""Adapts a model as the settings say: loads the base, quantises it, inserts a method; writes and reads the result.

    load_base(model, settings)                      the base's weights, in place
    model, trained = adapt(model, settings)         quantised, frozen, with the method's parameters
    final_writer(model, settings, ranks)            for Run.finish
    in_few_bits(optimizer, settings)                AdamW with 8-bit moments, where --optim asks for it
    load_adapted("runs/08_param_efficient/final")   base and adapter from the disk, for generate.py

final/ holds the adapter in PEFT's format, the vocabulary and run.json, which names the base. With --method full
it is a plain model, as in other chapters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from adamw8bit import AdamW8bit
from adapt_settings import folder_of
from methods import apply_method, load_adapter, merged_weights, save_adapter
from torch import Tensor, nn

from gpt2_chinese.checkpoint.final import export_final
from gpt2_chinese.checkpoint.find import read_json
from gpt2_chinese.checkpoint.model_state import check_finite, load_weights, weights_of
from gpt2_chinese.checkpoint.trained_model import load_model, read_weights
from gpt2_chinese.errors import UserError
from gpt2_chinese.model.gpt2 import GPT2LMHeadModel

if TYPE_CHECKING:
    from adapt_settings import Settings

    from gpt2_chinese.distributed.ranks import Ranks
    from gpt2_chinese.vocabulary.vocabulary import Vocabulary

CONFIG = "adapter_config.json"


def load_base(model: GPT2LMHeadModel, settings: Settings) -> None:
    """Copies the base's weights into a plain model; with random weights as base it does nothing."""
    if settings.base is not None:
        load_weights(model, read_weights(settings.base))


def in_few_bits(optimizer: torch.optim.AdamW, settings: Settings) -> torch.optim.Optimizer:
    """The same optimizer with its moments in 8 bits; with --optim adamw as it is. It must not have taken a step."""
    return AdamW8bit(optimizer.param_groups) if settings.optim == "adamw8bit" else optimizer


def decoded(optimizer: torch.optim.Optimizer) -> Any:
    """Has the state of torch.optim.AdamW, with moments in float32: what a checkpoint holds of either optimizer."""
    return SimpleNamespace(state=optimizer.decoded()) if isinstance(optimizer, AdamW8bit) else optimizer


def adapt(model: GPT2LMHeadModel, settings: Settings) -> tuple[nn.Module, Trained]:
    """Quantises the base if --bits is given, then freezes it and inserts the method.

    Args:
        model: a plain model with the base's weights; changed in place with --backend own.
        settings: has method, bits, backend and what `spec` reads.

    Returns:
        the model to train, called like a GPT2LMHeadModel, and its trained parameters.
    """
    if settings.bits is not None:
        quantise(model, settings.bits)
    torch.manual_seed(settings.seed)  # the first numbers of an adapter do not depend on what was drawn before
    if settings.backend == "peft":
        from peft_backend import PeftBackend  # late: it imports transformers

        model = PeftBackend(model, settings.spec)
    else:
        apply_method(model, settings.spec)
    return model, Trained(model)


def quantise(model: GPT2LMHeadModel, bits: int) -> None:
    """Keeps the blocks' weights in int8 or NF4, in place."""
    from quantize import quantize_model

    quantize_model(model, bits)


class Trained(nn.Module):
    """The trained parameters of a model under their names, for functions that save, load or optimize them.

    A checkpoint holds these and their moments, and nothing of the frozen base.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._parts = {name: p for name, p in model.named_parameters() if p.requires_grad}

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, nn.Parameter]]:
        yield from self._parts.items()

    def parameters(self, *_: Any, **__: Any) -> Iterator[nn.Parameter]:
        yield from self._parts.values()


def final_writer(model: nn.Module, settings: Settings, ranks: Ranks) -> Callable[[Path], None] | dict[str, Tensor]:
    """What Run.finish takes as weights: those of a plain model, or a function that writes the adapter.

    With --merge the function also writes merged/ next to final/.
    """
    if settings.method == "full":
        return weights_of(model)

    def write(path: Path) -> None:
        if not ranks.is_main:
            return
        own = model.own_model() if settings.backend == "peft" else model
        check_finite({name: p for name, p in own.named_parameters() if p.requires_grad})
        save_adapter(path.parent, own, settings.spec, str(folder_of(settings.base).resolve()))
        if settings.merge:
            about = {"base": str(settings.base), "method": settings.method, "step": settings.max_steps}
            weights = merged_weights(own)
            export_final(path.parents[1] / "merged", settings.model, weights, settings.vocab, about, settings.vocab_profile)

    return write


def load_adapted(
    folder: Path | str, device: torch.device | str = "cpu", vocab: str | None = None, base: str | None = None
) -> tuple[GPT2LMHeadModel, Vocabulary]:
    """A base with its adapter, in evaluation mode, and the vocabulary; also a plain model, as `load_model`.

    Args:
        folder: final/ of a run of this chapter, the run's folder, an adapter that PEFT saved, or a plain model.
        device, vocab: as in `load_model`.
        base: the base's folder, if the adapter's configuration names none on this machine.

    Raises:
        UserError: no adapter, no base, or the adapter of another model.
    """
    folder = Path(folder)
    if not (folder / CONFIG).is_file() and (folder / "final").is_dir():
        folder = folder / "final"
    if not (folder / CONFIG).is_file():
        return load_model(folder, device, vocab)
    about = read_json(folder / "run.json") if (folder / "run.json").is_file() else {}
    base = base or read_json(folder / CONFIG).get("base_model_name_or_path")
    if not base or not Path(base).exists():
        raise UserError(f"the base of the adapter {folder} is not there ({base}): name its folder with --base")
    model, vocabulary = load_model(base, "cpu", vocab)
    if about.get("bits"):
        quantise(model, about["bits"])
    load_adapter(folder, model)
    return model.to(device).eval(), vocabulary
