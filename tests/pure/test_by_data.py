"""Data-dependent sizes are bounds: derived from traces at several extents and checked as bounds. A
fit is claimed for the upper bound, a misfit for the lower one."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from ptrain.algebra.legality import require_runnable
from ptrain.cost import Column, Estimate, Footprint, Peak, Phase, State, Traffic
from ptrain.derivation.estimate import derive
from ptrain.errors import DoesNotFit, SpecError
from ptrain.facts.model import ModelFacts
from ptrain.facts.parameters import facts as facts_of_shape
from ptrain.report.predict import Prediction, prediction_screen
from ptrain.report.record import Check, compare_estimates, result_record, verdict_line
from ptrain.report.recorded import decode_record
from ptrain.report.summary import training_summary
from ptrain.report.sweep import pair_screen
from ptrain.selection.fit import fit
from ptrain.selection.preflight import require_fit
from ptrain.spec.load import load
from ptrain.spec.spec import Spec
from ptrain.train.heading import preflight_lines
from tests.pure.build import setting
from tests.timelines import model_timeline

WHO = "h.0.moe and 1 more module select by data (nonzero)"
SPEC = require_runnable(load("zero3", ["model={preset: llama-tiny}"]))


def facts_with_extents(spec: Spec = SPEC, *, extents: tuple[int, ...] = (3, 1)) -> ModelFacts:
    """Return facts of a model of the spec's shape whose micro-batch has the given `extents`."""
    sizes = setting(spec.model, spec.precision.effective_layout.parameters)
    known = facts_of_shape(spec.model, spec.batch.sequence, spec.unit)
    first, *others = (
        replace(known, timeline=model_timeline(replace(sizes, batch=2, sequence=16 * extent)))
        for extent in extents
    )
    return replace(first, by_data=WHO, others=tuple(others))


EXACT = derive(SPEC, facts_with_extents()).exact
LEAST = derive(SPEC, facts_with_extents(extents=(1,))).exact
MOST = derive(SPEC, facts_with_extents(extents=(3,))).exact


def row_of(exact: Estimate, state: State) -> Footprint:
    return next(row for row in exact.memory if row.state is state and row.rank == 0)


def peak_of(exact: Estimate, phase: Phase) -> Peak:
    return next(row for row in exact.peak if row.phase is phase and row.rank == 0)


def with_memory(size: int) -> Spec:
    assert SPEC.cluster is not None
    return replace(SPEC, cluster=replace(SPEC.cluster, device_memory=size, reserve=0))


def test_activations_and_peaks_lie_between_the_extents():
    activations = row_of(EXACT, State.ACTIVATIONS)
    assert activations.lower_bytes == row_of(LEAST, State.ACTIVATIONS).device_bytes
    assert activations.device_bytes == row_of(MOST, State.ACTIVATIONS).device_bytes
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        bounds = peak_of(EXACT, phase)
        assert bounds.lower_bytes == peak_of(LEAST, phase).device_bytes < bounds.device_bytes
        assert bounds.device_bytes == peak_of(MOST, phase).device_bytes
    assert set(EXACT.by_data) == {"activations", "peak"}
    assert EXACT.by_data["peak"].startswith(WHO)


def test_the_order_of_the_extents_does_not_matter():
    turned = derive(SPEC, facts_with_extents(extents=(1, 2, 3))).exact
    exact = derive(SPEC, facts_with_extents()).exact  # EXACT is of the torch that is installed
    assert list(turned.memory) == list(exact.memory) and list(turned.peak) == list(exact.peak)


@pytest.mark.parametrize("state", [State.PARAMETERS, State.OPTIMIZER, State.GRADIENTS, State.OTHER])
def test_data_independent_figures_stay_exact(state):
    assert row_of(EXACT, state) == row_of(MOST, state)
    assert row_of(EXACT, state).lower_bytes is None
    assert EXACT.traffic == MOST.traffic == LEAST.traffic
    assert peak_of(EXACT, Phase.UPDATE).lower_bytes is None


def test_data_dependent_offloading_is_not_predicted():
    facts = facts_with_extents()
    (other,) = facts.others
    assert other.timeline is not None
    moved = replace(other, timeline=other.timeline._replace(moved=(("host", 64),)))
    exact = derive(SPEC, replace(facts, others=(moved,))).exact
    assert {"activations", "peak", "traffic"} <= set(exact.undefined)
    assert not exact.peak and not exact.by_data
    assert not any(row.state is State.ACTIVATIONS for row in exact.memory)
    assert any(row.state is State.PARAMETERS for row in exact.memory)


def test_experts_without_a_gradient_are_rejected_where_data_ranks_sum_gradients():
    facts = replace(facts_with_extents(), unvisited=("h.0.moe.1.weight", "h.0.moe.1.bias"))
    with pytest.raises(SpecError) as error:
        derive(SPEC, facts)
    assert "h.0.moe.1.weight and 1 parameter more have no gradient" in str(error.value)
    assert "Call every expert" in str(error.value)


def check_of(size: int) -> Check:
    """Return the check of forward's peak for a measured number of bytes."""
    peaks = tuple(
        replace(row, device_bytes=size if row.phase is Phase.FORWARD else row.device_bytes)
        for row in EXACT.peak
    )
    measured = replace(EXACT, column=Column.MEASURED, peak=peaks, memory=tuple(EXACT.memory))
    return next(c for c in compare_estimates(EXACT, measured) if c.name == "peak forward rank 0")


def test_a_figure_holds_within_its_bounds_and_its_check_names_both():
    bounds = peak_of(EXACT, Phase.FORWARD)
    lower, upper = bounds.lower_bytes, bounds.device_bytes
    assert lower is not None
    for size in (lower, (lower + upper) // 2, upper):
        check = check_of(size)
        assert check.holds and (check.lower, check.predicted) == (lower, upper)
        assert f"within the bounds {lower} and {upper}" in check.why
        assert "depends on data" in check.why
    for size in (lower * 9 // 10, upper * 11 // 10):
        assert not check_of(size).holds and "outside the bounds" in check_of(size).why


def test_activations_hold_to_the_byte_at_both_bounds():
    row = row_of(EXACT, State.ACTIVATIONS)
    assert row.lower_bytes is not None
    for size, holds in (
        (row.lower_bytes - 1, False),
        (row.lower_bytes, True),
        (row.device_bytes, True),
        (row.device_bytes + 1, False),
    ):
        rows = tuple(replace(r, device_bytes=size) if r == row else r for r in EXACT.memory)
        checks = compare_estimates(EXACT, replace(EXACT, memory=rows))
        assert next(c for c in checks if c.name == "memory activations rank 0").holds is holds


def test_the_record_adds_bounds_where_there_are_any_and_is_read_back():
    measured = replace(EXACT, column=Column.MEASURED)
    checks = compare_estimates(EXACT, measured)
    plain = json.loads(json.dumps(result_record("routed", (EXACT, measured), checks=checks)))
    bounded = [row for row in plain["memory"] if "lower_bytes" in row]
    assert bounded and all(row["state"] == "activations" for row in bounded)
    assert all(row["upper_bytes"] == row["device_bytes"] for row in bounded)
    assert plain["by_data"]["exact"]["peak"].startswith(WHO)
    assert {"lower" in check for check in plain["checks"]} == {True, False}
    back = decode_record(plain)
    assert list(back.estimates[Column.EXACT].memory) == list(EXACT.memory)
    assert back.estimates[Column.EXACT].by_data == EXACT.by_data
    assert back.checks == checks


def test_a_fit_is_claimed_on_the_upper_bound_and_a_misfit_on_the_lower_one():
    lower, upper = EXACT.lower_peak_bytes(), EXACT.peak_bytes()
    assert lower is not None and upper is not None and lower < upper
    assert fit(with_memory(upper), EXACT).fits is True
    between = fit(with_memory(upper - 1), EXACT)
    assert between.fits is None and between.is_open and between.unknown.startswith(WHO)
    assert fit(with_memory(lower), EXACT).fits is None
    assert fit(with_memory(lower - 1), EXACT).fits is False
    require_fit(with_memory(lower), EXACT, facts_with_extents())
    with pytest.raises(DoesNotFit, match="does not fit by 1 B or more: the predicted peak is at"):
        require_fit(with_memory(lower - 1), EXACT, facts_with_extents())


def prediction(spec: Spec) -> Prediction:
    derivation = derive(spec, facts := facts_with_extents())
    return Prediction(label="routed", spec=spec, derivation=derivation, num_parameters=facts.numel)


def test_every_page_states_that_sizes_depend_on_data():
    lower, upper = EXACT.lower_peak_bytes(), EXACT.peak_bytes()
    assert lower is not None and upper is not None
    text = prediction_screen(prediction(with_memory(upper + 10**6)))
    assert " … " in next(line for line in text.splitlines() if line.startswith("activations"))
    assert "976.6 KiB to spare or more" in text
    assert f"sizes depend on data: {WHO}" in text
    assert "Unknown whether it fits: " in prediction_screen(prediction(with_memory(upper - 1)))
    assert "upper bounds: routed: sizes depend on data" in pair_screen(
        prediction(SPEC), prediction(SPEC)
    )
    first, *others = preflight_lines(SPEC, EXACT)
    assert " … " in first and f"sizes depend on data: {WHO}" in others[0]
    measured = replace(EXACT, column=Column.MEASURED)
    ended = training_summary(EXACT, measured, compare_estimates(EXACT, measured), torch="2.13.0")
    assert "within" in ended and "are bounds: sizes depend on data" in ended
    assert "bounds" not in verdict_line(compare_estimates(MOST, MOST), torch="2.13.0")


def test_traffic_has_no_bounds():
    assert all(isinstance(row, Traffic) for row in EXACT.traffic)
    assert not any(
        check.lower for check in compare_estimates(EXACT, EXACT) if "traffic" in check.name
    )
