"""Check before a start that a prediction fits, and find the cheapest changes that make it fit.

A change is a list of overrides. It is loaded on top of the user's spec and overrides, and derived
with the engine of `ptrain predict`, so that a change printed as fitting also fits when it is
pasted.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import partial
from math import inf
from operator import attrgetter
from typing import NamedTuple

from ptrain.algebra.legality import LocatedSpec
from ptrain.axes.data.form import form_of, units_ahead
from ptrain.axes.data.rules import DATA
from ptrain.cost import PLACED, Estimate, Spent, StepTime
from ptrain.derivation.estimate import facts_from_shape, fullest_alone, step_seconds
from ptrain.derivation.tape import PeakExceeded
from ptrain.errors import DoesNotFit, Fault, SpecError
from ptrain.facts.model import ModelFacts
from ptrain.facts.traced_part import traced_part
from ptrain.plan.lower import built_in_facts
from ptrain.selection.fit import Fit, fit, host_text, room_text
from ptrain.selection.recompute import ChosenDocument, recompute_policies, resolve_auto
from ptrain.spec.activations import FULL
from ptrain.spec.dials import GradientSync
from ptrain.spec.keys import data_axis_dials
from ptrain.spec.load import load
from ptrain.spec.model import ModelShape
from ptrain.spec.placement import CUT, DATA_AXES, S_STAR, Axis, Mode, Placement, R, S
from ptrain.spec.precision import LAYOUTS
from ptrain.spec.shorthand import placement_names
from ptrain.spec.spec import Spec, ranks_over
from ptrain.spec.write import to_mapping
from ptrain.units import format_memory, format_seconds

Overrides = tuple[str, ...]


class ChangeKind(IntEnum):
    """A kind of change, ordered by its cost in time for when no step time is predicted."""

    RECOMPUTE = 0
    LOSS = 1
    LAYOUT = 2
    MICRO = 3
    SLICES = 4
    SHARDING = 5
    RANKS = 6
    OFFLOAD = 7


_MOST_RANKS = 1024  # along one axis
_MOST_MICROS = 12  # micro-batch sizes that are tried: the largest ones, and 1
# Parameters, optimizer state and gradients on the data axis; placements with most on the host last.
_SHARDED = ("R,S,R", "R,S,S", "S*,S,S")
_HOSTED = ("R,O,S", "R,O,O", "S*,O,S", "S*,O,O", "S*@host,O,S", "S*@host,O,O")


def recompute_overrides(spec: Spec) -> Iterator[Overrides]:
    """Yield the policies that recompute all blocks, the one with least recomputation first."""
    modes = [f"{place}=M" for place in _activation_places(spec)]
    for name, policy in recompute_policies(spec):
        is_default = policy == FULL and "recompute" not in spec.resolved
        yield (*modes, *([] if is_default else [f"recompute={name}"]))


def _activation_places(spec: Spec) -> list[str]:
    """Return the keys that set the mode of activations."""
    own = [factor.axis for factor in spec.factors if _says_activations(spec, factor.axis)]
    return [f"placement.{axis}.activations" for axis in own] or ["activations"]


def faster_overrides(spec: Spec, step: StepTime, part: float) -> Iterator[Overrides]:
    """Yield single dials that may save more than `part` of a step: less recomputation, more
    overlap, fewer collectives or a shorter bubble where these take long enough, and a padded
    vocabulary."""
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
    if isinstance(spec.model, ModelShape) and spec.model.vocab_rows % _TILE:
        yield (f"model.vocab_multiple={_TILE}",)


def loss_overrides(spec: Spec) -> Iterator[Overrides]:
    """Yield losses that never hold all logits at once; none for a user's loss function."""
    if spec.loss.user_function is None:
        yield from (("loss=chunked",), ("loss=fused",), ("loss=vocab-parallel",))


def layout_overrides(spec: Spec) -> Iterator[Overrides]:
    """Yield smaller precision layouts with the same dtypes of master copies and optimizer moments;
    a layout without fp32 master copies would train differently."""
    own = spec.precision.layout
    for layout in LAYOUTS.values():
        is_as_exact = (layout.update_dtype, layout.moments) == (own.update_dtype, own.moments)
        is_smaller = (
            layout.parameters.itemsize < own.parameters.itemsize
            or layout.gradients.itemsize < own.gradients.itemsize
        )
        if is_as_exact and is_smaller and layout.scales_loss is own.scales_loss:
            yield (f"precision.layout={layout.name}",)


def micro_overrides(spec: Spec) -> Iterator[Overrides]:
    """Yield smaller micro-batches for the same global batch, the largest first."""
    samples = spec.batch.micro * spec.batch.accumulate
    smaller = [micro for micro in range(1, spec.batch.micro) if samples % micro == 0]
    for micro in dict.fromkeys((*smaller[:-_MOST_MICROS:-1], *smaller[:1])):
        yield (f"batch.micro={micro}", f"batch.accumulate={samples // micro}")


def slices_overrides(spec: Spec) -> Iterator[Overrides]:
    """Yield modes of tp activations with which ranks keep token shards."""
    if spec.degree(Axis.TP) > 1:
        yield from ((f"placement.tp.activations={mode}",) for mode in (S, S_STAR))


def sharding_overrides(spec: Spec) -> Iterator[Overrides]:
    """Yield dials that keep less, and placements that shard more: over the ranks of `dp_shard`, of
    a node, and of all data axes."""
    if units_ahead(spec, form_of(spec)):
        yield ("prefetch=0",)
    if spec.sync.reshard_after_forward is not True:
        yield ("sync.reshard_after_forward=true",)
    is_cut = any(Axis.DP_SHARD in spec.axes_where(state, *CUT) for state in PLACED)
    if spec.sync.gradients is GradientSync.LAST and is_cut:
        yield ("sync.gradients=every",)
    node = spec.cluster.devices_per_node if spec.cluster else 1
    ranks, shards = ranks_over(spec, DATA_AXES), spec.degree(Axis.DP_SHARD)
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
    """Yield placements that keep states on the host, with all data ranks on the sharding axis."""
    if ranks_over(spec, DATA_AXES) > 1:
        yield from _placed(spec, _HOSTED, ranks_over(spec, DATA_AXES))


def ranks_overrides(spec: Spec, axis: Axis) -> Iterator[Overrides]:
    """Yield more ranks, powers of two, along an axis that shards states. The global batch is kept
    if micro-batches fill it exactly, else it grows to the next such size."""
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
    """Return the overrides that reset dials and tiers named in faults."""
    places = [f"{fault.place}." for fault in faults]
    resets = [dial.default_override for dial in data_axis_dials() if f"{dial.place}." in places]
    is_tier = any(place.startswith("offload.") for place in places)
    return (*resets, *(["offload={}"] if is_tier else []))


def merged(*lists: Overrides) -> Overrides:
    """Return the overrides of all lists, the last one per key."""
    by_key = {override.partition("=")[0]: override for some in lists for override in some}
    return tuple(by_key.values())


def _placed(spec: Spec, tuples: Iterable[str], degree: int) -> Iterator[Overrides]:
    """Yield the nearest placements that the optimizer supports, on a `dp_shard` of this degree.
    They keep the mode of activations, where M and O apply to the rank."""
    axis, replicas = Axis.DP_SHARD, ranks_over(spec, DATA_AXES) // degree
    mesh = (f"mesh.{Axis.DP_REPLICATE}={replicas}", f"mesh.{axis}={degree}")
    kept = [f.placement.activations for f in spec.factors if _says_activations(spec, f.axis)]
    texts: dict[str, None] = {}
    for text in tuples:
        modes = (*map(Mode.parse, text.split(",")), *(kept[:1] or [R]))
        own = {state.value: mode for state, mode in zip(PLACED, modes, strict=True)}
        texts[str(DATA.nearest_legal(Placement(**own), spec.optimizer))] = None
    moved = mesh if degree != spec.degree(axis) else ()
    own_text = next((str(f.placement) for f in spec.factors if f.axis is axis), "")
    if not moved:
        texts.pop(own_text, None)
    yield from (
        (*moved, f"placement.{axis}={placement_names(axis).get(text, text)}") for text in texts
    )


def _says_activations(spec: Spec, axis: Axis) -> bool:
    """Return True if the placement of a data axis sets the rank's mode of activations."""
    own = (factor.placement.activations for factor in spec.factors if factor.axis is axis)
    return axis in DATA_AXES and any(mode != R for mode in own)


_OFFERED = 3  # changes that are printed
# GPUs multiply matrices at full speed if their columns are a multiple: NVIDIA's "Matrix
# Multiplication Background User's Guide" recommends 128 bytes for 16-bit numbers.
_TILE = 64
_FASTER, _MENTIONED = 0.05, 2  # minimum speedup of a dial, and number of dials that are named

_peak, _missing = attrgetter("fit.peak_bytes"), attrgetter("missing_bytes")
Reload = Callable[[Overrides], LocatedSpec]


_TRIED = (
    "recomputation, chunked loss, other precision layouts, smaller micro-batches, other "
    "shardings, more ranks, and states on the host"
)


class Variant(NamedTuple):
    """A changed spec of the same job, with its overrides and derived costs; `seconds` is None if no
    step time is predicted."""

    spec: Spec
    overrides: Overrides
    kinds: tuple[ChangeKind, ...]
    fit: Fit
    seconds: float | None = None

    @property
    def command(self) -> str:
        """The overrides, quoted for a shell."""
        return " ".join(shlex.quote(override) for override in self.overrides)

    @property
    def missing_bytes(self) -> int:
        """The bytes that the device or the host lacks."""
        return max(self.fit.short_bytes, self.fit.host_short_bytes)

    @property
    def line(self) -> str:
        """One line with the overrides, the step time, the peak and the spare memory."""
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
    derived, because each needs a trace."""

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
    """Raise DoesNotFit if a spec is known to be too large, with changes that fit or the closest
    one. For `reload` see `find_changes`."""
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
        facts: Facts of its model. Default: those of a built-in model.
        exact: The spec's exact estimate, if it is derived already.
        reload: Loads the user's spec with more overrides. Default: the resolved spec.
    """
    facts = built_in_facts(spec) if facts is None else facts
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
    """Find at most two single dials that make a step more than 5 % faster, for a spec that fits.
    Dials that need another trace are not tried. For `reload` see `find_changes`."""
    step, now = exact.step, Variant(spec, (), (), fit(spec, exact))
    if step is None or now.fit.fits is not True:
        return ()
    search = _Search(now=now, traced=traced_part(spec), facts=facts, reload=reload)
    changed = (search.derive((), said) for said in faster_overrides(spec, step, _FASTER))
    fitting = [search.timed(variant) for variant in changed if variant and variant.fit.fits]
    faster = [v for v in fitting if v.seconds and v.seconds * (1 + _FASTER) <= step.seconds]
    faster.sort(key=lambda variant: variant.seconds or inf)
    return tuple(_shorten(variant, reload, {}) for variant in faster[:_MENTIONED])


def _load_resolved(spec: Spec, more: Overrides) -> LocatedSpec:
    """Load a resolved spec with overrides, for the same device."""
    document = load(spec.resolved or to_mapping(spec, sync_is_written=True), more)
    changed = replace(document.spec, device=spec.device)
    if changed.cluster and spec.cluster:
        changed = replace(changed, cluster=replace(changed.cluster, sm=spec.cluster.sm))
    return ChosenDocument(spec=changed, locate=document.locate)


def _shorten(
    variant: Variant, reload: Reload, tried: Mapping[Overrides, Variant | None]
) -> Variant:
    """Remove overrides that follow from the user's input; specs in `tried` are loaded already."""
    # A search adds overrides for dials that the user's file may already set. Each is removed if the
    # loaded spec is the same without it.
    for override in variant.overrides:
        fewer = tuple(said for said in variant.overrides if said != override)
        with suppress(SpecError):
            one = tried.get(fewer) or variant
            shorter = one.spec if one.overrides == fewer else resolve_auto(reload(fewer))
            if shorter.with_fields(resolved={}) == variant.spec.with_fields(resolved={}):
                variant = variant._replace(overrides=fewer)
    return variant


@dataclass(eq=False, repr=False, slots=True, kw_only=True)
class _Search:
    """The search for changes of the spec in `now`. `traced` is the part of that spec that a trace
    depends on; `tried` holds all derived changes, None if rejected or no better; `untraced` has one
    per kind that was not derived."""

    now: Variant
    traced: Spec
    facts: ModelFacts
    reload: Reload
    tried: dict[Overrides, Variant | None] = field(default_factory=dict)
    untraced: dict[tuple[ChangeKind, ...], str] = field(default_factory=dict)

    def run(self) -> tuple[Variant, ...]:
        """Try single changes on the device, then combinations and more ranks if none fits. If fewer
        than `_OFFERED` fit, try offloading."""
        # Single changes first: they are the easiest to apply. Combinations are derived only if none
        # fits.
        fitting = sum(self._fits(kind, of(self.now.spec)) for kind, of in ON_DEVICE.items())
        if not (is_on_device := fitting > 0 or self._combine(ON_DEVICE)):
            self._widen()
        if sum(map(_is_fitting, self._better())) < _OFFERED and not (
            self._fits(ChangeKind.OFFLOAD, host_overrides(self.now.spec)) or is_on_device
        ):
            kinds = (*ON_DEVICE, ChangeKind.OFFLOAD)
            self._combine(kind for kind in kinds if kind is not ChangeKind.SHARDING)
        return self._best()

    def _best(self) -> tuple[Variant, ...]:
        """Return the cheapest fitting change of each kind, then other fitting ones; else the
        closest."""
        better = self._better()
        usable = [self.timed(variant) for variant in better if variant.fit.fits is not False]
        usable.sort(key=_rank)
        first = {variant.kinds: variant for variant in reversed(usable)}
        usable.sort(key=lambda variant: first[variant.kinds] is not variant)
        return tuple(sorted(usable[:_OFFERED], key=_rank) or sorted(better, key=_missing)[:1])

    def _better(self) -> list[Variant]:
        return [variant for variant in self.tried.values() if variant]

    def _fits(self, kind: ChangeKind, choices: Iterable[Overrides]) -> bool:
        """Derive the single changes of one kind, and return True if one fits."""
        variants = map(partial(self._try, (kind,)), choices)
        # of micro-batches, those that are smaller than one that fits are slower
        return any(map(_is_fitting, variants if kind is ChangeKind.MICRO else [*variants]))

    def _try(self, kinds: tuple[ChangeKind, ...], said: Overrides) -> Variant | None:
        """Return the variant with these overrides, derived once."""
        if said not in self.tried:
            self.tried[said] = self.derive(kinds, said)
        return self.tried[said]

    def derive(self, kinds: tuple[ChangeKind, ...], said: Overrides) -> Variant | None:
        """Return the variant, or None if it is rejected, changes the job, or is no better."""
        now = self.now
        try:
            after, said = self._load(said)
            size, before = (
                (spec.world_size, spec.batch.global_samples) for spec in (after, now.spec)
            )
            if size != before and ChangeKind.RANKS not in kinds:
                return None
            if (facts := self._facts_of(after)) is None:
                self.untraced[kinds] = shlex.join(said)  # keep the last, which is the smallest
                return None
            # above this peak a changed spec is no better than the present one
            room = after.cluster.usable_memory if after.cluster else inf
            most = room + max(0, now.missing_bytes)
            memory_fit = fit(after, fullest_alone(after, facts, most))
        except (SpecError, PeakExceeded):
            return None
        variant = Variant(spec=after, overrides=said, kinds=kinds, fit=memory_fit)
        is_better = memory_fit.fits is not False or variant.missing_bytes < now.missing_bytes
        return variant if is_better and memory_fit.peak_bytes is not None else None

    def _load(self, said: Overrides) -> tuple[Spec, Overrides]:
        """Load the user's spec with these overrides, and reset dials that conflict with them."""
        try:
            return resolve_auto(self.reload(said)), said
        except SpecError as error:
            if not (more := reset_overrides(error.faults)):
                raise
            said = (*said, *more)
            return resolve_auto(self.reload(said)), said

    def _facts_of(self, after: Spec) -> ModelFacts | None:
        """Return the facts of a changed spec; None if they need another trace."""
        return self.facts if traced_part(after) == self.traced else facts_from_shape(after)

    def timed(self, variant: Variant) -> Variant:
        """Return the variant with its step time, which takes longer to derive than the peak."""
        facts = self._facts_of(variant.spec)
        assert facts is not None, "its peak was derived from them"
        return variant._replace(seconds=step_seconds(variant.spec, facts))

    def _combine(self, kinds: Iterable[ChangeKind]) -> bool:
        """Combine the smallest change of each kind while each lowers the peak, until the sum fits.
        Return True if it does."""
        single = {kind: [v for v in self._better() if v.kinds == (kind,)] for kind in kinds}
        least = sorted((min(some, key=_peak) for some in single.values() if some), key=_peak)
        # Greedy: trying all combinations of all changes would take minutes. Changes of one kind
        # exclude each other.
        chosen, best = least[:1], least[0] if least else None
        for variant in least[1:]:
            joined = self._join([*chosen, variant])
            if joined and best and _peak(joined) < _peak(best):
                chosen, best = [*chosen, variant], joined
            if _is_fitting(joined):
                return True
        return False

    def _join(self, variants: Iterable[Variant]) -> Variant | None:
        chosen = sorted(variants, key=lambda variant: variant.kinds)
        kinds = tuple(kind for variant in chosen for kind in variant.kinds)
        return self._try(kinds, merged(*(variant.overrides for variant in chosen)))

    def _widen(self) -> None:
        """Derive the spec, or its closest variant, on the fewest ranks on which it fits."""
        for narrow in (self.now, *sorted(self._better(), key=_missing)[:1]):
            kinds = (*narrow.kinds, ChangeKind.RANKS)
            for axis in DATA_AXES:
                for more in ranks_overrides(narrow.spec, axis):
                    said = merged(narrow.overrides, more)
                    if _is_fitting(variant := self.derive(kinds, said)):
                        self.tried[said] = variant
                        return


def _is_fitting(variant: Variant | None) -> bool:
    return variant is not None and variant.fit.fits is True


def _rank(variant: Variant) -> tuple[float, ...]:
    """Return the sort key: fits, same ranks, not tight, step time, then fewer changes and spare
    memory."""
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
