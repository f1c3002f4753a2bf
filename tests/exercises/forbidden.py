"""For exercises that must use only sends and receives: inside the context, every collective raises Wrong."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch.distributed as dist

from tests.exercises.exercise import Wrong

COLLECTIVES = ("all_reduce", "reduce", "broadcast", "gather", "scatter", "all_gather", "all_gather_into_tensor",
               "reduce_scatter", "reduce_scatter_tensor", "all_to_all", "all_to_all_single", "all_gather_object",
               "broadcast_object_list", "gather_object")  # fmt: skip
SINCE_2_13 = ("all_gather_single", "reduce_scatter_single")


def _refuse(name: str) -> Callable:
    def refused(*_: Any, **__: Any) -> None:
        raise Wrong(f"dist.{name} is what this exercise is about: make it of sends and receives")

    return refused


@contextlib.contextmanager
def only_point_to_point() -> Iterator[None]:
    """Allows only dist.send, recv, isend, irecv, batch_isend_irecv and barrier."""
    names = (*COLLECTIVES, *(name for name in SINCE_2_13 if hasattr(dist, name)))
    with mock.patch.multiple(dist, **{name: _refuse(name) for name in names}):
        yield
