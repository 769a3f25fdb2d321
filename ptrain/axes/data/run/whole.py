"""What a wrap answers of names where it wraps a whole model, or a stage by itself."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ptrain.axes.data.run.target import Named, NamedTarget


class OfWholeModel:
    """It has each tensor once, under the model's name."""

    def is_copy(self, target: NamedTarget) -> bool:
        return False

    def canonical_name(self, name: str) -> str:
        return name

    def own(self, named: Mapping[str, torch.Tensor]) -> Named:
        return dict(named)
