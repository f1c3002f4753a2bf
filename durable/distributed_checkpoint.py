"""Reads checkpoints of torch.distributed.checkpoint (DCP) without running code that somebody hid in them.

DCP stores the metadata as a pickle, and a pickle can call any function. This reader allows only the classes below.
"""

from __future__ import annotations

import contextlib
import pickle
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata, StorageMeta

OF_METADATA = ("Metadata", "MetadataIndex", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata",
               "StorageMeta", "_MEM_FORMAT_ENCODING")  # fmt: skip
ALLOWED = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    *(("torch", name) for name, value in vars(torch).items() if isinstance(value, torch.dtype)),
    *(("torch.distributed.checkpoint.metadata", name) for name in OF_METADATA),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("pathlib", "PosixPath"),
    ("pathlib", "PurePosixPath"),
    ("pathlib._local", "PosixPath"),
}


class ForeignClass(pickle.UnpicklingError):
    """The metadata name a class or function that is not in ALLOWED.

    Attributes:
        name: its module and name.
    """

    def __init__(self, name: str) -> None:
        super().__init__(f"its metadata name {name}, which does not belong there")
        self.name = name


class Reader(FileSystemReader):
    """DCP's reader, with only the classes of ALLOWED in the metadata."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The metadata of the folder. Raises ForeignClass, or another UnpicklingError, or OSError."""
        with open(Path(self.path) / ".metadata", "rb") as stream:
            metadata = _Unpickler(stream).load()
        if getattr(metadata, "storage_meta", None) is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):  # early releases of Python 3.11 pickle an enum's member this way
            return self._member
        if (module, name) not in ALLOWED:
            raise ForeignClass(f"{module}.{name}")
        return super().find_class(module, name)

    @staticmethod
    def _member(enum: Any, name: str) -> Any:
        if enum is not _MEM_FORMAT_ENCODING:
            raise ForeignClass("builtins.getattr")
        return enum[name]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silences DCP's warning, at each call in a single process, that there is only one process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def last_line(error: BaseException) -> str:
    """The cause of an error in one line. DCP's CheckpointException holds the errors of all ranks: the first of them."""
    for inner in getattr(error, "failures", {}).values():
        return last_line(inner[0] if isinstance(inner, tuple) else inner)
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]
