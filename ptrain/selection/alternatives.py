"""Changes of a spec that may need less memory, as overrides to add to what the user typed. Whether
they are legal, and what they cost, is known once the changed spec is loaded and derived."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from enum import IntEnum
from functools import cache
from math import prod

from ptrain.axes.data.form import form_of, units_ahead
from ptrain.axes.data.rules import DATA
from ptrain.cost import PLACED, Spent, StepTime
from ptrain.errors import Fault
from ptrain.spec.activations import ATTENTION_ONLY, FULL, NAMED_POLICIES, Policy
from ptrain.spec.dials import GradientSync
from ptrain.spec.keys import dials
from ptrain.spec.model import Attention, ModelShape
from ptrain.spec.names import listing, strategy
from ptrain.spec.placement import CUT, DATA_AXES, S_STAR, Axis, Mode, Placement, R, S
from ptrain.spec.precision import LAYOUTS
from ptrain.spec.shorthand import POLICIES, modes_of
from ptrain.spec.spec import Spec

Overrides = tuple[str, ...]


class ChangeKind(IntEnum):
    """A kind of change, in the order of its cost in time where no step time is predicted."""

    RECOMPUTE = 0
    LOSS = 1
    LAYOUT = 2
    MICRO = 3
    SLICES = 4
    SHARDING = 5
    RANKS = 6
    OFFLOAD = 7


_MOST_RANKS = 1024  # along one axis
_MOST_MICROS = 12  # sizes of a micro-batch that are tried: the largest, and 1
# Parameters, optimizer state and gradients on the data axis; those with most on the host come last.
_SHARDED = ("R,S,R", "R,S,S", "S*,S,S")
_HOSTED = ("R,O,S", "R,O,O", "S*,O,S", "S*,O,O", "S*@host,O,S", "S*@host,O,O")


def recompute_policies(spec: Spec) -> Iterator[tuple[str, Policy]]:
    """Yield the policies with which blocks can be recomputed, the one that repeats least first."""
    is_eager = isinstance(spec.model, ModelShape) and spec.model.attention is Attention.EAGER
    yield from (
        (name, policy)
        for name, policy in NAMED_POLICIES.items()
        if is_eager or policy != ATTENTION_ONLY
    )


def recompute_overrides(spec: Spec) -> Iterator[Overrides]:
    """Yield the policies with which all blocks are recomputed, the one that repeats least first."""
    modes = [f"{place}=M" for place in _activation_places(spec)]
    for name, policy in recompute_policies(spec):
        is_default = policy == FULL and "recompute" not in spec.resolved
        yield (*modes, *([] if is_default else [f"recompute={name}"]))


def _activation_places(spec: Spec) -> list[str]:
    """Return the keys that give the mode of activations."""
    own = [factor.axis for factor in spec.factors if _says_activations(spec, factor.axis)]
    return [f"placement.{axis}.activations" for axis in own] or ["activations"]


def faster_overrides(spec: Spec, step: StepTime, part: float) -> Iterator[Overrides]:
    """Yield single dials that may save more than a part of a step: less recomputation, and more
    overlap or fewer collectives where the time that these could save is as long."""
    written = [*(["recompute=none"] if "recompute" in spec.resolved else [])]
    if any(kept.policy is not None for kept in spec.activations.modes):
        selective = next(recompute_overrides(spec))
        yield from ((selective,) if spec.activations.default.policy == FULL else ())
        yield (*(f"{place}=R" for place in _activation_places(spec)), *written)
    spent = (Spent.COLLECTIVES, Spent.WRAPPERS, Spent.LAUNCHES)
    if sum(map(step.spent, spent)) > part * step.seconds:
        yield ("overlap=backward", "prefetch=1")
        yield ("sync.reshard_after_forward=false",)
        if spec.batch.accumulate > 1:
            yield ("sync.gradients=last",)
        if spec.batch.accumulate % 2 == 0:
            micro, number = 2 * spec.batch.micro, spec.batch.accumulate // 2
            yield (f"batch.micro={micro}", f"batch.accumulate={number}")
    if step.spent(Spent.BUBBLE) > part * step.seconds:
        yield ("pipeline.schedule=zero-bubble",)


def loss_overrides(spec: Spec) -> Iterator[Overrides]:
    """Yield losses that never have all logits at once, unless the loss is the user's function."""
    if spec.loss.user_function is None:
        yield from (("loss=chunked",), ("loss=fused",), ("loss=vocab-parallel",))


def layout_overrides(spec: Spec) -> Iterator[Overrides]:
    """Yield smaller precision layouts in which the optimizer updates and keeps the same dtypes: a
    layout without fp32 master copies would train something else."""
    own = spec.precision.layout
    for layout in LAYOUTS.values():
        is_as_exact = (layout.updated, layout.moments) == (own.updated, own.moments)
        is_smaller = (
            layout.parameters.itemsize < own.parameters.itemsize
            or layout.gradients.itemsize < own.gradients.itemsize
        )
        if is_as_exact and is_smaller and layout.scales_loss is own.scales_loss:
            yield (f"precision.layout={layout.name}",)


def micro_overrides(spec: Spec) -> Iterator[Overrides]:
    """Yield smaller micro-batches of the same global batch, the largest first."""
    samples = spec.batch.micro * spec.batch.accumulate
    smaller = [micro for micro in range(1, spec.batch.micro) if samples % micro == 0]
    for micro in dict.fromkeys((*smaller[:-_MOST_MICROS:-1], *smaller[:1])):
        yield (f"batch.micro={micro}", f"batch.accumulate={samples // micro}")


def slices_overrides(spec: Spec) -> Iterator[Overrides]:
    """Yield tuples of tp with which its ranks keep slices of the tokens."""
    if spec.degree(Axis.TP) > 1:
        yield from ((f"placement.tp.activations={mode}",) for mode in (S, S_STAR))


def sharding_overrides(spec: Spec) -> Iterator[Overrides]:
    """Yield dials that keep nothing, and tuples that shard more, over the ranks of `dp_shard`, of a
    node and of all data axes."""
    if units_ahead(spec, form_of(spec)):
        yield ("prefetch=0",)
    if spec.sync.reshard_after_forward is not True:
        yield ("sync.reshard_after_forward=true",)
    is_cut = any(Axis.DP_SHARD in spec.axes_where(state, *CUT) for state in PLACED)
    if spec.sync.gradients is GradientSync.LAST and is_cut:
        yield ("sync.gradients=every",)
    node = spec.cluster.devices_per_node if spec.cluster else 1
    ranks, shards = _data_ranks(spec), spec.degree(Axis.DP_SHARD)
    for degree in dict.fromkeys((shards, node, ranks)):
        if degree > 1 and degree >= shards and ranks % degree == 0:
            yield from _placed(spec, _SHARDED, degree)


ON_DEVICE: Mapping[ChangeKind, Callable[[Spec], Iterator[Overrides]]] = {
    ChangeKind.RECOMPUTE: recompute_overrides,
    ChangeKind.LOSS: loss_overrides,
    ChangeKind.LAYOUT: layout_overrides,
    ChangeKind.MICRO: micro_overrides,
    ChangeKind.SLICES: slices_overrides,
    ChangeKind.SHARDING: sharding_overrides,
}


def host_overrides(spec: Spec) -> Iterator[Overrides]:
    """Yield tuples that keep states on the host, all data ranks on the one axis that shards."""
    if _data_ranks(spec) > 1:
        yield from _placed(spec, _HOSTED, _data_ranks(spec))


def ranks_overrides(spec: Spec, axis: Axis) -> Iterator[Overrides]:
    """Yield more ranks along an axis that cuts states, powers of two. The global batch stays where
    whole micro-batches make it up, else it grows until they do."""
    if not any(axis in spec.axes_where(state, *CUT) for state in PLACED):
        return
    own, devices = spec.degree(axis), spec.cluster.devices if spec.cluster else _MOST_RANKS**2
    for power in range(own.bit_length(), _MOST_RANKS.bit_length()):
        world = spec.world_size // own << power
        samples = spec.batch.micro * (spec.data_degree // own << power)
        accumulate = -(-spec.batch.global_samples // samples)
        yield (
            f"mesh.{axis}={2**power}",
            f"batch.global={accumulate * samples}",
            f"batch.accumulate={accumulate}",
            *([f"cluster.devices={world}"] if world > devices else []),
        )


def reset_overrides(faults: Iterable[Fault]) -> Overrides:
    """Return the overrides that set back what refuses another placement: dials, and tiers."""
    places = [f"{fault.place}." for fault in faults]
    resets = [dial.override for dial in dials() if f"{dial.place}." in places]
    is_tier = any(place.startswith("offload.") for place in places)
    return (*resets, *(["offload={}"] if is_tier else []))


def merged(*lists: Overrides) -> Overrides:
    """Return the overrides of all lists, of each key the last one."""
    by_key = {override.partition("=")[0]: override for some in lists for override in some}
    return tuple(by_key.values())


def with_micro(spec: Spec, micro: int) -> Spec:
    """The same global batch in micro-batches of `micro` samples."""
    accumulate = spec.batch.global_samples // (micro * spec.data_degree)
    return replace(spec, batch=replace(spec.batch, micro=micro, accumulate=accumulate))


def _placed(spec: Spec, tuples: Iterable[str], degree: int) -> Iterator[Overrides]:
    """Yield the nearest tuples that the optimizer takes, on a `dp_shard` of this degree, with the
    activations of the spec's own tuples: M and O there are the rank's."""
    axis, replicas = Axis.DP_SHARD, _data_ranks(spec) // degree
    mesh = (f"mesh.{Axis.DP_REPLICATE}={replicas}", f"mesh.{axis}={degree}")
    kept = [f.placement.activations for f in spec.factors if _says_activations(spec, f.axis)]
    texts: dict[str, None] = {}
    for text in tuples:
        modes = (*map(Mode.parse, text.split(",")), *(kept[:1] or [R]))
        own = {state.value: mode for state, mode in zip(PLACED, modes, strict=True)}
        texts[str(DATA.nearest(Placement(**own), spec.optimizer))] = None
    moved = mesh if degree != spec.degree(axis) else ()
    own_text = next((str(f.placement) for f in spec.factors if f.axis is axis), "")
    if not moved:
        texts.pop(own_text, None)
    yield from ((*moved, f"placement.{axis}={_names(axis).get(text, text)}") for text in texts)


@cache
def _names(axis: str) -> dict[str, str]:
    """Return by tuple the strategies that are one tuple of this axis and nothing more."""
    names: dict[str, str] = {}
    # a line of a strategy with other axes or sections, whose file need not be parsed
    others = (*(f"\n{key}:" for key in POLICIES), *(f"\n  {a}: {{" for a in Axis if a != axis))
    for name, path in listing("strategies").items():
        is_named = f"{axis}:" in (text := path.read_text(encoding="utf-8"))
        named = strategy(name) if is_named and not any(o in text for o in others) else None
        if named and not {*POLICIES} & {*named}:
            own = named["placement"]
            if own.keys() == {axis}:
                names.setdefault(",".join(modes_of(own[axis])), name)
    return names


def _data_ranks(spec: Spec) -> int:
    return prod(spec.degree(axis) for axis in DATA_AXES)


def _says_activations(spec: Spec, axis: Axis) -> bool:
    """Return whether the tuple of a data axis says how the rank keeps activations."""
    own = (factor.placement.activations for factor in spec.factors if factor.axis is axis)
    return axis in DATA_AXES and any(mode != R for mode in own)
