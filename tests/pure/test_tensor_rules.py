"""Legal tuples on tp and the models it shards; each rejection names a fix."""

from __future__ import annotations

from itertools import product

import pytest

from ptrain.algebra.legality import check, find_unsupported, require_runnable
from ptrain.axes.tensor.rules import TENSOR
from ptrain.derivation.estimate import derive
from ptrain.errors import SpecError
from ptrain.spec.job import OptimizerSpec
from ptrain.spec.load import load
from ptrain.spec.placement import MODES, Placement

ADAMW = OptimizerSpec()
SHAPE = {"layers": 2, "hidden": 96, "heads": 24, "kv_heads": 12, "ffn": 240, "vocab": 259}
STATES = ("parameters", "optimizer", "gradients", "activations")
TUPLES = [Placement(**dict(zip(STATES, modes, strict=True))) for modes in product(MODES, repeat=4)]


def spec(degree: int, **sections: object):
    mapping = {
        "model": SHAPE,
        "mesh": {"tp": degree},
        "placement": {"tp": "S,S,S,R"},
        "batch": {"global": 2, "micro": 1, "sequence": 32},
    }
    return load(mapping | sections).spec


def test_three_of_625_tuples_are_legal():
    legal = {str(each) for each in TUPLES if not list(TENSOR.broken_rules(each, ADAMW))}
    assert legal == {"S,S,S,R", "S,S,S,S", "S,S,S,S*"}


def test_the_nearest_tuple_is_legal_and_keeps_legal_modes():
    for each in TUPLES:
        nearest = TENSOR.nearest_legal(each, ADAMW)
        is_legal = not list(TENSOR.broken_rules(each, ADAMW))
        assert not list(TENSOR.broken_rules(nearest, ADAMW))
        assert (nearest == each) is is_legal
        assert str(each.activations) not in ("S", "S*") or nearest.activations == each.activations


@pytest.mark.parametrize(("degree", "fields"), [(5, ["heads", "kv_heads"]), (8, ["kv_heads"])])
def test_a_degree_that_does_not_divide_is_rejected_with_those_that_do(degree, fields):
    faults = check(spec(degree, batch={"sequence": 240}))
    found = [fault.finding for fault in faults]
    assert [name for name in SHAPE if any(f"divide {name}: " in text for text in found)] == fields
    assert {fault.remedy for fault in faults} == {"Use one of 1, 2, 3, 4, 6, 12, 24 for `mesh.tp`."}
    for choice in (2, 3, 4, 6, 12, 24):
        assert not check(spec(choice, batch={"sequence": 240}))


def test_ranks_that_share_a_key_value_head_have_equal_parts_of_it():
    one = SHAPE | {"kv_heads": 1, "hidden": 24 * 6}  # a head of 6 features
    (fault,) = check(spec(4, model=one))
    assert "tp=4 does not divide kv_heads: 1, and its ranks cannot share" in fault.finding
    assert fault.remedy == "Use one of 1, 2, 3, 6 for `mesh.tp`."
    assert not check(spec(6, model=one))


@pytest.mark.parametrize(
    ("place", "section"),
    [("tensor.plan", {"tensor": {"plan": "naive"}}), ("compile", {"compile": "block"})],
)
def test_a_naive_plan_and_compiled_blocks_need_full_key_value_heads(place, section):
    (fault,) = find_unsupported(spec(24, **section))
    assert fault.place == place
    assert "with tp=24 ranks that share 12 key-value heads" in fault.finding
    assert not find_unsupported(spec(12, **section))


def test_every_rank_has_rows_of_the_vocabulary():
    shape = {"heads": 48, "kv_heads": 48, "hidden": 192, "ffn": 48, "layers": 1}
    (fault,) = check(spec(48, model=shape | {"vocab": 280}))  # slices of 6 rows: 46 of them, 4 rows
    assert fault.finding == "tp=48 leaves ranks without a row of the vocabulary of 280"
    assert not check(spec(48, model=shape | {"vocab": 288}))


@pytest.mark.parametrize(
    ("shards", "tp", "vocab", "is_right"),
    [
        (2, 2, 259, True),
        (3, 2, 259, False),
        (4, 2, 259, True),
        (8, 2, 50257, False),
        (3, 2, 260, 1),
    ],
)
def test_shards_of_unequal_slices_have_equal_heights(shards, tp, vocab, is_right):
    sections = {
        "model": SHAPE | {"vocab": vocab},
        "mesh": {"dp_shard": shards, "tp": tp},
        "batch": {"global": shards, "micro": 1, "sequence": 32},
    }
    faults = find_unsupported(
        spec(tp, **sections, placement={"dp_shard": "S*,S,S,R", "tp": "S,S,S,R"})
    )
    assert [fault.finding[:17] for fault in faults] == ([] if is_right else ["not supported yet"])
    flat = spec(tp, **sections, placement={"dp_shard": "R,S,S,R", "tp": "S,S,S,R"})
    assert not find_unsupported(flat)


@pytest.mark.parametrize(("reshard", "is_right"), [(2, False), (4, True), (True, True)])
def test_tp_has_one_kind_of_shards(reshard, is_right):
    """torch raises NotImplementedError for DTensors in smaller shards."""
    sections = {
        "model": SHAPE | {"vocab": 264},
        "mesh": {"dp_shard": 4, "tp": 2},
        "batch": {"global": 4, "micro": 1, "sequence": 32},
        "placement": {"dp_shard": "S*,S,S,R", "tp": "S,S,S,R"},
        "sync": {"reshard_after_forward": reshard},
    }
    places = [fault.place for fault in find_unsupported(spec(2, **sections))]
    assert places == [] if is_right else ["sync.reshard_after_forward"]


def test_slices_of_the_tokens_are_equal():
    sliced = {"placement": {"tp": "S,S,S,S"}, "batch": {"sequence": 34}}
    (fault,) = check(spec(4, **sliced))
    assert fault.place == "batch.sequence" and "a multiple of 4" in fault.remedy
    assert not check(spec(2, **sliced))
    assert not check(spec(4, batch={"sequence": 34}))


def test_unequal_slices_of_the_vocabulary_are_not_gathered_yet():
    (fault,) = find_unsupported(spec(2, tensor={"loss_parallel": False}))
    assert fault.place == "tensor.loss_parallel" and "model.vocab_multiple=2" in fault.remedy
    even = {"model": SHAPE | {"vocab": 260}, "tensor": {"loss_parallel": False}}
    assert not find_unsupported(spec(2, **even))
    assert not find_unsupported(spec(2))


def test_a_fused_loss_takes_a_whole_head():
    (fault,) = check(spec(2, loss={"chunk": 8, "fused": True}))
    assert fault.place == "loss.fused" and "tp shards it" in fault.finding
    assert not check(spec(2, loss={"chunk": 8}))
    assert not check(spec(1, loss={"chunk": 8, "fused": True}))


def test_an_optimizer_that_takes_whole_matrices_is_rejected():
    (fault,) = (f for f in check(spec(2, optimizer={"name": "muon"})) if "tp shards" in f.finding)
    assert fault.place == "optimizer.name" and "adamw" in fault.remedy


def test_all_of_a_models_faults_come_at_once():
    with pytest.raises(SpecError) as caught:
        require_runnable(load("tp", ["mesh.tp=3", "placement.tp=S,S,S,S", "model.heads=4"]))
    assert {fault.place for fault in caught.value.faults} == {"mesh.tp", "batch.sequence"}


@pytest.mark.parametrize("mode", ["O", "M", "S@file", "R@host"])
def test_modes_of_the_rank_are_separate_from_modes_of_tp(mode):
    with pytest.raises(SpecError) as caught:
        require_runnable(load("tp", [f"placement.tp.activations={mode}"]))
    (fault,) = caught.value.faults
    assert "at the top level, `activations=M`" in fault.finding
    assert fault.remedy == "Use `placement.tp=S,S,S,R`."
    require_runnable(load("tp", [f"activations={mode}"]))


def test_totals_count_one_rank_s_account_where_slices_are_unequal():
    placed = {"dp_shard": "R,S,R,R", "tp": "S,S,S,R"}
    sections = {"mesh": {"dp_shard": 2, "tp": 2}, "placement": placed}
    uneven = derive(spec(2, **sections)).exact
    even = derive(spec(2, **sections, model=SHAPE | {"vocab": 260})).exact
    assert len(uneven.traffic) > len({row.key for row in uneven.traffic})
    assert 0 <= even.sent_bytes() - uneven.sent_bytes() < 0.01 * even.sent_bytes()
