"""The engine's own operations run outside of what the program has around its model.

torch.func's transforms (vmap, jvp) wrap each tensor that an operation makes, and would wrap the engine's buffers. A
TorchDispatchMode of the program sees each operation: selective activation checkpointing counts those of a forward, keeps the
results of some, and expects the same ones when it recomputes. Other chunks move then.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch._C import _len_torch_dispatch_stack as num_dispatch_modes
from torch._C._functorch import maybe_current_level as level_of_transforms
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils._python_dispatch import _disable_current_modes

from pstar.memory.activation_peak import LiveBytes

__all__ = ["level_of_transforms", "num_dispatch_modes", "outside_modes", "program_sees_operations"]


def program_sees_operations() -> bool:
    """Whether the innermost dispatch mode is the program's. LiveBytes is the engine's; it counts what moves allocate."""
    return not isinstance(torch._C._get_dispatch_stack_at(num_dispatch_modes() - 1), LiveBytes)


@contextmanager
def outside_modes() -> Iterator[None]:
    """Inside, no transform and no dispatch mode is in force."""
    with temporarily_clear_interpreter_stack(), _disable_current_modes():
        yield
