"""The replay of autograd and optimizers for flat units equals torch on tensors: gradient
accumulation, and the allocations of an optimizer step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from torch import nn

from ptrain.axes.data.run.flat_target import ParameterMembers
from ptrain.cost import State
from ptrain.derivation.flat import GhostMembers
from ptrain.optimizers.build import TorchOptimizerFactory
from ptrain.optimizers.ghost import GhostOptimizerFactory
from ptrain.optimizers.update import moment_shapes
from ptrain.runtime.comm import Mesh
from ptrain.runtime.world import World
from ptrain.spec.job import OPTIMIZERS, OptimizerSpec
from ptrain.spec.placement import Axis, Tier
from ptrain.spec.precision import DType
from ptrain.steps.step import CreateMesh
from ptrain.timeline import Complete
from tests.pure.build import make_facts
from tests.unit.both_runtimes import (
    Note,
    WatchedFakeRuntime,
    WatchedRuntime,
    WatchedTorchRuntime,
    notes,
)

SHAPES = ((5, 3), (2,))
NUMELS = (15, 2)
DEVICE, G = Tier.DEVICE, State.GRADIENTS
Give = Callable[[int, bool], None]
Program = Callable[[WatchedRuntime[Any], Any, Give], Iterator[Sequence[Any]]]


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    """One rank."""
    return Mesh(CreateMesh(axes=(), degrees=()), World())


def by_tensors(program: Program, mesh: Mesh) -> list[Note]:
    """Gradients come out of autograd's backward pass: fresh, or (`cloned`) as a view of a scalar,
    which AccumulateGrad copies."""
    named = [(str(index), nn.Parameter(torch.zeros(shape))) for index, shape in enumerate(SHAPES)]
    ones = [torch.ones(shape) for shape in SHAPES]
    members = ParameterMembers(named)

    def give(index: int, cloned: bool) -> None:
        parameter = named[index][1]
        with torch.enable_grad():
            (parameter.sum() if cloned else (parameter * ones[index]).sum()).backward()

    watched = tensors_watched(mesh)
    with ExitStack() as entered:
        for context in (torch.no_grad(), watched.meter, watched):
            entered.enter_context(context)
        return notes(lambda on: program(on, members, give), watched, lambda: None)


def tensors_watched(mesh: Mesh) -> WatchedTorchRuntime:
    """Return a watched torch runtime that has run once: the imports of its first operator leave a
    reference cycle."""
    watched = WatchedTorchRuntime(mesh)
    with watched:
        watched.room.zeros(1, DType.FP32, DEVICE, G)
    return WatchedTorchRuntime(mesh)


def by_ghosts(program: Program) -> list[Note]:
    watched = WatchedFakeRuntime({}, {})
    members = GhostMembers(make_facts(SHAPES).units[0].tensors, watched)

    def give(index: int, cloned: bool) -> None:
        size = NUMELS[index] * 4
        watched.record_allocation(size, DEVICE)
        members.accept_gradient(index, Complete(members.names[index], size, cloned))
        if cloned:
            watched.record_allocation(-size, DEVICE)

    return notes(lambda on: program(on, members, give), watched, lambda: None)


def require_equal_notes(program: Program, mesh: Mesh, name: str = "") -> None:
    """Require equal notes, except for the maximum between two notes, which a forward pass
    changes."""
    there, here = by_tensors(program, mesh), by_ghosts(program)
    for number, (left, right) in enumerate(zip(there, here, strict=True)):
        assert replace(left, peak=0) == replace(right, peak=0), f"{name}: statement {number}"


def binding(on: WatchedRuntime[Any], members: Any, give: Give) -> Iterator[Sequence[Any]]:
    """A first gradient is taken over or copied until it is written to a flat tensor, or zeros are
    where there is none; later ones are added there in place. The tensor lives while they are bound
    to it."""
    whole = on.room.new_empty(17, DType.FP32, DEVICE, G)
    give(1, True)
    yield (whole,)
    members.write_gradient(1, whole, is_bound=True)
    yield (whole,)
    members.write_gradient(0, whole, is_bound=True)
    for index, cloned in ((0, False), (1, True), (0, True), (1, False)):
        give(index, cloned)
        yield (whole,)
    del whole
    yield ()
    members.drop_gradients()
    yield ()


def collecting(on: WatchedRuntime[Any], members: Any, give: Give) -> Iterator[Sequence[Any]]:
    """The first is taken over or copied, the next is added to it, until they are collected."""
    whole = on.room.zeros(17, DType.BF16, DEVICE, G)
    give(0, False)
    members.write_gradient(0, whole, is_bound=False)
    yield (whole,)
    for index, cloned in ((0, False), (0, False), (1, True), (1, True), (1, False)):
        give(index, cloned)
        yield (whole,)
    members.add_gradient(0, whole)
    yield (whole,)
    members.add_gradient(0, whole)
    give(0, True)
    yield (whole,)
    members.drop_gradients()
    yield (whole,)
    members.add_gradient(1, whole)
    yield (whole,)


def adopting(on: WatchedRuntime[Any], members: Any, give: Give) -> Iterator[Sequence[Any]]:
    """Parameters are views of the last flat tensor that adopted them, which lives with them."""
    whole = on.room.zeros(17, DType.FP32, DEVICE, State.PARAMETERS)
    members.bind_views(whole)
    yield (whole,)
    del whole
    yield ()
    other = on.room.zeros(18, DType.FP32, DEVICE, State.PARAMETERS)
    members.bind_views(other)
    on.room.free_storage(other)
    yield ()
    on.room.allocate_storage(other)
    give(0, False)
    yield (other,)
    members.drop_gradients()
    yield (other,)


def random_order(seed: int) -> Program:
    def program(on: WatchedRuntime[Any], members: Any, give: Give) -> Iterator[Sequence[Any]]:
        draw, bound = Random(seed), set[int]()
        whole = on.room.zeros(17, DType.FP32, DEVICE, G)
        for _ in range(15):
            match draw.choice(("give", "give", "give", "collect", "write", "unbind", "new")):
                case "give":
                    give(draw.randrange(2), draw.random() < 0.4)
                case "collect" if (index := draw.randrange(2)) not in bound:
                    members.add_gradient(index, whole)
                case "write":
                    index, is_bound = draw.randrange(2), draw.random() < 0.6
                    members.write_gradient(index, whole, is_bound=is_bound)
                    bound = bound | {index} if is_bound else bound - {index}
                case "unbind":
                    members.drop_gradients()
                    bound.clear()
                case "new":
                    whole = on.room.zeros(17, DType.FP32, DEVICE, G)
            yield (whole,)

    return program


@pytest.mark.parametrize("program", [binding, collecting, adopting], ids=lambda p: p.__name__)
def test_replayed_gradients_have_the_lifetimes_of_autograds(program, mesh):
    require_equal_notes(program, mesh)


def test_replayed_gradients_have_the_lifetimes_of_autograds_in_random_orders(mesh):
    for seed in range(60):
        require_equal_notes(random_order(seed), mesh, f"seed {seed}")


def test_replayed_members_equal_those_of_parameters():
    unit = make_facts(SHAPES).units[0]
    ghosts = GhostMembers(unit.tensors, WatchedFakeRuntime({}, {}))
    tensors = ParameterMembers([(t.name, nn.Parameter(torch.zeros(t.shape))) for t in unit.tensors])
    for name in ("names", "shapes", "are_cut", "cutting_axes"):
        assert list(getattr(ghosts, name)) == list(getattr(tensors, name)), name
    tensors_of_tp = tuple(tensor._replace(cut_over=(Axis.TP,)) for tensor in unit.tensors)
    cut = GhostMembers(tensors_of_tp, WatchedFakeRuntime({}, {}))
    assert (cut.are_cut, cut.cutting_axes) == ([True, True], (Axis.TP,))


# ---- optimizers

MATRICES = ((6, 10), (10, 6), (8, 8), (1, 5))


def updating(rules: Any, rule: str, dtype: DType, *, is_scaled: bool) -> Any:
    """Leaves that are made, filled, updated and emptied, as a member of an update does it."""

    def program(on: WatchedRuntime[Any]) -> Iterator[Sequence[Any]]:
        room, state = on.room, State.OPTIMIZER
        spec = OptimizerSpec(name=rule, momentum=0.9)
        shapes = MATRICES if rule == "muon" else ((6, 10), (7,))
        numels = [shape[0] * (shape[1] if len(shape) > 1 else 1) for shape in shapes]
        values = [
            room.view_range(room.zeros(numel, dtype, DEVICE, state), 0, shape)
            for numel, shape in zip(numels, shapes, strict=True)
        ]
        leaves = [rules.create_leaf(value, dtype) for value in values]
        nothings = [leaf.value for leaf in leaves]
        yield nothings
        optimizer = rules.create_optimizer(rule, leaves, spec)
        for leaf, value in zip(leaves, values, strict=True):
            for name, shape in moment_shapes(rule, spec, room.shape(value)).items():
                leaf.state[name] = room.zeros_like(value, dtype, shape)
            for name, initial in OPTIMIZERS[rule].numbers.items():
                leaf.state[name] = room.scalar_like(value, DType.FP32, initial)
            leaf.value = value
            leaf.gradient = room.zeros_like(value, dtype)
        del values, value, leaf
        yield [leaf.value for leaf in leaves]
        scale = room.zeros(1, DType.FP32, DEVICE, state)
        scalars = (
            (room.view_range(scale, 0, ()), room.view_range(scale, 0, ())) if is_scaled else None
        )
        yield (scale,)
        optimizer.step(0.1, scalars)
        yield (scale,)
        leaves[0].gradient = None
        optimizer.step(0.1, scalars)
        yield (scale,)
        for leaf, nothing in zip(leaves, nothings, strict=True):
            leaf.value, leaf.gradient = nothing, None
        yield ()

    return program


def steps(rule: str, dtype: DType, mesh: Mesh, *, is_scaled: bool) -> tuple[list[Note], list[Note]]:
    ghosts = WatchedFakeRuntime({}, {})
    here = notes(
        updating(GhostOptimizerFactory(ghosts), rule, dtype, is_scaled=is_scaled),
        ghosts,
        lambda: None,
    )
    for _ in range(2):  # torch.optim's first step imports what leaves a cycle
        watched = tensors_watched(mesh)
        with torch.no_grad(), watched.meter, watched:
            there = notes(
                updating(TorchOptimizerFactory(), rule, dtype, is_scaled=is_scaled),
                watched,
                lambda: None,
            )
    return there, here


@pytest.mark.parametrize("is_scaled", [False, True])
@pytest.mark.parametrize("dtype", [DType.FP32, DType.BF16, DType.FP64])
@pytest.mark.parametrize("rule", OPTIMIZERS)
def test_an_optimizer_has_the_same_memory_in_replay_and_on_tensors(rule, dtype, is_scaled, mesh):
    there, here = steps(rule, dtype, mesh, is_scaled=is_scaled)
    for number, (left, right) in enumerate(zip(there, here, strict=True)):
        assert left == right, f"statement {number}"
