"""A hand-written context-parallel loop: each rank has a slice of the tokens and gathers keys and
values."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.nn.functional import all_gather

from tests.gloo.own_loops import WIDTH, WORDS

HEADS = 2


class Attention(nn.Module):
    """Causal attention over the tokens that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.output = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        heads = (
            layer(x).unflatten(-1, (HEADS, -1)) for layer in (self.query, self.key, self.value)
        )
        q, k, v = (each.transpose(1, 2) for each in heads)
        return self.output(self.attend(q, k, v).transpose(1, 2).flatten(2))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class GatheringAttention(Attention):
    """Causal attention over the tokens of all ranks."""

    is_contiguous = True

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        first = dist.get_rank() * q.shape[2]
        whole = [torch.cat(all_gather(each), 2) for each in (k, v)]
        if self.is_contiguous:
            whole = [_ContiguousBackward.apply(each) for each in whole]
        positions = torch.arange(first, first + q.shape[2])[:, None]
        return F.scaled_dot_product_attention(
            q, *whole, positions >= torch.arange(whole[0].shape[2])
        )


class _ContiguousBackward(torch.autograd.Function):
    """An identity function whose gradient is contiguous."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return gradient.contiguous()


class AttentiveNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList([Attention(), Attention()])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.norm(x))


def build_attentive() -> AttentiveNet:
    torch.manual_seed(0)
    return AttentiveNet().double()


def gather_over_context(plain: AttentiveNet, *, is_contiguous: bool) -> AttentiveNet:
    """Return a copy of the model with the same weights that attends to the tokens of all ranks."""
    net = copy.deepcopy(plain)
    for block in net.blocks:
        block.__class__ = GatheringAttention
        block.is_contiguous = is_contiguous
    return net
