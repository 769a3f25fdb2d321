"""Violations of Theorem 3 in the reduction: gradients that are not summed, summed repeatedly, over
wrong ranks, in a wrong dtype, or from another step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import MethodType

import torch
import torch.distributed as dist

from ptrain.axes.data.run.apply import FullyShardedWrap, ReplicatedWrap
from ptrain.axes.data.update import Gradients
from ptrain.internals.fsdp2 import parameter_groups
from ptrain.interpreter.program import Program
from ptrain.report.finding import Subject
from ptrain.spec.placement import Axis
from tests.faults.fault import Fault, Setting
from tests.faults.of_batches import BLOCKWISE, DDP, TP, ZERO2, ZERO3
from tests.faults.planting import (
    FAULTY_STEP,
    after_reduction,
    change_batches,
    data_group,
    flip_bit,
    is_faulty,
    modules,
    tensor_target,
    unit,
    units,
)

WITHOUT_OVERLAP = Setting(mesh={"dp_replicate": 2}, sections={"overlap": "none"})
HSDP = Setting(mesh={"dp_replicate": 2, "dp_shard": 2}, placement={"dp_shard": "zero3"})
TP_ZERO2 = Setting(mesh={"dp_shard": 2, "tp": 2}, shape={"vocab": 260})  # shards of one size
MEGATRON = Setting(mesh={"dp_shard": 2}, layout="megatron18")
LEFT_OUT = "blocks.0.attention.output.weight"


def averaged_sums(program: Program) -> None:
    """Divide by the number of ranks in the framework and in the loss: FSDP2's default."""
    for module in _sharded(program):
        module.set_gradient_divide_factor(float(program.world.size))


def sum_for_average(program: Program) -> None:
    """Sum one unit's gradients where losses are local means to be averaged."""
    ranks = program.spec.data_degree
    change_batches(
        program, lambda _, local: replace(local, global_tokens=local.global_tokens // ranks)
    )
    first = modules(program, r"blocks\.0")[0]
    for module in _sharded(program):
        if module is not first:
            module.set_gradient_divide_factor(float(ranks))


def _sharded(program: Program) -> list:
    assert isinstance(program.wrapped, FullyShardedWrap)
    return program.wrapped.sharded


def reduced_twice(program: Program) -> None:
    """Run the reduction again on reduced gradients: a factor of dp."""

    def again(step: int) -> None:
        for gradient in program.gradients():
            dist.all_reduce(gradient, group=data_group(program))

    after_reduction(program, again)


def hook_twice(program: Program) -> None:
    """Run one unit's hook twice: its gradient share is added twice."""
    gradients = unit(program, "blocks.0").gradients
    keep = gradients._add_to_stored

    def twice(part: torch.Tensor) -> None:
        keep(part.clone())
        keep(part)

    gradients._add_to_stored = twice


def last_micro_batch_only(program: Program) -> None:
    """Zero gradients before every micro-batch."""
    wrapped = program.wrapped
    micro_batch = wrapped.micro_batch

    @contextmanager
    def zeroed(is_last: bool) -> Iterator[None]:
        for gradient in program.gradients():
            gradient.zero_()
        with micro_batch(is_last):
            yield

    wrapped.micro_batch = zeroed


def zeroed_too_late(program: Program) -> None:
    """Keep the previous step's gradients when accumulation begins."""
    clear_gradients, steps = program.wrapped.clear_gradients, iter(range(10**6))

    def late() -> None:
        if next(steps) % 2:
            clear_gradients()

    program.wrapped.clear_gradients = late


def zeroed_within_accumulation(program: Program) -> None:
    """Zero gradients after the first micro-batch's backward."""
    micro_batch, passes = program.wrapped.micro_batch, iter(range(10**6))

    @contextmanager
    def zeroed(is_last: bool) -> Iterator[None]:
        with micro_batch(is_last):
            yield
        if not next(passes) % program.spec.batch.accumulate:
            for gradient in program.gradients():
                gradient.zero_()

    program.wrapped.micro_batch = zeroed


def never_reduced(program: Program) -> None:
    """Run all micro-batches without synchronization, including the last."""
    micro_batch = program.wrapped.micro_batch
    program.wrapped.micro_batch = lambda is_last: micro_batch(False)


def unit_not_reduced(program: Program) -> None:
    """Keep each rank's shard of its local gradient for one unit."""
    gradients = unit(program, "blocks.1").gradients

    def finish(self: Gradients, *, is_last: bool, is_due: bool) -> None:
        if self.whole is not None:
            self._store_reduced(self.cuts.take_part(self.whole, (), self.cut).clone())

    gradients.finish = MethodType(finish, gradients)


def largest_for_sum(program: Program) -> None:
    """Reduce with MAX instead of SUM."""
    wrapped = program.wrapped
    assert isinstance(wrapped, ReplicatedWrap)

    def reduce() -> None:
        for bucket in wrapped._unreduced:
            dist.all_reduce(bucket, dist.ReduceOp.MAX, group=wrapped.group)
        wrapped._unreduced.clear()

    wrapped._reduce_kept = reduce


def reduced_in_bf16(program: Program) -> None:
    """Reduce gradients in 16 bits although the layout requires another dtype."""
    for each in units(program):
        gradients = each.gradients
        finish = gradients.finish

        def rounded(
            *,
            is_last: bool,
            is_due: bool,
            of: Gradients = gradients,
            finish=finish,
        ) -> None:
            if of.whole is not None:
                of.whole.copy_(of.whole.bfloat16())
            finish(is_last=is_last, is_due=is_due)

        gradients.finish = rounded


def one_rank_in_bf16(program: Program) -> None:
    """Round one rank's local gradients to 16 bits before the sum."""
    if is_faulty(program):
        reduced_in_bf16(program)


def replicas_not_reduced(program: Program) -> None:
    """Reduce within the shard group only (HSDP): the replica group has one rank."""
    alone = [dist.new_group([rank]) for rank in range(program.world.size)]
    for module in _sharded(program):
        for group in parameter_groups(module):
            group.mesh_info.replicate_process_group = alone[program.world.rank]


def swapped_groups(program: Program) -> None:
    """Swap the groups of data ranks and tp ranks in reductions."""
    mesh = program.mesh
    data, tensor = mesh.group((Axis.DP_SHARD,)), mesh.group((Axis.TP,))
    mesh._groups[(Axis.DP_SHARD,)], mesh._groups[(Axis.TP,)] = tensor, data


def flipped_gradient(program: Program) -> None:
    """Flip a bit of one rank's reduced gradient once."""

    def act(step: int) -> None:
        if step == FAULTY_STEP and is_faulty(program):
            gradient = tensor_target(program, "blocks.0.mlp.up.weight").gradient
            assert gradient is not None
            flip_bit(gradient, -4, index=5)

    after_reduction(program, act)


def scaled_down(program: Program) -> None:
    """Divide by K although the loss is a sum over the global batch."""

    def act(step: int) -> None:
        torch._foreach_mul_(program.gradients(), 1 / program.spec.batch.accumulate)

    after_reduction(program, act)


def one_tensor_not_reduced(program: Program) -> None:
    """Leave one parameter's gradient out of the buckets."""
    target = tensor_target(program, LEFT_OUT)
    own: list[torch.Tensor] = []
    target.parameter.register_hook(lambda gradient: own.append(gradient.detach().clone()))

    def act(step: int) -> None:
        assert target.gradient is not None
        target.gradient.copy_(torch.stack(own).sum(0))
        own.clear()

    after_reduction(program, act)


FAULTS = (
    Fault(
        name="divided by N twice",
        setting=ZERO3,
        plant=averaged_sums,
        subjects=(Subject.GRADIENTS,),
        axis="dp_shard",
        factor="÷ 2",
    ),
    Fault(
        name="SUM for AVG in one unit",
        setting=ZERO3,
        plant=sum_for_average,
        subjects=(Subject.GRADIENTS, Subject.LOSS),
        axis="dp_shard",
        factor="× 2",
    ),
    Fault(
        name="gradient times dp: reduced twice",
        setting=DDP,
        plant=reduced_twice,
        subjects=(Subject.GRADIENTS,),
        axis="dp_replicate",
        factor="× 2",
    ),
    Fault(
        name="a hook that fires twice",
        setting=BLOCKWISE,
        plant=hook_twice,
        subjects=(Subject.GRADIENTS,),
        factor="× 2|twice",
        place=r"blocks\.0",
    ),
    Fault(
        name="last micro-batch only",
        setting=DDP,
        plant=last_micro_batch_only,
        subjects=(Subject.GRADIENTS,),
        factor="micro-batch",
    ),
    Fault(
        name="gradients zeroed too late",
        setting=DDP,
        plant=zeroed_too_late,
        subjects=(Subject.GRADIENTS,),
        factor="step|stale|zero",
    ),
    Fault(
        name="gradients zeroed within the accumulation",
        setting=TP,
        plant=zeroed_within_accumulation,
        subjects=(Subject.GRADIENTS,),
        factor="micro-batch",
    ),
    Fault(
        name="1/K applied to a sum",
        setting=ZERO2,
        plant=scaled_down,
        subjects=(Subject.GRADIENTS,),
        factor="÷ 3",
    ),
    Fault(
        name="never reduced: no synchronization on the last micro-batch",
        setting=DDP,
        plant=never_reduced,
        subjects=(Subject.GRADIENTS,),
        axis="dp_replicate",
        factor="missing|local|not summed|all-reduce",
    ),
    Fault(
        name="one unit not reduced",
        setting=BLOCKWISE,
        plant=unit_not_reduced,
        subjects=(Subject.GRADIENTS,),
        axis="dp_shard",
        factor="missing|local|not summed|reduce",
        place=r"blocks\.1",
    ),
    Fault(
        name="one tensor left out of the reduction",
        setting=DDP,
        plant=one_tensor_not_reduced,
        subjects=(Subject.GRADIENTS,),
        factor="missing all-reduce|changed after backward",  # which is where it is planted
        place=LEFT_OUT,
    ),
    Fault(
        name="MAX for SUM",
        setting=WITHOUT_OVERLAP,
        plant=largest_for_sum,
        subjects=(Subject.GRADIENTS, Subject.COLLECTIVE),
        axis="dp_replicate",
        factor="MAX",
    ),
    Fault(
        name="reduced in bf16",
        setting=MEGATRON,
        plant=reduced_in_bf16,
        subjects=(Subject.GRADIENTS,),
        factor="bfloat16",
    ),
    Fault(
        name="dtype mismatch on one rank: its gradients in bf16",
        setting=ZERO2,
        plant=one_rank_in_bf16,
        subjects=(Subject.GRADIENTS,),
        factor="bfloat16",
    ),
    Fault(
        name="HSDP replicas not reduced",
        setting=HSDP,
        plant=replicas_not_reduced,
        subjects=(Subject.GRADIENTS,),
        axis="dp_replicate",
        factor="missing|local|not summed|all-reduce",
    ),
    Fault(
        name="swapped tp and dp groups",
        setting=TP_ZERO2,
        plant=swapped_groups,
        subjects=(Subject.GRADIENTS, Subject.COLLECTIVE),
        axis="dp_shard|tp",
        factor="group|over tp|instead",
    ),
    Fault(
        name="a flipped bit in one rank's reduced gradient",
        setting=DDP,
        plant=flipped_gradient,
        subjects=(Subject.GRADIENTS,),
        factor="bit|element",
        place=r"blocks\.0\.mlp\.up\.weight",
    ),
)
