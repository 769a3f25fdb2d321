"""Processes that trace what a rank of cp or tp has, forked from one that has imported torch.

A user's are started anew, and spend three of four seconds on imports: in a matrix that would be
most of the time. What they are asked, what they do and how their answers are taken is the same.
"""

from __future__ import annotations

import io
import os
from contextlib import redirect_stderr, redirect_stdout
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from subprocess import TimeoutExpired
from typing import Any

from ptrain.traces.tensor_parts import main
from ptrain.train.parent import die_with
from tests.ranks import fork_server


class Forked:
    """What `tensor_parts` uses of a Popen: a question is written, then the answer is awaited."""

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
        self._process = context.Process(target=_answer, args=(question, theirs), daemon=True)
        self._process.start()
        theirs.close()

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Return what the process wrote and its errors. Raises TimeoutExpired."""
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


def _answer(question: str, pipe: Connection) -> None:
    """Answer in this process, and leave it without exit handlers."""
    die_with(os.getppid())
    output, errors = io.StringIO(), io.StringIO()
    with redirect_stdout(output), redirect_stderr(errors):
        code = main([question])
    pipe.send((code, output.getvalue(), errors.getvalue()))
    os._exit(0)
