"""`ptrain validate`: run a few steps with the meters on, and compare `exact` with `measured`."""

from __future__ import annotations

import shutil
import tempfile
from argparse import Namespace
from contextlib import suppress
from pathlib import Path

from ptrain.cli.arguments import print_json
from ptrain.cli.progress import progress
from ptrain.errors import VerdictFailed, refused
from ptrain.installed import require_torch
from ptrain.report.screen import command_line, next_line, show
from ptrain.spec.load import split_arguments, sweeps
from ptrain.spec.names import names
from ptrain.train.notebook import Run, load_trainable
from ptrain.train.notebook import run as train
from ptrain.train.options import require_reachable

_STEADY = 3  # two steps settle (buckets, optimizer state), the third is measured
_BRIEFLY = (
    "train.steps=4",
    "eval.every=0",
    "checkpoint.at_end=false",
    "checkpoint.every=0",
    "profile=[]",
)


def run(args: Namespace) -> int:
    """0 when every verdict holds, 1 when one fails."""
    require_torch()
    sources, overrides = split_arguments(args.arguments)
    jobs = [
        (source, choice)
        for source in sources or [names().default]
        for choice in sweeps([*_BRIEFLY, *overrides])
    ]
    for source, choice in jobs:
        _require_steady_step(source, choice)
    runs: list[Run] = []
    for source, choice in jobs:
        with progress(f"running four steps of {_title(source, choice)}") as step:
            step(len(runs), len(jobs))
            runs.append(_validate(source, choice, allow_import=args.allow_import))
        if not args.json:
            title = [_title(source, choice)] if len(jobs) > 1 else []
            between = [""] if len(runs) > 1 else []
            head = (runs[-1].heading, runs[-1].preflight)
            show(*between, *title, *head, str(runs[-1]))
    if args.json:
        records = [validation.record for validation in runs]
        print_json(records if len(records) > 1 else records[0])
    else:
        words = command_line("verify", args.arguments, allow_import=args.allow_import)
        show("", next_line(words, "ptrain verify --help"))
    return 0 if all(validation.holds for validation in runs) else VerdictFailed.exit_code


def _require_steady_step(source: str, overrides: tuple[str, ...]) -> None:
    """Raises SpecError for a spec that is wrong, too large for this host, or too short to have a
    verdict."""
    spec = load_trainable(source, overrides, words=_title(source, overrides))
    require_reachable(spec)
    steps = spec.train.steps
    if steps < _STEADY:
        raise refused(
            "train.steps",
            f"validate measures the third step; got {steps} steps",
            f"Use `train.steps={_STEADY}` or more, or remove it.",
        )


def _validate(source: str, overrides: tuple[str, ...], *, allow_import: bool) -> Run:
    folder = Path(tempfile.mkdtemp(prefix="ptrain-"))  # stays, with its logs, when a rank fails
    try:
        result = train(source, overrides, run_dir=folder / "run", allow_import=allow_import)
    finally:
        with suppress(OSError):  # not empty: something has started
            folder.rmdir()
    shutil.rmtree(folder)
    return result


def _title(source: str, overrides: tuple[str, ...]) -> str:
    return " ".join([source, *(override for override in overrides if override not in _BRIEFLY)])
