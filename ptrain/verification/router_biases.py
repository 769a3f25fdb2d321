"""Routers' biases on one device: moved by the formula as it is published, layer by layer.

Wang et al. 2024 (arXiv:2408.15664), algorithm 1: b_i += u sign(mean of c - c_i), of the choices c
of a whole step.
"""

from __future__ import annotations

import torch
from torch import nn

from ptrain.models.moe import Gate


def clear_counts(module: nn.Module) -> None:
    """Forget what a model's routers have chosen."""
    for gate in module.modules():
        if isinstance(gate, Gate) and gate.load_E is not None:
            gate.load_E.zero_()


@torch.no_grad()
def move_biases(module: nn.Module) -> None:
    """Move the bias of each expert of a model by what its routers have chosen since `clear_counts`,
    and clear these counts."""
    for gate in module.modules():
        if isinstance(gate, Gate) and gate.load_E is not None and gate.bias_E is not None:
            rate = gate.shape.bias_update_rate
            assert rate is not None, "there are biases"
            chosen_E = gate.load_E.double()
            gate.bias_E += rate * (chosen_E.mean() - chosen_E).sign()
    clear_counts(module)
