"""The user's cache: facts of models that had to be traced, so that the next prediction of the same
one needs neither the seconds nor an import of torch.

A trace is kept under what it depends on: the part of the spec that shapes it, the versions of
torch, of transformers and of what that takes its kernels from, the kind of processor, and this very
ptrain, file by file. What a `target:` of a spec names is never kept, nor what an editable or a
development version of these gave: their code may have changed where nobody sees it. Not in the key:
what somebody patches in an installed package, and the instructions that a processor has.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import platform
import re
import sys
import tempfile
import zlib
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from importlib import metadata
from pathlib import Path

import ptrain
from ptrain.codec import decode, encode
from ptrain.errors import PtrainError
from ptrain.facts.model import ModelFacts
from ptrain.facts.traced_part import traced_part
from ptrain.spec.model import HuggingFaceModel
from ptrain.spec.spec import Spec
from ptrain.spec.write import to_mapping

_SUFFIX = ".json.gz"
_OURS = re.compile(r"[0-9a-f]{32}\.json\.gz\w*")
# from where transformers takes operators, if it is there
_KERNELS = ("kernels", "flash-attn", "flash-linear-attention", "causal-conv1d", "mamba-ssm")


def kept(spec: Spec, read: Callable[[], ModelFacts]) -> ModelFacts:
    """Return the facts that the cache has of a spec, else what `read` gives, which is put there. A
    cache that cannot be written is none."""
    if (path := _path(spec)) is None:
        return read()
    if (known := _read(path)) is not None:
        return known
    facts = read()
    if not facts.untraced:
        with suppress(OSError):
            _write(path, facts)
    return facts


def folder() -> Path:
    """Return where traces are kept: what PTRAIN_CACHE names, else `ptrain` in the user's folder of
    caches."""
    if chosen := os.environ.get("PTRAIN_CACHE"):
        return Path(chosen)
    if chosen := os.environ.get("XDG_CACHE_HOME"):
        return Path(chosen) / "ptrain"
    home = Path.home()
    return (home / "Library/Caches" if sys.platform == "darwin" else home / ".cache") / "ptrain"


def files() -> list[Path]:
    """Return the files of the cache, by their names, and what a process left half written. Raises
    PtrainError where the user has no home."""
    try:
        listed = folder().glob(f"*{_SUFFIX}*")
    except RuntimeError as error:
        raise PtrainError(f"error: no cache folder: {error}") from error
    return [path for path in sorted(listed) if _OURS.fullmatch(path.name)]


def _path(spec: Spec) -> Path | None:
    """Return the file of a spec's facts; None where none are kept."""
    if spec.user_functions:
        return None
    is_theirs = isinstance(spec.model, HuggingFaceModel)
    try:
        versions = [_version(name) for name in ("torch", *(["transformers"] if is_theirs else []))]
        kernels = [_version(name, "none") for name in _KERNELS]
        part = to_mapping(traced_part(spec), sync_is_written=False)
        hub = os.environ.get("USE_HUB_KERNELS")
        depends = [part, versions, kernels, hub, platform.machine(), _sources()]
        home = folder()
    except (RuntimeError, OSError, metadata.PackageNotFoundError):
        return None  # a user without a home, files that cannot be read, code without a version
    return home / f"{hashlib.sha256(repr(depends).encode()).hexdigest()[:32]}{_SUFFIX}"


def _version(package: str, otherwise: str | None = None) -> str:
    """Return the version of a package. Raises PackageNotFoundError where it has none that says what
    its code is: one that is not installed (unless that is `otherwise`), editable, or in
    development."""
    try:
        distribution = metadata.distribution(package)
    except metadata.PackageNotFoundError:
        if otherwise is None:
            raise
        return otherwise
    origin = json.loads(distribution.read_text("direct_url.json") or "{}")
    if "dev" in distribution.version or origin.get("dir_info", {}).get("editable"):
        raise metadata.PackageNotFoundError(package)
    return distribution.version


@cache
def _sources() -> str:
    """Return what changes with this ptrain: a digest of its files."""
    root, digest = Path(ptrain.__file__).parent, hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        if path.is_file():  # editors leave links that lead nowhere
            digest.update(str(path.relative_to(root)).encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _read(path: Path) -> ModelFacts | None:
    """Return the facts of a file; None where there is none, or none that can be read."""
    try:
        facts: ModelFacts = decode(json.loads(gzip.decompress(path.read_bytes())), ModelFacts)
    except (OSError, EOFError, zlib.error, ValueError, TypeError):
        return None
    return facts


def _write(path: Path, facts: ModelFacts) -> None:
    """Put facts into a file, whole or not at all; it is its owner's alone."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    text = json.dumps(encode(facts, ModelFacts), separators=(",", ":"))
    descriptor, new = tempfile.mkstemp(prefix=path.name, dir=path.parent)  # 0o600
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(gzip.compress(text.encode(), mtime=0))
        os.replace(new, path)
    except OSError:
        os.unlink(new)
        raise
