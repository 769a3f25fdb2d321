"""Failures reported in the field, and scripts for other wrappers, each with its fix. The loops do
not use ptrain; `verify` is called on them.

Every story is a function (fault: bool) -> LoopVerdict that runs on two ranks."""

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
from tests.gloo.context_loop import build_attentive, gather_over_context
from tests.gloo.expert_loop import balance_loss, build_routed, expert_parameters, shard_experts
from tests.gloo.own_loops import batches, build_model, mean_loss, single_pass_loop
from tests.gloo.sequence_parallel import SequenceParallelNet

MASKED = -100  # cross_entropy's own mark of a target that does not count
MICRO = 2  # micro-batches of a rank
WEIGHT = 0.1  # of the loss that balances experts

Balance = Callable[[Tensor, Tensor], Tensor]  # (scores [tokens, experts], counts [experts])


def masked_batches() -> list[dict[str, Tensor]]:
    """Return token batches [8, 9]; only the last few targets of sample i count (prompts of
    different lengths)."""
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


def count_targets(batch: dict[str, Tensor]) -> int:
    return int((batch["labels"] != MASKED).sum())


def accumulation(fault: bool) -> LoopVerdict:
    """Fine-tune with masked prompts under DDP with gradient accumulation.

    The fault: each micro-batch's loss is the mean over its local tokens, and these means are
    averaged (transformers#34191, mlx-lm#1413, prime-rl#583). The fix divides sums by the token
    count of the global batch."""
    plain = build_model()
    model = DistributedDataParallel(copy.deepcopy(plain))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rank, size = dist.get_rank(), dist.get_world_size()

    def step(batch: dict[str, Tensor]) -> float:
        tokens = torch.tensor(count_targets(batch))
        dist.all_reduce(tokens)
        total, per_micro = 0.0, len(batch["tokens"]) // MICRO
        for k in range(MICRO):
            micro = rows(batch, slice(k * per_micro, (k + 1) * per_micro))
            if fault:
                loss = masked_sum(model, micro) / count_targets(micro) / MICRO
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
    return single_pass_loop(model, lambda batch: masked_sum(model, batch) / count_targets(batch))


def single_device_job(model: nn.Module, clip: float | None = None) -> ptrain.Job:
    """Return the reference job on the full batch."""

    def clipped(model: nn.Module) -> None:
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)

    return single_pass_loop(model, partial(mean_loss, model), between=clipped)


def sequence_parallelism(fault: bool) -> LoopVerdict:
    """Train with hand-written tensor parallelism and norms on sequence shards.

    A norm's weights are replicated, and each rank computes their gradient from its local shard. The
    fault: these gradients are not summed (Megatron-LM#1446, NeMo-RL#3716). The fix is one
    all-reduce over tp after backward."""
    plain = build_model()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    model = SequenceParallelNet(plain, mesh.get_group("tp"))

    def add_up(model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            is_norm = "norm" in name
            if name.endswith("down.bias") or (is_norm and not fault):
                dist.all_reduce(parameter.grad, group=mesh.get_group("tp"))

    job = single_pass_loop(model, partial(mean_loss, model), between=add_up)
    return ptrain.verify(single_device_job(plain), job, batches(), terms=ptrain.Terms(mesh=mesh))


def _sharded(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _fsdp2(fault: str) -> LoopVerdict:
    """Return an FSDP2 loop as in the tutorial: one unit per block, accumulation without
    synchronization, torch's clip_grad_norm_ on DTensors."""
    plain = build_model()
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
        elif fault != "twice":  # a twice divided norm is below the clip limit
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        model.zero_grad()
        return total

    reference = single_device_job(plain, None if fault == "twice" else clip)
    return ptrain.verify(
        reference, ptrain.Job(model=model, step=step), batches(),
        share=lambda tokens: tokens.chunk(size)[rank],
    )  # fmt: skip


def fsdp2_clip(fault: bool) -> LoopVerdict:
    """Train with a hand-written FSDP2 loop. The fault: it clips by the norm of the local shard
    (pytorch#72548, LoongForge#152)."""
    return _fsdp2("clip" if fault else "")


def fsdp2_twice(fault: bool) -> LoopVerdict:
    """Train with the same FSDP2 loop. The fault: gradients that FSDP2 has averaged are divided by
    the number of ranks again, as a DDP loop by hand requires."""
    return _fsdp2("twice" if fault else "")


def fsdp2_optimizer(fault: bool) -> LoopVerdict:
    """Train with the same FSDP2 loop. The fault: the optimizer is created before fully_shard and
    keeps the replaced tensors (dlrover#584, accelerate#3209). It trains nothing, without an
    error."""
    return _fsdp2("optimizer" if fault else "")


def accelerated(fault: bool) -> LoopVerdict:
    """Train with a plain accelerate script. The fault: it divides the loss by the number of
    micro-batches, which `accelerator.backward` has done already."""
    from accelerate import Accelerator

    plain, micro_batches = build_model(), 4
    with AccelerateEnvironment():
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
        single_device_job(plain), ptrain.Job(model=model, step=step), batches(),
        share=lambda tokens: tokens.chunk(accelerator.num_processes)[accelerator.process_index],
    )  # fmt: skip


def gathered_context(fault: bool) -> LoopVerdict:
    """Train with hand-written context parallelism: torch.distributed.nn.functional.all_gather
    gathers keys and values, and gradients are summed over cp.

    The fault is in torch: on gloo its backward pass assumes contiguous gradients, but fused
    attention returns gradients with the strides of its operands, tokens before heads. No error is
    raised, and the loss is right. The fix makes the gradients contiguous."""
    plain = build_attentive()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    model = gather_over_context(plain, is_contiguous=not fault)

    def loss_of(tokens: Tensor) -> Tensor:
        inputs, targets = (each.chunk(mesh.size(), 1)[mesh.get_local_rank()] for each in
                           (tokens[:, :-1], tokens[:, 1:]))  # fmt: skip
        logits = model(inputs).flatten(0, 1)
        total = F.cross_entropy(logits, targets.flatten(), reduction="sum")
        return total / tokens[:, 1:].numel()

    def add_up(model: nn.Module) -> None:
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, group=mesh.get_group("cp"))

    job = single_pass_loop(model, loss_of, between=add_up)
    terms = ptrain.Terms(mesh=mesh, loss="sum")
    return ptrain.verify(single_device_job(plain), job, batches(), terms=terms)


def _experts(between: Callable[[nn.Module], None], balance: Balance | None = None) -> LoopVerdict:
    """Return a loop in which each rank has half of the experts and half of the samples, and other
    gradients are averaged as in DDP. `balance` is the loss of each layer's router over the
    ranks."""
    plain = build_routed()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))
    model, size = shard_experts(plain, mesh), mesh.size()

    def average(model: nn.Module) -> None:
        own = {id(parameter) for parameter in expert_parameters(model)}
        for parameter in model.parameters():
            if id(parameter) not in own:
                dist.all_reduce(parameter.grad)
                parameter.grad /= size
        between(model)

    def of_one(tokens: Tensor) -> Tensor:
        loss = mean_loss(plain, tokens)
        return loss + _balanced(plain, balance_loss) if balance else loss

    def of_rank(tokens: Tensor) -> Tensor:
        loss = mean_loss(model, tokens)
        return loss + _balanced(model, balance) if balance else loss

    return ptrain.verify(
        single_pass_loop(plain, of_one),
        single_pass_loop(model, of_rank, between=average),
        batches(),
        share=lambda tokens: tokens.chunk(size)[mesh.get_local_rank()],
        terms=ptrain.Terms(mesh=mesh),
    )  # fmt: skip


def _balanced(model: nn.Module, balance: Balance) -> Tensor:
    return WEIGHT * sum(balance(block.shares, block.counts) for block in model.blocks)


def _divide_expert_gradients(model: nn.Module) -> None:
    """Divide expert gradients by the number of ranks: each rank's loss is the mean over its local
    tokens, but an expert has seen the tokens of all ranks."""
    for parameter in expert_parameters(model):
        parameter.grad /= dist.get_world_size()


def experts_averaged(fault: bool) -> LoopVerdict:
    """Train with hand-written expert parallelism and gradients averaged over the data ranks.

    The fault: expert gradients already include the tokens of all ranks and are averaged over the
    ranks that have the same experts, of which there is one (pytorch#160285, Megatron-LM#5956). The
    fix divides them by the number of ranks that sent tokens."""
    return _experts((lambda _: None) if fault else _divide_expert_gradients)


def balance_per_rank(fault: bool) -> LoopVerdict:
    """Train the same loop with a load-balancing loss. The fault: each rank balances its local
    tokens (Megatron-LM#3768, #1652). The fix counts the tokens of all ranks and averages the scores
    like the gradients."""

    def balance(shares: Tensor, counts: Tensor) -> Tensor:
        return balance_loss(shares, counts if fault else _of_all(counts))

    return _experts(_divide_expert_gradients, balance)


def counts_overwritten(fault: bool) -> LoopVerdict:
    """Train the same loop with a loss weighted by the local token count. The fault: the counts were
    all-reduced in place, so the weight is the count of all ranks and the router's gradient is too
    large by that factor (Megatron-LM#7452). The fix reduces a copy."""

    def balance(shares: Tensor, counts: Tensor) -> Tensor:
        everyone = _of_all(counts)
        if fault:
            counts.copy_(everyone)
        own = counts.sum() * dist.get_world_size() / everyone.sum()
        return balance_loss(shares, everyone) * own

    return _experts(_divide_expert_gradients, balance)


def _of_all(counts: Tensor) -> Tensor:
    everyone = counts.clone()
    dist.all_reduce(everyone)
    return everyone


class AccelerateEnvironment:
    """A context that sets the launcher's environment variables for accelerate and resets its
    state."""

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


def run_story(name: str, fault: bool) -> dict[str, Any]:
    """Run a story on this rank and return the verdict as plain data."""
    verdict = STORIES[name](fault)
    return {
        "holds": verdict.holds,
        "text": str(verdict),
        "culprit": encode(verdict.root_cause),
    }
