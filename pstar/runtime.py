"""PatrickStar's published import: `from pstar.runtime import initialize_engine`, as `from patrickstar.runtime import`."""

from pstar.engine import initialize_engine

__all__ = ["initialize_engine"]
