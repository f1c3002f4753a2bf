"""Models and forwards that were not written for pstar, compared with torch's AdamW on one process, in the least near memory.

bash benchmarks/any_module.sh          # a minute

The models, patterns and operations are those of the tests (tests/pstar/test_zoo.py, tests/borrowers.py,
tests/pstar/chunks/test_borrowed.py), in fp32, a few steps each, gradients clipped. The gap is the largest relative
difference of a loss. It is not 0 because torch and pstar round differently inside Adam; with the same Adam the tests
check equal bits. The last table counts the calls that lending adds to a step, and times one call of each kind. Their sum
is far below the difference between two runs of the same step.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from facts import bullets, processor, shortened, versions, when_and_how

from durable.cores import num_cores

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
STEPS, GOAL, LONGEST, LAYERS = 4, 1e-6, 150, 12


def gap(model_func: Callable[[], Any], loss_of: Callable[[Any, int], Any]) -> tuple[float, int, float, str]:
    """(largest relative gap of a loss, parameters, near memory as a share of the model data, "lazy" or "ordinary" start)."""
    import torch

    from tests import toy

    torch.manual_seed(0)
    plain = model_func()
    trained = [param for param in plain.parameters() if param.requires_grad]
    adamw = torch.optim.AdamW(trained, lr=toy.LR, weight_decay=toy.WEIGHT_DECAY)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model, optimizer = toy.build(model_func, near_budget="min")
    losses = toy.losses_of_both(plain, adamw, model, optimizer, loss_of, STEPS)
    worst = max(abs(loss / expected - 1) for expected, loss in losses)
    num_params = sum(param.numel() for param in plain.parameters())
    plainly = any("lazy start" in str(warning.message) for warning in caught)
    return worst, num_params, model.near.budget_bytes / (16 * num_params), "ordinary" if plainly else "lazy"


def models() -> Iterator[str]:
    from tests.pstar.test_zoo import ZOO, loss_of

    yield from ("| model | parameters | start | near, of the model data | gap |", "|---|---:|---|---:|---:|")
    for name, (model_func, inputs) in ZOO.items():
        worst, num_params, near, start = gap(model_func, lambda model, step, make=inputs: loss_of(model(**make(step))))
        yield f"| {name} | {num_params:,} | {start} | {near:.0%} | {mark(worst)} |"


def patterns() -> Iterator[str]:
    from tests.borrowers import PATTERNS, rows

    yield from ("| a forward or a loop with | gap |", "|---|---:|")
    for name, (model_func, loss_of) in PATTERNS.items():
        worst, *_ = gap(model_func, lambda model, step, make=loss_of: make(model, rows(step)))
        yield f"| {name} | {mark(worst)} |"


def operations() -> Iterator[str]:
    import pstar
    from tests.pstar.chunks.test_borrowed import OPERATIONS, between_two_steps

    yield from ("| between two steps | the line |", "|---|---|")
    for name, (operation, _) in OPERATIONS.items():
        try:
            operation(between_two_steps())
            line = "works"
        except pstar.StateError as error:
            line = shortened(str(error), LONGEST)
        yield f"| `{name}` | `{line}` |"


def not_asking() -> Iterator[str]:
    import pstar
    from tests import toy
    from tests.borrowers import rows
    from tests.pstar.chunks.test_borrowed import NOT_ASKING, DoesNotAsk

    yield from ("| a forward that reads a parameter of another module in | the line |", "|---|---|")
    for name in NOT_ASKING:
        model, _ = toy.build(lambda read=name: DoesNotAsk(read), near_budget="min", default_chunk_size=300)
        try:
            model.backward(model(rows(0)))
            line = "works"
        except pstar.StateError as error:
            line = shortened(str(error), LONGEST)
        yield f"| {name} | `{line}` |"


def lending() -> Iterator[str]:
    """The time of lending in a step with LAYERS layers that borrows nothing: calls a step times seconds a call."""
    import statistics
    import time
    import timeit

    import torch

    from pstar.chunks.borrowed import Idle, idle_class
    from tests import toy

    model, optimizer = toy.build(lambda: toy.Toy(LAYERS), near_budget="min")
    calls = {"acquire": 0, "pack": 0}
    chunks, hooks = model._chunks, model._hooks
    acquire, pack = chunks.acquire, hooks._pack

    def counted_acquire(names: tuple[str, ...]) -> None:
        calls["acquire"] += len(names)
        acquire(names)

    def counted_pack(tensor: torch.Tensor) -> object:
        calls["pack"] += 1
        return pack(tensor)

    def step() -> float:
        begin = time.perf_counter()
        toy.train(model, optimizer, 1)
        return time.perf_counter() - begin

    seconds = statistics.median([step() for _ in range(9)][2:])
    chunks.acquire, hooks._pack = counted_acquire, counted_pack
    step()
    param, used, num = torch.nn.Parameter(torch.zeros(1)), {"weight"}, 100_000
    kind, idle, tensor = type(param), idle_class(type(param)), torch.zeros(1)

    def classes() -> None:
        param.__class__ = kind
        param.__class__ = idle

    costs = [("a parameter is acquired and released: its class changes twice", calls["acquire"], classes),
             ("a module runs: its parameters are noted as used", calls["acquire"], lambda: used.update(("weight",))),
             ("backward saves a tensor: its class is checked", calls["pack"], lambda: issubclass(type(tensor), Idle)),
             ("the forward begins and ends", 1, lambda: opened(hooks.lender))]  # fmt: skip
    yield from ("| where lending costs | times a step | microseconds each | of a step |", "|---|---:|---:|---:|")
    whole = 0.0
    for what, times, call in costs:
        each = min(timeit.repeat(call, number=num, repeat=5)) / num
        whole += times * each / seconds
        yield f"| {what} | {times} | {each * 1e6:.2f} | {times * each / seconds:.3%} |"
    yield f"| all of it, of a step of {seconds * 1e3:.0f} ms | | | {whole:.2%} |"


def opened(lender: Any) -> None:
    with lender.forward(False):
        pass


def mark(worst: float) -> str:
    """The gap; marked if it is above the goal."""
    return f"{worst:.1e}, **off**" if worst > GOAL else f"{worst:.1e}" if worst else "0"


def page(argv: list[str]) -> str:
    import torch
    import transformers

    torch.set_num_threads(1)
    facts = [("work", f"{STEPS} steps each, fp32, one process on 1 of {num_cores()} cores ({processor()}), near_budget min; "
                      f"goal: a gap of at most {GOAL:g}"),
             ("versions", versions(transformers=transformers.__version__)),
             *when_and_how("any_module.sh", argv)]  # fmt: skip
    parts = [("Architectures", models), ("Parameters of other modules", patterns), ("What is refused", operations),
             ("What is refused in a forward", not_asking), ("Cost where nothing is borrowed", lending)]
    lines = ["# Any module", "", *bullets(facts)]
    for title, rows in parts:
        lines += ["", f"## {title}", "", *rows()]
    return "\n".join([*lines, ""])


def main(argv: list[str] | None = None) -> int:
    given = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=HERE / "results", help="folder of any_module.md [%(default)s]")
    arguments = parser.parse_args(given)
    text = page(given)
    arguments.results.mkdir(parents=True, exist_ok=True)
    (arguments.results / "any_module.md").write_text(text, encoding="utf-8")
    print(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
