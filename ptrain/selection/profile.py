"""What a micro-batch takes on one rank, layer by layer, as a search adds it up: bytes from the
committed tables (of a whole model, and of its first, a middle and its last stage), and seconds
of computation, communication and the host's launches by the rates of a machine.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from math import prod

from ptrain.axes.expert.cost import rows_bytes
from ptrain.axes.pipeline.stage_facts import chain_of
from ptrain.cost import Collective
from ptrain.derivation import layers as layer_tables
from ptrain.derivation.activation_moves import COPIES
from ptrain.derivation.clock import Clock
from ptrain.derivation.interconnect import Network
from ptrain.derivation.layers import passes_at
from ptrain.derivation.tables import Place, Setting, setting_of
from ptrain.derivation.tensor import cut_of, fullest_place, local_units
from ptrain.facts.model import (
    Items,
    LayerWork,
    ModelFacts,
    ModelWork,
    Operator,
    Passes,
    PassWork,
    UnitFacts,
    net,
)
from ptrain.facts.parameters import is_of_experts
from ptrain.facts.stages import FRONT, is_within
from ptrain.plan.lower import lower
from ptrain.rates.pace import Pace, UnknownRate, around
from ptrain.selection.space import without_experts
from ptrain.spec.activations import PLAIN, Kept, Scope
from ptrain.spec.model import ModelShape
from ptrain.spec.placement import EXPERT_AXES, Axis, Tier
from ptrain.spec.rates import Hook, OperatorKind
from ptrain.spec.spec import Spec, ranks_over
from ptrain.timeline import Boundary, Item, Kind, Mark, Repeated, Run


@dataclass(frozen=True, slots=True, kw_only=True)
class IssueSeconds:
    """Of a host's, forward and backward: in front of the blocks, of a block, and behind them."""

    front: tuple[float, float]
    block: tuple[float, float]
    behind: tuple[float, float]


def issue_seconds(clock: Clock, work: ModelWork, kept: Kept) -> IssueSeconds:
    """Return those of passes that are whole."""
    middle = work.layers[len(work.layers) // 2]
    return IssueSeconds(
        front=_issued(clock, work.front, PLAIN),
        block=_issued(clock, middle, kept),
        behind=_issued(clock, work.behind, PLAIN),
    )


def _issued(clock: Clock, work: LayerWork, kept: Kept) -> tuple[float, float]:
    forward, backward = (
        clock.pass_seconds(passes, around(kept, kind)).on_host
        for kind, passes in ((Kind.FORWARD, work.forward), (Kind.BACKWARD, work.backward))
    )
    return forward, backward


_LAYERS = 3  # a first, a middle and a last one


@dataclass(frozen=True, slots=True, kw_only=True)
class EndsActivity:
    """What a chunk, a micro-batch on a stage, has beyond its blocks: `saved` from its forward to
    its backward pass, its input and output included, and of a last stage `waiting` more than these
    between the halves of this one. By how much more there is than what is saved as the forward pass
    ends (`forward_rise`) and as the backward pass begins (`backward_rise`), how much less once that
    has come to the blocks (`begun`), and by how much more than with the blocks gone it ends
    (`end_rise`, of the embedding)."""

    saved: int
    waiting: int
    forward_rise: int
    backward_rise: int
    begun: int
    end_rise: int


@dataclass(frozen=True, kw_only=True)
class Activity:
    """Bytes of a micro-batch. Of a `block`: what its forward pass leaves, and the rises of this and
    of its backward pass above what there was before, gradients of parameters not counted; what the
    half of the inputs leaves beside all that (`half`), and what goes off the device (`moved`).
    `hidden` goes from layer to layer. `ends`: what stages at each place have beyond their blocks;
    `least`: what some rank has at least, whatever else it has."""

    block: int
    forward_rise: int
    backward_rise: int
    half: int
    moved: int
    hidden: int
    least: int
    ends: Mapping[Place, EndsActivity]

    def ends_of(self, *, front: bool, behind: bool) -> EndsActivity:
        """Return those of a rank with these ends of the model."""
        if front and behind:
            return self.ends[Place.ALONE]
        return self.ends[Place.FIRST if front else Place.LAST if behind else Place.MIDDLE]

    def of_samples(self, samples: int, known: int) -> Activity:
        """Return the bytes of so many samples, where these are those of the known number."""
        if samples == known:
            return self
        ends = {
            place: EndsActivity(
                **{s.name: samples * getattr(of_place, s.name) // known for s in fields(of_place)}
            )
            for place, of_place in self.ends.items()
        }
        sizes = {
            s.name: samples * getattr(self, s.name) // known
            for s in fields(self)
            if s.name != "ends"
        }
        return Activity(**sizes, ends=ends)


def with_rows(activity: Activity, rows: int, kept: Kept) -> Activity:
    """Return the bytes of a block whose tokens are copied to rows for experts, which take so many
    bytes: those that arrive and those that come back are kept, and of each trip both ends are there
    at once."""
    is_kept = kept.policy is None or kept.policy.scope is not Scope.BLOCK
    is_here = kept.tier is Tier.DEVICE
    more = _KEPT_ROWS * rows * is_kept
    return replace(
        activity,
        block=activity.block + more * is_here,
        moved=activity.moved + more * (not is_here),
        forward_rise=activity.forward_rise + (_KEPT_ROWS + 1) * rows,
        backward_rise=activity.backward_rise + (_KEPT_ROWS + (not is_kept) * _KEPT_ROWS) * rows,
    )


_KEPT_ROWS = 2  # tensors of all rows


def activity_of(spec: Spec, kept: Kept) -> Activity:
    """Return the bytes of a spec whose tables are known; `spec` has axes within a block alone."""
    shape = spec.model
    assert isinstance(shape, ModelShape), "a built-in model"
    facts_plan = lower(
        spec, ModelFacts.of_units((*((f"blocks.{i}",) for i in range(_LAYERS)), ("",)))
    )
    setting = setting_of(spec, cut_of(spec, facts_plan, fullest_place(spec, facts_plan)))
    setting = replace(setting, shape=replace(shape, layers=_LAYERS))
    ways = (kept,) * _LAYERS
    timeline = layer_tables.timeline(setting, None, ways)
    front, forward, behind = _parted(timeline.forward, Kind.FORWARD)
    _, backward, _ = _parted(timeline.backward, Kind.BACKWARD)
    part, of_block = setting, forward.net
    if spec.is_for_cuda and setting.shape.drops:
        # no table holds what dropout keeps there of a part of the layers
        part = replace(setting, shape=setting.shape.without_dropout())
        of_block = _parted(layer_tables.timeline(part, None, ways).forward, Kind.FORWARD)[1].net
    stages = {
        place: passes_at(part, place, ways) for place in (Place.FIRST, Place.MIDDLE, Place.LAST)
    }
    half = _parted(stages[Place.MIDDLE].items.get(Kind.INPUT, ()), Kind.INPUT)[1].net
    whole = Passes(
        items={Kind.FORWARD: timeline.forward, Kind.BACKWARD: timeline.backward},
        output=0,
        hidden=0,
    )
    return Activity(
        block=forward.net,
        forward_rise=forward.rise,
        backward_rise=backward.rise,
        half=half,
        moved=sum(size for _, size in timeline.moved) // _LAYERS,
        hidden=_hidden(setting),
        least=max(behind.rise, front.rise, backward.rise),
        ends={
            place: _ends(passes, of_block, half)
            for place, passes in ((Place.ALONE, whole), *stages.items())
        },
    )


def _hidden(setting: Setting) -> int:
    values = setting.values
    return values["batch"] * values["sequence"] * setting.shape.hidden * setting.compute.itemsize


def _ends(passes: Passes, block: int, half: int) -> EndsActivity:
    """What stages at a place have; their input came before the forward pass, and the gradient of
    their output before the backward pass."""
    forward = passes.items[Kind.FORWARD]
    _, _, behind = _parted(forward, Kind.FORWARD)
    head, _, end = _parted(passes.items[Kind.BACKWARD], Kind.BACKWARD)
    inputs = sum(map(net, passes.items.get(Kind.INPUT, ())))
    return EndsActivity(
        saved=sum(map(net, forward)) - _LAYERS * block + passes.hidden,
        waiting=inputs - _LAYERS * half - passes.output,
        forward_rise=behind.rise - behind.net,
        backward_rise=head.rise,
        begun=head.net,
        end_rise=end.rise,
    )


def _parted(items: Items, kind: Kind) -> tuple[Run, Run, Run]:
    """What is before the blocks, in the middle one, and behind them."""
    enter, leave, last = Mark.PRE_BACKWARD, Mark.POST_BACKWARD, 0
    if kind is Kind.FORWARD:
        enter, leave, last = Mark.ENTER, Mark.LEAVE, _LAYERS - 1
    parts = {place: _Sums() for place in ("before", "middle", "outer", "behind")}
    own = parts["before"]
    for item in _flat(items):
        if isinstance(item, Run):
            own.add(item.rise, item.net)
        elif not isinstance(item, Boundary):
            own.add(0, net(item))  # a gradient that is complete is the wrap's
        elif item.unit < _LAYERS and item.mark is enter:
            own = parts["middle" if item.unit == 1 else "outer"]
        elif item.unit == last and item.mark is leave:
            own = parts["behind"]
    before, middle, behind = (parts[place] for place in ("before", "middle", "behind"))
    return Run(*before.ends), Run(*middle.ends), Run(*behind.ends)


class _Sums:
    """What items leave together, and the rise above what there was before them."""

    def __init__(self) -> None:
        self.ends = 0, 0

    def add(self, rise: int, left: int) -> None:
        """Take in the next item."""
        own, level = self.ends
        self.ends = max(own, level + rise), level + left


def _flat(items: Iterable[Item]) -> Iterable[Item]:
    """Yield items one by one."""
    for item in items:
        if isinstance(item, Repeated):
            for _ in range(item.times):
                yield from _flat(item.items)
        else:
            yield item


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Parameters of one rank's part of the model: of a block, of each of its `tensors`, in front of
    the blocks and behind them; `copied` those in front that a last stage has too. `experts`: of a
    block those that no other rank along an axis of experts has, which has `shared_by` ranks."""

    block: int
    largest_part: int  # of a block's sub-blocks
    front: int
    behind: int
    copied: int
    tensors: tuple[int, ...]
    layers: int
    experts: int = 0
    shared_by: int = 1

    @property
    def own_experts(self) -> int:
        """Return the same where other ranks have others, else none."""
        return self.experts if self.shared_by > 1 else 0


def sizes_of(spec: Spec, facts: ModelFacts) -> Sizes:
    """Return the sizes of the largest part that a rank of the axes within a block has. `facts` are
    of units of one block."""
    ranks = prod(spec.degree(axis) for axis in EXPERT_AXES)
    spec = without_experts(spec)
    plan = lower(spec, facts)
    units: Sequence[UnitFacts] = facts.units
    if plan.tensor is not None:
        units = local_units(facts, plan.tensor, spec.degree(plan.tensor.axis))[0][0]
    *blocks, root = units
    block = max(blocks, key=lambda unit: unit.numel)
    front = sum(t.numel for t in root.tensors if is_within(t.name, FRONT))
    tied = dict(chain_of(spec, facts).tied)
    parts: dict[str, int] = {}
    tensors = {
        t.name: t.numel // ranks if is_of_experts(t.name) else t.numel for t in block.tensors
    }
    for name, size in tensors.items():
        part = ".".join(name.split(".")[:3])
        parts[part] = parts.get(part, 0) + size
    return Sizes(
        block=sum(tensors.values()),
        largest_part=max(parts.values()),
        front=front,
        behind=root.numel - front,
        copied=sum(t.numel for t in root.tensors if t.name in tied),
        tensors=tuple(tensors.values()),
        layers=len(blocks),
        experts=sum(size for name, size in tensors.items() if is_of_experts(name)),
        shared_by=ranks,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Seconds:
    """Of a micro-batch on one rank, forward and backward: in front of the blocks, of a block, and
    behind them; what the axes within a block send is in them. `weights`: of a block's backward, the
    part that is of weights alone. `moved`: in which a block's activations leave the device and come
    back, on lanes of their own. `issuing` are a host's that runs ahead."""

    front: tuple[float, float]
    block: tuple[float, float]
    behind: tuple[float, float]
    weights: float
    moved: tuple[float, float] = (0.0, 0.0)
    issuing: IssueSeconds | None = None

    def after(self, forward: float, backward: float) -> Seconds:
        """Return those of blocks that besides wait so long."""
        there, back = self.block
        return replace(self, block=(there + forward, back + backward))


def exchange_seconds(spec: Spec, shape: ModelShape, pace: Pace, kept: Kept) -> tuple[float, float]:
    """Return for how long a block waits, forward and backward, for rows that go to experts of other
    ranks and come back; what is computed again sends again."""
    ranks, inside = ranks_over(spec, spec.expert_axes), spec.degree(Axis.TP)
    if spec.degree(Axis.EP) == 1:
        return 0.0, 0.0
    once = pace.collective_seconds(
        Collective.ALL_TO_ALL,
        ranks=ranks,
        nodes=nodes_of(spec, ranks, 1 if spec.tensor.is_folded else inside),
        payload=rows_bytes(spec, shape),
    )
    again = kept.policy is not None and kept.policy.scope is Scope.BLOCK
    return _TRIPS * once, _TRIPS * once * (1 + again)


_TRIPS = 2  # of rows: to their experts, and back


def clock_of(spec: Spec, pace: Pace) -> Clock:
    """Return the clock of a spec with axes within a block alone, which asks for a pass once."""
    shared = Axis.TP if spec.degree(Axis.TP) > 1 else None
    return Clock(pace, Network(spec), shared)


def seconds_of(
    spec: Spec, work: ModelWork, clock: Clock, moved: int, *, is_issued: bool
) -> Seconds:
    """Return the seconds by its clock for the work of a spec with axes within a block alone, of
    which a block moves so many bytes off the device; `is_issued`: those of its host, too."""
    middle = len(work.layers) // 2
    layer, kept = work.layers[middle], spec.activations.of(len(work.layers))[middle]
    out, back = (
        clock.pace.copy_seconds(copy, moved) if moved else 0.0
        for copy in COPIES[Tier.HOST if kept.tier is Tier.DEVICE else kept.tier]
    )
    forward, backward = _both(clock, layer, kept)
    if kept.tier is Tier.FILE:  # which is written and read by the one that computes
        forward, backward, out, back = forward + out, backward + back, 0.0, 0.0
    return Seconds(
        front=_both(clock, work.front, PLAIN),
        block=(forward, backward),
        behind=_both(clock, work.behind, PLAIN),
        weights=_seconds(clock, layer.weights, around(kept, Kind.WEIGHT)),
        moved=(out, back),
        issuing=issue_seconds(clock, work, kept) if is_issued else None,
    )


def _both(clock: Clock, work: LayerWork, kept: Kept) -> tuple[float, float]:
    return (
        _seconds(clock, work.forward, around(kept, Kind.FORWARD)),
        _seconds(clock, work.backward, around(kept, Kind.BACKWARD)),
    )


def _seconds(clock: Clock, work: PassWork, hook: Hook) -> float:
    """Operators one after the other, and what they await of the ranks that share them."""
    return clock.pass_seconds(work, hook).in_a_row(clock.pace)


def nodes_of(spec: Spec, ranks: int, stride: int = 1) -> int:
    """Return on how many nodes a group of so many ranks is, each `stride` behind the one before."""
    if (cluster := spec.cluster) is None:
        return 1
    on_node = max(1, cluster.devices_per_node // stride)
    return max(1, -(-ranks // on_node))


_COPIED = 2**24  # bytes by which the pace of copies between tiers is asked


class Links:
    """Seconds of what ranks send each other on a cluster and do with bytes, asked once each;
    `is_nominal`: they are none that anybody measured."""

    def __init__(self, base: Spec, pace: Pace, *, is_nominal: bool = False) -> None:
        self.base, self.pace, self.is_nominal = base, pace, is_nominal
        # hosts that run ahead of their devices are known to take any time
        self.is_issued = pace.overlaps and any(pace.hook_seconds(hook) for hook in Hook)
        self._collectives = cache(pace.collective_seconds)
        layout = base.precision.effective
        update = partial(pace.update_seconds, base.optimizer.name, layout)
        self._updates = cache(lambda number, tensors: update(elements=number, tensors=tensors))
        self._operators = cache(
            lambda kind, size: pace.operator_seconds(Operator(kind, layout.parameters, (size,)))
        )

    def seconds(self, collective: Collective, ranks: int, stride: int, payload: float) -> float:
        """Return the seconds of a collective over ranks that are `stride` apart."""
        if ranks == 1 or not payload:
            return 0.0
        nodes = nodes_of(self.base, ranks, stride)
        return self._collectives(collective, ranks=ranks, nodes=nodes, payload=int(payload))

    def operator(self, kind: OperatorKind, size: float) -> float:
        """Return the seconds of an operator on so many bytes of values as they are computed."""
        return self._operators(kind, int(size))

    def update(self, elements: int, tensors: int) -> float:
        """Return the seconds of an update of so many elements in so many tensors."""
        return self._updates(elements, tensors)

    def there_and_back(self, tier: Tier) -> float:
        """Return the seconds of a byte that leaves for a tier and comes back: endless where that is
        not known."""
        try:
            return sum(self.pace.copy_seconds(copy, _COPIED) for copy in COPIES[tier]) / _COPIED
        except UnknownRate:
            return float("inf")
