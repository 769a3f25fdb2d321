"""The memory meter counts live bytes exactly and attributes them."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from shutil import which

import pytest
import torch
import torch._inductor.config
from torch import Tensor
from torch._prims.rng_prims import run_and_save_rng_state

from ptrain.cost import Phase, State
from ptrain.meters.memory import MemoryMeter
from ptrain.models.ledger import set_tier
from ptrain.runtime.comm import TagRegistry
from ptrain.spec.placement import Tier


class Holder:
    """A program that declares these tensors and does nothing."""

    def __init__(self, *held: tuple[State, Tensor]) -> None:
        self.held = list(held)
        self.registry = TagRegistry()

    def storages(self) -> Iterator[tuple[State, Tensor]]:
        yield from self.held


def peak(meter: MemoryMeter, phase: Phase = Phase.FORWARD) -> int:
    return next(row.device_bytes for row in meter.peaks() if row.phase is phase)


def device_bytes(meter: MemoryMeter) -> dict[State, int]:
    return {row.state: row.device_bytes for row in meter.footprints()}


def test_views_of_one_storage_count_once_and_with_their_padding():
    padded = torch.zeros(10)
    holder = Holder((State.PARAMETERS, padded[:7]), (State.PARAMETERS, padded[2:5]))
    with MemoryMeter(holder) as meter:
        pass
    assert device_bytes(meter)[State.PARAMETERS] == 40


def test_host_memory_is_no_device_memory():
    there, here = torch.zeros(8), torch.zeros(2)
    set_tier(there, Tier.HOST)
    with MemoryMeter(Holder((State.OPTIMIZER, there), (State.OPTIMIZER, here))) as meter:
        pass
    (row,) = (row for row in meter.footprints() if row.state is State.OPTIMIZER)
    assert (row.device_bytes, row.host_bytes) == (8, 32)


@pytest.mark.parametrize("is_born_inside", [False, True])
@pytest.mark.parametrize("is_declared", [False, True])
def test_a_batch_of_the_callers_counts_only_if_it_is_a_state(
    is_born_inside: bool, is_declared: bool
):
    weight, rows = torch.zeros(4), torch.zeros(6, 5)
    holder = Holder((State.PARAMETERS, weight))
    with MemoryMeter(holder) as meter:
        if is_born_inside:
            rows = torch.zeros(6, 5)
        if is_declared:
            holder.held.append((State.OTHER, rows))
        holder.registry.mark_input(rows[:3])
        part = rows[[0, 2]]
        meter.phase(Phase.FORWARD, 0)
        kept = part + 1
    assert peak(meter) == 16 + 40 + 40 + 120 * is_declared
    assert device_bytes(meter)[State.OTHER] == 120 * is_declared
    del kept


@pytest.mark.parametrize("tier", [Tier.HOST, Tier.FILE])
def test_a_buffer_that_is_tagged_after_its_birth_is_in_no_peak(tier: Tier):
    weight = torch.zeros(4)
    with MemoryMeter(Holder((State.PARAMETERS, weight))) as meter:
        meter.phase(Phase.UPDATE, 0)
        staging = torch.empty(100)
        set_tier(staging, tier)
        staging.fill_(1)
        here = weight + 1
        del staging
        there = torch.empty(100)
        set_tier(there, tier)
    assert peak(meter, Phase.UPDATE) == 32
    assert meter.live == 32
    del here, there


def test_a_tensor_freed_between_allocation_and_tag_does_not_hide_the_tag():
    """An operator's argument, or a tensor freed by another thread."""
    with MemoryMeter(Holder()) as meter:
        meter.phase(Phase.UPDATE, 0)
        argument = torch.empty(10)
        staging = torch.empty(100)
        del argument
        set_tier(staging, Tier.HOST)
        here = torch.empty(5)
        del staging
    assert peak(meter, Phase.UPDATE) == 40
    assert meter.live == 20
    del here


def test_the_peak_counts_simultaneously_live_bytes():
    weight = torch.zeros(100)
    with MemoryMeter(Holder((State.PARAMETERS, weight))) as meter:
        meter.phase(Phase.FORWARD, 0)
        first = weight + 1
        second = first + 1
        del first
        third = second + 1
        del second, third
    assert peak(meter) == 3 * 400
    assert meter.live == 400


def test_undeclared_memory_from_before_the_step_counts():
    forgotten = torch.zeros(50)
    with MemoryMeter(Holder()) as meter:
        meter.phase(Phase.FORWARD, 0)
        total = forgotten.sum()
        meter.phase(Phase.BACKWARD, 0)
        del total
    assert device_bytes(meter)[State.OTHER] == 200
    assert device_bytes(meter)[State.ACTIVATIONS] == 4
    assert peak(meter) == 204


def test_each_phase_has_a_peak():
    with MemoryMeter(Holder()) as meter:
        meter.phase(Phase.FORWARD, 0)
        kept = torch.zeros(10)
        meter.phase(Phase.BACKWARD, 0)
        torch.zeros(5)
        meter.phase(Phase.UPDATE, 0)
        del kept
    assert [peak(meter, phase) for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.UPDATE)] == [
        40,
        60,
        40,
    ]


def test_tensors_saved_by_forward_are_activations_and_resized_ones_transient():
    weight = torch.zeros(3)
    gathered = torch.zeros(50)
    gathered.untyped_storage().resize_(0)
    with MemoryMeter(Holder((State.PARAMETERS, weight))) as meter:
        meter.phase(Phase.FORWARD, 0)
        gathered.untyped_storage().resize_(200)
        saved = weight * 2
        meter.phase(Phase.BACKWARD, 0)
        gathered.untyped_storage().resize_(0)
    read = device_bytes(meter)
    assert read[State.ACTIVATIONS] == saved.untyped_storage().nbytes() == 12
    assert read[State.TRANSIENT] == 200
    assert read[State.PARAMETERS] == 12


def test_the_last_micro_batch_determines_the_activations():
    with MemoryMeter(Holder()) as meter:
        for index, size in enumerate((10, 20)):
            meter.phase(Phase.FORWARD, index)
            saved = torch.zeros(size)
            meter.phase(Phase.BACKWARD, index)
            del saved
    assert device_bytes(meter)[State.ACTIVATIONS] == 80


def test_a_batch_that_an_operator_reads_before_it_is_declared_counts_from_the_start():
    batch = torch.zeros(6)
    holder = Holder()
    with MemoryMeter(holder) as meter:
        parts = batch.split(2)
        holder.held.append((State.OTHER, batch))
        meter.phase(Phase.FORWARD, 0)
        del parts
    assert peak(meter) == 24
    assert device_bytes(meter)[State.OTHER] == 24


def test_gradients_are_read_when_backward_is_over_even_if_they_go_with_the_update():
    weight = torch.zeros(4, requires_grad=True)
    holder = Holder((State.PARAMETERS, weight))
    with MemoryMeter(holder) as meter:
        meter.phase(Phase.FORWARD, 0)
        loss = (weight * weight).sum()
        meter.phase(Phase.BACKWARD, 0)
        loss.backward()
        holder.held.append((State.GRADIENTS, weight.grad))
        meter.phase(Phase.UPDATE, 0)
        holder.held.pop()
        weight.grad = None
    assert device_bytes(meter)[State.GRADIENTS] == 16


def allocated_at_most(step: Callable[[], object]) -> int:
    """Return the most bytes that torch's profiler sees a step hold: it reports every allocation and
    free of the CPU allocator, another count by another path."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        step()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    level = highest = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        level += event.nbytes()
        highest = max(highest, level)
    return highest


def test_the_peak_equals_the_allocators_count_of_a_step():
    """These operators allocate only their results."""
    weight = torch.ones(1000, requires_grad=True)

    def step() -> None:
        x = weight
        for _ in range(5):
            x = x.sigmoid().tanh() + x
        x.sum().backward()
        weight.grad = None

    step()
    with MemoryMeter(Holder((State.PARAMETERS, weight))) as meter:
        meter.phase(Phase.FORWARD, 0)
        step()
    assert peak(meter) - 4000 == allocated_at_most(step) > 0


@pytest.mark.skipif(which("g++") is None, reason="inductor compiles with a C++ compiler")
def test_the_peak_of_compiled_code_equals_the_allocators_count():
    first, second = (torch.full((64, 64), 0.01, requires_grad=True) for _ in range(2))
    x = torch.ones(256, 64)

    def block() -> Tensor:
        return ((x @ first).sigmoid().tanh() @ second).exp().mean()

    def step(forward: Callable[[], Tensor]) -> None:
        forward().backward()
        first.grad = second.grad = None

    def measured(forward: Callable[[], Tensor]) -> int:
        held = [(State.PARAMETERS, tensor) for tensor in (first, second, x)]
        with MemoryMeter(Holder(*held)) as meter:
            meter.phase(Phase.FORWARD, 0)
            step(forward)
        return peak(meter) - 4 * (2 * 64 * 64 + 256 * 64)

    with torch._inductor.config.patch(compile_threads=1):
        compiled = torch.compile(block, fullgraph=True)
        step(compiled)
        for _ in range(2):  # the program allocates as before between two measurements
            assert measured(compiled) == allocated_at_most(lambda: step(compiled)) > 0
    assert measured(compiled) < measured(block)


def test_an_error_inside_leaves_the_collector_and_resize_as_they_were():
    resize = torch.UntypedStorage.resize_
    with pytest.raises(ZeroDivisionError), MemoryMeter(Holder()):
        assert not gc.isenabled()
        raise ZeroDivisionError
    assert gc.isenabled()
    assert torch.UntypedStorage.resize_ is resize


def test_the_results_of_a_higher_order_operator_are_counted():
    """Compiled recomputation with dropout saves the state of random numbers by one."""
    x = torch.ones(1000)
    with MemoryMeter(Holder((State.PARAMETERS, x))) as meter:
        meter.phase(Phase.FORWARD, 0)
        state, (dropped, mask) = run_and_save_rng_state(
            torch.ops.aten.native_dropout.default, x, 0.5, True
        )
    assert peak(meter) == sum(its.nbytes for its in (x, state, dropped, mask))
