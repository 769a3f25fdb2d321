"""Errors of several sections are reported together, unless one error makes the meaning of another
section unknown."""

from __future__ import annotations

import random
from typing import Any

import pytest

from ptrain.errors import SpecError
from ptrain.spec.load import load

SOUND: dict[str, Any] = {
    "model": {"preset": "llama-tiny"},
    "mesh": {"dp_shard": 2},
    "placement": "zero3",
    "batch": {"global": 16, "micro": 2, "sequence": 128},
}
# By section: a value with a fault, and the place of the fault.
FAULTS: dict[str, list[tuple[Any, str]]] = {
    "model": [
        ({"preset": "llama-tinny"}, "model.preset"),
        ({"preset": "llama-tiny", "heads": 3}, "model.heads"),
        ({"pretrained": "/no/such/folder"}, "model.pretrained"),
        ({"preset": "llama-tiny", "lora_r": 8}, "model.lora_r"),
    ],
    "mesh": [({"dp_shard": "x"}, "mesh.dp_shard"), ({"dp_shard": 2, "tq": 2}, "mesh.tq")],
    "placement": [("zero4", "placement"), ({"dp_shard": "S*,S,S"}, "placement.dp_shard")],
    "batch": [
        ({"global": 16, "micro": 0, "sequence": 128}, "batch.micro"),
        ({"micro": 2, "seq": 128}, "batch.sequence"),
    ],
    "precision": [({"layout": "fp23"}, "precision.layout")],
    "optimizer": [({"lr": -1}, "optimizer.lr"), ("adamw_torch", "optimizer")],
    "train": [({"steps": 0}, "train.steps")],
    "cluster": [({"preset": "moon"}, "cluster.preset"), ({"devices": 2}, "cluster")],
    "data": [
        ({"path": "a", "corpus": "synthetic"}, "data.path"),
        ({"corpus": "web"}, "data.corpus"),
    ],
    "pipeline": [
        ({"schedule": "none.csv"}, "pipeline.schedule"),
        ({"split": "x"}, "pipeline.split"),
    ],
    "context": [({"attention": "x"}, "context.attention")],
    "routing": [("none.json", "routing")],
    "training": [({"local_batch_size": 2}, "training.local_batch_size")],
    "compile": [("head", "compile")],
    "reshard": [("often", "reshard")],
    "log": [({"trackers": "x"}, "log.trackers")],
}


@pytest.mark.parametrize("seed", range(40))
def test_no_fault_of_a_section_hides_that_of_another(seed: int) -> None:
    draws = random.Random(seed)
    sections = draws.sample([*FAULTS], 3)
    chosen = {section: draws.choice(FAULTS[section]) for section in sections}
    with pytest.raises(SpecError) as caught:
        load(SOUND | {section: value for section, (value, _) in chosen.items()})
    places = {fault.place for fault in caught.value.faults}
    assert {place for _, place in chosen.values()} <= places


def test_an_error_that_makes_a_degree_unknown_hides_dependent_errors() -> None:
    """The global batch is a multiple of the data degree, which the mesh does not give."""
    changes = {"mesh": {"dp_shard": "x"}, "batch": {"global": 15, "micro": 2, "sequence": 128}}
    with pytest.raises(SpecError) as caught:
        load(SOUND | changes)
    assert [fault.place for fault in caught.value.faults] == ["mesh.dp_shard"]
