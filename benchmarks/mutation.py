"""The mutation score of the pure half: the share of changes that the default tests detect."""

from __future__ import annotations

import random
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

from _machine import version
from _script import Script, table_head, table_row

if TYPE_CHECKING:
    from _mutant import Mutant

AT_LEAST = 0.85
PACKAGES = {
    "spec": ("ptrain/spec/*.py",),
    "algebra": ("ptrain/algebra/*.py",),
    "derivation": ("ptrain/derivation/*.py",),
    "axes": ("ptrain/axes/*/rules.py", "ptrain/axes/*/cost.py"),
    "life": (
        *(f"ptrain/axes/data/{name}.py" for name in ("cuts", "theta")),
        *("ptrain/axes/data/update.py", "ptrain/axes/data/units.py"),
        *("ptrain/optimizers/update.py", "ptrain/runtime/ghost.py"),
    ),
}
CLAIMED = ("spec", "algebra", "derivation", "life")
# Of --sample: what is in functions, and what is outside of them, which takes a process each.
SHARES = {
    "spec": (0.36, 0.04),
    "algebra": (0.18, 0.01),
    "derivation": (0.36, 0.01),
    "axes": (0.18, 0.02),
    "life": (0.2, 0.01),
}
SCRIPT = Script("mutation", claimed=", ".join(CLAIMED), at_least=AT_LEAST)
_TOOLS = ("mutmut", "libcst", "coverage", "pytest", "hypothesis")


@dataclass(kw_only=True)
class Found:
    """The results of a package's mutants."""

    every: int  # mutants of the package
    sampled: list[Mutant]
    verdicts: dict[str, dict[str, Any]] = field(default_factory=dict)  # by the mutant's name

    def verdict(self, mutant: Mutant) -> str:
        return str(self.verdicts.get(mutant.name, {"verdict": "unreached"})["verdict"])

    def of(self, *words: str) -> list[Mutant]:
        return [each for each in self.sampled if self.verdict(each) in words]

    def lives(self, mutant: Mutant) -> bool:
        return self.verdict(mutant) in ("survived", "unreached")

    @property
    def killed(self) -> int:
        return len(self.of("killed", "timeout"))

    @property
    def alive(self) -> list[Mutant]:
        return [each for each in self.sampled if self.verdict(each) not in ("killed", "timeout")]

    @property
    def score(self) -> float:
        return self.killed / len(self.sampled)


Strata = Sequence[Found]  # a package's, inside of functions and outside of them


def wilson(share: float, of: float) -> tuple[float, float]:
    """Return the 95 % interval of a share (E. B. Wilson, 1927)."""
    z = NormalDist().inv_cdf(0.975)
    middle = share + z * z / (2 * of)
    half = z * (share * (1 - share) / of + z * z / (4 * of * of)) ** 0.5
    return (middle - half) / (1 + z * z / of), (middle + half) / (1 + z * z / of)


def drawn(tree: Path, package: str, *, inside: bool, number: int, seed: int) -> Found:
    """Return a random sample of a package's mutants inside of functions, or outside, each with its
    source."""
    from _mutant import is_sound
    from _mutants import mutants, places

    files = sorted(str(p.relative_to(tree)) for glob in PACKAGES[package] for p in tree.glob(glob))
    every = [
        (file, number)
        for file in files
        for number, function in enumerate(places(tree, file))
        if bool(function) is inside
    ]
    random.Random(f"{seed} {package}").shuffle(every)  # so that a larger sample holds a smaller one
    wanted: dict[str, set[int]] = {}
    for file, place in every[:number]:
        wanted.setdefault(file, set()).add(place)
    sampled = [
        each
        for file in sorted(wanted)
        for each in mutants(tree, file, wanted[file])
        if is_sound(each)
    ]
    return Found(every=len(every), sampled=sampled)


_COLUMNS = (
    "package", "in functions", "sampled", "killed", "outside", "sampled", "killed",
    "of the killed out of time", "of the alive reached by no test", "score", "95 % interval",
    "verdict",
)  # fmt: skip


def table(found: Mapping[str, Strata]) -> Iterator[str]:
    """Yield a row per package."""
    yield from table_head(*_COLUMNS)
    for name, strata in found.items():
        low, high = interval(strata)
        verdict = "holds" if score(strata) >= AT_LEAST else "fails"
        cells = (
            name,
            *(cell for each in strata for cell in (each.every, len(each.sampled), each.killed)),
            *(sum(len(each.of(word)) for each in strata) for word in ("timeout", "unreached")),
            f"{score(strata):.1%}",
            f"{low:.1%} – {high:.1%}",
            verdict if name in CLAIMED else "no claim",
        )
        yield table_row(*cells)


def score(strata: Strata) -> float:
    """Return the score over all strata, weighted by their numbers of mutants."""
    every = sum(each.every for each in strata)
    return sum(each.every / every * each.score for each in strata)


def interval(strata: Strata) -> tuple[float, float]:
    """Return Wilson's interval for the equivalent number of draws from all mutants."""
    every, share = sum(each.every for each in strata), score(strata)
    variance = sum(
        (each.every / every) ** 2 * each.score * (1 - each.score) / len(each.sampled)
        for each in strata
    )
    drawn_alike = sum(len(each.sampled) for each in strata)
    return wilson(share, share * (1 - share) / variance if variance else drawn_alike)


def overall(found: Mapping[str, Strata]) -> str:
    """Return the score of all packages."""
    strata = [each for package in found.values() for each in package]
    low, high = interval(strata)
    return (
        f"Of all {sum(each.every for each in strata):,} mutants of these packages together "
        f"{score(strata):.1%} (95 % interval {low:.1%} – {high:.1%}): of the "
        f"{sum(len(each.sampled) for each in strata)} that were drawn "
        f"{sum(each.killed for each in strata)} are killed."
    )


def survivors(tree: Path, found: Mapping[str, Strata]) -> Iterator[str]:
    """Yield each surviving change, and whether any test reaches it."""
    from _mutant import changed_lines

    yield from table_head("where", "function", "the code", "the mutant", "")
    for each in (each for strata in found.values() for each in strata):
        for mutant in each.alive:
            before, after = (code(text) for text in changed_lines(tree, mutant))
            said = "no test reaches it" if each.verdict(mutant) == "unreached" else ""
            place = f"{mutant.file.removeprefix('ptrain/')}:{mutant.line}"
            yield table_row(place, mutant.function or "at import", before, after, said)


def code(text: str) -> str:
    """Return a line of code as a table cell of at most 160 characters."""
    shown = text if len(text) <= 160 else text[:157] + "..."
    return f"`` {shown} ``".replace("|", "\\|") if shown else "(gone)"


def main() -> int:
    from _mutation_bench import SUITE, Bench
    from _mutation_runner import SPARE, TIMES

    parser = SCRIPT.parser()
    parser.add_argument("--sample", type=int, default=700, help="mutants, over the packages")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--package", action="append", choices=PACKAGES, help="default: the claimed")
    parser.add_argument("--stages", nargs="*", choices=SUITE.stages, default=[*SUITE.stages])
    parser.add_argument("--work", type=Path, help="a folder to keep, and to go on in")
    args = parser.parse_args()
    bench = Bench((args.work or Path(tempfile.mkdtemp())).resolve())
    found = {
        name: [
            drawn(
                bench.tree,
                name,
                inside=inside,
                number=max(1, round(args.sample * share)),
                seed=args.seed,
            )
            for inside, share in zip((True, False), SHARES[name], strict=True)
        ]
        for name in args.package or CLAIMED
    }
    for stage in args.stages:
        bench.judge([each for strata in found.values() for each in strata], stage)
    first, then = (" ".join(files) for files in SUITE.stages.values())
    tools = ", ".join(f"{name} {version(name)}" for name in _TOOLS)
    method = SCRIPT.method(suite=SUITE, first=first, then=then, times=TIMES, spare=SPARE)
    lines = [
        *SCRIPT.head(),
        f"Mutants of {bench.commit} with {tools}; seed {args.seed}.",
        "",
        *method,
        *table(found),
        "",
        overall(found),
        "",
        "Alive:",
        "",
        *survivors(bench.tree, found),
    ]
    failed = [
        f"{name}: {score(strata):.1%} are killed"
        for name, strata in found.items()
        if name in CLAIMED and score(strata) < AT_LEAST
    ]
    return SCRIPT.conclude(lines, failed, args)


if __name__ == "__main__":
    sys.exit(main())
