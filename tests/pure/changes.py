"""A small sound spec, and what becomes of it when sections are changed or left out."""

from __future__ import annotations

import pytest

from ptrain.errors import Fault, SpecError
from ptrain.spec.load import load
from ptrain.spec.spec import Spec

BASE = {
    "model": {"preset": "llama-tiny"},
    "mesh": {"dp_shard": 2},
    "placement": {"dp_shard": "S*,S,S,R"},
    "batch": {"global": 16, "micro": 2, "sequence": 32},
}


def load_changed(**changes: object) -> Spec:
    return load(BASE | changes).spec


def faults(*on_top: str, **changes: object) -> dict[str, Fault]:
    """By place; a section that is None is left out."""
    with pytest.raises(SpecError) as caught:
        load({key: value for key, value in (BASE | changes).items() if value is not None}, on_top)
    return {fault.place: fault for fault in caught.value.faults}
