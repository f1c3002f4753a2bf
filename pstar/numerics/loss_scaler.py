"""The loss scale (Micikevicius et al. 2018): a state machine of numbers. It sees no gradients; `update` reports each step.

Numbers below 6e-8 are zero in fp16, and many gradients are smaller. So the loss is multiplied by a scale before backward,
and the update divides the gradients by it. A scale that is too large makes a gradient infinite: then the step is skipped.
A dynamic scale searches for the largest one that works, by DeepSpeed's rules:

    good step, the window-th in a row       scale * 2, and overflows_left is reset to hysteresis
    overflow with overflows_left > 1        overflows_left - 1; the scale stays
    overflow with overflows_left = 1        scale / 2, not below the minimum
"""

from pstar.config import Fp16Config
from pstar.errors import StateError

FACTOR = 2.0
LARGEST = 2.0**32    # without a limit, gradients that are all zero would double the scale for ever
PATIENCE = 20
"""The run ends with an error after this many skipped steps in a row, if the scale cannot become smaller."""


class LossScaler:
    """The scale of one run. Every rank has one; all ranks make the same calls, so their scales are equal.

    Args:
        scale: the scale at the start.
        dynamic: whether the scale changes.
        window: good steps in a row after which it doubles.
        hysteresis: overflows until the scale is halved for the first time: 1 halves it at the first one, 2 at the second.
        consecutive: a good step resets overflows_left; else only a doubling does.
        minimum: the smallest scale.
        name: the setting that holds the scale, for messages.
    """

    def __init__(self, scale: float = 1.0, dynamic: bool = False, window: int = 1000, hysteresis: int = 2,
                 consecutive: bool = False, minimum: float = 1.0, name: str = "fp16.loss_scale"):
        self.scale, self.dynamic, self.window = scale, dynamic, window
        self.hysteresis, self.consecutive, self.minimum, self.name = hysteresis, consecutive, minimum, name
        self.overflows_left = hysteresis
        """Overflows until the scale is halved; 1: the next one halves it."""
        self.good_steps = 0
        """Good steps since the last overflow or doubling."""
        self.skipped_steps = 0
        """Skipped steps in the whole run."""
        self.skipped_in_a_row = 0
        """Steps skipped in a row with a scale that cannot become smaller."""

    def update(self, overflow: bool) -> None:
        """Sets the scale of the next step. Called after each step; overflow: the step was skipped.

        Raises StateError after PATIENCE steps skipped in a row with a scale that cannot become smaller.
        """
        stuck = not self.dynamic or self.scale <= self.minimum
        if not overflow:
            self.skipped_in_a_row = 0
            self.good_steps += 1
            if self.consecutive:
                self.overflows_left = self.hysteresis
            if self.dynamic and self.good_steps == self.window:
                self.scale, self.good_steps, self.overflows_left = min(self.scale * FACTOR, LARGEST), 0, self.hysteresis
            return
        self.skipped_steps += 1
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if stuck else 0
        self.good_steps = 0
        if self.dynamic and self.overflows_left > 1:
            self.overflows_left -= 1
        elif self.dynamic:
            self.scale = max(self.scale / FACTOR, self.minimum)
        if self.skipped_in_a_row == PATIENCE:
            self._give_up()

    def _give_up(self) -> None:
        skipped = f"{PATIENCE} steps in a row were skipped because gradients were not finite"
        if self.dynamic:
            raise StateError(f"{skipped}, down to a loss scale of {self.scale:g}: the loss itself overflows; "
                             "try a smaller learning rate, or bf16")
        if self.scale != 1.0:
            raise StateError(f"{skipped}: {self.name} {self.scale:g} is too large; give a smaller one, or 0 (dynamic)")
        raise StateError(f"{skipped}: try a smaller learning rate, look for a division by zero, or look for a scripted "
                         "function that reads another module's parameter (NaN while it is not near: pass its clone())")

    def state(self) -> dict[str, float]:
        """The state for a checkpoint, under its file names; every number fits fp32 exactly (counts up to 2^24)."""
        return {"loss_scale": self.scale, "good_steps": float(self.good_steps),
                "forgiving": float(self.overflows_left), "skipped_steps": float(self.skipped_steps)}

    def load(self, state: dict[str, float]) -> None:
        """Continues from state(); a fixed scale is the configuration's, not the checkpoint's."""
        self.skipped_steps = int(state["skipped_steps"])
        if self.dynamic:
            self.scale, self.good_steps = float(state["loss_scale"]), int(state["good_steps"])
            self.overflows_left = min(int(state["forgiving"]), self.hysteresis)


def scaler_for(fp16: Fp16Config) -> LossScaler:
    """The configured loss scale; without fp16 it is 1 and stays 1."""
    if not fp16.enabled:
        return LossScaler()
    if fp16.loss_scale > 0:
        return LossScaler(fp16.loss_scale)
    return LossScaler(max(2.0**fp16.initial_scale_power, fp16.min_loss_scale), True, fp16.loss_scale_window, fp16.hysteresis,
                      fp16.consecutive_hysteresis, fp16.min_loss_scale)
