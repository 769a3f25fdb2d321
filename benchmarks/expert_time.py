"""CPU time of a training step whose tokens travel to experts, against a hand-written loop.

Claim: with half of the experts on each rank and no token dropped, ptrain's step costs at most 3 %
more (median of the pairs' ratios) than a loop written by hand: torch's all-to-all with the counts
of each rank, its grouped product, DistributedDataParallel around all that is not an expert, the
experts' gradients divided by the ranks that sent tokens, one norm over both.

As in step_time.py both live in the same two gloo ranks, take turns, and are started afresh several
times. Prints; writes a result only with --save.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, here and in the ranks

from _machine import conclude, header, this_command
from step_time import (
    RANKS,
    Side,
    hand_written_steps,
    heading,
    in_turn,
    legal,
    program_steps,
    replicated,
    report,
    samples,
    summed,
)

if TYPE_CHECKING:  # torch is imported in the ranks
    from torch import Tensor, nn

LIMIT = 1.03
STRATEGY = "ep"
OVERRIDES = (
    "model.preset=llama-10m",
    "model.experts=8",
    "model.experts_per_token=2",
    "model.expert_ffn=512",
    "model.capacity_factor=null",
    "batch.global=4",
    "batch.micro=2",
    "batch.sequence=512",
    "optimizer.lr=3e-4",
)


def measure(strategy: str, pairs: int, steps: int, swapped: bool) -> dict[str, Side]:
    """On one rank: both contenders in turn."""
    return in_turn({"ptrain": _ptrain, "by hand": _by_hand}, strategy, pairs, steps, swapped)


def _ptrain(strategy: str) -> Callable[[], float]:
    return program_steps(legal(strategy, OVERRIDES))


def _by_hand(strategy: str) -> Callable[[], float]:
    """Give the rank its experts, wrap what is left, and clip by one norm."""
    from torch.distributed import get_rank
    from torch.nn.parallel import DistributedDataParallel

    from ptrain.models.build import build
    from ptrain.models.initialize import initialize

    spec = legal(strategy, OVERRIDES)
    model = build(spec.model, sequence=spec.batch.sequence)
    initialize(model, spec.train.seed)
    for block in model.blocks:
        block.mlp = _layer(block.mlp)
    own = [name for name, _ in model.named_parameters() if ".own_" in name]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, own)
    rows_of = samples(spec, index=get_rank(), groups=RANKS)
    return hand_written_steps(spec, replicated(model, spec), rows_of, slice(None), _clip)


def _clip(model: nn.Module, limit: float) -> None:
    """Divide the experts' gradients, and scale all by one norm: of the experts every rank has its
    own part."""
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
    """Return the rank's part of a layer of experts, whose tensors are those of `whole`."""
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--launches", type=int, default=3, help="starts of the ranks")
    parser.add_argument("--steps", type=int, default=1, help="steps of each contender in a pair")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/")
    args = parser.parse_args()
    import expert_time  # the ranks import this file by its name

    lines = [
        header(
            "expert_time: a step with experts on ranks of their own, by hand too", this_command()
        ),
        *heading(
            f"median ratio at most {LIMIT}, nothing of its interval",
            " ".join(OVERRIDES),
            pairs=args.pairs,
            launches=args.launches,
            steps=args.steps,
        ),
    ]
    sides = summed(expert_time.measure, STRATEGY, args.launches, args.pairs, args.steps)
    row, failed = report(STRATEGY, sides, args.steps, (LIMIT, math.inf))
    return conclude(
        "expert_time",
        [*lines, row],
        failed=failed,
        not_covered="wall time, other models, capacities, more ranks, and GPUs.",
        is_saved=args.save,
    )


if __name__ == "__main__":
    sys.exit(main())
