"""A checkpoint's manifest: what it is, and the SHA-256 of every file in it. Torch-free.

torch's checkpoints carry no checksum: of 200 flipped bits 191 were loaded as wrong values. A
checkpoint is complete when its folder has its final name and the manifest agrees with the files.
The manifest's last entry, its seal, is the SHA-256 of its own text before it: of 200 flipped bits
in an unsealed one 36 were read as another step, size or model.
SHA-256 here guards against accidents, not against an attacker: load only checkpoints you trust.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from ptrain.errors import PtrainError

FORMAT = 3  # of format 2: without `samples` and `data`
UNSEALED = 1  # the format of manifests without a seal, which are still read
NAME = "manifest.json"
_STEP = re.compile(r"step-(\d{8,})")
_FILE = re.compile(r"[A-Za-z0-9_.-]+")  # bare names: nothing outside the folder is ever read
_SEALED = re.compile(rb'(.*),\n "seal": "([0-9a-f]{64})"\n}', re.DOTALL)

_Bytes = Annotated[int, Field(ge=0)]
_Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """`step` counts finished steps, `samples` those that these steps trained on; None in an older
    manifest. `files`: name -> (bytes, SHA-256). `trained`: the sections of the resolved spec that a
    continuation is compared with, and `data`: name -> (size, digest, time of modification in ns) as
    `resume.data_prints` gives them; empty in a manifest that has none."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=True)

    step: Annotated[int, Field(ge=0)]
    spec: str
    world_size: Annotated[int, Field(ge=1)]
    torch: str
    files: Mapping[str, tuple[_Bytes, _Digest]]
    trained: Mapping[str, Any] = field(default_factory=dict)
    samples: Annotated[int, Field(ge=0)] | None = None
    data: Mapping[str, tuple[_Bytes, str, int]] = field(default_factory=dict)
    format: Annotated[int, Field(ge=UNSEALED)] = FORMAT


_SCHEMA = TypeAdapter(Manifest)


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
    path = folder / NAME
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
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
        raise PtrainError(f"checkpoint {folder}: {NAME} has lost its seal")
    if is_name(folder.name) and manifest.step != step_of(folder):
        raise PtrainError(f"checkpoint {folder}: {NAME} is of step {manifest.step}")
    if strange := [name for name in manifest.files if not _is_bare(name)]:
        raise PtrainError(f"checkpoint {folder}: {NAME} lists {strange[0]!r}, not a bare file name")
    return manifest


def _unsealed(folder: Path) -> tuple[bytes, bool]:
    """The text that was sealed, and whether it was. Raises PtrainError where the seal is not that
    of the text."""
    try:
        text = (folder / NAME).read_bytes()
    except OSError as error:
        raise PtrainError(f"checkpoint {folder}: no readable {NAME}: {error}") from error
    parts = _SEALED.fullmatch(text)
    if parts is None:
        return text, False
    content, seal = parts[1] + b"\n}", parts[2].decode()
    if _seal(content) != seal:
        raise PtrainError(f"checkpoint {folder}: {NAME} is not as it was written (its seal)")
    return content, True


def _parsed(folder: Path, text: bytes) -> Manifest:
    """Raises PtrainError with the first thing that a manifest cannot be."""
    try:
        manifest = _SCHEMA.validate_json(text)
    except ValidationError as error:
        _require_known_format(folder, text)
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        finding = f"{place}: {first['msg']}" if place else first["msg"]
        raise PtrainError(f"checkpoint {folder}: no readable {NAME}: {finding}") from error
    _require_known_format(folder, text)
    return manifest


def _require_known_format(folder: Path, text: bytes) -> None:
    """Raises PtrainError for a format that came after this one, whose fields nobody here knows."""
    with suppress(ValueError, RecursionError):
        content = json.loads(text)
        number = content.get("format") if isinstance(content, dict) else None
        if isinstance(number, int) and number > FORMAT:
            raise PtrainError(
                f"checkpoint {folder}: has format {number}, this ptrain reads up to {FORMAT}"
            )


def _seal(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()


def _is_bare(name: str) -> bool:
    return bool(_FILE.fullmatch(name)) and name not in (".", "..")


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
    return "" if actual == size else f"has {actual} bytes, {size} were written"


def _problem(path: Path, size: int, digest: str) -> str:
    if problem := _size_problem(path, size):
        return problem
    return "" if _digest(path)[1] == digest else "content differs from what was written (SHA-256)"


def _digest(path: Path) -> tuple[int, str]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return path.stat().st_size, digest
