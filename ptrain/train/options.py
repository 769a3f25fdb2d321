"""The command line of a training, shared by `ptrain train` and `python -m ptrain.train`.

What is trained stands in the spec; these options say how the command behaves. Torch-free.
"""

from __future__ import annotations

import argparse
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ptrain.errors import refused
from ptrain.spec.load import split_arguments
from ptrain.spec.names import names

_UNGUESSED = 16
_RESUME = "give a run folder such as runs/latest, one of its checkpoints/step-N, or auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """`run_dir` None: a new folder below `runs/`. `measure` N: full meters every N steps, beside
    the one steady step that is always measured. `prepared`: our launcher has checked the spec,
    made the run folder and printed the preflight, so that the ranks need not."""

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
        """Whether torch's elastic launcher is needed: for several nodes alone. Restarts on this
        machine are our own launcher's, which nobody outside can reach."""
        return self.nnodes > 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """All options; `from_arguments` reads the result."""
    add = parser.add_argument
    add(
        "words",
        nargs="*",
        metavar="SPEC a.b=c",
        help=f"a spec's name or file (without one: {names().default}), then overrides",
    )
    add(
        "--resume",
        metavar="PATH|auto",
        help="continue from a checkpoint or a run folder; auto: from --run-dir's own, if any",
    )
    add("--accept-data", action="store_true", help="resume although the training data changed")
    add("--run-dir", type=Path, metavar="DIR", help="the run folder (default: a new one in runs/)")
    add("--json", action="store_true", help="print only the result record, as JSON")
    add("--strict", action="store_true", help="exit 1 when predicted and measured differ")
    add(
        "--force",
        action="store_true",
        help="train even if the prediction does not fit, or the ranks are those of several nodes",
    )
    add("--device", choices=("auto", "cpu", "cuda"), help="short for device=…")
    add("--allow-import", action="store_true", help="let the spec's `target:` import code")
    add("--quiet", action="store_true", help="no lines per step")
    add("--tensorboard", action="store_true", help="also write TensorBoard events")
    add(
        "--measure", type=_count, default=0, metavar="N", help="full meters every N steps (0: none)"
    )
    add("--nnodes", type=_nodes, default=1, help="nodes (torch's elastic launcher)")
    add("--max-restarts", type=_count, default=0, help="start failed ranks anew so often")
    add("--rdzv-endpoint", default="", metavar="HOST:PORT", help="where nodes meet")
    add("--rdzv-id", default="", metavar="ID", help="a random id, equal on all nodes")
    add("--prepared", action="store_true", help=argparse.SUPPRESS)


def _count(text: str) -> int:
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"must be 0 or more; got {number}")
    return number


def _nodes(text: str) -> int:
    if (number := _count(text)) == 0:
        raise argparse.ArgumentTypeError("must be 1 or more; got 0")
    return number


def from_arguments(arguments: argparse.Namespace) -> Options:
    """The word that is no override is the SPEC; without one the default is trained."""
    specs, overrides = split_arguments(arguments.words)
    if len(specs) > 1:
        raise refused(
            "",
            f"a training takes one SPEC; got {' and '.join(specs)}",
            "train them one by one; an override is a.b=c, without blanks",
        )
    if arguments.nnodes > 1 and not arguments.rdzv_endpoint:
        raise refused(
            f"--nnodes {arguments.nnodes}",
            "the nodes have no place to meet",
            "give every node the same --rdzv-endpoint HOST:PORT, HOST being one of them",
        )
    if arguments.nnodes > 1 and len(arguments.rdzv_id) < _UNGUESSED:
        raise refused(
            f"--rdzv-id {arguments.rdzv_id}".rstrip(),
            f"an id of under {_UNGUESSED} characters is guessed by who wants the job",
            f"give every node the same random one, such as --rdzv-id {secrets.token_hex(16)}",
        )
    if arguments.resume == "auto" and not arguments.run_dir:
        raise refused(
            "--resume auto",
            "names no run: auto continues the run of --run-dir, and a new one has no checkpoint",
            "add --run-dir DIR, or name the run to continue: --resume runs/latest",
        )
    if arguments.device:
        overrides.append(f"device={arguments.device}")
    rest = {
        name: value
        for name, value in vars(arguments).items()
        if name in Options.__dataclass_fields__ and name not in ("spec", "overrides")
    }
    rest["resume"] = _resolved(arguments.resume)
    return Options(spec=specs[0] if specs else names().default, overrides=tuple(overrides), **rest)


def _resolved(resume: str | None) -> str | None:
    """As a full path: a new run is about to become `runs/latest`."""
    if resume in (None, "auto"):
        return resume
    if resume == "":
        raise refused("--resume", "no folder is named", _RESUME)
    path = Path(resume).resolve()
    if not path.is_dir():
        finding = "is a file, not a folder" if path.exists() else "no such folder"
        raise refused(f"--resume {resume}", finding, _RESUME)
    return str(path)


def parse(argv: Sequence[str]) -> Options:
    """Options of `python -m ptrain.train`; leaves by SystemExit(2) for what it does not know."""
    parser = argparse.ArgumentParser(
        prog="python -m ptrain.train", description="Train SPEC on the ranks that torchrun started."
    )
    add_arguments(parser)
    return from_arguments(parser.parse_intermixed_args(dotlist(argv)))


def dotlist(argv: Sequence[str]) -> list[str]:
    """`--mesh.dp_shard=4` is accepted for `mesh.dp_shard=4`."""
    return [re.sub(r"^--(?=[a-z_]+(\.[a-z_]+)+=)", "", word) for word in argv]


def to_argv(options: Options) -> list[str]:
    """The command line that gives these options to a rank."""
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
    """Return what torch's elastic launcher is told beside the ranks' own options."""
    argv = ["--nnodes", str(options.nnodes), "--max-restarts", str(options.max_restarts)]
    if options.rdzv_endpoint:
        argv += ["--rdzv-endpoint", options.rdzv_endpoint]
    return [*argv, "--rdzv-id", options.rdzv_id] if options.rdzv_id else argv
