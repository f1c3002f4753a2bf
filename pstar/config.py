"""The configuration: DeepSpeed's JSON keys, and the engine's keys for memory. Checked before the model is built."""

import difflib
import json
import math
import os
import stat
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from pstar.deepspeed.schedules import check
from pstar.deepspeed.translate import Note, batches, known, translate
from pstar.errors import ConfigError

_MOST = 2**63


@dataclass
class OptimizerParams:
    lr: float = 1e-3
    """Learning rate."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay rates of the first and second moment."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.0
    """Decoupled for AdamW, added to the gradient for Adam."""
    use_hybrid_adam: bool = True
    """PatrickStar's key. false: every update is computed far, by the CPU. true: near, where states have room there."""
    state_bits: int = 32
    """Bits of a moment: 32, or 8 for codes, of which 2,048 share an fp32 scale (Dettmers et al. 2022): 6 bytes a parameter
    less, and slightly other numbers."""


@dataclass
class OptimizerConfig:
    type: str = "AdamW"
    """AdamW or Adam."""
    params: OptimizerParams = field(default_factory=OptimizerParams)
    """The optimizer's hyper-parameters."""


@dataclass
class Bf16Config:
    enabled: bool = False
    """Compute in bf16; the fp32 master is split between the parameter and 16 more bits."""


@dataclass
class Fp16Config:
    enabled: bool = False
    """Compute in fp16 with a scaled loss; the optimizer keeps a separate fp32 master of every parameter."""
    loss_scale: float = 0.0
    """The loss is multiplied by it before backward; 0 for a dynamic scale, which the keys below describe."""
    initial_scale_power: int = 16
    """The dynamic scale begins at 2 to this power."""
    loss_scale_window: int = 1000
    """Steps in a row without an overflow after which the dynamic scale doubles."""
    hysteresis: int = 2
    """The overflow, counted from 1, that first halves the dynamic scale; doubling it restores the count. It is no factor."""
    consecutive_hysteresis: bool = False
    """Every step without an overflow restores the count, not only a doubling."""
    min_loss_scale: float = 1.0
    """The dynamic scale never becomes smaller."""


@dataclass
class SchedulerConfig:
    type: str | None = None
    """WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle or LRRangeTest; null: your loop sets the learning rate."""
    params: dict = field(default_factory=dict)
    """The schedule's parameters, with DeepSpeed's names and defaults. Only with a type."""


@dataclass
class MemTracerConfig:
    use_async_mem_monitor: bool = False
    """PatrickStar's key, accepted without effect: the ledger counts bytes as they are taken, so nothing is sampled."""


@dataclass
class ClientConfig:
    mem_tracer: MemTracerConfig = field(default_factory=MemTracerConfig)
    """PatrickStar's section of how memory is observed."""


@dataclass
class Config:
    """The settings of a run, checked when they are made. load_config makes one from a dict or a JSON file."""

    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """Which optimizer, with which hyper-parameters."""
    bf16: Bf16Config = field(default_factory=Bf16Config)
    """bf16 training; fp32 where neither it nor fp16 is enabled."""
    fp16: Fp16Config = field(default_factory=Fp16Config)
    """fp16 training with a loss scale."""
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    """A learning rate schedule of DeepSpeed. The engine steps it after every update; it is model.lr_scheduler."""
    train_batch_size: int | None = None
    """Samples of an optimizer step on all processes: micro-batch x gradient_accumulation_steps x processes, or an error."""
    train_micro_batch_size_per_gpu: int | None = None
    """Samples of a micro-step on one process. Your DataLoader makes the batches; this only decides the accumulation."""
    gradient_clipping: float = 0.0
    """Largest global norm of the gradients; 0 for no clipping."""
    gradient_accumulation_steps: int = 1
    """Backward passes per optimizer step; the gradients are averaged over them, and reduced once."""
    find_unused_parameters: bool = False
    """torch DDP's name. true: all gradients are reduced after backward, in a fixed order. A parameter may then get a
    gradient on some ranks only, or two in one backward (reentrant checkpointing). All gradients wait in memory. The ranks
    must still make the same gathers, as they do if near holds all parameters."""
    default_chunk_size: int | str = "auto"
    """Elements of a chunk, or auto: searched for the least padding within the near budget. Never more than the model has.
    Beside frozen parameters the chunks of trained ones may be smaller."""
    ownership: str = "whole"
    """whole: each rank owns every p-th chunk, p chunks are gathered at once (PatrickStar). sharded: each chunk is cut into
    p pieces and gathered alone, which needs less room near (Gemini). node: sharded among the ranks of each node, and every
    node has all chunks: for slow networks and enough memory (FSDP's hybrid sharding). On one node that is sharded."""
    communication: str = "group"
    """group: the p chunks of a group are gathered and reduced at once (PatrickStar). chunk: one chunk at a time is broadcast
    by its owner and reduced to it: less room near, as many bytes on the way. Only with ownership whole."""
    prefetch: int | bool = 2
    """How many moments of the traced step to look ahead: what they need is copied and gathered while the current one
    computes, where the budgets have room for both. 0 or false: every copy when it is needed."""
    near_budget: int | str = "auto"
    """Bytes of the accelerator's memory for chunks: 64MiB, 25% of all model data (frozen_bits does not change it), min (the
    least that works), or auto (40 % of the GPU's free memory; without a GPU, all model data)."""
    far_budget: int | str = "auto"
    """Bytes of host memory for chunks: 2GiB, 80% of all model data, min (the least that works), or auto (no bound)."""
    near_memory: int | str = "auto"
    """Bytes of the accelerator for chunks and activations together, 12GiB for example. The first step measures the bytes of
    activations at each moment; from then on chunks get the rest, at most near_budget. auto: near_budget alone counts."""
    frozen_bits: int = 32
    """Bits of a frozen weight matrix in host memory, on disk and on the way: 32 (as the model computes with it), or 8 or 4
    (NF4) for codes, of which 64 share a scale: QLoRA (Dettmers et al. 2023). Near it is whole. Vectors keep all bits."""
    disk_path: str | None = None
    """A folder on a local disk for model data that exceed the far budget: optimizer states first, then parameters."""
    disk_budget: int | str = "auto"
    """Bytes of that disk: 100GiB, or auto (all that is free)."""
    near_states: str = "margin"
    """Groups whose optimizer states are in near. margin: as many as fit in addition to all parameters and the gradients that
    are there at the same time (PatrickStar). fill: as many as fit in addition to what a few modules need; parameters of
    other groups are then copied in backward too, in the opposite direction to their gradients: faster if a step waits for
    the link."""
    far_states: str = "auto"
    """Where groups with states in far are updated. host: in far, by the CPU. stream: in near; their states are copied there
    and back. auto: the faster one, by speeds that are measured at the start; host without a GPU and with a disk_path."""
    offload_activations: bool = False
    """Copy tensors that backward needs to host memory, if chunks leave room there, and back for backward."""
    overlap_update: bool = False
    """Update groups with states in far during the next forward, in its order; each group is waited for before its use."""
    speculative_update: bool = False
    """Update a group with states in far during backward, as soon as its gradients are complete; undo the update if the step
    is then clipped or skipped (SuperOffload, Lian et al. 2026). No number changes. It pays if few steps are clipped."""
    speculative_log: int | str = "auto"
    """Bytes of host memory, beside the far budget, for what these updates overwrite: 2GiB, 25% of all model data, or auto (a
    quarter of this process's share). When it is full, the other groups are updated after backward."""
    eviction_policy: str = "next_use"
    """next_use (Belady on the traced step, weighted with the bytes that move), lru or fifo."""
    compile: str | list = "none"
    """block: torch.compile compiles each element of the model's largest ModuleList, between the engine's hooks; near then
    holds all parameters of a block at once. Or a list of classes to compile, ["Block"]. none: nothing is compiled."""
    profile: str | None = None
    """A file to write a profile of the first steps to, one for each rank; `pstar trace` draws it."""
    simulated_link: float = 0.0
    """Bytes a second: copies between near and far take at least as long as a link of this speed would. For experiments; 0 is
    off."""
    release_after_init: bool = False
    """PatrickStar's key, accepted without effect: the start is lazy, and no process makes chunks that it does not own."""
    use_cpu_embedding: bool = False
    """Look up and update nn.Embedding modules in host memory: rows cross the link, not tables. Except tied embeddings."""
    client: ClientConfig = field(default_factory=ClientConfig)
    """PatrickStar's section of the chunk manager."""

    def __post_init__(self) -> None:
        self.given: frozenset[str] = frozenset()
        """The keys that were given, dotted, after translation; filled by load_config."""
        self.notes: tuple[Note, ...] = ()
        """What became of the keys of DeepSpeed and PatrickStar; filled by load_config."""
        if self.optimizer.type not in ("Adam", "AdamW"):
            raise ConfigError(f"optimizer.type is {self.optimizer.type!r}; choose Adam or AdamW")
        if self.optimizer.params.lr < 0 or self.optimizer.params.eps < 0 or self.optimizer.params.weight_decay < 0:
            raise ConfigError("optimizer.params: lr, eps and weight_decay must not be negative")
        if self.optimizer.params.state_bits not in (8, 32):
            raise ConfigError(f"optimizer.params.state_bits is {self.optimizer.params.state_bits}; choose 8 or 32")
        if self.frozen_bits not in (4, 8, 32):
            raise ConfigError(f"frozen_bits is {self.frozen_bits}; choose 4, 8 or 32 (no codes)")
        if len(self.optimizer.params.betas) != 2 or not all(0 <= beta < 1 for beta in self.optimizer.params.betas):
            raise ConfigError(f"optimizer.params.betas is {self.optimizer.params.betas}; give two numbers in [0, 1)")
        self._check_fp16()
        if self.gradient_clipping < 0:
            raise ConfigError(f"gradient_clipping is {self.gradient_clipping}; give 0 (off) or a positive norm")
        if self.scheduler.type is not None:
            check(self.scheduler.type, self.scheduler.params)
        elif self.scheduler.params:
            raise ConfigError("scheduler.params is given without scheduler.type; give the type as well")
        for name in ("train_batch_size", "train_micro_batch_size_per_gpu"):
            if (size := getattr(self, name)) is not None and size < 1:
                raise ConfigError(f"{name} is {size}; give at least 1")
        if self.gradient_accumulation_steps < 1:
            raise ConfigError(f"gradient_accumulation_steps is {self.gradient_accumulation_steps}; give at least 1")
        if self.eviction_policy not in ("next_use", "lru", "fifo"):
            raise ConfigError(f"eviction_policy is {self.eviction_policy!r}; choose next_use, lru or fifo")
        if self.near_states not in ("margin", "fill"):
            raise ConfigError(f"near_states is {self.near_states!r}; choose margin or fill")
        if self.far_states not in ("auto", "host", "stream"):
            raise ConfigError(f"far_states is {self.far_states!r}; choose auto, host or stream")
        if self.compile not in ("none", "block") and not _is_list_of_names(self.compile):
            raise ConfigError(f"compile is {_short(self.compile)}; choose none or block, or give a list of classes")
        self.prefetch = 2 if self.prefetch is True else int(self.prefetch)
        if self.prefetch < 0:
            raise ConfigError(f"prefetch is {self.prefetch}; give 0 (off) or how many moments to look ahead")
        if self.simulated_link < 0:
            raise ConfigError(f"simulated_link is {self.simulated_link}; give 0 (off) or bytes a second")
        self._check_speculation()
        if self.disk_path is None and self.disk_budget != "auto":
            raise ConfigError("disk_budget is given without disk_path; give the folder as well")
        if self.ownership not in ("whole", "sharded", "node"):
            raise ConfigError(f"ownership is {self.ownership!r}; choose whole, sharded or node")
        if self.communication not in ("group", "chunk"):
            raise ConfigError(f"communication is {self.communication!r}; choose group or chunk")
        if self.communication == "chunk" and self.ownership != "whole":
            raise ConfigError(f"communication is chunk and ownership is {self.ownership}, which gathers one chunk at a time "
                              "anyway; set communication to group or ownership to whole")
        size = self.default_chunk_size
        if size != "auto" and (not isinstance(size, int) or size < 1):
            raise ConfigError(f"default_chunk_size is {size!r}; give a positive number of elements, or auto")

    def _check_speculation(self) -> None:
        if not self.speculative_update:
            if self.speculative_log != "auto":
                raise ConfigError("speculative_log is given without speculative_update; set that to true as well")
            return
        if self.find_unused_parameters:
            raise ConfigError("speculative_update and find_unused_parameters are both true, but the latter reduces all "
                              "gradients after backward; choose one")
        if self.far_states == "stream":
            raise ConfigError("speculative_update is true and far_states is stream, but only the host updates groups during "
                              "backward; set far_states to host or auto")

    def for_ranks(self, num_ranks: int) -> "Config":
        """This configuration with the batch sizes and gradient_accumulation_steps that DeepSpeed's rule gives for a number
        of processes. Raises ConfigError where the rule does not hold."""
        if self.train_batch_size is None and self.train_micro_batch_size_per_gpu is None:
            return self
        given = "gradient_accumulation_steps" in self.given or self.gradient_accumulation_steps > 1
        found = batches(self.train_batch_size, self.train_micro_batch_size_per_gpu,
                        self.gradient_accumulation_steps if given else None, num_ranks)
        config = replace(self, train_batch_size=found.train, train_micro_batch_size_per_gpu=found.micro,
                         gradient_accumulation_steps=found.steps)
        config.given, config.notes = self.given | {"gradient_accumulation_steps"}, self.notes
        return config

    @property
    def precision(self) -> str:
        """The dtype in which the model computes: fp32, bf16 or fp16."""
        return "bf16" if self.bf16.enabled else "fp16" if self.fp16.enabled else "fp32"

    def _check_fp16(self) -> None:
        fp16 = self.fp16
        if fp16.enabled and self.bf16.enabled:
            raise ConfigError("bf16.enabled and fp16.enabled are both true; choose one")
        if not 0 <= fp16.loss_scale < float("inf"):
            raise ConfigError(f"fp16.loss_scale is {fp16.loss_scale}; give 0 (dynamic) or a positive number")
        if not 0 <= fp16.initial_scale_power <= 32:
            raise ConfigError(f"fp16.initial_scale_power is {fp16.initial_scale_power}, the scale would begin at 2 to that "
                              "power; give 0 to 32")
        for name in ("loss_scale_window", "hysteresis"):
            if getattr(fp16, name) < 1:
                raise ConfigError(f"fp16.{name} is {getattr(fp16, name)}; give at least 1")
        if not 0 < fp16.min_loss_scale <= 2.0**32:
            raise ConfigError(f"fp16.min_loss_scale is {fp16.min_loss_scale}; give a positive number up to 2^32")


def load_config(source: "dict[str, Any] | str | Path | Config | None") -> Config:
    """A checked Config from a dict, a JSON file, or None (all defaults). Keys of DeepSpeed and PatrickStar are translated.

    Raises ConfigError for an unreadable file, an unknown key (naming the most similar one), a value of a wrong type, and a
    key of DeepSpeed or PatrickStar that is refused.
    """
    if isinstance(source, Config):
        return source
    where = "the configuration"
    if isinstance(source, (str, Path)):
        where = str(source)
        text = _read(Path(source), where)
        try:
            source = json.loads(text)
        except RecursionError:
            raise ConfigError(f"{where}: not valid JSON: nested too deeply") from None
        except ValueError as error:
            raise ConfigError(f"{where}: not valid JSON: {error}") from error
    if source is not None and not isinstance(source, dict):
        raise ConfigError(f"{where}: expected a JSON object, found {type(source).__name__}")
    try:
        found = translate(source or {}, _own_keys(Config))
        config = _build(Config, found.values, where, "")
    except ConfigError as error:  # errors from __post_init__ do not name the file
        raise error if str(error).startswith(where) else ConfigError(f"{where}: {error}") from None
    config.given, config.notes = frozenset(_dotted(found.values)), tuple(found.notes)
    return config


def _own_keys(cls: type, prefix: str = "") -> dict[str, bool]:
    """Every key of pstar, dotted, and whether it takes text, as auto is; an object's name ends in a dot."""
    found = {}
    for name, kind in get_type_hints(cls).items():
        if is_dataclass(kind):
            found |= {f"{prefix}{name}.": False} | _own_keys(kind, f"{prefix}{name}.")
        else:
            found[prefix + name] = str in (get_args(kind) or (kind,)) and name != "type"
    return found


def _read(path: Path, where: str) -> str:
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # a pipe or a device may never end
            raise ConfigError(f"{where}: cannot be read: it is not a file")
        return path.read_text(encoding="utf-8-sig")
    except ConfigError:  # which is a ValueError
        raise
    except OSError as error:
        raise ConfigError(f"{where}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{where}: not valid JSON: it is not UTF-8 text") from error
    except ValueError as error:
        raise ConfigError(f"{where}: cannot be read: {error}") from error


def _dotted(values: dict[str, Any], prefix: str = "") -> list[str]:
    names = []
    for key, value in values.items():
        names += [prefix + key, *(_dotted(value, f"{prefix}{key}.") if isinstance(value, dict) else ())]
    return names


def _build(cls: type, values: dict[str, Any], where: str, prefix: str) -> Any:
    types = get_type_hints(cls)
    arguments = {}
    for key, value in values.items():
        if key not in types:
            raise ConfigError(f"{where}: {_unknown(key, value, types, prefix)}")
        arguments[key] = _convert(types[key], value, where, prefix + key)
    return cls(**arguments)


def _unknown(key: Any, value: Any, types: dict[str, Any], prefix: str) -> str:
    """The line about an unknown key. Keys of DeepSpeed's objects are unknown inside the object, whose own name is known."""
    while key in known(prefix) and isinstance(value, dict) and value:
        prefix, types = f"{prefix}{key}.", {}
        key, value = next(iter(value.items()))
    if key in known(prefix):
        return f"'{prefix}{key}' must be a JSON object, found {_short(value)}"
    names = sorted(types.keys() | known(prefix))
    similar = difflib.get_close_matches(str(key), names, n=1, cutoff=0.4)
    hint = f"; did you mean '{prefix}{similar[0]}'?" if similar else f"; known keys: {', '.join(types or names)}"
    return f"unknown key {_short(f'{prefix}{key}')}{hint}"


def _convert(kind: Any, value: Any, where: str, name: str) -> Any:
    if is_dataclass(kind):
        if not isinstance(value, dict):
            raise ConfigError(f"{where}: '{name}' must be a JSON object, found {_short(value)}")
        return _build(kind, value, where, name + ".")
    if (_is_number(value) and not -_MOST <= value <= _MOST) or (isinstance(value, float) and math.isnan(value)):
        raise ConfigError(f"{where}: '{name}' must be a finite number up to 2^63, found {_short(value)}")
    if get_origin(kind) is tuple:
        if not isinstance(value, (list, tuple)) or not all(_is_number(item) for item in value):
            raise ConfigError(f"{where}: '{name}' must be a list of numbers, found {_short(value)}")
        if not all(-_MOST <= item <= _MOST for item in value):
            raise ConfigError(f"{where}: '{name}' must be finite numbers, found {_short(value)}")
        return tuple(float(item) for item in value)
    if kind is float and _is_number(value):
        return float(value)
    allowed = get_args(kind) or (kind,)
    if isinstance(value, allowed) and (bool in allowed or not isinstance(value, bool)):
        return value
    names = " or ".join(getattr(item, "__name__", str(item)) for item in allowed)
    raise ConfigError(f"{where}: '{name}' must be {names}, found {_short(value)}")


def _is_list_of_names(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(name, str) for name in value)


def _short(value: Any) -> str:
    """The value's repr, cut to 80 characters."""
    try:
        text = repr(value)
    except (RecursionError, ValueError):  # nested too deeply, or too many digits
        text = type(value).__name__
    return text if len(text) <= 80 else text[:77] + "..."


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def sentences(cls: type) -> dict[str, str]:
    """{field: the sentence under it} of a dataclass of this file."""
    import ast
    import inspect
    import textwrap

    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0].body
    return {
        first.target.id: " ".join(second.value.value.split())
        for first, second in zip(body, body[1:], strict=False)
        if isinstance(first, ast.AnnAssign) and isinstance(second, ast.Expr) and isinstance(second.value, ast.Constant)
    }


def reference(cls: type = Config, prefix: str = "") -> list[tuple[str, Any, str]]:
    """(key, default, meaning) of every key, from the dataclasses and the sentence under each field."""
    rows, default, types, meanings = [], cls(), get_type_hints(cls), sentences(cls)
    for item in fields(cls):
        if is_dataclass(types[item.name]):
            rows += reference(types[item.name], f"{prefix}{item.name}.")
        else:
            rows.append((prefix + item.name, getattr(default, item.name), meanings[item.name]))
    return rows
