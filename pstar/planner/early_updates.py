"""Predicts what speculative_update brings: updates by the host during backward, and their repair. Pure numbers.

Without it a step is forward and backward, and then the update. With it the host updates groups during backward, and copies
what they overwrite: as many groups as backward is long enough for, and as fit into a log in the host memory that far leaves.
The others are updated after backward. A step that is clipped or skipped copies all that back, and updates again.

The model of times is that of predict.py: forward and backward take the longest of compute, link and collectives. It does not
know that parameters which are updated early also come back over the link early, and takes the host's memory as free for the
update while the link reads and writes it. Both are small where compute is the longest.
"""

from dataclasses import dataclass

from pstar.planner.adam_choice import adam_traffic_bytes
from pstar.planner.predict import Prediction, host_adam_rate


@dataclass(frozen=True)
class EarlyUpdates:
    """A step with speculative_update, and when that pays."""

    step_seconds: float
    """Of a step that is neither clipped nor skipped."""
    repair_seconds: float
    """More for one that is."""
    log_bytes: int
    """What the updates overwrite, of one rank."""
    share: float
    """Of the parameters with states in far: those that are updated during backward."""
    worth_below: float
    """It pays if less than this share of the steps is clipped or skipped; 0: it never does."""


def predict_early(answer: Prediction) -> EarlyUpdates | None:
    """None for a plan that does not fit, has no states in far or has some on disk, and for a host that computes no Adam."""
    host = answer.adam.host_seconds if answer.fits else 0.0
    if not 0 < host < float("inf") or answer.mode == "disk":
        return None
    costs, seconds = answer.job.costs, answer.seconds
    overwritten = costs.param + costs.states
    far_bytes = overwritten * host * host_adam_rate(answer.machine, costs)
    early = host * (1 + 2 * overwritten / adam_traffic_bytes(costs))    # what is overwritten is read and written once more
    backward = (3 / 4 if answer.job.recompute else 2 / 3) * seconds["passes"] / answer.job.micro_steps
    room = max(0, answer.far_room - answer.far_bytes)
    share = min(1.0, backward / early, room / far_bytes)
    step = seconds["passes"] + max(seconds["adam near"], (1 - share) * host)
    repair = share * early
    worth = min(1.0, max(0.0, seconds["step"] - step) / repair) if repair else 0.0
    return EarlyUpdates(step, repair, int(share * far_bytes), share, worth)
