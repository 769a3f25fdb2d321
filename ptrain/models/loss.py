"""The loss: a sum over tokens; divided by a global count it cannot be mis-scaled (Theorem 3)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from ptrain.models.numerics import widen

IGNORED = -100  # a target that counts for nothing


def token_loss_sum(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """The sum of the tokens' cross entropies in nats, in at least fp32."""
    return F.cross_entropy(
        widen(logits_BTV.flatten(0, 1)),
        targets_BT.flatten(),
        ignore_index=IGNORED,
        reduction="sum",
    )
