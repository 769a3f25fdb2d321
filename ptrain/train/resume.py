"""`--resume PATH|auto`: which checkpoint to continue from."""

from __future__ import annotations

import shutil
from pathlib import Path

from ptrain.errors import PtrainError
from ptrain.interpreter.program import Program
from ptrain.train import checkpoint, lineage, manifest
from ptrain.train.exchange import Exchange
from ptrain.train.folder import RunFolder, shown
from ptrain.train.journal import LOG

AUTO = "auto"


def resume(program: Program, folder: RunFolder, asked: str | None, exchange: Exchange) -> int:
    """Fill the program as `asked`; the number of steps that are done already.

    `auto` takes the newest sound checkpoint of this run folder, else of the newest run of the same
    spec beside it, else starts anew. A path is a checkpoint or a run folder.
    """
    if program.world.is_first:
        for half in manifest.half_written(folder.checkpoints):
            shutil.rmtree(half, ignore_errors=True)
    if asked is None:
        return 0
    candidates = _auto(folder, program.spec.name) if asked == AUTO else _given(Path(asked))
    path, found, complaints = checkpoint.newest(candidates, exchange)
    for complaint in complaints:
        LOG.warning("skipped: %s", complaint)
    if path is None or found is None:
        if asked == AUTO and not complaints:
            LOG.info("resume  no checkpoint yet: from the start")
            return 0
        lacks = "no sound checkpoint there" if complaints else "holds no checkpoint"
        remedy = "train with checkpoint.every=N or checkpoint.at_end=true, or leave --resume out"
        told = f"--resume {asked}: {lacks}\n  remedy: {remedy}"
        raise PtrainError("\n".join([*complaints, told]))
    steps = program.spec.train.steps
    if found.step >= steps:
        raise PtrainError(
            f"--resume {asked}: already at step {found.step} of {steps}\n"
            f"  remedy: set train.steps above {found.step}"
        )
    checkpoint.load(program, path, found, exchange)
    for warning in lineage.warnings(found.trained, program.spec):
        LOG.warning("resume  %s", warning)
    was = f"{found.spec} on {found.world_size} ranks"
    LOG.info("resume  step %d of %s (saved by %s)", found.step, shown(path), was)
    return found.step


def _auto(folder: RunFolder, name: str) -> list[Path]:
    """Checkpoints of this run, then those of runs of the same name beside it; newest first."""
    runs = sorted(folder.path.parent.glob(f"*-{name}*"), reverse=True)
    beside = [
        path
        for run in runs
        if run != folder.path
        for path in manifest.complete(run / "checkpoints")
        if _spec_name(path) == name
    ]
    return [*manifest.complete(folder.checkpoints), *beside]


def _spec_name(path: Path) -> str | None:
    """Whose checkpoint it is; nobody's if its manifest is damaged, which ends no other run."""
    try:
        return manifest.read(path).spec
    except PtrainError as error:
        LOG.warning("skipped: %s", error)
        return None


def _given(path: Path) -> list[Path]:
    """A checkpoint, or those of a run folder or of its `checkpoints/`, newest first."""
    if (path / manifest.NAME).exists() or manifest.is_name(path.name):
        return [path]
    return manifest.complete(path / "checkpoints") or manifest.complete(path)
