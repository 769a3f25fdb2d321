"""What has become slower since a commit: the working tree and COMMIT in turns, in one run."""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from _machine import ROOT, commit, environment
from _paused import STEPS, in_pairs
from _script import Script, table_head, table_row
from _steps import paired
from start_up import command_of, seconds, words_of
from start_up import run as train

LIMIT = 1.05
SCRIPT = Script("against", limit=LIMIT)
FEWEST = 6  # rounds of which there is an interval of 95 %
MEASURES = ("predict", "derive", "start-up", "steps")
PREDICTED = ("zero3", "70b-zero3", "70b-3d", "405b-4096")
TRAINED = ("zero3", "ddp")
SPECS = tuple(sorted(path.stem for path in (ROOT / "specs" / "strategies").glob("*.yaml")))
SECONDS, MILLISECONDS = "s", "ms"


@dataclass(frozen=True, slots=True)
class Row:
    """A figure of the comparison: the measure, the spec and the clock."""

    measure: str
    spec: str
    clock: str
    unit: str = SECONDS


@dataclass(frozen=True, slots=True)
class Tree:
    """A checked out state of the repository."""

    name: str
    root: Path


@dataclass(slots=True)
class Side:
    """The times of a tree by round, in the unit of each row; and its results by measure and spec,
    which show whether the work was equal."""

    times: dict[Row, list[float]] = field(default_factory=dict)
    results: dict[tuple[str, str], str] = field(default_factory=dict)

    def note(self, row: Row, time: float) -> None:
        self.times.setdefault(row, []).append(time)


def predict(tree: Tree, side: Side) -> None:
    """Time one process per spec of this tree."""
    for spec in PREDICTED:
        if _has(tree, spec):
            cpu, wall = seconds(command_of(spec), tree.root)
            side.note(Row("predict", spec, "CPU"), cpu)
            side.note(Row("predict", spec, "wall"), wall)


def derive(tree: Tree, side: Side) -> None:
    """Time one process for all specs."""
    script = ROOT / "benchmarks" / "_derive_time.py"
    words = {spec: words_of(spec) for spec in PREDICTED if _has(tree, spec)}
    ended = subprocess.run(
        [sys.executable, str(script), str(tree.root), json.dumps(words)],
        cwd=tree.root,
        env=environment(tree.root),
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    for spec, (time, result) in json.loads(ended.stdout).items():
        side.note(Row("derive", spec, "CPU", MILLISECONDS), time)
        side.results["derive", spec] = result


def start_up(tree: Tree, side: Side) -> None:
    """Time one training of each spec up to its first step."""
    for spec in TRAINED:
        if _has(tree, spec):
            run = train([spec, "train.steps=4"], tree.root)
            side.note(Row("start-up", spec, "wall"), run.first_step)


def steps(trees: Sequence[Tree], specs: Sequence[str], rounds: int, sides: Sequence[Side]) -> None:
    """Time trainings of each spec that take turns."""
    for spec in specs:
        turns, losses = in_pairs([tree.root for tree in trees], spec, rounds)
        for side, taken, own in zip(sides, turns, losses, strict=True):
            for turn in taken:
                side.note(Row("steps", spec, "wall", MILLISECONDS), 1e3 * turn.wall)
                side.note(Row("steps", spec, "CPU", MILLISECONDS), 1e3 * turn.cpu)
            side.results["steps", spec] = f"{len(own)} losses, the last {own[-1]}"
        print(f"steps of {spec}: done", file=sys.stderr, flush=True)


Taking = Callable[[Tree, Side], None]
TAKEN: dict[str, Taking] = {
    "predict": predict,
    "derive": derive,
    "start-up": start_up,
}


def in_turns(trees: Sequence[Tree], measures: Sequence[str], rounds: int) -> list[Side]:
    """Return the times of each tree. A first round writes byte code and is left out."""
    takings = list(dict.fromkeys(TAKEN[measure] for measure in measures))
    sides = [Side() for _ in trees]
    for number in range(-1, rounds):
        turns = list(zip(trees, sides, strict=True))
        for take in takings:
            for tree, side in turns if number % 2 else reversed(turns):
                take(tree, side if number >= 0 else Side())
    return sides


def _has(tree: Tree, spec: str) -> bool:
    """Return True if the tree has a spec of this name. It checks files, since a process would
    disturb the comparison."""
    return any((tree.root / "specs").glob(f"*/{Path(words_of(spec)[0]).stem}.yaml"))


@contextmanager
def checked_out(name: str, repository: Path = ROOT) -> Iterator[Tree]:
    """Temporarily check out the commit `name` as a worktree."""
    with tempfile.TemporaryDirectory(prefix="ptrain-against-") as folder:
        root = Path(folder).resolve() / "tree"
        git(repository, "worktree", "add", "--quiet", "--detach", str(root), name)
        try:
            yield Tree(commit(root), root)
        finally:
            git(repository, "worktree", "remove", "--force", str(root))


def is_commit(name: str, repository: Path = ROOT) -> bool:
    words = ["rev-parse", "--verify", "--quiet", "--end-of-options", f"{name}^{{commit}}"]
    ended = subprocess.run(["git", "-C", str(repository), *words], stdout=subprocess.DEVNULL)
    return ended.returncode == 0


def git(repository: Path, *words: str) -> None:
    subprocess.run(["git", "-C", str(repository), *words], check=True)


def compared(
    mine: Side, its: Side, measures: Sequence[str], limit: float = LIMIT
) -> tuple[list[str], list[str]]:
    """Return the rows of the table, and the slower figures."""
    lines, failed = [], []
    rows = dict.fromkeys([*mine.times, *its.times])
    for figure in sorted(rows, key=lambda figure: MEASURES.index(figure.measure)):
        if figure.measure not in measures:
            continue
        cells = [figure.measure, f"`{figure.spec}`", figure.clock]
        cells += [_median(side.times.get(figure), figure.unit) for side in (mine, its)]
        if figure in mine.times and figure in its.times:
            median, low, high = paired(mine.times[figure], its.times[figure])
            cells += [f"{median:.3f}", f"{low:.3f} – {high:.3f}", verdict_of(low, high, limit)]
            if low > limit:
                name = f"{figure.measure} of {figure.spec}, {figure.clock} time"
                failed.append(f"{name}: lower bound {low:.3f}, at most {limit}")
        else:
            cells += ["", "", "no claim"]
        lines.append(table_row(*cells))
    return lines, failed


def verdict_of(low: float, high: float, limit: float) -> str:
    """Return the verdict as a word from the bounds of a ratio."""
    return "slower" if low > limit else "faster" if high < 1 else "holds"


def _median(times: list[float] | None, unit: str) -> str:
    return "not there" if times is None else f"{statistics.median(times):.3f} {unit}"


def works(mine: Side, its: Side) -> list[str]:
    """Return the results of both sides and whether they are equal."""
    lines = []
    for key in dict.fromkeys([*mine.results, *its.results]):
        results = [side.results.get(key, "not there") for side in (mine, its)]
        there = all(key in side.results for side in (mine, its))
        same = ("the same" if results[0] == results[1] else "another") if there else ""
        lines.append(table_row(key[0], f"`{key[1]}`", *results, same))
    return lines


def heading(trees: Sequence[Tree], rounds: int) -> list[str]:
    """Return the description of the figures, and the head of the table."""
    interval = "its two-sided 95 % interval by order statistics"
    if rounds < FEWEST:
        interval = f"the range of the {rounds}, too few for an interval of 95 %"
    names = (tree.name for tree in trees)
    return [
        *SCRIPT.method(rounds=rounds, interval=interval, steps=STEPS),
        *table_head("measure", "spec", "time", *names, "median ratio", "95 %", "verdict"),
    ]


def _results(trees: Sequence[Tree], mine: Side, its: Side) -> list[str]:
    head = table_head("measure", "spec", *(tree.name for tree in trees), "")
    return ["", "What either tree came to:", "", *head, *works(mine, its)]


def _rounds(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more; got {number}")
    return number


def _measures(text: str) -> tuple[str, ...]:
    measures = tuple(text.split(","))
    if unknown := [measure for measure in measures if measure not in MEASURES]:
        known = ", ".join(MEASURES)
        raise argparse.ArgumentTypeError(f"no measure {', '.join(unknown)}; known: {known}")
    return measures


def main() -> int:
    parser = SCRIPT.parser()
    parser.add_argument("commit", metavar="COMMIT", help="what git knows a commit by")
    parser.add_argument("--rounds", type=_rounds, default=12)
    parser.add_argument("--only", type=_measures, default=MEASURES, metavar=",".join(MEASURES))
    parser.add_argument(
        "--specs",
        nargs="+",
        default=TRAINED,
        choices=(*SPECS, "all"),
        metavar="NAME",
        help="whose steps; `--specs all` is every strategy",
    )
    args = parser.parse_args()
    if not is_commit(args.commit):
        parser.error(f"git knows no commit {args.commit}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # removes the worktree
    with checked_out(args.commit) as other:
        trees = [Tree(commit(), ROOT), other]
        head = SCRIPT.head(other=other.name)
        mine, its = in_turns(trees, [name for name in args.only if name in TAKEN], args.rounds)
        if "steps" in args.only:
            steps(trees, SPECS if "all" in args.specs else args.specs, args.rounds, (mine, its))
    lines, failed = compared(mine, its, args.only)
    page = [*head, *heading(trees, args.rounds), *lines, *_results(trees, mine, its)]
    return SCRIPT.conclude(page, failed, args)


if __name__ == "__main__":
    sys.exit(main())
