"""One gradient norm over all parameters and all axes, and the scaling that it asks for."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from ptrain.costs import State
from ptrain.interpreter.mesh import Mesh
from ptrain.interpreter.registry import Registry
from ptrain.plan.step import Clip


def clip_gradients(
    gradients: Sequence[torch.Tensor], step: Clip, mesh: Mesh, registry: Registry
) -> torch.Tensor:
    """Scale `gradients` in place to a global norm of at most `step.max_norm`; returns the norm
    before (0-d, at least fp32). One scalar all-reduce per axis along which they are shards; what
    is replicated is counted once. The formula is torch's `clip_grad_norm_`, its 1e-6 included.
    """
    dtype = torch.promote_types(gradients[0].dtype, torch.float32)
    norms = torch._foreach_norm(list(gradients), 2, dtype=dtype)
    square = torch.linalg.vector_norm(torch.stack(norms)).square_()
    registry.tag(square, State.GRADIENTS)
    for axis in step.axes:
        dist.all_reduce(square, group=mesh.group((axis,)))
    norm = square.sqrt_()
    scale = torch.clamp(step.max_norm / (norm + 1e-6), max=1.0)
    torch._foreach_mul_(list(gradients), scale)
    return norm
