"""DTensor (torch/distributed/tensor): its meshes, shapes of shards, what it remembers of operators,
whose random numbers it draws, and what it does where it believes that it is compiled."""

from __future__ import annotations

import torch
from torch.distributed import _functional_collectives
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    _collective_utils,
    _decompositions,
    _dispatch,
    _random,
    _redistribute,
    _sharding_prop,
)
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.parallel import ColwiseParallel

from ptrain.internals.part import PrivatePart

__all__ = ["RANDOM", "ShardingPropagator", "compute_local_shape_and_global_offset"]

RANDOM = _random, "_rng_tracker"
SHAPES = ShardingPropagator, "_propagate_tensor_meta_non_cached"

# Modules that have their own name for the question whether they are traced.
_ALL_TRACERS = (
    _functional_collectives, _collective_utils, _decompositions, _dispatch, _redistribute,
    _sharding_prop,
)  # fmt: skip
TRACERS = tuple(module for module in _ALL_TRACERS if hasattr(module, "_are_we_tracing"))

PARTS = (
    PrivatePart(owner=_functional_collectives, members=("_are_we_tracing",)),
    PrivatePart(owner=_random, members=("_rng_tracker",)),
    PrivatePart(owner=DTensor, members=("_op_dispatcher",)),
    PrivatePart(owner=DTensor._op_dispatcher, members=("sharding_propagator",)),
    PrivatePart(
        owner=DTensor._op_dispatcher.sharding_propagator, members=("propagate_op_sharding",)
    ),
    PrivatePart(owner=ShardingPropagator, members=("_propagate_tensor_meta_non_cached",)),
    PrivatePart(owner=torch._C, members=("_clear_DTensor_sharding_propagator_cache",)),
    PrivatePart(owner=DeviceMesh, members=("_concatenate", "_flatten", "_get_root_mesh")),
    PrivatePart(owner=ColwiseParallel, members=("_prepare_output_fn",)),
)


def flattened(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """Return the dimensions of a mesh as one of this name."""
    return mesh._flatten(name)


def side_by_side(*meshes: DeviceMesh) -> DeviceMesh:
    """Return parts of one mesh, flattened or not, as the dimensions of one."""
    return DeviceMesh._concatenate([*meshes])


def root_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the whole mesh that a mesh is a part of."""
    return mesh._get_root_mesh()


def forget_shapes() -> None:
    """DTensor remembers the local shapes of operators by their placements, of the rank that asked
    first; a process that plays several ranks has to forget between them."""
    DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()
    torch._C._clear_DTensor_sharding_propagator_cache()
