"""The terms of a loss, the weights that they have in it, and a step in which these are others."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_unflatten

from ptrain.models.watch import first_real, is_real
from ptrain.verification.jobs.record import counts
from ptrain.verification.jobs.trials import around_backward
from ptrain.verification.parts import canonical_modules

# What passes a gradient on to several terms, or times a number; of a mean or a sum where it is of
# terms that are stacked.
_LINEAR = {
    "AddBackward0", "SubBackward0", "MulBackward0", "DivBackward0", "NegBackward0",
    "StackBackward0", "ToCopyBackward0", "ViewBackward0", "SqueezeBackward0",
    "UnsqueezeBackward0", "CloneBackward0",
}  # fmt: skip
_OF_STACKED = {"MeanBackward0", "SumBackward0"}


class WithTerm(torch.autograd.Function):
    """A tensor whose backward gives another one a gradient too, which is a number."""

    @staticmethod
    def forward(ctx: Any, first: Tensor, term: Tensor, coefficient: float) -> Tensor:
        ctx.coefficient, ctx.like = coefficient, torch.empty_like(term)
        return first.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        return gradient, torch.full_like(ctx.like, ctx.coefficient), None


class ScalarValues(TorchFunctionMode):
    """While entered: the `values` of single numbers, by the autograd node that made them."""

    def __init__(self) -> None:
        super().__init__()
        self.values: dict[Any, float] = {}

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.grad_fn is not None and result.numel() == 1:
            self.values[result.grad_fn] = float(result.detach())
        return result


class LossTerms:
    """`with LossTerms(model) as terms:` around a step: the `coefficients` that the terms of a loss
    have in it, by name: what the model returns beside its first output by its key, else the
    operator that makes the term. `times`: what the gradients of these terms are multiplied by;
    `joined`: coefficients of terms of the model that are given one though the loss lacks them.
    `outputs`: the terms that the model returns."""

    def __init__(
        self, model: nn.Module, times: Mapping[str, float] | None = None,
        joined: Mapping[str, float] | None = None,
    ) -> None:  # fmt: skip
        self.coefficients: dict[str, float] = {}
        self.outputs: set[str] = set()
        self._shares = [0.0, 0.0]  # of the loss: as it is, and with other coefficients
        self._nodes: dict[Any, str] = {}
        self._scalars = ScalarValues()
        self._model, self._times, self._joined = model, times or {}, joined or {}
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        root = dict(canonical_modules(self._model))[""]
        self._stack.callback(root.register_forward_hook(self._returned).remove)
        self._stack.enter_context(around_backward(self._begins))
        self._stack.enter_context(self._scalars)
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def of(self, loss: float | None) -> float | None:
        """Return what a loss that the step returned is with the other coefficients."""
        was, now = self._shares
        return loss if loss is None or was == now or not was else loss * now / was

    def _begins(self, tensors: Any) -> Callable[[], None]:
        losses = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        if len(losses) == 1 and losses[0].numel() == 1 and losses[0].grad_fn is not None:
            self._watch(losses[0].grad_fn)
        return lambda: None

    def _returned(self, module: nn.Module, args: Any, output: Any) -> Any:
        first, joined = first_real(output), first_real(output)
        leaves, spec = tree_flatten_with_path(output)
        if first is None or not counts():
            return None
        put = []
        for place, leaf in leaves:
            if is_real(leaf) and leaf.numel() == 1 and leaf is not first and leaf.requires_grad:
                name = f"output{keystr(place)}"
                self.outputs.add(name)
                self._nodes[leaf.grad_fn] = name
                self._scalars.values[leaf.grad_fn] = float(leaf.detach())
                if name in self._joined:
                    self._shares[1] += self._joined[name] * float(leaf.detach())
                    joined, leaf = WithTerm.apply(joined, leaf, self._joined[name]), leaf.detach()
            put.append(leaf)
        return tree_unflatten([joined if leaf is first else leaf for leaf in put], spec)

    def _watch(self, loss: Any) -> None:
        seen: dict[str, int] = {}
        nodes = [loss]
        while nodes:
            node = nodes.pop()
            inner = [its for its, _ in node.next_functions if its is not None]
            name = self._nodes.get(node, "")
            is_linear = node.name() in _LINEAR and (len(inner) == 1 or "Mul" not in node.name())
            is_linear |= node.name() in _OF_STACKED and inner[0].name() == "StackBackward0"
            if not name and is_linear:
                nodes += inner[::-1]
                continue
            name = name or node.name().removesuffix("Backward0")
            seen[name] = seen.get(name, 0) + 1
            full = name if seen[name] == 1 else f"{name} ({seen[name]})"
            value = self._scalars.values.get(node, math.nan)
            node.register_prehook(partial(self._weighed, full, value))

    def _weighed(
        self, name: str, value: float, gradients: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...]:
        own, times = float(gradients[0].detach().double().sum()), self._times.get(name, 1.0)
        self.coefficients[name] = self.coefficients.get(name, 0.0) + own
        self._shares[0] += own * value
        self._shares[1] += times * own * value
        return (gradients[0] * times, *gradients[1:])
