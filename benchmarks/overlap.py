"""What buckets and overlap buy: DDP as naive as can be, bucketed, and bucketed and overlapped.

naive: an all-reduce per tensor, all of them after the backward pass. bucketed: few all-reduces,
after the backward pass. overlapped: the same few, each as soon as its bucket is full, while the
backward pass goes on (the default). The arithmetic is the same, and so are the bytes.

Claim: each waits less than the one before it: the upper 95 % bound of the median of the paired
ratios of blocked seconds is below 1, for bucketed against naive, for overlapped against bucketed.

All three programs live in the same gloo ranks and take turns: in each round each takes one step on
the clock and one with the stopwatch (seconds that the main thread waited for collectives), in an
order that rotates; ratios are of steps of one round. A step's time is that of its slowest rank.
Wall-clock figures: they need a machine that does nothing else. Prints; writes a result only with
--save. 60 rounds take about 4 minutes.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, here and in the ranks

from _machine import conclude, header, this_command
from step_time import OVERRIDES, RANKS, bound

CONTENDERS = {
    "naive": ("bucket=per-tensor", "overlap=none"),
    "bucketed": ("overlap=none",),
    "overlapped": ("overlap=backward",),
}
WARM_UP = 3


@dataclass
class Side:
    """One contender on one rank: seconds of its steps, of them waiting, calls of one step, and
    the last loss."""

    step: list[float] = field(default_factory=list)
    blocked: list[float] = field(default_factory=list)
    calls: int = 0
    loss: float = 0.0


def measure_rank(rounds: int) -> dict[str, Side]:
    """On one rank: all contenders in turn."""
    import torch.distributed as dist

    from ptrain.meters.blocked import Stopwatch
    from ptrain.meters.counter import Counter

    contenders = {name: _Contender(overrides) for name, overrides in CONTENDERS.items()}
    sides = {name: Side() for name in CONTENDERS}
    names, counter = list(CONTENDERS), Counter()
    for turn in range(-WARM_UP, rounds):
        shift = turn % len(names)
        for name in (*names[shift:], *names[:shift]):
            contender, side = contenders[name], sides[name]
            local = contender.batch()
            counter.read()
            dist.barrier()
            began = time.perf_counter()
            contender.step(local)
            seconds = time.perf_counter() - began
            counted = counter.read()
            side.calls = counted.calls - 1 if counted else 0  # the barrier is one
            local = contender.batch()
            groups = contender.program.mesh.axes_by_group()
            dist.barrier()
            with Stopwatch(groups, rank=dist.get_rank()) as stopwatch:
                side.loss = contender.step(local)
            if turn >= 0:
                side.step.append(seconds)
                side.blocked.append(sum(row.seconds for row in stopwatch.rows()))
    return sides


class _Contender:
    """A program with its own data, always the same samples."""

    def __init__(self, overrides: tuple[str, ...]) -> None:
        from ptrain.algebra.legality import require
        from ptrain.data.corpus import corpus
        from ptrain.interpreter.program import interpret
        from ptrain.rooms.world import World
        from ptrain.spec.load import load

        self.spec = require(load("ddp", (*OVERRIDES, *overrides)))
        self.program = interpret(self.spec, world=World.join(self.spec.timeout))
        self.source, self.number = corpus(self.spec.data), 0

    def batch(self) -> object:
        from ptrain.data.sampler import batch

        self.number += 1
        return batch(
            self.source,
            spec=self.spec,
            step=self.number,
            data_index=self.program.data_index,
            data_degree=RANKS,
        )

    def step(self, local: object) -> float:
        loss = self.program.forward_backward(local)
        self.program.step(1e-4)
        return float(loss)


def run(rounds: int) -> dict[str, list[Side]]:
    """Each contender's sides, one per rank."""
    import overlap  # the ranks import this file by its name

    from tests.ranks import Ranks

    pool = Ranks()
    ranks = pool.run(RANKS, overlap.measure_rank, rounds, timeout=3600)
    pool.close()
    return {name: [rank[name] for rank in ranks] for name in CONTENDERS}


def rows(sides: dict[str, list[Side]]) -> list[str]:
    """A row per contender, with its ratios to the first."""
    steps = {name: _slowest([rank.step for rank in each]) for name, each in sides.items()}
    waits = {name: _mean([rank.blocked for rank in each]) for name, each in sides.items()}
    lines = []
    for name, ranks in sides.items():
        lines.append(
            f"| {name} | {ranks[0].calls} | {statistics.median(steps[name]):.4f} "
            f"| {_against(steps[name], steps['naive'])} | {statistics.median(waits[name]):.4f} "
            f"| {_against(waits[name], waits['naive'])} | {sum(each.loss for each in ranks):.6f} |"
        )
    return lines


def claim(sides: dict[str, list[Side]]) -> tuple[list[str], list[str]]:
    """Each contender's blocked seconds against those of the one before it, and what fails."""
    waits = {name: _mean([rank.blocked for rank in each]) for name, each in sides.items()}
    names, lines, failed = list(sides), [], []
    for before, name in pairwise(names):
        high = bound(_ratios(waits[name], waits[before]))[1]
        told = f"{name} / {before}: {_against(waits[name], waits[before])}"
        lines.append(f"{told}, {'holds' if high < 1 else 'fails'}")
        failed += [] if high < 1 else [f"{told}, the upper bound is not below 1"]
    return lines, failed


def _slowest(ranks: list[list[float]]) -> list[float]:
    return [max(each) for each in zip(*ranks, strict=True)]


def _mean(ranks: list[list[float]]) -> list[float]:
    """Over the ranks: a rank that comes late waits less, and the others more."""
    return [statistics.fmean(each) for each in zip(*ranks, strict=True)]


def _against(own: list[float], other: list[float]) -> str:
    ratios = _ratios(own, other)
    low, high = bound(ratios)
    return f"{statistics.median(ratios):.3f} ({low:.3f} – {high:.3f})"


def _ratios(own: list[float], other: list[float]) -> list[float]:
    return [mine / theirs for mine, theirs in zip(own, other, strict=True)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/")
    args = parser.parse_args()
    sides = run(args.rounds)
    told, failed = claim(sides)
    lines = [
        header("overlap: naive, bucketed and overlapped all-reduces", this_command()),
        "Claim: each waits less for collectives than the one before it, the upper 95 % bound of "
        "the paired ratios' median below 1.",
        f"llama-10m, DDP, {RANKS} gloo ranks with one thread each, {' '.join(OVERRIDES[1:])}, "
        f"{args.rounds} rounds. Seconds are medians: steps of the slowest rank; `blocked`, the "
        "mean over the ranks, is what the main thread waited for collectives over dp_replicate in "
        "a step of its own. Ratios are to naive, medians of the rounds' ratios with the two-sided "
        "95 % interval by order statistics; such a median need not be the quotient of the two "
        "medians beside it. Loss is the last step's, and the same samples are in it.",
        "",
        "| | collectives | step s | ratio | blocked s | ratio | loss |",
        "|---|---|---|---|---|---|---|",
        *rows(sides),
        "",
        "Blocked seconds, paired:",
        *(f"- {line}" for line in told),
    ]
    return conclude(
        "overlap",
        lines,
        failed=failed,
        not_covered="how much faster a step becomes (shown, not claimed), networks between "
        "machines, GPUs, other strategies, other sizes of bucket and more ranks.",
        is_saved=args.save,
    )


if __name__ == "__main__":
    sys.exit(main())
