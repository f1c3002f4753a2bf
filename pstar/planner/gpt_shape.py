"""A GPT as numbers: its parameters, flops and activations, without a tensor; the subject of `pstar plan`.

The engine itself knows no GPT; only the planner does, because activations and time depend on more than parameters.
"""

import json
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

from pstar.errors import ConfigError
from pstar.layout.layout import ModuleSpec


@dataclass(frozen=True)
class GptShape:
    """A GPT-2 with a tied head: names and sizes of its parameters are those of Hugging Face's GPT2LMHeadModel."""

    layers: int
    hidden: int
    heads: int
    vocab: int = 50257
    positions: int = 1024
    """Rows of the learned position embedding: the longest sequence."""
    inner: int | None = None
    """Width inside the MLP; None for 4 * hidden."""
    lora_rank: int = 0
    """0: all parameters are trained. Else all of them are frozen, and each linear layer of a block gets two trained matrices
    of this rank (LoRA, Hu et al. 2021; in all linear layers as in QLoRA, Dettmers et al. 2023, section 4)."""

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "vocab", "positions"):
            if type(getattr(self, name)) is not int or getattr(self, name) < 1:
                raise ConfigError(f"model: {name} is {getattr(self, name)!r}; give a whole number of at least 1")
        if self.inner is not None and (type(self.inner) is not int or self.inner < 1):
            raise ConfigError(f"model: inner is {self.inner!r}; give a whole number of at least 1")
        if type(self.lora_rank) is not int or not 0 <= self.lora_rank <= self.hidden:
            raise ConfigError(f"model: the LoRA rank is {self.lora_rank!r} (--trainable); give 0 to the width, "
                              f"{self.hidden}")
        if self.hidden % self.heads:
            raise ConfigError(f"model: hidden {self.hidden} is not divisible by {self.heads} heads")

    @property
    def mlp(self) -> int:
        return self.inner or 4 * self.hidden

    @cached_property
    def num_params(self) -> int:
        """M; the tied head counts once."""
        return sum(numel for module in self.modules() for _, numel in module.parameters)

    @property
    def num_trained(self) -> int:
        """The parameters that are not frozen."""
        return sum(numel for module in self.modules() for name, numel in module.parameters if name not in module.frozen)

    def modules(self) -> tuple[ModuleSpec, ...]:
        """The modules that own parameters, in construction order, for pstar.layout.layout.

        An adapted layer NAME has its matrices in NAME.lora_A, (rank, in), and NAME.lora_B, (out, rank).
        """
        return _modules_of(self)

    def uses(self) -> dict[str, tuple[str, ...]]:
        """For each module the parameters that its forward uses, the tied head's as well, for pstar.layout.budget."""
        own = {module.name: tuple(name for name, _ in module.parameters) for module in self.modules()}
        return own | {"lm_head": ("transformer.wte.weight",)}

    def forward_flops(self, batch: int, seq_len: int) -> tuple[int, int]:
        """(flops of the layers, flops of the head) for one forward pass over (batch, seq_len).

        Narayanan et al. 2021, appendix: 24 b s h^2 + 4 b s^2 h a layer (here with the MLP's width) and 2 b s h v for the
        logits; backward takes twice as much. As there, the attention matrix counts whole, though it is causal.
        """
        tokens = batch * seq_len
        layer = 2 * tokens * (4 * self.hidden**2 + 2 * self.hidden * self.mlp) + 4 * tokens * seq_len * self.hidden
        return self.layers * layer, 2 * tokens * self.hidden * self.vocab

    def step_flops(self, batch: int, seq_len: int, recompute: bool = False) -> int:
        """Flops of forward and backward over (batch, seq_len); recompute: each layer's forward is computed again.

        Backward takes twice the forward's flops: half of them for the gradients of inputs, half for those of weights. Frozen
        weights have none; the matrices of rank r take 2 r (in + out) flops a token forward, like any weights.
        """
        layers, head = self.forward_flops(batch, seq_len)
        adapters = 2 * batch * seq_len * (self.num_trained if self.lora_rank else 0)
        passes = 2 if self.lora_rank else 3
        return layers * (passes + recompute) + head * passes + adapters * (3 + recompute)

    def activation_bytes(self, batch: int, seq_len: int, bytes_per_value: int = 2, recompute: bool = False,
                         offload: bool = False) -> int:
        """Bytes of activations near at the worst moment of a step on one GPU; with lora_rank an upper bound, the bytes that
        training all parameters takes (the matrices' inputs are kept then too, and their outputs are small).

        Korthikanti et al. 2022, without tensor parallelism. A layer keeps 34 s b h bytes in 16 bit if the attention matrix
        is never stored (a fused kernel, or their selective recomputation). With full recomputation it keeps its input, 2 s b
        h, and one layer at a time is recomputed. Outside the layers: the embedding's output and the last norm's input and
        output, 6 s b h. Logits: in the model's precision, and fp32 log-probabilities, both with gradients: 12 s b v in 16
        bit, 16 in fp32. The worst moment is the loss, or with recomputation the backward of one layer, when the logits are
        freed. In fp32 all 16-bit numbers double.

        With offload kept activations are in far (offloaded_bytes), and the worst moment is the largest of three. At the
        loss: log-probabilities, their gradient and the gradient of the fp32 logits, 12 s b v. Then: the head's gradient of
        the tied table, h v values, which autograd holds until it has the embedding's, plus the logits' gradient or one
        layer's tensors. At the end: the head's gradient, the embedding's, and their sum.
        """
        scale, tokens = bytes_per_value / 2, batch * seq_len
        anew = 34 * tokens * self.hidden * scale
        if offload:
            tied = bytes_per_value * self.vocab * self.hidden
            return int(max(12 * tokens * self.vocab, tied + max(bytes_per_value * tokens * self.vocab, anew), 3 * tied))
        logits = tokens * self.vocab * (2 * bytes_per_value + 8)
        return int(self._kept_bytes(tokens, scale, recompute) + max(logits, anew if recompute else 0))

    def offloaded_bytes(self, batch: int, seq_len: int, bytes_per_value: int = 2, recompute: bool = False
                        ) -> tuple[int, int]:
        """(bytes of offloaded activations in far at the end of forward, bytes that are copied back for backward).

        In far are all activations that activation_bytes counts as kept, and the fp32 log-probabilities, 4 s b v. A tensor
        that two operations read is copied back twice: the log-probabilities and, without recomputation, each layer's
        attention output, 2 s b h in 16 bit. Tensors below pstar.chunks.LEAST_BYTES, which stay near, are counted too: they
        matter only to models of about their size.
        """
        scale, tokens = bytes_per_value / 2, batch * seq_len
        logs = 4 * tokens * self.vocab
        away = int(self._kept_bytes(tokens, scale, recompute)) + logs
        return away, away + logs + (0 if recompute else int(2 * self.layers * tokens * self.hidden * scale))

    def _kept_bytes(self, tokens: int, scale: float, recompute: bool) -> float:
        """Bytes kept between forward and backward, without the logits; see activation_bytes."""
        return (self.layers * (2 if recompute else 34) + 6) * tokens * self.hidden * scale


@lru_cache(8)    # a prediction asks for them several times, and a deep model has thousands
def _modules_of(shape: GptShape) -> tuple[ModuleSpec, ...]:
    width, mlp, rank = shape.hidden, shape.mlp, shape.lora_rank
    modules: list[ModuleSpec] = []

    def add(name: str, *sizes: tuple[str, int], trained: bool = not rank) -> None:
        parameters = tuple((f"transformer.{name}.{kind}", numel) for kind, numel in sizes)
        names = frozenset(dict(parameters))
        matrices = frozenset(each for each in names if each.endswith("weight") and ".ln_" not in each)
        modules.append(ModuleSpec(f"transformer.{name}", parameters, frozenset() if trained else names, matrices))

    def linear(name: str, inputs: int, outputs: int) -> None:
        add(name, ("weight", inputs * outputs), ("bias", outputs))
        if rank:
            add(f"{name}.lora_A", ("weight", rank * inputs), trained=True)
            add(f"{name}.lora_B", ("weight", outputs * rank), trained=True)

    add("wte", ("weight", shape.vocab * width))
    add("wpe", ("weight", shape.positions * width))
    for layer in range(shape.layers):
        add(f"h.{layer}.ln_1", ("weight", width), ("bias", width))
        linear(f"h.{layer}.attn.c_attn", width, 3 * width)
        linear(f"h.{layer}.attn.c_proj", width, width)
        add(f"h.{layer}.ln_2", ("weight", width), ("bias", width))
        linear(f"h.{layer}.mlp.c_fc", width, mlp)
        linear(f"h.{layer}.mlp.c_proj", mlp, width)
    add("ln_f", ("weight", width), ("bias", width))
    return tuple(modules)


def parse_trainable(text: str) -> int:
    """The lora_rank of a GptShape: 0 for "all", RANK for "lora:RANK". Raises ConfigError."""
    kind, _, rank = text.partition(":")
    if text == "all":
        return 0
    if kind != "lora" or not rank.isdecimal() or int(rank) < 1:
        raise ConfigError(f"--trainable {text}: give all, or lora:RANK with a rank of at least 1, as lora:8")
    return int(rank)


# GPT-2 (Radford et al. 2019), and the configurations of PatrickStar's evaluation: examples/model_builder.py of the authors'
# repository (Tencent/PatrickStar), their number of layers and width. Their sequence length is 1024 throughout.
MODELS = {
    "gpt2": GptShape(12, 768, 12),
    "medium": GptShape(24, 1024, 16),
    "large": GptShape(36, 1280, 20),
    "xl": GptShape(48, 1600, 25),
    "1B": GptShape(20, 2048, 16),
    "2B": GptShape(40, 2048, 16),
    "4B": GptShape(64, 2304, 16),
    "6B": GptShape(53, 3072, 16),
    "8B": GptShape(72, 3072, 16),
    "10B": GptShape(50, 4096, 16),
    "12B": GptShape(60, 4096, 16),
    "15B": GptShape(78, 4096, 16),
    "18B": GptShape(90, 4096, 16),
    "20B": GptShape(25, 8192, 16),
    "40B": GptShape(50, 8192, 16),
    "50B": GptShape(62, 8192, 16),
    "60B": GptShape(75, 8192, 16),
    "68B": GptShape(66, 9216, 16),
    "175B": GptShape(96, 12288, 96),
}


def find_model(text: str) -> GptShape:
    """A name of MODELS, LAYERSxHIDDEN or LAYERSxHIDDENxHEADS, or the path of a Hugging Face config.json of a GPT-2.

    Without HEADS a head is 64 wide if that divides the width, else there is one head; no byte count here depends on it.
    Raises ConfigError for anything else.
    """
    named = {name.lower(): shape for name, shape in MODELS.items()} | {"small": MODELS["gpt2"]}
    if text.lower() in named:
        return named[text.lower()]
    parts = text.lower().split("x")
    if len(parts) in (2, 3) and all(part.isdecimal() and len(part) <= 12 for part in parts):
        layers, hidden, *heads = map(int, parts)
        return GptShape(layers, hidden, heads[0] if heads else hidden // 64 if hidden and hidden % 64 == 0 else 1)
    path = Path(text)
    try:
        path.stat()
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:    # a name too long or with a null character, no permission
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"--model {text[:60]}: {reason}; give one of {', '.join(MODELS)}, LAYERSxHIDDEN, or a "
                          "config.json") from None
    if path.is_dir():
        path /= "config.json"
    if path.suffix != ".json" and not path.exists():
        raise ConfigError(f"--model {text}: no such model; give one of {', '.join(MODELS)}, LAYERSxHIDDEN, or a config.json")
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(content, dict) or content.get("model_type", "gpt2") != "gpt2":
        raise ConfigError(f"{path}: expected the config.json of a GPT-2; describe another model as LAYERSxHIDDENxHEADS")
    if content.get("tie_word_embeddings", True) is not True:
        raise ConfigError(f"{path}: tie_word_embeddings is not true; the planner knows tied heads only")
    positions = content.get("n_positions") or content.get("n_ctx") or 1024
    missing = [key for key in ("n_layer", "n_embd", "n_head") if key not in content]
    if missing:
        raise ConfigError(f"{path}: '{missing[0]}' is missing; it takes n_layer, n_embd, n_head")
    return GptShape(content["n_layer"], content["n_embd"], content["n_head"], content.get("vocab_size") or 50257, positions,
                    content.get("n_inner"))
