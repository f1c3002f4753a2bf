"""How --recompute cuts the blocks of a model. Imports no torch: a wrong value is answered before torch is loaded."""

from __future__ import annotations

import math
from dataclasses import dataclass

from gpt2_chinese.errors import UserError


@dataclass(frozen=True)
class Plan:
    """How the blocks are cut.

    Attributes:
        length: blocks in a segment, which keeps its input only; 0: every block keeps all.
        selective: a segment also keeps the results of matrix products and attention.
    """

    length: int = 0
    selective: bool = False

    @classmethod
    def of(cls, text: str, num_layers: int) -> Plan:
        """Reads the flag --recompute. Raises UserError.

        sqrt is the length for which inputs kept and activations of one segment are fewest together, O(sqrt(n)) each (Chen
        et al. 2016, section 4.1).
        """
        kind, _, number = text.partition(":")
        if text in ("none", "block", "selective"):
            return cls(0 if text == "none" else 1, text == "selective")
        if text == "sqrt":
            return cls(max(1, round(math.sqrt(num_layers))))
        if kind == "every" and number.isascii() and number.isdecimal() and int(number) > 0:
            if int(number) > num_layers:
                raise UserError(f"--recompute {text}: the model has {num_layers} layers, give every:{num_layers} at most")
            return cls(int(number))
        raise UserError(f"--recompute {text}: give none, block, every:K with K of at least 1, selective or sqrt")

    def cut(self, num_layers: int) -> list[range]:
        """The layers of each segment; [] without recomputation."""
        if not self.length:
            return []
        return [range(first, min(first + self.length, num_layers)) for first in range(0, num_layers, self.length)]
