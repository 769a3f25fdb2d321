"""The step time on timelines and machines that can be computed by hand.

A model is a chain of blocks and a root, one unit each, whose parameters take equal time to gather
or to reduce; embedding and head belong to the root."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate as running

import pytest

from ptrain.cost import Collective, Phase, Spent, StepTime
from ptrain.derivation.machine import Machine
from ptrain.spec.activations import ActivationMode
from ptrain.spec.cluster import Cluster, Hook
from ptrain.spec.dials import GatherAfterUpdate, GradientSync, Overlap, SyncPolicy
from ptrain.spec.placement import Axis, Placement, Tier
from ptrain.spec.spec import ActivationSpec, Spec
from ptrain.timeline import Complete
from tests.pure.build import (
    BY_HAND,
    GATHERED,
    WHOLE,
    ZERO_1,
    ZERO_2,
    make_facts,
    make_spec,
    tuple_of,
)
from tests.pure.hand_made_paces import HandPace, chain, model
from tests.pure.replayed_steps import flight

SHARD, REPLICATE = Axis.DP_SHARD, Axis.DP_REPLICATE
BLOCKS, NUMEL = 4, 100
UNIT = 4 * NUMEL  # bytes
FORWARD, BACKWARD = 10, 20  # seconds of a block
FRONT, BEHIND = (2, 4), (6, 12)
MOVED = 1000  # bytes that a block's activations have, where they are off the device
COMPUTED = BLOCKS * (FORWARD + BACKWARD) + sum(FRONT) + sum(BEHIND)
NEVER_AHEAD = {"overlap": Overlap.NONE}


def step_time(spec: Spec, pace: HandPace, blocks: int = BLOCKS) -> StepTime:
    facts = chain(blocks, NUMEL)
    if spec.activations.tiers != {Tier.DEVICE}:
        (tier,) = spec.activations.tiers
        moved = ((tier.value, MOVED),) * blocks
        facts = replace(facts, timeline=facts.timeline._replace(moved=moved))
    work = model(FORWARD, BACKWARD, layers=blocks, front=FRONT, behind=BEHIND)
    time = flight(spec, facts, Machine(pace=pace, work=lambda _: work)).step
    assert time is not None
    return time


def spec(placement: Placement | None = None, axis: Axis = SHARD, **dials: object) -> Spec:
    """Return a spec over two ranks of one data axis, or one device, without clipping."""
    mesh = {} if placement is None else {axis: (2, placement)}
    made, more = {}, {}
    for name, value in dials.items():
        (made if name in ("accumulate", "sync", "clip", "bucket_bytes") else more)[name] = value
    return replace(make_spec(mesh, **{"clip": None, "model": BY_HAND} | made), **more)


def unit_seconds(seconds: float) -> HandPace:
    """Return a machine that gathers or reduces a unit in the given seconds."""
    return HandPace(sent=seconds / UNIT)


def exposed_seconds(time: StepTime, collective: Collective | None = None) -> float:
    return sum(
        row.seconds
        for row in time.rows
        if row.key.spent is Spent.COLLECTIVES and collective in (None, row.key.collective)
    )


def transfer_seconds(time: StepTime) -> float:
    return sum(row.moving for row in time.rows)


def test_one_device_computes_and_updates():
    time = step_time(spec(), HandPace(element=0.5))
    assert time.seconds_in(Spent.COMPUTE) == COMPUTED
    assert (
        time.seconds_in(Spent.UPDATE) == time.of_phase(Phase.UPDATE) == 0.5 * (BLOCKS + 1) * NUMEL
    )
    assert time.of_phase(Phase.FORWARD) == BLOCKS * FORWARD + FRONT[0] + BEHIND[0]
    assert time.of_phase(Phase.BACKWARD) == BLOCKS * BACKWARD + FRONT[1] + BEHIND[1]
    assert time.seconds == sum(time.of_phase(phase) for phase in Phase)


@pytest.mark.parametrize("overlap", Overlap)
@pytest.mark.parametrize("placement", [WHOLE, GATHERED, ZERO_1, ZERO_2], ids=str)
def test_a_free_network_leaves_only_compute_time(placement, overlap):
    axis = REPLICATE if placement is WHOLE else SHARD
    time = step_time(spec(placement, axis, overlap=overlap), HandPace())
    assert time.seconds == COMPUTED


@pytest.mark.parametrize("placement", [WHOLE, GATHERED, ZERO_1, ZERO_2], ids=str)
def test_cores_that_send_compute_nothing_meanwhile(placement):
    """Whatever is issued ahead: all that moves is exposed."""
    axis = REPLICATE if placement is WHOLE else SHARD
    time = step_time(spec(placement, axis), replace(unit_seconds(7), overlaps=False))
    assert (
        exposed_seconds(time) == pytest.approx(transfer_seconds(time))
        and transfer_seconds(time) > 0
    )
    assert time.seconds == pytest.approx(COMPUTED + transfer_seconds(time))


# -- FSDP2


def test_of_fsdp2_the_first_gather_and_the_last_reduction_are_exposed_where_the_rest_is_hidden():
    """A gather takes as long as the front's forward, which hides that of the first block."""
    time = step_time(spec(GATHERED), unit_seconds(2))
    assert exposed_seconds(time, Collective.ALL_GATHER) == pytest.approx(2)
    assert exposed_seconds(time, Collective.REDUCE_SCATTER) == pytest.approx(
        2
    )  # the root's, issued last
    assert transfer_seconds(time) == pytest.approx(2 * (BLOCKS + 1) * 2 + (BLOCKS + 1) * 2)


@pytest.mark.parametrize("unit", [0.5, 2, 6, 10, 14, 30, 100])
@pytest.mark.parametrize("blocks", [1, 2, 5])
def test_fsdp2_takes_the_longer_of_gather_and_computation_unit_by_unit(unit, blocks):
    """Forward: the network gathers one unit after the other, but none before the parameters of the
    unit before the one in use are there. Backward: one gather ahead, behind it in the network the
    reduction of the unit before, which the next reduction waits for."""
    time = step_time(spec(GATHERED), unit_seconds(unit), blocks)
    assert time.seconds == pytest.approx(_fully_sharded(unit, blocks))


def _fully_sharded(unit: float, blocks: int) -> float:
    """By a recursion over units, the root first."""
    there = network = unit
    now, before = there + FRONT[0], 0.0
    for _ in range(blocks):
        network = max(network, before) + unit
        before, there = there, max(now, network)
        now = there + FORWARD
    now += BEHIND[0]
    network = max(network, before) + unit  # the root again, given back after forward
    now = max(now, network)
    gathered = network = max(network, now) + unit  # the last block, beside the end's backward
    now, reduced = now + BEHIND[1], 0.0
    for block in reversed(range(blocks)):
        now = max(now, gathered)
        if block:
            gathered = network = max(network, now) + unit
        now = max(now + BACKWARD, reduced)
        reduced = network = max(network, now) + unit
    now = max(now + FRONT[1], reduced)
    return max(network, now) + unit


def test_without_overlap_fsdp2_waits_for_all_that_it_sends():
    time = step_time(spec(GATHERED, **NEVER_AHEAD), unit_seconds(7))
    assert (
        exposed_seconds(time)
        == pytest.approx(transfer_seconds(time))
        == pytest.approx(7 * 3 * (BLOCKS + 1))
    )


def test_prefetching_one_unit_saves_the_delay_of_reductions():
    """Without prefetch in backward a gather follows the reduction of the unit before it, and each
    block except the last waits for both."""
    ahead, behind = (step_time(spec(GATHERED, prefetch=n), unit_seconds(8)).seconds for n in (1, 0))
    assert behind - ahead == pytest.approx(2 * 8 * (BLOCKS - 1))


def test_parameters_that_stay_gathered_are_gathered_once():
    keep = SyncPolicy(gradients=GradientSync.LAST, reshard_after_forward=False)
    once = step_time(spec(GATHERED, sync=keep), unit_seconds(7))
    assert transfer_seconds(once) == pytest.approx(2 * 7 * (BLOCKS + 1))


def test_a_reduction_over_replicas_follows_that_over_shards_and_is_awaited_at_the_end():
    """Half of a unit's bytes go on, over another network."""
    mesh = {REPLICATE: (2, tuple_of("R,R,R")), SHARD: (2, GATHERED)}
    hybrid = make_spec(mesh, clip=None, model=BY_HAND)
    pace = HandPace(by_collective={Collective.ALL_REDUCE: 30 / (UNIT / 2)})
    time = step_time(hybrid, pace)
    assert transfer_seconds(time) == pytest.approx(30 * (BLOCKS + 1))
    # from the last block's gradient on one after the other
    late = 30 * (BLOCKS + 1) - (BACKWARD * (BLOCKS - 1) + FRONT[1])
    assert time.seconds == pytest.approx(COMPUTED + late)


# -- DDP


def _replicas(unit: float, bucket: int = UNIT, **dials: object) -> StepTime:
    dials = {"bucket_bytes": bucket} | dials
    return step_time(spec(WHOLE, REPLICATE, **dials), unit_seconds(unit))


@pytest.mark.parametrize("unit", [1, 4, 10, 20, 25, 100])
def test_ddp_buckets_are_reduced_during_backward(unit):
    """Bucket i is full once the gradient of block i from the end is complete, and the root's is
    last."""
    full = [BEHIND[1] + BACKWARD * (block + 1) for block in range(BLOCKS)]
    full.append(full[-1] + FRONT[1])
    over = list(running(full, lambda network, ready: max(network, ready) + unit, initial=0))[-1]
    time = _replicas(unit)
    assert exposed_seconds(time) == pytest.approx(over - full[-1])
    assert time.seconds == pytest.approx(COMPUTED + over - full[-1])


def test_one_bucket_hides_nothing():
    time = _replicas(3, bucket=2**40)
    assert exposed_seconds(time) == transfer_seconds(time) == pytest.approx(3 * (BLOCKS + 1))


def test_ddp_without_overlap_reduces_when_backward_is_over():
    time = _replicas(3, overlap=Overlap.NONE)
    assert exposed_seconds(time) == transfer_seconds(time) == pytest.approx(3 * (BLOCKS + 1))


def test_ddp_reduces_in_the_last_micro_batch_alone():
    for number in (1, 2, 3, 5):
        time = _replicas(4, accumulate=number)
        assert time.seconds == pytest.approx(number * COMPUTED + 4)
        assert transfer_seconds(time) == pytest.approx(4 * (BLOCKS + 1))


def test_torchs_zero_redundancy_waits_for_the_owner_with_most_and_for_all_broadcasts():
    """Of five tensors one rank owns three; two buckets go out, whose bytes are the model's."""
    placement = spec(ZERO_1, REPLICATE)
    time = step_time(placement, replace(unit_seconds(10), element=0.1))
    assert time.seconds_in(Spent.UPDATE) == pytest.approx(0.1 * 3 * NUMEL)
    assert exposed_seconds(time, Collective.BROADCAST) == pytest.approx(10 * (BLOCKS + 1))


# -- flat units


def _flat(unit: float, placement: Placement = ZERO_1, element: float = 0.0, **dials: object):
    return step_time(spec(placement, **dials), replace(unit_seconds(unit), element=element))


def test_a_gather_after_the_update_is_awaited_at_once_when_it_blocks():
    time = _flat(5, element=0.1, gather_after_update=GatherAfterUpdate.BLOCKING)
    assert exposed_seconds(time, Collective.ALL_GATHER) == pytest.approx(5 * (BLOCKS + 1))
    assert time.seconds_in(Spent.UPDATE) == pytest.approx(0.1 * (BLOCKS + 1) * NUMEL / 2)


def test_gathers_during_the_update_are_overlapped():
    """Each unit is updated in 5 s and gathered in 5 s: the last one's gather is exposed. This is
    the default."""
    time = _flat(5, element=0.1)
    assert time == _flat(5, element=0.1, gather_after_update=GatherAfterUpdate.DURING_UPDATE)
    assert exposed_seconds(time, Collective.ALL_GATHER) == pytest.approx(5)


def test_gathers_of_the_next_forward_are_awaited_where_a_unit_is_used():
    dial = {"gather_after_update": GatherAfterUpdate.NEXT_FORWARD}
    time = _flat(5, **dial)
    assert exposed_seconds(time, Collective.ALL_GATHER) == pytest.approx(5 * (BLOCKS + 1))
    assert time.of_phase(Phase.FORWARD) == pytest.approx(
        BLOCKS * FORWARD + FRONT[0] + BEHIND[0] + 5 * (BLOCKS + 1)
    )


def test_an_overlapped_reduction_of_flat_units_is_awaited_by_the_next_one():
    alone = _flat(15, ZERO_2, overlap=Overlap.NONE)
    beside = _flat(15, ZERO_2, overlap=Overlap.BACKWARD)
    reduced = 15 * (BLOCKS + 1)
    assert exposed_seconds(alone, Collective.REDUCE_SCATTER) == pytest.approx(reduced)
    # those of the blocks are done when the next one's gradients are there, but for the last
    assert exposed_seconds(beside, Collective.REDUCE_SCATTER) == pytest.approx(15 - FRONT[1] + 15)


@pytest.mark.parametrize("ahead", [0, 1])
def test_prefetched_units_are_gathered_during_compute(ahead):
    """The prefetch of flat units; the gather of the unit in use is awaited at once."""
    placement = tuple_of("S*,S,R")
    time = _flat(6, placement, prefetch=ahead)
    exposed = exposed_seconds(time, Collective.ALL_GATHER)
    assert exposed == pytest.approx(2 * 6 * (BLOCKS + 1) if not ahead else exposed)
    assert ahead == 0 or exposed < 2 * 6 * (BLOCKS + 1) / 2


# -- the host, tiers, micro-batches, the network


def test_wrapper_hooks_take_host_time_that_a_busy_device_hides():
    hooks = {Hook.FSDP2_GATHER: 0.5, Hook.FSDP2_REDUCE: 0.25}
    on_cores = step_time(spec(GATHERED), HandPace(overlaps=False, hooks=hooks))
    assert on_cores.seconds_in(Spent.WRAPPERS) == (BLOCKS + 1) * (2 * 0.5 + 0.25)
    beside = step_time(spec(GATHERED), HandPace(hooks=hooks))
    assert beside.seconds == step_time(spec(GATHERED), HandPace()).seconds
    slow = step_time(spec(GATHERED), HandPace(hooks={Hook.FSDP2_GATHER: 100.0}))
    assert slow.seconds == pytest.approx(2 * 100 * (BLOCKS + 1))


def _offloaded_step(copy: float, tier: Tier = Tier.HOST, *, overlaps: bool = True) -> StepTime:
    """One device, whose blocks' activations go off it, and come back, in so many seconds each."""
    away = spec(activations=ActivationSpec(default=ActivationMode(tier=tier)))
    return step_time(away, HandPace(copied=copy / MOVED, overlaps=overlaps))


def test_activations_on_files_and_those_that_cores_copy_take_the_ranks_time():
    for time in (_offloaded_step(3, overlaps=False), _offloaded_step(3, Tier.FILE)):
        assert (
            time.seconds_in(Spent.COPIES) == transfer_seconds(time) == pytest.approx(2 * 3 * BLOCKS)
        )


@pytest.mark.parametrize("copy", [3, 10, 15, 20, 50])
def test_activations_are_offloaded_and_reloaded_during_compute(copy):
    """They leave one after the other and return one layer ahead: the last layer's when its backward
    begins, after its offload is complete."""
    ended = FRONT[0]
    away = 0.0
    for _ in range(BLOCKS):
        ended += FORWARD
        away = max(away, ended) + copy
    now = ended + BEHIND[0] + BEHIND[1]
    back = now = max(now, away) + copy
    for block in reversed(range(BLOCKS)):
        now = max(now, back)
        back = now + copy if block else now
        now += BACKWARD
    assert _offloaded_step(copy).seconds == pytest.approx(now + FRONT[1])


def test_flat_units_have_hooks_for_collectives_but_not_for_the_norm():
    hooks = {Hook.FLAT_GATHER: 1.0, Hook.FLAT_REDUCE: 0.25}
    clipped = spec(ZERO_2, clip=1.0)
    time = step_time(clipped, HandPace(overlaps=False, hooks=hooks))
    assert time.seconds_in(Spent.WRAPPERS) == (BLOCKS + 1) * 1.25


def test_gradients_that_are_added_are_read_and_written():
    """K micro-batches: K - 1 sums of 12 bytes an element on one device."""
    pace = HandPace(byte=0.01)
    times = [step_time(spec(accumulate=number), pace).seconds for number in (1, 2, 4)]
    added = 0.01 * 3 * UNIT * (BLOCKS + 1)
    assert times == pytest.approx([COMPUTED, 2 * COMPUTED + added, 4 * COMPUTED + 3 * added])


def test_copies_and_additions_of_fsdp2_take_time_during_collectives():
    """Of a unit of 400 bytes among two ranks: 2 x 400 out of a gather's buffer, twice, and 2 x 400
    into a reduction's; where there are no streams also 2 x 200 into the gather's, twice, and 3 x
    200 where a shard is added to that of the micro-batch before."""
    pace = HandPace(byte=0.001)
    for number, overlaps, size in (
        (1, True, 6 * 400),
        (1, False, 6 * 400 + 4 * 200),
        (2, False, 2 * (6 * 400 + 4 * 200) + 3 * 200),
    ):
        time = step_time(spec(GATHERED, accumulate=number), replace(pace, overlaps=overlaps))
        assert time.seconds_in(Spent.WRAPPERS) == pytest.approx(0.001 * size * (BLOCKS + 1))


def test_each_micro_batch_between_the_first_and_the_last_takes_the_same():
    for placement in (GATHERED, ZERO_1, ZERO_2):
        times = [
            step_time(spec(placement, accumulate=k), unit_seconds(7)).seconds for k in (2, 3, 4, 9)
        ]
        assert times[2] - times[1] == pytest.approx(times[1] - times[0])
        assert times[3] - times[2] == pytest.approx(5 * (times[1] - times[0]))


def test_the_norm_is_awaited_and_gradients_are_clipped():
    clipped = spec(GATHERED, clip=1.0)
    pace = HandPace(clipped=0.5, by_collective={Collective.ALL_REDUCE: 1.0})
    time = step_time(clipped, pace)
    assert time.seconds_in(Spent.UPDATE) == 0.5 * (BLOCKS + 1) * NUMEL / 2
    assert exposed_seconds(time, Collective.ALL_REDUCE) == 4  # a scalar


def test_ranks_on_cores_agree_on_the_loss_before_they_update():
    """Between nodes an all-reduce of a few numbers, over all ranks; of accelerators nobody knows
    its time, and on one node it takes none that counts."""
    pace = HandPace(by_collective={Collective.ALL_REDUCE: 1.0})
    on_cores = replace(pace, overlaps=False)
    apart = Cluster(devices=2, devices_per_node=1, device_memory=1, intra_node_bandwidth=1.0)
    assert step_time(spec(GATHERED, cluster=apart), on_cores).exposed_seconds()["world",] == 2 * 64
    assert ("world",) not in step_time(spec(GATHERED, cluster=apart), pace).exposed_seconds()
    assert ("world",) not in step_time(spec(GATHERED), on_cores).exposed_seconds()
    assert ("world",) not in step_time(spec(), on_cores).exposed_seconds()


def test_muon_takes_the_time_of_its_products_and_adamw_the_rest():
    """A matrix of 6 x 4 in a block, in five iterations of three products; the root is updated by
    AdamW."""
    facts = make_facts(((6, 4), (3,)), ((5, 2),))
    timeline = chain(1, 1).timeline
    names = tuple(Complete(t.name, 4 * t.numel) for t in reversed(facts.tensors))
    facts = replace(facts, timeline=timeline._replace(backward=names), blocks=("blocks.0",))
    muon = make_spec({}, clip=None, model=BY_HAND, optimizer="muon")
    work = model(4, 4, layers=1)
    time = flight(muon, facts, Machine(pace=HandPace(element=1000.0), work=lambda _: work)).step
    products = 5 * 2 * (4 * 6 * 4 + 4 * 4 * 4 + 4 * 4 * 6)
    assert time is not None and time.seconds_in(Spent.UPDATE) == products + 1000 * (3 + 10)
