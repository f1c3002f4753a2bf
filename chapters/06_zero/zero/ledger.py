"""The bytes of a rank's model states and the bytes that it sends: measured, and by the formulas of the ZeRO paper.

The ledger adds up the storages of live tensors, each once, at two moments of a step: when backward has ended, and when the
update begins. It keeps the largest sum of each moment over the run. The formulas include the padding of the parameters.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

MIB = 1 << 20
KINDS = ("parameters", "gradients", "masters", "moments")


def state_formula(unit_numels: Iterable[int], stage: int, num_ranks: int, num_bytes: int, offload: str = "none"
                  ) -> dict[str, int]:  # fmt: skip
    """Bytes of one rank's model states when backward has ended (Rajbhandari et al. 2020, section 5).

    Args:
        unit_numels: number of parameters of each unit, without padding.
        stage: 0 to 3.
        num_ranks: the number of ranks, p.
        num_bytes: bytes of a parameter: 2, or 4 for fp32. In fp32 parameters are masters, unless only masters are offloaded.
        offload: none, optimizer, or optimizer,params.

    Returns:
        bytes by kind; bytes in host memory have the key 'host KIND'. Kinds of 0 bytes are left out.
    """
    shards = num_ranks if stage else 1
    sharded = sum(-(-numel // shards) for numel in unit_numels)
    whole = sum(unit_numels) if stage == 0 else shards * sharded
    separate = num_bytes == 2 or offload == "optimizer" or (offload != "none" and stage < 3)
    found = {
        "parameters": num_bytes * (sharded if stage == 3 else whole),
        "gradients": num_bytes * (sum(unit_numels) if stage == 1 else whole if stage == 0 else sharded),
        "masters": 4 * sharded if separate else 0,
        "moments": 8 * sharded,
    }
    host = {"none": (), "optimizer": ("masters", "moments", "gradients"), "optimizer,params": KINDS}[offload]
    host = [kind for kind in host if not (kind == "gradients" and stage == 1)]  # whole on the device until backward ends
    return {("host " + kind if kind in host else kind): n for kind, n in found.items() if n}


def sent_formula(unit_numels: list[int], stage: int, num_ranks: int, num_bytes: int, micro_batches: int = 1) -> int:
    """Bytes that a rank sends in a step: 2Ψ at stages 0, 1 and 2, 3Ψ at stage 3, each times (p - 1) / p.

    Stages 2 and 3 reduce every micro-batch. In each, stage 3 gathers a block twice: before its forward and its backward.
    The first unit (parameters outside the blocks) is kept from forward to backward, so it is gathered once.
    """
    shards = num_ranks if stage else 1
    padded = [-(-numel // shards) * shards for numel in unit_numels]
    once = sum(num_bytes * n * (num_ranks - 1) // num_ranks for n in padded)
    first = num_bytes * padded[0] * (num_ranks - 1) // num_ranks
    if stage == 0:
        return sum(2 * num_bytes * n * (num_ranks - 1) // num_ranks for n in padded)
    return {1: 2 * once, 2: (micro_batches + 1) * once, 3: micro_batches * (3 * once - first)}[stage]


class Ledger:
    """The measured bytes of one rank.

    Args:
        zero: a Sharded; the ledger reads its units, optimizer, host and comm.

    Attributes:
        states: moment -> kind -> bytes, from the step with the largest sum.
        gradients_bytes: largest number of bytes of whole gradients at a time, in backward.
        gathered_bytes: largest number of bytes of whole parameters at a time (stage 3).
    """

    def __init__(self, zero: Any) -> None:
        self.zero = zero
        self.states: dict[str, dict[str, int]] = {}
        self.gradients_bytes = self.gathered_bytes = 0

    def alive(self) -> dict[str, int]:
        """Bytes of the live tensors, by kind."""
        units, optimizer = self.zero.units, self.zero.optimizer
        states = optimizer.state.values() if optimizer is not None else ()
        host = self.zero.host is not None
        seen: set[int] = set()
        found: dict[str, int] = {}

        def add(kind: str, tensors: Iterable[Tensor | None]) -> None:
            for tensor in tensors:
                storage = None if tensor is None else tensor.untyped_storage()
                if storage is not None and storage.nbytes() and storage.data_ptr() not in seen:
                    seen.add(storage.data_ptr())
                    found[kind] = found.get(kind, 0) + storage.nbytes()

        add("parameters", [unit.full for unit in units])
        add("host parameters" if self.zero.params_on_host else "parameters", [unit.own for unit in units])
        add("gradients", [p.grad for unit in units for p in unit.parameters.values()])
        handed = [unit.grad for unit in units] + [piece.master.grad for unit in units for piece in unit.pieces]
        add("host gradients" if host else "gradients", handed)
        add("host masters" if host else "masters", [unit.master for unit in units])
        moments = [state[key] for state in states for key in ("exp_avg", "exp_avg_sq") if key in state]
        add("host moments" if host else "moments", moments)
        return found

    def sample(self, moment: str) -> None:
        """Records the live bytes at a moment of a step, if their sum is the largest yet."""
        now = self.alive()
        if sum(now.values()) > sum(self.states.get(moment, {}).values()):
            self.states[moment] = now

    def note_gradients(self) -> None:
        """Records the bytes of whole gradients, if they are the most yet."""
        grads = [p.grad for unit in self.zero.units for p in unit.parameters.values() if p.grad is not None]
        self.gradients_bytes = max(self.gradients_bytes, sum(grad.nbytes for grad in grads))

    def note_gathered(self) -> None:
        """Records the bytes of whole parameters, if they are the most yet."""
        now = sum(unit.full.untyped_storage().nbytes() for unit in self.zero.units)
        self.gathered_bytes = max(self.gathered_bytes, now)

    def formula(self) -> dict[str, int]:
        """The bytes that `states` should have after backward."""
        zero = self.zero
        offload = "none" if zero.host is None else "optimizer,params" if zero.params_on_host else "optimizer"
        numels = [unit.numel for unit in zero.units]
        return state_formula(numels, zero.stage, zero.comm.num_ranks, zero.units[0].full.element_size(), offload)

    def rows(self) -> list[tuple[str, str]]:
        """Rows for the summary of a run; rank 0 prints them."""
        zero, formula = self.zero, self.formula()
        measured = self.states.get("after backward", {})
        numels, element = [unit.numel for unit in zero.units], zero.units[0].full.element_size()
        # fmt: off
        rows = [("model states", f"{_mib(sum(measured.values()))} on rank 0 after backward, by the formula "
                                 f"{_mib(sum(formula.values()))}; {sum(numels):,} parameters, stage {zero.stage}")]
        for kind in (where + kind for where in ("", "host ") for kind in KINDS):
            if kind in measured or kind in formula:
                rows.append((f"  {kind}", f"{_mib(measured.get(kind, 0))}, by the formula {_mib(formula.get(kind, 0))}"))
        rows.append(("in the update", _mib(sum(self.states.get("in the update", {}).values()))))
        rows.append(("whole at a time", f"gradients {_mib(self.gradients_bytes)}, of {_mib(element * sum(numels))}"
                     + (f"; parameters {_mib(self.gathered_bytes)}" if zero.stage == 3 else "")))  # fmt: skip
        sent = ", ".join(f"{what} {_mib(n)}" for what, n in zero.comm.last_sent.items()) or "none: one process"
        rows.append(("sent in a step", sent))
        if zero.host is not None:
            last = zero.host.last
            rows.append(("moved in a step", f"{_mib(last['to_host_bytes'])} to the host, "
                                            f"{_mib(last['to_device_bytes'])} to the device"))  # fmt: skip
        return rows


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / MIB:.2f} MiB"
