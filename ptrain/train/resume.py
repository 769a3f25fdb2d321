"""`--resume PATH|auto`: fill a program from the checkpoint that it continues from."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

from ptrain.errors import refused
from ptrain.interpreter.program import Program
from ptrain.train import checkpoint, finite, lineage, manifest
from ptrain.train.candidates import AUTO, candidates, none_sound, require_fitting
from ptrain.train.exchange import Exchange
from ptrain.train.folder import RunFolder, shown
from ptrain.train.journal import LOG
from ptrain.train.manifest import Manifest, step_of


def resume(program: Program, folder: RunFolder, source: str | None, exchange: Exchange) -> int:
    """Fill the program from `source`; return the number of steps that are done already.

    `auto` takes the newest sound checkpoint of this run folder, else starts anew. A path is a
    checkpoint or a run folder.
    """
    if program.world.is_first:
        for half in manifest.half_written(folder.checkpoints):
            shutil.rmtree(half, ignore_errors=True)
    if source is None:
        return 0
    paths = candidates(source, folder)
    path, verified, complaints = _fill(program, paths, source, exchange)
    if path is None or verified is None:
        if source != AUTO or complaints:
            raise none_sound(source, complaints)
        LOG.info("resume  no checkpoint yet: from the start")
        return 0
    _set_aside(folder, verified.step, exchange)
    for warning in lineage.warnings(verified.trained, program.spec):
        LOG.warning("resume  %s", warning)
    was = f"{verified.spec} on {verified.world_size} ranks"
    LOG.info("resume  step %d of %s (saved by %s)", verified.step, shown(path), was)
    return verified.step


def _fill(
    program: Program, paths: Sequence[Path], source: str, exchange: Exchange
) -> tuple[Path | None, Manifest | None, list[str]]:
    """Load the first of rank 0's `paths` that is sound and holds finite values alone; which it is,
    its manifest, and what is wrong with those before it.

    What a checkpoint holds is seen when it is loaded. The next one overwrites it all: one that
    lacks a tensor of the program is refused. Where none is left, nothing may be trained.
    """
    complaints: list[str] = []
    unsaid: list[str] = []
    remaining = [Path(text) for text in exchange.first([str(path) for path in paths])]
    while True:
        path, verified, others = checkpoint.newest(remaining, exchange)
        complaints += others
        if path is None or verified is None:
            return None, None, complaints
        _skip([*unsaid, *others])
        require_fitting(program.spec, source, path, verified)
        checkpoint.load(program, path, verified, exchange)
        problem = finite.complaint(program, exchange)
        if not problem:
            return path, verified, complaints
        unsaid = [f"checkpoint {shown(path)}: {problem}"]
        complaints += unsaid
        remaining = remaining[remaining.index(path) + 1 :]


def _set_aside(folder: RunFolder, step: int, exchange: Exchange) -> None:
    """What this run folder has of later steps was passed over, or is of a training that this one
    leaves: under its name the next checkpoint of that step would be taken for saved. Raises
    SpecError, on all ranks, where it cannot be renamed."""
    problem = ""
    if exchange.world.is_first:
        try:
            _rename(path for path in manifest.complete(folder.checkpoints) if step_of(path) > step)
        except OSError as error:
            problem = f"a later checkpoint cannot be set aside: {error}"
    if problem := exchange.first(problem):
        remedy = "make it writable, or continue into another folder: --run-dir DIR"
        raise refused(f"checkpoints in {shown(folder.path)}", problem, remedy)


def _rename(paths: Iterable[Path]) -> None:
    for path in paths:
        aside = path.with_name(f"{path.name}.aside-{secrets.token_hex(4)}")
        path.rename(aside)
        LOG.warning("set aside: %s, now %s", shown(path), aside.name)


def _skip(complaints: list[str]) -> None:
    for complaint in complaints:
        LOG.warning("skipped: %s", complaint)
