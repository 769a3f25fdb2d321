"""The figures of a few blocks are extrapolated to many if they are periodic, and are unknown
otherwise."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ptrain.cost import Collective, Phase, State, Traffic, TrafficKey
from ptrain.derivation.allocator import steady_reserved
from ptrain.simulation.replay import (
    Begin,
    Change,
    Event,
    MemoryStream,
    StorageKind,
    repeated_calls,
    repeated_storages,
)

FEW = (3, 4, 5)
SIZES = st.integers(1, 4).map(lambda size: size * 512)
ACTIVATION = StorageKind("activation", State.ACTIVATIONS)


@dataclass(frozen=True)
class Toy:
    """A step of equal blocks: each keeps some storages in forward, frees them in backward (the last
    block first) and leaves gradients, which the update frees in either order. `norms`: bytes by
    block of a list that the update makes. `cap`: gradients are in buckets of so many bytes, 0: not
    at all."""

    kept: tuple[int, ...]
    gradients: tuple[int, ...]
    micro_batches: int = 1
    norms: int = 0
    cap: int = 0
    oldest_first: bool = True

    def stream(self, blocks: int) -> MemoryStream:
        keys = iter(range(10**6))
        weights = tuple(
            Change(StorageKind("weight", State.PARAMETERS), size, next(keys))
            for _ in range(blocks)
            for size in self.gradients
        )
        return MemoryStream(resident=weights, events=tuple(self._events(blocks, keys)))

    def _events(self, blocks: int, keys: Iterator[int]) -> Iterator[Event]:
        gradients: list[Change] = []
        for micro in range(self.micro_batches):
            yield Begin(Phase.FORWARD, micro)
            kind = StorageKind("activation", State.ACTIVATIONS, micro)
            kept = [[Change(kind, size, next(keys)) for size in self.kept] for _ in range(blocks)]
            for block in kept:
                yield from block
            yield Begin(Phase.BACKWARD, micro)
            for block in reversed(kept):
                if micro == 0 and not self.cap:
                    kind = StorageKind("gradient", State.GRADIENTS)
                    new = [Change(kind, size, next(keys)) for size in self.gradients]
                    gradients += new
                    yield from new
                yield from map(inverse_change, block)
        if self.cap:
            gradients = [
                Change(StorageKind("bucket", State.GRADIENTS), size, next(keys))
                for size in self.buckets(blocks)
            ]
            yield from gradients
        yield Begin(Phase.UPDATE, 0)
        if self.norms:
            norms = Change(StorageKind("norms", State.TRANSIENT), self.norms * blocks, next(keys))
            yield from (norms, inverse_change(norms))
        yield from map(inverse_change, gradients if self.oldest_first else reversed(gradients))

    def buckets(self, blocks: int) -> Iterator[int]:
        """Yield the bytes of each, in the order in which gradients come."""
        filled = 0
        for size in self.gradients * blocks:
            filled += size
            if filled >= self.cap:
                yield filled
                filled = 0
        if filled:
            yield filled


def inverse_change(change: Change) -> Change:
    return Change(change.kind, -change.size, change.key)


def assert_same(written: MemoryStream, whole: MemoryStream) -> None:
    assert written.history(0) == whole.history(0)
    for expands in (False, True):
        assert steady_reserved(written.allocated_step(), expands=expands) == steady_reserved(
            whole.allocated_step(), expands=expands
        )


TOYS = st.builds(
    Toy,
    kept=st.lists(SIZES, min_size=1, max_size=4).map(tuple),
    gradients=st.lists(SIZES, min_size=1, max_size=3).map(tuple),
    micro_batches=st.integers(1, 3),
    norms=st.sampled_from((0, 4, 512)),
    oldest_first=st.booleans(),
)


@given(TOYS, st.integers(6, 12))
def test_equal_blocks_are_repeated_with_their_lifetimes(toy: Toy, blocks: int) -> None:
    written = repeated_storages([toy.stream(few) for few in FEW], blocks - FEW[0])
    assert written is not None
    assert_same(written, toy.stream(blocks))


@given(TOYS, st.integers(1, 16).map(lambda size: size * 512), st.integers(6, 12))
def test_buckets_are_repeated_rightly_or_not_at_all(toy: Toy, cap: int, blocks: int) -> None:
    toy = Toy(toy.kept, toy.gradients, toy.micro_batches, toy.norms, cap, toy.oldest_first)
    written = repeated_storages([toy.stream(few) for few in FEW], blocks - FEW[0])
    if written is not None:
        assert_same(written, toy.stream(blocks))
    if all(size >= cap for size in toy.gradients):
        assert written is not None, "each has a bucket of its own"


def test_a_bucket_that_grows_is_no_repetition() -> None:
    """A larger model may fill it."""
    toy = Toy(kept=(512,), gradients=(1024,), cap=100_000)
    assert repeated_storages([toy.stream(few) for few in FEW], 1) is None


def test_figures_that_differ_from_block_to_block_are_not_extrapolated() -> None:
    def stream(blocks: int) -> MemoryStream:
        sizes = (512 * (1 + number**2) for number in range(blocks))
        events = [Change(ACTIVATION, size, key) for key, size in enumerate(sizes)]
        return MemoryStream(resident=(), events=(Begin(Phase.FORWARD, 0), *events))

    assert repeated_storages([stream(few) for few in FEW], 1) is None


@pytest.mark.parametrize("beside", [0, 1])
def test_a_storage_in_the_midst_of_those_like_it_is_not_named(beside: int) -> None:
    def stream(blocks: int) -> MemoryStream:
        """One of two by block goes: neither the youngest nor the oldest by the same number."""
        changes = [Change(ACTIVATION, 512, key) for key in range(2 * blocks + 1)]
        middle = changes[blocks + beside]
        return MemoryStream(
            resident=(), events=(Begin(Phase.FORWARD, 0), *changes, inverse_change(middle))
        )

    assert repeated_storages([stream(few) for few in FEW], 1) is None


def call(payload: int, state: State = State.OTHER, ranks: int = 8) -> Traffic:
    key = TrafficKey(
        axes=("dp_shard",), collective=Collective.BROADCAST, state=state, phase=Phase.FORWARD
    )
    sent = -(-payload * (ranks - 1) // ranks)
    return Traffic(key=key, calls=1, payload_bytes=payload, sent_bytes=sent)


def sent_of_eight(call: Traffic) -> int:
    return -(-call.payload_bytes * 7 // 8)


def test_calls_are_repeated_and_the_traffic_of_a_growing_call_is_rounded_again() -> None:
    runs = [[call(100), *[call(64)] * few, call(12 * few)] for few in FEW]
    assert repeated_calls(runs, 6, sent_of_eight) == (
        call(100), *[call(64)] * 9, call(108),
    )  # fmt: skip


def test_a_call_of_gradients_that_grows_is_no_repetition() -> None:
    runs = [[call(100 * few, State.GRADIENTS)] for few in FEW]
    assert repeated_calls(runs, 6, sent_of_eight) is None


def test_where_most_activations_live_is_found_by_its_backward_pass() -> None:
    first, second = (Change(ACTIVATION, size, key) for key, size in enumerate((512, 1024)))
    backward = [Begin(Phase.BACKWARD, micro) for micro in range(3)]
    events = (first, backward[0], second, backward[1], inverse_change(second), backward[2])
    assert MemoryStream(resident=(), events=events).fullest_backward() == 1
