"""What a micro-batch takes of one rank, layer by layer, as a search adds it up: bytes, read off the
committed tables, and seconds, by the rates of a machine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace

from ptrain.axes.pipeline.stage_facts import chain_of
from ptrain.derivation import activations
from ptrain.derivation.tables import setting_of
from ptrain.derivation.tensor import cut_of, local_units
from ptrain.facts.model import ModelFacts, UnitFacts
from ptrain.facts.operators import InnerCollective, LayerWork, ModelWork, PassWork
from ptrain.facts.stages import FRONT, is_within
from ptrain.plan.lower import lower
from ptrain.rates.pace import Pace, operators_seconds
from ptrain.spec.activations import Kept
from ptrain.spec.axis import DATA_AXES, Axis
from ptrain.spec.model import ModelShape
from ptrain.spec.rates import Hook
from ptrain.spec.spec import Spec
from ptrain.timeline import Boundary, Complete, Item, Mark, Repeated, Run

_LAYERS = 3  # a first, a middle and a last one


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Parameters of one rank's part of the model: of a block, by tensor in the order of its units,
    in front of the blocks and behind them; `copied` those in front that a last stage has too."""

    block: int
    largest_part: int  # of a block's sub-blocks
    front: int
    behind: int
    copied: int
    tensors: int  # of a block


def sizes_of(spec: Spec, facts: ModelFacts) -> Sizes:
    """Return the sizes of the largest part that a rank of the axes within a block has. `facts` are
    of units of one block."""
    plan = lower(spec, facts.unit_modules, facts.roles, (), facts.blocks, facts.fusions)
    units: Sequence[UnitFacts] = facts.units
    if plan.tensor is not None:
        units = local_units(facts, plan.tensor, spec.degree(plan.tensor.axis))[0][0]
    *blocks, root = units
    block = max(blocks, key=lambda unit: unit.numel)
    front = sum(t.numel for t in root.tensors if is_within(t.name, FRONT))
    tied = dict(chain_of(spec, facts).tied)
    parts: dict[str, int] = {}
    for tensor in block.tensors:
        part = ".".join(tensor.name.split(".")[:3])
        parts[part] = parts.get(part, 0) + tensor.numel
    return Sizes(
        block=block.numel,
        largest_part=max(parts.values()),
        front=front,
        behind=root.numel - front,
        copied=sum(t.numel for t in root.tensors if t.name in tied),
        tensors=len(block.tensors),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Activity:
    """Bytes that a micro-batch's forward pass leaves in front of the blocks, of each block and
    behind them, and by how much more than before these passes rise in between. Of a backward pass
    the rise is above what there was before it, the gradients of parameters not counted; `hidden` is
    what goes from layer to layer, `logits` what a stage with the head hands on."""

    front: int
    block: int
    behind: int
    front_rise: int
    forward_rise: int
    behind_rise: int
    head_rise: int
    backward_rise: int
    hidden: int
    logits: int

    @property
    def least(self) -> int:
        """Return what some rank has of a micro-batch at least, whatever else it has."""
        return max(self.behind_rise, self.front_rise, self.backward_rise)

    def of_samples(self, samples: int, known: int) -> Activity:
        """Return the bytes of so many samples, where these are those of the known number."""
        if samples == known:
            return self
        sizes = {spot.name: getattr(self, spot.name) for spot in fields(self)}
        return Activity(**{name: samples * size // known for name, size in sizes.items()})


def activity_of(spec: Spec, kept: Kept) -> Activity:
    """Return the bytes of a spec whose tables are known; `spec` has axes within a block alone."""
    shape = spec.model
    assert isinstance(shape, ModelShape), "a built-in model"
    facts_plan = lower(spec, (*((f"blocks.{i}",) for i in range(_LAYERS)), ("",)))
    setting = setting_of(spec, cut_of(spec, facts_plan, 0))
    setting = replace(setting, shape=replace(shape, layers=_LAYERS))
    timeline = activations.timeline(setting, None, (kept,) * _LAYERS)
    before, forward, behind = _parted(timeline.forward, Mark.ENTER, Mark.LEAVE, first=0)
    head, backward, _ = _parted(
        timeline.backward, Mark.PRE_BACKWARD, Mark.POST_BACKWARD, first=_LAYERS - 1
    )
    values, itemsize = setting.values, setting.compute.itemsize
    return Activity(
        front=before.net,
        block=forward.net,
        behind=behind.net,
        front_rise=before.rise,
        forward_rise=forward.rise,
        behind_rise=behind.rise,
        head_rise=head.rise,
        backward_rise=backward.rise,
        hidden=values["batch"] * values["sequence"] * shape.hidden * itemsize,
        logits=values["batch"] * spec.batch.sequence * values["vocab"] * itemsize,
    )


def _parted(items: Iterable[Item], enter: Mark, leave: Mark, *, first: int) -> tuple[Run, Run, Run]:
    """What is before the blocks, in the middle one, and behind them; `first` is the block that the
    pass begins with."""
    parts = {"before": Run(0, 0), "middle": Run(0, 0), "behind": Run(0, 0)}
    place, last = "before", _LAYERS - 1 - first
    for item in _flat(items):
        if isinstance(item, Run):
            if place in parts:
                parts[place] = parts[place].then(item)
        elif isinstance(item, Boundary) and item.unit < _LAYERS:
            if item.mark is enter:
                place = "middle" if item.unit == 1 else "outer"
            elif item.mark is leave and item.unit == last:
                place = "behind"
    return parts["before"], parts["middle"], parts["behind"]


def _flat(items: Iterable[Item]) -> Iterable[Item]:
    for item in items:
        if isinstance(item, Repeated):
            for _ in range(item.times):
                yield from _flat(item.items)
        elif not isinstance(item, Complete):
            yield item


@dataclass(frozen=True, slots=True, kw_only=True)
class Seconds:
    """Of a micro-batch on one rank, forward and backward: in front of the blocks, of a block, and
    behind them; what the axes within a block send is in them. `weights`: of a block's backward, the
    part that is of weights alone."""

    front: tuple[float, float]
    block: tuple[float, float]
    behind: tuple[float, float]
    weights: float


def seconds_of(spec: Spec, work: ModelWork, pace: Pace) -> Seconds:
    """Return a machine's seconds for the work of a spec with axes within a block alone."""
    layer = work.layers[len(work.layers) // 2]
    return Seconds(
        front=_both(spec, work.front, pace),
        block=_both(spec, layer, pace),
        behind=_both(spec, work.behind, pace),
        weights=_seconds(spec, layer.weights, pace, Hook.HALVES_OPERATOR),
    )


def _both(spec: Spec, work: LayerWork, pace: Pace) -> tuple[float, float]:
    return (
        _seconds(spec, work.forward, pace, Hook.FORWARD_OPERATOR),
        _seconds(spec, work.backward, pace, Hook.BACKWARD_OPERATOR),
    )


def _seconds(spec: Spec, work: PassWork, pace: Pace, around: Hook) -> float:
    """Operators one after the other, and what they await of the ranks that share them."""
    ranks = 1
    for factor in spec.factors:
        if factor.axis not in (*DATA_AXES, Axis.PP):
            ranks *= factor.degree
    nodes = nodes_of(spec, ranks)
    total = operators_seconds(pace, work, around)
    for item in work:
        if isinstance(item, InnerCollective):
            # where the device computes by itself, the host runs ahead
            hook = 0.0 if pace.overlaps else pace.hook_seconds(Hook.TENSOR_SUM)
            alone = pace.collective_seconds(
                item.collective, ranks=ranks, nodes=nodes, payload=item.payload
            )
            total += item.times * (alone + hook)
    return total


def nodes_of(spec: Spec, ranks: int, stride: int = 1) -> int:
    """Return on how many nodes a group of so many ranks is, each `stride` behind the one before."""
    cluster = spec.cluster
    if cluster is None:
        return 1
    on_node = max(1, cluster.devices_per_node // stride)
    return max(1, -(-ranks // on_node))
