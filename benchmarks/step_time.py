"""CPU time of a training step against a hand-written loop, for ddp and zero3.

Claim: ptrain's step costs at most 1 % more (median of the pairs' ratios), and the upper 95 % bound
of that median is at most 1.02. ptrain's side includes its sampler, its accumulation, its clipping
and the always-on counter; the hand-written side is raw DistributedDataParallel, or raw
fully_shard, with the same options, torch's own clipping and fused AdamW on the same samples.

Both programs live in the same two gloo ranks and take turns; a pair is some steps of each, and the
order alternates. The ranks are started afresh several times, since where a process happens to put
its tensors moves a step by 1 % for as long as it lives. CPU time is the sum over the ranks, their
communication threads included.
Prints; writes a result only with --save.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, here and in the ranks

from _machine import conclude, header, this_command

if TYPE_CHECKING:  # torch is imported in the ranks
    from torch import Tensor, nn

    from ptrain.rooms.world import World
    from ptrain.spec.spec import Spec

MEDIAN_LIMIT, BOUND_LIMIT = 1.01, 1.02
SAME = 1e-4  # losses of the same work, relative: sums are taken in another order
RANKS = 2
STOCK_BUCKET_MB = 25  # of DistributedDataParallel, torch 2.11 to 2.15
OVERRIDES = (
    "model.preset=llama-10m",
    "batch.global=4",
    "batch.micro=2",
    "batch.sequence=256",
    "optimizer.lr=3e-4",
)
WARM_UP = 3


@dataclass(frozen=True)
class Side:
    """CPU seconds of each half of a pair, and the losses of the steps in them."""

    seconds: list[float]
    losses: list[float]


def measure(strategy: str, pairs: int, steps: int, swapped: bool) -> dict[str, Side]:
    """On one rank: both contenders in turn."""
    return in_turn({"ptrain": _ptrain, "by hand": _by_hand}, strategy, pairs, steps, swapped)


def in_turn(
    makers: Mapping[str, Callable[[str], Callable[[], float]]],
    strategy: str,
    pairs: int,
    steps: int,
    swapped: bool,
) -> dict[str, Side]:
    """On one rank: pairs of some steps of each, `swapped` is which one is made and runs first."""
    import torch.distributed as dist

    names = sorted(makers, reverse=swapped)
    contenders = {name: makers[name](strategy) for name in names}
    sides = {name: Side([], []) for name in names}
    for name in names:
        for _ in range(WARM_UP):
            sides[name].losses.append(contenders[name]())
    for pair in range(pairs):
        for name in names if pair % 2 == 0 else reversed(names):
            dist.barrier()
            began = time.process_time()
            shares = [contenders[name]() for _ in range(steps)]
            sides[name].seconds.append(time.process_time() - began)
            sides[name].losses.extend(shares)
    return sides


def _ptrain(strategy: str) -> Callable[[], float]:
    return program_steps(_spec(strategy))


def program_steps(spec: Spec, world: World | None = None) -> Callable[[], float]:
    """Return ptrain's next step: its sampler, its program, its counter; on the ranks that are
    there, or of a world of fake ones, which count nothing."""
    from ptrain.data.corpus import corpus
    from ptrain.interpreter.program import interpret
    from ptrain.meters.counter import Counter
    from ptrain.rooms.world import World
    from ptrain.train.loop import local_batch
    from ptrain.train.schedule import learning_rate

    program = interpret(spec, world=world or World.join(spec.timeout))
    source, steps = corpus(spec.data), iter(range(10**9))
    counter = None if world else Counter()

    def step() -> float:
        number = next(steps)
        share = program.forward_backward(local_batch(program, source, number))
        program.step(learning_rate(spec.optimizer, number))
        if counter and number % spec.log_every == 0:
            counter.read()
        return float(share)  # as late as the hand-written loop reads its own

    return step


def _by_hand(strategy: str) -> Callable[[], float]:
    spec = _spec(strategy)
    every = slice(None)
    return hand_written_steps(spec, _wrapped_by_hand(strategy, spec), _samples(spec), every)


def hand_written_steps(
    spec: Spec,
    model: nn.Module,
    rows_of: Callable[[int], Tensor],
    own: slice | Tensor,
    clip: Callable[[nn.Module, float], object] | None = None,
) -> Callable[[], float]:
    """Return the next step of what one would write: loop, clip, step. Gradients are averaged by the
    wrapper around `model`; of a sample's positions the rank has its `own`. `clip`: in the place of
    torch's."""
    import torch
    import torch.nn.functional as F

    settings = spec.optimizer
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=settings.lr,
        betas=settings.betas,
        eps=settings.eps,
        weight_decay=settings.weight_decay,
        fused=True,
    )
    steps = iter(range(10**9))

    def step() -> float:
        number = next(steps)
        rows = rows_of(number)
        logits = model(rows[:, :-1][:, own])
        loss = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:][:, own].flatten())
        loss.backward()
        if clip is None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
        else:
            clip(model, settings.clip)
        for group in optimizer.param_groups:
            group["lr"] = settings.lr * min(1.0, (number + 1) / max(1, settings.schedule.warmup))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item() / RANKS

    return step


def _wrapped_by_hand(strategy: str, spec: Spec) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from ptrain.models.build import build
    from ptrain.models.initialize import initialize

    model = build(spec.model, sequence=spec.batch.sequence)
    initialize(model, spec.train.seed)
    if strategy == "ddp":
        return replicated(model, spec)
    mesh = init_device_mesh("cpu", (RANKS,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=True)
    return fully_shard(model, mesh=mesh, reshard_after_forward=True)


def _samples(spec: Spec) -> Callable[[int], Tensor]:
    """A step's rows on this rank."""
    from torch.distributed import get_rank

    return samples(spec, index=get_rank(), groups=RANKS)


def samples(spec: Spec, *, index: int, groups: int) -> Callable[[int], Tensor]:
    """A step's rows of one of so many groups of ranks with samples of their own: ptrain's samples,
    but drawn beforehand. Of several micro-batches all, where one group has all samples."""
    import torch

    from ptrain.data.corpus import corpus
    from ptrain.data.order import sample

    source = corpus(spec.data)
    tokens = torch.from_numpy(source.train.astype("int64"))
    windows, length = source.num_samples(spec.batch.sequence), spec.batch.sequence
    drawn = [sample(i, windows=windows, seed=spec.train.seed) % windows for i in range(4096)]
    own = spec.batch.micro * spec.batch.accumulate
    assert groups == 1 or spec.batch.accumulate == 1, "else its samples are no stretch"

    def rows(number: int) -> Tensor:
        first = (number * groups + index) * own
        starts = drawn[first : first + own]
        return torch.stack([tokens[length * at : length * (at + 1) + 1] for at in starts])

    return rows


def replicated(model: nn.Module, spec: Spec) -> nn.Module:
    """Wrap a model in DistributedDataParallel with the spec's options."""
    from torch.nn.parallel import DistributedDataParallel

    return DistributedDataParallel(
        model,
        bucket_cap_mb=bucket_cap_mb(spec),
        gradient_as_bucket_view=True,
        broadcast_buffers=False,
        init_sync=False,
    )


def bucket_cap_mb(spec: Spec) -> float | None:
    """Return what DistributedDataParallel is told of its buckets' size. Torch's own is not named:
    its first bucket would be as large as the others."""
    cap = spec.bucket_bytes / 2**20
    return None if cap == STOCK_BUCKET_MB else cap


def _spec(strategy: str) -> Spec:
    return legal(strategy, OVERRIDES)


def legal(strategy: str, overrides: Sequence[str]) -> Spec:
    """Return a legal spec."""
    from ptrain.algebra.legality import require
    from ptrain.spec.load import load

    return require(load(strategy, overrides))


def bound(ratios: list[float]) -> tuple[float, float]:
    """The two-sided 95 % interval of the median, by order statistics (binomial, no assumption)."""
    from math import comb

    ordered, count = sorted(ratios), len(ratios)
    tail, below = 0.0, 0
    while (tail := tail + comb(count, below) / 2**count) <= 0.025:
        below += 1
    return ordered[max(0, below - 1)], ordered[min(count - 1, count - below)]


def run(strategy: str, launches: int, pairs: int, steps: int) -> dict[str, Side]:
    """Both contenders, summed over the ranks, launch after launch."""
    import step_time  # the ranks import this file by its name

    return summed(step_time.measure, strategy, launches, pairs, steps)


def summed(
    measured: Callable[[str, int, int, bool], dict[str, Side]],
    strategy: str,
    launches: int,
    pairs: int,
    steps: int,
) -> dict[str, Side]:
    """What `measured` gives on ranks that are started anew for each launch, their sum."""
    from tests.ranks import Ranks

    sides = {name: Side([], []) for name in ("ptrain", "by hand")}
    for launch in range(launches):
        pool = Ranks()
        ranks = pool.run(
            RANKS, measured, strategy, pairs // launches, steps, launch % 2 == 1,
            timeout=3600,
        )  # fmt: skip
        pool.close()
        for name, side in sides.items():
            side.seconds.extend(map(sum, zip(*(rank[name].seconds for rank in ranks), strict=True)))
            side.losses.extend(map(sum, zip(*(rank[name].losses for rank in ranks), strict=True)))
    return sides


def report(
    strategy: str,
    sides: dict[str, Side],
    steps: int,
    limits: tuple[float, float] = (MEDIAN_LIMIT, BOUND_LIMIT),
) -> tuple[str, list[str]]:
    """A table's row, and what fails, with the figure."""
    seconds = {name: side.seconds for name, side in sides.items()}
    ratios = [a / b for a, b in zip(seconds["ptrain"], seconds["by hand"], strict=True)]
    median, (low, high) = statistics.median(ratios), bound(ratios)
    losses = {name: side.losses for name, side in sides.items()}
    apart = max(abs(a - b) / b for a, b in zip(losses["ptrain"], losses["by hand"], strict=True))
    failed = over_limits(strategy, median, high, limits)
    failed += different(strategy, apart)
    mine, theirs = (statistics.median(seconds[name]) / steps for name in ("ptrain", "by hand"))
    row = (
        f"| {strategy} | {mine:.4f} | {theirs:.4f} | {median:.4f} | {low:.4f} – {high:.4f} "
        f"| {losses['ptrain'][-1]:.6f} | {losses['by hand'][-1]:.6f} | {apart:.1e} "
        f"| {'fails' if failed else 'holds'} |"
    )
    return row, failed


def over_limits(name: str, median: float, high: float, limits: tuple[float, float]) -> list[str]:
    """Which of the two limits a ratio and its upper bound do not keep."""
    told = zip(("median ratio", "upper 95 % bound"), (median, high), limits, strict=True)
    return [
        f"{name}: {what} {figure:.4f}, at most {limit}"
        for what, figure, limit in told
        if figure > limit
    ]


def different(name: str, apart: float) -> list[str]:
    """Losses that say that the work was not the same."""
    if apart < SAME:  # which no NaN is
        return []
    return [f"{name}: losses {apart:.1e} apart, not less than {SAME:g}"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=60)
    parser.add_argument("--launches", type=int, default=6, help="starts of the ranks")
    parser.add_argument("--steps", type=int, default=1, help="steps of each contender in a pair")
    parser.add_argument("--strategies", nargs="+", default=["ddp", "zero3"])
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/")
    args = parser.parse_args()

    lines = [
        header("step_time: a step's CPU time against a hand-written loop", this_command()),
        *heading(
            f"median ratio at most {MEDIAN_LIMIT}, upper 95 % bound at most {BOUND_LIMIT}",
            f"llama-10m, {' '.join(OVERRIDES[1:])}",
            pairs=args.pairs,
            launches=args.launches,
            steps=args.steps,
        ),
    ]
    failed: list[str] = []
    for strategy in args.strategies:
        found = run(strategy, args.launches, args.pairs, args.steps)
        row, wrong = report(strategy, found, args.steps)
        lines.append(row)
        failed += wrong
    return conclude(
        "step_time",
        lines,
        failed=failed,
        not_covered="wall time, other strategies and models, more ranks, and GPUs.",
        is_saved=args.save,
    )


def heading(claim: str, setting: str, *, pairs: int, launches: int, steps: int) -> list[str]:
    """Return the claim, what is compared, and the head of the table."""
    return [
        f"Claim: {claim}; losses less than {SAME:g} apart.",
        f"{setting}: {RANKS} gloo ranks with one thread each, "
        f"{pairs} alternating pairs of {steps} steps over {launches} launches, the first {WARM_UP} "
        "steps of each left out. "
        "CPU seconds are per step, user and system, both ranks together. The interval is of the "
        "median, two-sided, by order statistics. The ratio is the median of the pairs' ratios and "
        "need not be the quotient of the two medians. Losses are of the last step; `apart` is the "
        "largest relative difference over all steps.",
        "",
        "| strategy | ptrain | by hand | median ratio | 95 % | loss ptrain | loss by hand | apart "
        "| verdict |",
        "|---|---|---|---|---|---|---|---|---|",
    ]


if __name__ == "__main__":
    sys.exit(main())
