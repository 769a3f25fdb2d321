"""Apply a placement on the data axes to a module: one wrap per kind of plan step.

A wrap returns the module to call, the context of each micro-batch, the gradients in the optimizer's
layout, and the targets that the optimizer updates. The training loop is the same for all.

Replicas are torch's DistributedDataParallel, summing, with buckets of any size, reduced during or
after backward. Shards by row, all-gathered by unit, are FSDP2's `fully_shard` with its options,
summing.

DDP's static_graph stays off. It changes no number, and saves only the search for unused parameters,
which is off already; torch 2.13 fails in `no_sync` on the first micro-batch of such a model.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, assert_never

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.nn.parallel import DistributedDataParallel

from ptrain.axes.data.fsdp2 import shard_dim
from ptrain.axes.data.run.flat import FlatWrap, ParameterWrap, WrappedModel
from ptrain.axes.data.run.flat_target import RowWriter, ZeroRedundancyUpdate
from ptrain.axes.data.run.summing import arranged_buckets, handing_over, record_arrival
from ptrain.cost import State
from ptrain.facts.model import LAST_UNIT
from ptrain.facts.stages import Units
from ptrain.internals import fsdp2
from ptrain.internals.ddp import DEFAULT_BUCKET_BYTES
from ptrain.internals.dtensor import concatenate_meshes
from ptrain.internals.fakes import unset_fake_temporarily
from ptrain.internals.fsdp2 import FSDPParamGroup, parameter_groups
from ptrain.models.initialize import keeps_its_weights
from ptrain.models.ledger import is_recomputing, local_tensor
from ptrain.models.numerics import TORCH_DTYPES
from ptrain.runtime.comm import Mesh, TaggedAllGather, TaggedReduceScatter, TagRegistry
from ptrain.spec.dials import GradientSync, Reshard, SyncPolicy
from ptrain.spec.job import OptimizerSpec
from ptrain.spec.precision import Layout
from ptrain.steps.step import Plan
from ptrain.steps.wraps import FlatUnits, FullyShard, LocalGradients, Replicate
from ptrain.timeline import Kind


class ReplicatedWrap(ParameterWrap):
    """The wrap in DistributedDataParallel, which sums gradients.

    Its constructor communicates nothing, since all ranks have equal initial weights.
    """

    def __init__(
        self,
        model: nn.Module,
        step: Replicate,
        mesh: Mesh,
        units: Units,
        registry: TagRegistry,
    ) -> None:
        super().__init__(model, units)
        device = mesh.world.device
        self.step, self.mesh, self.registry = step, mesh, registry
        self.group = mesh.group(step.axes)
        self.keeps_buckets = False
        self._buckets: list[torch.Tensor] = []  # of this step, in the order in which they filled
        self._unreduced: list[torch.Tensor] = []
        self._reducing: list[dist.Work] = []
        self._trained = [p for p in model.parameters() if p.requires_grad]
        # The last arrival of each gradient, by index, until the first reduction. The hooks refer to
        # the dictionary only: autograd keeps them in C++, invisible to the garbage collector.
        self._arrived: dict[int, None] = {}
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(
                partial(record_arrival, self._arrived, index)
            )
            for index, parameter in enumerate(self._trained)
        ]
        with warnings.catch_warnings():
            # torch 2.13 renames broadcast_buffers, but the new argument would still broadcast once
            warnings.simplefilter("ignore", FutureWarning)
            self.wrapped = DistributedDataParallel(
                model,
                # torch rejects device ids of a module on the CPU.
                device_ids=[device.index] if device.type == "cuda" else None,
                process_group=self.group,
                bucket_cap_mb=_bucket_cap_mb(step),
                broadcast_buffers=False,
                gradient_as_bucket_view=True,
                init_sync=False,
            )
        # Without a hook, DDP would divide the sum by the number of ranks. The loss is divided
        # already.
        self.wrapped.register_comm_hook(None, handing_over(self._receive_bucket, registry))
        self.module = self.wrapped

    @contextmanager
    def micro_batch(self, is_last: bool) -> Iterator[None]:
        if is_last:
            yield
            self._reduce_kept()
            return
        self.keeps_buckets = True
        with self.wrapped.no_sync():
            yield

    def forward_pass(self) -> AbstractContextManager[None]:
        """Run forward without synchronization; the backward pass decides whether to reduce."""
        self.keeps_buckets = True
        accumulating: AbstractContextManager[None] = self.wrapped.no_sync()
        return accumulating

    @contextmanager
    def backward_pass(self, kind: Kind, is_last: bool) -> Iterator[None]:
        assert kind is Kind.BACKWARD, "torch's replicas wait for autograd to accumulate"
        if is_last:
            # DDP prepares its reducer in forward, and `forward_pass` runs under `no_sync`. An empty
            # list: no search for unused parameters.
            self.wrapped.reducer.prepare_for_backward([])
        yield

    def end_passes(self) -> None:
        self._reduce_kept()

    def _receive_bucket(self, bucket: torch.Tensor) -> None:
        """Sum a full bucket over the ranks asynchronously, or later without overlap.

        The loss is divided by a global count already, so gradients are summed.
        """
        self._buckets.append(bucket)
        if self.step.overlaps and not self._hooks:
            if (work := dist.all_reduce(bucket, group=self.group, async_op=True)) is not None:
                self._reducing.append(work)
        else:
            self._unreduced.append(bucket)

    def _reduce_kept(self) -> None:
        """Wait for running reductions after backward, and reduce the remaining buckets."""
        if self._hooks:
            self._arrange_first_gradients()
        for work in self._reducing:
            work.wait()
        self._reducing.clear()
        for bucket in self._unreduced:
            dist.all_reduce(bucket, group=self.group)
        self._unreduced.clear()

    def _arrange_first_gradients(self) -> None:
        """Arrange the gradients of the first step in the buckets of all later steps.

        DDP starts with one bucket in the order of parameters. It rebuilds its buckets for the
        second step, in the order in which gradients arrived. Sums of another order differ in
        rounding, so that a resumed run would differ from an uninterrupted one.
        """
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        if not self._buckets_have_all():
            return
        arrived = [self._trained[index] for index in self._arrived]
        is_default = _bucket_cap_mb(self.step) is None
        size = None if is_default else self.step.bucket_bytes
        self._buckets = arranged_buckets(self._buckets, arrived, size)
        self._unreduced = list(self._buckets)

    def gradients(self) -> list[torch.Tensor]:
        """Return DDP's buckets, which contain only gradients.

        If other code replaced a gradient that is a view of a bucket, return the parameters'
        gradients.
        """
        return list(self._buckets) if self._buckets_have_all() else super().gradients()

    def _buckets_have_all(self) -> bool:
        """Return True if the buckets contain all gradients."""
        if sum(map(torch.numel, self._buckets)) != sum(map(torch.numel, self._trained)):
            return False
        # `_cdata` is the address of the StorageImpl, which all views of a bucket share.
        storages = {bucket.untyped_storage()._cdata for bucket in self._buckets}
        return all(
            parameter.grad is not None and parameter.grad.untyped_storage()._cdata in storages
            for parameter in self._trained
        )

    def clear_gradients(self) -> None:
        """Zero the buckets if micro-batches accumulate into them, else drop `.grad`.

        Without accumulation, autograd's gradients are copied into the buckets, which need not be
        read. DDP rebuilds its buckets in the second step.
        """
        self._buckets.clear()
        parameters = [target.parameter for target in self._targets()]
        kept = [p.grad for p in parameters if p.grad is not None] if self.keeps_buckets else []
        if kept:  # one operator, because a GPU would launch a kernel for each gradient
            torch._foreach_zero_(kept)
            return
        for parameter in parameters:
            parameter.grad = None

    def own_update(self, optimizer: OptimizerSpec, layout: Layout) -> ZeroRedundancyUpdate | None:
        if not self.step.zero_redundancy:
            return None
        return ZeroRedundancyUpdate(
            list(self._targets()),
            optimizer,
            self.mesh.submesh(self.step.axes),
            self.registry,
            stands_in=self.mesh.world.stands_in,
        )


def _bucket_cap_mb(step: Replicate) -> float | None:
    """Return DDP's `bucket_cap_mb`.

    None is its default size, with which its first bucket is small.
    """
    is_default = step.bucket_bytes == DEFAULT_BUCKET_BYTES
    return None if is_default else step.bucket_bytes / 2**20


_RETURNS_A_VIEW = "FSDP2-wrapped module .* returned a view tensor"


class FullyShardedWrap(ParameterWrap):
    """The wrap in FSDP2, unit by unit and then the root, which sums gradients.

    With replicas it is HSDP, on a 2-d mesh.
    """

    def __init__(
        self, model: nn.Module, step: FullyShard, plan: Plan, mesh: Mesh, registry: TagRegistry
    ) -> None:
        super().__init__(model, plan.units, owns_masters=step.materialized)
        if not keeps_its_weights(model):
            # a GPT's MLP returns a view, and no built-in model writes into a unit's output
            warnings.filterwarnings("ignore", _RETURNS_A_VIEW, UserWarning)
        self.step, self.registry = step, registry
        steps = [(modules, plan.wrap_of(modules)) for modules in plan.units]
        units = [(modules, own) for modules, own in steps if isinstance(own, FullyShard)]
        apart = [modules for modules, own in steps if not isinstance(own, FullyShard)]
        # parameters that no axis shards stay with autograd
        self._local = [
            parameter
            for modules in apart
            for module in self._unit_modules(modules)
            for parameter in module.parameters()
        ]
        # one module of each unit; its modules share their state
        self.sharded: list[FSDPModule] = []
        for modules, own in units:
            self._shard_unit(modules, own, plan.update.layout, mesh)
        for module, (modules, own) in zip(self.sharded, units, strict=True):
            self._use_summing_collectives(module, modules[0] or "root", own, mesh)
        if not step.overlaps:
            fsdp2.all_gather_after_computation(model)
        prefetch = step.prefetch if step.overlaps else 0
        if prefetch is not None:
            Prefetch(self.sharded, [self._unit_modules(modules) for modules, _ in units], prefetch)

    def _shard_unit(
        self, modules: Sequence[str], step: FullyShard, layout: Layout, mesh: Mesh
    ) -> None:
        """Shard the modules of one unit."""
        members = self._unit_modules(modules)
        # the mesh of a smaller group is sliced from a tensor, which must be real
        with unset_fake_temporarily():
            fully_shard(
                members,
                mesh=fsdp_mesh(step, mesh),
                reshard_after_forward=_reshard_option(step.sync.reshard_after_forward, modules),
                mp_policy=_precision_policy(step, layout),
                ignored_params=set(self._local),
                shard_placement_fn=partial(_shard_of, step.sync, mesh.group_size(step.shard_axes)),
            )
        assert isinstance(members[0], FSDPModule)
        self.sharded.append(members[0])

    def _use_summing_collectives(
        self, module: FSDPModule, name: str, step: FullyShard, mesh: Mesh
    ) -> None:
        """Make a unit's gradients summed, not averaged, by collectives that tag their buffers."""
        # The loss is divided by a global count already. Forced sums: TaggedReduceScatter supports
        # no other operator.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
        module.set_custom_all_gather(TaggedAllGather(self.registry, name))
        module.set_custom_reduce_scatter(
            TaggedReduceScatter(
                step.reduce_scatter, self.registry, name, is_awaited=not step.overlaps
            )
        )
        for group in parameter_groups(module):
            _name_smaller_group(group, step, mesh)

    def _unit_modules(self, modules: Sequence[str]) -> list[nn.Module]:
        """Return the modules of a unit."""
        return [self.model.get_submodule(name) for name in modules]

    def micro_batch(self, is_last: bool) -> AbstractContextManager[None]:
        # The root is wrapped last, as torch requires: its call collects the parameters that no unit
        # has. The setters on it reach all units.
        root = self.sharded[-1]
        sync = self.step.sync
        root.set_requires_gradient_sync(is_last or sync.gradients is GradientSync.EVERY)
        # After the last micro-batch parameters change, so a gathered copy would be stale.
        root.set_reshard_after_backward(is_last or sync.reshard_after_backward)
        return nullcontext()

    @contextmanager
    def forward_pass(self) -> Iterator[None]:
        """Temporarily prepare torch's prefetch order for a forward pass.

        In backward, torch prefetches the unit whose forward ended before. For a micro-batch's first
        unit, this would be the last unit of the previous micro-batch, which is not needed. A unit
        that is already gathered is therefore put before it: that unit itself.
        """
        order = fsdp2.backward_order(self.sharded[-1])
        start = len(order)
        order += [group for module in self.sharded for group in parameter_groups(module)][:1]
        yield
        # Every group that ended forward was appended after the placeholder. `_backward_prefetch`
        # (_fsdp_param_group.py, 2.13) gathers the entry before the current one; for the first unit
        # that entry is now the unit itself, whose gather is a no-op.
        if len(order) > start + 1:
            order[start] = order[start + 1]

    @contextmanager
    def backward_pass(self, kind: Kind, is_last: bool) -> Iterator[None]:
        """Temporarily set FSDP2's synchronization for a backward pass, or for one half of it.

        The weight half calls no hooks of FSDP2, so gradients are reduced after it.
        """
        root = self.sharded[-1]
        is_whole = kind is Kind.BACKWARD
        with self.micro_batch(is_last):
            if not is_whole:  # autograd calls no hooks when it computes weight gradients only
                root.set_requires_gradient_sync(False)
                root.set_reshard_after_backward(False)
            # not the last backward while other micro-batches' backward passes are still to come
            root.set_is_last_backward(is_whole and is_last)
            yield
        if kind is Kind.WEIGHT and (is_last or self.step.sync.gradients is GradientSync.EVERY):
            self._reduce_now(is_last)

    def _reduce_now(self, is_last: bool) -> None:
        """Reduce gradients as FSDP2's hooks do in a backward pass."""
        root = self.sharded[-1]
        self.micro_batch(is_last)
        root.set_is_last_backward(True)
        for module in self.sharded:
            for group in parameter_groups(module):
                # In the order in which the units were wrapped, so that all ranks issue the same
                # collectives in the same order.
                group.post_backward()
        # The callback waits for the last reduction and resets the state of each group to idle, as
        # at the end of a pass with hooks.
        fsdp2.end_backward(root)

    def end_evaluation(self) -> None:
        for module in self.sharded:
            module.reshard()
            # shards of smaller groups are kept for a backward pass, which does not follow
            for part in fsdp2.parameters(module):
                fsdp2.drop_post_forward_shard(part)

    def storages(self) -> Iterator[tuple[State, torch.Tensor]]:
        """Yield shards, temporary larger shards and gradients with their states.

        The shards are listed while the module shows unsharded parameters, too. Smaller groups keep
        larger shards between passes. Gradients include the shards' (reduced), the unsharded
        parameters' (not reduced), and gradients accumulated in another dtype.
        """
        # With Θ = M, the shards are the master copies, which the optimizer owns. Quantized weights
        # have none.
        for module in self.sharded:
            for part in fsdp2.parameters(module):
                shard = local_tensor(part.sharded_param.detach())
                is_master = self.step.materialized and shard.is_floating_point()
                yield State.OPTIMIZER if is_master else State.PARAMETERS, shard
                if (between := fsdp2.post_forward_shard(part)) is not None:
                    yield State.TRANSIENT, between
                for gradient in fsdp2.gradients(part):
                    yield State.GRADIENTS, local_tensor(gradient)
        for parameter in self._local:
            yield State.PARAMETERS, local_tensor(parameter.detach())
            if parameter.grad is not None:
                yield State.GRADIENTS, local_tensor(parameter.grad)


class Prefetch:
    """The prefetch of `count` units ahead of their use.

    In forward, the next units to be entered are gathered; in backward, the units whose forward
    ended before. The first forward pass sets the order. A `count` of 0 turns off torch's
    default prefetch in backward.
    """

    def __init__(
        self, sharded: Sequence[FSDPModule], members: Sequence[Sequence[nn.Module]], count: int
    ) -> None:
        self.count = count
        self._first = {module: modules[0] for module, modules in zip(sharded, members, strict=True)}
        self._entered: list[FSDPModule] = []
        self._left: list[FSDPModule] = []
        self._hooks = []
        for module, modules in zip(sharded, members, strict=True):
            # A unit without parameters has nothing to gather, and would use up a place in the
            # order.
            if not parameter_groups(module):
                continue
            if not count:
                # the module itself is gathered already, so nothing is prefetched
                module.set_modules_to_backward_prefetch([module])
                continue
            self._hooks += [
                modules[0].register_forward_pre_hook(partial(_append_once, self._entered, module)),
                modules[-1].register_forward_hook(partial(_append_once, self._left, module)),
            ]
        if count:
            # The root's forward ends last, so all units are recorded by then.
            self._hooks.append(members[-1][0].register_forward_hook(lambda *_: self._set_order()))

    def _set_order(self) -> None:
        """Set the prefetch order after the first forward pass."""
        for hook in self._hooks:
            hook.remove()
        for place, module in enumerate(self._entered):
            following = self._entered[place + 1 : place + 1 + self.count]
            module.set_modules_to_forward_prefetch(following)
            # prepended: FSDP2's pre-forward hook reads the list that this hook sets
            self._first[module].register_forward_pre_hook(
                partial(_gather_ahead, module, following), prepend=True
            )
        backward = self._left[::-1]
        for place, module in enumerate(backward):
            preceding = backward[place + 1 : place + 1 + self.count]
            # An empty list would turn on torch's implicit prefetch again (`default_prefetch` in
            # _fsdp_state.py, 2.13).
            module.set_modules_to_backward_prefetch(preceding or [module])


def _gather_ahead(module: FSDPModule, following: list[FSDPModule], *_: object) -> None:
    """Set the units to prefetch in forward; none if a part of a unit is recomputed in backward.

    The units that follow in forward have finished their backward then.
    """
    module.set_modules_to_forward_prefetch([] if is_recomputing() else following)


def _append_once(order: list[FSDPModule], module: FSDPModule, *_: object) -> None:
    """Append a module to an order on its first use."""
    if module not in order:
        order.append(module)


def allocating_streams(model: nn.Module) -> dict[int, str]:
    """Return the names of the streams that FSDP2 allocates in, by `stream_key`, after a step.

    It uses one or two for reduced gradients, another for all-gathered units. Empty if no module is
    fully sharded.
    """
    return {
        stream_key(stream): name
        for module in model.modules()
        if isinstance(module, FSDPModule)
        for stream, name in fsdp2.allocation_streams(module)
    }


def stream_key(stream: Any) -> int:
    """Return a key of a stream.

    A GPU's stream has a number, but a new Python object at each access. CPU streams are compared by
    identity.
    """
    return int(getattr(stream, "stream_id", id(stream)))


def fsdp_mesh(step: FullyShard, mesh: Mesh) -> dist.DeviceMesh:
    """Return the 1-d mesh of shards, or the 2-d mesh (replicate, shard)."""
    shards = mesh.submesh(step.shard_axes)
    if not step.replicate_axes:
        return shards
    return concatenate_meshes(mesh.submesh(step.replicate_axes), shards)


def _reshard_option(given_back: bool | int | Reshard, modules: Sequence[str]) -> bool | int | None:
    """Return FSDP2's `reshard_after_forward`; None lets torch keep the root gathered.

    The root is the module with which the first forward pass begins.
    """
    if not isinstance(given_back, Reshard):
        return given_back
    return False if tuple(modules) == LAST_UNIT else None


def _shard_of(sync: SyncPolicy, ranks: int, parameter: nn.Parameter) -> Shard:
    """Return the dimension along which FSDP2 shards a parameter."""
    return Shard(shard_dim(tuple(local_tensor(parameter).shape), ranks, sync))


def _precision_policy(step: FullyShard, layout: Layout) -> MixedPrecisionPolicy:
    """Return the precision policy: with Θ = M, masters are all-gathered in the compute dtype."""
    gathered, reduced = TORCH_DTYPES[layout.parameters], TORCH_DTYPES[layout.reduced]
    if step.materialized:
        # Inputs have the compute dtype already. A cast would also round the tables of positions,
        # which are fp32.
        return MixedPrecisionPolicy(gathered, reduced, cast_forward_inputs=False)
    return MixedPrecisionPolicy(reduce_dtype=None if reduced is gathered else reduced)


def _name_smaller_group(group: FSDPParamGroup, step: FullyShard, mesh: Mesh) -> None:
    """Register the axes of the group that shards a unit between forward and backward."""
    if (between := fsdp2.post_forward_group(group)) is not None:
        mesh.register_group(between, step.shard_axes)


def apply(
    model: nn.Module,
    plan: Plan,
    mesh: Mesh,
    registry: TagRegistry,
    write: RowWriter | None = None,
) -> WrappedModel:
    """Wrap a model by the plan.

    Args:
        model: The model, or one stage's part of it.
        plan: The plan of that part.
        mesh: The process groups.
        registry: The tags of storages.
        write: Writes initial values of flat units, if the parameters have none yet.
    """
    match plan.wrap:
        case LocalGradients():
            return ParameterWrap(model, plan.units)
        case Replicate() as step:
            return ReplicatedWrap(model, step, mesh, plan.units, registry)
        case FullyShard() as step:
            return FullyShardedWrap(model, step, plan, mesh, registry)
        case FlatUnits() as step:
            return FlatWrap(model, plan, mesh, registry, write)
        case step:
            assert_never(step)
