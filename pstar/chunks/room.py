"""What chunks may take of near: what activations leave of `near_memory`, never less than what the largest module needs."""

from collections.abc import Collection, Iterable

from pstar.chunks.peak_watch import PeakWatch
from pstar.chunks.update_tiers import UpdateTiers
from pstar.errors import BudgetError
from pstar.memory.tier import Tier, format_bytes
from pstar.planner.plan import Plan


class NearRoom:
    """The room of chunks near, at each moment.

    Args:
        plan: with near_memory, what chunks and activations share, or without it: then only the budget counts.
        near: the tier.
        tiers: where states lie: near, they take room that never leaves.
        watch: is told at each moment what activations take; None where nobody wants to know.
    """

    def __init__(self, plan: Plan, near: Tier, tiers: UpdateTiers, watch: PeakWatch | None):
        self.plan, self.near, self.tiers, self.watch = plan, near, tiers, watch
        self.near_memory = plan.near_memory
        self.least_bytes = plan.least_near
        """With which every module can run; grows where modules borrow from each other."""
        self._largest_peak = 0

    def beside(self, peak: int | None) -> int | None:
        """What chunks may take beside `peak` bytes of other things; the least that works while these are unknown (None).

        None where only the budget counts.
        """
        if self.near_memory is None:
            return None
        least = self.least_bytes + self.plan.costs.states * self.tiers.near_elems
        return least if peak is None else max(self.near_memory - peak, least)

    def grow(self, num_bytes: int) -> bool:
        """Near takes num_bytes beside what is in use there, for parameters; whether it may. With near_budget min, the least
        that works, the budget learns what the plan could not know: who borrows from whom, and calls modules of others."""
        near, needed = self.near, self.near.used_bytes + num_bytes
        if near.budget_bytes is not None and near.budget_bytes < needed:
            if self.plan.config.near_budget != "min":
                return False
            near.budget_bytes = needed
        self.least_bytes = max(self.least_bytes, needed)
        if near.limit_bytes is not None:
            near.limit(max(near.limit_bytes, needed))
        return True

    def margin(self, peaks: Iterable[int]) -> int | None:
        """What is left for chunks at all moments, given the peaks of all traces; None where states are not to move for it.

        Raises BudgetError where it is too little for the largest module.
        """
        if self.near_memory is None:
            return None
        # The largest of the whole run: states that followed each length would move with each.
        self._largest_peak = most = max([self._largest_peak, *peaks])
        if self.near_memory - most < self.least_bytes:
            raise BudgetError(
                f"near_memory {format_bytes(self.near_memory)} is too small: activations take up to {format_bytes(most)} "
                f"beside chunks, which need {format_bytes(self.least_bytes)}: give at least {most + self.least_bytes} "
                "bytes, a smaller micro-batch, activation checkpointing or offload_activations")
        if not self.plan.config.optimizer.params.use_hybrid_adam:
            return None
        return min(self.near.budget_bytes, self.near_memory - most)

    def groups_that_fit(self, margin: int) -> Collection[int]:
        """The groups whose states fit near, where chunks have `margin` bytes there."""
        return self.plan.homes(margin)
