"""What the meters cost: CPU time of a step with them against the same step without.

Claim: the counter that is always on costs at most 2 % of a step (upper 95 % bound of the median of
the paired CPU-time ratios) with a look every `log.every` steps, which is 10 where a spec does not
say. Training looks less often where a look would cost more than 1 % of the time in between. The
other meters run on chosen steps only; what one such step costs is shown. One program takes all
steps, so that nothing but the meters differs: in each round every contender takes one step, in an
order that rotates, and a ratio is of two steps of one round. The flight recorder's ring is filled
first: a look reads all of it. CPU time is the sum over the ranks, their communication threads
included. That each contender's step moves the same is counted on a step after the timed ones.
Prints; writes a result only with --save. 50 rounds take about 5 minutes.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, here and in the ranks

from _machine import conclude, header, this_command
from step_time import OVERRIDES, RANKS, WARM_UP, bound

if TYPE_CHECKING:
    from ptrain.interpreter.program import Program

BOUND_LIMIT = 1.02
RING = 2000  # collectives that the flight recorder keeps
CONTENDERS = ("bare", "counter", "wire", "stopwatch", "full meters")
Watch = Callable[[], AbstractContextManager[object]]


@dataclass(frozen=True)
class Side:
    """One contender on one rank: CPU seconds of its timed steps, the mean of their losses, and of
    one step more the collectives and the bytes sent."""

    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    counted: list[tuple[int, int]] = field(default_factory=list)


def measure_rank(strategy: str, rounds: int) -> tuple[dict[str, Side], int]:
    """On one rank: each contender's steps, and the spec's log_every."""
    import torch.distributed as dist

    from ptrain.algebra.legality import require
    from ptrain.data.corpus import corpus
    from ptrain.data.sampler import batch
    from ptrain.interpreter.program import interpret
    from ptrain.meters.counter import Counter
    from ptrain.rooms.world import World
    from ptrain.spec.load import load

    spec = require(load(strategy, OVERRIDES))
    program = interpret(spec, world=World.join(spec.timeout))
    source, numbers = corpus(spec.data), iter(range(10**9))
    watches, sides = _watches(program), {name: Side() for name in CONTENDERS}
    _fill_the_ring()

    def step(name: str) -> tuple[float, float]:
        local = batch(
            source, spec=spec, step=next(numbers), data_index=program.data_index, data_degree=RANKS
        )
        dist.barrier()
        began = time.process_time()
        with watches[name]():
            loss = program.forward_backward(local)
            program.step(1e-4)
        return time.process_time() - began, float(loss)

    for turn in range(-WARM_UP, rounds):
        shift = turn % len(CONTENDERS)
        for name in (*CONTENDERS[shift:], *CONTENDERS[:shift]):
            seconds, loss = step(name)
            if turn >= 0:
                sides[name].seconds.append(seconds)
                sides[name].losses.append(loss)
    counter = Counter()
    for name in CONTENDERS:
        counter.read()
        step(name)
        if counted := counter.read():
            sides[name].counted.append((counted.calls - 1, counted.sent_bytes))  # but the barrier
    return sides, spec.log_every


def _watches(program: Program) -> dict[str, Watch]:
    """What surrounds a step of each contender."""
    from ptrain.meters.blocked import Stopwatch
    from ptrain.meters.counter import Counter
    from ptrain.meters.measure import measure
    from ptrain.meters.wire import WireMeter

    counter, rank = Counter(), program.world.rank
    axes_by_group = program.mesh.axes_by_group()

    @contextmanager
    def counted() -> Iterator[None]:
        yield
        counter.read()

    return {
        "bare": nullcontext,
        "counter": counted,
        "wire": lambda: WireMeter(axes_by_group, rank=rank),
        "stopwatch": lambda: Stopwatch(axes_by_group, rank=rank),
        "full meters": lambda: measure(program),
    }


def _fill_the_ring() -> None:
    import torch
    import torch.distributed as dist

    for _ in range(RING):
        dist.all_reduce(torch.zeros(1))


def run(strategy: str, rounds: int) -> tuple[dict[str, Side], int]:
    """Each contender: CPU seconds and losses summed over the ranks, each rank's counts."""
    import meter_overhead  # the ranks import this file by its name

    from tests.ranks import Ranks

    pool = Ranks()
    ranks = pool.run(RANKS, meter_overhead.measure_rank, strategy, rounds, timeout=3600)
    pool.close()
    return {name: _joined([rank[0][name] for rank in ranks]) for name in CONTENDERS}, ranks[0][1]


def _joined(ranks: Sequence[Side]) -> Side:
    return Side(
        [sum(each) for each in zip(*(rank.seconds for rank in ranks), strict=True)],
        [sum(each) for each in zip(*(rank.losses for rank in ranks), strict=True)],
        [each for rank in ranks for each in rank.counted],
    )


def rows(strategy: str, sides: dict[str, Side], log_every: int) -> tuple[list[str], list[str]]:
    """The table's rows of one strategy, and what does not keep the claim."""
    bare, lines, failed = sides["bare"], [], []
    for name, side in sides.items():
        ratios = [a / b for a, b in zip(side.seconds, bare.seconds, strict=True)]
        lines.append(_row(strategy, name, side, ratios, "" if side is bare else "no claim"))
        if side.counted != bare.counted:
            failed.append(f"{strategy}, {name}: {side.counted} was sent, {bare.counted} without")
        if name == "counter":
            ratios = [1 + (ratio - 1) / log_every for ratio in ratios]
            high = bound(ratios)[1]
            name = f"counter, a look every {log_every} steps"
            if high > BOUND_LIMIT:
                failed.append(f"{strategy}, {name}: bound {high:.4f}, at most {BOUND_LIMIT}")
            verdict = "fails" if high > BOUND_LIMIT else "holds"
            lines.append(_row(strategy, name, None, ratios, verdict))
    return lines, failed


def _row(strategy: str, name: str, side: Side | None, ratios: Sequence[float], verdict: str) -> str:
    """`side` is None where the ratio is worked out from another row's."""
    low, high = bound(list(ratios))
    ratio = [f"{statistics.median(ratios):.4f}", f"{low:.4f} – {high:.4f}"]
    seconds, *work = ("", "", "", "") if side is None else _own(side)
    cells = [strategy, name, seconds, *(["1", ""] if name == "bare" else ratio), *work, verdict]
    return f"| {' | '.join(cells)} |"


def _own(side: Side) -> tuple[str, ...]:
    """Seconds, collectives, bytes and loss; more than one figure where the ranks differ."""
    return (
        f"{statistics.median(side.seconds):.4f}",
        ", ".join(dict.fromkeys(f"{calls}" for calls, _ in side.counted)),
        ", ".join(dict.fromkeys(f"{sent:,}" for _, sent in side.counted)),
        f"{statistics.fmean(side.losses):.4f}",
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--strategies", nargs="+", default=["ddp", "zero3"])
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/")
    args = parser.parse_args()
    table, failed, every = [], [], set()
    title = header("meter_overhead: a step's CPU time with meters and without", this_command())
    for strategy in args.strategies:
        sides, log_every = run(strategy, args.rounds)
        found, wrong = rows(strategy, sides, log_every)
        table, failed = [*table, *found], [*failed, *wrong]
        every.add(log_every)
    return conclude(
        "meter_overhead",
        [title, *_explained(args.rounds, every), *table],
        failed=failed,
        not_covered="wall time, other models and strategies, more ranks, and GPUs. A step that "
        "has a look, and a step that is metered in full, cost what their rows say: of them nothing "
        "is claimed.",
        is_saved=args.save,
    )


def _explained(rounds: int, every: set[int]) -> list[str]:
    """The claim, what each row is, and the head of the table."""
    steps = " and ".join(map(str, sorted(every)))
    return [
        f"Claim: with a look every {steps} steps, the upper 95 % bound of the counter's ratio is "
        f"at most {BOUND_LIMIT}. A single step with a look costs more, as its row shows.",
        "",
        "What runs in `ptrain train`: torch's flight recorder writes down every collective anyway. "
        "On rank 0 the counter asks once a step how many were issued, which costs microseconds, "
        "and *looks*, which means that it reads the whole record, at the steps that are logged: "
        f"every `log.every`th ({steps} here, the default), the first and the last. A look takes "
        "time in proportion to what the record holds, at most 2000 collectives, so it is put off "
        "where it would cost more than 1 % of the time since the last one, and comes early only "
        "where the record would overflow unseen. The other meters run in chosen steps only "
        "(`ptrain validate`, and the measured steps of a training).",
        "",
        f"llama-10m, {RANKS} gloo ranks with one thread each, {' '.join(OVERRIDES[1:])}, "
        f"{rounds} rounds of one step each, order rotating. CPU seconds are medians per step, "
        "user and system, both ranks together. The ratio is the median of the rounds' ratios to "
        "*bare*, not the quotient of the two medians, with its two-sided 95 % interval by order "
        "statistics. Each row is of steps that all have the meter, on both ranks and with a full "
        f"record. Only the row *a look every {steps} steps* is worked out instead of timed: of "
        f"each ratio of *counter* the part above 1 is divided by {steps}. (A median of {steps} "
        "steps of which one has a look would not show the look.)",
        "",
        "The work is the same: collectives and bytes that a rank sends, counted in one step more "
        "of each row. The losses are means over the timed steps, which are steps of one training "
        "and therefore of different samples: they agree roughly.",
        "",
        "| strategy | meter | CPU s | median ratio | 95 % | collectives | bytes sent | loss "
        "| verdict |",
        "|---|---|---|---|---|---|---|---|---|",
    ]


if __name__ == "__main__":
    sys.exit(main())
