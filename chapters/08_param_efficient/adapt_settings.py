"""The flags that chapter 08 adds, what they refuse, and where the base comes from. Imports no torch."""

from __future__ import annotations

import importlib.util
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from base_model import file_of, kinds_of, make_base
from methods.spec import MERGED_METHODS, METHODS, MODULES, PEFT_METHODS, MethodSpec

from gpt2_chinese.checkpoint.find import newest_complete, read_state
from gpt2_chinese.checkpoint.sealed_folder import digest
from gpt2_chinese.checkpoint.trained_model import begin_from
from gpt2_chinese.data.token_cache import load_tokens
from gpt2_chinese.errors import UserError
from gpt2_chinese.files import display
from gpt2_chinese.files import kind as kind_of
from gpt2_chinese.settings import ROOT, ParallelSettings, flag

RANDOM = "random"
STEPS = 200  # 14 passes over the shipped comments; the model's own default, 800, is for training from nothing


@dataclass
class Settings(ParallelSettings):
    method: str = flag("lora", "What is trained: full is all parameters, qlora is lora over a base of few bits.",
                       (*METHODS, "qlora"))  # fmt: skip
    rank: int = flag(8, "lora, dora, qlora: width of the two small matrices.")
    alpha: float = flag(16.0, "lora, dora, qlora: the update is scaled by alpha / rank.")
    dropout: float = flag(0.0, "lora, dora, qlora: share of the inputs of the small matrices set to 0.")
    modules: str | None = flag(None, f"lora, dora, qlora, ia3: layers of a block, of {', '.join(MODULES)}, with commas.",
                               shown="c_attn, with ia3 also mlp.c_proj")  # fmt: skip
    rslora: bool = flag(False, "lora, dora, qlora: scale by alpha / sqrt(rank) instead.")
    bottleneck: int = flag(16, "adapter: width of the hidden layer.")
    virtual_tokens: int = flag(16, "prefix, prompt: trained positions before the text.")
    bits: int | None = flag(None, "qlora: bits of a weight of the base, 8 (int8) or 4 (NF4).", (8, 4), "4 with qlora")
    backend: str = flag("own", "own (the folder methods) or peft (Hugging Face PEFT).", ("own", "peft"))
    optim: str = flag("adamw", "adamw (moments in float32) or adamw8bit (in 8 bits: 2 bytes a parameter instead of 8).",
                      ("adamw", "adamw8bit"))  # fmt: skip
    offload_activations: bool = flag(False, "Keep the blocks' activations in host memory.")
    kind: str = flag("comments", "Kind of text to adapt to, a file name of --train-data without .json; all: all of it.")
    merge: bool = flag(False, "Also write merged/, a plain model with the adapter added to its weights.")
    init_from: str | None = flag(
        None, "The base: a GPT-2 folder or file in Hugging Face's format, a run, or random. It also sets model and "
        "vocabulary.", shown="a model of the other kinds of text, trained once",
    )  # fmt: skip
    max_steps: int | None = flag(None, "Steps to train.", shown="200, unless --epochs says how long")
    base_steps: int = flag(400, "Steps that chapter 00 trains the base, if --init-from names none.")
    base_dir: str = flag(str(ROOT / "runs" / "08_param_efficient_base"), "Folder for such bases.",
                         shown="runs/08_param_efficient_base")  # fmt: skip

    # -- not flags: filled by prepare and check_resolved ---------------------------------------------------------------
    base: Path | None = field(default=None, init=False)  # file of the base's weights; None: random weights
    base_facts: dict[str, Any] = field(default_factory=dict, init=False, repr=False)
    kind_tokens: dict[str, Any] = field(default_factory=dict, init=False, repr=False)  # kind -> validation Tokens
    before: dict[str, Any] | None = field(default=None, init=False, repr=False)  # measured by the run that is resumed
    corpora: tuple[Path, Path] = field(default=(Path(), Path()), init=False, repr=False)  # with all kinds: train, valid
    seq_len_given: bool = field(default=False, init=False, repr=False)

    @property
    def spec(self) -> MethodSpec:
        """The method and its numbers; qlora is lora, over a base that is quantised first."""
        modules = None if self.modules is None else tuple(part.strip() for part in self.modules.split(","))
        return MethodSpec("lora" if self.method == "qlora" else self.method, self.rank, self.alpha, self.dropout, modules,
                          self.rslora, self.bottleneck, self.virtual_tokens)  # fmt: skip

    @property
    def frozen(self) -> bool:
        return self.method != "full"

    def prepare(self) -> None:
        """Turns --kind into files, and finds the base of a checkpoint that --resume names."""
        self.seq_len_given = self.seq_len is not None
        if self.max_steps is None and self.epochs is None:
            self.max_steps = STEPS
        if self.method == "qlora" and self.bits is None:
            self.bits = 4
        self.corpora = Path(self.train_data), Path(self.valid_data)
        if self.kind != "all":
            self.train_data = str(file_of(self.train_data, self.kind, "--train-data"))
            self.valid_data = str(file_of(self.valid_data, self.kind, "--valid-data"))
        if self.init_from is None and self.resume not in ("auto", "never"):
            self.init_from = _base_of(Path(self.resume))
            if self.init_from not in (None, RANDOM):
                self._follow(self.init_from)
        elif self.init_from not in (None, RANDOM):
            self.base = begin_from(self.init_from)[0]
        self.base_facts = {"path": self.init_from}
        if self.base is None:
            self.init_from = None  # resolve would look for a file of this name

    def _follow(self, base: str) -> None:
        """Model and vocabulary of a base that a checkpoint names, unless flags give them."""
        self.base, vocab = begin_from(base)
        if not self.is_given("model_config"):
            self.model_config = str(folder_of(self.base))
        if not self.is_given("vocab") and vocab is not None:
            self.vocab = str(vocab)
        self.init_from = None  # resolve refuses it together with --resume PATH

    def validate(self) -> None:
        spec = self.spec
        if not self.seq_len_given:
            self.seq_len = max(1, min(self.seq_len, self.model.n_positions - spec.virtual_tokens))
        super().validate()
        spec.check(self.model, self.seq_len)
        if self.bits is not None and self.method != "qlora":
            raise UserError(f"--bits {self.bits} is for --method qlora: --method {self.method} keeps the base as it is")
        if self.backend == "peft":
            self._check_peft()
        if self.init_from is None and self.base_facts["path"] == RANDOM and self.method != "full":
            raise UserError(f"--init-from random is for --method full: --method {self.method} needs a base on the disk")
        if self.kind == "all" and self.base is None and self.base_facts["path"] != RANDOM:
            raise UserError("--kind all leaves no other kind of text to train a base on: give --init-from")
        if self.merge and (self.method == "full" or spec.method not in MERGED_METHODS):
            why = "final/ is a plain model already" if self.method == "full" else "it adds modules that a plain GPT-2 lacks"
            raise UserError(f"--merge is not for --method {self.method}: {why}")
        if self.base_steps < 1:
            raise UserError(f"--base-steps must be at least 1, not {self.base_steps}")

    def _check_peft(self) -> None:
        if self.method not in PEFT_METHODS:
            raise UserError(f"--backend peft has no --method {self.method} here: give {', '.join(PEFT_METHODS)}, or "
                            "--backend own")  # fmt: skip
        if self.recompute != "none" or self.offload_activations:
            raise UserError("--recompute and --offload-activations need --backend own: PEFT's blocks are Hugging Face's")
        if self.documents != "cross":
            raise UserError(f"--documents {self.documents} needs --backend own: Hugging Face's GPT-2 lets attention cross")
        if self.loss_tiles != "none":
            raise UserError(f"--loss-tiles {self.loss_tiles} needs --backend own: PEFT's model computes its logits whole")
        if importlib.util.find_spec("peft") is None or importlib.util.find_spec("transformers") is None:
            raise UserError("--backend peft needs Hugging Face PEFT: start by train.sh, or pip install -e '.[peft]'")

    def check_resolved(self) -> None:
        """Makes the base if there is none, and compares it with the one of the checkpoint to resume."""
        if self.resume_from is not None and self.resume_from.is_file():
            self.resume_from = None  # the base's weights: adapt() loads them, also before a checkpoint
        random = self.base_facts["path"] == RANDOM
        then = self._recorded()
        if self.base is None and not random:
            self.base = make_base(self, *self.corpora)
        self.base_facts = {"path": RANDOM} if random else {"path": str(self.base), **digest(self.base, folder_of(self.base))}
        self.init_from = self.base_facts["path"]
        if then is not None:
            self._check_checkpoint(then["facts"])
            self.before = then["before"]
        files = {"all": self.corpora[1]} if self.kind == "all" else kinds_of(self.corpora[1])
        if self.kind != "all" and self.corpora[1].is_file():
            files = {self.kind: self.corpora[1]}
        self.kind_tokens = {name: load_tokens(file, self.vocab, self.vocab_profile) for name, file in files.items()}

    def facts(self) -> dict[str, Any]:
        """What a checkpoint records, to be compared with a later run."""
        return {"base": self.base_facts, **asdict(self.spec), "method": self.method, "bits": self.bits,
                "backend": self.backend, "kind": self.kind}  # fmt: skip

    def _recorded(self) -> dict[str, Any] | None:
        """What the checkpoint to resume records of this chapter; None without a checkpoint. Raises UserError."""
        if self.resume_from is None:
            return None
        then = read_state(self.resume_from).get("extra", {}).get("adapt")
        if not isinstance(then, dict):
            raise UserError(f"checkpoint {self.resume_from} is of another chapter: adapt its weights with --init-from, and "
                            "give another --output-dir")  # fmt: skip
        return then

    def _check_checkpoint(self, then: dict[str, Any]) -> None:
        now = _plain(self.facts())
        if then["base"].get("sha256") != now["base"].get("sha256"):
            raise UserError(f"checkpoint {self.resume_from} was trained on the base {then['base']['path']}, this "
                            f"run has {now['base']['path']}: give that --init-from, another --output-dir, or --resume never")
        for name, before in then.items():
            if name != "base" and now[name] != before:
                raise UserError(f"checkpoint {self.resume_from} has {name} {before}, this run {now[name]}: give the same "
                                "flags, another --output-dir, or --resume never")  # fmt: skip

    def about(self) -> list[tuple[str, str]]:
        spec, by = self.spec, {"own": "", "peft": ", by Hugging Face PEFT"}[self.backend]
        numbers = {"lora": f"rank {spec.rank}, alpha {spec.alpha:g}, on {', '.join(spec.targets)}",
                   "adapter": f"bottleneck {spec.bottleneck}", "ia3": f"on {', '.join(spec.targets)}"}  # fmt: skip
        numbers["dora"] = numbers["lora"]
        numbers["prefix"] = numbers["prompt"] = f"{spec.num_virtual_tokens} virtual tokens"
        few = f", base in {self.bits} bits" if self.bits else ""
        host = ", kept in host memory" if self.offload_activations else ""
        return [
            ("base", "random weights" if self.base is None else str(display(folder_of(self.base)))),
            ("adapted to", self.kind if self.kind == "all" else f"{self.kind} ({display(Path(self.train_data))})"),
            ("method", ": ".join(filter(None, (self.method, numbers.get(spec.method)))) + few + by),
            ("activations", f"recompute {self.recompute}{host}"),
            *([] if self.loss_tiles == "none" else [("loss", f"tiles {self.loss_tiles}")]),
            *([("optimizer", "AdamW, moments in 8 bits")] if self.optim == "adamw8bit" else []),
        ]


def folder_of(base: Path) -> Path:
    """The folder with the config.json of a file of weights."""
    return base.parent.parent if base.name == ".metadata" else base.parent


def _plain(facts: dict[str, Any]) -> dict[str, Any]:
    """As JSON reads it back: lists in place of tuples."""
    return {name: list(value) if isinstance(value, tuple) else value for name, value in facts.items()}


def _base_of(path: Path) -> str | None:
    """The base that a checkpoint, or the newest one of a run, records; None where there is no such record."""
    if kind_of(path, f"--resume {path}") != "folder":
        return None
    folder = newest_complete(path / "checkpoints") if (path / "checkpoints").is_dir() else path
    if folder is None or not (folder / "state.json").is_file():
        return None
    adapt = read_state(folder).get("extra", {}).get("adapt")
    return adapt["facts"]["base"]["path"] if isinstance(adapt, dict) else None
