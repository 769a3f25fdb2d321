"""What a prediction must know of a model, without torch: its tensors by unit in order, what a step
computes operator by operator, and what each pass of a stage allocates.

Built-in families state their tensors as formulas (`facts.parameters`); for any other model the
facts are read off the module and traced. An operator has a kind, a dtype and the dimensions that
its time depends on; a pass is a list of operators and of the collectives between them, in order. A
stage's pass leaves out what crosses its boundaries: hidden states and the output's gradient were
alive before, its own output and the input's gradient stay alive. Where sizes depend on routing, a
timeline is a formula of the rows that the experts of each layer get: a storage has a fixed size or
is proportional to the rows of one layer, which the tracer verifies.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import NamedTuple, Self

from ptrain.cost import Collective
from ptrain.facts.stages import Chain, Units
from ptrain.spec.model import ModelSpec
from ptrain.spec.placement import Axis
from ptrain.spec.precision import DType
from ptrain.spec.rates import OperatorKind
from ptrain.spec.role import Fusions, Roles
from ptrain.timeline import Boundary, Complete, Item, Kind, Repeated, Run, Timeline, run

NO_LAYER = -1


class RowsSize(NamedTuple):
    """`number` bytes, or as many of each row that the experts of a layer get: one of those that
    have experts, first to last."""

    number: int
    layer: int = NO_LAYER

    def at(self, rows: Sequence[int]) -> int:
        """Return the bytes where the layers get so many rows."""
        return self.number if self.layer == NO_LAYER else self.number * rows[self.layer]

    def behind(self, layers: int) -> RowsSize:
        """Return it of a layer so many further on."""
        return self if self.layer == NO_LAYER else self._replace(layer=self.layer + layers)


class StorageEvent(NamedTuple):
    """A storage is allocated, or `is_freed`."""

    size: RowsSize
    is_freed: bool


class StorageEvents(NamedTuple):
    """What is allocated and freed between two boundaries, in order."""

    events: tuple[StorageEvent, ...]

    def at(self, rows: Sequence[int]) -> Run:
        """Return it in bytes."""
        deltas = ((-1 if event.is_freed else 1) * event.size.at(rows) for event in self.events)
        known = run(deltas)
        assert known is not None, "something happens"
        return known


RowsItem = Boundary | Complete | StorageEvents


class RowsTimeline(NamedTuple):
    """One micro-batch, as a `Timeline`."""

    forward: tuple[RowsItem, ...]
    backward: tuple[RowsItem, ...]
    moved: tuple[tuple[str, RowsSize], ...] = ()
    repeated: tuple[tuple[str, int], ...] = ()

    def at(self, rows: Sequence[int]) -> Timeline:
        """Return the timeline where the experts of each layer get so many rows."""
        return Timeline(
            forward=tuple(_at(self.forward, rows)),
            backward=tuple(_at(self.backward, rows)),
            moved=tuple((tier, size.at(rows)) for tier, size in self.moved),
            repeated=self.repeated,
        )


def _at(items: Sequence[RowsItem], rows: Sequence[int]) -> Iterator[Item]:
    for item in items:
        yield item.at(rows) if isinstance(item, StorageEvents) else item


Items = tuple[Item, ...]


class Passes(NamedTuple):
    """Of one micro-batch on one stage: the items of each kind of pass; bytes of what it hands on
    (hidden states, or logits) and of hidden states. `moved` and `repeated` as a timeline's."""

    items: Mapping[Kind, Items]
    output: int
    hidden: int
    moved: tuple[tuple[str, int], ...] = ()
    repeated: tuple[tuple[str, int], ...] = ()

    @property
    def loss(self) -> int:
        """Bytes of one micro-batch that outlive its whole backward pass and cross no boundary."""
        return _left(self, Kind.BACKWARD)

    @property
    def timeline(self) -> Timeline:
        """Forward and whole backward."""
        return Timeline(
            forward=self.items[Kind.FORWARD],
            backward=self.items[Kind.BACKWARD],
            moved=self.moved,
            repeated=self.repeated,
        )


def passes_of(
    whole: Timeline, halves: Timeline | None, *, is_first: bool, output: int, hidden: int
) -> Passes:
    """Return the passes of a stage by the timelines of its whole passes and, behind the first one
    and where backward passes are in halves, of these."""
    items = {Kind.FORWARD: whole.forward, Kind.BACKWARD: whole.backward}
    if is_first:
        passes = of_first_stage(items, output=output)
    else:
        if halves is not None:
            items |= {Kind.INPUT: halves.forward, Kind.WEIGHT: halves.backward}
        passes = of_later_stage(items, output=output, hidden=hidden)
    return passes._replace(moved=whole.moved, repeated=whole.repeated)


class RowsPasses(NamedTuple):
    """The same as a formula of the rows that the experts of its `layers` get."""

    layers: tuple[str, ...]
    whole: RowsTimeline
    halves: RowsTimeline | None
    is_first: bool
    output: int
    hidden: int

    def at(self, rows: Sequence[int]) -> Passes:
        """Return the passes where the layers get so many rows."""
        return passes_of(
            self.whole.at(rows),
            self.halves.at(rows) if self.halves else None,
            is_first=self.is_first,
            output=self.output,
            hidden=self.hidden,
        )


def of_first_stage(items: Mapping[Kind, Items], *, output: int) -> Passes:
    """Nobody waits for gradients of tokens, and the half of the weights is the whole."""
    whole = {**items, Kind.INPUT: (), Kind.WEIGHT: items[Kind.BACKWARD]}
    return Passes(items=whole, output=output, hidden=0)


def of_later_stage(items: Mapping[Kind, Items], *, output: int, hidden: int) -> Passes:
    """Return the passes of a stage behind the first. What both halves leave of the graph goes in
    the end of the second."""
    passes = Passes(items=items, output=output, hidden=hidden)
    if Kind.WEIGHT not in items:
        return passes
    left = _left(passes, Kind.INPUT, Kind.WEIGHT) - passes.loss
    assert left >= 0, "halves of a backward pass that free what is not there"
    ended = {**items, Kind.WEIGHT: (*items[Kind.WEIGHT], Run(0, -left))}
    return Passes(items=ended, output=output, hidden=hidden)


def _left(passes: Passes, *backward: Kind) -> int:
    """Return the bytes of one micro-batch that outlive these passes and cross no boundary."""
    items = (item for kind in (Kind.FORWARD, *backward) for item in passes.items[kind])
    return sum(map(net, items)) - passes.output - passes.hidden


def net(item: Item) -> int:
    """Bytes that stay, but for gradients, which are the wrap's."""
    match item:
        case Run():
            return item.net
        case Complete(_, size, cloned):
            return 0 if cloned else -size
        case Repeated(times, items):
            return times * sum(map(net, items))
        case _:
            return 0


class Operator(NamedTuple):
    """`times` operators of one kind, dtype and size: `dimensions` are its kind's. `is_whole`: of
    fused attention, no mask leaves out half of the scores."""

    kind: OperatorKind
    dtype: DType
    dimensions: tuple[int, ...]
    times: int = 1
    is_whole: bool = False

    @property
    def flops(self) -> int:
        """Floating-point operations of one of them, two for a multiplication and its addition: of
        fused attention two products forward and five backward (`models.work`), whole as if nothing
        were masked; 0 of what is bound by memory."""
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
    """A collective within a pass, over the axis that cuts operators or over one that is named, of
    so many neighbouring `ranks` of it (0: of all): bytes of the whole tensor. `beside`: how many
    entries of the pass behind it run before it is awaited."""

    collective: Collective
    payload: int
    times: int = 1
    axis: str = ""
    ranks: int = 0
    beside: int = 0


PassWork = tuple[Operator | InnerCollective, ...]


class LayerWork(NamedTuple):
    """What one layer, or what stands in front of the layers or behind them, computes of one
    micro-batch. `backward` holds what it computes again of forward; `inputs` and `weights` are its
    halves, where these are computed apart."""

    forward: PassWork
    backward: PassWork
    inputs: PassWork = ()
    weights: PassWork = ()

    def then(self, other: LayerWork) -> LayerWork:
        """Return both as one, the other behind it: in backward before it."""
        return LayerWork(
            forward=self.forward + other.forward,
            backward=other.backward + self.backward,
            inputs=other.inputs + self.inputs,
            weights=self.weights + other.weights,
        )


class ModelWork(NamedTuple):
    """What a rank computes of one micro-batch, by layer (of all layers of the model, in their
    order). `front` is the embedding; `behind` the last norm, the head and the loss."""

    front: LayerWork
    layers: tuple[LayerWork, ...]
    behind: LayerWork


class WorkByKind(NamedTuple):
    """A model's work with each kind of layer once: `order` says of which kind each layer is."""

    front: LayerWork
    kinds: tuple[LayerWork, ...]
    order: tuple[int, ...]
    behind: LayerWork

    @classmethod
    def of(cls, work: ModelWork) -> WorkByKind:
        """Return the same as a model's work."""
        numbers: dict[LayerWork, int] = {}
        order = tuple([numbers.setdefault(layer, len(numbers)) for layer in work.layers])
        return cls(front=work.front, kinds=tuple(numbers), order=order, behind=work.behind)

    @property
    def model(self) -> ModelWork:
        """The work of all layers; those that are alike share theirs."""
        layers = tuple([self.kinds[number] for number in self.order])
        return ModelWork(front=self.front, layers=layers, behind=self.behind)


# Attention of a model that is not built in: the modules that compute it, and of what heads.


class AttentionHeads(NamedTuple):
    """Heads of queries, heads of keys and values, and the features of a head."""

    heads: int
    kv_heads: int
    head_dim: int


class AttendingModule(NamedTuple):
    """A module whose own code attends, once in a forward pass; by its name in the model."""

    name: str
    heads: AttentionHeads


class Attending(NamedTuple):
    """What slices of the tokens need of a model: its modules that attend, in the order of a forward
    pass, and the argument by which its forward takes the tokens' positions, int64 [1, T]; "" where
    it takes none. `dropping`: the modules whose own code drops out something, outside of attention.
    """

    modules: tuple[AttendingModule, ...]
    positions: str = ""
    dropping: tuple[str, ...] = ()

    @property
    def heads(self) -> tuple[AttentionHeads, ...]:
        """Of what heads each is."""
        return tuple(module.heads for module in self.modules)


# What is known of a model's layers with experts, of which ranks may have some each.


class ExpertLayers(NamedTuple):
    """All layers with experts of a model, which are alike: `modules` hold those of a layer, first
    to last, a `number` of them; of these a token chooses so many (`chosen`), each of which gets a
    row of `features` elements."""

    modules: tuple[str, ...]
    number: int
    chosen: int
    features: int


class TensorFacts(NamedTuple):
    """A parameter or buffer: canonical dotted name and shape in elements. `cut_over`: it is one
    rank's slice of it along these axes; `is_copy`: a stage's own copy of what another stage has;
    `is_frozen`: it is trained by nobody, so that it has neither a gradient nor optimizer state."""

    name: str
    shape: tuple[int, ...]
    cut_over: tuple[Axis, ...] = ()
    is_copy: bool = False
    is_frozen: bool = False

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def is_cut(self) -> bool:
        """Whether it is one rank's slice."""
        return bool(self.cut_over)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitFacts:
    """What is gathered, reduced and freed together: a block, or the root with all that is left.
    `modules` are dotted names, "" for the root. Tied tensors appear once, in the root. `trained`
    are those of its tensors that are not frozen."""

    modules: tuple[str, ...]
    tensors: tuple[TensorFacts, ...]
    # of the tensors, once: they are read often
    shapes: tuple[tuple[int, ...], ...] = field(init=False, repr=False, compare=False)
    numel: int = field(init=False, repr=False, compare=False)
    trained: tuple[TensorFacts, ...] = field(init=False, repr=False, compare=False)
    trained_shapes: tuple[tuple[int, ...], ...] = field(init=False, repr=False, compare=False)
    # elements of what has gradients and optimizer state
    trained_numel: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        shapes = tuple([tensor.shape for tensor in self.tensors])
        object.__setattr__(self, "shapes", shapes)
        object.__setattr__(self, "numel", sum(map(math.prod, shapes)))
        trained = tuple([tensor for tensor in self.tensors if not tensor.is_frozen])
        object.__setattr__(self, "trained", trained)
        object.__setattr__(self, "trained_shapes", tuple([tensor.shape for tensor in trained]))
        object.__setattr__(self, "trained_numel", sum(map(math.prod, self.trained_shapes)))

    @property
    def frozen(self) -> tuple[TensorFacts, ...]:
        """Its tensors that nobody trains."""
        if len(self.trained) == len(self.tensors):
            return ()
        return tuple([tensor for tensor in self.tensors if tensor.is_frozen])

    @property
    def name(self) -> str:
        """What the unit is called; "" for the root."""
        first, *others = self.modules
        return f"{first} … {others[-1]}" if others else first

    @property
    def is_root(self) -> bool:
        """Whether it is what no other unit has."""
        return self.modules == ("",)

    def is_hidden(self, tensor: TensorFacts) -> bool:
        """Return whether one of its tensors is a matrix within the model: no embedding, no head."""
        return len(tensor.shape) == 2 and not self.is_root


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """`units` in the order in which fully_shard wraps them: blocks first to last, then the root.
    `buffers` are (name, bytes). `gradient_order` names the parameters in the order in which their
    gradients are complete in a backward pass (it decides DDP's buckets). `timeline` is one
    micro-batch traced at the spec's shape and dtypes; None where a committed table gives it. Of a
    model that is not built in, `roles` are those on the tensor axis and `fusions` the lengths in
    its fused projections; `chain` is what the pipeline axis cuts, and `stage_passes` what was
    traced of each stage, by the places of ranks along the cutting axes: without pp of one stage,
    the model. `stage_rows` are the same as formulas of where tokens go, empty where that changes no
    size or there is no formula; `work` is what that micro-batch computes and `part_works` what it
    does on the ranks at each place along tp, of all their stages together; `blocks` are the names
    of what repeats, first to last. `draws`: it draws random numbers in forward, as dropout does;
    `sample_bytes` are those of a sample that is not tokens; `ignored` are fields of a config that
    have no influence, each with the reason; `vocabulary` is how many logits a token has, where it
    has run. `untraced` says why there is no trace of a model that should have one,
    `unknown_attention` of what attention nobody knows what the spec's GPUs would keep. `by_data`
    says what selects by data, as a router does, so that sizes depend on it: then the traces are
    those of one extent of what is selected, and `others` are the facts at other extents; figures
    lie between the least and the largest of all. `attending` is what slices of the tokens over cp
    need of a model that is not built in, `experts` its layers with experts where ranks have some
    each. `unvisited` are parameters that have no gradient where nothing is selected for them.
    `built_whole` says why each rank builds the full model before it keeps its part; it is empty
    where a rank draws or reads its part alone. `stops` are modules whose inputs have no gradient,
    for nothing trained comes before them. `model` is there where they are of another one than the
    spec's.
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
    attending: Attending | None = None
    experts: ExpertLayers | None = None
    others: tuple[ModelFacts, ...] = field(default=(), hash=False)
    unvisited: tuple[str, ...] = ()
    stops: tuple[str, ...] = ()
    built_whole: str = field(default="", compare=False)

    def __hash__(self) -> int:
        """Of little: what is equal has units of equal sizes, and to go through all their tensors
        costs milliseconds."""
        return hash((tuple(unit.numel for unit in self.units), self.buffers, self.chain is None))

    @classmethod
    def of_units(cls, units: Units, roles: Roles = ()) -> Self:
        """Return those of a model of which only the modules of each unit are known."""
        return cls(units=tuple(UnitFacts(modules=own, tensors=()) for own in units), roles=roles)

    def as_one_unit(self) -> ModelFacts:
        """Return the same model with its root for its only unit; its trace knows others."""
        units = (UnitFacts(modules=("",), tensors=self.tensors),)
        return replace(self, units=units, timeline=None, stage_passes=(), stage_rows=())

    @property
    def tensors(self) -> tuple[TensorFacts, ...]:
        return tuple(tensor for unit in self.units for tensor in unit.tensors)

    @property
    def trained(self) -> tuple[TensorFacts, ...]:
        """The tensors that are not frozen, unit by unit."""
        return tuple(tensor for unit in self.units for tensor in unit.trained)

    @property
    def trained_numel(self) -> int:
        """Elements of what has gradients and optimizer state: P where nothing is frozen."""
        return sum(unit.trained_numel for unit in self.units)

    def is_passed_by(self, unit: UnitFacts) -> bool:
        """Return whether no gradient comes to what a unit gives; what is trained is within the
        root."""
        is_idle = bool(unit.tensors) and not unit.trained and not unit.is_root
        return is_idle and unit.modules[0] in self.stops

    @property
    def unit_modules(self) -> tuple[tuple[str, ...], ...]:
        """The modules of each unit, as a plan lists them."""
        return tuple(unit.modules for unit in self.units)

    @property
    def numel(self) -> int:
        """P, the number of parameters."""
        return sum(unit.numel for unit in self.units)


def prefixes(name: str) -> Iterator[str]:
    """The dotted names of the modules around a name, and itself, outermost first."""
    parts = name.split(".")
    return accumulate(parts, "{}.{}".format)
