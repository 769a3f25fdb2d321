"""What a layer of experts does on one device in the departing micro-batch.

Legend of shape suffixes: N tokens of all samples, K experts of a token, C hidden, M = N·K rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from ptrain.models.moe import MoE
from ptrain.verification.causes.rerun import call_of
from ptrain.verification.causes.scene import Investigation
from ptrain.verification.causes.values import Explanation


@dataclass(frozen=True)
class RoutedLayer:
    """A layer of one device in the departing micro-batch: what it was given, the router's weights
    and choices, and what the experts made of their rows."""

    layer: MoE
    x_BTC: Tensor
    weights_NK: Tensor
    chosen_NK: Tensor
    y: Tensor  # [M, C] sorted by expert, or [experts, places of one, C]

    @classmethod
    def of(cls, scene: Investigation, path: str, layer: MoE) -> RoutedLayer:
        (x_BTC, *_), _ = call_of(scene, path)
        _, (weights_NK, chosen_NK) = call_of(scene, f"{path}.router")
        _, y = call_of(scene, f"{path}.experts")
        return cls(layer, x_BTC, weights_NK, chosen_NK, y)

    def combined(self, weights_NK: Tensor, rows_NKC: Tensor) -> Tensor:
        """Return what the layer gives of such weights and rows."""
        y_BTC = (rows_NKC * weights_NK[..., None]).sum(1).view_as(self.x_BTC)
        if self.layer.shared is None:
            return y_BTC
        with torch.no_grad():
            shared: Tensor = self.layer.shared(self.x_BTC)
        return y_BTC + shared

    @cached_property
    def order_M(self) -> Tensor:
        """Which choice stands in each row, sorted by expert."""
        return self.chosen_NK.flatten().argsort(stable=True)

    @cached_property
    def places_NK(self) -> Tensor:
        """The place of each choice; the number of places where it finds none."""
        assert self.layer.places is not None, "experts take all that is sent to them"
        places_NK: Tensor = self.layer.places(self.chosen_NK.unflatten(0, self.x_BTC.shape[:2]))
        return places_NK

    @cached_property
    def is_dropped_NK(self) -> Tensor:
        return self.places_NK == self.y.shape[:2].numel()

    @cached_property
    def rows_NKC(self) -> Tensor:
        """What each token's experts give."""
        if self.layer.shape.capacity_factor is not None:
            return F.pad(self.y.flatten(0, 1), (0, 0, 0, 1))[self.places_NK]
        return self.in_rows(self.order_M.argsort())

    def in_rows(self, numbers_M: Tensor) -> Tensor:
        """Return the rows with these numbers as those of the tokens [N, K, C]."""
        return self.y[numbers_M].unflatten(0, self.chosen_NK.shape)


Other = tuple[Explanation, Tensor, Tensor]  # with its weights and rows
