"""A room of ghosts conforms to a room of tensors: after every statement of a program the same bytes
live on the same tiers, as many lived at most, the same was sent and copied, and tensors are alike
in size, kind, place, state and in what they are views of."""

from __future__ import annotations

import gc
import inspect
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from ptrain.rooms.comm import Mesh
from ptrain.rooms.ghost import Ghost
from ptrain.rooms.room import TensorRuntime
from ptrain.rooms.world import fake_world
from ptrain.spec.precision import DType
from ptrain.steps.step import CreateMesh
from tests.unit.both_rooms import (
    Called,
    GhostsWatched,
    Program,
    Watched,
    notes,
    notes_of_ghosts,
    notes_of_tensors,
)
from tests.unit.drawn_programs import drawn
from tests.unit.room_programs import ALONE, BOTH, DEVICE, TOGETHER, G

DRAWN = 150
PROGRAMS = ALONE | TOGETHER


@pytest.fixture(scope="module")
def mesh() -> Iterator[Mesh]:
    """Rank 3 of two times two: collectives move nothing, and sizes are those of four ranks."""
    world = fake_world(rank=3, size=4)
    try:
        mesh = Mesh(CreateMesh(axes=BOTH, degrees=(2, 2)), world)
        # what torch imports at its first operator leaves a cycle that holds that tensor
        notes_of_tensors(PROGRAMS["making"], mesh, None)
        gc.freeze()  # every program begins with a collection, which then has little to look at
        yield mesh
    finally:
        dist.destroy_process_group()


def require_alike(program: Program, mesh: Mesh, path: Path) -> None:
    tensors = notes_of_tensors(program, mesh, str(path))
    ghosts = notes_of_ghosts(program, mesh)
    for number, (there, here) in enumerate(zip(tensors, ghosts, strict=True)):
        assert there == here, f"{program.__name__}: after statement {number}"
    assert not any(ghosts[-1].live.values()), "everything is given back"


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_primitive_does_on_ghosts_what_it_does_on_tensors(name, mesh, tmp_path):
    require_alike(PROGRAMS[name], mesh, tmp_path)


@pytest.mark.parametrize("first", range(0, DRAWN, 50))
def test_drawn_programs_do_on_ghosts_what_they_do_on_tensors(first, mesh, tmp_path):
    for seed in range(first, first + 50):
        require_alike(drawn(seed), mesh, tmp_path)


def played(program: Program, mesh: Mesh) -> set[str]:
    """The names of the methods that a program calls."""
    watched = GhostsWatched(mesh.degrees, {})
    watched.room = called = Called(watched, mesh.degrees, {})
    notes(program, watched, lambda: None)
    return called.names


def test_every_primitive_of_a_room_has_a_program(mesh):
    public = {
        name
        for name, member in vars(TensorRuntime).items()
        if inspect.isfunction(member) and not name.startswith("_")
    }
    assert len(public) > 20
    assert public == public & set().union(*(played(program, mesh) for program in PROGRAMS.values()))


def test_a_room_that_gives_a_buffer_back_late_is_noticed(mesh, tmp_path, monkeypatch):
    held: list[object] = []
    cast = Called.cast

    def late(self: Any, tensor: Ghost, *arguments: Any, **options: Any) -> Ghost:
        held.append(tensor)
        return cast(self, tensor, *arguments, **options)

    monkeypatch.setattr("ptrain.rooms.ghost.GhostRuntime.cast", late)
    with pytest.raises(AssertionError, match="after statement"):
        require_alike(PROGRAMS["casting"], mesh, tmp_path)


def test_a_byte_more_is_noticed(mesh):
    def program(on: Watched[Any]) -> Iterator[Sequence[Any]]:
        yield (on.room.new_empty(3 + isinstance(on, GhostsWatched), DType.FP32, DEVICE, G),)

    with pytest.raises(AssertionError, match="after statement 0"):
        require_alike(program, mesh, Path())
