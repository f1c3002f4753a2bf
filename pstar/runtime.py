"""PatrickStar's published entry: `from pstar.runtime import initialize_engine` works as `from patrickstar.runtime` did."""

from pstar.engine import initialize_engine

__all__ = ["initialize_engine"]
