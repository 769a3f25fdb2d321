"""DTensor (torch/distributed/tensor): meshes, shards, caches, random numbers, tracing."""

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

# Modules that import `_are_we_tracing` by name, so that each needs a patch.
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


def flatten_mesh(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """Return the dimensions of a mesh as one dimension with this name."""
    return mesh._flatten(name)


def concatenate_meshes(*meshes: DeviceMesh) -> DeviceMesh:
    """Return one mesh whose dimensions are these parts of a mesh, flattened or not."""
    return DeviceMesh._concatenate([*meshes])


def root_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the full mesh that a mesh is a part of."""
    return mesh._get_root_mesh()


def clear_shape_caches() -> None:
    """Clear DTensor's cache of local shapes.

    DTensor caches the local shapes of operators by placement, as computed for the first rank that
    needs them. A process that plays several ranks must clear the cache between them.
    """
    DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()
    # The C++ dispatch has a second cache in front of the Python one.
    torch._C._clear_DTensor_sharding_propagator_cache()
