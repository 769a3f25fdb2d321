"""The command line of a training, shared by `ptrain train` and `python -m ptrain.train`.

The spec defines the training; these options define the behavior of the command. This module imports
no torch.

`Guard` is the interface by which verification watches the steps of a training and may stop it.
`verify_every: n` compares steps with a single-device reference. Training code imports no
verification: a separate module starts such a training and passes the guard.
"""

from __future__ import annotations

import argparse
import re
import secrets
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from ptrain.commands import add_arguments
from ptrain.errors import input_error
from ptrain.spec.load import split_arguments
from ptrain.spec.names import load_names
from ptrain.spec.spec import Spec

_MIN_ID_LENGTH = 16  # characters of --rdzv-id, which keeps strangers out of the rendezvous
_RESUME = "Use a run folder such as `runs/latest`, one of its `checkpoints/step-N`, or `auto`."


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of a training. See `ptrain train --help`.

    Attributes:
        run_dir: The run folder. None: a new folder below `runs/`.
        measure: Run all meters every N steps, in addition to one steady step. 0: never.
        prepared: True if the launcher has checked the spec, created the run folder and printed the
            preflight, so that the ranks skip these.
    """

    spec: str
    overrides: tuple[str, ...] = ()
    resume: str | None = None
    accept_data: bool = False
    run_dir: Path | None = None
    json: bool = False
    strict: bool = False
    force: bool = False
    allow_import: bool = False
    quiet: bool = False
    tensorboard: bool = False
    measure: int = 0
    nnodes: int = 1
    max_restarts: int = 0
    rdzv_endpoint: str = ""
    rdzv_id: str = ""
    prepared: bool = False

    @property
    def wants_elastic(self) -> bool:
        """True if torch's elastic launcher is required: only for several nodes.

        ptrain's launcher handles restarts on one machine without a port that others can reach.
        """
        return self.nnodes > 1


def from_arguments(arguments: argparse.Namespace) -> Options:
    """Return the options of parsed arguments. Words that are no override name the SPEC.

    Raises:
        SpecError: There are several SPECs, or options contradict each other.
    """
    specs, overrides = split_arguments(arguments.words)
    if len(specs) > 1:
        raise input_error(
            "",
            f"expected one SPEC; got {' and '.join(specs)}",
            "Train the specs one after the other. Overrides have the form `a.b=c`, without spaces.",
        )
    if arguments.nnodes > 1 and not arguments.rdzv_endpoint:
        raise input_error(
            f"--nnodes {arguments.nnodes}",
            "several nodes need a rendezvous endpoint",
            "Add the same `--rdzv-endpoint HOST:PORT` on every node; HOST is one of the nodes.",
        )
    if arguments.nnodes > 1 and len(arguments.rdzv_id) < _MIN_ID_LENGTH:
        raise input_error(
            f"--rdzv-id {arguments.rdzv_id}".rstrip(),
            f"an id with fewer than {_MIN_ID_LENGTH} characters can be guessed",
            f"Add the same random id on every node, such as `--rdzv-id {secrets.token_hex(16)}`.",
        )
    if arguments.resume == "auto" and not arguments.run_dir:
        raise input_error(
            "--resume auto",
            "auto continues the run in --run-dir, which is not set",
            "Add `--run-dir DIR`, or continue a run with `--resume runs/latest`.",
        )
    if arguments.device:
        overrides.append(f"device={arguments.device}")
    rest = {
        name: value
        for name, value in vars(arguments).items()
        if name in Options.__dataclass_fields__ and name not in ("spec", "overrides")
    }
    rest["resume"] = _resolve_resume(arguments.resume)
    return Options(
        spec=specs[0] if specs else load_names().default, overrides=tuple(overrides), **rest
    )


def _resolve_resume(resume: str | None) -> str | None:
    """Return `--resume` as a full path, because a new run is about to replace `runs/latest`.

    Raises:
        SpecError: The folder does not exist.
    """
    if resume in (None, "auto"):
        return resume
    if resume == "":
        raise input_error("--resume", "the path is empty", _RESUME)
    path = Path(resume).resolve()
    if not path.is_dir():
        finding = "is a file, not a folder" if path.exists() else "no such folder"
        raise input_error(f"--resume {resume}", finding, _RESUME)
    return str(path)


def parse_options(argv: Sequence[str]) -> Options:
    """Parse the options of `python -m ptrain.train`. Raises SystemExit(2) for an unknown option."""
    parser = argparse.ArgumentParser(
        prog="python -m ptrain.train",
        description="Train SPEC on the ranks that torchrun started.",
        allow_abbrev=False,
    )
    add_arguments(parser, "train", without=("--chart",))
    # Intermixed: options may be between the SPEC and its overrides.
    return from_arguments(parser.parse_intermixed_args(strip_dashes(argv)))


def strip_dashes(argv: Sequence[str]) -> list[str]:
    """Remove the dashes of overrides: `--mesh.dp_shard=4` becomes `mesh.dp_shard=4`."""
    return [re.sub(r"^--(?=[a-z_]+(\.[a-z_]+)+=)", "", word) for word in argv]


def to_argv(options: Options) -> list[str]:
    """Return the command line that passes these options to a rank."""
    # Without the options of the launcher: nodes, restarts and rendezvous.
    argv = [options.spec, *options.overrides]
    switches = ("json", "strict", "force", "allow_import", "accept_data", "quiet", "tensorboard")
    named = (flag for flag in (*switches, "prepared") if getattr(options, flag))
    argv += ["--" + flag.replace("_", "-") for flag in named]
    if options.resume is not None:
        argv += ["--resume", options.resume]
    if options.run_dir is not None:
        argv += ["--run-dir", str(options.run_dir)]
    if options.measure:
        argv += ["--measure", str(options.measure)]
    return argv


def elastic_argv(options: Options) -> list[str]:
    """Return the command line options for torch's elastic launcher."""
    argv = ["--nnodes", str(options.nnodes), "--max-restarts", str(options.max_restarts)]
    if options.rdzv_endpoint:
        argv += ["--rdzv-endpoint", options.rdzv_endpoint]
    return [*argv, "--rdzv-id", options.rdzv_id] if options.rdzv_id else argv


def require_profiled_steps(spec: Spec) -> None:
    """Raise SpecError if a step to profile is not a step of the training."""
    steps = spec.train.steps
    if beyond := [step for step in spec.profile if not 1 <= step <= steps]:
        raise input_error(
            "profile",
            f"there is no step {beyond[0]}",
            f"Use steps from 1 to {steps}, or raise `train.steps`.",
        )


if TYPE_CHECKING:
    from ptrain.interpreter.program import Program
    from ptrain.train.exchange import Exchange

PLAIN, GUARDED = "ptrain.train", "ptrain.verification.guarded"


class StepGuard:
    """A guard of the steps of a training, on every rank. This base class checks nothing."""

    def __init__(self, *_: object) -> None:
        """Accept the arguments of `MakeGuard`."""

    def step_context(
        self, step: int, watch: AbstractContextManager[object]
    ) -> AbstractContextManager[object]:
        """Return the context of a step (from 0), which contains the context `watch`."""
        return watch

    def check_step(self, step: int, loss: float, norm: float | None) -> None:
        """Check a finished step.

        Args:
            step: The step, from 0.
            loss: The global loss.
            norm: The gradient norm before clipping. None: not computed.

        Raises:
            TrainingStopped: The check failed. Raised on all ranks.
        """


# Args: the program, its exchange, a predicate of the measured steps (from 0), and a function that
# returns the command that continues the run.
MakeGuard: TypeAlias = (
    "Callable[[Program, Exchange, Callable[[int], bool], Callable[[], str]], StepGuard]"
)


def rank_module(spec: Spec) -> str:
    """Return the module that runs a rank of a training of this spec."""
    return GUARDED if spec.verify_every else PLAIN
