"""The hook that attaches the X-ray to the Python processes of a job.

The command puts a temporary folder with `sitecustomize.py` first on PYTHONPATH, so that every
Python process of the job calls `attach_hook`. Nothing else happens until the process imports torch;
then a hook counts optimizer steps. The meters (`xray.watch`) are imported at the end of the first
step, watch `WATCHED` steps, write the observation, and detach. One hook that returns at once is
left, because torch calls it from a loop over the hooks, which must not change meanwhile.

This module imports nothing heavy, because every Python process of the job imports it. An error of
the X-ray never ends the job: it is written to the process's status file.
"""

from __future__ import annotations

import atexit
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from ptrain.import_path import own_root

FOLDER, FIRST = "PTRAIN_XRAY_FOLDER", "PTRAIN_XRAY_FIRST"
WATCHED = 3  # steps: memory, traffic, waits
STATUS = "process-{}.json"  # by process ID
# The hook's folder leaves the import path, so that another `sitecustomize` runs as usual.
SITECUSTOMIZE = """\
import os, sys
here = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [folder for folder in sys.path if os.path.abspath(folder or ".") != here]
root = {root!r}
if root not in sys.path:
    sys.path.append(root)
from ptrain.xray import hook
hook.attach_hook()
this = sys.modules.pop("sitecustomize")
try:
    import sitecustomize
except ImportError as error:
    sys.modules["sitecustomize"] = this
    if error.name != "sitecustomize":
        raise
"""


def attach_hook() -> None:
    """Wait for the import of torch in this process."""
    if FOLDER in os.environ:
        sys.meta_path.insert(0, TorchFinder(_on_torch))


class TorchFinder(MetaPathFinder):
    """The finder that calls a function once, when torch has been imported."""

    def __init__(self, function: Callable[[], None]) -> None:
        self._function = function

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> Any:
        """Return torch's usual spec with a loader that calls the function; None for others."""
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec: ModuleSpec | None = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            execute = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                self._function()

            loader.exec_module = exec_module
        return spec


def _on_torch() -> None:
    """Count optimizer steps from now on."""
    folder, first = os.environ[FOLDER], int(os.environ.get(FIRST, "3"))
    counter = StepCounter(folder, first)
    optimizers: Any = sys.modules["torch.optim.optimizer"]
    optimizers.register_optimizer_step_post_hook(counter.on_step)
    atexit.register(counter.write_status)
    counter.write_status()


class StepCounter:
    """The counter of optimizer steps, which starts and ends the watch.

    A step ends when the anchor has stepped: the last optimizer of a cycle, if there are several.
    """

    def __init__(self, folder: str, first: int) -> None:
        """Prepare the count.

        Args:
            folder: The folder of status files and observations.
            first: The first watched step, from 1; at least 2.
        """
        self.folder, self.first, self.steps = folder, first, 0
        self._is_done = False
        self._cycle: list[Any] = []
        self._anchor: Any = None
        self._watch: Any = None
        self._error = ""
        self._ended = 0.0
        self._process = os.getpid()

    def on_step(self, optimizer: Any, *_: object) -> None:
        """Note that an optimizer has stepped."""
        if self._is_done:
            return
        if self._anchor is None:
            if not any(known is optimizer for known in self._cycle):
                self._cycle.append(optimizer)
                self.steps = 1
                self._ended = time.perf_counter()
                return
            self._anchor = self._cycle[-1]
        if optimizer is not self._anchor:
            return
        self.steps += 1
        seconds = time.perf_counter() - self._ended
        try:
            self._end_step(seconds)
        except Exception as error:  # noqa: BLE001  a meter must not end the job that it watches
            self._error = f"{type(error).__name__}: {error}"
            self._end_watch()
        self._ended = time.perf_counter()

    def _end_step(self, seconds: float) -> None:
        """Start, continue or end the watch after a step."""
        if self._watch is None:
            watch = importlib.import_module("ptrain.xray.watch")
            self._watch = watch.JobWatch(self.folder, self._cycle)
        begun = self.steps - self.first + 1  # number of watched steps that have begun
        self._watch.end_step(seconds)
        if 0 <= begun < WATCHED:
            self._watch.begin_step(begun, self.steps + 1)
        elif begun > WATCHED:  # one more step without meters has been timed
            self._watch.write_observation()
            self._end_watch()

    def _end_watch(self) -> None:
        """Detach all meters, and count no further step."""
        self._is_done = True
        watch, self._watch = self._watch, None
        if watch is not None:
            with suppress(Exception):
                watch.detach_meters()

    def write_status(self) -> None:
        """Write the status of this process: its rank, its steps, and the X-ray's error."""
        if os.getpid() != self._process:  # a forked child has its parent's exit handlers
            return
        if self._watch is not None and self.steps == self.first + WATCHED - 1:
            with suppress(Exception):  # the job has no further step
                self._watch.write_observation()
        status = {
            "rank": int(os.environ.get("RANK", "0")),
            "steps": self.steps,
            "error": self._error,
        }
        with suppress(OSError):  # the folder is gone once the command has ended
            path = os.path.join(self.folder, STATUS.format(self._process))
            with open(path, "w", encoding="utf-8") as file:
                json.dump(status, file)


def job_environment(folder: Path, first: int) -> dict[str, str]:
    """Return this process's environment with the hook attached.

    Args:
        folder: A temporary folder; `sitecustomize.py` and all results are written there.
        first: The first watched step.
    """
    text = SITECUSTOMIZE.format(root=own_root())
    (folder / "sitecustomize.py").write_text(text, encoding="utf-8")
    before = os.environ.get("PYTHONPATH")
    paths = str(folder) if before is None else f"{folder}{os.pathsep}{before}"
    return {**os.environ, "PYTHONPATH": paths, FOLDER: str(folder), FIRST: str(first)}
