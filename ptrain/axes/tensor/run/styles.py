"""Lay out a module's parameters, inputs and outputs over the tensor axis where torch has no style.

A = S*: each rank saves its shard of the column operators' common input, and all-gathers it again
for backward (Korthikanti et al. 2022, section 4.2.2).

Several ranks may compute a part of one parameter's gradient. The module then reads the parameter
through a function whose backward pass sums the parts.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from ptrain.cost import State
from ptrain.internals.autograd import Hooks, innermost_saved_tensor_hooks
from ptrain.internals.functional_collectives import all_gather_tensor, reduce_scatter_sum
from ptrain.models.compiled import ReadThrough
from ptrain.models.ledger import with_first
from ptrain.models.moe import weight_router_losses
from ptrain.runtime.comm import TagRegistry


class _ParameterTransform(ParallelStyle):
    """A style that replaces a module's direct parameters by the result of `transform` while the
    module runs."""

    @abstractmethod
    def transform(self, parameter: torch.Tensor, device_mesh: DeviceMesh) -> Any:
        """Return the tensor that the module reads; its backward pass may differ from identity."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return self.put_on(module, device_mesh)

    def put_on(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Register hooks on a module by which it reads transformed parameters, and return it."""
        ReadThrough(module, partial(self.transform, device_mesh=device_mesh))
        return module


class LocalShards(_ParameterTransform):
    """The style that passes the local shard of each parameter to a module without DTensors."""

    def transform(self, parameter: torch.Tensor, device_mesh: DeviceMesh) -> Any:
        return parameter.to_local() if isinstance(parameter, DTensor) else parameter


class _TaggingTransform(_ParameterTransform):
    def __init__(self, registry: TagRegistry) -> None:
        super().__init__()
        self.registry = registry


class GradientsLikeParameters(_TaggingTransform):
    """The style that gives gradients the placement of their parameters.

    It is for parameters that are used on a rank's tokens, and for sharded ones with full gradients.
    """

    def transform(self, parameter: torch.Tensor, device_mesh: DeviceMesh) -> Any:
        return _GradientLikeParameter.apply(parameter, self.registry)


class SummedGradients(_TaggingTransform):
    """The style that sums gradients over the ranks.

    It is for a replicated parameter that each rank uses on its shard of the features, such as a
    norm of the heads within attention.
    """

    def transform(self, parameter: torch.Tensor, device_mesh: DeviceMesh) -> Any:
        return _SumGradient.apply(parameter, device_mesh.get_group(), self.registry)


class _GradientLikeParameter(torch.autograd.Function):
    """The identity, whose backward pass gives the gradient the placement of its parameter.

    The ranks' gradients of a norm on token shards are partial sums, which are summed here once. An
    embedding's gradient is full, and only this rank's rows are kept.
    """

    @staticmethod
    def forward(ctx: Any, parameter: DTensor, registry: TagRegistry) -> torch.Tensor:
        ctx.placements, ctx.registry = parameter.placements, registry
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, gradient: DTensor) -> tuple[torch.Tensor, None]:
        if gradient.placements == ctx.placements:
            return gradient, None
        # Tagged before the collective, which the meters classify by the tag of its input.
        ctx.registry.tag(gradient._local_tensor, State.GRADIENTS)
        kept = gradient.redistribute(placements=ctx.placements)
        if isinstance(ctx.placements[0], Shard):
            rows = kept.to_local()
            kept = DTensor.from_local(
                torch.empty_like(rows).copy_(rows),  # a slice alone would keep the whole alive
                kept.device_mesh,
                kept.placements,
                run_check=False,
                shape=kept.shape,
                stride=kept.stride(),
            )
        return kept, None


class _SumGradient(torch.autograd.Function):
    """The identity; backward sums over the ranks."""

    @staticmethod
    def forward(
        ctx: Any, parameter: torch.Tensor, group: dist.ProcessGroup, registry: TagRegistry
    ) -> torch.Tensor:
        ctx.group, ctx.registry = group, registry
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        summed = gradient.clone()  # autograd may still refer to the gradient
        ctx.registry.tag(summed, State.GRADIENTS)
        dist.all_reduce(summed, group=ctx.group)
        return summed, None, None


# A = S*: column operators save this rank's token shard of their common input. It is all-gathered
# again for the backward pass (Korthikanti et al. 2022, section 4.2.2).


class _SavedShard:
    """A saved view of an all-gathered tensor, stored as this rank's shard of it."""

    def __init__(self, source: _GatherSource, part: _SavedTensor, saved: torch.Tensor) -> None:
        self.source = source
        self.part = part
        self.view, self.is_local = saved.shape, not isinstance(saved, DTensor)

    def tensor(self) -> torch.Tensor:
        whole = self.source.gather_full(self.part)
        return (whole.to_local() if self.is_local else whole).view(self.view)


class _SavedTensor:
    """A tensor that is saved by the outer hooks, of recomputation or offload."""

    def __init__(self, saved: torch.Tensor, outer: Hooks) -> None:
        # saved_tensors_hooks do not nest: only the innermost pair is called. So this pair calls the
        # outer one, which may offload or recompute.
        pack, self._unpack = outer
        self._packed = pack(saved)

    def tensor(self) -> torch.Tensor:
        unpacked: torch.Tensor = self._unpack(self._packed)
        return unpacked


class _GatherSource:
    """The all-gathered tensor of a shard, which lives from the first to the last use of its saved
    views."""

    def __init__(self, device_mesh: DeviceMesh, dim: int) -> None:
        self.device_mesh = device_mesh
        self.dim = dim
        self.num_saved = 0
        self._whole: DTensor | None = None

    def gather_full(self, saved: _SavedTensor) -> DTensor:
        """Return the full tensor for a saved view; it is dropped after the last view."""
        if self._whole is None:
            # The first use all-gathers once for all saved views.
            self._whole = DTensor.from_local(
                saved.tensor(), self.device_mesh, [Shard(self.dim)], run_check=False
            ).redistribute(placements=[Replicate()])
        whole = self._whole
        self.num_saved -= 1
        if self.num_saved <= 0:  # a graph that is kept is gone through again
            self._whole = None
        return whole


class Regather:
    """The hooks on the tensors that autograd saves while one sub-block runs.

    They call the saved-tensor hooks that were active before.
    """

    def __init__(self, device_mesh: DeviceMesh, dim: int) -> None:
        self.device_mesh = device_mesh
        self.dim = dim
        self._hooks: saved_tensors_hooks | None = None
        self._outer: Hooks = _NONE
        self._source: _GatherSource | None = None
        self._part: torch.Tensor | None = None
        self._key = 0

    def enter(self) -> None:
        self._outer = innermost_saved_tensor_hooks() or _NONE
        self._hooks = saved_tensors_hooks(self._pack, _unpack)
        # Entered and left by two hooks of the module, since a `with` block cannot span them.
        self._hooks.__enter__()

    def record_gather(self, part: torch.Tensor, gathered: DTensor) -> None:
        """Record that `gathered` was all-gathered from `part`."""
        self._source = _GatherSource(self.device_mesh, self.dim)
        # Without its graph, so that saving the part does not keep earlier activations alive.
        self._part = part.detach()
        # The address of the StorageImpl: autograd saves views of it, not `gathered` itself.
        self._key = gathered.to_local().untyped_storage()._cdata

    def leave(self) -> None:
        if self._hooks is not None:
            self._hooks.__exit__(None, None, None)
        self._hooks = self._source = self._part = None
        self._outer = _NONE
        self._key = 0

    def _pack(self, saved: torch.Tensor) -> _SavedShard | _SavedTensor:
        source, part = self._source, self._part
        local = saved._local_tensor if isinstance(saved, DTensor) else saved
        is_whole = local.untyped_storage()._cdata == self._key
        if source is None or part is None or not is_whole:
            return _SavedTensor(saved, self._outer)
        source.num_saved += 1
        return _SavedShard(source, _SavedTensor(part, self._outer), saved)


def _unpack(packed: _SavedShard | _SavedTensor) -> torch.Tensor:
    return packed.tensor()


def _as_is(saved: Any) -> Any:
    return saved


_NONE: Hooks = (_as_is, _as_is)


SEQUENCE = 1  # the token dimension follows the sample dimension


class _TokenStyle(ParallelStyle):
    """A style with the placement of the tokens between sub-blocks, `between`."""

    def __init__(self, between: Placement) -> None:
        super().__init__()
        self.between = between


class FullInput(_TokenStyle):
    """The style that all-gathers the first floating-point input of a module as a DTensor.

    The gradients of all its users are added first, and then summed over the ranks once.
    """

    def __init__(self, between: Placement, *, regathers: bool = False) -> None:
        super().__init__(between)
        self.regathers = regathers

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        regather = Regather(device_mesh, SEQUENCE) if self.regathers else None

        def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if regather is not None:
                regather.enter()

            def whole(part: torch.Tensor) -> DTensor:
                gathered = _gather_full(part, device_mesh, self.between)
                if regather is not None:
                    regather.record_gather(part, gathered)
                return gathered

            return with_first(args, kwargs, whole)

        module.register_forward_pre_hook(enter, with_kwargs=True)
        if regather is not None:
            # always_call: after an exception the pair of hooks would otherwise stay active for all
            # later modules.
            module.register_forward_hook(lambda *_: regather.leave(), always_call=True)
        return module


class LocalFullInput(FullInput):
    """The style that all-gathers the input like `FullInput`, but as a local tensor.

    The gradient of that tensor is a partial sum.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        super()._apply(module, device_mesh)

        def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            # Declared as a partial sum, the gradient is reduced once, by the backward of the
            # all-gather. By default DTensor would take each rank's part for the full gradient.
            return with_first(args, kwargs, lambda x: x.to_local(grad_placements=[Partial()]))

        module.register_forward_pre_hook(enter, with_kwargs=True)
        return module


class PartialSums(LocalFullInput):
    """The style of a module whose output is a partial sum, and which uses no DTensors.

    It all-gathers the input like `LocalFullInput`.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        super()._apply(module, device_mesh)
        # every rank routes all tokens, and what their losses give is summed with the rest
        weight_router_losses(module, 1.0 / device_mesh.size())

        def leave(_: nn.Module, __: object, output: torch.Tensor) -> torch.Tensor:
            return _redistribute(output, device_mesh, Partial(), self.between)

        module.register_forward_hook(leave)
        return module


class InnerShards(ParallelStyle):
    """The style that shards a module's weight along `dim`; the module reads its local shard."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        weight = module.get_parameter("weight")
        cut = [Shard(weight.dim() + self.dim)]
        slices_ = distribute_tensor(weight, device_mesh, cut, src_data_rank=None)
        module.register_parameter("weight", nn.Parameter(slices_, weight.requires_grad))
        return LocalShards()._apply(module, device_mesh)


class GatheredFeatures(ParallelStyle):
    """The style that all-gathers the features of a module's output over a group of ranks.

    Each rank of the group uses all of them, so their gradients are summed over the group.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group = group

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.register_forward_hook(lambda _, __, own: _GatherFeatures.apply(own, self.group))
        return module


class _GatherFeatures(torch.autograd.Function):
    """All-gathers the last dimension; backward sums the gradients and keeps this rank's part."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        parts = all_gather_tensor(own[None], group)  # [ranks, ..., features of a rank]
        return parts.movedim(0, -2).flatten(-2)  # a copy, in rank order

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        parts = gradient.unflatten(-1, (ctx.group.size(), -1)).movedim(-2, 0).contiguous()
        return reduce_scatter_sum(parts, ctx.group)[0], None


class FullOutput(_TokenStyle):
    """The style that all-gathers a module's output as a DTensor."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.register_forward_hook(
            lambda _, __, output: _gather_full(output, device_mesh, self.between)
        )
        return module


class ShardTokens(_TokenStyle):
    """The style that shards the first floating-point input, a replicated one, by tokens."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def part(whole: torch.Tensor) -> torch.Tensor:
            return _redistribute(whole, device_mesh, Replicate(), self.between)

        def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return with_first(args, kwargs, part)

        module.register_forward_pre_hook(enter, with_kwargs=True)
        return module


class GatherTokens(_TokenStyle):
    """The style that all-gathers the first output tensor, which is sharded by tokens."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def leave(_: nn.Module, __: object, output: Any) -> Any:
            if isinstance(output, tuple):
                first, *others = output
                return (_redistribute(first, device_mesh, self.between, Replicate()), *others)
            return _redistribute(output, device_mesh, self.between, Replicate())

        module.register_forward_hook(leave)
        return module


class LocalInput(ParallelStyle):
    """The style that replaces the first floating-point input by its local shard.

    The input is a local tensor already when the module is recomputed.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return with_first(
                args, kwargs, lambda part: part.to_local() if isinstance(part, DTensor) else part
            )

        module.register_forward_pre_hook(enter, with_kwargs=True)
        return module


class HeadParallel(ColwiseParallel):
    """The style that shards a head's logits over the vocabulary.

    If the head returns a loss, it stays a plain tensor.
    """

    @staticmethod
    def _prepare_output_fn(
        output_layouts: Any, use_local_output: bool, mod: Any, outputs: Any, device_mesh: Any
    ) -> Any:
        # A loss in the head returns a plain scalar, which has no vocabulary dimension to shard.
        if not isinstance(outputs, DTensor):
            return outputs
        return ColwiseParallel._prepare_output_fn(
            output_layouts, use_local_output, mod, outputs, device_mesh
        )


# Parallel styles for layers whose weight is stored inputs by outputs (transformers' Conv1D).
# torch's styles do not support them.


class TransposedColumn(ColwiseParallel):
    """A column layer, whose weight is sharded by its second dimension. Its bias is sharded too."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return _distribute_module(self, module, device_mesh, {"weight": Shard(1), "bias": Shard(0)})


class TransposedRow(RowwiseParallel):
    """A row layer, whose weight is sharded by its first dimension. Its bias is replicated."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        # RowwiseParallel sets this in its `_apply`, which accepts only nn.Linear and
        # nn.Embedding (torch/distributed/tensor/parallel/style.py, 2.13).
        self.desired_input_layouts = (Shard(-1),)
        return _distribute_module(
            self, module, device_mesh, {"weight": Shard(0), "bias": Replicate()}
        )


def _distribute_module(
    style: Any, module: nn.Module, device_mesh: DeviceMesh, placements: dict[str, Placement]
) -> nn.Module:
    def cut(_: str, child: nn.Module, mesh: DeviceMesh) -> None:
        def part(name: str, whole: torch.Tensor) -> DTensor:
            cut_as = [placements[name]]
            return distribute_tensor(whole, mesh, cut_as, src_data_rank=style.src_data_rank)

        replace_parameters(child, part)

    return distribute_module(
        module,
        device_mesh,
        cut,
        partial(style._prepare_input_fn, style.input_layouts, style.desired_input_layouts),
        partial(style._prepare_output_fn, style.output_layouts, style.use_local_output),
    )


class ReplicateParallel(ParallelStyle):
    """The style that replicates a module's parameters, which a rank uses on its token shard."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def replica(_: str, own: torch.Tensor) -> DTensor:
            return distribute_tensor(own, device_mesh, [Replicate()], src_data_rank=None)

        replace_parameters(module, replica)
        return module


def replace_parameters(module: nn.Module, make: Callable[[str, torch.Tensor], DTensor]) -> None:
    """Replace a module's direct parameters by the DTensors that `make` returns.

    Args:
        module: The module, changed in place.
        make: Returns the DTensor for a name and a parameter.
    """
    # A list, because registering changes the dictionary that is iterated.
    for name, parameter in list(module.named_parameters(recurse=False)):
        own = nn.Parameter(make(name, parameter), parameter.requires_grad)
        module.register_parameter(name, own)


def _gather_full(part: torch.Tensor, device_mesh: DeviceMesh, layout: Placement) -> DTensor:
    tensor = (
        part
        if isinstance(part, DTensor)
        else DTensor.from_local(part, device_mesh, [layout], run_check=False)
    )
    return tensor.redistribute(placements=[Replicate()])


def _redistribute(
    part: torch.Tensor, device_mesh: DeviceMesh, source: Placement, target: Placement
) -> torch.Tensor:
    """Return a rank's local tensor in another placement.

    Replicated tensors have equal gradients on all ranks.
    """
    distributed = DTensor.from_local(part, device_mesh, [source], run_check=False)
    return distributed.redistribute(placements=[target]).to_local()
