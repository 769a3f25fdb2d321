"""Facts that a prediction needs of a model: tensors, operators, and allocations by pass.

Built-in families state their tensors as formulas (`facts.parameters`); the facts of other models
are read from the module and traced. An operator has a kind, a dtype and the dimensions that its
time depends on. A pass is a list of operators and the collectives between them, in order. A stage's
pass leaves out memory that crosses its boundaries: hidden states and the output's gradient are
allocated before it, and its output and the input's gradient outlive it. If sizes depend on routing,
a timeline is a formula of the rows that the experts of each layer get: a storage has a fixed size
or is proportional to the rows of one layer, which the tracer verifies.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import NamedTuple, Self

from ptrain.cost import Collective
from ptrain.facts.stages import Chain, Units
from ptrain.spec.cluster import OperatorKind
from ptrain.spec.model import ModelSpec
from ptrain.spec.placement import Axis, Fusions, Roles
from ptrain.spec.precision import DType
from ptrain.timeline import Boundary, Complete, Item, Kind, Repeated, Run, Timeline, run

NO_LAYER = -1
LAST_UNIT = ("norm", "head")  # the modules of the last unit of `unit: ends`


class RowsSize(NamedTuple):
    """`number` bytes, or `number` bytes per row that the experts of one layer get. `layer` is the
    index among the layers with experts, or NO_LAYER."""

    number: int
    layer: int = NO_LAYER

    def at_rows(self, rows: Sequence[int]) -> int:
        """Return the bytes, given the rows of each layer."""
        return self.number if self.layer == NO_LAYER else self.number * rows[self.layer]

    def shift_layer(self, layers: int) -> RowsSize:
        """Return the size for a layer that is `layers` layers later."""
        return self if self.layer == NO_LAYER else self._replace(layer=self.layer + layers)


class StorageEvent(NamedTuple):
    """The allocation of a storage, or its release if `is_freed`."""

    size: RowsSize
    is_freed: bool


class StorageEvents(NamedTuple):
    """The allocations and releases between two boundaries, in order."""

    events: tuple[StorageEvent, ...]

    def at_rows(self, rows: Sequence[int]) -> Run:
        """Return the events in bytes, given the rows of each layer."""
        deltas = ((-1 if event.is_freed else 1) * event.size.at_rows(rows) for event in self.events)
        known = run(deltas)
        assert known is not None, "something happens"
        return known


RowsItem = Boundary | Complete | StorageEvents


class RowsTimeline(NamedTuple):
    """The timeline of one micro-batch as a formula of the rows of each layer."""

    forward: tuple[RowsItem, ...]
    backward: tuple[RowsItem, ...]
    moved: tuple[tuple[str, RowsSize], ...] = ()
    repeated: tuple[tuple[str, int, int], ...] = ()

    def at_rows(self, rows: Sequence[int]) -> Timeline:
        """Return the timeline, given the rows that the experts of each layer get."""
        return Timeline(
            forward=tuple(_evaluate_items(self.forward, rows)),
            backward=tuple(_evaluate_items(self.backward, rows)),
            moved=tuple((tier, size.at_rows(rows)) for tier, size in self.moved),
            repeated=self.repeated,
        )


def _evaluate_items(items: Sequence[RowsItem], rows: Sequence[int]) -> Iterator[Item]:
    """Yield the items in bytes."""
    for item in items:
        yield item.at_rows(rows) if isinstance(item, StorageEvents) else item


Items = tuple[Item, ...]


class Passes(NamedTuple):
    """The passes of one micro-batch on one stage.

    Attributes:
        items: The items of each kind of pass.
        output: Bytes of the stage's output: hidden states, or logits.
        hidden: Bytes of the hidden states that the stage receives; 0 for the first stage.
        moved: As in `Timeline`.
        repeated: As in `Timeline`.
    """

    items: Mapping[Kind, Items]
    output: int
    hidden: int
    moved: tuple[tuple[str, int], ...] = ()
    repeated: tuple[tuple[str, int, int], ...] = ()

    @property
    def loss_bytes(self) -> int:
        """The bytes of one micro-batch that outlive its backward pass and cross no boundary."""
        return _remaining_bytes(self, Kind.BACKWARD)

    @property
    def timeline(self) -> Timeline:
        """The timeline of the forward pass and the full backward pass."""
        return Timeline(
            forward=self.items[Kind.FORWARD],
            backward=self.items[Kind.BACKWARD],
            moved=self.moved,
            repeated=self.repeated,
        )


def passes_of(
    whole: Timeline, halves: Timeline | None, *, is_first: bool, output: int, hidden: int
) -> Passes:
    """Return the passes of a stage from the timelines of its trace.

    Args:
        whole: The timeline of the forward pass and the full backward pass.
        halves: The timeline of the backward pass in halves, for input and for weight gradients;
            None if the schedule does not split it. The first stage ignores it.
        is_first: True for the first stage.
        output: Bytes of the stage's output.
        hidden: Bytes of the hidden states that the stage receives.
    """
    items = {Kind.FORWARD: whole.forward, Kind.BACKWARD: whole.backward}
    if halves is not None and not is_first:
        items |= {Kind.INPUT: halves.forward, Kind.WEIGHT: halves.backward}
    passes = passes_of_stage(items, is_first=is_first, output=output, hidden=hidden)
    return passes._replace(moved=whole.moved, repeated=whole.repeated)


class RowsPasses(NamedTuple):
    """The passes of a stage as a formula of the rows that the experts of its `layers` get."""

    layers: tuple[str, ...]
    whole: RowsTimeline
    halves: RowsTimeline | None
    is_first: bool
    output: int
    hidden: int

    def at_rows(self, rows: Sequence[int]) -> Passes:
        """Return the passes, given the rows of each layer."""
        return passes_of(
            self.whole.at_rows(rows),
            self.halves.at_rows(rows) if self.halves else None,
            is_first=self.is_first,
            output=self.output,
            hidden=self.hidden,
        )


def passes_of_stage(
    items: Mapping[Kind, Items], *, is_first: bool, output: int, hidden: int
) -> Passes:
    """Return the passes of a stage.

    Tokens have no gradients, so on the first stage the half for input gradients is empty, and the
    half for weight gradients is the full backward pass. On other stages, parts of the autograd
    graph that neither half frees are freed at the end of the second half.

    Args:
        items: The items of each kind of pass, with both halves of the backward pass or without.
        is_first: True for the first stage.
        output: Bytes of the stage's output.
        hidden: Bytes of the hidden states that the stage receives.
    """
    if is_first:
        whole = {**items, Kind.INPUT: (), Kind.WEIGHT: items[Kind.BACKWARD]}
        return Passes(items=whole, output=output, hidden=0)
    passes = Passes(items=items, output=output, hidden=hidden)
    if Kind.WEIGHT not in items:
        return passes
    # The halves keep parts of the graph that the full backward pass frees: the difference of what
    # remains after each of them.
    left = _remaining_bytes(passes, Kind.INPUT, Kind.WEIGHT) - passes.loss_bytes
    assert left >= 0, "halves of a backward pass that free what is not there"
    return passes._replace(items={**items, Kind.WEIGHT: (*items[Kind.WEIGHT], Run(0, -left))})


def _remaining_bytes(passes: Passes, *backward: Kind) -> int:
    """Return the bytes of one micro-batch that outlive these passes and cross no boundary."""
    items = (item for kind in (Kind.FORWARD, *backward) for item in passes.items[kind])
    return sum(map(net_bytes, items)) - passes.output - passes.hidden


def net_bytes(item: Item) -> int:
    """Return the bytes that remain after an item, except gradients, which the wrapper owns."""
    match item:
        case Run():
            return item.net
        case Complete(_, size, cloned):  # the runs allocate a gradient that is not cloned
            return 0 if cloned else -size
        case Repeated(times, items):
            return times * sum(map(net_bytes, items))
        case _:
            return 0


class Operator(NamedTuple):
    """A number of equal operators (`times`).

    `dimensions` are the sizes of its kind that its time depends on. `is_whole` marks fused
    attention without a causal mask, which would skip half of the scores.
    """

    kind: OperatorKind
    dtype: DType
    dimensions: tuple[int, ...]
    times: int = 1
    is_whole: bool = False

    @property
    def flops(self) -> int:
        """The floating-point operations of one operator; 0 for operators that memory bounds.

        A multiplication and its addition count as two. Fused attention has two products forward and
        five backward (`models.work`), counted in full, as if nothing were masked.
        """
        match self.kind:
            case OperatorKind.PRODUCT:
                return 2 * math.prod(self.dimensions)
            case OperatorKind.ATTENTION:
                return 4 * math.prod(self.dimensions)
            case OperatorKind.ATTENTION_BACKWARD:
                return 10 * math.prod(self.dimensions)
            case _:
                return 0


class InnerCollective(NamedTuple):
    """A collective within a pass.

    Attributes:
        payload: Bytes of the full tensor.
        axis: The mesh axis; empty for the axis that shards operators.
        ranks: The number of neighbouring ranks of the axis; 0 for all.
        beside: The number of following entries of the pass that overlap with it.
    """

    collective: Collective
    payload: int
    times: int = 1
    axis: str = ""
    ranks: int = 0
    beside: int = 0


PassWork = tuple[Operator | InnerCollective, ...]


class LayerWork(NamedTuple):
    """The computation of one layer for one micro-batch, or of the modules around the layers.

    `backward` includes recomputed forward operators. `inputs` and `weights` are the halves of
    backward, if these are computed separately.
    """

    forward: PassWork
    backward: PassWork
    inputs: PassWork = ()
    weights: PassWork = ()

    def followed_by(self, other: LayerWork) -> LayerWork:
        """Return the work of both as one, with the other after this one.

        Backward passes run in reverse, except the half for weight gradients, which keeps the order.
        """
        return LayerWork(
            forward=self.forward + other.forward,
            backward=other.backward + self.backward,
            inputs=other.inputs + self.inputs,
            weights=self.weights + other.weights,
        )


class ModelWork(NamedTuple):
    """The computation of a rank for one micro-batch, by layer of the full model.

    `front` is the embedding; `behind` is the last norm, the head and the loss.
    """

    front: LayerWork
    layers: tuple[LayerWork, ...]
    behind: LayerWork


class WorkByKind(NamedTuple):
    """A model's work that stores each kind of layer once; `order` is the kind of each layer."""

    front: LayerWork
    kinds: tuple[LayerWork, ...]
    order: tuple[int, ...]
    behind: LayerWork

    @classmethod
    def from_model(cls, work: ModelWork) -> WorkByKind:
        """Return a model's work by kind of layer."""
        numbers: dict[LayerWork, int] = {}
        order = tuple([numbers.setdefault(layer, len(numbers)) for layer in work.layers])
        return cls(front=work.front, kinds=tuple(numbers), order=order, behind=work.behind)

    @property
    def to_model(self) -> ModelWork:
        """The work of all layers; equal layers share an object."""
        layers = tuple([self.kinds[number] for number in self.order])
        return ModelWork(front=self.front, layers=layers, behind=self.behind)


# Attention of a model that is not built in: the modules that compute it, and their heads.


class AttentionHeads(NamedTuple):
    """The number of query heads, of key and value heads, and the features of a head."""

    heads: int
    kv_heads: int
    head_dim: int


class AttendingModule(NamedTuple):
    """A module that computes attention in its forward, once per forward pass of the model."""

    name: str
    heads: AttentionHeads


class AttentionFacts(NamedTuple):
    """The facts that context parallelism needs of a model.

    Attributes:
        modules: The modules that compute attention, in the order of a forward pass.
        positions: The argument of the model's forward that takes token positions, int64 [1, T];
            empty if there is none.
        dropping: The modules whose forward uses dropout outside of attention.
    """

    modules: tuple[AttendingModule, ...]
    positions: str = ""
    dropping: tuple[str, ...] = ()

    @property
    def heads(self) -> tuple[AttentionHeads, ...]:
        """The heads of each module."""
        return tuple(module.heads for module in self.modules)


class ExpertLayers(NamedTuple):
    """The layers with experts of a model, which are equal.

    Attributes:
        modules: The module of each layer that holds its experts, first to last.
        number: The number of experts of a layer.
        chosen: The number of experts that a token goes to.
        features: The elements of a row, which an expert gets for each token.
    """

    modules: tuple[str, ...]
    number: int
    chosen: int
    features: int


class TensorFacts(NamedTuple):
    """A parameter or buffer.

    Attributes:
        name: The canonical dotted name.
        shape: The shape in elements; for a sharded tensor, of one rank's shard.
        cut_over: The axes that the tensor is sharded over.
        is_copy: True for a stage's copy of a tensor that another stage has, as for tied weights.
        is_frozen: True if it is not trained, so that it has no gradient and no optimizer state.
        num_quantized: The elements of a quantized weight, whose `shape` counts bytes; else 0.
    """

    name: str
    shape: tuple[int, ...]
    cut_over: tuple[Axis, ...] = ()
    is_copy: bool = False
    is_frozen: bool = False
    num_quantized: int = 0

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def is_cut(self) -> bool:
        """True if the tensor is one rank's shard."""
        return bool(self.cut_over)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitFacts:
    """A unit of tensors that are all-gathered, reduced and freed together: a block, or the root.

    Attributes:
        modules: The dotted names of its modules; "" for the root, which has all remaining tensors.
        tensors: The tensors in order. Tied tensors appear once, in the root.
        trained: The tensors that are not frozen.
        trained_numel: The elements of tensors that have gradients and optimizer state.
        quantized_numel: The bytes of quantized weights, which count as elements.
    """

    modules: tuple[str, ...]
    tensors: tuple[TensorFacts, ...]
    # Computed once, because they are read often.
    shapes: tuple[tuple[int, ...], ...] = field(init=False, repr=False, compare=False)
    numel: int = field(init=False, repr=False, compare=False)
    trained: tuple[TensorFacts, ...] = field(init=False, repr=False, compare=False)
    trained_shapes: tuple[tuple[int, ...], ...] = field(init=False, repr=False, compare=False)
    trained_numel: int = field(init=False, repr=False, compare=False)
    quantized_numel: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # object.__setattr__, because the dataclass is frozen.
        shapes = tuple([tensor.shape for tensor in self.tensors])
        object.__setattr__(self, "shapes", shapes)
        object.__setattr__(self, "numel", sum(map(math.prod, shapes)))
        trained = tuple([tensor for tensor in self.tensors if not tensor.is_frozen])
        object.__setattr__(self, "trained", trained)
        object.__setattr__(self, "trained_shapes", tuple([tensor.shape for tensor in trained]))
        object.__setattr__(self, "trained_numel", sum(map(math.prod, self.trained_shapes)))
        quantized = sum([tensor.numel for tensor in self.tensors if tensor.num_quantized])
        object.__setattr__(self, "quantized_numel", quantized)

    @property
    def frozen(self) -> tuple[TensorFacts, ...]:
        """The tensors that are not trained."""
        if len(self.trained) == len(self.tensors):
            return ()
        return tuple([tensor for tensor in self.tensors if tensor.is_frozen])

    @property
    def name(self) -> str:
        """The name of the unit; empty for the root."""
        first, *others = self.modules
        return f"{first} … {others[-1]}" if others else first

    @property
    def is_root(self) -> bool:
        """True for the unit of all tensors that no other unit has."""
        return self.modules == ("",)

    @property
    def stays_by_default(self) -> bool:
        """True for the root, and for the unit with which forward ends and backward begins."""
        return self.is_root or self.modules == LAST_UNIT


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """All facts of a model that a prediction needs.

    Attributes:
        units: In the order in which fully_shard wraps them: blocks first to last, then the root.
        buffers: The name and the bytes of each buffer.
        gradient_order: The parameters in the order in which a backward pass completes their
            gradients. DDP fills its buckets in this order.
        timeline: One micro-batch, traced at the spec's shape and dtypes; None if a committed table
            has it.
        roles: The roles of modules on the tensor axis, for a model that is not built in.
        fusions: The lengths of the parts of fused projections, for such a model.
        chain: The sequence of layers that the pipeline axis divides.
        blocks: The names of repeated modules, first to last.
        stage_passes: The traced passes of each stage, by the places of ranks along axes that shard
            the model. Without pp the model is one stage.
        stage_rows: The passes as formulas of the rows of experts; empty if routing changes no size,
            or no formula holds.
        work: The operators of one micro-batch.
        part_works: The operators on ranks at each place along tp, of all their stages together.
        draws: True if the forward pass draws random numbers, for example for dropout.
        sample_bytes: The bytes of a sample that does not consist of tokens.
        ignored: Fields of a config without an effect, each with the reason.
        vocabulary: The number of logits of a token, if the model has run.
        untraced: The reason why a trace is missing that the model should have.
        unknown_attention: The attention whose memory on the spec's GPUs is unknown.
        model: The model of these facts, if it is not the spec's.
        by_data: The modules that select by data, such as a router, so that sizes depend on data.
            The traces then have one extent of the selection.
        attending: The facts for context parallelism, for a model that is not built in.
        experts: The layers with experts, if they are sharded over ranks.
        others: The facts at other extents of the selection. Figures lie between the smallest and
            the largest of all.
        unvisited: Parameters without a gradient if nothing is selected for them.
        stops: Modules whose inputs have no gradient, because nothing before them is trained.
        built_whole: The reason why each rank builds the full model before it keeps its part; empty
            if a rank draws or reads its part alone.
    """

    units: tuple[UnitFacts, ...]
    buffers: tuple[tuple[str, int], ...] = ()
    gradient_order: tuple[str, ...] = ()
    timeline: Timeline | None = None
    roles: Roles = ()
    fusions: Fusions = ()
    chain: Chain | None = None
    blocks: tuple[str, ...] = ()
    stage_passes: tuple[tuple[Passes, ...], ...] = field(default=(), hash=False)
    stage_rows: tuple[tuple[RowsPasses, ...], ...] = field(default=(), hash=False)
    work: WorkByKind | None = field(default=None, compare=False)
    part_works: tuple[WorkByKind, ...] = field(default=(), compare=False)
    draws: bool = False
    sample_bytes: int | None = None
    ignored: tuple[str, ...] = field(default=(), compare=False)
    vocabulary: int | None = field(default=None, compare=False)
    untraced: str = field(default="", compare=False)
    unknown_attention: str = ""
    model: ModelSpec | None = field(default=None, compare=False)
    by_data: str = ""
    attending: AttentionFacts | None = None
    experts: ExpertLayers | None = None
    others: tuple[ModelFacts, ...] = field(default=(), hash=False)
    unvisited: tuple[str, ...] = ()
    stops: tuple[str, ...] = ()
    built_whole: str = field(default="", compare=False)

    def __hash__(self) -> int:
        """Return a hash of unit sizes and buffers only.

        Equal facts have equal unit sizes, and hashing all tensors would take milliseconds.
        """
        return hash((tuple(unit.numel for unit in self.units), self.buffers, self.chain is None))

    @classmethod
    def of_units(cls, units: Units, roles: Roles = ()) -> Self:
        """Return the facts of a model of which only the modules of each unit are known."""
        return cls(units=tuple(UnitFacts(modules=own, tensors=()) for own in units), roles=roles)

    def as_one_unit(self) -> ModelFacts:
        """Return the facts with the root as the only unit.

        They have no trace, because the trace has other units.
        """
        units = (UnitFacts(modules=("",), tensors=self.tensors),)
        return replace(self, units=units, timeline=None, stage_passes=(), stage_rows=())

    @property
    def tensors(self) -> tuple[TensorFacts, ...]:
        """All tensors, unit by unit."""
        return tuple(tensor for unit in self.units for tensor in unit.tensors)

    @property
    def trained(self) -> tuple[TensorFacts, ...]:
        """The tensors that are not frozen, unit by unit."""
        return tuple(tensor for unit in self.units for tensor in unit.trained)

    @property
    def trained_numel(self) -> int:
        """The elements of all tensors with gradients and optimizer state."""
        return sum(unit.trained_numel for unit in self.units)

    @property
    def quantized_numel(self) -> int:
        """The bytes of all quantized weights."""
        return sum(unit.quantized_numel for unit in self.units)

    def is_passed_by(self, unit: UnitFacts) -> bool:
        """Return True if no gradient reaches the output of a unit that has nothing to train.

        The root is never passed by.
        """
        is_idle = bool(unit.tensors) and not unit.trained and not unit.is_root
        return is_idle and unit.modules[0] in self.stops

    @property
    def unit_modules(self) -> tuple[tuple[str, ...], ...]:
        """The modules of each unit, as a plan lists them."""
        return tuple(unit.modules for unit in self.units)

    @property
    def numel(self) -> int:
        """The number of parameters, P. Bytes of quantized weights count as elements."""
        return sum(unit.numel for unit in self.units)


def module_prefixes(name: str) -> Iterator[str]:
    """Yield the dotted names of the modules that contain a name, outermost first, then the name."""
    parts = name.split(".")
    return accumulate(parts, "{}.{}".format)
