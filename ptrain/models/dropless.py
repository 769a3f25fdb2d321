"""Route every row to its experts without a capacity: sort rows by expert, multiply group by group,
and put the results back in order.

No size depends on the routing but those of rows that travel to other ranks. Groups of rows are
multiplied by torch's grouped product where it exists, else (fp64, or rows that do not fill 16
bytes) one group after the other into one result.

Legend of shape suffixes: N tokens, C hidden, E experts or groups, K experts of a token, M = N·K
rows sorted by expert, S places of an expert, I inputs, O outputs.

Experts of a model that is not built in, whose rows may be those of other ranks: a module that is
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
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ptrain.errors import PtrainError

ALIGNED = 16  # bytes of a row that torch's grouped product takes
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def grouped_product(x_MI: Tensor, weights_EIO: Tensor, ends_E: Tensor) -> Tensor:
    """Return what each row gives with the matrix of its group: [M, O]. `ends_E` (int32) are the
    rows behind each group's last; a group may have none."""
    y_MO: Tensor
    if _is_torchs(x_MI, weights_EIO):
        y_MO = F.grouped_mm(x_MI, weights_EIO, offs=ends_E)
    else:
        y_MO = _by_group(x_MI, weights_EIO, ends_E)
    return y_MO


def _is_torchs(x_MI: Tensor, weights_EIO: Tensor) -> bool:
    is_even = all(width * x_MI.itemsize % ALIGNED == 0 for width in weights_EIO.shape[1:])
    return is_even and x_MI.dtype in DTYPES


# Arguments and meaning are those of aten::_grouped_mm: the second factor has the groups as its
# first dimension, or the groups are of the inner one, as in a weight's gradient.
@torch.library.custom_op("ptrain::_grouped_mm", mutates_args=())
def _by_group(left: Tensor, right: Tensor, offs: Tensor) -> Tensor:
    result = _empty(left, right, offs)
    for group, (first, behind) in enumerate(pairwise([0, *offs.tolist()])):
        if right.dim() == 3:
            # into the result's own rows: a product allocates nothing beside it
            torch.mm(left[first:behind], right[group], out=result[first:behind])
        else:
            torch.mm(left[:, first:behind], right[first:behind], out=result[group])
    return result


@_by_group.register_fake
def _empty(left: Tensor, right: Tensor, offs: Tensor) -> Tensor:
    groups = () if right.dim() == 3 else (offs.shape[0],)
    return left.new_empty(*groups, left.shape[0], right.shape[-1])


def _keep(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, gradient_MO: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    x_MI, weights_EIO, ends_E = ctx.saved_tensors
    needs_x, needs_weights, _ = ctx.needs_input_grad
    of_x = _by_group(gradient_MO, weights_EIO.mT, ends_E) if needs_x else None
    # the transposed one is computed, so that a weight kept transposed has a contiguous gradient
    of_weights = _by_group(gradient_MO.mT, x_MI, ends_E).mT if needs_weights else None
    return of_x, of_weights, None


_by_group.register_autograd(_backward, setup_context=_keep)


class Journey:
    """The way of one forward pass, where nothing travels."""

    def __init__(self) -> None:
        self._beside: Callable[[], Tensor] | None = None

    def compute_beside(self, compute: Callable[[], Tensor]) -> None:
        """Say what may be computed while rows travel, before they set out."""
        self._beside = compute

    def computed_beside(self) -> Tensor:
        """Return what that gave, when rows are back."""
        assert self._beside is not None, "there is something"
        return self._beside()

    def rows_there(self, x_MC: Tensor, ends_E: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rows that this rank's experts get, and where those of each of these end."""
        return x_MC, ends_E

    def rows_back(self, y_MC: Tensor) -> Tensor:
        """Return what the rows that set out have become, in their order."""
        return y_MC

    def places_there(self, x_ESC: Tensor) -> Tensor:
        """Return the places that this rank's experts get."""
        return x_ESC

    def places_back(self, y_ESC: Tensor) -> Tensor:
        """Return what the places that set out have become."""
        return y_ESC


OnRows = Callable[[Tensor, Tensor], Tensor]  # (rows [M, C], where each expert's end) -> [M, C]


def dropless(
    x_NC: Tensor, chosen_NK: Tensor, num_experts: int, journey: Journey, experts: OnRows
) -> Tensor:
    """Return what each token's experts give [N, K, C]."""
    num_chosen, chosen_M = chosen_NK.shape[1], chosen_NK.flatten()
    order_M = chosen_M.argsort(stable=True)
    x_MC, ends_E = journey.rows_there(x_NC[order_M // num_chosen], ends_of(chosen_M, num_experts))
    # handed on, so that what rows become is given back where they set out
    y_MC = journey.rows_back(experts(x_MC, ends_E))
    del x_MC, ends_E
    return y_MC[order_M.argsort()].unflatten(0, (-1, num_chosen))


def ends_of(chosen_M: Tensor, num_experts: int) -> Tensor:
    """Return the rows behind the last of each expert, sorted by expert: int32, as torch's grouped
    product takes them."""
    counts_E = torch.zeros(num_experts, dtype=torch.int64, device=chosen_M.device)
    counts_E = counts_E.scatter_add(0, chosen_M, torch.ones_like(chosen_M))
    return counts_E.cumsum(0, dtype=torch.int32)


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
