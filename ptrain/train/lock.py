"""The lock of a run folder: one training writes into it, and the next is told who does. Torch-free.

The kernel gives a lock back when the last process that holds it is gone, however it went: our
launcher hands its own to the ranks, so that none of them outlives the lock either.
"""

from __future__ import annotations

import errno
import fcntl
import os
import platform
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ptrain.errors import SpecError, refused

NAME = ".lock"
# file systems that keep no locks, of which nobody can tell whether somebody else writes there
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


@dataclass(slots=True)
class Lock:
    """`descriptor` is held open for as long as the lock is; -1 once it is released."""

    file: Path
    descriptor: int

    def release(self) -> None:
        """Nothing is left of it. It may be released again."""
        if self.descriptor < 0:
            return
        with suppress(OSError):
            if _is(self.file, self.descriptor):
                self.file.unlink()
        os.close(self.descriptor)
        self.descriptor = -1


def take(folder: Path) -> Lock:
    """Take the lock of `folder`. Raises SpecError where another training holds it, with its
    process."""
    file = folder / NAME
    while True:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 256, 0).decode(errors="replace").strip()
            os.close(descriptor)
            raise _held(folder, holder) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                os.close(descriptor)
                raise
        if _is(file, descriptor):  # not one that its holder has just taken away
            break
        os.close(descriptor)
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"process {os.getpid()} on {platform.node()}\n".encode(), 0)
    return Lock(file, descriptor)


def require_free(folder: Path) -> None:
    """Raises SpecError where a training holds the lock of `folder`; makes nothing."""
    if (folder / NAME).exists():
        take(folder).release()


def _held(folder: Path, holder: str) -> SpecError:
    return refused(
        f"--run-dir {folder}",
        f"another training writes there: {holder or 'its process is not known'}",
        "wait for its end or stop it, or choose another folder",
    )


def _is(file: Path, descriptor: int) -> bool:
    """Whether that is what the name leads to."""
    try:
        return os.path.samestat(os.stat(file), os.fstat(descriptor))
    except OSError:
        return False
