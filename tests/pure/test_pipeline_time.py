"""The time of whole steps that `derive` predicts: repeated blocks and pipelines, on a machine made
by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ptrain.axes.pipeline.catalogue import schedule_of
from ptrain.cost import Collective, Phase, Spent, StepTime
from ptrain.derivation.estimate import derive
from ptrain.derivation.interconnect import Network
from ptrain.derivation.machine import Machine
from ptrain.facts.model import InnerCollective, ModelWork
from ptrain.spec.cluster import Cluster, Hook
from ptrain.spec.load import load
from ptrain.spec.placement import Axis
from tests.pure.build import GATHERED, WHOLE, make_spec
from tests.pure.hand_made_paces import HandPace, layer, model

SAMPLES = 8
FORWARD, BACKWARD = 10, 20
MESSAGE = 32 * 128 * 4  # bytes of the hidden states of a micro-batch


def step(
    pace: HandPace,
    work: ModelWork | None = None,
    *,
    plays_all: bool = False,
    fewer: Callable[[int], HandPace | None] = lambda ranks: None,
    **changes: Any,
) -> StepTime:
    layers = changes.pop("layers", 8)
    of_model = work or model(FORWARD, BACKWARD, layers=layers)
    machine = Machine(pace=pace, work=lambda _: of_model, plays_all=plays_all, fewer=fewer)
    time = derive(load(of_all(changes, layers)).spec, machine=machine).exact.step
    assert time is not None
    return time


def of_all(changes: dict[str, Any], layers: int = 8) -> dict[str, Any]:
    return {
        "model": {"preset": "llama-tiny", "layers": layers},
        "batch": {"global": SAMPLES, "micro": 1, "sequence": 32},
        "optimizer": {"name": "adamw", "clip": None},
    } | changes


def pipeline(pace: HandPace, ranks: int, microbatches: int, schedule: str = "1f1b", **more: Any):
    changes = {
        "mesh": {"pp": ranks},
        "placement": {"pp": "S,S,S,R"},
        "pipeline": {"schedule": schedule},
        "batch": {"global": microbatches, "micro": 1, "sequence": 32},
    }
    return step(pace, **changes | more)


# -- repeated blocks


@pytest.mark.parametrize("sent", [0.0, 1e-5, 1e-3])
@pytest.mark.parametrize("dials", [{}, {"prefetch": 2}, {"overlap": "none"}], ids=str)
def test_a_repeated_block_takes_the_time_of_its_repetitions(sent, dials):
    """Both if compute and if the network is the bottleneck."""
    mesh = {"mesh": {"dp_shard": 4}, "placement": {"dp_shard": "S*,S,S,R"}, "layers": 24, **dials}
    pace = HandPace(sent=sent, byte=1e-6)
    by_one, all_of_them = (step(pace, plays_all=plays, **mesh) for plays in (False, True))
    assert by_one.seconds == pytest.approx(all_of_them.seconds)
    for row, other in zip(by_one.rows, all_of_them.rows, strict=True):
        assert row.key == other.key
        assert (row.seconds, row.moving) == pytest.approx((other.seconds, other.moving), abs=1e-9)


# -- pipelines


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 2), (4, 4), (4, 16), (8, 32)])
def test_the_bubble_of_equal_stages_is_p_minus_1_over_m_plus_p_minus_1(
    schedule, ranks, microbatches
):
    time = pipeline(HandPace(), ranks, microbatches, schedule)
    of_stage = 8 // ranks * (FORWARD + BACKWARD)
    assert time.seconds == pytest.approx((microbatches + ranks - 1) * of_stage)
    share = (ranks - 1) / (microbatches + ranks - 1)
    assert time.seconds_in(Spent.BUBBLE) / time.seconds == pytest.approx(share)
    assert time.seconds_in(Spent.COMPUTE) == pytest.approx(microbatches * of_stage)


def test_halves_of_backward_fill_the_bubble():
    """ZB-H1: (p - 1)(F + I - W)."""
    time = pipeline(HandPace(), 4, 8, "zero-bubble")
    assert time.seconds_in(Spent.BUBBLE) == pytest.approx(3 * 2 * FORWARD)


def test_the_slowest_stage_decides():
    """What stands behind the layers is as much as all other stages: these wait for it."""
    work = model(FORWARD, BACKWARD, layers=8, behind=(40, 80))
    time = pipeline(HandPace(), 4, 16, work=work)
    slow = 2 * (FORWARD + BACKWARD) + 120
    assert time.seconds == pytest.approx(16 * slow + 3 * 2 * (FORWARD + BACKWARD))
    assert time.seconds_in(Spent.BUBBLE) == pytest.approx(3 * 2 * (FORWARD + BACKWARD))


def test_messages_are_transferred_during_compute():
    """gpipe's fill and drain wait for one message per boundary."""
    free, sending = (pipeline(HandPace(sent=s), 4, 8, "gpipe") for s in (0, 5 / MESSAGE))
    assert sending.seconds - free.seconds == pytest.approx(2 * 3 * 5)
    assert sending.exposed_seconds() == {}


def test_a_message_takes_its_senders_time_where_cores_send():
    pace = HandPace(sent=5 / MESSAGE, overlaps=False)
    time = pipeline(pace, 2, 4, "gpipe")
    sent = time.exposed_seconds()["pp",]
    assert sent == pytest.approx(4 * 5)
    assert time.seconds_in(Spent.COMPUTE) == pytest.approx(4 * 4 * (FORWARD + BACKWARD))


def test_a_stages_passes_have_a_hook_each():
    pace = HandPace(overlaps=False, hooks={Hook.PIPELINE_PASS: 1.0})
    time = pipeline(pace, 4, 8)
    assert time.seconds_in(Spent.WRAPPERS) == pytest.approx(2 * 8)
    assert time.seconds == pytest.approx((8 + 3) * (2 * (FORWARD + BACKWARD) + 2))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero-bubble"])
def test_ranks_that_wait_leave_their_core_to_the_others(schedule):
    """Two, or four, on one core, which is busy all the time: a step takes as long as on one
    rank."""
    for ranks in (2, 4):
        pace = HandPace(overlaps=False, operation=ranks)
        alone = {1: HandPace(overlaps=False), 2: HandPace(overlaps=False, operation=2)}
        time = pipeline(pace, ranks, 4, schedule, fewer=alone.get)
        assert time.seconds == pytest.approx(4 * 8 * (FORWARD + BACKWARD))
        assert time.assumed == ()


@pytest.mark.parametrize("known", [(1, 2), (2,)])
def test_ranks_on_shared_cores_share_their_throughput(known: tuple[int, ...]):
    """Four ranks on two cores, of one thread each: two of them are twice as fast, three as fast as
    two cores are for three. One that is alone is no faster than two, measured or not."""
    fewer = dict.fromkeys(known, HandPace(overlaps=False))
    work = model(FORWARD, BACKWARD, layers=8)
    machine = Machine(
        pace=HandPace(overlaps=False, operation=2), work=lambda _: work, fewer=fewer.get
    )
    changes = {"mesh": {"pp": 4}, "placement": {"pp": "S,S,S,R"}}
    derivation = derive(load(of_all(changes)).spec)
    spec, plan, facts = derivation.spec, derivation.plan, derivation.facts
    speed = machine.of_step(spec, plan, facts, schedule_of(spec)).speed
    assert speed is not None
    assert [speed(busy) for busy in (1, 2, 3, 4)] == pytest.approx([2, 2, 4 / 3, 1])


def test_without_rates_of_fewer_ranks_the_assumption_is_reported():
    time = pipeline(HandPace(overlaps=False), 2, 4)
    assert time.seconds == pytest.approx((4 + 1) * 4 * (FORWARD + BACKWARD))
    assert "leave their cores idle" in time.assumed[0]


def test_the_last_micro_batch_reduces_for_all():
    """Flat units within a pipeline, ZeRO-2: a stage's units are reduced when its last backward pass
    is over."""
    changes = {
        "mesh": {"pp": 2, "dp_shard": 2},
        "placement": {"pp": "S,S,S,R", "dp_shard": "R,S,S,R"},
        "sync": {"gradients": "last"},
        "batch": {"global": 8, "micro": 1, "sequence": 32},
        "pipeline": {"schedule": "gpipe"},
        "overlap": "none",
    }
    free, reducing = (
        step(HandPace(by_collective={Collective.REDUCE_SCATTER: sent}), **changes)
        for sent in (0.0, 1e-4)
    )
    assert reducing.of_phase(Phase.BACKWARD) > free.of_phase(Phase.BACKWARD)
    # the last stage reduces before it gives its last gradient to the first one, which then does
    numel = derive(load(of_all(changes)).spec).facts.numel
    assert reducing.seconds - free.seconds == pytest.approx(4 * numel * 1e-4, rel=1e-3)


def test_the_slowest_part_of_operators_decides():
    """Of the ranks of tp with unequal slices the one with most to compute."""
    of_rank = [model(FORWARD, BACKWARD, layers=8), model(2 * FORWARD, BACKWARD, layers=8)]
    base = {
        "model": {"preset": "llama-tiny", "layers": 8, "vocab": 257},
        "mesh": {"tp": 2},
        "placement": {"tp": "S,S,S,R"},
        "batch": {"global": 8, "micro": 1, "sequence": 32},
        "optimizer": {"name": "adamw", "clip": None},
    }
    machine = Machine(pace=HandPace(), work=lambda index: of_rank[index])
    time = derive(load(base).spec, machine=machine).exact.step
    assert time is not None and time.seconds == pytest.approx(8 * 8 * (2 * FORWARD + BACKWARD))


@pytest.mark.parametrize("overlaps", [True, False])
def test_collectives_between_operators_are_awaited_at_once(overlaps):
    """Two sums of 4 s a layer in each pass, and what a cut product takes of the host: of cores
    beside that, of a device that waits for the sum behind it."""
    sums = (InnerCollective(Collective.ALL_REDUCE, 400, 2),)
    alike = layer(FORWARD, BACKWARD, sums)
    work = ModelWork(front=layer(0, 0), layers=(alike,) * 8, behind=layer(0, 0))
    pace = HandPace(sent=0.01, overlaps=overlaps, hooks={Hook.CUT_PRODUCT: 0.5})
    time = step(pace, work, mesh={"tp": 2}, placement={"tp": "S,S,S,R"})
    passes = SAMPLES * 8 * 2
    assert time.exposed_seconds()["tp",] == pytest.approx(passes * 2 * 4)
    assert time.seconds_in(Spent.COMPUTE) == pytest.approx(SAMPLES * 8 * (FORWARD + BACKWARD))
    assert time.seconds_in(Spent.WRAPPERS) == pytest.approx(0 if overlaps else passes * 0.5)


def test_a_pipeline_takes_as_long_as_the_host_that_has_most_to_issue():
    """Bubbles included, in which a host goes on: two stages of 4 layers, an operator in each
    pass of a layer, and the last one's hosts that of the end too."""
    hooks = {Hook.FORWARD_OPERATOR: 30.0, Hook.BACKWARD_OPERATOR: 35.0}
    work = model(FORWARD, BACKWARD, layers=8, behind=(2, 4))
    times = [pipeline(HandPace(hooks=known), 2, 4, work=work) for known in ({}, hooks)]
    assert times[1].seconds == pytest.approx(4 * 5 * (30 + 35))
    assert times[1].seconds > times[0].seconds
    assert times[1].seconds_in(Spent.BUBBLE) == pytest.approx(times[0].seconds_in(Spent.BUBBLE))
    hidden = pipeline(HandPace(hooks={Hook.FORWARD_OPERATOR: 1.0}), 2, 4, work=work)
    assert hidden.seconds == times[0].seconds


def test_a_prediction_without_rates_names_the_command_that_measures_them():
    estimate = derive(load(of_all({"mesh": {"dp_shard": 1}})).spec).exact
    assert estimate.step is None
    assert "cluster" in estimate.undefined["step_seconds"]


def test_a_group_counts_the_nodes_that_its_ranks_are_on():
    cluster = Cluster(devices=16, devices_per_node=4, device_memory=1, intra_node_bandwidth=1.0)
    mesh = {Axis.PP: (2, WHOLE), Axis.DP_REPLICATE: (4, WHOLE), Axis.DP_SHARD: (2, GATHERED)}
    network = Network(make_spec(mesh, cluster=cluster))
    assert network.group(("dp_shard",)) == (2, 1)
    assert network.group(("dp_replicate",)) == (4, 2)
    assert network.group(("dp_replicate",), 2) == (2, 1)
    assert network.group(("dp_replicate", "dp_shard")) == (8, 2)
    assert (
        network.pair(Axis.DP_REPLICATE),
        network.pair(Axis.PP),
        network.ends(Axis.DP_REPLICATE),
    ) == (2, 2, 2)


@pytest.mark.parametrize("data", ["zero1", "zero2"])
def test_overlapped_collectives_never_slow_a_pipeline(data):
    """The last micro-batch passes 28 stages, each of which starts a reduction."""
    written: dict[str, Any] = {
        "model": {"family": "gpt", "layers": 28, "hidden": 18432, "heads": 144, "vocab": 131072},
        "mesh": {"pp": 4, "dp_shard": 48, "tp": 8},
        "placement": {"pp": "S,S,S,R", "dp_shard": data, "tp": "tp-sp"},
        "batch": {"global": 768, "micro": 1, "sequence": 4096},
        "precision": {"layout": "megatron18"},
        "pipeline": {"schedule": "interleaved", "stages": 28},
        "cluster": {"preset": "h100-64", "devices": 1536, "device_memory": "800 GiB"},
    }
    beside, late = {"overlap": "backward"}, {"gather_after_update": "next-forward"}

    def seconds(dials: dict[str, str]) -> float:
        step = derive(load(written | dials).spec).exact.step
        assert step is not None
        return step.seconds

    plain = seconds({})
    assert seconds(beside) <= plain
    assert seconds(late) <= plain
    assert seconds(beside | late) <= min(seconds(beside), seconds(late))
