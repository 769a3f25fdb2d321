"""The passes of a step: forward and backward of a rank's micro-batches, in an order that the
program does not know."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor, nn

from ptrain.axes.data.run.flat import WrappedModel
from ptrain.costs import Phase
from ptrain.interpreter.loss import StepLoss
from ptrain.models.objective import StepBatch

Enter = Callable[[Phase, int], None]  # is told of every pass: its phase and its micro-batch
Add = Callable[[Tensor], None]  # is told of the loss of every micro-batch


class PassRunner(Protocol):
    """What the program needs of the order in which micro-batches run."""

    def train(self, batch: StepBatch) -> None:
        """Forward and backward of every micro-batch; gradients are complete after it."""

    def evaluate(self, batch: StepBatch, add: Add) -> None:
        """Forward of every micro-batch. Where the loss is, `add` is called with each."""


class InTurn:
    """One micro-batch after the other through the whole model, forward and then backward."""

    def __init__(
        self,
        wrapped: WrappedModel,
        model: nn.Module,
        sizes: tuple[int, int],
        loss: StepLoss,
        enter: Enter,
    ) -> None:
        """`model` is what `wrapped` wraps; `sizes` are micro-batches a step and samples in each."""
        self.wrapped, self.model = wrapped, model
        self.count, self.micro = sizes
        self.loss, self.enter = loss, enter

    def train(self, batch: StepBatch) -> None:
        for index, samples in enumerate(batch.micro_batches(self.micro)):
            with self.wrapped.micro_batch(index == self.count - 1):
                self.enter(Phase.FORWARD, index)
                loss = self.loss.run(self.wrapped.module, samples)
                self.loss.add(loss)
                self.enter(Phase.BACKWARD, index)
                loss.backward(self.loss.seed(loss))
            del loss

    def evaluate(self, batch: StepBatch, add: Add) -> None:
        for samples in batch.micro_batches(self.micro):
            add(self.loss.run(self.model, samples))
