"""The way of rows to the experts of other ranks and back: an all-to-all there and one back, and in
backward the same two for gradients.

Legend of shape suffixes: N ranks, E experts of all ranks, e experts of a rank, S places that an
expert has of one rank's samples, T places of all ranks, M rows of a rank's tokens, R rows that its
experts get, C hidden.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from ptrain.internals.functional_collectives import all_to_all_single_autograd, awaited
from ptrain.models.journey import Journey


class JourneyOverRanks(Journey):
    """The way of one forward pass over the ranks of `group`, each of which has as many experts: the
    first those that come first."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def places_there(self, x_ESC: Tensor) -> Tensor:
        x_NeSC = self._places_exchanged(x_ESC)
        del x_ESC
        return x_NeSC.movedim(0, 1).flatten(1, 2)

    def places_back(self, y_eTC: Tensor) -> Tensor:
        y_NeSC = y_eTC.unflatten(1, (self.group.size(), -1)).movedim(1, 0)
        del y_eTC
        return self._places_exchanged(y_NeSC.flatten(0, 1)).flatten(0, 1)

    def _places_exchanged(self, x_ESC: Tensor) -> Tensor:
        ranks = self.group.size()
        sizes = [len(x_ESC) // ranks] * ranks
        received_ESC = awaited(all_to_all_single_autograd(x_ESC, sizes, sizes, self.group))
        return received_ESC.unflatten(0, (ranks, -1))
