"""One flat unit: its Theta, its G and its update."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ptrain.axes.data.costs import Run, runs
from ptrain.derivation.flat_bench import Bench, Buffer
from ptrain.derivation.flat_gradients import Gradients
from ptrain.derivation.flat_theta import Theta
from ptrain.derivation.flat_update import UnitUpdate
from ptrain.facts.model import UnitFacts
from ptrain.spec.axis import Axis


class Unit:
    """`pending`: gradients that this pass has yet to complete."""

    def __init__(self, bench: Bench, buffer: Buffer, facts: UnitFacts) -> None:
        self.facts, self.buffer = facts, buffer
        self.theta = Theta(bench, buffer)
        self.gradients = Gradients(bench, buffer)
        self.update = UnitUpdate(bench, buffer, facts, self.theta, self.gradients)
        self.pending = 0

    @property
    def num_tensors(self) -> int:
        return len(self.facts.tensors)

    def kept_runs(self, place: Mapping[Axis, int]) -> Iterator[Run]:
        """What is kept of G at this place along the axes that it is cut over, in runs of tensors
        whose operators are cut and of others."""
        if self.gradients.kept is None:
            return iter(())
        tensors = [(tensor.numel, tensor.is_cut) for tensor in self.facts.tensors]
        within = self.buffer.stretches(self.gradients.now, place)
        return runs(tensors, self.buffer.padded, within)
