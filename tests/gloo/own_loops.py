"""Training loops as somebody else writes them: nothing of ptrain in them but `Job` around each."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import ptrain
from ptrain.codec import encode
from ptrain.verification.jobs.job import LoopVerdict

WORDS, WIDTH, LENGTH, ROWS = 17, 8, 9, 8  # 9 rows of the head on one of two ranks, 8 on the other


class Block(nn.Module):
    """A third of the MLP's width is odd, so that shards are uneven."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 3 * width)
        self.down = nn.Linear(3 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList([Block(WIDTH), Block(WIDTH)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def built(dtype: torch.dtype = torch.float64) -> Net:
    torch.manual_seed(0)
    return Net().to(dtype)


def batches(count: int = 3) -> list[Tensor]:
    """Tokens [8, 9]."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, WORDS, (ROWS, LENGTH), generator=generator) for _ in range(count)]


def mean_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


Nothing = Callable[[nn.Module], None]


def no_change(model: nn.Module) -> None:
    """Nothing is done to the gradients."""


def loop(
    model: nn.Module, *, micro_batches: int = 1, between: Nothing = no_change, rate: float = 1e-2
) -> ptrain.Job:
    """Accumulation over micro-batches of equal size; `between` backward and update."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)

    def step(tokens: Tensor) -> Tensor:
        total = torch.zeros(())
        for micro in tokens.chunk(micro_batches):
            loss = mean_loss(model, micro) / micro_batches
            loss.backward()
            total = total + loss.detach()
        between(model)
        optimizer.step()
        optimizer.zero_grad()
        return total

    return ptrain.Job(model=model, step=step)


def whole_batch(
    model: nn.Module,
    loss_of: Callable[[Any], Tensor],
    *,
    between: Nothing = no_change,
    optimizer: torch.optim.Optimizer | None = None,
) -> ptrain.Job:
    """One backward pass and one update a batch; without an optimizer by AdamW."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step(batch: Any) -> Tensor:
        loss = loss_of(batch)
        loss.backward()
        between(model)
        optimizer.step()
        model.zero_grad()
        return loss

    return ptrain.Job(model=model, step=step)


def squares(model: nn.Module) -> ptrain.Job:
    """The mean square of the output, by SGD."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return whole_batch(model, lambda x: model(x).square().mean(), optimizer=optimizer)


def ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model)


def fsdp2(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def fsdp1(model: nn.Module, use_orig_params: bool = True) -> nn.Module:
    cpu = torch.device("cpu")
    return FullyShardedDataParallel(model, use_orig_params=use_orig_params, device_id=cpu)


def fsdp1_flat(model: nn.Module) -> nn.Module:
    return fsdp1(model, use_orig_params=False)


def tp(model: nn.Module) -> nn.Module:
    """The head's 17 rows and the MLP's 24 are cut over the ranks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    return _tp(model, mesh)


def _tp(model: nn.Module, mesh: Any) -> nn.Module:
    for block in model.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    head = ColwiseParallel(output_layouts=Replicate(), use_local_output=True)
    return parallelize_module(model, mesh, {"head": head})


def tp_sp(model: nn.Module) -> nn.Module:
    """Norms on pieces of the sequence: torch's own SequenceParallel."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    inner = {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
    }
    outer = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    for block in model.blocks:
        parallelize_module(block, mesh, inner)
    return parallelize_module(model, mesh, outer)


def fsdp2_tp(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    _tp(model, mesh["tp"])
    for block in model.blocks:
        fully_shard(block, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"])


def hsdp(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def by_hand(model: nn.Module) -> nn.Module:
    """No wrapper: `averaged` in the loop."""
    return model


WRAPPERS = {
    each.__name__: each
    for each in (ddp, fsdp2, fsdp1, fsdp1_flat, tp, tp_sp, fsdp2_tp, hsdp, by_hand)
}
MICRO_BATCHES = 2


def averaged(model: nn.Module) -> None:
    """All-reduce by hand, in the form of every tutorial."""
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def part_of(way: str) -> Callable[[Tensor], Tensor] | None:
    """This rank's rows of a batch; ranks along tp have the same."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if way in ("tp", "tp_sp"):
        return None
    if way == "fsdp2_tp":
        rank, size = rank // 2, size // 2
    return lambda tokens: tokens.chunk(size)[rank]


def judged(
    way: str, fault: str = "", dtype: torch.dtype = torch.float64, num_batches: int = 3
) -> LoopVerdict:
    """A loop with a fault (the name of a function of own_faults, or none) against the sound one on
    the plain module."""
    from tests.gloo import own_faults

    model = built(dtype)
    plain = copy.deepcopy(model)
    wrapped = WRAPPERS[way](model)
    between = averaged if way == "by_hand" else no_change
    sound = loop(plain, micro_batches=MICRO_BATCHES)
    if fault:
        job, sound = own_faults.FAULTS[fault](wrapped, sound, between)
    else:
        job = loop(wrapped, micro_batches=MICRO_BATCHES, between=between)
    return ptrain.verify(sound, job, batches(num_batches), share=part_of(way))


def told(way: str, fault: str = "", dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    """What a test asks of a verdict, as plain data."""
    verdict = judged(way, fault, dtype)
    root_cause = verdict.root_cause
    return {
        "holds": verdict.holds,
        "text": str(verdict),
        "culprit": encode(root_cause),
        "failing": [check.name for check in verdict.checks if not check.holds],
    }


def gradients(model: nn.Module) -> Iterator[Tensor]:
    """As this rank stores them."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            gradient = parameter.grad
            yield gradient.to_local() if hasattr(gradient, "to_local") else gradient
