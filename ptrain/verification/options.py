"""The command-line options of a verification, shared by `ptrain verify` and `python -m
ptrain.verification`. Torch-free."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ptrain.commands import add_arguments
from ptrain.errors import input_error
from ptrain.spec.load import split_arguments
from ptrain.spec.names import SPEC_FOLDERS, list_files, load_names, resolve_alias
from ptrain.train.options import strip_dashes

STEPS, LEAST_STEPS = 100, 3


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyOptions:
    """The options of one spec's verification on its ranks.

    Attributes:
        spec: The name or path of the spec.
        overrides: Overrides of its keys.
        steps: The steps of each trajectory.
        quick: True to skip the trajectories.
        every_collective: True to compare the result of each collective over its group.
        verbose: True to print more.
        json: True to print JSON.
        allow_import: True to permit the user's functions.
        folder: The private folder of the command that started the ranks, for logs and the record;
            None to print the record.
    """

    spec: str = ""
    overrides: tuple[str, ...] = ()
    steps: int = STEPS
    quick: bool = False
    every_collective: bool = False
    verbose: bool = False
    json: bool = False
    allow_import: bool = False
    folder: Path | None = None


def require_steps(steps: int) -> None:
    """Raise SpecError if a trajectory is too short to show anything."""
    if steps < LEAST_STEPS:
        raise input_error(
            "--steps",
            f"a trajectory needs at least {LEAST_STEPS} steps; got {steps}",
            f"Use `--steps {STEPS}`, or omit the option.",
        )


def spec_source(spec: str) -> str:
    """Return the spec of a run folder, or `spec` itself if it is none."""
    resolved = Path(spec) / "spec.resolved.yaml"
    is_named = resolve_alias(spec) in list_files(*SPEC_FOLDERS)
    return spec if is_named or not resolved.is_file() else str(resolved)


def parse_options(argv: Sequence[str]) -> VerifyOptions:
    """Parse the command line of a rank.

    Raises:
        SystemExit: With code 2 for an unknown option.
        PtrainError: There are several specs, or too few steps.
    """
    parser = argparse.ArgumentParser(
        prog="python -m ptrain.verification",
        description="Verify SPEC on the ranks that torchrun started.",
        allow_abbrev=False,
    )
    add_arguments(parser, "verify")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_intermixed_args(strip_dashes(argv))
    specs, overrides = split_arguments(options.arguments)
    if len(specs) > 1:
        raise input_error(
            "",
            f"these ranks verify one SPEC; got {' and '.join(specs)}",
            "Use `ptrain verify`, which takes several specs and starts the ranks of each.",
        )
    rest = {name: value for name, value in vars(options).items() if name != "arguments"}
    require_steps(options.steps)
    return VerifyOptions(
        spec=specs[0] if specs else load_names().default, overrides=tuple(overrides), **rest
    )


def to_argv(options: VerifyOptions) -> list[str]:
    """Return the command line that passes these options to a rank."""
    return [options.spec, *options.overrides, *option_words(options)]


def option_words(options: VerifyOptions) -> Iterator[str]:
    """Yield the command-line words other than the spec and the overrides."""
    yield from ("--steps", str(options.steps))
    yield from ("--" + flag.replace("_", "-") for flag in FLAGS if getattr(options, flag))
    if options.folder is not None:
        yield from ("--folder", str(options.folder))


FLAGS = ("quick", "every_collective", "verbose", "json", "allow_import")
