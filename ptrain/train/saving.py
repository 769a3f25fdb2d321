"""Saving a checkpoint through torch.distributed.checkpoint, at once or in the background.

A checkpoint is saved into `step-N.tmp-…`, hashed, and renamed. A folder with its final name is
therefore complete, and none is ever overwritten. It contains only tensors; all other state is JSON.

With `checkpoint.background` a step waits only until the tensors are copied to host memory. A thread
of each rank writes the copies while training continues. One save runs at a time: the next one waits
for it, and so do the end of the training and a stop by a signal.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import signal
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.staging import BlockingAsyncStager

from ptrain.errors import PtrainError, RankFailed, SpecError, input_error
from ptrain.files import missing_space
from ptrain.interpreter.program import Program
from ptrain.train import finite, manifest
from ptrain.train.exchange import Exchange
from ptrain.train.folder import display_path
from ptrain.train.journal import LOG
from ptrain.train.manifest import Manifest
from ptrain.train.rank_start import Interrupts
from ptrain.units import leaves

METADATA = ".metadata"  # torch's file with the index of the tensors
_RANK_FILE = re.compile(r"__(\d+)_\d+\.distcp")  # torch's file names; the first number is the rank


def save_checkpoint(program: Program, parent: Path, step: int, exchange: Exchange) -> Path:
    """Write the checkpoint `parent/step-N`. All ranks call it.

    Args:
        program: The program to save.
        parent: The folder of the checkpoints.
        step: The number of finished steps.
        exchange: The exchange of the ranks.

    Returns:
        The folder of the checkpoint. An existing one is returned unchanged.

    Raises:
        PtrainError: A rank could not write its files, or the disk has less space than they need.
        TrainingStopped: A value is not finite. Raised before anything is written.
    """
    if pending := begin_save(program, parent, step, exchange):
        with suppress_single_process_warning():
            write_checkpoint(pending, exchange)
    return parent / manifest.folder_name(step)


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingCheckpoint:
    """A checkpoint that has not been written.

    Attributes:
        final: The folder of the complete checkpoint.
        temporary: The folder until then.
        state: The tensors of this rank.
        manifest: The manifest, without the files.
        began: When the save began (`time.monotonic`).
    """

    final: Path
    temporary: Path
    state: dict[str, Any]
    manifest: Manifest
    began: float


def begin_save(
    program: Program, parent: Path, step: int, exchange: Exchange
) -> PendingCheckpoint | None:
    """Return the checkpoint of a step, before it is written. All ranks call it.

    Args:
        program: The program to save. The state of the result consists of its live tensors.
        parent: The folder of the checkpoints.
        step: The number of finished steps.
        exchange: The exchange of the ranks.

    Returns:
        None if the checkpoint exists: the run was resumed from it and has done no step since.

    Raises:
        PtrainError: The disk has less space than the tensors need.
        TrainingStopped: A value is not finite.
    """
    began, name = time.monotonic(), manifest.folder_name(step)
    # The ranks share a temporary folder. Its random name differs from leftovers of a killed job.
    token = exchange.broadcast(secrets.token_hex(4))
    final, temporary = parent / name, parent / f"{name}.tmp-{token}"
    if exchange.broadcast(final.exists()):
        return None
    finite.require_finite(program, step, exchange)
    state = program.state_dict()
    needed = _checkpoint_bytes(program, state, exchange)
    if problem := exchange.broadcast(missing_space(parent, needed)):
        raise _unwritable_error(final, problem)
    described = Manifest(
        step=step,
        spec=program.spec.name,
        world_size=program.world.size,
        torch=torch.__version__,
        files={},
        trained=manifest.trained_sections(program.spec),
        samples=step * program.spec.batch.global_samples + program.sample_offset,
        data=program.data_prints,
        tensor_bytes=needed,
    )
    return PendingCheckpoint(
        final=final, temporary=temporary, state=state, manifest=described, began=began
    )


def write_checkpoint(pending: PendingCheckpoint, exchange: Exchange) -> None:
    """Write a checkpoint and give it its final name. All ranks call it.

    Args:
        pending: The checkpoint.
        exchange: An exchange of the ranks that nothing else uses meanwhile.

    Raises:
        PtrainError: A rank could not write its files. Nothing of the checkpoint is left.
    """
    temporary, rank = pending.temporary, exchange.world.rank
    try:
        temporary.mkdir(mode=0o700, parents=True, exist_ok=True)
        _write_tensors(pending.state, temporary, exchange)
        files = manifest.file_digests(temporary, _list_rank_files(rank, temporary))
    except (OSError, CheckpointException) as error:
        problem, files = f"rank {rank}: {_error_text(error)}", {}
    else:
        problem = ""
    answers = exchange.gather({"problem": problem, "files": files})
    problems = [answer["problem"] for answer in answers if answer["problem"]]
    if exchange.world.is_first and not problems:
        try:
            _commit_checkpoint(pending, answers)
        except OSError as error:
            problems = [_error_text(error)]
    # No rank ends or looks for the final folder before rank 0 has answered.
    if problems := exchange.broadcast(problems):
        shutil.rmtree(temporary, ignore_errors=True)
        raise _unwritable_error(pending.final, problems[0])


def remove_older(program: Program, parent: Path) -> None:
    """Remove the checkpoints that the spec does not keep, on rank 0, after a save.

    A checkpoint that cannot be removed gives a warning, and the training continues.

    Args:
        program: The program, whose spec has `checkpoint.keep`.
        parent: The folder of the checkpoints.
    """
    if not program.world.is_first:
        return
    try:
        for path in manifest.remove_surplus(parent, program.spec.checkpoint.keep):
            LOG.info("removed  %s", display_path(path))
    except OSError as error:
        LOG.warning("warning: an older checkpoint cannot be removed: %s", error)


def _checkpoint_bytes(program: Program, state: Mapping[str, Any], exchange: Exchange) -> int:
    """Return the bytes of the full tensors of all ranks, each counted once."""
    # Full shapes: a rank has all names, except in a pipeline.
    is_asked = program.world.is_first or program.plan.pipeline is not None
    own = {name: value.nbytes for name, value in leaves(state)} if is_asked else {}
    sizes = exchange.gather(own)
    return sum({name: size for of_rank in sizes for name, size in of_rank.items()}.values())


def _unwritable_error(final: Path, problem: str) -> SpecError:
    """Return the error of a checkpoint that cannot be written."""
    return input_error(
        f"checkpoint {display_path(final)}",
        f"is not writable: {problem}",
        "Free some space, or use another folder with `--run-dir DIR`.",
    )


def _write_tensors(state: dict[str, Any], folder: Path, exchange: Exchange) -> None:
    """Write this rank's tensors with torch's FileSystemWriter."""
    strays = [name for name, value in leaves(state) if not isinstance(value, torch.Tensor)]
    assert not strays, f"checkpoints contain tensors only: {strays[:3]}"
    writer = FileSystemWriter(folder, overwrite=False)  # the default is True (torch 2.13)
    group = exchange.group
    dcp.save(state, storage_writer=writer, process_group=group, no_dist=group is None)


@contextmanager
def suppress_single_process_warning() -> Iterator[None]:
    """Temporarily suppress torch's warning about checkpoints of a single process."""
    with warnings.catch_warnings():
        # From state_dict_saver.py and state_dict_loader.py in torch/distributed/checkpoint.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _list_rank_files(rank: int, folder: Path) -> list[str]:
    """Return the files that a rank wrote. Rank 0 also writes the metadata."""
    names = [path.name for path in folder.iterdir()]
    mine = [
        name for name in names if (match := _RANK_FILE.fullmatch(name)) and int(match[1]) == rank
    ]
    return [*mine, METADATA] if rank == 0 else mine


def _commit_checkpoint(pending: PendingCheckpoint, answers: list[dict[str, Any]]) -> None:
    """Write the manifest and give the checkpoint its final name."""
    temporary, final = pending.temporary, pending.final
    files = {name: tuple(entry) for answer in answers for name, entry in answer["files"].items()}
    unlisted = {path.name for path in temporary.iterdir()} - set(files)
    assert not unlisted, f"files that no rank has written: {sorted(unlisted)}"
    for name in files:
        os.chmod(temporary / name, 0o600)  # torch's writer uses the mode of the umask
    seconds = time.monotonic() - pending.began
    manifest.write(temporary, replace(pending.manifest, files=files, seconds=seconds))
    # The manifest is flushed, so a folder with the final name is complete also after a power loss.
    temporary.rename(final)
    manifest.sync_folder(final.parent)


def _error_text(error: BaseException) -> str:
    """Return the message of an error; for a CheckpointException, of the first rank that failed."""
    if isinstance(error, CheckpointException):
        return str(next(iter(error.failures.values()))[0])
    return str(error)


class CheckpointSaver:
    """Saves the checkpoints of a training, at once or in the background. All ranks call it.

    Args:
        program: The program to save.
        parent: The folder of the checkpoints.
        exchange: The exchange of the training.
        interrupts: The signals of this rank, by which a failed save ends the training.
        check: Called with the number of finished steps before each save.
    """

    def __init__(
        self,
        program: Program,
        parent: Path,
        exchange: Exchange,
        interrupts: Interrupts,
        check: Callable[[int], object],
    ) -> None:
        self._program, self._parent, self._check = program, parent, check
        self._exchange, self._interrupts = exchange, interrupts
        self._writing: Future[None] | None = None
        self._copy_state: Callable[[dict[str, Any]], Any] | None = None
        if program.spec.checkpoint.background:
            self._thread = ThreadPoolExecutor(1, "checkpoint")
            self._of_thread = Exchange(program.world)  # only the thread uses it
            # It copies to pinned memory, which needs a GPU. DefaultStager fails in torch 2.11.
            has_gpu = program.world.device.type == "cuda"
            stager = BlockingAsyncStager(cache_staged_state_dict=True) if has_gpu else None
            self._copy_state = stager.stage if stager else _clone_state

    def save(self, step: int) -> None:
        """Save a checkpoint. In the background, return when the state is copied.

        Args:
            step: The number of finished steps.

        Raises:
            PtrainError: A rank could not write its files, now or in the previous save.
            TrainingStopped: A value is not finite, or the ranks differ.
        """
        self._check(step)
        self.finish()
        if self._copy_state is None:
            path = save_checkpoint(self._program, self._parent, step, self._exchange)
            self._conclude_save(path)
        elif pending := begin_save(self._program, self._parent, step, self._exchange):
            copied = replace(pending, state=self._copy_state(pending.state))
            self._writing = self._thread.submit(self._write_copy, copied)
            self._writing.add_done_callback(self._stop_if_failed)

    @property
    def is_idle(self) -> bool:
        """True if no checkpoint is being written."""
        return self._writing is None or self._writing.done()

    def finish(self) -> None:
        """Wait until the checkpoint is written. Raises the error of a save that failed."""
        if self._writing is not None:
            self._writing.result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Release the thread. Wait for it, unless a rank is lost that it would wait for."""
        if self._copy_state is None:
            return
        is_lost = isinstance(error, RankFailed) or not isinstance(error, PtrainError | None)
        if self._writing is not None and not is_lost:
            wait([self._writing])
        self._thread.shutdown(wait=self.is_idle)
        if self.is_idle:  # the thread uses its exchange
            self._of_thread.close()

    def _write_copy(self, pending: PendingCheckpoint) -> None:
        """Write a checkpoint, in the thread."""
        with suppress_single_process_warning():
            write_checkpoint(pending, self._of_thread)
        self._conclude_save(pending.final)

    def _conclude_save(self, path: Path) -> None:
        """Print the path of a complete checkpoint, and remove older ones."""
        LOG.info("checkpoint  %s", display_path(path))
        remove_older(self._program, self._parent)

    def _stop_if_failed(self, writing: Future[None]) -> None:
        """Make all ranks stop after the current step, where `save` raises the error."""
        if writing.exception() is not None:
            self._interrupts.received.add(signal.SIGTERM)  # the ranks agree on signals


@torch.no_grad()
def _clone_state(state: dict[str, Any]) -> dict[str, Any]:
    """Return copies of tensors in nested dictionaries."""
    return {
        key: value.clone() if isinstance(value, torch.Tensor) else _clone_state(value)
        for key, value in state.items()
    }
