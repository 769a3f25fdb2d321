"""The command `ptrain verify SPEC… [a.b=c …]`: compare specs with a single-device reference.

If a comparison fails, the command names the root cause. Like the parent of a training, this process
does not import torch, and starts the ranks of each spec itself. Under a launcher it becomes a rank.
"""

from __future__ import annotations

import json
import shlex
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ptrain.cli.arguments import print_json
from ptrain.errors import VerdictFailed
from ptrain.facts.parameters import count_weights
from ptrain.files import temporary_folder
from ptrain.installed import require_torch
from ptrain.plan.lower import built_in_facts
from ptrain.report.screen import command_line, next_line, print_lines, print_screen
from ptrain.selection.recompute import resolve_auto
from ptrain.spec.load import expand_sweeps, load, split_arguments
from ptrain.spec.model import ModelShape
from ptrain.spec.names import load_names
from ptrain.spec.spec import Spec, require_file_tier, require_leave, require_transformers
from ptrain.spec.write import to_yaml
from ptrain.train import environment
from ptrain.train.folder import RunFolder
from ptrain.train.heading import rank_stage_texts, require_host_memory
from ptrain.train.launch import launch_ranks
from ptrain.verification import options
from ptrain.verification.options import VerifyOptions, spec_source, to_argv

# Bytes per parameter of a reference: parameters, gradients, their sum and two moments in fp64. Each
# rank has a reference.
_REFERENCE_BYTES = 5 * 8


@dataclass(frozen=True, slots=True, kw_only=True)
class TitledSpec:
    """A spec of the command, with the source and the overrides as its title."""

    title: str
    spec: Spec


def run(args: Namespace) -> int:
    """Verify every spec; return 0 if every verdict holds, else 1."""
    options.require_steps(args.steps)
    if environment.is_launched():
        _become_rank(args)
    require_torch()
    sources, overrides = split_arguments(args.arguments)
    jobs = [
        _load_checked(source, choice, allow_import=args.allow_import)
        for source in sources or [load_names().default]
        for choice in expand_sweeps(overrides)
    ]
    with temporary_folder(keeps_failure=True) as folder:
        try:
            records = _verify_all(jobs, args, folder)
        except VerificationInterrupted as interrupted:
            return interrupted.code
    if args.json:
        print_json(records if len(records) > 1 else records[0])
    holds = all(record["verdict"] == "holds" for record in records)
    if not args.json:
        train = command_line("train", args.arguments, allow_import=args.allow_import)
        command = train if holds else shlex.join([*args.typed, "--verbose"])
        print_screen("", next_line(command, "ptrain verify --help"))
    return 0 if holds else VerdictFailed.exit_code


def _verify_all(jobs: Sequence[TitledSpec], args: Namespace, folder: Path) -> list[dict[str, Any]]:
    """Verify all jobs one after the other, and return their records.

    Args:
        jobs: The specs to verify.
        args: The options of the command.
        folder: A new private folder.
    """
    records = []
    for number, job in enumerate(jobs):
        if not args.json and len(jobs) > 1:
            print_lines(*[""] * bool(number), job.title)
        records.append(verify_spec(job.spec, _verify_options(args), folder / str(number)))
    return records


def _load_checked(source: str, overrides: tuple[str, ...], *, allow_import: bool) -> TitledSpec:
    """Load a spec and check it before any rank starts and anything is written.

    Raises:
        SpecError: If the spec is wrong, needs an extra that is missing, or exceeds the host's
            memory.
    """
    spec = resolve_auto(load(spec_source(source), overrides))
    require_leave(spec, allow_import=allow_import)
    require_transformers(spec.model)
    require_file_tier(spec)
    if isinstance(spec.model, ModelShape):
        _require_reference_memory(spec, count_weights(built_in_facts(spec)))
    return TitledSpec(title=" ".join([source, *overrides]), spec=spec)


def _require_reference_memory(spec: Spec, numel: int) -> None:
    """Check that this host can hold the references of a model, one for each rank.

    Raises:
        SpecError: If it cannot.
    """
    require_host_memory(
        spec.world_size * numel * _REFERENCE_BYTES,
        f"{spec.world_size} references in fp64, one for each rank,",
        "Verify the mesh and the placement with a smaller model: `model.preset=llama-tiny`.",
    )


def _verify_options(args: Namespace) -> VerifyOptions:
    """Return the options that apply to every spec."""
    return VerifyOptions(steps=args.steps, **{flag: getattr(args, flag) for flag in options.FLAGS})


def _become_rank(args: Namespace) -> None:
    """Replace this process by a rank of the verification."""
    words = [*args.arguments, *options.option_words(_verify_options(args))]
    environment.exec_module("ptrain.verification", words)


class VerificationInterrupted(Exception):
    """The error raised when a signal ends a verification; `code` is the command's exit code."""

    def __init__(self, code: int) -> None:
        super().__init__(f"interrupted, exit code {code}")
        self.code = code


def verify_spec(spec: Spec, options: VerifyOptions, folder: Path) -> dict[str, Any]:
    """Verify a spec in a private folder and return its record.

    Args:
        spec: The resolved spec; it replaces `options.spec`.
        options: The options of the verification.
        folder: A folder for logs and results; it replaces `options.folder`.

    Returns:
        The result record.

    Raises:
        RankFailed: If a rank fails.
        PtrainError: If a rank reports wrong input.
        VerificationInterrupted: If a signal ended the ranks.
    """
    (folder / "logs").mkdir(mode=0o700, parents=True)
    written = folder / "spec.resolved.yaml"
    written.write_text(to_yaml(spec.resolved), encoding="utf-8")
    argv = to_argv(replace(options, spec=str(written), overrides=(), folder=folder))
    run = RunFolder(folder)
    code = launch_ranks(
        argv,
        num_ranks=spec.world_size,
        folder=run,
        parts=rank_stage_texts(spec),
        module="ptrain.verification",
    )
    if code not in (0, VerdictFailed.exit_code):
        raise VerificationInterrupted(code)
    record: dict[str, Any] = json.loads(run.summary.read_text(encoding="utf-8"))
    return record
