"""Is what was derived what gloo ranks do, of specs that nobody chose?

Claim: of legal specs drawn from the whole grammar (`_random_specs`) on 2 to 4 ranks, every rank's
resident state and traffic are those that `exact` says, 0 bytes and 0 calls off, its peaks within
2 %, and nothing raises.

A spec is a function of its seed; seeds whose mesh is another size are passed over. Run on gloo: a
drawn device, backend, cluster or timeout is left out, and files are in a folder of their own.
Prints; writes a result only with --save. About 10 minutes on two cores.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from _coverage import Coverage
from _machine import conclude, header, this_command
from _random_specs import Written, accepted, drawn

from ptrain.costs import Estimate
from ptrain.data.sampler import LocalBatch
from ptrain.derivation.estimate import derive
from ptrain.errors import PtrainError
from ptrain.interpreter.program import interpret
from ptrain.meters.measure import measure
from ptrain.report.record import Check, compare
from ptrain.rooms.world import World
from ptrain.spec.spec import Spec
from ptrain.traces.facts import facts_of
from ptrain.train.probe import FIRST_STEADY, set_up
from tests.ranks import CALL_SECONDS, Pool, RankError

SPECS, SIZES = 100, (2, 3, 4)
PEAK = 0.02
ELSEWHERE = ("device", "backend", "cluster", "timeout")
LR = 1e-3
REFUSED = "ptrain.errors.SpecError: "  # with place and remedy, by every rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A seed's spec: on how many ranks, how many figures, those that are off, the largest share by
    which a peak is, or why there are none."""

    seed: int
    ranks: int
    figures: int = 0
    off: tuple[str, ...] = ()
    peak: float = 0.0
    refused: str = ""


def here(written: Written, folder: Path) -> Written:
    """Return the spec for gloo ranks of this machine."""
    spec = {key: value for key, value in written.items() if key not in ELSEWHERE}
    if isinstance(spec.get("offload"), dict) and "path" in spec["offload"]:
        spec["offload"] = {**spec["offload"], "path": str(folder)}
    return spec


def steady(spec: Spec) -> Estimate:
    """What this rank measures of the third step."""
    program = interpret(spec, world=World.join(spec.timeout, device="cpu", backend="gloo"))
    rows = spec.batch.accumulate * spec.batch.micro
    tokens = torch.zeros(rows, spec.batch.sequence + 1, dtype=torch.int64)
    batch = LocalBatch(tokens=tokens, global_tokens=spec.batch.tokens, sample_ids=())
    estimates = []
    for _ in range(FIRST_STEADY + 1):
        with measure(program) as measurement:
            program.forward_backward(batch, LR)
            program.step(LR)
        estimates.append(measurement.estimate())
    _, before, after = estimates
    return replace(after, traffic=(*after.traffic, *set_up(before.traffic, after.traffic)))


def measured(seed: int, written: Written, pool: Pool) -> Measured:
    """Return how `exact` and the meters compare on every rank."""
    ranks = 0
    try:
        spec = replace(accepted(written), device="cpu")
        ranks = spec.world_size
        exact = derive(spec, facts_of(spec)).exact
        rows = [
            (rank, check)
            for rank, on_gloo in enumerate(pool.run(steady, spec, timeout=CALL_SECONDS))
            for check in compare(exact.of_rank(rank), on_gloo)
        ]
    except PtrainError as error:
        return Measured(seed=seed, ranks=ranks, refused=str(error).splitlines()[0])
    except RankError as error:
        if all(REFUSED in cause for cause in error.causes.values()):
            why = str(error).partition(REFUSED)[2].splitlines()[0]
            return Measured(seed=seed, ranks=ranks, refused=why)
        last = str(error).strip().splitlines()[-1]
        return Measured(seed=seed, ranks=ranks, off=(f"raised: {last}",))
    peaks = [abs(_share(check)) for _, check in rows if check.name.startswith("peak")]
    return Measured(
        seed=seed,
        ranks=ranks,
        figures=len(rows),
        off=tuple(f"rank {rank}: {_said(check)}" for rank, check in rows if _is_off(check)),
        peak=max(peaks, default=0.0),
    )


def _share(check: Check) -> float:
    if check.predicted == check.measured:
        return 0.0
    if check.predicted is None or not check.measured:
        return float("inf")
    return check.predicted / check.measured - 1


def _is_off(check: Check) -> bool:
    is_peak = check.name.startswith("peak")
    return abs(_share(check)) > PEAK if is_peak else check.predicted != check.measured


def _said(check: Check) -> str:
    return f"{check.name}: exact {check.predicted}, measured {check.measured}"


def draws(first: int, folder: Path) -> Iterator[tuple[int, Written]]:
    """Yield seeds and their specs for gloo ranks, of the right sizes, without end."""
    for seed in count(first):
        draw = drawn(seed, max(SIZES))
        if len(draw.ranks) > 1 and accepted(draw.written).world_size in SIZES:
            yield seed, here(draw.written, folder)


def page(results: list[Measured], coverage: Coverage) -> Iterator[str]:
    """Yield the lines of a result."""
    compared = [result for result in results if result.figures]
    raised = [result for result in results if not result.figures and result.off]
    exact_peaks = sum(result.peak == 0.0 for result in compared)
    figures = sum(result.figures for result in compared)
    largest = max((result.peak for result in compared), default=0.0)
    yield f"{len(compared)} specs, {figures:,} figures; every peak to the byte in {exact_peaks} "
    yield f"of them, the largest difference of a peak {largest:.3%}; {len(raised)} specs raised."
    yield from ("", "Coverage of the grammar:", "")
    yield from (f"- {line}" for line in coverage.lines())
    refused: Counter[str] = Counter(result.refused for result in results if result.refused)
    for why, times in refused.most_common():
        yield from ("", f"Not run ({times}): {why}")
    peaks = [result for result in compared if result.peak]
    if peaks:
        yield from ("", "Peaks that are not equal to the byte:", "")
        yield from (f"- seed {result.seed}: {result.peak:.3%}" for result in peaks)
    yield ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--specs", type=int, default=SPECS, help="how many are measured")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/")
    args = parser.parse_args()
    head = header(
        "adversary: exact and gloo ranks, of specs drawn from the grammar", this_command()
    )
    results: list[Measured] = []
    coverage, pool = Coverage(), Pool(SIZES[0])
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as at_end:
        at_end.callback(lambda: pool.close())  # whichever pool is open then
        for seed, written in draws(args.first, Path(folder)):
            ranks = accepted(written).world_size
            if ranks != pool.size:  # pools that wait take time from the others
                pool.close()
                pool = Pool(ranks)
            result = measured(seed, written, pool)
            results.append(result)
            coverage.add(written)
            outcome = result.refused or f"{len(result.off)} of {result.figures} off"
            print(
                f"seed {seed}, {ranks} ranks: {outcome}", *result.off, file=sys.stderr, flush=True
            )
            if sum(not result.refused for result in results) == args.specs:
                break
    return conclude(
        "adversary_measured",
        [head, *page(results, coverage)],
        failed=[f"seed {result.seed}: {row}" for result in results for row in result.off[:2]],
        not_covered="models that are not built in, GPUs, more than 4 ranks",
        is_saved=args.save,
    )


if __name__ == "__main__":
    raise SystemExit(main())
