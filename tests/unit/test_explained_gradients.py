"""What is said of gradients that are a multiple, and of a loss that weighs samples otherwise."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from ptrain.report.finding import Certainty, Mismatch, Moment, RootCause, Subject
from ptrain.verification.jobs.evidence import RankGradients, sample_gradients
from ptrain.verification.jobs.gradients import explain_gradients
from ptrain.verification.jobs.job import TOLERANCES, Axes, Ranks
from ptrain.verification.jobs.shards import find_shards

LIMIT = TOLERANCES[torch.float64]


def _explain_gradient(factor: float, *axes: str, given: Sequence[Tensor] = ()) -> RootCause:
    """Return what is said of a gradient that is a multiple, on axes of two ranks each; `given`:
    what each micro-batch gives by itself, whose sum the loop takes."""
    truth = torch.randn(12, dtype=torch.float64)
    taken = sum(given, torch.zeros(())) if given else truth * factor
    truth = taken / factor
    return _explained_of(truth, taken, *axes, given=given)


def _explained_of(
    truth: Tensor, taken: Tensor, *axes: str, given: Sequence[Tensor] = ()
) -> RootCause:
    model = nn.Linear(4, 3, bias=False).double()
    own = RankGradients(
        holds=find_shards(model, dict(model.named_parameters())), truths={"weight": truth},
        taken={"weight": taken}, given=[{"weight": row} for row in given], before={},
        micro_batches=len(given),
    )  # fmt: skip
    degrees: Axes = dict.fromkeys(axes, ((0, 1),))
    ranks = Ranks(rank=0, size=1, device=torch.device("cpu"), axes=degrees)
    mismatch = Mismatch(
        step=0, moment=Moment.GRADIENTS, subject=Subject.GRADIENTS, name="weight", rank=0,
        difference=1.0,
    )  # fmt: skip
    return explain_gradients(
        [mismatch], sample_gradients(ranks, own), ranks, LIMIT, lambda its, fix: ""
    )


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_of_two_axes_with_the_same_degree_neither_is_named(factor: float) -> None:
    said = _explain_gradient(factor, "dp", "tp")
    assert (said.axis, said.certainty) == ("", Certainty.FITS)
    assert f"{factor:.4g} times the reference. Possible causes: " in said.sentence
    assert "dp (2)" in said.sentence
    assert "tp (2)" in said.sentence


def test_a_factor_that_no_degree_explains_has_possible_causes_only() -> None:
    said = _explain_gradient(0.37, "dp")
    assert said.certainty is Certainty.FITS
    assert "0.37 times the reference. Possible causes: " in said.sentence


def test_a_loss_that_the_micro_batches_do_not_divide_is_the_only_cause() -> None:
    given = [torch.randn(12, dtype=torch.float64) for _ in range(3)]
    said = _explain_gradient(3.0, "dp", given=given)
    assert (said.state, said.certainty) == (Subject.LOSS, Certainty.PROVEN)
    assert said.factor == "× 3 (micro-batches)"
    assert "not divided by the micro-batches (3) in the loss." in said.sentence


def test_a_factor_between_powers_of_several_degrees_names_none() -> None:
    said = _explain_gradient(2 / 3, "dp", given=list(torch.randn(3, 12).double()))
    assert (said.axis, said.certainty) == ("", Certainty.FITS)
    assert "Possible causes: another scale of the loss." in said.sentence


def test_only_the_fixes_that_were_tried_are_ruled_out() -> None:
    truth = torch.randn(12, dtype=torch.float64)
    said = _explained_of(truth, truth.flip(0))
    assert said.certainty is Certainty.UNEXPLAINED
    assert "divided by" not in said.tried
