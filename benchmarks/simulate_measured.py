"""Is what a simulation says of a rank what the rank does on gloo?

Claim: for every spec in specs/strategies/ and every rank, resident state, activations, traffic and
peaks of `ptrain simulate` are those that the meters read off gloo ranks, 0 bytes off; and what was
derived (`exact`) stands beside both. Model, mesh, placement and layout are the strategy's; the
batch is smaller. Prints; writes a result only with --save. About 6 minutes on two cores.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from _machine import conclude, header, this_command

from ptrain.costs import Estimate
from ptrain.derivation.estimate import derive
from ptrain.report.record import Check, compare
from ptrain.simulation.execute import simulate
from ptrain.spec.load import load
from ptrain.spec.names import listing
from ptrain.spec.spec import Spec
from ptrain.traces.facts import facts_of
from tests.gloo.test_simulated import short, steady
from tests.ranks import Ranks


@dataclass(frozen=True, kw_only=True)
class Rank:
    """Figures of one rank in two pairs of columns."""

    rank: int
    simulated: tuple[Check, ...]  # simulated against measured
    exact: tuple[Check, ...]  # exact against measured

    @property
    def wrong(self) -> list[Check]:
        return [check for check in self.simulated if check.predicted != check.measured]


def ranks_of(spec: Spec, measured: list[Estimate]) -> Iterator[Rank]:
    exact = derive(spec, facts_of(spec)).exact
    for rank, found in enumerate(measured):
        simulated = simulate(spec, rank).estimate
        yield Rank(
            rank=rank,
            simulated=compare(simulated, found),
            exact=compare(exact.of_rank(rank), found),
        )


def off(checks: list[Check], kind: str) -> str:
    """The largest difference among the figures of one kind, as a share where it is not 0."""
    wrong = [
        check
        for check in checks
        if check.name.startswith(kind) and check.predicted != check.measured
    ]
    if not wrong:
        return "0"
    if any(check.predicted is None or not check.measured for check in wrong):
        return "missing"
    return f"{max((check.predicted / check.measured - 1 for check in wrong), key=abs):+.4%}"


def row(name: str, spec: Spec, found: list[Rank]) -> str:
    simulated = [check for rank in found for check in rank.simulated]
    exact = [check for rank in found for check in rank.exact]
    cells = (
        name, str(spec.world_size), str(len(simulated)),
        *(off(simulated, kind) for kind in ("memory", "traffic", "peak")),
        *(off(exact, kind) for kind in ("memory", "traffic", "peak")),
    )  # fmt: skip
    return f"| {' | '.join(cells)} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/")
    args = parser.parse_args()
    head = header("simulate: every strategy on fake ranks and on gloo", this_command())
    columns = (
        "strategy", "ranks", "figures", "simulated - measured: memory", "traffic", "peak",
        "exact - measured: memory", "traffic", "peak",
    )  # fmt: skip
    lines = [head, f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    failed, pool, size = [], Ranks(), 0
    for name in sorted(listing("strategies"), key=lambda name: load(name).spec.world_size):
        spec = short(name)
        if spec.world_size != size:  # pools that wait take time from the others
            pool.close()
            pool, size = Ranks(), spec.world_size
        found = list(ranks_of(spec, pool.run(size, steady, spec)))
        lines.append(row(name, spec, found))
        print(lines[-1], file=sys.stderr, flush=True)
        for rank in found:
            failed += [f"{name} rank {rank.rank}: {check.name}" for check in rank.wrong]
    pool.close()
    return conclude(
        "simulate_measured",
        lines,
        failed=failed,
        not_covered="GPUs, and strategies at their own batch",
        is_saved=args.save,
    )


if __name__ == "__main__":
    raise SystemExit(main())
