"""Do a few blocks that run stand rightly for the many that do not, and what does it save?

Claim: `ptrain simulate` of every spec of specs/paper and specs/node and of every model of
specs/models, by runs with few blocks where it replays, equals `simulate --every-block` in every
figure, in every moment of its memory and in what CUDA's allocator would reserve: 0 bytes; and
`simulate` of 70b-zero3 takes at most 8 seconds.

Rank 0 of each, in one process. `differ`: figures in which `exact` and simulated are not equal.
Prints; writes a result only with --save. Three quarters of an hour, of which the specs of a node
with tp take most.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass

from _machine import conclude, header, this_command

from ptrain.derivation.allocator import reserved
from ptrain.derivation.estimate import derive
from ptrain.report.record import compare
from ptrain.selection.recompute import settled
from ptrain.simulation.execute import Simulated, simulate
from ptrain.spec.load import load
from ptrain.spec.names import listing
from ptrain.spec.spec import Spec
from ptrain.traces.facts import facts_of

MOST_SECONDS = {"70b-zero3": 8.0}
OF_A_MODEL = ("mesh.dp_shard=8", "batch={global: 8, micro: 1, sequence: 1024}")


@dataclass(frozen=True, kw_only=True)
class Result:
    """A spec simulated both ways."""

    name: str
    blocks: int | None
    seconds: float
    seconds_of_all: float
    unequal: list[str]
    differing: int


def cases() -> list[tuple[str, str, tuple[str, ...]]]:
    """Return a name, a spec and its overrides of each."""
    specs = [(name, name, ()) for name in (*listing("paper"), *listing("node"))]
    models = [
        (f"zero3 {name}", "zero3", (f"model.preset={name}", *OF_A_MODEL))
        for name in listing("models")
    ]
    return [*specs, *models]


def result_of(name: str, source: str, overrides: tuple[str, ...]) -> Result:
    spec = settled(load(source, overrides))
    began = time.perf_counter()
    few = simulate(spec)
    between = time.perf_counter()
    every = simulate(spec, every_block=True)
    ended = time.perf_counter()
    exact = derive(spec, facts_of(spec)).exact.of_rank(0)
    checks = compare(exact, few.estimate)
    return Result(
        name=name,
        blocks=few.replayed,
        seconds=between - began,
        seconds_of_all=ended - between,
        unequal=[what for what, is_equal in equalities(spec, few, every).items() if not is_equal],
        differing=sum(check.predicted != check.measured for check in checks),
    )


def equalities(spec: Spec, few: Simulated, every: Simulated) -> dict[str, bool]:
    """Return by kind of figure whether both ways give the same."""
    mine, theirs = few.estimate, every.estimate
    return {
        "memory": mine.memory == theirs.memory,
        "peaks": mine.peak == theirs.peak,
        "traffic": mine.traffic == theirs.traffic,
        "operations": mine.operations == theirs.operations,
        "moments": few.course == every.course,
        "reserved": all(
            reserved(few.allocated(spec), expands=expands)
            == reserved(every.allocated(spec), expands=expands)
            for expands in (False, True)
        ),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="names of cases; default: all")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/")
    args = parser.parse_args()
    head = header("simulated by a few blocks, and by all", this_command())
    lines = [
        "| spec | blocks replayed | seconds | every block | unequal | `exact` differs |",
        "|---|---|---|---|---|---|",
    ]
    failed: list[str] = []
    left_out = [case[0] for case in cases() if args.names and case[0] not in args.names]
    for case in cases():
        if case[0] in left_out:
            continue
        result = result_of(*case)
        cells = (
            result.name, result.blocks or "–", f"{result.seconds:.1f}",
            f"{result.seconds_of_all:.1f}", ", ".join(result.unequal) or "0", result.differing,
        )  # fmt: skip
        lines.append(f"| {' | '.join(map(str, cells))} |")
        print(lines[-1], flush=True)
        failed += [f"{result.name}: {what} unequal" for what in result.unequal]
        if result.differing:
            failed.append(f"{result.name}: {result.differing} figures of `exact` differ")
        most = MOST_SECONDS.get(result.name)
        if most is not None and result.seconds > most:
            failed.append(f"{result.name}: {result.seconds:.1f} s, more than {most:g}")
    return conclude(
        "simulate_replayed",
        [head, *lines],
        failed=failed,
        not_covered=", ".join(["other ranks, models by their class, CUDA's kernels", *left_out]),
        is_saved=args.save,
    )


if __name__ == "__main__":
    raise SystemExit(main())
