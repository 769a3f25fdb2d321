"""Ghosts by hand: where they begin, as what they count, and what a call of them is reported as.
That tensors do the same is shown where torch is (tests/unit/test_rooms.py)."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from ptrain.cost import Collective, State
from ptrain.runtime.ghost import GhostRuntime
from ptrain.runtime.interface import Shape
from ptrain.spec.cluster import OperatorKind
from ptrain.spec.dials import ReduceScatterVia
from ptrain.spec.placement import Axis, Tier
from ptrain.spec.precision import DType

OUTER, INNER = Axis.DP_REPLICATE, Axis.DP_SHARD
DEGREES = {OUTER: 2, INNER: 3}
DEVICE, HOST, FILE = Tier.DEVICE, Tier.HOST, Tier.FILE
THETA, OMEGA, G, OTHER = State.PARAMETERS, State.OPTIMIZER, State.GRADIENTS, State.OTHER
FP32, BF16 = DType.FP32, DType.BF16


class Rows:
    """What a reader is told."""

    def __init__(self) -> None:
        self.sizes: list[tuple[int, Tier]] = []
        self.calls: list[tuple[object, ...]] = []
        self.operators: list[tuple[OperatorKind, DType, int]] = []

    def record_allocation(self, size: int, tier: Tier) -> None:
        self.sizes.append((size, tier))

    def record_collective(
        self,
        collective: Collective,
        axes: Sequence[Axis],
        state: State,
        payload: int,
        via: str,
        *,
        is_awaited: bool,
    ) -> None:
        self.calls.append((collective, tuple(axes), state, payload, via))

    def record_copy(self, source: Tier, target: Tier, state: State, size: int) -> None:
        self.calls.append((source, target, state, size))

    def record_operator(self, kind: OperatorKind, dtype: DType, size: int) -> None:
        self.operators.append((kind, dtype, size))

    def record_update(self, rule: str, dtype: DType, tier: Tier, shapes: Sequence[Shape]) -> None:
        raise AssertionError("a room updates nothing")


@pytest.fixture
def room() -> GhostRuntime:
    return GhostRuntime(Rows(), DEGREES, {INNER: 2})


def calls(room: GhostRuntime) -> list[tuple[object, ...]]:
    """The calls since it was asked last."""
    reader = room.reader
    assert isinstance(reader, Rows)
    found, reader.calls = reader.calls, []
    return found


def test_a_rank_is_at_its_places_and_at_the_first_of_all_other_axes(room):
    assert [room.coordinate(axis) for axis in DEGREES] == [0, 2]
    assert [room.degree(axis) for axis in DEGREES] == [2, 3]
    elsewhere = room.with_coordinates({OUTER: 1})
    assert [elsewhere.coordinate(axis) for axis in DEGREES] == [1, 0]
    assert elsewhere.reader is room.reader
    assert room.sort_axes((INNER, OUTER)) == (OUTER, INNER)


def test_windows_and_pieces_begin_where_they_lie(room):
    whole = room.new_empty(24, FP32, DEVICE, THETA)
    window = room.view_window(whole, (2, 3, 4), {0: 1, 1: 2})
    assert (window.start, window.shape, window.numel) == (12 + 8, (1, 1, 4), 4)
    inner = room.view_window(room.view_range(whole, 12, (12,)), (3, 4), {1: 3})
    assert (inner.start, inner.shape) == (12 + 3, (3, 1))
    assert room.flatten(window).start == 20
    assert room.is_same_memory(window, room.view_range(whole, 20, (4,)))
    assert not room.is_same_memory(window, room.view_range(whole, 19, (4,)))
    assert not room.is_same_memory(whole, room.new_empty(24, FP32, DEVICE, THETA))
    assert room.reader.sizes == [(96, DEVICE)] * 2 + [(-96, DEVICE)]


def test_a_cast_bears_a_name_only_as_a_state_of_its_own(room):
    source = room.new_empty(6, FP32, HOST, OMEGA, "source")
    kinds = {
        (state, copy): room.cast(source, BF16, state, "cast", copy=copy).storage
        for state in (None, G)
        for copy in (False, True)
    }
    tags = {key: (storage.state, storage.name) for key, storage in kinds.items()}
    assert tags == {key: (G, "cast") if key[0] else (None, "") for key in kinds}
    assert all((storage.size, storage.tier) == (12, HOST) for storage in kinds.values())
    assert room.cast(source, FP32) is source
    assert (source.storage.state, source.storage.name) == (OMEGA, "source")
    assert room.cast(source, FP32, G) is source
    assert (source.storage.state, source.storage.name) == (G, "source")
    assert room.cast(source, FP32, THETA, "other") is source
    assert (source.storage.state, source.storage.name) == (THETA, "other")
    assert not calls(room)


def test_what_is_computed_from_a_file_is_in_memory_and_has_been_read(room):
    source = room.new_empty(6, FP32, FILE, OMEGA, "source")
    like, zeros = room.empty_like(source, 2), room.zeros_like(source, BF16)
    scalar = room.scalar_like(source, FP32)
    assert [ghost.tier for ghost in (like, zeros, scalar)] == [HOST] * 3
    assert [ghost.storage.size for ghost in (like, zeros, scalar)] == [8, 12, 4]
    assert [ghost.storage.state for ghost in (like, zeros, scalar)] == [OMEGA, None, None]
    assert not calls(room)
    assert room.cast(source, BF16, G).tier is HOST
    assert calls(room) == [(FILE, HOST, OMEGA, 24)]


def test_a_copy_counts_as_what_it_is_written_to_and_else_as_what_it_is_read_from(room):
    source, into = room.new_empty(6, FP32, HOST, OMEGA), room.new_empty(6, FP32, DEVICE, G)
    untagged = room.cast(into, BF16)
    room.copy(source, into)
    room.copy(source, untagged)
    room.copy(room.cast(source, BF16), untagged)
    room.copy(into, room.view_range(into, 0, (6,)))
    assert calls(room) == [
        (HOST, DEVICE, G, 24), (HOST, DEVICE, OMEGA, 24), (HOST, DEVICE, OTHER, 12),
    ]  # fmt: skip


def test_a_collective_counts_as_the_first_of_its_tensors_that_has_a_state(room):
    """The result comes first; in an exchange what is received has the state of what is sent."""
    shard, whole = room.new_empty(2, FP32, DEVICE, OMEGA), room.new_empty(6, FP32, DEVICE, G)
    bare = room.cast(room.new_empty(2, BF16, DEVICE, OMEGA), FP32)
    gathered = room.cast(room.new_empty(6, BF16, DEVICE, OMEGA), FP32)
    room.all_gather(shard, whole, (INNER,), is_awaited=True)
    room.all_gather(shard, gathered, (INNER,), is_awaited=True)
    room.all_gather(bare, gathered, (INNER,), is_awaited=True)
    for via in ReduceScatterVia:
        room.reduce_scatter(whole, shard, (INNER,), via, is_awaited=True)
        room.reduce_scatter(whole, bare, (INNER,), via, is_awaited=True)
    room.all_reduce(bare, (OUTER,), is_awaited=True)
    gather, scatter = Collective.ALL_GATHER, Collective.REDUCE_SCATTER
    via = {ReduceScatterVia.NATIVE: "", ReduceScatterVia.ALL_TO_ALL: "all_to_all"}
    states = {ReduceScatterVia.NATIVE: (OMEGA, G), ReduceScatterVia.ALL_TO_ALL: (G, G)}
    assert calls(room) == [
        *((gather, (INNER,), state, 24, "") for state in (G, OMEGA, OTHER)),
        *((scatter, (INNER,), state, 24, via[how]) for how in via for state in states[how]),
        (Collective.ALL_REDUCE, (OUTER,), OTHER, 8, ""),
    ]


def test_an_exchange_has_one_buffer_more_until_it_is_waited_for(room):
    whole = room.new_empty(6, FP32, DEVICE, G)
    shard = room.empty_like(whole, 2)
    room.reader.sizes.clear()
    exchange = ReduceScatterVia.ALL_TO_ALL
    move = room.reduce_scatter(whole, shard, (INNER,), exchange, is_awaited=False)
    assert room.reader.sizes == [(24, DEVICE)]
    assert move.wait() is shard
    assert room.reader.sizes == [(24, DEVICE), (-24, DEVICE)]


def test_what_does_not_fit_together_is_no_collective(room):
    whole = room.new_empty(6, FP32, DEVICE, G)
    for shard in (
        room.new_empty(3, FP32, DEVICE, G),
        room.new_empty(2, BF16, DEVICE, G),
        room.new_empty(2, FP32, HOST, G),
    ):
        with pytest.raises(AssertionError):
            room.all_gather(shard, whole, (INNER,), is_awaited=True)
    with pytest.raises(AssertionError):
        room.all_reduce(room.new_empty(2, FP32, HOST, G), (INNER,), is_awaited=True)
    with pytest.raises(AssertionError):
        room.copy(room.new_empty(2, FP32, HOST, G), whole)
    with pytest.raises(AssertionError):
        room.add(whole, room.new_empty(2, FP32, DEVICE, G))
    with pytest.raises(AssertionError):
        room.view_window(whole, (2, 4), {0: 1})


def test_a_room_tells_what_its_operators_read_and_write():
    """Zeros are written; a cast and a copy read one and write the other; a sum reads both and
    writes one of them. What goes to another tier is a copy between tiers and no operator."""
    rows = Rows()
    room = GhostRuntime(rows, DEGREES, {INNER: 2})
    zeros = room.zeros(6, FP32, Tier.DEVICE, G)
    narrow = room.cast(zeros, BF16)
    room.copy(narrow, room.new_empty(6, BF16, Tier.DEVICE, G))
    room.add(zeros, narrow)
    room.copy_to_tier(zeros, Tier.HOST, G)
    assert rows.operators == [
        (OperatorKind.POINTWISE, FP32, 24),
        (OperatorKind.COPY, BF16, 24 + 12),
        (OperatorKind.COPY, BF16, 12 + 12),
        (OperatorKind.POINTWISE, FP32, 24 + 12 + 24),
    ]
    assert rows.calls == [(Tier.DEVICE, Tier.HOST, G, 24)]
