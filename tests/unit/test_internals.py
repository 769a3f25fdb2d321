"""The private torch APIs in use exist in the installed torch as `internals` declares them."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

import ptrain.internals
from ptrain.internals import fsdp2
from ptrain.internals.part import FIRST, LAST, PrivatePart
from ptrain.runtime.world import fake_world
from ptrain.version import TESTED_TORCH

SUBSYSTEMS = sorted(
    path.stem
    for path in Path(ptrain.internals.__path__[0]).glob("*.py")
    if path.stem not in ("__init__", "part")
)


def has_part(part: PrivatePart, version: str) -> bool:
    """Return True if this torch version has the part."""

    def numbers(text: str) -> tuple[int, ...]:
        return tuple(map(int, text.split(".")[:2]))

    return numbers(part.since) <= numbers(version) <= numbers(part.until)


def find_differences(part: PrivatePart, version: str) -> Iterator[str]:
    """Yield a sentence for every difference of the part from the installed torch."""
    owner, is_due = part.owner, has_part(part, version)
    name = str(getattr(owner, "__qualname__", getattr(owner, "__name__", owner)))
    taken = inspect.signature(owner).parameters if part.arguments else ()
    known = [(member, hasattr(owner, member), "has") for member in part.members]
    known += [(argument, argument in taken, "takes") for argument in part.arguments]
    for member, is_there, verb in known:
        if is_due and not is_there:
            yield f"{name} has no {member} in torch {version}"
        if not is_due and is_there:
            span = f"{part.since} to {part.until}"
            yield f"{name} {verb} {member} in torch {version} too; expected {span}"


def test_internals_are_written_for_every_torch_that_is_tested():
    assert (TESTED_TORCH[0], TESTED_TORCH[-1]) == (FIRST, LAST)


@pytest.mark.parametrize("subsystem", SUBSYSTEMS)
def test_torch_has_the_declared_apis_of_a_component(subsystem):
    parts = import_module(f"ptrain.internals.{subsystem}").PARTS
    assert parts
    faults = [fault for part in parts for fault in find_differences(part, torch.__version__)]
    assert not faults, "; ".join(faults)


class Changed:
    kept = 1

    @staticmethod
    def call(argument: int) -> None: ...


@pytest.mark.parametrize(
    ("part", "fault"),
    [
        (PrivatePart(owner=Changed, members=("kept",)), None),
        (PrivatePart(owner=Changed, members=("gone",)), "Changed has no gone in torch 2.13.0"),
        (PrivatePart(owner=Changed, members=("gone",), since="2.14"), None),
        (PrivatePart(owner=Changed, members=("gone",), until="2.12"), None),
        (
            PrivatePart(owner=Changed, members=("kept",), since="2.14"),
            "Changed has kept in torch 2.13.0 too; expected 2.14 to 2.15",
        ),
        (PrivatePart(owner=Changed.call, arguments=("argument",)), None),
        (
            PrivatePart(owner=Changed.call, arguments=("other",)),
            "Changed.call has no other in torch 2.13.0",
        ),
    ],
)
def test_a_changed_api_is_reported_in_a_sentence(part, fault):
    assert [*find_differences(part, "2.13.0")] == ([] if fault is None else [fault])


def test_the_policies_of_a_group_are_those_that_fully_shard_was_given():
    world = fake_world(0, 2)
    mesh = init_device_mesh("cpu", (2,))
    given = MixedPrecisionPolicy(param_dtype=torch.bfloat16), CPUOffloadPolicy(pin_memory=False)
    wrapped = fully_shard(
        torch.nn.Linear(8, 8), mesh=mesh, mp_policy=given[0], offload_policy=given[1]
    )
    (group,) = fsdp2.parameter_groups(wrapped)
    *precisions, offload = fsdp2.policies(group)
    world.close()
    assert precisions and all(policy == given[0] for policy in precisions)
    assert offload is given[1]
