"""Expert parallelism as somebody writes it by hand: a rank has half of the experts, and tokens
travel to theirs and back."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tests.gloo.own_loops import WIDTH, WORDS

EXPERTS = 4


class Experts(nn.Module):
    """Of each expert two matrices; all tokens are here."""

    group: dist.ProcessGroup | None = None

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * WIDTH) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH, WIDTH) / WIDTH**0.5)

    def forward(self, rows: Tensor, chosen: Tensor) -> Tensor:
        order = chosen.argsort(stable=True)
        counts = torch.bincount(chosen, minlength=EXPERTS)
        sorted_rows = rows[order]
        if self.group is None:
            done = self.computed(sorted_rows, counts.tolist(), self.up, self.down)
        else:
            done = self._travel(sorted_rows, counts)
        return done[order.argsort()]

    def computed(self, rows: Tensor, counts: list[int], up: Tensor, down: Tensor) -> Tensor:
        parts = rows.split(counts)
        return torch.cat([F.gelu(x @ w) @ v for x, w, v in zip(parts, up, down, strict=True)])

    def _travel(self, rows: Tensor, counts: Tensor) -> Tensor:
        """To the ranks that have the experts, and back."""
        ranks, received = self.group.size(), torch.empty_like(counts)
        dist.all_to_all_single(received, counts, group=self.group)
        going = counts.view(ranks, -1).sum(1).tolist()
        coming = received.view(ranks, -1)
        arrived = all_to_all_single_autograd(
            rows.contiguous(), coming.sum(1).tolist(), going, self.group
        )
        own = torch.arange(coming.shape[1]).repeat(ranks).repeat_interleave(received)
        order = own.argsort(stable=True)
        up, down = (weight.to_local() for weight in (self.up, self.down))
        done = self.computed(arrived[order], coming.sum(0).tolist(), up, down)[order.argsort()]
        return all_to_all_single_autograd(
            done.contiguous(), going, coming.sum(1).tolist(), self.group
        )


class RoutedBlock(nn.Module):
    """One expert for each token. `shares` are the router's scores of the last pass, `counts` the
    tokens of each expert in it."""

    shares: Tensor
    counts: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = Experts()

    def forward(self, x: Tensor) -> Tensor:
        rows = self.norm(x).flatten(0, 1)
        self.shares = self.router(rows).softmax(-1)
        weight, chosen = self.shares.max(-1)
        self.counts = torch.bincount(chosen, minlength=EXPERTS)
        return x + (self.experts(rows, chosen) * weight[:, None]).view_as(x)


class RoutedNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList([RoutedBlock(), RoutedBlock()])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def routed() -> RoutedNet:
    """With all experts on one device, in fp64."""
    torch.manual_seed(0)
    return RoutedNet().double()


def over_experts(model: RoutedNet, mesh: DeviceMesh) -> RoutedNet:
    """Return a copy of which each rank has its experts."""
    spread = copy.deepcopy(model)
    for block in spread.blocks:
        block.experts.group = mesh.get_group()
        for name, whole in list(block.experts.named_parameters()):
            own = distribute_tensor(whole.detach(), mesh, [Shard(0)], src_data_rank=None)
            block.experts.register_parameter(name, nn.Parameter(own))
    return spread


def of_experts(model: nn.Module) -> list[nn.Parameter]:
    """Those that each rank has some of."""
    return [parameter for parameter in model.parameters() if isinstance(parameter, DTensor)]


def unevenness(shares: Tensor, counts: Tensor) -> Tensor:
    """The loss that balances a layer (Switch Transformer, arXiv:2101.03961, equation 4), of the
    tokens whose `shares` are given; `counts` of all tokens that count."""
    return EXPERTS * (counts / counts.sum() * shares.mean(0)).sum()
