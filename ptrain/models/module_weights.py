"""The weights that a model begins with which is not built in: a folder of safetensors under the
module's own names. They are read some rows at a time: into the module before anything cuts it, or
where ranks cut rows alone, into the rows that a rank keeps of a module without values.

A tied tensor has several names, and a file any of them. transformers keeps some tensors under other
names than its files, and the experts of a layer stacked: its own conversion of a state of numbered
rows says which rows of ours are which of theirs.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ptrain.errors import refused
from ptrain.internals.fakes import detect_fake_mode, unset_fake_temporarily
from ptrain.models.huggingface import as_saved, is_of_transformers
from ptrain.models.pretrained import PretrainedFolder
from ptrain.models.published_names import StoredPiece
from ptrain.models.window import Window, whole

_MAY_LACK, _PASSED_OVER = "_keys_to_ignore_on_load_missing", "_keys_to_ignore_on_load_unexpected"


class NamedTensor(NamedTuple):
    """A parameter or a kept buffer, by all of its names: several, where it is tied."""

    names: tuple[str, ...]
    tensor: Tensor


@dataclass(frozen=True, slots=True)
class StoredRows:
    """One of theirs, in this `shape`, that is rows of one of ours, from the `first`; of ours all
    dimensions but the last are counted as one."""

    name: str
    first: int
    shape: tuple[int, ...]

    def of(self, tensor: Tensor) -> Tensor:
        """Return these rows of ours, as a view in the shape of theirs."""
        if tensor.shape == self.shape:
            return tensor
        count = math.prod(self.shape[:-1])
        rows = tensor.view(-1, tensor.shape[-1])[self.first : self.first + count]
        return rows.view(self.shape)

    def piece(self, shape: Sequence[int], window: Window, part: Tensor) -> StoredPiece | None:
        """Return what `part`, this window of ours in a `shape`, takes of theirs; None where they
        have no row in common. The window is whole but for its first dimension, unless theirs is
        ours."""
        if tuple(shape) == self.shape:
            return StoredPiece(self.name, window, part)
        assert all(size == n for (_, size), n in zip(window[1:], shape[1:], strict=True)), "rows"
        width = math.prod(shape[1:-1])
        begin, end = window[0][0] * width, sum(window[0]) * width
        first, last = max(begin, self.first), min(end, self.first + math.prod(self.shape[:-1]))
        if first >= last:
            return None
        place = part.view(-1, shape[-1])[first - begin : last - begin]
        return StoredPiece(self.name, ((first - self.first, last - first), (0, shape[-1])), place)


@dataclass(frozen=True, slots=True)
class StoredParts:
    """One of ours that is several of theirs, or one with another name."""

    rows: tuple[StoredRows, ...]
    is_transposed: bool = False
    section: None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Those of theirs."""
        return tuple(rows.name for rows in self.rows)

    def write(self, tensor: Tensor) -> Mapping[str, Tensor]:
        """Return theirs of this one by name."""
        return {rows.name: rows.of(tensor) for rows in self.rows}


class ModuleWeights:
    """What a module takes of a folder. Raises SpecError where the folder is not of this module, or
    as PretrainedFolder."""

    def __init__(self, module: nn.Module, folder: str) -> None:
        prefix = getattr(module, "base_model_prefix", "")
        prefixes = (f"{prefix}.",) if prefix else ()
        self._module, self._folder = module, PretrainedFolder(Path(folder), prefixes)
        self._stored = stored_rows(module)
        self._tensors = named_tensors(module)
        self._rows = {named.names[0]: [*self._of(named)] for named in self._tensors}
        self._require_all_used()

    @torch.no_grad()
    def read(self, *, only_buffers: bool = False) -> None:
        """Write to the module what the files have, in the dtypes of the module; or only to its
        buffers."""
        for (name, *_), tensor in self._tensors:
            if not (only_buffers and isinstance(tensor, nn.Parameter)):
                place = tensor.detach()
                self.read_window(name, place.shape, whole(place.shape), place, place.dtype)

    def read_window(
        self, name: str, shape: Sequence[int], window: Window, part: Tensor, dtype: torch.dtype
    ) -> None:
        """Write a window of a tensor of this shape to `part`, rounded to `dtype`. Where files have
        it in parts, the window is of whole rows of its first dimension."""
        if not part.numel():
            return
        for rows in self._rows[name]:
            if (piece := rows.piece(shape, window, part)) is not None:
                self._folder.read(piece, dtype)

    @property
    def bytes_read(self) -> int:
        """Bytes of tensors that have been read so far."""
        return self._folder.bytes_read

    def has(self, name: str) -> bool:
        """Return whether the folder has anything of a tensor, by the first of its names."""
        return bool(self._rows[name])

    def _of(self, named: NamedTensor) -> Iterator[StoredRows]:
        """Yield theirs of a tensor, by the names that they have in this folder."""
        tensor = named.tensor
        there = [theirs for name in named.names if (theirs := self._folder.called(name))]
        if not there and self._may_lack(named):
            return
        stored = self._stored[named.names[0]]
        for rows in [StoredRows(there[0], 0, tuple(tensor.shape))] if there else stored:
            theirs = self._folder.called(rows.name) or rows.name
            self._folder.require(theirs, rows.shape, tensor.dtype)
            yield replace(rows, name=theirs)

    def _may_lack(self, named: NamedTensor) -> bool:
        """Return whether a folder may lack a tensor, which then is as the constructor made it. It
        may lack no parameter: ranks that keep rows have none that was made."""
        if isinstance(named.tensor, nn.Parameter):
            return False
        is_own = not is_of_transformers(self._module)
        is_weight = named.tensor.is_floating_point()
        return is_own or not is_weight or self._says(_MAY_LACK, named.names[0])

    def _require_all_used(self) -> None:
        known = {self._folder.called(name) for name in self._module.state_dict()}
        others = self._folder.file_of.keys() - self._used() - known
        self._folder.refuse(name for name in others if not self._says(_PASSED_OVER, name))

    def _used(self) -> set[str]:
        return {rows.name for parts in self._rows.values() for rows in parts}

    def _says(self, attribute: str, name: str) -> bool:
        """Return whether the class of transformers has a pattern of this kind for a name."""
        patterns = getattr(self._module, attribute, None) or ()
        return any(re.search(pattern, name) for pattern in patterns)


def named_tensors(module: nn.Module) -> list[NamedTensor]:
    """Return the tensors of a module's state: parameters, and buffers that are kept."""
    by_tensor: dict[int, list[tuple[str, Tensor]]] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        is_extra = name.rpartition(".")[2] == "_extra_state"  # which a module makes when asked
        if isinstance(tensor, Tensor) and not is_extra:
            by_tensor.setdefault(id(tensor), []).append((name, tensor))
    return [
        NamedTensor(tuple(name for name, _ in named), named[0][1]) for named in by_tensor.values()
    ]


def stored_rows(module: nn.Module) -> Mapping[str, list[StoredRows]]:
    """Return how files have each tensor of a module, by the first of its names. Raises SpecError
    where they have it neither whole nor as rows."""
    shapes = {named.names[0]: tuple(named.tensor.shape) for named in named_tensors(module)}
    if not is_of_transformers(module):
        return {name: [StoredRows(name, 0, shape)] for name, shape in shapes.items()}
    state: dict[str, Tensor] = {}
    starts, names = [0], [*shapes]
    stored: dict[str, list[StoredRows]] = {name: [] for name in shapes}
    with unset_fake_temporarily():
        for name, shape in shapes.items():
            rows = torch.arange(math.prod(shape[:-1]), device="cpu") + starts[-1]
            state[name] = rows.view(*shape[:-1], 1) if shape else rows[0]
            starts.append(starts[-1] + len(rows))
        for theirs, rows in as_saved(module, state).items():
            first = int(rows.flatten()[0])
            place = bisect_right(starts, first) - 1
            name = names[place]
            if torch.equal(rows.flatten(), torch.arange(rows.numel(), device="cpu") + first):
                shape = (*rows.shape[:-1], *shapes[name][-1:])
                stored[name].append(StoredRows(theirs, first - starts[place], shape))
    for name, parts in stored.items():
        if sum(math.prod(rows.shape) for rows in parts) != math.prod(shapes[name]):
            finding = f"files have {name} of {type(module).__name__} neither whole nor as rows"
            raise refused("model.pretrained", finding, "name a model of another class")
    return stored


def holds_buffers(module: nn.Module) -> bool:
    """Return whether files of a module have buffers."""
    return bool(_buffers(module))


def _buffers(module: nn.Module) -> list[NamedTensor]:
    tensors = named_tensors(module)
    return [named for named in tensors if not isinstance(named.tensor, nn.Parameter)]


def kept_buffers(module: nn.Module, folder: str) -> dict[str, Tensor]:
    """Return the buffers that a folder has of a module, by name, whether the module has values or
    not. They are given to the module. Raises SpecError as ModuleWeights."""
    buffers = _buffers(module)
    if not buffers:
        return {}
    for (name, *_), tensor in buffers:
        owner, _, leaf = name.rpartition(".")
        if tensor.is_meta:
            setattr(module.get_submodule(owner), leaf, torch.empty_like(tensor, device="cpu"))
    weights = ModuleWeights(module, folder)
    weights.read(only_buffers=True)
    names = [name for (name, *_), _ in buffers if weights.has(name)]
    return {name: module.get_buffer(name) for name in names}


@contextmanager
def without_values() -> Iterator[None]:
    """Within it modules that are built have no values of parameters, which stay on meta; buffers
    are computed."""
    register = nn.Module.register_parameter

    def registered(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            param = nn.Parameter(param.to("meta"), requires_grad=param.requires_grad)
        register(module, name, param)

    nn.Module.register_parameter = registered
    try:
        yield
    finally:
        nn.Module.register_parameter = register


def require_module_weights(module: nn.Module, folder: str | None) -> None:
    """Raises SpecError unless a folder, where there is one, has what `module` needs, and nothing
    else."""
    if folder is not None:
        ModuleWeights(module, folder)


def read_module_weights(module: nn.Module, folder: str | None) -> None:
    """Let a module begin with the weights in a folder, where there is one; of parameters on meta
    nothing is read, and of fake tensors, which have no values."""
    if folder is not None and detect_fake_mode() is None:
        is_meta = any(parameter.is_meta for parameter in module.parameters())
        ModuleWeights(module, folder).read(only_buffers=is_meta)
