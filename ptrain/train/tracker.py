"""Track a training in TensorBoard, W&B or MLflow (optional extras): one interface for all of them,
and the names by which a run is continued. Torch-free: what is not installed is refused by the
parent.

MLflow's place is in its variables (MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME), else its default,
a database in the current folder. W&B's project, entity, key and mode are in WANDB_PROJECT,
WANDB_API_KEY, WANDB_MODE=offline …; its files are in `wandb/` of the run folder.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

from ptrain.errors import Fault, SpecError
from ptrain.spec.spec import Spec
from ptrain.spec.text import flow
from ptrain.train.folder import AUTO, RunFolder
from ptrain.train.options import Options
from ptrain.units import leaves


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedRun:
    """A training as a tracker begins it: its spec and the predicted `figures`, after `first` steps
    that were done before. `identity`: what the tracker called it then, "" of a new one."""

    name: str
    folder: Path
    spec: Mapping[str, object]
    figures: Mapping[str, float]
    first: int = 0
    identity: str = ""

    @property
    def facts(self) -> dict[str, object]:
        """Return what is known before the first step: the spec's sections, and `predicted`."""
        return {**self.spec, "predicted": dict(self.figures)}


class Tracker(Protocol):
    """Where a training's figures go beside metrics.jsonl. Its methods are called in one thread, and
    may raise or hang: the training goes on without it."""

    def begin(self, run: TrackedRun) -> str:
        """Return what the tracker calls the run, by which a continuation finds it again."""
        ...

    def log(self, step: int, figures: Mapping[str, float]) -> None: ...

    def conclude(self, verdict: str) -> None: ...

    def close(self, *, has_failed: bool) -> None: ...


def names_of_trackers(spec: Spec, options: Options) -> tuple[str, ...]:
    """Return the trackers of a run, in the order of the spec."""
    by_option = ("tensorboard",) if options.tensorboard else ()
    return tuple(dict.fromkeys((*spec.log.trackers, *by_option)))


def require_trackers(names: Sequence[str]) -> None:
    """Raises SpecError for those whose packages, which bear their names, are not installed. A
    folder `wandb` of an earlier run, from where Python imports, is none."""
    faults = [
        Fault(
            place="log.trackers",
            finding=f"{name} needs a package that is not installed",
            remedy=f"Run `pip install 'ptrain[{name}]'`, or remove {name} from `log.trackers`.",
        )
        for name in names
        if (package := find_spec(name)) is None or package.origin is None
    ]
    if faults:
        raise SpecError(*faults)


def identity_of(folder: RunFolder, tracker: str, source: str | None, name: str) -> str:
    """Return what a tracker called a run that goes on in `folder`: as the folder itself has it, or
    the run of `source`, from which it continues, if that bears the same name; "" of a new one."""
    for run in (folder, *_continued(source, name)):
        if (file := run.identity(tracker)).exists():
            return file.read_text(encoding="utf-8").strip()
    return ""


def _continued(source: str | None, name: str) -> list[RunFolder]:
    """The run of a checkpoint, or the folder of a run, that `--resume` names."""
    if source is None or source == AUTO:
        return []
    path = Path(source)
    runs = [RunFolder(run) for run in (path, *path.parents[:2])]
    nearest = [run for run in runs if run.resolved.exists()][:1]
    return [run for run in nearest if _name_of(run) == name]


def _name_of(run: RunFolder) -> str:
    lines = run.resolved.read_text(encoding="utf-8").splitlines()
    names = (line.partition(":")[2] for line in lines if line.startswith("name:"))
    return next(names, "").strip(" \"'")


PATIENCE = 15  # seconds for its servers to answer, of 90 and more that are usual there


class WeightsAndBiases:
    """A run whose id is made here, so that a continuation finds it in offline mode too. Steps are a
    figure of their own: W&B drops rows of a step that is done again under its own count."""

    def begin(self, run: TrackedRun) -> str:
        import wandb

        identity = run.identity or secrets.token_hex(4)
        settings = wandb.Settings(
            console="off",  # the lines on standard output are in the logs, or for machines
            silent=True,
            init_timeout=PATIENCE,
            login_timeout=PATIENCE,
        )
        self._run = wandb.init(
            id=identity,
            resume="allow",
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
    """Events in `events/` of the run folder. A continuation in the same folder hides the steps that
    it does again; one in another folder begins at its own first step there."""

    def begin(self, run: TrackedRun) -> str:
        from torch.utils.tensorboard import SummaryWriter

        purged = run.first + 1 if run.first else None
        self._writer = SummaryWriter(log_dir=str(run.folder / "events"), purge_step=purged)
        rows = [f"| {place} | {flow(value)} |" for place, value in leaves(run.facts)]
        self._writer.add_text("run", "\n".join((f"| {run.name} | |", "|---|---|", *rows)))
        return ""

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)

    def conclude(self, verdict: str) -> None:
        self._writer.add_text("verdict", verdict)

    def close(self, *, has_failed: bool) -> None:
        self._writer.close()


_MOST_PARAMETERS = 100  # of a request
_UNKEYED = re.compile(r"[^\w.\- :/]")  # characters that no key of its has
_LONGEST = 500  # characters of a parameter that all of its stores take


class MLflow:
    """The active run of the thread that its methods are called in. Parameters are those of the
    first attempt: MLflow lets none change."""

    def begin(self, run: TrackedRun) -> str:
        import mlflow

        self._mlflow = mlflow
        active = mlflow.start_run(run_id=run.identity or None, run_name=run.name)
        if not run.identity:
            facts = [(_key(place), flow(value)[:_LONGEST]) for place, value in leaves(run.facts)]
            for start in range(0, len(facts), _MOST_PARAMETERS):
                mlflow.log_params(dict(facts[start : start + _MOST_PARAMETERS]))
        return str(active.info.run_id)

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        self._mlflow.log_metrics(dict(figures), step=step)

    def conclude(self, verdict: str) -> None:
        self._mlflow.set_tag("verdict", verdict)

    def close(self, *, has_failed: bool) -> None:
        self._mlflow.end_run("FAILED" if has_failed else "FINISHED")


def _key(place: str) -> str:
    return _UNKEYED.sub("_", place)
