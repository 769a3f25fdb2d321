"""The loss of a micro-batch, from the model's output or computed inside its forward pass a slice of
the tokens at a time; the sum over a rank's micro-batches; and the forward and backward passes of
a step, in an order that the program does not know.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ptrain.axes.data.run.flat import WrappedModel
from ptrain.axes.tensor.run.apply import local
from ptrain.cost import Phase
from ptrain.interpreter.clip import LossScale
from ptrain.models.objective import LossInside, NextToken, Objective, SampleBatch, StepBatch


class Loss:
    """How a model gives its loss: `objective` says which, and `inside` is what computes it in the
    model's own forward pass."""

    def __init__(
        self, objective: Objective | None = None, inside: LossInside | None = None
    ) -> None:
        self.objective = objective or NextToken()
        self._inside = inside

    @property
    def is_inside(self) -> bool:
        """Whether the model's own forward pass computes it."""
        return self._inside is not None

    def attach(self, model: nn.Module, head: str) -> None:
        """To a model that gives its loss itself; `head` names the module that makes the logits of
        one that is not built in."""
        if self._inside is not None:
            self._inside.attach(model, head)

    def given(self, samples: SampleBatch) -> AbstractContextManager[None]:
        """Return the context that a forward pass runs in."""
        return self._inside.given(samples.targets) if self._inside else nullcontext()

    def run(self, model: nn.Module, samples: SampleBatch) -> Tensor:
        """Forward: the micro-batch's loss before it is divided (0-d)."""
        if self._inside is None:
            return local(self.objective.run(model, samples))
        with self.given(samples):
            loss: Tensor = model(samples.inputs)
        return loss

    def forward(self, model: Any, samples: SampleBatch) -> Tensor:
        """Forward of a stage, with `model` to call: what `of_forward` makes the loss of."""
        if self._inside is None:
            return self.objective.forward(model, samples)
        output: Tensor = model(samples.inputs)
        return output

    def of_forward(self, output: Tensor, samples: SampleBatch) -> Tensor:
        """The same as `run`, of what `forward` returned."""
        return output if self._inside else local(self.objective.of_forward(output, samples))


class StepLoss:
    """The losses of a step's micro-batches, each divided so that those of the global batch add up
    to its mean, and their sum on this rank, `share` (0-d)."""

    def __init__(
        self, loss: Loss, scaling: LossScale | None, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._loss, self._scaling = loss, scaling
        self._batch: StepBatch | None = None
        self.share = torch.zeros((), dtype=dtype, device=device)

    def begin(self, batch: StepBatch) -> None:
        """A step with this batch begins."""
        self._batch = batch
        self.share.zero_()

    @contextmanager
    def evaluating(self, batch: StepBatch) -> Iterator[None]:
        """While entered, losses are those of this batch, and none of a step's."""
        self._batch = batch
        try:
            yield
        finally:
            self._batch = None

    def given(self, samples: SampleBatch) -> AbstractContextManager[None]:
        """Return the context that a forward pass runs in."""
        return self._loss.given(samples)

    def forward(self, model: Any, samples: SampleBatch) -> Tensor:
        """Forward of a stage, with `model` to call: what `of_output` makes the loss of."""
        return self._loss.forward(model, samples)

    def run(self, model: nn.Module, samples: SampleBatch) -> Tensor:
        """Forward of a micro-batch: its loss (0-d), of which backward begins with `seed`."""
        return self._loss.run(model, samples) / self._divisor(samples)

    def seed(self, loss: Tensor) -> Tensor | None:
        """Return what backward begins with; None for 1."""
        return self._scaling.seed(loss) if self._scaling else None

    def add(self, loss: Tensor) -> None:
        """A micro-batch's loss, to the share."""
        self.share.add_(loss.detach())

    def of_last_stage(self, output: Tensor, samples: SampleBatch) -> Tensor:
        """The loss of what the last stage of a pipeline returned, of which backward begins with
        `seed`; added to the share."""
        loss = self.of_output(output, samples)
        self.add(loss)
        return loss

    def of_output(self, output: Tensor, samples: SampleBatch) -> Tensor:
        """The micro-batch's loss, of what its forward pass returned (0-d)."""
        return self._loss.of_forward(output, samples) / self._divisor(samples)

    def _divisor(self, samples: SampleBatch) -> float:
        assert self._batch is not None, "a step has begun"
        return self._loss.objective.divisor(self._batch, samples)


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
