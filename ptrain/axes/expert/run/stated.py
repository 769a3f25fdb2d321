"""Routing as a spec states it, on a fake rank that nobody answers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import nn

from ptrain.axes.expert.run.apply import assume
from ptrain.axes.expert.run.exchange import Counts, Routed
from ptrain.costs import Phase
from ptrain.spec.routing import Choices
from ptrain.steps.experts import Loads


class StatedRouting:
    """Of the rank with the tokens of this place. It is told which micro-batch runs, as an observer
    of a program."""

    def __init__(self, loads: Loads, place: int) -> None:
        self._loads, self._place, self._micro_batch = loads, place, 0

    def phase(self, phase: Phase, micro_batch: int) -> None:
        """The program enters a pass of a micro-batch."""
        self._micro_batch = micro_batch

    def lead(self, model: nn.Module) -> None:
        """From now on rows of the model's layers go as stated."""
        assume(model, lambda layer: partial(self._routed, layer))

    def _routed(self, layer: str, rows: int, ranks: int, own: int, rank: int) -> Routed:
        chosen = [
            self._loads.choices(layer, source)[self._micro_batch]
            for source in self._loads.group(self._place)
        ]
        assert (len(chosen), sum(chosen[rank])) == (ranks, rows), "a rule: counts fit the spec"
        sent = _by_rank(chosen[rank], own)
        return Routed(sent, [_by_rank(choices, own)[rank] for choices in chosen])


def _by_rank(choices: Choices, own: int) -> Counts:
    numbers: Sequence[int] = choices
    return [numbers[first : first + own] for first in range(0, len(numbers), own)]
