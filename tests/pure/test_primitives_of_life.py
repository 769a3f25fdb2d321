"""What the life of flat units asks of its room, in order: which storages it makes and as what they
count, what it issues and what it waits for, what it clears, adds up and announces. Followed by
hand on two units of 17 and 18 elements, both 18 padded for two ranks, where bytes alone say too
little."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings

from ptrain.costs import Phase, State
from ptrain.derivation.flat import Flat
from ptrain.derivation.tape import Scene, Tape
from ptrain.plan.lower import lower
from ptrain.rooms.ghost import Ghost, GhostRoom, Storage
from ptrain.rooms.room import Axes, Move
from ptrain.spec.batch import GatherAfterUpdate, ReduceScatterVia
from ptrain.spec.placement import Tier
from ptrain.spec.precision import LAYOUTS, ZERO16
from ptrain.spec.spec import Spec
from ptrain.steps.step import FlatUnits, Plan
from ptrain.timeline import Timeline
from tests.pure.build import ZERO_2, make_facts, tuple_of
from tests.pure.test_flat_life import BLOCK, on_two, plans

FACTS = make_facts(BLOCK, ((7, 2), (1, 4)))
FORWARD, BACKWARD, UPDATE = Phase.FORWARD, Phase.BACKWARD, Phase.UPDATE
CALLS = ("gather", "reduce-scatter", "all-reduce")
CLEARED = ["clear 36 from 0"]
followed = pytest.mark.usefixtures("written")
BLOCKS, ROOT = "blocks.0.0 … blocks.0.1", "root.0 … root.1"


class Written(GhostRoom):
    """A room that writes down what it is asked for, in `events` of its reader."""

    @property
    def _events(self) -> list[str]:
        events: list[str] = self.reader.events  # type: ignore[attr-defined]
        return events

    def all_gather(self, shard: Ghost, into: Ghost, axes: Axes, *, is_awaited: bool) -> None:
        self._events.append(f"gather {_when(is_awaited)}")
        super().all_gather(shard, into, axes, is_awaited=is_awaited)

    def reduce_scatter(
        self, whole: Ghost, into: Ghost, axes: Axes, via: ReduceScatterVia, *, is_awaited: bool
    ) -> Move[Ghost]:
        self._events.append(f"reduce-scatter {_when(is_awaited)}")
        return super().reduce_scatter(whole, into, axes, via, is_awaited=is_awaited)

    def all_reduce(self, tensor: Ghost, axes: Axes, *, is_awaited: bool) -> Move[Ghost]:
        self._events.append(f"all-reduce {_when(is_awaited)}")
        return super().all_reduce(tensor, axes, is_awaited=is_awaited)

    def clear(self, tensor: Ghost) -> None:
        self._events.append(f"clear {tensor.nbytes} from {tensor.start}")

    def add(self, tensor: Ghost, part: Ghost) -> None:
        super().add(tensor, part)
        self._events.append(f"add {part.nbytes} on {tensor.tier}")

    def ahead(self, tensor: Ghost) -> None:
        self._events.append(f"ahead {tensor.nbytes} on {tensor.tier}")


def _when(is_awaited: bool) -> str:
    return "awaited" if is_awaited else "begun"


class Pages(Tape):
    """A tape with what was asked for beside it, by phase."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[str] = []


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lives are played in rooms that write; every storage is written down as it is made."""
    monkeypatch.setattr("ptrain.derivation.flat.GhostRoom", Written)
    make = Storage.__init__

    def noted(
        storage: Storage, size: int, tier: Tier, state: State | None, name: str, reader: Any
    ) -> None:
        reader.events.append(f"{size} on {tier} as {state}" + f" of {name}" * bool(name))
        make(storage, size, tier, state, name, reader)

    monkeypatch.setattr(Storage, "__init__", noted)


def opened(spec: Spec, **dials: object) -> tuple[Pages, Flat]:
    plan = lower(spec, FACTS.unit_modules)
    assert isinstance(plan.wrap, FlatUnits)
    plan = plan.having(replace(plan.wrap, **dials))
    return _opened(spec, plan)


def _opened(spec: Spec, plan: Plan) -> tuple[Pages, Flat]:
    assert isinstance(plan.wrap, FlatUnits)
    pages, nothing = Pages(), Timeline(forward=(), backward=())
    scene = Scene(tape=pages, spec=spec, facts=FACTS, plan=plan, timeline=nothing)
    return pages, Flat(scene, plan.wrap)


def step(pages: Pages, flat: Flat) -> Iterator[tuple[Phase, list[str]]]:
    """One step, phase by phase, with what it asked for."""
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


def asked(spec: Spec, **dials: object) -> list[list[str]]:
    """Of a steady step: each forward and backward pass, the reduction, the update."""
    pages, flat = opened(spec, **dials)
    list(step(pages, flat))
    return [events for _, events in step(pages, flat)]


def of_kind(events: Sequence[str], *kinds: str) -> list[str]:
    return [event for event in events if event.startswith(kinds)]


@followed
def test_zero_2_reduces_what_each_unit_gave_and_gathers_in_place():
    forward, backward, reduction, update = asked(on_two(ZERO_2))
    assert forward == reduction == []
    assert backward == [
        f"72 on device as gradients of {ROOT}",
        f"72 on device as gradients of {BLOCKS}",
        f"36 on device as gradients of {BLOCKS}",
        "reduce-scatter awaited",
        f"36 on device as gradients of {ROOT}",
        "reduce-scatter awaited",
    ]
    # gradient and Theta of the unit after; its state is in place, and is not announced
    assert update == ["ahead 36 on device", "ahead 72 on device"] + ["gather awaited"] * 2


@followed
def test_what_is_on_the_host_comes_in_the_dtype_of_use_and_is_updated_there():
    forward, backward, reduction, update = asked(on_two(tuple_of("O,O,S"), layout=ZERO16))
    brought = ["18 on device as parameters", "gather awaited"]
    assert forward == 2 * brought
    assert backward == [
        *brought,
        f"36 on device as gradients of {ROOT}",
        *brought,
        f"36 on device as gradients of {BLOCKS}",
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
    first, backward, second, later, reduction, update = asked(spec)
    brought = ["36 on host as parameters", "36 on device as parameters", "gather awaited"]
    # the unit that follows in this direction is announced
    assert first == second == [*brought, "ahead 36 on file", *brought]
    opening = [f"72 on device as gradients of {name}" for name in (ROOT, BLOCKS)]
    both = [*brought, "ahead 36 on file", opening[0], *brought, opening[1]]
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
def test_a_second_gradient_is_added_up_and_the_first_is_cleared():
    spec = on_two(tuple_of("R,S,R"), layout=LAYOUTS["zero20"], accumulate=2)
    _, first, _, second, reduction, _ = asked(spec)
    opening = [f"36 on device as gradients of {name}" for name in (ROOT, BLOCKS)]
    summed = {name: f"72 on device as gradients of {name}" for name in (BLOCKS, ROOT)}
    assert first == [*opening, summed[BLOCKS], *CLEARED, summed[ROOT], *CLEARED]
    assert second == ["add 36 on device", *CLEARED] * 2
    assert reduction == [
        f"36 on device as gradients of {BLOCKS}",
        "reduce-scatter awaited",
        f"36 on device as gradients of {ROOT}",
        "reduce-scatter awaited",
    ]


@followed
def test_the_padding_of_whole_tensors_is_cleared():
    spec = on_two(tuple_of("S*,S*@host,R"), layout=ZERO16, optimizer="muon", momentum=0.9)
    *_, reduction, update = asked(spec)
    assert reduction == ["all-reduce awaited"] * 2
    # tensors of 15 and 2 elements on two ranks: momentum and master of the first are made
    # longer by one; of the unit's 17 in 16 bits the last is padding
    padding = ["clear 2 from 17", "clear 0 from 18"]
    assert of_kind(update, "clear") == [*["clear 64 from 0"] * 2, *padding]


def calls_of(spec: Spec, **dials: object) -> list[list[str]]:
    return [of_kind(events, *CALLS) for events in asked(spec, **dials)]


@followed
def test_without_prefetch_and_overlap_everything_is_awaited():
    for modes in ("S*,R,S", "R,S,S", "R,S,R", "S*@host,S*,R"):
        for calls in calls_of(on_two(tuple_of(modes))):
            assert all(call.endswith("awaited") for call in calls)


@followed
def test_a_unit_ahead_is_begun_in_both_directions():
    forward, backward, *_ = calls_of(on_two(tuple_of("S*,R,S")), prefetch=1)
    assert forward == ["gather awaited", "gather begun"]
    assert of_kind(backward, "gather") == ["gather awaited", "gather begun"]
    assert of_kind(backward, "reduce") == ["reduce-scatter awaited"] * 2


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
def test_gathers_beside_the_update_are_begun_and_those_after_it_are_awaited():
    spec = on_two(ZERO_2)
    *_, update = calls_of(spec, gather_after_update=GatherAfterUpdate.DURING_UPDATE)
    assert update == ["gather begun"] * 2
    forward, *_, update = calls_of(spec, gather_after_update=GatherAfterUpdate.NEXT_FORWARD)
    assert (forward, update) == (["gather awaited"] * 2, [])


def test_a_unit_of_one_tensor_bears_its_name_alone():
    spec = on_two(ZERO_2)
    facts = make_facts(((6,),), ())
    plan = lower(spec, facts.unit_modules)
    assert isinstance(plan.wrap, FlatUnits)
    nothing = Timeline(forward=(), backward=())
    scene = Scene(tape=Tape(), spec=spec, facts=facts, plan=plan, timeline=nothing)
    (unit,) = Flat(scene, plan.wrap).units.all
    assert unit.parameters.whole.storage.name == "blocks.0.0"


@settings(deadline=None, max_examples=60)
@given(plans())
def test_what_is_kept_counts_as_the_state_that_it_is_listed_as(drawn: tuple[Spec, Plan]):
    """Theta and G by their tags. Omega's too: a scalar as much as a moment."""
    spec, plan = drawn
    pages, flat = _opened(spec, plan)
    for _ in step(pages, flat):
        states = Counter((state, ghost.storage.state) for state, ghost in flat.storages())
        assert all(listed is tagged for listed, tagged in states), states


@settings(deadline=None, max_examples=30)
@given(plans())
def test_a_second_step_is_the_first_again(drawn: tuple[Spec, Plan]):
    """What a step leaves is what it came upon: signatures, and kept storages, stay."""
    spec, plan = drawn
    pages, flat = _opened(spec, plan)
    list(step(pages, flat))
    signature = flat.signature()
    kept = [id(ghost.storage) for state, ghost in flat.storages() if state is not State.GRADIENTS]
    list(step(pages, flat))
    assert flat.signature() == signature
    assert kept == [
        id(ghost.storage) for state, ghost in flat.storages() if state is not State.GRADIENTS
    ]


def test_a_signature_tells_what_a_pass_depends_on():
    _, flat = opened(on_two(ZERO_2, accumulate=2))
    seen = [flat.units.signature()]
    for unit in range(2):
        flat.before_backward(unit)
        seen.append(flat.units.signature())
    flat.units.all[0].accumulated(0)
    seen.append(flat.units.signature())
    flat.end()
    seen.append(flat.units.signature())
    assert len(set(seen)) == len(seen)
