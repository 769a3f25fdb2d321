"""The resident memory that a program declares, read without a meter."""

from __future__ import annotations

from ptrain.cost import State
from ptrain.meters.memory import MeteredProgram
from ptrain.models.ledger import storage_of, tier_of
from ptrain.spec.placement import Tier


def resident(program: MeteredProgram) -> dict[State, dict[Tier, int]]:
    """Return bytes by state and tier of the unique storages that the program declares; a storage
    counts once, for the first state that names it."""
    seen: set[int] = set()
    sizes = {state: dict.fromkeys(Tier, 0) for state in State}
    for state, tensor in program.storages():
        storage = storage_of(tensor)
        if storage._cdata not in seen:
            seen.add(storage._cdata)
            sizes[state][tier_of(storage)] += storage.nbytes()
    return sizes
