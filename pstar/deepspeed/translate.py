"""Applies the table of keys.py: a configuration of DeepSpeed or PatrickStar in, pstar's own keys and one line a fact out."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pstar.deepspeed.keys import AUTO, DEEPSPEED, IGNORED, KEYS, REFUSED, TAKEN, TRANSLATED, VALUE, Key
from pstar.errors import ConfigError

AUTO_WORDS = "The Trainer would write its arguments here: pstar takes its own defaults, so give what you need."
DECOUPLED = "DeepSpeed's Adam decouples weight decay unless adam_w_mode is false: AdamW here."
NO_SCHEDULE = ("Left out: only the Trainer knows the number of steps that is auto here. The learning rate stays as "
               "optimizer.params.lr says.")
TORCH_DECAY = "torch.optim.AdamW, which torch_adam chooses, decays by 0.01 unless told otherwise."
STEPS = ("warmup_num_steps", "total_num_steps")
_ROWS: dict[str, list[Key]] = {}
for _key in KEYS:
    _ROWS.setdefault(_key.name, []).append(_key)
_ORDER = {id(row): number for number, row in enumerate(KEYS)}
_OBJECTS = {name[:end] for name in _ROWS for end, letter in enumerate(name) if letter == "."}


@dataclass(frozen=True)
class Note:
    """What became of keys that share a fate and a reason."""

    fate: str
    sentence: str
    keys: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.fate}: {', '.join(self.keys)}: {self.sentence}"


@dataclass
class Translation:
    """pstar's keys, nested as in a file, and what became of the file's."""

    values: dict[str, Any]
    notes: list[Note] = field(default_factory=list)
    """One for each fate and sentence, in the order of the fates; empty if all keys are pstar's own."""


def known(prefix: str) -> set[str]:
    """The names that the table has directly below a dotted prefix ('' or 'zero_optimization.')."""
    return {name.removeprefix(prefix).partition(".")[0] for name in _ROWS if name.startswith(prefix)}


def translate(values: Mapping[str, Any], own: Mapping[str, Any]) -> Translation:
    """Translates a configuration.

    Args:
        values: the file's object.
        own: pstar's own keys, dotted, each with whether it takes the text auto; objects end in a dot.

    A key that is neither pstar's nor in the table stays where it is: load_config names the nearest known one. Raises
    ConfigError for a key that is refused.
    """
    kept, found, autos = _sorted_out(values, own)
    notes: dict[tuple[str, str], list[str]] = {}
    for name, value, row in sorted(found, key=lambda item: _ORDER[id(item[2])]):
        if row.fate == REFUSED:
            raise ConfigError(f"'{name}' is {_shown(value)}: {row.sentence}")
        for key, meant in row.into.items():
            _set(kept, key, value if meant is VALUE else meant)
        said = row.name if row.name != name and row.fate == IGNORED else f"{name} {_shown(value)}"
        mentioned = notes.setdefault((row.fate, row.sentence), [])
        mentioned += [] if said in mentioned else [said]
    if autos:
        notes.setdefault((TRANSLATED, AUTO_WORDS), []).extend(autos)
    _rules(values, kept, notes)
    order = (TAKEN, TRANSLATED, IGNORED)
    listed = [Note(fate, sentence, tuple(keys)) for (fate, sentence), keys in notes.items()]
    return Translation(kept, sorted(listed, key=lambda note: order.index(note.fate)))


def _sorted_out(values: Mapping[str, Any], own: Mapping[str, Any]) -> tuple[dict, list[tuple[str, Any, Key]], list[str]]:
    """(pstar's own keys, (name, value, row) of the table's, names of pstar's keys that are auto and do not take it)."""
    kept: dict[str, Any] = {}
    found, autos = [], []
    for name, value in _leaves(values, "", own):
        row = None if name in own and name in _OBJECTS else _row_of(name, value)    # "compile" is an object in DeepSpeed
        plain = row is not None and row.fate == TAKEN and not row.into and name in own
        if row is not None and (value != AUTO or row.fate == IGNORED) and not plain:
            found.append((name, value, row))
            if row.fate == TAKEN and name in own:
                _set(kept, name, value)
        elif value == AUTO and (row is not None or own.get(name) is False):
            autos.append(name)
        else:
            if plain:
                found.append((name, value, row))
            _set(kept, name, value)
    return kept, found, autos


def _leaves(values: Mapping[str, Any], prefix: str, own: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """(dotted name, value) of all keys, going into the objects that pstar or the table knows from inside."""
    for key, value in values.items():
        name = f"{prefix}{key}"
        if "." in str(key):    # else optimizer.type would be the key type in optimizer
            raise ConfigError(f"unknown key {str(key)[:80]!r}: write nested objects, as {{\"fp16\": {{...}}}}")
        row = _row_of(name, value, inherited=False) if isinstance(value, dict) else None
        inside = isinstance(value, dict) and (name + "." in own or name in _OBJECTS)
        if inside and not (row is not None and row.fate != IGNORED):
            yield from _leaves(value, f"{name}.", own)
        else:
            yield name, value


def _row_of(name: str, value: Any, inherited: bool = True) -> Key | None:
    """The first row of a key that is for this value; else that of the object that the key is in."""
    while name:
        for row in _ROWS.get(name, ()):
            if not row.on or any(value == each and type(value) in (type(each), int, float) for each in row.on):
                return row
        name = name.rpartition(".")[0] if inherited else ""
        if name in ("optimizer", "fp16", "bf16", "zero_optimization", "client", ""):
            return None
    return None


def _rules(values: Mapping[str, Any], kept: dict[str, Any], notes: dict[tuple[str, str], list[str]]) -> None:
    """What depends on several keys: a schedule without steps, one folder on the disk, whether Adam decouples decay."""
    if "scheduler" in kept:
        _schedule(values["scheduler"], kept, notes)
    zero = values.get("zero_optimization")
    offloads = [zero.get(f"offload_{what}") for what in ("optimizer", "param")] if isinstance(zero, dict) else []
    paths = {str(each["nvme_path"]) for each in offloads
             if isinstance(each, dict) and each.get("device") == "nvme" and each.get("nvme_path")}
    if len(paths) > 1:
        raise ConfigError(f"'zero_optimization' names two folders for nvme, {' and '.join(sorted(paths))}: give one of them "
                          "in both places, pstar has one disk_path")
    if any(isinstance(each, dict) and each.get("device") == "nvme" for each in offloads):
        if not paths:
            raise ConfigError("'zero_optimization' offloads to nvme without nvme_path: give the folder")
        kept |= {"disk_path": paths.pop()} | ({} if "far_budget" in kept else {"far_budget": "min"})
    optimizer = kept.get("optimizer")
    if isinstance(optimizer, dict) and DEEPSPEED & values.keys():
        _adam(values, optimizer, notes)


def _schedule(given: Any, kept: dict[str, Any], notes: dict[tuple[str, str], list[str]]) -> None:
    params = given.get("params") if isinstance(given, dict) else None
    autos = [name for name, value in params.items() if value == AUTO] if isinstance(params, dict) else []
    if left := [name for name in autos if name in STEPS]:
        notes[TRANSLATED, NO_SCHEDULE] = [f"scheduler.params.{name}" for name in left]
        del kept["scheduler"]
        for key in [key for key in notes if any(name.startswith("scheduler.") for name in notes[key])]:
            if key != (TRANSLATED, NO_SCHEDULE):
                notes[key] = [name for name in notes[key] if not name.startswith("scheduler.")]
                if not notes[key]:
                    del notes[key]
    elif autos:
        numbers = {name: value for name, value in params.items() if value != AUTO}
        kept["scheduler"]["params"] = numbers | ({"warmup_max_lr": None} if "warmup_max_lr" in autos else {})
        notes.setdefault((TRANSLATED, AUTO_WORDS), []).extend(f"scheduler.params.{name}" for name in autos)


def _adam(values: Mapping[str, Any], optimizer: dict[str, Any], notes: dict[tuple[str, str], list[str]]) -> None:
    """DeepSpeed's rule: AdamW if the name or adam_w_mode, true unless given, says so."""
    given = values.get("optimizer")
    params = given.get("params") if isinstance(given, dict) else None
    params = params if isinstance(params, dict) else {}
    if optimizer.get("type") == "Adam" and params.get("adam_w_mode", True) is not False:
        optimizer["type"] = "AdamW"
        if "adam_w_mode" not in params and params.get("weight_decay"):
            notes[TRANSLATED, DECOUPLED] = ["optimizer.type Adam"]
    if params.get("torch_adam") is True and "weight_decay" not in params and optimizer.get("type", "AdamW") == "AdamW":
        optimizer.setdefault("params", {})["weight_decay"] = 0.01
        notes[TRANSLATED, TORCH_DECAY] = ["optimizer.params.torch_adam true"]


def _set(values: dict[str, Any], name: str, value: Any) -> None:
    """Sets a dotted key in nested objects. A value that should be an object, and is not, stays: load_config refuses it."""
    *sections, last = name.split(".")
    value = dict(value) if isinstance(value, dict) else value    # the caller's object stays as it is
    for section in sections:
        values = values.setdefault(section, {})
        if not isinstance(values, dict):
            return
    if isinstance(value, dict) and isinstance(values.get(last), dict):
        values[last] |= value
    else:
        values[last] = value


def _shown(value: Any) -> str:
    """A value as JSON, cut to 40 characters."""
    try:
        text = f"{value:g}" if isinstance(value, float) else json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        text = type(value).__name__
    return text if len(text) <= 40 else text[:37] + "..."


@dataclass(frozen=True)
class Batches:
    """The three numbers of a batch; None where the file gives none."""

    train: int | None
    micro: int | None
    steps: int | None


def batches(train: int | None, micro: int | None, steps: int | None, num_ranks: int) -> Batches:
    """DeepSpeed's rule: train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps x processes.

    What is missing follows from the rest; with one of the three sizes given, one micro-step. Raises ConfigError where the
    rule does not hold.
    """
    if train is None and micro is None:
        return Batches(None, None, steps)
    if train is None:
        steps = steps or 1
        return Batches(micro * steps * num_ranks, micro, steps)
    if micro is not None and steps is None:
        steps = max(1, train // (micro * num_ranks))
    steps = steps or 1
    micro = micro or max(1, train // (num_ranks * steps))
    if train != micro * steps * num_ranks:
        raise ConfigError(f"train_batch_size is {train}, but train_micro_batch_size_per_gpu {micro} x "
                          f"gradient_accumulation_steps {steps} x {num_ranks} process(es) is {micro * steps * num_ranks}: "
                          "change one of them")
    return Batches(train, micro, steps)
