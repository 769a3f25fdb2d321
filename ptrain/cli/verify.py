"""`ptrain verify SPEC… [a.b=c …]`: run specs against one device; on failure name the root cause.

Like the parent of a training, this process stays free of torch and starts the ranks of each spec
itself; under a launcher it becomes a rank.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ptrain.cli.arguments import print_json
from ptrain.errors import VerdictFailed, refused
from ptrain.installed import require_torch
from ptrain.plan.lower import own_facts
from ptrain.report.screen import command_line, next_line, show
from ptrain.selection.recompute import resolve_auto
from ptrain.spec.extras import require_leave, require_transformers
from ptrain.spec.file_tier import require_file_tier
from ptrain.spec.load import load, parse_override, split_arguments, sweeps
from ptrain.spec.model import ModelShape
from ptrain.spec.names import names
from ptrain.spec.spec import Spec
from ptrain.train import environment
from ptrain.train.host_memory import require_host_memory
from ptrain.verification import options
from ptrain.verification.options import VerifyOptions, source_of
from ptrain.verification.same_training import common, is_within, require_alike
from ptrain.verification.start import Interrupted, start

# Parameters, gradients and their sum, two moments: what the reference has in fp64 beside each rank.
_REFERENCE_BYTES = 5 * 8


@dataclass(frozen=True, slots=True, kw_only=True)
class TitledSpec:
    """One spec of the command: how it was written, and what it is."""

    title: str
    spec: Spec


def run(args: Namespace) -> int:
    """0 when every verdict holds, 1 when one fails."""
    options.require_steps(args.steps)
    if environment.launched():
        _become_rank(args)
    require_torch()
    sources, overrides = split_arguments(args.arguments)
    jobs = [
        _checked(source, choice, allow_import=args.allow_import)
        for source in sources or [names().default]
        for choice in sweeps(overrides)
    ]
    other = _other(args, jobs, overrides)
    folder = Path(tempfile.mkdtemp(prefix="ptrain-"))  # 0700; stays, with its logs, if a rank fails
    try:
        records = _started(jobs, other, args, folder)
    except Interrupted as interrupted:
        shutil.rmtree(folder)
        return interrupted.code
    shutil.rmtree(folder)
    if args.json:
        print_json(records if len(records) > 1 else records[0])
    holds = all(record["verdict"] == "holds" for record in records)
    if not args.json:
        train = command_line("train", args.arguments, allow_import=args.allow_import)
        command = train if holds else shlex.join([*args.typed, "--verbose"])
        show("", next_line(command, "ptrain verify --help"))
    return 0 if holds else VerdictFailed.exit_code


def _started(
    jobs: Sequence[TitledSpec], other: TitledSpec | None, args: Namespace, folder: Path
) -> list[dict[str, Any]]:
    """The records of all jobs, one after the other; the other mesh goes first."""
    options = VerifyOptions(
        spec="",
        steps=args.steps,
        quick=args.quick,
        every_collective=args.every_collective,
        verbose=args.verbose,
        json=args.json,
        allow_import=args.allow_import,
        references=folder / "references",
    )
    (folder / "references").mkdir(mode=0o700)
    if other is not None:
        account = folder / "account.pt"
        start(other.spec, replace(options, account=account), folder / "other")
        options = replace(options, compare=account)
    records = []
    for number, job in enumerate(jobs):
        if not args.json and len(jobs) > 1:
            print(*[""] * bool(number), job.title, sep="\n", flush=True)
        records.append(start(job.spec, options, folder / str(number)))
    return records


def _checked(source: str, overrides: tuple[str, ...], *, allow_import: bool) -> TitledSpec:
    """Raises what is wrong with the spec, before any rank starts and anything is written."""
    spec = resolve_auto(load(source_of(source), overrides))
    require_leave(spec, allow_import=allow_import)
    require_transformers(spec.model)
    require_file_tier(spec)
    if isinstance(spec.model, ModelShape):
        _require_room(spec, own_facts(spec).numel)
    return TitledSpec(title=" ".join([source, *overrides]), spec=spec)


def _require_room(spec: Spec, numel: int) -> None:
    """Raises SpecError for a model whose references, one for each rank, this host cannot hold."""
    require_host_memory(
        spec.world_size * numel * _REFERENCE_BYTES,
        f"{spec.world_size} references in fp64, one for each rank,",
        "Verify the mesh and the placement with a smaller model: `model.preset=llama-tiny`.",
    )


def _other(args: Namespace, jobs: list[TitledSpec], overrides: Sequence[str]) -> TitledSpec | None:
    """What is of the training and not of its mesh holds for both; of a list of values the first,
    so that the others are refused."""
    if args.against is None:
        return None
    keys = common(jobs[0].spec)
    shared = [override for override in overrides if is_within(parse_override(override).route, keys)]
    other = _checked(args.against, next(sweeps(shared)), allow_import=args.allow_import)
    for job in jobs:
        require_alike(common(job.spec), common(other.spec), f"--against {args.against}")
    return other


def _become_rank(args: Namespace) -> None:
    if args.against is not None:
        raise refused(
            "--against",
            "starts the ranks of both specs, and torchrun has started ranks already",
            "Run `ptrain verify` without torchrun.",
        )
    words = [*args.arguments, "--steps", str(args.steps)]
    for flag in ("quick", "every_collective", "verbose", "json", "allow_import"):
        words += ["--" + flag.replace("_", "-")] if getattr(args, flag) else []
    sys.stdout.flush()
    words = [sys.executable, "-P", "-m", "ptrain.verification", *words]
    os.execve(sys.executable, words, environment.of_ptrain())
