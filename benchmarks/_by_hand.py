"""What one would write by hand on torch's own parts: the contender that ptrain is held against.

Each maker gives a function that makes one step of a spec's model on ptrain's samples and returns
this rank's share of the loss. Imported in the ranks; torch only there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

from _steps import replicated, samples

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from ptrain.spec.spec import Spec

Step = Callable[[], Any]


def by_hand(spec: Spec) -> Step:
    """Return a step with DistributedDataParallel, or with fully_shard on each block and the
    rest."""
    from ptrain.spec.placement import Axis

    model = built(spec)
    is_sharded = spec.degree(Axis.DP_SHARD) > 1
    model = fully_sharded(model, spec, "cpu") if is_sharded else replicated(model, spec)
    return loop(spec, model, adamw(spec, model))


def compiled(spec: Spec) -> Step:
    """Return a step with DistributedDataParallel around blocks compiled by torch.compile."""
    model = built(spec)
    for block in model.blocks:
        block.compile(fullgraph=True, dynamic=False)
    model = replicated(model, spec)
    return loop(spec, model, adamw(spec, model))


def zero_redundancy(spec: Spec) -> Step:
    """Return a step with DistributedDataParallel and torch's ZeroRedundancyOptimizer."""
    model = replicated(built(spec), spec)
    return loop(spec, model, zero_redundancy_adamw(spec, model))


def tensor_parallel(spec: Spec) -> Step:
    """Return a step with torch's plans: columns then rows of each block, logits sharded over the
    vocabulary."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        loss_parallel,
        parallelize_module,
    )

    model = built(spec)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    columns, rows = ColwiseParallel, RowwiseParallel
    for block in model.blocks:
        parallelize_module(
            block.attention,
            mesh,
            {"query": columns(), "key": columns(), "value": columns(), "output": rows()},
        )
        parallelize_module(block.mlp, mesh, {"gate": columns(), "up": columns(), "down": rows()})
    parallelize_module(model, mesh, {"head": columns(use_local_output=False)})

    def passes(rows: Tensor) -> Tensor:
        with loss_parallel():
            loss = _loss(model(rows[:, :-1]), rows)
            loss.backward()
        return loss.full_tensor()

    parts = _split_parameters(model)
    optimizer = torch.optim.AdamW([{"params": part} for part in parts], **settings_of(spec))
    clip = partial(_clip_parts, parts)
    return _loop(spec, optimizer, passes, clip, share=1 / dist.get_world_size())


def pipelined(spec: Spec) -> Step:
    """Return a step with torch's PipelineStage and Schedule1F1B, half of the blocks on each of two
    ranks; the norm of the gradients is summed over the stages."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    model, rank, ranks = built(spec), dist.get_rank(), dist.get_world_size()
    share = len(model.blocks) // ranks
    model.blocks = model.blocks[rank * share : (rank + 1) * share]
    if rank:
        model.embed = nn.Identity()
    if rank < ranks - 1:
        model.norm = model.head = nn.Identity()
    stage = PipelineStage(model, rank, ranks, torch.device("cpu"))
    number = spec.batch.accumulate
    schedule = Schedule1F1B(stage, number, loss_fn=_loss_of_targets)
    parameters = list(model.parameters())

    def passes(rows: Tensor) -> Tensor:
        losses: list[Tensor] = []
        if rank == 0:
            schedule.step(rows[:, :-1])
        else:
            schedule.step(target=rows[:, 1:], losses=losses)
        return torch.stack(losses).mean() if losses else torch.zeros(())

    def clip(limit: float) -> None:
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        squared = norm**2
        dist.all_reduce(squared)
        torch.nn.utils.clip_grads_with_norm_(parameters, limit, squared.sqrt())

    return _loop(spec, adamw(spec, model), passes, clip)


def fully_sharded(model: nn.Module, spec: Spec, device: str) -> nn.Module:
    """Apply fully_shard to each block and the rest, on a mesh of the spec's axes."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(
        device,
        tuple(factor.degree for factor in spec.factors),
        mesh_dim_names=tuple(factor.axis.value for factor in spec.factors),
    )
    options: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": True}
    if spec.precision.layout.name == "fsdp-mixed":
        options["mp_policy"] = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16,
            reduce_dtype=torch.bfloat16,
            # by default a block's rotary tables would be rounded to bf16 with its other inputs
            cast_forward_inputs=False,
        )
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def built(spec: Spec) -> nn.Module:
    """Return the spec's model in fp32, equal on every rank. It starts with the values of ptrain's
    masters, rounded to the dtype of the parameters."""
    from ptrain.models.initialize import build_model, initialize
    from ptrain.models.numerics import TORCH_DTYPES

    model = build_model(spec.model, sequence=spec.batch.sequence)
    initialize(model, spec.train.seed)
    used = TORCH_DTYPES[spec.precision.layout.parameters]
    for parameter in model.parameters():
        parameter.data = parameter.data.to(used).float()
    return model


def adamw(spec: Spec, model: nn.Module) -> Optimizer:
    import torch

    return torch.optim.AdamW(model.parameters(), **settings_of(spec))


def zero_redundancy_adamw(spec: Spec, model: nn.Module) -> Optimizer:
    import torch
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.AdamW, parameters_as_bucket_view=True, **settings_of(spec)
    )


def settings_of(spec: Spec) -> dict[str, Any]:
    """Return torch's arguments for the spec's AdamW."""
    settings = spec.optimizer
    return {
        "lr": settings.lr,
        "betas": settings.betas,
        "eps": settings.eps,
        "weight_decay": settings.weight_decay,
        "fused": True,
    }


def _split_parameters(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return the parameters that tp shards, and the others: no optimizer kernel takes both."""
    from torch.distributed.tensor import DTensor

    parameters = list(model.parameters())
    return (
        [p for p in parameters if isinstance(p, DTensor)],
        [p for p in parameters if not isinstance(p, DTensor)],
    )


def _clip_parts(groups: Iterable[list[nn.Parameter]], limit: float) -> None:
    import torch
    from torch.distributed.tensor import DTensor

    norms = []
    for group in groups:
        norm = torch.nn.utils.get_total_norm([p.grad for p in group if p.grad is not None])
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    total = torch.linalg.vector_norm(torch.stack(norms))
    for group in groups:
        torch.nn.utils.clip_grads_with_norm_(group, limit, total)


def _loss(logits: Tensor, rows: Tensor) -> Tensor:
    return _loss_of_targets(logits, rows[:, 1:])


def _loss_of_targets(logits: Tensor, targets: Tensor) -> Tensor:
    import torch.nn.functional as F

    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def _backward(loss: Tensor) -> None:
    loss.backward()


def loop(
    spec: Spec,
    model: nn.Module,
    optimizer: Optimizer,
    *,
    backward: Callable[[Any], Any] = _backward,
    clip: Callable[[float], Any] | None = None,
    step: Callable[[], Any] | None = None,
    rows_of: Callable[[int], Tensor] | None = None,
    own: slice | Tensor = slice(None),
    share: float | None = None,
    read: Callable[[Tensor], Any] = float,
) -> Step:
    """The loop that one would write around a model that a library wrapped, with the library's own
    backward, clipping and step; on ptrain's samples of this rank, or on these rows. Of a sample's
    positions the rank has its `own`. `read` makes a result of the loss."""
    import torch

    is_padded = getattr(spec.model, "vocab_multiple", 1) > 1

    parameters = list(model.parameters())

    def passes(rows: Tensor) -> Tensor:
        logits = model(rows[:, :-1][:, own])
        if is_padded:  # rows of the head without a token
            logits = logits[..., : spec.model.vocab]
        loss = _loss_of_targets(logits, rows[:, 1:][:, own])
        backward(loss)
        return loss

    def clipped(limit: float) -> None:
        torch.nn.utils.clip_grad_norm_(parameters, limit)

    share = 1 / spec.data_degree if share is None else share
    return _loop(
        spec, optimizer, passes, clip or clipped,
        share=share, step=step, rows_of=rows_of, read=read,
    )  # fmt: skip


def _loop(
    spec: Spec,
    optimizer: Optimizer,
    passes: Callable[[Tensor], Tensor],
    clip: Callable[[float], object],
    *,
    share: float = 1.0,
    step: Callable[[], object] | None = None,
    rows_of: Callable[[int], Tensor] | None = None,
    read: Callable[[Tensor], Any] = float,
) -> Step:
    """Rows, forward and backward `passes`, clipping, rate, update; of the loss that the passes give
    the rank's `share` is what it tells."""
    rows_of = rows_of or _samples(spec)
    numbers, settings = iter(range(10**9)), spec.optimizer
    assert settings.clip is not None, "the specs clip"

    def once() -> Any:
        number = next(numbers)
        loss = passes(rows_of(number))
        clip(settings.clip)
        for group in optimizer.param_groups:
            group["lr"] = settings.lr * min(1.0, (number + 1) / max(1, settings.schedule.warmup))
        if step:
            step()
        else:
            optimizer.step()
            optimizer.zero_grad()
        return read(loss.detach() * share)

    return once


def _samples(spec: Spec) -> Callable[[int], Tensor]:
    """A step's rows on this rank, whose place among the ranks is that along the data axes, or which
    has all of them."""
    import torch.distributed as dist

    groups = spec.data_degree
    return samples(spec, index=dist.get_rank() if groups > 1 else 0, groups=groups)
