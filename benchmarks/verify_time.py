"""How long `ptrain verify SPEC` takes, --quick and --full."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from _script import Script, table
from start_up import seconds

from ptrain.spec.names import list_files

EXAMPLE, STEPS = "tp-sp", 20
LIMITS = {"--quick": 30.0, "--full": 100.0}  # wall seconds of the example
SCRIPT = Script("verify_time", steps=STEPS)
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
    yield from SCRIPT.method()
    columns = [f"{depth}: {what}" for depth in LIMITS for what in ("wall s", "CPU s", "load")]
    yield table(["spec", *columns], rows(results))
    if missing:
        yield f"Not run: {', '.join(missing)}."


def main() -> int:
    parser = SCRIPT.parser()
    parser.add_argument("--only", nargs="+", metavar="SPEC", help="these specs, and no other")
    parser.add_argument("--work", type=Path, required=True, help="a file that keeps what was run")
    args = parser.parse_args()
    head = SCRIPT.head()
    results: dict[str, Took] = json.loads(args.work.read_text()) if args.work.exists() else {}
    names = sorted(dict.fromkeys((EXAMPLE, *list_files("strategies"))))
    for name in args.only or names:
        for depth in LIMITS:
            if f"{name} {depth}" not in results:
                results[f"{name} {depth}"] = took(name, depth)
                args.work.write_text(json.dumps(results, indent=1))
                print(name, depth, results[f"{name} {depth}"], flush=True)
    missing = [name for name in names if f"{name} --full" not in results]
    return SCRIPT.conclude([*head, *page(results, missing)], list(failures(results)), args)


if __name__ == "__main__":
    sys.exit(main())
