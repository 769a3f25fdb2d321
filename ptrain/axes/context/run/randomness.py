"""Dropout outside attention: what becomes of a token follows from its place in the whole sequence.

Ranks of cp draw alike, and the mask of all tokens, as one device draws it: a rank keeps those of
its own. No generator can be set to the middle of a mask, so that this costs the mask of all tokens
while it is drawn (of a processor in the dtype of what is dropped), and nothing after.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ptrain.axes.context.run.slices import taken
from ptrain.axes.context.tokens import Span
from ptrain.models.dropout import DropoutCall, dropout_by

_TOKENS = 1  # the dimension of tokens, behind that of samples


@dataclass(frozen=True, slots=True)
class SlicedMasks:
    """The masks of the tokens in `spans`, those of the `index`-th of so many `ranks`; a rank has
    `between` tokens between the blocks, fewer where another axis cuts them again."""

    spans: tuple[Span, ...]
    index: int
    ranks: int
    between: int

    @property
    def tokens(self) -> int:
        """How many tokens the rank has."""
        return sum(behind - first for first, behind in self.spans)

    def are_of(self, shape: torch.Size) -> bool:
        """Whether something of this shape [samples, tokens, ...] is of the rank's tokens."""
        return len(shape) > _TOKENS and shape[_TOKENS] in (self.tokens, self.between)

    def around(self, modules: Iterable[nn.Module]) -> None:
        """Let what these drop out by their own code have such masks, in backward again too."""
        for module in modules:
            entered = _Entered(self)
            module.register_forward_pre_hook(entered.enter)
            module.register_forward_hook(entered.leave, always_call=True)

    def drop(self, call: DropoutCall) -> Tensor:
        """Return what is left of the rank's tokens; of anything else what all ranks draw alike."""
        x = call.input
        if isinstance(x, DTensor):  # its slice of the tokens over tp, if it has one
            own = self.drop(DropoutCall(x.to_local(), call.rate, call.is_in_place, call.before))
            return DTensor.from_local(
                own, x.device_mesh, x.placements, shape=x.shape, stride=x.stride()
            )
        if not self.are_of(x.shape):
            return call.by_before()
        if x.is_cuda and not call.is_in_place:
            return self._masked(x, call.rate)
        kept = self._noise(x, call.rate)
        return x.mul_(kept) if call.is_in_place else x * kept

    def _noise(self, x: Tensor, rate: float) -> Tensor:
        """Return what at::dropout multiplies by on a processor: 0, or 1 / (1 - rate)."""
        own = self._own(x.new_empty(self._sizes_of_all(x)).bernoulli_(1 - rate))
        return own.div_(1 - rate)

    def _masked(self, x: Tensor, rate: float) -> Tensor:
        """Return what at::dropout gives on a GPU, where it is one kernel, whose mask is a byte an
        element: by this mask its backward pass does to a gradient what it does to its input."""
        _, mask = torch.native_dropout(x.new_empty(self._sizes_of_all(x)), rate, True)
        own = self._own(mask)
        left: Tensor = torch.ops.aten.native_dropout_backward(x, own, 1 / (1 - rate))
        return left

    def _sizes_of_all(self, x: Tensor) -> tuple[int, ...]:
        samples, tokens, *others = x.shape
        return (samples, tokens * self.ranks, *others)

    def _own(self, mask: Tensor) -> Tensor:
        """Return a copy of the rank's part of the mask of all tokens. Of slices over another axis
        any that no other rank has will do, since ranks of that axis draw apart."""
        tokens = mask.shape[_TOKENS] // self.ranks
        if tokens == self.tokens:
            return taken(mask, self.spans)
        return taken(mask, ((self.index * tokens, (self.index + 1) * tokens),))


class _Entered:
    """Forward passes of a module that are under way: one may be within another."""

    def __init__(self, masks: SlicedMasks) -> None:
        self._masks = masks
        self._passes: list[ExitStack] = []

    def enter(self, *_: object) -> None:
        stack = ExitStack()
        stack.enter_context(dropout_by(self._masks.drop))
        self._passes.append(stack)

    def leave(self, *_: object) -> None:
        if self._passes:  # else a hook before ours has raised
            self._passes.pop().close()
