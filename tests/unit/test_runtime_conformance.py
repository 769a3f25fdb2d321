"""The fake runtime conforms to the torch runtime: after every statement of a program the live bytes
by tier, their maximum, the traffic, and the size, dtype, device, state and storage of every tensor
are equal."""

from __future__ import annotations

import gc
import inspect
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from ptrain.runtime.comm import Mesh
from ptrain.runtime.ghost import Ghost
from ptrain.runtime.interface import TensorRuntime
from ptrain.runtime.world import fake_world
from ptrain.spec.precision import DType
from ptrain.steps.step import CreateMesh
from tests.unit.both_runtimes import (
    CallRecorder,
    Program,
    WatchedFakeRuntime,
    WatchedRuntime,
    notes,
    notes_of_fake_tensors,
    notes_of_tensors,
)
from tests.unit.random_programs import random_program
from tests.unit.runtime_programs import ALONE, BOTH, DEVICE, TOGETHER, G

DRAWN = 150
PROGRAMS = ALONE | TOGETHER


@pytest.fixture(scope="module")
def mesh() -> Iterator[Mesh]:
    """Rank 3 of two times two: collectives move nothing, and sizes are those of four ranks."""
    world = fake_world(rank=3, size=4)
    try:
        mesh = Mesh(CreateMesh(axes=BOTH, degrees=(2, 2)), world)
        # what torch imports at its first operator leaves a cycle that holds that tensor
        notes_of_tensors(PROGRAMS["make_tensors"], mesh, None)
        gc.freeze()  # every program begins with a collection, which then has little to look at
        yield mesh
    finally:
        dist.destroy_process_group()


def require_alike(program: Program, mesh: Mesh, path: Path) -> None:
    tensors = notes_of_tensors(program, mesh, str(path))
    ghosts = notes_of_fake_tensors(program, mesh)
    for number, (there, here) in enumerate(zip(tensors, ghosts, strict=True)):
        assert there == here, f"{program.__name__}: after statement {number}"
    assert not any(ghosts[-1].live.values()), "everything is given back"


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_primitive_has_the_same_effect_on_fake_and_real_tensors(name, mesh, tmp_path):
    require_alike(PROGRAMS[name], mesh, tmp_path)


@pytest.mark.parametrize("first", range(0, DRAWN, 50))
def test_random_programs_have_the_same_effect_on_fake_and_real_tensors(first, mesh, tmp_path):
    for seed in range(first, first + 50):
        require_alike(random_program(seed), mesh, tmp_path)


def called_methods(program: Program, mesh: Mesh) -> set[str]:
    """The names of the methods that a program calls."""
    watched = WatchedFakeRuntime(mesh.degrees, {})
    watched.room = called = CallRecorder(watched, mesh.degrees, {})
    notes(program, watched, lambda: None)
    return called.names


def test_every_primitive_of_the_runtime_has_a_program(mesh):
    public = {
        name
        for name, member in vars(TensorRuntime).items()
        if inspect.isfunction(member) and not name.startswith("_")
    }
    assert len(public) > 20
    assert public == public & set().union(
        *(called_methods(program, mesh) for program in PROGRAMS.values())
    )


def test_a_runtime_that_frees_a_buffer_late_is_detected(mesh, tmp_path, monkeypatch):
    held: list[object] = []
    cast = CallRecorder.cast

    def late(self: Any, tensor: Ghost, *arguments: Any, **options: Any) -> Ghost:
        held.append(tensor)
        return cast(self, tensor, *arguments, **options)

    monkeypatch.setattr("ptrain.runtime.ghost.GhostRuntime.cast", late)
    with pytest.raises(AssertionError, match="after statement"):
        require_alike(PROGRAMS["cast_tensors"], mesh, tmp_path)


def test_a_byte_more_is_noticed(mesh):
    def program(on: WatchedRuntime[Any]) -> Iterator[Sequence[Any]]:
        yield (on.room.new_empty(3 + isinstance(on, WatchedFakeRuntime), DType.FP32, DEVICE, G),)

    with pytest.raises(AssertionError, match="after statement 0"):
        require_alike(program, mesh, Path())
