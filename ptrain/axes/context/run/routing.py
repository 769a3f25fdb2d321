"""Routers of which each rank has a slice of the tokens: what they choose is counted over all.

Legend of shape suffixes: N ranks, L stretches of a rank's tokens, B samples, K choices of a token,
T tokens of a rank, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ptrain.axes.context.attention import Span
from ptrain.cost import State
from ptrain.internals.functional_collectives import all_gathered, all_summed
from ptrain.models.balance import Balance, SampleTokens, weigh
from ptrain.models.moe import ExpertPlaces
from ptrain.rooms.registry import Registry


def route_slices(model: nn.Module, tokens: SampleSlices, parts: int) -> None:
    """Let the routers of `model` choose for slices of the tokens as they would for all of them: an
    expert has its places, and a loss its mean, over the whole sample. A slice is one in so many
    `parts` of what was routed before, so that its mean is as large a share of that."""
    weigh(model, 1.0 / parts)
    for module in model.modules():
        if isinstance(module, (Balance, ExpertPlaces)):
            module.tokens = tokens


class SampleSlices(SampleTokens):
    """The tokens of samples of which each rank of `group` has those in its spans. What is counted
    is an integer, of which there is no gradient."""

    def __init__(
        self, group: dist.ProcessGroup, registry: Registry, spans: Sequence[Sequence[Span]]
    ) -> None:
        """`spans` are those of every rank, in order; of a rank with fewer than others some are
        empty."""
        self.group, self.registry, self.slices = group, registry, len(spans)
        most = max(map(len, spans))
        padded = [[*own, *[(0, 0)] * (most - len(own))] for own in spans]
        starts = [span for own in padded for span in own]
        self._order = sorted(range(len(starts)), key=starts.__getitem__)
        own = group.rank() * most
        self._own = [self._order.index(own + stretch) for stretch in range(most)]
        self._lengths = [behind - first for first, behind in padded[group.rank()]]

    def summed(self, counts_BE: Tensor) -> Tensor:
        self.registry.tag(counts_BE, State.ACTIVATIONS)
        return all_summed(counts_BE, self.group)

    def before(self, before_BKT: Tensor, chosen_BKT: Tensor, *, num_experts: int) -> Tensor:
        parts = chosen_BKT.split(self._lengths, dim=-1)
        counts_LBKE = torch.stack([_counts(part, num_experts) for part in parts])
        self.registry.tag(counts_LBKE, State.ACTIVATIONS)
        all_ = all_gathered(counts_LBKE, self.group)  # [N * L, B, K, E], by rank
        in_order = torch.stack([all_[place] for place in self._order], dim=2)  # [B, K, N * L, E]
        elsewhere_BKLE = _ahead(in_order)[:, :, self._own] - _ahead(counts_LBKE.movedim(0, 2))
        ahead = [
            elsewhere_BKLE[:, :, stretch].gather(-1, part) for stretch, part in enumerate(parts)
        ]
        return before_BKT + torch.cat(ahead, dim=-1)


def _counts(chosen_BKT: Tensor, num_experts: int) -> Tensor:
    """Return how many tokens chose each expert first, second and so on [B, K, E]."""
    zeros_BKE = chosen_BKT.new_zeros(*chosen_BKT.shape[:-1], num_experts)
    return zeros_BKE.scatter_add(-1, chosen_BKT, torch.ones_like(chosen_BKT))


def _ahead(counts_BKLE: Tensor) -> Tensor:
    """Return how many choices come before the first of each count: all of lower ones, and of equal
    ones those of earlier stretches."""
    flat = counts_BKLE.flatten(1, 2)
    return (flat.cumsum(1) - flat).unflatten(1, counts_BKLE.shape[1:3])
