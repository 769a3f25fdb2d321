"""Comparison of a prediction with the measurement of a rank: `ptrain.compare(spec, measurement)`.

For a program every figure is compared. For a model that another framework wrapped, only the
resident bytes of parameters, optimizer state and gradients, and every collective on more than a
scalar. Activations, buffers and peaks depend on the code around the model, and frameworks differ in
their scalars (norms, losses, flags).

A wrapper may differ from its configuration: replicas instead of shards, one unit instead of blocks.
It then fails checks that name state and axis. The cause is searched among variants of the spec. A
variant is the cause if it predicts every figure to the byte. It is a partial cause if it predicts
all figures that held and at least three that differ, as many as one kind of call has.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain, combinations

from ptrain.algebra.legality import is_sound
from ptrain.axes.data.form import data_factors
from ptrain.cost import PLACED, Estimate, Footprint, Phase, State
from ptrain.derivation.estimate import derive
from ptrain.facts.model import ModelFacts
from ptrain.installed import versions
from ptrain.meters.measure import Measurement
from ptrain.report.record import Check, CheckTable, verdict_line, verdict_word
from ptrain.report.record import compare_estimates as checks_of
from ptrain.report.summary import training_summary
from ptrain.spec.dials import GradientSync, Reshard, UnitKind, UnitSize
from ptrain.spec.placement import OFFLOADED, S_STAR, Distribution, Mode, Placement, R, S, Tier
from ptrain.spec.precision import LAYOUTS
from ptrain.spec.spec import Spec, rank_groups
from ptrain.traces.facts import facts_of

_TUPLES = {
    Placement(parameters=R, optimizer=R, gradients=R): "every rank has the full model, as in ddp",
    Placement(parameters=R, optimizer=S, gradients=R): "only the optimizer state is sharded",
    Placement(parameters=R, optimizer=S, gradients=S): "optimizer state and gradients are "
    "sharded, parameters stay replicated",
    Placement(parameters=S_STAR, optimizer=S, gradients=S): "all states are sharded",
    Placement(
        parameters=Mode(Distribution.GATHERED, Tier.HOST),
        optimizer=OFFLOADED,
        gradients=OFFLOADED,
    ): "the shards are on the host, as with CPUOffloadPolicy",
}


@dataclass(frozen=True, slots=True)
class SpecVariant:
    """A variant of a spec, with the behavior of a wrapper under it and the text that selects it.

    Attributes:
        spec: The variant.
        behavior: A clause that describes the wrapper.
        words: The setting to write, for a spec.
    """

    spec: Spec
    behavior: str
    words: str


def spec_variants(spec: Spec) -> Iterator[SpecVariant]:
    """Yield legal variants of a spec whose data axes behave differently.

    Variants with one change come first, then variants with two changes of different kinds.
    """
    ways = (
        _reshard_variants,
        _sync_variants,
        _unit_variants,
        _placement_variants,
        _layout_variants,
    )
    singles = [(way, other) for way in ways for other in way(spec) if is_sound(other.spec)]
    yield from (other for _, other in singles)
    for (way, first), (second_way, second) in combinations(singles, 2):
        if way is second_way:
            continue
        for both in second_way(first.spec):
            # A change that reads differently after the first one is another change: skip it.
            if both.words == second.words and is_sound(both.spec):
                does, words = (
                    f"{first.behavior}, and {both.behavior}",
                    f"{first.words} and {both.words}",
                )
                yield SpecVariant(both.spec, does, words)


def _reshard_variants(spec: Spec) -> Iterator[SpecVariant]:
    """Yield variants that reshard all-gathered units at another time after forward."""
    degree = spec.data_degree
    ways: dict[bool | int | Reshard, str] = {
        Reshard.NON_ROOT: "the root stays unsharded from forward to backward, as with "
        "fully_shard if reshard_after_forward is not set",
        False: "units stay unsharded from forward to backward",
        True: "units, including the root, are resharded after forward",
    }
    ways |= {
        shards: f"units stay in {shards} shards from forward to backward"
        for shards in range(2, degree // 2 + 1)
        if degree % shards == 0
    }
    for value, does in ways.items():
        now = spec.sync.reshard_after_forward
        if type(value) is not type(now) or value != now:
            sync = replace(spec.sync, reshard_after_forward=value)
            yield SpecVariant(replace(spec, sync=sync), does, f"reshard: {str(value).lower()}")


def _sync_variants(spec: Spec) -> Iterator[SpecVariant]:
    """Yield variants that reduce accumulated gradients at another time."""
    if spec.batch.accumulate == 1:
        return
    for value in GradientSync:
        if value is not spec.sync.gradients:
            sync = replace(spec.sync, gradients=value)
            does = f"gradients are reduced after {value} micro-batch"
            yield SpecVariant(replace(spec, sync=sync), does, f"sync: {{gradients: {value}}}")


def _unit_variants(spec: Spec) -> Iterator[SpecVariant]:
    """Yield the variant with the full model as one unit. Other unit sizes need other facts."""
    if spec.unit_size.kind is not UnitKind.MODEL:
        other = replace(spec, unit=UnitSize(kind=UnitKind.MODEL))
        yield SpecVariant(other, "the full model is one unit", f"unit: {UnitKind.MODEL}")


def _placement_variants(spec: Spec) -> Iterator[SpecVariant]:
    """Yield variants that place the states of all data axes differently."""
    factors = data_factors(spec)
    for placement, does in _TUPLES.items():
        if all(factor.placement == placement for factor in factors):
            continue
        placed = tuple(
            factor._replace(placement=placement) if factor in factors else factor
            for factor in spec.factors
        )
        words = ", ".join(f"{factor.axis}: [{placement}]" for factor in factors)
        yield SpecVariant(replace(spec, factors=placed), does, f"placement: {{{words}}}")


def _layout_variants(spec: Spec) -> Iterator[SpecVariant]:
    """Yield variants with another precision layout."""
    for name, layout in LAYOUTS.items():
        if layout != spec.precision.layout and not spec.precision.compute_fp64:
            other = replace(spec, precision=replace(spec.precision, layout=layout))
            yield SpecVariant(
                other, f"dtypes follow the layout {name}", f"precision: {{layout: {name}}}"
            )


_OF_A_KIND = 3  # checks of one kind of call: calls, payload and bytes sent
_STATES = (State.PARAMETERS, State.OPTIMIZER, State.GRADIENTS)
_SCALARS = 64  # bytes per call, up to which a collective counts as one on scalars
Axes = tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison(CheckTable):
    """The comparison of a prediction with one rank's measurement.

    It iterates over its checks, and prints as the table at the end of a training.

    Attributes:
        predicted: The predicted figures.
        measured: The measured figures.
        checks: One check per figure.
        cause: A sentence with the cause of failed checks and the setting to write. "": unknown.
        notes: Remarks about the measurement.
    """

    predicted: Estimate
    measured: Estimate
    checks: tuple[Check, ...]
    cause: str = ""
    notes: tuple[str, ...] = ()

    @property
    def verdict(self) -> str:
        """The verdict as one line, such as `verdict: holds (14 of 14)`."""
        predicted = self.predicted
        untold, assumed = predicted.undefined, predicted.assumed
        version = versions()["torch"]
        return verdict_line(self.checks, torch=version, untold=untold, assumed=assumed)

    @property
    def holds(self) -> bool:
        """True if all checks hold."""
        return verdict_word(self.checks) == "holds"

    def __iter__(self) -> Iterator[Check]:
        return iter(self.checks)

    def __len__(self) -> int:
        return len(self.checks)

    def __repr__(self) -> str:
        held = sum(check.holds for check in self.checks)
        return f"Comparison({verdict_word(self.checks)}: {held} of {len(self.checks)})"

    def __str__(self) -> str:
        by_figure = checks_of(self.predicted, self.measured)  # without causes: printed once below
        text = training_summary(self.predicted, self.measured, by_figure, torch=versions()["torch"])
        cause = [f"cause: {self.cause}"] if self.cause else []
        return "\n".join([text, *cause, *(f"note: {note}" for note in self.notes)])


def compare(spec: Spec, measurement: Measurement, facts: ModelFacts | None = None) -> Comparison:
    """Compare the prediction of a spec with this rank's measured step.

    Args:
        spec: The spec that predicts. For a model that you wrapped yourself, the spec that it should
            match.
        measurement: The result of `ptrain.measure`.
        facts: The facts of a model that the spec does not build: `ptrain.read_facts(spec, model)`,
            read before the model is wrapped.

    Returns:
        The comparison: its checks, `holds` and `verdict`. Printed, it is the table of predicted
        and measured figures. If it fails, `cause` names a cause that explains the difference, if
        one is known.

    Raises:
        SpecError: The model does not fit the spec.

    Example:
        >>> with ptrain.measure(program) as measurement:  # doctest: +SKIP
        ...     loss = program.forward_backward(program.samples(step))
        ...     norm = program.step(lr=1e-3)
        >>> print(ptrain.compare(spec, measurement))  # doctest: +SKIP
    """
    spec = replace(spec, device=measurement.device)  # activations depend on the device's kernels
    facts = facts or facts_of(spec)
    exact = _drop_setup_traffic(derive(spec, facts).exact.of_rank(measurement.rank))
    measured = replace(measurement.estimate(), wire=())  # defined only as a mean over the ranks
    if measurement.spec is not None:
        checks = checks_of(exact, measured)
        return Comparison(predicted=exact, measured=measured, checks=checks)
    seen = select_common_figures(name_groups_by_axes(measured, spec, measurement))
    predicted = select_common_figures(exact)
    measured = _recount_masters(seen, predicted)
    checks = checks_of(predicted, measured)
    comparison = Comparison(predicted=predicted, measured=measured, checks=checks)
    if comparison.holds:
        return comparison
    return _add_cause(comparison, seen, spec, facts, measurement)


def _recount_masters(measured: Estimate, predicted: Estimate) -> Estimate:
    """Return a wrapper's figures with its parameters counted as the prediction counts them.

    FSDP2's shards are parameters of the module. A spec with Θ = M counts them as master weights,
    which are optimizer state, and has no other resident parameters.
    """
    kept = [row for row in predicted.memory if row.state is State.PARAMETERS]
    if any(row.device_bytes or row.host_bytes or row.file_bytes for row in kept):
        return measured
    rows = {row.state: row for row in measured.memory}
    shards, state = rows[State.PARAMETERS], rows[State.OPTIMIZER]
    rows[State.PARAMETERS] = Footprint(state=shards.state, rank=shards.rank, device_bytes=0)
    rows[State.OPTIMIZER] = replace(
        state,
        device_bytes=state.device_bytes + shards.device_bytes,
        host_bytes=state.host_bytes + shards.host_bytes,
        file_bytes=state.file_bytes + shards.file_bytes,
    )
    return replace(measured, memory=tuple(rows.values()))


def _drop_setup_traffic(exact: Estimate) -> Estimate:
    """Return the estimate without set-up traffic, which precedes the measured step."""
    steady = tuple(row for row in exact.traffic if row.key.phase is not Phase.SETUP)
    return replace(exact, traffic=steady)


def _add_cause(
    comparison: Comparison, seen: Estimate, spec: Spec, facts: ModelFacts, measured: Measurement
) -> Comparison:
    """Add the variant that explains the most differing figures, as the cause.

    Args:
        comparison: The comparison.
        seen: The measured figures, before master weights are recounted.
        spec: The spec.
        facts: The facts of the model.
        measured: The measurement.
    """
    differed = _failed_checks(comparison.checks)
    cause, explained = "", frozenset[str]()
    for other in spec_variants(spec):
        predicted = _predict_variant(other, facts)
        # Recounted for each variant: some have Θ = M, others do not.
        left = _failed_checks(checks_of(predicted, _recount_masters(seen, predicted)))
        names = differed - left
        # It must explain all figures, or break none and explain the three of one kind of call.
        if left and not (left < differed and len(names) >= _OF_A_KIND):
            continue
        if len(names) > len(explained):
            which = f"{len(names)} of the {len(differed)} figures that differ"
            claim = f"predicts {which if left else 'every figure'}"
            cause, explained = f"{other.behavior}; use `{other.words}`, which {claim}", names
        if not left:
            break
    checks = tuple(
        replace(check, why=cause) if check.name in explained else check
        for check in comparison.checks
    )
    return replace(comparison, checks=checks, cause=cause, notes=measured.policies)


def _failed_checks(checks: tuple[Check, ...]) -> frozenset[str]:
    """Return the names of the checks that fail."""
    return frozenset(check.name for check in checks if not check.holds)


def _predict_variant(other: SpecVariant, facts: ModelFacts) -> Estimate:
    """Return the prediction of a variant."""
    is_one = other.spec.unit_size.kind is UnitKind.MODEL
    return select_common_figures(derive(other.spec, facts.as_one_unit() if is_one else facts).exact)


def ranks_over_axes(spec: Spec, rank: int) -> dict[Axes, tuple[int, ...]]:
    """Return the group of a rank over each choice of axes.

    Args:
        spec: The spec, for its mesh.
        rank: The global rank.

    Returns:
        By choice of axes of degree 2 or more: the ranks, including `rank`, whose coordinates differ
        from it on these axes only.
    """
    axes = [factor.axis for factor in spec.factors if factor.degree > 1]
    choices = chain.from_iterable(combinations(axes, n + 1) for n in range(len(axes)))
    return {
        tuple(map(str, chosen)): next(group for group in rank_groups(spec, chosen) if rank in group)
        for chosen in choices
    }


def name_groups_by_axes(estimate: Estimate, spec: Spec, measurement: Measurement) -> Estimate:
    """Return a measurement with groups named by mesh axes.

    A group of another framework has some name. It gets the axes of the spec over which the same
    ranks form a group; other groups keep their name.

    Args:
        estimate: The measured figures.
        spec: The spec.
        measurement: The measurement, with the ranks of each group.
    """
    names = {ranks: axes for axes, ranks in ranks_over_axes(spec, measurement.rank).items()}
    renamed = {axes: names.get(ranks, axes) for axes, ranks in measurement.ranks_by_axes.items()}
    return replace(
        estimate,
        traffic=tuple(
            replace(row, key=replace(row.key, axes=renamed.get(row.key.axes, row.key.axes)))
            for row in estimate.traffic
        ),
    )


def select_common_figures(estimate: Estimate) -> Estimate:
    """Return the figures that both a program and a model of another framework have."""
    return replace(
        estimate,
        memory=tuple(row for row in estimate.memory if row.state in _STATES),
        peak=(),
        operations=(),
        traffic=tuple(
            row
            for row in estimate.traffic
            if row.key.phase is not Phase.SETUP
            and row.key.state in PLACED
            and row.payload_bytes > _SCALARS * row.calls
        ),
        accounts=(),
        account_of=(),
        undefined={kind: why for kind, why in estimate.undefined.items() if kind == "traffic"},
    )
