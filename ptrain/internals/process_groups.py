"""c10d (torch/distributed/distributed_c10d.py): process groups, timeouts, stores, works."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from ptrain.internals.part import PrivatePart

_MESH_PREFIX = "mesh_"  # prefix of the descriptions that DeviceMesh gives its groups
RECORDER = torch._C._distributed_c10d  # also has the flight recorder, if torch is built with it
Work = RECORDER.Work

# torch 2.13 renamed these two and deprecates the old names, the only ones in 2.11.
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
    """Return the store of the default process group.

    Raises:
        ValueError: There is no default group.
    """
    store: dist.Store = distributed_c10d._get_default_store()
    return store


def resolve_group(name: str) -> dist.ProcessGroup:
    """Return the process group with this name.

    Raises:
        RuntimeError: There is no such group.
    """
    group: dist.ProcessGroup = distributed_c10d._resolve_process_group(name)
    return group


def is_group_name(text: str) -> bool:
    """Return True if a process group has this name."""
    return text in distributed_c10d._world.pg_names.values()


def group_names() -> dict[dist.ProcessGroup, str]:
    """Return the name of each process group of this process, in order of creation."""
    known: dict[dist.ProcessGroup, str] = distributed_c10d._world.pg_names
    return known


def group_store(group: dist.ProcessGroup) -> dist.Store:
    """Return the store through which the ranks of a group connected."""
    store: dist.Store = distributed_c10d._world.pg_map[group][1]
    return store


def count_collectives(groups: Iterator[dist.ProcessGroup]) -> int:
    """Return the number of collectives issued in these groups."""
    return sum(group._get_sequence_number_for_group() for group in groups)


def set_group_timeout(group: dist.ProcessGroup | None, timeout: timedelta) -> None:
    """Set the timeout of a group's collectives; None is the default group."""
    distributed_c10d._set_pg_timeout(timeout, group)


def gloo_options(timeout: timedelta) -> dist.ProcessGroupGloo.Options:
    """Return the options of a gloo group with a timeout for sends, receives and collectives."""
    options = dist.ProcessGroupGloo._Options()
    options._timeout = timeout
    return options


def is_group(value: Any) -> bool:
    """Return True if a script object, an argument of an operator, is a process group."""
    return bool(value._type().name() == "ProcessGroup")


def group_axis(arguments: Sequence[Any]) -> str:
    """Return the mesh axis of the group that a collective's arguments name.

    The axis is in the description that DeviceMesh gives its groups. "" if no group is named.
    """
    group = _named_group(arguments)
    return "" if group is None else str(group.group_desc).removeprefix(_MESH_PREFIX)


def mesh_dimension(group: dist.ProcessGroup) -> str:
    """Return the mesh dimension that a group was created for, "" for a group without a mesh."""
    text = str(group.group_desc)
    return text.removeprefix(_MESH_PREFIX) if text.startswith(_MESH_PREFIX) else ""


def group_size(arguments: Sequence[Any]) -> int:
    """Return the number of ranks of the group that a collective's arguments name, 0 without one."""
    group = _named_group(arguments)
    return 0 if group is None else group.size()


def _named_group(arguments: Sequence[Any]) -> dist.ProcessGroup | None:
    """Return the group that a collective's arguments name, None without one."""
    names = (argument for argument in arguments if isinstance(argument, str))
    # Operators name their group by a string argument, and other arguments may be strings too (the
    # reduction, such as "sum").
    return next((resolve_group(name) for name in names if is_group_name(name)), None)
