"""The trackers of a run while it lives: W&B, MLflow and TensorBoard behind one interface, none of
which can end, stop or delay a training.

Each works in a thread of its own, since a server that is gone may take minutes to say so, in which
the other ranks would wait for this one until their collectives time out.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from queue import Full, Queue
from types import TracebackType
from typing import Self

from ptrain.cost import Estimate
from ptrain.errors import Fault
from ptrain.models.boundary import CodeRaised, boundary, said
from ptrain.spec.spec import Spec
from ptrain.train.folder import RunFolder, write_text
from ptrain.train.journal import LOG
from ptrain.train.mlflow import MLflow
from ptrain.train.options import Options
from ptrain.train.tensorboard import TensorBoard
from ptrain.train.tracker import TrackedRun, Tracker, identity_of, names_of_trackers
from ptrain.train.wandb import WeightsAndBiases

TRACKERS: Mapping[str, Callable[[], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "mlflow": MLflow,
}
PATIENCE = 20.0  # seconds at the end of a run: the launcher gives the last rank 30
MOST_CALLS = 10_000  # that wait for a tracker
_PASSWORD = re.compile(r"//[^/\s]+@")  # of an address, and the user's name; it may have an @


class TrackerThread:
    """A tracker, called from a thread of its own in the order of the calls. It is given up, with
    one warning, once it raises or is too far behind."""

    def __init__(self, name: str, tracker: Tracker) -> None:
        self.name = name
        self.is_given_up = False
        self._warns = threading.Lock()  # both threads may give it up
        self._tracker = tracker
        self._calls: Queue[Callable[[Tracker], object] | None] = Queue(MOST_CALLS)
        self._thread = threading.Thread(target=self._work, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def call(self, call: Callable[[Tracker], object]) -> None:
        """Return at once; what was called before comes first."""
        if not self.is_given_up:
            try:
                self._calls.put_nowait(call)
            except Full:
                self._give_up(f"{MOST_CALLS} rows wait for it")

    def finish(self) -> None:
        """Return at once; the thread ends when nothing is left to do."""
        self.call(lambda _: self._calls.put(None))

    def join(self, deadline: float) -> None:
        """Wait for that, at most until `deadline`, of the monotonic clock."""
        if self.is_given_up:
            return
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            self._give_up(f"it has not taken all rows {PATIENCE:g} s after the last")

    def _work(self) -> None:
        while (call := self._calls.get()) is not None and not self.is_given_up:
            try:
                with boundary(lambda error: Fault(place=self.name, finding=said(error))):
                    call(self._tracker)
            except CodeRaised as error:
                self._give_up(error.faults[0].finding)
                return

    def _give_up(self, reason: str) -> None:
        with self._warns:
            if self.is_given_up:
                return
            self.is_given_up = True
        hidden = _PASSWORD.sub("//", reason)
        LOG.warning("warning: %s has failed, and is left out from here on: %s", self.name, hidden)


class Trackers:
    """What a training tells its trackers: as `with` begins, the `run`; then rows; at last the
    verdict. Of none on ranks but the first, and where a spec names none."""

    def __init__(self, run_of: Mapping[str, TrackedRun] | None = None) -> None:
        self._run_of = run_of or {}
        self._threads: list[TrackerThread] = []

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """Give all of them a row of a step, counted from 1."""
        for thread in self._threads:
            thread.call(lambda tracker: tracker.log(step, figures))

    def conclude(self, verdict: str) -> None:
        for thread in self._threads:
            thread.call(lambda tracker: tracker.conclude(verdict))

    def __enter__(self) -> Self:
        for name, run in self._run_of.items():
            thread = TrackerThread(name, TRACKERS[name]())
            thread.call(partial(_begin, run, RunFolder(run.folder).identity(name)))
            self._threads.append(thread)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        deadline = time.monotonic() + PATIENCE
        for thread in self._threads:
            thread.call(lambda tracker: tracker.close(has_failed=error is not None))
            thread.finish()
        for thread in self._threads:
            thread.join(deadline)


def trackers_of(
    spec: Spec, options: Options, folder: RunFolder, predicted: Estimate, *, first: int
) -> Trackers:
    """Return the trackers of rank 0. `first`: steps that are done already."""
    run = TrackedRun(
        name=folder.path.name,
        folder=folder.path,
        spec=spec.resolved,
        figures=_figures(predicted),
        first=first,
    )
    return Trackers(
        {
            name: replace(run, identity=identity_of(folder, name, options.resume, spec.name))
            for name in names_of_trackers(spec, options)
        }
    )


def _figures(predicted: Estimate) -> dict[str, float]:
    """The names are those of the rows, where these have the figure too."""
    states = {row.state for row in predicted.memory}
    figures: dict[str, float] = {f"{state}_bytes": predicted.bytes_of(state) for state in states}
    if (peak := predicted.peak_bytes()) is not None:
        figures["peak_bytes"] = peak
    return dict(sorted(figures.items())) | {"sent_bytes": predicted.sent_bytes()}


def _begin(run: TrackedRun, file: Path, tracker: Tracker) -> None:
    """Begin the run, and write down what the tracker calls it."""
    if identity := tracker.begin(run):
        file.parent.mkdir(mode=0o700, exist_ok=True)
        write_text(file, identity + "\n")
