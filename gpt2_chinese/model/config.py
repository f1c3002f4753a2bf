"""The hyper-parameters of a GPT-2, as a Hugging Face `config.json` holds them, and the presets with their run defaults.

This file does not import torch: a wrong configuration is reported before torch is loaded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from gpt2_chinese.errors import UserError
from gpt2_chinese.files import kind, read_json


@dataclass
class ModelConfig:
    """A GPT-2. Field names are Hugging Face's, so that transformers and this project read each other's `config.json`."""

    n_layer: int = 4
    n_embd: int = 128
    n_head: int = 4
    n_positions: int = 128
    vocab_size: int | None = None  # None: not fixed, follows the vocabulary
    n_inner: int | None = None  # None: 4 * n_embd
    resid_pdrop: float = 0.0
    embd_pdrop: float = 0.0
    attn_pdrop: float = 0.0
    layer_norm_epsilon: float = 1e-5
    initializer_range: float = 0.02
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    pad_token_id: int | None = None
    extra: dict[str, Any] = field(default_factory=dict)  # keys we do not use, kept for the round trip
    # ids of the marks before and after a document, where attention must not cross them (--documents): of a run, in no file
    marks: tuple[int, int] | None = None

    @property
    def inner(self) -> int:
        """Width of the hidden layer of the MLP."""
        return self.n_inner or 4 * self.n_embd

    def num_parameters(self) -> int:
        """Number of parameters, the tied head counted once."""
        width, inner = self.n_embd, self.inner
        attention = width * 3 * width + 3 * width + width * width + width
        mlp = width * inner + inner + inner * width + width
        block = 4 * width + attention + mlp
        return (self.vocab_size or 0) * width + self.n_positions * width + self.n_layer * block + 2 * width

    def to_dict(self) -> dict[str, Any]:
        """The content of a `config.json` that `transformers.GPT2LMHeadModel.from_pretrained` reads."""
        own = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in _NO_KEYS}
        fixed = {
            "architectures": ["GPT2LMHeadModel"],
            "model_type": "gpt2",
            "activation_function": "gelu_new",
            "n_ctx": self.n_positions,
            "tie_word_embeddings": True,
        }
        return {**fixed, **self.extra, **own}

    @classmethod
    def from_dict(cls, content: Any, source: str) -> ModelConfig:
        """Reads what `to_dict` or transformers wrote; `source` names the origin in errors.

        Raises:
            UserError: a value of the wrong type or range, or a variant of GPT-2 that this model lacks.
        """
        if not isinstance(content, dict):
            raise UserError(f"{source} is not a JSON object: give a GPT-2 config.json")
        content = {key: value for key, value in content.items() if key not in _NO_KEYS}
        if "n_ctx" in content and "n_positions" not in content:
            content["n_positions"] = content["n_ctx"]
        for key, (allowed, default) in _FIXED.items():
            value = content.get(key, default)
            if value not in allowed:
                raise UserError(f"{source}: {key} is {_short(value)}, this model has only {_one_of(allowed)}")
        for key in ("architectures", "n_ctx"):
            content.pop(key, None)
        known = {f.name for f in fields(cls)} - _NO_KEYS
        if missing := [name for name in ("n_layer", "n_embd", "n_head", "n_positions") if name not in content]:
            raise UserError(f"{source} lacks {', '.join(missing)}: give a GPT-2 config.json")
        config = cls(**{key: value for key, value in content.items() if key in known})
        config.extra = {key: value for key, value in content.items() if key not in known}
        config.check(source)
        return config

    @classmethod
    def from_file(cls, path: Path) -> ModelConfig:
        """Reads a `config.json`, or the one in a folder. Raises UserError as `from_dict`."""
        if kind(path, f"the model configuration {path}") == "folder":
            path = path / "config.json"
        return cls.from_dict(read_json(path, f"the model configuration {path}"), str(path))

    def check(self, source: str) -> None:
        """Raises UserError for values that no GPT-2 can have."""
        for name in ("n_layer", "n_embd", "n_head", "n_positions", "vocab_size", "n_inner"):
            value = getattr(self, name)
            optional = name in ("vocab_size", "n_inner")
            if optional and value is None:
                continue
            if type(value) is not int or value < 1:
                raise UserError(f"{source}: {name} must be a whole number of at least 1, not {_short(value)}")
            if value > _MOST[name]:
                raise UserError(f"{source}: {name} {_short(value)} is above {_MOST[name]:,}, which no GPT-2 has")
        for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
                raise UserError(f"{source}: {name} must be at least 0 and below 1, not {_short(value)}")
        for name in ("layer_norm_epsilon", "initializer_range"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e6:  # nor NaN
                raise UserError(f"{source}: {name} must be a positive number, not {_short(value)}")
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            value = getattr(self, name)
            if value is not None and type(value) is not int:
                raise UserError(f"{source}: {name} must be a whole number or null, not {_short(value)}")
        if self.n_embd % self.n_head:
            raise UserError(f"{source}: n_embd {self.n_embd} is not divisible by n_head {self.n_head}")


_NO_KEYS = {"extra", "marks"}  # fields that no config.json holds

# keys for variants of GPT-2 that this model lacks: (allowed values, value where the key is absent)
_FIXED: dict[str, tuple[tuple[Any, ...], Any]] = {
    "model_type": (("gpt2",), "gpt2"),
    "activation_function": (("gelu_new", "gelu_pytorch_tanh"), "gelu_new"),
    "tie_word_embeddings": ((True,), True),
    "scale_attn_weights": ((True,), True),
    "scale_attn_by_inverse_layer_idx": ((False,), False),
    "add_cross_attention": ((False,), False),
    "is_encoder_decoder": ((False,), False),
    "pruned_heads": (({}, None), {}),
    "quantization_config": ((None,), None),
}

# larger values are mistakes: building such a model would take hours, or fill the memory
_MOST = {"n_layer": 1000, "n_embd": 1 << 17, "n_head": 1 << 17, "n_positions": 1 << 24, "vocab_size": 1 << 24,
         "n_inner": 1 << 20}  # fmt: skip


def _short(value: Any) -> str:
    """A value for an error message: on one line, cut to 60 characters."""
    if isinstance(value, int) and abs(value) >= 10**50:
        return "a number of more than 50 digits"  # Python refuses to print those of more than 4300
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


def _one_of(values: tuple[Any, ...]) -> str:
    return " or ".join(repr(value) for value in values)


@dataclass(frozen=True)
class RunDefaults:
    """Settings that depend on the size of the model, used where the user gives none."""

    seq_len: int
    batch_size: int
    lr: float
    warmup_steps: int
    max_steps: int
    eval_every: int
    save_every: int
    weight_decay: float = 0.1
    clip_grad_norm: float = 1.0
    log_every: int = 1


class Presets(Mapping[str, ModelConfig]):
    """Models by name. Each look-up returns a copy, so that setting its vocabulary changes no other model of the process."""

    def __init__(self, models: dict[str, ModelConfig]) -> None:
        self._models = models

    def __getitem__(self, name: str) -> ModelConfig:
        return deepcopy(self._models[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._models)

    def __len__(self) -> int:
        return len(self._models)


PRESETS = Presets({
    "tiny": ModelConfig(n_layer=4, n_embd=128, n_head=4, n_positions=128),
    "small": ModelConfig(n_layer=12, n_embd=768, n_head=12, n_positions=1024),
    "medium": ModelConfig(n_layer=24, n_embd=1024, n_head=16, n_positions=1024),
    "large": ModelConfig(n_layer=36, n_embd=1280, n_head=20, n_positions=1024),
    "xl": ModelConfig(n_layer=48, n_embd=1600, n_head=25, n_positions=1024),
})  # fmt: skip

# 24 divides by 1, 2, 3, 4, 6 and 8 processes; 800 steps of tiny take under four minutes on two cores
RUN_DEFAULTS: dict[str, RunDefaults] = {
    "tiny": RunDefaults(128, 24, 3e-3, 50, 800, 200, 200),
    "small": RunDefaults(512, 16, 6e-4, 500, 10_000, 500, 500),
    "medium": RunDefaults(512, 16, 3e-4, 500, 10_000, 500, 500),
    "large": RunDefaults(512, 16, 2.5e-4, 500, 10_000, 500, 500),
    "xl": RunDefaults(512, 16, 2e-4, 500, 10_000, 500, 500),
}


def resolve_model_config(name_or_path: str) -> tuple[ModelConfig, RunDefaults]:
    """The model that --model-config names, and its run defaults.

    A `config.json` gets the run defaults of the largest preset that is not wider than its model.

    Raises:
        UserError: neither a preset nor a readable GPT-2 `config.json`.
    """
    if name_or_path in PRESETS:
        content = {key: value for key, value in PRESETS[name_or_path].to_dict().items() if value is not None}
        return ModelConfig.from_dict(content, name_or_path), RUN_DEFAULTS[name_or_path]
    path = Path(name_or_path)
    if kind(path, f"--model-config {name_or_path}") == "missing":
        raise UserError(f"--model-config {name_or_path}: no such file, and not one of the presets {', '.join(PRESETS)}")
    config = ModelConfig.from_file(path)
    narrower = [name for name, preset in PRESETS.items() if preset.n_embd <= config.n_embd] or ["tiny"]
    return config, RUN_DEFAULTS[narrower[-1]]
