"""Before anything starts: does the prediction fit the device, and if not, which legal specs of the
same job need less."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from math import prod
from typing import Any

from ptrain.algebra.legality import check, executed
from ptrain.axes.data.costs import STOCK_BUCKET_BYTES
from ptrain.axes.data.form import tier_of
from ptrain.costs import PLACED, Estimate, State
from ptrain.derivation.estimate import derive, own_facts
from ptrain.derivation.facts import ModelFacts
from ptrain.derivation.paper import state_sizes
from ptrain.errors import DoesNotFit
from ptrain.selection.fit import fit
from ptrain.spec.axis import DATA_AXES, Axis, Factor
from ptrain.spec.batch import (
    GatherAfterUpdate,
    GradientSync,
    Overlap,
    ReduceScatterVia,
    UnitSize,
)
from ptrain.spec.names import listing, strategy
from ptrain.spec.placement import CUT, S_STAR, Distribution, Placement, R, S, Tier
from ptrain.spec.spec import Offload, Spec
from ptrain.units import format_bytes

_OFFERED = 3
# Tuples that are tried in place of the spec's own: what needs no other layout, tier or optimizer.
_TUPLES = tuple(
    Placement(parameters=parameters, optimizer=optimizer, gradients=gradients)
    for parameters, optimizer, gradients in product((R, S_STAR), (R, S), (R, S))
)
_MOST_RANKS = 1024  # along one axis, when more ranks are tried
_DERIVED = 4  # variants from each end of the range that are derived in full


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """Another spec for the same job: what to write after the SPEC, and what it would take."""

    spec: Spec
    overrides: tuple[str, ...]
    peak_bytes: int
    sent_bytes: int
    fits: bool
    more_ranks: bool = False

    @property
    def command(self) -> str:
        """The overrides as a shell takes them."""
        return " ".join(shlex.quote(override) for override in self.overrides)

    @property
    def claim(self) -> str:
        """What is true of it."""
        on = f" on {self.spec.world_size} ranks" if self.more_ranks else ""
        return f"fits{on}" if self.fits else "closer, but does not fit"


def require_fit(spec: Spec, exact: Estimate, facts: ModelFacts | None = None) -> None:
    """Raises DoesNotFit, with up to three cheaper specs, unless the predicted peak fits."""
    found = fit(spec, exact)
    if found.fits:
        return
    if found.short_bytes > 0:
        room = format_bytes(found.device_memory or 0)
        lines = [
            f"{spec.name} does not fit by {format_bytes(found.short_bytes)}: the predicted peak is "
            f"{format_bytes(found.peak_bytes)} of {room} per rank"
        ]
    else:
        room = format_bytes(found.host_memory or 0)
        lines = [
            f"{spec.name} does not fit by {format_bytes(found.host_short_bytes)}: the states of a "
            f"node's ranks take {format_bytes(found.host_bytes)} of its host's {room}"
        ]
    variants = cheaper(spec, facts)
    wider = more_ranks(spec, variants, facts)
    for variant in (*variants, *([wider] if wider else [])):
        lines.append(f"  {variant.claim}: {variant.command}  (peak {_peak(variant)})")
    fitting = wider or any(variant.fits for variant in variants)
    instead = "one that fits" if fitting else "a smaller model or sequence"
    raise DoesNotFit("\n".join([*lines, f"  remedy: {instead}, or --force to train it anyway"]))


def _peak(variant: Variant) -> str:
    return format_bytes(variant.peak_bytes)


def cheaper(spec: Spec, facts: ModelFacts | None = None) -> tuple[Variant, ...]:
    """At most three legal variants over the data axes that need less memory: other tuples, other
    factorizations of the same ranks, smaller micro-batches. Those that fit first; of these the
    plainest product, then the one that sends least."""
    facts = own_facts(spec) if facts is None else facts
    now = _variant(spec, spec, facts)
    found = [_variant(spec, other, facts) for other in _promising(spec, facts, now)]
    smaller = [variant for variant in found if variant.peak_bytes < now.peak_bytes]
    smaller.sort(
        key=lambda each: (
            not each.fits,
            len(each.spec.factors) if each.fits else 0,
            each.sent_bytes if each.fits else each.peak_bytes,
            each.peak_bytes,
        )
    )
    return tuple(smaller[:_OFFERED])


def more_ranks(
    spec: Spec, variants: Sequence[Variant], facts: ModelFacts | None = None
) -> Variant | None:
    """Where none of `variants` fits: the fewest ranks (a power of two along one axis) on which
    this spec does, or else the first variant. None if that takes more than 1024."""
    if any(variant.fits for variant in variants):
        return None
    facts = own_facts(spec) if facts is None else facts
    for narrow in (spec, *(variant.spec for variant in variants[:1])):
        for axis in DATA_AXES:
            found = _widened(spec, narrow, axis, facts)
            if found:
                return found
    return None


def _widened(spec: Spec, narrow: Spec, axis: Axis, facts: ModelFacts) -> Variant | None:
    if not any(axis in narrow.axes_where(state, *CUT) for state in PLACED):
        return None
    degrees = [2**power for power in range(1, _MOST_RANKS.bit_length())]
    wider = (_with_degree(narrow, axis, each) for each in degrees if each > narrow.degree(axis))
    found = (_variant(spec, after, facts) for after in wider if not check(after))
    return next((replace(each, more_ranks=True) for each in found if each.fits), None)


def _with_degree(spec: Spec, axis: Axis, degree: int) -> Spec:
    """The global batch stays where whole micro-batches make it up, else it grows until they do."""
    factors = tuple(
        replace(factor, degree=degree) if factor.axis is axis else factor for factor in spec.factors
    )
    wide = replace(spec, factors=factors)
    once = spec.batch.micro * wide.data_degree
    accumulate = -(-spec.batch.global_samples // once)
    batch = replace(spec.batch, global_samples=accumulate * once, accumulate=accumulate)
    cluster = spec.cluster
    if cluster and cluster.devices < wide.world_size:
        cluster = replace(cluster, devices=wide.world_size)
    return replace(wide, batch=batch, cluster=cluster)


def state_bytes(spec: Spec, sizes: dict[State, int]) -> int:
    """Theta, Omega and G on one rank by Theorem 1, without padding: a cheap order of variants."""
    return sum(
        size // prod(spec.degree(axis) for axis in spec.axes_where(state, *CUT))
        for state, size in sizes.items()
    )


def _promising(spec: Spec, facts: ModelFacts, now: Variant) -> Iterator[Spec]:
    """Few enough to derive: the smallest, the largest that fit, and smaller micro-batches."""
    sizes_of = state_sizes(spec, facts)
    here = state_bytes(spec, sizes_of)
    by_size: dict[int, Spec] = {}
    for other in _placements(spec):
        by_size.setdefault(state_bytes(other, sizes_of), other)
    sizes = sorted(size for size in by_size if size < here)
    room = spec.cluster.device_memory - now.peak_bytes if spec.cluster else 0
    enough = [size for size in sizes if size - here <= room]
    chosen = dict.fromkeys((*sizes[:_DERIVED], *enough[-_DERIVED:]))
    specs = [by_size[size] for size in chosen]
    yield from specs
    if spec.batch.micro > 1:
        yield from (_with_micro(each, 1) for each in (spec, *specs[:1]))


def _placements(spec: Spec) -> Iterator[Spec]:
    """Every legal tuple over every factorization of the data ranks; one axis before two."""
    others = tuple(factor for factor in spec.factors if factor.axis not in DATA_AXES)
    for degrees in _factorizations(spec.data_degree):
        axes = [
            (axis, degree) for axis, degree in zip(DATA_AXES, degrees, strict=True) if degree > 1
        ]
        for tuples in product(_TUPLES, repeat=len(axes)):
            factors = tuple(
                Factor(axis=axis, degree=degree, placement=placement)
                for (axis, degree), placement in zip(axes, tuples, strict=True)
            )
            changed = _with_dials_it_obeys(_with_factors(spec, (*factors, *others)))
            if not check(changed) and not executed(changed):
                yield changed


def _factorizations(number: int) -> Iterator[tuple[int, int]]:
    """(dp_replicate, dp_shard): all on one axis first, then all others."""
    yield 1, number
    yield from ((each, number // each) for each in range(2, number) if number % each == 0)


def _with_factors(spec: Spec, factors: tuple[Factor, ...]) -> Spec:
    """The sync policy follows the gradients' mode as it does where none is written."""
    order = list(Axis)
    factors = tuple(sorted(factors, key=lambda factor: order.index(factor.axis)))
    sync = spec.sync
    if _whole_gradients(factors) != _whole_gradients(spec.factors):
        late = _whole_gradients(factors)
        sync = replace(sync, gradients=GradientSync.LAST if late else GradientSync.EVERY)
    return replace(spec, factors=factors, sync=sync)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Dial:
    """A key that a placement may be unable to obey: its field, what holds for every placement, and
    how that is written."""

    place: str
    field: str
    value: object
    override: str


_DIALS = (
    _Dial(place="unit", field="unit", value=UnitSize(), override="unit=block"),
    _Dial(place="bucket", field="bucket_bytes", value=STOCK_BUCKET_BYTES, override="bucket=size"),
    _Dial(place="prefetch", field="prefetch", value=0, override="prefetch=0"),
    _Dial(place="overlap", field="overlap", value=Overlap.NONE, override="overlap=none"),
    _Dial(place="offload", field="offload", value=Offload(), override="offload={}"),
    _Dial(
        place="gather_after_update",
        field="gather_after_update",
        value=GatherAfterUpdate.BLOCKING,
        override="gather_after_update=blocking",
    ),
    _Dial(
        place="reduce_scatter",
        field="reduce_scatter",
        value=ReduceScatterVia.NATIVE,
        override="reduce_scatter=native",
    ),
)


def _with_dials_it_obeys(spec: Spec) -> Spec:
    """What refuses only a dial of the job's own is no reason not to offer a tuple."""
    places = {fault.place.split(".")[0] for fault in check(spec)}
    changes: dict[str, Any] = {dial.field: dial.value for dial in _DIALS if dial.place in places}
    return replace(spec, **changes) if changes else spec


def _is_offloaded(spec: Spec) -> bool:
    return any(tier_of(spec.factors, state) is not Tier.DEVICE for state in PLACED)


def _whole_gradients(factors: tuple[Factor, ...]) -> bool:
    return all(
        factor.placement.gradients.distribution is Distribution.REPLICATED
        for factor in factors
        if factor.axis in DATA_AXES
    )


def _with_micro(spec: Spec, micro: int) -> Spec:
    accumulate = spec.batch.global_samples // (micro * spec.data_degree)
    return replace(spec, batch=replace(spec.batch, micro=micro, accumulate=accumulate))


def _variant(before: Spec, after: Spec, facts: ModelFacts) -> Variant:
    exact = derive(after, facts).exact
    found = fit(after, exact)
    return Variant(
        spec=after,
        overrides=tuple(_overrides(before, after)),
        peak_bytes=found.peak_bytes,
        sent_bytes=exact.sent_bytes(),
        fits=found.fits,
    )


def _overrides(before: Spec, after: Spec) -> Iterator[str]:
    """The dotlist that makes `after` of `before`."""
    if _degrees(before) != _degrees(after):
        mesh = ", ".join(f"{axis}: {degree}" for axis, degree in _degrees(after))
        yield f"mesh={{{mesh}}}"
    if _tuples(before) != _tuples(after):
        yield f"placement={_written(after)}"
    for dial in _DIALS:
        changes = getattr(before, dial.field) != getattr(after, dial.field)
        # A tier for O may be written, which the resolved spec has in its modes.
        ends = dial.field == "offload" and _is_offloaded(before) and not _is_offloaded(after)
        if changes or ends:
            yield dial.override
    if before.batch.global_samples != after.batch.global_samples:
        yield f"batch.global={after.batch.global_samples}"
    if before.batch != after.batch:
        yield f"batch.micro={after.batch.micro}"
        yield f"batch.accumulate={after.batch.accumulate}"
    if before.cluster and after.cluster and before.cluster.devices != after.cluster.devices:
        yield f"cluster.devices={after.cluster.devices}"


def _written(spec: Spec) -> str:
    """A strategy's name where its tuples have one, else the tuples."""
    tuples = {str(axis): str(placement) for axis, placement in _tuples(spec)}
    for name, named in _named_tuples().items():
        if named == tuples:
            return name
    return "{" + ", ".join(f"{axis}: [{modes}]" for axis, modes in tuples.items()) + "}"


@cache
def _named_tuples() -> dict[str, dict[str, str]]:
    """Strategies that are their tuples and nothing more."""
    found = {}
    for name in listing("strategies"):
        tree = strategy(name)
        if tree and isinstance(tree.root, dict) and "sync" not in tree.root:
            placement = tree.root["placement"]
            found[name] = {axis: ",".join(modes.values()) for axis, modes in placement.items()}
    return found


def _degrees(spec: Spec) -> tuple[tuple[Axis, int], ...]:
    return tuple((factor.axis, factor.degree) for factor in spec.factors)


def _tuples(spec: Spec) -> tuple[tuple[Axis, Placement], ...]:
    return tuple((factor.axis, factor.placement) for factor in spec.factors)
