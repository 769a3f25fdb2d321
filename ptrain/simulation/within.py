"""What an operator's kernels take within themselves on a spec's GPUs while it runs, by its
arguments: an allocator sees it, a meter of operators does not."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from ptrain.derivation.attention import attention_of
from ptrain.derivation.workspaces import attention_backward, sum_of_rows
from ptrain.spec.spec import Spec

_ATTENTION, _BACKWARD = "aten::_scaled_dot_product_", "_backward"
_OF_PROCESSOR = "flash_attention_for_cpu"
_SUM = "aten::sum"
_WIDEST = 4  # bytes of a number that is summed in 32 bits

Within = Callable[[str, tuple[Any, ...]], tuple[int, ...]]


def within(spec: Spec) -> Within:
    """Return a function that gives these bytes of an operator, one by one, by its name and
    arguments; nothing where nobody knows them. A processor's attention stands for the spec's."""
    if not spec.is_for_cuda:
        return lambda name, args: ()
    attention = attention_of(spec)
    kernel = attention.kernel(spec.sm) if attention else None

    def of_operator(name: str, args: tuple[Any, ...]) -> tuple[int, ...]:
        if name.startswith(_ATTENTION) and name.endswith(_BACKWARD):
            if spec.deterministic:  # as many sums as the GPU has processors for
                return ()
            operator = name.removeprefix(_ATTENTION).removesuffix(_BACKWARD)
            stands_in = operator == _OF_PROCESSOR
            runs = kernel if stands_in else operator.removesuffix("_attention")
            batch, heads, sequence, head_dim = args[1].shape
            return attention_backward(
                runs,
                args[1].itemsize,
                batch=batch,
                heads=heads,
                sequence=sequence,
                head_dim=head_dim,
            )
        return _of_sum(*args[:2]) if name == _SUM and len(args) > 1 else ()

    return of_operator


def _of_sum(tensor: Any, dimensions: Any) -> tuple[int, ...]:
    """Of all dimensions but the last; other sums leave little."""
    if tensor.dim() < 2 or not tensor.numel() or tensor.itemsize > _WIDEST:
        return ()
    *rows, columns = tensor.shape
    if sorted(d % tensor.dim() for d in dimensions or ()) != [*range(len(rows))]:
        return ()
    size = sum_of_rows(math.prod(rows), columns)
    return (size,) if size else ()
