"""The command `ptrain validate`: run four measured steps, and compare them with the prediction."""

from __future__ import annotations

from argparse import Namespace

from ptrain.cli.arguments import print_json
from ptrain.cli.progress import show_progress
from ptrain.errors import VerdictFailed, input_error
from ptrain.files import temporary_folder
from ptrain.installed import require_torch
from ptrain.report.screen import command_line, next_line, print_screen
from ptrain.spec.load import expand_sweeps, split_arguments
from ptrain.spec.names import load_names
from ptrain.train.notebook import Run, load_trainable
from ptrain.train.notebook import run as train
from ptrain.train.options import require_profiled_steps

# DDP rebuilds its buckets after the first step and optimizers create their state in it; memory and
# traffic are measured in the third step.
_STEADY = 3
_SHORT_RUN = (
    "train.steps=4",
    "eval.every=0",
    "checkpoint.at_end=false",
    "checkpoint.every=0",
    "profile=[]",
)


def run(args: Namespace) -> int:
    """Validate every spec; return 0 if every verdict holds, else 1."""
    require_torch()
    sources, overrides = split_arguments(args.arguments)
    jobs = [
        (source, choice)
        for source in sources or [load_names().default]
        for choice in expand_sweeps([*_SHORT_RUN, *overrides])
    ]
    for source, choice in jobs:
        _require_steady_step(source, choice)
    runs: list[Run] = []
    for source, choice in jobs:
        with show_progress(f"running four steps of {_spec_title(source, choice)}") as step:
            step(len(runs), len(jobs))
            runs.append(_validate_spec(source, choice, allow_import=args.allow_import))
        if not args.json:
            title = [_spec_title(source, choice)] if len(jobs) > 1 else []
            between = [""] if len(runs) > 1 else []
            head = (runs[-1].heading, runs[-1].preflight)
            print_screen(*between, *title, *head, str(runs[-1]))
    if args.json:
        records = [validation.record for validation in runs]
        print_json(records if len(records) > 1 else records[0])
    else:
        words = command_line("verify", args.arguments, allow_import=args.allow_import)
        print_screen("", next_line(words, "ptrain verify --help"))
    return 0 if all(validation.holds for validation in runs) else VerdictFailed.exit_code


def _require_steady_step(source: str, overrides: tuple[str, ...]) -> None:
    """Check a spec before anything runs.

    Raises:
        SpecError: If the spec is wrong, too large for this host, or too short for a measured step.
    """
    spec = load_trainable(source, overrides, words=_spec_title(source, overrides))
    require_profiled_steps(spec)
    steps = spec.train.steps
    if steps < _STEADY:
        raise input_error(
            "train.steps",
            f"validate measures the third step; got {steps} steps",
            f"Use `train.steps={_STEADY}` or more, or remove it.",
        )


def _validate_spec(source: str, overrides: tuple[str, ...], *, allow_import: bool) -> Run:
    """Run one spec in a temporary folder, which is kept with its logs if a rank fails."""
    with temporary_folder(keeps_failure=True) as folder:
        return train(source, overrides, run_dir=folder / "run", allow_import=allow_import)


def _spec_title(source: str, overrides: tuple[str, ...]) -> str:
    """Return the source and the overrides of a spec, without the overrides of this command."""
    return " ".join([source, *(override for override in overrides if override not in _SHORT_RUN)])
