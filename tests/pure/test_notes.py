"""The notes of a prediction say what runs and no theorem counts."""

from __future__ import annotations

import pytest

from ptrain.derivation.estimate import derive
from ptrain.spec.load import load

BASE = {
    "model": {"preset": "llama-tiny"},
    "mesh": {"dp_shard": 2},
    "batch": {"global": 8, "micro": 2, "sequence": 32},
}


def noted(placement: str, **changes: object) -> str:
    spec = load(BASE | {"placement": {"dp_shard": placement}} | changes).spec
    return "\n".join(derive(spec).exact.notes)


@pytest.mark.parametrize(
    ("placement", "changes", "words"),
    [
        ("S*,S,S,R", {"sync": {"gradients": "last"}}, "unsharded sum of its own, 3.219 MB"),
        ("R,S,S,R", {"sync": {"gradients": "last"}}, "gradients R until the last micro-batch"),
        ("R,S,S,R", {}, "r|Θ| that Theorem 2"),
        ("R,S*,R,R", {}, "optimizer state is gathered over dp_shard"),
        ("R,S*,S*,R", {}, "they are gathered for it, r|G|"),
        ("R,R,M,R", {"batch": {"micro": 2, "sequence": 32}}, "as soon as its gradients are"),
        ("R,O,O,R", {}, "a rank copies between its tiers"),
        ("S*,S@file,S,R", {}, "read from files"),
    ],
)
def test_what_no_theorem_counts_is_said(placement, changes, words):
    assert words in noted(placement, **changes)


def test_nothing_is_held_unsharded_where_every_micro_batch_is_reduced():
    assert "unsharded" not in noted("S*,S,S,R")
    assert "unsharded" not in noted("R,S,R,R")


def test_smaller_groups_send_their_part():
    mesh = {"mesh": {"dp_shard": 4}, "batch": {"micro": 2, "sequence": 32}}
    assert "over 2 ranks and sends 1/2 of it" in noted("S*,S,S,R", reshard=2, **mesh)


def test_a_spread_update_takes_a_third_unit():
    notes = derive(load("ddp-zero-redundancy").spec).exact.notes
    assert any("3 units on dp_replicate" in note and "2 units" in note for note in notes)


def test_an_optimizer_with_one_moment_of_a_matrix_says_what_it_saves():
    derivation = derive(load("muon").spec)
    words = "1 moment of each matrix of the blocks"
    assert [words in note for note in derivation.exact.notes].count(True) == 1
    assert words not in noted("S*,S,S,R")
    sgd = {"optimizer": {"name": "sgd", "momentum": 0.9}}
    assert words not in noted("S*,S,S,R", **sgd)
