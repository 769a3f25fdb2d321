"""Search for a spec in which `exact` and `simulated` differ.

    python -m tests.adversary.search [--seeds A-B] [--one] [--axis AXIS] [--minutes N]

Claim: of legal specs drawn from the whole grammar (`random_specs`: any key, any value; small
models on up to 4096 ranks), on the first rank, the last and one in between, `exact` and `simulated`
have the same resident state, peaks, traffic and operations: 0 bytes, 0 calls and 0 operations off.

A spec is a function of its seed: --seeds A-B are drawn, A and B included, all in this process. Of
the first spec that fails in some kind of figure the smallest one that fails so is printed, as YAML
and as a command, after at most --tries simulations. With --one only one of the three ranks is
simulated, in turns. Exits 1 where one fails. Some 10 seeds take a minute of a core, and as long
again each that is made smaller. `tests/unit/test_adversary.py` has seeds 0 to 299 every night.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ptrain.spec.load import load
from tests.adversary.coverage import Coverage
from tests.adversary.disagreements import Comparison, Disagreement, compare_columns
from tests.adversary.random_specs import RandomSpec, Written, random_spec
from tests.adversary.shrinking import Shrinking, command, lines

MOST_TRIES = 60
CLAIM = """\
Claim: of specs that are drawn from the declared grammar, `exact` and simulated differ by no byte of
any state or peak, no call and no operation. Of each spec the first rank, the last and one between.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A seed whose two columns differ, with the smallest such spec; None if an earlier seed differs
    in the same kinds of figure."""

    seed: int
    comparison: Comparison
    smallest: Written | None
    of_smallest: Disagreement

    def page(self) -> Iterator[str]:
        """Yield the page's lines for the failure."""
        if self.smallest is None:
            return
        kinds = ", ".join(self.comparison.kinds)
        yield f"Seed {self.seed} ({len(self.comparison.differing)} figures: {kinds}); the smallest:"
        yield from (
            "",
            "```",
            lines(self.smallest),
            "",
            command(self.smallest, self.of_smallest.rank),
        )
        yield from (str(self.of_smallest), "```", "")


@dataclass(slots=True)
class SearchReport:
    """The results of a run of seeds."""

    coverage: Coverage = field(default_factory=Coverage)
    refused: Counter[str] = field(default_factory=Counter)
    not_simulated: Counter[str] = field(default_factory=Counter)
    undefined: Counter[str] = field(default_factory=Counter)
    specs: int = 0
    ranks: int = 0
    figures: int = 0
    failures: list[Failure] = field(default_factory=list)

    def add(self, draw: RandomSpec, ranks: Sequence[int], comparison: Comparison) -> None:
        """Count a spec that was compared on these ranks."""
        self.coverage.add(draw.written)
        self.refused += draw.refused
        self.undefined.update(comparison.undefined.keys())
        self.specs += 1
        self.ranks += 0 if comparison.refused else len(ranks)
        self.figures += comparison.figures
        if comparison.refused:
            self.not_simulated[comparison.refused] += 1

    def page(self) -> Iterator[str]:
        """Yield the lines of a result."""
        yield f"{self.specs} specs, {self.ranks} ranks, {self.figures} figures."
        yield from ("", "Coverage of the grammar:", "")
        yield from (f"- {line}" for line in self.coverage.lines())
        yield from ("", f"Keys that were refused: {self.refused.total()}, by the fault's place:")
        yield ", ".join(f"{place} {count}" for place, count in self.refused.most_common(20))
        for what, counts in (("Not simulated", self.not_simulated), ("Not said", self.undefined)):
            if counts:
                rows = "; ".join(f"{name}: {count}" for name, count in counts.most_common())
                yield from ("", f"{what}, of how many specs: {rows}.")
        yield ""
        for failure in self.failures:
            yield from failure.page()


def smallest(
    written: Written, failing: Disagreement, most: int = MOST_TRIES
) -> tuple[Written, Disagreement]:
    """Return the smallest spec that differs in the same kind of figure on the corresponding rank,
    and the differences."""
    last = load(dict(written)).spec.world_size - 1
    seen = {"": failing}

    def fails(smaller: Written) -> bool:
        ranks = load(dict(smaller)).spec.world_size
        rank = failing.rank * (ranks - 1) // last if last else 0
        rows = compare_columns(smaller, (rank,)).differing
        row = next((row for row in rows if row.kind == failing.kind), None)
        if row is not None:
            seen[""] = row
        return row is not None

    return Shrinking(written, fails, most).smallest(), seen[""]


def examine(
    seed: int, account: SearchReport, *, is_one: bool = False, tries: int = MOST_TRIES
) -> None:
    """Draw and compare a seed's spec; reduce it if it fails in a new kind of figure."""
    draw = random_spec(seed)
    ranks = draw.ranks[seed % len(draw.ranks) :][:1] if is_one else draw.ranks
    began = time.perf_counter()
    comparison = compare_columns(draw.written, ranks)
    account.add(draw, ranks, comparison)
    seconds = time.perf_counter() - began
    said = comparison.refused or f"{len(comparison.differing)} of {comparison.figures} differ"
    print(f"seed {seed}: {said}, {seconds:.0f} s", file=sys.stderr, flush=True)
    if not comparison.differing:
        return
    known = {kind for failure in account.failures for kind in failure.comparison.kinds}
    row = next((row for row in comparison.differing if row.kind not in known), None)
    small = None
    if row is not None:
        small, row = smallest(draw.written, row, tries)
    failure = Failure(
        seed=seed,
        comparison=comparison,
        smallest=small,
        of_smallest=row or comparison.differing[0],
    )
    print(*failure.page(), sep="\n", file=sys.stderr, flush=True)
    account.failures.append(failure)


def has_axis(draw: RandomSpec, axis: str) -> bool:
    """Return True if the mesh has this axis with two ranks or more."""
    return axis in [factor.axis for factor in load(dict(draw.written)).spec.factors]


def seeds(text: str) -> range:
    """Return the range of seeds: `3-7` (inclusive) or `3`."""
    span = re.fullmatch(r"([0-9]+)(?:-([0-9]+))?", text)
    if span is None:
        raise argparse.ArgumentTypeError(f"write A-B; got {text!r}")
    return range(int(span[1]), int(span[2] or span[1]) + 1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=seeds, default=range(100), metavar="A-B")
    parser.add_argument("--one", action="store_true", help="one rank of each spec")
    parser.add_argument("--tries", type=int, default=MOST_TRIES, help="to make a spec smaller")
    parser.add_argument("--axis", help="specs alone whose mesh has this axis, e.g. cp")
    parser.add_argument("--minutes", type=float, default=0.0, help="no seed begins after so many")
    args = parser.parse_args()
    account, began = SearchReport(), time.monotonic()
    for seed in args.seeds:
        if args.minutes and time.monotonic() - began > 60 * args.minutes:
            break
        if args.axis is None or has_axis(random_spec(seed), args.axis):
            examine(seed, account, is_one=args.one, tries=args.tries)
    print(CLAIM, *account.page(), sep="\n")
    print("fails" if account.failures else "holds")
    return 1 if account.failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
