"""Stragglers: collectives take longer after long compute on cores that both compute and
communicate."""

from __future__ import annotations

from typing import Any

import pytest

from ptrain.cost import Collective, Phase, Spent, StepTime
from ptrain.derivation import in_flight
from ptrain.derivation.estimate import derive
from ptrain.derivation.machine import Machine
from ptrain.facts.model import InnerCollective, ModelWork
from ptrain.rates.measured import Line
from ptrain.spec.cluster import Hook
from ptrain.spec.load import load
from tests.pure.hand_made_paces import HandPace, layer, model

LATE = 0.5  # seconds of a collective for one that was computed
FORWARD, BACKWARD, LAYERS = 10, 20, 8
SHARDED = {"dp_shard": 2}, {"dp_shard": "zero3"}


def step(pace: HandPace, work: ModelWork | None = None, **changes: Any) -> StepTime:
    of_model = work or model(FORWARD, BACKWARD, layers=LAYERS)
    machine = Machine(pace=pace, work=lambda _: of_model, plays_all=changes.pop("plays_all", False))
    mapping = {
        "model": {"preset": "llama-tiny", "layers": LAYERS},
        "batch": {"global": 8, "micro": 1, "sequence": 32},
        "optimizer": {"name": "adamw", "clip": None},
    }
    time = derive(load(mapping | changes).spec, machine=machine).exact.step
    assert time is not None
    return time


def extra_seconds(work: ModelWork | None = None, **changes: Any) -> float:
    """Return the seconds by which the step is longer with straggler delay."""
    free, late = (
        step(HandPace(overlaps=False, sent=1e-4, late=late), work, **changes)
        for late in (0.0, LATE)
    )
    return late.seconds - free.seconds


@pytest.mark.parametrize("name", ["ddp", "zero1", "zero2", "zero3"])
@pytest.mark.parametrize("micro", [1, 4])
def test_all_that_is_computed_ahead_of_a_collective_makes_it_late_once(name, micro):
    """In however many micro-batches, of which ddp and zero1 reduce in the last alone."""
    axis = "dp_replicate" if name == "ddp" else "dp_shard"
    changes = {
        "mesh": {axis: 2},
        "placement": {axis: name},
        "batch": {"global": 8, "micro": micro, "sequence": 32},
    }
    computed = step(HandPace(), **changes).seconds_in(Spent.COMPUTE)
    assert extra_seconds(**changes) == pytest.approx(LATE * computed)


def test_repeated_blocks_have_the_straggler_delay_of_single_ones():
    mesh, placement = SHARDED
    changes: dict[str, Any] = {"mesh": mesh, "placement": placement}
    pace = HandPace(overlaps=False, sent=1e-4, byte=1e-6, late=LATE)
    for accumulate in (1, 2):
        changes["batch"] = {"global": 8, "micro": 4 // accumulate, "sequence": 32}
        by_one, all_of_them = (step(pace, plays_all=plays, **changes) for plays in (False, True))
        assert by_one.seconds == pytest.approx(all_of_them.seconds)


def test_devices_that_compute_during_transfers_have_no_straggler_delay():
    mesh, placement = SHARDED
    free, late = (
        step(HandPace(sent=1e-4, late=late), mesh=mesh, placement=placement) for late in (0.0, LATE)
    )
    assert late.seconds == free.seconds


def test_collectives_within_a_pass_share_its_straggler_delay():
    sums = (InnerCollective(Collective.ALL_REDUCE, 400, 2),)
    alike = layer(FORWARD, BACKWARD, sums)
    work = ModelWork(front=layer(0, 0), layers=(alike,) * LAYERS, behind=layer(0, 0))
    late = extra_seconds(work, mesh={"tp": 2}, placement={"tp": "S,S,S,R"})
    assert late == pytest.approx(LATE * 8 * LAYERS * (FORWARD + BACKWARD))


def test_a_stages_message_is_late_by_the_pass_ahead_of_it():
    """Four forward passes of a first stage of two, and four backward passes of the last."""
    changes: dict[str, Any] = {
        "mesh": {"pp": 2},
        "placement": {"pp": "S,S,S,R"},
        "pipeline": {"schedule": "gpipe"},
        "batch": {"global": 4, "micro": 1, "sequence": 32},
    }
    message = 32 * 128 * 4
    time = step(HandPace(overlaps=False, sent=5 / message, late=LATE), **changes)
    sent = [row for row in time.rows if row.key.collective is Collective.SEND]
    assert [row.key.phase for row in sent] == [Phase.FORWARD]
    assert sent[0].seconds == pytest.approx(4 * (5 + LATE * LAYERS // 2 * FORWARD))


@pytest.mark.parametrize("name", ["zero2", "zero3"])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zero-bubble"])
def test_passes_that_are_known_are_as_late_as_those_that_are_played(name, schedule, monkeypatch):
    """Of a pipeline's stages with shards; and no second of a pass makes two collectives late."""
    changes: dict[str, Any] = {
        "mesh": {"pp": 2, "dp_shard": 2},
        "placement": {"pp": "S,S,S,R", "dp_shard": name},
        "pipeline": {"schedule": schedule},
        "batch": {"global": 16, "micro": 1, "sequence": 32},
    }
    pace = HandPace(overlaps=False, sent=1e-4, late=LATE)
    known = step(pace, **changes)
    monkeypatch.setattr(in_flight.RankStep, "recorded_pass", lambda *_: None)
    assert step(pace, **changes).seconds == pytest.approx(known.seconds)
    of_passes = step(HandPace(), **changes).seconds_in(Spent.COMPUTE)
    late = (
        sum(
            row.seconds
            for row in step(pace_late, **changes).rows
            if row.key.spent is Spent.COLLECTIVES and row.key.phase is not Phase.UPDATE
        )
        for pace_late in (pace, HandPace(overlaps=False, sent=1e-4))
    )
    with_it, without = late
    assert with_it - without <= LATE * of_passes * (1 + 1e-3)


def test_hooks_of_cut_products_make_late_once():
    """Those within a pass, and none a second time ahead of what follows it."""
    sums = (InnerCollective(Collective.ALL_REDUCE, 400, 2),)
    alike = layer(FORWARD, BACKWARD, sums)
    work = ModelWork(front=layer(0, 0), layers=(alike,) * LAYERS, behind=layer(0, 0))
    changes: dict[str, Any] = {
        "mesh": {"dp_shard": 2, "tp": 2},
        "placement": {"dp_shard": "zero3", "tp": "S,S,S,R"},
    }
    hooks = {Hook.CUT_PRODUCT: 1.0}
    free, late = (
        step(HandPace(overlaps=False, sent=1e-4, hooks=hooks, late=late), work, **changes)
        for late in (0.0, LATE)
    )
    spent = free.seconds_in(Spent.COMPUTE) + free.seconds_in(Spent.WRAPPERS)
    assert late.seconds - free.seconds == pytest.approx(LATE * spent)


def test_straggler_delay_is_interpolated_and_constant_beyond_measurements():
    line = Line({0.001: 0.0, 0.01: 0.0009, 0.1: 0.0018})
    seconds = [
        line.interpolate(computed) for computed in (0.0, 0.001, 0.0055, 0.01, 0.055, 0.1, 7.0)
    ]
    assert seconds == pytest.approx([0, 0, 0.00045, 0.0009, 0.00135, 0.0018, 0.0018])
    assert Line({}).interpolate(1.0) == 0.0
    assert Line({0.01: 0.004}).interpolate(0.005) == 0.002, "from nothing on"
