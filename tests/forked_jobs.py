"""Commands of ptrain whose processes are forked from one that has imported torch.

Imports are nine of ten CPU seconds of a short job on two ranks. The processes are a job's all the
same: a parent that watches its children, each with a session, an environment and descriptors of its
own. What Python does before the first import (the path, `sitecustomize`, the interpreter's options)
is a started job's alone.
"""

from __future__ import annotations

import gc
import os
import runpy
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from subprocess import DEVNULL, TimeoutExpired
from types import SimpleNamespace
from typing import Any
from unittest import mock

from ptrain.train import launch
from ptrain.train.rank_start import die_with_parent
from tests.ranks import fork_server

_CAUGHT = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
)  # by a parent of ranks; not by its children
_MOST_DESCRIPTORS = 4096


class Command:
    """The part of Popen that `tests.jobs` uses."""

    def __init__(
        self, arguments: Sequence[str], *, module: str, cwd: Path, variables: Mapping[str, str]
    ) -> None:
        context = fork_server()
        pipes = [context.Pipe(duplex=False) for _ in range(2)]
        writers = [writer for _, writer in pipes]
        self._process = context.Process(
            target=_run_module, args=(module, arguments, str(cwd), variables, *writers), daemon=True
        )
        self._process.start()
        self.stdout, self.stderr = (os.fdopen(os.dup(reader.fileno())) for reader, _ in pipes)
        for pipe in pipes:
            for end in pipe:
                end.close()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, seconds: float | None = None) -> int:
        self._process.join(seconds)
        code = self._process.exitcode
        if code is None:
            raise TimeoutExpired(str(self.pid), seconds or 0.0)
        return code

    def send_signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()


def _run_module(
    module: str,
    arguments: Sequence[str],
    cwd: str,
    variables: Mapping[str, str],
    output: Connection,
    errors: Connection,
) -> None:
    """Run `python -m MODULE ARGUMENTS` in this process."""
    die_with_parent(os.getppid())
    gc.freeze()  # modules of the fork server, which garbage collection can skip
    os.chdir(cwd)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    _write_to(output.fileno(), errors.fileno())
    output.close()
    errors.close()
    forking = SimpleNamespace(Popen=_Rank, DEVNULL=DEVNULL)
    with mock.patch.object(launch, "subprocess", forking):
        _run_and_exit(module, arguments, variables)


class _Rank:
    """The part of Popen that `ptrain.train.launch` uses: a child of this process."""

    def __init__(
        self,
        words: Sequence[str],
        *,
        env: Mapping[str, str],
        stdin: int,
        stdout: int | None,
        stderr: int,
        pass_fds: Sequence[int],
        start_new_session: bool,
        preexec_fn: Callable[[], None],
    ) -> None:
        assert stdin == DEVNULL and start_new_session and words[1:3] == ["-P", "-m"]
        sys.stdout.flush()
        sys.stderr.flush()
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid:
            return
        try:
            os.setsid()
            for number in _CAUGHT:
                signal.signal(number, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            preexec_fn()
            _write_to(1 if stdout is None else stdout, stderr)
            for descriptor in range(3, _MOST_DESCRIPTORS):
                if descriptor not in pass_fds:
                    _close(descriptor)
            Path("/proc/self/comm").write_text(f"rank {env['RANK']}")  # see Job.ranks
            _run_and_exit(words[3], words[4:], env)
        finally:
            os._exit(70)


def _write_to(output: int, errors: int) -> None:
    nothing = os.open(os.devnull, os.O_RDONLY)
    for descriptor, own in ((nothing, 0), (output, 1), (errors, 2)):
        os.dup2(descriptor, own)
    os.close(nothing)
    sys.stdout = sys.__stdout__ = os.fdopen(1, "w", closefd=False)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = os.fdopen(2, "w", closefd=False)  # type: ignore[misc]


def _close(descriptor: int) -> None:
    with suppress(OSError):  # none is open
        os.close(descriptor)


def _run_and_exit(module: str, arguments: Sequence[str], variables: Mapping[str, str]) -> None:
    """Run a module as the main one and leave with its exit code, without exit handlers."""
    os.environ.clear()
    os.environ.update(variables)
    sys.argv[:] = [module, *arguments]
    code: Any = 0
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as left:
        code = left.code or 0
    except BaseException:  # noqa: BLE001 - as the interpreter does
        sys.excepthook(*sys.exc_info())
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
