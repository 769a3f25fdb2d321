"""Copies that differ: the rank, the axis, and the first call in which ranks differ."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ptrain.report import copies
from ptrain.report.copies import Call, Replica, axes_between, find_equal_generators
from ptrain.report.finding import DifferenceKind, Mismatch, Moment, Subject

# dp_replicate 2 x tp 2, row-major
GRID = {rank: {"dp_replicate": rank // 2, "tp": rank % 2} for rank in range(4)}


def copy(
    digest: str,
    name: str = "w",
    *,
    part: str = "",
    kind: str = "float32[4]",
    subject: Subject = Subject.PARAMETERS,
    moment: Moment = Moment.UPDATE,
) -> Replica:
    return Replica(moment, subject, name, part, kind, digest)


def find_differences(*tables: list[Replica]) -> list[tuple[str, int, DifferenceKind, str]]:
    return [(d.name, d.rank, d.way, d.told) for d in copies.find_differing_replicas(tables, step=3)]


def test_ranks_that_agree_depart_from_nothing():
    assert not find_differences([copy("a")], [copy("a")])


def test_a_tensor_of_one_rank_is_not_a_copy():
    assert not find_differences([copy("a", part="tp=0")], [copy("b", part="tp=1")])


def test_the_rank_that_differs_from_the_most_is_named():
    assert find_differences([copy("a")], [copy("b")], [copy("a")]) == [
        ("w", 1, DifferenceKind.VALUE, "")
    ]


def test_both_of_two_differing_copies_are_named():
    assert [rank for _, rank, _, _ in find_differences([copy("a")], [copy("b")])] == [0, 1]


def test_the_differing_part_of_a_tensor_is_named():
    tables = [[copy("a", part="[0:8]")]] * 2 + [[copy("b", part="[0:8]")]]
    assert find_differences(*tables) == [("w", 2, DifferenceKind.VALUE, "[0:8]")]


def test_a_different_dtype_is_reported_before_a_different_value():
    other = copy("b", kind="bfloat16[4]")
    assert find_differences([copy("a")], [copy("a")], [other]) == [
        ("w", 2, DifferenceKind.DTYPE, "bfloat16 for float32")
    ]


def test_a_different_shape_is_reported():
    other = copy("b", kind="float32[5]")
    (mismatch,) = find_differences([copy("a")], [copy("a")], [other])
    assert mismatch[2:] == (DifferenceKind.SHAPE, "float32[5] for float32[4]")


def test_numbers_are_reported_as_words():
    def counter(value: str) -> list[Replica]:
        return [copy(value, "w.step", kind="", subject=Subject.COUNTER)]

    assert find_differences(counter("8"), counter("7"), counter("8")) == [
        ("w.step", 1, DifferenceKind.VALUE, "7 for 8")
    ]


def test_the_earliest_difference_is_reported_first():
    update, gradient = copy("a", "u"), copy("a", "g", moment=Moment.GRADIENTS)
    odd = [copy("b", "u"), copy("b", "g", moment=Moment.GRADIENTS)]
    names = [name for name, *_ in find_differences([update, gradient], [update, gradient], odd)]
    assert names == ["g", "u"]


@pytest.mark.parametrize(
    ("odd", "ranks", "axes"),
    [
        ((1,), (0, 1), "tp"),
        ((2,), (0, 2), "dp_replicate"),
        ((3,), (0, 1, 2, 3), "tp+dp_replicate"),  # its neighbours along both have something else
        ((2, 3), (0, 1, 2, 3), "dp_replicate"),  # they agree along tp, or differ on their own
        ((0, 1), (0, 1), "tp"),  # nobody is right
        ((0, 3), (0, 3), "dp_replicate+tp"),  # no rank differs from another along one alone
    ],
)
def test_the_axis_is_the_one_along_which_a_neighbour_differs(odd, ranks, axes):
    assert sorted(axes_between(odd, ranks, GRID).split("+")) == sorted(axes.split("+"))


def test_the_root_cause_is_the_first_thing_on_all_its_ranks():
    good, bad = [copy("a", "v"), copy("a")], [copy("b", "v"), copy("b")]
    mismatches = [*copies.find_differing_replicas([good, good, bad, bad, good], step=3)]
    root_cause = copies.explain_replica_mismatches(
        mismatches, GRID | {4: {"dp_replicate": 2, "tp": 0}}, last_good=2
    )
    assert root_cause is not None
    assert (root_cause.state, root_cause.place, root_cause.ranks) == (
        Subject.PARAMETERS,
        "v",
        (2, 3),
    )
    assert root_cause.axis == "dp_replicate"
    assert root_cause.factor == copies.DIFFERS
    assert "all agreed after step 2" in root_cause.sentence
    assert copies.explain_replica_mismatches([], GRID) is None


def test_random_state_at_different_places_must_differ():
    places = [("dp=0", "x"), ("dp=0", "x"), ("dp=1", "y"), None]
    assert not [*find_equal_generators(places, Moment.UPDATE, 3)]
    (mismatch,) = find_equal_generators([("dp=0", "x"), ("dp=1", "x")], Moment.UPDATE, 3)
    assert (mismatch.rank, mismatch.between, mismatch.told) == (1, (0, 1), copies.SHARED)
    root_cause = copies.explain_replica_mismatches([mismatch], {0: {"dp": 0}, 1: {"dp": 1}})
    assert root_cause is not None
    assert (root_cause.axis, root_cause.factor) == ("dp", copies.SHARED)


def test_a_rank_that_differs_from_itself_involves_no_axis():
    alone = [
        Mismatch(
            step=3,
            moment=Moment.UPDATE,
            subject=Subject.PARAMETERS,
            name="w",
            rank=rank,
            between=(rank,),
            told="differs from the bfloat16 cast of its float32 master copy",
        )
        for rank in (0, 1)
    ]
    root_cause = copies.explain_replica_mismatches(alone, GRID)
    assert root_cause is not None
    assert (root_cause.axis, root_cause.factor, root_cause.ranks) == ("", alone[0].told, (0, 1))


SUM = Call(operator="all_reduce", reduces="SUM", dtype="float32", numel=8, carries="gradients a")


def first(*ledgers: list[Call]) -> list[tuple[int, int, DifferenceKind, str]]:
    mismatches = copies.find_differing_calls("dp", dict(enumerate(ledgers)), 3)
    return [(d.index, d.rank, d.way, d.told) for d in mismatches]


def changed_call(**fields: object) -> Call:
    return replace(SUM, **fields)


def test_ranks_that_call_the_same_depart_from_nothing():
    assert not first([SUM, SUM], [SUM, SUM])
    assert copies.explain_call_mismatches([]) is None


@pytest.mark.parametrize(
    ("call", "way", "told"),
    [
        (changed_call(reduces="MAX"), DifferenceKind.VALUE, "MAX for SUM"),
        (
            changed_call(operator="all_gather", reduces=""),
            DifferenceKind.VALUE,
            "all_gather for all_reduce",
        ),
        (changed_call(dtype="int32"), DifferenceKind.DTYPE, "int32 for float32"),
        (changed_call(numel=9), DifferenceKind.SHAPE, "9 elements for 8 elements"),
        (changed_call(carries="gradients b"), DifferenceKind.VALUE, "gradients b for gradients a"),
        (changed_call(when="update"), DifferenceKind.VALUE, "update for nothing known"),
        (changed_call(result="f00"), DifferenceKind.VALUE, copies.ANOTHER_RESULT),
    ],
)
def test_the_first_differing_call_is_named_with_its_difference(call, way, told):
    assert first([SUM, SUM], [SUM, call], [SUM, SUM]) == [(1, 1, way, told)]


def test_a_call_that_a_rank_leaves_out_is_named():
    assert first([SUM, SUM], [SUM], [SUM, SUM]) == [(1, 1, DifferenceKind.MISSING, "is not called")]
    assert first([SUM], [SUM], [SUM, SUM]) == [
        (1, 2, DifferenceKind.MISSING, "is called here alone")
    ]


def test_who_leaves_a_call_out_is_named_where_as_many_have_it():
    ledger = [changed_call(carries=name) for name in "abc"]
    without = [ledger[0], ledger[2]]
    assert first(ledger, without) == [(1, 1, DifferenceKind.MISSING, "is not called")]
    assert first(without, ledger, ledger, without) == [
        (1, 0, DifferenceKind.MISSING, "is not called"),
        (1, 3, DifferenceKind.MISSING, "is not called"),
    ]


def test_the_root_cause_of_calls_names_operator_place_axis_and_ranks():
    ledgers = {0: [SUM], 4: [SUM], 8: [changed_call(reduces="MAX")]}
    root_cause = copies.explain_call_mismatches(
        [*copies.find_differing_calls("dp_shard", ledgers, 3)]
    )
    assert root_cause is not None
    assert (root_cause.axis, root_cause.factor, root_cause.ranks) == (
        "dp_shard",
        "MAX for SUM",
        (8,),
    )
    assert root_cause.place == "all_reduce #0 over dp_shard (gradients a)"
    assert "ranks 0, 4 agree" in root_cause.sentence
