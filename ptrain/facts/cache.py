"""The user's cache: facts of models that had to be traced, so that the next prediction of the same
one needs neither the seconds nor an import of torch.

A trace is kept under what it depends on: the part of the spec that shapes it, the versions of
torch, of transformers and of what that takes its kernels from, the kind of processor, and this very
ptrain, file by file. What an editable or a development version of these gave is never kept: their
code may have changed where nobody sees it. The trace of a `target:` is kept with the files that it
read: the modules that were loaded, the data that its Python code opened, and the folder of the
target. It is valid as long as they are what they were. Not noticed: environment variables, files in
other folders that native code reads, patches of an installed package, and the instructions that a
processor has.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import platform
import re
import sys
import sysconfig
import tempfile
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from importlib.machinery import PathFinder
from pathlib import Path

import ptrain
from ptrain.codec import decode, encode
from ptrain.errors import PtrainError
from ptrain.facts.model import ModelFacts
from ptrain.facts.traced_part import traced_part
from ptrain.spec.dials import Compiled
from ptrain.spec.function import UserFunction
from ptrain.spec.model import HuggingFaceModel
from ptrain.spec.spec import Spec
from ptrain.spec.write import to_mapping

_OFF = "off"  # as the value of PTRAIN_CACHE
_STARTED = time.time()  # of this process, nearly: a file that is younger may not be what it runs
_LARGE = 2**20  # bytes of a file, from which on its size and date stand for its content
_LISTED = 300  # files of a folder whose size and date count
_INSTALLED = "-packages"  # site-packages, and Debian's dist-packages
_SYSTEM = ("/proc/", "/sys/", "/dev/")
_SUFFIX = ".json.gz"
_OURS = re.compile(r"[0-9a-f]{32}\.json\.gz\w*")
# from where transformers takes operators, if it is there
_KERNELS = ("kernels", "flash-attn", "flash-linear-attention", "causal-conv1d", "mamba-ssm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """The facts of a model, and the files that they depend on with a signature of each."""

    facts: ModelFacts
    files: tuple[tuple[str, str], ...] = ()


def kept(spec: Spec, read: Callable[[], ModelFacts], *, allow_import: bool = False) -> ModelFacts:
    """Return the facts of a spec that the cache has, else read them and put them there. A cache
    that cannot be written is none.

    Args:
        spec: The spec whose model is read.
        read: Reads the facts.
        allow_import: The spec may import the user's code, without which its trace is not used.
    """
    is_theirs = bool(spec.user_functions)
    path = None if is_theirs and not allow_import else _path(spec)
    if path is None:
        return read()
    if (known := _read(path)) is not None and all(_signature(f) == s for f, s in known.files):
        return known.facts
    if is_theirs:
        with _opened_files() as opened:
            facts = read()
        files = _files_of({*opened, *_module_files(), *_folders(spec)})
    else:
        facts, files = read(), ()
    if not facts.untraced and files is not None:
        with suppress(OSError):
            _write(path, Trace(facts=facts, files=files))
    return facts


_OPENED: list[set[str]] = []  # of the traces that run now


@cache
def _watch_opened() -> None:
    """Note the files that are opened to be read. A hook cannot be removed."""

    def note(event: str, arguments: tuple[object, ...]) -> None:
        if event == "open" and (newest := _OPENED[-1:]):  # another thread may end a trace
            path, _, flags = arguments
            is_written = isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR)
            if isinstance(path, str | bytes | os.PathLike) and not is_written:
                newest[0].add(os.path.abspath(os.fsdecode(path)))

    sys.addaudithook(note)


@contextmanager
def _opened_files() -> Iterator[set[str]]:
    """Collect the files that are opened meanwhile."""
    _watch_opened()
    _OPENED.append(set())
    try:
        yield _OPENED[-1]
    finally:
        _OPENED.pop()


def _module_files() -> Iterator[str]:
    """Yield the files of loaded modules; of an installed package its first."""
    for name, module in [*sys.modules.items()]:
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and not (_INSTALLED in file and "." in name):
            yield os.path.abspath(file)


def _files_of(paths: Iterable[str]) -> tuple[tuple[str, str], ...] | None:
    """Return files with their signatures, without those of Python, ptrain and installed packages;
    None if one of them is younger than this process."""
    stdlib, own = sysconfig.get_path("stdlib"), str(Path(ptrain.__file__).parent)
    files = []
    for path in sorted(paths):
        is_ignored = path.startswith((*_SYSTEM, f"{stdlib}/", f"{own}/")) or path.endswith(".pyc")
        if not is_ignored and os.path.exists(path):
            if any(os.path.getmtime(file) >= _STARTED for file in _listed_files(path)):
                return None
            files.append((path, _signature(path)))
    return tuple(files)


def _signature(path: str) -> str:
    """Return a text that changes with a file, or with the files of a folder; empty without one."""
    try:
        if os.path.isdir(path):
            return _folder_signature(path)
        status = os.stat(path)
        if status.st_size >= _LARGE or _INSTALLED in path:
            return f"{status.st_size} {status.st_mtime_ns}"
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError:
        return ""


def _folders(spec: Spec) -> set[str]:
    """Return the folders of the files that the user's functions are imported from."""
    folders = set()
    for function in spec.user_functions:
        module = sys.modules.get(function.target.partition(":")[0])
        for file in (getattr(module, "__file__", None), *_origins(function)):
            if isinstance(file, str) and os.path.isfile(file):
                folders.add(os.path.dirname(os.path.abspath(file)))
    return folders


def _listed_files(path: str) -> list[str]:
    """Return a file, or the first files of a folder by name, without those of folders in it."""
    if not os.path.isdir(path):
        return [path]
    with os.scandir(path) as entries:
        files = sorted(entry.path for entry in entries if entry.is_file())
    return [file for file in files if not file.endswith(".pyc")][:_LISTED]


def _folder_signature(path: str) -> str:
    """Return a digest of the names, sizes and dates of a folder's files: native code may read them,
    and no audit event names the files that it opens."""
    digest = hashlib.sha256()
    for file in _listed_files(path):
        status = os.stat(file)
        digest.update(f"{file} {status.st_size} {status.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def is_off() -> bool:
    """Return True if PTRAIN_CACHE switches the cache off."""
    return os.environ.get("PTRAIN_CACHE") == _OFF


def folder() -> Path:
    """Return where traces are kept: what PTRAIN_CACHE names (`off`: no trace is read or kept), else
    `ptrain` in the user's folder of caches."""
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
    if is_off():
        return None
    is_theirs = isinstance(spec.model, HuggingFaceModel)
    try:
        versions = [_version(name) for name in ("torch", *(["transformers"] if is_theirs else []))]
        kernels = [_version(name, "none") for name in _KERNELS]
        part = to_mapping(traced_part(spec), sync_is_written=False)
        hub = os.environ.get("USE_HUB_KERNELS")
        origins = [_origins(function) for function in spec.user_functions]
        compiler = None if spec.compile is Compiled.NONE else _compiler()
        depends = [part, versions, kernels, hub, platform.machine(), _sources(), origins, compiler]
        home = folder()
    except (RuntimeError, OSError, metadata.PackageNotFoundError):
        return None  # a user without a home, files that cannot be read, code without a version
    return home / f"{hashlib.sha256(repr(depends).encode()).hexdigest()[:32]}{_SUFFIX}"


def _compiler() -> list[object]:
    """Return what the programs of torch.compile depend on besides: the instructions of the
    processor, and what the environment says to inductor."""
    info = Path("/proc/cpuinfo")
    flags = re.search(
        r"^(?:flags|Features)\s*:.*$", info.read_text() if info.exists() else "", re.M
    )
    said = sorted(item for item in os.environ.items() if item[0].startswith("TORCHINDUCTOR_"))
    return [flags and flags[0], said]


def _origins(function: UserFunction) -> list[str | None]:
    """Return the files that a function's module may be imported from."""
    top = function.target.partition(":")[0].partition(".")[0]
    folders = None if function.folder is None else [function.folder]
    modules = [PathFinder.find_spec(top, path) for path in (None, folders)]
    return [None if module is None else module.origin for module in modules]


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


def _read(path: Path) -> Trace | None:
    """Return the trace of a file; None where there is none, or none that can be read."""
    try:
        trace: Trace = decode(json.loads(gzip.decompress(path.read_bytes())), Trace)
    except (OSError, EOFError, zlib.error, ValueError, TypeError):
        return None
    return trace


def _write(path: Path, trace: Trace) -> None:
    """Put a trace into a file, whole or not at all; it is its owner's alone."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    text = json.dumps(encode(trace, Trace), separators=(",", ":"))
    descriptor, new = tempfile.mkstemp(prefix=path.name, dir=path.parent)  # 0o600
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(gzip.compress(text.encode(), mtime=0))
        os.replace(new, path)
    except OSError:
        os.unlink(new)
        raise
