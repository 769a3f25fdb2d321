"""CPU time of a step in accelerate, Lightning Fabric, DeepSpeed and ptrain, against a loop by hand.

Claim: the median ratio of ptrain's step to the hand-written loop of the same placement is at most
1.02, its upper 95 % bound at most 1.05, at the same losses. Nothing is claimed of the other rows.

Needs, besides ptrain's packages: `pip install accelerate lightning-fabric deepspeed`; a peer that
is missing is left out with a line. All contenders of a group live in the same two gloo ranks and
run in turn, one step each; a round is a step of every contender, in an order that rotates. CPU time
is the sum over the ranks, communication threads included. Ranks are started afresh several times.

The section `traps` asks accelerate for two things that it silently does not do, and shows what
`ptrain.measure` says of its model. Prints; writes a result only with --save.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, here and in the ranks

from _machine import conclude, header, this_command
from _peers import GROUPS, environment, installed
from step_time import OVERRIDES, RANKS, SAME, WARM_UP, bound, different, over_limits

MEDIAN_LIMIT, BOUND_LIMIT = 1.02, 1.05
BASE = "by hand"


@dataclass(frozen=True)
class Turns:
    """CPU seconds of each timed step of one contender, and the loss of every step."""

    seconds: list[float]
    losses: list[float]


def measure(group: str, names: Sequence[str], rounds: int, first: int) -> dict[str, Turns]:
    """On one rank: every contender in turn; the order rotates from round to round."""
    import torch.distributed as dist

    environment(dist.get_rank())
    order = [*names[first % len(names) :], *names[: first % len(names)]]
    steps = {name: GROUPS[group][name][1]() for name in order}
    found = {name: Turns([], []) for name in order}
    for name, step in steps.items():
        found[name].losses.extend(step() for _ in range(WARM_UP))
    for number in range(rounds):
        shift = number % len(order)
        for name in [*order[shift:], *order[:shift]]:
            dist.barrier()
            began = time.process_time()
            loss = steps[name]()
            found[name].seconds.append(time.process_time() - began)
            found[name].losses.append(loss)
    return found


def run(group: str, names: Sequence[str], launches: int, rounds: int) -> dict[str, Turns]:
    """Summed over the ranks, launch after launch."""
    import peers  # the ranks import this file by its name

    from tests.ranks import Ranks

    found = {name: Turns([], []) for name in names}
    for launch in range(launches):
        pool = Ranks()
        ranks = pool.run(
            RANKS, peers.measure, group, names, rounds // launches, launch, timeout=3600
        )
        pool.close()
        for name, turns in found.items():
            turns.seconds.extend(
                map(sum, zip(*(rank[name].seconds for rank in ranks), strict=True))
            )
            turns.losses.extend(map(sum, zip(*(rank[name].losses for rank in ranks), strict=True)))
    return found


def report(found: dict[str, Turns]) -> tuple[list[str], list[str]]:
    """The rows of a group, and what of ptrain's does not keep the claim."""
    base, rows, failed = found[BASE], [], []
    for name, turns in found.items():
        ratios = [a / b for a, b in zip(turns.seconds, base.seconds, strict=True)]
        median, (low, high) = statistics.median(ratios), bound(ratios)
        apart = max(abs(a - b) / b for a, b in zip(turns.losses, base.losses, strict=True))
        verdict = "no claim"
        if name.startswith("ptrain"):
            wrong = over_limits(name, median, high, (MEDIAN_LIMIT, BOUND_LIMIT))
            wrong += different(name, apart)
            failed, verdict = [*failed, *wrong], "fails" if wrong else "holds"
        interval = "" if name == BASE else f"{median:.3f} | {low:.3f} – {high:.3f}"
        rows.append(
            f"| {name} | {statistics.median(turns.seconds):.4f} | {interval or '1 | '} "
            f"| {turns.losses[-1]:.6f} | {apart:.1e} | {'' if name == BASE else verdict} |"
        )
    return rows, failed


def traps(there: dict[str, str]) -> list[str]:
    """What accelerate's model is told to be, in ranks of their own."""
    if "accelerate" not in there:
        return ["## Traps", "", "Left out, not installed: accelerate."]
    import _traps

    from tests.ranks import Ranks

    pool = Ranks()
    found = [pool.run(RANKS, _traps.ask, which, timeout=600)[0] for which in _traps.ASKED]
    pool.close()
    return _traps.section(found, there["accelerate"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=36)
    parser.add_argument("--launches", type=int, default=3, help="starts of the ranks")
    parser.add_argument("--groups", nargs="+", default=list(GROUPS), choices=list(GROUPS))
    parser.add_argument("--no-traps", action="store_true", help="only the table")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/")
    args = parser.parse_args()

    needed = [package for group in GROUPS.values() for package, _ in group.values()]
    there = installed(needed)
    lines = [
        header("peers: a step's CPU time in four libraries", this_command()),
        *_heading(args.rounds, args.launches, there),
    ]
    failed: list[str] = []
    for group in args.groups:
        names = [name for name, (need, _) in GROUPS[group].items() if not need or need in there]
        left_out = [name for name in GROUPS[group] if name not in names]
        rows, wrong = report(run(group, names, args.launches, args.rounds))
        lines += ["", f"## {group[0].upper()}{group[1:]}", "", *_TABLE, *rows]
        lines += ["", *(f"Left out, not installed: {name}." for name in left_out)]
        failed += wrong
    if not args.no_traps:
        lines += ["", *traps(there)]
    return conclude(
        "peers",
        lines,
        failed=failed,
        not_covered="wall time, other settings of the libraries and other models, more ranks, "
        "and GPUs. The verdict is about ptrain's rows only: nothing is claimed of the libraries' "
        "time, nor of the traps.",
        is_saved=args.save,
    )


_TABLE = (
    "| | CPU s per step | ratio | 95 % | loss | apart | verdict |",
    "|---|---:|---:|---:|---:|---:|---|",
)


def _heading(rounds: int, launches: int, there: dict[str, str]) -> list[str]:
    versions = ", ".join(f"{name} {text}" for name, text in there.items()) or "none"
    return [
        f"Claim: ptrain's median ratio at most {MEDIAN_LIMIT}, upper 95 % bound at most "
        f"{BOUND_LIMIT}, in every group; losses less than {SAME:g} apart.",
        f"Peers: {versions}. llama-10m, {RANKS} gloo ranks with one thread each, "
        f"{' '.join(OVERRIDES[1:])}, fp32, fused AdamW, clipping, {rounds} rounds over {launches} "
        f"launches, the first {WARM_UP} steps of each left out. A round is one step of every "
        "contender of a group, in rotating order. CPU seconds are the median per step, user and "
        "system, both ranks together; the ratio is to the loop by hand in the same round, median "
        "with its two-sided 95 % interval by order statistics. Being a median of ratios, it need "
        "not be the quotient of the two medians of seconds, and may even stand on the other side "
        "of 1. Loss is of the last step, `apart` "
        "the largest relative difference from the loop by hand over all steps.",
    ]


if __name__ == "__main__":
    sys.exit(main())
