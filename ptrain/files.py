"""Files and temporary folders: private, atomic, and never written through a symbolic link.

Another user may be able to create entries in the folder of a run, such as a link to a file of this
user. A file is therefore opened without following links, and a file that must be complete is
written under a random name and renamed.

A process that is killed cannot remove its temporary folder. The kernel releases the lock on it, and
the next process of the same user that needs such a folder removes those without a lock.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ptrain.units import format_bytes

_TEMPORARY = "ptrain-tmp-"  # only folders with this prefix are removed
_KEPT = ".keep"  # a file that marks a folder whose logs explain a failure
_UNFINISHED = ".tmp"


def open_private(path: Path, flags: int) -> int:
    """Open a file without following a link, and create it with mode 0600 if missing.

    Args:
        path: The file.
        flags: Flags of `os.open`, such as `os.O_WRONLY | os.O_APPEND`.

    Returns:
        The descriptor.

    Raises:
        OSError: The path is a link, a pipe or a device, or cannot be opened.
    """
    # O_NONBLOCK: opening a pipe would wait for its reader. It does not affect regular files.
    more = os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(path, flags | more, 0o600)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{path} is not a regular file")
    return descriptor


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file atomically: to a temporary file in its folder, flushed to disk and renamed."""
    # In the same folder: a rename across file systems is not atomic.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}{_UNFINISHED}")
    try:
        with os.fdopen(open_private(temporary, os.O_WRONLY | os.O_EXCL), "wb") as file:
            file.write(content)
            file.flush()
            # Before the rename, which may otherwise reach the disk first: then the file would be
            # empty after a power loss.
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically."""
    write_bytes(path, text.encode())


def write_json(path: Path, value: object) -> None:
    """Write a JSON file atomically."""
    write_text(path, json.dumps(value, indent=1) + "\n")


def remove_unfinished(folder: Path) -> None:
    """Remove the temporary files that killed calls of `write_bytes` left in a folder."""
    for path in folder.glob(f".*{_UNFINISHED}"):
        path.unlink(missing_ok=True)


@contextmanager
def warn_if_unwritable(path: Path, warn: Callable[[str], object]) -> Iterator[None]:
    """Turn an OSError, such as that of a full disk, into a warning.

    Args:
        path: The file that is written.
        warn: Called with the warning.
    """
    try:
        yield
    except OSError as error:
        warn(f"warning: {path} cannot be written: {error.strerror or error}")


class LineFile:
    """A private file to which lines are appended.

    A line that cannot be written is lost. The first loss is reported, and later lines are tried
    again: a full disk may be cleared.

    Args:
        path: The file, opened by the first line.
        warn: Called with the warning.
    """

    def __init__(self, path: Path, warn: Callable[[str], object]) -> None:
        self._path, self._warn = path, warn
        self._descriptor = -1
        self._has_warned = False

    def write(self, text: str) -> None:
        """Append a text completely or not at all."""
        with warn_if_unwritable(self._path, self._warn_once):
            if self._descriptor < 0:
                self._descriptor = open_private(self._path, os.O_WRONLY | os.O_APPEND)
            content = text.encode(errors="backslashreplace")
            before = os.fstat(self._descriptor).st_size
            # A full disk takes the part that fits. Without a line's end, the next line would be
            # joined to it.
            if (written := os.write(self._descriptor, content)) < len(content):
                if os.fstat(self._descriptor).st_size == before + written:
                    os.ftruncate(self._descriptor, before)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def flush(self) -> None:
        """Do nothing: every text is written at once."""

    def close(self) -> None:
        """Close the file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _warn_once(self, warning: str) -> None:
        """Report the first loss."""
        if not self._has_warned:
            self._has_warned = True  # before the call, which may write to this file
            self._warn(warning)


def missing_space(folder: Path, needed: int) -> str:
    """Return a problem if the file system of a folder has less space than needed, else "".

    Args:
        folder: The folder, which need not exist yet.
        needed: The bytes that will be written.
    """
    there = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    disk = shutil.disk_usage(there)
    # Some network file systems report no sizes at all.
    if disk.total == 0 or needed <= disk.free:
        return ""
    return f"{format_bytes(needed)} are needed, but {format_bytes(disk.free)} are free"


def user_mode() -> int:
    """Return the mode that the umask of this user gives a new file, such as 0o644."""
    # The mask can only be read by replacing it.
    mask = os.umask(0o077)
    os.umask(mask)
    return 0o666 & ~mask


@contextmanager
def temporary_folder(*, keeps_failure: bool = False) -> Iterator[Path]:
    """Yield a new temporary folder with mode 0700, and remove it at the end.

    Args:
        keeps_failure: Keep the folder, unless it is empty, if an exception is raised.
    """
    _remove_abandoned()
    folder, descriptor = _create_locked()
    has_failed = True
    try:
        yield folder
        has_failed = False
    finally:
        if keeps_failure and has_failed and any(folder.iterdir()):
            (folder / _KEPT).touch()
        else:
            shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)


def _create_locked() -> tuple[Path, int]:
    """Create and lock a temporary folder. Returns its path and the descriptor of the lock."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_TEMPORARY))
        # Before it is locked, another process may take it for an abandoned one and remove it.
        with suppress(FileNotFoundError):
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            with suppress(OSError):  # of file systems without locks, where none is abandoned
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if folder.exists():
                return folder, descriptor
            os.close(descriptor)


def _remove_abandoned() -> None:
    """Remove the temporary folders of this user whose process has ended."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_TEMPORARY}*"):
        with suppress(OSError):  # removed by another process, or in use
            if folder.lstat().st_uid != os.geteuid() or (folder / _KEPT).exists():
                continue
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)
            finally:
                os.close(descriptor)
