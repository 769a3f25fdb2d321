"""What a model must do: take tokens and give logits. The first forward pass of a model is where its
code shows whether it does."""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from ptrain.errors import Fault, SpecError, refused
from ptrain.models.boundary import boundary, said
from ptrain.models.roles import named_in_spec
from ptrain.spec.spec import Spec

NEEDED = (
    "forward(tokens: int64 [batch, sequence]) -> logits [batch, sequence, vocabulary], one tensor "
    "of real numbers"
)


def logits_of(model: nn.Module, tokens_BT: Tensor, spec: Spec) -> Tensor:
    """Return the logits that `model` gives of tokens. Raises SpecError where its code raises, and
    where what it gives is no logits."""
    with forward_of(model, tokens_BT, spec):
        output = model(tokens_BT)
    return require_logits(output, model, tokens_BT, spec)


def forward_of(model: nn.Module, tokens_BT: Tensor, spec: Spec) -> AbstractContextManager[None]:
    """Around a forward pass of these tokens: raises SpecError in place of what the model raises."""
    place, name = named_in_spec(model, spec)

    def fault(error: BaseException) -> Fault:
        given = f"given tokens {_like(tokens_BT)}, raised"
        finding = f"{type(model).__name__}.forward of {name}, {given} {said(error)}"
        return Fault(place=place, finding=finding, remedy=f"what is needed: {NEEDED}")

    return boundary(fault)


def require_logits(output: Any, model: nn.Module, tokens_BT: Tensor, spec: Spec) -> Tensor:
    """Raises SpecError for what is not the logits of these tokens."""
    if isinstance(output, Tensor) and _is_of(output, tokens_BT):
        if torch.is_grad_enabled() and not output.requires_grad:
            raise _refused(model, spec, "logits on which no trainable parameter has an influence")
        return output
    raise _refused(model, spec, _like(output), f", given tokens {_like(tokens_BT)},")


def require_takes_tokens(model: nn.Module, spec: Spec) -> None:
    """Raises SpecError for a forward that other inputs than tokens must be given. For a model that
    nobody runs."""
    try:
        inspect.signature(model.forward).bind(None)
    except ValueError:
        pass  # a builtin may have no signature to compare with
    except TypeError as error:
        place, name = named_in_spec(model, spec)
        finding = f"{type(model).__name__}.forward of {name}, called with tokens alone: {error}"
        raise refused(place, finding, f"what is needed: {NEEDED}") from error


def _is_of(output: Tensor, tokens_BT: Tensor) -> bool:
    is_each = output.dim() == 3 and output.shape[:2] == tokens_BT.shape
    return is_each and output.is_floating_point()


def _refused(model: nn.Module, spec: Spec, output: str, given: str = "") -> SpecError:
    place, name = named_in_spec(model, spec)
    finding = f"{type(model).__name__}.forward of {name}{given} gave {output}"
    return refused(place, finding, f"what is needed: {NEEDED}")


def _like(value: Any) -> str:
    """`a tuple of (float32 [2, 16, 260], NoneType)`: types and shapes, no values."""
    match value:
        case Tensor():
            return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
        case dict():
            inner = ", ".join(f"{key}: {_like(item)}" for key, item in list(value.items())[:4])
        case tuple() | list():
            inner = ", ".join(map(_like, value[:4]))
        case _:
            return type(value).__name__
    more = ", …" if len(value) > 4 else ""
    return f"{type(value).__name__} ({inner}{more})"
