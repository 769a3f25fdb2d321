"""Of a pipeline's ranks a few stand for all where it is asked whether a spec fits: the fullest is
among them, whatever the schedule is."""

from __future__ import annotations

from itertools import product

import pytest

from ptrain.algebra.legality import is_sound
from ptrain.derivation.estimate import derive, fullest_alone
from ptrain.plan.lower import built_in_facts
from ptrain.selection.fit import fit
from ptrain.spec.load import load
from ptrain.spec.pipeline import ScheduleName
from ptrain.spec.spec import Spec

_TUPLES = ("R,S,R,R", "R,S,S,R", "S*,S,S,R")


def specs(schedule: ScheduleName) -> list[Spec]:
    """Of fourteen layers on six ranks, of whose stages not all are equal, and on eight."""
    drawn = []
    for ranks, number, placement, policy in product((6, 8), (8, 16), _TUPLES, ("every",)):
        words = (
            f"model={{preset: gpt3-125m, layers: {14 if ranks == 6 else 16}}}",
            f"mesh={{pp: {ranks}, dp_shard: 2}}",
            f"placement={{pp: [S, S, S, R], dp_shard: [{placement}]}}",
            f"pipeline.schedule={schedule}",
            f"batch={{micro: 1, accumulate: {number}, sequence: 128}}",
            f"sync={{gradients: {'last' if placement == 'R,S,R,R' else policy}}}",
            "cluster.preset=h100-1024",
        )
        drawn.append(load(None, words).spec)
    return [spec for spec in drawn if is_sound(spec)]


@pytest.mark.parametrize("schedule", ScheduleName)
def test_a_few_ranks_are_as_full_as_the_fullest_of_all(schedule: ScheduleName):
    legal = specs(schedule)
    assert legal
    for spec in legal:
        facts = built_in_facts(spec)
        assert fit(spec, fullest_alone(spec, facts)) == fit(spec, derive(spec, facts).exact)
