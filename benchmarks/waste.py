"""Which waste, planted where memory and traffic are said, the tests notice without a record."""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from _machine import version
from _mutant import Mutant, changed_lines
from _mutation_bench import Bench, Suite
from _script import Script, table_head, table_row
from _waste import KINDS, of_module
from mutation import Found, code, wilson

AT_LEAST = 0.95
TARGETS = (
    *(f"ptrain/axes/data/{name}.py" for name in ("cuts", "theta")),
    *(f"ptrain/axes/data/{name}.py" for name in ("update", "units")),
    "ptrain/optimizers/update.py",
)
# They read the sources as text, or hold the tree against what was printed or recorded of it.
WITHOUT = tuple(
    f"tests/pure/test_{name}.py"
    for name in ("layers", "paper_page", "readme", "pages", "snapshot", "replay_digests")
)
PROBE = "benchmarks/_waste_probe.py::test_no_prediction_"
RAISES, DIFFERS, TESTS = "raises", "differs", "tests"  # stages
ENOUGH, SLOW = 60.0, 30.0  # processor seconds, as in `_mutation_bench.Suite`
CAUGHT = ("killed", "timeout")
_TOOLS = ("coverage", "pytest", "hypothesis")

SCRIPT = Script("waste", at_least=AT_LEAST, enough=ENOUGH, slow=SLOW)


@dataclass(eq=False, kw_only=True)
class Draw:
    """One kind's mutants: those still to come, those that are judged, and those put aside."""

    kind: str
    every: int
    to_come: list[Mutant]
    chosen: list[Mutant] = field(default_factory=list)
    aside: dict[str, list[Mutant]] = field(default_factory=dict)  # by why


def draws(root: Path, targets: Sequence[str], seed: int) -> list[Draw]:
    """Every mutant of the targets, by kind, in an order that the seed alone decides."""
    files = sorted({str(p.relative_to(root)) for glob in targets for p in root.glob(glob)})
    mutants = [mutant for file in files for mutant in of_module(root, file)]
    kinds = []
    for kind in KINDS:
        of_kind = [mutant for mutant in mutants if mutant.operator == kind]
        random.Random(f"{seed} {kind}").shuffle(of_kind)
        kinds.append(Draw(kind=kind, every=len(of_kind), to_come=of_kind))
    return kinds


def next_mutants(kinds: Sequence[Draw], number: int) -> list[tuple[Draw, Mutant]]:
    """So many more (fewer where there are no more), of the kind with the fewest first."""
    batch: list[tuple[Draw, Mutant]] = []
    counts = {draw: len(draw.chosen) for draw in kinds}
    while len(batch) < number and (left := [draw for draw in kinds if draw.to_come]):
        draw = min(left, key=lambda draw: counts[draw])
        counts[draw] += 1
        batch.append((draw, draw.to_come.pop(0)))
    return batch


def choose(benches: Sequence[Bench], kinds: Sequence[Draw], number: int) -> None:
    """Draws until there are so many that change a prediction and make none raise.

    Whether one changes any is asked first: it ends at the first that differs or raises."""
    while batch := next_mutants(kinds, number - sum(len(draw.chosen) for draw in kinds)):
        differs = judged(benches, [mutant for _, mutant in batch], DIFFERS)
        changing = [mutant for _, mutant in batch if differs.verdict(mutant) in CAUGHT]
        raises = judged(benches, changing, RAISES)
        for draw, mutant in batch:
            if raises.verdict(mutant) in CAUGHT:
                draw.aside.setdefault("raises", []).append(mutant)
            elif mutant in changing:
                draw.chosen.append(mutant)
            elif differs.verdict(mutant) == "unreached":
                draw.aside.setdefault("not run by a prediction", []).append(mutant)
            else:
                draw.aside.setdefault("changes no prediction", []).append(mutant)


def judged(benches: Sequence[Bench], mutants: Sequence[Mutant], stage: str) -> Found:
    """The verdicts of a stage. Each bench, a process with a clone of its own, has its share."""
    first, *others = benches
    first.reach(stage)
    for bench in others:
        shutil.copy(first.folder / f"{stage}.json", bench.folder)
    shares = [
        Found(every=len(mutants), sampled=list(mutants[place :: len(benches)]))
        for place in range(len(benches))
    ]
    with ThreadPoolExecutor(len(benches)) as pool:
        list(pool.map(lambda bench, share: bench.judge([share], stage), benches, shares))
    verdicts = {name: row for share in shares for name, row in share.verdicts.items()}
    return Found(every=len(mutants), sampled=list(mutants), verdicts=verdicts)


def table(kinds: Sequence[Draw], verdicts: Found) -> Iterator[str]:
    """A row a kind."""
    asides = sorted({why for draw in kinds for why in draw.aside})
    judged = ("judged", "caught", "survived", "reached by no test")
    yield from table_head("kind", "sites", *asides, *judged)
    for draw in kinds:
        words = [verdicts.verdict(mutant) for mutant in draw.chosen]
        num_caught = sum(word in CAUGHT for word in words)
        num_unreached = words.count("unreached")
        counts = (
            draw.every,
            *(len(draw.aside.get(why, ())) for why in asides),
            len(words),
            num_caught,
            len(words) - num_caught - num_unreached,
            num_unreached,
        )
        yield table_row(draw.kind, *counts)


def listed(root: Path, kinds: Sequence[Draw], verdicts: Found) -> Iterator[str]:
    """Every mutant that was judged: where, what it is, and what caught it."""
    yield from table_head("kind", "where", "function", "the code", "the mutant", "verdict")
    for draw in kinds:
        for mutant in sorted(draw.chosen, key=lambda mutant: (mutant.file, mutant.line)):
            word = verdicts.verdict(mutant)
            by = str(verdicts.verdicts.get(mutant.name, {}).get("by", "")).rpartition("/")[2]
            verdict = f"caught by {by}" if word in CAUGHT else f"**{word}**"
            before, after = (code(text) for text in changed_lines(root, mutant))
            place = f"{mutant.file.removeprefix('ptrain/')}:{mutant.line}"
            yield table_row(draw.kind, place, mutant.function, before, after, verdict)


def arguments() -> argparse.Namespace:
    """What the command line says."""
    parser = SCRIPT.parser()
    parser.add_argument("targets", nargs="*", default=TARGETS, help="globs of files")
    parser.add_argument("--tests", nargs="+", default=["tests/pure"])
    parser.add_argument("--without", nargs="*", default=WITHOUT, help="tests that do not judge")
    parser.add_argument("--number", type=int, default=60, help="mutants to judge")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--work", type=Path, help="a folder to keep, and to go on in")
    return parser.parse_args()


def benches_in(work: Path, args: argparse.Namespace) -> list[Bench]:
    """A clone for each process."""
    stages = {RAISES: (f"{PROBE}raises",), DIFFERS: (f"{PROBE}differs",), TESTS: tuple(args.tests)}
    suite = Suite(stages=stages, left_out=tuple(args.without), enough=ENOUGH, slow=SLOW)
    folders = [work / str(place) for place in range(args.processes)]
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
    return [Bench(folder, suite) for folder in folders]


def main() -> int:
    args = arguments()
    benches = benches_in((args.work or Path(tempfile.mkdtemp())).resolve(), args)
    tree = benches[0].tree
    kinds = draws(tree, args.targets, args.seed)
    choose(benches, kinds, args.number)
    chosen = [mutant for draw in kinds for mutant in draw.chosen]
    verdicts = judged(benches, chosen, TESTS)
    num_caught = sum(verdicts.verdict(mutant) in CAUGHT for mutant in chosen)
    share = num_caught / max(1, len(chosen))
    low, high = wilson(share, max(1, len(chosen)))
    summary = (
        f"{num_caught} of {len(chosen)} are caught: {share:.1%} (95 % interval {low:.1%} – "
        f"{high:.1%})."
    )
    tools = ", ".join(f"{name} {version(name)}" for name in _TOOLS)
    lines = [
        *SCRIPT.head(),
        f"Mutants of {benches[0].commit} with {tools}; seed {args.seed}.",
        "",
        *SCRIPT.method(),
        f"Targets: {' '.join(args.targets)}. Tests: {' '.join(args.tests)}, "
        f"without {' '.join(args.without)}.",
        "",
        *table(kinds, verdicts),
        "",
        summary,
        "",
        *listed(tree, kinds, verdicts),
    ]
    return SCRIPT.conclude(lines, [summary] if share < AT_LEAST else [], args)


if __name__ == "__main__":
    sys.exit(main())
