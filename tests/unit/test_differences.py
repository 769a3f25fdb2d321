"""The differences of a step over all ranks: the first mismatch first, and one check of each
kind."""

from __future__ import annotations

import math

import torch

from ptrain.codec import decode, encode
from ptrain.report.finding import Certainty, DifferenceKind, Mismatch, Moment, RootCause, Subject
from ptrain.verification.compare import AllDifferences, Differences
from ptrain.verification.jobs.job import TOLERANCES, Ranks
from ptrain.verification.jobs.record import compare_buffers

ONE = Ranks(rank=0, size=1, device=torch.device("cpu"))
UPDATED = Moment.UPDATE, Subject.PARAMETERS
TAKEN = Moment.GRADIENTS, Subject.GRADIENTS


def step(number: int = 0) -> Differences:
    return Differences(step=number, rank=0)


def test_mismatches_are_in_the_order_of_time_and_of_the_model_and_the_loss_is_last() -> None:
    differences, own = AllDifferences(ONE, ["embed", "head"]), step()
    for kind, name in (
        ((Moment.UPDATE, Subject.LOSS), "loss"), (UPDATED, "head"), (UPDATED, "embed"),
        ((Moment.BACKWARD, Subject.ACTIVATIONS), "blocks.0"),
        ((Moment.BACKWARD, Subject.ACTIVATIONS), "blocks.1"),
    ):  # fmt: skip
        own.compare(*kind, name, difference=1.0, tolerance=0.1)
    own.modules = {"blocks.0": 0, "blocks.1": 1}
    assert differences.gather_step(own)
    names = [mismatch.name for mismatch in differences.mismatches]
    assert names == ["blocks.1", "blocks.0", "embed", "head", "loss"]
    assert [mismatch.name for mismatch in differences.first_mismatches] == ["blocks.1", "blocks.0"]


def test_a_check_has_the_largest_difference_and_the_place_of_the_first_mismatch() -> None:
    differences = AllDifferences(ONE, ["embed", "head"])
    for number, size in enumerate((0.05, 0.3)):
        own = step(number)
        own.compare(*UPDATED, "head", difference=2 * size, tolerance=0.1)
        own.compare(*UPDATED, "embed", difference=size / 2, tolerance=0.1)
        differences.gather_step(own)
    (check,) = differences.checks()
    assert (check.name, check.measured) == ("parameters after the update", 0.6)
    assert not check.holds and check.why == "differs at embed, step 1, rank 0"


def test_a_tensor_missing_on_one_side_fails_its_check() -> None:
    differences, own = AllDifferences(ONE), step()
    own.add_mismatch(
        *TAKEN, "router", "no gradient when the optimizer steps", DifferenceKind.MISSING
    )
    own.compare(*TAKEN, "embed", difference=0.0, tolerance=0.1)
    differences.gather_step(own)
    (check,) = differences.checks()
    assert (check.measured, check.tolerance, check.holds) == (math.inf, 0.1, False)
    assert check.why.endswith("(no gradient when the optimizer steps)")


def test_copies_that_differ_are_no_difference_from_one_device() -> None:
    differences, own = AllDifferences(ONE), step()
    own.compare(*UPDATED, "embed", difference=0.0, tolerance=0.1)
    assert not differences.gather_step(own)
    copy = Mismatch(
        step=0, moment=UPDATED[0], subject=UPDATED[1], name="embed", rank=0, between=(0, 1)
    )
    differences.add_mismatches([copy])
    assert differences.mismatches == [copy] and all(check.holds for check in differences.checks())


def test_counters_of_the_start_and_of_later_are_one_check_which_a_loop_leaves_out() -> None:
    differences = AllDifferences(ONE)
    for moment in (Moment.START, Moment.UPDATE):
        own = step()
        own.compare(moment, Subject.COUNTER, "embed.step", difference=0.0, tolerance=0.1)
        differences.gather_step(own)
    assert [check.name for check in differences.checks()] == ["step counter"]
    own = step()
    own.add_mismatch(Moment.START, Subject.PARAMETERS, "embed", "in the loop's model, but")
    differences.gather_step(own)
    assert [check.name for check in differences.checks()] == ["step counter", "initial parameters"]
    assert [check.name for check in differences.checks(since=Moment.BATCH)] == ["step counter"]


def test_a_root_cause_states_difference_place_fix_and_certainty_per_line() -> None:
    found = RootCause(
        state=Subject.GRADIENTS, axis="dp", factor="÷ 2", place="a", step=3, ranks=(0, 1),
        sentence="The gradients are half as large. Possible causes: the loss is divided twice; a "
        "sum is missing.",
        fix="Divide once, after optimizer.step(). Or not at all.", called_at="train.py:41",
    )  # fmt: skip
    assert str(found).splitlines() == [
        "root cause: gradients · axis dp · ÷ 2 · a · step 3 · ranks 0, 1",
        "  what differs: The gradients are half as large.",
        "  where: a, called at train.py:41; first in step 3, on ranks 0, 1",
        "  possible causes: the loss is divided twice; a sum is missing.",
        "  fix: Divide once, after optimizer.step(). Or not at all.",
        "  fits: the fix was not tried",
    ]
    assert decode(encode(found), RootCause) == found
    assert found.as_proven("divided once").certainty is Certainty.FITS  # none of several is proven


def test_a_root_cause_of_an_earlier_record_has_its_fix_in_the_text() -> None:
    found = RootCause(
        state=Subject.LOSS, axis="", factor="NaN", place="", step=0, ranks=(0,),
        sentence="It is NaN. Lower the rate.",
    )  # fmt: skip
    assert str(found.as_unexplained("a sum")).splitlines()[1:] == [
        "  what differs: It is NaN. Lower the rate.",
        "  where: first in step 0, on rank 0",
        "  not explained: ruled out: a sum",
    ]
    assert not {"called_at", "fix"} & set(encode(found))  # records stay what they were


def test_a_root_cause_states_the_result_of_its_fix_or_the_excluded_causes() -> None:
    root_cause = RootCause(
        state=Subject.LOSS, axis="", factor="× 2", place="", step=0, ranks=(0,), sentence="Halve."
    )
    assert "fits: the fix was not tried" in str(root_cause)
    assert str(root_cause.as_proven("halved it is right")).endswith("by trying: halved it is right")
    unexplained = root_cause.as_unexplained("a sum")
    assert (unexplained.certainty, unexplained.tried) == (
        Certainty.UNEXPLAINED, "ruled out: a sum"
    )  # fmt: skip


def test_infinities_in_both_buffers_are_equal_and_other_differences_count() -> None:
    mask = torch.tensor([[0.5, -math.inf], [1.0, 2.0]])
    others = {
        "same": mask.clone(),
        "one side": mask.clamp(min=-1e30),
        "beside": mask * torch.tensor([1.0, 1.1]),
    }
    own = step()
    rows = ((name, mask, other) for name, other in others.items())
    compare_buffers(own, rows, TOLERANCES[torch.float32], Moment.START)
    assert [mismatch.name for mismatch in own.mismatches] == ["one side", "beside"]
    assert math.isinf(own.mismatches[0].difference) and own.mismatches[1].difference < 0.2
