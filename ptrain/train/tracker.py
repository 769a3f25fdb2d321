"""Trackers of a training, with one interface: TensorBoard, W&B and MLflow, which are optional
extras, and an endpoint for Prometheus.

MLflow's location is set by its variables (MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME); by default
it is a database in the current folder. W&B's project, entity, key and mode are in WANDB_PROJECT,
WANDB_ENTITY, WANDB_API_KEY, WANDB_MODE=offline …; its files are in `wandb/` of the run folder. This
module imports no torch, so that the parent can reject missing packages.
"""

from __future__ import annotations

import re
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from ptrain.errors import Fault, SpecError
from ptrain.spec.spec import Spec
from ptrain.spec.text import to_flow_yaml
from ptrain.train import environment, manifest
from ptrain.train.folder import AUTO, RunFolder
from ptrain.train.options import Options
from ptrain.units import leaves


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedRun:
    """The data with which a tracker begins a run.

    Attributes:
        name: The name of the run.
        folder: The run folder.
        spec: The resolved spec.
        figures: The predicted figures.
        first: The number of finished steps.
        identity: The id that the tracker gave the run at an earlier attempt. "": a new run.
    """

    name: str
    folder: Path
    spec: Mapping[str, object]
    figures: Mapping[str, float]
    first: int = 0
    identity: str = ""

    @property
    def facts(self) -> dict[str, object]:
        """The data that is known before the first step: the spec's sections, and `predicted`."""
        return {**self.spec, "predicted": dict(self.figures)}


class Tracker(Protocol):
    """A receiver of the figures of a training.

    Its methods are called in one thread. They may raise or hang: the training continues without it.
    """

    def begin(self, run: TrackedRun) -> str:
        """Begin a run, and return the id by which a continuation finds it again."""
        ...

    def log(self, step: int, figures: Mapping[str, float]) -> None: ...

    def conclude(self, verdict: str) -> None: ...

    def close(self, *, has_failed: bool) -> None: ...


def tracker_names(spec: Spec, options: Options) -> tuple[str, ...]:
    """Return the trackers of a run, in the order of the spec."""
    by_option = ("tensorboard",) if options.tensorboard else ()
    return tuple(dict.fromkeys((*spec.log.trackers, *by_option)))


def require_trackers(names: Sequence[str]) -> None:
    """Raise SpecError for trackers whose packages, which have their names, are not installed.

    Python can import a folder `wandb` of an earlier run as a namespace package. It has no origin
    and does not count.
    """
    faults = [
        Fault(
            place="log.trackers",
            finding=f"{name} needs a package that is not installed",
            remedy=f"Run `pip install 'ptrain[{name}]'`, or remove {name} from `log.trackers`.",
        )
        for name in names
        if name != PROMETHEUS and ((package := find_spec(name)) is None or package.origin is None)
    ]
    if faults:
        raise SpecError(*faults)


def continued_run_id(folder: RunFolder, tracker: str, source: str | None, name: str) -> str:
    """Return the id that a tracker gave a continued run, "" for a new one.

    The id is in this run folder, or in the run of `source` if that has the same name.

    Args:
        folder: This run folder.
        tracker: The name of the tracker.
        source: The value of `--resume`.
        name: The name of the spec.
    """
    for run in (folder, *_continued_runs(source, name)):
        if (file := run.identity(tracker)).exists():
            return file.read_text(encoding="utf-8").strip()
    return ""


def _continued_runs(source: str | None, name: str) -> list[RunFolder]:
    """Return the run folder that `--resume` refers to, if its spec has this name."""
    if source is None or source == AUTO:
        return []
    path = Path(source)
    runs = [RunFolder(run) for run in (path, *path.parents[:2])]
    nearest = [run for run in runs if run.resolved.exists()][:1]
    return [run for run in nearest if _run_name(run) == name]


def _run_name(run: RunFolder) -> str:
    """Return the name in the resolved spec of a run. The file is not parsed as YAML."""
    lines = run.resolved.read_text(encoding="utf-8").splitlines()
    names = (line.partition(":")[2] for line in lines if line.startswith("name:"))
    return next(names, "").strip(" \"'")


PROMETHEUS = "prometheus"
PATIENCE = 15  # seconds to wait for W&B's servers; its default is 90 or more


class WeightsAndBiases:
    """A tracker for W&B.

    The id of the run is created here, so that a continuation finds it in offline mode, too. The
    step is logged as a figure, because W&B drops rows whose internal step was logged before.
    """

    def begin(self, run: TrackedRun) -> str:
        """Begin or continue a run, and return its id."""
        import wandb

        identity = run.identity or secrets.token_hex(4)
        settings = wandb.Settings(
            console="off",  # do not capture standard output: the run folder has the logs
            silent=True,
            init_timeout=PATIENCE,
            login_timeout=PATIENCE,
        )
        self._run = wandb.init(
            id=identity,
            resume="allow",  # continue the run if the id exists, else create it
            name=None if run.identity else run.name,
            dir=str(run.folder),
            config=run.facts,
            settings=settings,
        )
        self._run.define_metric("*", step_metric="step")
        return identity

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        self._run.log({"step": step, **figures})

    def conclude(self, verdict: str) -> None:
        self._run.summary["verdict"] = verdict

    def close(self, *, has_failed: bool) -> None:
        self._run.finish(exit_code=int(has_failed))


class TensorBoard:
    """A tracker that writes TensorBoard events to `events/` of the run folder.

    A continuation in the same folder removes the steps that it repeats from view. In another
    folder, the events begin with its first step.
    """

    def begin(self, run: TrackedRun) -> str:
        """Open the event file and write the spec as a table. The result is "": a run has no id."""
        from torch.utils.tensorboard import SummaryWriter

        purged = run.first + 1 if run.first else None
        self._writer = SummaryWriter(log_dir=str(run.folder / "events"), purge_step=purged)
        rows = [f"| {place} | {to_flow_yaml(value)} |" for place, value in leaves(run.facts)]
        self._writer.add_text("run", "\n".join((f"| {run.name} | |", "|---|---|", *rows)))
        return ""

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)

    def conclude(self, verdict: str) -> None:
        self._writer.add_text("verdict", verdict)

    def close(self, *, has_failed: bool) -> None:
        self._writer.close()


_MOST_PARAMETERS = 100  # MLflow's limit per request
_INVALID_IN_KEY = re.compile(r"[^\w.\- :/]")  # characters that MLflow rejects in keys
_LONGEST = 500  # characters of a parameter value that all of MLflow's stores accept


class MLflow:
    """A tracker for MLflow, whose active run belongs to the thread that calls its methods.

    The parameters of the first attempt are kept, because MLflow does not allow changes.
    """

    def begin(self, run: TrackedRun) -> str:
        """Begin or continue a run, log its parameters once, and return its id."""
        import mlflow

        self._mlflow = mlflow
        active = mlflow.start_run(run_id=run.identity or None, run_name=run.name)
        if not run.identity:
            facts = [
                (_INVALID_IN_KEY.sub("_", place), to_flow_yaml(value)[:_LONGEST])
                for place, value in leaves(run.facts)
            ]
            for start in range(0, len(facts), _MOST_PARAMETERS):
                mlflow.log_params(dict(facts[start : start + _MOST_PARAMETERS]))
        return str(active.info.run_id)

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        self._mlflow.log_metrics(dict(figures), step=step)

    def conclude(self, verdict: str) -> None:
        self._mlflow.set_tag("verdict", verdict)

    def close(self, *, has_failed: bool) -> None:
        self._mlflow.end_run("FAILED" if has_failed else "FINISHED")


class Prometheus:
    """A tracker that serves the newest figures to Prometheus, on this machine only.

    The address is http://127.0.0.1:PORT/metrics, with the port of the variable PTRAIN_METRICS_PORT.
    """

    def begin(self, run: TrackedRun) -> str:
        """Begin to serve. The result is "": a run has no id."""
        self._figures: dict[str, float] = {}
        self._checkpoints = RunFolder(run.folder).checkpoints
        handler = partial(_MetricsHandler, self._text)
        # A loopback address: other machines cannot connect, and Prometheus needs no password here.
        port = environment.metrics_port()
        try:
            self._server = ThreadingHTTPServer(("127.0.0.1", port), handler)
        except OSError as error:
            text = f"port {port}: {error.strerror}. Set PTRAIN_METRICS_PORT to a free port"
            raise OSError(text) from error
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return ""

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        self._figures = {**self._figures, **figures, "step": step}

    def conclude(self, verdict: str) -> None:
        """Do nothing: a verdict is no number."""

    def close(self, *, has_failed: bool) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _text(self) -> str:
        """Return the figures in Prometheus' text format."""
        figures = dict(self._figures)
        if paths := manifest.complete_checkpoints(self._checkpoints):
            figures["last_checkpoint_step"] = manifest.step_in_name(paths[0])
        lines = []
        for figure, value in figures.items():
            name = f"ptrain_{re.sub(r'[^a-zA-Z0-9_]', '_', figure)}"
            lines += [f"# TYPE {name} gauge", f"{name} {float(value)!r}"]
        return "\n".join(lines) + "\n"


class _MetricsHandler(BaseHTTPRequestHandler):
    """Answers `GET /metrics`."""

    def __init__(self, text: Callable[[], str], *connection: Any) -> None:
        self._text = text
        super().__init__(*connection)

    def do_GET(self) -> None:
        """Send the figures, or 404 for another path."""
        is_known = self.path.partition("?")[0] == "/metrics"
        body = self._text().encode() if is_known else b"See /metrics.\n"
        self.send_response(200 if is_known else 404)
        self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing: standard error belongs to the training."""
