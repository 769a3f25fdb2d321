"""The command line of a verification, shared by `ptrain verify` and `python -m
ptrain.verification`. Torch-free."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ptrain.commands import add_arguments
from ptrain.errors import refused
from ptrain.spec.load import split_arguments
from ptrain.spec.names import SPEC_FOLDERS, canonical, listing, names
from ptrain.train.options import dotlist

STEPS, LEAST_STEPS = 100, 3


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyOptions:
    """One spec on its ranks: `steps` of each trajectory; `quick`: without these; whether what a
    collective leaves is hashed over its group (`every_collective`).

    `folder` is the private one of the command that started them: logs, and the record, which is
    printed otherwise. `references` keeps what specs of one command share."""

    spec: str = ""
    overrides: tuple[str, ...] = ()
    steps: int = STEPS
    quick: bool = False
    every_collective: bool = False
    verbose: bool = False
    json: bool = False
    allow_import: bool = False
    folder: Path | None = None
    references: Path | None = None


def require_steps(steps: int) -> None:
    """Raises SpecError for a trajectory that shows nothing."""
    if steps < LEAST_STEPS:
        raise refused(
            "--steps",
            f"a trajectory needs at least {LEAST_STEPS} steps; got {steps}",
            f"Use `--steps {STEPS}`, or omit the option.",
        )


def source_of(spec: str) -> str:
    """A run folder stands for the spec that ran."""
    resolved = Path(spec) / "spec.resolved.yaml"
    is_named = canonical(spec) in listing(*SPEC_FOLDERS)
    return spec if is_named or not resolved.is_file() else str(resolved)


def parse(argv: Sequence[str]) -> VerifyOptions:
    """Read the options of a rank. Raises SystemExit(2) for an unknown option."""
    parser = argparse.ArgumentParser(
        prog="python -m ptrain.verification",
        description="Verify SPEC on the ranks that torchrun started.",
        allow_abbrev=False,
    )
    add_arguments(parser, "verify")
    for name in _PATHS:
        parser.add_argument(f"--{name}", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_intermixed_args(dotlist(argv))
    specs, overrides = split_arguments(options.arguments)
    if len(specs) > 1:
        raise refused(
            "",
            f"these ranks verify one SPEC; got {' and '.join(specs)}",
            "Use `ptrain verify`, which takes several specs and starts the ranks of each.",
        )
    rest = {name: value for name, value in vars(options).items() if name != "arguments"}
    require_steps(options.steps)
    return VerifyOptions(
        spec=specs[0] if specs else names().default, overrides=tuple(overrides), **rest
    )


def to_argv(options: VerifyOptions) -> list[str]:
    """The command line that gives these options to a rank."""
    return [options.spec, *options.overrides, *said(options)]


def said(options: VerifyOptions) -> Iterator[str]:
    """Yield the words that are no spec and no override."""
    yield from ("--steps", str(options.steps))
    yield from ("--" + flag.replace("_", "-") for flag in FLAGS if getattr(options, flag))
    for name in _PATHS:
        if (path := getattr(options, name)) is not None:
            yield from (f"--{name}", str(path))


FLAGS = ("quick", "every_collective", "verbose", "json", "allow_import")
_PATHS = ("folder", "references")
