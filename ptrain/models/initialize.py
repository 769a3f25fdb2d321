"""Build a spec's model, and initialize its weights from the seed and each parameter's name alone.

Every parameter is drawn in full, in fp32 on the CPU, from a separate generator, and cast
afterwards. The model therefore starts from the same numbers for any placement, dtype and rank. A
model built on the meta device gets values by

    module.to_empty(device=...)     # no values yet, neither parameters nor buffers
    initialize(module, seed)        # fills both

or, where a rank keeps only shards, by `InitialValues` for each shard and then `reset_buffers`. A
module with buffers defines a method `reset_buffers(self) -> None` that refills them.

A built-in model whose spec names a folder of published weights starts with these.

A custom model keeps the values of its constructor (`keeps_its_weights`). `build` seeds torch's
generator before it constructs the model, so every rank has the same weights. `models.drawn`
reproduces them tensor by tensor; a rank builds the full model only if that is not possible.

Initial weights of a custom model may come from a folder of safetensors with the module's names.
They are read some rows at a time, into the shards of a module without values, or into a full module
before it is sharded.

A tied tensor has several names, and a file may use any of them. transformers stores some tensors
under other names than in files, and stacks experts. To find the mapping, its conversion is applied
to a state whose rows are numbered.

A user may pass a module in place of the spec's model: any module with `forward(tokens) -> logits`
and weights, on the CPU or the rank's device. A causal language model of transformers returns an
object; it is changed to return the logits, unless the spec names a user's loss function.
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

from ptrain.errors import SpecError, input_error
from ptrain.facts.parameters import OF_VOCABULARY, is_of_adapter
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
from ptrain.models.quantized import quantize_frozen
from ptrain.models.transformer import Transformer
from ptrain.models.window import Window, full_window, narrow_to_window
from ptrain.spec.block import Norm
from ptrain.spec.misfits import find_misfits
from ptrain.spec.model import ExternalModel, HuggingFaceModel, ModelShape, ModelSpec
from ptrain.spec.spec import Spec, require_leave_of
from ptrain.units import group_by_key

_MATRIX = 2  # dimensions
_MAY_LACK, _PASSED_OVER = "_keys_to_ignore_on_load_missing", "_keys_to_ignore_on_load_unexpected"


class NamedTensor(NamedTuple):
    """A parameter or persistent buffer with all of its names; a tied one has several."""

    names: tuple[str, ...]
    tensor: Tensor


@dataclass(frozen=True, slots=True)
class StoredRows:
    """A tensor of a file, with this `shape`, that holds rows of a parameter from row `first`.

    Rows count all dimensions of the parameter but the last as one.
    """

    name: str
    first: int
    shape: tuple[int, ...]

    def view_rows(self, tensor: Tensor) -> Tensor:
        """Return these rows of a parameter, as a view in the shape of the file's tensor."""
        if tensor.shape == self.shape:
            return tensor
        count = math.prod(self.shape[:-1])
        return tensor.view(-1, tensor.shape[-1])[self.first : self.first + count].view(self.shape)

    def window_pieces(
        self, shape: Sequence[int], window: Window, part: Tensor
    ) -> Iterator[StoredPiece]:
        """Yield the windows of the file's tensor that fill `part`, a window of a parameter of
        `shape`."""
        if tuple(shape) == self.shape:
            yield StoredPiece(self.name, window, part)
            return
        end, place = self.first + math.prod(self.shape[:-1]), 0
        for begin, count in _contiguous_runs(shape[:-1], window[:-1]):
            first, last = max(begin, self.first), min(begin + count, end)
            if first < last:
                lines = part.view(-1, part.shape[-1])[place : place + count]
                yield from self._row_pieces(first, lines[first - begin : last - begin], window[-1])
            place += count

    def _row_pieces(
        self, first: int, place: Tensor, columns: tuple[int, int]
    ) -> Iterator[StoredPiece]:
        """Yield the pieces of consecutive rows that all lie in this tensor."""
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


def _contiguous_runs(shape: Sequence[int], window: Window) -> Iterator[tuple[int, int]]:
    """Yield start and length of each contiguous run of a window, in elements of the full tensor."""
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
    """A parameter that files store as several tensors, or under another name."""

    rows: tuple[StoredRows, ...]
    is_transposed: bool = False
    section: None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the file's tensors."""
        return tuple(rows.name for rows in self.rows)

    def to_file_tensors(self, tensor: Tensor) -> Mapping[str, Tensor]:
        """Return the file's tensors of this parameter by name."""
        return {rows.name: rows.view_rows(tensor) for rows in self.rows}


class ModuleWeights:
    """The weights of a folder for one module, rounded to the dtypes that the module has at
    construction.

    The module may lack values, and is not kept.

    Raises:
        SpecError: The folder does not match the module, or see `PretrainedFolder`.
    """

    def __init__(self, module: nn.Module, folder: str) -> None:
        prefix = getattr(module, "base_model_prefix", "")
        self._folder = PretrainedFolder(Path(folder), (f"{prefix}.",) if prefix else ())
        stored, tensors = stored_rows(module), named_tensors(module)
        self._rows: dict[str, list[StoredRows]] = {}
        self._dtypes: dict[str, torch.dtype] = {}
        for named in tensors:
            rows = [*self._stored_rows(module, named, stored[named.names[0]])]
            self._rows |= dict.fromkeys(named.names, rows)
            self._dtypes |= dict.fromkeys(named.names, named.tensor.dtype)
        self._require_all_used(module)

    @torch.no_grad()
    def read_into(self, module: nn.Module, *, only_buffers: bool = False) -> None:
        """Write the folder's values to the module, or to its buffers only."""
        for (name, *_), tensor in named_tensors(module):
            if not (only_buffers and isinstance(tensor, nn.Parameter)):
                place = tensor.detach()
                self.read_window(name, place.shape, full_window(place.shape), place, place.dtype)

    def read_window(
        self, name: str, shape: Sequence[int], window: Window, part: Tensor, dtype: torch.dtype
    ) -> None:
        """Write a window of a tensor of this shape to `part`.

        Values are rounded to the dtype that the module had and then to `dtype`.
        """
        if not part.numel():
            return
        for rows in self._rows[name]:
            for piece in rows.window_pieces(shape, window, part):
                self._folder.read_piece(piece, self._dtypes[name], dtype)

    @property
    def bytes_read(self) -> int:
        """The bytes of tensors read so far."""
        return self._folder.bytes_read

    def has_tensor(self, name: str) -> bool:
        """Return True if the folder has the tensor under any of its names."""
        return bool(self._rows[name])

    def _stored_rows(
        self, module: nn.Module, named: NamedTensor, stored: Sequence[StoredRows]
    ) -> Iterator[StoredRows]:
        """Yield the file tensors of a parameter, by their names in this folder.

        `stored` are the tensors under their usual names.
        """
        tensor = named.tensor
        there = [theirs for name in named.names if (theirs := self._folder.find_name(name))]
        if not there and _may_lack(module, named):
            return
        for rows in [StoredRows(there[0], 0, tuple(tensor.shape))] if there else stored:
            theirs = self._folder.find_name(rows.name) or rows.name
            self._folder.require_tensor(theirs, rows.shape, tensor.dtype)
            yield replace(rows, name=theirs)

    def _require_all_used(self, module: nn.Module) -> None:
        """Raise SpecError for tensors of the folder that the module does not use."""
        known = {self._folder.find_name(name) for name in module.state_dict()}
        used = {rows.name for parts in self._rows.values() for rows in parts}
        others = self._folder.file_of.keys() - used - known
        self._folder.reject_unused(
            name for name in others if not _matches_pattern(module, _PASSED_OVER, name)
        )


def _may_lack(module: nn.Module, named: NamedTensor) -> bool:
    """Return True if a folder may lack a tensor, which then keeps the constructor's values.

    No parameter may be missing, since ranks with shards have no constructed values.
    """
    if isinstance(named.tensor, nn.Parameter):
        return False
    is_own = not is_of_transformers(module)
    is_weight = named.tensor.is_floating_point()
    return is_own or not is_weight or _matches_pattern(module, _MAY_LACK, named.names[0])


def _matches_pattern(module: nn.Module, attribute: str, name: str) -> bool:
    """Return True if the class of transformers lists a pattern in this attribute that matches a
    name."""
    patterns = getattr(module, attribute, None) or ()
    return any(re.search(pattern, name) for pattern in patterns)


def named_tensors(module: nn.Module) -> list[NamedTensor]:
    """Return the parameters and persistent buffers of a module."""
    state = module.state_dict(keep_vars=True)
    by_tensor = group_by_key(
        (id(tensor), (name, tensor))
        for name, tensor in state.items()
        if isinstance(tensor, Tensor)
        and name.rpartition(".")[2] != "_extra_state"  # a module computes it on demand
    )
    return [
        NamedTensor(tuple(name for name, _ in named), named[0][1]) for named in by_tensor.values()
    ]


def stored_rows(module: nn.Module) -> Mapping[str, list[StoredRows]]:
    """Return the file tensors of each tensor of a module, by the first of its names.

    Raises:
        SpecError: Files store a tensor neither in full nor as rows.
    """
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
    # Every element must be found exactly once, else a file would be read into the wrong rows.
    for name, parts in stored.items():
        if sum(math.prod(rows.shape) for rows in parts) != math.prod(shapes[name]):
            raise input_error(
                "model.pretrained",
                f"the files contain {name} of {type(module).__name__} neither as one "
                "tensor nor as rows of one",
                "Use a model of another class.",
            )
    return stored


def holds_buffers(module: nn.Module) -> bool:
    """Return True if files of the module contain buffers."""
    return bool(_named_buffers(module))


def _named_buffers(module: nn.Module) -> list[NamedTensor]:
    return [named for named in named_tensors(module) if not isinstance(named.tensor, nn.Parameter)]


def kept_buffers(module: nn.Module, folder: str) -> dict[str, Tensor]:
    """Return the buffers of a module that a folder has, by name, and set them in the module.

    The module may be on meta.

    Raises:
        SpecError: See `ModuleWeights`.
    """
    if not (buffers := _named_buffers(module)):
        return {}
    for (name, *_), tensor in buffers:
        owner, _, leaf = name.rpartition(".")
        if tensor.is_meta:
            setattr(module.get_submodule(owner), leaf, torch.empty_like(tensor, device="cpu"))
    weights = ModuleWeights(module, folder)
    weights.read_into(module, only_buffers=True)
    names = [name for (name, *_), _ in buffers if weights.has_tensor(name)]
    return {name: module.get_buffer(name) for name in names}


def require_module_weights(module: nn.Module, folder: str | None) -> None:
    """Raise SpecError unless a folder, if there is one, has exactly the tensors of `module`."""
    if folder is not None:
        ModuleWeights(module, folder)


def read_module_weights(module: nn.Module, folder: str | None) -> None:
    """Read the weights of a folder, if there is one, into a module; no effect on fake tensors."""
    if folder is not None and detect_fake_mode() is None:
        ModuleWeights(module, folder).read_into(module)


def build_model(
    model: ModelSpec, *, sequence: int, allow_import: bool = False, seed: int = 0
) -> nn.Module:
    """Build a spec's model.

    A built-in model has no initial values yet; `initialize` fills it. Another model has the values
    of its constructor, which runs with torch's generator at `seed`; weights in a folder are read
    later.

    Args:
        model: The model section of the spec.
        sequence: Number of tokens of a sample.
        allow_import: Whether the user allows imports of the model's code.
        seed: Seed of the constructor.

    Raises:
        SpecError: The model cannot be built, or its folder of weights does not match it.
    """
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
    if faults := tuple(find_misfits(shape)):
        raise SpecError(*faults)
    module = Transformer(shape, sequence=sequence)
    if shape.pretrained is not None:
        require_weights(module, shape)
    return module


STD = 0.02
_RESIDUAL = (
    "attention.output.weight",
    ".down.weight",
)  # projections whose output is added to the residual stream


def keeps_its_weights(module: nn.Module) -> bool:
    """Return True if the constructor gave the model its weights; it must then be built off meta."""
    return not isinstance(module, Transformer)


@dataclass(frozen=True, slots=True, kw_only=True)
class InitialValues:
    """The initial parameters of `module`, rounded to `dtype`.

    The module's values are read only if it keeps its weights. `weights`: the values of a custom
    module without values.
    """

    module: nn.Module
    seed: int
    dtype: torch.dtype = torch.float32
    weights: ModuleWeights | DrawnWeights | None = None

    @torch.no_grad()
    def write_window(self, name: str, shape: Sequence[int], window: Window, part: Tensor) -> None:
        """Fill `part`, on any device, with this window of a parameter.

        Drawn parameters are drawn in full; of published files only the window is read.

        Args:
            name: The dotted name of the parameter.
            shape: The shape of the full parameter.
            window: Offset and size along each dimension, in elements.
            part: Receives the values, in the window's size.
        """
        if self.weights is not None:
            self.weights.read_window(name, shape, window, part, self.dtype)
        elif self._is_read and not is_of_adapter(name):
            weights_of(self.module.shape).read_window(name, shape, window, part, self.dtype)
        else:
            drawn = initial_parameter(name, shape, self.seed, self.module)
            part.copy_(narrow_to_window(drawn, window).to(self.dtype))

    @property
    def _is_read(self) -> bool:
        module = self.module
        has_folder = isinstance(module, Transformer) and module.shape.pretrained is not None
        return has_folder and detect_fake_mode() is None  # fakes have no values


def initial_parameter(name: str, shape: Sequence[int], seed: int, module: nn.Module) -> Tensor:
    """Return one full parameter of a model that starts without files, in fp32 on the CPU.

    Args:
        name: The dotted name, which also decides the drawn values and their scale.
        shape: The shape of the full parameter; rows that pad the vocabulary are zero.
        seed: The seed of the training.
        module: The model. Its values are copied if its constructor gave it weights.
    """
    if keeps_its_weights(module):
        return module.get_parameter(name).detach().to("cpu", torch.float32, copy=True)
    assert isinstance(module, Transformer), "only built-in models have no weights"
    if name.endswith("norm.weight"):
        # the identity scale
        weight = 0.0 if module.shape.norm is Norm.RMS_PLUS_ONE else 1.0
        return torch.full(shape, weight, device="cpu")
    if name.endswith(("bias", "lora_B.weight")):  # an adapter begins without an effect
        return torch.zeros(*shape, device="cpu")
    drawn = torch.zeros(*shape, device="cpu", dtype=torch.float32)
    num_residual = 2 * module.shape.layers  # every block adds twice to the residual stream
    # GPT-2's scaling makes the variance of the residual stream independent of the depth.
    std = STD / math.sqrt(num_residual) if name.endswith(_RESIDUAL) else STD
    # A digest of the name, so that the values of a parameter do not depend on which others are
    # drawn before it, and any rank can draw any parameter alone.
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    generator = torch.Generator("cpu").manual_seed(int.from_bytes(digest, "big") >> 1)
    # The rows of tokens are drawn as without padding, which is zero.
    drawn[: module.shape.vocab if name in OF_VOCABULARY else None].normal_(
        0.0, std, generator=generator
    )
    return drawn


def initialize(module: nn.Module, seed: int) -> None:
    """Fill every parameter and buffer of a model without sharded tensors."""
    if keeps_its_weights(module):
        return
    values = InitialValues(module=module, seed=seed)
    for name, parameter in module.named_parameters():
        values.write_window(name, parameter.shape, full_window(parameter.shape), parameter)
    reset_buffers(module)


@torch.no_grad()
def reset_buffers(module: nn.Module) -> None:
    """Refill the buffers of every submodule that has a method `reset_buffers`."""
    for child in module.modules():
        reset = getattr(child, "reset_buffers", None)
        if callable(reset):
            reset()


@torch.no_grad()
def cast_module(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast parameters to `dtype`, and floating-point buffers to fp32, or to fp64 with fp64."""
    wide = torch.promote_types(dtype, torch.float32)
    for parameter in filter(torch.is_floating_point, module.parameters()):  # none is quantized
        # The Parameter object stays, which may have several names.
        parameter.data = parameter.data.to(dtype)
    for child in module.modules():
        for name, buffer in child.named_buffers(recurse=False):
            if buffer.is_floating_point():
                setattr(child, name, buffer.to(wide))
    if wide is torch.float64:  # values stored in fp32 lost precision, so tables are recomputed
        reset_buffers(module)


_PLACE = "model"
_WRAPPERS = (DistributedDataParallel, FSDPModule, FSDP1)


def accept_module(module: nn.Module, spec: Spec) -> Spec:
    """Return the spec with `module` as its model, and prepare the module in place.

    It is set to training mode, its parameters are cast to the spec's dtype, and a model of
    transformers is changed to return logits.

    Raises:
        SpecError: It is no module, is wrapped already, or has no values.
    """
    require_fresh(module)
    if gives_objects(module) and spec.loss.user_function is None:
        to_logits(module)
    cast_module(module, TORCH_DTYPES[spec.precision.effective_layout.parameters])
    quantize_frozen(module, spec)
    module.train()
    return with_model(spec, module)


def with_model(spec: Spec, module: nn.Module) -> Spec:
    """Return the spec with a module as its model: the shape of a built-in one, else its class.

    A spec with a custom model is returned unchanged.
    """
    if not isinstance(spec.model, ModelShape):
        return spec
    if isinstance(module, Transformer):
        shape = module.shape
        return spec if shape == spec.model else replace(spec, model=shape)
    kind = type(module)
    return replace(spec, model=ExternalModel(target=f"{kind.__module__}:{kind.__qualname__}"))


def require_fresh(module: nn.Module) -> None:
    """Raise SpecError for an object that is no module, is wrapped already, or has no values."""
    if not isinstance(module, nn.Module):
        raise input_error(
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
            raise input_error(_PLACE, finding, remedy)
    for path, parameter in module.named_parameters():
        if isinstance(parameter, DTensor):
            raise input_error(
                _PLACE,
                f"{path} of {name} is already sharded (a DTensor)",
                "Pass the module with full tensors; ptrain shards them.",
            )
    if keeps_its_weights(module):
        _require_values(module)


def _require_values(module: nn.Module) -> None:
    """Raise SpecError for a tensor on the meta device."""
    tensors = (*module.named_parameters(), *module.named_buffers())
    on_meta = [path for path, tensor in tensors if tensor.is_meta]
    if on_meta:
        raise input_error(
            _PLACE,
            f"{on_meta[0]} of {type(module).__name__} is on the meta device and has no values",
            "Build it on the CPU after `torch.manual_seed`, with the same seed on every "
            "rank, or load its weights first (`to_empty` and `load_state_dict`).",
        )
