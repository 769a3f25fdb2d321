"""Sound programs whose batches, losses or reductions are unusual."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import ptrain
from tests.corpus.ddp import masked_loss, standardised, stepped
from tests.corpus.fault import sound
from tests.corpus.fsdp2 import sharded
from tests.corpus.parts import (
    adamw,
    average,
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


def ddp(model: nn.Module | None = None, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(model or regressor(), **options)


def held(job: Any, *, share: Any = my_rows, batches: Any = None, **terms: Any) -> Any:
    return ptrain.verify(
        lambda: looped(regressor()),
        job,
        row_batches() if batches is None else batches,
        share=share,
        terms=ptrain.Terms(**terms) if terms else None,
    )


@sound("gradients are zeroed in place, and are views of DDP's buckets")
def zeroed_in_bucket_views() -> Any:
    def job() -> ptrain.Job:
        model = ddp(gradient_as_bucket_view=True)
        optimizer = adamw(model)

        def step(rows: Tensor) -> Tensor:
            optimizer.zero_grad(set_to_none=False)
            loss = regression_loss(model, rows)
            loss.backward()
            optimizer.step()
            return loss.detach()

        return ptrain.Job(model=model, step=step)

    return held(job)


@sound("four micro-batches, all but the last within no_sync")
def accumulated_without_sync() -> Any:
    def job() -> ptrain.Job:
        model = ddp()

        def forward_backward(rows: Tensor) -> Tensor:
            losses = []
            for number, micro in enumerate(rows.chunk(4)):
                with nullcontext() if number == 3 else model.no_sync():
                    losses.append(regression_loss(model, micro))
                    (losses[-1] / 4).backward()
            return torch.stack(losses).mean().detach()

        return stepped(model, forward_backward)

    return held(job)


@sound("micro-batches of three rows and of one, weighted by their rows")
def micro_batches_of_unequal_size() -> Any:
    def job() -> ptrain.Job:
        model = ddp()

        def forward_backward(rows: Tensor) -> Tensor:
            loss = torch.zeros(())
            for micro in rows.split(3):
                part = regression_loss(model, micro) * len(micro) / len(rows)
                part.backward()
                loss += part.detach()
            return loss

        return stepped(model, forward_backward)

    return held(job)


@sound("rank 0 has five rows and rank 1 three; the loss is divided by all eight")
def uneven_shares() -> Any:
    def job() -> ptrain.Job:
        model = regressor()

        def loss(called: nn.Module, rows: Tensor) -> Tensor:
            return regression_loss(called, rows) * len(rows) / 8

        return looped(model, loss=loss, before_update=lambda: total(model.parameters()))

    return held(job, share=lambda rows: rows[:5] if rank() == 0 else rows[5:], loss="sum")


@sound("padding is masked, and losses are divided by the number of tokens of all ranks")
def padding_by_the_global_count() -> Any:
    batches = token_batches()
    batches[:, 2:, 4:] = 0

    def job() -> ptrain.Job:
        model = ddp(writer())

        def loss(called: nn.Module, tokens: Tensor) -> Tensor:
            count = (tokens[:, 1:] != 0).sum().float()
            dist.all_reduce(count)
            return masked_loss(called, tokens, count / size())

        return looped(model, loss=loss)

    return ptrain.verify(lambda: looped(writer(), loss=masked_loss), job, batches, share=my_rows)


@sound("a rank's rows are every second one")
def interleaved_rows() -> Any:
    return held(lambda: looped(ddp()), share=lambda rows: rows[rank() :: size()])


@sound("rank 0 has the last rows and rank 1 the first")
def rows_in_reverse() -> Any:
    return held(lambda: looped(ddp()), share=lambda rows: rows.chunk(size())[1 - rank()])


@sound("the step returns a number of Python")
def loss_is_a_number() -> Any:
    def job() -> ptrain.Job:
        inner = looped(ddp())
        return ptrain.Job(model=inner.model, step=lambda rows: inner.step(rows).item())

    return held(job)


@sound("every rank reports the mean loss of all ranks")
def loss_already_reduced() -> Any:
    def job() -> ptrain.Job:
        inner = looped(ddp())

        def step(rows: Tensor) -> Tensor:
            loss = inner.step(rows).reshape(1)
            dist.all_reduce(loss)
            return loss[0] / size()

        return ptrain.Job(model=inner.model, step=step)

    return held(job, loss="same")


@sound("statistics of the batch are those of all ranks, by collectives in forward")
def statistics_over_ranks() -> Any:
    return ptrain.verify(
        lambda: looped(standardised(False)),
        lambda: looped(ddp(standardised(True))),
        row_batches(),
        share=my_rows,
    )


@sound("DDP with a communication hook that divides before it sums")
def communication_hook() -> Any:
    def hook(_, bucket):  # torch refuses annotations that are not evaluated
        future = dist.all_reduce(bucket.buffer().div_(size()), async_op=True).get_future()
        return future.then(lambda done: done.value()[0])

    def job() -> ptrain.Job:
        model = ddp()
        model.register_comm_hook(None, hook)
        return looped(model)

    return held(job)


@sound("DDP with a static graph and a bucket for each parameter")
def static_graph_and_small_buckets() -> Any:
    return held(lambda: looped(ddp(static_graph=True, bucket_cap_mb=1e-5)))


@sound("bf16 gradients are reduced in fp32")
def reduced_in_fp32() -> Any:
    def low(is_parallel: bool) -> ptrain.Job:
        model = regressor().bfloat16()

        def reduce() -> None:
            for parameter in model.parameters() if is_parallel else ():
                whole = parameter.grad.float()
                dist.all_reduce(whole)
                parameter.grad = (whole / size()).bfloat16()

        return looped(model, before_update=reduce)

    return ptrain.verify(
        lambda: low(False),
        lambda: low(True),
        row_batches().bfloat16(),
        share=my_rows,
        terms=ptrain.Terms(dtype=torch.bfloat16),
    )


@sound("losses are scaled by 1024, and gradients back before the update")
def loss_scale_undone() -> Any:
    def job() -> ptrain.Job:
        model = ddp()

        def unscale() -> None:
            for parameter in model.parameters():
                parameter.grad /= 1024

        inner = looped(
            model,
            loss=lambda called, rows: regression_loss(called, rows) * 1024,
            before_update=unscale,
        )
        return ptrain.Job(model=model, step=lambda rows: inner.step(rows) / 1024)

    return held(job)


@sound("FSDP2 that keeps its parameters gathered, clipped by torch")
def sharded_and_clipped() -> Any:
    def clipped(model: nn.Module) -> ptrain.Job:
        return looped(
            model,
            before_update=lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3),
        )

    return ptrain.verify(
        lambda: clipped(regressor()),
        lambda: clipped(sharded(reshard_after_forward=False)),
        row_batches(),
        share=my_rows,
    )


@sound("FSDP2 that reduces the last of two micro-batches only")
def sharded_and_accumulated() -> Any:
    def job() -> ptrain.Job:
        model = sharded()

        def forward_backward(rows: Tensor) -> Tensor:
            losses = []
            for number, micro in enumerate(rows.chunk(2)):
                model.set_requires_gradient_sync(number == 1)
                losses.append(regression_loss(model, micro))
                (losses[-1] / 2).backward()
            return torch.stack(losses).mean().detach()

        return stepped(model, forward_backward)

    return held(job)


@sound("two documents in a sample, of which neither sees the other")
def packed_documents() -> Any:
    def packed_loss(model: nn.Module, tokens: Tensor) -> Tensor:
        halves = torch.cat([tokens[:, :5], tokens[:, 4:]])  # each document as a row of its own
        return token_loss(model, halves)

    return ptrain.verify(
        lambda: looped(writer(), loss=packed_loss),
        lambda: looped(fully_shard(writer()), loss=packed_loss),
        token_batches(),
        share=my_rows,
    )


@sound("cross entropy with smoothed labels")
def smoothed_labels() -> Any:
    def smoothed(model: nn.Module, tokens: Tensor) -> Tensor:
        logits = model(tokens[:, :-1]).flatten(0, 1)
        return F.cross_entropy(logits, tokens[:, 1:].flatten(), label_smoothing=0.1)

    return ptrain.verify(
        lambda: looped(writer(), loss=smoothed),
        lambda: looped(ddp(writer()), loss=smoothed),
        token_batches(),
        share=my_rows,
    )


@sound("the model is evaluated between steps, in eval mode")
def evaluated_between_steps() -> Any:
    def job() -> ptrain.Job:
        model = ddp()

        @torch.no_grad()
        def evaluate() -> None:
            model.eval()
            model.module(torch.ones(3, 8))
            model.train()

        return looped(model, after_update=evaluate)

    return held(job)


@sound("all in float64, reduced in one flat buffer")
def flat_buffer_in_float64() -> Any:
    def job() -> ptrain.Job:
        model = regressor().double()

        def reduce() -> None:
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            flat = torch.cat([gradient.flatten() for gradient in gradients])
            dist.all_reduce(flat)
            pieces = (flat / size()).split([gradient.numel() for gradient in gradients])
            for gradient, piece in zip(gradients, pieces, strict=True):
                gradient.copy_(piece.view_as(gradient))

        return looped(model, before_update=reduce)

    return ptrain.verify(
        lambda: looped(regressor().double()), job, row_batches().double(), share=my_rows
    )


@sound("gradients get noise of one seed after they are reduced")
def noise_of_one_seed() -> Any:
    def noisy(is_parallel: bool) -> ptrain.Job:
        model = regressor()
        generator = torch.Generator().manual_seed(11)

        def disturb() -> None:
            if is_parallel:
                average(model.parameters())
            for parameter in model.parameters():
                parameter.grad += 0.01 * torch.randn(parameter.shape, generator=generator)

        return looped(model, before_update=disturb)

    return ptrain.verify(lambda: noisy(False), lambda: noisy(True), row_batches(), share=my_rows)
