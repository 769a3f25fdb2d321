"""The bounds of a search apply to exact predictions, from which its estimates may differ."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ptrain.derivation.estimate import derive
from ptrain.selection.choose import Chooser
from ptrain.selection.deriver import played_as
from ptrain.selection.job import searched_job
from ptrain.selection.ranking import SLACK
from ptrain.selection.search import may_hold
from ptrain.selection.where import parse
from tests.pure.searches import chooser, without_known


def test_a_memory_bound_applies_to_the_exact_peak():
    """With a bound at the peak of the best, nothing slower wins; below it, all rows are below."""
    words = "pp==2", "tp==2", "micro==1", "recompute==full", "cluster.reserve=0"
    best = without_known(chooser(*words, count=4).choose).ranking[0]
    at_it = without_known(chooser(*words, f"memory<={best.peak_bytes}", count=4).choose)
    under = chooser(*words, f"memory<={best.peak_bytes - 1}", count=4)
    below = without_known(under.choose)
    # Four candidates are derived, and a bound leaves other four: a faster one may be among them.
    assert at_it.ranking[0].nominal_seconds <= best.nominal_seconds
    assert at_it.ranking[0].peak_bytes <= best.peak_bytes
    assert below.ranking
    assert all(row.peak_bytes < best.peak_bytes for row in below.ranking)


@pytest.mark.parametrize("kept", ["none", "selective", "full"])
def test_blocks_that_are_sharded_over_a_node_are_estimated_though_a_head_is_larger_than_a_few(kept):
    """With tp=8 the head of one or two layers sets the peak, and blocks that of the 80 layers."""
    where = [f"recompute=={kept}", "tp==8", "pp==1", "micro==2", "dp_shard==8"]
    job = searched_job("llama3-70b", [], cluster="h100-64", where=where)
    search = Chooser(job).search
    placements = search.run(job.where).placements
    scored = [block.scored(row) for row in placements for *_, block, _ in row.best]
    assert scored
    for row in scored[::40]:
        exact = derive(row.candidate.spec(job.base)).exact
        most = max(entry.device_bytes for entry in exact.peak)
        assert most / SLACK <= row.peak <= most * SLACK


def test_the_margin_of_estimates_is_decided_by_exact_predictions():
    below = parse("memory<=100")
    assert [may_hold(below, figure, 1.05) for figure in (98.0, 104.0, 106.0)] == [True, True, False]
    assert may_hold(parse("memory>=100"), 98.0, 1.05) and may_hold(parse("time!=98"), 98.0, 1.05)


def test_a_shared_prediction_holds_for_each_candidate():
    """With one micro-batch, the time of gradient reductions changes no figure."""
    searched = chooser("batch.global=8", "micro==1", "pp==1", "tp==1", "gradients==last", count=1)
    base = searched.job.base
    pairs = [
        (candidate.spec(base), played_as(candidate, candidate.spec(base)).spec(base))
        for block in searched.search.blocks()
        for candidate in (block.scored(row).candidate for row in block.rows[::8])
    ]
    pairs = [(spec, other) for spec, other in pairs if spec != other]
    assert pairs
    for spec, other in pairs:
        mine, its = (derive(every).exact for every in (spec, other))
        assert (tuple(mine.memory), tuple(mine.peak)) == (tuple(its.memory), tuple(its.peak))
        assert (mine.traffic, mine.step) == (its.traffic, its.step)


def test_of_one_micro_batch_it_is_nothing_to_the_estimate_when_gradients_are_reduced():
    searched = chooser("batch.global=8", "micro==1", "pp==1", "tp==1", "recompute==full")
    compared = 0
    for block in searched.search.blocks():
        figures: dict[object, set[tuple[float, float]]] = {}
        for scored in map(block.scored, block.rows):
            alike = played_as(scored.candidate, scored.candidate.spec(searched.job.base))
            figures.setdefault(repr(alike), set()).add((scored.peak, scored.seconds))
            compared += 1
        assert all(len(of_one) == 1 for of_one in figures.values())
        assert len(figures) < compared


def test_a_spec_with_other_fields_is_the_one_that_replace_makes():
    base = chooser().job.base
    batch = replace(base.batch, micro=2)
    assert base.with_fields(batch=batch, cluster=None) == replace(base, batch=batch, cluster=None)
    assert base.batch != batch and base.cluster is not None
    with pytest.raises(AssertionError, match="fields of a spec"):
        base.with_fields(batches=batch)
