"""Hand-written loops over token slices and expert-parallel ranks with torch's components:
contenders of `peers.py`. Imported in the ranks; torch only there."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from _by_hand import adamw, built, loop
from _steps import RANKS, own_samples, replicated, samples

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ptrain.spec.spec import Spec

Step = Callable[[], float]


def ring(spec: Spec) -> Step:
    """DistributedDataParallel around a model whose attention is torch's own ring templates
    (`_templated_ring_attention`, as `context_parallel` calls them on GPUs; with the CPU's kernel,
    for which torch registers none). All ranks have all samples."""
    from torch.distributed import get_rank

    is_balanced = str(spec.context.attention) == "zigzag"
    own = _positions(get_rank(), spec.batch.sequence, is_balanced=is_balanced)
    model = replicated(_ringed(spec, own, is_balanced=is_balanced), spec)
    rows_of = samples(spec, index=0, groups=1)
    return loop(spec, model, adamw(spec, model), rows_of=rows_of, own=own, share=1 / RANKS)


def _positions(rank: int, sequence: int, *, is_balanced: bool) -> Tensor:
    """Return a rank's tokens: a slice, or the first half and its mirror image."""
    import torch

    if not is_balanced:
        return torch.arange(sequence).chunk(RANKS)[rank]
    chunks = torch.arange(sequence).chunk(2 * RANKS)
    return torch.cat((chunks[rank], chunks[-1 - rank]))


def _ringed(spec: Spec, own: Tensor, *, is_balanced: bool) -> nn.Module:
    """Return the model for these positions with torch's attention templates."""
    from torch.distributed.tensor.experimental._context_parallel import _attention

    model = built(spec)
    for name, table in list(model.named_buffers(recurse=False)):
        model.register_buffer(name, table[own].clone(), persistent=False)
    ring = _ring(is_balanced=is_balanced)
    for block in model.blocks:
        block.attention.core = ring
    _attention.set_rotate_method("alltoall")
    return model


def _ring(*, is_balanced: bool) -> nn.Module:
    import torch
    from torch import nn
    from torch.distributed import group
    from torch.distributed.tensor.experimental._context_parallel import _attention

    forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default

    class Ring(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            _attention._cp_options.enable_load_balance = is_balanced
            output, sums = _attention._templated_ring_attention(
                group.WORLD, 2, forward, query, key, value, is_causal=True, dropout_p=0.0
            )
            ctx.save_for_backward(query, key, value, output, sums)
            return output

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
            query, key, value, output, sums = ctx.saved_tensors
            gradients = _attention._templated_ring_attention_backward(
                group.WORLD, 2, backward, gradient, "grad_out", query, key, value, output, sums,
                is_causal=True, dropout_p=0.0,
            )  # fmt: skip
            return tuple(gradients[:3])

    class Attention(nn.Module):
        def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: None = None) -> Tensor:
            return Ring.apply(query, key, value)

    return Attention()


def experts(spec: Spec) -> Step:
    """torch's all-to-all with the counts of each rank, its grouped product, DistributedDataParallel
    around all that is not an expert; the experts' gradients divided by the ranks that sent tokens,
    one norm over both. No token is dropped."""
    from torch.nn.parallel import DistributedDataParallel

    model = built(spec)
    for block in model.blocks:
        block.mlp = _layer(block.mlp)
    own = [name for name, _ in model.named_parameters() if ".own_" in name]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, own)
    wrapped = replicated(model, spec)
    return loop(
        spec,
        wrapped,
        adamw(spec, wrapped),
        clip=lambda limit: _clip(wrapped, limit),
        rows_of=own_samples(spec),
        share=1 / RANKS,
    )


def _clip(model: nn.Module, limit: float) -> None:
    """Divide the experts' gradients, and scale all gradients by one norm: every rank has its shard
    of the experts."""
    import torch
    import torch.distributed as dist

    named = dict(model.named_parameters())
    own = [named[name].grad for name in named if ".own_" in name]
    shared = [named[name].grad for name in named if ".own_" not in name]
    torch._foreach_div_(own, RANKS)
    square = torch.nn.utils.get_total_norm(own).square()
    dist.all_reduce(square)
    norm = (square + torch.nn.utils.get_total_norm(shared).square()).sqrt()
    scale = (limit / (norm + 1e-6)).clamp(max=1.0)
    torch._foreach_mul_([*own, *shared], scale)


def _layer(whole: nn.Module) -> nn.Module:
    """Return the rank's shard of a layer of experts, whose tensors are those of `whole`."""
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from torch import nn
    from torch.distributed._functional_collectives import all_to_all_single_autograd

    rank, experts = dist.get_rank(), whole.experts.up.weight.shape[0]
    mine = slice(rank * experts // RANKS, (rank + 1) * experts // RANKS)

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router = nn.Parameter(whole.router.weight.detach().clone())
            for name in ("gate", "up", "down"):
                weight = getattr(whole.experts, name).weight.detach()[mine].clone()
                setattr(self, f"own_{name}", nn.Parameter(weight))

        def forward(self, x: Tensor) -> Tensor:
            rows = x.flatten(0, 1)
            weights, chosen = F.linear(rows, self.router).softmax(-1).topk(2)
            weights = weights / weights.sum(-1, keepdim=True)
            order = chosen.flatten().argsort(stable=True)
            counts = torch.bincount(chosen.flatten(), minlength=experts)
            back = self.travel(rows[order // 2], counts)[order.argsort()].unflatten(0, (-1, 2))
            return (back * weights[..., None]).sum(1).view_as(x)

        def travel(self, rows: Tensor, counts: Tensor) -> Tensor:
            coming = torch.empty_like(counts)
            dist.all_to_all_single(coming, counts)
            going = counts.view(RANKS, -1).sum(1).tolist()
            arriving = coming.view(RANKS, -1).sum(1).tolist()
            arrived = all_to_all_single_autograd(rows, arriving, going, dist.group.WORLD)
            of_whom = torch.arange(experts // RANKS).repeat(RANKS).repeat_interleave(coming)
            order = of_whom.argsort(stable=True)
            ends = coming.view(RANKS, -1).sum(0).cumsum(0, dtype=torch.int32)
            done = self.computed(arrived[order], ends)[order.argsort()]
            return all_to_all_single_autograd(done, going, arriving, dist.group.WORLD)

        def computed(self, rows: Tensor, ends: Tensor) -> Tensor:
            gate = F.silu(F.grouped_mm(rows, self.own_gate.mT, offs=ends))
            inner = gate * F.grouped_mm(rows, self.own_up.mT, offs=ends)
            return F.grouped_mm(inner, self.own_down.mT, offs=ends)

    return Layer()
