"""Fixes for rejected numbers of ranks, heads or tokens over cp, and the options of token slices."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ptrain.plan.composition import explain_compositions, theorem_3
from ptrain.spec.batch import PADDED, Hybrid
from ptrain.spec.placement import Axis
from ptrain.spec.spec import Spec
from tests.pure.build import GATHERED
from tests.pure.test_context_rules import RING, SHAPE, TP, ULYSSES, ZIGZAG, plan_of, refusal, spec


@pytest.mark.parametrize(
    ("attention", "sequence", "finding", "remedy"),
    [
        (RING, 30, "30 tokens cannot be split into 4 equal shards over cp=4 (ring)",
         "Use `batch.sequence=28` or `batch.sequence=32`, or one of 1, 2, 3, 5, 6, 10, 15 "
         "for `mesh.cp`"),
        (ZIGZAG, 36, "36 tokens cannot be split into 8 equal chunks, two per rank, "
         "over cp=4 (zigzag)",
         "Use `batch.sequence=32` or `batch.sequence=40`, or one of 1, 2, 3, 6, 9 for `mesh.cp`, "
         "or `context.attention=ring`"),
        (ULYSSES, 3, "3 tokens cannot be split into 4 equal shards over cp=4 (ulysses)",
         "Use `batch.sequence=4`, or one of 1, 3 for `mesh.cp`"),
        (Hybrid(ulysses=2, ring=2), 33,
         "33 tokens cannot be split into 8 equal chunks, two per rank, over cp=4 "
         "({ulysses: 2, ring: 2})", "Use `batch.sequence=32` or `batch.sequence=40`"),
    ],
    ids=str,
)  # fmt: skip
def test_an_indivisible_sequence_is_rejected_with_a_fix(attention, sequence, finding, remedy):
    refused = refusal(spec(4, attention, sequence=sequence))
    assert refused == ("batch.sequence", finding, f"{remedy}{PADDED}.")


def test_a_hybrid_of_other_ranks_is_rejected_once():
    place, finding, _ = refusal(spec(2, Hybrid(ulysses=5, ring=1), sequence=16))
    assert (place, finding) == ("context.attention", "ulysses 5 × ring 1 = 5 ranks, but cp has 2")


@pytest.mark.parametrize(
    ("ranks", "sequence", "remedy"),
    [
        (5, 240, "Use one of 1, 2, 3, 4, 6, 12 for `mesh.cp`, or `context.attention=zigzag`."),
        (5, 40, "Use one of 1, 2, 4 for `mesh.cp`, or `context.attention=zigzag`."),
        (5, 35, "Use one of 1 for `mesh.cp`, or `context.attention=ring`."),
        (5, 36, "Use one of 1, 2, 3, 4, 6, 12 for `mesh.cp`."),  # of which five chunks are none
        (8, 36, "Use one of 1, 2, 3, 4, 6, 12 for `mesh.cp`."),
    ],
)
def test_heads_that_ulysses_does_not_divide_are_rejected_once_with_a_fix(ranks, sequence, remedy):
    made = spec(ranks, ULYSSES, sequence=sequence)
    assert refusal(made) == ("mesh.cp", f"ulysses over {ranks} ranks does not divide 12 heads",
                             remedy)  # fmt: skip


def test_ulysses_divides_the_heads_that_tp_leaves():
    place, finding, remedy = refusal(
        spec(4, Hybrid(ulysses=4, ring=1), inside={Axis.TP: (2, TP)}, sequence=36)
    )
    assert place == "context.attention"
    assert finding == "ulysses over 4 ranks does not divide 6 heads per tp rank"
    assert (
        remedy
        == "Use one of {ulysses: 1, ring: 4}, {ulysses: 2, ring: 2}, or `context.attention=ring`."
    )
    one = spec(2, ULYSSES, inside={Axis.TP: (12, TP)}, model=replace(SHAPE, kv_heads=12, ffn=96))
    assert "does not divide 1 head per tp rank" in refusal(one)[1]


def test_an_indivisible_sequence_is_answered_with_degrees_that_also_divide_the_heads():
    _, _, remedy = refusal(spec(3, ULYSSES, sequence=40))
    assert remedy == (
        f"Use `batch.sequence=39` or `batch.sequence=42`, or one of 1, 2, 4 for `mesh.cp`{PADDED}."
    )


def test_the_conditions_of_theorem_3_hold_and_fail_if_samples_differ():
    made = spec(2, around={Axis.DP_SHARD: (2, GATHERED)})
    plan = plan_of(made)
    assert [condition.holds for condition in theorem_3(made, plan)] == [True] * 3
    wrong = plan.replace_steps(replace(plan.context, axis=Axis.DP_SHARD))
    assert [condition.holds for condition in theorem_3(made, wrong)] == [False, True, True]
    short = plan.replace_steps(replace(plan.context, sequence=33))
    assert [condition.holds for condition in theorem_3(made, short)] == [True, False, True]
    local = plan.replace_steps(replace(plan.wrap, axes=(Axis.DP_SHARD,)))
    assert [condition.holds for condition in theorem_3(made, local)] == [True, True, False]


def headings(made: Spec) -> list[str]:
    return [heading for heading, _ in explain_compositions(made, plan_of(made))]


def test_token_slices_are_distinguished_from_data_axes_in_products():
    of_slices = "why cp computes the same as a single device"
    assert headings(spec(2)) == [of_slices]
    assert headings(spec(2, inside={Axis.TP: (2, TP)})) == [of_slices, "why tp and cp compose"]
    three = spec(2, around={Axis.DP_SHARD: (2, GATHERED)}, inside={Axis.TP: (2, TP)})
    assert headings(three) == [of_slices, "why tp and data axes compose"]
