"""Predicted seconds of a step beside what others published of theirs, row by row; and what the rows
that may be used for building say of a cluster's factors and of the interval of a prediction."""

from __future__ import annotations

import math
import re
import statistics
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path

import yaml
from _machine import ROOT
from _script import Script, table_head, table_row
from _steps import spearman

from ptrain.cost import Phase, Spent, StepTime, TimeKey, TimeRow
from ptrain.derivation.estimate import Derivation, derive, predict_throughput, step_family
from ptrain.errors import PtrainError
from ptrain.spec.load import load

SCRIPT = Script("published_seconds")
FOLDER = Path(__file__).with_name("published")
INTERVALS = ROOT / "specs" / "step_times.yaml"
CPU_PAGE = ROOT / "benchmarks" / "results" / "step_seconds_cpu2_2026-11-28_0533.md"
ALIKE, RANKED = 0.12, 0.95
SAME = ("eager", "compiled")  # what a row of torch's runtime ran, where its numbers are bf16
OUTSIDE = 20  # of so many rows one is below the interval, and one above
FREE = "cluster.stragglers=0"


@dataclass(frozen=True)
class Row:
    """A published step: its file's `use` and `runtime`, `seconds` or `tokens` per second and GPU,
    and the words that load the spec that is predicted."""

    family: str
    device: str
    source: str
    use: str
    runtime: str
    name: str
    kind: str  # eager, or how it ran otherwise
    words: tuple[str, ...]
    tokens: float | None = None
    seconds: float | None = None
    memory: str = ""
    remark: str = ""  # about its family

    @property
    def is_same(self) -> bool:
        """Return True if it ran torch's components in bf16, like ptrain."""
        return self.runtime == "torch" and self.kind in SAME


def published() -> Iterator[Row]:
    """Yield the rows of benchmarks/published."""
    for path in sorted(FOLDER.glob("*.yaml")):
        file = yaml.safe_load(path.read_text(encoding="utf-8"))
        for family in file["families"]:
            for row in family["rows"]:
                words = (*family["words"], *row["words"])
                fields = {key: family.get(key, "") for key in ("family", "device", "remark")}
                yield Row(
                    **{key: file[key] for key in ("source", "use", "runtime")},
                    **fields | row | {"words": words},
                )


@dataclass(frozen=True)
class Judged:
    """A row with its derivation, or None with the reason."""

    row: Row
    derivation: Derivation | None
    why: str = ""

    @property
    def step(self) -> StepTime | None:
        return self.derivation.exact.step if self.derivation else None

    @cached_property
    def tokens(self) -> int:
        """Return the tokens of a step per GPU."""
        assert self.derivation is not None
        spec = self.derivation.spec
        return spec.batch.global_samples * spec.batch.sequence // spec.world_size

    @property
    def published(self) -> float:
        """Return the published tokens per second and GPU."""
        return self.row.tokens or self.tokens / (self.row.seconds or math.inf)

    @property
    def ratio(self) -> float:
        """Return the published seconds of a step divided by the predicted ones."""
        assert self.step is not None
        return self.tokens / self.published / self.step.seconds

    @property
    def device(self) -> str:
        """Return the device that ran the row, without its power limit."""
        return self.row.device.partition(" ")[0]

    @property
    def flops_and_memory(self) -> tuple[float, int]:
        """Return the peak and the memory of a device of the spec."""
        assert self.derivation is not None and self.derivation.spec.cluster is not None
        cluster = self.derivation.spec.cluster
        return cluster.flops, cluster.device_memory

    @property
    def off(self) -> float:
        """Return how much longer the predicted step is."""
        return 1 / self.ratio - 1

    @property
    def mfu(self) -> float:
        """Return the published share of the device's peak, attention counted in full."""
        assert self.derivation is not None
        seconds = self.tokens / self.published
        step = StepTime((TimeRow(key=TimeKey(Spent.COMPUTE, Phase.FORWARD), seconds=seconds),))
        known = predict_throughput(self.derivation.spec, self.derivation.facts, step)
        return (known and known.mfu_full) or 0.0


def judged(row: Row, *more: str) -> Judged:
    """Predict a row; `more` overrides its words."""
    try:
        derivation = derive(load(row.words[0], (*row.words[1:], *more)).spec)
    except PtrainError as error:  # a row that cannot be said is one of the page's rows
        return Judged(row, None, str(error).splitlines()[0])
    why = derivation.exact.undefined.get("step_seconds", "")
    return Judged(row, None if why else derivation, why)


# What the rows say of factors: only those of `use: build`.


def straggling(rows: Iterable[Row]) -> list[float]:
    """Return of the jobs that ran on several numbers of GPUs, from one to the next, how much longer
    a step takes for each doubling than predicted without stragglers."""
    jobs: dict[object, list[tuple[int, float]]] = {}
    for row in rows:
        if row.runtime == "torch" and (known := judged(row, FREE)).derivation:
            spec = known.derivation.spec
            key = row.source, row.kind, spec.model, spec.batch.micro, spec.batch.sequence
            jobs.setdefault((*key, spec.batch.accumulate), []).append(
                (spec.world_size, known.ratio)
            )
    found = []
    for sizes in map(sorted, jobs.values()):
        for (few, before), (many, after) in pairwise(sizes):
            if many > few:
                found.append((after / before) ** (1 / math.log2(many / few)) - 1)
    return found


def print_factors() -> int:
    """Print what the rows for building say of a cluster's factors."""
    rows = [row for row in published() if row.use == "build"]
    doublings = straggling(rows)
    print(
        f"cluster.stragglers: {statistics.median(doublings):.4f}, the median of {len(doublings)} "
        f"pairs ({min(doublings):+.4f} to {max(doublings):+.4f})"
    )
    return 0


def step_times(rows: Sequence[Judged]) -> str:
    """Return specs/step_times.yaml: by family the interval in which published steps lie, as parts
    of those predicted, and the best MFU of the collected steps by the device's peak."""
    lines = [
        "# What published steps took, as multiples of the predicted time: of each family all but",
        f"# one row in {OUTSIDE} are above `low`, and all but one below `high`. Written by",
        "# `benchmarks/published_seconds.py --write` from the rows of `use: build` in",
        "# benchmarks/published and, for CPUs, from the page of step_seconds.py. A row of another",
        "# runtime counts in both directions. `devices`: those that ran the rows, by the peak and",
        "# the memory of the spec that is predicted.",
        "intervals:",
    ]
    families: dict[str, list[Judged]] = {}
    for row in rows:
        is_counted = row.row.is_same or row.row.runtime == "other"
        family = step_family(row.derivation.spec) if row.derivation else ""
        if row.row.use == "build" and family and is_counted:
            families.setdefault(family, []).append(row)
    for family, chosen in families.items():
        ratios = [row.ratio for row in chosen]
        others = [row.ratio for row in chosen if not row.row.is_same]
        ratios += [1 / ratio for ratio in others]  # the direction of the error is unknown
        devices = {
            row.device: row.flops_and_memory for row in sorted(chosen, key=lambda one: one.device)
        }
        kind = "16-bit" if others else "bf16"
        steps = f"{len(chosen)} published {kind} steps of dense models on {' and '.join(devices)}"
        lines += [
            _interval_line(family, ratios, len(chosen), steps),
            "    devices:",
            *(
                f"      {device}: {{flops: {flops:.4g}, memory: {memory}}}"
                for device, (flops, memory) in devices.items()
            ),
        ]
    page = CPU_PAGE.read_text(encoding="utf-8")
    ratios = [
        float(measured) / float(predicted)
        for predicted, measured in re.findall(
            r"^\| \w+ \| \d+ \| [^|]+ \| ([\d.]+) \| ([\d.]+) \|", page, re.MULTILINE
        )
    ]
    steps = f"{len(ratios)} trainings of this project on CPUs"
    lines += [
        _interval_line("CPU", ratios, len(ratios), steps),
        "# The best share of a device's peak in bf16 of the collected steps of PyTorch's runtime,",
        "# whatever their `use`, by the operations per second of the peak, with attention counted",
        "# in full.",
        "best_mfu:",
    ]
    best: dict[float, Judged] = {}
    for row in rows:
        if row.derivation and row.row.is_same and row.derivation.spec.cluster:
            flops = row.derivation.spec.cluster.flops
            best[flops] = max(best.get(flops, row), row, key=lambda one: one.mfu)
    for flops, row in sorted(best.items()):
        said = f"{row.row.source.partition(',')[0]}: {row.row.name}"
        fields = f"mfu: {row.mfu:.3f}, device: {row.device}, source: '{said}'"
        lines.append(f"  {flops:.4g}: {{{fields}}}")
    return "\n".join(lines) + "\n"


def _interval_line(family: str, ratios: list[float], number: int, steps: str) -> str:
    """Return a family's lines of specs/step_times.yaml, without its devices."""
    ratios = sorted(ratios)
    outside = len(ratios) // OUTSIDE
    low, high = ratios[outside], ratios[-1 - outside]
    head = f"  {family}:\n    low: {low:.2f}\n    high: {high:.2f}"
    return f"{head}\n    rows: {number}\n    steps: {steps}"


def held_out(rows: Sequence[Judged]) -> Iterator[str]:
    """Yield, by family, how many of the rows for scoring lie within the interval."""
    inside: dict[str, list[bool]] = {}
    for row in rows:
        step = row.step
        if row.row.use == "score" and row.row.is_same and row.derivation and step and step.interval:
            low, high = step.interval
            family = step_family(row.derivation.spec)
            inside.setdefault(family, []).append(low <= step.seconds * row.ratio <= high)
    for family, found in inside.items():
        yield f"{family}: {sum(found)} of {len(found)} scored rows lie within the interval."


def table(rows: Sequence[Judged]) -> Iterator[str]:
    """Yield the lines of every row, by family."""
    groups: dict[tuple[str, str], list[Judged]] = {}
    for row in rows:
        groups.setdefault((row.row.family, row.row.source), []).append(row)
    for (family, source), group in groups.items():
        yield from ("", f"## {family} ({source}; {group[0].row.use})", "")
        yield from table_head("row", "ran", "published tok/s/GPU", "predicted", "seconds off")
        for known in group:
            if known.step is None:
                cells = [f"{known.row.tokens or 0:,.0f}", "–", known.why]
            else:
                predicted = known.tokens / known.step.seconds
                cells = [f"{known.published:,.0f}", f"{predicted:,.0f}", f"{known.off:+.1%}"]
            yield table_row(known.row.name, known.row.kind, *cells)
        yield from ("", group[0].row.remark) if group[0].row.remark else ()


def summary(rows: Sequence[Judged], use: str) -> tuple[list[str], list[str]]:
    """Return the lines of the summary of rows of one use, and what of the claim fails."""
    known = [row for row in rows if row.row.use == use and row.step]
    same = [row for row in known if row.row.is_same]
    lines, failed = [], list[str]()
    for name, chosen in (
        ("eager and compiled", same),
        *((k, [r for r in same if r.row.kind == k]) for k in SAME),
    ):
        if chosen:
            median = statistics.median(abs(row.off) for row in chosen)
            kind = name.capitalize()
            lines.append(
                f"{kind} rows of torch, {use}: {len(chosen)}, median of |seconds off| {median:.1%}."
            )
            if name not in SAME and median > ALIKE:
                failed.append(f"{use}: the median of |seconds off| is {median:.1%}")
    names = ("use", "family", "ran", "rows", "median of seconds off", "rank correlation")
    lines += ["", *table_head(*names)]
    groups: dict[tuple[str, str], list[Judged]] = {}
    for row in known:
        groups.setdefault((row.row.family, row.row.kind), []).append(row)
    for (family, kind), group in groups.items():
        middle = statistics.median(row.off for row in group)
        predicted = [row.tokens / row.step.seconds for row in group if row.step]
        ranked = spearman([row.published for row in group], predicted) if len(group) > 2 else None
        shown = "–" if ranked is None else f"{ranked:.3f}"
        lines.append(table_row(use, family, kind, len(group), f"{middle:+.1%}", shown))
        if ranked is not None and ranked < RANKED:
            failed.append(f"{use}: {family}, {kind}: the order's rank correlation is {ranked:.3f}")
    return [*lines, ""], failed


def main(arguments: Sequence[str]) -> int:
    parser = SCRIPT.parser()
    parser.add_argument("--use", choices=("build", "score"), help="only rows of this use")
    parser.add_argument("--factors", action="store_true", help="print what rows say of factors")
    parser.add_argument("--write", action="store_true", help="write specs/step_times.yaml")
    options = parser.parse_args(arguments)
    if options.factors:
        return print_factors()
    head = SCRIPT.head()
    rows = [judged(row) for row in published() if options.use in (None, row.use)]
    failed = [f"{row.row.name}: not predicted: {row.why}" for row in rows if row.step is None]
    lines = []
    for use in ("score", "build"):
        more, wrong = summary(rows, use)
        lines += more
        failed += wrong
    lines += held_out(rows)
    if options.write:
        INTERVALS.write_text(step_times(rows), encoding="utf-8")
    elif options.use is None and INTERVALS.read_text(encoding="utf-8") != step_times(rows):
        failed.append("specs/step_times.yaml is out of date: run this with --write")
    return SCRIPT.conclude([*head, *lines, *table(rows)], failed, options)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
