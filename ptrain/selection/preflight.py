"""Before anything starts: does the prediction fit the device, and if not, which legal specs of the
same job need less."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

from ptrain.algebra.legality import check
from ptrain.costs import PLACED, Estimate, State
from ptrain.derivation.estimate import fullest_alone, own_facts
from ptrain.derivation.paper import state_sizes
from ptrain.errors import DoesNotFit
from ptrain.facts.model import ModelFacts
from ptrain.selection.alternatives import (
    frugal,
    obeying,
    on_device,
    on_host,
    overrides,
    sliced,
    with_micro,
)
from ptrain.selection.fit import fit, host_text, room_text
from ptrain.spec.axis import DATA_AXES, Axis
from ptrain.spec.placement import CUT, Tier
from ptrain.spec.spec import Spec
from ptrain.units import format_bytes

_OFFERED = 3
_MOST_RANKS = 1024  # along one axis, when more ranks are tried
_DERIVED = 4  # variants from each end of the range that are derived in full


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """Another spec for the same job: what to write after the SPEC, and what it would take. There is
    none without a known peak. `may_fit`: data, or the unknown memory of its
    host, decides."""

    spec: Spec
    overrides: tuple[str, ...]
    peak_bytes: int
    sent_bytes: int
    fits: bool
    host_short_bytes: int = 0
    more_ranks: bool = False
    may_fit: bool = False

    @property
    def command(self) -> str:
        """The overrides as a shell takes them."""
        return " ".join(shlex.quote(override) for override in self.overrides)

    @property
    def claim(self) -> str:
        """What is true of it."""
        on = f" on {self.spec.world_size} ranks" if self.more_ranks else ""
        if self.may_fit:
            return f"may fit{on}, by its data or its host's memory"
        return f"fits{on}" if self.fits else "closer, but does not fit"


def require_fit(spec: Spec, exact: Estimate, facts: ModelFacts | None = None) -> None:
    """Raises DoesNotFit, with up to three cheaper specs, where it is known not to fit. What nobody
    knows is no reason."""
    memory_fit = fit(spec, exact)
    if memory_fit.fits is not False:
        return
    is_known = memory_fit.peak_bytes is not None
    if memory_fit.short_bytes > 0:
        is_bound = memory_fit.lower_bytes is not None
        what = "the predicted peak is" if is_known else "its states alone are"
        what += " at least" if is_bound else ""
        more = "" if is_known and not is_bound else " or more"
        lines = [
            f"{spec.name} does not fit by {format_bytes(memory_fit.short_bytes)}{more}: {what} "
            f"{format_bytes(memory_fit.least_bytes)}{room_text(memory_fit)} per rank"
        ]
    else:
        lines = [
            f"{spec.name} does not fit by {format_bytes(memory_fit.host_short_bytes)}: its ranks "
            f"need {host_text(memory_fit)}"
        ]
    variants = cheaper(spec, facts, exact) if is_known else ()
    wider = more_ranks(spec, variants, facts) if is_known else None
    for variant in (*variants, *([wider] if wider else [])):
        lines.append(f"  {variant.claim}: {variant.command}  (peak {_peak(variant)})")
    fitting = wider or any(variant.fits for variant in variants)
    instead = "one that fits" if fitting else "a smaller model or sequence"
    raise DoesNotFit("\n".join([*lines, f"  remedy: {instead}, or --force to train it anyway"]))


def _peak(variant: Variant) -> str:
    return format_bytes(variant.peak_bytes)


def cheaper(
    spec: Spec, facts: ModelFacts | None = None, exact: Estimate | None = None
) -> tuple[Variant, ...]:
    """Return at most three legal variants over the data axes that need less memory: other tuples,
    other factorizations of the same ranks, smaller micro-batches; where none of these fits, states
    on the host. Those that fit come first; of these the plainest product, then the one that sends
    least. There are none where the spec's own peak is not known. `exact` is the spec's own, where
    it is derived."""
    facts = own_facts(spec) if facts is None else facts
    now = _variant(spec, spec, fullest_alone(spec, facts) if exact is None else exact)
    if now is None:
        return ()
    offers = _better(now, _variants(spec, _promising(spec, facts, now), facts))
    if any(variant.fits for variant in offers):
        return tuple(offers[:_OFFERED])
    hosted = _hosted(spec, facts, now)
    fitting = [variant for variant in hosted if variant.fits]
    closer = [variant for variant in hosted if not variant.fits]
    return (*fitting, *offers[: _OFFERED - 1], *closer, *offers[_OFFERED - 1 :])[:_OFFERED]


def _hosted(spec: Spec, facts: ModelFacts, now: Variant) -> list[Variant]:
    """Return variants that keep states on the host; in smaller micro-batches only if none fits
    else."""
    others = tuple(on_host(spec))
    variants = _better(now, _variants(spec, others, facts))
    if spec.batch.micro == 1 or any(variant.fits for variant in variants):
        return variants
    return _better(now, _variants(spec, (with_micro(other, 1) for other in others), facts))


def _better(now: Variant, variants: Iterable[Variant]) -> list[Variant]:
    """Return the variants that fit or at least need less (of the host no more than it has), best
    first."""
    short = max(now.host_short_bytes, 0)
    return sorted(
        (
            variant
            for variant in variants
            if (variant.fits and not now.fits)
            or (variant.peak_bytes < now.peak_bytes and variant.host_short_bytes <= short)
        ),
        key=lambda variant: (
            not variant.fits,
            (_states_off_device(variant.spec), len(variant.spec.factors), variant.sent_bytes)
            if variant.fits
            else (),
            variant.peak_bytes,
        ),
    )


def _states_off_device(spec: Spec) -> int:
    return sum(
        any(factor.placement[state].tier is not Tier.DEVICE for factor in spec.factors)
        for state in PLACED
    )


def more_ranks(
    spec: Spec, variants: Sequence[Variant], facts: ModelFacts | None = None
) -> Variant | None:
    """Return the spec, or else the first variant, on the fewest ranks (a power of two along one
    axis) on which it fits. None where one of `variants` fits, or where that takes more than
    1024."""
    if any(variant.fits for variant in variants):
        return None
    facts = own_facts(spec) if facts is None else facts
    for narrow in (spec, *(variant.spec for variant in variants[:1])):
        for axis in DATA_AXES:
            wider = _widened(spec, narrow, axis, facts)
            if wider:
                return wider
    return None


def _widened(spec: Spec, narrow: Spec, axis: Axis, facts: ModelFacts) -> Variant | None:
    if not any(axis in narrow.axes_where(state, *CUT) for state in PLACED):
        return None
    degrees = [2**power for power in range(1, _MOST_RANKS.bit_length())]
    wider = (
        _with_degree(narrow, axis, degree) for degree in degrees if degree > narrow.degree(axis)
    )
    variants = _variants(spec, (after for after in wider if not check(after)), facts)
    return next((replace(variant, more_ranks=True) for variant in variants if variant.fits), None)


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
    """Theta, Omega and G on one rank's device by Theorem 1, without padding: a cheap order of
    variants."""
    return sum(
        size // prod(spec.degree(axis) for axis in spec.axes_where(state, *CUT))
        for state, size in sizes.items()
        if all(factor.placement[state].tier is Tier.DEVICE for factor in spec.factors)
    )


def _promising(spec: Spec, facts: ModelFacts, now: Variant) -> Iterator[Spec]:
    """Yield specs, few enough to derive: the spec itself without what its dials keep, with slices
    on tp, the smallest, the largest that fit, and smaller micro-batches."""
    yield from frugal(spec)
    yield from sliced(spec)
    sizes_of = state_sizes(spec, facts)
    here = state_bytes(spec, sizes_of)
    room = spec.cluster.usable_memory - now.peak_bytes if spec.cluster else 0
    # More than now only where it is the host that has too little.
    largest = here - 1 if now.fits else here + max(room, -1)
    by_size: dict[int, Spec] = {}
    for other in on_device(spec):
        size = state_bytes(other, sizes_of)
        if size <= largest and size not in by_size and (legal := obeying(other)):
            by_size[size] = legal
    sizes = sorted(by_size)
    enough = [size for size in sizes if size - here <= room]
    chosen = dict.fromkeys((*sizes[:_DERIVED], *enough[-_DERIVED:]))
    specs = [by_size[size] for size in chosen]
    yield from specs
    if spec.batch.micro > 1:
        yield from (with_micro(candidate, 1) for candidate in (spec, *specs[:1]))


def _variants(before: Spec, specs: Iterable[Spec], facts: ModelFacts) -> Iterator[Variant]:
    """Each that has a known peak."""
    for after in specs:
        if variant := _variant(before, after, fullest_alone(after, facts)):
            yield variant


def _variant(before: Spec, after: Spec, exact: Estimate) -> Variant | None:
    """Return `after` with what it costs, None without a known peak."""
    memory_fit = fit(after, exact)
    if memory_fit.peak_bytes is None:
        return None
    return Variant(
        spec=after,
        overrides=tuple(overrides(before, after)),
        peak_bytes=memory_fit.peak_bytes,
        sent_bytes=exact.sent_bytes(),
        fits=memory_fit.fits is True,
        may_fit=memory_fit.fits is None,
        host_short_bytes=memory_fit.host_short_bytes,
    )
