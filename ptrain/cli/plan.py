"""The command `ptrain plan`: show the changes to the model as text, and a schedule as a picture.

This module does not import torch for built-in models.
"""

from __future__ import annotations

from argparse import Namespace
from dataclasses import asdict

from ptrain.axes.context.draw import balance_rows
from ptrain.charts.canvas import ChartFile, chart_file
from ptrain.charts.figures import mesh_sheet, plan_sheets
from ptrain.cli.arguments import missing_spec, print_json
from ptrain.cli.predict import load_facts
from ptrain.derivation.estimate import Derivation, derive
from ptrain.errors import input_error
from ptrain.plan.composition import all_conditions
from ptrain.plan.lower import built_in_facts
from ptrain.plan.show import format_plan as plan_text
from ptrain.report.screen import command_line, next_line, print_screen
from ptrain.selection.recompute import resolve_auto
from ptrain.spec.batch import batch_lines
from ptrain.spec.load import load, split_arguments
from ptrain.spec.model import ModelShape
from ptrain.spec.spec import Spec


def run(args: Namespace) -> int:
    """Print the steps of every spec in the order of execution; return 0."""
    sources, overrides = split_arguments(args.arguments)
    if not sources:
        raise missing_spec("plan")
    if args.chart and len(sources) > 1:
        raise input_error(
            "--chart",
            f"draws one spec; got {len(sources)}",
            "Run `ptrain plan` once for each spec.",
        )
    chart = chart_file(args.chart)
    plans = [_derive_source(source, overrides, args.allow_import) for source in sources]
    chart_lines = [_draw_charts(plans[0][1], chart)] if chart else []
    if args.json:
        more = {"chart": str(args.chart)} if chart else {}
        records = [as_record(spec, derivation) | more for spec, derivation in plans]
        print_json(records if len(records) > 1 else records[0])
    else:
        texts = [as_text(spec, derivation) for spec, derivation in plans]
        words = command_line("predict", args.arguments, allow_import=args.allow_import)
        print_screen("\n\n".join([*texts, *chart_lines, next_line(words, "ptrain predict --help")]))
    return 0


def as_text(spec: Spec, derivation: Derivation) -> str:
    """Return the plan of a spec as text, with its batch and its warnings."""
    warnings = [f"warning: {warning}" for warning in derivation.exact.warnings]
    lines = batch_lines(spec.batch, spec.data_degree)
    return "\n".join([plan_text(spec, derivation.plan), *lines, *warnings])


def as_record(spec: Spec, derivation: Derivation) -> dict[str, object]:
    """Return the steps of a plan as plain data, each with its kind."""
    plan = derivation.plan
    steps = [{"step": type(step).__name__, **asdict(step)} for step in plan.steps]
    return {
        "spec": spec.name,
        "steps": steps,
        "units": ["+".join(modules) for modules in plan.units],
        "conditions": [condition._asdict() for condition in all_conditions(spec, plan)],
        "balance": balance_rows(plan.context) if plan.context else [],
        "warnings": list(derivation.exact.warnings),
    }


def _draw_charts(derivation: Derivation, chart: ChartFile) -> str:
    """Draw the pipeline schedule and the token shards in one file, or else the mesh."""
    first, *others = [*plan_sheets(derivation.plan)] or [mesh_sheet(derivation)]
    for sheet in others:
        first.add_below(sheet)
    return chart.draw(first)


def _derive_source(
    source: str, overrides: list[str], allow_import: bool
) -> tuple[Spec, Derivation]:
    """Return a resolved spec and its derivation.

    The facts of a built-in model come from its shape: a plan does not need the traced allocations.
    """
    spec = resolve_auto(load(source, overrides))
    is_of_shape = isinstance(spec.model, ModelShape) and spec.data.function is None
    facts = built_in_facts(spec) if is_of_shape else load_facts(spec, allow_import=allow_import)
    return spec, derive(spec, facts, is_timed=False)
