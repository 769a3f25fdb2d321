"""Checkpoints through torch.distributed.checkpoint: canonical names and full shapes, so that a run
continues under any other placement and number of ranks.

Saved into `step-N.tmp-…`, hashed, then renamed: a checkpoint that has its final name is whole, and
none is ever overwritten. Verified before anything is unpickled; tensors only, all else is JSON.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from ptrain.errors import PtrainError, SpecError, refused
from ptrain.interpreter.program import Program
from ptrain.models.numerics import DTYPE_NAMES, TORCH_DTYPES
from ptrain.optimizers.update import MASTER
from ptrain.spec.precision import LAYOUTS, Layout
from ptrain.train import finite, lineage, manifest
from ptrain.train.exchange import Exchange
from ptrain.train.folder import shown
from ptrain.train.index import METADATA, IndexReader
from ptrain.train.manifest import Manifest

_REMEDY = "give the model, optimizer and layout that were trained"
_OURS = re.compile(r"__(\d+)_\d+\.distcp")  # the rank that wrote it


def save(program: Program, parent: Path, step: int, exchange: Exchange) -> Path:
    """All ranks write `parent/step-N`; returns it. Raises PtrainError if one could not, and
    TrainingStopped, before anything is written, where something is not finite."""
    name = manifest.folder_name(step)
    token = exchange.first(secrets.token_hex(4))
    final, temporary = parent / name, parent / f"{name}.tmp-{token}"
    if exchange.first(final.exists()):
        return final  # resumed from it, and no step since
    finite.require(program, step, exchange)
    try:
        temporary.mkdir(mode=0o700, parents=True, exist_ok=True)
        _write(program, temporary)
        files = manifest.digests(temporary, _written_by(program.world.rank, temporary))
    except (OSError, CheckpointException) as error:
        problem, files = f"rank {program.world.rank}: {_reason(error)}", {}
    else:
        problem = ""
    answers = exchange.gather({"problem": problem, "files": files})
    if problems := [answer["problem"] for answer in answers if answer["problem"]]:
        shutil.rmtree(temporary, ignore_errors=True)
        remedy = "make room there, or choose another folder with --run-dir DIR"
        raise refused(f"checkpoint {shown(final)}", f"cannot be written: {problems[0]}", remedy)
    if program.world.is_first:
        _commit(program, temporary, final, step, answers)
    exchange.barrier()
    return final


def load(program: Program, folder: Path, verified: Manifest, exchange: Exchange) -> None:
    """Fill the program from a checkpoint that has been verified.

    Raises PtrainError, before a tensor is touched, for a checkpoint of another model.
    """
    if fault := lineage.other_model(verified.trained, program.spec):
        raise SpecError(fault._replace(source=f"checkpoint {shown(folder)}"))
    reader = IndexReader(folder, listed=frozenset(verified.files))
    state = program.state_dict()
    metadata = reader.read_metadata()
    problem = _first(_mismatch(metadata, state), exchange)
    if not problem and not lineage.is_other_optimizer(verified.trained, program.spec):
        problem = _surplus(metadata, state, exchange)
    if problem:
        remedy = _other_layout(metadata, state) or _REMEDY
        raise refused(f"checkpoint {shown(folder)}", problem, remedy)
    with without_advice():
        dcp.load(state, storage_reader=reader, no_dist=exchange.group is None)
    program.load_state_dict(state)


def verify(folder: Path, exchange: Exchange) -> Manifest:
    """Return the manifest of a checkpoint whose files agree with it. Every rank hashes its share of
    them; all raise PtrainError for what any of them found."""
    problem, checkpoint = "", None
    try:
        checkpoint = manifest.read(folder)
        share = sorted(checkpoint.files)[exchange.world.rank :: exchange.world.size]
        damaged = manifest.problems(folder, checkpoint, share)
        problem = f"checkpoint {shown(folder)}: {damaged[0]}" if damaged else ""
    except PtrainError as error:
        problem = str(error)
    if problems := [complaint for complaint in exchange.gather(problem) if complaint]:
        raise PtrainError(problems[0])
    assert checkpoint is not None
    return checkpoint


def newest(
    candidates: Sequence[Path], exchange: Exchange
) -> tuple[Path | None, Manifest | None, list[str]]:
    """The first of rank 0's `candidates` that is sound, its manifest, and what is wrong with those
    before it."""
    complaints: list[str] = []
    for text in exchange.first([str(path) for path in candidates]):
        try:
            return Path(text), verify(Path(text), exchange), complaints
        except PtrainError as error:
            complaints.append(str(error))
    return None, None, complaints


def _write(program: Program, folder: Path) -> None:
    state = program.state_dict()
    strays = [name for name, value in _flat(state) if not isinstance(value, torch.Tensor)]
    assert not strays, f"only tensors go into a checkpoint: {strays[:3]}"
    writer = FileSystemWriter(folder, overwrite=False)
    with without_advice():
        dcp.save(state, storage_writer=writer, no_dist=program.world.size == 1)


@contextmanager
def without_advice() -> Iterator[None]:
    """torch warns whenever a checkpoint is of one process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _written_by(rank: int, folder: Path) -> list[str]:
    """Return the files whose hashes are this rank's business; the metadata is rank 0's."""
    names = [path.name for path in folder.iterdir()]
    mine = [name for name in names if (match := _OURS.fullmatch(name)) and int(match[1]) == rank]
    return [*mine, METADATA] if rank == 0 else mine


def _commit(
    program: Program, temporary: Path, final: Path, step: int, answers: list[dict[str, Any]]
) -> None:
    files = {name: tuple(entry) for answer in answers for name, entry in answer["files"].items()}
    unlisted = {path.name for path in temporary.iterdir()} - set(files)
    assert not unlisted, f"files that no rank accounts for: {sorted(unlisted)}"
    for name in files:
        os.chmod(temporary / name, 0o600)
    manifest.write(
        temporary,
        Manifest(
            step=step,
            spec=program.spec.name,
            world_size=program.world.size,
            torch=torch.__version__,
            files=files,
            trained=lineage.trained(program.spec),
            samples=step * program.spec.batch.global_samples + program.sample_offset,
            data=program.data_prints,
        ),
    )
    temporary.rename(final)
    manifest.sync_folder(final.parent)


def _mismatch(metadata: Metadata, state: dict[str, Any]) -> str:
    """The first tensor of the program that the checkpoint lacks or has in another shape."""
    for name, value in _flat(state):
        saved = metadata.state_dict_metadata.get(name)
        if not isinstance(saved, TensorStorageMetadata):
            return f"has no {name}: it is of another model, optimizer or layout"
        if saved.size != value.shape:
            return f"{name} is {tuple(saved.size)}, this model has {tuple(value.shape)}"
        if saved.properties.dtype != value.dtype:
            return f"{name} is {saved.properties.dtype}, this layout has {value.dtype}"
    return ""


def _other_layout(metadata: Metadata, state: dict[str, Any]) -> str:
    """Return what to write where the checkpoint was trained with another layout; empty if it was
    not."""
    saved = _dtypes(
        (name, entry.properties.dtype)
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    )
    own = _dtypes((name, value.dtype) for name, value in _flat(state))
    moments = {"moments"} - (saved.keys() & own.keys())  # another optimizer's are not compared
    if all(saved.get(part) == own.get(part) for part in {*saved, *own} - moments):
        return ""
    fitting = [name for name, layout in LAYOUTS.items() if _fits(layout, saved)]
    parts = {part: str(DTYPE_NAMES[dtype]) for part, dtype in saved.items()}
    if fitting:
        others = f" (or {', '.join(fitting[1:])})" if fitting[1:] else ""
        add = f"precision.layout={fitting[0]}{others}"
    elif parts.get("parameters") == "fp64":
        add = "precision.compute=fp64"
    else:
        whole = {"master": "none"} | parts
        add = " ".join(f"precision.{part}={name}" for part, name in whole.items())
    trained = ", ".join(f"{part} {name}" for part, name in parts.items())
    return f"it was trained with {trained}: add {add}"


def _dtypes(tensors: Iterable[tuple[str, torch.dtype]]) -> dict[str, torch.dtype]:
    """Return the dtypes of parameters, master copies and moments, as a spec's `precision` calls
    them."""
    dtypes: dict[str, torch.dtype] = {}
    for name, dtype in tensors:
        if name.startswith("model."):
            dtypes.setdefault("parameters", dtype)
        elif name.endswith(f".{MASTER}"):
            dtypes.setdefault("master", dtype)
        elif name.endswith((".exp_avg", ".momentum_buffer")):
            dtypes.setdefault("moments", dtype)
    return dtypes


def _fits(layout: Layout, saved: dict[str, torch.dtype]) -> bool:
    master = TORCH_DTYPES[layout.master] if layout.master else None
    moments = TORCH_DTYPES[layout.moments]
    return (saved.get("parameters"), saved.get("master"), saved.get("moments", moments)) == (
        TORCH_DTYPES[layout.parameters],
        master,
        moments,
    )


def _first(problem: str, exchange: Exchange) -> str:
    """Return the first problem of any rank, on every rank: with pp each knows its own layers
    only."""
    return next((complaint for complaint in exchange.gather(problem) if complaint), "")


def _surplus(metadata: Metadata, state: dict[str, Any], exchange: Exchange) -> str:
    """The first tensor of the checkpoint that the program would drop: that no rank knows."""
    known = {name for name, _ in _flat(state)}
    unknown = exchange.gather(sorted(set(metadata.state_dict_metadata) - known))
    surplus = sorted(set.intersection(*map(set, unknown)))
    if not surplus:
        return ""
    return f"has {len(surplus)} tensors that this model or optimizer lacks, as {surplus[0]}"


def _flat(state: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Join nested names by dots, as torch.distributed.checkpoint writes them."""
    leaves: list[tuple[str, Any]] = []
    for name, value in state.items():
        place = f"{prefix}{name}"
        leaves += _flat(value, f"{place}.") if isinstance(value, dict) else [(place, value)]
    return leaves


def _reason(error: BaseException) -> str:
    if isinstance(error, CheckpointException):
        first = next(iter(error.failures.values()))
        return str(first[0])
    return str(error)
