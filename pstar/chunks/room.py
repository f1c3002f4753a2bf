"""How much of near chunks may take: what activations leave of `near_memory`, at least what the largest module needs."""

from collections.abc import Collection, Iterable

from pstar.chunks.peak_watch import PeakWatch
from pstar.chunks.update_tiers import UpdateTiers
from pstar.errors import BudgetError
from pstar.memory.tier import Tier, format_bytes
from pstar.planner.plan import Plan


class NearRoom:
    """The room of chunks in near, at each moment.

    Args:
        plan: its near_memory is shared by chunks and activations; None: only the budget counts.
        near: the tier.
        tiers: the tier of each group's optimizer states; states in near take room all the time.
        watch: writes the bytes of activations into the profile at each moment; None: activations are not measured.
    """

    def __init__(self, plan: Plan, near: Tier, tiers: UpdateTiers, watch: PeakWatch | None):
        self.plan, self.near, self.tiers, self.watch = plan, near, tiers, watch
        self.near_memory = plan.near_memory
        self.least_bytes = plan.least_near
        """Bytes of chunks with which every module can run; grows if modules borrow parameters from each other."""
        self._largest_peak = 0

    def left_by(self, peak: int | None) -> int | None:
        """Bytes that `peak` bytes of activations leave for chunks; the least that works if peak is not known (None).

        None if only the budget counts.
        """
        if self.near_memory is None:
            return None
        costs = self.plan.costs
        least = self.least_bytes + costs.states * self.tiers.near_elems + costs.scales * self.tiers.near_blocks
        return least if peak is None else max(self.near_memory - peak, least)

    def grow(self, num_bytes: int) -> bool:
        """Lets parameters take num_bytes in addition to what is in use in near; returns whether the budget allows it.

        With near_budget min the budget grows: the plan cannot know which modules borrow parameters or call other modules.
        """
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
        """Bytes left for chunks at every moment, given the peaks of all traces; None if optimizer states do not move for it.

        Raises BudgetError if it is too little for the largest module.
        """
        if self.near_memory is None:
            return None
        # The largest peak of the whole run: else states would move whenever the length of the inputs changes.
        self._largest_peak = most = max([self._largest_peak, *peaks])
        if self.near_memory - most < self.least_bytes:
            raise BudgetError(
                f"near_memory {format_bytes(self.near_memory)} is too small: activations take up to {format_bytes(most)} "
                f"and chunks need {format_bytes(self.least_bytes)}: give at least {most + self.least_bytes} bytes, "
                "a smaller micro-batch, activation checkpointing or offload_activations")
        if not self.plan.config.optimizer.params.use_hybrid_adam:
            return None
        return min(self.near.budget_bytes, self.near_memory - most)

    def groups_that_fit(self, margin: int) -> Collection[int]:
        """The groups whose optimizer states fit near, if chunks have `margin` bytes there."""
        return self.plan.choose_near_states(margin)
