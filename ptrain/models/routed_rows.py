"""Experts of a model that is not built in, whose rows may be those of other ranks: a module that is
given rows, each with its experts and weights, sorts them by expert, and gives each expert its own.

What a rank's experts make of rows is computed by torch's grouped product in experts as transformers
has them, whatever their dtype; in any other module by its own code, which is given rows for one
expert each, with weights of one.

Legend of shape suffixes: N tokens, C hidden, K experts of a token, E experts, M rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from ptrain.errors import PtrainError
from ptrain.models.dropless import Journey, dropless, grouped_product

NUMBER = "num_experts"  # an attribute of such a module, if it has it: how many a rank has

_GATE = "_apply_gate"  # a method of every class of experts that transformers has
_LOST = (
    "of {name} no gradient would reach the ranks whose rows it got, nor its own tensors: run every "
    "expert, also on no rows"
)


class RoutedRows(nn.Module):
    """What is mixed into the class of such a module. `journey` makes what rows go through in a
    forward pass, and `reading` what is around the use of its tensors; the layer has so many experts
    (`num_all`), on all ranks together."""

    journey: Callable[[], Journey]
    reading: Callable[[nn.Module], AbstractContextManager[None]] | None = None
    num_all: int

    def forward(self, x_NC: Tensor, chosen_NK: Tensor, weights_NK: Tensor) -> Tensor:
        """Return what each token's experts give, by weight [N, C]."""
        rows_NKC = dropless(x_NC, chosen_NK, self.num_all, self.journey(), self._of_own)
        return (rows_NKC * weights_NK[..., None]).sum(1).to(x_NC.dtype)

    def _of_own(self, x_MC: Tensor, ends_E: Tensor) -> Tensor:
        with self.reading(self) if self.reading else nullcontext():
            return self.of_rows(x_MC, ends_E)

    def of_rows(self, x_MC: Tensor, ends_E: Tensor) -> Tensor:
        """Return what rows become, which are sorted by expert."""
        chosen_M1 = _experts_of(x_MC, ends_E)[:, None]
        y_MC: Tensor = super().forward(x_MC, chosen_M1, x_MC.new_ones(chosen_M1.shape))
        if torch.is_grad_enabled() and not y_MC.requires_grad:
            raise PtrainError(_LOST.format(name=type(self).__name__))
        return y_MC


class _TransformersRows(RoutedRows):
    """The same of experts as transformers has them: two tensors of projections, of which the first
    may be two in one."""

    def of_rows(self, x_MC: Tensor, ends_E: Tensor) -> Tensor:
        own: Any = self
        first = "gate_up_proj" if own.has_gate else "up_proj"
        h_MF = self._product(x_MC, first, ends_E)
        h_MF = own._apply_gate(h_MF) if own.has_gate else own.act_fn(h_MF)
        y_MC = self._product(h_MF, "down_proj", ends_E)
        return own.post_expert_norm(y_MC) if own.has_post_expert_norm else y_MC

    def _product(self, x_MI: Tensor, name: str, ends_E: Tensor) -> Tensor:
        """Return what rows give with one of the projections of their experts [M, outputs]."""
        own: Any = self
        weight = getattr(own, name)
        y_MO = grouped_product(x_MI, weight if own.is_transposed else weight.mT, ends_E)
        if own.has_bias:
            y_MO = y_MO + getattr(own, f"{name}_bias")[_experts_of(x_MI, ends_E)]
        return y_MO


def route(model: nn.Module, modules: Iterable[str], number: int) -> None:
    """Let these modules of a model, each all of a layer's so many experts, sort their rows by
    expert. They are changed in place, as torch's fully_shard changes what it wraps; their rows
    travel nowhere as yet."""
    for name in modules:
        experts: Any = model.get_submodule(name)
        if not isinstance(experts, RoutedRows):
            kind: Any = type(experts)
            experts.__class__ = _routed(kind)
            experts.journey, experts.num_all = Journey, number


@cache
def _routed(kind: type) -> type:
    """Return a class that routes rows, of a class of experts."""
    mixin = _TransformersRows if hasattr(kind, _GATE) else RoutedRows
    return type(kind.__name__, (mixin, kind), {"__module__": kind.__module__})


def _experts_of(x_MC: Tensor, ends_E: Tensor) -> Tensor:
    """Return the expert of each row."""
    rows_M = torch.arange(len(x_MC), dtype=ends_E.dtype, device=ends_E.device)
    return torch.searchsorted(ends_E, rows_M, right=True)
