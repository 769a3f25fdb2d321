"""M: a module's results are computed again in backward, by torch's composable checkpoint; what a
policy keeps is not.

A product over a dimension that tp shards is a partial sum of full size on each rank. In its place
the sum over the ranks is kept: sharded tokens make it smaller, and no rank sends it twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from ptrain.internals.checkpoint import checkpoint
from ptrain.internals.dispatch import operator_names
from ptrain.spec.activations import Operators, Policy

# Operators by class; a name that ends in * stands for all that begin so.
_NAMES = {
    Operators.MATMUL: ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"),
    Operators.ATTENTION: (
        "aten::_scaled_dot_product_*",
        "aten::_flash_attention_forward",
        "aten::_efficient_attention_forward",
    ),
    Operators.SOFTMAX: ("aten::_softmax", "aten::_safe_softmax"),
    # Llama's norm is written out: what it reduces to is kept, a number for each token
    Operators.NORM: (
        "aten::native_layer_norm",
        "aten::_fused_rms_norm",
        "ptrain::fused_rms_norm",  # which stands in for it
        "aten::rsqrt",
    ),
    # a wait of what is there already costs nothing, and how many there are may differ
    Operators.COLLECTIVE: (
        "_c10d_functional::all_gather_into_tensor",
        "_c10d_functional::reduce_scatter_tensor",
        "_c10d_functional::all_reduce",
        "_c10d_functional::all_to_all_single",
    ),
}


def recompute(module: nn.Module, policy: Policy, *, draws: bool) -> None:
    """Make `module`'s forward pass run again in backward, until all that was not kept is there.
    With `draws` it may draw random numbers, which are then the same."""
    options: dict[str, Any] = {"preserve_rng_state": draws}
    if policy.keep:
        kept = list(dict.fromkeys(operator for kind in policy.keep for operator in operators(kind)))
        options["context_fn"] = partial(_contexts, frozenset(kept))
    checkpoint(module, **options)


def _contexts(kept: frozenset[Any]) -> Any:
    return create_selective_checkpoint_contexts(_Keeping(kept))


class _Keeping:
    """The choice of the results that one pass of a module keeps, in the order of its operators."""

    def __init__(self, kept: frozenset[Any]) -> None:
        self.kept = kept
        self._has_partial = False

    def __call__(self, _: Any, operator: Any, *args: Any, **__: Any) -> CheckpointPolicy:
        """Return whether the result of `operator` is kept; forward and backward agree on it."""
        if self._has_partial and operator in _sums():
            self._has_partial = False
            return CheckpointPolicy.MUST_SAVE
        if operator not in self.kept:
            return CheckpointPolicy.PREFER_RECOMPUTE
        if operator in operators(Operators.MATMUL) and _is_partial(args):
            self._has_partial = True
            return CheckpointPolicy.PREFER_RECOMPUTE
        return CheckpointPolicy.MUST_SAVE


def _is_partial(args: tuple[Any, ...]) -> bool:
    """Return True if the product of the last two arguments sums over a sharded dimension."""
    left = args[-2]
    return isinstance(left, DTensor) and any(p.is_shard(left.dim() - 1) for p in left.placements)


@cache
def _sums() -> tuple[Any, ...]:
    names = ("reduce_scatter_tensor", "all_reduce")
    return tuple(_overload(f"_c10d_functional::{name}") for name in names)


@cache
def operators(kind: Operators) -> tuple[Any, ...]:
    """Return the operators of a kind that this torch has."""
    overloads: list[Any] = []
    for name in _NAMES[kind]:
        overloads += [_overload(full_name) for full_name in _matching(name)]
    if kind is Operators.ATTENTION:
        overloads.append(torch.ops.higher_order.flex_attention)
    return tuple(overloads)


def _matching(name: str) -> Iterator[str]:
    stem = name.removesuffix("*")
    for full_name in operator_names():
        is_forward = "." not in full_name and not full_name.endswith("_backward")
        if is_forward and (full_name == name or (stem != name and full_name.startswith(stem))):
            yield full_name


def _overload(name: str) -> Any:
    space, _, operator = name.partition("::")
    return getattr(getattr(torch.ops, space), operator).default
