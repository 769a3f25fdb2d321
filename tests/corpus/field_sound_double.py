"""Unusual sound programs in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrizations
from torch.optim.swa_utils import AveragedModel

import ptrain
from tests.corpus.collectives import own_part
from tests.corpus.context import tokens_of_rank
from tests.corpus.experts import mixture, whole_mixture
from tests.corpus.fault import sound
from tests.corpus.field_axes import RingWriter
from tests.corpus.field_tensor import HeadSlicedBigram, log_total, wanted_logit
from tests.corpus.fsdp2 import local_gradients
from tests.corpus.parts import (
    FEATURES,
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
    scale_to,
    size,
    token_batches,
    token_loss,
    total,
    writer,
)
from tests.corpus.tensor import SlicedRegressor, bigram, sgd
from tests.corpus.tensor import terms as of_tensors

Build = Callable[[], nn.Module]
Loop = Callable[[nn.Module, bool], ptrain.Job]


def double_rows(size: int = 8) -> Tensor:
    return row_batches(size=size).double()


def double_regressor() -> nn.Module:
    return regressor().double()


def on_rows(loop: Loop, build: Build = double_regressor, wrap: Any = None, **options: Any) -> Any:
    """Compare a loop of a plain model with the same loop of a wrapped one, on shares of rows."""
    wrap = wrap or DistributedDataParallel
    options = {"share": my_rows} | options
    batches = options.pop("batches", None)
    rows = double_rows() if batches is None else batches
    return ptrain.verify(lambda: loop(build(), False), lambda: loop(wrap(build()), True), rows,
                         **options)  # fmt: skip


def plainly(model: nn.Module, _: bool) -> ptrain.Job:
    return looped(model)


def by_hand(model: nn.Module, is_parallel: bool, **options: Any) -> ptrain.Job:
    """Return a loop that averages gradients itself."""
    return looped(
        model,
        before_update=lambda: average(model.parameters()) if is_parallel else None,
        **options,
    )


def same(model: nn.Module) -> nn.Module:
    return model


@sound("float64: FSDP2 over a head that is the embedding")
def double_tied_and_sharded() -> Any:
    def loop(model: nn.Module, _: bool) -> ptrain.Job:
        return looped(model, loss=token_loss)

    build = lambda: writer(is_tied=True).double()  # noqa: E731
    return on_rows(loop, build, fully_shard, batches=token_batches())


@sound("float64: cross entropy over a vocabulary that tp has cut, by hand")
def double_loss_over_cut_vocabulary() -> Any:
    def loss(model: nn.Module, tokens: Tensor) -> Tensor:
        logits = model(tokens[:, :-1])
        return (log_total(logits) - wanted_logit(logits, tokens[:, 1:])).mean()

    def sliced() -> ptrain.Job:
        torch.manual_seed(0)
        return looped(HeadSlicedBigram().double(), loss=loss)

    return ptrain.verify(
        lambda: looped(bigram().double(), loss=token_loss),
        sliced,
        token_batches(),
        terms=of_tensors(),
    )


@sound("float64: sequence parallelism by hand, whose norm's gradients are summed over tp")
def double_norm_on_slices() -> Any:
    def job() -> ptrain.Job:
        model = SlicedRegressor(slices_rows=True).double()
        return looped(model, before_update=lambda: total(model.norm.parameters()))

    return ptrain.verify(lambda: looped(double_regressor()), job, double_rows(), terms=of_tensors())


@sound("float64: attention around a ring of ranks, with its backward by hand")
def double_ring() -> Any:
    def job() -> ptrain.Job:
        torch.manual_seed(0)
        model = RingWriter().double()

        def loss(called: nn.Module, batch: Any) -> Tensor:
            inputs, labels, first = batch
            return F.cross_entropy(called(inputs, first).flatten(0, 1), labels.flatten())

        return by_hand(model, True, loss=loss)

    return ptrain.verify(
        lambda: looped(writer().double(), loss=token_loss),
        job,
        token_batches(),
        share=tokens_of_rank,
        terms=ptrain.Terms(mesh=axis("cp")),
    )


@sound("float64: each rank has one of two experts, and the rows of all ranks")
def double_experts() -> Any:
    def job() -> ptrain.Job:
        model = mixture(capacity=99).double()

        def reduce() -> None:
            for name, parameter in model.named_parameters():
                if "experts" in name:
                    parameter.grad /= size()
                else:
                    average([parameter])

        return looped(model, before_update=reduce)

    return ptrain.verify(
        lambda: looped(whole_mixture().double()),
        job,
        double_rows(16),
        share=my_rows,
        terms=ptrain.Terms(mesh=axis("ep")),
    )


@sound("float64: seven rows, of which rank 0 has five; losses are sums over all seven")
def double_uneven_rows() -> Any:
    def loop(model: nn.Module, is_parallel: bool) -> ptrain.Job:
        def loss(called: nn.Module, rows: Tensor) -> Tensor:
            return regression_loss(called, rows) * len(rows) / 7

        def reduce() -> None:
            if is_parallel:
                total(model.parameters())

        return looped(model, loss=loss, before_update=reduce)

    return on_rows(
        loop, wrap=same, batches=double_rows(7), share=lambda batch: batch.split([5, 2])[rank()],
        terms=ptrain.Terms(loss="sum"),
    )  # fmt: skip


@sound("float64: FSDP2 over a width of seven, which two ranks cannot share evenly")
def double_odd_width() -> Any:
    return on_rows(plainly, lambda: regressor(width=7).double(), fully_shard)


class Turning(Regressor):
    """The regressor that turns pairs of features by complex numbers, kept as pairs of reals."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.randn(4, 2))

    def forward(self, x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.unflatten(-1, (4, 2)).contiguous())
        turned = torch.view_as_real(pairs * torch.view_as_complex(self.turn)).flatten(-2)
        return super().forward(turned)


def seeded(kind: Callable[[], nn.Module]) -> Build:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return kind().double()

    return build


@sound("float64: features are turned by complex numbers")
def double_complex_numbers() -> Any:
    return on_rows(plainly, seeded(Turning))


@sound("float64: a penalty on the input's gradient, with a second backward through the first")
def double_gradient_penalty() -> Any:
    def loss(model: nn.Module, rows: Tensor) -> Tensor:
        x = rows[:, :FEATURES].clone().requires_grad_(True)
        output = model(x)
        (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        error = (output - rows[:, FEATURES:]).square().mean()
        return error + 0.1 * slope.square().sum(dim=-1).mean()

    return on_rows(lambda model, parallel: by_hand(model, parallel, loss=loss), wrap=same)


@sound("float64: FSDP2 whose shards are clipped by the norm of all shards, by hand")
def double_clipped_shards() -> Any:
    def loop(model: nn.Module, is_parallel: bool) -> ptrain.Job:
        def clip() -> None:
            parts = local_gradients(model) if is_parallel else list(model.parameters())
            squares = torch.stack([part.grad.square().sum() for part in parts]).sum()
            if is_parallel:
                dist.all_reduce(squares)
            scale_to(parts, float(squares.sqrt()), 0.3)

        return looped(model, optimizer=sgd(model), before_update=clip)

    return on_rows(loop, wrap=fully_shard)


@sound("float64: a running mean of the weights, by torch's AveragedModel")
def double_running_mean() -> Any:
    def loop(model: nn.Module, is_parallel: bool) -> ptrain.Job:
        inner = model.module if is_parallel else model
        mean = AveragedModel(inner)
        job = looped(model, after_update=lambda: mean.update_parameters(inner))
        return ptrain.Job(model=model, step=job.step, average=mean)

    return on_rows(loop)


@sound("float64: two passes a step: the second is at weights that the first one's gradients moved")
def double_sharpness_aware() -> Any:
    def loop(model: nn.Module, _: bool) -> ptrain.Job:
        optimizer = sgd(model)

        def step(rows: Tensor) -> Tensor:
            loss = regression_loss(model, rows)
            loss.backward()
            moves = [0.05 * p.grad / p.grad.norm() for p in model.parameters()]
            with torch.no_grad():
                for parameter, move in zip(model.parameters(), moves, strict=True):
                    parameter += move
            optimizer.zero_grad()
            regression_loss(model, rows).backward()
            with torch.no_grad():
                for parameter, move in zip(model.parameters(), moves, strict=True):
                    parameter -= move
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return ptrain.Job(model=model, step=step)

    return on_rows(loop)


@sound("float64: every second step the weights go half of the way back to slow ones")
def double_lookahead() -> Any:
    def loop(model: nn.Module, _: bool) -> ptrain.Job:
        slow = [p.detach().clone() for p in model.parameters()]
        done = [0]

        def look_back() -> None:
            done[0] += 1
            if done[0] % 2:
                return
            for kept, parameter in zip(slow, model.parameters(), strict=True):
                kept.lerp_(parameter.detach(), 0.5)
                parameter.data.copy_(kept)

        return looped(model, after_update=look_back)

    return on_rows(loop)


@sound("float64: two losses with a backward each, of which the first keeps the graph")
def double_two_backwards() -> Any:
    def loop(model: nn.Module, is_parallel: bool) -> ptrain.Job:
        optimizer = adamw(model)

        def step(rows: Tensor) -> Tensor:
            output = model(rows[:, :FEATURES])
            error = F.mse_loss(output, rows[:, FEATURES:])
            size_of_output = 0.1 * output.abs().mean()
            error.backward(retain_graph=True)
            size_of_output.backward()
            if is_parallel:
                average(model.parameters())
            optimizer.step()
            optimizer.zero_grad()
            return (error + size_of_output).detach()

        return ptrain.Job(model=model, step=step)

    return on_rows(loop, wrap=same)


@sound("float64: rank 1 returns no loss, rank 0 that of all rows")
def double_loss_on_one_rank() -> Any:
    def loop(model: nn.Module, is_parallel: bool) -> ptrain.Job:
        inner = looped(model)

        def step(rows: Tensor) -> Tensor | None:
            loss = inner.step(rows)
            if is_parallel:
                dist.all_reduce(loss)
                loss /= size()
            return None if is_parallel and rank() == 1 else loss

        return ptrain.Job(model=model, step=step)

    return on_rows(loop, terms=ptrain.Terms(loss="same"))


@sound("float64: rows have weights of their own; losses are divided by the weights of all ranks")
def double_weighted_rows() -> Any:
    def loop(model: nn.Module, is_parallel: bool) -> ptrain.Job:
        def loss(called: nn.Module, rows: Tensor) -> Tensor:
            errors = (called(rows[:, :FEATURES]) - rows[:, FEATURES:]).square().squeeze(-1)
            weights = 1 + rows[:, 0].abs()
            whole = weights.sum()
            if is_parallel:
                dist.all_reduce(whole)
                whole /= size()
            return (errors * weights).sum() / whole

        return looped(model, loss=loss)

    return on_rows(loop)


@sound("float64: a weight that a parametrization keeps orthogonal")
def double_orthogonal() -> Any:
    def build() -> nn.Module:
        model = double_regressor()
        parametrizations.orthogonal(model.up, orthogonal_map="cayley")
        return model

    return on_rows(plainly, build)


@sound("float64: a hook turns the gradient of hidden features round")
def double_reversed_gradient() -> Any:
    def loss(model: nn.Module, rows: Tensor) -> Tensor:
        x = rows[:, :FEATURES]
        hidden = model.up(model.norm(x))
        reversed_hidden = hidden * 1.0
        if reversed_hidden.requires_grad:
            reversed_hidden.register_hook(lambda gradient: -0.1 * gradient)
        against = reversed_hidden.tanh().mean()
        output = model.down(F.gelu(hidden))
        return F.mse_loss(output, rows[:, FEATURES:]) + against

    return on_rows(lambda model, parallel: by_hand(model, parallel, loss=loss), wrap=same)


@sound("float64: gradients are reduced in parts, which are gathered; NAdam updates")
def double_reduced_in_parts() -> Any:
    def loop(model: nn.Module, is_parallel: bool) -> ptrain.Job:
        def reduce() -> None:
            for parameter in model.parameters() if is_parallel else ():
                flat = F.pad(parameter.grad.flatten(), (0, parameter.numel() % 2))
                part = torch.empty_like(own_part(flat, 0))
                dist.reduce_scatter(part, list(flat.chunk(2)))
                parts = [torch.empty_like(part) for _ in range(2)]
                dist.all_gather(parts, part / 2)
                whole = torch.cat(parts)[: parameter.numel()]
                parameter.grad = whole.view_as(parameter)

        optimizer = torch.optim.NAdam(model.parameters(), lr=1e-2)
        return looped(model, optimizer=optimizer, before_update=reduce)

    return on_rows(loop, wrap=same)


@sound("float64: the model is compared with a frozen copy of its first weights")
def double_frozen_copy() -> Any:
    def loop(model: nn.Module, is_parallel: bool) -> ptrain.Job:
        inner = model.module if is_parallel else model
        first = copy.deepcopy(inner).requires_grad_(False)

        def loss(called: nn.Module, rows: Tensor) -> Tensor:
            output = called(rows[:, :FEATURES])
            drift = F.mse_loss(output, first(rows[:, :FEATURES]))
            return F.mse_loss(output, rows[:, FEATURES:]) + 0.3 * drift

        return looped(model, loss=loss)

    return on_rows(loop)
