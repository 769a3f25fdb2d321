"""The replay of flat units, computed by hand for short steps, and its laws for others."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ptrain.cost import Collective, Phase, State
from ptrain.derivation.flat import Flat
from ptrain.derivation.ghosts.table import make_wrapping
from ptrain.derivation.in_flight import play_update
from ptrain.derivation.tape import Scene, Tape
from ptrain.optimizers.ghost import muon_temporaries
from ptrain.plan.lower import lower
from ptrain.spec.dials import GatherAfterUpdate, GradientSync, ReduceScatterVia, Reshard, SyncPolicy
from ptrain.spec.placement import Axis, Placement, Tier
from ptrain.spec.precision import FP32, LAYOUTS, ZERO16, DType
from ptrain.spec.spec import Spec
from ptrain.steps.step import Clip, Plan
from ptrain.steps.wraps import FlatUnits
from ptrain.timeline import Timeline
from tests.pure.build import BY_HAND, ZERO_1, ZERO_2, make_facts, make_spec, tuple_of
from tests.pure.replayed_steps import resident, traffic_of_ranks

# Two blocks and a root; 17 -> 18 elements for 2 ranks.
BLOCK = ((5, 3), (2,))
FACTS = make_facts(BLOCK, BLOCK, ((1, 4), (7, 2)))
FLAT = 18 + 18 + 18

THETA, OMEGA, G = State.PARAMETERS, State.OPTIMIZER, State.GRADIENTS
FORWARD, BACKWARD, UPDATE = Phase.FORWARD, Phase.BACKWARD, Phase.UPDATE
AR, AG, RS = Collective.ALL_REDUCE, Collective.ALL_GATHER, Collective.REDUCE_SCATTER
H2D, D2H = Collective.HOST_TO_DEVICE, Collective.DEVICE_TO_HOST
READ, WRITE = Collective.FILE_READ, Collective.FILE_WRITE


def on_two(placement: Placement, **options) -> Spec:
    return make_spec({Axis.DP_SHARD: (2, placement)}, clip=None, model=BY_HAND, **options)


def plan_of(spec: Spec, **dials) -> Plan:
    """The plan of a spec, its wrap with other dials."""
    plan = lower(spec, FACTS)
    assert isinstance(plan.wrap, FlatUnits)
    return plan.replace_steps(replace(plan.wrap, **dials))


def traffic_by_call(spec: Spec, **dials) -> dict[tuple[Collective, State, Phase], tuple[int, int]]:
    """{(collective, state, phase): (calls, payload)}."""
    return {
        (row.key.collective, row.key.state, row.key.phase): (row.calls, row.payload_bytes)
        for row in traffic_of_ranks(make_wrapping(spec, plan_of(spec, **dials), FACTS))
    }


def resident_bytes(spec: Spec, **dials) -> dict[State, tuple[int, int, int]]:
    """Device, host and file bytes of rank 1."""
    return {
        row.state: (row.device_bytes, row.host_bytes, row.file_bytes)
        for row in resident(spec, plan_of(spec, **dials), FACTS)
        if row.rank == 1
    }


def test_offloaded_parameters_and_optimizer_leave_only_gradients_on_the_device():
    spec = on_two(tuple_of("O,O,S"), layout=ZERO16)
    found = resident_bytes(spec)
    assert found[THETA] == (0, FLAT // 2 * 2, 0)
    assert found[OMEGA] == (0, FLAT // 2 * 12 + 3 * 4, 0)
    assert found[G] == (FLAT // 2 * 2, 0, 0)


def test_offloaded_parameters_come_for_each_use_and_gradients_go_once():
    spec = on_two(tuple_of("O,O,S"), layout=ZERO16)
    whole, part = FLAT * 2, FLAT // 2 * 2
    assert traffic_by_call(spec) == {
        (H2D, THETA, FORWARD): (3, part),
        (AG, THETA, FORWARD): (3, whole),
        (H2D, THETA, BACKWARD): (3, part),
        (AG, THETA, BACKWARD): (3, whole),
        (RS, G, BACKWARD): (3, whole),
        (D2H, G, UPDATE): (3, part),
    }


def test_a_whole_copy_on_the_host_needs_no_collective_to_come():
    spec = on_two(tuple_of("R@host,S,S"))
    rows = traffic_by_call(spec)
    assert rows[H2D, THETA, FORWARD] == rows[H2D, THETA, BACKWARD] == (3, 4 * FLAT)
    assert (AG, THETA, FORWARD) not in rows
    # the update: its part comes to the device, the parts are gathered there, the whole goes back
    assert rows[H2D, THETA, UPDATE] == (3, 4 * FLAT // 2)
    assert rows[AG, THETA, UPDATE] == rows[D2H, THETA, UPDATE] == (3, 4 * FLAT)


def test_a_file_is_read_and_written_through_the_host():
    spec = on_two(tuple_of("S*@file,S@file,S@file"))
    part = 4 * FLAT // 2
    state = 2 * part + 3 * 4  # two moments and a counter by unit
    rows = traffic_by_call(spec)
    assert rows[READ, THETA, FORWARD] == rows[H2D, THETA, FORWARD] == (3, part)
    assert rows[D2H, G, BACKWARD] == rows[WRITE, G, BACKWARD] == (3, part)
    assert (READ, G, BACKWARD) not in rows  # the first micro-batch finds nothing to add to
    assert rows[READ, G, UPDATE] == (3, part)
    assert rows[READ, OMEGA, UPDATE] == rows[WRITE, OMEGA, UPDATE] == (3 * 3, state)
    assert rows[READ, THETA, UPDATE] == rows[WRITE, THETA, UPDATE] == (3, part)
    assert resident_bytes(spec)[THETA] == resident_bytes(spec)[G] == (0, 0, part)
    assert resident_bytes(spec)[OMEGA] == (0, 0, state)


def test_later_micro_batches_read_gradients_kept_in_a_file():
    spec = on_two(tuple_of("R,S,S@file"), accumulate=3)
    rows = traffic_by_call(spec)
    part = 4 * FLAT // 2
    assert rows[WRITE, G, BACKWARD] == rows[D2H, G, BACKWARD] == (9, 3 * part)
    assert rows[READ, G, BACKWARD] == (6, 2 * part)


def test_an_optimizer_streamed_to_the_device_is_copied_in_and_out():
    spec = on_two(tuple_of("R,O,S"))
    state = 4 * FLAT + 3 * 4
    rows = traffic_by_call(spec, update_tier=Tier.DEVICE)
    assert rows[H2D, OMEGA, UPDATE] == rows[D2H, OMEGA, UPDATE] == (9, state)
    assert (D2H, G, UPDATE) not in rows
    assert traffic_by_call(spec)[D2H, G, UPDATE] == (3, 4 * FLAT // 2)


def test_gathered_optimizer_state_is_gathered_for_the_update():
    rows = traffic_by_call(on_two(tuple_of("R,S*,S")))
    assert rows[AG, OMEGA, UPDATE] == (2 * 3, 2 * 4 * FLAT)
    assert rows[AG, G, UPDATE] == (3, 4 * FLAT)
    assert (AG, THETA, UPDATE) not in rows


def test_materialized_gradients_are_used_up_in_the_backward_pass():
    spec = on_two(tuple_of("S*,S,M"))
    rows = traffic_by_call(spec)
    assert not [key for key in rows if key[2] is UPDATE]
    assert rows[RS, G, BACKWARD] == (3, 4 * FLAT)
    assert resident_bytes(spec)[G] == (0, 0, 0)


def test_materialized_parameters_are_the_master_copies():
    spec = on_two(tuple_of("M,S,R"), layout=ZERO16)
    assert resident_bytes(spec)[THETA] == (0, 0, 0)
    assert resident_bytes(spec)[OMEGA] == (FLAT // 2 * 12 + 3 * 4, 0, 0)
    rows = traffic_by_call(spec)
    assert rows[AG, THETA, FORWARD] == (3, 2 * FLAT)  # in the dtype of use
    assert not [key for key in rows if key[1:] == (THETA, UPDATE)]


def test_an_overlapped_reduction_only_changes_its_phase():
    spec = on_two(ZERO_1)
    late, early = traffic_by_call(spec), traffic_by_call(spec, overlaps=True)
    assert late[RS, G, UPDATE] == early[RS, G, BACKWARD]
    assert (RS, G, UPDATE) not in early
    assert resident_bytes(spec)[G] == (4 * FLAT, 0, 0)
    assert resident_bytes(spec, overlaps=True)[G] == (4 * FLAT // 2, 0, 0)


def test_parameters_become_whole_after_the_update_or_in_the_next_forward():
    spec = on_two(ZERO_2)
    blocking = traffic_by_call(spec)
    during = traffic_by_call(spec, gather_after_update=GatherAfterUpdate.DURING_UPDATE)
    late = traffic_by_call(spec, gather_after_update=GatherAfterUpdate.NEXT_FORWARD)
    assert blocking == during
    assert late[AG, THETA, FORWARD] == blocking[AG, THETA, UPDATE]
    assert (AG, THETA, UPDATE) not in late


@pytest.mark.parametrize(
    ("placement", "bytes_per_element"), [("R,S,R", 2 + 4), ("R,S,S", (2 + 4) / 2)]
)
def test_a_layout_that_keeps_both_holds_a_second_gradient(placement, bytes_per_element):
    spec = on_two(tuple_of(placement), layout=LAYOUTS["zero20"])
    assert resident_bytes(spec)[G] == (FLAT * bytes_per_element, 0, 0)


def test_gradients_travel_in_the_dtype_of_the_reduction_and_are_kept_in_another():
    spec = on_two(tuple_of("R,S,S"), layout=LAYOUTS["fsdp-mixed"])
    assert traffic_by_call(spec)[RS, G, BACKWARD] == (3, 2 * FLAT)
    assert resident_bytes(spec)[G] == (4 * FLAT // 2, 0, 0)


def test_scalars_of_gradients_on_the_host_travel_to_be_reduced():
    spec = on_two(tuple_of("R,O,O"), layout=LAYOUTS["fp16"])
    spec = replace(spec, optimizer=replace(spec.optimizer, clip=1.0))
    scalars = [
        (row.key.collective, row.calls, row.payload_bytes)
        for row in traffic_of_ranks(make_wrapping(spec, plan_of(spec), FACTS))
        if row.payload_bytes <= 12
    ]
    # the norm there and back; the flag there, and it and the scale back; an all-reduce of each
    assert sorted(scalars) == [(AR, 2, 8), (D2H, 3, 12), (H2D, 2, 8)]


def test_newton_schulz_holds_the_gradient_two_matrices_and_two_grams():
    # fp32 gradient ahead of its momentum; in bf16 the matrix, the next one, two grams of 4 x 4
    assert muon_temporaries((8, 4), DType.FP32, scaled=False) == 32 * 4 + 2 * 32 * 2 + 2 * 16 * 2
    assert muon_temporaries((4, 8), DType.FP32, scaled=False) == muon_temporaries(
        (8, 4), DType.FP32, scaled=False
    )


AXES = (Axis.DP_REPLICATE, Axis.DP_SHARD)
some_axes = st.sets(st.sampled_from(AXES)).map(lambda drawn: tuple(a for a in AXES if a in drawn))
tiers = st.sampled_from(list(Tier))


@st.composite
def plans(draw) -> tuple[Spec, Plan]:
    """Any flat step over two axes, legal or not to a spec, with any layout and dials."""
    layout = draw(st.sampled_from([*LAYOUTS.values(), replace(FP32, reduced=DType.BF16)]))
    placement = tuple_of("S*,S,R")
    spec = make_spec(
        {Axis.DP_REPLICATE: (2, tuple_of("R,S,R")), Axis.DP_SHARD: (2, placement)},
        layout=layout,
        accumulate=draw(st.sampled_from([1, 2, 5])),
        optimizer=draw(st.sampled_from(["adamw", "sgd", "muon"])),
        momentum=0.9,
        model=BY_HAND,
    )
    plan = lower(spec, FACTS)
    assert isinstance(plan.wrap, FlatUnits)
    optimizer = draw(some_axes)
    by_tensor = spec.optimizer.name == "muon"
    updated = () if by_tensor else tuple(a for a in draw(some_axes) if a in optimizer)
    gradients = draw(some_axes)
    materialized = layout.master is not None and draw(st.booleans())
    optimizer_tier = draw(tiers)
    on_host = optimizer_tier is not Tier.DEVICE and updated == optimizer and draw(st.booleans())
    consumed = plan.accumulate.micro_batches == 1 and draw(st.booleans())
    sync = SyncPolicy(
        gradients=draw(st.sampled_from(list(GradientSync))),
        reshard_after_forward=draw(st.sampled_from([True, False, Reshard.NON_ROOT])),
        reshard_after_backward=draw(st.booleans()),
    )
    if not gradients:
        sync = replace(sync, gradients=GradientSync.LAST)
    parameters_tier = optimizer_tier if materialized else draw(tiers)
    when = draw(st.sampled_from(list(GatherAfterUpdate)))
    if parameters_tier is not Tier.DEVICE and when is GatherAfterUpdate.NEXT_FORWARD:
        when = GatherAfterUpdate.BLOCKING
    wrap = replace(
        plan.wrap,
        parameters=optimizer if materialized else draw(some_axes),
        optimizer=optimizer,
        gradients=gradients,
        updated=updated,
        sync=sync,
        reduce_scatter=draw(st.sampled_from(list(ReduceScatterVia))),
        parameters_tier=parameters_tier,
        optimizer_tier=optimizer_tier,
        gradients_tier=Tier.DEVICE if consumed else draw(tiers),
        update_tier=Tier.HOST if on_host else Tier.DEVICE,
        materialized=materialized,
        consumed=consumed,
        gathered_gradients=tuple(a for a in draw(some_axes) if a in gradients and a not in updated),
        overlaps=draw(st.booleans()) and bool(gradients),
        gather_after_update=when,
    )
    steps = tuple(step for step in plan.replace_steps(wrap).steps if not isinstance(step, Clip))
    return spec, replace(plan, steps=steps)


def life(spec: Spec, plan: Plan) -> tuple[int, int]:
    """Bytes on the tape when the last backward pass is over, and when the step is."""
    assert isinstance(plan.wrap, FlatUnits)
    tape = Tape()
    timeline = Timeline(forward=(), backward=())
    scene = Scene(tape=tape, spec=spec, facts=FACTS, plan=plan, timeline=timeline)
    flat = Flat(scene, plan.wrap)
    num = plan.accumulate.micro_batches
    for index in range(num):
        flat.begin(is_first=index == 0, is_last=index == num - 1)
        for mark in (flat.enter, flat.leave, flat.before_backward):
            for unit in range(len(FACTS.units)):
                mark(unit)
        flat.end()
    if plan.wrap.consumed:
        flat.units.finish_update()  # an updated part that still travels is no gradient
    after_backward = tape.level
    play_update([flat], [0])
    return after_backward, tape.level


@settings(max_examples=60)
@given(plans())
def test_a_step_frees_all_its_allocations(drawn: tuple[Spec, Plan]):
    assert life(*drawn)[1] == 0


@settings(max_examples=60)
@given(plans())
def test_only_gradients_live_after_backward(drawn: tuple[Spec, Plan]):
    spec, plan = drawn
    assert isinstance(plan.wrap, FlatUnits)
    rows = [*make_wrapping(spec, plan, FACTS).footprints(0)]
    gradients = next(row for row in rows if row.state is G)
    assert life(spec, plan)[0] == gradients.device_bytes


@settings(max_examples=60)
@given(plans())
def test_every_further_block_sends_the_same(drawn: tuple[Spec, Plan]):
    """Scalars are sent once, and the root in its own way; a block more is a block more."""
    spec, plan = drawn
    one, two, three = (
        {row.key: row for row in traffic_of_ranks(make_wrapping(spec, plan, facts))}
        for facts in (make_facts(*[BLOCK] * count, ((7, 2),)) for count in (1, 2, 3))
    )
    assert one.keys() == two.keys() == three.keys()
    for key in one:
        for count in ("calls", "payload_bytes", "sent_bytes"):
            first, second, third = (getattr(rows[key], count) for rows in (one, two, three))
            assert third - second == second - first >= 0
