"""A hand-written expert-parallel loop: each rank has half of the experts, and tokens are exchanged
by all-to-all."""

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
    """Experts of two matrices each; all tokens are local."""

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
            done = self.apply_experts(sorted_rows, counts.tolist(), self.up, self.down)
        else:
            done = self._exchange_rows(sorted_rows, counts)
        return done[order.argsort()]

    def apply_experts(self, rows: Tensor, counts: list[int], up: Tensor, down: Tensor) -> Tensor:
        parts = rows.split(counts)
        return torch.cat([F.gelu(x @ w) @ v for x, w, v in zip(parts, up, down, strict=True)])

    def _exchange_rows(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Exchange rows with the ranks that have the experts."""
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
        done = self.apply_experts(arrived[order], coming.sum(0).tolist(), up, down)[order.argsort()]
        return all_to_all_single_autograd(
            done.contiguous(), going, coming.sum(1).tolist(), self.group
        )


class RoutedBlock(nn.Module):
    """A block that routes each token to one expert. `shares` holds the router's scores of the last
    pass, `counts` the number of tokens per expert in that pass."""

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


def build_routed() -> RoutedNet:
    """Return the model with all experts on one device, in fp64."""
    torch.manual_seed(0)
    return RoutedNet().double()


def shard_experts(model: RoutedNet, mesh: DeviceMesh) -> RoutedNet:
    """Return a copy of the model in which each rank has its shard of the experts."""
    spread = copy.deepcopy(model)
    for block in spread.blocks:
        block.experts.group = mesh.get_group()
        for name, whole in list(block.experts.named_parameters()):
            own = distribute_tensor(whole.detach(), mesh, [Shard(0)], src_data_rank=None)
            block.experts.register_parameter(name, nn.Parameter(own))
    return spread


def expert_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that are sharded over the ranks."""
    return [parameter for parameter in model.parameters() if isinstance(parameter, DTensor)]


def balance_loss(shares: Tensor, counts: Tensor) -> Tensor:
    """Return the load-balancing loss of a layer (Switch Transformer, arXiv:2101.03961, equation 4).
    `shares` are the scores of the tokens of the loss, `counts` the tokens per expert that are
    counted."""
    return EXPERTS * (counts / counts.sum() * shares.mean(0)).sum()
