"""Faults of buffers that the forward pass reads."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import ptrain
from tests.corpus.fault import NOT_REDUCED, planted
from tests.corpus.parts import FEATURES, looped, my_rows, rank, regressor, row_batches


class BalancedMixture(nn.Module):
    """Three experts, of which a row takes the one that its router, plus a bias per expert,
    prefers. The bias is a buffer that follows the loads, which the forward pass counts."""

    def __init__(self, checkpoints: bool = False, counts_inside: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.router = nn.Linear(FEATURES, 3, bias=False)
        self.experts = nn.ModuleList(nn.Linear(FEATURES, 8) for _ in range(3))
        self.head = nn.Linear(8, 1)
        self.register_buffer("bias", torch.zeros(3))
        self.register_buffer("loads", torch.zeros(3))
        self.checkpoints, self.counts_inside = checkpoints, counts_inside

    def choose(self, x: Tensor) -> Tensor:
        return (self.router(x).detach() + self.bias).argmax(dim=-1)

    def count(self, choice: Tensor) -> None:
        with torch.no_grad():
            self.loads += torch.bincount(choice, minlength=3)

    def mixed(self, x: Tensor) -> Tensor:
        choice = self.choose(x)
        if self.counts_inside:
            self.count(choice)
        weights = self.router(x).softmax(dim=-1).gather(-1, choice[:, None])
        outputs = torch.stack([expert(x) for expert in self.experts], dim=1)
        return F.gelu(outputs[torch.arange(len(x)), choice] * weights)

    def forward(self, x: Tensor) -> Tensor:
        if not self.counts_inside:
            self.count(self.choose(x))
        if self.checkpoints:
            return self.head(checkpoint(self.mixed, x, use_reentrant=False, early_stop=False))
        return self.head(self.mixed(x))

    @torch.no_grad()
    def follow(self, rate: float, sums_ranks: bool, by_sign: bool = False) -> None:
        """Move the bias towards equal loads, and reset the counts."""
        if sums_ranks:
            dist.all_reduce(self.loads)
        change = self.loads.mean() - self.loads
        self.bias += rate * (change.sign() if by_sign else change)
        self.loads.zero_()


@planted(
    source="https://github.com/pytorch/torchtitan/pull/1114",
    wrong=("buffers", "activations", "loss"), axis="dp", place="bias", step=0,
    sentence="the routing bias follows each rank's own loads: they are not summed over dp",
    right=("bias|buffer|load", NOT_REDUCED + "|differ|rank"),
    wrong_if=("learning rate", "head.weight", "sample is", "counted twice"),
)  # fmt: skip
def loads_not_summed(fault: bool) -> Any:
    def loop(model: nn.Module, inner: BalancedMixture, sums: bool) -> ptrain.Job:
        return looped(model, after_update=lambda: inner.follow(0.2, sums, by_sign=True))

    def plain() -> ptrain.Job:
        model = BalancedMixture()
        return loop(model, model, False)

    def job() -> ptrain.Job:
        inner = BalancedMixture()
        return loop(DistributedDataParallel(inner, broadcast_buffers=False), inner, not fault)

    return ptrain.verify(plain, job, row_batches(size=16), share=my_rows)


@planted(
    source="https://github.com/PrimeIntellect-ai/prime-rl/pull/2953",
    wrong=("buffers", "activations", "loss"), axis="none", place="bias, loads", step=0,
    sentence="the loads are counted twice: the recomputation in backward counts them again",
    right=("bias|buffer|load", "twice|again|recomput|double|checkpoint|differ"),
    wrong_if=("not reduced", "learning rate", "head.weight", "sample is"),
)  # fmt: skip
def loads_counted_by_the_recomputation(fault: bool) -> Any:
    def plain() -> ptrain.Job:
        model = BalancedMixture()
        return looped(model, after_update=lambda: model.follow(0.03, False))

    def job() -> ptrain.Job:
        inner = BalancedMixture(checkpoints=True, counts_inside=fault)
        model = DistributedDataParallel(inner, broadcast_buffers=False)
        return looped(model, after_update=lambda: inner.follow(0.03, True))

    return ptrain.verify(plain, job, row_batches(size=16), share=my_rows)


class Projected(nn.Module):
    """The regressor on features that a fixed random matrix, a buffer, has mixed."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.inner = regressor()
        generator = torch.Generator().manual_seed(seed)
        mixing = torch.randn(FEATURES, FEATURES, generator=generator) / FEATURES**0.5
        self.register_buffer("mixing", mixing + torch.eye(FEATURES))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x @ self.mixing)


@planted(
    source="https://github.com/pytorch/pytorch/issues/111138",
    wrong=("buffers", "activations", "loss"), axis="dp", place="mixing", step=0,
    sentence="rank 1's random matrix, a buffer, is another: it is never broadcast from rank 0",
    right=("mixing|buffer", "rank|differ|broadcast|other"),
    wrong_if=("not reduced", "learning rate", "inner.up.weight", "sample"),
)  # fmt: skip
def buffer_never_broadcast(fault: bool) -> Any:
    def job() -> ptrain.Job:
        inner = Projected(3 + rank())
        if not fault:
            dist.broadcast(inner.mixing, src=0)
        return looped(DistributedDataParallel(inner, broadcast_buffers=False))

    return ptrain.verify(lambda: looped(Projected(3)), job, row_batches(), share=my_rows)
