"""A model some of whose parameters do not train."""

from __future__ import annotations

from torch import nn

from tests.models_external import Necks

FROZEN = "layers.0.up"


def partly_frozen(hidden: int = 16, layers: int = 2, vocab: int = 259) -> nn.Module:
    """The target of a spec: `{target: tests.faults.models:partly_frozen}`."""
    model = Necks(hidden, layers, vocab)
    model.get_parameter(FROZEN).requires_grad_(False)
    return model
