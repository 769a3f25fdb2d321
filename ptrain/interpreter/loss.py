"""The loss of a micro-batch: of the logits that the model returns, or computed inside its forward
pass, a slice of the tokens at a time."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch import Tensor, nn

from ptrain.axes.tensor.run.apply import loss_inside, whole_loss
from ptrain.plan.step import Plan


class Loss:
    """How a plan has it."""

    def __init__(self, plan: Plan) -> None:
        self._inside = loss_inside(plan.loss, plan.tensor) if plan.loss else None

    def attach(self, model: nn.Module, head: str) -> None:
        """To a wrapped model; `head` names the module that makes the logits of one that is not
        built in."""
        if self._inside is not None:
            self._inside.attach(model, head)

    def given(self, targets_BT: Tensor) -> AbstractContextManager[None]:
        """What a forward pass runs in."""
        return self._inside.given(targets_BT) if self._inside else nullcontext()

    def run(self, model: nn.Module, inputs_BT: Tensor, targets_BT: Tensor) -> Tensor:
        """Forward: the tokens' summed loss (0-d)."""
        with self.given(targets_BT):
            output = model(inputs_BT)
        return self.of(output, targets_BT)

    def of(self, output: Tensor, targets_BT: Tensor) -> Tensor:
        """The same, of what the forward pass returned."""
        return output if self._inside else whole_loss(output, targets_BT)
