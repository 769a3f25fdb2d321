"""The estimates of `ptrain select` for hosts slower than their devices."""

from __future__ import annotations

import pytest

from ptrain.cost import Spent
from ptrain.derivation.machine import Machine, machine_of
from ptrain.facts.model import ModelFacts
from ptrain.selection.choose import Chooser
from ptrain.selection.job import searched_job
from ptrain.selection.ranking import Ranked
from ptrain.spec.cluster import Hook
from ptrain.spec.placement import Axis
from ptrain.spec.spec import Spec
from ptrain.steps.step import Plan
from tests.pure.hand_made_paces import HandPace
from tests.pure.searches import machine
from tests.pure.test_select import correlation, scored_sample

# Microseconds, as a host of GPUs takes them.
_HOOKS = {
    Hook.FORWARD_OPERATOR: 8,
    Hook.BACKWARD_OPERATOR: 7,
    Hook.HALVES_OPERATOR: 11,
    Hook.RECOMPUTED_OPERATOR: 9,
    Hook.SELECTED_OPERATOR: 20,
    Hook.MOVED_OPERATOR: 15,
    Hook.CUT_PRODUCT: 60,
    Hook.FSDP2_GATHER: 300,
    Hook.FSDP2_REDUCE: 250,
    Hook.DDP_BUCKET: 100,
    Hook.FLAT_GATHER: 120,
    Hook.FLAT_REDUCE: 140,
    Hook.PIPELINE_PASS: 300,
}


class IssuedPace:
    """A cluster's pace, whose hosts take so many times the microseconds above."""

    def __init__(self, pace: object, times: float) -> None:
        self._pace, self._times = pace, times

    def __getattr__(self, name: str) -> object:
        return getattr(self._pace, name)

    def hook_seconds(self, hook: Hook) -> float:
        return self._times * 1e-6 * _HOOKS[hook]


def chooser(*where: str, times: float) -> Chooser:
    """One for a small model on eight devices."""

    def issued(spec: Spec, plan: Plan, facts: ModelFacts) -> Machine:
        known = machine_of(spec, plan, facts)
        return known._replace(pace=IssuedPace(known.pace, times))

    words = ("batch.sequence=1024", "batch.global=16")
    job = searched_job("gpt3-125m", words, cluster="h100-8", devices=8, where=where)
    return Chooser(job, machine=issued)


def rows_of(chooser: Chooser, number: int) -> list[Ranked]:
    return [row for row in map(chooser.exactly, scored_sample(chooser.search, 5, number)) if row]


@pytest.mark.parametrize("times", [2, pytest.param(20, marks=pytest.mark.nightly)])
def test_estimates_have_the_order_of_exact_predictions_with_slow_hosts(times: float):
    rows = [row for row in rows_of(chooser("cp==1", times=times), 40) if row.step]
    closed, exact = ([row.closed.seconds for row in rows], [row.seconds or 0.0 for row in rows])
    late = sum(row.step.seconds_in(Spent.LAUNCHES) > 0 for row in rows if row.step)
    assert len(rows) > 20 and late > len(rows) // 2
    assert correlation(closed, exact) > 0.98
    assert all(0.75 * its < mine < 1.25 * its for mine, its in zip(closed, exact, strict=True))


def test_fast_hosts_change_nothing():
    quick, none = chooser("pp<=2", times=1e-6), chooser("pp<=2", times=0)
    assert quick.search.links.is_issued and not none.search.links.is_issued
    for block, other in zip(quick.search.blocks(), none.search.blocks(), strict=True):
        mine, its = ([of.step(row) for row in of.rows] for of in (block, other))
        assert mine == its


def test_a_host_bound_step_takes_the_launch_time_of_its_passes():
    """Eight samples a rank, one by one: 32 layers of an operator in each pass, and one behind."""
    job = searched_job(
        "llama3-8b",
        ["batch.global=64", "precision.layout=bf16"],
        cluster="h100-8",
        where=["dp_replicate=8", "recompute=full", "micro=1"],
    )
    hooks = {
        Hook.RECOMPUTED_OPERATOR: 1000.0,
        Hook.FORWARD_OPERATOR: 10.0,
        Hook.BACKWARD_OPERATOR: 20.0,
    }
    hand = Chooser(job, machine=lambda spec, *_: machine(spec, pace=HandPace(hooks=hooks)))
    best = hand.search.run(job.where).best
    plain = [c for c in best if c.candidate.data.degree(Axis.DP_REPLICATE) == 8]
    assert plain and {c.seconds for c in plain} == {8 * (32 * 2 * 1000 + 30)}
