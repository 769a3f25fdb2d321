"""Random specs of the full grammar, predicted with a clock."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ptrain.algebra.legality import require_runnable
from ptrain.cost import Estimate
from ptrain.derivation.estimate import derive
from ptrain.derivation.machine import Machine
from ptrain.derivation.work import model_work, why_unknown
from ptrain.spec.load import load
from tests.pure.hand_made_paces import HandPace

EVERY = 12  # of 300
PACE = HandPace(operation=1e-12, byte=1e-9, sent=1e-7, copied=1e-9, element=1e-9, clipped=1e-9)


@pytest.fixture(scope="module")
def written_specs(benchmark_module):
    frozen = benchmark_module("snapshot").frozen()["drawn"]
    return [row["written"] for row in frozen.values()][::EVERY]


def bytes_of(estimate: Estimate) -> tuple[object, ...]:
    return [*estimate.memory], [*estimate.peak], estimate.traffic, estimate.accounts


def test_a_clock_changes_no_byte_and_counts_repeated_blocks(written_specs):
    timed = 0
    for words in written_specs:
        spec = require_runnable(load(dict(words)))
        known = derive(spec)
        plan, facts = known.plan, known.facts
        if why_unknown(spec, plan, facts):
            continue
        for overlaps in (True, False):
            machine = Machine(
                pace=replace(PACE, overlaps=overlaps),
                work=lambda index, spec=spec, plan=plan, facts=facts: model_work(
                    spec, plan, facts, index
                ),
            )
            exact = derive(spec, facts, machine).exact
            assert bytes_of(exact) == bytes_of(known.exact), words
            if exact.step is None:
                continue
            whole = derive(spec, facts, machine._replace(plays_all=True)).exact.step
            assert exact.step.seconds == pytest.approx(whole.seconds), words
            timed += 1
    assert timed > 25
