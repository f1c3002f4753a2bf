"""The loss scale (Micikevicius et al. 2018): a state machine of numbers. Knows no gradient; it is told how steps went.

fp16 is zero below 6e-8, and many gradients are smaller. So the loss is multiplied by a scale before backward, and the
gradients are divided by it on their way into the update. A scale that is too large makes one of them infinite: then the
step is skipped. A dynamic scale looks for the largest that works, by DeepSpeed's rules:

    good step, the window-th in a row       scale * 2, and as many overflows as at first are forgiven again
    overflow while some are forgiven        one fewer is; the scale stays          (hysteresis: how many, counted with the
    overflow when none is left              scale / 2, not below the minimum        first that is not; it is no factor)
"""

from pstar.errors import StateError

FACTOR = 2.0
LARGEST = 2.0**32    # gradients that are all zero would double it for ever
PATIENCE = 20
"""Steps skipped in a row, by a scale that cannot become smaller, after which a run has no hope."""


class LossScaler:
    """The scale of one run. Every rank has one, and all are told the same, so that all agree.

    Args:
        scale: at the start.
        dynamic: whether it changes.
        window: good steps in a row after which it doubles.
        hysteresis: the overflow that first halves it: 1 for every one, 2 forgives one.
        consecutive: a good step restores the forgiveness; else only a doubling does.
        minimum: it never becomes smaller.
        name: of the setting to blame in messages.
    """

    def __init__(self, scale: float = 1.0, dynamic: bool = False, window: int = 1000, hysteresis: int = 2,
                 consecutive: bool = False, minimum: float = 1.0, name: str = "fp16.loss_scale"):
        self.scale, self.dynamic, self.window = scale, dynamic, window
        self.hysteresis, self.consecutive, self.minimum, self.name = hysteresis, consecutive, minimum, name
        self.forgiving = hysteresis
        """Overflows until the scale is halved, the halving one counted."""
        self.good_steps = 0
        """Since the last overflow or doubling."""
        self.skipped_steps = 0
        """In the whole run."""
        self.skipped_in_a_row = 0
        """Those that no smaller scale can end."""

    def update(self, overflow: bool) -> None:
        """A step is over; with an overflow it was skipped. Sets the scale of the next one.

        Raises StateError after PATIENCE skipped steps in a row that no smaller scale can end.
        """
        stuck = not self.dynamic or self.scale <= self.minimum
        if not overflow:
            self.skipped_in_a_row = 0
            self.good_steps += 1
            if self.consecutive:
                self.forgiving = self.hysteresis
            if self.dynamic and self.good_steps == self.window:
                self.scale, self.good_steps, self.forgiving = min(self.scale * FACTOR, LARGEST), 0, self.hysteresis
            return
        self.skipped_steps += 1
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if stuck else 0
        self.good_steps = 0
        if self.dynamic and self.forgiving > 1:
            self.forgiving -= 1
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
        raise StateError(f"{skipped}: try a smaller learning rate, or look for a division by zero in a module, or for a "
                         "parameter of another one in a scripted function (NaN where it is not near: give its clone())")

    def state(self) -> dict[str, float]:
        """What a run that goes on needs; every number fits fp32 exactly (counts up to 2^24)."""
        return {"loss_scale": self.scale, "good_steps": float(self.good_steps), "forgiving": float(self.forgiving),
                "skipped_steps": float(self.skipped_steps)}

    def load(self, state: dict[str, float]) -> None:
        """Goes on from state(); a fixed scale is what the configuration says, not what it was."""
        self.skipped_steps = int(state["skipped_steps"])
        if self.dynamic:
            self.scale, self.good_steps = float(state["loss_scale"]), int(state["good_steps"])
            self.forgiving = min(int(state["forgiving"]), self.hysteresis)
