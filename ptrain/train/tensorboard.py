"""The optional extra `tensorboard`: a training as TensorBoard's events."""

from __future__ import annotations

from collections.abc import Mapping

from ptrain.spec.text import flow
from ptrain.train.manifest import leaves
from ptrain.train.tracker import TrackedRun


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
