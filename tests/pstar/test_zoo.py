"""Architectures written for plain PyTorch: its bits, at the smallest near budget that works."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pstar
from tests import toy

transformers = pytest.importorskip("transformers")

STEPS = 3
SMALL = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}


def noise(step: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(step))


def ids(step: int, rows: int = 3, length: int = 7) -> torch.Tensor:
    return torch.randint(0, 97, (rows, length), generator=torch.Generator().manual_seed(step))


def text(step: int) -> dict:
    return {"input_ids": ids(step), "labels": ids(step)}


def pictures(step: int) -> dict:
    return {"pixel_values": noise(step, 2, 3, 32, 32), "labels": torch.tensor([step % 5, 1])}


def speech(step: int) -> dict:
    return {"input_features": noise(step, 2, 8, 40), "labels": ids(step, 2)}


def waves(step: int) -> dict:
    return {"input_values": noise(step, 2, 400), "labels": ids(step, 2, 4) % 19 + 1}


def pairs(step: int) -> dict:
    return {"input_ids": ids(step, 2), "pixel_values": noise(step, 2, 3, 32, 32), "return_loss": True}


def images(step: int) -> dict:
    return {"x": noise(step, 4, 3, 16, 16)}


def sequence(step: int) -> dict:
    return {"x": noise(step, 4, 6, 8)}


class Residual(nn.Module):
    """Group norm, convolution and the embedding of a time step, as in a diffusion model."""

    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        self.norm, self.conv = nn.GroupNorm(2, inner), nn.Conv2d(inner, outer, 3, padding=1)
        self.time, self.skip = nn.Linear(8, outer), nn.Conv2d(inner, outer, 1)

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        return self.skip(x) + self.conv(F.silu(self.norm(x))) + self.time(time)[:, :, None, None]


class UNet(nn.Module):
    """Down, attention in the middle, up with skips; predicts the noise that was added."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(1, 8), nn.SiLU(), nn.Linear(8, 8))
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.down = nn.ModuleList([Residual(8, 8), Residual(8, 16)])
        self.shrink = nn.Conv2d(16, 16, 3, stride=2, padding=1)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.grow = nn.ConvTranspose2d(16, 16, 2, stride=2)
        self.up = nn.ModuleList([Residual(32, 16), Residual(24, 8)])
        self.last = nn.Conv2d(8, 3, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time = self.time(torch.linspace(0, 1, len(x), device=x.device, dtype=x.dtype)[:, None])
        h, kept = self.first(x * 0.7), []
        for block in self.down:
            h = block(h, time)
            kept.append(h)
        h = self.shrink(h)
        flat = h.flatten(2).transpose(1, 2)
        h = h + self.attention(flat, flat, flat, need_weights=False)[0].transpose(1, 2).unflatten(2, h.shape[2:])
        h = self.grow(h)
        for block in self.up:
            h = block(torch.cat([h, kept.pop()], 1), time)
        return F.mse_loss(self.last(h), x)


class VisionNet(nn.Module):
    """Convolutions with batch norm and a shortcut, in the manner of torchvision."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2))
        self.depthwise = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False), nn.BatchNorm2d(8), nn.ReLU6())
        self.classifier = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.1), nn.Linear(8, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.stem(x)
        return self.classifier(h + self.depthwise(h)).logsumexp(1).mean()


class Recurrent(nn.Module):
    """torch's LSTM or GRU, whose weights a list of its own refers to, with a tied head."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.rnn = kind(8, 8, num_layers=2, batch_first=True, bidirectional=True)
        self.into, self.out = nn.Linear(8, 8), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(self.out(self.rnn(self.into(x))[0]), self.into.weight.T).square().mean()


class StochasticDepth(nn.Module):
    """Layers that are left out by chance: many steps differ from the traced one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if torch.rand(()) < 0.7:
                x = x + layer(x).tanh()
        return x.square().mean() + sum(layer.weight.square().mean() for layer in self.layers)


def of(kind: str, **config) -> Callable[[], nn.Module]:
    """A class of transformers, made of its configuration. It is looked for when a model is made: that takes a second for
    all of them, and every worker of the suite imports this file."""

    def make() -> nn.Module:
        configuration = next(name for name in (kind.split("For")[0], kind.removesuffix("Model")) if
                             hasattr(transformers, f"{name}Config"))
        return getattr(transformers, kind)(getattr(transformers, f"{configuration}Config")(**config))

    return make


T5 = {"vocab_size": 97, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}
VIT = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "image_size": 32}
WHISPER = {"vocab_size": 97, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4,
           "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "num_mel_bins": 8,
           "max_source_positions": 20, "max_target_positions": 20, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
           "decoder_start_token_id": 1}
DEEPSEEK = {"moe_intermediate_size": 16, "n_shared_experts": 1, "n_routed_experts": 4, "kv_lora_rank": 8, "q_lora_rank": 8,
            "qk_rope_head_dim": 4, "v_head_dim": 8, "qk_nope_head_dim": 4, "n_group": 2, "topk_group": 1,
            "num_experts_per_tok": 2, "first_k_dense_replace": 1}
WAVES = {"conv_dim": (8, 8), "conv_stride": (5, 2), "conv_kernel": (10, 3), "num_feat_extract_layers": 2,
         "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4, "mask_time_prob": 0.0, "vocab_size": 20}

# Name -> (model, from the step to its arguments).
ZOO: dict[str, tuple[Callable[[], nn.Module], Callable[[int], dict]]] = {
    "T5": (of("T5ForConditionalGeneration", **T5), text),
    "ViT": (of("ViTForImageClassification", **VIT, patch_size=8, num_labels=5), pictures),
    "Mixtral": (of("MixtralForCausalLM", **SMALL, num_key_value_heads=2, num_local_experts=4), text),
    "Llama, tied": (of("LlamaForCausalLM", **SMALL, num_key_value_heads=2, tie_word_embeddings=True), text),
    "Qwen2": (of("Qwen2ForCausalLM", **SMALL, num_key_value_heads=2), text),
    "BERT": (of("BertForMaskedLM", **SMALL), text),
    "ResNet": (of("ResNetForImageClassification", embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic",
                  num_labels=5), pictures),
    "Whisper": (of("WhisperForConditionalGeneration", **WHISPER), speech),
    "Mamba": (of("MambaForCausalLM", vocab_size=97, hidden_size=32, state_size=4, num_hidden_layers=2, time_step_rank=4),
              text),
    "GPT-NeoX": (of("GPTNeoXForCausalLM", **SMALL), text),
    "Phi": (of("PhiForCausalLM", **SMALL), text),
    "Gemma": (of("GemmaForCausalLM", **SMALL, num_key_value_heads=2, head_dim=8), text),
    "DeepSeek-V3": (of("DeepseekV3ForCausalLM", **SMALL, num_key_value_heads=4, **DEEPSEEK), text),
    "CLIP": (of("CLIPModel", text_config=SMALL | {"max_position_embeddings": 16, "eos_token_id": 96, "bos_token_id": 1},
                vision_config=VIT | {"patch_size": 16}, projection_dim=16), pairs),
    "wav2vec 2.0": (of("Wav2Vec2ForCTC", **(SMALL | WAVES)), waves),
    "U-Net": (UNet, images),
    "convolutions with batch norm": (VisionNet, images),
    "LSTM": (lambda: Recurrent(nn.LSTM), sequence),
    "GRU": (lambda: Recurrent(nn.GRU), sequence),
    "stochastic depth": (StochasticDepth, sequence),
}
STARTS_PLAINLY = {"LSTM": "referenced weakly", "GRU": "referenced weakly"}


def loss_of(out: object) -> torch.Tensor:
    return out if isinstance(out, torch.Tensor) else out.loss


def plain_run(name: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    model_func, inputs = ZOO[name]
    return toy.plain_run(model_func, lambda model, step: loss_of(model(**inputs(step))), STEPS)


def train(model: pstar.Engine, optimizer: torch.optim.Optimizer, inputs: Callable[[int], dict]) -> list[float]:
    losses = []
    for step in range(STEPS):
        torch.manual_seed(step)
        optimizer.zero_grad()
        loss = loss_of(model(**inputs(step)))
        model.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    return losses


# One for each thing that a model may do: shared embeddings, tied ones, experts, cells of C++ (and a start that is not lazy),
# norms with buffers, skips across levels, layers left out. The others combine them.
QUICK = (("T5", "min"), ("Llama, tied", "auto"), ("Mixtral", "45%"), ("Mamba", "min"), ("LSTM", "45%"), ("U-Net", "min"),
         ("convolutions with batch norm", "45%"), ("stochastic depth", "min"))


@pytest.mark.parametrize("name, near", [
    pytest.param(*case, marks=[pytest.mark.deep] * (case not in QUICK))
    for case in itertools.product(ZOO, ["min", "45%", "auto"])])
def test_an_architecture_trains_as_in_plain_pytorch(name, near):
    model_func, inputs = ZOO[name]
    losses, weights = plain_run(name)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model, optimizer = toy.build(model_func, near_budget=near)
    said = [str(warning.message) for warning in caught if "lazy start" in str(warning.message)]
    assert [STARTS_PLAINLY[name] in line for line in said] == [True] if name in STARTS_PLAINLY else not said
    assert train(model, optimizer, inputs) == losses
    state, _ = model.gather_state()
    for key, value in weights.items():
        assert torch.equal(state[key], value), key


@pytest.mark.filterwarnings("ignore:lazy start")
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.deep] * (name != "ResNet")) for name in ZOO])
def test_an_architecture_trains_in_16_bit_wherever_its_chunks_are(name):
    model_func, inputs = ZOO[name]
    for bits in ({"bf16": {"enabled": True}}, {"fp16": {"enabled": True, "initial_scale_power": 8}}):
        near, far = (train(*toy.build(model_func, near_budget=near, **bits), inputs) for near in ("100%", "min"))
        assert near == far, bits


def test_a_model_that_cannot_start_lazily_can_be_planned():
    with pytest.warns(UserWarning, match="lazy start is not possible for this model.* referenced weakly"):
        plan = pstar.plan_engine(ZOO["LSTM"][0], {"near_budget": "min"})
    assert plan.layout.num_params > 0
