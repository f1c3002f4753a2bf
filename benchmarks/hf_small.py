"""Makes a model of any architecture of Transformers small: the values of its configuration that decide its size."""

from __future__ import annotations

import contextlib
from typing import Any


def each(value: object, names: str) -> dict[str, object]:
    """{name: value}: the library calls the same thing by several names."""
    return dict.fromkeys(names.split(), value)


BASIC = (
    each(97, "vocab_size decoder_vocab_size vocab_size_per_layer_input") | each(2, "type_vocab_size")
    | {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "num_labels": 5}
    | each(64, "max_position_embeddings n_positions n_ctx max_source_positions max_target_positions")
    | each(2, "num_hidden_layers num_layers n_layer n_layers")
    | each(2, "encoder_layers decoder_layers num_encoder_layers num_decoder_layers")
    | each(0.0, "mask_time_prob")
)  # fmt: skip
WIDTHS = (
    each(32, "hidden_size d_model n_embd dim embed_dim embedding_size hidden_dim word_embed_proj_dim")
    | each(32, "lru_width attention_hidden_size image_size")
    | each(48, "intermediate_size ffn_dim d_ff n_inner encoder_ffn_dim decoder_ffn_dim ffn_hidden_size")
    | each(16, "moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size projection_dim")
    | each(4, "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads")
    | each(2, "num_key_value_heads num_kv_heads n_head_kv multi_query_group_num linear_num_key_heads linear_num_value_heads")
    | each(8, "head_dim d_kv qk_rope_head_dim qk_nope_head_dim v_head_dim linear_key_head_dim linear_value_head_dim")
    | each(16, "qk_head_dim q_lora_rank kv_lora_rank o_lora_rank") | each(4, "rotary_dim adapter_rank")
    | each(4, "num_experts num_local_experts n_routed_experts moe_num_experts")
    | each(2, "num_experts_per_tok num_experts_per_token moe_topk") | each(1, "n_group topk_group first_k_dense_replace")
    | each(4, "state_size ssm_state_size mamba_d_state mamba_n_heads") | each(16, "mamba_d_head") | each(2, "mamba_expand")
    | each(8, "mamba_num_heads mamba_head_dim hidden_size_per_layer_input") | each(1, "expand n_groups")
    | each(8, "sliding_window attention_window patch_size") | each(0, "num_kv_shared_layers")
    | each(16, "num_mel_bins num_conv_pos_embeddings") | each(4, "num_conv_pos_embedding_groups")
    | each((16, 16), "conv_dim") | each((5, 2), "conv_stride conv_kernel") | each(2, "num_feat_extract_layers")
)  # fmt: skip

TRIED: tuple[dict[str, Any], ...] = (
    WIDTHS,
    WIDTHS | {"num_key_value_heads": 4},
    {name: value for name, value in WIDTHS.items() if "head_dim" not in name} | {"num_key_value_heads": 4},
    {},
)
"""Widths to try in turn: those that fit one architecture contradict the other values of another."""

OFTEN_NONE = ("head_dim", "pad_token_id", "decoder_start_token_id", "num_key_value_heads", "num_experts_per_tok",
              "q_lora_rank")  # fmt: skip
"""Values that are set although the configuration has none by default."""

NOT_SET = (AttributeError, NotImplementedError, TypeError, ValueError)
"""What a configuration raises for a value that follows from others, or differs by layer."""

LAYER_KINDS = ("layer_types", "mlp_layer_types", "layers_block_type", "attention_layers")


def shrink(config: Any, widths: dict[str, Any]) -> None:
    """Sets those of BASIC and widths that a configuration has, and of the configurations inside it."""
    for part in list(vars(config).values()):
        if hasattr(part, "model_type") and hasattr(part, "to_dict"):
            shrink(part, widths)
    for name, value in (BASIC | widths).items():
        with contextlib.suppress(*NOT_SET):
            old = getattr(config, name, False)
            like = isinstance(old, list | tuple) if isinstance(value, tuple) else type(old) in (int, float)
            if like or (old is None and name in OFTEN_NONE):
                setattr(config, name, value)
    for name in LAYER_KINDS:
        with contextlib.suppress(*NOT_SET):
            if kinds := getattr(config, name, None):
                different = list(dict.fromkeys(kinds))
                config.num_hidden_layers = max(config.num_hidden_layers, min(len(different), 3))
                setattr(config, name, (different * config.num_hidden_layers)[: config.num_hidden_layers])
    if "rope_type" in (rope := getattr(config, "rope_parameters", None) or {}):
        rope["mrope_section"] = [2, 1, 1]    # of half a head: time, height and width of a picture's part
    for name in ("use_cache", "apply_spec_augment"):    # the second draws from NumPy, which the comparison does not seed
        with contextlib.suppress(*NOT_SET):
            setattr(config, name, False)
