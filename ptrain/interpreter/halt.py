"""A training that stops on the device, before its host knows."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Halt:
    """What an optimizer is told beside its gradients where a loss has no scale: `flag` (0-d fp32)
    is 1 where the update is left out, moments and their counter included."""

    flag: torch.Tensor

    def beside(self, tensor: torch.Tensor) -> tuple[None, torch.Tensor]:
        """Return no scale, and the flag where `tensor` is updated: on the device."""
        assert tensor.device == self.flag.device, "what is updated on the host is waited for"
        return None, self.flag
