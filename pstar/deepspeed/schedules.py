"""DeepSpeed's learning rate schedules as formulas: the number of updates made so far in, the next update's rate out.

DeepSpeed's scheduler is stepped after each update, and its first update uses what it had set at its start. So update k,
counted from 0, uses the rate of DeepSpeed's iteration k - 1 (runtime/lr_schedules.py of DeepSpeed 0.19.8). OneCycle and
LRRangeTest are those of Smith, "A disciplined approach to neural network hyper-parameters", 2018, with the decay that
DeepSpeed adds.
"""

import difflib
import math
from collections.abc import Callable
from typing import Any

from pstar.errors import ConfigError

NEEDED = object()
"""The default of a parameter that must be given."""
_WARMUP = {"warmup_min_lr": 0.0, "warmup_max_lr": None, "warmup_num_steps": 1000, "warmup_type": "log"}
PARAMS: dict[str, dict[str, Any]] = {
    "WarmupLR": _WARMUP,
    "WarmupDecayLR": {"total_num_steps": NEEDED, **_WARMUP, "warmup_max_lr": 0.001},
    "WarmupCosineLR": {"total_num_steps": NEEDED, "warmup_min_ratio": 0.0, "warmup_num_steps": 1000,
                       "cos_min_ratio": 0.0001, "warmup_type": "log"},
    "OneCycle": {"cycle_min_lr": NEEDED, "cycle_max_lr": NEEDED, "decay_lr_rate": 0.0, "cycle_first_step_size": 2000,
                 "cycle_second_step_size": None, "cycle_first_stair_count": 0, "cycle_second_stair_count": None,
                 "decay_step_size": 0, "cycle_momentum": True, "cycle_min_mom": 0.8, "cycle_max_mom": 0.9,
                 "decay_mom_rate": 0.0},
    "LRRangeTest": {"lr_range_test_min_lr": 1e-3, "lr_range_test_step_size": 2000, "lr_range_test_step_rate": 1.0,
                    "lr_range_test_staircase": False},
}
"""The parameters of each schedule and their defaults; None: as the formula says."""
_POSITIVE = ("warmup_num_steps", "total_num_steps", "cycle_first_step_size", "lr_range_test_step_size")
BETA2 = 0.99
"""The second beta of OneCycle, which DeepSpeed sets together with the momentum."""


def check(kind: str, params: dict[str, Any]) -> dict[str, Any]:
    """All parameters of a schedule, defaults included. Raises ConfigError with what to change."""
    if kind not in PARAMS:
        raise ConfigError(f"scheduler.type is {kind!r}; choose {', '.join(PARAMS)}")
    defaults = PARAMS[kind]
    given = {name: value for name, value in params.items() if (name, value) != ("last_batch_iteration", -1)}
    for name, value in given.items():
        where = f"scheduler.params.{name}"
        if name not in defaults:
            near = difflib.get_close_matches(str(name), defaults, n=1, cutoff=0.4)
            raise ConfigError(f"unknown key '{where}'" + (f"; did you mean 'scheduler.params.{near[0]}'?" if near else
                                                          f"; {kind} knows {', '.join(defaults)}"))
        if name == "warmup_type":
            if value not in ("log", "linear"):
                raise ConfigError(f"{where} is {value!r}; choose log or linear")
            continue
        if isinstance(defaults[name], bool):
            if not isinstance(value, bool):
                raise ConfigError(f"{where} must be true or false, found {value!r:.40}")
            continue
        number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not number and not (value is None and (defaults[name] is None or name == "warmup_max_lr")):
            raise ConfigError(f"{where} must be a number, the same for all parameter groups, found {value!r:.40}")
        if number and (value < 0 or value < 1 and name in _POSITIVE):
            raise ConfigError(f"{where} is {value}; give {'at least 1' if name in _POSITIVE else '0 or more'}")
    if missing := [name for name, value in defaults.items() if value is NEEDED and name not in given]:
        raise ConfigError(f"scheduler.params.{missing[0]} is missing: {kind} needs it")
    return defaults | given


def _ramp(at: int, steps: int, kind: str) -> float:
    """From 0 to 1 over so many iterations, as DeepSpeed's warm-up goes; at counts from 0."""
    steps = max(2, steps)
    return at / steps if kind == "linear" else math.log(at + 1) / math.log(steps)


def _warmup(p: dict[str, Any], at: int, base: float, after: Callable[[int], float]) -> float:
    top = base if p["warmup_max_lr"] is None else p["warmup_max_lr"]
    if at < 0:
        return p["warmup_min_lr"]
    warms = at < max(2, p["warmup_num_steps"])
    share = _ramp(at, p["warmup_num_steps"], p["warmup_type"]) if warms else after(at)
    return p["warmup_min_lr"] + (top - p["warmup_min_lr"]) * share


def _decay(p: dict[str, Any], at: int) -> float:
    """WarmupDecayLR after the warm-up: linear from 1 to 0 at total_num_steps."""
    return max(0.0, (p["total_num_steps"] - at) / max(1.0, p["total_num_steps"] - max(2, p["warmup_num_steps"])))


def _cosine(p: dict[str, Any], at: int, base: float) -> float:
    warmup = max(2, p["warmup_num_steps"])
    if at < 0:
        return 0.0
    if at < warmup:
        return base * (p["warmup_min_ratio"] + (1 - p["warmup_min_ratio"]) * _ramp(at, warmup, p["warmup_type"]))
    gone = min(1.0, (at - warmup + 1) / max(1, p["total_num_steps"] - warmup))
    return base * max(0.0, p["cos_min_ratio"] + (1 - p["cos_min_ratio"]) * (1 + math.cos(math.pi * gone)) / 2)


def _halves(p: dict[str, Any]) -> tuple[float, float]:
    first, second = p["cycle_first_step_size"], p["cycle_second_step_size"]
    return float(first), float(first if second is None else second)


def _height(p: dict[str, Any], at: int) -> float:
    """OneCycle: 0 at the cycle's ends, 1 at its peak; in stairs if a count is given."""
    first, second = _halves(p)
    up, down = p["cycle_first_stair_count"], p["cycle_second_stair_count"]
    inside = (at + 1) % (first + second)
    rises = inside <= first
    way, size = (inside, first) if rises else (first + second - inside, second)
    stairs = up if rises or down is None else down
    return math.floor(way * stairs / size) / stairs if stairs > 0 else way / size


def _one_cycle(p: dict[str, Any], at: int) -> float:
    low, high, total = p["cycle_min_lr"], p["cycle_max_lr"], sum(_halves(p))
    if at < 0:
        return low
    if at < total:
        return low + (high - low) * _height(p, at)
    decays = p["decay_step_size"] > 0
    return low / (1 + p["decay_lr_rate"] * (at - total + 1) / p["decay_step_size"]) if decays else low


def _range_test(p: dict[str, Any], at: int) -> float:
    interval = (at + 1) / p["lr_range_test_step_size"]
    interval = math.floor(interval) if p["lr_range_test_staircase"] else interval
    return p["lr_range_test_min_lr"] * (1 + p["lr_range_test_step_rate"] * interval)


_FORMULAS: dict[str, Callable[[dict[str, Any], int, float], float]] = {
    "WarmupLR": lambda p, at, base: _warmup(p, at, base, lambda _: 1.0),
    "WarmupDecayLR": lambda p, at, base: _warmup(p, at, base, lambda at: _decay(p, at)),
    "WarmupCosineLR": _cosine,
    "OneCycle": lambda p, at, _: _one_cycle(p, at),
    "LRRangeTest": lambda p, at, _: _range_test(p, at),
}


def learning_rate(kind: str, params: dict[str, Any], updates: int, base: float) -> float:
    """The rate of the update after so many updates. params: from check(). base: the optimizer's own learning rate."""
    return _FORMULAS[kind](params, updates - 1, base)


def betas(kind: str, params: dict[str, Any], updates: int) -> tuple[float, float] | None:
    """Adam's betas for the update after so many updates; None unless the schedule changes them (OneCycle)."""
    if kind != "OneCycle" or not params["cycle_momentum"]:
        return None
    at, total = updates - 1, sum(_halves(params))
    low, high = params["cycle_min_mom"], params["cycle_max_mom"]
    if at < 0:
        return low, BETA2
    if at < total:
        return high - (high - low) * _height(params, at), BETA2
    decays = params["decay_step_size"] > 0
    grown = 1 + params["decay_mom_rate"] * (at - total + 1) / params["decay_step_size"] if decays else 1.0
    return high * grown, BETA2
