"""Floating-point operations of the operators that a rank runs on its own tensors, by torch's own
formulas (`torch.utils.flop_counter`), forward, backward and again.

torch's counter itself looks above DTensor, where operators have the global shapes, and does not
know fused attention on a processor, nor the fused loss; this looks below and does.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from ptrain.cost import Operations, Phase
from ptrain.models.ledger import OperatorMode
from ptrain.models.recomputing import runs_again
from ptrain.models.work import products

_aten = torch.ops.aten
# An operator of processors -> the one whose formula counts it.
_ALIKE = {
    _aten._scaled_dot_product_flash_attention_for_cpu: _aten._scaled_dot_product_flash_attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        _aten._scaled_dot_product_flash_attention_backward
    ),
    _aten.addmm_: _aten.addmm,  # the fused loss adds up its weight's gradient in place
}
_ATTENTION = "aten::_scaled_dot_product_"
_GROUPED = "_grouped_mm"  # of torch, and of ours where torch has none
_FUSED = "torch_nn::_linear_cross_entropy_batch_chunked_no_reduction"


class OperationsMeter(OperatorMode):
    """Counts while it is entered; the program tells it the phase."""

    def __init__(self, *, rank: int) -> None:
        super().__init__()
        self._rank = rank
        self._phase = Phase.FORWARD
        self._forward = self._backward = self._again = 0
        self._attention: dict[str, None] = {}

    def phase(self, phase: Phase, micro_batch: int) -> None:
        self._phase = phase

    def operator(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = function(*args, **kwargs)
        packet = getattr(function, "_overloadpacket", None)
        formula = flop_registry.get(_ALIKE.get(packet, packet))
        if self._phase is Phase.UPDATE:
            return result
        if _ATTENTION in function._schema.name and self._phase is Phase.FORWARD:
            self._attention[function._schema.name.removeprefix(_ATTENTION)] = None
        if formula is not None:
            name, attends = function._schema.name, False
            if _ATTENTION in name:
                attends = "backward" not in name
                args = _with_equal_heads(args, is_backward=not attends)
            self._add(int(formula(*args, **kwargs, out_val=result)), attends=attends)
        elif function._schema.name.endswith(f"::{_GROUPED}"):  # torch has no formula of it
            self._add(2 * sum(map(math.prod, products(_GROUPED, args))))
        elif function._schema.name == _FUSED:
            self._add_logits(args[0], args[1])
        return result

    def _add_logits(self, x_NC: torch.Tensor, weight_VC: torch.Tensor) -> None:
        """Of a fused loss: its forward pass shows no operator inside, and its backward pass
        computes the logits again among operators of its own."""
        number = 2 * x_NC.numel() * weight_VC.shape[0]
        self._add(number)
        self._again += number
        self._backward -= number

    def _add(self, number: int, *, attends: bool = False) -> None:
        """`attends`: by a forward kernel of attention."""
        if runs_again() and (attends or torch.is_grad_enabled()):
            # A recomputation records its graph; the operators of a backward pass record none, nor
            # do those in a function with a backward pass of its own, as attention over cp is. Of a
            # chunk of the loss no module's hooks run again, so that modules cannot tell.
            self._again += number
        elif self._phase is Phase.FORWARD:
            self._forward += number
        else:
            self._backward += number

    def attention(self) -> tuple[str, ...]:
        """Return which kernels of attention ran: `cudnn_attention`; none of what is computed
        operator by operator."""
        return tuple(self._attention)

    def row(self) -> Operations:
        """Return the operations of the steps that it saw."""
        return Operations(
            rank=self._rank, forward=self._forward, backward=self._backward, again=self._again
        )


def _with_equal_heads(args: tuple[Any, ...], *, is_backward: bool) -> tuple[Any, ...]:
    """Shapes of keys and values of as many heads as the queries have, each of which meets its own:
    torch's formula asks for them up to 2.11."""
    first = 1 if is_backward else 0
    query, *others = args[first : first + 3]
    heads = query.shape[1]
    shapes = (torch.Size((len(x), heads, *x.shape[2:])) for x in others)
    return (*args[:first], query, *shapes, *args[first + 3 :])
