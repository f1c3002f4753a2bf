"""`--backend peft`: the same base weights in Hugging Face's GPT-2, adapted by Hugging Face PEFT.

    model = PeftBackend(model, spec)         instead of        apply_method(model, spec)
    loss = model(inputs, targets)                              loss = model(inputs, targets)

The adapter begins with the numbers that `apply_method` draws, and later random numbers are the same too, so that both
backends follow one curve. `own_model()` copies the trained adapter into a model of this project, to save, merge or sample.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import torch
from methods.apply import apply_method
from methods.peft_config import peft_config
from methods.peft_format import adapter_tensors, set_adapter_tensors
from methods.spec import PEFT_METHODS, MethodSpec
from methods.wrap import plain_name
from torch import Tensor, nn

from gpt2_chinese.checkpoint.huggingface import shapes_of
from gpt2_chinese.errors import UserError
from gpt2_chinese.model.config import ModelConfig
from gpt2_chinese.model.gpt2 import GPT2LMHeadModel

if TYPE_CHECKING:
    from peft import PeftConfig


def check_backend(spec: MethodSpec) -> None:
    """Raises UserError for a method that PEFT lacks, or where PEFT or transformers is not installed."""
    if spec.method not in PEFT_METHODS:
        known = ", ".join(PEFT_METHODS)
        raise UserError(f"--backend peft has no --method {spec.method}: give one of {known}, or --backend own")
    try:
        import peft  # noqa: F401
        import transformers  # noqa: F401
    except ImportError as error:
        raise UserError(f"--backend peft needs {error.name}: pip install peft transformers, or use --backend own") from None


class PeftBackend(nn.Module):
    """A PEFT model with the interface of GPT2LMHeadModel.

    Args:
        model: plain, its Conv1D layers not quantised; not changed.
        spec: the method and its numbers.

    Raises:
        UserError: a method that PEFT lacks, PEFT is not installed, or numbers that do not fit the model.
    """

    def __init__(self, model: GPT2LMHeadModel, spec: MethodSpec) -> None:
        super().__init__()
        check_backend(spec)
        from peft import get_peft_model, set_peft_model_state_dict
        from transformers import GPT2Config
        from transformers import GPT2LMHeadModel as HuggingFaceModel

        own = copy.deepcopy(model)
        apply_method(own, spec)
        with torch.random.fork_rng(devices=[]):  # what transformers and PEFT draw is overwritten
            hugging_face = HuggingFaceModel(GPT2Config(**{**model.config.to_dict(), "use_cache": False}))
            hugging_face.load_state_dict(model.state_dict())
            self.peft = get_peft_model(hugging_face, library_config(spec, model.config))
        set_peft_model_state_dict(self.peft, adapter_tensors(own))
        self.to(model.transformer.wte.weight.device)
        self.base_config, self.config = model.config, own.config
        self.method_spec = spec
        self.loss = model.loss

    def forward(self, input_ids: Tensor, targets: Tensor | None = None) -> Tensor:
        """Logits (B, T, V) of ids (B, T), or the mean cross-entropy with targets (B, T), a float32 scalar."""
        logits = self.peft(input_ids=input_ids).logits
        logits = logits[:, -input_ids.shape[1] :]  # a prompt's positions come first
        return logits if targets is None else self.loss(logits, targets)

    def own_model(self) -> GPT2LMHeadModel:
        """A new model of this project with the method applied and PEFT's present weights."""
        from peft import get_peft_model_state_dict

        weights = {plain_name(name): tensor for name, tensor in self.peft.get_base_model().state_dict().items()}
        with torch.random.fork_rng(devices=[]):
            model = GPT2LMHeadModel(self.base_config)
            model.load_state_dict({name: weights[name] for name in shapes_of(self.base_config)}, strict=False)
            apply_method(model, self.method_spec)
        set_adapter_tensors(model, get_peft_model_state_dict(self.peft))
        return model.to(weights["transformer.wte.weight"].device)


def library_config(spec: MethodSpec, config: ModelConfig) -> PeftConfig:
    """PEFT's configuration object of a method."""
    from peft import IA3Config, LoraConfig, PrefixTuningConfig, PromptTuningConfig

    kinds = {"lora": LoraConfig, "dora": LoraConfig, "ia3": IA3Config, "prefix": PrefixTuningConfig,
             "prompt": PromptTuningConfig}  # fmt: skip
    content = peft_config(spec, config)
    del content["peft_type"]  # PEFT's classes set it
    return kinds[spec.method](**content)
