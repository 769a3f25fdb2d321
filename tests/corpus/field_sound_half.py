"""Unusual sound programs in bfloat16, or partly so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import ptrain
from tests.corpus.context import tokens_of_rank
from tests.corpus.experts import mixture, whole_mixture
from tests.corpus.fault import sound
from tests.corpus.field_axes import RingWriter
from tests.corpus.field_losses import masked_batches, masked_sum
from tests.corpus.field_sound_double import Loop, on_rows, plainly, same
from tests.corpus.parts import (
    FEATURES,
    VOCAB,
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
    total,
    writer,
)
from tests.corpus.pipeline import RegressorStage
from tests.corpus.precision import MasterWeights
from tests.corpus.tensor import SlicedRegressor, sgd

HALF = torch.bfloat16
RATE = 5e-3


def half_regressor() -> nn.Module:
    return regressor().to(HALF)


def half_rows() -> Tensor:
    return row_batches().to(HALF)


def half(loop: Loop, build: Any = half_regressor, wrap: Any = None, **options: Any) -> Any:
    """Compare loops over shares of rows, which compute in bfloat16."""
    options = {"batches": half_rows(), "terms": ptrain.Terms(dtype=HALF)} | options
    return on_rows(loop, build, wrap, **options)


def with_masters(model: nn.Module, **options: Any) -> ptrain.Job:
    return looped(model, optimizer=MasterWeights(model, lr=RATE), **options)


def mastered(model: nn.Module, is_parallel: bool) -> ptrain.Job:
    """Return a loop that averages gradients by hand and updates weights in float32."""
    reduce = (lambda: average(model.parameters())) if is_parallel else (lambda: None)
    return with_masters(model, before_update=reduce)


def cast_loss(model: nn.Module, rows: Tensor) -> Tensor:
    with torch.autocast("cpu", HALF):
        output = model(rows[:, :FEATURES])
    return F.mse_loss(output.float(), rows[:, FEATURES:])


def cast(model: nn.Module, _: bool) -> ptrain.Job:
    return looped(model, loss=cast_loss)


@sound("bfloat16: autocast around DDP, with the loss in float32")
def half_autocast() -> Any:
    return half(cast, regressor, batches=row_batches())


@sound("bfloat16: FSDP2 that casts weights to bfloat16, against a plain model under autocast")
def half_cast_by_fsdp() -> Any:
    policy = MixedPrecisionPolicy(
        param_dtype=HALF, reduce_dtype=torch.float32, output_dtype=torch.float32
    )

    def loop(model: nn.Module, is_parallel: bool) -> ptrain.Job:
        return looped(model, loss=regression_loss if is_parallel else cast_loss)

    def wrap(model: nn.Module) -> nn.Module:
        return fully_shard(model, mp_policy=policy)

    return half(loop, regressor, wrap, batches=row_batches())


@sound("bfloat16: DDP over a model in bfloat16 whose weights are updated in float32")
def half_masters_in_ddp() -> Any:
    return half(lambda model, _: with_masters(model))


def of_tensors() -> ptrain.Terms:
    return ptrain.Terms(mesh=axis("tp"), loss="same", dtype=HALF)


@sound("bfloat16: layers cut by columns and rows over tp, by hand")
def half_cut_layers() -> Any:
    return ptrain.verify(
        lambda: with_masters(half_regressor()),
        lambda: with_masters(SlicedRegressor().to(HALF)),
        half_rows(),
        terms=of_tensors(),
    )


@sound("bfloat16: the norm sees a slice of the rows; its gradients are summed over tp")
def half_norm_on_slices() -> Any:
    def job() -> ptrain.Job:
        model = SlicedRegressor(slices_rows=True).to(HALF)
        return with_masters(model, before_update=lambda: total(model.norm.parameters()))

    return ptrain.verify(
        lambda: with_masters(half_regressor()), job, half_rows(), terms=of_tensors()
    )


@sound("bfloat16: attention around a ring of ranks, with its backward by hand")
def half_ring() -> Any:
    def job() -> ptrain.Job:
        torch.manual_seed(0)
        model = RingWriter().to(HALF)

        def loss(called: nn.Module, batch: Any) -> Tensor:
            inputs, labels, first = batch
            return F.cross_entropy(called(inputs, first).float().flatten(0, 1), labels.flatten())

        return with_masters(model, loss=loss, before_update=lambda: average(model.parameters()))

    def plain_loss(model: nn.Module, tokens: Tensor) -> Tensor:
        logits = model(tokens[:, :-1]).float().flatten(0, 1)
        return F.cross_entropy(logits, tokens[:, 1:].flatten())

    return ptrain.verify(
        lambda: with_masters(writer().to(HALF), loss=plain_loss),
        job,
        token_batches(),
        share=tokens_of_rank,
        terms=ptrain.Terms(mesh=axis("cp"), dtype=HALF),
    )


@sound("bfloat16: two stages by hand, which send activations and gradients in bfloat16")
def half_stages() -> Any:
    def job() -> ptrain.Job:
        stage = RegressorStage().to(HALF)
        optimizer = MasterWeights(stage, lr=RATE)

        def step(rows: Tensor) -> Tensor:
            loss = torch.zeros(1, dtype=HALF)
            if rank() == 0:
                output = stage.first(rows)
                dist.send(output.detach(), dst=1)
                gradient = torch.empty_like(output)
                dist.recv(gradient, src=1)
                output.backward(gradient)
            else:
                received = torch.empty(stage.hidden_shape(rows), dtype=HALF)
                dist.recv(received, src=0)
                value = stage.loss(received.requires_grad_(True), rows)
                value.backward()
                dist.send(received.grad, dst=0)
                loss = value.detach().reshape(1)
            dist.broadcast(loss, src=1)
            optimizer.step()
            optimizer.zero_grad()
            return loss[0]

        return ptrain.Job(model=stage, step=step)

    return ptrain.verify(
        lambda: with_masters(half_regressor()),
        job,
        half_rows(),
        terms=ptrain.Terms(mesh=axis("pp"), loss="same", dtype=HALF),
    )


@sound("bfloat16: each rank has one of two experts, and the rows of all ranks")
def half_experts() -> Any:
    def job() -> ptrain.Job:
        model = mixture(capacity=99).to(HALF)

        def reduce() -> None:
            for name, parameter in model.named_parameters():
                if "experts" in name:
                    parameter.grad /= size()
                else:
                    average([parameter])

        return with_masters(model, before_update=reduce)

    return ptrain.verify(
        lambda: with_masters(whole_mixture().to(HALF)),
        job,
        row_batches(size=16).to(HALF),
        share=my_rows,
        terms=ptrain.Terms(mesh=axis("ep"), dtype=HALF),
    )


@sound("bfloat16: DDP reduces gradients of a float32 model in bfloat16, by a hook")
def half_compressed() -> Any:
    def hook(_, bucket):  # torch refuses annotations that are not evaluated
        low = (bucket.buffer() / size()).to(HALF)
        work = dist.all_reduce(low, async_op=True)
        return work.get_future().then(lambda future: future.value()[0].float())

    def wrap(model: nn.Module) -> nn.Module:
        wrapped = DistributedDataParallel(model)
        wrapped.register_comm_hook(None, hook)
        return wrapped

    return half(plainly, regressor, wrap, batches=row_batches())


@sound("bfloat16: gradients of two micro-batches are added up and reduced in float32")
def half_added_up_in_float32() -> Any:
    def loop(model: nn.Module, is_parallel: bool) -> ptrain.Job:
        optimizer = MasterWeights(model, lr=RATE)

        def step(rows: Tensor) -> Tensor:
            sums = [torch.zeros(p.shape) for p in model.parameters()]
            loss = torch.zeros(())
            for micro in rows.chunk(2):
                part = regression_loss(model, micro) / 2
                part.backward()
                loss += part.detach().float()
                for held, parameter in zip(sums, model.parameters(), strict=True):
                    held += parameter.grad.float()
                    parameter.grad = None
            for held, parameter in zip(sums, model.parameters(), strict=True):
                if is_parallel:
                    dist.all_reduce(held)
                    held /= size()
                parameter.grad = held.to(HALF)
            optimizer.step()
            optimizer.zero_grad()
            return loss

        return ptrain.Job(model=model, step=step)

    return half(loop, wrap=same)


class CompensatedSteps:
    """Descends in bfloat16, and keeps what each update lost by rounding for the next one."""

    def __init__(self, model: nn.Module) -> None:
        self.parameters = list(model.parameters())
        self.lost = [torch.zeros_like(p) for p in self.parameters]

    @torch.no_grad()
    def step(self) -> None:
        for parameter, lost in zip(self.parameters, self.lost, strict=True):
            change = -0.05 * parameter.grad - lost
            after = parameter + change
            lost.copy_((after - parameter) - change)
            parameter.copy_(after)

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None


@sound("bfloat16: updates in bfloat16 that are compensated for what rounding loses")
def half_compensated() -> Any:
    def loop(model: nn.Module, is_parallel: bool) -> ptrain.Job:
        reduce = (lambda: average(model.parameters())) if is_parallel else (lambda: None)
        return looped(model, optimizer=CompensatedSteps(model), before_update=reduce)

    return half(loop, wrap=same)


@sound("bfloat16: the loss is scaled by 256, and gradients back in float32")
def half_scaled_loss() -> Any:
    def loop(model: nn.Module, _: bool) -> ptrain.Job:
        optimizer = adamw(model)

        def step(rows: Tensor) -> Tensor:
            loss = cast_loss(model, rows)
            (loss * 256).backward()
            for parameter in model.parameters():
                parameter.grad /= 256
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return ptrain.Job(model=model, step=step)

    return half(loop, regressor, batches=row_batches())


@sound("bfloat16: FSDP2 over tied ends, under autocast")
def half_tied_ends() -> Any:
    def loop(model: nn.Module, _: bool) -> ptrain.Job:
        def loss(called: nn.Module, tokens: Tensor) -> Tensor:
            with torch.autocast("cpu", HALF):
                logits = called(tokens[:, :-1])
            return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())

        return looped(model, loss=loss)

    return half(loop, lambda: writer(is_tied=True), fully_shard, batches=token_batches())


@sound("bfloat16: a moving average in float32 of weights in bfloat16")
def half_average_in_float32() -> Any:
    def loop(model: nn.Module, is_parallel: bool) -> ptrain.Job:
        slow = {name: p.detach().float().clone() for name, p in model.named_parameters()}

        def follow() -> None:
            for name, parameter in model.named_parameters():
                slow[name].lerp_(parameter.detach().float(), 0.1)

        reduce = (lambda: average(model.parameters())) if is_parallel else (lambda: None)
        job = with_masters(model, before_update=reduce, after_update=follow)
        return ptrain.Job(model=model, step=job.step, average=slow)

    return half(loop, wrap=same)


@sound("bfloat16: gradients in bfloat16 are clipped by their norm in float32")
def half_clipped() -> Any:
    def loop(model: nn.Module, is_parallel: bool) -> ptrain.Job:
        def clip() -> None:
            if is_parallel:
                average(model.parameters())
            norm = torch.stack([p.grad.float().square().sum() for p in model.parameters()]).sum()
            for parameter in model.parameters():
                parameter.grad *= min(1.0, 0.5 / float(norm.sqrt()))

        return with_masters(model, before_update=clip)

    return half(loop, wrap=same)


class CheckpointedLayer(Regressor):
    """The regressor whose layer is run again in backward."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = checkpoint(lambda rows: F.gelu(self.up(self.norm(rows))), x, use_reentrant=False)
        return self.down(hidden)


def seeded(kind: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return kind()

    return build


@sound("bfloat16: a layer is run again in backward, under the same autocast")
def half_checkpointed() -> Any:
    return half(cast, seeded(CheckpointedLayer), batches=row_batches())


class NormInFloat32(Regressor):
    """A norm in float32 between layers in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.up.to(HALF)
        self.down.to(HALF)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(self.norm(x.float()).to(HALF))))


@sound("bfloat16: a norm in float32 between layers in bfloat16, in DDP")
def half_and_single() -> Any:
    return half(lambda model, _: with_masters(model), seeded(NormInFloat32))


@sound("bfloat16: logits in bfloat16, losses divided in float32 by the labels of all ranks")
def half_unequal_labels() -> Any:
    def loop(model: nn.Module, is_parallel: bool) -> ptrain.Job:
        def loss(called: nn.Module, batch: list[Tensor]) -> Tensor:
            inputs, labels = batch
            count = (labels >= 0).sum()
            if is_parallel:
                dist.all_reduce(count)
            with torch.autocast("cpu", HALF):
                whole = masked_sum(called, inputs, labels)
            return whole.float() / count * (size() if is_parallel else 1)

        return looped(model, loss=loss, optimizer=sgd(model))

    return half(
        loop, writer, batches=masked_batches(),
        share=lambda batch: [batch[0].split([1, 3])[rank()], batch[1].split([1, 3])[rank()]],
    )  # fmt: skip


@sound("bfloat16: a dictionary of soft targets in bfloat16, and a divergence in float32")
def half_soft_targets() -> Any:
    generator = torch.Generator().manual_seed(9)
    batches = [
        {
            "tokens": tokens[:, :-1],
            "wanted": torch.rand(4, 8, VOCAB, generator=generator).softmax(dim=-1).to(HALF),
        }
        for tokens in token_batches()
    ]

    def loop(model: nn.Module, _: bool) -> ptrain.Job:
        def loss(called: nn.Module, batch: dict[str, Tensor]) -> Tensor:
            with torch.autocast("cpu", HALF):
                logits = called(batch["tokens"])
            log_chances = logits.float().log_softmax(dim=-1)
            return -(batch["wanted"].float() * log_chances).sum(dim=-1).mean()

        return looped(model, loss=loss)

    return half(
        loop, writer, batches=batches,
        share=lambda batch: {name: my_rows(part) for name, part in batch.items()},
    )  # fmt: skip


@sound("bfloat16: autocast over shards within replicas, on four ranks", ranks=4)
def half_hybrid_shards() -> Any:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return half(cast, regressor, lambda model: fully_shard(model, mesh=mesh), batches=row_batches())
