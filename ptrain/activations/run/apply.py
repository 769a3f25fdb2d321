"""What is done to a module so that its blocks leave for backward what a plan says: from outside, no
module is another and no name is new.

It is done when operators are cut over tp and before any data axis wraps the module: what these do
before a block runs is then done once, and again by themselves where it is needed.
"""

from __future__ import annotations

import torch
from torch import nn

from ptrain.activations.run.offload import OffloadHooks
from ptrain.activations.run.recompute import recompute
from ptrain.errors import refused
from ptrain.models.transformer import Transformer
from ptrain.rooms.registry import Registry
from ptrain.rooms.tiers import Tiers
from ptrain.spec.activations import Kept, Scope
from ptrain.spec.placement import Tier
from ptrain.steps.step import Keep

_CORE = "attention.core"  # of a block of the built-in families


def keep(module: nn.Module, step: Keep, tiers: Tiers) -> None:
    """`module` is a model, or a stage's part of one, which has some of the blocks. Raises SpecError
    where the attention alone is to be computed again and is no module."""
    known = dict(module.named_modules())
    offload: OffloadHooks | None = None
    for name, kept in step.blocks:
        if name not in known or next(known[name].parameters(), None) is None:
            continue  # another stage's, for which something stands in
        inner = _recomputed(known, name, kept)
        if kept.tier is not Tier.DEVICE:
            offload = offload or OffloadHooks(module, tiers)
            offload.around(inner, kept.tier)  # first, so that it is around a checkpoint's inputs
        if kept.policy is not None:
            recompute(inner, kept.policy, draws=_draws(module, known[name]))


def keep_traced(module: nn.Module, step: Keep | None) -> None:
    """The same where nothing but sizes counts: on a processor, and no file is made."""
    if step is not None:
        keep(module, step, _WithoutFiles(torch.device("cpu"), Registry()))


class _WithoutFiles(Tiers):
    def _mapped(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype, device="cpu")


def _recomputed(known: dict[str, nn.Module], name: str, kept: Kept) -> nn.Module:
    if kept.policy is None or kept.policy.scope is Scope.BLOCK:
        return known[name]
    core = f"{name}.{_CORE}"
    if core not in known:
        finding = f"the attention alone is to be computed again, and {name} has no module for it"
        remedy = "write M, or a policy over operators: selective, or {keep: [matmul, attention]}"
        raise refused("activations", finding, remedy)
    return known[core]


def _draws(model: nn.Module, block: nn.Module) -> bool:
    """Whether the block may draw random numbers; of a model that is not built in nobody knows.
    Their state is 5 KB on a processor."""
    return not isinstance(model, Transformer) or any(
        getattr(child, "dropout", 0) or (isinstance(child, nn.Dropout) and child.p)
        for child in block.modules()
    )
