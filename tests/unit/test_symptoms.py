"""Explanations of a gradient as a sum over ranks and samples, and mismatches that no fix
excuses."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from ptrain.report.finding import Mismatch, Moment, RootCause, Subject
from ptrain.verification.jobs.evidence import (
    Contributions,
    Fix,
    JobEvidence,
    RankGradients,
    Sample,
    fit_contributions,
)
from ptrain.verification.jobs.gradients import GradientCase
from ptrain.verification.jobs.job import Ranks
from ptrain.verification.parts import LeastSquares


class Alone(Ranks):
    """Ranks of which all others have what this one has."""

    def gather(self, value: Any, kind: Any = Any) -> list[Any]:
        return [value] * self.size


PAIR = Alone(rank=0, size=2, device=torch.device("cpu"), axes={"dp": ((0, 1),)})
DRAWN = torch.randn(2, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
DRAWN_4 = torch.randn(4, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


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


def _explain_parameter(sample: Sample, ranks: Ranks = PAIR) -> list[tuple[RootCause, Fix | None]]:
    """Return the hypotheses about one parameter."""
    own = RankGradients(holds={}, truths={}, taken={}, given=[], before={}, micro_batches=1)
    mismatch = Mismatch(
        step=0, moment=Moment.GRADIENTS, subject=Subject.GRADIENTS, name="w", rank=0
    )
    evidence = JobEvidence(samples={"w": sample}, own=own, micro_batches=1)
    case = GradientCase([mismatch], evidence, ranks, 1e-6, ["w"])
    return list(case.hypotheses())


def test_shards_that_were_cut_and_not_summed_lack_no_micro_batch_of_one_rank() -> None:
    assert not _explain_parameter(_sample(_cut(DRAWN)))
    assert not _explain_parameter(_sample(_cut(DRAWN.sum(0).expand(2, -1))))


def test_a_rank_that_is_missing_everywhere_is_no_reduction_that_is_missing() -> None:
    ((said, _),) = _explain_parameter(_sample(_cut(DRAWN[:1].expand(2, -1))))
    assert (said.factor, said.ranks) == ("rank 1 missing", (1,))


def test_ranks_sum_over_each_axis_and_over_several_together() -> None:
    axes = {"dp": ((0, 2), (1, 3)), "cp": ((0, 1), (2, 3))}
    ranks = Ranks(rank=0, size=4, device=torch.device("cpu"), axes=axes)
    assert ranks.sum_groups == axes | {"dp+cp": ((0, 1, 2, 3),)}
    assert ranks.separating_axis([2, 3]) == "dp"
    assert ranks.separating_axis([1, 3]) == "cp"
    assert ranks.separating_axis(range(4)) == ""


def test_partial_sums_over_two_axes_are_named_by_both() -> None:
    axes = {"dp": ((0, 2), (1, 3)), "cp": ((0, 1), (2, 3))}
    ranks = Alone(rank=0, size=4, device=torch.device("cpu"), axes=axes)
    truth = DRAWN_4.sum(0)
    sample = Sample(
        truth=truth, before=torch.zeros_like(truth), gradients=DRAWN_4, basis=DRAWN_4[:, :0, None]
    )
    ((said, fix),) = _explain_parameter(sample, ranks)
    assert said.factor == "missing all-reduce over dp and cp"
    assert fix is not None and torch.allclose(fix.apply("w", sample, 3), truth)


def test_the_previous_gradient_is_recognized_alone_and_added() -> None:
    earlier = DRAWN_4[0]
    for factor, gradient in (("stale", earlier), ("previous step added", DRAWN.sum(0) + earlier)):
        sample = Sample(
            truth=DRAWN.sum(0), before=earlier, gradients=gradient.expand(2, -1),
            basis=DRAWN[:, :0, None],
        )  # fmt: skip
        ((said, fix),) = _explain_parameter(sample)
        assert said.factor.startswith(factor)
        assert fix is not None and torch.allclose(fix.apply("w", sample, 0), sample.truth)


def test_a_gradient_that_is_there_and_wrong_is_not_excused_by_one_that_is_missing() -> None:
    missing, wrong = _sample(torch.zeros_like(DRAWN)), _sample(DRAWN)
    ((_, fix),) = _explain_parameter(missing)
    assert fix is not None
    for rank in (0, 1):
        assert torch.equal(fix.apply("w", missing, rank), missing.truth)
        assert not torch.equal(fix.apply("w", wrong, rank), wrong.truth)


def _of_few_elements() -> Sample:
    """Twice the mean of six micro-batches on two ranks, of which each holds eight elements: too few
    to tell them apart there."""
    basis = torch.randn(2, 3, 16, dtype=torch.float64)
    truth = basis.mean((0, 1))
    return Sample(
        truth=truth, before=torch.zeros_like(truth), basis=basis,
        gradients=_cut(2 * truth.expand(2, -1)),
    )  # fmt: skip


def test_a_multiple_of_ranks_with_few_elements_has_several_possible_causes() -> None:
    said, _ = _explain_parameter(_of_few_elements())[0]
    assert "2 times the reference. Possible causes: " in said.sentence


def test_a_rank_with_few_elements_keeps_its_gradient() -> None:
    sample = _of_few_elements()
    its = fit_contributions(sample)
    assert its is not None and not its.of_loop
    for row in (its.add_residual(sample, 1), its.reweight(sample, 1)):
        assert torch.equal(row[8:], sample.gradients[1][8:])


@pytest.mark.parametrize(
    ("losses", "actual", "factor"),
    [
        ([1.0, 3.0], (0.25, 0.5), 1.25),
        ([1.0, -1.0], (0.25, 0.5), None),
        ([1.0, 3.0], (0.25, 0.0), None),
    ],
)
def test_a_loss_without_a_sum_or_a_weight_has_no_factor(
    losses: list[float], actual: tuple[float, float], factor: float | None
) -> None:
    right, own = LeastSquares((0.5, 0.5), 0.0), LeastSquares(actual, 0.0)
    its = Contributions(((0, 0), (0, 1)), right, {0: own}, {0: (0, 1)})
    assert its.loss_factor(0, losses) == factor


def test_a_small_part_of_the_gradient_is_no_stale_one() -> None:
    """Within what 16 bits leave of sums a tenth of it would be nothing."""
    truth, earlier = DRAWN.sum(0), DRAWN_4[0]
    own = RankGradients(holds={}, truths={}, taken={}, given=[], before={}, micro_batches=1)
    mismatch = Mismatch(
        step=1, moment=Moment.GRADIENTS, subject=Subject.GRADIENTS, name="w", rank=0
    )
    for part, factor in ((0.0, "stale by 1 step"), (0.09, "previous step added")):
        sample = Sample(
            truth=truth, before=earlier, gradients=(part * truth + earlier).expand(2, -1),
            basis=DRAWN[:, :0, None],
        )  # fmt: skip
        evidence = JobEvidence(samples={"w": sample}, own=own, micro_batches=1)
        case = GradientCase([mismatch], evidence, PAIR, 0.1, ["w"])
        assert factor in [said.factor for said, _ in case.hypotheses()]
