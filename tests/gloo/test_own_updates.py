"""Faults of the update in a user's loop: each is named and proven by repeating the update with the
reference's inputs, in the first step and late."""

from __future__ import annotations

from typing import Any

import pytest

from ptrain.report.finding import Certainty
from tests.gloo import update_faults
from tests.gloo.update_faults import LATE
from tests.ranks import Ranks

pytestmark = pytest.mark.gloo

# Expected: state, axis (ranks of DDP, dp of FSDP2), factor, step, ranks, and the replay.
ALL, ONE = [0, 1], [1]
NAMED = {
    "resumed": (
        "optimizer", False, "moments lost", LATE, ALL,
        "the reference's exp_avg, exp_avg_sq, step matches",
    ),
    "moments of zeros": (
        "optimizer", True, "moments lost", LATE, ONE, "reference's exp_avg matches",
    ),
    "step lost": (
        "step counter", False, f"step 0 for {LATE}", LATE, ALL,
        "the reference's step matches",
    ),
    "swapped": (
        "optimizer", False, "weight_decay 0 for 0.1", 0, ALL, "the reference's weight_decay",
    ),
    "swapped late": (
        "optimizer", False, "weight_decay 0 for 0.1", LATE, ALL, "the reference's weight_decay",
    ),
    "clip per group": (
        "gradient norm", False, "clip per group", 0, ALL, "each group clipped separately",
    ),
    "clip per group late": (
        "gradient norm", False, "clip per group", LATE, ALL, "each group clipped separately",
    ),
    "clip on one rank": (
        "gradient norm", True, "not clipped", 0, ONE, "before clipping equals",
    ),
    "clip on one rank late": (
        "gradient norm", True, "not clipped", LATE, ONE, "before clipping equals",
    ),
    "not clipped": (
        "gradient norm", False, "not clipped", 0, ALL, "before clipping equals the gradients",
    ),
    "rebuilt masters": (
        "optimizer", False, "value ", LATE, ALL, "with the reference's value",
    ),
    "other rate on one rank": (
        "learning rate", True, "× 2", 0, ONE, "the reference's lr matches the",
    ),
    "written after": (
        "parameters", True, "differs after the update", LATE, ONE, "the optimizers' own results",
    ),
}  # fmt: skip
AXES = {"ddp": "ranks", "fsdp2": "dp"}
SOUND = ("sound", "sound clipped", "sound masters")


def test_every_fault_has_a_message() -> None:
    assert {*NAMED, *SOUND} == set(update_faults.CASES)


@pytest.mark.parametrize("way", ["ddp", pytest.param("fsdp2", marks=pytest.mark.nightly)])
def test_each_fault_of_the_update_has_its_proven_message(ranks: Ranks, way: str) -> None:
    everyones = ranks.run(2, update_faults.verdicts, way, tuple(NAMED))
    assert everyones[0] == everyones[1], "the ranks tell the same"
    wrong = {}
    for name, (state, has_axis, factor, step, who, proof) in NAMED.items():
        verdict = everyones[0][name]
        root_cause: dict[str, Any] = verdict["culprit"] or {}
        expected = (state, AXES[way] if has_axis else "", step, who, Certainty.PROVEN)
        keys = ("state", "axis", "step", "ranks", "certainty")
        if (
            tuple(root_cause.get(key) for key in keys) != expected
            or not root_cause["factor"].startswith(factor)
            or proof not in root_cause["tried"]
        ):
            wrong[name] = verdict["text"]
    assert not wrong, "\n".join(wrong.values())


@pytest.mark.parametrize("way", [pytest.param("ddp", marks=pytest.mark.nightly), "fsdp2"])
def test_correct_groups_clipping_and_masters_report_no_cause(ranks: Ranks, way: str) -> None:
    verdicts = ranks.run(2, update_faults.verdicts, way, SOUND)[0]
    assert [verdicts[name]["culprit"] for name in SOUND] == [None, None, None]
    assert verdicts["sound"]["holds"], verdicts["sound"]["text"]


def test_a_norm_that_counts_copies_twice_is_named_with_the_axis(ranks: Ranks) -> None:
    root_cause = ranks.run(2, update_faults.verdicts, "ddp", ("clip by copies",))[0][
        "clip by copies"
    ]["culprit"]
    keys = ("state", "axis", "factor", "certainty")
    expected = ("gradient norm", "ranks", "counted several times", Certainty.PROVEN)
    assert tuple(root_cause[key] for key in keys) == expected, root_cause
    assert "counted 2 times" in root_cause["sentence"]


@pytest.mark.nightly
def test_an_update_that_another_rank_makes_is_repeated_there(ranks: Ranks) -> None:
    verdicts = ranks.run(2, update_faults.verdicts, "ddp", ("zero", "zero of another rate"))[0]
    assert verdicts["zero"]["holds"], verdicts["zero"]["text"]
    root_cause = verdicts["zero of another rate"]["culprit"]
    assert (root_cause["factor"], root_cause["certainty"]) == ("× 2", Certainty.PROVEN)


@pytest.mark.nightly
def test_an_update_that_a_shard_does_not_determine_is_not_explained(ranks: Ranks) -> None:
    """On full tensors it is; on shards the difference is reported without a cause."""
    names = ("by norm", "by norm of another rate")
    sharded, replicated = (
        ranks.run(2, update_faults.verdicts, way, names)[0] for way in ("fsdp2", "ddp")
    )
    assert sharded["by norm"]["holds"], sharded["by norm"]["text"]
    root_cause = sharded["by norm of another rate"]["culprit"]
    assert root_cause["certainty"] == Certainty.UNEXPLAINED
    assert root_cause["tried"].endswith("; lr differed from the reference before it")
    assert replicated["by norm of another rate"]["culprit"]["certainty"] == Certainty.PROVEN
