"""What the choices of the data axes say, and what they do with the units of a model: the seconds of
one unit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

from ptrain.axes.candidates import AxisChoice, chosen
from ptrain.axes.data.form import (
    form_of,
    has,
    joins_units,
    reduces_in_backward,
    tier_of,
    when_gathered,
)
from ptrain.cost import Collective, State
from ptrain.selection.profile import Links, Sizes
from ptrain.spec.dials import GatherAfterUpdate, GradientSync, UnitKind, UnitSize
from ptrain.spec.placement import CUT, Distribution, Tier
from ptrain.spec.rates import Hook, OperatorKind
from ptrain.spec.spec import Spec
from ptrain.steps.wraps import BY_TENSOR, REPLICAS, Form
from ptrain.units import grouped

_THETA, _OMEGA, _GRADS = State.PARAMETERS, State.OPTIMIZER, State.GRADIENTS
_BUCKET = 25 * 2**20  # bytes that DistributedDataParallel reduces at once
_BESIDE = ("unit", "overlap", "prefetch")
_HALF = 0.5  # of a layer, a sub-block
_ISSUED_PARTS = 1.5  # for each sub-block: the third unit of a block is its norms


@dataclass(frozen=True, kw_only=True)
class DataWay:
    """What one choice of the data axes says, whatever its degrees are: `cut` by state which of its
    axes cut it, `near` which states are on the device."""

    choice: AxisChoice
    form: Form
    cut: dict[State, tuple[bool, ...]]
    near: dict[State, bool]
    is_on_file: bool  # Omega
    is_made: bool
    is_brought: bool
    is_late: bool
    unit: UnitSize | None  # None: as many neighbours as fill a bucket
    said_unit: UnitSize | None
    keeps_forward: bool
    keeps_backward: bool
    overlaps: bool
    gathers_beside: bool  # the update of other units
    ahead: int
    is_copied_back: bool

    @cached_property
    def kind(self) -> tuple[object, ...]:
        """Return what it says but for its unit and what moves beside computation."""
        choice = self.choice
        changes = tuple((name, str(value)) for name, value in choice.changes if name not in _BESIDE)
        return tuple(factor.placement for factor in choice.factors), changes

    @cached_property
    def moved(self) -> tuple[object, ...]:
        """Return what decides what is done with a unit, whenever it is done."""
        return (*self.cut.values(), self.form, self.is_made, self.is_brought, self.unit)

    def parts(self, state: State, degrees: Sequence[int]) -> int:
        """Return into how many slices a state is cut."""
        return prod(d for d, is_in in zip(degrees, self.cut[state], strict=True) if is_in)

    def row_shards(self, degrees: Sequence[int]) -> int:
        """Return over how many ranks rows of tensors are cut; 1 where not tensor by tensor."""
        if self.form not in BY_TENSOR:
            return 1
        masters = degrees[-1] if self.is_made and degrees else 1
        return max(self.parts(_THETA, degrees), masters)

    def sized(self, degrees: Sequence[int]) -> AxisChoice:
        """Return the choice with its degrees."""
        factors = zip(self.choice.factors, degrees, strict=True)
        own = tuple(f._replace(degree=d) for f, d in factors)
        return AxisChoice(factors=own, changes=self.choice.changes, follows=self.choice.follows)


def ways_of(
    base: Spec, choices: Iterable[AxisChoice], beside: Sequence[AxisChoice]
) -> Iterator[DataWay]:
    """Yield what choices say beside others, which decide by which form they are executed."""
    for choice in choices:
        spec, factors = chosen(base, (choice, *beside)), choice.factors
        form, sync = form_of(spec), spec.sync
        cut = {
            state: tuple(f.placement[state].distribution in CUT for f in factors)
            for state in (_THETA, _OMEGA, _GRADS)
        }
        is_made = has(factors, _THETA, Distribution.MATERIALIZED)
        near = {state: tier_of(factors, state) is Tier.DEVICE for state in cut}
        is_brought = is_made or any(cut[_THETA]) or not near[_THETA]
        unit = None if joins_units(spec, form) else spec.unit_size
        ahead = (spec.prefetch or 0) if form is Form.FLAT else int(is_brought)
        gathered = when_gathered(spec) if form is Form.FLAT else None
        yield DataWay(
            choice=choice,
            form=form,
            cut=cut,
            near=near,
            is_on_file=tier_of(factors, _OMEGA) is Tier.FILE,
            is_made=is_made,
            is_brought=is_brought,
            is_late=sync.gradients is GradientSync.LAST,
            unit=unit,
            said_unit=spec.unit,
            keeps_forward=is_brought and not sync.reshard_after_forward,
            keeps_backward=is_brought and not sync.reshard_after_backward,
            overlaps=reduces_in_backward(spec, form, keeps_parts=any(cut[_GRADS])),
            gathers_beside=gathered is GatherAfterUpdate.DURING_UPDATE,
            ahead=0 if unit and unit.kind is UnitKind.MODEL else ahead,
            is_copied_back=spec.offload.update is Tier.DEVICE,
        )


def representatives(ways: Iterable[DataWay]) -> list[DataWay]:
    """Return of ways that differ in their unit and in what moves beside computation alone the first
    of those that move most: a descent tries the others."""
    alike = grouped((way.kind, way) for way in ways)
    return [max(some, key=lambda way: (way.overlaps, way.ahead)) for some in alike.values()]


# -- what ways do with units


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitSeconds:
    """Of one unit of `moved` parameters, of which a layer has `per_layer`: to gather and to reduce
    it, to copy it out of the one and into the other, to add its gradients to those before and to
    fill these with zeros, to reduce it before it is updated (`finish`) and to gather it then
    (`spread`). `largest`: parameters of the largest one. `issue_…`: seconds of the host."""

    moved: float
    largest: float
    per_layer: float
    gather: float
    reduce: float
    unpack: float
    pack: float
    add: float
    fill: float
    finish: float
    spread: float
    issue_gather: float = 0.0
    issue_reduce: float = 0.0
    issue_settled: float = 0.0


class _Moves:
    """Seconds in which bytes are moved over the data axes: innermost the shards, which are `within`
    ranks apart, around them the copies."""

    def __init__(self, links: Links, way: DataWay, degrees: Sequence[int], within: int) -> None:
        self.links, self.way, self.degrees = links, way, degrees
        self.strides = [within * prod(degrees[at + 1 :]) for at in range(len(degrees))]
        self.number = range(len(degrees))
        # a host that computes by itself issues what it sends between its operators
        self.is_apart = links.pace.overlaps or not degrees

    def over(self, collective: Collective, mask: Sequence[bool], size: float) -> float:
        """Return the seconds of one call over some of the axes: its group has all their ranks."""
        at = [place for place in self.number if mask[place]]
        if not at:
            return 0.0
        ranks = prod(self.degrees[place] for place in at)
        return self.links.seconds(collective, ranks, self.strides[at[-1]], size)

    def hook(self, flat: Hook, other: Hook) -> float:
        """Return the seconds of the host's for a call."""
        return self.links.pace.hook_seconds(flat if self.way.form is Form.FLAT else other)

    def gather(self, size: float) -> float:
        """Of Theta, over all the axes that cut it, or the master copy that it is made of."""
        way = self.way
        if not way.is_brought:
            return 0.0
        hook = 0.0 if self.is_apart else self.hook(Hook.FLAT_GATHER, Hook.FSDP2_GATHER)
        return hook + self.over(
            Collective.ALL_GATHER, way.cut[_OMEGA if way.is_made else _THETA], size
        )

    def reduce(self, size: float) -> float:
        """Shards first: what copies sum then is a shard. DDP reduces by bucket, and a flat unit is
        reduced over all the axes that cut gradients at once."""
        way = self.way
        if not self.degrees or way.form is Form.LOCAL:
            return 0.0
        if way.form in REPLICAS:
            hook = 0.0 if self.is_apart else self.links.pace.hook_seconds(Hook.DDP_BUCKET)
            pieces, first = max(1.0, size / _BUCKET), [at == 0 for at in self.number]
            return pieces * (hook + self.over(Collective.ALL_REDUCE, first, size / pieces))
        total = 0.0 if self.is_apart else self.hook(Hook.FLAT_REDUCE, Hook.FSDP2_REDUCE)
        if way.form is Form.FLAT:
            return total + self.over(Collective.REDUCE_SCATTER, way.cut[_GRADS], size)
        for at in reversed(self.number):
            is_cut = way.cut[_GRADS][at] or way.cut[_OMEGA][at]
            collective = Collective.REDUCE_SCATTER if is_cut else Collective.ALL_REDUCE
            total += self.over(collective, [other == at for other in self.number], size)
            size /= self.degrees[at] if is_cut else 1
        return total

    def settle(self, size: float) -> float:
        """What of a flat unit is reduced for its update: first into the slices of Omega, then a sum
        over the other axes."""
        way = self.way
        if way.form is not Form.FLAT or not self.degrees:
            return 0.0
        both = list(zip(way.cut[_OMEGA], way.cut[_GRADS], strict=True))
        size /= way.parts(_GRADS, self.degrees)
        narrower = [omega and not grads for omega, grads in both]
        slices = prod(self.degrees[at] for at in self.number if narrower[at])
        reduced = self.over(Collective.REDUCE_SCATTER, narrower, size)
        whole = [not (omega or grads) for omega, grads in both]
        return reduced + self.over(Collective.ALL_REDUCE, whole, size / slices)

    def spread(self, size: float) -> float:
        """What is gathered after the update: Theta that is whole where Omega is a slice."""
        way = self.way
        if way.is_made:
            return 0.0
        both = zip(way.cut[_OMEGA], way.cut[_THETA], strict=True)
        mask = [omega and not theta for omega, theta in both]
        return self.over(Collective.ALL_GATHER, mask, size / way.parts(_THETA, self.degrees))

    def issuing(self, size: float) -> tuple[float, float, float]:
        """Return the seconds in which a host that runs ahead issues what is sent of a unit: its
        gather, its reduction and what is settled with the update. Of buckets it is a share."""
        way, hook = self.way, self.links.pace.hook_seconds
        gather = self.hook(Hook.FLAT_GATHER, Hook.FSDP2_GATHER) * way.is_brought
        if way.form is Form.LOCAL:
            return gather, 0.0, 0.0
        if way.form in REPLICAS:
            return gather, size / _BUCKET * hook(Hook.DDP_BUCKET), 0.0
        if way.form is not Form.FLAT:
            return gather, hook(Hook.FSDP2_REDUCE), 0.0
        pairs = list(zip(way.cut[_THETA], way.cut[_OMEGA], way.cut[_GRADS], strict=True))
        calls = any(o and not g for _, o, g in pairs) + any(not (o or g) for _, o, g in pairs)
        settled = calls * hook(Hook.FLAT_REDUCE)
        if not way.is_made and any(o and not t for t, o, _ in pairs):
            settled += hook(Hook.FLAT_GATHER)
        return gather, hook(Hook.FLAT_REDUCE) * any(way.cut[_GRADS]), settled


def unit_seconds(
    links: Links, way: DataWay, degrees: tuple[int, ...], sizes: Sizes, within: int
) -> UnitSeconds:
    """Return what is done with a unit. Experts that ranks have of their own are cut over the others
    alone: of these the innermost axis has the fewer."""
    layout = links.base.precision.effective
    held, reduced = layout.parameters.itemsize, layout.reduced.itemsize
    layers = _layers_of(links.base, way.unit, sizes)
    moved = sizes.block * layers
    share = sizes.own_experts / sizes.block
    both = [(_Moves(links, way, degrees, within), 1 - share)]
    if share:
        inner = within * sizes.shared_by
        both.append((_Moves(links, way, inside(degrees, sizes.shared_by), inner), share))
    gather, reduce, settled, spread = (
        sum(getattr(moves, name)(part * size) for moves, part in both)
        for name, size in (
            ("gather", moved * held),
            ("reduce", moved * reduced),
            ("settle", moved * reduced),
            ("spread", moved * held),
        )
    )
    is_cut, is_flat = any(way.cut[_GRADS]), way.form is Form.FLAT
    times = _ISSUED_PARTS if layers == _HALF else 1.0
    issue = both[0][0].issuing(moved * reduced) if links.is_issued else (0.0, 0.0, 0.0)
    issue_gather, issue_reduce, issue_settled = (times * len(both) * one for one in issue)
    tensors = [3 * held * size for size in sizes.tensors]
    add = layers * sum(links.operator(OperatorKind.POINTWISE, size) for size in tensors)
    if way.form in BY_TENSOR and not way.is_late:
        add = 0.0
    return UnitSeconds(
        moved=moved,
        largest=sizes.largest_part if layers == _HALF else moved,
        per_layer=1 / layers,
        gather=gather,
        reduce=settled if is_flat and not is_cut else reduce,
        unpack=_unpacked(links, way, degrees, moved),
        pack=_packed(links, way, degrees, moved * reduced),
        add=add,
        fill=links.operator(OperatorKind.POINTWISE, moved * reduced) if is_flat else 0.0,
        finish=settled if is_cut else 0.0,
        spread=spread,
        issue_gather=issue_gather,
        issue_reduce=issue_reduce,
        issue_settled=issue_settled,
    )


def inside(degrees: Sequence[int], ranks: int) -> tuple[int, ...]:
    """Return the degrees of the axes where the innermost is without so many ranks."""
    *outer, last = degrees or (1,)
    return (*outer, last // ranks) if degrees else ()


def blocks_of_bucket(base: Spec, sizes: Sizes) -> int:
    """Return how many blocks are one where they join as long as a bucket has room."""
    block = sizes.block * base.precision.effective.reduced.itemsize
    return max(1, base.bucket_bytes // block)


def _layers_of(base: Spec, unit: UnitSize | None, sizes: Sizes) -> float:
    """Return the layers of a unit."""
    if unit is None:
        return min(blocks_of_bucket(base, sizes), sizes.layers)
    match unit.kind:
        case UnitKind.MODEL:
            return sizes.layers
        case UnitKind.SUB_BLOCK:
            return _HALF
        case UnitKind.BLOCKS:
            return unit.count or 1
        case _:
            return 1


def _unpacked(links: Links, way: DataWay, degrees: Sequence[int], moved: float) -> float:
    """Seconds of a unit that has been gathered: tensor by tensor it is copied apart. A flat one is
    made of a master copy's shard, and is put in order where it came over several axes."""
    if not way.is_brought:
        return 0.0
    layout = links.base.precision.effective
    held, master = layout.parameters.itemsize, (layout.master or layout.parameters).itemsize
    whole = links.operator(OperatorKind.COPY, 2 * moved * held)
    if way.form in BY_TENSOR:
        return whole
    shard = moved / way.parts(_OMEGA, degrees) * (master + held)
    cast = links.operator(OperatorKind.COPY, shard) if way.is_made else 0.0
    over = way.cut[_OMEGA if way.is_made else _THETA]
    return cast + (whole if sum(over) > 1 else 0.0)


def _packed(links: Links, way: DataWay, degrees: Sequence[int], size: float) -> float:
    """Seconds of a unit's gradients that are reduced: tensor by tensor they are copied together
    before. Behind, the shard of a flat unit is added to what is kept."""
    if way.form in BY_TENSOR:
        return links.operator(OperatorKind.COPY, 2 * size)
    if way.form is Form.FLAT and any(way.cut[_GRADS]):
        parts = way.parts(_GRADS, degrees)
        return links.operator(OperatorKind.POINTWISE, 3 * size / parts)
    return 0.0
