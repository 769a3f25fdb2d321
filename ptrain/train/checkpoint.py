"""Loading a checkpoint through torch.distributed.checkpoint, and resuming from it.

Tensors have canonical names and full shapes, so that a run continues under any other placement and
number of ranks. A checkpoint is verified before anything is unpickled.

`--resume PATH|auto` loads the checkpoint from which a training continues.
"""

from __future__ import annotations

import pickle
import secrets
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

from ptrain.errors import PtrainError, SpecError, input_error
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
from ptrain.train.saving import METADATA, suppress_single_process_warning
from ptrain.units import leaves

_REMEDY = "Use the model, optimizer and precision layout of the checkpoint."


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
