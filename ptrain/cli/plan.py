"""`ptrain plan`: what will be done to the model, as text. Torch-free for built-in models."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from dataclasses import asdict

from ptrain.algebra.legality import require
from ptrain.cli.arguments import add_spec_arguments, print_json
from ptrain.cli.predict import facts_of
from ptrain.derivation.estimate import Derivation, derive
from ptrain.errors import PtrainError
from ptrain.plan.composition import theorem_6, theorem_7
from ptrain.plan.show import show
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
    plans = [_derived(source, overrides, args.allow_import) for source in sources]
    if args.json:
        records = [as_record(spec, derivation) for spec, derivation in plans]
        print_json(records if len(records) > 1 else records[0])
    else:
        print("\n\n".join(as_text(spec, derivation) for spec, derivation in plans))
    return 0


def as_text(spec: Spec, derivation: Derivation) -> str:
    """The plan, and what to know before it runs."""
    warnings = [f"warning: {warning}" for warning in derivation.exact.warnings]
    return "\n".join([show(spec, derivation.plan), *warnings])


def as_record(spec: Spec, derivation: Derivation) -> dict[str, object]:
    """The steps as plain data, each with its kind."""
    plan = derivation.plan
    steps = [{"step": type(step).__name__, **asdict(step)} for step in plan.steps]
    return {
        "spec": plan.name,
        "steps": steps,
        "units": ["+".join(modules) for modules in plan.units],
        "conditions": [asdict(each) for each in (*theorem_6(spec, plan), *theorem_7(spec, plan))],
        "warnings": list(derivation.exact.warnings),
    }


def _derived(source: str, overrides: list[str], allow_import: bool) -> tuple[Spec, Derivation]:
    spec = require(load(source, overrides))
    return spec, derive(spec, facts_of(spec, allow_import=allow_import))
