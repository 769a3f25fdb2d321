"""CPU time of a full training's step compared with a hand-written loop, accelerate, Fabric and
DeepSpeed."""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, here and in the ranks

from _peers import GROUPS, environment, installed
from _script import Script, table_head, table_row
from _steps import RANKS, different, legal, paired
from _whole_loop import WARM_UP, Turns, beside
from step_seconds import MODELS

LONG, SHORT = 1.02, 1.05  # of zero1 and zero2 the second in short steps
LONG_ALONE = {"cp-ring": 1.02, "cp-zigzag": 1.02, "ep": 1.03}  # nothing is claimed of short steps
LENGTHS = {"long": (2, 256), "short": (1, 32)}  # samples of a micro-batch, tokens of each
UNCLAIMED = ("fsdp-mixed", "hsdp")
# Where the model computes in bf16 gradients are scaled by 1: an ulp of the norm, whose sums are
# taken in another order, rounds masters to other numbers, and losses part by 1e-2.
UNREACHED = {"fsdp-mixed": ("optimizer.clip=1e6",)}
REDUNDANT = ("zero1", "zero2")
WORLDS = {"hsdp": 4}  # ranks of others than two
MICRO_BATCHES = {"pp-1f1b": 4}  # where it is not one
WHOLE = ("tp", "pp-1f1b", "cp-ring", "cp-zigzag")  # every rank has all samples
EXPERTS = (
    "model.experts=8", "model.experts_per_token=2", "model.expert_ffn=512",
    "model.capacity_factor=null",
)  # fmt: skip
COMPILED = {"ddp, compiled": "ddp"}  # the specs of these, to which `compile=block` is added
OWN = "ptrain"
SCRIPT = Script(
    "peers",
    long=LONG,
    short=SHORT,
    redundant=" and ".join(REDUNDANT),
    unclaimed=" and ".join(UNCLAIMED),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A strategy at a size and a step length."""

    strategy: str
    model: str
    length: str
    dials: tuple[str, ...] = ()  # ptrain's own

    @property
    def ranks(self) -> int:
        return WORLDS.get(self.strategy, RANKS)

    @property
    def spec(self) -> str:
        return COMPILED.get(self.strategy, self.strategy)

    @property
    def own_dials(self) -> tuple[str, ...]:
        return (*self.dials, *(["compile=block"] if self.strategy in COMPILED else []))

    @property
    def words(self) -> tuple[str, ...]:
        micro, sequence = LENGTHS[self.length]
        accumulated = MICRO_BATCHES.get(self.strategy, 1)
        shared = 1 if self.strategy in WHOLE else self.ranks
        batch = f"global: {micro * accumulated * shared}, micro: {micro}, sequence: {sequence}"
        more = EXPERTS if self.strategy == "ep" else UNREACHED.get(self.strategy, ())
        return (f"model={MODELS[self.model]}", f"batch={{{batch}}}", "optimizer.lr=3e-4", *more)

    @property
    def limit(self) -> float | None:
        """Return the highest median ratio for ptrain; None without a claim."""
        if self.strategy in UNCLAIMED:
            return None
        if self.strategy in LONG_ALONE:
            return LONG_ALONE[self.strategy] if self.length == "long" else None
        if self.strategy not in REDUNDANT:
            return LONG
        if self.model == "1m":
            return None
        return SHORT if self.length == "short" else LONG

    def __str__(self) -> str:
        return f"{self.strategy}, {self.model}, {self.length} steps"


def measure(case: Case, names: Sequence[str], rounds: int, folder: str) -> dict[str, Turns]:
    """Run every contender in turn on one rank."""
    import torch.distributed as dist

    environment(dist.get_rank(), case.ranks)
    if case.strategy in COMPILED:
        import torch._inductor.config

        # Ranks of a pool are daemons, which may not start the processes of a parallel compilation.
        torch._inductor.config.compile_threads = 1
    spec = legal(case.spec, case.words)
    steps = {name: GROUPS[case.strategy][name][1](spec) for name in names}
    own, others = beside(case.spec, (*case.words, *case.own_dials), rounds, folder, steps)
    return {OWN: own, **others}


def run(case: Case, names: Sequence[str], launches: int, rounds: int) -> dict[str, Turns]:
    """Return times summed over the ranks, launch by launch."""
    import peers  # the ranks import this file by its name

    from tests.ranks import Ranks

    total = {name: Turns() for name in (OWN, *names)}
    for _ in range(launches):
        pool = Ranks()
        with tempfile.TemporaryDirectory() as folder:
            run_dir = str(Path(folder) / "run")
            ranks = pool.run(
                case.ranks, peers.measure, case, names, rounds // launches, run_dir, timeout=3600
            )
        pool.close()
        for name, turns in total.items():
            of_ranks = [rank[name] for rank in ranks]
            turns.processor.extend(_summed([rank.processor for rank in of_ranks]))
            turns.losses.extend(_summed([rank.losses for rank in of_ranks]))
            turns.wall.extend(map(max, zip(*(rank.wall for rank in of_ranks), strict=True)))
    return total


def _summed(of_ranks: Sequence[Sequence[float]]) -> Iterator[float]:
    """Yield the sum over the ranks, of as many as all of them have: the loop by hand takes a step
    more than the training has rows of."""
    return map(sum, zip(*of_ranks, strict=True))


def report(case: Case, total: dict[str, Turns]) -> tuple[list[str], list[str]]:
    """Return the rows of a case, and violations of the claim."""
    base_name = next(name for name in total if name != OWN)
    base, own = total[base_name], total[OWN]
    rows, failed = [], []
    for name, turns in total.items():
        median, low, high = paired(turns.processor, base.processor)
        wall, *_ = paired(turns.wall, base.wall)
        apart = max(abs(a - b) / abs(b) for a, b in zip(turns.losses, base.losses, strict=False))
        wrong = []
        if name == OWN:
            wrong = list(_too_slow(case, median))
            wrong += different(str(case), apart)
        elif name != base_name:
            _, least, _ = paired(own.processor, turns.processor)
            if least > 1:
                wrong = [f"{case}: {name} is faster, by {least:.3f} at least"]
        failed += wrong
        cells = (
            f"{statistics.median(turns.processor):.4f}",
            f"{median:.3f}",
            f"{low:.3f} – {high:.3f}",
            f"{wall:.3f}",
            f"{apart:.1e}",
            "" if name == base_name else "fails" if wrong else _verdict(case, name),
        )
        rows.append(table_row(case.model, case.length, name, *cells))
    return rows, failed


def _too_slow(case: Case, median: float) -> Iterator[str]:
    if case.limit is not None and median > case.limit:
        yield f"{case}: median ratio {median:.4f}, at most {case.limit}"


def _verdict(case: Case, name: str) -> str:
    return "no claim" if name == OWN and case.limit is None else "holds"


def main() -> int:
    parser = SCRIPT.parser()
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--launches", type=int, default=2, help="starts of the ranks")
    parser.add_argument("--strategies", nargs="+", default=list(GROUPS), choices=list(GROUPS))
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--lengths", nargs="+", default=list(LENGTHS), choices=list(LENGTHS))
    parser.add_argument(
        "--dials", nargs="+", default=(), metavar="a.b=c", help="of ptrain's spec alone"
    )
    args = parser.parse_args()

    there = installed([package for group in GROUPS.values() for package, _ in group.values()])
    lines = [*SCRIPT.head(), *_method(args.rounds, args.launches, there)]
    failed: list[str] = []
    for strategy in args.strategies:
        group = GROUPS[strategy]
        names = [name for name, (need, _) in group.items() if not need or need in there]
        lines += ["", f"## {strategy}", "", *_head()]
        for model in args.models:
            for length in args.lengths:
                case = Case(strategy=strategy, model=model, length=length, dials=tuple(args.dials))
                rows, wrong = report(case, run(case, names, args.launches, args.rounds))
                lines += rows
                failed += wrong
                print("\n".join(rows), file=sys.stderr, flush=True)
        left_out = [name for name in group if name not in names]
        lines += ["", *(f"Left out, not installed: {name}." for name in left_out)]
    return SCRIPT.conclude(lines, failed, args)


def _head() -> Iterator[str]:
    figures = ("CPU s per step", "ratio", "95 %", "wall", "apart", "verdict")
    return table_head("model", "steps", "", *figures)


def _method(rounds: int, launches: int, there: dict[str, str]) -> list[str]:
    return SCRIPT.method(
        versions=", ".join(f"{name} {text}" for name, text in there.items()) or "none",
        lengths=", ".join(
            f"{name}: {m} × {tokens} tokens" for name, (m, tokens) in LENGTHS.items()
        ),
        rounds=rounds,
        launches=launches,
        warm_up=WARM_UP,
    )


if __name__ == "__main__":
    sys.exit(main())
