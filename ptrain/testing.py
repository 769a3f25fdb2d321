"""Assertions for the tests of your repository: does a loop, or a spec, train like a single device?

    from ptrain.testing import assert_trains_like_one_device

    def my_loop():                       # importable: at the top level of a module
        ...                              # build, wrap, and return ptrain.verify(...)

    def test_my_loop():
        assert_trains_like_one_device(my_loop, num_ranks=2)

Ranks are processes of this machine that communicate with gloo over the loopback interface. A parent
process starts them, and ends all of them when one fails, when the timeout expires, or when the test
process ends. The test process itself imports no torch and joins no process group.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from ptrain.codec import encode
from ptrain.errors import PtrainError, RankFailed, VerdictFailed, input_error
from ptrain.files import temporary_folder, write_json
from ptrain.installed import require_torch
from ptrain.train import environment
from ptrain.train.folder import RunFolder
from ptrain.train.launch import launch_ranks

_GRACE = 10.0  # seconds in which the parent of the ranks ends them, before it is killed


def assert_trains_like_one_device(
    function: Callable[..., Any], *arguments: Any, num_ranks: int = 2, timeout: float = 120.0
) -> None:
    """Assert that a loop trains like a single device.

    Args:
        function: The loop, defined at the top level of an importable module. It is called on every
            rank and returns the result of `ptrain.verify`.
        arguments: Arguments of the function, as JSON values.
        num_ranks: The number of ranks.
        timeout: The limit for the full run, in seconds.

    Raises:
        AssertionError: The verdict fails. The message begins with the root cause.
        RankFailed: A rank failed, or the timeout expired.
        PtrainError: The function cannot be imported, or does not return a verdict.

    Example:
        >>> def test_my_loop():
        ...     assert_trains_like_one_device(my_loop, num_ranks=2)
    """
    for rank, verdict in enumerate(
        on_ranks(function, *arguments, num_ranks=num_ranks, timeout=timeout)
    ):
        if not (isinstance(verdict, Mapping) and "holds" in verdict and "text" in verdict):
            raise PtrainError(
                f"{_qualified_name(function)} returned {verdict!r:.60} on rank {rank}\n  remedy: "
                "Return the result of `ptrain.verify(...)`."
            )
        if not verdict["holds"]:
            raise AssertionError(
                f"{_qualified_name(function)} on {num_ranks} ranks: {verdict['text']}"
            )


def on_ranks(
    function: Callable[..., Any], *arguments: Any, num_ranks: int = 2, timeout: float = 120.0
) -> list[Any]:
    """Call a function on every rank and return the results, in rank order.

    Args:
        function: A function at the top level of an importable module. It returns a JSON value, or
            the result of `ptrain.verify`.
        arguments: Arguments of the function, as JSON values.
        num_ranks: The number of ranks.
        timeout: The limit for the full run, in seconds.

    Returns:
        The JSON values. A verdict becomes a mapping with `holds`, `text` and `culprit`.

    Raises:
        PtrainError: An argument is wrong, or the function cannot be imported.
        RankFailed: A rank failed, or the timeout expired.
    """
    if num_ranks < 1:
        raise input_error("num_ranks", f"got {num_ranks}", "1 or more")
    require_torch()
    with temporary_folder() as folder:
        (folder / "logs").mkdir(mode=0o700)  # `launch_ranks` expects it in a run folder
        name = _qualified_name(function)
        words = [name, str(num_ranks), str(folder), json.dumps(list(arguments))]
        ended = _run_python(["-m", "ptrain.testing", *words], timeout, name)
        if ended.returncode:
            raise _error_of(ended)
        return [
            json.loads((folder / f"rank{rank}.json").read_text(encoding="utf-8"))
            for rank in range(num_ranks)
        ]


def assert_verified(
    spec: str | Path,
    *overrides: str,
    steps: int = 20,
    quick: bool = False,
    timeout: float = 600.0,
    allow_import: bool = False,
) -> None:
    """Assert that `ptrain verify SPEC a.b=c …` succeeds.

    Args:
        spec: The name of a spec, or a file.
        overrides: Overrides as on the command line.
        steps: The length of the compared trajectories, in steps.
        quick: Skip the trajectories; `steps` is ignored.
        timeout: The limit for the command, in seconds.
        allow_import: Allow the spec to import your code.

    Raises:
        AssertionError: The verdict fails. The message holds the output of the command.
        PtrainError: The spec cannot be verified.

    Example:
        >>> def test_spec():
        ...     assert_verified("train.yaml", quick=True)
    """
    depth = ["--quick"] if quick else ["--steps", str(steps)]
    words = ["-m", "ptrain", "verify", str(spec), *overrides, *depth]
    words += ["--allow-import"] * allow_import
    ended = _run_python(words, timeout, " ".join([str(spec), *overrides]))
    if ended.returncode == VerdictFailed.exit_code:
        raise AssertionError(
            f"{spec} differs from the single-device reference\n{ended.stdout}".rstrip()
        )
    if ended.returncode:
        raise _error_of(ended)


def _qualified_name(function: Callable[..., Any]) -> str:
    """Return `module:function` of a function.

    Raises:
        SpecError: Another process cannot import the function.
    """
    module, name = getattr(function, "__module__", ""), getattr(function, "__qualname__", "")
    if not module or module == "__main__" or not name.isidentifier():
        raise input_error(
            "function",
            f"a rank cannot import {name or function!r} from {module or 'this program'}",
            "Define the function at the top level of an importable module (no lambda, no "
            "inner function).",
        )
    return f"{module}:{name}"


def _run_python(
    words: Sequence[str], timeout: float, what: str
) -> subprocess.CompletedProcess[str]:
    """Run Python in another process, with the import path of this one.

    Raises:
        RankFailed: The process did not end within `timeout` seconds. `what` names it.
    """
    process = subprocess.Popen(
        [sys.executable, "-P", *words],
        # Without the variables of a rank: the test process may itself be one.
        env=environment.non_rank_environment(sys.path),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C reaches only the test process, which ends this one
    )
    try:
        printed, errors = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        raise RankFailed(f"{what}: no verdict within {timeout:g} s") from None
    finally:
        _end_process(process)
    return subprocess.CompletedProcess(process.args, process.returncode, printed, errors)


def _end_process(process: subprocess.Popen[str]) -> None:
    """Terminate a process, which ends its ranks, and kill it if it does not end in time.

    If it is killed, the kernel kills its ranks (`rank_start.die_with_parent`).
    """
    if process.poll() is None:
        process.terminate()
        try:
            process.communicate(timeout=_GRACE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()


def _error_of(ended: subprocess.CompletedProcess[str]) -> PtrainError:
    """Return the error of a process that failed, with its standard error as the message."""
    errors = ended.stderr.strip() or f"ended with exit code {ended.returncode}"
    kind = RankFailed if ended.returncode != PtrainError.exit_code else PtrainError
    return kind(errors)


def _run_parent(words: Sequence[str]) -> int:
    """Run the parent process of the ranks, and return its exit code.

    Args:
        words: FUNCTION NUM_RANKS FOLDER ARGUMENTS.
    """
    function, num_ranks, folder, arguments = words
    try:
        return launch_ranks(
            [function, folder, arguments],
            num_ranks=int(num_ranks),
            folder=RunFolder(Path(folder)),
            module="ptrain.testing",
        )
    except PtrainError as error:
        print(error, file=sys.stderr)
        return error.exit_code


def _become_rank(words: Sequence[str]) -> None:
    """Run one rank of a test. It writes the result of the function to FOLDER/rank<rank>.json.

    Args:
        words: FUNCTION FOLDER ARGUMENTS.
    """
    import torch

    from ptrain.runtime.world import World
    from ptrain.train.rank_exit import run_and_exit
    from ptrain.verification.jobs.job import LoopVerdict

    def run() -> int:
        function, folder, arguments = words
        torch.set_num_threads(1)  # the ranks share the cores of this machine
        with closing(World.join(device="cpu", backend="gloo")) as world:
            returned = _import_function(function)(*json.loads(arguments))
            if isinstance(returned, LoopVerdict):
                culprit = encode(returned.root_cause)
                returned = {"holds": returned.holds, "text": str(returned), "culprit": culprit}
            write_json(Path(folder) / f"rank{world.rank}.json", returned)
        return 0

    run_and_exit(run)


def _import_function(target: str) -> Any:
    """Import the function of a text `module:function`.

    Raises:
        SpecError: The module cannot be imported.
    """
    module, _, name = target.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        raise input_error(
            "function",
            f"a rank cannot import {module}: no module named {error.name!r}",
            "Put its folder on the path of the tests.",
        ) from error


if __name__ == "__main__":
    if environment.is_launched():
        _become_rank(sys.argv[1:])
    sys.exit(_run_parent(sys.argv[1:]))
