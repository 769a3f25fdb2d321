"""Dropout outside attention: what becomes of a token follows from its place in the whole sequence.

Ranks of cp draw alike, and the mask of all tokens, as one device draws it: a rank keeps those of
its own. No generator can be set to the middle of a mask, so that this costs the mask of all tokens
while it is drawn (of a processor in the dtype of what is dropped), and nothing after.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import product

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ptrain.axes.context.attention import Span, spans_at
from ptrain.axes.context.run.slices import taken
from ptrain.models.dropout import DropoutCall, dropout_by
from ptrain.steps.step import ContextParallel

_TOKENS = 1  # the dimension of tokens, behind that of samples


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchCut:
    """How many `samples` a micro-batch has, and into how many `slices` their tokens are cut between
    the blocks, over other axes too."""

    samples: int
    slices: int


@dataclass(frozen=True, slots=True)
class SlicedMasks:
    """The masks of the tokens in `spans` of so many `samples`, those of the `index`-th of `ranks`;
    a rank has `between` tokens of a sample between the blocks, fewer where another axis cuts them.
    """

    spans: tuple[Span, ...]
    index: int
    ranks: int
    samples: int
    between: int

    @property
    def tokens(self) -> int:
        """How many tokens of a sample the rank has."""
        return sum(behind - first for first, behind in self.spans)

    def are_of(self, shape: Sequence[int]) -> bool:
        """Whether something of this shape, [samples, tokens, ...] or [samples · tokens, ...], is of
        the rank's tokens; samples may be one, with what is alike in all of them behind."""
        return self._has_dimension(shape) or self._flat_samples(shape) > 0

    def of_all(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of what all ranks have."""
        before = shape[:_TOKENS] if self._has_dimension(shape) else ()
        tokens, *others = shape[len(before) :]
        return (*before, tokens * self.ranks, *others)

    def _has_dimension(self, shape: Sequence[int]) -> bool:
        is_long = len(shape) > _TOKENS and shape[0] in (1, self.samples)
        return is_long and shape[_TOKENS] in (self.tokens, self.between)

    def _flat_samples(self, shape: Sequence[int]) -> int:
        """Return how many samples' tokens are one dimension, the first; 0 where none are."""
        ways = product((self.tokens, self.between), (1, self.samples))
        return next((count for tokens, count in ways if shape[0] == count * tokens), 0)

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
            own = self.drop(replace(call, input=x.to_local()))
            return DTensor.from_local(
                own, x.device_mesh, x.placements, shape=x.shape, stride=x.stride()
            )
        if not self.are_of(x.shape):
            return call.by_before()
        if not self._has_dimension(x.shape):
            by_samples = x.unflatten(0, (self._flat_samples(x.shape), -1))
            return self.drop(replace(call, input=by_samples)).flatten(0, 1)
        if x.is_cuda and not call.is_in_place:
            return self.masked(x, call.rate)
        kept = self._noise(x, call.rate)
        return x.mul_(kept) if call.is_in_place else x * kept

    def _noise(self, x: Tensor, rate: float) -> Tensor:
        """Return what at::dropout multiplies by on a processor: 0, or 1 / (1 - rate)."""
        own = self._own(x.new_empty(self.of_all(x.shape)).bernoulli_(1 - rate))
        return own.div_(1 - rate)

    def masked(self, x: Tensor, rate: float) -> Tensor:
        """Return what at::dropout gives on a GPU, where it is one kernel, whose mask is a byte an
        element: by this mask its backward pass does to a gradient what it does to its input."""
        _, mask = torch.native_dropout(x.new_empty(self.of_all(x.shape)), rate, True)
        own = self._own(mask)
        left: Tensor = torch.ops.aten.native_dropout_backward(x, own, 1 / (1 - rate))
        return left

    def _own(self, mask: Tensor) -> Tensor:
        """Return a copy of the rank's part of the mask of all tokens. Of slices over another axis
        any that no other rank has will do, since ranks of that axis draw apart."""
        tokens = mask.shape[_TOKENS] // self.ranks
        if tokens == self.tokens:
            return taken(mask, self.spans)
        return taken(mask, ((self.index * tokens, (self.index + 1) * tokens),))


def masks_at(step: ContextParallel, index: int, cut: MicroBatchCut) -> SlicedMasks:
    """Return the masks of one of the ranks of cp."""
    return SlicedMasks(
        spans=spans_at(step, index),
        index=index,
        ranks=step.ulysses * step.ring,
        samples=cut.samples,
        between=step.sequence // cut.slices,
    )


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
