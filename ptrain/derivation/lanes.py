"""A step's lanes: what a rank does when, and what moves beside it; of a pipeline, what every rank
does."""

from __future__ import annotations

from dataclasses import replace

from ptrain.derivation.clock_state import LaneSpan
from ptrain.derivation.estimate import Derivation, derive
from ptrain.derivation.machine import machine_of


def step_lanes(derivation: Derivation) -> tuple[LaneSpan, ...]:
    """Return the spans of a step whose time was predicted, every block by itself. Of micro-batches
    between the first and the last there is one. Raises UnknownRate where there is no time."""
    spec, facts = derivation.spec, derivation.facts
    spans: list[LaneSpan] = []
    machine = machine_of(spec, derivation.plan, facts)
    derive(spec, facts, replace(machine, plays_all=True, spans=spans))
    return tuple(spans)
