"""Where a module drops out something, by what its modules say, and what a GPU keeps of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd


def dropouts(module: nn.Module) -> Iterator[tuple[str, float]]:
    """Yield the dotted name and the probability of each attribute for dropout that is not 0."""
    for name, child in module.named_modules():
        rates = {key: value for key, value in vars(child).items() if "drop" in key}
        if isinstance(child, _DropoutNd):
            rates["p"] = child.p
        for key, value in rates.items():
            if isinstance(value, float) and value > 0.0:
                yield f"{name}.{key}".lstrip("."), value


def drops_out(module: nn.Module) -> bool:
    """Return whether some module says that it drops out; what a function drops a trace tells."""
    return any(True for _ in dropouts(module))


def kernels_of(*, is_for_cuda: bool) -> AbstractContextManager[None]:
    """Return a context within which dropout allocates what it does on that kind of device."""
    return _as_on_cuda() if is_for_cuda else nullcontext()


@contextmanager
def _as_on_cuda() -> Iterator[None]:
    """Within it dropout allocates on a processor what it does on a GPU: a mask of one byte an
    element (`at::dropout` calls native_dropout there, and on a processor multiplies by noise as
    wide as its input). Fused attention saves no mask, for backward draws it anew from seed and
    offset: two scalars, which are not there here. Values are those of another draw.
    """
    attend: Any = F.scaled_dot_product_attention
    drop: Any = F.dropout

    def fused(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        *rest: Any,
        **settings: Any,
    ) -> Tensor:
        y: Tensor = attend(query, key, value, attn_mask, 0.0, *rest, **settings)
        return y

    def masked(
        input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor:
        if inplace or not training or p == 0.0:
            y: Tensor = drop(input, p, training, inplace)
            return y
        return torch.native_dropout(input, p, training)[0]

    functional: Any = F
    functional.scaled_dot_product_attention, functional.dropout = fused, masked
    try:
        yield
    finally:
        functional.scaled_dot_product_attention, functional.dropout = attend, drop
