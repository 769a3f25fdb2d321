"""The notes of a prediction list traffic and memory that no theorem counts."""

from __future__ import annotations

import pytest

from ptrain.derivation.estimate import derive
from ptrain.spec.load import load

BASE = {
    "model": {"preset": "llama-tiny"},
    "mesh": {"dp_shard": 2},
    "batch": {"global": 8, "micro": 2, "sequence": 32},
}


def notes_of(placement: str, **changes: object) -> str:
    spec = load(BASE | {"placement": {"dp_shard": placement}} | changes).spec
    return "\n".join(derive(spec).exact.notes)


@pytest.mark.parametrize(
    ("placement", "changes", "words"),
    [
        ("S*,S,S,R", {"sync": {"gradients": "last"}}, "full local sum, 3.219 MB"),
        ("R,S,S,R", {"sync": {"gradients": "last"}}, "gradients are R until the last micro-batch"),
        ("R,S,S,R", {}, "r|Θ|, which Theorem 2"),
        ("R,S*,R,R", {}, "optimizer state is all-gathered over dp_shard"),
        ("R,S*,S*,R", {}, "which needs them in full, r|G|"),
        ("R,R,M,R", {"batch": {"micro": 2, "sequence": 32}}, "as soon as its gradients are"),
        ("R,O,O,R", {}, "copies between memory tiers"),
        ("S*,S@file,S,R", {}, "read from files"),
    ],
)
def test_costs_that_no_theorem_counts_are_listed(placement, changes, words):
    assert words in notes_of(placement, **changes)


def test_nothing_is_held_unsharded_where_every_micro_batch_is_reduced():
    assert "unsharded" not in notes_of("S*,S,S,R")
    assert "unsharded" not in notes_of("R,S,R,R")


def test_smaller_groups_send_their_part():
    mesh = {"mesh": {"dp_shard": 4}, "batch": {"micro": 2, "sequence": 32}}
    assert "over 2 ranks and sends 1/2 of it" in notes_of("S*,S,S,R", reshard=2, **mesh)


def test_a_spread_update_takes_a_third_unit():
    notes = derive(load("ddp-zero-redundancy").spec).exact.notes
    assert any("3 units on dp_replicate" in note and "2 units" in note for note in notes)


def test_an_optimizer_with_one_moment_per_matrix_states_its_saving():
    derivation = derive(load("muon").spec)
    words = "1 moment per element of block matrices"
    assert [words in note for note in derivation.exact.notes].count(True) == 1
    assert words not in notes_of("S*,S,S,R")
    sgd = {"optimizer": {"name": "sgd", "momentum": 0.9}}
    assert words not in notes_of("S*,S,S,R", **sgd)


def noted_on(name: str, *overrides: str) -> tuple[str, ...]:
    return derive(load(name, overrides).spec).exact.notes


def test_tensors_replicated_over_tp_are_counted_in_elements_and_bytes():
    """Two norms of 128 in each of 4 blocks and one after them; 4 + 8 + 4 bytes per element."""
    (note,) = noted_on("tp", "model={preset: llama-tiny}", "mesh={tp: 2}")
    assert note == (
        "1,152 of 804,736 parameters belong to no sharded operator and are replicated over "
        "tp: 18.43 kB of Θ, Ω and G before data-parallel sharding, of which the theorem "
        "counts one shard"
    )


ODD = "model={layers: 3, hidden: 42, heads: 3, kv_heads: 1, ffn: 101, vocab: 259}"


@pytest.mark.parametrize(
    ("ranks", "unit", "words"),
    [
        (3, "model", ""),  # 74340 elements: 3 x 17514 in blocks and 21798 around them
        (17, "model", "1 element more than in the model"),
        (13, "model", "7 elements more than in the model"),  # 13 x 5719 = 74347
        (4, "block", "8 elements more than in the model"),  # 2 each, for 17514 and 21798
    ],
)
def test_flat_units_are_padded_to_equal_shards(ranks, unit, words):
    notes = noted_on(
        "zero1", ODD, f"mesh.dp_shard={ranks}", f"unit={unit}", "batch={micro: 1, sequence: 8}"
    )
    told = [note.removeprefix("flat units are padded: ") for note in notes if "padded" in note]
    assert told == ([words] if words else [])


def test_tensors_sharded_by_rows_are_padded_to_equal_shards():
    """Each of 2 ranks has 1 row more than it needs of 2 tables of 259 rows, of 128 elements each,
    over the 804736 of the model."""
    notes = noted_on("zero3", "model={preset: llama-tiny}", "mesh={dp_shard: 2}")
    padded = 2 * 128 / 804736
    words = f"each tensor is sharded by rows, ceil(d0 / 2) on every rank: {padded:.2%} more than"
    assert [note.startswith(words) for note in notes].count(True) == 1


def test_micro_batches_repeat_traffic_that_the_paper_counts_once():
    (note,) = (note for note in noted_on("zero3", "batch={global: 16, micro: 2, sequence: 8}")
               if "the paper's step has one" in note)  # fmt: skip
    assert note == (
        "a step has 4 micro-batches, but the paper's step has one; with this `sync`, "
        "collectives per unit are: all_gather forward 4×, backward 4×, reduction of "
        "gradients 4×"
    )
