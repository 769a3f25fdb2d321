"""Training loops written without ptrain; only `Job` wraps each of them."""

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
    """A block whose MLP width is 3 x an odd number, so that shards are uneven."""

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


def build_model(dtype: torch.dtype = torch.float64) -> Net:
    torch.manual_seed(0)
    return Net().to(dtype)


def batches(count: int = 3) -> list[Tensor]:
    """Return token batches of shape [8, 9]."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, WORDS, (ROWS, LENGTH), generator=generator) for _ in range(count)]


def mean_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


Nothing = Callable[[nn.Module], None]


def no_change(model: nn.Module) -> None:
    """Leave the gradients unchanged."""


def loop(
    model: nn.Module, *, micro_batches: int = 1, between: Nothing = no_change, rate: float = 1e-2
) -> ptrain.Job:
    """Return a loop that accumulates over micro-batches of equal size and calls `between` between
    backward and update."""
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


def single_pass_loop(
    model: nn.Module,
    loss_of: Callable[[Any], Tensor],
    *,
    between: Nothing = no_change,
    optimizer: torch.optim.Optimizer | None = None,
) -> ptrain.Job:
    """Return a loop with one backward pass and one update per batch. Default optimizer: AdamW."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step(batch: Any) -> Tensor:
        loss = loss_of(batch)
        loss.backward()
        between(model)
        optimizer.step()
        model.zero_grad()
        return loss

    return ptrain.Job(model=model, step=step)


def square_loss_job(model: nn.Module) -> ptrain.Job:
    """Return the job with the mean square of the output as the loss, and SGD."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return single_pass_loop(model, lambda x: model(x).square().mean(), optimizer=optimizer)


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


def tensor_parallel(model: nn.Module) -> nn.Module:
    """Shard the head's 17 rows and the MLP's 24 over the ranks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    return _shard_operators(model, mesh)


def _shard_operators(model: nn.Module, mesh: Any) -> nn.Module:
    for block in model.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    head = ColwiseParallel(output_layouts=Replicate(), use_local_output=True)
    return parallelize_module(model, mesh, {"head": head})


def tensor_and_sequence_parallel(model: nn.Module) -> nn.Module:
    """Shard the operators, and run norms on sequence shards with torch's SequenceParallel."""
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
    _shard_operators(model, mesh["tp"])
    for block in model.blocks:
        fully_shard(block, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"])


def hsdp(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the plain module; `all_reduce_gradients` in the loop replaces a wrapper."""
    return model


WRAPPERS = {
    each.__name__: each
    for each in (
        ddp,
        fsdp2,
        fsdp1,
        fsdp1_flat,
        tensor_parallel,
        tensor_and_sequence_parallel,
        fsdp2_tp,
        hsdp,
        unwrapped,
    )
}
MICRO_BATCHES = 2


def all_reduce_gradients(model: nn.Module) -> None:
    """All-reduce the gradients as tutorials do."""
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def local_rows(way: str) -> Callable[[Tensor], Tensor] | None:
    """Return this rank's rows of a batch. Ranks along tp have the same rows."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if way in ("tensor_parallel", "tensor_and_sequence_parallel"):
        return None
    if way == "fsdp2_tp":
        rank, size = rank // 2, size // 2
    return lambda tokens: tokens.chunk(size)[rank]


def verify_loop(
    way: str, fault: str = "", dtype: torch.dtype = torch.float64, num_batches: int = 3
) -> LoopVerdict:
    """Verify a loop with the fault named `fault` (a function of own_faults, or none) against the
    correct loop on the plain module."""
    from tests.gloo import own_faults

    model = build_model(dtype)
    plain = copy.deepcopy(model)
    wrapped = WRAPPERS[way](model)
    between = all_reduce_gradients if way == "unwrapped" else no_change
    sound = loop(plain, micro_batches=MICRO_BATCHES)
    if fault:
        job, sound = own_faults.FAULTS[fault](wrapped, sound, between)
    else:
        job = loop(wrapped, micro_batches=MICRO_BATCHES, between=between)
    return ptrain.verify(sound, job, batches(num_batches), share=local_rows(way))


def summarize_verdict(
    way: str, fault: str = "", dtype: torch.dtype = torch.float64
) -> dict[str, Any]:
    """Return the fields of a verdict that tests read, as plain data."""
    verdict = verify_loop(way, fault, dtype)
    root_cause = verdict.root_cause
    return {
        "holds": verdict.holds,
        "text": str(verdict),
        "culprit": encode(root_cause),
        "failing": [check.name for check in verdict.checks if not check.holds],
    }


def gradients(model: nn.Module) -> Iterator[Tensor]:
    """Return the gradients as this rank stores them."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            gradient = parameter.grad
            yield gradient.to_local() if hasattr(gradient, "to_local") else gradient
