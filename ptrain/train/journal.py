"""Report a training while it runs: lines and a progress bar on rank 0, metrics.jsonl, and trackers.

W&B, MLflow and TensorBoard have one interface, and none of them can end, stop or delay a training.
Each works in a thread of its own: a server that is gone may take minutes to fail, and the other
ranks would wait for this one until their collectives time out.
"""

from __future__ import annotations

import json
import logging
import os
import re
import statistics
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from queue import Full, Queue
from types import TracebackType
from typing import Any, Protocol, Self

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

from ptrain.cost import Estimate
from ptrain.errors import Fault
from ptrain.meters.traffic import Counter
from ptrain.models.boundary import CodeRaised, boundary, said
from ptrain.report import routing
from ptrain.report.routing import LayerRouting
from ptrain.report.screen import show
from ptrain.spec.spec import Spec
from ptrain.train.folder import RunFolder, write_text
from ptrain.train.look import StepFigures
from ptrain.train.options import Options
from ptrain.train.tracker import (
    MLflow,
    TensorBoard,
    TrackedRun,
    Tracker,
    WeightsAndBiases,
    identity_of,
    names_of_trackers,
)
from ptrain.units import format_memory

LOG = logging.getLogger("ptrain")
_ROW = re.compile(r'^\{"step": (\d+), .*\}\n', re.MULTILINE)


@dataclass(frozen=True, slots=True)
class StepReport:
    """One step, counted from 1. `seen` is what `Journal.seen` gave when it was launched."""

    step: int
    figures: StepFigures
    lr: float
    seconds: float
    routing: Sequence[LayerRouting] = ()
    seen: Mapping[str, float] = field(default_factory=dict)


def is_shown(spec: Spec, step: int) -> bool:
    """Return whether a step, counted from 1, has a line of its own."""
    return step % spec.log_every == 0 or step in (1, spec.train.steps)


class Sink(Protocol):
    """Where figures go beside metrics.jsonl."""

    def log(self, step: int, figures: Mapping[str, float]) -> None: ...


class Journal:
    """Of rank 0; the others have none of it (`Journal(spec)`) and stay silent."""

    def __init__(
        self,
        spec: Spec,
        folder: RunFolder | None = None,
        *,
        first: int = 0,
        bar: bool = False,
        quiet: bool = False,
        sink: Sink | None = None,
    ) -> None:
        """`first` steps are done: the first new row replaces rows of later steps."""
        self.spec = spec
        self._sink = sink
        self.level = logging.DEBUG if quiet else logging.INFO
        self.seconds: list[float] = []
        self.skipped_steps = 0  # because a gradient of the scaled loss overflowed
        self._measured: Mapping[str, float] = {}  # of the last measured step
        self._path, self._first = folder.metrics if folder else None, first
        self._metrics: Any = None  # opened by the first row
        self._counter = Counter() if spec.world_size > 1 and folder else None
        self._uncounted = 0  # steps since the counter's last look
        self._progress = _progress(spec.train.steps) if bar else None

    def measured(self, estimate: Estimate) -> None:
        """Take what this rank's meters saw, for the steps to come."""
        peak, sent = estimate.peak_bytes(), estimate.sent_bytes()
        self._measured = ({} if peak is None else {"peak_bytes": peak}) | {"sent_bytes": sent}

    def seen(self, step: int) -> Mapping[str, float]:
        """Return what meters and counter have seen when a step (from 1) is launched: the last
        measured step, and where the counter looks, collectives. Called once a step."""
        return {**self._measured, **self._counted(step)}

    def step(self, report: StepReport) -> None:
        """A row of metrics for every step, a line for every `log_every`th, the first and last."""
        self.seconds.append(report.seconds)
        if self._path is None:
            return
        shown = is_shown(self.spec, report.step)
        figures = self._figures(report)
        tokens = {"tokens_per_expert": {layer.layer: layer.tokens for layer in report.routing}}
        self._write({"step": report.step, **figures, **(tokens if report.routing else {})})
        self._track(report.step, figures)
        if self._progress is not None:
            self._progress.update(self._progress.task_ids[0], completed=report.step)
        if shown:
            self._metrics.flush()
            LOG.log(self.level, self._line(report.step, figures))

    def held_out(self, step: int, loss: float) -> None:
        if self._path is None:
            return
        self._write({"step": step, "held_out_loss": loss})
        self._track(step, {"held_out_loss": loss})
        LOG.info("step %d/%d  held-out loss %.4f", step, self.spec.train.steps, loss)

    def step_seconds(self) -> float | None:
        """Return the median seconds of a step, the first two left out; None before the third."""
        return statistics.median(self.seconds[2:]) if len(self.seconds) > 2 else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.stop()
            _Console.progress = None
        if self._metrics is not None:
            self._metrics.close()

    def _write(self, row: Mapping[str, object]) -> None:
        assert self._path is not None, "only rank 0 writes"
        if self._metrics is None:
            _drop_rows(self._path, self._first)
            self._metrics = _append(self._path)
        self._metrics.write(json.dumps(row) + "\n")

    def _track(self, step: int, figures: Mapping[str, float]) -> None:
        if self._sink is not None:
            self._sink.log(step, figures)

    def _figures(self, report: StepReport) -> dict[str, float]:
        """The same names in every sink."""
        figures = {
            "loss": report.figures.loss,
            "lr": report.lr,
            "seconds": report.seconds,
            **self._rate(report.seconds),
        }
        if report.figures.gradient_norm is not None:
            figures["gradient_norm"] = report.figures.gradient_norm
        if report.routing:
            figures |= routing.figures(report.routing)
        if report.figures.loss_scale is not None:
            figures |= self._scaled(report.figures.loss_scale, report.figures, figures)
        return {**figures, **report.seen}

    def _rate(self, seconds: float) -> dict[str, float]:
        """In samples, where a sample is not tokens."""
        if self.spec.data.function is not None:
            return {"samples_per_second": self.spec.batch.global_samples / seconds}
        return {"tokens_per_second": self.spec.batch.tokens / seconds}

    def _scaled(
        self, scale: float, known: StepFigures, figures: dict[str, float]
    ) -> dict[str, float]:
        """The scale of the next step, and the steps skipped so far; the norm of a skipped step,
        which is no number, goes."""
        if known.is_skipped:
            self.skipped_steps += 1
            figures.pop("gradient_norm", None)
        return {"loss_scale": scale, "skipped_steps": self.skipped_steps}

    def _counted(self, step: int) -> dict[str, float]:
        """Collectives per step since the last look, from the counter that is always on; nothing
        where it did not look, or where its ring has been overwritten in between."""
        if self._counter is None:
            return {}
        self._uncounted += 1
        is_last = step == self.spec.train.steps
        wanted = is_shown(self.spec, step)
        counted = self._counter.read() if is_last else self._counter.look(wanted=wanted)
        if counted is None:
            return {}
        steps, self._uncounted = self._uncounted, 0
        if counted.missed:
            return {}
        return {
            "counted_calls": counted.calls / steps,
            "counted_sent_bytes": counted.sent_bytes / steps,
        }

    def _line(self, step: int, figures: dict[str, float]) -> str:
        parts = [f"step {step}/{self.spec.train.steps}", f"loss {figures['loss']:.4f}"]
        parts += [text(figures[name]) for name, text in _TEXTS.items() if name in figures]
        if "expert_load" in figures:
            parts.append(routing.words(figures))
        if figures.get("skipped_steps"):
            parts.append(f"{figures['skipped_steps']:g} skipped")
        if "peak_bytes" in figures:
            parts.append(f"peak {format_memory(figures['peak_bytes'])}")
        return "  ".join(parts)


# How figures of a step stand in its line, in this order.
_TEXTS: Mapping[str, Callable[[float], str]] = {
    "gradient_norm": "|g| {:.2f}".format,
    "lr": "lr {:.1e}".format,
    "samples_per_second": "{:.1f} samples/s".format,
    "tokens_per_second": lambda rate: f"{rate / 1e3:.1f}k tokens/s",
    "seconds": "{:.2f} s".format,
    "loss_scale": "scale {:g}".format,
}


def set_up_logging(folder: RunFolder, *, rank: int, speaks: bool) -> None:
    """Every rank logs to its file; the one that speaks also to standard output, bare lines."""
    LOG.setLevel(logging.DEBUG)
    LOG.propagate = False
    LOG.handlers.clear()
    folder.log(rank).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    file = logging.StreamHandler(_append(folder.log(rank)))
    file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    LOG.addHandler(file)
    if speaks:
        console = _Console()
        console.setLevel(logging.INFO)
        LOG.addHandler(console)


class _Console(logging.Handler):
    """Lines on standard output, above a progress bar where there is one."""

    progress: Progress | None = None

    def emit(self, record: logging.LogRecord) -> None:
        text = self.format(record)
        if _Console.progress is not None:
            _Console.progress.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            show(text)


def _progress(steps: int) -> Progress | None:
    """A bar on a terminal only."""
    if not sys.stdout.isatty():
        return None
    progress = Progress(
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        transient=True,
        refresh_per_second=2,
    )
    progress.add_task("steps", total=steps)
    progress.start()
    _Console.progress = progress
    return progress


def _drop_rows(path: Path, after: int) -> None:
    """Replace a metrics file in one move by its rows of steps up to `after`. A line that was cut
    short goes too."""
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    rows = [row for row in _ROW.finditer(text) if int(row[1]) <= after]
    if (kept := "".join(row[0] for row in rows)) != text:
        write_text(path, kept)


def _append(path: Path) -> Any:
    """Line-buffered text that only the owner may read."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    return os.fdopen(descriptor, "w", encoding="utf-8", buffering=1)


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
                self._give_up(f"{MOST_CALLS} rows are waiting")

    def finish(self) -> None:
        """Return at once; the thread ends when nothing is left to do."""
        self.call(lambda _: self._calls.put(None))

    def join(self, deadline: float) -> None:
        """Wait for that, at most until `deadline`, of the monotonic clock."""
        if self.is_given_up:
            return
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            self._give_up(f"it did not accept all rows within {PATIENCE:g} s")

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
        LOG.warning("warning: %s failed and is disabled: %s", self.name, hidden)


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
