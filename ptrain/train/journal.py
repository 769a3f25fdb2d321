"""The reports of a running training: lines and a progress bar, metrics.jsonl, and trackers.

W&B, MLflow and TensorBoard share one interface, and none of them can end, stop or delay a training.
Each runs in a separate thread: a call to an unreachable server may take minutes to fail, in which
the other ranks would wait for this one until their collectives time out.
"""

from __future__ import annotations

import json
import logging
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
from typing import Protocol, Self

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

from ptrain.cost import Estimate
from ptrain.errors import Fault
from ptrain.files import LineFile, warn_if_unwritable, write_text
from ptrain.meters.traffic import CollectiveCounter
from ptrain.models.boundary import UserCodeError, convert_exceptions, describe_error
from ptrain.report import routing
from ptrain.report.routing import LayerRouting
from ptrain.report.screen import escape_controls, print_screen
from ptrain.spec.spec import Spec
from ptrain.train.exchange import StepFigures
from ptrain.train.folder import RunFolder
from ptrain.train.options import Options
from ptrain.train.tracker import (
    PROMETHEUS,
    MLflow,
    Prometheus,
    TensorBoard,
    TrackedRun,
    Tracker,
    WeightsAndBiases,
    continued_run_id,
    tracker_names,
)
from ptrain.units import format_memory

LOG = logging.getLogger("ptrain")
# A complete row: a process that was killed may leave one without its end.
_ROW = re.compile(r'^\{"step": (\d+), .*\}\n', re.MULTILINE)


@dataclass(frozen=True, slots=True)
class StepReport:
    """The report of one step, counted from 1.

    Attributes:
        step: The step.
        figures: Its loss and related figures.
        lr: The learning rate.
        seconds: The duration of the step.
        routing: The routing counts of each layer.
        seen: The result of `Journal.launch_figures` when the step was launched.
    """

    step: int
    figures: StepFigures
    lr: float
    seconds: float
    routing: Sequence[LayerRouting] = ()
    seen: Mapping[str, float] = field(default_factory=dict)


def is_shown(spec: Spec, step: int) -> bool:
    """Return True if a step is printed: each `log_every`th, the first and the last.

    Args:
        spec: The spec, for `log_every` and the number of steps.
        step: The step, from 1.
    """
    return step % spec.log_every == 0 or step in (1, spec.train.steps)


class FigureSink(Protocol):
    """A receiver of figures in addition to metrics.jsonl."""

    def log(self, step: int, figures: Mapping[str, float]) -> None: ...


class Journal:
    """The journal of rank 0. Other ranks have a silent one, without a folder."""

    def __init__(
        self,
        spec: Spec,
        folder: RunFolder | None = None,
        *,
        first: int = 0,
        bar: bool = False,
        quiet: bool = False,
        sink: FigureSink | None = None,
    ) -> None:
        """Set up the journal.

        Args:
            spec: The spec.
            folder: The run folder. None: write and print nothing.
            first: The number of finished steps. The first new row replaces rows of later steps.
            bar: Show a progress bar on a terminal.
            quiet: Log the lines of steps on the level DEBUG.
            sink: The receiver of all figures.
        """
        self.spec = spec
        self._sink = sink
        self.level = logging.DEBUG if quiet else logging.INFO
        self.seconds: list[float] = []
        self.skipped_steps = 0  # because a gradient of the scaled loss overflowed
        self._measured: Mapping[str, float] = {}  # of the last measured step
        self._path, self._first = folder.metrics if folder else None, first
        self._metrics: LineFile | None = None  # created by the first row
        self._counter = CollectiveCounter() if spec.world_size > 1 and folder else None
        self._uncounted = 0  # steps since the counter was last read
        self._progress = _start_progress(spec.train.steps) if bar else None

    def record_measurement(self, estimate: Estimate) -> None:
        """Record the meters' figures of this rank, to be added to the rows of the next steps."""
        peak, sent = estimate.peak_bytes(), estimate.sent_bytes()
        self._measured = ({} if peak is None else {"peak_bytes": peak}) | {"sent_bytes": sent}

    def launch_figures(self, step: int) -> Mapping[str, float]:
        """Return the figures of meters and counter when a step is launched.

        Args:
            step: The step, from 1. Call it once per step.

        Returns:
            The figures in bytes of the last measured step, and the collectives if the counter was
            read.
        """
        return {**self._measured, **self._counted_collectives(step)}

    def write_step(self, report: StepReport) -> None:
        """Write a row of metrics, and print a line at each `log_every`th, first and last step."""
        self.seconds.append(report.seconds)
        if self._path is None:
            return
        shown = is_shown(self.spec, report.step)
        figures = self._figures(report)
        tokens = {"tokens_per_expert": {layer.layer: layer.tokens for layer in report.routing}}
        self._write_row({"step": report.step, **figures, **(tokens if report.routing else {})})
        self._track_figures(report.step, figures)
        if self._progress is not None:
            self._progress.update(self._progress.task_ids[0], completed=report.step)
        if shown:
            LOG.log(self.level, self._step_line(report.step, figures))

    def write_held_out_loss(self, step: int, loss: float) -> None:
        """Write and print the held-out loss after a step."""
        if self._path is None:
            return
        self._write_row({"step": step, "held_out_loss": loss})
        self._track_figures(step, {"held_out_loss": loss})
        LOG.info("step %d/%d  held-out loss %.4f", step, self.spec.train.steps, loss)

    def step_seconds(self) -> float | None:
        """Return the median duration of a step without the first two; None before the third."""
        # The first two steps create optimizer state and rebuild DDP's buckets (probe.FIRST_STEADY).
        return statistics.median(self.seconds[2:]) if len(self.seconds) > 2 else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.stop()
            _Console.progress = None
        if self._metrics is not None:
            self._metrics.close()

    def _write_row(self, row: Mapping[str, object]) -> None:
        """Append a row to metrics.jsonl. The first one drops rows of steps that are repeated."""
        assert self._path is not None, "only rank 0 writes"
        if self._metrics is None:
            with warn_if_unwritable(self._path, LOG.warning):
                _drop_rows(self._path, self._first)
            self._metrics = LineFile(self._path, LOG.warning)
        self._metrics.write(json.dumps(row) + "\n")

    def _track_figures(self, step: int, figures: Mapping[str, float]) -> None:
        """Pass figures to the trackers."""
        if self._sink is not None:
            self._sink.log(step, figures)

    def _figures(self, report: StepReport) -> dict[str, float]:
        """Return the figures of a step, with the same names for all receivers."""
        figures = {
            "loss": report.figures.loss,
            "lr": report.lr,
            "seconds": report.seconds,
            **self._rate_figures(report.seconds),
        }
        if report.figures.gradient_norm is not None:
            figures["gradient_norm"] = report.figures.gradient_norm
        if report.routing:
            figures |= routing.routing_figures(report.routing)
        if report.figures.loss_scale is not None:
            figures |= self._scale_figures(report.figures.loss_scale, report.figures, figures)
        return {**figures, **report.seen}

    def _rate_figures(self, seconds: float) -> dict[str, float]:
        """Return the throughput, in samples if a sample is not a sequence of tokens."""
        if self.spec.data.function is not None:
            return {"samples_per_second": self.spec.batch.global_samples / seconds}
        return {"tokens_per_second": self.spec.batch.tokens / seconds}

    def _scale_figures(
        self, scale: float, known: StepFigures, figures: dict[str, float]
    ) -> dict[str, float]:
        """Return the loss scale of the next step and the number of skipped steps.

        The gradient norm of a skipped step is not finite and is removed from `figures`.
        """
        if known.is_skipped:
            self.skipped_steps += 1
            figures.pop("gradient_norm", None)
        return {"loss_scale": scale, "skipped_steps": self.skipped_steps}

    def _counted_collectives(self, step: int) -> dict[str, float]:
        """Return the collectives per step since the counter was last read.

        The result is empty if the counter was not read, or if its ring buffer was overwritten
        since.
        """
        if self._counter is None:
            return {}
        self._uncounted += 1
        is_last = step == self.spec.train.steps
        wanted = is_shown(self.spec, step)
        counted = self._counter.read() if is_last else self._counter.read_if_wanted(wanted=wanted)
        if counted is None:
            return {}
        steps, self._uncounted = self._uncounted, 0
        if counted.missed:
            return {}
        return {
            "counted_calls": counted.calls / steps,
            "counted_sent_bytes": counted.sent_bytes / steps,
        }

    def _step_line(self, step: int, figures: dict[str, float]) -> str:
        """Return the line of a step."""
        parts = [f"step {step}/{self.spec.train.steps}", f"loss {figures['loss']:.4f}"]
        parts += [text(figures[name]) for name, text in _TEXTS.items() if name in figures]
        if "expert_load" in figures:
            parts.append(routing.routing_text(figures))
        if figures.get("skipped_steps"):
            parts.append(f"{figures['skipped_steps']:g} skipped")
        if "peak_bytes" in figures:
            parts.append(f"peak {format_memory(figures['peak_bytes'])}")
        return "  ".join(parts)


# The formats of figures in the line of a step, in this order.
_TEXTS: Mapping[str, Callable[[float], str]] = {
    "gradient_norm": "|g| {:.2f}".format,
    "lr": "lr {:.1e}".format,
    "samples_per_second": "{:.1f} samples/s".format,
    "tokens_per_second": lambda rate: f"{rate / 1e3:.1f}k tokens/s",
    "seconds": "{:.2f} s".format,
    "loss_scale": "scale {:g}".format,
}


def set_up_logging(folder: RunFolder, *, rank: int, speaks: bool) -> None:
    """Log to the file of this rank.

    Args:
        folder: The run folder.
        rank: This rank.
        speaks: Also print lines of level INFO and above on standard output.
    """
    LOG.setLevel(logging.DEBUG)
    # A program that configures the root logger would print every line twice.
    LOG.propagate = False
    # From an earlier training in this process, such as a notebook.
    LOG.handlers.clear()
    folder.log(rank).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    file = logging.StreamHandler(LineFile(folder.log(rank), LOG.warning))
    file.setFormatter(_EscapingFormatter("%(asctime)s %(levelname)s %(message)s"))
    LOG.addHandler(file)
    if speaks:
        console = _Console()
        console.setLevel(logging.INFO)
        LOG.addHandler(console)


class _EscapingFormatter(logging.Formatter):
    """A formatter whose lines cannot control the terminal that shows the log."""

    def format(self, record: logging.LogRecord) -> str:
        return escape_controls(super().format(record))


class _Console(logging.Handler):
    """A log handler that prints lines on standard output, above any progress bar."""

    progress: Progress | None = None

    def emit(self, record: logging.LogRecord) -> None:
        text = self.format(record)
        if _Console.progress is not None:
            text = escape_controls(text)
            _Console.progress.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            print_screen(text)


def _start_progress(steps: int) -> Progress | None:
    """Start a progress bar; None if standard output is no terminal."""
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
    """Remove the rows of steps after `after` from a metrics file, atomically.

    Incomplete lines are removed, too.
    """
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    rows = [row for row in _ROW.finditer(text) if int(row[1]) <= after]
    if (remaining := "".join(row[0] for row in rows)) != text:
        write_text(path, remaining)


TRACKERS: Mapping[str, Callable[[], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "mlflow": MLflow,
    PROMETHEUS: Prometheus,
}
# Seconds for all trackers at the end of a run, less than the 30 s that the launcher gives the last
# rank (launch._ORDERLY_GRACE).
PATIENCE = 20.0
# Calls that may wait for a tracker. They bound the memory if a server does not respond.
MOST_CALLS = 10_000
_CREDENTIALS = re.compile(r"//[^/\s]+@")  # user name and password of an address; both may contain @


class TrackerThread:
    """A tracker that runs in a separate thread and gets its calls in order.

    It is disabled, with one warning, when it raises or when too many calls wait.
    """

    def __init__(self, name: str, tracker: Tracker) -> None:
        self.name = name
        self.is_given_up = False
        self._warns = threading.Lock()  # both threads may disable it; only one warns
        self._tracker = tracker
        self._calls: Queue[Callable[[Tracker], object] | None] = Queue(MOST_CALLS)
        # A daemon, so that a call that hangs does not keep the process alive.
        self._thread = threading.Thread(target=self._run_calls, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def enqueue(self, call: Callable[[Tracker], object]) -> None:
        """Queue a call and return at once."""
        if not self.is_given_up:
            try:
                self._calls.put_nowait(call)
            except Full:
                self._give_up(f"{MOST_CALLS} rows are waiting")

    def finish(self) -> None:
        """Queue the end of the thread and return at once."""
        # `enqueue` never blocks. The thread puts the end mark itself, when the queue has room
        # because it has just taken this call.
        self.enqueue(lambda _: self._calls.put(None))

    def join(self, deadline: float) -> None:
        """Wait for the end of the thread until `deadline` (monotonic); then disable the tracker."""
        if self.is_given_up:
            return
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            self._give_up(f"it did not accept all rows within {PATIENCE:g} s")

    def _run_calls(self) -> None:
        """Run the queued calls."""
        while (call := self._calls.get()) is not None and not self.is_given_up:
            try:
                with convert_exceptions(
                    lambda error: Fault(place=self.name, finding=describe_error(error))
                ):
                    call(self._tracker)
            except UserCodeError as error:
                self._give_up(error.faults[0].finding)
                return

    def _give_up(self, reason: str) -> None:
        """Disable the tracker and warn once. Passwords in addresses are removed from the reason."""
        with self._warns:
            if self.is_given_up:
                return
            self.is_given_up = True
        hidden = _CREDENTIALS.sub("//", reason)
        LOG.warning("warning: %s failed and is disabled: %s", self.name, hidden)


class Trackers:
    """The trackers of a training, as a context manager that begins and closes their runs.

    It is empty on all ranks except the first, and if the spec names none.

    Args:
        run_of: The run to begin, by the name of the tracker.
    """

    def __init__(self, run_of: Mapping[str, TrackedRun] | None = None) -> None:
        self._run_of = run_of or {}
        self._threads: list[TrackerThread] = []

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """Send the figures of a step, counted from 1, to all trackers."""
        for thread in self._threads:
            thread.enqueue(lambda tracker: tracker.log(step, figures))

    def conclude(self, verdict: str) -> None:
        """Send the verdict to all trackers."""
        for thread in self._threads:
            thread.enqueue(lambda tracker: tracker.conclude(verdict))

    def __enter__(self) -> Self:
        for name, run in self._run_of.items():
            thread = TrackerThread(name, TRACKERS[name]())
            thread.enqueue(partial(_begin_run, run, RunFolder(run.folder).identity(name)))
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
            thread.enqueue(lambda tracker: tracker.close(has_failed=error is not None))
            thread.finish()
        for thread in self._threads:  # all of them finish in parallel, with one deadline
            thread.join(deadline)


def make_trackers(
    spec: Spec, options: Options, folder: RunFolder, predicted: Estimate, *, first: int
) -> Trackers:
    """Return the trackers of rank 0.

    Args:
        spec: The spec.
        options: The options of the training.
        folder: The run folder.
        predicted: The prediction, whose figures the trackers record.
        first: The number of finished steps.
    """
    run = TrackedRun(
        name=folder.path.name,
        folder=folder.path,
        spec=spec.resolved,
        figures=_figures(predicted),
        first=first,
    )
    return Trackers(
        {
            name: replace(run, identity=continued_run_id(folder, name, options.resume, spec.name))
            for name in tracker_names(spec, options)
        }
    )


def _figures(predicted: Estimate) -> dict[str, float]:
    """Return the predicted figures, with the names of the rows where both have a figure."""
    states = {row.state for row in predicted.memory}
    figures: dict[str, float] = {f"{state}_bytes": predicted.bytes_of(state) for state in states}
    if (peak := predicted.peak_bytes()) is not None:
        figures["peak_bytes"] = peak
    return dict(sorted(figures.items())) | {"sent_bytes": predicted.sent_bytes()}


def _begin_run(run: TrackedRun, file: Path, tracker: Tracker) -> None:
    """Begin the run of a tracker and record its id."""
    if identity := tracker.begin(run):
        file.parent.mkdir(mode=0o700, exist_ok=True)
        write_text(file, identity + "\n")
