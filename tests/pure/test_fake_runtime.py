"""The fake runtime, computed by hand: allocation, role and recorded call of each operation.
tests/unit/test_runtime_conformance.py compares it with tensors."""

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
    """A reader that records events."""

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
def fake_runtime() -> GhostRuntime:
    return GhostRuntime(Rows(), DEGREES, {INNER: 2})


def calls(room: GhostRuntime) -> list[tuple[object, ...]]:
    """Return the calls since the last request."""
    reader = room.reader
    assert isinstance(reader, Rows)
    found, reader.calls = reader.calls, []
    return found


def test_a_rank_has_its_coordinates_and_coordinate_zero_on_other_axes(fake_runtime):
    assert [fake_runtime.coordinate(axis) for axis in DEGREES] == [0, 2]
    assert [fake_runtime.degree(axis) for axis in DEGREES] == [2, 3]
    elsewhere = GhostRuntime(fake_runtime.reader, DEGREES, {OUTER: 1})
    assert [elsewhere.coordinate(axis) for axis in DEGREES] == [1, 0]
    assert fake_runtime.sort_axes((INNER, OUTER)) == (OUTER, INNER)


def test_views_begin_at_their_offsets(fake_runtime):
    whole = fake_runtime.new_empty(24, FP32, DEVICE, THETA)
    window = fake_runtime.view_window(whole, (2, 3, 4), {0: 1, 1: 2})
    assert (window.start, window.shape, window.numel) == (12 + 8, (1, 1, 4), 4)
    inner = fake_runtime.view_window(fake_runtime.view_range(whole, 12, (12,)), (3, 4), {1: 3})
    assert (inner.start, inner.shape) == (12 + 3, (3, 1))
    assert fake_runtime.flatten(window).start == 20
    assert fake_runtime.is_same_memory(window, fake_runtime.view_range(whole, 20, (4,)))
    assert not fake_runtime.is_same_memory(window, fake_runtime.view_range(whole, 19, (4,)))
    assert not fake_runtime.is_same_memory(whole, fake_runtime.new_empty(24, FP32, DEVICE, THETA))
    assert fake_runtime.reader.sizes == [(96, DEVICE)] * 2 + [(-96, DEVICE)]


def test_a_cast_has_a_state_name_only_as_a_separate_state(fake_runtime):
    source = fake_runtime.new_empty(6, FP32, HOST, OMEGA, "source")
    kinds = {
        (state, copy): fake_runtime.cast(source, BF16, state, "cast", copy=copy).storage
        for state in (None, G)
        for copy in (False, True)
    }
    tags = {key: (storage.state, storage.name) for key, storage in kinds.items()}
    assert tags == {key: (G, "cast") if key[0] else (None, "") for key in kinds}
    assert all((storage.size, storage.tier) == (12, HOST) for storage in kinds.values())
    assert fake_runtime.cast(source, FP32) is source
    assert (source.storage.state, source.storage.name) == (OMEGA, "source")
    assert fake_runtime.cast(source, FP32, G) is source
    assert (source.storage.state, source.storage.name) == (G, "source")
    assert fake_runtime.cast(source, FP32, THETA, "other") is source
    assert (source.storage.state, source.storage.name) == (THETA, "other")
    assert not calls(fake_runtime)


def test_results_computed_from_a_file_are_in_memory_after_a_read(fake_runtime):
    source = fake_runtime.new_empty(6, FP32, FILE, OMEGA, "source")
    like, zeros = fake_runtime.empty_like(source, 2), fake_runtime.zeros_like(source, BF16)
    scalar = fake_runtime.scalar_like(source, FP32)
    assert [ghost.tier for ghost in (like, zeros, scalar)] == [HOST] * 3
    assert [ghost.storage.size for ghost in (like, zeros, scalar)] == [8, 12, 4]
    assert [ghost.storage.state for ghost in (like, zeros, scalar)] == [OMEGA, None, None]
    assert not calls(fake_runtime)
    assert fake_runtime.cast(source, BF16, G).tier is HOST
    assert calls(fake_runtime) == [(FILE, HOST, OMEGA, 24)]


def test_a_copy_counts_as_its_target_or_else_its_source(fake_runtime):
    source, into = (
        fake_runtime.new_empty(6, FP32, HOST, OMEGA),
        fake_runtime.new_empty(6, FP32, DEVICE, G),
    )
    untagged = fake_runtime.cast(into, BF16)
    fake_runtime.copy(source, into)
    fake_runtime.copy(source, untagged)
    fake_runtime.copy(fake_runtime.cast(source, BF16), untagged)
    fake_runtime.copy(into, fake_runtime.view_range(into, 0, (6,)))
    assert calls(fake_runtime) == [
        (HOST, DEVICE, G, 24), (HOST, DEVICE, OMEGA, 24), (HOST, DEVICE, OTHER, 12),
    ]  # fmt: skip


def test_a_collective_counts_as_its_first_tensor_with_a_state(fake_runtime):
    """The result comes first; in an exchange the received tensor has the state of the sent one."""
    shard, whole = (
        fake_runtime.new_empty(2, FP32, DEVICE, OMEGA),
        fake_runtime.new_empty(6, FP32, DEVICE, G),
    )
    bare = fake_runtime.cast(fake_runtime.new_empty(2, BF16, DEVICE, OMEGA), FP32)
    gathered = fake_runtime.cast(fake_runtime.new_empty(6, BF16, DEVICE, OMEGA), FP32)
    fake_runtime.all_gather(shard, whole, (INNER,), is_awaited=True)
    fake_runtime.all_gather(shard, gathered, (INNER,), is_awaited=True)
    fake_runtime.all_gather(bare, gathered, (INNER,), is_awaited=True)
    for via in ReduceScatterVia:
        fake_runtime.reduce_scatter(whole, shard, (INNER,), via, is_awaited=True)
        fake_runtime.reduce_scatter(whole, bare, (INNER,), via, is_awaited=True)
    fake_runtime.all_reduce(bare, (OUTER,), is_awaited=True)
    gather, scatter = Collective.ALL_GATHER, Collective.REDUCE_SCATTER
    via = {ReduceScatterVia.NATIVE: "", ReduceScatterVia.ALL_TO_ALL: "all_to_all"}
    states = {ReduceScatterVia.NATIVE: (OMEGA, G), ReduceScatterVia.ALL_TO_ALL: (G, G)}
    assert calls(fake_runtime) == [
        *((gather, (INNER,), state, 24, "") for state in (G, OMEGA, OTHER)),
        *((scatter, (INNER,), state, 24, via[how]) for how in via for state in states[how]),
        (Collective.ALL_REDUCE, (OUTER,), OTHER, 8, ""),
    ]


def test_an_exchange_holds_one_more_buffer_until_its_wait(fake_runtime):
    whole = fake_runtime.new_empty(6, FP32, DEVICE, G)
    shard = fake_runtime.empty_like(whole, 2)
    fake_runtime.reader.sizes.clear()
    exchange = ReduceScatterVia.ALL_TO_ALL
    move = fake_runtime.reduce_scatter(whole, shard, (INNER,), exchange, is_awaited=False)
    assert fake_runtime.reader.sizes == [(24, DEVICE)]
    assert move.wait() is shard
    assert fake_runtime.reader.sizes == [(24, DEVICE), (-24, DEVICE)]


def test_mismatched_tensors_are_no_collective(fake_runtime):
    whole = fake_runtime.new_empty(6, FP32, DEVICE, G)
    for shard in (
        fake_runtime.new_empty(3, FP32, DEVICE, G),
        fake_runtime.new_empty(2, BF16, DEVICE, G),
        fake_runtime.new_empty(2, FP32, HOST, G),
    ):
        with pytest.raises(AssertionError):
            fake_runtime.all_gather(shard, whole, (INNER,), is_awaited=True)
    with pytest.raises(AssertionError):
        fake_runtime.all_reduce(fake_runtime.new_empty(2, FP32, HOST, G), (INNER,), is_awaited=True)
    with pytest.raises(AssertionError):
        fake_runtime.copy(fake_runtime.new_empty(2, FP32, HOST, G), whole)
    with pytest.raises(AssertionError):
        fake_runtime.add(whole, fake_runtime.new_empty(2, FP32, DEVICE, G))
    with pytest.raises(AssertionError):
        fake_runtime.view_window(whole, (2, 4), {0: 1})


def test_the_runtime_records_the_bytes_that_operators_read_and_write():
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
