"""The fake runtime conforms to the runtime of a rank with gloo: gloo's works hold their tensors
until they are waited for, and its threads a moment longer."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from ptrain.runtime.comm import Mesh
from ptrain.runtime.world import World
from ptrain.steps.step import CreateMesh
from tests.ranks import Ranks
from tests.unit.both_runtimes import notes_of_fake_tensors, notes_of_tensors
from tests.unit.random_programs import random_program
from tests.unit.runtime_programs import ALONE, BOTH, TOGETHER

pytestmark = pytest.mark.gloo

DRAWN = 20
RELEASE_SECONDS = 2e-3


def _differences(names: Sequence[str], seeds: Sequence[int]) -> list[str]:
    """Return the programs and statements after which the two runtimes differ on this rank, without
    the maximum between two readings, which would include tensors that a thread still holds."""
    world = World(
        rank=dist.get_rank(), size=dist.get_world_size(), device=torch.device("cpu"), backend="gloo"
    )
    mesh = Mesh(CreateMesh(axes=BOTH, degrees=(2, 2)), world)
    settle: Callable[[], None] = lambda: time.sleep(RELEASE_SECONDS)  # noqa: E731
    notes_of_tensors(ALONE["make_tensors"], mesh, None)  # torch's first operator leaves a cycle
    differing = []
    for program in (*map(TOGETHER.__getitem__, names), *map(random_program, seeds)):
        there = notes_of_tensors(program, mesh, None, settle)
        here = notes_of_fake_tensors(program, mesh)
        assert len(there) == len(here)
        differing += [
            f"{program.__name__}: after statement {number}: {left} {right}"
            for number, (left, right) in enumerate(zip(there, here, strict=True))
            if replace(left, peak=0) != replace(right, peak=0)
        ]
    return differing


def test_collectives_on_gloo_match_those_on_fake_tensors(ranks: Ranks) -> None:
    assert ranks.run(4, _differences, list(TOGETHER), range(DRAWN)) == [[]] * 4
