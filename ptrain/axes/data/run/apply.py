"""Apply a placement on the data axes to a module: each plan step as a wrap, ready to run.

A wrap gives the module to call, selects what belongs to one micro-batch, brings the gradients into
the optimizer's layout, and lists what the optimizer updates. The loop around it is the same.

Replicas are torch's DistributedDataParallel, summing, with buckets of any size, in or after
backward. Shards by row, all-gathered by unit, are FSDP2's `fully_shard` with its dials, summing.

Note: DDP's static_graph stays off. It changes no number, and saves only the search for unused
parameters, which is off already; and torch 2.13 fails in `no_sync` on the first micro-batch of such
a model.
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
from ptrain.axes.data.run.summing import handing_over
from ptrain.cost import State
from ptrain.facts.stages import Units
from ptrain.internals import fsdp2
from ptrain.internals.dtensor import side_by_side
from ptrain.internals.fakes import unset_fake_temporarily
from ptrain.internals.fsdp2 import FSDPParamGroup, parameter_groups
from ptrain.models.initialize import keeps_its_weights
from ptrain.models.ledger import local
from ptrain.models.numerics import TORCH_DTYPES
from ptrain.models.watch import runs_again
from ptrain.rooms.comm import Mesh, Registry, TaggedAllGather, TaggedReduceScatter
from ptrain.spec.dials import GradientSync, Reshard, SyncPolicy
from ptrain.spec.job import OptimizerSpec
from ptrain.spec.precision import Layout
from ptrain.steps.step import Plan
from ptrain.steps.wraps import FlatUnits, FullyShard, LocalGradients, Replicate
from ptrain.timeline import Kind

_STOCK_BUCKET_MB = 25


class ReplicatedWrap(ParameterWrap):
    """DistributedDataParallel, summing. Its constructor sends nothing: all ranks hold the same
    initial weights already."""

    def __init__(
        self,
        model: nn.Module,
        step: Replicate,
        mesh: Mesh,
        units: Units,
        registry: Registry,
    ) -> None:
        super().__init__(model, units)
        device = mesh.world.device
        self.step, self.mesh, self.registry = step, mesh, registry
        self.group = mesh.group(step.axes)
        self.keeps_buckets = False
        self._buckets: list[torch.Tensor] = []  # of this step, in the order in which they were full
        self._unreduced: list[torch.Tensor] = []
        self._reducing: list[dist.Work] = []
        self._trained = [p for p in model.parameters() if p.requires_grad]
        with warnings.catch_warnings():
            # 2.13 renames broadcast_buffers, but its successor would still broadcast once
            warnings.simplefilter("ignore", FutureWarning)
            self.wrapped = DistributedDataParallel(
                model,
                device_ids=[device.index] if device.type == "cuda" else None,
                process_group=self.group,
                bucket_cap_mb=_bucket_cap_mb(step),
                broadcast_buffers=False,
                gradient_as_bucket_view=True,
                init_sync=False,
            )
        self.wrapped.register_comm_hook(None, handing_over(self._receive, registry))
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
        """Whether a backward pass reduces is not known yet, and told in it."""
        self.keeps_buckets = True
        accumulating: AbstractContextManager[None] = self.wrapped.no_sync()
        return accumulating

    @contextmanager
    def backward_pass(self, kind: Kind, is_last: bool) -> Iterator[None]:
        assert kind is Kind.BACKWARD, "torch's replicas wait for autograd to accumulate"
        if is_last:
            self.wrapped.reducer.prepare_for_backward([])
        yield

    def end_passes(self) -> None:
        self._reduce_kept()

    def _receive(self, bucket: torch.Tensor) -> None:
        """Sum a full bucket over the ranks, asynchronously; without overlap, later. The loss is
        divided by a global count already."""
        self._buckets.append(bucket)
        if self.step.overlaps:
            if (work := dist.all_reduce(bucket, group=self.group, async_op=True)) is not None:
                self._reducing.append(work)
        else:
            self._unreduced.append(bucket)

    def _reduce_kept(self) -> None:
        """When backward is over: wait for what is on its way. Without overlap, reduce one bucket
        after the other."""
        for work in self._reducing:
            work.wait()
        self._reducing.clear()
        for bucket in self._unreduced:
            dist.all_reduce(bucket, group=self.group)
        self._unreduced.clear()

    def gradients(self) -> list[torch.Tensor]:
        """Return the buckets: DDP's are few, and hold nothing else. Where somebody put another
        gradient in place of a view of them, return what he put there."""
        return list(self._buckets) if self._have_all() else super().gradients()

    def _have_all(self) -> bool:
        """Return whether the buckets have all gradients."""
        if sum(map(torch.numel, self._buckets)) != sum(map(torch.numel, self._trained)):
            return False
        storages = {bucket.untyped_storage()._cdata for bucket in self._buckets}
        return all(
            parameter.grad is not None and parameter.grad.untyped_storage()._cdata in storages
            for parameter in self._trained
        )

    def clear_gradients(self) -> None:
        """Accumulation adds into the buckets, so they are zeroed; else autograd's gradients are
        copied into them, which saves reading them. In the second step DDP makes its buckets
        anew."""
        self._buckets.clear()
        for target in self._targets():
            if self.keeps_buckets and target.parameter.grad is not None:
                target.parameter.grad.zero_()
            else:
                target.parameter.grad = None

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
    """None for torch's own size, with which it keeps the first bucket small."""
    cap = step.bucket_bytes / 2**20
    return None if cap == _STOCK_BUCKET_MB else cap


_RETURNS_A_VIEW = "FSDP2-wrapped module .* returned a view tensor"


class FullyShardedWrap(ParameterWrap):
    """FSDP2 by unit, then the root; on a 2-d mesh it is HSDP. Averaging is off."""

    def __init__(
        self, model: nn.Module, step: FullyShard, plan: Plan, mesh: Mesh, registry: Registry
    ) -> None:
        super().__init__(model, plan.units, owns_masters=step.materialized)
        if not keeps_its_weights(model):
            # a gpt's mlp returns a view, and nothing in our models writes into what a unit returns
            warnings.filterwarnings("ignore", _RETURNS_A_VIEW, UserWarning)
        self.step, self.registry = step, registry
        steps = [(modules, plan.wrap_of(modules)) for modules in plan.units]
        units = [(modules, own) for modules, own in steps if isinstance(own, FullyShard)]
        apart = [modules for modules, own in steps if not isinstance(own, FullyShard)]
        # what no axis shards stays with autograd
        self._local = [
            parameter
            for modules in apart
            for module in self._members(modules)
            for parameter in module.parameters()
        ]
        self.sharded: list[FSDPModule] = []  # one of each unit's modules, which share their state
        for modules, own in units:
            self._shard(modules, own, plan.update.layout, mesh)
        for module, (modules, own) in zip(self.sharded, units, strict=True):
            self._sum(module, modules[0] or "root", own, mesh)
        if not step.overlaps:
            fsdp2.gather_behind_computation(model)
        prefetch = step.prefetch if step.overlaps else 0
        if prefetch is not None:
            Prefetch(self.sharded, [self._members(modules) for modules, _ in units], prefetch)

    def _shard(self, modules: Sequence[str], step: FullyShard, layout: Layout, mesh: Mesh) -> None:
        members = self._members(modules)
        with unset_fake_temporarily():  # the mesh of a smaller group is cut from a tensor
            fully_shard(
                members,
                mesh=fsdp_mesh(step, mesh),
                reshard_after_forward=_after_forward(step.sync.reshard_after_forward),
                mp_policy=_precision(step, layout),
                ignored_params=set(self._local),
                shard_placement_fn=partial(_shard_of, step.sync, mesh.size(step.shard_axes)),
            )
        assert isinstance(members[0], FSDPModule)
        self.sharded.append(members[0])

    def _sum(self, module: FSDPModule, name: str, step: FullyShard, mesh: Mesh) -> None:
        """Let a unit's gradients be summed, not averaged, by collectives that say whose they
        are."""
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

    def _members(self, modules: Sequence[str]) -> list[nn.Module]:
        return [self.model.get_submodule(name) for name in modules]

    def micro_batch(self, is_last: bool) -> AbstractContextManager[None]:
        root = self.sharded[-1]
        sync = self.step.sync
        root.set_requires_gradient_sync(is_last or sync.gradients is GradientSync.EVERY)
        root.set_reshard_after_backward(is_last or sync.reshard_after_backward)
        return nullcontext()

    @contextmanager
    def forward_pass(self) -> Iterator[None]:
        """In backward torch gathers ahead what was left before, also what a micro-batch before left
        last, for nothing. So before the first unit of each stands that unit, which is there."""
        order = fsdp2.backward_order(self.sharded[-1])
        start = len(order)
        order += [group for module in self.sharded for group in parameter_groups(module)][:1]
        yield
        if len(order) > start + 1:
            order[start] = order[start + 1]

    @contextmanager
    def backward_pass(self, kind: Kind, is_last: bool) -> Iterator[None]:
        root = self.sharded[-1]
        is_whole = kind is Kind.BACKWARD
        with self.micro_batch(is_last):
            if not is_whole:  # autograd runs no hook when the weights' gradients are there
                root.set_requires_gradient_sync(False)
                root.set_reshard_after_backward(False)
            # between micro-batches of which some are still to come back, nothing is at an end
            root.set_is_last_backward(is_whole and is_last)
            yield
        if kind is Kind.WEIGHT and (is_last or self.step.sync.gradients is GradientSync.EVERY):
            self._reduce_now(is_last)

    def _reduce_now(self, is_last: bool) -> None:
        """What FSDP2's hooks do in a backward pass."""
        root = self.sharded[-1]
        self.micro_batch(is_last)
        root.set_is_last_backward(True)
        for module in self.sharded:
            for group in parameter_groups(module):
                group.post_backward()
        fsdp2.end_backward(root)

    def end_evaluation(self) -> None:
        for module in self.sharded:
            module.reshard()
            for part in fsdp2.parameters(module):  # of a smaller group: kept for a backward pass
                fsdp2.forget_smaller_shard(part)

    def storages(self) -> Iterator[tuple[State, torch.Tensor]]:
        """The shards, also while the module shows gathered parameters; the larger shards of
        smaller groups; and the gradients: reduced ones of the shards, unreduced ones of the
        gathered parameters, or of another dtype than these."""
        stored = State.OPTIMIZER if self.step.materialized else State.PARAMETERS
        for module in self.sharded:
            for part in fsdp2.parameters(module):
                yield stored, local(part.sharded_param.detach())
                if (between := fsdp2.smaller_shard(part)) is not None:
                    yield State.TRANSIENT, between
                for gradient in fsdp2.gradients(part):
                    yield State.GRADIENTS, local(gradient)
        for parameter in self._local:
            yield State.PARAMETERS, local(parameter.detach())
            if parameter.grad is not None:
                yield State.GRADIENTS, local(parameter.grad)


class Prefetch:
    """Gathers `count` units ahead: in forward those that are entered next, in backward those that
    were left before. The order is that of the first forward pass; `count` 0 switches off what
    torch does by itself in backward."""

    def __init__(
        self, sharded: Sequence[FSDPModule], members: Sequence[Sequence[nn.Module]], count: int
    ) -> None:
        self.count = count
        self._first = {module: modules[0] for module, modules in zip(sharded, members, strict=True)}
        self._entered: list[FSDPModule] = []
        self._left: list[FSDPModule] = []
        self._hooks = []
        for module, modules in zip(sharded, members, strict=True):
            if not parameter_groups(module):
                continue
            if not count:
                module.set_modules_to_backward_prefetch([module])  # it is there: nothing to do
                continue
            self._hooks += [
                modules[0].register_forward_pre_hook(partial(_note, self._entered, module)),
                modules[-1].register_forward_hook(partial(_note, self._left, module)),
            ]
        if count:
            self._hooks.append(members[-1][0].register_forward_hook(lambda *_: self._settle()))

    def _settle(self) -> None:
        """The first forward pass is over."""
        for hook in self._hooks:
            hook.remove()
        for place, module in enumerate(self._entered):
            following = self._entered[place + 1 : place + 1 + self.count]
            module.set_modules_to_forward_prefetch(following)
            self._first[module].register_forward_pre_hook(
                partial(_gather_ahead, module, following), prepend=True
            )
        backward = self._left[::-1]
        for place, module in enumerate(backward):
            preceding = backward[place + 1 : place + 1 + self.count]
            module.set_modules_to_backward_prefetch(preceding or [module])


def _gather_ahead(module: FSDPModule, following: list[FSDPModule], *_: object) -> None:
    """Nothing, where a part of a unit runs again: what follows in forward has been through its
    backward pass."""
    module.set_modules_to_forward_prefetch([] if runs_again() else following)


def _note(order: list[FSDPModule], module: FSDPModule, *_: object) -> None:
    if module not in order:
        order.append(module)


def allocating_streams(model: nn.Module) -> dict[int, str]:
    """Return the names of the streams that FSDP2 allocates in, by `stream_key`, once a step has
    run: reduced gradients in one or two, what is gathered in another. Empty where nothing is fully
    sharded."""
    return {
        stream_key(stream): name
        for module in model.modules()
        if isinstance(module, FSDPModule)
        for stream, name in fsdp2.streams(module)
    }


def stream_key(stream: Any) -> int:
    """Return what tells streams apart: a GPU's have a number, and an object made at each look at
    them; a processor's are objects."""
    return int(getattr(stream, "stream_id", id(stream)))


def fsdp_mesh(step: FullyShard, mesh: Mesh) -> dist.DeviceMesh:
    """One dimension, or (replicate, shard)."""
    shards = mesh.submesh(step.shard_axes)
    if not step.replicate_axes:
        return shards
    return side_by_side(mesh.submesh(step.replicate_axes), shards)


def _after_forward(given_back: bool | int | Reshard) -> bool | int | None:
    """None is torch's own: in the first forward pass the module that it begins with is the root,
    which stays gathered."""
    return None if isinstance(given_back, Reshard) else given_back


def _shard_of(sync: SyncPolicy, ranks: int, parameter: nn.Parameter) -> Shard:
    return Shard(shard_dim(tuple(local(parameter).shape), ranks, sync))


def _precision(step: FullyShard, layout: Layout) -> MixedPrecisionPolicy:
    """Theta = M: the shards are the masters, gathered in the dtype of the computation. Shards in
    that dtype are gathered as they are."""
    gathered, reduced = TORCH_DTYPES[layout.parameters], TORCH_DTYPES[layout.reduced]
    if step.materialized:
        return MixedPrecisionPolicy(gathered, reduced, cast_forward_inputs=False)
    return MixedPrecisionPolicy(reduce_dtype=None if reduced is gathered else reduced)


def _name_smaller_group(group: FSDPParamGroup, step: FullyShard, mesh: Mesh) -> None:
    """The ranks that keep a unit between forward and backward, where they are fewer than all."""
    if (between := fsdp2.smaller_group(group)) is not None:
        mesh.adopt(between, step.shard_axes)


def apply(
    model: nn.Module,
    plan: Plan,
    mesh: Mesh,
    registry: Registry,
    write: RowWriter | None = None,
) -> WrappedModel:
    """Wrap `model` as the plan says. `write`: of a step that is filled by unit, what gives its
    parameters the values that they have not yet."""
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
