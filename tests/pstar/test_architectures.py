"""Every causal language model of transformers that these sizes describe: plain PyTorch's bits, in the least near memory."""

from __future__ import annotations

import inspect
import random
import warnings

import numpy
import pytest
import torch
from torch import nn

from tests import toy

pytest.importorskip("transformers")

STEPS, PARTS, LARGEST = 3, 8, 3_000_000
LEAST_TRAINED = 12    # of 24 in a part; the others need sizes that fit together in another way, or another library
NAMES = {
    32: "hidden_size d_model n_embd embedding_size lru_width attention_hidden_size",
    64: "intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim d_ff n_inner max_position_embeddings n_positions n_ctx "
        "max_seq_len",
    97: "vocab_size vocab_size_per_layer_input",
    2: "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_key_value_heads num_kv_heads "
       "num_experts_per_tok top_k_experts expand mamba_expand n_groups linear_num_key_heads eos_token_id",
    4: "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads num_experts "
       "num_local_experts n_routed_experts mamba_n_heads qk_rope_head_dim qk_nope_head_dim rotary_dim time_step_rank "
       "linear_num_value_heads chunk_size",
    8: "head_dim d_kv state_size mamba_d_state kv_lora_rank v_head_dim sliding_window hidden_size_per_layer_input "
       "attention_window_size linear_key_head_dim linear_value_head_dim",
    16: "moe_intermediate_size shared_expert_intermediate_size mamba_d_head q_lora_rank",
    1: "mamba_n_groups n_group topk_group n_shared_experts first_k_dense_replace bos_token_id",
    0: "pad_token_id",
}
SIZES = {"is_decoder": True, "use_cache": False} | {name: size for size, names in NAMES.items() for name in names.split()}


def model_func(name: str):
    """Makes a small model of this type; None if transformers refuses the sizes, or the model is not small."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    kind = CONFIG_MAPPING[name]
    known = {*inspect.signature(kind.__init__).parameters, *getattr(kind, "__dataclass_fields__", {}), *kind.attribute_map}

    def make() -> nn.Module:
        return AutoModelForCausalLM.from_config(config)

    try:
        config = kind(**{key: size for key, size in SIZES.items() if key in known})
        with torch.device("meta"):
            if sum(param.numel() for param in make().parameters()) > LARGEST:
                return None
        loss_of(make().train(), 0).backward()
    except Exception:    # of transformers, without the engine
        return None
    return make


def loss_of(model, step: int) -> torch.Tensor:
    for seed in (random.seed, numpy.random.seed, torch.manual_seed):
        seed(step)
    ids = torch.randint(3, 97, (2, 8))
    return model(input_ids=ids, labels=ids)["loss"]


def names_of(part: int) -> list[str]:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)[part::PARTS]


def train_part(part: int) -> None:
    """Trains all models of a part, on several ranks with rows of its own on each."""
    trained = []
    for name in names_of(part):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            make = model_func(name)
            if make is not None:
                try:
                    toy.compare(make, loss_of, STEPS, default_chunk_size=9_000)
                except BaseException as error:
                    error.add_note(f"in {name}")
                    raise
                trained.append(name)
    assert len(trained) >= LEAST_TRAINED, trained


@pytest.mark.deep
@pytest.mark.parametrize("part", range(PARTS))
def test_a_language_model_of_transformers_gives_the_same_bits(part: int) -> None:
    train_part(part)
