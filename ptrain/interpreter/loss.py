"""The loss of a micro-batch: of the logits that the model returns, or computed inside its forward
pass, a slice of the tokens at a time; and what a rank's micro-batches add up to in a step."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from ptrain.axes.tensor.run.apply import whole_loss
from ptrain.data.sampler import LocalBatch
from ptrain.interpreter.scaling import LossScale
from ptrain.models.chunked import LossInside


class Loss:
    """How a model gives its loss; `inside` is what computes it in the model's own forward pass."""

    def __init__(self, inside: LossInside | None = None) -> None:
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

    def given(self, targets_BT: Tensor) -> AbstractContextManager[None]:
        """Return the context that a forward pass runs in."""
        return self._inside.given(targets_BT) if self._inside else nullcontext()

    def run(self, model: nn.Module, inputs_BT: Tensor, targets_BT: Tensor) -> Tensor:
        """Forward: the tokens' summed loss (0-d)."""
        with self.given(targets_BT):
            output = model(inputs_BT)
        return self.of(output, targets_BT)

    def of(self, output: Tensor, targets_BT: Tensor) -> Tensor:
        """The same, of what the forward pass returned."""
        return output if self._inside else whole_loss(output, targets_BT)


class StepLoss:
    """The losses of a step's micro-batches, each divided by the tokens of the global batch, and
    their sum on this rank, `share` (0-d)."""

    def __init__(
        self, loss: Loss, scaling: LossScale | None, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._loss, self._scaling = loss, scaling
        self._global_tokens = 1
        self.share = torch.zeros((), dtype=dtype, device=device)

    def begin(self, batch: LocalBatch) -> None:
        """A step with this batch begins."""
        self._global_tokens = batch.global_tokens
        self.share.zero_()

    def given(self, targets_BT: Tensor) -> AbstractContextManager[None]:
        """Return the context that a forward pass runs in."""
        return self._loss.given(targets_BT)

    def run(self, model: nn.Module, inputs_BT: Tensor, targets_BT: Tensor) -> Tensor:
        """Forward of a micro-batch: its loss (0-d), of which backward begins with `seed`."""
        return self._loss.run(model, inputs_BT, targets_BT) / self._global_tokens

    def seed(self, loss: Tensor) -> Tensor | None:
        """Return what backward begins with; None for 1."""
        return self._scaling.seed(loss) if self._scaling else None

    def add(self, loss: Tensor) -> None:
        """A micro-batch's loss, to the share."""
        self.share.add_(loss.detach())

    def of_output(self, output: Tensor, targets_BT: Tensor) -> Tensor:
        """The tokens' summed loss of what a forward pass returned (0-d)."""
        return self._loss.of(output, targets_BT)

    def of_last_stage(self, output: Tensor, targets_BT: Tensor) -> Tensor:
        """The loss of what the last stage of a pipeline returned, of which backward begins with
        `seed`; added to the share."""
        loss = self._loss.of(output, targets_BT) / self._global_tokens
        self.add(loss)
        return loss
