"""`recompute: {budget: SIZE}` chooses the policy with the least recomputation that fits."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from ptrain.cost import Column, Estimate, Peak, Phase
from ptrain.derivation.estimate import derive
from ptrain.errors import SpecError
from ptrain.selection import recompute
from ptrain.selection.recompute import ladder, resolve_auto
from ptrain.spec.activations import PLAIN
from ptrain.spec.load import load

BASE = {
    "model": {"preset": "llama-tiny", "layers": 8},
    "mesh": {"dp_shard": 2},
    "placement": {"dp_shard": ["S*", "S", "S", "R"]},
    "batch": {"global": 8, "sequence": 32},
}
OPEN = {"recompute": {"budget": "1 GiB"}}
LADDER = [
    "none",
    "selective",
    {"policy": "full", "every": 4},
    {"policy": "full", "every": 3},
    {"policy": "full", "every": 2},
    "full",
]


def resolved_policy(spec):
    """`recompute` without its budget, in a word where one is enough."""
    found = dict(spec.resolved["recompute"])
    del found["budget"]
    return found["policy"] if list(found) == ["policy"] else found


def document(**changes):
    return load(BASE | OPEN | changes)


@pytest.fixture
def peaks(monkeypatch):
    """A peak of MiB by rung of the ladder, in place of the derived one."""
    table = {}

    def fake(spec):
        size = table[str(resolved_policy(spec))] * 2**20
        peak = (Peak(phase=Phase.BACKWARD, rank=0, device_bytes=size),)
        return SimpleNamespace(exact=Estimate(column=Column.EXACT, world_size=1, peak=peak))

    monkeypatch.setattr(recompute, "derive", fake)
    monkeypatch.setattr(recompute, "is_tabulated", lambda spec: str(resolved_policy(spec)) in table)
    table |= {str(rung): 100 - 10 * number for number, rung in enumerate(LADDER)}
    return table


def test_the_ladder_goes_from_nothing_recomputed_to_everything():
    assert [resolved_policy(spec) for spec in ladder(document().spec)] == LADDER
    eager = [resolved_policy(spec) for spec in ladder(document(attention="eager").spec)]
    assert eager == [*LADDER[:2], "attention", *LADDER[2:]]


STAGES = {"mesh": {"pp": 2}, "placement": {"pp": ["S", "S", "S", "R"]}}


@pytest.mark.parametrize("changes", [{}, {"attention": "eager"}, STAGES])
@pytest.mark.parametrize("sequence", [32, 2048])
def test_no_rung_computes_less_again_than_the_one_before(changes, sequence):
    spec = document(batch={"global": 8, "sequence": sequence}, **changes).spec
    rungs = [derive(rung).exact.operations for rung in ladder(spec)]
    again = [max(row.again for row in rows) for rows in rungs]
    assert again == sorted(again)
    assert again[0] == 0 < again[-1]


def test_over_long_sequences_the_scores_cost_more_than_a_third_of_the_blocks():
    spec = document(attention="eager", batch={"global": 8, "sequence": 2048}).spec
    assert [resolved_policy(rung) for rung in ladder(spec)].index("attention") == LADDER.index(
        {"policy": "full", "every": 2}
    )


def test_every_policy_can_be_chosen_and_reloads_from_the_resolved_spec(peaks):
    tuples = {"dp_shard": ["S*", "S", "S", "M"]}
    for changes in ({}, {"activations": {"0-3": "M", "4-": "O"}}, {"placement": tuples}):
        for spec in ladder(document(**changes).spec):
            assert not spec.activations.is_open
            assert load(spec.resolved).spec == spec
            assert resolve_auto(SimpleNamespace(spec=spec, locate=None)) == spec


@pytest.mark.parametrize(("budget", "number"), [(200, 0), (100, 0), (99, 1), (79, 3), (50, 5)])
def test_the_first_that_fits_is_taken(peaks, budget, number):
    found = resolve_auto(document(recompute={"budget": f"{budget} MiB"}))
    assert resolved_policy(found) == LADDER[number]
    assert found.activations.budget == budget * 2**20
    assert (found.activations.block_modes(8) == (PLAIN,) * 8) is (number == 0)


def test_a_rung_that_is_known_by_its_trace_alone_is_left_out(peaks):
    del peaks["none"]
    assert resolved_policy(resolve_auto(document())) == "selective"


def test_blocks_that_are_not_m_stay_as_they_are(peaks):
    spec = resolve_auto(document(activations={"0-3": "M", "4-": "O"}))
    assert resolved_policy(spec) == "none"
    assert spec.resolved["activations"] == {"0-3": "R", "4-": "O"}


def test_a_number_of_blocks_that_is_written_is_kept(peaks):
    rungs = [spec.activations.every for spec in ladder(document(recompute=EVERY).spec)]
    assert rungs == [1, 5, 5]


EVERY = {"budget": "1 GiB", "every": 5}


def refusal(**changes):
    with pytest.raises(SpecError) as caught:
        resolve_auto(document(**changes))
    (fault,) = caught.value.faults
    return fault.place, fault.finding, fault.remedy


def test_a_budget_that_nothing_keeps_is_rejected_with_the_smallest_peak(peaks):
    assert refusal(recompute={"budget": "40 MiB"}) == (
        "recompute.budget",
        "40 MiB: the smallest peak that recomputation reaches is 50 MiB, with full",
        "Use a budget of 52428800 bytes or more, a smaller `batch.micro`, or `activations=O`.",
    )
    peaks["full"] = 90
    finding = refusal(recompute={"budget": "40 MiB"})[1]
    assert finding.endswith("is 60 MiB, with full for every 2 blocks")


def test_an_explicit_policy_overrides_the_budget(peaks):
    written = {"budget": "60 MiB", "policy": "selective"}
    assert refusal(activations="M", recompute=written) == (
        "recompute.budget",
        "60 MiB: the given policy, selective, has a peak of 90 MiB",
        "Use `recompute={budget: 62914560}` without a policy, or a larger budget.",
    )
    peaks["selective"] = 60
    assert (
        resolved_policy(resolve_auto(document(activations="M", recompute=written))) == "selective"
    )


def test_unknown_peaks_are_rejected_as_a_basis(peaks):
    peaks.clear()
    place, finding, remedy = refusal()
    assert place == "recompute.budget"
    assert finding.startswith("not supported yet: choosing a policy from a budget")
    assert remedy == "Use `activations=M` with `recompute=selective` or `recompute=full`."


def test_a_chosen_policy_has_the_peak_that_is_predicted():
    for spec in ladder(document().spec):
        peak = derive(spec).exact.peak_bytes()
        found = resolve_auto(document(recompute={"budget": peak}))
        assert derive(found).exact.peak_bytes() <= peak
