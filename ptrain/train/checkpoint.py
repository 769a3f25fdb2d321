"""Checkpoints: saving and loading through torch.distributed.checkpoint, and resuming.

Tensors have canonical names and full shapes, so that a run continues under any other placement and
number of ranks.

A checkpoint is saved into `step-N.tmp-…`, hashed, and renamed. A folder with its final name is
therefore complete, and none is ever overwritten. It is verified before anything is unpickled. It
contains only tensors; all other state is JSON.

`--resume PATH|auto` loads the checkpoint from which a training continues.
"""

from __future__ import annotations

import os
import pickle
import re
import secrets
import shutil
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

from ptrain.errors import PtrainError, SpecError, input_error
from ptrain.files import missing_space
from ptrain.interpreter.program import Program
from ptrain.models.numerics import DTYPE_NAMES, TORCH_DTYPES
from ptrain.optimizers.update import MASTER
from ptrain.spec.precision import LAYOUTS, Layout
from ptrain.train import finite, manifest
from ptrain.train.exchange import Exchange
from ptrain.train.folder import (
    AUTO,
    RunFolder,
    display_path,
    no_checkpoint_error,
    require_compatible,
    resume_candidates,
)
from ptrain.train.journal import LOG
from ptrain.train.manifest import Manifest, step_in_name
from ptrain.units import leaves

_REMEDY = "Use the model, optimizer and precision layout of the checkpoint."
_RANK_FILE = re.compile(r"__(\d+)_\d+\.distcp")  # torch's file names; the first number is the rank


def save(program: Program, parent: Path, step: int, exchange: Exchange) -> Path:
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
    name = manifest.folder_name(step)
    # The ranks share a temporary folder. Its random name differs from leftovers of a killed job.
    token = exchange.broadcast(secrets.token_hex(4))
    final, temporary = parent / name, parent / f"{name}.tmp-{token}"
    if exchange.broadcast(final.exists()):
        return final  # the run was resumed from it and has done no step since
    finite.require_finite(program, step, exchange)
    state = program.state_dict()
    needed = _checkpoint_bytes(program, state, exchange)
    if problem := exchange.broadcast(missing_space(parent, needed)):
        raise _unwritable_error(final, problem)
    try:
        temporary.mkdir(mode=0o700, parents=True, exist_ok=True)
        _write_tensors(program, state, temporary)
        files = manifest.file_digests(temporary, _list_rank_files(program.world.rank, temporary))
    except (OSError, CheckpointException) as error:
        problem, files = f"rank {program.world.rank}: {_error_text(error)}", {}
    else:
        problem = ""
    answers = exchange.gather({"problem": problem, "files": files})
    problems = [answer["problem"] for answer in answers if answer["problem"]]
    if program.world.is_first and not problems:
        try:
            _commit_checkpoint(program, temporary, final, step, answers)
        except OSError as error:
            problems = [_error_text(error)]
    # No rank ends or looks for the final folder before rank 0 has answered.
    if problems := exchange.broadcast(problems):
        shutil.rmtree(temporary, ignore_errors=True)
        raise _unwritable_error(final, problems[0])
    return final


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


def load(program: Program, folder: Path, verified: Manifest, exchange: Exchange) -> None:
    """Load a verified checkpoint into a program.

    Args:
        program: The program to fill.
        folder: The checkpoint.
        verified: Its manifest, from `verify_files`.
        exchange: The exchange of the ranks.

    Raises:
        PtrainError: The checkpoint belongs to another model, optimizer or precision layout. Raised
            before any tensor is changed.
    """
    if fault := manifest.model_fault(verified.trained, program.spec):
        raise SpecError(fault._replace(source=f"checkpoint {display_path(folder)}"))
    reader = IndexReader(folder, listed=frozenset(verified.files))
    state = program.state_dict()
    metadata = reader.read_metadata()
    # All ranks raise together, before any loads: dcp.load is collective.
    problem = _first_problem(_first_mismatch(metadata, state), exchange)
    if not problem and not manifest.has_other_optimizer(verified.trained, program.spec):
        problem = _unknown_tensors(metadata, state, exchange)
    if problem:
        remedy = _layout_remedy(metadata, state) or _REMEDY
        raise input_error(f"checkpoint {display_path(folder)}", problem, remedy)
    with suppress_single_process_warning():
        dcp.load(state, storage_reader=reader, no_dist=exchange.group is None)
    program.load_state_dict(state)


def verify_files(folder: Path, exchange: Exchange) -> Manifest:
    """Verify the files of a checkpoint and return its manifest.

    Each rank hashes a part of the files.

    Raises:
        PtrainError: A file is damaged or missing. Raised on all ranks.
    """
    problem, checkpoint = "", None
    try:
        checkpoint = manifest.read(folder)
        share = sorted(checkpoint.files)[exchange.world.rank :: exchange.world.size]
        damaged = manifest.file_problems(folder, checkpoint, share)
        problem = f"checkpoint {display_path(folder)}: {damaged[0]}" if damaged else ""
    except PtrainError as error:
        problem = str(error)
    if problems := [complaint for complaint in exchange.gather(problem) if complaint]:
        raise PtrainError(problems[0])
    assert checkpoint is not None
    return checkpoint


def find_newest_sound(
    candidates: Sequence[Path], exchange: Exchange
) -> tuple[Path | None, Manifest | None, list[str]]:
    """Return the first sound checkpoint of rank 0's candidates. All ranks call it.

    Args:
        candidates: The checkpoints, in the order in which they are tried.
        exchange: The exchange of the ranks.

    Returns:
        Its folder and manifest, both None without one, and the complaints about the candidates
        before it.
    """
    complaints: list[str] = []
    for text in exchange.broadcast([str(path) for path in candidates]):
        try:
            return Path(text), verify_files(Path(text), exchange), complaints
        except PtrainError as error:
            complaints.append(str(error))
    return None, None, complaints


def _write_tensors(program: Program, state: dict[str, Any], folder: Path) -> None:
    """Write this rank's tensors with torch's FileSystemWriter."""
    strays = [name for name, value in leaves(state) if not isinstance(value, torch.Tensor)]
    assert not strays, f"checkpoints contain tensors only: {strays[:3]}"
    writer = FileSystemWriter(folder, overwrite=False)  # the default is True (torch 2.13)
    with suppress_single_process_warning():
        dcp.save(state, storage_writer=writer, no_dist=program.world.size == 1)


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


def _commit_checkpoint(
    program: Program, temporary: Path, final: Path, step: int, answers: list[dict[str, Any]]
) -> None:
    """Write the manifest and give the checkpoint its final name."""
    files = {name: tuple(entry) for answer in answers for name, entry in answer["files"].items()}
    unlisted = {path.name for path in temporary.iterdir()} - set(files)
    assert not unlisted, f"files that no rank has written: {sorted(unlisted)}"
    for name in files:
        os.chmod(temporary / name, 0o600)  # torch's writer uses the mode of the umask
    manifest.write(
        temporary,
        Manifest(
            step=step,
            spec=program.spec.name,
            world_size=program.world.size,
            torch=torch.__version__,
            files=files,
            trained=manifest.trained_sections(program.spec),
            samples=step * program.spec.batch.global_samples + program.sample_offset,
            data=program.data_prints,
        ),
    )
    # The manifest is flushed, so a folder with the final name is complete also after a power loss.
    temporary.rename(final)
    manifest.sync_folder(final.parent)


def _first_mismatch(metadata: Metadata, state: dict[str, Any]) -> str:
    """Return the first tensor of the program that the checkpoint lacks or stores differently.

    Shape and dtype are compared. The result is "" if all agree.
    """
    for name, value in leaves(state):
        saved = metadata.state_dict_metadata.get(name)
        if not isinstance(saved, TensorStorageMetadata):
            return f"has no {name}: its model, optimizer or precision layout differs"
        if saved.size != value.shape:
            return f"{name} is {tuple(saved.size)}, but this model has {tuple(value.shape)}"
        if saved.properties.dtype != value.dtype:
            return f"{name} is {saved.properties.dtype}, but this layout has {value.dtype}"
    return ""


def _layout_remedy(metadata: Metadata, state: dict[str, Any]) -> str:
    """Return the fix for a checkpoint of another precision layout, "" if the layouts agree."""
    saved = _dtype_by_part(
        (name, entry.properties.dtype)
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    )
    expected = _dtype_by_part((name, value.dtype) for name, value in leaves(state))
    # Moments are compared only if both sides have them: optimizers differ in their moments.
    moments = {"moments"} - (saved.keys() & expected.keys())
    if all(saved.get(part) == expected.get(part) for part in {*saved, *expected} - moments):
        return ""
    fitting = [name for name, layout in LAYOUTS.items() if _has_dtypes(layout, saved)]
    parts = {part: str(DTYPE_NAMES[dtype]) for part, dtype in saved.items()}
    if fitting:
        others = f" (or {', '.join(fitting[1:])})" if fitting[1:] else ""
        add = f"`precision.layout={fitting[0]}`{others}"
    elif parts.get("parameters") == "fp64":
        add = "`precision.compute=fp64`"
    else:
        add = " ".join(f"precision.{k}={name}" for k, name in ({"master": "none"} | parts).items())
        add = f"`{add}`"
    trained = ", ".join(f"{part} {name}" for part, name in parts.items())
    return f"The checkpoint was trained with {trained}. Add {add}."


def _dtype_by_part(tensors: Iterable[tuple[str, torch.dtype]]) -> dict[str, torch.dtype]:
    """Return the dtypes of parameters, master weights and moments, by their key in `precision`."""
    dtypes: dict[str, torch.dtype] = {}
    for name, dtype in tensors:
        if name.startswith("model."):
            dtypes.setdefault("parameters", dtype)
        elif name.endswith(f".{MASTER}"):
            dtypes.setdefault("master", dtype)
        elif name.endswith((".exp_avg", ".momentum_buffer")):
            dtypes.setdefault("moments", dtype)
    return dtypes


def _has_dtypes(layout: Layout, saved: dict[str, torch.dtype]) -> bool:
    """Return True if a precision layout has the saved dtypes."""
    master = TORCH_DTYPES[layout.master] if layout.master else None
    moments = TORCH_DTYPES[layout.moments]
    return (saved.get("parameters"), saved.get("master"), saved.get("moments", moments)) == (
        TORCH_DTYPES[layout.parameters],
        master,
        moments,
    )


def _first_problem(problem: str, exchange: Exchange) -> str:
    """Return the first problem of any rank, on all ranks.

    With pipeline parallelism a rank only has the tensors of its stages.
    """
    return next((complaint for complaint in exchange.gather(problem) if complaint), "")


def _unknown_tensors(metadata: Metadata, state: dict[str, Any], exchange: Exchange) -> str:
    """Return a problem if the checkpoint has tensors that no rank's program has, else ""."""
    known = {name for name, _ in leaves(state)}
    unknown = exchange.gather(sorted(set(metadata.state_dict_metadata) - known))
    if not (surplus := sorted(set.intersection(*map(set, unknown)))):
        return ""
    return (
        f"has {len(surplus)} tensors that this model or optimizer does not have, for "
        f"example {surplus[0]}"
    )


def _error_text(error: BaseException) -> str:
    """Return the message of an error; for a CheckpointException, of the first rank that failed."""
    if isinstance(error, CheckpointException):
        return str(next(iter(error.failures.values()))[0])
    return str(error)


def resume_training(
    program: Program,
    folder: RunFolder,
    source: str | None,
    exchange: Exchange,
    accept_data: bool = False,
) -> int:
    """Load the checkpoint that a training continues from.

    `auto` selects the newest sound checkpoint of this run folder; without one, training starts at
    step 0. A path is a checkpoint or a run folder. The next sample is the one after the samples of
    the checkpoint, whatever its `batch.global`. The learning-rate schedule continues by steps.

    Args:
        program: The program to fill.
        folder: The run folder.
        source: `auto`, a path, or None to start at step 0.
        exchange: The exchange of the ranks.
        accept_data: Only warn if the training data has changed.

    Returns:
        The number of finished steps.

    Raises:
        SpecError: No sound checkpoint fits, or the training data has changed.
    """
    if program.world.is_first:
        for half in manifest.incomplete_checkpoints(folder.checkpoints):
            shutil.rmtree(half, ignore_errors=True)
    if source is None:
        return 0
    paths = resume_candidates(source, folder)
    path, verified, complaints = _load_newest(program, paths, source, exchange, accept_data)
    if path is None or verified is None:
        if source != AUTO or complaints:
            raise no_checkpoint_error(source, complaints)
        LOG.info("resume  no checkpoint: starting from step 0")
        return 0
    _rename_later(folder, verified.step, exchange)
    size = program.spec.batch.global_samples
    trained = dict(leaves(verified.trained))
    # Manifests of format 2 do not count samples: assume that all steps had one batch size.
    estimate = verified.step * int(str(trained.get("batch.global", size)))
    before = estimate if verified.samples is None else verified.samples
    program.sample_offset = before - verified.step * size
    for warning in manifest.difference_lines(verified.trained, program.spec):
        LOG.warning("resume  %s", warning)
    was = f"{verified.spec} on {verified.world_size} ranks"
    LOG.info("resume  step %d of %s (saved by %s)", verified.step, display_path(path), was)
    return verified.step


def _changed_data(was: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return a finding for each key whose data differs.

    Keys on one side only are left out: `manifest.difference_lines` reports the changed spec.
    """
    findings = []
    for name in sorted(was.keys() & now.keys()):
        (before, old, _), (size, digest, _) = was[name], now[name]
        if before != size:
            unit = "bytes" if digest else "samples"
            findings.append(f"{name} has {size} {unit}; it had {before} at the checkpoint")
        elif old != digest:
            findings.append(f"the content of {name} has changed")
    return findings


def _load_newest(
    program: Program, paths: Sequence[Path], source: str, exchange: Exchange, accept_data: bool
) -> tuple[Path | None, Manifest | None, list[str]]:
    """Load the first of rank 0's checkpoints that is sound and has only finite values.

    Finite values can be checked only after loading. The next checkpoint then overwrites all of
    them, because one that lacks a tensor is rejected. If none is left, training must not start.

    Returns:
        Its folder and manifest, both None without one, and the complaints about those before it.
    """
    complaints: list[str] = []
    unreported: list[str] = []
    remaining = [Path(text) for text in exchange.broadcast([str(path) for path in paths])]
    while True:
        path, verified, others = find_newest_sound(remaining, exchange)
        complaints += others
        if path is None or verified is None:
            return None, None, complaints
        _log_skipped([*unreported, *others])
        require_compatible(program.spec, source, path, verified)
        if changes := "; ".join(_changed_data(verified.data, program.data_prints)):
            finding = f"its training data changed: {changes}"
            remedy = "Restore the data, or add `--accept-data` to continue with the changed data."
            if not accept_data:
                raise input_error(f"checkpoint {display_path(path)}", finding, remedy)
            LOG.warning("resume  %s", changes)
        load(program, path, verified, exchange)
        if not (problem := finite.describe_non_finite(program, exchange)):
            return path, verified, complaints
        unreported = [f"checkpoint {display_path(path)}: {problem}"]
        complaints += unreported
        remaining = remaining[remaining.index(path) + 1 :]


def _rename_later(folder: RunFolder, step: int, exchange: Exchange) -> None:
    """Rename the checkpoints of later steps in this run folder.

    They were skipped, or belong to a training that this one replaces. Under their names the next
    checkpoint of such a step would count as saved.

    Raises:
        SpecError: A folder cannot be renamed. Raised on all ranks.
    """
    problem = ""
    if exchange.world.is_first:
        try:
            _rename_aside(
                path
                for path in manifest.complete_checkpoints(folder.checkpoints)
                if step_in_name(path) > step
            )
        except OSError as error:
            problem = f"a later checkpoint cannot be renamed: {error}"
    if problem := exchange.broadcast(problem):
        raise input_error(
            f"checkpoints in {display_path(folder.path)}",
            problem,
            "Make the folder writable, or use another one with `--run-dir DIR`.",
        )


def _rename_aside(paths: Iterable[Path]) -> None:
    for path in paths:
        aside = path.with_name(f"{path.name}.aside-{secrets.token_hex(4)}")
        path.rename(aside)
        LOG.warning("renamed: %s to %s", display_path(path), aside.name)


def _log_skipped(complaints: list[str]) -> None:
    for complaint in complaints:
        LOG.warning("skipped: %s", complaint)


METADATA = ".metadata"
_FOREIGN_REMEDY = "Continue from another checkpoint; ptrain did not write this one."
_CLASSES = (
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
    "Metadata",
    "MetadataIndex",
    "StorageMeta",
    "TensorProperties",
    "TensorStorageMetadata",
    "_MEM_FORMAT_ENCODING",
)
# The names that torch pickles into its metadata. A TensorProperties pickles its layout by
# _get_layout, and its memory format as a _MEM_FORMAT_ENCODING. Python 3.13 moved PosixPath to
# pathlib._local.
_UNPICKLED = (
    *(("torch.distributed.checkpoint.metadata", name) for name in _CLASSES),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),
)


class IndexReader(FileSystemReader):
    """A reader of checkpoints that unpickles only torch's records.

    It opens only files that the manifest lists.
    """

    def __init__(self, folder: Path, *, listed: frozenset[str]) -> None:
        super().__init__(folder)
        self._listed = listed

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the metadata of the checkpoint.

        Raises:
            SpecError: It contains other classes, or refers to files outside the manifest.
        """
        with (Path(self.path) / METADATA).open("rb") as file:
            metadata = _Unpickler(file).load()
        if not isinstance(metadata, Metadata):
            raise input_error(
                f"checkpoint {self.path}", f"{METADATA} contains no metadata", _FOREIGN_REMEDY
            )
        for info in (metadata.storage_data or {}).values():
            if info.relative_path not in self._listed:
                raise input_error(
                    f"checkpoint {self.path}",
                    f"{METADATA} refers to {info.relative_path!r}, which the manifest does not "
                    "list",
                    _FOREIGN_REMEDY,
                )
        # As FileSystemReader.read_metadata does (torch/distributed/checkpoint/filesystem.py).
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _Unpickler(pickle.Unpickler):
    """An unpickler that accepts only the classes of a checkpoint's metadata.

    Unpickling may call any importable function.
    """

    def find_class(self, module: str, name: str) -> Any:
        """Return an allowed class or a dtype. Raises SpecError for any other name."""
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or (module, name) in _UNPICKLED:
            return super().find_class(module, name)
        raise input_error(
            "checkpoint",
            f"{METADATA} refers to {module}.{name}, which is not allowed",
            _FOREIGN_REMEDY,
        )
