"""The loss of a slice of the tokens at a time, inside the model's own forward pass: all logits are
never there at once.

While targets are given, whatever makes the logits gives their summed loss instead: a head, or the
method `logits(x)` of a built-in model without one. It runs where it always ran, within the hooks of
its module, so that whoever gathers its weights has gathered them. No model is edited: the head gets
a class of its own under its old name, and the method is hidden by an attribute of the instance.

Note: fused, a token's loss has the compute dtype (torch's operator rounds it as a head rounds its
logits); their sum is in at least fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.utils.checkpoint import checkpoint

from ptrain.models.loss import IGNORED, token_loss_sum
from ptrain.models.numerics import widen
from ptrain.models.transformer import Transformer
from ptrain.steps.step import ChunkedLoss

Make = Callable[[Tensor], Tensor]  # logits of hidden states
LossOf = Callable[[Tensor, Tensor], Tensor]  # of logits and targets, summed over the tokens


class LossInside:
    """What turns a model that returns logits into one that returns their summed loss."""

    def __init__(self, step: ChunkedLoss, loss: LossOf = token_loss_sum) -> None:
        self.step, self.loss = step, loss
        self.targets: Tensor | None = None

    @contextmanager
    def given(self, targets_BT: Tensor) -> Iterator[None]:
        """While entered, the model returns the loss of these, of which IGNORED count for nothing;
        0-d."""
        self.targets = targets_BT
        try:
            yield
        finally:
            self.targets = None

    def attach(self, model: nn.Module, head: str) -> None:
        """To a model, or to that part of it which makes the logits; `head` names the module that
        does where the model is not built in."""
        module = _head(model, head)
        if module is None:
            assert isinstance(model, Transformer), "others have a head"
            plain = model.logits
            model.__dict__["logits"] = lambda x_BTC: self._instead(model.embed, plain, x_BTC)
        else:
            module.__class__ = _with_loss(type(module), self)

    @staticmethod
    def detach(model: nn.Module, head: str) -> None:
        """Undo `attach`."""
        module = _head(model, head)
        if module is None:
            del model.__dict__["logits"]
        else:
            module.__class__ = type(module).__base__

    def _instead(self, owner: nn.Module, make: Make, x_BTC: Tensor) -> Tensor:
        if self.targets is None:
            return make(x_BTC)
        assert x_BTC.shape[:-1] == self.targets.shape, "a head is given all tokens"
        targets_N = self.targets.flatten()
        if self.step.fused:
            return _fused(x_BTC.flatten(0, 1), targets_N, owner, self.step.tokens)
        x_BTC, whole = _local(x_BTC)
        chunks = zip(
            x_BTC.flatten(0, 1).split(self.step.tokens),
            targets_N.split(self.step.tokens),
            strict=True,
        )
        return sum_of(self._again(lambda x: make(whole(x)), x, targets) for x, targets in chunks)

    def _again(self, make: Make, x_NC: Tensor, targets_N: Tensor) -> Tensor:
        """Return the loss of a chunk, whose logits are computed once more in backward. The chunk
        goes in as one sample: a head is used to samples."""

        def loss(x_NC: Tensor, targets_N: Tensor) -> Tensor:
            return self.loss(make(x_NC.unsqueeze(0)), targets_N.unsqueeze(0))

        if not torch.is_grad_enabled():
            return loss(x_NC, targets_N)
        chunk_loss: Tensor = checkpoint(
            loss, x_NC, targets_N, use_reentrant=False, preserve_rng_state=False
        )
        return chunk_loss


def sum_of(losses: Iterator[Tensor]) -> Tensor:
    """One after the other: none waits for the others."""
    total = next(losses)
    for loss in losses:
        total = total + loss
    return total


def can_fuse() -> bool:
    """Return whether torch has the fused operator, with chunks whose size is said."""
    return hasattr(F, "linear_cross_entropy") and hasattr(nn, "LinearCrossEntropyOptions")


def _fused(x_NC: Tensor, targets_N: Tensor, owner: nn.Module, tokens: int) -> Tensor:
    """By token: of a sum torch rounds the whole to the compute dtype."""
    weight, bias = owner.get_parameter("weight"), getattr(owner, "bias", None)
    losses_N = F.linear_cross_entropy(
        x_NC,
        weight,
        targets_N,
        linear_bias=bias,
        reduction="none",
        ignore_index=IGNORED,
        options=nn.LinearCrossEntropyOptions(batch_chunk_size=tokens, chunking_method=None),
    )
    return widen(losses_N).sum()


def _head(model: nn.Module, name: str) -> nn.Module | None:
    """The module that makes the logits; None of a built-in model whose head is its embedding."""
    return model.head if isinstance(model, Transformer) else model.get_submodule(name)


def _with_loss(kind: Any, inside: LossInside) -> type:
    """`kind`, whose hooks run around all chunks together."""

    class Head(kind):
        def forward(self, x_BTC: Tensor) -> Tensor:
            return inside._instead(self, super().forward, x_BTC)

    Head.__name__ = Head.__qualname__ = kind.__name__
    return Head


def _local(x_BTC: Tensor) -> tuple[Tensor, Make]:
    """Hidden states that are whole on every rank of an axis, as plain tensors, and what makes them
    a DTensor again. Their gradients are the ranks' terms, summed once for all chunks."""
    if not isinstance(x_BTC, DTensor):
        return x_BTC, lambda x: x
    mesh = x_BTC.device_mesh
    return x_BTC.to_local(grad_placements=[Partial()]), lambda x: _Whole.apply(x, mesh)


class _Whole(torch.autograd.Function):
    """A DTensor of what all ranks have alike, whose gradient goes back as it comes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: DeviceMesh) -> Tensor:
        return DTensor.from_local(x, mesh, [Replicate()], run_check=False)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        assert isinstance(gradient, DTensor)
        assert gradient.placements == (Partial(),), "of a head that is cut"
        return gradient.to_local(), None
