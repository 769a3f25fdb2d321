"""Jobs without a known step time: their ranking, and the note about it."""

from __future__ import annotations

import pytest

from ptrain.report.selection import as_record, selection_text
from ptrain.selection.choose import Chooser
from ptrain.selection.job import searched_job
from tests.pure.searches import without_known


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["loss=fused"], "torch's fused loss is one operator"),
        (["cluster.rates=null"], "has no rates"),
    ],
)
def test_a_job_without_a_time_is_ranked_by_known_figures_with_a_reason(words, why):
    where = ["pp=1", "tp=1", "micro=1", "dp_shard=8", "unit=block"]
    job = searched_job("llama3-8b", ["batch.global=64", *words], cluster="h100-8", where=where)
    ranking = without_known(Chooser(job, count=5).choose)
    assert ranking.ranking and all(row.seconds is None for row in ranking.ranking)
    assert why in ranking.unknown and f"time is unknown: {ranking.unknown}" in selection_text(
        ranking
    )
    keys = [(row.closed.seconds, row.tiers.copied, row.peak_bytes) for row in ranking.ranking]
    assert keys == sorted(keys)
    assert all(row["time_unknown"] for row in as_record(ranking)["ranking"])
