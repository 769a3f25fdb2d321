"""Hand-written loops with dropout: over data ranks, tensor parallel, recomputed, on token slices,
in stages; each correct or with a fault."""

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


class DropoutNet(nn.Module):
    """A model that uses every kind of dropout that torch has on a CPU."""

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
    """A branch from [rows, 8] to [rows, 1] with dropout in the middle and at the end; tp shards
    it."""

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


class SharedMask(nn.Module):
    """A module that applies one feature mask to all rows."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x * torch.rand(8).gt(0.2))


def build_model(build: Callable[[], nn.Module], seed: int | None = None) -> nn.Module:
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


def next_token_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def square_loss(model: nn.Module, rows: Tensor) -> Tensor:
    return (model(rows) - rows.sum(1, keepdim=True)).square().mean()


def data_parallel(way: str, fault: str = "") -> dict[str, Any]:
    """Return the verdict of two data ranks with two micro-batches each. `fault`: nothing, not
    reduced, same masks, evaluates, a mask."""
    rank, size = dist.get_rank(), dist.get_world_size()
    tokens = torch.randint(0, WORDS, (3, 8, 7), generator=torch.Generator().manual_seed(1))

    def loop() -> ptrain.Job:
        model = build_model(DropoutNet, 7 if fault == "same masks" else 7 + rank)
        if fault == "evaluates":
            model.eval()
        if way == "ddp" and fault != "not reduced":
            return job(DistributedDataParallel(model), next_token_loss, 2)
        return job(fully_shard(model) if way == "fsdp2" else model, next_token_loss, 2)

    def share(batch: Tensor) -> Tensor:
        return batch.chunk(size)[rank]

    return _summary(
        ptrain.verify(
            lambda: job(build_model(DropoutNet), next_token_loss), loop, tokens, share=share
        )
    )


def tensor_parallel(fault: str = "") -> dict[str, Any]:
    """Return the verdict of a tensor-parallel loop. `fault`: nothing, seeds (by rank), keeps or
    forgets (the generator's state)."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    middle = 0.0 if fault == "seeds" else 0.2
    keeps = {"keeps": True, "forgets": False}.get(fault)

    def loop() -> ptrain.Job:
        model = build_model(lambda: Branch(keeps_state=keeps, middle=middle))
        parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        torch.manual_seed(5 + dist.get_rank() * (fault == "seeds"))
        return job(model, square_loss)

    terms = ptrain.Terms(mesh=mesh, loss="same")

    def plain() -> ptrain.Job:
        return job(build_model(lambda: Branch(middle=middle)), square_loss)

    return _summary(ptrain.verify(plain, loop, _rows(), terms=terms))


def shared_mask(as_jobs: bool = False) -> dict[str, Any]:
    """Return the verdict of a loop with one mask for all rows, which no sample's rows identify."""
    rank, size = dist.get_rank(), dist.get_world_size()

    def loop() -> ptrain.Job:
        return job(DistributedDataParallel(build_model(SharedMask, rank)), square_loss)

    def plain() -> ptrain.Job:
        return job(build_model(SharedMask), square_loss)

    sides: Any = (plain(), loop()) if as_jobs else (plain, loop)
    return _summary(ptrain.verify(*sides, _rows(), share=lambda batch: batch.chunk(size)[rank]))


def _rows() -> Tensor:
    return torch.randn(3, 8, 8, generator=torch.Generator().manual_seed(1)).double()


def _summary(verdict: Any) -> dict[str, Any]:
    return {"holds": verdict.holds, "text": str(verdict)}


class Stage(nn.Module):
    """One of two stages, or the full model for None; each stage has dropout."""

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


def two_stages() -> dict[str, Any]:
    """Return the verdict of a hand-written pipeline of two stages and two micro-batches. The second
    stage receives no samples."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))

    def loop() -> ptrain.Job:
        place = dist.get_rank()
        model = build_model(lambda: Stage(place), 20 + place)
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
        return job(build_model(Stage), square_loss)

    return _summary(ptrain.verify(plain, loop, _rows(), terms=ptrain.Terms(mesh=mesh)))


def token_slices() -> dict[str, Any]:
    """Return the verdict of hand-written token slices, each with its local masks."""

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
    return _summary(verdict)
