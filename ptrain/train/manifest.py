"""The manifest of a checkpoint: its contents and the SHA-256 of every file.

torch's checkpoints contain no checksum: of 200 flipped bits, 191 were loaded as wrong values. A
checkpoint is complete if its folder has its final name and the files match the manifest. The last
entry of the manifest, its seal, is the SHA-256 of its text before the seal. Of 200 flipped bits in
a manifest without a seal, 36 were read as another step, size or model. SHA-256 guards against
accidents, not against attackers: only load checkpoints that you trust.

A checkpoint of another model is rejected. Another learning rate, optimizer, dataset, seed or batch
may be intended, so each key that differs is reported.

`checkpoint.keep` states which checkpoints stay after a save. This module imports no torch.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from itertools import islice
from pathlib import Path
from typing import Any, cast

from ptrain.errors import Fault, PtrainError
from ptrain.spec.job import KeepSpec
from ptrain.spec.leaf import (
    FreeMapping,
    Integer,
    Leaf,
    Real,
    RejectedValue,
    Text,
    describe,
    grammar_dataclass,
    is_required,
    reject,
)
from ptrain.spec.spec import Spec
from ptrain.spec.text import require_file
from ptrain.spec.write import omitted_sections
from ptrain.units import leaves

_REMEDY = "Use the model of the checkpoint, or remove `--resume` to train from the start."
# Names and locations, which do not change the model: the checkpoint contains the weights.
_WHEREABOUTS = ("preset", "folder", "pretrained")
_WATCHED = {"optimizer": (), "data": (), "train": ("seed",), "batch": ("global", "sequence")}


def trained_sections(spec: Spec) -> dict[str, object]:
    """Return the sections of a spec that a manifest stores, as read back from JSON."""
    plain = json.loads(json.dumps(spec.resolved, default=str))
    model = {key: value for key, value in plain["model"].items() if key not in _WHEREABOUTS}
    watched = {
        section: {key: plain[section][key] for key in keys or plain[section]}
        for section, keys in _WATCHED.items()
    }
    return {"model": model, **watched}


def model_fault(was: Mapping[str, object], spec: Spec) -> Fault | None:
    """Return the fault if a checkpoint has another model, else None.

    Manifests of older versions, without a model section, are accepted.

    Args:
        was: `Manifest.trained` of the checkpoint.
        spec: The spec of the training.
    """
    before, now = was.get("model"), trained_sections(spec)["model"]
    if not isinstance(before, dict) or _as_json(before) == _as_json(now):
        return None
    assert isinstance(now, dict)
    names = [
        name for name in {**before, **now} if _as_json(before.get(name)) != _as_json(now.get(name))
    ]
    saved = ", ".join(f"{name}: {before.get(name)}" for name in names)
    current = ", ".join(f"{name}: {now.get(name)}" for name in names)
    return Fault(
        place="model",
        finding=f"the checkpoint contains another model: {saved}; this spec has {current}",
        remedy=_REMEDY,
    )


def difference_lines(was: Mapping[str, object], spec: Spec) -> Iterator[str]:
    """Yield one line per key that differs from the checkpoint and may be intended.

    Sections that an older manifest lacks are not compared.

    Args:
        was: `Manifest.trained` of the checkpoint.
        spec: The spec of the training.
    """
    before, now = dict(leaves(was)), dict(leaves(trained_sections(spec)))
    defaults = dict(leaves(omitted_sections()))
    for place in {**before, **now}:
        section = place.partition(".")[0]
        # Older manifests have the keys of all optimizers, and later ones more sections.
        is_default = place not in now and defaults.get(place, now) == before[place]
        is_kept = not is_default and (place in before or isinstance(was.get(section), dict))
        if section in _WATCHED and is_kept and before.get(place) != now.get(place):
            yield (
                f"{place}: {_format_value(before, place)} in the checkpoint, "
                f"{_format_value(now, place)} now"
            )


def has_other_optimizer(was: Mapping[str, object], spec: Spec) -> bool:
    """Return True if the checkpoint was trained with another optimizer, or other ones in groups."""
    before, now = dict(leaves(was)), dict(leaves(trained_sections(spec)))
    if before.get("optimizer.name", spec.optimizer.name) != spec.optimizer.name:
        return True
    return _named_groups(before) != _named_groups(now)


def _named_groups(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the match and the optimizer of each group that names one."""
    groups = values.get("optimizer.groups") or []
    return [(str(group["match"]), group["name"]) for group in groups if group.get("name")]


def _format_value(values: Mapping[str, object], place: str) -> str:
    """Return the value at a dotted key, for messages."""
    return _as_json(values[place]) if place in values else "nothing"


def _as_json(value: object) -> str:
    """Return a value as JSON, which compares independently of the order of keys."""
    return json.dumps(value, sort_keys=True)


FORMAT = 4  # format 3 lacks `tensor_bytes` and `seconds`, format 2 also `samples` and `data`
UNSEALED = 1  # the format of manifests without a seal, which are still read
NAME = "manifest.json"
_STEP = re.compile(r"step-(\d{8,})")  # eight digits keep the names sorted; more are accepted
_FILE = re.compile(r"[A-Za-z0-9_.-]+")  # bare names: nothing outside the folder is ever read
_SEALED = re.compile(rb'(.*),\n "seal": "([0-9a-f]{64})"\n}', re.DOTALL)

_MOST_BYTES = 64 * 2**20  # of a manifest: 0.2 KB per file
_MOST = 2**63 - 1  # the limit of file sizes and times (ns) in file systems


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The manifest of a checkpoint. `_LEAF_OF` defines the valid values of each field.

    Attributes:
        step: The number of finished steps.
        spec: The name of the spec.
        world_size: The number of ranks that saved it.
        torch: The version of torch.
        files: Bytes and SHA-256 by file name.
        trained: The sections of the resolved spec that a continuation is compared with; empty in
            old manifests.
        samples: The number of samples of the finished steps. None: unknown, in old manifests.
        data: Size, digest and modification time (ns) of the training data, as
            `sampler.fingerprint_data` returns them; empty in old manifests.
        tensor_bytes: The bytes of all tensors, each counted once. None: unknown, in old manifests.
        seconds: The time from the end of the last step until the files were written. None:
            unknown, in old manifests.
        format: The version of the format.
    """

    step: int
    spec: str
    world_size: int
    torch: str
    files: Mapping[str, tuple[int, str]]
    trained: Mapping[str, Any] = field(default_factory=dict)
    samples: int | None = None
    data: Mapping[str, tuple[int, str, int]] = field(default_factory=dict)
    tensor_bytes: int | None = None
    seconds: float | None = None
    format: int = FORMAT


@grammar_dataclass
class _Row(Leaf):
    """A list with one leaf per item."""

    leaves: tuple[Leaf, ...] = ()

    def check(self, value: Any) -> object:
        """Return the values as a tuple. Raises RejectedValue if the list or a value is invalid."""
        if not isinstance(value, list) or len(value) != len(self.leaves):
            got = f"a list of {len(value)}" if isinstance(value, list) else describe(value)
            reject(f"must be a list of {len(self.leaves)}; got {got}")
        return tuple(_check_values(dict(enumerate(self.leaves)), dict(enumerate(value))).values())


_COUNT, _TEXT = Integer("", 0, _MOST), Text("", r"(?s:.*)")
_DIGEST = Text("", "[0-9a-f]{64}", "a SHA-256 as 64 hexadecimal digits")
_LEAF_OF: Mapping[str, Leaf] = {
    "step": _COUNT,
    "spec": _TEXT,
    "world_size": Integer("", 1, _MOST),
    "torch": _TEXT,
    "files": FreeMapping("", values=_Row("", leaves=(_COUNT, _DIGEST))),
    "trained": FreeMapping(""),
    "samples": Integer("", 0, _MOST, accepts_null=True),
    "data": FreeMapping("", values=_Row("", leaves=(_COUNT, _TEXT, Integer("", -_MOST, _MOST)))),
    "tensor_bytes": Integer("", 0, _MOST, accepts_null=True),
    "seconds": Real("", 0.0, float(_MOST), accepts_null=True),
    "format": Integer("", UNSEALED, _MOST),
}


def folder_name(step: int) -> str:
    """Return the name of a checkpoint's folder."""
    return f"step-{step:08d}"


def is_checkpoint_name(text: str) -> bool:
    """Return True for the name of a complete checkpoint."""
    return bool(_STEP.fullmatch(text))


def step_in_name(folder: Path) -> int:
    """Return the step in the name of a complete checkpoint.

    Args:
        folder: A folder named `step-00000100`, for example.

    Returns:
        The number of finished steps.
    """
    return int(folder.name.removeprefix("step-"))


def complete_checkpoints(parent: Path) -> list[Path]:
    """Return the complete checkpoints in `parent`, newest first."""
    paths = [path for path in parent.glob("step-*") if is_checkpoint_name(path.name)]
    return sorted(paths, key=step_in_name, reverse=True)


def incomplete_checkpoints(parent: Path) -> list[Path]:
    """Return the folders of checkpoints whose job was killed while it saved or removed them."""
    return sorted(parent.glob("step-*.tmp-*"))


def surplus_steps(steps: Collection[int], sound: Collection[int], keep: KeepSpec) -> set[int]:
    """Return the steps whose checkpoints are removed after a save.

    The newest `keep.last` sound checkpoints stay, and all that are newer than the oldest of them: a
    damaged one takes no other's place. If fewer are sound, all stay.

    Args:
        steps: The steps of all complete checkpoints.
        sound: The newest that are sound, at least `keep.last` if there are so many.
        keep: The section `checkpoint.keep` of the spec.

    Returns:
        A subset of `steps`.

    Example:
        >>> surplus_steps({10, 20, 30, 40}, {10, 20, 30, 40}, KeepSpec(last=2, every=20))
        {10}
    """
    newest = sorted(sound, reverse=True)[: keep.last]
    if len(newest) < keep.last:
        return set()
    older = {step for step in steps if step < newest[-1]}
    return {step for step in older if not keep.every or step % keep.every}


def remove_surplus(parent: Path, keep: KeepSpec | None) -> Iterator[Path]:
    """Remove the checkpoints that `checkpoint.keep` does not keep, after a save.

    Each is renamed, so that it is no complete checkpoint any more, and then deleted. What a kill
    leaves of it, the next start of a training in this folder deletes.

    Args:
        parent: The folder of the checkpoints.
        keep: The section `checkpoint.keep` of the spec. None: keep all.

    Yields:
        Each removed checkpoint, oldest first.

    Raises:
        OSError: A folder cannot be renamed or deleted.
    """
    if keep is None:
        return
    paths = {step_in_name(path): path for path in complete_checkpoints(parent)}
    # Newest first: older ones are not read.
    sound = islice((step for step, path in paths.items() if not find_fault(path)), keep.last)
    for step in sorted(surplus_steps(paths, [*sound], keep)):
        aside = paths[step].with_name(f"{paths[step].name}.tmp-{secrets.token_hex(4)}")
        paths[step].rename(aside)
        shutil.rmtree(aside)
        yield paths[step]


def file_digests(folder: Path, names: Iterable[str]) -> dict[str, tuple[int, str]]:
    """Return the size and the digest of files.

    Args:
        folder: The folder of the files.
        names: Names of files, relative to the folder.

    Returns:
        The size in bytes and the SHA-256 (hexadecimal), by name.
    """
    return {name: _file_digest(folder / name) for name in names}


def write(folder: Path, manifest: Manifest) -> None:
    """Write a manifest with mode 0600, and flush the file and its folder to disk."""
    # O_EXCL: a manifest is never overwritten.
    descriptor = os.open(folder / NAME, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(seal_text(asdict(manifest)))
        file.flush()
        os.fsync(file.fileno())
    # The file is durable only when its entry in the folder is.
    sync_folder(folder)


def seal_text(content: Mapping[str, object]) -> bytes:
    """Return the text of a manifest with its seal: the SHA-256 of the text without the seal."""
    text = json.dumps(content, indent=1).encode()
    return text.removesuffix(b"\n}") + b',\n "seal": "%s"\n}' % _sha256(text).encode()


def read(folder: Path) -> Manifest:
    """Read and check the manifest of a checkpoint.

    Raises:
        PtrainError: The manifest is missing, damaged, invalid or of a newer format.
    """
    text, is_sealed = _read_unsealed(folder)
    manifest = _parse_manifest(folder, text)
    # A damaged seal would otherwise turn the manifest into one without a seal.
    if not is_sealed and manifest.format != UNSEALED:
        raise PtrainError(f"checkpoint {folder}: {NAME} has no seal")
    # A copied folder may have been renamed. The name decides which checkpoint is newest.
    if is_checkpoint_name(folder.name) and manifest.step != step_in_name(folder):
        raise PtrainError(f"checkpoint {folder}: {NAME} belongs to step {manifest.step}")
    if strange := [
        # `.` and `..` match the pattern, and are folders.
        name
        for name in manifest.files
        if not _FILE.fullmatch(name) or name in (".", "..")
    ]:
        raise PtrainError(f"checkpoint {folder}: {NAME} lists {strange[0]!r}, not a bare file name")
    return manifest


def _read_unsealed(folder: Path) -> tuple[bytes, bool]:
    """Return the text without its seal, and whether it had one.

    Raises:
        PtrainError: The file cannot be read, or the seal does not match.
    """
    try:
        require_file(folder / NAME, _MOST_BYTES)
        text = (folder / NAME).read_bytes()
    except OSError as error:
        raise PtrainError(f"checkpoint {folder}: {NAME} is not readable: {error}") from error
    if (parts := _SEALED.fullmatch(text)) is None:
        return text, False
    content, seal = parts[1] + b"\n}", parts[2].decode()
    if _sha256(content) != seal:
        raise PtrainError(f"checkpoint {folder}: {NAME} was modified (its seal does not match)")
    return content, True


def _parse_manifest(folder: Path, text: bytes) -> Manifest:
    """Parse a manifest. Raises PtrainError with the first fault."""
    try:
        content = json.loads(text)
        number = content.get("format") if isinstance(content, dict) else None
        if isinstance(number, int) and number > FORMAT:  # a newer format may have other fields
            raise PtrainError(
                f"checkpoint {folder}: has format {number}; this version of ptrain reads "
                f"formats up to {FORMAT}"
            )
        return _build_manifest(content)
    except (ValueError, RecursionError) as error:
        raise PtrainError(f"checkpoint {folder}: {NAME} is not readable: {error}") from error
    except RejectedValue as error:
        finding = f"{error.finding}. {error.remedy}" if error.remedy else error.finding
        raise PtrainError(f"checkpoint {folder}: {NAME} is not readable: {finding}") from error


def _build_manifest(content: object) -> Manifest:
    """Build a manifest. Raises RejectedValue if a field is invalid, missing or unknown."""
    known = cast("dict[str, object]", FreeMapping("").check(content))
    for spot in fields(Manifest):
        if is_required(spot) and spot.name not in known:
            reject(f"{spot.name}: is missing")
    if strange := known.keys() - _LEAF_OF.keys():
        reject(f"{min(strange)}: unknown field", f"Allowed fields: {', '.join(_LEAF_OF)}.")
    return Manifest(**_check_values(_LEAF_OF, known))


def _check_values(leaves: Mapping[Any, Leaf], values: Mapping[Any, object]) -> dict[Any, Any]:
    """Return the values after their leaves have checked them. A fault names its key."""
    taken = {}
    for key, value in values.items():
        try:
            taken[key] = leaves[key].parse(value)
        except RejectedValue as error:
            reject(f"{key}: {error.finding}", error.remedy)
    return taken


def _sha256(text: bytes) -> str:
    """Return the SHA-256 of a text."""
    return hashlib.sha256(text).hexdigest()


def file_problems(folder: Path, manifest: Manifest, names: Iterable[str]) -> list[str]:
    """Return the faults of these files, before they are loaded.

    Args:
        folder: The checkpoint.
        manifest: Its manifest.
        names: The files to hash, a part of its files.
    """
    return [
        f"{name}: {problem}"
        for name in names
        if (problem := _file_problem(folder / name, *manifest.files[name]))
    ]


def find_fault(folder: Path, *, hashes: bool = False) -> str:
    """Return the first fault of a checkpoint, "" if none is found.

    Args:
        folder: The checkpoint.
        hashes: Compare the digests of its files, which reads them. Else only sizes are compared.
    """
    try:
        manifest = read(folder)
        faults = (
            file_problems(folder, manifest, sorted(manifest.files))
            if hashes
            else find_wrong_sizes(folder, manifest)
        )
    except (PtrainError, OSError) as error:
        return str(error).removeprefix(f"checkpoint {folder}: ")
    return faults[0] if faults else ""


def find_wrong_sizes(folder: Path, manifest: Manifest) -> list[str]:
    """Find the files that are missing or have another size, without reading them.

    Args:
        folder: The checkpoint.
        manifest: The manifest with the expected sizes in bytes.

    Returns:
        "NAME: PROBLEM" for each such file, sorted by name.
    """
    return [
        f"{name}: {problem}"
        for name, (size, _) in sorted(manifest.files.items())
        if (problem := _size_problem(folder / name, size))
    ]


def sync_folder(folder: Path) -> None:
    """Flush a folder to disk, which makes renames in it durable."""
    # fsync of the folder, because a rename changes the folder and not the file.
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _size_problem(path: Path, size: int) -> str:
    """Return a fault if the file is missing or has another size, else ""."""
    if path.is_symlink() or not path.is_file():  # a link could lead out of the folder
        return "missing"
    actual = path.stat().st_size
    return "" if actual == size else f"has {actual} bytes, but {size} were written"


def _file_problem(path: Path, size: int, digest: str) -> str:
    """Return a fault if the file is missing or its content has changed, else ""."""
    # The size first: it finds a truncated file without reading it.
    if problem := _size_problem(path, size):
        return problem
    return "" if _file_digest(path)[1] == digest else "its content was modified (SHA-256)"


def _file_digest(path: Path) -> tuple[int, str]:
    """Return size and SHA-256 of a file."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return path.stat().st_size, digest
