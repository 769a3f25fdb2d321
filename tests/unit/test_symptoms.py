"""What all ranks' samples of a gradient tell of it, and what a fix may not excuse."""

from __future__ import annotations

import math

import torch

from ptrain.verification.jobs.evidence import Sample
from ptrain.verification.jobs.job import Ranks
from ptrain.verification.jobs.symptoms import Fix, Symptom, SymptomKind, symptom

PAIR = Ranks(rank=0, size=2, device=torch.device("cpu"), axes={"dp": ((0, 1),)})
DRAWN = torch.randn(2, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def _cut(rows: torch.Tensor) -> torch.Tensor:
    """Each rank's half of its row [2, 16]; it holds nothing of the other."""
    halves = torch.full_like(rows, math.nan)
    halves[0, :8], halves[1, 8:] = rows[0, :8], rows[1, 8:]
    return halves


def _sample(gradients: torch.Tensor) -> Sample:
    truth = DRAWN.sum(0)
    return Sample(
        truth=truth, before=torch.zeros_like(truth), gradients=gradients, basis=DRAWN[:, None]
    )


def test_shards_that_were_cut_and_not_summed_lack_the_reduction_of_their_axis() -> None:
    local = symptom(_sample(_cut(DRAWN)), PAIR, 1e-6)
    assert (local.kind, local.axis) == (SymptomKind.LOCAL, "dp")
    reduced = symptom(_sample(_cut(DRAWN.sum(0).expand(2, -1))), PAIR, 1e-6)
    assert reduced.kind is SymptomKind.RIGHT


def test_a_rank_that_is_missing_everywhere_is_no_reduction_that_is_missing() -> None:
    lacking = symptom(_sample(_cut(DRAWN[:1].expand(2, -1))), PAIR, 1e-6)
    assert (lacking.kind, lacking.ranks) == (SymptomKind.SOME, (1,))


def test_ranks_sum_over_each_axis_and_over_several_together() -> None:
    axes = {"dp": ((0, 2), (1, 3)), "cp": ((0, 1), (2, 3))}
    ranks = Ranks(rank=0, size=4, device=torch.device("cpu"), axes=axes)
    assert ranks.summed == axes | {"dp+cp": ((0, 1, 2, 3),)}
    assert ranks.parting([2, 3]) == "dp"
    assert ranks.parting([1, 3]) == "cp"
    assert ranks.parting(range(4)) == ""


def test_parts_of_a_sum_over_two_axes_are_told_by_both() -> None:
    axes = {"dp": ((0, 2), (1, 3)), "cp": ((0, 1), (2, 3))}
    ranks = Ranks(rank=0, size=4, device=torch.device("cpu"), axes=axes)
    parts = torch.randn(4, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    truth = parts.sum(0)
    sample = Sample(
        truth=truth, before=torch.zeros_like(truth), gradients=parts, basis=parts[:, :0, None]
    )
    partial = symptom(sample, ranks, 1e-6)
    assert (partial.kind, partial.axis) == (SymptomKind.PARTIAL, "dp+cp")


def test_a_gradient_that_is_there_and_wrong_is_not_excused_by_one_that_is_missing() -> None:
    fix = Fix(symptom=Symptom(SymptomKind.EMPTY, ranks=(0, 1)), names={"missing", "wrong"})
    missing, wrong = _sample(torch.zeros_like(DRAWN)), _sample(DRAWN)
    for rank in (0, 1):
        assert torch.equal(fix.of("missing", missing, rank, PAIR), missing.truth)
        assert not torch.equal(fix.of("wrong", wrong, rank, PAIR), wrong.truth)
