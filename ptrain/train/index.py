"""Reading a checkpoint's index without trusting it.

torch keeps the index of a checkpoint as a pickle, and a pickle may call anything. This reader
unpickles the few classes of an index and nothing else, and follows no file name that the manifest
does not list.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from ptrain.errors import refused

METADATA = ".metadata"
_REMEDY = "Continue from another checkpoint; ptrain did not write this one."
_CLASSES = (
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
    "Metadata",
    "MetadataIndex",
    "StorageMeta",
    "TensorProperties",
    "TensorStorageMetadata",
    "_MEM_FORMAT_ENCODING",
)
_UNPICKLED = (
    *(("torch.distributed.checkpoint.metadata", name) for name in _CLASSES),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),
)


class IndexReader(FileSystemReader):
    """Reads files that the manifest lists, and unpickles nothing but torch's own records."""

    def __init__(self, folder: Path, *, listed: frozenset[str]) -> None:
        super().__init__(folder)
        self._listed = listed

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with (Path(self.path) / METADATA).open("rb") as file:
            metadata = _Unpickler(file).load()
        if not isinstance(metadata, Metadata):
            raise refused(f"checkpoint {self.path}", f"{METADATA} contains no metadata", _REMEDY)
        for info in (metadata.storage_data or {}).values():
            if info.relative_path not in self._listed:
                raise refused(
                    f"checkpoint {self.path}",
                    f"{METADATA} refers to {info.relative_path!r}, which the manifest does not "
                    "list",
                    _REMEDY,
                )
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _Unpickler(pickle.Unpickler):
    """Pickle may call anything; this one knows the classes of a checkpoint's index only."""

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or (module, name) in _UNPICKLED:
            return super().find_class(module, name)
        raise refused(
            "checkpoint", f"{METADATA} refers to {module}.{name}, which is not allowed", _REMEDY
        )
