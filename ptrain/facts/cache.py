"""The user's cache of traced model facts: a later prediction of the same model needs no torch.

The key of a trace has everything that it depends on: the part of the spec that shapes it; the
versions of torch, of transformers and of its kernel packages; the kind of processor; and all source
files of ptrain. Traces of editable or development versions of these packages are not cached,
because their code may change without a new version.

The trace of a `target:` is stored with the files that it read: the loaded modules, the data that
its Python code opened, and the target's folder. It is valid as long as these are unchanged. The
cache does not notice changes of environment variables, of files in other folders that native code
reads, of patched installed packages, and of a processor's instruction set.
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
from ptrain.spec.model import HuggingFaceModel, UserFunction
from ptrain.spec.spec import Spec
from ptrain.spec.write import to_mapping

_OFF = "off"  # value of PTRAIN_CACHE
_STARTED = time.time()  # about the start of this process; younger files may differ from loaded code
_LARGE = 2**20  # bytes; larger files, such as weights, are compared by size and date only
_LISTED = 300  # files of a folder that its signature covers, in order of name
_INSTALLED = "-packages"  # site-packages, and Debian's dist-packages
_SYSTEM = ("/proc/", "/sys/", "/dev/")
_SUFFIX = ".json.gz"
_OURS = re.compile(r"[0-9a-f]{32}\.json\.gz\w*")
# Packages from which transformers takes operators if they are installed.
_KERNELS = ("kernels", "flash-attn", "flash-linear-attention", "causal-conv1d", "mamba-ssm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """The facts of a model, and the files that they depend on with their signatures."""

    facts: ModelFacts
    files: tuple[tuple[str, str], ...] = ()


def read_or_cache(
    spec: Spec, read: Callable[[], ModelFacts], *, allow_import: bool = False
) -> ModelFacts:
    """Return the facts of a spec from the cache, or read them and add them to it.

    A cache that cannot be written is ignored.

    Args:
        spec: The spec of the model.
        read: Reads the facts.
        allow_import: The spec may import the user's code. Otherwise a trace of such code is not
            used.
    """
    is_theirs = bool(spec.user_functions)
    path = None if is_theirs and not allow_import else _cache_path(spec)
    if path is None:
        return read()
    if (trace := _read_trace(path)) is not None and all(
        _file_signature(f) == s for f, s in trace.files
    ):
        return trace.facts
    if is_theirs:
        with _opened_files() as opened:
            facts = read()
        files = _file_signatures({*opened, *_module_files(), *_target_folders(spec)})
    else:
        facts, files = read(), ()
    if not facts.untraced and files is not None:
        with suppress(OSError):
            _write_trace(path, Trace(facts=facts, files=files))
    return facts


_OPENED: list[set[str]] = []  # the opened files of each running trace


@cache
def _watch_opened() -> None:
    """Add an audit hook that records the files opened for reading. It cannot be removed again."""

    def note(event: str, arguments: tuple[object, ...]) -> None:
        # A slice and not _OPENED[-1], which fails if another thread ends a trace in between.
        if event == "open" and (newest := _OPENED[-1:]):
            path, _, flags = arguments
            is_written = isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR)
            if isinstance(path, str | bytes | os.PathLike) and not is_written:
                newest[0].add(os.path.abspath(os.fsdecode(path)))

    sys.addaudithook(note)


@contextmanager
def _opened_files() -> Iterator[set[str]]:
    """Temporarily record the files that are opened."""
    _watch_opened()
    _OPENED.append(set())
    try:
        yield _OPENED[-1]
    finally:
        _OPENED.pop()


def _module_files() -> Iterator[str]:
    """Yield the files of loaded modules; for an installed package, only its top-level module.

    Modules below an installed package may lie elsewhere: inductor writes programs into a temporary
    folder and loads them as `torch._inductor.runtime.compile_tasks` (torch 2.13).
    """
    files = {name: getattr(module, "__file__", None) for name, module in [*sys.modules.items()]}
    for name, file in files.items():
        top = files.get(name.partition(".")[0])
        is_below_installed = "." in name and isinstance(top, str) and _INSTALLED in top
        if isinstance(file, str) and not is_below_installed:
            yield os.path.abspath(file)


def _file_signatures(paths: Iterable[str]) -> tuple[tuple[str, str], ...] | None:
    """Return files with their signatures.

    Files of the standard library, of ptrain and of virtual file systems, and bytecode are left out.

    Returns:
        None if a file is younger than this process, which may have loaded an older version of it.
    """
    stdlib, package = sysconfig.get_path("stdlib"), str(Path(ptrain.__file__).parent)
    files = []
    for path in sorted(paths):
        is_ignored = path.startswith((*_SYSTEM, f"{stdlib}/", f"{package}/")) or path.endswith(
            ".pyc"
        )
        if not is_ignored and os.path.exists(path):
            if any(os.path.getmtime(file) >= _STARTED for file in _listed_files(path)):
                return None
            files.append((path, _file_signature(path)))
    return tuple(files)


def _file_signature(path: str) -> str:
    """Return a text that changes with a file, or a folder's files; empty if it is missing."""
    try:
        if os.path.isdir(path):
            return _folder_signature(path)
        status = os.stat(path)
        if status.st_size >= _LARGE or _INSTALLED in path:
            return f"{status.st_size} {status.st_mtime_ns}"
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError:
        return ""


def _target_folders(spec: Spec) -> set[str]:
    """Return the folders of the files that the user's functions are imported from."""
    folders = set()
    for function in spec.user_functions:
        module = sys.modules.get(function.target.partition(":")[0])
        for file in (getattr(module, "__file__", None), *_module_origins(function)):
            if isinstance(file, str) and os.path.isfile(file):
                folders.add(os.path.dirname(os.path.abspath(file)))
    return folders


def _listed_files(path: str) -> list[str]:
    """Return a file, or the first files of a folder by name, without subfolders."""
    if not os.path.isdir(path):
        return [path]
    with os.scandir(path) as entries:
        files = sorted(entry.path for entry in entries if entry.is_file())
    return [file for file in files if not file.endswith(".pyc")][:_LISTED]


def _folder_signature(path: str) -> str:
    """Return a digest of the names, sizes and dates of a folder's files.

    Native code may read these files, and no audit event reports the files that it opens.
    """
    digest = hashlib.sha256()
    for file in _listed_files(path):
        status = os.stat(file)
        digest.update(f"{file} {status.st_size} {status.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def is_off() -> bool:
    """Return True if PTRAIN_CACHE switches the cache off."""
    return os.environ.get("PTRAIN_CACHE") == _OFF


def cache_folder() -> Path:
    """Return the folder of the cache.

    It is the value of PTRAIN_CACHE (`off`: nothing is read or kept), or else the folder `ptrain` in
    the user's cache folder.
    """
    if chosen := os.environ.get("PTRAIN_CACHE"):
        return Path(chosen)
    if chosen := os.environ.get("XDG_CACHE_HOME"):
        return Path(chosen) / "ptrain"
    home = Path.home()
    return (home / "Library/Caches" if sys.platform == "darwin" else home / ".cache") / "ptrain"


def cached_files() -> list[Path]:
    """Return the files of the cache by name, including unfinished files of interrupted processes.

    Raises:
        PtrainError: If the user has no home folder.
    """
    try:
        listed = cache_folder().glob(f"*{_SUFFIX}*")
    except RuntimeError as error:
        raise PtrainError(f"error: no cache folder: {error}") from error
    return [path for path in sorted(listed) if _OURS.fullmatch(path.name)]


def _cache_path(spec: Spec) -> Path | None:
    """Return the cache file of a spec's facts; None if they cannot be cached."""
    if is_off():
        return None
    is_theirs = isinstance(spec.model, HuggingFaceModel)
    try:
        versions = [
            _package_version(name) for name in ("torch", *(["transformers"] if is_theirs else []))
        ]
        kernels = [_package_version(name, "none") for name in _KERNELS]
        part = to_mapping(traced_part(spec), sync_is_written=False)
        hub = os.environ.get("USE_HUB_KERNELS")
        origins = [_module_origins(function) for function in spec.user_functions]
        compiler = None if spec.compile is Compiled.NONE else _compiler_settings()
        # The compute kernels of a CPU, and so the traced allocations, depend on its architecture.
        depends = [
            part,
            versions,
            kernels,
            hub,
            platform.machine(),
            _source_digest(),
            origins,
            compiler,
        ]
        home = cache_folder()
    except (RuntimeError, OSError, metadata.PackageNotFoundError):
        return None  # a user without a home, files that cannot be read, code without a version
    return home / f"{hashlib.sha256(repr(depends).encode()).hexdigest()[:32]}{_SUFFIX}"


def _compiler_settings() -> list[object]:
    """Return the processor's instruction sets and inductor's environment variables, on which the
    programs of torch.compile depend."""
    info = Path("/proc/cpuinfo")
    flags = re.search(
        r"^(?:flags|Features)\s*:.*$", info.read_text() if info.exists() else "", re.M
    )
    names = ("TORCHINDUCTOR_", "ATEN_CPU_CAPABILITY")
    settings = sorted(item for item in os.environ.items() if item[0].startswith(names))
    return [flags and flags[0], settings]


def _module_origins(function: UserFunction) -> list[str | None]:
    """Return the files that a function's top-level module may be imported from."""
    top = function.target.partition(":")[0].partition(".")[0]
    folders = None if function.folder is None else [function.folder]
    modules = [PathFinder.find_spec(top, path) for path in (None, folders)]
    return [None if module is None else module.origin for module in modules]


def _package_version(package: str, otherwise: str | None = None) -> str:
    """Return the version of a package that identifies its code.

    Args:
        package: The name of the package.
        otherwise: The result if the package is not installed.

    Raises:
        PackageNotFoundError: If the package is missing without `otherwise`, editable, or a
            development version.
    """
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
def _source_digest() -> str:
    """Return a digest of ptrain's source files."""
    root, digest = Path(ptrain.__file__).parent, hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        if path.is_file():  # editors leave links that lead nowhere
            digest.update(str(path.relative_to(root)).encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _read_trace(path: Path) -> Trace | None:
    """Return the trace in a file; None if it is missing or unreadable."""
    try:
        trace: Trace = decode(json.loads(gzip.decompress(path.read_bytes())), Trace)
    except (OSError, EOFError, zlib.error, ValueError, TypeError):
        return None
    return trace


def _write_trace(path: Path, trace: Trace) -> None:
    """Write a trace completely or not at all, readable by its owner only."""
    # A trace names the user's files and classes.
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    text = json.dumps(encode(trace, Trace), separators=(",", ":"))
    descriptor, new = tempfile.mkstemp(prefix=path.name, dir=path.parent)  # with mode 0600
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(gzip.compress(text.encode(), mtime=0))  # mtime=0: equal traces, equal bytes
        os.replace(new, path)  # atomic, because both are in one folder
    except OSError:
        os.unlink(new)
        raise
