"""The replay of two flat units in a runtime that records its calls."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from ptrain.cost import Phase, State
from ptrain.derivation.flat import Flat
from ptrain.derivation.tape import Scene, Tape
from ptrain.plan.lower import lower
from ptrain.runtime.ghost import Ghost, GhostRuntime, Storage
from ptrain.runtime.interface import Axes, PendingResult
from ptrain.spec.dials import ReduceScatterVia
from ptrain.spec.placement import Tier
from ptrain.spec.spec import Spec
from ptrain.steps.step import Plan
from ptrain.steps.wraps import FlatUnits
from ptrain.timeline import Timeline
from tests.pure.build import make_facts
from tests.pure.test_flat_replay import BLOCK

FACTS = make_facts(BLOCK, ((7, 2), (1, 4)))
FORWARD, BACKWARD, UPDATE = Phase.FORWARD, Phase.BACKWARD, Phase.UPDATE


class Written(GhostRuntime):
    """A runtime that records its calls in `events` of its reader."""

    @property
    def _events(self) -> list[str]:
        events: list[str] = self.reader.events  # type: ignore[attr-defined]
        return events

    def all_gather(self, shard: Ghost, into: Ghost, axes: Axes, *, is_awaited: bool) -> None:
        self._events.append(f"gather {_phase_name(is_awaited)}")
        super().all_gather(shard, into, axes, is_awaited=is_awaited)

    def reduce_scatter(
        self, whole: Ghost, into: Ghost, axes: Axes, via: ReduceScatterVia, *, is_awaited: bool
    ) -> PendingResult[Ghost]:
        self._events.append(f"reduce-scatter {_phase_name(is_awaited)}")
        return super().reduce_scatter(whole, into, axes, via, is_awaited=is_awaited)

    def all_reduce(self, tensor: Ghost, axes: Axes, *, is_awaited: bool) -> PendingResult[Ghost]:
        self._events.append(f"all-reduce {_phase_name(is_awaited)}")
        return super().all_reduce(tensor, axes, is_awaited=is_awaited)

    def fill_zeros(self, tensor: Ghost) -> None:
        self._events.append(f"clear {tensor.nbytes} from {tensor.start}")

    def add(self, tensor: Ghost, part: Ghost) -> None:
        super().add(tensor, part)
        self._events.append(f"add {part.nbytes} on {tensor.tier}")

    def prefetch(self, tensor: Ghost) -> None:
        self._events.append(f"ahead {tensor.nbytes} on {tensor.tier}")


def _phase_name(is_awaited: bool) -> str:
    return "awaited" if is_awaited else "begun"


class Pages(Tape):
    """A tape with the recorded calls by phase."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[str] = []


def write_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """Temporarily replay in recording runtimes; every allocation is recorded."""
    monkeypatch.setattr("ptrain.derivation.flat.GhostRuntime", Written)
    make = Storage.__init__

    def noted(
        storage: Storage, size: int, tier: Tier, state: State | None, name: str, reader: Any
    ) -> None:
        reader.events.append(f"{size} on {tier} as {state}" + f" of {name}" * bool(name))
        make(storage, size, tier, state, name, reader)

    monkeypatch.setattr(Storage, "__init__", noted)


def open_replay(spec: Spec, **dials: object) -> tuple[Pages, Flat]:
    """Open a step without overlap, unless the options request it."""
    plan = lower(spec, FACTS)
    assert isinstance(plan.wrap, FlatUnits)
    plan = plan.replace_steps(replace(plan.wrap, **{"overlaps": False, **dials}))
    return opened_plan(spec, plan)


def opened_plan(spec: Spec, plan: Plan) -> tuple[Pages, Flat]:
    assert isinstance(plan.wrap, FlatUnits)
    pages, nothing = Pages(), Timeline(forward=(), backward=())
    scene = Scene(tape=pages, spec=spec, facts=FACTS, plan=plan, timeline=nothing)
    return pages, Flat(scene, plan.wrap)


def step(pages: Pages, flat: Flat) -> Iterator[tuple[Phase, list[str]]]:
    """Replay one step and return its calls by phase."""
    num = flat.scene.plan.accumulate.micro_batches
    pages.events = []
    for index in range(num):
        flat.begin(is_first=index == 0, is_last=index == num - 1)
        for unit in range(len(FACTS.units)):
            flat.enter(unit)
            flat.leave(unit)
        yield FORWARD, pages.events
        pages.events = []
        for unit in reversed(range(len(FACTS.units))):
            flat.before_backward(unit)
        flat.end()
        yield BACKWARD, pages.events
        pages.events = []
    flat.reduce()
    yield BACKWARD, pages.events
    pages.events = []
    flat.update(0)
    flat.finish_update()
    yield UPDATE, pages.events
    pages.events = []


def record_step_calls(spec: Spec, **dials: object) -> list[list[str]]:
    """Of a steady step: each forward and backward pass, the reduction, the update."""
    pages, flat = open_replay(spec, **dials)
    list(step(pages, flat))
    return [events for _, events in step(pages, flat)]


def of_kind(events: Sequence[str], *kinds: str) -> list[str]:
    return [event for event in events if event.startswith(kinds)]
