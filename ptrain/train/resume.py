"""`--resume PATH|auto`: fill a program from the checkpoint that it continues from."""

from __future__ import annotations

import hashlib
import secrets
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ptrain.data.source import SampleSource, Split
from ptrain.errors import refused
from ptrain.interpreter.program import Program
from ptrain.spec.spec import Spec
from ptrain.train import checkpoint, finite, lineage, manifest
from ptrain.train.exchange import Exchange
from ptrain.train.folder import AUTO, RunFolder, candidates, none_sound, require_fitting, shown
from ptrain.train.journal import LOG
from ptrain.train.manifest import Manifest, step_of

_BLOCK, _NUM_BLOCKS = 1 << 20, 256  # bytes; a larger file than all blocks is not read in full
_LEAST_BLOCKS = 16  # of each of many files: ranks wait for rank 0, which reads them


def resume(
    program: Program,
    folder: RunFolder,
    source: str | None,
    exchange: Exchange,
    accept_data: bool = False,
) -> int:
    """Fill the program from `source`; return the number of steps that are done already.

    `auto` takes the newest sound checkpoint of this run folder, else starts anew. A path is a
    checkpoint or a run folder. The next sample is the one after those of the checkpoint, whatever
    its `batch.global`; the learning rate's schedule goes on by steps. Raises SpecError if the
    program's data are not those of the checkpoint; with `accept_data` it only warns.
    """
    if program.world.is_first:
        for half in manifest.half_written(folder.checkpoints):
            shutil.rmtree(half, ignore_errors=True)
    if source is None:
        return 0
    paths = candidates(source, folder)
    path, verified, complaints = _fill(program, paths, source, exchange, accept_data)
    if path is None or verified is None:
        if source != AUTO or complaints:
            raise none_sound(source, complaints)
        LOG.info("resume  no checkpoint yet: from the start")
        return 0
    _set_aside(folder, verified.step, exchange)
    size = program.spec.batch.global_samples
    trained = dict(lineage.leaves(verified.trained))
    alike = verified.step * int(str(trained.get("batch.global", size)))  # older: of equal steps
    before = alike if verified.samples is None else verified.samples
    program.sample_offset = before - verified.step * size
    for warning in lineage.warnings(verified.trained, program.spec):
        LOG.warning("resume  %s", warning)
    was = f"{verified.spec} on {verified.world_size} ranks"
    LOG.info("resume  step %d of %s (saved by %s)", verified.step, shown(path), was)
    return verified.step


def data_prints(spec: Spec, source: SampleSource) -> dict[str, tuple[int, str, int]]:
    """Return size, digest and time of modification of a training's data, by the key of the spec.

    They are bytes and SHA-256 of a file, a digest of a built-in text, and the number of samples of
    a user's dataset, whose content is unknown. Up to 256 MiB of a file are digested in full. Of a
    larger one 256 blocks of 1 MiB are, evenly spaced from its first byte to its last: a change of
    tokens between these blocks is not noticed. Several files share the 256 MiB.
    """
    data = spec.data
    if data.is_of_files:
        paths = {"data.path": data.path, "data.loss_mask": data.loss_mask}
        for index, part in enumerate(data.sources or ()):
            paths[f"data.sources.{index}.path"] = part.path
            paths[f"data.sources.{index}.loss_mask"] = part.loss_mask
        files = {key: Path(path) for key, path in paths.items() if path}
        blocks = max(_NUM_BLOCKS // len(files), _LEAST_BLOCKS)
        return {key: file_print(path, blocks) for key, path in files.items()}
    is_user_code = data.function is not None
    size = source.num_samples(spec.batch.window, Split.TRAIN) if is_user_code else 0
    return {"data": (size, source.digest() or "", 0)}


def file_print(path: Path, blocks: int) -> tuple[int, str, int]:
    """Return the entry of a file in `data_prints`, of which at most so many blocks are read."""
    status, digest = path.stat(), hashlib.sha256()
    size, what, last = status.st_size, "sha256", blocks - 1
    places = list(range(0, size, _BLOCK))
    if len(places) > blocks:
        what = f"sha256 of {blocks} blocks"
        places = [(size - _BLOCK) * number // last for number in range(blocks)]
    with path.open("rb") as file:
        for place in places:
            file.seek(place)
            digest.update(file.read(_BLOCK))
    return size, f"{what}: {digest.hexdigest()}", status.st_mtime_ns


def _changed_data(was: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return a finding for each name whose data differ. `lineage.warnings` reports names that only
    one side has: the spec was changed."""
    findings = []
    for name in sorted(was.keys() & now.keys()):
        (before, old, _), (size, digest, _) = was[name], now[name]
        if before != size:
            unit = "bytes" if digest else "samples"
            findings.append(f"{name} has {size} {unit}, {before} when it was saved")
        elif old != digest:
            findings.append(f"{name} has other content than when it was saved")
    return findings


def _fill(
    program: Program, paths: Sequence[Path], source: str, exchange: Exchange, accept_data: bool
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
        if changes := "; ".join(_changed_data(verified.data, program.data_prints)):
            finding = f"its training data changed: {changes}"
            remedy = "restore the data, or continue with the changed data: add --accept-data"
            if not accept_data:
                raise refused(f"checkpoint {shown(path)}", finding, remedy)
            LOG.warning("resume  %s", changes)
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
