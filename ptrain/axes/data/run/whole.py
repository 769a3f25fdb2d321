"""What a wrap answers where it wraps a whole model, or a stage by itself."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import torch

from ptrain.axes.data.run.target import Named, NamedTarget, gradients_of


class OfWholeModel(ABC):
    """It has each tensor once, under the model's name."""

    @abstractmethod
    def targets(self) -> Sequence[Sequence[NamedTarget]]: ...

    def gradients(self) -> list[torch.Tensor]:
        return gradients_of(self.targets())

    def copies(self) -> Sequence[NamedTarget]:
        return ()

    def canonical_name(self, name: str) -> str:
        return name

    def own(self, named: Mapping[str, torch.Tensor]) -> Named:
        return dict(named)
