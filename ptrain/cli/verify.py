"""`ptrain verify SPEC… [a.b=c …]`: run specs against one device; on failure name the culprit.

Like the parent of a training, this process stays free of torch and starts the ranks of each spec
itself; under a launcher it becomes a rank.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from argparse import ArgumentParser, Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ptrain.cli.arguments import add_spec_arguments, print_json
from ptrain.derivation.estimate import own_facts
from ptrain.errors import VerdictFailed, refused
from ptrain.selection.recompute import settled
from ptrain.spec.extras import require_transformers
from ptrain.spec.file_tier import require_file_tier
from ptrain.spec.load import load
from ptrain.spec.model import ExternalModel, ModelShape
from ptrain.spec.names import names
from ptrain.spec.overrides import split_arguments, sweeps
from ptrain.spec.spec import Spec
from ptrain.spec.write import to_yaml
from ptrain.train import environment
from ptrain.train.folder import RunFolder
from ptrain.train.heading import parts_of_ranks
from ptrain.train.launch import launch
from ptrain.units import format_bytes
from ptrain.verification import options
from ptrain.verification.alike import common, require_alike
from ptrain.verification.options import Options, source_of

# Parameters, gradients and their sum, two moments: what the reference has in fp64 beside each rank.
_REFERENCE_BYTES = 5 * 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One spec of the command: how it was written, and what it is."""

    title: str
    spec: Spec


def add_arguments(parser: ArgumentParser) -> None:
    add_spec_arguments(parser)
    options.add_arguments(parser)
    parser.add_argument(
        "--against", metavar="SPEC", help="compare directly with another mesh of the same training"
    )


def run(args: Namespace) -> int:
    """0 when every verdict holds, 1 when one fails."""
    options.require_steps(args.steps)
    if environment.launched():
        _become_rank(args)
    sources, overrides = split_arguments(args.arguments)
    jobs = [
        _checked(source, choice, allow_import=args.allow_import)
        for source in sources or [names().default]
        for choice in sweeps(overrides)
    ]
    other = _other(args, jobs)
    folder = Path(tempfile.mkdtemp(prefix="ptrain-"))  # 0700; stays, with its logs, if a rank fails
    (folder / "references").mkdir(mode=0o700)
    if other is not None:
        _start(other, args, folder / "other", account=folder / "account.pt")
    records = []
    for number, job in enumerate(jobs):
        if not args.json and len(jobs) > 1:
            print(*[""] * bool(number), job.title, sep="\n", flush=True)
        compare = folder / "account.pt" if other is not None else None
        records.append(_start(job, args, folder / str(number), compare=compare))
    if args.json:
        print_json(records if len(records) > 1 else records[0])
    shutil.rmtree(folder)
    holds = all(each["verdict"] == "holds" for each in records)
    return 0 if holds else VerdictFailed.exit_code


def _checked(source: str, overrides: tuple[str, ...], *, allow_import: bool) -> Job:
    """Raises what is wrong with the spec, before any rank starts and anything is written."""
    spec = settled(load(source_of(source), overrides))
    if isinstance(spec.model, ExternalModel) and not allow_import:
        finding = f"this would run code of {spec.model.target}"
        raise refused("model.target", finding, "allow it with --allow-import")
    require_transformers(spec.model)
    require_file_tier(spec)
    if isinstance(spec.model, ModelShape):
        _require_room(spec, own_facts(spec).numel)
    return Job(title=" ".join([source, *overrides]), spec=spec)


def _require_room(spec: Spec, numel: int) -> None:
    """Raises SpecError for a model that one device beside each rank cannot hold on this host."""
    needed = spec.world_size * numel * _REFERENCE_BYTES
    here = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > here:
        finding = (
            f"one device in fp64 beside each of {spec.world_size} ranks takes "
            f"{format_bytes(needed)} of the host, which has {format_bytes(here)}"
        )
        remedy = "verify the mesh and placement with a smaller model: model.layers=, model.hidden="
        raise refused("model", finding, remedy)


def _other(args: Namespace, jobs: list[Job]) -> Job | None:
    if args.against is None:
        return None
    other = _checked(args.against, (), allow_import=args.allow_import)
    for job in jobs:
        require_alike(common(job.spec), common(other.spec), f"--against {args.against}")
    return other


def _start(
    job: Job,
    args: Namespace,
    folder: Path,
    *,
    account: Path | None = None,
    compare: Path | None = None,
) -> dict[str, Any]:
    """The ranks of one spec; its record, empty where it only leaves an account."""
    (folder / "logs").mkdir(mode=0o700, parents=True)
    written = folder / "spec.resolved.yaml"
    written.write_text(to_yaml(job.spec.resolved), encoding="utf-8")
    asked = Options(
        spec=str(written),
        steps=args.steps,
        every_collective=args.every_collective,
        json=args.json,
        allow_import=args.allow_import,
        folder=folder,
        references=folder.parent / "references",
        account=account,
        compare=compare,
    )
    code = launch(
        options.to_argv(asked),
        num_ranks=job.spec.world_size,
        folder=RunFolder(folder),
        parts=parts_of_ranks(job.spec),
        module="ptrain.verification",
    )
    if code not in (0, VerdictFailed.exit_code):
        raise SystemExit(code)  # interrupted
    if account is not None:
        return {}
    found: dict[str, Any] = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    return found


def _become_rank(args: Namespace) -> None:
    if args.against is not None:
        finding = "the other spec has ranks of its own, and these are started already"
        raise refused("--against", finding, "start `ptrain verify` without torchrun")
    words = [*args.arguments, "--steps", str(args.steps)]
    for flag in ("every_collective", "json", "allow_import"):
        words += ["--" + flag.replace("_", "-")] if getattr(args, flag) else []
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "ptrain.verification", *words])
