"""Find equal blocks of a rank, so that running a few of them is enough.

Built-in models are compared by their shape, Transformers classes by two instances on fake tensors:
the model, and the same model with few layers. In both instances all blocks must have the same
classes, tensor shapes and attributes except for their index, and outside of blocks only the number
of layers may differ. An attribute without a comparable value (a lock, an object with slots) makes
the comparison fail. In a forward pass, divided at the entries of blocks, all blocks but the first
and the last must run the same operators on tensors from the same relative blocks.

Note: code that only runs in a backward pass is compared through attributes of its block only.
"""

from __future__ import annotations

import itertools
import types
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from typing import Any, assert_never

import torch
from torch import Tensor, nn

from ptrain.derivation.flat import joined_units
from ptrain.derivation.layers import block_kinds
from ptrain.derivation.tensor import local_units
from ptrain.errors import PtrainError
from ptrain.facts.model import ModelFacts
from ptrain.internals.fakes import READ
from ptrain.models.contract import forward_once
from ptrain.models.facts import untraced_facts
from ptrain.models.ledger import OperatorMode, watch_modules
from ptrain.models.pretrained import layers_of, with_layers
from ptrain.plan.lower import built_in_facts, lower
from ptrain.spec.dials import UnitKind
from ptrain.spec.model import ExternalModel, HuggingFaceModel, ModelShape, ModelSpec
from ptrain.spec.placement import Axis
from ptrain.spec.spec import Spec, indices_in_groups
from ptrain.steps.step import Plan
from ptrain.steps.wraps import Form
from ptrain.traces.tensor_parts import FakeModel, fake_model

Leaves = dict[str, Hashable]
_Leaf = tuple[str, Hashable]

_WALKED = ("_parameters", "_buffers", "_modules")  # visited separately from other attributes
_PLAIN = (
    bool, int, float, complex, str, bytes, type(None), type, Enum, torch.dtype, torch.device,
    types.FunctionType, types.BuiltinFunctionType,
)  # fmt: skip


class NotComparableError(Exception):
    """The error for an attribute whose value cannot be compared."""


def structure_of(model: nn.Module, blocks: Sequence[str]) -> tuple[Leaves, list[Leaves]]:
    """Return the leaves outside of the blocks, and the leaves of each block.

    Args:
        model: The model.
        blocks: The names of its blocks.

    Raises:
        NotComparableError: If an attribute has no comparable value.
    """
    walk = _LeafWalk({f".{name}": model.get_submodule(name) for name in blocks})
    return dict(walk.iter_leaves(model)), [
        dict(walk.iter_leaves(block)) for block in walk.blocks.values()
    ]


def common_leaves(blocks: Sequence[Leaves]) -> Leaves | None:
    """Return the common leaves of blocks; None if they differ in more than their index."""
    first = blocks[0]
    if any(block.keys() != first.keys() for block in blocks):
        return None
    indices = [(int, index) for index in range(len(blocks))]
    leaves: Leaves = {}
    for path, leaf in first.items():
        of_all = [block[path] for block in blocks]
        is_index = of_all == indices
        if not is_index and any(other != leaf for other in of_all):
            return None
        leaves[path] = "its index" if is_index else leaf
    return leaves


def differ_in_layers_alone(first: Leaves, other: Leaves, layers: tuple[int, int]) -> bool:
    """Return True if two models differ in nothing but their number of layers.

    Args:
        first: The leaves of one model outside of its blocks.
        other: The leaves of the other model.
        layers: The numbers of layers of both models.
    """
    counts = tuple((int, number) for number in layers)
    return first.keys() == other.keys() and all(
        leaf == other[path] or (leaf, other[path]) == counts for path, leaf in first.items()
    )


class _LeafWalk:
    """A walk over the leaves of one model: types, tensor shapes and attribute values by path.

    An object that occurs again is recorded by the place of its first occurrence. A list with one
    equal entry per block is recorded as such, so that its length does not count.
    """

    def __init__(self, blocks: dict[str, nn.Module]) -> None:
        self.blocks = blocks
        self._number_of = {id(block): number for number, block in enumerate(blocks.values())}
        self._met: dict[int, tuple[int, str]] = {}
        self._kept: list[object] = []  # so that no other object gets its id
        self._part = 0

    def iter_leaves(self, module: nn.Module) -> Iterator[_Leaf]:
        """Yield the leaves of the model without its blocks, or of one block."""
        self._part += 1
        # A block that is walked itself must not be recorded as a reference to a block.
        self._number_of.pop(id(module), None)
        yield from self._of_module("", module)

    def _of_module(self, path: str, module: nn.Module) -> Iterator[_Leaf]:
        """Yield the leaves of a module."""
        if self.blocks.get(path) is module:
            return
        if again := self._first_place(module, path):
            yield path, again
            return
        yield path, ("instance", type(module))
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                yield from self._of_tensor(f"{path}.{name}", tensor)
        for name, value in vars(module).items():
            if name not in _WALKED:
                yield from self._of_value(f"{path}.{name}", value)
        for name, child in module._modules.items():
            if child is not None:
                yield from self._of_module(f"{path}.{name}", child)

    def _of_tensor(self, path: str, tensor: Tensor) -> Iterator[_Leaf]:
        """Yield the type and layout of a tensor."""
        kind = (type(tensor), tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad)
        yield path, self._first_place(tensor, path) or kind

    def _of_value(self, path: str, value: object) -> Iterator[_Leaf]:
        """Yield the leaves of any value."""
        match value:
            case _ if isinstance(value, _PLAIN):
                yield path, (type(value), value)
            case Tensor():
                yield from self._of_tensor(path, value)
            case nn.Module():
                yield from self._of_module(path, value)
            case types.MethodType():
                yield f"{path}()", value.__func__
                yield from self._of_value(path, value.__self__)
            case partial():
                yield f"{path}()", partial
                yield from self._of_value(path, (value.func, value.args, value.keywords))
            case Mapping():
                yield from self._of_mapping(path, value)
            case list() | tuple():
                yield from self._of_sequence(path, value)
            case set() | frozenset():
                yield path, (type(value), frozenset(value))
            case _:
                yield from self._of_object(path, value)

    def _of_mapping(self, path: str, value: Mapping[object, object]) -> Iterator[_Leaf]:
        """Yield the leaves of a mapping; hooks by position, because their keys are unique
        numbers.
        """
        are_hooks = "_hooks" in path.rpartition(".")[2]
        yield path, (type(value), len(value))
        for place, (key, entry) in enumerate(value.items()):
            yield from self._of_value(f"{path}[{place if are_hooks else repr(key)}]", entry)

    def _of_sequence(self, path: str, value: Sequence[object]) -> Iterator[_Leaf]:
        """Yield the leaves of a list or tuple."""
        # For example `config.layer_types`, which has one entry for each layer.
        is_plain = all(isinstance(entry, _PLAIN) for entry in value)
        if is_plain and len(value) == len(self.blocks) and len({*value}) == 1:
            yield path, (type(value), "by block", value[0])
            return
        yield path, (type(value), len(value))
        for place, entry in enumerate(value):
            yield from self._of_value(f"{path}[{place}]", entry)

    def _of_object(self, path: str, value: object) -> Iterator[_Leaf]:
        """Yield the leaves of an object with attributes.

        Raises:
            NotComparableError: If the object has state outside of `vars`.
        """
        if again := self._first_place(value, path):
            yield path, again
            return
        if not _has_no_hidden_state(value):
            raise NotComparableError(f"{path} is {type(value).__name__}")
        yield path, ("instance", type(value))
        for name, entry in getattr(value, "__dict__", {}).items():
            yield from self._of_value(f"{path}.{name}", entry)

    def _first_place(self, value: object, path: str) -> Hashable:
        """Return the place of an object's first occurrence; None if this is the first."""
        # References to other blocks are recorded by their number, so that a block that holds its
        # successor differs from the others.
        if id(value) in self._number_of:
            return "block", self._number_of[id(value)]
        if id(value) in self._met:
            part, place = self._met[id(value)]
            return "here" if part == self._part else part, place
        self._met[id(value)] = self._part, path
        self._kept.append(value)
        return None


def _has_no_hidden_state(value: object) -> bool:
    """Return True if `vars` is the complete state of an object.

    Pickle must know the complete state, so its protocol shows this: a C class with more state
    overrides `__reduce__` or `__getstate__`, or cannot be reduced.
    """
    kind: Any = type(value)
    own_ways = ("__reduce__", "__reduce_ex__", "__getstate__")
    if any(getattr(kind, way) is not getattr(object, way) for way in own_ways):
        return False
    try:
        reduced: Any = object.__reduce_ex__(value, 2)
    except TypeError:
        return False
    state = reduced[2]  # (callable, arguments, state, …), the reduction of protocol 2
    return state is None or state is getattr(value, "__dict__", None)  # else it has slots


Section = list[Hashable]
_IN_FRONT = -1


class SectionRecorder(OperatorMode):
    """A recorder of operators, divided into sections at the entries of blocks.

    It must be entered after a mode of fake tensors. `entered` has the numbers of the blocks in the
    order in which they ran.
    """

    def __init__(self, model: nn.Module, blocks: Sequence[str]) -> None:
        super().__init__()
        self.sections: list[Section] = [[]]
        self.entered: list[int] = []
        self._blocks = [model.get_submodule(name) for name in blocks]
        self._births = 0  # in this section
        self._origins: dict[int, tuple[int, str | int]] = {}
        self._kept: list[Tensor] = []  # so that no other tensor gets its id
        for place, module in ((_IN_FRONT, model), *enumerate(self._blocks)):
            for name, tensor in (*module.named_parameters(), *module.named_buffers()):
                self._origins[id(tensor)] = place, name

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Temporarily record a forward pass of the model."""
        numbered = zip(map(str, itertools.count()), self._blocks, strict=False)
        with watch_modules(numbered, before=self._enter_block), self:
            yield

    def _enter_block(self, index: str, *_: object) -> None:
        """Begin a section at the entry of a block."""
        self.entered.append(int(index))
        self.sections.append([])
        self._births = 0

    def run_operator(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator and record it with its arguments and results."""
        inputs = self._as_comparable(args), self._as_comparable(kwargs)
        result = function(*args, **kwargs)
        self.sections[-1].append(
            (function, *inputs, torch.is_grad_enabled(), self._as_comparable(result))
        )
        return result

    def _as_comparable(self, value: Any) -> Hashable:
        """Return a value in a form that compares equal between sections.

        A tensor becomes its origin, relative to the section, and its layout.
        """
        match value:
            case Tensor():
                layout = value.shape, value.stride(), value.dtype, value.device
                return *self._origin_of(value), *layout, value.requires_grad
            case list() | tuple():
                return type(value), *map(self._as_comparable, value)
            case dict():
                return tuple((key, self._as_comparable(entry)) for key, entry in value.items())
            case _:
                return type(value), value

    def _origin_of(self, tensor: Tensor) -> tuple[str, int, str | int]:
        """Return the origin of a tensor, relative to the current section.

        A tensor without a recorded origin is new in this section.
        """
        here = len(self.sections) - 1 + _IN_FRONT
        if id(tensor) not in self._origins:
            self._origins[id(tensor)] = here, self._births
            self._births += 1
            self._kept.append(tensor)
        place, name = self._origins[id(tensor)]
        if place == _IN_FRONT:
            return "in front", 0, name
        return "blocks ago", here - place, name


FEWEST = 4  # blocks of the shortest run; it must exceed the number of prefetched units
LEAST = 20  # fewer blocks are all run: the three runs have 4 + 5 + 6 = 15 blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class EqualBlocks:
    """The equal blocks of one rank of a job.

    Attributes:
        number: The number of consecutive blocks in each of its stages.
        split: The number of blocks of every stage of the job; empty without pp.
        own: The stages of the rank.
    """

    spec: Spec
    number: int
    split: tuple[int, ...] = ()
    own: tuple[int, ...] = ()

    def cut_to(self, blocks: int) -> Spec:
        """Return the job with another number of blocks in each of the rank's stages."""
        spec = self.spec
        split = tuple(
            blocks if stage in self.own else count for stage, count in enumerate(self.split)
        )
        # All blocks keep activations in the same way, whatever ranges of blocks the spec names.
        kept = spec.activations.block_modes(sum(self.split) or self.number)[0]
        shorter = replace(
            spec,
            model=_with_layers(spec.model, sum(split) or blocks),
            activations=replace(spec.activations, default=kept, by_block=(), every=1),
        )
        if not split:
            return shorter
        return replace(shorter, pipeline=replace(spec.pipeline, split=split))


def _with_layers(model: ModelSpec, layers: int) -> ModelSpec:
    """Return a model with another number of layers."""
    match model:
        case ModelShape():
            return replace(model, layers=layers)
        case HuggingFaceModel():
            return with_layers(model, layers)
        case ExternalModel():
            raise AssertionError("a user's function cannot build fewer layers")
        case other:
            assert_never(other)


def equal_blocks(
    spec: Spec, rank: int, *, fewest: int = FEWEST, least: int = LEAST
) -> EqualBlocks | None:
    """Return the equal blocks of a rank.

    Args:
        spec: A resolved spec.
        rank: The rank to simulate.
        fewest: The number of blocks of the shorter instance in the comparison.
        least: The smallest number of blocks for which running a few is worthwhile.

    Returns:
        None if blocks differ, the rank's stages have different or too small numbers of blocks, or
        nothing proves that the blocks are equal.
    """
    match spec.model:
        case ModelShape():
            kinds = block_kinds(spec, [str(layer) for layer in range(spec.model.layers)])
            if kinds is None or len({*kinds}) > 1:
                return None
            blocks = _blocks_of_plan(spec, rank, built_in_facts(spec), spec.model.layers, fewest)
            return blocks if blocks and blocks.number >= least else None
        case HuggingFaceModel():
            return _compare_instances(spec, rank, fewest, least)
    return None


def _blocks_of_plan(
    spec: Spec, rank: int, facts: ModelFacts, layers: int, fewest: int
) -> EqualBlocks | None:
    """Return the rank's blocks, if the plan treats them equally.

    If as many units are prefetched as the shortest run has blocks, the prefetched memory grows
    with each of the three runs and stops growing later. The three runs do not show where.

    Args:
        spec: The resolved spec.
        rank: The rank to simulate.
        facts: The facts of the model.
        layers: The number of layers of the model.
        fewest: The number of blocks of the shortest run.
    """
    is_within = spec.unit_size.kind in (UnitKind.BLOCK, UnitKind.SUB_BLOCK)
    is_far = spec.prefetch is not None and spec.prefetch >= fewest
    if not is_within or is_far or len({*spec.activations.block_modes(layers)}) > 1:
        return None
    plan = lower(spec, facts)
    if not plan.wrap.treats_equal_blocks_alike or _are_joined(plan, facts):
        return None
    if plan.pipeline is None:
        return EqualBlocks(spec=spec, number=layers)
    split = tuple(map(len, plan.pipeline.layers))
    own = plan.pipeline.stages_of(indices_in_groups(spec, (Axis.PP,))[rank])
    numbers = {split[stage] for stage in own}
    if len(numbers) > 1:
        return None
    return EqualBlocks(spec=spec, number=numbers.pop(), split=split, own=own)


def _are_joined(plan: Plan, facts: ModelFacts) -> bool:
    """Return True if some blocks of a rank share a unit: with fewer blocks, other ones would."""
    if plan.form is not Form.FLAT:
        return False
    parts = [facts.units]
    if plan.tensor is not None:
        degree = plan.spec.degree(plan.tensor.axis)
        parts = [units for units, _ in local_units(facts, plan.tensor, degree)]
    return any(len(joined_units(plan, units)) < len(units) for units in parts)


# -- the proof


@dataclass(frozen=True, slots=True, kw_only=True)
class Repetition:
    """A model with equal blocks.

    Attributes:
        around: The leaves outside of the blocks.
        block: The common leaves of the blocks.
        sections: The operators before the blocks, of the first block, of each block between, and of
            the last block with everything after it.
    """

    facts: ModelFacts
    around: Leaves
    block: Leaves
    sections: tuple[Section, ...]


def _compare_instances(spec: Spec, rank: int, fewest: int, least: int) -> EqualBlocks | None:
    """Return the equal blocks of a Transformers model, if two instances prove them."""
    assert isinstance(spec.model, HuggingFaceModel)
    layers = layers_of(spec.model)
    if layers is None or layers < least:  # known from the config, without building the model
        return None
    full = _find_repetition(spec)
    if full is None or len(full.facts.blocks) != layers:
        return None
    blocks = _blocks_of_plan(spec, rank, full.facts, layers, fewest)
    if blocks is None or blocks.number < least:
        return None
    few = _find_repetition(blocks.cut_to(fewest))
    is_proven = (
        few is not None
        and (few.block, few.sections) == (full.block, full.sections)
        and few.facts.roles == full.facts.roles
        and differ_in_layers_alone(full.around, few.around, (layers, len(few.facts.blocks)))
    )
    return blocks if is_proven else None


def _find_repetition(spec: Spec) -> Repetition | None:
    """Return the structure of a model with equal blocks; None if it cannot be determined."""
    try:
        model = fake_model(spec)
        return None if model is None else _read_structure(model)
    except (
        *READ,
        NotComparableError,
        PtrainError,
        RuntimeError,
    ):  # the simulation reports the error
        return None


def _read_structure(model: FakeModel) -> Repetition | None:
    """Return the structure of an instance on fake tensors; None if its blocks differ."""
    # fork_rng, because the forward pass may draw random numbers.
    with model.running(), torch.random.fork_rng(devices=[]):
        facts = untraced_facts(model.module, model.spec)
        around, structures = structure_of(model.module, facts.blocks)
        # Between the first and the last block there must be one to compare.
        block = common_leaves(structures) if len(structures) > 2 else None
        if block is None:
            return None
        sections = _record_sections(model, facts.blocks)
    if sections is None:
        return None
    return Repetition(facts=facts, around=around, block=block, sections=sections)


def _record_sections(model: FakeModel, blocks: tuple[str, ...]) -> tuple[Section, ...] | None:
    """Return the sections of a forward pass; None unless blocks run once, in order, and equally."""
    # Backward follows from the operators of forward, except for code that only backward runs
    # (module docstring).
    recorder = SectionRecorder(model.module, blocks)
    with recorder.recording():
        forward_once(model.module, model.spec)
    # A block that runs twice, or not at all, has a section that is not its own.
    if recorder.entered != [*range(len(blocks))]:
        return None
    front, first, *between, last = recorder.sections
    if any(section != between[0] for section in between):
        return None
    return front, first, between[0], last
