"""Rules evaluated once for many specs give the result of each single spec."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ptrain.algebra.legality import is_sound
from ptrain.axes.data.candidates import is_left_out
from ptrain.selection.job import searched_job
from ptrain.selection.space import (
    THROUGH,
    WITHIN,
    Legality,
    Memo,
    OpenSpec,
    Through,
    data_choices,
    pipelines,
)
from ptrain.spec.dials import Overlap, UnitKind, UnitSize
from ptrain.spec.spec import Spec

BASE = searched_job("llama3-70b", ["batch.global=64"], cluster="h100-64", devices=64).scored
WAYS = [(), *((choice,) for choice in WITHIN[0].choices(BASE, 2, Legality(BASE, BASE).written))]


@pytest.mark.parametrize("through", Through)
@pytest.mark.parametrize("many", [True, False])
@pytest.mark.parametrize("within", WAYS[:2], ids=["alone", "beside tp"])
def test_choices_of_data_axes_are_legal_if_each_spec_is(through, many, within):
    legality = Legality(BASE, BASE)
    for choices in data_choices(BASE).values():
        legal = {id(c) for c in legality.data(choices, within, through, many=many)}
        assert legal == {id(c) for c in choices if _is_legal(legality, c, within, through, many)}


def _is_legal(legality, choice, within, through, many) -> bool:
    number = 4 if many else 1
    spec = legality._tall((THROUGH[through], choice, *within), number, legality._even)
    return is_sound(spec) and not is_left_out(spec, legality.written)


def test_a_schedule_is_legal_with_the_micro_batches_of_each_spec():
    legality, answers = Legality(BASE, BASE), set()
    for _, choices in pipelines(BASE, 64):
        for choice in choices:
            for number in (1, 2, 3, 8, 64):
                other = Legality(BASE, BASE)  # which has nothing from another number
                answer = legality.pipeline(choice, number)
                assert answer == other.pipeline(choice, number)
                answers.add(answer)
    assert answers == {True, False}


def test_a_rule_that_reads_an_open_field_is_evaluated_per_value():
    batch = replace(BASE.batch, micro=1, accumulate=64, global_samples=64)
    opened = OpenSpec.with_open_fields(BASE.with_fields(batch=batch), ("batch.accumulate",))
    assert opened.is_sound(batch=batch)
    assert not opened.is_sound(batch=replace(batch, accumulate=63))
    assert opened.rules is not None and len(opened.rules) < 10


def test_a_rejection_by_another_rule_applies_to_all_choices():
    uneven = BASE.with_fields(model=replace(BASE.model, heads=7))
    opened = OpenSpec.with_open_fields(uneven, ("overlap",))
    assert opened.rules is None
    assert not opened.is_sound(overlap=None)


def test_a_claim_is_checked_once_for_specs_that_agree_on_its_fields():
    asked: list[Spec] = []

    def claim(spec: Spec) -> bool:
        """Of what is gathered block by block nobody asks how it overlaps."""
        asked.append(spec)
        return spec.unit == UnitSize() or spec.overlap is None

    memo, two = Memo(claim, ("unit", "overlap")), UnitSize(kind=UnitKind.BLOCKS, count=2)
    one = UnitSize()
    backward = Overlap.BACKWARD
    values = [
        {"unit": unit, "overlap": overlap} for unit in (one, two) for overlap in (None, backward)
    ]
    for _ in range(2):
        assert [memo.holds_of(BASE, of_spec) for of_spec in values] == [True, True, True, False]
    assert len(asked) == 3  # of one block whatever the overlap is
