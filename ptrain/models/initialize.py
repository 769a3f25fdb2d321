"""Build a spec's model and initialize its weights from the seed and each parameter's name alone.

Every tensor is drawn whole, in fp32 on the CPU, from a generator of its own, and cast afterwards:
whatever the placement, the dtype or the rank, the model starts from the same numbers. A model
built on the meta device is made real by

    module.to_empty(device=...)     # no values yet, neither parameters nor buffers
    initialize(module, seed)        # fills both

or, where a rank keeps only a part, part by part by `InitialValues` and then `reset_buffers`.
A module with buffers defines how to refill them in a method `reset_buffers(self) -> None`.

A built-in model whose spec names a published one's folder begins with the weights in it.

A model that is not ptrain's keeps its constructor's values (`keeps_its_weights`): `build` seeds
torch's generator before it constructs, so every rank has the same weights. `models.drawn` gives
these tensor by tensor; a rank builds a full model only if this cannot represent it.

Initial weights of a model that is not built in may come from a folder of safetensors under the
module's own names. They are read some rows at a time: into the part that a rank keeps of a module
without values, or into a full module before it is sharded.

A tied tensor has several names, and a file any of them. transformers keeps some tensors under other
names than its files, and the experts of a layer stacked: its own conversion of a state of numbered
rows shows which rows of ours are which of theirs.

A module that the user built may replace the spec's model: any module with `forward(tokens) ->
logits`, on the CPU or the rank's device, with its weights. A causal language model of transformers
returns its logits inside an object. From here on it returns the logits alone, unless the spec's
loss is a function of the user's.
"""

from __future__ import annotations

import hashlib
import math
import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import NamedTuple, assert_never

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ptrain.errors import SpecError, refused
from ptrain.facts.parameters import OF_VOCABULARY
from ptrain.internals.fakes import detect_fake_mode, unset_fake_temporarily
from ptrain.models.drawn import DrawnWeights
from ptrain.models.external import build_external
from ptrain.models.meta import materialize_built_on_meta
from ptrain.models.numerics import TORCH_DTYPES
from ptrain.models.pretrained import (
    PretrainedFolder,
    as_saved,
    build_hugging_face,
    gives_objects,
    is_of_transformers,
    require_weights,
    to_logits,
    weights_of,
)
from ptrain.models.published_config import StoredPiece
from ptrain.models.transformer import Transformer
from ptrain.models.window import Window, narrowed, whole
from ptrain.spec.block import Norm
from ptrain.spec.extras import require_leave_of
from ptrain.spec.misfits import misfits
from ptrain.spec.model import ExternalModel, HuggingFaceModel, ModelShape, ModelSpec
from ptrain.spec.spec import Spec
from ptrain.units import grouped

_MATRIX = 2  # dimensions
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
        return tensor.view(-1, tensor.shape[-1])[self.first : self.first + count].view(self.shape)

    def pieces(self, shape: Sequence[int], window: Window, part: Tensor) -> Iterator[StoredPiece]:
        """Yield what `part`, this window of ours in a `shape`, takes of theirs."""
        if tuple(shape) == self.shape:
            yield StoredPiece(self.name, window, part)
            return
        end, place = self.first + math.prod(self.shape[:-1]), 0
        for begin, count in _runs(shape[:-1], window[:-1]):
            first, last = max(begin, self.first), min(begin + count, end)
            if first < last:
                lines = part.view(-1, part.shape[-1])[place : place + count]
                yield from self._lines(first, lines[first - begin : last - begin], window[-1])
            place += count

    def _lines(self, first: int, place: Tensor, columns: tuple[int, int]) -> Iterator[StoredPiece]:
        """Yield rows of ours from the `first` on, all of which are rows of theirs."""
        first -= self.first
        if len(self.shape) == _MATRIX:
            yield StoredPiece(self.name, ((first, len(place)), columns), place)
            return
        for row, line in enumerate(place, first):
            index: list[tuple[int, int]] = []
            for size in reversed(self.shape[:-1]):
                row, at = divmod(row, size)
                index.insert(0, (at, 1))
            lead = (1,) * len(index)
            yield StoredPiece(self.name, (*index, columns), line.view(*lead, -1))


def _runs(shape: Sequence[int], window: Window) -> Iterator[tuple[int, int]]:
    """Yield where the places of a window of a tensor of this shape are, counted through, as runs:
    the first and how many."""
    depth = len(shape)
    while depth > 1 and window[depth - 1] == (0, shape[depth - 1]):
        depth -= 1
    width = math.prod(shape[depth:])
    offset, size = window[depth - 1]
    for index in product(*(range(first, first + count) for first, count in window[: depth - 1])):
        start = 0
        for at, length in zip(index, shape, strict=False):
            start = start * length + at
        yield (start * shape[depth - 1] + offset) * width, size * width


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
    """What a module takes of a folder, rounded to the dtypes that it has now. The module need have
    no values, and is not kept. Raises SpecError where the folder is not of this module, or as
    PretrainedFolder."""

    def __init__(self, module: nn.Module, folder: str) -> None:
        prefix = getattr(module, "base_model_prefix", "")
        self._folder = PretrainedFolder(Path(folder), (f"{prefix}.",) if prefix else ())
        stored, tensors = stored_rows(module), named_tensors(module)
        self._rows: dict[str, list[StoredRows]] = {}
        self._dtypes: dict[str, torch.dtype] = {}
        for named in tensors:
            rows = [*self._of(module, named, stored[named.names[0]])]
            self._rows |= dict.fromkeys(named.names, rows)
            self._dtypes |= dict.fromkeys(named.names, named.tensor.dtype)
        self._require_all_used(module)

    @torch.no_grad()
    def read(self, module: nn.Module, *, only_buffers: bool = False) -> None:
        """Write to the module what the files have, in the dtypes of the module; or only to its
        buffers."""
        for (name, *_), tensor in named_tensors(module):
            if not (only_buffers and isinstance(tensor, nn.Parameter)):
                place = tensor.detach()
                self.read_window(name, place.shape, whole(place.shape), place, place.dtype)

    def read_window(
        self, name: str, shape: Sequence[int], window: Window, part: Tensor, dtype: torch.dtype
    ) -> None:
        """Write a window of a tensor of this shape to `part`, rounded to the dtype that the module
        had and then to `dtype`."""
        if not part.numel():
            return
        for rows in self._rows[name]:
            for piece in rows.pieces(shape, window, part):
                self._folder.read(piece, self._dtypes[name], dtype)

    @property
    def bytes_read(self) -> int:
        """Bytes of tensors that have been read so far."""
        return self._folder.bytes_read

    def has(self, name: str) -> bool:
        """Return whether the folder has anything of a tensor, by any of its names."""
        return bool(self._rows[name])

    def _of(
        self, module: nn.Module, named: NamedTensor, stored: Sequence[StoredRows]
    ) -> Iterator[StoredRows]:
        """Yield theirs of a tensor, by the names that they have in this folder; `stored`: those
        that they usually have."""
        tensor = named.tensor
        there = [theirs for name in named.names if (theirs := self._folder.called(name))]
        if not there and _may_lack(module, named):
            return
        for rows in [StoredRows(there[0], 0, tuple(tensor.shape))] if there else stored:
            theirs = self._folder.called(rows.name) or rows.name
            self._folder.require(theirs, rows.shape, tensor.dtype)
            yield replace(rows, name=theirs)

    def _require_all_used(self, module: nn.Module) -> None:
        known = {self._folder.called(name) for name in module.state_dict()}
        used = {rows.name for parts in self._rows.values() for rows in parts}
        others = self._folder.file_of.keys() - used - known
        self._folder.refuse(name for name in others if not _says(module, _PASSED_OVER, name))


def _may_lack(module: nn.Module, named: NamedTensor) -> bool:
    """Return whether a folder may lack a tensor, which then is as the constructor made it. It may
    lack no parameter: ranks that keep a part have none that was made."""
    if isinstance(named.tensor, nn.Parameter):
        return False
    is_own = not is_of_transformers(module)
    is_weight = named.tensor.is_floating_point()
    return is_own or not is_weight or _says(module, _MAY_LACK, named.names[0])


def _says(module: nn.Module, attribute: str, name: str) -> bool:
    """Return whether the class of transformers has a pattern of this kind for a name."""
    patterns = getattr(module, attribute, None) or ()
    return any(re.search(pattern, name) for pattern in patterns)


def named_tensors(module: nn.Module) -> list[NamedTensor]:
    """Return the tensors of a module's state: parameters, and buffers that are kept."""
    state = module.state_dict(keep_vars=True)
    by_tensor = grouped(
        (id(tensor), (name, tensor))
        for name, tensor in state.items()
        if isinstance(tensor, Tensor)
        and name.rpartition(".")[2] != "_extra_state"  # which a module makes when asked
    )
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
            raise refused(
                "model.pretrained",
                f"the files contain {name} of {type(module).__name__} neither as one "
                "tensor nor as rows of one",
                "Use a model of another class.",
            )
    return stored


def holds_buffers(module: nn.Module) -> bool:
    """Return whether files of a module have buffers."""
    return bool(_buffers(module))


def _buffers(module: nn.Module) -> list[NamedTensor]:
    return [named for named in named_tensors(module) if not isinstance(named.tensor, nn.Parameter)]


def kept_buffers(module: nn.Module, folder: str) -> dict[str, Tensor]:
    """Return the buffers that a folder has of a module, by name, whether the module has values or
    not. They are given to the module. Raises SpecError as ModuleWeights."""
    if not (buffers := _buffers(module)):
        return {}
    for (name, *_), tensor in buffers:
        owner, _, leaf = name.rpartition(".")
        if tensor.is_meta:
            setattr(module.get_submodule(owner), leaf, torch.empty_like(tensor, device="cpu"))
    weights = ModuleWeights(module, folder)
    weights.read(module, only_buffers=True)
    names = [name for (name, *_), _ in buffers if weights.has(name)]
    return {name: module.get_buffer(name) for name in names}


def require_module_weights(module: nn.Module, folder: str | None) -> None:
    """Raises SpecError unless a folder, where there is one, has what `module` needs, and nothing
    else."""
    if folder is not None:
        ModuleWeights(module, folder)


def read_module_weights(module: nn.Module, folder: str | None) -> None:
    """Let a module begin with the weights in a folder, where there is one; of fake tensors, which
    have no values, nothing is read."""
    if folder is not None and detect_fake_mode() is None:
        ModuleWeights(module, folder).read(module)


def build(
    model: ModelSpec, *, sequence: int, allow_import: bool = False, seed: int = 0
) -> nn.Module:
    """A built-in model comes without its initial weights, which `models.initialize` gives (a folder
    of them is known to fit); another with those of its constructor, which runs with torch's
    generator at `seed`, or of a folder that fits, which `models.initialize` reads."""
    match model:
        case ModelShape():
            return _build_shape(model, sequence)
        case ExternalModel():
            require_leave_of(model.function, allow_import=allow_import)
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                module = build_external(model)
                materialize_built_on_meta(module, model.function)
        case HuggingFaceModel():
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                module = build_hugging_face(model, sequence=sequence)
        case other:
            assert_never(other)
    require_module_weights(module, model.pretrained)
    return module


def _build_shape(shape: ModelShape, sequence: int) -> nn.Module:
    if faults := tuple(misfits(shape)):
        raise SpecError(*faults)
    module = Transformer(shape, sequence=sequence)
    if shape.pretrained is not None:
        require_weights(module, shape)
    return module


STD = 0.02
_RESIDUAL = ("attention.output.weight", ".down.weight")  # what adds to the residual stream


def keeps_its_weights(module: nn.Module) -> bool:
    """True for a model whose constructor gave its weights: it must be built off the meta device."""
    return not isinstance(module, Transformer)


@dataclass(frozen=True, slots=True, kw_only=True)
class InitialValues:
    """The initial parameters of `module`, whose own are not read unless the model keeps its
    weights; rounded to `dtype`, whichever they are then stored in. `weights`: those of a module
    that is not built in and has no values."""

    module: nn.Module
    seed: int
    dtype: torch.dtype = torch.float32
    weights: ModuleWeights | DrawnWeights | None = None

    @torch.no_grad()
    def write(self, name: str, shape: Sequence[int], window: Window, part: Tensor) -> None:
        """Fill `part`, on any device, with this window of a parameter. What is drawn is drawn
        whole; of a published model's files nothing else is read."""
        if self.weights is not None:
            self.weights.read_window(name, shape, window, part, self.dtype)
        elif self._is_read:
            weights_of(self.module.shape).read(name, shape, window, part, self.dtype)
        else:
            drawn = initial(name, shape, self.seed, self.module)
            part.copy_(narrowed(drawn, window).to(self.dtype))

    @property
    def _is_read(self) -> bool:
        module = self.module
        has_folder = isinstance(module, Transformer) and module.shape.pretrained is not None
        return has_folder and detect_fake_mode() is None  # fakes have no values


def initial(name: str, shape: Sequence[int], seed: int, module: nn.Module) -> Tensor:
    """One parameter of a model that begins with no files, whole, in fp32 on the CPU."""
    if keeps_its_weights(module):
        return module.get_parameter(name).detach().to("cpu", torch.float32, copy=True)
    assert isinstance(module, Transformer), "only built-in models have no weights"
    if name.endswith("norm.weight"):
        # with which a norm does nothing but norm
        weight = 0.0 if module.shape.norm is Norm.RMS_PLUS_ONE else 1.0
        return torch.full(shape, weight, device="cpu")
    if name.endswith("bias"):
        return torch.zeros(*shape, device="cpu")
    drawn = torch.zeros(*shape, device="cpu", dtype=torch.float32)
    num_residual = 2 * module.shape.layers  # every block adds twice to the residual stream
    std = STD / math.sqrt(num_residual) if name.endswith(_RESIDUAL) else STD
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    generator = torch.Generator("cpu").manual_seed(int.from_bytes(digest, "big") >> 1)
    # The rows of tokens are drawn as without padding, which is zero.
    drawn[: module.shape.vocab if name in OF_VOCABULARY else None].normal_(
        0.0, std, generator=generator
    )
    return drawn


def initialize(module: nn.Module, seed: int) -> None:
    """Fill every parameter and every buffer of a model none of whose tensors are cut."""
    if keeps_its_weights(module):
        return
    values = InitialValues(module=module, seed=seed)
    for name, parameter in module.named_parameters():
        values.write(name, parameter.shape, whole(parameter.shape), parameter)
    reset_buffers(module)


@torch.no_grad()
def reset_buffers(module: nn.Module) -> None:
    """Refill the buffers of every submodule that knows how to."""
    for child in module.modules():
        reset = getattr(child, "reset_buffers", None)
        if callable(reset):
            reset()


@torch.no_grad()
def cast(module: nn.Module, dtype: torch.dtype) -> None:
    """Parameters to `dtype`; buffers that hold reals stay wide: fp32, or fp64 with fp64."""
    wide = torch.promote_types(dtype, torch.float32)
    for parameter in module.parameters():
        parameter.data = parameter.data.to(dtype)
    for child in module.modules():
        for name, buffer in child.named_buffers(recurse=False):
            if buffer.is_floating_point():
                setattr(child, name, buffer.to(wide))
    if wide is torch.float64:  # tables computed in fp64 and stored in fp32 have lost their tail
        reset_buffers(module)


_PLACE = "model"
_WRAPPERS = (DistributedDataParallel, FSDPModule, FSDP1)


def accept(module: nn.Module, spec: Spec) -> Spec:
    """Return the spec with `module` for its model. The module is changed in place: it is in
    training mode, its parameters are in the spec's dtype, and one of transformers gives logits.
    Raises SpecError for what is no module, is wrapped already or has no values."""
    require_fresh(module)
    if gives_objects(module) and spec.loss.user_function is None:
        to_logits(module)
    cast(module, TORCH_DTYPES[spec.precision.effective.parameters])
    module.train()
    return with_model(spec, module)


def with_model(spec: Spec, module: nn.Module) -> Spec:
    """Return the spec with what is known of a module for its model: the shape of one of ours; the
    module's class, in the place of a shape that is none of its own."""
    if not isinstance(spec.model, ModelShape):
        return spec
    if isinstance(module, Transformer):
        shape = module.shape
        return spec if shape == spec.model else replace(spec, model=shape)
    kind = type(module)
    return replace(spec, model=ExternalModel(target=f"{kind.__module__}:{kind.__qualname__}"))


def require_fresh(module: nn.Module) -> None:
    """Raises SpecError for what is no module, is wrapped already or has no values."""
    if not isinstance(module, nn.Module):
        raise refused(
            _PLACE,
            f"{type(module).__name__} is not a torch.nn.Module",
            "Pass the unwrapped module.",
        )
    name = type(module).__name__
    for path, inner in module.named_modules():
        if wrapper := next((kind for kind in _WRAPPERS if isinstance(inner, kind)), None):
            finding = f"{path or name} is already wrapped: {wrapper.__name__}"
            remedy = "Pass the unwrapped module; ptrain wraps it according to the spec. "
            remedy += (
                "To measure a module that you wrapped, use `ptrain.measure(model, "
                "optimizer=optimizer)`."
            )
            raise refused(_PLACE, finding, remedy)
    for path, parameter in module.named_parameters():
        if isinstance(parameter, DTensor):
            raise refused(
                _PLACE,
                f"{path} of {name} is already sharded (a DTensor)",
                "Pass the module with full tensors; ptrain shards them.",
            )
    if keeps_its_weights(module):
        _require_values(module)


def _require_values(module: nn.Module) -> None:
    tensors = (*module.named_parameters(), *module.named_buffers())
    on_meta = [path for path, tensor in tensors if tensor.is_meta]
    if on_meta:
        raise refused(
            _PLACE,
            f"{on_meta[0]} of {type(module).__name__} is on the meta device and has no values",
            "Build it on the CPU after `torch.manual_seed`, with the same seed on every "
            "rank, or load its weights first (`to_empty` and `load_state_dict`).",
        )
