"""Composable checkpointing (torch/distributed/_composable), which recomputes in backward."""

from __future__ import annotations

from torch.distributed._composable.checkpoint_activation import checkpoint

from ptrain.internals.part import PrivatePart

__all__ = ["checkpoint"]

PARTS = (PrivatePart(owner=checkpoint, arguments=("module", "kwargs")),)
