"""One flat unit: its Theta, its G and its update."""

from __future__ import annotations

from ptrain.derivation.facts import UnitFacts
from ptrain.derivation.flat_bench import Bench, Buffer
from ptrain.derivation.flat_gradients import Gradients
from ptrain.derivation.flat_theta import Theta
from ptrain.derivation.flat_update import UnitUpdate


class Unit:
    """`pending`: gradients that this pass has yet to complete."""

    def __init__(self, bench: Bench, buffer: Buffer, facts: UnitFacts) -> None:
        self.num_tensors = len(facts.tensors)
        self.theta = Theta(bench, buffer)
        self.gradients = Gradients(bench, buffer)
        self.update = UnitUpdate(bench, buffer, facts, self.theta, self.gradients)
        self.pending = 0
