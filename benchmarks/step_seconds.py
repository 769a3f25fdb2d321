"""Seconds of a step, predicted from a machine's rates beside those that trainings take on it."""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from operator import attrgetter, itemgetter
from pathlib import Path

from _machine import ROOT, environment
from _pace import Machine
from _script import Script, table_head, table_row
from _steps import spearman

from ptrain.algebra.legality import check, find_unsupported
from ptrain.cli.predict import load_facts
from ptrain.derivation.estimate import derive
from ptrain.errors import PtrainError
from ptrain.spec.load import load

SCRIPT = Script("step_seconds")
MEDIAN, WORST, RANKED, BEST = 0.10, 0.25, 0.9, 0.05  # bounds of the claim
WARM_UP, STEPS = 4, 10  # the meters look at one of the first steps
SECONDS = 600  # of a training
REPEATED = "zero3"
# How far the pace of products and of memory may be from the beginning's.
CALM, TRIES = 0.25, 2
_MEASURED = ("measured", "lower", "upper", "apart")
AGAIN = 2  # times both of two that may be the best are run again

# vocabulary of bytes; heads that four ranks of tp divide
MODELS = {
    "1m": "{family: llama, layers: 4, hidden: 128, heads: 4, kv_heads: 4, ffn: 352, vocab: 260}",
    "10m": "{family: llama, layers: 6, hidden: 384, heads: 8, kv_heads: 4, ffn: 1024, vocab: 260}",
    "50m": "{family: llama, layers: 8, hidden: 704, heads: 8, kv_heads: 4, ffn: 1920, vocab: 260}",
}
SAMPLES = {"1m": 16, "10m": 16, "50m": 8}  # of a batch, an eighth of them a micro-batch
STRATEGIES = tuple(sorted(path.stem for path in (ROOT / "specs" / "strategies").glob("*.yaml")))
# Products of axes and of what they hold, beside the named ones.
PRODUCTS: dict[str, tuple[str, ...]] = {
    "tp x zero1": ("tp-zero3", "placement.dp_shard=zero1"),
    "tp x zero2": ("tp-zero3", "placement.dp_shard=zero2"),
    "tp-sp x zero3": ("tp-zero3", "placement.tp=tp-sp"),
    "pp x zero1": ("pp-zero3", "placement.dp_shard=zero1"),
    "pp-gpipe x zero3": ("pp-zero3", "pipeline.schedule=gpipe"),
    "pp x tp": ("pp-1f1b", "mesh={pp: 2, tp: 2}", "placement={pp: pp-1f1b, tp: tp}"),
    "zero3, recomputed": ("zero3", "activations=M"),
    "tp, recomputed": ("tp", "activations=M"),
    "zero3, by model": ("zero3", "unit=model"),
    "zero2, accumulated": ("zero2", "batch.micro=1"),
    "ddp, bf16": ("ddp", "precision.layout=bf16"),
    "hsdp x zero1": ("hsdp", "placement={dp_replicate: ddp, dp_shard: zero1}"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A training: its name, its arguments, its size and its ranks."""

    name: str
    model: str
    ranks: int
    words: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """Seconds of its step: `predicted`, the median `measured`, and the quartiles of that; `apart`:
    how far the machine's pace was from the beginning's, at most."""

    case: Case
    predicted: float
    measured: float
    lower: float
    upper: float
    apart: float | None = None  # nobody looked

    @property
    def off(self) -> float:
        return self.predicted / self.measured - 1


def cases(models: Sequence[str], ranks: Sequence[int], names: Sequence[str]) -> Iterator[Case]:
    """Yield the trainings whose mesh has this many ranks, or can be extended to it along one
    axis."""
    specs = {name: (name,) for name in STRATEGIES} | PRODUCTS
    for model in models:
        for count in ranks:
            for name, words in specs.items():
                if names and name not in names:
                    continue
                full = (*words, f"model={MODELS[model]}", *_batch(words, model))
                if (meshed := _of_ranks(full, count, SAMPLES[model])) is not None:
                    yield Case(name=name, model=model, ranks=count, words=meshed)


def _batch(words: Sequence[str], model: str) -> Iterator[str]:
    """Return the batch of its size, unless the product sets one."""
    samples = SAMPLES[model]
    yield f"batch={{global: {samples}, micro: {samples // 8}, sequence: 128}}"
    yield from (word for word in words if word.startswith("batch."))


def _of_ranks(words: tuple[str, ...], count: int, samples: int) -> tuple[str, ...] | None:
    """Return the arguments of a legal spec with this many ranks: with an extended axis, or one
    micro-batch."""
    axes = load(words[0]).spec.factors
    longer = [(f"mesh.{axes[0].axis}={count}",)] if len(axes) == 1 else []
    once = [(f"batch.micro={samples // count}", "batch.accumulate=1")]
    for more in ((), *longer, *once, *(a + b for a in longer for b in once)):
        with suppress(PtrainError):
            spec = load(words[0], [*words[1:], *more]).spec
            if spec.world_size == count and not check(spec) and not find_unsupported(spec):
                return (*words, *more)
    return None


def predicted(case: Case, cluster: str) -> float | None:
    """Return the seconds that a spec's step is predicted to take; of what no table tells, as over
    cp, a trace tells which operators run."""
    spec = load(case.words[0], [*case.words[1:], f"cluster.preset={cluster}"]).spec
    step = derive(spec, load_facts(spec, allow_import=False)).exact.step
    return None if step is None else step.seconds


def measured(case: Case) -> list[float]:
    """Train it; return the seconds of its steps without the first ones."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        words = [sys.executable, "-m", "ptrain", "train", *case.words, f"train.steps={STEPS}"]
        ended = subprocess.run(
            words,
            cwd=folder,
            env=environment(ROOT),
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
        if ended.returncode:
            raise RuntimeError(f"{case.name}: {ended.stderr.strip().splitlines()[-1]}")
        lines = (Path(folder) / "runs" / "latest" / "metrics.jsonl").read_text().splitlines()
    return [row["seconds"] for row in map(json.loads, lines) if "seconds" in row][WARM_UP:]


class Trainings:
    """Trainings on a machine whose pace is looked at between them."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.beginning = self.before = machine.look()

    def timed(self, case: Case, seconds: float) -> Timed:
        """Run a training beside its prediction; of several tries that with the nearest pace."""
        tries: list[tuple[float, Timed]] = []
        while len(tries) < TRIES and not any(apart <= CALM for apart, _ in tries):
            lower, median, upper = statistics.quantiles(measured(case), n=4)
            after = self.machine.look()
            apart = max(pace.apart(self.beginning) for pace in (self.before, after))
            self.before = after
            row = Timed(
                case=case,
                predicted=seconds,
                measured=median,
                lower=lower,
                upper=upper,
                apart=apart,
            )
            tries.append((apart, row))
        return min(tries, key=itemgetter(0))[1]

    def in_turns(self, rows: Sequence[Timed]) -> list[Timed]:
        """Run these again, in turns; return them with the medians of all their trainings."""
        seconds = [[row.measured] for row in rows]
        for _ in range(AGAIN):
            for row, known in zip(rows, seconds, strict=True):
                known.append(self.timed(row.case, row.predicted).measured)
        return [
            replace(row, measured=statistics.median(known))
            for row, known in zip(rows, seconds, strict=True)
        ]


def rank_correlation(rows: Sequence[Timed]) -> float:
    """Return Spearman's rank correlation of predicted and measured seconds."""
    return spearman([row.predicted for row in rows], [row.measured for row in rows])


def choices(
    rows: Sequence[Timed], in_turns: Callable[[Sequence[Timed]], list[Timed]]
) -> Iterator[tuple[str, Timed, Timed]]:
    """Yield of each size and number of ranks the predicted best and the measured best."""
    ordered = sorted(rows, key=lambda row: (row.case.model, row.case.ranks))
    for (model, ranks), group in groupby(ordered, lambda row: (row.case.model, row.case.ranks)):
        of_size = list(group)
        both = [min(of_size, key=attrgetter(name)) for name in ("predicted", "measured")]
        if both[0].case != both[1].case:
            both = in_turns(both)
        yield f"{model} on {ranks}", *both


def table(rows: Sequence[Timed]) -> Iterator[str]:
    """Yield a row for each training."""
    figures = ("predicted s", "measured s", "quartiles", "off", "pace")
    yield from table_head("model", "ranks", "spec", *figures)
    for row in rows:
        case = row.case
        seconds = (f"{row.predicted:.4f}", f"{row.measured:.4f}")
        quartiles = f"{row.lower:.4f} – {row.upper:.4f}"
        cells = (case.model, case.ranks, case.name, *seconds, quartiles)
        yield table_row(*cells, f"{row.off:+.1%}", _share(row.apart))


def _share(apart: float | None) -> str:
    return "–" if apart is None else f"{apart:.0%}"


def judged(
    rows: Sequence[Timed], spread: float, bests: Sequence[tuple[str, Timed, Timed]]
) -> tuple[list[str], list[str]]:
    """Return the lines of the verdict, and what of the claim fails."""
    errors = [abs(row.off) for row in rows]
    median, worst, allowed = statistics.median(errors), max(errors), max(WORST, 2 * spread)
    ranked = rank_correlation(rows)
    looked_at = [row.apart for row in rows if row.apart is not None]
    busy = sum(apart > CALM for apart in looked_at)
    lines = [
        "",
        f"{busy} of {len(looked_at)} ran while the machine's pace was more than {CALM:.0%} from "
        "that of the beginning",
        "",
        f"{len(rows)} trainings: median of |off| {median:.1%}, largest {worst:.1%} (allowed "
        f"{allowed:.1%}; {REPEATED}, run twice, {spread:.1%} apart), rank correlation {ranked:.3f}",
        "",
        *table_head("", "predicted best", "measured best", "the first takes more by"),
    ]
    failed = []
    if median > MEDIAN:
        failed.append(f"the median is {median:.1%}, more than {MEDIAN:.0%}")
    if worst > allowed:
        failed.append(f"the largest is {worst:.1%}, more than {allowed:.1%}")
    if ranked < RANKED:
        failed.append(f"the rank correlation is {ranked:.3f}, less than {RANKED}")
    for size, best, fastest in bests:
        loss = best.measured / fastest.measured - 1
        lines.append(table_row(size, best.case.name, fastest.case.name, f"{loss:.1%}"))
        if loss > BEST:
            failed.append(f"{size}: {best.case.name} takes {loss:.1%} more than the best")
    return lines, failed


def main(arguments: Sequence[str]) -> int:
    parser = SCRIPT.parser()
    parser.add_argument("cluster", metavar="CLUSTER", help="a file of `ptrain calibrate`")
    parser.add_argument("--models", nargs="+", choices=tuple(MODELS), default=tuple(MODELS))
    parser.add_argument("--ranks", nargs="+", type=int, default=(2, 4))
    parser.add_argument("--specs", nargs="+", default=(), metavar="NAME")
    parser.add_argument("--kept", type=Path, help="a file of measured seconds, which is added to")
    parser.add_argument(
        "--kept-only", action="store_true", help="run none but those that are run again"
    )
    options = parser.parse_args(arguments)
    head = SCRIPT.head()
    cluster = str(Path(options.cluster).resolve())
    kept = json.loads(options.kept.read_text()) if options.kept and options.kept.exists() else []
    by_words = {tuple(row["words"]): row for row in kept}
    rows, unpredicted, left_out = [], [], 0
    with closing(Machine()) as machine:
        trainings = Trainings(machine)
        for case in cases(options.models, options.ranks, options.specs):
            if options.kept_only and case.words not in by_words:
                left_out += 1
                continue
            seconds = predicted(case, cluster)
            if seconds is None:
                unpredicted.append(f"{case.model} on {case.ranks}, {case.name}")
                continue
            if case.words in by_words:
                known = by_words[case.words]
                figures = {name: known[name] for name in _MEASURED if name in known}
                row = Timed(case=case, predicted=seconds, **figures)
            else:
                row = trainings.timed(case, seconds)
                kept.append({"words": case.words, **asdict(row)})
            rows.append(row)
            print(
                f"{case.model} {case.ranks} {case.name}: {row.predicted:.4f} {row.measured:.4f} "
                f"{_share(row.apart)}",
                flush=True,
            )
            if options.kept:
                options.kept.write_text(json.dumps(kept, indent=1))
        repeated = [row for row in rows if row.case.name == REPEATED]
        again = [trainings.timed(row.case, row.predicted) for row in repeated]
        bests = list(choices(rows, trainings.in_turns))
    spreads = [abs(b.measured / a.measured - 1) for a, b in zip(repeated, again, strict=True)]
    lines, failed = judged(rows, max(spreads, default=0.0), bests)
    if unpredicted:
        failed.append(f"not predicted: {'; '.join(unpredicted)}")
    not_covered = "; ".join(uncovered(options, left_out, is_kept=bool(by_words)))
    return SCRIPT.conclude([*head, *table(rows), *lines], failed, options, not_covered)


def impossible(models: Sequence[str], ranks: Sequence[int], names: Sequence[str]) -> Iterator[str]:
    """Yield what a size of model cannot be trained with on so many ranks, where another size can: a
    schedule of more stages than it has blocks, say."""
    for count in ranks:
        legal = {model: {case.name for case in cases([model], [count], names)} for model in MODELS}
        every = set().union(*legal.values())
        for model in models:
            if lacking := sorted(every - legal[model]):
                yield f"{model} on {count}: {', '.join(lacking)} are not legal"


def uncovered(options: argparse.Namespace, left_out: int, *, is_kept: bool) -> Iterator[str]:
    """Yield what the page does not say."""
    yield from impossible(options.models, options.ranks, options.specs)
    if sizes := [name for name in MODELS if name not in options.models]:
        yield f"the sizes {', '.join(sizes)}"
    if left_out:
        yield f"{left_out} trainings of these sizes, which were not run"
    if is_kept:
        yield "how long the trainings take in the hour of the rates: they ran in hours before"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
