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
from step_time import RANKS, SAME, WARM_UP, Side, in_turn, report, summed

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
    from ptrain.data.corpus import corpus
    from ptrain.interpreter.program import interpret
    from ptrain.meters.counter import Counter
    from ptrain.rooms.world import World
    from ptrain.train.loop import local_batch
    from ptrain.train.schedule import learning_rate

    spec = _spec(strategy)
    program = interpret(spec, world=World.join(spec.timeout))
    source, counter, numbers = corpus(spec.data), Counter(), iter(range(10**9))

    def step() -> float:
        number = next(numbers)
        loss = float(program.forward_backward(local_batch(program, source, number)))
        program.step(learning_rate(spec.optimizer, number))
        if number % spec.log_every == 0:
            counter.read()
        return loss

    return step


def _by_hand(strategy: str) -> Callable[[], float]:
    """Cut the tokens, put a ring in the place of attention, wrap, loop, clip, step."""
    import torch
    import torch.nn.functional as F
    from torch.distributed import get_rank
    from torch.nn.parallel import DistributedDataParallel

    spec = _spec(strategy)
    settings = spec.optimizer
    own = _positions(get_rank(), spec.batch.sequence, is_balanced=strategy == "cp-zigzag")
    model = DistributedDataParallel(
        _ringed(spec, own, is_balanced=strategy == "cp-zigzag"),
        bucket_cap_mb=spec.bucket_bytes / 2**20,
        gradient_as_bucket_view=True,
        broadcast_buffers=False,
        init_sync=False,
    )
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=settings.lr,
        betas=settings.betas,
        eps=settings.eps,
        weight_decay=settings.weight_decay,
        fused=True,
    )
    rows_of, numbers = _samples(spec), iter(range(10**9))

    def step() -> float:
        number = next(numbers)
        rows = rows_of(number)
        logits = model(rows[:, own])
        loss = F.cross_entropy(logits.flatten(0, 1), rows[:, own + 1].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
        for group in optimizer.param_groups:
            group["lr"] = settings.lr * min(1.0, (number + 1) / max(1, settings.schedule.warmup))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item() / RANKS

    return step


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


def _samples(spec: Spec) -> Callable[[int], Tensor]:
    """A step's rows, the same on all ranks: ptrain's samples, but drawn beforehand."""
    import torch

    from ptrain.data.corpus import corpus
    from ptrain.data.sampler import sample

    source = corpus(spec.data)
    tokens = torch.from_numpy(source.train.astype("int64"))
    windows, length = source.num_samples(spec.batch.sequence), spec.batch.sequence
    drawn = [sample(i, windows=windows, seed=spec.train.seed) % windows for i in range(4096)]
    micro = spec.batch.micro

    def rows(number: int) -> Tensor:
        starts = drawn[number * micro : (number + 1) * micro]
        return torch.stack([tokens[length * at : length * (at + 1) + 1] for at in starts])

    return rows


def _spec(strategy: str) -> Spec:
    from ptrain.algebra.legality import require
    from ptrain.spec.load import load

    return require(load(strategy, OVERRIDES))


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
        f"Claim: median ratio at most {LIMIT}; losses less than {SAME:g} apart.",
        f"llama-10m, {RANKS} gloo ranks with one thread each, {' '.join(OVERRIDES[1:])}, "
        f"{args.pairs} alternating pairs of {args.steps} steps over {args.launches} launches, the "
        f"first {WARM_UP} steps of each left out. CPU seconds are per step, user and system, both "
        "ranks together. The interval is of the median, two-sided, by order statistics; nothing is "
        "claimed of it. Losses are of the last step; `apart` is the largest relative difference "
        "over all steps.",
        "",
        "| strategy | ptrain | by hand | median ratio | 95 % | loss ptrain | loss by hand | apart "
        "| verdict |",
        "|---|---|---|---|---|---|---|---|---|",
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
