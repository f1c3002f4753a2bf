"""What one rank reads from disk and writes to it in a step, predicted before any step has run.

The engine moves at most a few per cent more than the fewest bytes that must pass the disk (tests/pstar/memory). So the
prediction is that bound (schedule/least.py), for the step that the layout implies: forward, backward, the updates in order.
"""

from collections.abc import Iterable

from pstar.layout.budget import Costs
from pstar.layout.layout import Group, Layout
from pstar.schedule.least import Use, least_read_bytes, least_written_bytes

PARAM, GRAD, STATES = "param", "grad", "states"


def uses_of_step(layout: Layout, states_near: Iterable[int], micro_steps: int = 1) -> list[Use]:
    """The blocks that must be in memory together, moment by moment; states that stay in near are left out.

    On several ranks near holds whole gathered groups in addition, so a pass needs this rank's parameters alone, and then its
    gradients alone.
    """
    order, near = in_order(layout), set(states_near)
    alone = layout.num_ranks == 1

    def use(group: Group, *kinds: str, drops: tuple[str, ...] = ()) -> Use:
        return Use(frozenset((kind, group.index) for kind in kinds), frozenset((kind, group.index) for kind in drops))

    micro_step = [use(group, PARAM) for group in order]
    for group in reversed(order):
        if group.frozen:
            micro_step.append(use(group, PARAM))
        elif alone:
            micro_step.append(use(group, PARAM, GRAD))
        else:
            micro_step += [use(group, PARAM), use(group, GRAD)]
    states = {group.index: () if group.index in near else (STATES,) for group in layout.trained}
    updates = [use(group, PARAM, GRAD, *states[group.index], drops=(GRAD,)) for group in layout.trained]
    return micro_step * micro_steps + updates


def in_order(layout: Layout) -> list[Group]:
    """The groups in the order of forward: a layout numbers the frozen ones last, a model's layers have both kinds."""
    kinds = (layout.trained, layout.frozen)
    placed = [((number + 0.5) / len(groups), group) for groups in kinds for number, group in enumerate(groups)]
    return [group for _, group in sorted(placed, key=lambda item: (item[0], item[1].index))]


def disk_traffic(layout: Layout, states_near: list[int], costs: Costs, near_budget: int, far_budget: int,
                 micro_steps: int = 1, prefetch: int = 2) -> dict[str, int]:
    """{"disk to far": bytes, "far to disk": bytes} of one rank and step, whose host has far_budget bytes for chunks.

    prefetch: above 0, the states of the next update come while the last one runs, so their room is in use twice.
    """
    uses, near = uses_of_step(layout, states_near, micro_steps), set(states_near)
    states = {group.index: costs.state_bytes(group) for group in layout.trained}
    sizes: dict[tuple[str, int], int] = {}
    for group in layout.groups:
        sizes[PARAM, group.index] = costs.far_bytes(costs.param_bytes(group.piece_elems, group.coded))
        if not group.frozen:
            sizes[GRAD, group.index] = costs.far_bytes(costs.grad * group.piece_elems)
            sizes[STATES, group.index] = 0 if group.index in near else states[group.index]
    kept = sum(states[index] for index in near)
    in_flight = max((sizes[STATES, index] for index in states), default=0) if prefetch else 0
    room = far_budget + (near_budget - kept if layout.num_ranks == 1 else 0) - in_flight
    room = max(room, *(sum(sizes[key] for key in use.needs) for use in uses))
    read = round(least_read_bytes(uses, sizes, room))
    frozen = sum(sizes[PARAM, group.index] for group in layout.frozen)    # on disk since the first step, and unchanged
    # A gradient that grows in every micro-step is written as often as it is read.
    written = read if micro_steps > 1 else max(0, least_written_bytes(uses, sizes, room) - frozen)
    return {"disk to far": read, "far to disk": written}
