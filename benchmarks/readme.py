"""Rewrites the blocks of README.md that show output: `python benchmarks/readme.py`.

A block stands between `<!-- output: COMMAND -->` (or `<!-- table: NAME -->`) and `<!-- end -->`.
Commands run as `python -m ptrain …` in an empty folder. `--check` exits 1 if a block is not what it
would be now, but for those of `train`, `validate`, `verify` and `simulate`: they tell of a machine.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable

import _activations
import _pipelines
from _machine import ROOT, environment
from _readmes import compare, on_ranks, rewrite, tuples

from ptrain.costs import TIERS, Estimate
from ptrain.derivation.estimate import derive
from ptrain.report.predict import model_state_bytes, sent_bytes
from ptrain.report.table import size
from ptrain.spec.names import listing
from ptrain.steps.step import FlatUnits, FullyShard, LocalGradients, Plan, Replicate, Wrap

README = ROOT / "README.md"
BLOCK = re.compile(r"(<!-- (output|table): (.+?) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
MEASURED = ("ptrain train", "ptrain validate", "ptrain verify", "ptrain simulate")


def output(command: str) -> str:
    """The command and what it prints, as a code block."""
    program, *arguments = command.split()
    assert program == "ptrain", command
    with tempfile.TemporaryDirectory() as folder:
        ended = subprocess.run(
            [sys.executable, "-m", "ptrain", *arguments],
            cwd=folder,
            env=environment(),
            capture_output=True,
            text=True,
            check=True,
        )
    return f"```\n$ {command}\n{ended.stdout.rstrip()}\n```\n"


def strategies() -> str:
    """Every named strategy on as many ranks, with its predictions and what it runs as."""
    rows = [
        "| strategy | Θ,Ω,G,A by axis | Θ+Ω+G per rank | peak | sent per step (paper) | runs as |",
        "|---|---|---|---|---|---|",
    ]
    for name in listing("strategies"):
        spec = on_ranks(name)
        derivation = derive(spec)
        exact = derivation.exact
        peak = max((row.device_bytes for row in exact.peak), default=None)
        cells = (
            f"`{name}`",
            tuples(spec),
            at_rest(exact),
            size(peak),
            f"{size(sent_bytes(exact))} ({size(sent_bytes(derivation.paper))})",
            runs_as(derivation.plan),
        )
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows) + "\n"


def at_rest(exact: Estimate) -> str:
    """Bytes on the device, and those on other tiers where there are any."""
    sizes = [model_state_bytes(exact, tier) or 0 for tier in TIERS]
    told = zip(sizes[1:], ("host", "files"), strict=True)
    others = (f" + {size(number)} {where}" for number, where in told if number)
    return size(sizes[0]) + "".join(others)


def runs_as(plan: Plan) -> str:
    """The real parts of torch behind a plan, in the order in which they take the model."""
    parts = ["`parallelize_module`"] if plan.tensor else []
    if not isinstance(plan.wrap, LocalGradients):
        parts.append(wrapped_by(plan.wrap))
    if plan.pipeline:
        parts.append("`stage_backward`")
    return ", ".join(parts) or wrapped_by(plan.wrap)


def wrapped_by(wrap: Wrap) -> str:
    match wrap:
        case LocalGradients():
            return "one device"
        case Replicate():
            spread = ", `ZeroRedundancyOptimizer`" if wrap.zero_redundancy else ""
            return "`DistributedDataParallel`" + spread
        case FullyShard():
            return "`fully_shard`, 2-D mesh" if wrap.replicate_axes else "`fully_shard`"
        case FlatUnits():
            return "flat units"


TABLES = {"strategies": strategies, **_pipelines.TABLES, **_activations.TABLES}


def rewritten(text: str, is_made: Callable[[str], bool]) -> str:
    """README with those of its blocks made anew whose command or table `is_made` says."""

    def block(match: re.Match[str]) -> str:
        head, kind, what, old, end = match.groups()
        if not is_made(what):
            return head + old + end
        return head + (TABLES[what]() if kind == "table" else output(what)) + end

    return BLOCK.sub(block, text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--predicted", action="store_true", help="leave out what needs a run")
    parser.add_argument("--only", metavar="COMMAND", help="one block, by its command or table")
    args = parser.parse_args()
    text = README.read_text(encoding="utf-8")
    is_predicted = args.check or args.predicted
    new = rewritten(
        text,
        lambda what: (
            what == args.only if args.only else not (is_predicted and what.startswith(MEASURED))
        ),
    )
    if args.check:
        return compare(README, new)
    return rewrite(README, new, f"{len(BLOCK.findall(text))} blocks")


if __name__ == "__main__":
    sys.exit(main())
