"""Where a module drops out something, by what its modules say."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
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
