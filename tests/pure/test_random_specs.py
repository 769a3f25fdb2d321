"""Random specs of the declared grammar: every key and kind of value can be drawn, draws are legal
and depend only on the seed."""

from __future__ import annotations

from random import Random

import pytest

from ptrain.selection.recompute import resolve_auto
from ptrain.spec.leaf import Leaf, Text
from ptrain.spec.load import load
from tests.adversary import key_values as keys
from tests.adversary.coverage import Coverage
from tests.adversary.random_specs import random_spec

SEEDS = range(12)


def test_every_key_of_the_grammar_is_drawn_or_left_out_with_a_reason():
    declared = dict(keys.declared_keys())
    drawn, left_out = set(keys.values()), set(keys.LEFT_OUT)
    assert not left_out - set(declared) and not drawn & left_out
    executed = {
        place
        for place, holds in declared.items()
        if isinstance(holds, Leaf) and holds.supported != ()
    }
    assert executed - drawn == left_out, "new keys need texts or limits in key_values"


def test_limits_and_texts_are_of_keys_that_there_are():
    assert set(keys.LIMITS) <= set(keys.values())
    places = {place for place in keys.texts() if not place.startswith("^")}
    assert places <= set(keys.values())


def test_every_kind_of_value_is_one_that_its_key_takes():
    declared = dict(keys.declared_keys())
    for place, kinds in keys.values().items():
        for kind in kinds:
            value = kind.draw(Random(0))
            assert kind.holds(value), f"{place}={kind.label}"
            if isinstance(holds := declared[place], Leaf):
                holds.check(value)


def test_a_text_key_without_known_values_is_named():
    with pytest.raises(LookupError, match=r"new\.key: any text will do"):
        [*keys.kinds_of_key("new.key", Text("what is new"))]


@pytest.mark.parametrize("seed", SEEDS)
def test_random_specs_are_legal_and_depend_only_on_the_seed(seed):
    draw = random_spec(seed)
    spec = resolve_auto(load(dict(draw.written)))
    assert draw.ranks[0] == 0 and draw.ranks[-1] == spec.world_size - 1
    assert draw == random_spec(seed)


def test_pairs_are_counted_of_values_of_different_keys_whatever_form_a_tuple_has():
    coverage = Coverage()
    coverage.add(
        {
            "model": {"preset": "llama-tiny"},
            "mesh": {"dp_shard": 2},
            "placement": {"dp_shard": "S*,S,S,R"},
            "batch": {"sequence": 1},
        }
    )
    assert coverage.specs["placement.dp_shard.parameters=S*"] == 1
    assert coverage.specs["batch.sequence=low"] == 1
    assert coverage.pairs["batch.sequence=low", "placement.dp_shard.parameters=S*"] == 1
    assert "batch.sequence=high" in coverage.missing()
    assert coverage.lines()[0].startswith("keys: 7 of ")


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_a_few_hundred_draws_have_every_key():
    coverage = Coverage()
    for seed in range(300):
        coverage.add(random_spec(seed).written)
    places = {label.partition("=")[0] for label in coverage.specs}
    assert places == set(keys.values())
