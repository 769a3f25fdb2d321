"""The calls that the replay of flat units makes to its runtime, in order: allocations with their
states, collectives and waits, resets, sums and announcements. Computed by hand for two units of 17
and 18 elements, both padded to 18 for two ranks, where byte totals do not determine the calls."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings

from ptrain.axes.data.update import TensorTarget
from ptrain.cost import State
from ptrain.derivation.flat import Flat, GhostScale
from ptrain.derivation.tape import Scene, Tape
from ptrain.optimizers.ghost import GhostFused
from ptrain.plan.lower import lower
from ptrain.spec.dials import GatherAfterUpdate, Overlap
from ptrain.spec.placement import Axis, Tier
from ptrain.spec.precision import LAYOUTS, ZERO16
from ptrain.spec.spec import Spec
from ptrain.steps.step import Plan
from ptrain.steps.wraps import FlatUnits
from ptrain.timeline import Kind, Timeline
from tests.pure.build import ZERO_2, make_facts, make_spec, tuple_of
from tests.pure.recorded_replay import (
    FACTS,
    of_kind,
    open_replay,
    opened_plan,
    record_step_calls,
    step,
    write_down,
)
from tests.pure.test_flat_replay import on_two, plans

CALLS = ("gather", "reduce-scatter", "all-reduce")
followed = pytest.mark.usefixtures("recording")
BLOCKS, ROOT = "blocks.0.0 … blocks.0.1", "root.0 … root.1"


@pytest.fixture
def recording(monkeypatch: pytest.MonkeyPatch) -> None:
    write_down(monkeypatch)


@followed
def test_zero_2_reduces_each_units_gradients_and_gathers_in_place():
    forward, backward, reduction, update = record_step_calls(on_two(ZERO_2))
    assert forward == reduction == []
    assert backward == [
        f"72 on device as gradients of {ROOT}",
        f"72 on device as gradients of {BLOCKS}",
        "clear 4 from 17",
        f"36 on device as gradients of {BLOCKS}",
        "reduce-scatter awaited",
        f"36 on device as gradients of {ROOT}",
        "reduce-scatter awaited",
    ]
    # gradient and Theta of the unit after; its state is in place, and is not announced
    assert update == ["ahead 36 on device", "ahead 72 on device"] + ["gather begun"] * 2


@followed
def test_host_states_are_copied_in_the_dtype_of_use_and_updated_there():
    forward, backward, reduction, update = record_step_calls(
        on_two(tuple_of("O,O,S"), layout=ZERO16), prefetch=0
    )
    brought = ["18 on device as parameters", "gather awaited"]
    assert forward == 2 * brought
    assert backward == [
        *brought,
        f"36 on device as gradients of {ROOT}",
        *brought,
        f"36 on device as gradients of {BLOCKS}",
        "clear 2 from 17",
        f"18 on device as gradients of {BLOCKS}",
        "reduce-scatter awaited",
        f"18 on device as gradients of {ROOT}",
        "reduce-scatter awaited",
    ]
    assert reduction == []
    # its 16-bit gradient, in fp32 beside the master copy, and Theta in 16 bits again
    unit = ["18 on host as gradients", "36 on host as None", "18 on host as None"]
    announced = [18, 18, 36, 36, 4, 36]  # gradient, Theta, two moments, the counter, the master
    tiers = ["device", *["host"] * 5]
    ahead = [f"ahead {size} on {tier}" for size, tier in zip(announced, tiers, strict=True)]
    assert update == [*ahead, *unit, *unit]


@followed
def test_files_are_read_added_to_and_written_by_way_of_the_host():
    spec = on_two(tuple_of("S*@file,S@file,S@file"), accumulate=2)
    first, backward, second, later, reduction, update = record_step_calls(spec, prefetch=0)
    brought = ["36 on host as parameters", "36 on device as parameters", "gather awaited"]
    # the unit that follows in this direction is announced
    assert first == second == [*brought, "ahead 36 on file", *brought]
    opening = [f"72 on device as gradients of {name}" for name in (ROOT, BLOCKS)]
    both = [*brought, "ahead 36 on file", opening[0], *brought, opening[1], "clear 4 from 17"]
    kept = {
        name: [
            f"36 on device as gradients of {name}",
            "reduce-scatter awaited",
            "36 on host as gradients",
        ]
        for name in (BLOCKS, ROOT)
    }
    assert backward == [*both, *kept[BLOCKS], *kept[ROOT]]  # into the file that there is
    added = ["36 on host as gradients", "add 36 on host"]
    assert later == [*both, *kept[BLOCKS], *added, *kept[ROOT], *added]
    assert reduction == ["36 on host as gradients"] * 2
    read = ["36 on host as parameters"] + ["36 on host as optimizer"] * 2
    ahead = ["ahead 36 on host", *["ahead 36 on file"] * 3, "ahead 4 on file"]
    assert update == [*ahead, *[*read, "4 on host as optimizer"] * 2]


@followed
def test_a_second_gradient_is_written_where_the_first_was_and_both_are_added_up():
    spec = on_two(tuple_of("R,S,R"), layout=LAYOUTS["zero20"], accumulate=2)
    _, first, _, second, reduction, _ = record_step_calls(spec)
    opening = [f"36 on device as gradients of {name}" for name in (ROOT, BLOCKS)]
    opening.append("clear 2 from 17")
    summed = {name: f"72 on device as gradients of {name}" for name in (BLOCKS, ROOT)}
    assert first == [*opening, summed[BLOCKS], summed[ROOT]]
    assert second == ["add 36 on device"] * 2
    assert reduction == [
        f"36 on device as gradients of {BLOCKS}",
        "reduce-scatter awaited",
        f"36 on device as gradients of {ROOT}",
        "reduce-scatter awaited",
    ]


@followed
def test_file_states_are_updated_on_the_device_through_the_host():
    *_, update = record_step_calls(
        on_two(tuple_of("S*@file,S@file,S@file")), update_tier=Tier.DEVICE
    )
    states = [
        *("36 on host as optimizer", "36 on device as optimizer") * 2,
        *("4 on host as optimizer", "4 on device as optimizer"),
    ]
    unit = [
        "36 on device as gradients",
        *("36 on host as parameters", "36 on device as parameters"),
        *states,
        *(state for state in states if "host" in state),  # and back
        "36 on host as parameters",
    ]
    assert [event for event in update if not event.startswith("ahead")] == [*unit, *unit]


@followed
def test_a_counter_is_no_moment_and_is_never_cast():
    spec = on_two(tuple_of("R,O,S"), layout=LAYOUTS["bf16"])
    *_, update = record_step_calls(spec, update_tier=Tier.DEVICE)
    unit = ["18 on device as optimizer"] * 2 + ["4 on device as optimizer", "gather begun"]
    assert [event for event in update if not event.startswith("ahead")] == [*unit, *unit]


@followed
def test_fully_updated_states_are_gathered_in_their_dtype():
    *_, reduction, update = record_step_calls(on_two(tuple_of("S*,R,S")))
    assert reduction == ["72 on device as gradients", "gather awaited"] * 2
    assert update == [
        *("ahead 72 on device", "ahead 36 on device"),
        *("72 on device as parameters", "gather awaited") * 2,
    ]


@followed
def test_halves_of_a_pass_open_units_and_reduce_all_of_them_after_the_second():
    pages, flat = open_replay(on_two(ZERO_2))
    flat.begin(is_first=True, is_last=True)
    pages.events = []
    flat.begin_half(Kind.INPUT)
    for unit in (1, 0):
        flat.before_backward(unit)
    flat.end_half(Kind.INPUT)
    opening = [f"72 on device as gradients of {name}" for name in (ROOT, BLOCKS)]
    opening.append("clear 4 from 17")
    assert pages.events == opening
    flat.begin_half(Kind.WEIGHT)
    assert pages.events == opening
    flat.end_half(Kind.WEIGHT)
    assert pages.events[len(opening) :] == [
        *(f"36 on device as gradients of {ROOT}", "reduce-scatter awaited"),
        *(f"36 on device as gradients of {BLOCKS}", "reduce-scatter awaited"),
    ]
    assert all(unit.pending == 0 for unit in flat.units.all)


@pytest.mark.parametrize("placement", ["R,S,S", "S*,R,S"])
def test_every_optimizer_gets_the_learning_rate_and_the_scale(placement, monkeypatch):
    seen = []
    monkeypatch.setattr(GhostFused, "step", lambda rule, lr, scalars: seen.append((lr, scalars)))
    spec = replace(on_two(tuple_of(placement), layout=ZERO16), prefetch=0)
    _, flat = open_replay(spec, consumed=False)
    for unit in flat.units.all:
        unit.before_backward()
    flat.end()
    flat.reduce()
    flat.update_of.step(0.5)
    assert seen == [(0.5, None)] * 2
    flat.update_of.step_group(1, 0.25)
    flat.update_of.step_group(0, 0.125, is_taken=False)
    assert seen[2:] == [(0.25, None)]
    flat.update_of.step(0.5, GhostScale(Tape()))
    value = flat.update_of.groups[0].members[0].slots["master"].stored
    lr, scalars = seen[3]
    assert lr == 0.5 and scalars is not None
    assert all(scalar.shape == () for scalar in scalars)
    assert all(scalar.storage is not value.storage for scalar in scalars)


@pytest.mark.parametrize(
    ("optimizer", "momentum", "names"),
    [
        ("adamw", 0.0, {"exp_avg", "exp_avg_sq", "step", "master"}),
        ("sgd", 0.9, {"momentum_buffer", "master"}),
        ("sgd", 0.0, {"master"}),
    ],
)
def test_optimizer_state_bears_torch_s_names(optimizer, momentum, names):
    spec = on_two(tuple_of("R,S,S"), optimizer=optimizer, momentum=momentum, layout=ZERO16)
    _, flat = open_replay(spec, consumed=False)
    assert [{*tensors} for _, tensors in flat.update_of.tensors()] == [names] * 2


@followed
def test_the_padding_of_whole_tensors_is_cleared():
    spec = on_two(tuple_of("S*,S*@host,R"), layout=ZERO16, optimizer="muon", momentum=0.9)
    *_, reduction, update = record_step_calls(spec)
    assert reduction == ["all-reduce awaited"] * 2
    # tensors of 15 and 2 elements on two ranks: momentum and master of the first are made
    # longer by one; of the unit's 17 in 16 bits the last is padding
    padding = ["clear 2 from 17", "clear 0 from 18"]
    assert of_kind(update, "clear") == [*["clear 64 from 0"] * 2, *padding]


def calls_of(spec: Spec, **dials: object) -> list[list[str]]:
    return [of_kind(events, *CALLS) for events in record_step_calls(spec, **dials)]


@followed
def test_without_prefetch_and_overlap_everything_is_awaited():
    for modes in ("S*,R,S", "R,S,S", "R,S,R", "S*@host,S*,R"):
        for calls in calls_of(replace(on_two(tuple_of(modes)), overlap=Overlap.NONE)):
            assert all(call.endswith("awaited") for call in calls)


@pytest.mark.parametrize(
    ("modes", "dials", "ahead"),
    [
        ("S*,R,S", {}, 1),
        ("O,O,S", {}, 1),
        ("R,S,S", {}, 0),
        ("S*,R,S", {"overlap": Overlap.NONE}, 0),
        ("S*,R,S", {"prefetch": 0}, 0),
        ("S*,R,S", {"prefetch": 3}, 3),
    ],
)
def test_by_default_the_next_unit_is_prefetched(modes, dials, ahead):
    wrap = lower(replace(on_two(tuple_of(modes)), **dials), FACTS).wrap
    assert isinstance(wrap, FlatUnits)
    assert wrap.prefetch == ahead


@followed
def test_a_unit_ahead_is_begun_in_both_directions():
    forward, backward, *_ = calls_of(on_two(tuple_of("S*,R,S")), prefetch=1)
    assert forward == ["gather awaited", "gather begun"]
    assert of_kind(backward, "gather") == ["gather awaited", "gather begun"]
    assert of_kind(backward, "reduce") == ["reduce-scatter awaited"] * 2


@pytest.mark.parametrize(
    ("modes", "overlap", "overlaps"),
    [
        ("R,S,S", None, True),
        ("S*,S@host,S@host", None, True),
        ("R,S,R", None, False),
        ("R,S,S", Overlap.NONE, False),
        ("R,S,R", Overlap.BACKWARD, True),
    ],
)
def test_sharded_gradients_are_reduced_during_backward_by_default(modes, overlap, overlaps):
    spec = replace(on_two(tuple_of(modes)), overlap=overlap)
    assert lower(spec, FACTS).wrap.overlaps is overlaps


@pytest.mark.parametrize(
    ("shards", "replicas", "is_beside"),
    [
        ("R,S,R", None, True),
        ("R,O,S", None, True),
        ("R,S,S", "R,R,R", True),
        ("R,R,R", "R,S,R", True),
        ("R,S,S", "R,S,R", False),  # a group counts replicas first, memory counts them last
        ("R@host,O,S", None, False),
        ("R,S,M", None, False),
        ("R,R,O", None, False),
    ],
)
def test_updated_shards_are_gathered_during_the_update_if_no_memory_is_needed(
    shards, replicas, is_beside
):
    outer = {} if replicas is None else {Axis.DP_REPLICATE: (2, tuple_of(replicas))}
    spec = make_spec({**outer, Axis.DP_SHARD: (2, tuple_of(shards))}, clip=None)
    wrap = lower(spec, FACTS).wrap
    assert isinstance(wrap, FlatUnits)
    blocking = GatherAfterUpdate.BLOCKING
    when = GatherAfterUpdate.DURING_UPDATE if is_beside else blocking
    assert wrap.gather_after_update is when
    for said in ({"overlap": Overlap.NONE}, {"gather_after_update": blocking}):
        plain = lower(replace(spec, **said), FACTS).wrap
        assert isinstance(plain, FlatUnits) and plain.gather_after_update is blocking


@followed
def test_overlap_begins_every_reduction_of_the_backward_pass():
    for modes, call in (("R,S,S", "reduce-scatter"), ("R,S,R", "reduce-scatter")):
        _, backward, reduction, _ = calls_of(on_two(tuple_of(modes)), overlaps=True)
        assert (backward, reduction) == ([f"{call} begun"] * 2, [])
    _, backward, reduction, _ = calls_of(
        on_two(tuple_of("S*,S*,R")), overlaps=True, gathered_gradients=(), updated=()
    )
    assert (of_kind(backward, "all-reduce"), reduction) == (["all-reduce begun"] * 2, [])


@followed
def test_overlapped_gathers_are_started_and_later_ones_awaited():
    spec = on_two(ZERO_2)
    *_, update = calls_of(spec, gather_after_update=GatherAfterUpdate.DURING_UPDATE)
    assert update == ["gather begun"] * 2
    forward, *_, update = calls_of(spec, gather_after_update=GatherAfterUpdate.NEXT_FORWARD)
    assert (forward, update) == (["gather awaited"] * 2, [])


@pytest.mark.parametrize(
    ("placement", "ranks"), [("S*,R,R", None), ("S*,R@host,R", 1), ("S*,S*,R", 2)]
)
def test_state_of_whole_tensors_has_their_shape_where_it_is_used_as_it_is_kept(placement, ranks):
    """Elsewhere it is flat, and padded for the ranks that keep a part each."""
    _, flat = open_replay(on_two(tuple_of(placement), optimizer="muon", momentum=0.9))
    for target, tensors in flat.update_of.tensors():
        assert isinstance(target, TensorTarget)
        kept = target.shape if ranks is None else (-(-math.prod(target.shape) // ranks),)
        assert {ghost.shape for name, ghost in tensors.items() if name != "step"} == {kept}


def test_a_unit_of_one_tensor_bears_its_name_alone():
    spec = on_two(ZERO_2)
    facts = make_facts(((6,),), ())
    plan = lower(spec, facts)
    assert isinstance(plan.wrap, FlatUnits)
    nothing = Timeline(forward=(), backward=())
    scene = Scene(tape=Tape(), spec=spec, facts=facts, plan=plan, timeline=nothing)
    (unit,) = Flat(scene, plan.wrap).units.all
    assert unit.parameters.whole.storage.name == "blocks.0.0"


@settings(max_examples=60)
@given(plans())
def test_resident_tensors_count_as_their_listed_state(drawn: tuple[Spec, Plan]):
    """Theta and G by their tags. Omega's too: a scalar as much as a moment."""
    spec, plan = drawn
    pages, flat = opened_plan(spec, plan)
    for _ in step(pages, flat):
        states = Counter((state, ghost.storage.state) for state, ghost in flat.storages())
        assert all(listed is tagged for listed, tagged in states), states


@settings(max_examples=30)
@given(plans())
def test_a_second_step_is_the_first_again(drawn: tuple[Spec, Plan]):
    """What a step leaves is what it came upon: signatures, and kept storages, stay."""
    spec, plan = drawn
    pages, flat = opened_plan(spec, plan)
    list(step(pages, flat))
    signature = flat.signature()
    kept = [id(ghost.storage) for state, ghost in flat.storages() if state is not State.GRADIENTS]
    list(step(pages, flat))
    assert flat.signature() == signature
    assert kept == [
        id(ghost.storage) for state, ghost in flat.storages() if state is not State.GRADIENTS
    ]


def test_a_signature_contains_the_dependencies_of_a_pass():
    _, flat = open_replay(on_two(ZERO_2, accumulate=2))
    seen = [flat.units.signature()]
    for unit in range(2):
        flat.before_backward(unit)
        seen.append(flat.units.signature())
    flat.units.all[0].handle_gradient(0)
    seen.append(flat.units.signature())
    flat.end()
    seen.append(flat.units.signature())
    assert len(set(seen)) == len(seen)
