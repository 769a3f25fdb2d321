"""For the tests of somebody's own repository: does my loop train like one device, does my spec?

    from ptrain.testing import assert_trains_like_one_device

    def my_loop():                       # importable: at the top of a module
        ...                              # build, wrap, and return ptrain.verify(...)

    def test_my_loop():
        assert_trains_like_one_device(my_loop, num_ranks=2)

Ranks are processes of this machine that meet under gloo over the loopback. They have a parent of
their own, which ends them all when one fails, when the time is over, or when the test is gone; so
nothing of them is in the process of the tests. Torch-free: pytest collects without it.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from ptrain.codec import encode
from ptrain.errors import PtrainError, RankFailed, VerdictFailed, refused
from ptrain.installed import require_torch
from ptrain.train import environment
from ptrain.train.folder import RunFolder, write_json
from ptrain.train.launch import launch

_GRACE = 10.0  # seconds for the parent of the ranks to end them


def assert_trains_like_one_device(
    function: Callable[..., Any], *arguments: Any, num_ranks: int = 2, timeout: float = 120.0
) -> None:
    """Call `function(*arguments)` on every rank; it returns what `ptrain.verify` returns.

    Raises AssertionError with the verdict, the root cause first, where it does not hold; RankFailed
    with the first failing rank's error; PtrainError for a function that no rank can import or that
    returns no verdict. `arguments` must be JSON.
    """
    for rank, verdict in enumerate(
        on_ranks(function, *arguments, num_ranks=num_ranks, timeout=timeout)
    ):
        if not (isinstance(verdict, Mapping) and "holds" in verdict and "text" in verdict):
            raise PtrainError(
                f"{_name(function)} returned {verdict!r:.60} on rank {rank}\n  remedy: "
                "Return the result of `ptrain.verify(...)`."
            )
        if not verdict["holds"]:
            raise AssertionError(f"{_name(function)} on {num_ranks} ranks: {verdict['text']}")


def on_ranks(
    function: Callable[..., Any], *arguments: Any, num_ranks: int = 2, timeout: float = 120.0
) -> list[Any]:
    """Return what `function(*arguments)` returns on each rank, as JSON; a verdict as a mapping with
    `holds`, `text` and `culprit`. `timeout` is in seconds, all in all. Raises PtrainError where a
    rank fails or the time is over."""
    if num_ranks < 1:
        raise refused("num_ranks", f"got {num_ranks}", "1 or more")
    require_torch()
    with tempfile.TemporaryDirectory(prefix="ptrain-test-") as folder:
        (Path(folder) / "logs").mkdir(mode=0o700)
        words = [_name(function), str(num_ranks), folder, json.dumps(list(arguments))]
        ended = _run(["-m", "ptrain.testing", *words], timeout, _name(function))
        if ended.returncode:
            raise _error(ended)
        return [
            json.loads((Path(folder) / f"rank{rank}.json").read_text(encoding="utf-8"))
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
    """`ptrain verify SPEC a.b=c …`: raises AssertionError with what it prints where the verdict
    fails, PtrainError for a spec that cannot be verified. `quick`: without trajectories, and so
    without `steps`; `timeout` is in seconds."""
    depth = ["--quick"] if quick else ["--steps", str(steps)]
    words = ["-m", "ptrain", "verify", str(spec), *overrides, *depth]
    words += ["--allow-import"] * allow_import
    ended = _run(words, timeout, " ".join([str(spec), *overrides]))
    if ended.returncode == VerdictFailed.exit_code:
        raise AssertionError(
            f"{spec} differs from the single-device reference\n{ended.stdout}".rstrip()
        )
    if ended.returncode:
        raise _error(ended)


def _name(function: Callable[..., Any]) -> str:
    """`package.module:function`, by which a rank finds it."""
    module, name = getattr(function, "__module__", ""), getattr(function, "__qualname__", "")
    if not module or module == "__main__" or not name.isidentifier():
        raise refused(
            "function",
            f"a rank cannot import {name or function!r} from {module or 'this program'}",
            "Define the function at the top level of an importable module (no lambda, no "
            "inner function).",
        )
    return f"{module}:{name}"


def _run(words: Sequence[str], timeout: float, what: str) -> subprocess.CompletedProcess[str]:
    """Python in a process of its own, with this one's import path; ended when the time is over."""
    process = subprocess.Popen(
        [sys.executable, "-P", *words],
        env=environment.alone(sys.path),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C reaches the tests alone, which end it
    )
    try:
        printed, said = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        raise RankFailed(f"{what}: no verdict within {timeout:g} s") from None
    finally:
        _end(process)
    return subprocess.CompletedProcess(process.args, process.returncode, printed, said)


def _end(process: subprocess.Popen[str]) -> None:
    """It ends its ranks; where it is killed the kernel does."""
    if process.poll() is None:
        process.terminate()
        try:
            process.communicate(timeout=_GRACE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()


def _error(ended: subprocess.CompletedProcess[str]) -> PtrainError:
    said = ended.stderr.strip() or f"ended with exit code {ended.returncode}"
    kind = RankFailed if ended.returncode != PtrainError.exit_code else PtrainError
    return kind(said)


def _parent(words: Sequence[str]) -> int:
    """The parent of the ranks: FUNCTION NUM_RANKS FOLDER ARGUMENTS."""
    function, num_ranks, folder, arguments = words
    try:
        return launch(
            [function, folder, arguments],
            num_ranks=int(num_ranks),
            folder=RunFolder(Path(folder)),
            module="ptrain.testing",
        )
    except PtrainError as error:
        print(error, file=sys.stderr)
        return error.exit_code


def _become_rank(words: Sequence[str]) -> None:
    """Run a rank of the test: FUNCTION FOLDER ARGUMENTS. It calls the function, and leaves what
    that returned in FOLDER/rank0.json …"""
    import torch

    from ptrain.rooms.world import World
    from ptrain.train.rank_exit import live
    from ptrain.verification.jobs.job import LoopVerdict

    def run() -> int:
        function, folder, arguments = words
        torch.set_num_threads(1)
        with closing(World.join(device="cpu", backend="gloo")) as world:
            returned = _function(function)(*json.loads(arguments))
            if isinstance(returned, LoopVerdict):
                culprit = encode(returned.root_cause)
                returned = {"holds": returned.holds, "text": str(returned), "culprit": culprit}
            write_json(Path(folder) / f"rank{world.rank}.json", returned)
        return 0

    live(run)


def _function(target: str) -> Any:
    module, _, name = target.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        raise refused(
            "function",
            f"a rank cannot import {module}: no module named {error.name!r}",
            "Put its folder on the path of the tests.",
        ) from error


if __name__ == "__main__":
    if environment.launched():
        _become_rank(sys.argv[1:])
    sys.exit(_parent(sys.argv[1:]))
