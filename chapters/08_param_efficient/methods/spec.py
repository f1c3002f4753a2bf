"""Which method adapts a model, and its numbers. Imports no torch: a wrong flag is answered before torch is loaded."""

from __future__ import annotations

import math
from dataclasses import dataclass

from gpt2_chinese.errors import UserError
from gpt2_chinese.model.config import ModelConfig

METHODS = ("full", "lora", "dora", "adapter", "prefix", "prompt", "ia3", "bitfit")
PEFT_METHODS = ("lora", "dora", "prefix", "prompt", "ia3")  # those of `--backend peft`: Hugging Face PEFT has no others
MERGED_METHODS = ("full", "lora", "dora", "ia3", "bitfit")  # those that leave a plain GPT-2 after `--merge`

# the Conv1D layers of a block that `modules` can name; PEFT's target_modules take the same names, as ends of full names
MODULES = ("c_attn", "attn.c_proj", "c_fc", "mlp.c_proj")
# lora, dora: attention alone (Hu et al. 2021, section 4.2); ia3: attention's projection and the MLP's hidden layer, as PEFT
# has it for GPT-2 (Liu et al. 2022, section 3.3, rescale keys and values, and not the queries that c_attn makes, too)
DEFAULT_MODULES = {"lora": ("c_attn",), "dora": ("c_attn",), "ia3": ("c_attn", "mlp.c_proj")}
SCALES_INPUT = ("mlp.c_proj",)  # ia3 rescales the input of these, and the output of the others; PEFT's feedforward_modules


def full_path(module: str) -> str:
    """The path of one of MODULES inside a block: c_attn -> attn.c_attn, c_fc -> mlp.c_fc."""
    return {"c_attn": "attn.c_attn", "c_fc": "mlp.c_fc"}.get(module, module)


def layer_sizes(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """(num_in, num_out) of each layer of a block that MODULES names."""
    width, inner = config.n_embd, config.inner
    sizes = ((width, 3 * width), (width, width), (width, inner), (inner, width))
    return dict(zip(MODULES, sizes, strict=True))


@dataclass(frozen=True)
class MethodSpec:
    """A method and its numbers. Each method reads its own fields and ignores the others."""

    method: str = "lora"  # one of METHODS
    rank: int = 8  # lora, dora: width of the two small matrices
    alpha: float = 16.0  # lora, dora: the update is scaled by alpha / rank
    dropout: float = 0.0  # lora, dora: share of the inputs of the small matrices set to 0 in training
    modules: tuple[str, ...] | None = None  # lora, dora, ia3: some of MODULES; None: DEFAULT_MODULES of the method
    rslora: bool = False  # lora, dora: scale by alpha / sqrt(rank) (Kalajdzievski 2023, section 3)
    bottleneck: int = 16  # adapter: width of the hidden layer
    num_virtual_tokens: int = 16  # prefix, prompt: trained positions before the text

    @property
    def targets(self) -> tuple[str, ...]:
        """The layers of a block that the method wraps, in the order of MODULES; () if it wraps none by name."""
        if self.method not in DEFAULT_MODULES:
            return ()
        chosen = self.modules or DEFAULT_MODULES[self.method]
        return tuple(name for name in MODULES if name in chosen)

    @property
    def scaling(self) -> float:
        """lora, dora: the factor of the product of the two small matrices."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    @property
    def virtual_tokens(self) -> int:
        """How many of the model's positions the method uses: num_virtual_tokens for prefix and prompt, else 0."""
        return self.num_virtual_tokens if self.method in ("prefix", "prompt") else 0

    def check(self, config: ModelConfig, seq_len: int | None = None) -> None:
        """Compares the numbers with a model, and with the length of the training sequences if it is given.

        Raises:
            UserError: a number that the model has no room for, or a name that it lacks; names the flag.
        """
        if self.method not in METHODS:
            raise UserError(f"--method {self.method}: give one of {', '.join(METHODS)}")
        if self.modules is not None and self.method in DEFAULT_MODULES:
            self._check_modules()
        if self.method in ("lora", "dora"):
            self._check_rank(config)
        if self.method == "adapter":
            _check_whole("--bottleneck", self.bottleneck, config.n_embd, f"the model's width is {config.n_embd}")
        if self.method in ("prefix", "prompt"):
            self._check_positions(config, seq_len)

    def _check_modules(self) -> None:
        if unknown := [name for name in self.modules or () if name not in MODULES]:
            raise UserError(f"--modules {','.join(map(str, unknown))}: a block has the layers {', '.join(MODULES)}")
        if not self.modules:
            raise UserError(f"--modules is empty: give some of {', '.join(MODULES)}")

    def _check_rank(self, config: ModelConfig) -> None:
        for name in self.targets:
            num_in, num_out = layer_sizes(config)[name]
            _check_whole("--rank", self.rank, min(num_in, num_out), f"{name} is {num_in} x {num_out}")
        if isinstance(self.alpha, bool) or not isinstance(self.alpha, int | float) or not 0 < self.alpha < 1e9:
            raise UserError(f"--alpha {self.alpha}: give a number above 0 and below 1e9")
        if isinstance(self.dropout, bool) or not isinstance(self.dropout, int | float) or not 0 <= self.dropout < 1:
            raise UserError(f"--dropout {self.dropout}: give a number of at least 0 and below 1")

    def _check_positions(self, config: ModelConfig, seq_len: int | None) -> None:
        number, positions = self.num_virtual_tokens, config.n_positions
        _check_whole("--virtual-tokens", number, positions - 1, f"the model has {positions} positions for them and the text")
        if seq_len is not None and seq_len + number > positions:
            raise UserError(
                f"--seq-len {seq_len} and --virtual-tokens {number} need {seq_len + number} positions, the model has "
                f"{positions}: give --seq-len {positions - number} or less"
            )


def _check_whole(flag: str, value: object, most: int, why: str) -> None:
    """Raises UserError unless `value` is a whole number of 1 to `most`."""
    if type(value) is not int or value < 1:
        raise UserError(f"{flag} {value}: give a whole number of at least 1")
    if value > most:
        raise UserError(f"{flag} {value} is above {most}: {why}")
