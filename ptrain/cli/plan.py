"""`ptrain plan`: what will be done to the model, as text. Torch-free for built-in models."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from dataclasses import asdict

from ptrain.algebra.legality import require
from ptrain.cli.arguments import add_spec_arguments, print_json
from ptrain.cli.predict import facts_of
from ptrain.errors import PtrainError
from ptrain.plan.lower import lower
from ptrain.plan.show import show
from ptrain.plan.step import Plan
from ptrain.spec.load import load
from ptrain.spec.overrides import split_arguments
from ptrain.spec.spec import Spec


def add_arguments(parser: ArgumentParser) -> None:
    add_spec_arguments(parser)
    parser.add_argument(
        "--allow-import", action="store_true", help="let the spec's `target:` import code"
    )


def run(args: Namespace) -> int:
    """The steps of every SPEC, in the order of execution."""
    sources, overrides = split_arguments(args.arguments)
    if not sources:
        raise PtrainError("ptrain plan: name a SPEC; `ptrain specs` lists them")
    plans = [_lower(source, overrides, args.allow_import) for source in sources]
    if args.json:
        records = [as_record(plan) for _, plan in plans]
        print_json(records if len(records) > 1 else records[0])
    else:
        print("\n\n".join(show(spec, plan) for spec, plan in plans))
    return 0


def as_record(plan: Plan) -> dict[str, object]:
    """The steps as plain data, each with its kind."""
    steps = [{"step": type(step).__name__, **asdict(step)} for step in plan.steps]
    return {
        "spec": plan.name,
        "steps": steps,
        "units": ["+".join(modules) for modules in plan.units],
    }


def _lower(source: str, overrides: list[str], allow_import: bool) -> tuple[Spec, Plan]:
    spec = require(load(source, overrides))
    facts = facts_of(spec, allow_import=allow_import)
    return spec, lower(spec, facts.unit_modules)
