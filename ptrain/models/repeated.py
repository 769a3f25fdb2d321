"""Parameters that repeat the first few numbers of what a folder has of them: a module without
values is looked at with these, before it is cut.

A matrix is held as its first row and what follows it, each row begun one number further on (a
Hankel matrix), so that rows differ, and take as much memory as a row and a column. A vector is what
the files have. Rows overlap: nobody may write into them, and an operator that wants them apart
copies what it is given. Products, which do, are computed some columns at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ptrain.models.drawn import LookedWeights
from ptrain.models.module_weights import ModuleWeights
from ptrain.models.window import Window, overlaps
from ptrain.units import ceil_div

MOST_COPIED = 2**23  # bytes of a matrix at once: what a processor's cache may hold


@contextmanager
def repeated_values(module: nn.Module, weights: ModuleWeights | LookedWeights) -> Iterator[None]:
    """Within it the parameters of a module on meta have such values, in their dtypes; behind it
    they are those that they were before."""
    before = [
        (child, name, parameter)
        for child in module.modules()
        for name, parameter in child._parameters.items()
        if parameter is not None
    ]
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    stand_ins = {
        id(parameter): _repeated(names[id(parameter)], parameter, weights)
        for _, _, parameter in before
    }
    for child, name, parameter in before:
        child._parameters[name] = stand_ins[id(parameter)]
    try:
        with _ByColumns():
            yield
    finally:
        for child, name, parameter in before:
            child._parameters[name] = parameter


def _repeated(
    name: str, parameter: nn.Parameter, weights: ModuleWeights | LookedWeights
) -> nn.Parameter:
    shape = parameter.shape
    count = 1 + sum(size - 1 for size in shape) if parameter.numel() else 0
    window = _first(shape, count)
    read = torch.empty([size for _, size in window], dtype=parameter.dtype)
    weights.read_window(name, shape, window, read, parameter.dtype)
    values = read.flatten()[:count].clone()
    stand_in = nn.Parameter(values.as_strided(shape, (1,) * len(shape)), parameter.requires_grad)
    vars(stand_in).update(vars(parameter))
    return stand_in


def _first(shape: Sequence[int], count: int) -> Window:
    """Return a window of at least so many elements, and few more: of the last dimensions first."""
    window: Window = ()
    for size in reversed(shape):
        taken = min(size, count)
        window, count = ((0, taken), *window), ceil_div(count, max(1, taken))
    return window


class _ByColumns(TorchDispatchMode):
    """Computes a product with a matrix whose rows overlap some columns at a time, each copied to
    the same place: of places that are freed in between, glibc takes none again."""

    def __init__(self) -> None:
        super().__init__()
        self._place = torch.empty(MOST_COPIED, dtype=torch.uint8)

    def __torch_dispatch__(
        self,
        function: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if function in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            *addends, left, right = args
            columns = MOST_COPIED // max(1, right.itemsize * right.shape[0])
            if overlaps(right) and columns:
                product = partial(function, **(kwargs or {}))
                outputs = self._by_columns(product, addends, left, right.split(columns, 1))
                return torch.cat([*outputs], -1)
        return function(*args, **(kwargs or {}))

    def _by_columns(
        self,
        product: Callable[..., Tensor],
        addends: Sequence[Tensor],
        left: Tensor,
        parts: Sequence[Tensor],
    ) -> Iterator[Tensor]:
        """Yield the product with each part of a matrix, to which something may be added."""
        first = 0
        for part in parts:
            place = self._place[: part.nbytes].view(part.dtype).view(part.shape)
            count = part.shape[1]
            added = [x.narrow(-1, first, count) if x.shape[-1] > 1 else x for x in addends]
            yield product(*added, left, place.copy_(part))
            first += count
