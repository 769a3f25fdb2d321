"""Sound programs whose models are unusual."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import ptrain
from tests.corpus.fault import sound
from tests.corpus.parts import (
    Regressor,
    axis,
    looped,
    my_rows,
    regression_loss,
    regressor,
    row_batches,
    token_batches,
    token_loss,
    writer,
)
from tests.corpus.pipeline import RegressorStage, staged
from tests.corpus.pipeline import terms as of_stages


def within_ddp(build: Callable[[], nn.Module], loss: Any = regression_loss, **options: Any) -> Any:
    is_of_tokens = loss is token_loss
    return ptrain.verify(
        lambda: looped(build(), loss=loss),
        lambda: looped(DistributedDataParallel(build(), **options), loss=loss),
        token_batches() if is_of_tokens else row_batches(),
        share=my_rows,
    )


@sound("the head is the embedding")
def tied_weights() -> Any:
    return within_ddp(lambda: writer(is_tied=True), token_loss)


@sound("a layer is frozen")
def frozen_layer() -> Any:
    def build() -> nn.Module:
        model = regressor()
        model.up.requires_grad_(False)
        return model

    return within_ddp(build)


class Squared(torch.autograd.Function):
    """x * |x| with a backward by hand."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x.abs()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x.abs() * gradient


class WithOwnBackward(Regressor):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(Squared.apply(self.up(self.norm(x))))


class Answering(Regressor):
    """Returns a dictionary."""

    def forward(self, x: Tensor) -> dict[str, Any]:
        hidden = F.gelu(self.up(self.norm(x)))
        return {"output": self.down(hidden), "hidden": hidden, "name": "answer"}


class Checkpointed(Regressor):
    def forward(self, x: Tensor) -> Tensor:
        hidden = checkpoint(lambda rows: F.gelu(self.up(self.norm(rows))), x, use_reentrant=False)
        return self.down(hidden)


class CountingRegressor(Regressor):
    """Counts its calls in a buffer, and has dropout of rate 0."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.dropout = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(self.dropout(x))


class WithBatchNorm(Regressor):
    """Batch norm that keeps its statistics, whether it trains or not."""

    def __init__(self) -> None:
        super().__init__()
        self.batch_norm = nn.BatchNorm1d(8)

    def train(self, mode: bool = True) -> WithBatchNorm:
        super().train(mode)
        self.batch_norm.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.batch_norm(x))


class LayerThrice(nn.Module):
    """Calls one layer three times."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.tanh(self.cell(x)) + x
        return self.out(x)


def seeded(kind: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind().train()


@sound("an autograd function with a backward by hand")
def backward_by_hand() -> Any:
    return within_ddp(lambda: seeded(WithOwnBackward))


@sound("the model returns a dictionary")
def answer_in_a_dictionary() -> Any:
    def loss(model: nn.Module, rows: Tensor) -> Tensor:
        return F.mse_loss(model(rows[:, :8])["output"], rows[:, 8:])

    return within_ddp(lambda: seeded(Answering), loss)


@sound("activation checkpointing on one side only")
def checkpointed_on_one_side() -> Any:
    return ptrain.verify(
        lambda: looped(regressor()),
        lambda: looped(DistributedDataParallel(seeded(Checkpointed))),
        row_batches(),
        share=my_rows,
    )


@sound("a buffer counts the calls; dropout has rate 0")
def counting_buffer_and_idle_dropout() -> Any:
    return within_ddp(lambda: seeded(CountingRegressor))


@sound("batch norm whose statistics are frozen")
def frozen_batch_norm() -> Any:
    return within_ddp(lambda: seeded(WithBatchNorm))


@sound("one layer is called three times in a forward")
def layer_called_three_times() -> Any:
    return within_ddp(lambda: seeded(LayerThrice))


@sound("weight norm, as a parametrization")
def weight_norm() -> Any:
    def build() -> nn.Module:
        model = regressor()
        parametrizations.weight_norm(model.up)
        return model

    return within_ddp(build)


@sound("spectral norm, whose vectors move in every forward")
def spectral_norm() -> Any:
    def build() -> nn.Module:
        model = regressor()
        parametrizations.spectral_norm(model.up)
        return model

    return within_ddp(build, broadcast_buffers=False)


@sound("a head that no batch uses")
def unused_head() -> Any:
    def build() -> nn.Module:
        model = regressor()
        model.spare = nn.Linear(4, 4)
        return model

    return within_ddp(build, find_unused_parameters=True)


@sound("two stages by hand, one micro-batch after the other")
def stages_by_hand() -> Any:
    return ptrain.verify(
        lambda: looped(regressor()),
        lambda: staged(RegressorStage()),
        row_batches(),
        terms=of_stages(),
    )


@sound("tensor parallelism by DTensor's plans")
def plans_of_dtensor() -> Any:
    def job() -> ptrain.Job:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        return looped(parallelize_module(regressor(), axis("tp"), plan))

    return ptrain.verify(
        lambda: looped(regressor()), job, row_batches(), terms=ptrain.Terms(loss="same")
    )
