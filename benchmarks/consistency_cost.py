"""What `consistency_every: 10` costs: ten steps with one check against ten steps without.

Claim: the upper 95 % bound of the median of the paired ratios is at most 1.03, in CPU time and in
wall time. One program takes all steps, through the part of `ptrain train` that surrounds them, so
that nothing but the check differs: in each round either contender takes ten steps, and who begins
changes. Inside of the clock are forward, backward, the ranks' agreement on the loss, update, and
with the check the digests of gradients, parameters and optimizer state and the ranks' exchange of
them; outside is the batch. CPU time is the sum over the ranks, their communication threads
included; wall time is that of the slowest rank, from a barrier on. The first check, in which the
ranks tell each other what they hold, is in the warm-up. That both send the same but for the
exchange is counted in a round after the timed ones.
Prints; writes a result only with --save. 30 rounds of three strategies take about 25 minutes.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, here and in the ranks

from _machine import conclude, header, this_command
from step_time import bound

EVERY = 10
BOUND_LIMIT = 1.03
MOST_CALLS = 2  # of the exchange: the lengths of what the ranks say, and that itself
WITH, WITHOUT = "with", "without"
MODEL = "llama-10m"
STRATEGIES = ("ddp", "zero3", "hsdp")


@dataclass
class Side:
    """One contender: seconds of each window of ten steps, CPU and wall, its loss at the end of
    each, and of one window more the collectives and the bytes sent."""

    cpu: list[float] = field(default_factory=list)
    wall: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    counted: tuple[int, int] = (0, 0)


def measure_rank(strategy: str, model: str, rounds: int) -> dict[str, Side]:
    """On one rank: both contenders' windows."""
    import torch.distributed as dist

    from ptrain.algebra.legality import require
    from ptrain.data.corpus import corpus
    from ptrain.interpreter.program import interpret
    from ptrain.meters.counter import Counter
    from ptrain.rooms.world import World
    from ptrain.spec.load import load
    from ptrain.train.consistency import Consistency
    from ptrain.train.exchange import Exchange
    from ptrain.train.loop import local_batch

    data = load(strategy).spec.data_degree
    batch = f"batch={{global: {2 * data}, micro: 2, sequence: 256}}"
    overrides = (f"model.preset={model}", batch, "optimizer.lr=3e-4", f"consistency_every={EVERY}")
    spec = require(load(strategy, overrides))
    world = World.join(spec.timeout)
    program, source, exchange = interpret(spec, world=world), corpus(spec.data), Exchange(world)
    consistency = Consistency(program, exchange, lambda: "")
    sides = {WITH: Side(), WITHOUT: Side()}
    taken = 0

    def watched(name: str, step: int) -> AbstractContextManager[None]:
        return consistency.around(step, nullcontext()) if name == WITH else nullcontext()

    def window(name: str) -> tuple[float, float, float]:
        nonlocal taken
        batches = [local_batch(program, source, taken + step) for step in range(EVERY)]
        dist.barrier()
        cpu, wall = time.process_time(), time.perf_counter()
        for step, each in enumerate(batches, start=taken):
            with watched(name, step):
                loss = exchange.add([float(program.forward_backward(each))])[0]
                program.step(3e-4)
            if name == WITH and consistency.is_due(step + 1):
                consistency.require(step + 1)
        dist.barrier()
        taken += EVERY
        return time.process_time() - cpu, time.perf_counter() - wall, loss

    for turn in range(-1, rounds):
        for name in (WITH, WITHOUT) if turn % 2 else (WITHOUT, WITH):
            cpu, wall, loss = window(name)
            if turn >= 0:
                sides[name].cpu.append(cpu)
                sides[name].wall.append(wall)
                sides[name].losses.append(loss)
    counter = Counter()
    for name, side in sides.items():
        counter.read()
        window(name)
        if counted := counter.read():
            side.counted = counted.calls, counted.sent_bytes
    exchange.close()
    return sides


def run(strategy: str, model: str, rounds: int) -> dict[str, Side]:
    """Each contender, over all ranks."""
    import consistency_cost  # the ranks import this file by its name

    from ptrain.spec.load import load
    from tests.ranks import Ranks

    pool = Ranks()
    size = load(strategy).spec.world_size
    ranks = pool.run(size, consistency_cost.measure_rank, strategy, model, rounds, timeout=7200)
    pool.close()
    return {name: joined([rank[name] for rank in ranks]) for name in (WITH, WITHOUT)}


def joined(ranks: Sequence[Side]) -> Side:
    """CPU seconds are summed, of wall time the longest counts; the loss is the same on all."""
    return Side(
        cpu=[sum(each) for each in zip(*(rank.cpu for rank in ranks), strict=True)],
        wall=[max(each) for each in zip(*(rank.wall for rank in ranks), strict=True)],
        losses=ranks[0].losses,
        counted=ranks[0].counted,
    )


def rows(strategy: str, sides: dict[str, Side]) -> tuple[list[str], list[str]]:
    """The table's rows of one strategy, and what does not keep the claim."""
    lines, failed = [], []
    checked, bare = sides[WITH], sides[WITHOUT]
    for clock, mine, its in (("CPU", checked.cpu, bare.cpu), ("wall", checked.wall, bare.wall)):
        ratios = [a / b for a, b in zip(mine, its, strict=True)]
        low, high = bound(ratios)
        holds = high <= BOUND_LIMIT
        if not holds:
            failed.append(f"{strategy}, {clock}: bound {high:.4f}, at most {BOUND_LIMIT}")
        cells = (
            strategy,
            clock,
            f"{statistics.median(its):.3f}",
            f"{statistics.median(mine):.3f}",
            f"{statistics.median(ratios):.4f}",
            f"{low:.4f} – {high:.4f}",
            "holds" if holds else "fails",
        )
        lines.append(f"| {' | '.join(cells)} |")
    more = checked.counted[0] - bare.counted[0]
    if not 0 < more <= MOST_CALLS:
        told = f"{checked.counted[0]} collectives with the check, {bare.counted[0]} without"
        failed.append(f"{strategy}: {told}, and an exchange has {MOST_CALLS}")
    return lines, failed


def work(strategy: str, sides: dict[str, Side]) -> str:
    """What both contenders did, side by side."""
    cells = [strategy]
    for name in (WITHOUT, WITH):
        side = sides[name]
        calls, sent = side.counted
        cells += [f"{calls}", f"{sent:,}", f"{statistics.fmean(side.losses):.4f}"]
    return f"| {' | '.join(cells)} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--strategies", nargs="+", default=list(STRATEGIES))
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/")
    args = parser.parse_args()
    table, works, failed = [], [], []
    title = header("consistency_cost: ten steps with a check and ten without", this_command())
    for strategy in args.strategies:
        sides = run(strategy, args.model, args.rounds)
        found, wrong = rows(strategy, sides)
        table, failed = [*table, *found], [*failed, *wrong]
        works.append(work(strategy, sides))
    return conclude(
        "consistency_cost",
        [title, *_explained(args.model, args.rounds), *table, "", *_work_head(), *works],
        failed=failed,
        not_covered="other models and strategies, more ranks, several nodes, and GPUs. The single "
        "step that has the check costs more than the tenth part that is claimed.",
        is_saved=args.save,
    )


def _explained(model: str, rounds: int) -> list[str]:
    """The claim, what a row is, and the head of the table."""
    return [
        f"Claim: with `consistency_every: {EVERY}` the upper 95 % bound of the ratio is at most "
        f"{BOUND_LIMIT}, in CPU time and in wall time.",
        "",
        "The check digests, on every rank and in place, the reduced gradients of the step, and "
        "after its update parameters, optimizer state, buffers, counters and learning rate; then "
        "the ranks exchange a digest per set of ranks that hold the same. Under ddp every rank "
        "holds everything, which is the most that there is to digest.",
        "",
        f"{model}, gloo ranks with one thread each, micro-batches of 2 samples of 256 tokens, "
        f"{rounds} rounds; in each either contender takes {EVERY} steps of one training, and who "
        "begins changes. Seconds are medians per ten steps: CPU user and system of all ranks, wall "
        "time of the slowest. The ratio is the median of the rounds' ratios, not the quotient of "
        "the two medians, with its two-sided 95 % interval by order statistics.",
        "",
        "| strategy | time | s without | s with | median ratio | 95 % | verdict |",
        "|---|---|---|---|---|---|---|",
    ]


def _work_head() -> list[str]:
    return [
        "What a rank sent in ten steps, and the mean of the losses at their ends: steps of one "
        "training and therefore of different samples, which agree roughly.",
        "",
        "| strategy | collectives without | bytes | loss | collectives with | bytes | loss |",
        "|---|---|---|---|---|---|---|",
    ]


if __name__ == "__main__":
    sys.exit(main())
