"""The command `ptrain select`: find the placement of a model, or of a spec with `auto` in it.

This module does not import torch.
"""

from __future__ import annotations

import gc
import shlex
import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from ptrain.charts.canvas import ChartFile, chart_file, write_atomically
from ptrain.charts.front import front_sheet
from ptrain.cli.arguments import print_json
from ptrain.cli.predict import load_facts
from ptrain.cli.progress import show_progress
from ptrain.errors import PtrainError, input_error
from ptrain.facts.model import ModelFacts
from ptrain.plan.lower import built_in_facts
from ptrain.report.reasons import advice_lines, advice_record, parse_thresholds
from ptrain.report.screen import next_line, print_lines, print_screen
from ptrain.report.selection import TOP, as_csv, as_record, as_spec, placement_text, selection_text
from ptrain.selection.algorithm1 import Answer, algorithm1, requirements
from ptrain.selection.choose import select
from ptrain.selection.ranking import PlacementRanking, SearchGoal
from ptrain.spec.load import split_arguments
from ptrain.spec.spec import Spec

_NOTHING_FITS = 2
_THRESHOLDS = "0.7,0.3"  # the paper's


def run(args: Namespace) -> int:
    """Search placements and print the ranking; return 0, or 2 if nothing fits."""
    sources, overrides = split_arguments(args.arguments)
    if len(sources) != 1:
        number = f"takes one MODEL or SPEC; got {len(sources)}"
        raise PtrainError(f"ptrain select: {number}. `ptrain specs` lists the names.")
    _require_effects(args)
    chart = chart_file(args.chart)
    if args.out is not None and not args.out.parent.is_dir():
        raise input_error(
            "--out", f"there is no folder {args.out.parent}", f"Run `mkdir -p {args.out.parent}`."
        )
    if args.out is not None and args.out.is_dir():
        raise input_error("--out", f"{args.out} is a folder", "Name a file.")
    with _without_collector(), show_progress("searching placements") as step:
        selection = select(
            sources[0],
            overrides,
            cluster=args.cluster,
            devices=args.devices,
            objective=args.objective,
            where=args.where,
            count=args.exact,
            tokens=args.tokens,
            deadline=args.deadline,
            budget=args.budget,
            margin=args.margin,
            read=partial(_trace_facts, allow_import=args.allow_import),
            watch=lambda done, count: step(done, count, "deriving the best candidates"),
        )
    advice = _ask_algorithm1(selection, args) if args.by == "algorithm1" else None
    files = _write_files(selection, args, chart)
    if args.json:
        by = {} if advice is None else {"algorithm1": advice_record(advice)}
        print_json(as_record(selection, args.top) | by)
    elif args.csv:
        print(as_csv(selection, args.top), end="")
    else:
        advice_text = [] if advice is None else [*advice_lines(advice), ""]
        text = selection_text(selection, args.top or TOP)
        print_screen(*advice_text, text, *files, "", next_line(*_next_commands(selection, args)))
    return 0 if selection.best else _NOTHING_FITS


def _next_commands(selection: PlacementRanking, args: Namespace) -> list[str]:
    """Return the commands that write and train the best placement, the shortest last."""
    if selection.best is None or args.out is not None:
        return [f"ptrain train {args.out}" if selection.best else "ptrain select --help"]
    command = f"{shlex.join(args.typed)} --out best.yaml"
    return [f"{command} && ptrain train best.yaml", command, "ptrain select --help"]


@contextmanager
def _without_collector() -> Iterator[None]:
    """Temporarily disable garbage collection.

    A search creates millions of values and few reference cycles; collections take up to a third of
    its time.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _trace_facts(spec: Spec, *, allow_import: bool) -> ModelFacts:
    """Return the facts of a model that has no table of allocations.

    The trace is announced on standard error, because it takes seconds.
    """
    print_lines(f"tracing {spec.name} as in {placement_text(spec)}", stream=sys.stderr)
    return load_facts(spec, allow_import=allow_import)


def _require_effects(args: Namespace) -> None:
    """Check that every option has an effect.

    Raises:
        SpecError: If one has none.
    """
    is_of_devices = args.objective == SearchGoal.DEVICES
    for name in ("tokens", "deadline", "budget"):
        if getattr(args, name) is not None and not is_of_devices:
            raise input_error(
                f"--{name}", "needs the objective devices", "Add `--objective devices`."
            )
    if args.thresholds != _THRESHOLDS and args.by != "algorithm1":
        raise input_error("--thresholds", "needs the method algorithm1", "Add `--by algorithm1`.")


def _ask_algorithm1(selection: PlacementRanking, args: Namespace) -> Answer:
    """Return the answer of the paper's Algorithm 1 for the job that was searched."""
    base = selection.job.base
    assert base.cluster is not None, "a job that is searched for has a cluster"
    required = requirements(
        built_in_facts(selection.job.sized), base.cluster, selection.job.devices
    )
    return algorithm1(required, parse_thresholds(args.thresholds))


def _write_files(
    selection: PlacementRanking, args: Namespace, chart: ChartFile | None
) -> list[str]:
    """Write the requested files of the best placement; return a line for each."""
    lines: list[str] = []
    if selection.best is None:
        return lines
    if args.out is not None:
        write_atomically(args.out, as_spec(selection, selection.best).encode(), "--out")
        lines.append(f"spec: {args.out}")
    if chart is not None:
        chart.draw(front_sheet(selection))
        lines.append(f"chart: {args.chart}")
    return lines
