"""`--resume PATH|auto`: fill a program from the checkpoint that it continues from."""

from __future__ import annotations

import shutil

from ptrain.interpreter.program import Program
from ptrain.train import checkpoint, lineage, manifest
from ptrain.train.candidates import AUTO, candidates, none_sound, require_fitting
from ptrain.train.exchange import Exchange
from ptrain.train.folder import RunFolder, shown
from ptrain.train.journal import LOG


def resume(program: Program, folder: RunFolder, asked: str | None, exchange: Exchange) -> int:
    """Fill the program as `asked`; the number of steps that are done already.

    `auto` takes the newest sound checkpoint of this run folder, else starts anew. A path is a
    checkpoint or a run folder.
    """
    if program.world.is_first:
        for half in manifest.half_written(folder.checkpoints):
            shutil.rmtree(half, ignore_errors=True)
    if asked is None:
        return 0
    path, found, complaints = checkpoint.newest(candidates(asked, folder), exchange)
    if path is None or found is None:
        if asked != AUTO or complaints:
            raise none_sound(asked, complaints)
        LOG.info("resume  no checkpoint yet: from the start")
        return 0
    _skip(complaints)
    require_fitting(program.spec, asked, path, found)
    checkpoint.load(program, path, found, exchange)
    for warning in lineage.warnings(found.trained, program.spec):
        LOG.warning("resume  %s", warning)
    was = f"{found.spec} on {found.world_size} ranks"
    LOG.info("resume  step %d of %s (saved by %s)", found.step, shown(path), was)
    return found.step


def _skip(complaints: list[str]) -> None:
    for complaint in complaints:
        LOG.warning("skipped: %s", complaint)
