"""The optional extra `wandb`: a training as a run of Weights & Biases.

Project, entity, key and mode are W&B's own variables (WANDB_PROJECT, WANDB_API_KEY,
WANDB_MODE=offline); its files go to `wandb/` of the run folder.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping

from ptrain.train.tracker import TrackedRun

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
