"""Bytes of a micro-batch's activations on one rank, layer by layer, as a search adds them up: read
off the committed tables of a whole model, and of the first, a middle and the last stage of one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property

from ptrain.derivation import activations
from ptrain.derivation.layers import passes_at
from ptrain.derivation.tables import Place, Setting, setting_of
from ptrain.derivation.tensor import cut_of, fullest_place
from ptrain.facts.model import ModelFacts
from ptrain.facts.passes import Items, Passes, net
from ptrain.plan.lower import lower
from ptrain.selection.arrays import Array, numpy
from ptrain.spec.activations import Kept, Scope
from ptrain.spec.model import ModelShape
from ptrain.spec.placement import Tier
from ptrain.spec.spec import Spec
from ptrain.timeline import Boundary, Item, Kind, Mark, Repeated, Run

_LAYERS = 3  # a first, a middle and a last one
# Of a model that is whole, and of stages: the order in which moments count chunks.
STAGE_PLACES = (Place.ALONE, Place.FIRST, Place.MIDDLE, Place.LAST)


@dataclass(frozen=True, slots=True, kw_only=True)
class EndsActivity:
    """What a chunk, a micro-batch on a stage, has beyond its blocks: `saved` from its forward to
    its backward pass, its input and output included, and `waiting` more than these between the
    halves of this one. By how much more there is than what is saved as the forward pass ends
    (`forward_rise`) and as the backward pass begins (`backward_rise`, or its half, `half_rise`),
    how much less once that has come to the blocks (`begun`, `half_begun`), and by how much more
    than with the blocks gone it ends (`end_rise`, of the embedding)."""

    saved: int
    waiting: int = 0
    forward_rise: int
    backward_rise: int
    begun: int
    end_rise: int
    half_rise: int = 0
    half_begun: int = 0


@dataclass(frozen=True, kw_only=True)
class Activity:
    """Bytes of a micro-batch. Of a `block`: what its forward pass leaves, and the rises of this and
    of its backward pass above what there was before, gradients of parameters not counted; what the
    half of the inputs leaves beside all that (`half`), and the rise above (`half_rise`); what goes
    off the device (`moved`). `hidden` goes from layer to layer. `ends`: what stages at each place
    have beyond their blocks; `least`: what some rank has at least, whatever else it has."""

    block: int
    forward_rise: int
    backward_rise: int
    half: int
    half_rise: int
    moved: int
    hidden: int
    least: int
    ends: Mapping[Place, EndsActivity]

    @cached_property
    def by_place(self) -> dict[str, Array]:
        """Return each field of `EndsActivity` by place, in the order of `STAGE_PLACES`."""
        ends = [self.ends[place] for place in STAGE_PLACES]
        names = [of.name for of in fields(EndsActivity)]
        table = [[getattr(of_place, name) for of_place in ends] for name in names]
        return dict(zip(names, numpy().array(table, dtype=numpy().float32), strict=True))

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
    timeline = activations.timeline(setting, None, ways)
    front, forward, behind = _parted(timeline.forward, Kind.FORWARD)
    _, backward, _ = _parted(timeline.backward, Kind.BACKWARD)
    part, of_block = setting, forward.net
    if spec.is_for_cuda and setting.shape.drops:
        # no table holds what dropout keeps there of a part of the layers
        part = replace(setting, shape=setting.shape.without_dropout())
        of_block = _parted(activations.timeline(part, None, ways).forward, Kind.FORWARD)[1].net
    stages = {
        place: passes_at(part, place, ways) for place in (Place.FIRST, Place.MIDDLE, Place.LAST)
    }
    half = _parted(stages[Place.MIDDLE].items.get(Kind.INPUT, ()), Kind.INPUT)[1]
    whole = Passes(
        items={Kind.FORWARD: timeline.forward, Kind.BACKWARD: timeline.backward},
        output=0,
        hidden=0,
    )
    return Activity(
        block=forward.net,
        forward_rise=forward.rise,
        backward_rise=backward.rise,
        half=half.net,
        half_rise=half.rise - half.net,
        moved=sum(size for _, size in timeline.moved) // _LAYERS,
        hidden=_hidden(setting),
        least=max(behind.rise, front.rise, backward.rise),
        ends={
            place: _ends(place, passes, of_block, half.net)
            for place, passes in ((Place.ALONE, whole), *stages.items())
        },
    )


def _hidden(setting: Setting) -> int:
    values = setting.values
    return values["batch"] * values["sequence"] * setting.shape.hidden * setting.compute.itemsize


def _ends(place: Place, passes: Passes, block: int, half: int) -> EndsActivity:
    """What stages at a place have; their input came before the forward pass, and the gradient of
    their output, which the half of the weights needs too, before the backward pass."""
    forward = passes.items[Kind.FORWARD]
    _, _, behind = _parted(forward, Kind.FORWARD)
    head, _, end = _parted(passes.items[Kind.BACKWARD], Kind.BACKWARD)
    ends = EndsActivity(
        saved=sum(map(net, forward)) - _LAYERS * block + passes.hidden,
        forward_rise=behind.rise - behind.net,
        backward_rise=head.rise,
        begun=head.net,
        end_rise=end.rise,
    )
    inputs = passes.items.get(Kind.INPUT)
    if not inputs:
        return ends
    begun, _, _ = _parted(inputs, Kind.INPUT)
    given = -passes.output if place is Place.LAST else passes.output
    return replace(
        ends,
        waiting=sum(map(net, inputs)) - _LAYERS * half + given,
        half_rise=begun.rise,
        half_begun=begun.net,
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
