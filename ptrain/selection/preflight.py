"""Check before a start that a prediction fits, and find the cheapest changes that make it fit.

A change is a list of overrides. It is loaded on top of what the user typed and derived with the
engine of `ptrain predict`: a change that is printed as fitting also fits when it is pasted.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import combinations
from math import inf
from operator import attrgetter
from typing import NamedTuple

from ptrain.algebra.legality import Located
from ptrain.cost import Estimate
from ptrain.derivation.estimate import derive, facts_from_shape, fullest_alone, step_seconds
from ptrain.derivation.tape import TooLarge
from ptrain.errors import DoesNotFit, SpecError
from ptrain.facts.model import ModelFacts
from ptrain.facts.traced_part import traced_part
from ptrain.plan.lower import own_facts
from ptrain.selection.alternatives import (
    ON_DEVICE,
    ChangeKind,
    Overrides,
    faster_overrides,
    host_overrides,
    merged,
    ranks_overrides,
    reset_overrides,
)
from ptrain.selection.fit import Fit, fit, host_text, room_text
from ptrain.selection.recompute import ChosenDocument, resolve_auto
from ptrain.spec.load import load
from ptrain.spec.placement import DATA_AXES
from ptrain.spec.spec import Spec
from ptrain.spec.write import to_mapping
from ptrain.units import format_memory, format_seconds

_OFFERED = 3
_FASTER, _MENTIONED = 0.05, 2  # how much faster a dial must make a step, and how many are named

_peak, _missing = attrgetter("fit.peak_bytes"), attrgetter("missing_bytes")
Reload = Callable[[Overrides], Located]


_TRIED = (
    "recomputation, chunked loss, other precision layouts, smaller micro-batches, other "
    "shardings, more ranks, and states on the host"
)


class Variant(NamedTuple):
    """A changed spec of the same job, with the overrides that make it and its derived costs.
    `seconds` is None where no step time is predicted."""

    spec: Spec
    overrides: Overrides
    kinds: tuple[ChangeKind, ...]
    fit: Fit
    seconds: float | None = None

    @property
    def command(self) -> str:
        """The overrides as a shell takes them."""
        return " ".join(shlex.quote(override) for override in self.overrides)

    @property
    def missing_bytes(self) -> int:
        """The bytes by which the device or the host is too small."""
        return max(self.fit.short_bytes, self.fit.host_short_bytes)

    @property
    def line(self) -> str:
        """One line with the overrides, the step time, the peak and the headroom."""
        ranks = f" on {self.spec.world_size} ranks" if ChangeKind.RANKS in self.kinds else ""
        peak = f"peak {format_memory(self.fit.peak_bytes or 0)}"
        if self.fit.fits is False:
            missing = format_memory(self.missing_bytes)
            host = f", {host_text(self.fit)}" if self.fit.host_short_bytes > 0 else ""
            return f"  closest{ranks}: {self.command} → {peak}{host}, still {missing} too large"
        claim = "fits" if self.fit.fits else "may fit"
        time = "unknown" if self.seconds is None else format_seconds(self.seconds)
        spare = f"{format_memory(self.fit.spare_bytes)} to spare{' (tight)' * self.fit.is_tight}"
        spare = spare if self.fit.fits else f"unknown: {self.fit.unknown}"
        host = f", {host_text(self.fit)}" if host_text(self.fit) else ""
        return f"  {claim}{ranks}: {self.command} → step time {time}, {peak}{host}, {spare}"


class FitAdvice(NamedTuple):
    """Changes that fit, best first, or else the closest one. `untraced` are changes that were not
    derived, because the model would have to be traced for each of them."""

    variants: tuple[Variant, ...] = ()
    untraced: tuple[str, ...] = ()

    @property
    def lines(self) -> list[str]:
        """The lines to print below the finding that a spec does not fit."""
        lines = [variant.line for variant in self.variants]
        lines = lines or [f"  no change fits or reduces the peak; tried: {_TRIED}"]
        if self.untraced:
            lines.append(f"  not tried, because each needs a trace: {', '.join(self.untraced)}")
        return lines


def require_fit(
    spec: Spec, exact: Estimate, facts: ModelFacts | None = None, reload: Reload | None = None
) -> None:
    """Check that a spec is not known to be too large. `reload` as of `find_changes`.

    Raises:
        DoesNotFit: With the cheapest changes that fit, or the closest one.
    """
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
            f"{spec.name} does not fit by {format_memory(memory_fit.short_bytes)}{more}: {what} "
            f"{format_memory(memory_fit.least_bytes)}{room_text(memory_fit)} per rank"
        ]
    else:
        lines = [
            f"{spec.name} does not fit by {format_memory(memory_fit.host_short_bytes)}: its ranks "
            f"need {host_text(memory_fit)}"
        ]
    instead = "Use a smaller model or sequence"
    if memory_fit.usable_memory is not None and memory_fit.usable_memory <= 0:
        instead = "The reserve leaves no memory. Set `cluster.reserve` and `cluster.device_memory`"
    if is_known:
        advice = find_changes(spec, facts, exact, reload)
        lines += advice.lines
        if any(variant.fit.fits for variant in advice.variants):
            instead = "Add one of these overrides"
        elif advice.untraced:
            instead = "Try the changes above with `ptrain predict`"
    raise DoesNotFit("\n".join([*lines, f"  remedy: {instead}, or train anyway with `--force`."]))


def find_changes(
    spec: Spec,
    facts: ModelFacts | None = None,
    exact: Estimate | None = None,
    reload: Reload | None = None,
) -> FitAdvice:
    """Find the three cheapest changes with which a spec fits, or else the closest one.

    Args:
        spec: A spec with a known peak; without one there is no advice.
        facts: The facts of its model; those of a built-in model are known.
        exact: The spec's own exact estimate, where it is derived.
        reload: Load what the user typed with more overrides; by default the resolved spec.
    """
    facts = own_facts(spec) if facts is None else facts
    memory_fit = fit(spec, fullest_alone(spec, facts) if exact is None else exact)
    if memory_fit.peak_bytes is None or (memory_fit.usable_memory or 1) <= 0:
        return FitAdvice()
    now = Variant(spec=spec, overrides=(), kinds=(), fit=memory_fit)
    search = _Search(
        now=now,
        traced=traced_part(spec),
        facts=facts,
        reload=reload or partial(_load_resolved, spec),
    )
    variants = search.run()
    if reload is not None:
        tried = {**search.tried, (): now}
        variants = tuple(_shorten(variant, reload, tried) for variant in variants)
    return FitAdvice(variants=variants, untraced=tuple(search.untraced.values()))


def find_faster(
    spec: Spec, facts: ModelFacts, exact: Estimate, reload: Reload
) -> tuple[Variant, ...]:
    """Find the single dials that make a step of a spec that fits more than 5 % faster, at most two.
    Those that need another trace of the model are not tried. `reload` as of `find_changes`."""
    step, variants = exact.step, list[Variant]()
    if step is None or fit(spec, exact).fits is not True:
        return ()
    for said in faster_overrides(spec, step, _FASTER):
        with suppress(SpecError, TooLarge):
            after = resolve_auto(reload(said))
            is_same = traced_part(after) == traced_part(spec)
            if (known := facts if is_same else facts_from_shape(after)) is not None:
                changed = derive(after, known).exact
                memory_fit, seconds = fit(after, changed), changed.step and changed.step.seconds
                if memory_fit.fits and seconds and seconds * (1 + _FASTER) <= step.seconds:
                    variants.append(
                        Variant(
                            spec=after, overrides=said, kinds=(), fit=memory_fit, seconds=seconds
                        )
                    )
    variants.sort(key=lambda variant: variant.seconds or inf)
    return tuple(_shorten(variant, reload, {}) for variant in variants[:_MENTIONED])


def _load_resolved(spec: Spec, more: Overrides) -> Located:
    """Load a resolved spec with overrides, for the device that it runs on."""
    document = load(spec.resolved or to_mapping(spec, sync_is_written=True), more)
    changed = replace(document.spec, device=spec.device)
    if changed.cluster and spec.cluster:
        changed = replace(changed, cluster=replace(changed.cluster, sm=spec.cluster.sm))
    return ChosenDocument(spec=changed, locate=document.locate)


def _shorten(
    variant: Variant, reload: Reload, tried: Mapping[Overrides, Variant | None]
) -> Variant:
    """Leave out the overrides that follow from what was typed. What was `tried` is loaded."""
    for override in variant.overrides:
        fewer = tuple(said for said in variant.overrides if said != override)
        with suppress(SpecError):
            one = tried.get(fewer) or variant
            shorter = one.spec if one.overrides == fewer else resolve_auto(reload(fewer))
            if shorter.but(resolved={}) == variant.spec.but(resolved={}):
                variant = variant._replace(overrides=fewer)
    return variant


@dataclass(eq=False, repr=False, slots=True, kw_only=True)
class _Search:
    """The search for changes of the spec as it is `now`; `traced` is the part of it that a trace
    depends on, `facts` are those of its model. `tried` are all changes that were derived,
    None where one is refused or no better; `untraced` the first of each kind that were not.
    `fits_alone`: a single change on the device fits."""

    now: Variant
    traced: Spec
    facts: ModelFacts
    reload: Reload
    tried: dict[Overrides, Variant | None] = field(default_factory=dict)
    untraced: dict[tuple[ChangeKind, ...], str] = field(default_factory=dict)
    fits_alone: bool = False

    def run(self) -> tuple[Variant, ...]:
        """Try single changes on the device; if none fits, combined ones and more ranks. If fewer
        than `_OFFERED` fit, try offloads."""
        for kind, choices in ON_DEVICE.items():
            self._try_all(kind, choices(self.now.spec))
        if not self._has_fit():
            self._combine(ON_DEVICE)
        if not (is_on_device := self._has_fit()):
            self._widen()
        if sum(variant.fit.fits is True for variant in self._better()) < _OFFERED and not (
            self._try_all(ChangeKind.OFFLOAD, host_overrides(self.now.spec)) or is_on_device
        ):
            kinds = (*ON_DEVICE, ChangeKind.OFFLOAD)
            self._combine(kind for kind in kinds if kind is not ChangeKind.SHARDING)
        return self._best()

    def _best(self) -> tuple[Variant, ...]:
        """Return the cheapest of each kind that fit, then others that fit; else the closest one."""
        better = self._better()
        usable = [self._timed(variant) for variant in better if variant.fit.fits is not False]
        if not usable:
            return tuple(sorted(better, key=_missing)[:1])
        usable = [variant for variant in usable if not _is_needless(variant, usable)]
        usable.sort(key=_rank)
        first = {variant.kinds: variant for variant in reversed(usable)}.values()
        chosen = [*sorted(first, key=_rank), *(one for one in usable if one not in first)][
            :_OFFERED
        ]
        return tuple(sorted(chosen, key=_rank))

    def _better(self) -> list[Variant]:
        return [variant for variant in self.tried.values() if variant]

    def _has_fit(self) -> bool:
        return any(variant.fit.fits for variant in self._better())

    def _try_all(self, kind: ChangeKind, choices: Iterable[Overrides]) -> bool:
        """Derive the single changes of one kind. Return True if one fits."""
        is_fitting = False
        for said in choices:
            variant = self._try((kind,), said)
            is_fitting |= variant is not None and variant.fit.fits is True
            self.fits_alone |= is_fitting and kind is not ChangeKind.OFFLOAD
            if is_fitting and kind is ChangeKind.MICRO:
                break  # a smaller one is slower
        return is_fitting

    def _try(self, kinds: tuple[ChangeKind, ...], said: Overrides) -> Variant | None:
        """Derive the typed spec with these overrides, unless that is done."""
        if said not in self.tried:
            self.tried[said] = self._derive(kinds, said)
        return self.tried[said]

    def _derive(self, kinds: tuple[ChangeKind, ...], said: Overrides) -> Variant | None:
        """Return None where the changed spec is refused, another job, or no better. Once a change
        fits, those that do not are offered no more, and nobody needs to know how large they are."""
        now = self.now
        try:
            after, said = self._load(said)
            size, before = (
                (spec.world_size, spec.batch.global_samples) for spec in (after, now.spec)
            )
            if size != before and ChangeKind.RANKS not in kinds:
                return None
            if (facts := self._facts_of(after)) is None:
                self.untraced[kinds] = shlex.join(said)  # the last is the smallest of its kind
                return None
            memory_fit = fit(after, fullest_alone(after, facts, self._limit(after)))
        except (SpecError, TooLarge):
            return None
        variant = Variant(spec=after, overrides=said, kinds=kinds, fit=memory_fit)
        is_better = memory_fit.fits is not False or variant.missing_bytes < now.missing_bytes
        return variant if is_better and memory_fit.peak_bytes is not None else None

    def _limit(self, after: Spec) -> float:
        """Return a peak above which a changed spec is no better than the spec as it is now, or than
        a single change on the device that fits: then only others that fit are of interest."""
        cluster = after.cluster
        if cluster is None or cluster.device_memory is None:
            return inf
        return (
            cluster.device_memory
            - cluster.reserved_bytes
            + (0 if self.fits_alone else max(0, self.now.missing_bytes))
        )

    def _load(self, said: Overrides) -> tuple[Spec, Overrides]:
        """Load the typed spec with these overrides. Dials that refuse them are set back."""
        try:
            return resolve_auto(self.reload(said)), said
        except SpecError as error:
            if not (more := reset_overrides(error.faults)):
                raise
            said = (*said, *more)
            return resolve_auto(self.reload(said)), said

    def _facts_of(self, after: Spec) -> ModelFacts | None:
        """Return the facts of a changed spec; None where only another trace has them."""
        return self.facts if traced_part(after) == self.traced else facts_from_shape(after)

    def _timed(self, variant: Variant) -> Variant:
        """Add the time of a step, which takes longer to derive than the peak."""
        facts = self._facts_of(variant.spec)
        assert facts is not None, "its peak was derived from them"
        return variant._replace(seconds=step_seconds(variant.spec, facts))

    def _combine(self, kinds: Iterable[ChangeKind]) -> None:
        """Add up the changes that need least of each kind, as long as each lowers the peak. If the
        sum fits, derive the combinations of fewer of them, until one fits."""
        single = {kind: [v for v in self._better() if v.kinds == (kind,)] for kind in kinds}
        least = sorted((min(some, key=_peak) for some in single.values() if some), key=_peak)
        chosen, best = least[:1], least[0] if least else None
        for variant in least[1:]:
            joined = self._join([*chosen, variant])
            if joined and best and _peak(joined) < _peak(best):
                chosen, best = [*chosen, variant], joined
        for number in range(2, len(chosen) if best and best.fit.fits else 0):
            fewer = [self._join(some) for some in combinations(chosen, number)]
            if any(variant and variant.fit.fits for variant in fewer):
                return

    def _join(self, variants: Iterable[Variant]) -> Variant | None:
        chosen = sorted(variants, key=lambda variant: variant.kinds)
        kinds = tuple(kind for variant in chosen for kind in variant.kinds)
        return self._try(kinds, merged(*(variant.overrides for variant in chosen)))

    def _widen(self) -> None:
        """Derive the spec, or else its closest variant, on the fewest ranks on which it fits."""
        for narrow in (self.now, *sorted(self._better(), key=_missing)[:1]):
            kinds = (*narrow.kinds, ChangeKind.RANKS)
            for axis in DATA_AXES:
                wider = [
                    *map(partial(merged, narrow.overrides), ranks_overrides(narrow.spec, axis))
                ]
                most = self._derive(kinds, wider[-1]) if wider else None
                if most is not None and not most.fit.fits:
                    continue  # then fewer do not fit either
                for said in wider:
                    variant = self._try(kinds, said)
                    if variant is not None and variant.fit.fits:
                        return


def _is_needless(variant: Variant, usable: Iterable[Variant]) -> bool:
    """Return True if fewer of its overrides fit too, and take no longer."""
    return any(
        {*less.overrides} < {*variant.overrides}
        and (variant.seconds or inf) >= (less.seconds or inf)
        for less in usable
    )


def _rank(variant: Variant) -> tuple[float, ...]:
    """Return the sort key: fits, needs no more ranks, has headroom, then step time and headroom.
    Without a step time the fewest changes, in the stated order of their kinds."""
    return (
        variant.fit.fits is not True,
        ChangeKind.RANKS in variant.kinds,
        variant.fit.is_tight,
        variant.seconds is None,
        variant.seconds or 0.0,
        len(variant.kinds),
        max(variant.kinds),
        -variant.fit.spare_bytes,
    )
