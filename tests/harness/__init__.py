"""Runs a function on several ranks (processes) and turns each way in which a rank can go wrong into a red test."""

from tests.harness.pool import RankFailure, RankPool, run_ranks

__all__ = ["RankFailure", "RankPool", "run_ranks"]
