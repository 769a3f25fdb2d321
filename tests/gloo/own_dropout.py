"""Loops whose models drop out, as somebody writes them: over data ranks, over tp, recomputed, on
slices, by stages; each sound or with a fault."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import ptrain
from tests.corpus.collectives import GatherParts
from tests.corpus.context import tokens_of_rank
from tests.corpus.parts import average, axis, looped, token_batches, token_loss, writer

WIDTH, WORDS, HEADS = 8, 11, 2


class Dropping(nn.Module):
    """Drops out in every way that torch has on a CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.drop = nn.Embedding(WORDS, WIDTH), nn.Dropout(0.2)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, dropout=0.1)  # tokens come first
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.drop(self.embed(tokens))
        parts = self.qkv(x).view(*x.shape[:2], 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        rate = 0.1 if self.training else 0.0
        seen = F.scaled_dot_product_attention(*parts, dropout_p=rate, is_causal=True)
        x = x + seen.transpose(1, 2).flatten(2)
        turned = x.transpose(0, 1)
        hidden = torch.ones(len(turned), len(turned)).triu(1).bool()
        turned = turned + self.attention(turned, turned, turned, attn_mask=hidden)[0]
        noise = torch.empty_like(x).bernoulli_(0.9) / 0.9 if self.training else 1.0
        return self.head(F.dropout(turned.transpose(0, 1), 0.1, self.training) * noise)


class Branch(nn.Module):
    """[rows, 8] -> [rows, 1]: a branch that drops out in the middle and at its end; tp cuts it."""

    def __init__(self, *, keeps_state: bool | None = None, middle: float = 0.2) -> None:
        super().__init__()
        self.up, self.middle = nn.Linear(8, 16), nn.Dropout(middle)
        self.down, self.end = nn.Linear(16, 8), nn.Dropout(0.3)
        self.out, self.keeps_state = nn.Linear(8, 1), keeps_state

    def branch(self, x: Tensor) -> Tensor:
        return self.end(self.down(self.middle(F.gelu(self.up(x)))))

    def forward(self, x: Tensor) -> Tensor:
        if self.keeps_state is None:
            return self.out(x + self.branch(x))
        again = checkpoint(self.branch, x, use_reentrant=False, preserve_rng_state=self.keeps_state)
        return self.out(x + again)


class Shared(nn.Module):
    """One mask of the features for all rows that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x * torch.rand(8).gt(0.2))


def built(build: Callable[[], nn.Module], seed: int | None = None) -> nn.Module:
    torch.manual_seed(0)
    model = build().double()
    if seed is not None:
        torch.manual_seed(seed)
    return model


def job(model: nn.Module, loss: Callable[..., Tensor], micro: int = 1, spoil: Any = None) -> Any:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step(batch: Tensor) -> Tensor:
        losses = [loss(model, part) / micro for part in batch.chunk(micro)]
        torch.stack(losses).sum().backward()
        if spoil is not None:
            spoil(model)
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack(losses).sum().detach()

    return ptrain.Job(model=model, step=step)


def next_tokens(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def squares(model: nn.Module, rows: Tensor) -> Tensor:
    return (model(rows) - rows.sum(1, keepdim=True)).square().mean()


def over_data(way: str, fault: str = "") -> dict[str, Any]:
    """Two micro-batches a rank; `fault`: nothing, not reduced, same masks, evaluates, a mask."""
    rank, size = dist.get_rank(), dist.get_world_size()
    tokens = torch.randint(0, WORDS, (3, 8, 7), generator=torch.Generator().manual_seed(1))

    def loop() -> ptrain.Job:
        model = built(Dropping, 7 if fault == "same masks" else 7 + rank)
        if fault == "evaluates":
            model.eval()
        if way == "ddp" and fault != "not reduced":
            return job(DistributedDataParallel(model), next_tokens, 2)
        return job(fully_shard(model) if way == "fsdp2" else model, next_tokens, 2)

    def share(batch: Tensor) -> Tensor:
        return batch.chunk(size)[rank]

    return _told(
        ptrain.verify(lambda: job(built(Dropping), next_tokens), loop, tokens, share=share)
    )


def over_tensor(fault: str = "") -> dict[str, Any]:
    """`fault`: nothing, seeds (by rank), keeps or forgets (the generator's state)."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    middle = 0.0 if fault == "seeds" else 0.2
    keeps = {"keeps": True, "forgets": False}.get(fault)

    def loop() -> ptrain.Job:
        model = built(lambda: Branch(keeps_state=keeps, middle=middle))
        parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        torch.manual_seed(5 + dist.get_rank() * (fault == "seeds"))
        return job(model, squares)

    terms = ptrain.Terms(mesh=mesh, loss="same")

    def plain() -> ptrain.Job:
        return job(built(lambda: Branch(middle=middle)), squares)

    return _told(ptrain.verify(plain, loop, _rows(), terms=terms))


def for_all_rows(as_jobs: bool = False) -> dict[str, Any]:
    """A mask that no rows of samples say."""
    rank, size = dist.get_rank(), dist.get_world_size()

    def loop() -> ptrain.Job:
        return job(DistributedDataParallel(built(Shared, rank)), squares)

    def plain() -> ptrain.Job:
        return job(built(Shared), squares)

    sides: Any = (plain(), loop()) if as_jobs else (plain, loop)
    return _told(ptrain.verify(*sides, _rows(), share=lambda batch: batch.chunk(size)[rank]))


def _rows() -> Tensor:
    return torch.randn(3, 8, 8, generator=torch.Generator().manual_seed(1)).double()


def _told(verdict: Any) -> dict[str, Any]:
    return {"holds": verdict.holds, "text": str(verdict)}


class Stage(nn.Module):
    """One of two stages, or (None) both: each drops out."""

    def __init__(self, place: int | None = None) -> None:
        super().__init__()
        up, down = nn.Linear(8, 16), nn.Linear(16, 1)
        self.place = place
        if place != 1:
            self.up = up
        if place != 0:
            self.down = down
        self.first, self.last = nn.Dropout(0.2), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.place == 1 else self.first(F.gelu(self.up(x)))
        return x if self.place == 0 else self.down(self.last(x))


def over_stages() -> dict[str, Any]:
    """Two stages by hand, two micro-batches: the second is given none of the samples."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))

    def loop() -> ptrain.Job:
        place = dist.get_rank()
        model = built(lambda: Stage(place), 20 + place)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

        def first(rows: Tensor) -> None:
            hidden = model(rows)
            dist.send(hidden.detach().contiguous(), 1)
            gradient = torch.empty_like(hidden)
            dist.recv(gradient, 1)
            hidden.backward(gradient)

        def last(rows: Tensor) -> Tensor:
            hidden = torch.empty(len(rows), 16, dtype=rows.dtype)
            dist.recv(hidden, 0)
            hidden.requires_grad_()
            loss = (model(hidden) - rows.sum(1, keepdim=True)).square().mean() / 2
            loss.backward()
            dist.send(hidden.grad, 0)
            return loss.detach()

        def step(batch: Tensor) -> Any:
            losses = [(last if place else first)(rows) for rows in batch.chunk(2)]
            optimizer.step()
            optimizer.zero_grad()
            return sum(losses) if place else None

        return ptrain.Job(model=model, step=step)

    def plain() -> ptrain.Job:
        return job(built(Stage), squares)

    return _told(ptrain.verify(plain, loop, _rows(), terms=ptrain.Terms(mesh=mesh)))


def over_tokens() -> dict[str, Any]:
    """Slices of the tokens by hand, each with masks of its own."""

    def model(seed: int = 0) -> nn.Module:
        net = writer()
        net.mlp.append(nn.Dropout(0.25))
        torch.manual_seed(seed)
        return net

    def sliced() -> ptrain.Job:
        net = model(10 + dist.get_rank())

        def loss(called: Any, part: Any) -> Tensor:
            inputs, labels, first = part
            logits = called(inputs, first, lambda kv: GatherParts.apply(kv, 1))
            return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

        return looped(net, loss=loss, before_update=lambda: average(net.parameters()))

    def plain() -> ptrain.Job:
        return looped(model(), loss=token_loss)

    verdict = ptrain.verify(
        plain, sliced, token_batches(), share=tokens_of_rank, terms=ptrain.Terms(mesh=axis("cp"))
    )
    return _told(verdict)
