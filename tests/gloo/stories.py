"""Failures that were reported in the field, and scripts on somebody else's wrapping, each with the
fix beside it. Nothing of ptrain is in a loop; `verify` is called around it.

Every story is a function (fault: bool) -> LoopVerdict, run on two ranks.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import ptrain
from ptrain.codec import encode
from ptrain.verification.jobs.job import LoopVerdict
from tests.gloo.context_loop import attentive, over_context
from tests.gloo.expert_loop import of_experts, over_experts, routed, unevenness
from tests.gloo.own_loops import batches, built, mean_loss, whole_batch
from tests.gloo.sequence_parallel import SequenceParallelNet

MASKED = -100  # cross_entropy's own mark of a target that does not count
MICRO = 2  # micro-batches of a rank
WEIGHT = 0.1  # of the loss that balances experts

Balance = Callable[[Tensor, Tensor], Tensor]  # (scores [tokens, experts], counts [experts])


def masked_batches() -> list[dict[str, Tensor]]:
    """Tokens [8, 9]; of sample i only the last few targets count (a prompt of its own length)."""
    found = []
    for tokens in batches():
        labels = tokens[:, 1:].clone()
        for row, counted in enumerate((8, 1, 2, 7, 1, 3, 8, 2)):
            labels[row, : labels.size(1) - counted] = MASKED
        found.append({"tokens": tokens[:, :-1], "labels": labels})
    return found


def rows(batch: dict[str, Tensor], chosen: slice) -> dict[str, Tensor]:
    return {name: tensor[chosen] for name, tensor in batch.items()}


def masked_sum(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = model(batch["tokens"]).flatten(0, 1)
    return F.cross_entropy(logits, batch["labels"].flatten(), reduction="sum")


def counted(batch: dict[str, Tensor]) -> int:
    return int((batch["labels"] != MASKED).sum())


def accumulation(fault: bool) -> LoopVerdict:
    """Fine-tuning with masked prompts under DDP and accumulation. The fault: every micro-batch's
    loss is the mean over its own tokens, and these means are averaged
    (transformers#34191, mlx-lm#1413, prime-rl#583). The fix divides sums by the tokens of the
    whole global batch."""
    plain = built()
    model = DistributedDataParallel(copy.deepcopy(plain))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rank, size = dist.get_rank(), dist.get_world_size()

    def step(batch: dict[str, Tensor]) -> float:
        tokens = torch.tensor(counted(batch))
        dist.all_reduce(tokens)
        total, per_micro = 0.0, len(batch["tokens"]) // MICRO
        for k in range(MICRO):
            micro = rows(batch, slice(k * per_micro, (k + 1) * per_micro))
            if fault:
                loss = masked_sum(model, micro) / counted(micro) / MICRO
            else:
                loss = masked_sum(model, micro) * size / int(tokens)  # DDP divides by size
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        return total

    def share(batch: dict[str, Tensor]) -> dict[str, Tensor]:
        per_rank = len(batch["tokens"]) // size
        return rows(batch, slice(rank * per_rank, (rank + 1) * per_rank))

    return ptrain.verify(
        _masked_on_one_device(plain), ptrain.Job(model=model, step=step), masked_batches(),
        share=share,
    )  # fmt: skip


def _masked_on_one_device(model: nn.Module) -> ptrain.Job:
    return whole_batch(model, lambda batch: masked_sum(model, batch) / counted(batch))


def on_one_device(model: nn.Module, clip: float | None = None) -> ptrain.Job:
    """The whole batch at once."""

    def clipped(model: nn.Module) -> None:
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)

    return whole_batch(model, partial(mean_loss, model), between=clipped)


def sequence_parallelism(fault: bool) -> LoopVerdict:
    """Tensor parallelism by hand, with norms on pieces of the sequence. A norm's weights are the
    same on all ranks, and each rank's gradient of them comes from its own piece. The fault: nobody
    adds these up (Megatron-LM#1446, NeMo-RL#3716). The fix is one all-reduce over tp after
    backward."""
    plain = built()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    model = SequenceParallelNet(plain, mesh.get_group("tp"))

    def add_up(model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            is_norm = "norm" in name
            if name.endswith("down.bias") or (is_norm and not fault):
                dist.all_reduce(parameter.grad, group=mesh.get_group("tp"))

    job = whole_batch(model, partial(mean_loss, model), between=add_up)
    return ptrain.verify(on_one_device(plain), job, batches(), terms=ptrain.Terms(mesh=mesh))


def _sharded(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _fsdp2(fault: str) -> LoopVerdict:
    """FSDP2 as its tutorial has it: units per block, accumulation without synchronisation, torch's
    clip_grad_norm_ over DTensors."""
    plain = built()
    model = copy.deepcopy(plain)
    early = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model = _sharded(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    optimizer = early if fault == "optimizer" else optimizer
    rank, size, clip = dist.get_rank(), dist.get_world_size(), 0.05

    def step(tokens: Tensor) -> float:
        total = 0.0
        for k, micro in enumerate(tokens.chunk(MICRO)):
            model.set_requires_gradient_sync(k == MICRO - 1)
            loss = mean_loss(model, micro) / MICRO
            loss.backward()
            total += loss.item()
        if fault == "twice":
            for parameter in model.parameters():
                parameter.grad /= size
        if fault == "clip":
            local = [parameter.grad.to_local() for parameter in model.parameters()]
            norm = torch.linalg.vector_norm(torch.cat([each.flatten() for each in local]))
            for each in local:
                each *= min(1.0, clip / float(norm))
        elif fault != "twice":  # what was divided twice is below the clip
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        model.zero_grad()
        return total

    reference = on_one_device(plain, None if fault == "twice" else clip)
    return ptrain.verify(
        reference, ptrain.Job(model=model, step=step), batches(),
        share=lambda tokens: tokens.chunk(size)[rank],
    )  # fmt: skip


def fsdp2_clip(fault: bool) -> LoopVerdict:
    """A hand-written FSDP2 loop. The fault: it clips by the norm of the shard that a rank has
    (pytorch#72548, LoongForge#152)."""
    return _fsdp2("clip" if fault else "")


def fsdp2_twice(fault: bool) -> LoopVerdict:
    """The same loop. The fault: gradients that FSDP2 has averaged are divided by the number of
    ranks again, as DDP by hand needs it."""
    return _fsdp2("twice" if fault else "")


def fsdp2_optimizer(fault: bool) -> LoopVerdict:
    """The same loop. The fault: the optimizer is made before fully_shard, and keeps the tensors
    that the shards have replaced (dlrover#584, accelerate#3209): it trains nothing, and no error
    says so."""
    return _fsdp2("optimizer" if fault else "")


def accelerated(fault: bool) -> LoopVerdict:
    """A plain accelerate script. The fault: it divides the loss by the number of micro-batches, as
    one does by hand; `accelerator.backward` has done that already."""
    from accelerate import Accelerator

    plain, micro_batches = built(), 4
    with AsLaunched():
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=micro_batches)
    bare = copy.deepcopy(plain)
    model, optimizer = accelerator.prepare(bare, torch.optim.AdamW(bare.parameters(), lr=1e-2))

    def step(tokens: Tensor) -> float:
        total = 0.0
        for micro in tokens.chunk(micro_batches):
            with accelerator.accumulate(model):
                loss = mean_loss(model, micro)
                accelerator.backward(loss / micro_batches if fault else loss)
                optimizer.step()
                optimizer.zero_grad()
            total += loss.item() / micro_batches
        return total

    return ptrain.verify(
        on_one_device(plain), ptrain.Job(model=model, step=step), batches(),
        share=lambda tokens: tokens.chunk(accelerator.num_processes)[accelerator.process_index],
    )  # fmt: skip


def gathered_context(fault: bool) -> LoopVerdict:
    """Context parallelism by hand: keys and values are gathered by
    torch.distributed.nn.functional.all_gather, gradients summed over cp. The fault is torch's: on
    gloo its backward pass takes gradients for contiguous, and those of fused attention have the
    strides of its operands, tokens in front of heads. No error says so, and the loss is right. The
    fix makes them contiguous."""
    plain = attentive()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    model = over_context(plain, is_contiguous=not fault)

    def loss_of(tokens: Tensor) -> Tensor:
        inputs, targets = (each.chunk(mesh.size(), 1)[mesh.get_local_rank()] for each in
                           (tokens[:, :-1], tokens[:, 1:]))  # fmt: skip
        logits = model(inputs).flatten(0, 1)
        total = F.cross_entropy(logits, targets.flatten(), reduction="sum")
        return total / tokens[:, 1:].numel()

    def add_up(model: nn.Module) -> None:
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, group=mesh.get_group("cp"))

    job = whole_batch(model, loss_of, between=add_up)
    terms = ptrain.Terms(mesh=mesh, loss="sum")
    return ptrain.verify(on_one_device(plain), job, batches(), terms=terms)


def _experts(between: Callable[[nn.Module], None], balance: Balance | None = None) -> LoopVerdict:
    """A rank has half of the experts and half of the samples; gradients of all else are averaged,
    as DDP does it. `balance`: the loss of each layer's router over the ranks."""
    plain = routed()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))
    model, size = over_experts(plain, mesh), mesh.size()

    def average(model: nn.Module) -> None:
        own = {id(parameter) for parameter in of_experts(model)}
        for parameter in model.parameters():
            if id(parameter) not in own:
                dist.all_reduce(parameter.grad)
                parameter.grad /= size
        between(model)

    def of_one(tokens: Tensor) -> Tensor:
        loss = mean_loss(plain, tokens)
        return loss + _balanced(plain, unevenness) if balance else loss

    def of_rank(tokens: Tensor) -> Tensor:
        loss = mean_loss(model, tokens)
        return loss + _balanced(model, balance) if balance else loss

    return ptrain.verify(
        whole_batch(plain, of_one), whole_batch(model, of_rank, between=average), batches(),
        share=lambda tokens: tokens.chunk(size)[mesh.get_local_rank()],
        terms=ptrain.Terms(mesh=mesh),
    )  # fmt: skip


def _balanced(model: nn.Module, balance: Balance) -> Tensor:
    return WEIGHT * sum(balance(block.shares, block.counts) for block in model.blocks)


def _divided(model: nn.Module) -> None:
    """Each rank's loss is the mean of its own tokens, and an expert has seen those of all ranks."""
    for parameter in of_experts(model):
        parameter.grad /= dist.get_world_size()


def experts_averaged(fault: bool) -> LoopVerdict:
    """Expert parallelism by hand, gradients averaged over the data ranks. The fault: those of
    experts have seen the tokens of all ranks already, and are averaged over the ranks that have
    the same experts, of which there is one (pytorch#160285, Megatron-LM#5956). The fix divides
    them by the ranks that sent tokens."""
    return _experts((lambda _: None) if fault else _divided)


def balance_per_rank(fault: bool) -> LoopVerdict:
    """The same with a loss that balances the experts. The fault: each rank balances its own tokens
    (Megatron-LM#3768, #1652). The fix counts those of all ranks; the scores are averaged as the
    gradients are."""

    def balance(shares: Tensor, counts: Tensor) -> Tensor:
        return unevenness(shares, counts if fault else _of_all(counts))

    return _experts(_divided, balance)


def counts_overwritten(fault: bool) -> LoopVerdict:
    """The same; a rank's part of the loss counts by its own tokens, which it takes from the counts.
    The fault: these were all-reduced in place, so that the number is that of all ranks and the
    router's gradient of it as many times too large (Megatron-LM#7452). The fix reduces a copy."""

    def balance(shares: Tensor, counts: Tensor) -> Tensor:
        everyone = _of_all(counts)
        if fault:
            counts.copy_(everyone)
        own = counts.sum() * dist.get_world_size() / everyone.sum()
        return unevenness(shares, everyone) * own

    return _experts(_divided, balance)


def _of_all(counts: Tensor) -> Tensor:
    everyone = counts.clone()
    dist.all_reduce(everyone)
    return everyone


class AsLaunched:
    """What a launcher tells accelerate through the environment, and none of its own state of
    before."""

    def __enter__(self) -> None:
        from accelerate.state import AcceleratorState, GradientState, PartialState

        for state in (AcceleratorState, GradientState, PartialState):
            state._shared_state.clear()
        rank, size = str(dist.get_rank()), str(dist.get_world_size())
        self.before = dict(os.environ)
        os.environ |= {
            "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size,
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29531",
        }  # fmt: skip

    def __exit__(self, *error: object) -> None:
        for name in set(os.environ) - set(self.before):
            del os.environ[name]


Story = Callable[[bool], LoopVerdict]
STORIES: dict[str, Story] = {
    each.__name__: each
    for each in (
        accumulation,
        sequence_parallelism,
        fsdp2_clip,
        fsdp2_twice,
        fsdp2_optimizer,
        accelerated,
        gathered_context,
        experts_averaged,
        balance_per_rank,
        counts_overwritten,
    )
}


def told(name: str, fault: bool) -> dict[str, Any]:
    """On a rank of a pool: the verdict as plain data."""
    verdict = STORIES[name](fault)
    return {
        "holds": verdict.holds,
        "text": str(verdict),
        "culprit": encode(verdict.root_cause),
    }
