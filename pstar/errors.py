"""The engine's errors. Every message is one line that names the object at fault and says what to do."""


class PstarError(Exception):
    """Base of all errors that the engine raises on purpose."""

    one_line = True
    """The message says what is wrong and what to do: a program may show it without the traceback."""


class ConfigError(PstarError, ValueError):
    """A configuration that cannot be run: an unknown key, a bad value, a model without parameters."""


class BudgetError(PstarError, MemoryError):
    """A tier's byte budget cannot hold what must be in it at once."""


class StateError(PstarError, RuntimeError):
    """An illegal change of state: a bug in the engine, calls in a wrong order, or a parameter that is read between steps."""


class LateError(StateError, TimeoutError):
    """A collective that some ranks did not join before the process group's timeout: they hang, died, or call another one."""


class ArgumentError(PstarError, ValueError):
    """Bad arguments: tensors or numbers that a kernel cannot take; the message begins with the argument's name."""


class CheckpointError(PstarError, OSError):
    """A checkpoint that could not be written, is damaged, or is of another model."""


class ProfileError(PstarError, ValueError):
    """A profile that cannot be read, is damaged, lacks the requested steps, or cannot be written or drawn."""


class DiskError(PstarError, OSError):
    """The disk tier's folder or file failed: no space, no permission, a broken disk."""
