"""Does verification catch, localise and name faults, and is it silent where there is none?

Claim: each fault of tests/faults, planted in a running program, makes the whole protocol fail, and
the culprit is the state, the axis and the factor that were tampered with; but for those that lie
below what can be told from rounding. No strategy of the repository makes it fail by itself, over
seeds and layouts. How sure the culprits are (proven by trying a cure, fits, not explained) is
counted. What each gave is kept in --work as soon as it is done, so that a run that was broken off
goes on; --part 2/5 runs a fifth of them, and the page is made of all that lies in --work. Writes a
result only with --save.
The faults take some minutes on two cores, the strategies one hour.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence, Sized
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from _machine import commit, conclude, header, this_command

from ptrain.report.finding import Certainty
from ptrain.spec.axis import Axis
from ptrain.spec.spec import Spec
from tests.faults.alarms import (
    ACCUMULATED,
    ALL_SEEDS,
    LAYOUTS,
    MOST_RANKS,
    SEEDS,
    STEPS,
    as_written,
    calm,
    cases,
    seeds,
)
from tests.faults.catalogue import FAULTS
from tests.faults.fault import Fault
from tests.faults.trials import STEPS as TRIAL_STEPS
from tests.faults.trials import tried
from tests.ranks import RankError, Ranks

Result = dict[str, Any]
Results = dict[str, Result]
Key = tuple[str, str, int]  # strategy, layout, seed
Alarms = dict[Key, Result]
CLAIMED = ("caught", "localised", "named")
NONE = "no culprit"


def is_of(its: Fault, axis: str | None) -> bool:
    """Whether a fault is planted where the mesh has this axis; for experts' axis, in any model that
    has some. Every fault is where none is asked for."""
    has_experts = axis == Axis.EP and its.setting.model == "experts"
    return axis is None or axis in its.setting.mesh or has_experts


def axes_of(spec: Spec) -> list[str]:
    """The mesh's."""
    return [str(factor.axis) for factor in spec.factors]


class OneSize:
    """Pools of ranks of one size at a time: those that wait would take time from the others."""

    def __init__(self) -> None:
        self.size = 0
        self.ranks = Ranks()

    def of(self, size: int) -> Ranks:
        if size != self.size:
            self.ranks.close()
            self.ranks, self.size = Ranks(), size
        return self.ranks


def fault(ranks: OneSize, name: str) -> Result:
    """One fault before the protocol."""
    trial = tried(ranks.of(FAULTS[name].setting.world), name)
    return {
        "caught": trial.caught,
        "localised": trial.localised,
        "named": trial.named,
        "line": trial.line,
        "certainty": trial.certainty or NONE,
        "seconds": trial.seconds,
        "commit": commit(),
    }


def alarm(ranks: OneSize, strategy: str, layout: str, seed: int, work: Path) -> Result:
    """One strategy as it is."""
    size = as_written(strategy).spec.world_size
    result = calm(ranks.of(size), strategy, layout, seed, work / "references")
    return {
        "layout": result.layout,
        "line": result.line,
        "seconds": result.seconds,
        "commit": commit(),
    }


def kept(work: Path, key: str, run: Callable[[], Result]) -> Result | None:
    """What was done before, or is done now. Where a rank fails it is to be done again."""
    if (known := _known(work, key)) is not None:
        return known
    try:
        result = run()
    except RankError as error:
        print(key, error, flush=True)
        return None
    _file(work, key).write_text(json.dumps(result))
    print(key, result["line"] or "silent", f"{result['seconds']:.1f} s", flush=True)
    return result


def table_of_faults(results: Results) -> Iterator[str]:
    yield "| fault | planted in | caught | localised | named | how sure | culprit | s |"
    yield "|---|---|---|---|---|---|---|---|"
    for name, result in results.items():
        its = FAULTS[name]
        if its.undetectable:
            continue
        cells = [
            name,
            str(its.setting),
            *("yes" if result.get(key) else "**no**" for key in ("caught", "localised")),
            _named(name, result),
            result.get("certainty", ""),
            result["line"].replace("|", r"\|"),
            f"{result['seconds']:.1f}",
        ]
        yield f"| {' | '.join(cells)} |"


def _named(name: str, result: Result) -> str:
    if not result.get("named"):
        return "**no**"
    its = FAULTS[name]
    return "yes" if its.factor else "state and axis" if its.axis else "state"


def totals(results: Results, names: Collection[str] = FAULTS) -> str:
    own = [result for name, result in results.items() if not FAULTS[name].undetectable]
    caught, localised, named = (sum(bool(result.get(key)) for result in own) for key in CLAIMED)
    without = sum(not FAULTS[name].factor for name in results if not FAULTS[name].undetectable)
    return (
        f"Of {len(own)} faults {caught} are caught, {localised} localised, {named} named "
        f"({without} of these by state, axis and place alone: other arithmetic has no factor); "
        f"{len(results) - len(own)} beside them lie below the band{_left(results, len(names))}."
    )


def certainties(results: Results) -> str:
    """How sure the culprits of these faults are, by number; of what was kept by an earlier version
    of this file nothing is known."""
    own = [result for name, result in results.items() if not FAULTS[name].undetectable]
    counts = Counter(result.get("certainty", "kept without it") for result in own)
    order = [*map(str, Certainty), *(kind for kind in counts if kind not in set(Certainty))]
    listed = ", ".join(f"{counts[kind]} {kind}" for kind in order)
    return f"How sure the {len(own)} culprits are: {listed}."


def _left(done: Sized, wanted: int) -> str:
    left = wanted - len(done)
    return f" ({left} of {wanted} were not run)" if left else ""


def below_the_band(results: Results) -> Iterator[str]:
    for name, result in results.items():
        if why := FAULTS[name].undetectable:
            said = "the protocol holds" if not result.get("caught") else f"yet: {result['line']}"
            yield f"- {name} ({FAULTS[name].setting}): {why}. Here {said}."


def table_of_alarms(results: Alarms) -> Iterator[str]:
    yield "| strategy | layouts | runs | false alarms |"
    yield "|---|---|---|---|"
    for strategy in dict.fromkeys(strategy for strategy, _, _ in results):
        own = {key: result for key, result in results.items() if key[0] == strategy}
        layouts = dict.fromkeys(result.get("layout", key[1]) for key, result in own.items())
        alarms = [
            f"{key[1]}, seed {key[2]}: {its['line']}" for key, its in own.items() if its["line"]
        ]
        yield f"| {strategy} | {', '.join(layouts)} | {len(own)} | {'; '.join(alarms) or '0'} |"


def _seeds_text(layouts: Sequence[str], number: int) -> str:
    """Which seeds the strategies have in these layouts, of the first `number`."""
    with_all = [layout for layout in layouts if layout in ALL_SEEDS]
    rest = [layout for layout in layouts if layout not in ALL_SEEDS]
    several = f"seeds {SEEDS.start} to {number - 1}" if number > 1 else f"seed {SEEDS.start}"
    parts = (
        f"{' and '.join(with_all)} layout with {several}",
        f"{' and '.join(rest)} with seed {SEEDS.start}",
    )
    return ", in ".join(part for part, of in zip(parts, (with_all, rest), strict=True) if of)


def _which(axis: str | None) -> str:
    """Which strategies are run, and on what."""
    of_experts = (
        f"spec in specs/experts/ of at most {MOST_RANKS} ranks, with places and dropless, on a "
        "llama of 2 layers with 4 experts"
    )
    if axis == Axis.EP:
        return of_experts
    others = f"strategy in specs/strategies/{f' with {axis}' if axis else ''} on llama"
    return others if axis else f"{others}, and every {of_experts},"


def page(
    faults: Results,
    alarms: Alarms,
    wanted: int,
    names: Collection[str] = FAULTS,
    axis: str | None = None,
    layouts: Sequence[str] = LAYOUTS,
    number: int = len(SEEDS),
) -> list[str]:
    """Claims, tables, totals: of the faults `names`, and of strategies with this axis, in these
    layouts."""
    below = list(below_the_band(faults))
    every = [*faults.values(), *alarms.values()]
    commits = ", ".join(dict.fromkeys(result["commit"] for result in every))
    cried = sum(bool(result["line"]) for result in alarms.values())
    return [
        "Each fault is planted in a program on gloo ranks: in its batches, its wraps and their "
        "collectives, its optimizer, its hooks; never in the source. The model is llama or gpt "
        "with 2 layers, hidden 32, sequence 16. The whole protocol of `ptrain verify` runs on it, "
        f"with trajectories of {TRIAL_STEPS} steps, and stops at the first stage that fails. "
        "*Caught*: the verdict fails. *Localised*: the state and the first tensor or module that "
        "the culprit names are those that were tampered with. *Named*: so are the axis of the mesh "
        "and the factor; what they have to be is written beside each fault, in tests/faults.",
        "",
        f"Commits that these ran at: {commits}.",
        "",
        *table_of_faults(faults),
        "",
        totals(faults, names),
        "",
        certainties(faults),
        "",
        *(("## Below the band", "", *below, "") if below else ()),
        "## False alarms",
        "",
        f"Every {_which(axis)} with hidden 32, sequence 16 and {ACCUMULATED[0]} micro-batches a "
        f"rank ({ACCUMULATED[1]} where gradients do not outlive backward), where they are legal in "
        f"{_seeds_text(layouts, number)}: the same protocol, {STEPS} steps.",
        "",
        *table_of_alarms(alarms),
        "",
        f"{cried} false alarms in {len(alarms)} runs{_left(alarms, wanted)}.",
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="where results are kept meanwhile")
    parser.add_argument("--only", choices=("faults", "alarms", "page"))
    parser.add_argument("--axis", help="faults and strategies with this axis alone, e.g. cp")
    parser.add_argument("--part", type=_part, default=(0, 1), metavar="K/N", help="run every N-th")
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=LAYOUTS)
    parser.add_argument("--seeds", type=int, default=len(SEEDS), help="so many, from 0")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/")
    args = parser.parse_args()
    head = header("faults: planted, caught, localised and named", this_command())
    (args.work / "references").mkdir(mode=0o700, parents=True, exist_ok=True)
    ranks = OneSize()
    runs = [
        (strategy, layout, seed)
        for strategy, layout in cases()
        if layout in args.layouts
        and (args.axis is None or args.axis in axes_of(as_written(strategy).spec))
        for seed in seeds(layout)[: args.seeds]
    ]
    runs.sort(key=lambda key: (LAYOUTS.index(key[1]), key[2], as_written(key[0]).spec.world_size))
    names = [name for name, its in FAULTS.items() if is_of(its, args.axis)]
    place, count = args.part
    mine = {*names[place::count], *runs[place::count]}
    faults = {name: its for name in names if (its := _of_fault(ranks, name, args, name in mine))}
    alarms = {key: its for key in runs if (its := _of_strategy(ranks, key, args, key in mine))}
    ranks.ranks.close()
    return conclude(
        f"faults_{args.axis}" if args.axis else "faults",
        [head, *page(faults, alarms, len(runs), names, args.axis, args.layouts, args.seeds)],
        failed=[*_failed(faults, alarms, runs, names)],
        not_covered="faults of other models, of NCCL and of several machines; other batches than "
        "these; and strategies at their own size (benchmarks/verify.py).",
        is_saved=args.save,
    )


def _part(text: str) -> tuple[int, int]:
    """Read K/N, from 1/N to N/N."""
    number, _, count = text.partition("/")
    if not (number.isdigit() and count.isdigit() and 1 <= int(number) <= int(count)):
        raise argparse.ArgumentTypeError(f"got {text}: write K/N with K from 1 to N, as 2/5")
    return int(number) - 1, int(count)


def _of_fault(ranks: OneSize, name: str, args: argparse.Namespace, is_asked: bool) -> Result | None:
    if args.only in (None, "faults") and is_asked:
        return kept(args.work, name, lambda: fault(ranks, name))
    return _known(args.work, name)


def _of_strategy(
    ranks: OneSize, key: Key, args: argparse.Namespace, is_asked: bool
) -> Result | None:
    text = " ".join(map(str, key))
    if args.only in (None, "alarms") and is_asked:
        return kept(args.work, text, lambda: alarm(ranks, *key, args.work))
    return _known(args.work, text)


def _known(work: Path, key: str) -> Result | None:
    file = _file(work, key)
    return json.loads(file.read_text()) if file.exists() else None


def _file(work: Path, key: str) -> Path:
    return work / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.json"


def _failed(
    faults: Results, alarms: Alarms, runs: Sequence[Key], names: Collection[str] = FAULTS
) -> Iterator[str]:
    """What was not run shows nothing: it fails the claim too."""
    for name in names:
        fault, result = FAULTS[name], faults.get(name)
        if result is None:
            yield f"{name}: was not run"
        elif not fault.undetectable and not all(result.get(key) for key in CLAIMED):
            lacking = [key for key in CLAIMED if not result.get(key)]
            yield f"{name}: not {', '.join(lacking)}: {result['line']}"
    for key in runs:
        result = alarms.get(key)
        if result is None:
            yield f"{' '.join(map(str, key))}: was not run"
        elif result["line"]:
            yield f"{' '.join(map(str, key))}: {result['line']}"


if __name__ == "__main__":
    sys.exit(main())
