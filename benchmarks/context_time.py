"""CPU time of a training step over slices of the tokens, against a hand-written loop.

Claim: with attention by a ring, contiguous and zigzag, ptrain's step costs at most 2 % more (median
of the pairs' ratios) than a loop written by hand around torch's own ring templates
(`_templated_ring_attention`, as `context_parallel` calls them on GPUs; with the CPU's kernel, for
which torch registers none). Both wrap the model in DistributedDataParallel over the two ranks, clip
and update alike, on the same tokens.

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
from typing import TYPE_CHECKING, Any

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

    from ptrain.spec.spec import Spec

LIMIT = 1.02
STRATEGIES = ("cp-ring", "cp-zigzag")
OVERRIDES = (
    "model.preset=llama-10m",
    "batch.global=2",
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
    """Cut the tokens, put a ring in the place of attention, wrap; all ranks have all samples."""
    from torch.distributed import get_rank

    spec = legal(strategy, OVERRIDES)
    is_balanced = strategy == "cp-zigzag"
    own = _positions(get_rank(), spec.batch.sequence, is_balanced=is_balanced)
    model = replicated(_ringed(spec, own, is_balanced=is_balanced), spec)
    return hand_written_steps(spec, model, samples(spec, index=0, groups=1), own)


def _positions(rank: int, sequence: int, *, is_balanced: bool) -> Tensor:
    """A rank's tokens: a slice, or of twice as many the one and its mirror image."""
    import torch

    if not is_balanced:
        return torch.arange(sequence).chunk(RANKS)[rank]
    chunks = torch.arange(sequence).chunk(2 * RANKS)
    return torch.cat((chunks[rank], chunks[-1 - rank]))


def _ringed(spec: Spec, own: Tensor, *, is_balanced: bool) -> nn.Module:
    """Return the model for these positions, its attention by torch's templates."""
    from torch.distributed.tensor.experimental._context_parallel import _attention

    from ptrain.models.build import build
    from ptrain.models.initialize import initialize

    model = build(spec.model, sequence=spec.batch.sequence)
    initialize(model, spec.train.seed)
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--launches", type=int, default=3, help="starts of the ranks")
    parser.add_argument("--steps", type=int, default=1, help="steps of each contender in a pair")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/")
    args = parser.parse_args()
    import context_time  # the ranks import this file by its name

    lines = [
        header("context_time: a step over slices of the tokens, by hand and not", this_command()),
        *heading(
            f"median ratio at most {LIMIT}, nothing of its interval",
            f"llama-10m, {' '.join(OVERRIDES[1:])}",
            pairs=args.pairs,
            launches=args.launches,
            steps=args.steps,
        ),
    ]
    failed: list[str] = []
    for strategy in STRATEGIES:
        sides = summed(context_time.measure, strategy, args.launches, args.pairs, args.steps)
        row, wrong = report(strategy, sides, args.steps, (LIMIT, math.inf))
        lines.append(row)
        failed += wrong
    return conclude(
        "context_time",
        lines,
        failed=failed,
        not_covered="wall time, other models, more ranks, and GPUs.",
        is_saved=args.save,
    )


if __name__ == "__main__":
    sys.exit(main())
