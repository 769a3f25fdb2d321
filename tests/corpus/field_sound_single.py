"""Unusual sound programs in float32."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import ptrain
from tests.corpus.collectives import CopyToRanks, GatherParts, MeanOverRanks, SumOverRanks, own_part
from tests.corpus.fault import sound
from tests.corpus.field_gradients import bare_adapted
from tests.corpus.field_losses import SoftMixture, concentration
from tests.corpus.field_sound_double import Loop, by_hand, on_rows, plainly, same
from tests.corpus.parts import (
    FEATURES,
    LENGTH,
    Regressor,
    adamw,
    average,
    axis,
    looped,
    my_rows,
    rank,
    regression_loss,
    regressor,
    row_batches,
    size,
    token_batches,
    token_loss,
    total,
    writer,
)
from tests.corpus.pipeline import TiedStage, tied_bigram
from tests.corpus.pipeline import terms as of_stages
from tests.corpus.tensor import terms as of_tensors


def single(loop: Loop, build: Any = regressor, wrap: Any = None, **options: Any) -> Any:
    """Compare loops over shares of rows in float32."""
    options = {"batches": row_batches()} | options
    return on_rows(loop, build, wrap, **options)


@sound("float32: low-rank adapters beside frozen layers, in FSDP2")
def single_adapters() -> Any:
    def build() -> nn.Module:
        model = bare_adapted()
        model.attach()
        model.up.requires_grad_(False)
        model.norm.requires_grad_(False)
        return model

    def loop(model: nn.Module, _: bool) -> ptrain.Job:
        trained = [p for p in model.parameters() if p.requires_grad]
        return looped(model, optimizer=torch.optim.AdamW(trained, lr=1e-2))

    return single(loop, build, fully_shard)


def nested(model: nn.Module) -> nn.Module:
    fully_shard(model.up, reshard_after_forward=False)
    fully_shard(model.down, reshard_after_forward=True)
    return fully_shard(model, reshard_after_forward=False)


@sound("float32: FSDP2 in three units that reshard differently, reduced for each micro-batch")
def single_nested_units() -> Any:
    def loop(model: nn.Module, _: bool) -> ptrain.Job:
        optimizer = adamw(model)

        def step(rows: Tensor) -> Tensor:
            losses = [regression_loss(model, micro) / 2 for micro in rows.chunk(2)]
            for loss in losses:
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return sum(loss.detach() for loss in losses)

        return ptrain.Job(model=model, step=step)

    return single(loop, wrap=nested)


@sound("float32: FSDP2 that ignores the norm, whose gradients are averaged by hand")
def single_ignored_parameters() -> Any:
    def loop(model: nn.Module, is_parallel: bool) -> ptrain.Job:
        def reduce() -> None:
            if is_parallel:
                average(model.norm.parameters())

        return looped(model, before_update=reduce)

    def wrap(model: nn.Module) -> nn.Module:
        return fully_shard(model, ignored_params=set(model.norm.parameters()))

    return single(loop, wrap=wrap)


@sound("float32: shards within replicas, on four ranks", ranks=4)
def single_hybrid_shards() -> Any:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return single(plainly, wrap=lambda model: fully_shard(model, mesh=mesh))


@sound("float32: DDP with a hook that reduces a bucket in parts, and gathers them")
def single_hook_in_parts() -> Any:
    def hook(_, bucket):  # torch refuses annotations that are not evaluated
        flat = bucket.buffer()
        padded = F.pad(flat, (0, -flat.numel() % 2))
        part = torch.empty(padded.numel() // 2)
        dist.reduce_scatter(part, list(padded.chunk(2)))
        parts = [torch.empty_like(part) for _ in range(2)]
        dist.all_gather(parts, part / 2)
        future = torch.futures.Future()
        future.set_result(torch.cat(parts)[: flat.numel()])
        return future

    def wrap(model: nn.Module) -> nn.Module:
        wrapped = DistributedDataParallel(model, bucket_cap_mb=0.0002)
        wrapped.register_comm_hook(None, hook)
        return wrapped

    return single(plainly, wrap=wrap)


@sound("float32: hooks start an async all-reduce for each gradient; all are awaited")
def single_async_reduction() -> Any:
    def loop(model: nn.Module, is_parallel: bool) -> ptrain.Job:
        works: list[Any] = []

        def start(parameter: Tensor) -> None:
            parameter.grad /= size()
            works.append(dist.all_reduce(parameter.grad, async_op=True))

        for parameter in model.parameters() if is_parallel else ():
            parameter.register_post_accumulate_grad_hook(start)

        def wait() -> None:
            for work in works:
                work.wait()
            works.clear()

        return looped(model, before_update=wait)

    return single(loop, wrap=same)


@sound("float32: context parallelism in two slices a rank, zigzag, with keys gathered in order")
def single_zigzag() -> Any:
    order = torch.tensor([0, 3, 1, 2])  # the slices as the ranks have them, one after the other

    def slices(tokens: Tensor) -> Tensor:
        """Return this rank's two slices, one after the other."""
        parts = tokens.chunk(4, dim=1)
        return torch.cat([parts[rank()], parts[3 - rank()]], dim=1)

    def gather(own: Tensor) -> Tensor:
        parts = GatherParts.apply(own, 1).chunk(4, dim=1)
        return torch.cat([parts[int(place)] for place in order.argsort()], dim=1)

    def job() -> ptrain.Job:
        model = writer()

        def loss(called: nn.Module, batch: Any) -> Tensor:
            inputs, labels = batch
            places = slices(torch.arange(LENGTH)[None])[0]
            x = called.embed(inputs) + called.position(places)
            q, k, v = called.qkv(called.norm(x)).chunk(3, dim=-1)
            k, v = gather(k), gather(v)
            scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
            seen = places[:, None] >= torch.arange(LENGTH)
            x = x + called.proj(scores.masked_fill(~seen, -torch.inf).softmax(dim=-1) @ v)
            logits = called.head(x + called.mlp(x))
            return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

        return by_hand(model, True, loss=loss)

    return ptrain.verify(
        lambda: looped(writer(), loss=token_loss),
        job,
        token_batches(),
        share=lambda tokens: (slices(tokens[:, :-1]), slices(tokens[:, 1:])),
        terms=ptrain.Terms(mesh=axis("cp")),
    )


@sound("float32: DTensor's plans with sequence parallelism around the norm")
def single_plan_with_sequences() -> Any:
    def job() -> ptrain.Job:
        model = regressor()
        cut = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(0))
        plan = {
            "": cut,
            "norm": SequenceParallel(sequence_dim=0),
            "up": ColwiseParallel(input_layouts=Shard(0)),
            "down": RowwiseParallel(output_layouts=Replicate()),
        }
        parallelize_module(model, axis("tp"), plan)
        return looped(model)

    return ptrain.verify(
        lambda: looped(regressor()), job, row_batches(), terms=ptrain.Terms(loss="same")
    )


@sound("float32: a balancing loss of the loads of all ranks, which are differentiable means")
def single_global_balance() -> Any:
    def loop(model: nn.Module, is_parallel: bool) -> ptrain.Job:
        def loss(called: nn.Module, rows: Tensor) -> Tensor:
            output, weights = called(rows[:, :FEATURES])
            loads = weights.mean(dim=0)
            loads = MeanOverRanks.apply(loads) if is_parallel else loads
            return F.mse_loss(output, rows[:, FEATURES:]) + 2 * loads.square().sum()

        return looped(model, loss=loss)

    return single(loop, SoftMixture)


@sound("float32: the square of the logits' log-sum is a second term of the loss")
def single_log_sum_penalty() -> Any:
    def loop(model: nn.Module, _: bool) -> ptrain.Job:
        def loss(called: nn.Module, tokens: Tensor) -> Tensor:
            logits = called(tokens[:, :-1]).flatten(0, 1)
            penalty = logits.logsumexp(dim=-1).square().mean()
            return F.cross_entropy(logits, tokens[:, 1:].flatten()) + 0.01 * penalty

        return looped(model, loss=loss)

    return single(loop, writer, batches=token_batches())


class InnerNorm(Regressor):
    """The regressor with a norm over its hidden features, which tp may have cut."""

    def __init__(self, is_cut: bool) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.linspace(0.5, 1.5, 16))
        self.is_cut = is_cut
        if is_cut:
            for owner, name, dim in (
                (self.up, "weight", 0), (self.up, "bias", 0), (self.down, "weight", 1),
                (self, "gain", 0),
            ):  # fmt: skip
                setattr(owner, name, nn.Parameter(own_part(getattr(owner, name).data, dim)))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        hidden = self.up(CopyToRanks.apply(x) if self.is_cut else x)
        squares = hidden.square().sum(dim=-1, keepdim=True)
        if self.is_cut:
            squares = CopyToRanks.apply(SumOverRanks.apply(squares))
        hidden = hidden * (squares / 16 + 1e-6).rsqrt() * self.gain
        y = F.linear(F.gelu(hidden), self.down.weight)
        return (SumOverRanks.apply(y) if self.is_cut else y) + self.down.bias


@sound("float32: a norm over features that tp has cut, whose squares are summed over the ranks")
def single_norm_of_cut_features() -> Any:
    def loop(is_cut: bool) -> ptrain.Job:
        torch.manual_seed(0)
        return looped(InnerNorm(is_cut))

    return ptrain.verify(lambda: loop(False), lambda: loop(True), row_batches(), terms=of_tensors())


class RunningScale(Regressor):
    """Divides features by a running mean of their size over all rows, a buffer."""

    sums_ranks = False

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(FEATURES))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                seen = x.abs().mean(dim=0)
                if self.sums_ranks:
                    dist.all_reduce(seen)
                    seen /= size()
                self.scale.lerp_(seen, 0.2)
        return super().forward(x / self.scale)


@sound("float32: a buffer follows the size of all ranks' rows, and the forward pass reads it")
def single_running_scale() -> Any:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return RunningScale()

    def loop(model: nn.Module, is_parallel: bool) -> ptrain.Job:
        model.sums_ranks = is_parallel
        return by_hand(model, is_parallel)

    return single(loop, build, same)


@sound("float32: a teacher that follows the model gives a term of the loss")
def single_following_teacher() -> Any:
    def loop(model: nn.Module, is_parallel: bool) -> ptrain.Job:
        inner = model.module if is_parallel else model
        teacher = copy.deepcopy(inner).requires_grad_(False)

        def loss(called: nn.Module, rows: Tensor) -> Tensor:
            output, wanted = called(rows[:, :FEATURES]), teacher(rows[:, :FEATURES])
            return F.mse_loss(output, rows[:, FEATURES:]) + F.mse_loss(output, wanted)

        def follow() -> None:
            for slow, parameter in zip(teacher.parameters(), inner.parameters(), strict=True):
                slow.lerp_(parameter.detach(), 0.2)

        job = looped(model, loss=loss, after_update=follow)
        return ptrain.Job(model=model, step=job.step, average=dict(teacher.named_parameters()))

    return single(loop)


class Dropping(Regressor):
    """The regressor with dropout of its hidden features."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.dropout(F.gelu(self.up(self.norm(x))), 0.3, self.training))


@sound("float32: dropout, which each rank seeds by the step and by its rank")
def single_dropout() -> Any:
    def loop(model: nn.Module, is_parallel: bool) -> ptrain.Job:
        inner, done = looped(model), [0]

        def step(rows: Tensor) -> Any:
            torch.manual_seed(100 * done[0] + (rank() if is_parallel else 0))
            done[0] += 1
            return inner.step(rows)

        return ptrain.Job(model=model, step=step)

    def build() -> nn.Module:
        torch.manual_seed(0)
        return Dropping()

    return single(loop, build)


@sound("float32: two stages by hand that take turns on four micro-batches, with tied ends")
def single_taking_turns() -> Any:
    def job() -> ptrain.Job:
        stage = TiedStage()
        optimizer = adamw(stage)

        def step(tokens: Tensor) -> Tensor:
            loss = torch.zeros(1)
            for micro in tokens.chunk(4):
                if rank() == 0:
                    output = stage.first(micro)
                    dist.send(output.detach(), dst=1)
                    gradient = torch.empty_like(output)
                    dist.recv(gradient, src=1)
                    output.backward(gradient)
                else:
                    received = torch.empty(stage.hidden_shape(micro))
                    dist.recv(received, src=0)
                    received.requires_grad_(True)
                    value = stage.loss(received, micro) / 4
                    value.backward()
                    dist.send(received.grad, dst=0)
                    loss += value.detach()
            dist.broadcast(loss, src=1)
            total([stage.embed.weight])
            optimizer.step()
            optimizer.zero_grad()
            return loss[0]

        return ptrain.Job(model=stage, step=step)

    return ptrain.verify(
        lambda: looped(tied_bigram(), loss=token_loss), job, token_batches(), terms=of_stages()
    )


class Named(Regressor):
    """Takes and returns dictionaries."""

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Any]:  # type: ignore[override]
        hidden = F.gelu(self.up(self.norm(batch["features"])))
        return {"answer": {"value": self.down(hidden)}, "seen": len(hidden)}


@sound("float32: batches are dictionaries, and so is what the model returns")
def single_dictionaries() -> Any:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return Named()

    def loop(model: nn.Module, _: bool) -> ptrain.Job:
        def loss(called: nn.Module, batch: dict[str, Tensor]) -> Tensor:
            return F.l1_loss(called(batch)["answer"]["value"], batch["target"])

        return looped(model, loss=loss)

    batches = [
        {"features": rows[:, :FEATURES], "target": rows[:, FEATURES:]} for rows in row_batches()
    ]
    return single(
        loop, build, batches=batches,
        share=lambda batch: {name: my_rows(part) for name, part in batch.items()},
    )  # fmt: skip


@sound("float32: losses are sums, and gradients are divided by all rows before the update")
def single_divided_at_the_end() -> Any:
    def loop(model: nn.Module, is_parallel: bool) -> ptrain.Job:
        optimizer = adamw(model)

        def step(rows: Tensor) -> Tensor:
            seen = torch.zeros(2)
            for micro in rows.split([len(rows) - 1, 1]):
                loss = regression_loss(model, micro) * len(micro)
                loss.backward()
                seen += torch.stack([loss.detach(), torch.tensor(float(len(micro)))])
            if is_parallel:
                total(model.parameters())
                dist.all_reduce(seen)
            for parameter in model.parameters():
                parameter.grad /= seen[1]
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            return seen[0] / seen[1]

        return ptrain.Job(model=model, step=step)

    return single(loop, wrap=same, terms=ptrain.Terms(loss="same"))


@sound("float32: gradients go to one owner each, which updates and sends the parameter")
def single_owners() -> Any:
    def loop(model: nn.Module, is_parallel: bool) -> ptrain.Job:
        parameters = list(model.parameters())
        own = [p for n, p in enumerate(parameters) if not is_parallel or n % size() == rank()]
        optimizer = torch.optim.AdamW(own, lr=1e-2)

        def reduce() -> None:
            for number, parameter in enumerate(parameters if is_parallel else ()):
                parameter.grad /= size()
                dist.reduce(parameter.grad, dst=number % size())

        def send() -> None:
            for number, parameter in enumerate(parameters if is_parallel else ()):
                dist.broadcast(parameter.data, src=number % size())
            model.zero_grad()

        return looped(model, optimizer=optimizer, before_update=reduce, after_update=send)

    return single(loop, wrap=same)


@sound("float32: a layer is frozen until the fourth step")
def single_unfrozen_later() -> Any:
    def loop(model: nn.Module, is_parallel: bool) -> ptrain.Job:
        model.up.requires_grad_(False)
        inner, done = by_hand(model, is_parallel), [0]

        def step(rows: Tensor) -> Any:
            model.up.requires_grad_(done[0] >= 3)
            done[0] += 1
            return inner.step(rows)

        return ptrain.Job(model=model, step=step)

    return single(loop, wrap=same)


class CheckpointedMixture(SoftMixture):
    """The soft mixture, whose experts are run again in backward."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return checkpoint(super().forward, x, use_reentrant=True)


@sound("float32: all of a mixture is run again in backward, by reentrant checkpoints")
def single_reentrant_checkpoint() -> Any:
    def loss(model: nn.Module, rows: Tensor) -> Tensor:
        output, weights = model(rows[:, :FEATURES].clone().requires_grad_(True))
        return F.mse_loss(output, rows[:, FEATURES:]) + 0.1 * concentration(weights)

    return single(
        lambda model, parallel: by_hand(model, parallel, loss=loss), CheckpointedMixture, same
    )
