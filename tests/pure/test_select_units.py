"""What `ptrain select` gathers and reduces together: buckets of blocks, blocks and models."""

from __future__ import annotations

import pytest

from ptrain.algebra.legality import check, find_unsupported, is_sound
from ptrain.derivation.estimate import derive
from ptrain.report.selection import describe_settings
from ptrain.selection.choose import Chooser, neighbours
from ptrain.selection.job import searched_job, words_of
from ptrain.selection.ranking import Ranked
from ptrain.selection.space import data_choices
from ptrain.selection.where import unit_of
from ptrain.spec.dials import Overlap, UnitSize
from ptrain.spec.load import load
from ptrain.spec.placement import Axis
from ptrain.spec.spec import Spec
from tests.pure.searches import without_known

_SPREAD = "placement.dp_shard=R,S,R,R"


def chooser(*where: str, model: str = "gpt3-125m", count: int = 100) -> Chooser:
    """One on four devices; a block of this model has 11 MB of gradients, and two are a bucket."""
    words = "batch.sequence=1024", "batch.global=8", "precision.layout=bf16", "model.ffn=2048"
    where = ("tp==1", "cp==1", "micro==2", "recompute=none", *where)
    job = searched_job(model, words, cluster="h100-8", devices=4, where=where)
    return Chooser(job, count=count)


def specs_of(chooser: Chooser) -> list[Spec]:
    """Return the scored candidates and those that one step of the descent reaches."""
    search, base = chooser.search, chooser.job.base
    best = [scored.candidate for scored in search.run(chooser.job.where).best]
    around = (other for candidate in best[:4] for other in neighbours(search, candidate))
    specs = [candidate.spec(base) for candidate in (*best, *around)]
    return [spec for spec in specs if is_sound(spec)]


def test_blocks_that_join_are_tried_in_a_bucket_one_by_one_and_all_at_once():
    units = {*map(unit_of, specs_of(chooser("pp==1", _SPREAD)))}
    assert units == {"bucket", "block", "2 blocks", "sub-block", "model"}


def test_a_block_is_written_only_where_blocks_would_join_without():
    specs = [spec for spec in specs_of(chooser(_SPREAD)) if spec.unit == UnitSize()]
    assert specs
    assert {unit_of(spec.with_fields(unit=None)) for spec in specs} == {"bucket"}


@pytest.mark.parametrize("unit", ["block", "bucket", "model"])
def test_a_constraint_of_the_unit_is_obeyed_by_no_other_units(unit: str):
    assert {*map(unit_of, specs_of(chooser(f"unit={unit}")))} == {unit}


def test_ddp_does_not_reduce_by_block():
    whole = "placement.dp_replicate=R,R,R,R", "pp==1", "dp_shard==1"
    assert not specs_of(chooser(*whole, "unit=block"))
    assert specs_of(chooser(*whole, "unit=bucket"))


@pytest.fixture(scope="module")
def ranked_units() -> list[Ranked]:
    """The best of those with a whole model and its optimizer's state in shards, by unit."""
    by_unit = (chooser("pp==1", _SPREAD, f"unit={unit}", count=2) for unit in _UNITS)
    return [row for search in by_unit for row in without_known(search.choose).ranking]


_UNITS = ("bucket", "block", "model")


def test_a_winning_unit_equals_the_prediction_of_its_overrides(ranked_units: list[Ranked]):
    for row in ranked_units:
        source, *overrides = words_of(chooser().job, row.spec)
        loaded = load(source, overrides).spec
        exact = derive(loaded).exact
        assert not (check(loaded) or find_unsupported(loaded))
        assert exact.step is not None
        assert (exact.peak_bytes(), exact.step.seconds) == (row.peak_bytes, row.seconds)
        assert (loaded.unit is None) == (unit_of(loaded) == "bucket")


def test_a_row_shows_its_unit(ranked_units: list[Ranked]):
    said = {
        unit
        for unit in _UNITS
        for row in ranked_units
        if f" unit {unit} " in describe_settings(row.spec)
    }
    assert said == {*_UNITS}


def test_estimates_of_units_are_close_to_exact_predictions(ranked_units: list[Ranked]):
    for row in ranked_units:
        assert row.closed.peak == pytest.approx(row.peak_bytes, rel=0.03)
        assert row.closed.seconds == pytest.approx(row.seconds, rel=0.15)


def test_an_overlap_that_is_written_leaves_prefetching_to_be_tried():
    words = "batch.sequence=1024", "batch.global=8", "overlap=backward"
    where = ["dp_shard=4", "placement.dp_shard=M,S,S,R", "micro=1", "recompute=none"]
    searched = Chooser(
        searched_job("gpt3-125m", words, cluster="h100-8", devices=4, where=where), count=1
    )
    best = next(searched.search.run(searched.job.where).best).candidate
    specs = [other.spec(searched.job.base) for other in neighbours(searched.search, best)]
    assert {spec.overlap for spec in specs} == {Overlap.BACKWARD}
    assert len({spec.prefetch for spec in specs}) > 1


def test_overlap_without_prefetching_is_tried_for_it_takes_the_memory_of_none_and_less_time():
    words = ["model.preset=llama3-70b", "cluster.preset=h100-64", "mesh.dp_shard=64"]
    words += ["batch={global: 64, micro: 1, sequence: 8192}", "loss=chunked", "unit=sub-block"]
    words += ["activations=M", "recompute=full"]
    dials = (["overlap=none"], ["overlap=backward", "prefetch=0"], ["prefetch=1"])
    none, without, ahead = (derive(load("zero3", [*words, *said]).spec).exact for said in dials)
    assert none.peak_bytes() == without.peak_bytes() < ahead.peak_bytes()
    assert without.step.seconds < 0.996 * none.step.seconds
    offered = data_choices(load("zero3", words).spec)[(Axis.DP_SHARD,)]
    changes = [dict(choice.changes) for choice in offered]
    assert any((c["overlap"], c["prefetch"]) == (Overlap.BACKWARD, 0) for c in changes)


def test_a_larger_bucket_is_estimated_to_be_sent_in_fewer_calls():
    where = "pp==1", "placement.dp_replicate=R,R,R,R", "dp_shard==1"
    searched = chooser(*where, model="gpt3-6.7b")  # not bound by its host
    best = next(searched.search.run(searched.job.where).best).candidate
    larger = [
        other
        for other in neighbours(searched.search, best)
        if other.spec(searched.job.base).bucket_bytes > searched.job.base.bucket_bytes
    ]
    seconds = [searched.search.score(other).seconds for other in (best, *larger)]
    assert len(larger) == 2 and len({*seconds}) > 1
