"""What a step of a loop on slices of the tokens is run with to try a cure: other inputs of a
module, another gradient of what it returns, the mask of attention by the tokens' places in the
whole sample."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from ptrain.models.arguments import first_real
from ptrain.verification.names import canonical_modules

_HIDDEN = -1e4  # what a mask adds to the scores that it hides, or less (-inf)


@dataclass(frozen=True, slots=True, kw_only=True)
class Forced:
    """What the passes of one module get in the place of what they have: leaves of what it is given
    by their place, and the gradient of the first tensor that it returns."""

    given: Mapping[int, Tensor] | None = None
    upstream: Tensor | None = None


@contextmanager
def forced(model: nn.Module, places: Mapping[str, Forced]) -> Iterator[None]:
    """Within it these modules, by path, get other inputs or gradients."""
    modules = dict(canonical_modules(model))
    with ExitStack() as stack:
        for path, instead in places.items():
            if instead.given is not None:
                before = partial(_give, instead.given)
                handle = modules[path].register_forward_pre_hook(before, with_kwargs=True)
                stack.callback(handle.remove)
            if instead.upstream is not None:
                after = partial(_hand_back, instead.upstream)
                stack.callback(modules[path].register_forward_hook(after).remove)
        yield


def _give(given: Mapping[int, Tensor], module: nn.Module, args: Any, kwargs: Any) -> Any:
    leaves, spec = tree_flatten((args, kwargs))
    return tree_unflatten([given.get(at, leaf) for at, leaf in enumerate(leaves)], spec)


def _hand_back(upstream: Tensor, module: nn.Module, args: Any, output: Any) -> Any:
    first = first_real(output)

    def put(leaf: Any) -> Any:
        if first is None or leaf is not first or not leaf.requires_grad:
            return leaf
        copy = leaf.clone()
        copy.register_hook(lambda gradient: upstream.to(gradient))
        return copy

    return tree_map(put, output)


_FILLED = (Tensor.masked_fill, Tensor.masked_fill_, torch.masked_fill)
_ADDED = (Tensor.add, Tensor.add_, torch.add, Tensor.__add__, Tensor.__radd__, Tensor.__iadd__)
_WEIGHED = (Tensor.softmax, torch.softmax, F.softmax)


class MaskOfPlaces(TorchFunctionMode):
    """While entered, scores of attention [..., queries, keys] are hidden where `seen` [queries,
    keys] says so, and nowhere else: in torch's attention, and in a softmax of scores that are
    masked by hand (filled, or added to)."""

    def __init__(self, seen: Tensor) -> None:
        super().__init__()
        self._seen = seen

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is F.scaled_dot_product_attention:
            args, kwargs = self._attended(args, kwargs)
        elif args and isinstance(args[0], Tensor) and self._are_scores(args[0]):
            if function in _FILLED and _hides(args[2] if len(args) > 2 else kwargs.get("value")):
                return args[0]  # the mask is laid over them before the softmax
            if function in _ADDED and len(args) > 1 and _hides(args[1]):
                return args[0]
            if function in _WEIGHED:
                hidden = ~self._seen.to(args[0].device)
                args = args[0].masked_fill(hidden, -torch.inf), *args[1:]
        return function(*args, **kwargs)

    def _are_scores(self, tensor: Tensor) -> bool:
        return tensor.shape[-2:] == self._seen.shape

    def _attended(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        given = dict(zip(("query", "key", "value", "attn_mask", "dropout_p"), args, strict=False))
        given |= kwargs
        if (given["query"].shape[-2], given["key"].shape[-2]) != tuple(self._seen.shape):
            return args, kwargs
        mask = self._seen.to(given["query"].device)
        return (), given | {"attn_mask": mask, "is_causal": False}


def _hides(value: Any) -> bool:
    """Return whether what scores are filled with, or what is added to them, hides some."""
    least = float(value.min()) if isinstance(value, Tensor) and value.numel() else value
    return isinstance(least, int | float) and least <= _HIDDEN
