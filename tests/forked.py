"""Forked processes that trace a rank of cp or tp, from a process that has imported torch.

A user's processes start from scratch and spend three of four seconds on imports, which would be
most of a test's time. Requests, work and answers are the same; the forked processes have the
folder, import path and variables of the requesting process, like a user's.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from subprocess import TimeoutExpired
from typing import Any, ClassVar
from unittest import mock

import pytest

from ptrain.traces import tensor_parts
from ptrain.traces.tensor_parts import main
from ptrain.train.rank_start import die_with_parent
from tests.ranks import fork_server


@pytest.fixture(autouse=True)
def forked_traces() -> Iterator[None]:
    """Temporarily trace ranks of cp or tp in forked processes that need not import torch."""
    with mock.patch.object(tensor_parts, "Popen", Forked):
        yield


class Forked:
    """What `tensor_parts` uses of a Popen: a question is written, then the answer is awaited."""

    patches: ClassVar[Mapping[str, Any]] = {}  # what another module has in the process, by name

    def __init__(self, *command: Any, **pipes: Any) -> None:
        self.stdin: _Question | None = _Question(self)
        self.returncode: int | None = None
        self._texts = "", ""
        self._process: ForkServerProcess | None = None
        self._pipe: Connection | None = None

    def ask(self, question: str) -> None:
        """Fork the process that answers."""
        context = fork_server()
        self._pipe, theirs = context.Pipe(duplex=False)
        self._process = context.Process(
            target=_answer, args=(question, _Begun.here(), self.patches, theirs), daemon=True
        )
        self._process.start()
        theirs.close()

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Return the process's output and errors. Raises TimeoutExpired."""
        if self._pipe is None or self.returncode is not None:
            return self._texts
        if not self._pipe.poll(timeout):
            raise TimeoutExpired("", timeout or 0.0)
        try:
            self.returncode, *texts = self._pipe.recv()
            self._texts = texts[0], texts[1]
        except EOFError:
            self.returncode = -1
        return self._texts

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()


class _Question(io.StringIO):
    def __init__(self, process: Forked) -> None:
        super().__init__()
        self._process = process

    def close(self) -> None:
        if not self.closed:
            self._process.ask(self.getvalue())
        super().close()


@dataclass(frozen=True)
class _Begun:
    """The state that a started process inherits."""

    folder: str
    path: list[str]
    variables: dict[str, str]

    @classmethod
    def here(cls) -> _Begun:
        return cls(os.getcwd(), [*sys.path], dict(os.environ))

    def take_over(self) -> None:
        os.chdir(self.folder)
        sys.path[:] = self.path
        os.environ.clear()
        os.environ.update(self.variables)


def patch_processes(**patches: Any) -> type[Forked]:
    """Return processes in which modules have other values, by `module__name` within ptrain.traces:
    `patched(tensor_parts__REAL_BYTES=0)`."""
    names = {f"ptrain.traces.{name.replace('__', '.')}": patches[name] for name in patches}
    return type("Patched", (Forked,), {"patches": names})


def nothing(*_: Any) -> None:
    """Do nothing, in place of a function."""


def _answer(question: str, begun: _Begun, patches: Mapping[str, Any], pipe: Connection) -> None:
    """Answer in this process, and leave it without exit handlers."""
    die_with_parent(os.getppid())
    begun.take_over()
    for name, value in patches.items():
        mock.patch(name, value).start()
    output, errors = io.StringIO(), io.StringIO()
    with redirect_stdout(output), redirect_stderr(errors):
        code = main([question])
    pipe.send((code, output.getvalue(), errors.getvalue()))
    os._exit(0)
