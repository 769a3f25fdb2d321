"""What is minimised: the loss of a micro-batch, of what a model returned, or of the model.

What a spec's `loss:` or `step:` gives is the mean of a micro-batch's samples. Micro-batches are of
one size, so that the mean of theirs is the global batch's (Theorem 3)."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ptrain.errors import refused
from ptrain.models.batch import SampleBatch, StepBatch
from ptrain.models.described import kind_of
from ptrain.models.external import resolved
from ptrain.models.graph import ModelCalls
from ptrain.models.loss import token_loss_sum
from ptrain.spec.function import UserFunction
from ptrain.spec.spec import LossSpec

_LOSS = "let it return the mean loss of the micro-batch's samples: one real number, 0-d, a Tensor"

AROUND_CALLS = (
    "parameters are gathered, and their gradients reduced, around calls of the whole model"
)


class Objective(Protocol):
    """The loss of one micro-batch (0-d), which a global batch's `divisor` divides."""

    def run(self, model: nn.Module, samples: SampleBatch) -> Tensor:
        """Run the model forward; return the loss."""
        ...

    def of(self, output: Any, samples: SampleBatch) -> Tensor:
        """Return the loss of what the model returned."""
        ...

    def forward(self, model: Any, samples: SampleBatch) -> Tensor:
        """Run what a stage of a pipeline runs of it, with `model` to call: return what the model
        returns, or the loss where a function of the user's takes part."""
        ...

    def of_forward(self, output: Tensor, samples: SampleBatch) -> Tensor:
        """Return the loss of what `forward` returned."""
        ...

    def divisor(self, batch: StepBatch, samples: SampleBatch) -> float:
        """Return what the loss of these samples is divided by, so that a global batch's add up to
        its mean."""
        ...


class NextToken:
    """The cross entropies of the next tokens, in nats, summed over the tokens."""

    def run(self, model: nn.Module, samples: SampleBatch) -> Tensor:
        output = model(samples.inputs)
        return self.of(output, samples)

    def of(self, output: Any, samples: SampleBatch) -> Tensor:
        return token_loss_sum(output, samples.targets)

    def forward(self, model: Any, samples: SampleBatch) -> Tensor:
        logits: Tensor = model(samples.inputs)
        return logits

    def of_forward(self, output: Tensor, samples: SampleBatch) -> Tensor:
        return self.of(output, samples)

    def divisor(self, batch: StepBatch, samples: SampleBatch) -> float:
        return batch.global_tokens


class OfOutput:
    """The mean loss that a function of the user's computes of the model's output and the batch.
    Raises SpecError for what is no loss, at any call."""

    def __init__(self, function: UserFunction) -> None:
        self.function = function
        self._call: Any = resolved(function, "output", "batch")

    def run(self, model: nn.Module, samples: SampleBatch) -> Tensor:
        output = model(samples.inputs)
        return self.of(output, samples)

    def of(self, output: Any, samples: SampleBatch) -> Tensor:
        loss = self._call(output, samples.contiguous, **self.function.arguments)
        return _require_loss(loss, self.function)

    def forward(self, model: Any, samples: SampleBatch) -> Tensor:
        return self.run(model, samples)

    def of_forward(self, output: Tensor, samples: SampleBatch) -> Tensor:
        return output

    def divisor(self, batch: StepBatch, samples: SampleBatch) -> float:
        return batch.global_samples / samples.rows


class OfModel(OfOutput):
    """The mean loss that a function of the user's computes with the model and the batch."""

    def __init__(self, function: UserFunction) -> None:
        self.function = function
        self._call = resolved(function, "model", "batch")

    def run(self, model: nn.Module, samples: SampleBatch) -> Tensor:
        """Raises SpecError where the function does without the model: hooks of what wraps it would
        not run."""
        calls = ModelCalls(model)
        with calls.watching():
            loss = self.of(model, samples)
        if not calls.count:
            finding = f"{self.function.target} does not call the model"
            raise refused(self.function.place, finding, f"write model(…) in it: {AROUND_CALLS}")
        return loss

    def forward(self, model: Any, samples: SampleBatch) -> Tensor:
        return self.of(model, samples)


def objective_of(loss: LossSpec) -> Objective:
    """Return what a spec minimises. Raises SpecError for a function that cannot be called so."""
    if loss.step is not None:
        return OfModel(loss.step)
    return NextToken() if loss.function is None else OfOutput(loss.function)


def _require_loss(loss: object, function: UserFunction) -> Tensor:
    """Raises SpecError for what is no loss that can be trained on."""
    if not isinstance(loss, Tensor) or loss.dim() or not loss.is_floating_point():
        raise refused(function.place, f"{function.target} returned {kind_of(loss)}", _LOSS)
    if torch.is_grad_enabled() and not loss.requires_grad:
        finding = f"{function.target} returned a loss on which no trainable parameter has an "
        raise refused(function.place, f"{finding}influence", "compute it of the model's output")
    return loss
