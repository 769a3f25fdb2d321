"""The optional extra `tensorboard`: the figures of metrics.jsonl as TensorBoard events."""

from __future__ import annotations

from pathlib import Path

from ptrain.errors import Fault, SpecError

MISSING = Fault(
    place="--tensorboard",
    finding="needs a package that is not installed",
    remedy="pip install 'ptrain[tensorboard]'",
)


class TensorBoard:
    """A sink of the journal, writing to `events/` of the run folder."""

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise SpecError(MISSING) from error
        self._writer = SummaryWriter(log_dir=str(folder))

    def log(self, step: int, figures: dict[str, float]) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()
