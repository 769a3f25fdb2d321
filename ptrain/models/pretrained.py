"""The weights of a published model, from the safetensors in its folder: a rank reads the elements
that it keeps and no others, some rows at a time, so that it never has more than these beside them.

What files say is checked before any weight is read: every tensor of the model is there once, in its
shape, in a dtype of weights, in a file beside the index. Nothing that comes with weights is run.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ptrain.errors import refused
from ptrain.models.published_config import StoredPiece, StoredTensor, stored
from ptrain.models.window import Window, stretches
from ptrain.spec.model import ModelShape
from ptrain.spec.resolve_sections import CONFIG

INDEX, WHOLE = "model.safetensors.index.json", "model.safetensors"
WIDTHS = {"F32": 4, "BF16": 2, "F16": 2}  # bytes of an element
# What holds no reals is no weight, and stands in files in its own dtype.
_OTHERS = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "C64": torch.complex64,
}
_ALL_WIDTHS = {**WIDTHS, **{name: dtype.itemsize for name, dtype in _OTHERS.items()}}
MOST_MAPPED = 2**24  # bytes of a file that a process has in its memory at once
POSITIONS = "positions.weight"
_PLACE = "model.pretrained"
_AS_IT_IS = "write no sizes beside pretrained, or name the folder that has them"
_BARE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\.safetensors")
_PREFIXES = ("model.", "transformer.")
# Tables that older versions saved: they are made, not learnt.
_TABLES = re.compile(r".*\.(rotary_emb\.inv_freq|attn\.(masked_)?bias)")
_MOST_INDEX = 2**28  # bytes of an index: those of 405B have 10^5


def _wrong(folder: Path, finding: str, remedy: str = "") -> Exception:
    usual = "name a folder of safetensors that transformers loads"
    return refused(_PLACE, f"{folder}: {finding}", remedy or usual)


class PretrainedFolder:
    """The tensors of a folder by name, each in its file. `prefixes`: those that names of the whole
    model have and names of a bare one lack. Raises SpecError for files that are not there, not
    whole, outside the folder, or have a tensor twice."""

    def __init__(self, folder: Path, prefixes: Sequence[str] = ()) -> None:
        self.folder, self._prefixes = folder, prefixes
        safetensors = _safetensors()
        self._open, self._error = safetensors.safe_open, safetensors.SafetensorError
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, str] = {}
        self.file_of: dict[str, str] = {}
        self.bytes_read = 0  # of tensors, not of headers
        listed = self._index()
        for file in dict.fromkeys(listed.values()) if listed else [WHOLE]:
            self._read_header(file)
        for name, file in (listed or {}).items():
            if self.file_of.get(name) != file:
                elsewhere = self.file_of.get(name)
                has = f"it is in {elsewhere}" if elsewhere else "no file has it"
                raise _wrong(folder, f"{INDEX} says that {name} is in {file}, and {has}")

    def called(self, name: str) -> str | None:
        """Return the name that a tensor has in this folder; None where it is not there."""
        bare = (name.removeprefix(prefix) for prefix in self._prefixes)
        return next((name for name in (name, *bare) if name in self.file_of), None)

    def read(self, piece: StoredPiece, *dtypes: torch.dtype) -> None:
        """Write a window of a tensor to its place, rounded to all of `dtypes`, one after the other;
        one without dimensions is one row. A file is mapped anew for every MOST_MAPPED bytes: what
        was read of it counts as this process's memory until then, and of a slice along columns the
        kernel maps the rows whole."""
        place = torch.atleast_1d(piece.place)
        if not place.numel():
            return
        shape = self.shapes[piece.name]
        most = MOST_MAPPED // _ALL_WIDTHS[self.dtypes[piece.name]]
        for sizes, target in stretches(piece.window, place, shape, most):
            with self._open(self.folder / self.file_of[piece.name], "pt") as file:
                part = file.get_slice(piece.name)[tuple(slice(a, a + n) for a, n in sizes)]
                self.bytes_read += part.nbytes
                for dtype in dtypes:
                    part = part.to(dtype)
                target.copy_(part)

    def require(
        self, name: str, expected: tuple[int, ...], dtype: torch.dtype = torch.float32
    ) -> None:
        """Raises SpecError unless there is a tensor of this name, in this shape: of weights, or if
        `dtype` is none of reals, of this one."""
        if name not in self.file_of:
            raise _wrong(self.folder, f"there is no tensor {name}", _AS_IT_IS)
        if self.shapes[name] != expected:
            finding = f"{name} is {list(self.shapes[name])}, and the spec's model has {expected}"
            raise _wrong(self.folder, finding, _AS_IT_IS)
        if not dtype.is_floating_point:
            if _OTHERS.get(self.dtypes[name]) != dtype:
                finding = f"{name} is {self.dtypes[name]}, and the model has {str(dtype)[6:]}"
                raise _wrong(self.folder, finding, "write it in the dtype of the model")
        elif self.dtypes[name] not in WIDTHS:
            finding = f"{name} is {self.dtypes[name]}; weights are {', '.join(WIDTHS)}"
            raise _wrong(self.folder, finding)

    def refuse(self, others: Iterable[str]) -> None:
        """Raises SpecError for tensors that no part of a model takes, but tables that are made."""
        if surplus := sorted(name for name in others if not _TABLES.fullmatch(name)):
            finding = f"{len(surplus)} tensors are of no part of this model, as {surplus[0]}"
            raise _wrong(self.folder, finding, _AS_IT_IS)

    def _index(self) -> dict[str, str] | None:
        path = self.folder / INDEX
        if not path.exists():
            return None
        try:
            if path.stat().st_size > _MOST_INDEX:
                raise ValueError("is larger than any index")
            files = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            finding = f"{INDEX} cannot be read: {type(error).__name__}: {error}"
            raise _wrong(self.folder, finding) from error
        if not isinstance(files, dict) or not files:
            raise _wrong(self.folder, f"{INDEX} lists no tensors")
        for name, file in files.items():
            if not isinstance(file, str) or not _BARE.fullmatch(file):
                finding = f"{INDEX} says that {name} is in {file!r}, which is no file beside it"
                raise _wrong(self.folder, finding, "take the folder from where you trust it")
        return {**files}

    def _read_header(self, file: str) -> None:
        path = self.folder / file
        if path.is_symlink() and not path.exists():
            raise _wrong(self.folder, f"{file} is a link to nothing")
        if not path.is_file():
            raise _wrong(self.folder, f"there is no {file}")
        try:
            with self._open(path, "pt") as opened:
                for name in sorted(opened.keys()):
                    if name in self.file_of:
                        finding = f"{self.file_of[name]} and {file} both have {name}"
                        raise _wrong(self.folder, finding)
                    part = opened.get_slice(name)
                    self.file_of[name] = file
                    self.shapes[name] = tuple(part.get_shape())
                    self.dtypes[name] = str(part.get_dtype())
        except (OSError, ValueError, self._error) as error:
            raise _wrong(self.folder, f"{file} is no sound safetensors file: {error}") from error


class PretrainedWeights:
    """The initial parameters of a built-in model, from a folder. Raises SpecError where the folder
    is not of this model."""

    def __init__(self, shape: ModelShape) -> None:
        assert shape.pretrained is not None, "a folder is named"
        self._shape, self._folder = shape, PretrainedFolder(Path(shape.pretrained), _PREFIXES)
        self._kind = kind_of(Path(shape.pretrained))

    def require(self, parameters: Mapping[str, tuple[int, ...]]) -> None:
        """Raises SpecError unless the folder has these, by ptrain's names, and nothing else."""
        used: set[str] = set()
        for name, shape in parameters.items():
            of_files = self._stored(name)
            for theirs in map(self._called, of_files.names):
                used.add(theirs)
                expected = _expected(shape, of_files)
                if name == POSITIONS:
                    expected = self._longer(theirs, expected)
                self._folder.require(theirs, expected)
        self._folder.refuse(self._folder.file_of.keys() - used - {"lm_head.weight"})

    def read(
        self, name: str, shape: Sequence[int], window: Window, part: Tensor, dtype: torch.dtype
    ) -> None:
        """Write a window of a parameter, by ptrain's name, of this shape, to `part`, rounded to
        `dtype`. Of positions those of a sample are the first: the others are not trained."""
        for piece in self._stored(name).pieces(part, window):
            self._folder.read(piece._replace(name=self._called(piece.name)), dtype)

    @property
    def bytes_read(self) -> int:
        """Bytes of tensors that this process has read so far."""
        return self._folder.bytes_read

    def _stored(self, name: str) -> StoredTensor:
        return stored(self._kind, name, self._shape)

    def _called(self, theirs: str) -> str:
        """Return the name in this folder, or where it has none, that which it should have."""
        return self._folder.called(theirs) or theirs

    def _longer(self, name: str, expected: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of positions with as many as the folder has. Raises SpecError for fewer
        than a sample needs."""
        there = self._folder.shapes.get(name, expected)
        if there[1:] == expected[1:] and there[0] < expected[0]:
            finding = f"it has {there[0]} positions, and a sample {expected[0]} tokens"
            remedy = f"write batch.sequence={there[0]} or less"
            raise _wrong(self._folder.folder, finding, remedy)
        return (*there[:1], *expected[1:])


def _expected(shape: tuple[int, ...], of_files: StoredTensor) -> tuple[int, ...]:
    """Return the shape of theirs, of one of ours with this one."""
    if of_files.is_stacked:
        return shape[1:]
    if of_files.section is not None:
        shape = (of_files.section.total, *shape[1:])
    return shape[::-1] if of_files.is_transposed else shape


@lru_cache(maxsize=4)
def weights_of(shape: ModelShape) -> PretrainedWeights:
    """Return the weights that a shape begins with. Raises SpecError as PretrainedFolder."""
    return PretrainedWeights(shape)


def require_weights(module: nn.Module, shape: ModelShape) -> None:
    """Raises SpecError unless a shape's folder has what `module` needs, and nothing else."""
    parameters = {name: tuple(p.shape) for name, p in module.named_parameters()}
    weights_of(shape).require(parameters)


def _safetensors() -> Any:
    try:
        import safetensors
    except ImportError as error:
        finding = "its files are safetensors, and the library that reads them is not installed"
        raise refused(_PLACE, finding, "pip install safetensors") from error
    return safetensors


def kind_of(folder: Path) -> str:
    """Return the model type that a folder's config names, which has been read before."""
    config: dict[str, Any] = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    return str(config["model_type"])
