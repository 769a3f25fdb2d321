"""The optional extra `mlflow`: a training as a run of MLflow.

Where it goes are MLflow's own variables (MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME); without, its
own default, a database in the current folder.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from ptrain.spec.text import flow
from ptrain.train.manifest import leaves
from ptrain.train.tracker import TrackedRun

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
