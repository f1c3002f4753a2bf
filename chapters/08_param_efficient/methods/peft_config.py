"""A MethodSpec as the adapter_config.json of Hugging Face PEFT, and back. Imports no torch."""

from __future__ import annotations

import re
from typing import Any

from gpt2_chinese.errors import UserError
from gpt2_chinese.model.config import ModelConfig
from methods.spec import MODULES, SCALES_INPUT, MethodSpec, full_path

_TYPES = {"lora": "LORA", "dora": "LORA", "prefix": "PREFIX_TUNING", "prompt": "PROMPT_TUNING", "ia3": "IA3",
          "adapter": "ADAPTER", "bitfit": "BITFIT"}  # fmt: skip
# options of PEFT that this chapter lacks: refused unless absent, false or empty
_UNKNOWN = ("rank_pattern", "alpha_pattern", "layers_to_transform", "layer_replication", "modules_to_save",
            "exclude_modules", "target_parameters", "trainable_token_indices", "lora_bias", "alora_invocation_tokens",
            "prefix_projection", "use_qalora", "use_bdlora", "monteclora_config", "velora_config",
            "arrow_config")  # fmt: skip


def peft_config(spec: MethodSpec, config: ModelConfig) -> dict[str, Any]:
    """The content of adapter_config.json, as keyword arguments of PEFT's configuration, with peft_type and task_type."""
    if spec.method not in _TYPES:
        raise ValueError(f"--method {spec.method} trains the model itself: there is no adapter to save")
    common = {"peft_type": _TYPES[spec.method], "task_type": "CAUSAL_LM"}
    layers = {"target_modules": list(spec.targets), "fan_in_fan_out": True}  # Conv1D stores (in, out)
    if spec.method in ("lora", "dora"):
        alpha = int(spec.alpha) if spec.alpha == int(spec.alpha) else spec.alpha
        return {**common, **layers, "r": spec.rank, "lora_alpha": alpha, "lora_dropout": spec.dropout,
                "use_rslora": spec.rslora, "use_dora": spec.method == "dora", "bias": "none"}  # fmt: skip
    if spec.method == "ia3":
        return {**common, **layers, "feedforward_modules": [name for name in spec.targets if name in SCALES_INPUT]}
    if spec.method in ("prefix", "prompt"):
        return {**common, "num_virtual_tokens": spec.num_virtual_tokens, "token_dim": config.n_embd,
                "num_layers": config.n_layer, "num_attention_heads": config.n_head,
                "num_transformer_submodules": 1}  # fmt: skip
    return {**common, "bottleneck": spec.bottleneck} if spec.method == "adapter" else common


def spec_of(content: Any, source: str) -> MethodSpec:
    """The method that an adapter_config.json describes.

    Raises:
        UserError: a method or an option that this chapter lacks, or a value of the wrong type.
    """
    if not isinstance(content, dict) or "peft_type" not in content:
        raise UserError(f"{source} has no peft_type: give the adapter_config.json of an adapter")
    name = content["peft_type"]
    if name not in _TYPES.values():
        raise UserError(f"{source}: peft_type {name!r} is none of {', '.join(dict.fromkeys(_TYPES.values()))}")
    if unknown := [key for key in _UNKNOWN if content.get(key)]:
        raise UserError(f"{source}: {unknown[0]} is set, which this chapter lacks: train the adapter without it")
    if content.get("bias", "none") != "none":
        raise UserError(f"{source}: bias is {content['bias']!r}: only adapters that train no bias are read")
    number = {"num_virtual_tokens": content.get("num_virtual_tokens", 16)}
    if name == "LORA":
        return MethodSpec(
            "dora" if content.get("use_dora") else "lora", content.get("r", 8), content.get("lora_alpha", 8),
            content.get("lora_dropout", 0.0), _modules(content, source), bool(content.get("use_rslora")),
        )  # fmt: skip
    if name == "IA3":
        return _ia3(content, source)
    if name == "ADAPTER":
        return MethodSpec("adapter", bottleneck=content.get("bottleneck", 16))
    return MethodSpec({kind: method for method, kind in _TYPES.items()}[name], **number)


def _ia3(content: dict[str, Any], source: str) -> MethodSpec:
    spec = MethodSpec("ia3", modules=_modules(content, source))
    wanted = tuple(name for name in spec.targets if name in SCALES_INPUT)
    if _modules(content, source, "feedforward_modules") != wanted:
        raise UserError(f"{source}: feedforward_modules must be {', '.join(wanted) or 'empty'} for these target_modules")
    return spec


def _modules(content: dict[str, Any], source: str, key: str = "target_modules") -> tuple[str, ...]:
    """The MODULES that PEFT's list means: it has ends of names, or the full names in each block.

    c_proj means both attn.c_proj and mlp.c_proj. Names of only some blocks are refused later: tensors are missing.
    """
    targets = content.get(key) or []
    if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
        raise UserError(f"{source}: {key} must be a list of names, not the pattern {targets!r}")
    ends = {target: re.sub(r"^(transformer\.)?h\.\d+\.", "", target) for target in targets}
    found = {target: [name for name in MODULES if f".{full_path(name)}".endswith(f".{end}")] for target, end in ends.items()}
    if lost := [target for target, names in found.items() if not names]:
        raise UserError(f"{source}: {key} names {lost[0]!r}, no layer of a GPT-2 block: it has {', '.join(MODULES)}")
    return tuple(name for name in MODULES if any(name in names for names in found.values()))
