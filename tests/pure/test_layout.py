"""Ranks and coordinates equal those of torch's DeviceMesh."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from ptrain.spec.placement import DATA_AXES, Axis
from ptrain.spec.spec import (
    coordinates,
    indices_in_groups,
    place_of,
    rank_groups,
    ranks_over,
)
from ptrain.units import row_major
from tests.pure.build import WHOLE, make_spec

FACTORIZATIONS = [(a, 8 // a) for a in (1, 2, 4, 8)]


def mesh_of(degrees):
    return make_spec(
        {axis: (degree, WHOLE) for axis, degree in zip(DATA_AXES, degrees, strict=True)}
    )


def group_of(spec, rank, axes):
    (members,) = (group for group in rank_groups(spec, axes) if rank in group)
    return members


@pytest.mark.parametrize("degrees", FACTORIZATIONS)
@pytest.mark.parametrize("rank", range(8))
def test_coordinates_and_groups_are_those_of_device_mesh(degrees, rank):
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=8)
    try:
        mesh = init_device_mesh("cpu", degrees, mesh_dim_names=tuple(map(str, DATA_AXES)))
        spec = mesh_of(degrees)
        assert tuple(coordinates(spec, rank).values()) == tuple(mesh.get_coordinate())
        for axis in DATA_AXES:
            ranks = dist.get_process_group_ranks(mesh.get_group(str(axis)))
            assert list(group_of(spec, rank, (axis,))) == ranks
            assert indices_in_groups(spec, (axis,))[rank] == mesh.get_local_rank(str(axis))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("degrees", FACTORIZATIONS)
def test_a_group_over_all_axes_is_flattened_row_major(degrees):
    spec = mesh_of(degrees)
    flat = torch.arange(8).view(degrees).flatten().tolist()
    for rank in range(8):
        assert list(group_of(spec, rank, DATA_AXES)) == flat
        assert indices_in_groups(spec, DATA_AXES)[rank] == flat.index(rank)


@pytest.mark.parametrize("degrees", FACTORIZATIONS)
@pytest.mark.parametrize("axes", [(), (Axis.DP_REPLICATE,), (Axis.DP_SHARD,), DATA_AXES])
def test_groups_cover_every_rank_once(degrees, axes):
    spec = mesh_of(degrees)
    found = list(rank_groups(spec, axes))
    assert sorted(rank for members in found for rank in members) == list(range(8))
    assert {len(members) for members in found} == {ranks_over(spec, axes)}


def test_ranks_are_row_major_the_last_axis_counts_fastest():
    spec = mesh_of((2, 4))
    places = [tuple(coordinates(spec, rank).values()) for rank in range(8)]
    assert places == [(first, last) for first in range(2) for last in range(4)]


@pytest.mark.parametrize("rank", [-1, 8])
def test_a_rank_outside_the_world_has_no_coordinates(rank):
    with pytest.raises(AssertionError, match=f"rank {rank} is not in a world of 8"):
        coordinates(mesh_of((2, 4)), rank)


@pytest.mark.parametrize("degrees", FACTORIZATIONS)
@pytest.mark.parametrize("axes", [(), DATA_AXES[:1], DATA_AXES[1:], DATA_AXES])
def test_the_positions_of_all_ranks_equal_each_ranks_position(degrees, axes):
    spec = mesh_of(degrees)
    places = [coordinates(spec, rank) for rank in range(8)]
    assert indices_in_groups(spec, axes) == tuple(
        row_major((place[axis], spec.degree(axis)) for axis in axes) for place in places
    )


@pytest.mark.parametrize("degrees", FACTORIZATIONS)
@pytest.mark.parametrize("axes", [(), DATA_AXES[:1], DATA_AXES[1:], DATA_AXES])
def test_a_position_is_at_the_coordinates_of_its_ranks(degrees, axes):
    spec = mesh_of(degrees)
    for rank in range(spec.world_size):
        found = place_of(spec, axes, indices_in_groups(spec, axes)[rank])
        own = coordinates(spec, rank)
        assert found == {axis: own[axis] for axis in own if axis in axes}
