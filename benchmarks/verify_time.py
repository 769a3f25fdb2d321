"""How long does `ptrain verify SPEC` take, --quick and --full?

Claim: of README's example, `ptrain verify tp-sp --steps 20`, --quick takes at most 40 s and --full
at most 100 s on two quiet cores, from start to exit.
Each is a process as a user starts it, one after the other, on the ranks of the spec's mesh; wall
seconds, and CPU seconds of all its processes. What a run took is kept in --work as soon as it is
done, so that --only takes some specs and a run that was broken off goes on. Without --only README's
example and all specs of specs/strategies/ are run, an hour. Writes a result only with --save.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from _machine import conclude, header, this_command
from _tables import table
from start_up import seconds

from ptrain.spec.names import listing

EXAMPLE, STEPS = "tp-sp", 20
LIMITS = {"--quick": 40.0, "--full": 100.0}  # wall seconds of the example
Took = dict[str, Any]


def took(spec: str, depth: str) -> Took:
    """Run the command once; `load` is the machine's before it begins."""
    steps = ["--steps", str(STEPS)] if depth == "--full" else []
    load = os.getloadavg()[0]
    cpu, wall = seconds([sys.executable, "-m", "ptrain", "verify", spec, depth, *steps])
    return {"cpu": cpu, "wall": wall, "load": load}


def rows(results: dict[str, Took]) -> Iterator[list[str]]:
    for name in dict.fromkeys(key.partition(" ")[0] for key in results):
        both = [results.get(f"{name} {depth}") for depth in LIMITS]
        cells = [f"{its['wall']:.0f}|{its['cpu']:.0f}|{its['load']:.1f}" if its else "–|–|–"
                 for its in both]  # fmt: skip
        yield [name, *(part for cell in cells for part in cell.split("|"))]


def failures(results: dict[str, Took]) -> Iterator[str]:
    for depth, limit in LIMITS.items():
        its = results.get(f"{EXAMPLE} {depth}")
        if its is None:
            yield f"{EXAMPLE} {depth} was not run"
        elif its["wall"] > limit:
            yield f"{EXAMPLE} {depth}: {its['wall']:.0f} s, at most {limit:.0f}"


def page(results: dict[str, Took], missing: Sequence[str]) -> Iterator[str]:
    yield (
        f"Seconds from start to exit of `ptrain verify SPEC --quick` and `--full --steps {STEPS}`; "
        "*load*: the machine's mean load of the minute before it began."
    )
    yield ""
    columns = [f"{depth}: {what}" for depth in LIMITS for what in ("wall s", "CPU s", "load")]
    yield table(["spec", *columns], rows(results))
    if missing:
        yield f"Not run: {', '.join(missing)}."


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="SPEC", help="these specs, and no other")
    parser.add_argument("--work", type=Path, required=True, help="a file that keeps what was run")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/")
    args = parser.parse_args()
    head = header("verify_time: seconds of a verification", this_command())
    results: dict[str, Took] = json.loads(args.work.read_text()) if args.work.exists() else {}
    names = sorted(dict.fromkeys((EXAMPLE, *listing("strategies"))))
    for name in args.only or names:
        for depth in LIMITS:
            if f"{name} {depth}" not in results:
                results[f"{name} {depth}"] = took(name, depth)
                args.work.write_text(json.dumps(results, indent=1))
                print(name, depth, results[f"{name} {depth}"], flush=True)
    missing = [name for name in names if f"{name} --full" not in results]
    return conclude(
        "verify_time",
        [head, *page(results, missing)],
        failed=list(failures(results)),
        not_covered="other work on the same machine, GPUs, and more than one machine.",
        is_saved=args.save,
    )


if __name__ == "__main__":
    sys.exit(main())
