"""c10d (torch/distributed/distributed_c10d.py): its register of groups, their names and timeouts,
and what a collective returns while it is on its way."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from ptrain.internals.part import PrivatePart

_OF_MESH = "mesh_"  # begins how a mesh describes its groups
RECORDER = torch._C._distributed_c10d  # of it the flight recorder, where it is built in
Work = RECORDER.Work

# torch 2.13 renamed these two and deprecates the old names, which are all that 2.11 has.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

PARTS = (
    PrivatePart(
        owner=distributed_c10d,
        members=("_get_default_store", "_resolve_process_group", "_set_pg_timeout", "_world"),
    ),
    PrivatePart(owner=distributed_c10d._world, members=("pg_map", "pg_names")),
    PrivatePart(owner=RECORDER, members=("Work", "ProcessGroup")),
    PrivatePart(owner=RECORDER.ProcessGroup, members=("group_desc",)),
    PrivatePart(owner=RECORDER.ProcessGroup, members=("_get_sequence_number_for_group",)),
    PrivatePart(owner=RECORDER.ProcessGroupGloo._Options, members=("_timeout",)),
)


def default_store() -> dist.Store:
    """Return the store through which all ranks found each other. Raises ValueError where none
    did."""
    store: dist.Store = distributed_c10d._get_default_store()
    return store


def named(name: str) -> dist.ProcessGroup:
    """Return the group of this name. Raises RuntimeError where there is none."""
    group: dist.ProcessGroup = distributed_c10d._resolve_process_group(name)
    return group


def is_name(text: str) -> bool:
    """Return whether a group has this name."""
    return text in distributed_c10d._world.pg_names.values()


def names() -> dict[dist.ProcessGroup, str]:
    """Return the groups of this process with their names, in the order in which they were made."""
    known: dict[dist.ProcessGroup, str] = distributed_c10d._world.pg_names
    return known


def store_of(group: dist.ProcessGroup) -> dist.Store:
    """Return the store through which the ranks of a group met."""
    store: dist.Store = distributed_c10d._world.pg_map[group][1]
    return store


def collectives(groups: Iterator[dist.ProcessGroup]) -> int:
    """Return how many collectives were begun in these groups."""
    return sum(group._get_sequence_number_for_group() for group in groups)


def limit_collectives(group: dist.ProcessGroup | None, timeout: timedelta) -> None:
    """Let the collectives of a group, None for all ranks, fail after this time."""
    distributed_c10d._set_pg_timeout(timeout, group)


def gloo_options(timeout: timedelta) -> dist.ProcessGroupGloo.Options:
    """Return the options of a gloo group whose sends, receives and collectives fail after this
    time."""
    options = dist.ProcessGroupGloo._Options()
    options._timeout = timeout
    return options


def is_group(value: Any) -> bool:
    """Return whether an operator's argument, as a script object, is a group."""
    return bool(value._type().name() == "ProcessGroup")


def axis_of(arguments: Sequence[Any]) -> str:
    """Return along which axis of a mesh the ranks differ whose collective has these arguments, as
    the mesh says it of groups that it makes; nothing where none does."""
    group = _group_of(arguments)
    return "" if group is None else str(group.group_desc).removeprefix(_OF_MESH)


def size_of(arguments: Sequence[Any]) -> int:
    """Return how many ranks the group has whose collective has these arguments; 0 where none is
    named."""
    group = _group_of(arguments)
    return 0 if group is None else group.size()


def _group_of(arguments: Sequence[Any]) -> dist.ProcessGroup | None:
    names = (argument for argument in arguments if isinstance(argument, str))
    return next((named(name) for name in names if is_name(name)), None)
