"""Read and write a checkpoint's manifest: its contents and the SHA-256 of every file. Torch-free.

torch's checkpoints carry no checksum: of 200 flipped bits 191 were loaded as wrong values. A
checkpoint is complete when its folder has its final name and the manifest agrees with the files.
The manifest's last entry, its seal, is the SHA-256 of its own text before it: of 200 flipped bits
in an unsealed one 36 were read as another step, size or model.
SHA-256 here guards against accidents, not against an attacker: load only checkpoints you trust.

A checkpoint of another model is rejected. Another learning rate, optimizer, text, seed or batch may
be intended, so each key that differs is reported.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, cast

from ptrain.errors import Fault, PtrainError
from ptrain.spec.leaf import (
    Free,
    Leaf,
    Refused,
    Text,
    Whole,
    declared,
    describe,
    is_required,
    refuse,
)
from ptrain.spec.spec import Spec
from ptrain.units import leaves

_REMEDY = "Use the model of the checkpoint, or remove `--resume` to train from the start."
# Names and places: the model is the same without, and a checkpoint has its weights.
_WHEREABOUTS = ("preset", "folder", "pretrained")
_WATCHED = {"optimizer": (), "data": (), "train": ("seed",), "batch": ("global", "sequence")}


def trained(spec: Spec) -> dict[str, object]:
    """Return what a manifest keeps of a spec, as JSON reads it back."""
    plain = json.loads(json.dumps(spec.resolved, default=str))
    model = {key: value for key, value in plain["model"].items() if key not in _WHEREABOUTS}
    watched = {
        section: {key: plain[section][key] for key in keys or plain[section]}
        for section, keys in _WATCHED.items()
    }
    return {"model": model, **watched}


def other_model(was: Mapping[str, object], spec: Spec) -> Fault | None:
    """Return how the model section differs from the one that was saved; None for an older
    manifest."""
    before, now = was.get("model"), trained(spec)["model"]
    if not isinstance(before, dict) or _text(before) == _text(now):
        return None
    assert isinstance(now, dict)
    names = [name for name in {**before, **now} if _text(before.get(name)) != _text(now.get(name))]
    saved = ", ".join(f"{name}: {before.get(name)}" for name in names)
    current = ", ".join(f"{name}: {now.get(name)}" for name in names)
    return Fault(
        place="model",
        finding=f"the checkpoint contains another model: {saved}; this spec has {current}",
        remedy=_REMEDY,
    )


def warnings(was: Mapping[str, object], spec: Spec) -> Iterator[str]:
    """One line for each key that is not as it was, and may be meant. What a manifest of an older
    format did not keep is not compared."""
    before, now = dict(leaves(was)), dict(leaves(trained(spec)))
    for place in {**before, **now}:
        section = place.partition(".")[0]
        is_kept = place in before or isinstance(was.get(section), dict)
        if section in _WATCHED and is_kept and before.get(place) != now.get(place):
            yield f"{place}: {_said(before, place)} in the checkpoint, {_said(now, place)} now"


def is_other_optimizer(was: Mapping[str, object], spec: Spec) -> bool:
    return dict(leaves(was)).get("optimizer.name", spec.optimizer.name) != spec.optimizer.name


def _said(values: Mapping[str, object], place: str) -> str:
    return _text(values[place]) if place in values else "nothing"


def _text(value: object) -> str:
    return json.dumps(value, sort_keys=True)


FORMAT = 3  # of format 2: without `samples` and `data`
UNSEALED = 1  # the format of manifests without a seal, which are still read
NAME = "manifest.json"
_STEP = re.compile(r"step-(\d{8,})")
_FILE = re.compile(r"[A-Za-z0-9_.-]+")  # bare names: nothing outside the folder is ever read
_SEALED = re.compile(rb'(.*),\n "seal": "([0-9a-f]{64})"\n}', re.DOTALL)

_MOST = 2**63 - 1  # what a file system counts to, in bytes and in nanoseconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A checkpoint's manifest; `_HOLDS` says what a file may hold in each field.

    `step` counts finished steps, `samples` those that these steps trained on; None in an older
    manifest. `files`: name -> (bytes, SHA-256). `trained`: the sections of the resolved spec that a
    continuation is compared with, and `data`: name -> (size, digest, time of modification in ns) as
    `resume.data_prints` gives them; empty in a manifest that has none."""

    step: int
    spec: str
    world_size: int
    torch: str
    files: Mapping[str, tuple[int, str]]
    trained: Mapping[str, Any] = field(default_factory=dict)
    samples: int | None = None
    data: Mapping[str, tuple[int, str, int]] = field(default_factory=dict)
    format: int = FORMAT


@declared
class _Row(Leaf):
    """A list with a leaf of its own for each value."""

    leaves: tuple[Leaf, ...] = ()

    def check(self, value: Any) -> object:
        if not isinstance(value, list) or len(value) != len(self.leaves):
            got = f"a list of {len(value)}" if isinstance(value, list) else describe(value)
            refuse(f"must be a list of {len(self.leaves)}; got {got}")
        return tuple(_taken(dict(enumerate(self.leaves)), dict(enumerate(value))).values())


_COUNT, _TEXT = Whole("", 0, _MOST), Text("", r"(?s:.*)")
_DIGEST = Text("", "[0-9a-f]{64}", "a SHA-256 as 64 hexadecimal digits")
_HOLDS: Mapping[str, Leaf] = {
    "step": _COUNT,
    "spec": _TEXT,
    "world_size": Whole("", 1, _MOST),
    "torch": _TEXT,
    "files": Free("", values=_Row("", leaves=(_COUNT, _DIGEST))),
    "trained": Free(""),
    "samples": Whole("", 0, _MOST, null=True),
    "data": Free("", values=_Row("", leaves=(_COUNT, _TEXT, Whole("", -_MOST, _MOST)))),
    "format": Whole("", UNSEALED, _MOST),
}


def folder_name(step: int) -> str:
    return f"step-{step:08d}"


def is_name(text: str) -> bool:
    """Return whether a folder of this name is a checkpoint that was written to its end."""
    return bool(_STEP.fullmatch(text))


def step_of(folder: Path) -> int:
    """The step in the name of a checkpoint that was written to its end."""
    return int(folder.name.removeprefix("step-"))


def complete(parent: Path) -> list[Path]:
    """Return the checkpoints with their final name below `parent`, newest first."""
    paths = [path for path in parent.glob("step-*") if is_name(path.name)]
    return sorted(paths, key=step_of, reverse=True)


def half_written(parent: Path) -> list[Path]:
    """Return the folders that a job that was killed while saving left behind."""
    return sorted(parent.glob("step-*.tmp-*"))


def digests(folder: Path, names: Iterable[str]) -> dict[str, tuple[int, str]]:
    """Size and SHA-256 of these files."""
    return {name: _digest(folder / name) for name in names}


def write(folder: Path, manifest: Manifest) -> None:
    """Flushed to the disk together with the folder's entries."""
    descriptor = os.open(folder / NAME, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(sealed(asdict(manifest)))
        file.flush()
        os.fsync(file.fileno())
    sync_folder(folder)


def sealed(content: Mapping[str, object]) -> bytes:
    """The manifest's text, which ends with the SHA-256 of itself without that line."""
    text = json.dumps(content, indent=1).encode()
    return text.removesuffix(b"\n}") + b',\n "seal": "%s"\n}' % _seal(text).encode()


def read(folder: Path) -> Manifest:
    """Raises PtrainError for a folder that holds no manifest that this version can read, or one
    that is not as it was written."""
    text, is_sealed = _unsealed(folder)
    manifest = _parsed(folder, text)
    if not is_sealed and manifest.format != UNSEALED:
        raise PtrainError(f"checkpoint {folder}: {NAME} has no seal")
    if is_name(folder.name) and manifest.step != step_of(folder):
        raise PtrainError(f"checkpoint {folder}: {NAME} belongs to step {manifest.step}")
    if strange := [
        name for name in manifest.files if not _FILE.fullmatch(name) or name in (".", "..")
    ]:
        raise PtrainError(f"checkpoint {folder}: {NAME} lists {strange[0]!r}, not a bare file name")
    return manifest


def _unsealed(folder: Path) -> tuple[bytes, bool]:
    """The text that was sealed, and whether it was. Raises PtrainError where the seal is not that
    of the text."""
    try:
        text = (folder / NAME).read_bytes()
    except OSError as error:
        raise PtrainError(f"checkpoint {folder}: {NAME} is not readable: {error}") from error
    if (parts := _SEALED.fullmatch(text)) is None:
        return text, False
    content, seal = parts[1] + b"\n}", parts[2].decode()
    if _seal(content) != seal:
        raise PtrainError(f"checkpoint {folder}: {NAME} was modified (its seal does not match)")
    return content, True


def _parsed(folder: Path, text: bytes) -> Manifest:
    """Raises PtrainError with the first thing that a manifest cannot be."""
    try:
        content = json.loads(text)
        number = content.get("format") if isinstance(content, dict) else None
        if isinstance(number, int) and number > FORMAT:  # its fields are not known here
            raise PtrainError(
                f"checkpoint {folder}: has format {number}; this version of ptrain reads "
                f"formats up to {FORMAT}"
            )
        return _manifest(content)
    except (ValueError, RecursionError) as error:
        raise PtrainError(f"checkpoint {folder}: {NAME} is not readable: {error}") from error
    except Refused as error:
        finding = f"{error.finding}. {error.remedy}" if error.remedy else error.finding
        raise PtrainError(f"checkpoint {folder}: {NAME} is not readable: {finding}") from error


def _manifest(content: object) -> Manifest:
    """Build a manifest of plain data. Raises Refused, with the place, where a value is not what its
    field holds, a field without a default is missing, or one is unknown."""
    known = cast("dict[str, object]", Free("").check(content))
    for spot in fields(Manifest):
        if is_required(spot) and spot.name not in known:
            refuse(f"{spot.name}: is missing")
    if strange := known.keys() - _HOLDS.keys():
        refuse(f"{min(strange)}: unknown field", f"Allowed fields: {', '.join(_HOLDS)}.")
    return Manifest(**_taken(_HOLDS, known))


def _taken(leaves: Mapping[Any, Leaf], values: Mapping[Any, object]) -> dict[Any, Any]:
    """Return the values as their leaves take them; the fault of one names its key."""
    taken = {}
    for key, value in values.items():
        try:
            taken[key] = leaves[key].take(value)
        except Refused as error:
            refuse(f"{key}: {error.finding}", error.remedy)
    return taken


def _seal(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()


def problems(folder: Path, manifest: Manifest, names: Iterable[str]) -> list[str]:
    """Return what is wrong with these files, before anything reads them."""
    return [
        f"{name}: {problem}"
        for name in names
        if (problem := _problem(folder / name, *manifest.files[name]))
    ]


def wrong_sizes(folder: Path, manifest: Manifest) -> list[str]:
    """Return what can be seen to be wrong without reading the files."""
    return [
        f"{name}: {problem}"
        for name, (size, _) in sorted(manifest.files.items())
        if (problem := _size_problem(folder / name, size))
    ]


def sync_folder(folder: Path) -> None:
    """A rename is on the disk when the folder that holds the name is."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _size_problem(path: Path, size: int) -> str:
    if path.is_symlink() or not path.is_file():
        return "missing"
    actual = path.stat().st_size
    return "" if actual == size else f"has {actual} bytes, but {size} were written"


def _problem(path: Path, size: int, digest: str) -> str:
    if problem := _size_problem(path, size):
        return problem
    return "" if _digest(path)[1] == digest else "its content was modified (SHA-256)"


def _digest(path: Path) -> tuple[int, str]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return path.stat().st_size, digest
