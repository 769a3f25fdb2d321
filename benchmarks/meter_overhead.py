"""What the meters cost: CPU time of a step with them against the same step without.

Claim: the always-on counter costs at most 2 % (upper 95 % bound of the median of the paired
CPU-time ratios) with a look every `log_every` steps; training looks less often where a look would
cost more than 1 % of the time in between. The other meters run on chosen steps only; what one such
step costs is shown. One program takes all steps, so that nothing but the
meters differs: in each round every contender takes one step, in an order that rotates, and a ratio
is of two steps of one round. The flight recorder's ring is filled first: a look reads all of it.
CPU time is the sum over the ranks, their communication threads included.
Prints; writes a result only with --save. 50 rounds take about 5 minutes.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
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


def measure_rank(strategy: str, rounds: int) -> tuple[dict[str, list[float]], int]:
    """On one rank: CPU seconds of each contender's steps, and the spec's log_every."""
    import torch.distributed as dist

    from ptrain.algebra.legality import require
    from ptrain.data.corpus import corpus
    from ptrain.data.sampler import batch
    from ptrain.interpreter.program import interpret
    from ptrain.interpreter.world import World
    from ptrain.spec.load import load

    spec = require(load(strategy, OVERRIDES))
    program = interpret(spec, world=World.join(spec.timeout))
    source = corpus(spec.data)
    watches = _watches(program)
    _fill_the_ring()
    seconds: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    number = 0
    for turn in range(-WARM_UP, rounds):
        shift = turn % len(CONTENDERS)
        for name in (*CONTENDERS[shift:], *CONTENDERS[:shift]):
            local = batch(
                source, spec=spec, step=number, data_index=program.data_index, data_degree=RANKS
            )
            dist.barrier()
            began = time.process_time()
            with watches[name]():
                program.forward_backward(local)
                program.step(1e-4)
            if turn >= 0:
                seconds[name].append(time.process_time() - began)
            number += 1
    return seconds, spec.log_every


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


def run(strategy: str, rounds: int) -> tuple[dict[str, list[float]], int]:
    """CPU seconds of each contender, summed over the ranks."""
    import meter_overhead  # the ranks import this file by its name

    from tests.ranks import Ranks

    pool = Ranks()
    ranks = pool.run(RANKS, meter_overhead.measure_rank, strategy, rounds, timeout=3600)
    pool.close()
    seconds = {
        name: [sum(each) for each in zip(*(rank[0][name] for rank in ranks), strict=True)]
        for name in CONTENDERS
    }
    return seconds, ranks[0][1]


def rows(strategy: str, seconds: dict[str, list[float]], log_every: int) -> tuple[list[str], bool]:
    """The table's rows of one strategy, and whether the claim holds."""
    bare, holds = seconds["bare"], True
    lines = []
    for name in CONTENDERS[1:]:
        ratios = [with_it / without for with_it, without in zip(seconds[name], bare, strict=True)]
        lines.append(_row(strategy, name, seconds[name], ratios, ""))
        if name == "counter":
            ratios = [1 + (ratio - 1) / log_every for ratio in ratios]
            holds = bound(ratios)[1] <= BOUND_LIMIT
            verdict = "holds" if holds else "fails"
            name = f"counter, a look every {log_every} steps"
            lines.append(_row(strategy, name, [], ratios, verdict))
    return lines, holds


def _row(strategy: str, name: str, seconds: list[float], ratios: list[float], verdict: str) -> str:
    low, high = bound(ratios)
    own = f"{statistics.median(seconds):.4f}" if seconds else ""
    return (
        f"| {strategy} | {name} | {own} | {statistics.median(ratios):.4f} "
        f"| {low:.4f} – {high:.4f} | {verdict} |"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--strategies", nargs="+", default=["ddp", "zero3"])
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/")
    args = parser.parse_args()
    lines = [
        header("meter_overhead: a step's CPU time with meters and without", this_command()),
        f"Claim: upper 95 % bound of the counter's ratio at most {BOUND_LIMIT}.",
        f"llama-10m, {RANKS} gloo ranks with one thread each, {' '.join(OVERRIDES[1:])}, "
        f"{args.rounds} rounds of one step each, order rotating. CPU seconds are medians per step, "
        "user and system, both ranks together. The interval is of the median of the rounds' "
        "ratios, two-sided, by order statistics. Every row but the verdict's is of a step that "
        "has the meter.",
        "",
        "| strategy | meter | CPU s | median ratio | 95 % | verdict |",
        "|---|---|---|---|---|---|",
    ]
    all_hold = True
    for strategy in args.strategies:
        seconds, log_every = run(strategy, args.rounds)
        found, holds = rows(strategy, seconds, log_every)
        own = statistics.median(seconds["bare"])
        lines += [f"| {strategy} | none | {own:.4f} | 1 | | |", *found]
        all_hold &= holds
    return conclude("meter_overhead", lines, holds=all_hold, is_saved=args.save)


if __name__ == "__main__":
    sys.exit(main())
