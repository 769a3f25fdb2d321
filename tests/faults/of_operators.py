"""Faults of tensor and pipeline parallelism: missing exchanges between ranks that share a model,
and values that must be equal or different across ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather
from torch.distributed.tensor import DTensor, Replicate

from ptrain.axes.pipeline.run.stage import StagedModel
from ptrain.axes.tensor.run.apply import RankRandomness
from ptrain.internals.fsdp2 import parameter_groups
from ptrain.interpreter.program import Program
from ptrain.models.attention import SdpaCore
from ptrain.report.finding import Subject
from ptrain.spec.placement import Axis
from tests.faults.fault import Fault, Setting
from tests.faults.of_batches import DDP, TP, ZERO3
from tests.faults.planting import (
    after_reduction,
    flip_bit,
    is_faulty,
    modules,
    owner_of_hook,
    remove_hooks,
    replicated_gradients,
)

SP = Setting(mesh={"tp": 2}, placement={"tp": "S,S,S,S"})
TP_GPT = Setting(mesh={"tp": 2}, model="gpt")
TP_DROPOUT = Setting(mesh={"tp": 2}, model="gpt", shape={"dropout": 0.1})
DDP_DROPOUT = Setting(mesh={"dp_replicate": 2}, model="gpt", shape={"dropout": 0.1})
TIED = Setting(mesh={"pp": 2}, model="llama-tied", accumulate=4)
NORMS = r"norm\.weight"


def norms_not_summed(program: Program) -> None:
    """Keep each rank's norm gradients of its local tokens without a reduction."""
    for module in modules(program, r".*norm"):
        assert remove_hooks(module, "ReadThrough") == 2


def norms_summed_three_times(program: Program) -> None:
    def again(step: int) -> None:
        for gradient in replicated_gradients(program, NORMS):
            for _ in range(2):
                dist.all_reduce(gradient, group=program.mesh.group((Axis.TP,)))

    after_reduction(program, again)


class _NotReplicated(torch.autograd.Function):
    """An identity whose backward pass omits the sum."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        return DTensor.from_local(x, mesh, [Replicate()], run_check=False)

    @staticmethod
    def backward(ctx: Any, gradient: DTensor) -> tuple[torch.Tensor, None]:
        return gradient.to_local(), None


def input_not_replicated(program: Program) -> None:
    """Omit the sum of input gradients over the ranks: Megatron's copy operator without its
    all-reduce."""
    (mlp,) = modules(program, r"blocks\.1\.mlp")
    assert remove_hooks(mlp, "FullInput._apply.<locals>") == 1
    mesh = program.mesh.submesh((Axis.TP,))
    mlp.register_forward_pre_hook(lambda _, args: (_NotReplicated.apply(args[0], mesh), *args[1:]))


def bias_on_every_rank(program: Program) -> None:
    """Add a row operator's bias on every rank before the sum over them."""
    degree = program.mesh.degrees[Axis.TP]
    for module in modules(program, r"blocks\.\d\.mlp\.down"):

        def more(module: nn.Module, _: Any, output: Any) -> Any:
            bias = module.bias
            local = bias.to_local() if not isinstance(output, DTensor) else bias
            return output + (degree - 1) * local

        module.register_forward_hook(more)


def slices_in_wrong_order(program: Program) -> None:
    """Gather the ranks' sequence shards in the wrong order before one sub-block."""
    (mlp,) = modules(program, r"blocks\.0\.mlp")

    def turned(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        whole: DTensor = args[0]
        rolled = torch.roll(whole, whole.shape[1] // 2, 1)
        return (rolled, *args[1:])

    mlp.register_forward_pre_hook(turned)


def wrong_rope_offset(program: Program) -> None:
    """Rotate by positions from the start of the second rank's token slice."""
    if not program.mesh.coordinate(Axis.TP):
        return
    offset = program.spec.batch.sequence // 2

    def shifted(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        x, *tables = args
        return (x, *(table.roll(-offset, 0) for table in tables))

    for attention in modules(program, r"blocks\.\d\.attention"):
        attention.register_forward_pre_hook(shifted)


class _NotCausal(SdpaCore):
    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, _: Any) -> torch.Tensor:
        return nn.functional.scaled_dot_product_attention(q, k, v)


def no_mask_on_one_rank(program: Program) -> None:
    """Attend to later tokens on one rank."""
    if is_faulty(program):
        for core in modules(program, r"blocks\.1\.attention\.core"):
            core.forward = _NotCausal().forward


def masks_shared_within(program: Program) -> None:
    """Use one generator for the heads of all ranks in a sharded sub-block."""
    if program.spec.model.dropout:  # else there is none
        own = owner_of_hook(modules(program, r"blocks\.0\.attention")[0], RankRandomness)
        own.index = 0


def _drawn_as(program: Program, index: int) -> None:
    """Give the program another `random_index`. It is a property, so the instance gets a new
    class."""
    kind = type(program)
    program.__class__ = type(kind.__name__, (kind,), {"random_index": property(lambda _: index)})


def masks_differ_between(program: Program) -> None:
    """Drop replicated activations with different masks on the ranks of tp."""
    _drawn_as(program, program.world.rank)


def masks_shared_by_samples(program: Program) -> None:
    """Draw the same masks on all data ranks."""
    _drawn_as(program, 0)


def evaluates_on_one_rank(program: Program) -> None:
    """Leave one rank in evaluation mode, without dropout."""
    if is_faulty(program):
        program.model.eval()


def masks_of_another_seed(program: Program) -> None:
    """Draw all masks from another seed on all ranks."""
    _drawn_as(program, program.random_index + 1000)


def dropped_more(program: Program) -> None:
    """Drop twice the specified share on all ranks."""
    for module in program.model.modules():
        if isinstance(module, nn.Dropout):
            module.p *= 2
        elif isinstance(getattr(module, "dropout", None), float):
            module.dropout *= 2


def flipped_activation(program: Program) -> None:
    """Flip the lowest bit of one element of a module's output on one rank."""

    def flipped(_: nn.Module, __: Any, output: torch.Tensor) -> torch.Tensor:
        other = output.clone()
        flip_bit(other, 0, index=7)
        return other

    if is_faulty(program):
        (module,) = modules(program, r"blocks\.0\.mlp\.down")
        module.register_forward_hook(flipped)


def tied_not_summed(program: Program) -> None:
    """Omit the sum of the embedding gradients of first and last stage."""
    assert isinstance(program.wrapped, StagedModel)
    program.wrapped._sum_shared = lambda: None


class _ReversedShards(AllGather):
    """The ranks' shards in reverse order."""

    def __init__(self, inner: AllGather) -> None:
        self.inner = inner

    def allocate(self, *size: Any, **kind: Any) -> torch.Tensor:
        return self.inner.allocate(*size, **kind)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> None:
        self.inner(output_tensor, input_tensor, group)
        output_tensor.copy_(output_tensor.view(group.size(), -1).flip(0).reshape(-1))


def gathered_in_wrong_order(program: Program) -> None:
    """Return the shards of one unit's all-gather in another order."""
    (block,) = modules(program, r"blocks\.1")
    assert isinstance(block, FSDPModule)
    (group,) = parameter_groups(block)
    block.set_custom_all_gather(_ReversedShards(group._all_gather_comm))


def one_rank_in_fp32(program: Program) -> None:
    """Compute one module with lower precision on one rank."""
    dtype = next(program.model.parameters()).dtype
    lower = torch.float32 if dtype is torch.float64 else torch.bfloat16

    def rounded(_: nn.Module, __: Any, output: torch.Tensor) -> torch.Tensor:
        return output.to(lower).to(output.dtype)

    if is_faulty(program):
        (module,) = modules(program, r"blocks\.0\.mlp\.down")
        module.register_forward_hook(rounded)


def wrong_buffer(program: Program) -> None:
    """Use another model's rotation table on one rank, without a buffer broadcast."""
    if is_faulty(program):
        table = next(
            buffer for name, buffer in program.model.named_buffers() if name.endswith("sin_TK")
        )
        table.mul_(0.9)


FAULTS = (
    Fault(
        name="norm gradients under SP unsynchronised",
        setting=SP,
        plant=norms_not_summed,
        subjects=(Subject.GRADIENTS,),
        axis="tp",
        factor="missing|local|not summed|partial|all-reduce",
        place="norm",
    ),
    Fault(
        name="norm gradients under SP summed three times",
        setting=SP,
        plant=norms_summed_three_times,
        subjects=(Subject.GRADIENTS,),
        axis="tp",
        factor="× 4",
        place="norm",
    ),
    Fault(
        name="input not replicated under TP",
        setting=TP,
        plant=input_not_replicated,
        subjects=(Subject.ACTIVATIONS, Subject.GRADIENTS),
        axis="tp",
        factor="missing|local|not summed|partial|all-reduce",
        place=r"blocks\.1\.mlp",
    ),
    Fault(
        name="bias added on every tp rank before the sum",
        setting=TP_GPT,
        plant=bias_on_every_rank,
        subjects=(Subject.GRADIENTS, Subject.ACTIVATIONS),
        axis="tp",
        factor="× 2",
        place=r"mlp\.down\.bias",
    ),
    Fault(
        name="sequence slices gathered in the wrong order",
        setting=SP,
        plant=slices_in_wrong_order,
        subjects=(Subject.ACTIVATIONS,),
        axis="tp",
        factor="order",
        place=r"blocks\.0\.mlp",
    ),
    Fault(
        name="wrong rope offset under SP",
        setting=SP,
        plant=wrong_rope_offset,
        subjects=(Subject.ACTIVATIONS,),
        axis="tp",
        place=r"blocks\.0\.attention",
    ),
    Fault(
        name="no causal mask on one rank",
        setting=DDP,
        plant=no_mask_on_one_rank,
        subjects=(Subject.ACTIVATIONS,),
        place=r"blocks\.1\.attention\.core",
    ),
    Fault(
        name="dropout masks shared where they must differ (heads of tp)",
        setting=TP_DROPOUT,
        plant=masks_shared_within,
        subjects=(Subject.RANDOM,),
        axis="tp",
        factor="shared where it must differ",
    ),
    Fault(
        name="dropout masks different where they must be shared (tp)",
        setting=TP_DROPOUT,
        plant=masks_differ_between,
        subjects=(Subject.RANDOM,),
        axis="tp",
        factor="differs where it must be shared",
    ),
    Fault(
        name="dropout masks shared by data ranks",
        setting=DDP_DROPOUT,
        plant=masks_shared_by_samples,
        subjects=(Subject.RANDOM,),
        axis="dp_replicate",
        factor="shared where it must differ",
    ),
    Fault(
        name="one rank of tp in evaluation mode",
        setting=TP_DROPOUT,
        plant=evaluates_on_one_rank,
        subjects=(Subject.RANDOM,),
        axis="tp",
        factor="evaluates",
    ),
    Fault(
        name="dropout of another seed on all ranks",
        setting=DDP_DROPOUT,
        plant=masks_of_another_seed,
        subjects=(Subject.RANDOM,),
        undetectable=(
            "masks that are drawn alike where they must be and apart where they must be are as "
            "good as those of the spec's seed"
        ),
    ),
    Fault(
        name="dropout of twice the rate on all ranks",
        setting=DDP_DROPOUT,
        plant=dropped_more,
        subjects=(Subject.RANDOM,),
        undetectable=(
            "several ranks draw other masks than one device does, so beside one device nothing is "
            "dropped; what the masks are like is not looked at"
        ),
    ),
    Fault(
        name="a flipped bit in an activation: lowest bit",
        setting=DDP,
        plant=flipped_activation,
        subjects=(Subject.ACTIVATIONS,),
        undetectable=(
            "one unit in the last place of one element is what another order of summation does to "
            "each, and no rank has a copy of another's samples"
        ),
    ),
    Fault(
        name="tied embedding not reduced",
        setting=TIED,
        plant=tied_not_summed,
        subjects=(Subject.GRADIENTS,),
        axis="pp",
        factor="missing|local|not summed|all-reduce",
        place=r"embed\.weight",
    ),
    Fault(
        name="all-gather in the wrong order of ranks",
        setting=ZERO3,
        plant=gathered_in_wrong_order,
        subjects=(Subject.ACTIVATIONS, Subject.PARAMETERS),
        axis="dp_shard",
        factor="order",
        place=r"blocks\.1",
    ),
    Fault(
        name="dtype mismatch on one rank: a module in lower precision",
        setting=DDP,
        plant=one_rank_in_fp32,
        subjects=(Subject.ACTIVATIONS,),
        factor="float32|bfloat16",
        place=r"blocks\.0\.mlp\.down",
    ),
    Fault(
        name="a buffer not synchronised",
        setting=DDP,
        plant=wrong_buffer,
        subjects=(Subject.BUFFERS,),
        axis="dp_replicate",
        factor=r"× 0\.9",
        place="sin_TK",
    ),
)
