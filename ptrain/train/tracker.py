"""What a tracker of experiments is given of a training: one interface for all of them, and the
names by which a run is continued. Torch-free: what is not installed is refused by the parent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

from ptrain.errors import Fault, SpecError
from ptrain.spec.spec import Spec
from ptrain.train.folder import AUTO, RunFolder
from ptrain.train.options import Options


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
