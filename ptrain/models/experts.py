"""How transformers' layers of experts compute where a spec says nothing: as transformers itself
chooses, by torch's grouped product, whose sizes depend on no token. Where torch has none (in fp64,
and of rows that do not fill 16 bytes) expert by expert, for the tokens that are routed to each.

Legend of shape suffixes: N tokens, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ptrain.errors import refused
from ptrain.models.window import overlaps

Experts = Callable[..., Tensor]  # (module, hidden_ND, indices, weights) -> output_ND
Register = Callable[[str, Experts], None]

EXPERTS = "experts_implementation"  # a setting of every config, which no config writes down
_GROUPED_MM = "grouped_mm"
_BY_DTYPE, _GROUPED_OR_REFUSED = "ptrain_by_dtype", "ptrain_grouped_or_refused"
_ALIGNED = 16  # bytes of a row
_GROUPED = (torch.float32, torch.bfloat16, torch.float16)


def experts_setting(register: Register, product: Experts, given: object) -> dict[str, object]:
    """Return the setting of a config, where its own is `given`: transformers knows it by a name
    that is registered; `product` is its forward pass by grouped products. Where these are given and
    torch has none, a forward pass raises SpecError."""

    def grouped(module: nn.Module, hidden_ND: Tensor, *routing: Tensor) -> Tensor:
        if not _is_grouped(module, hidden_ND):
            kind = str(hidden_ND.dtype).removeprefix("torch.")
            finding = f"torch has no grouped product of {kind} with these widths, only of float32, "
            finding += f"bfloat16 and float16 with rows of a multiple of {_ALIGNED} bytes"
            raise refused(f"model.config.{EXPERTS}", finding, "write eager, or leave it out")
        return product(module, hidden_ND, *routing)

    def by_dtype(module: nn.Module, hidden_ND: Tensor, *routing: Tensor) -> Tensor:
        by_expert = type(module).forward.__wrapped__
        run = grouped if _is_grouped(module, hidden_ND) else by_expert
        output_ND: Tensor = run(module, hidden_ND, *routing)
        return output_ND

    register(_BY_DTYPE, by_dtype)
    register(_GROUPED_OR_REFUSED, grouped)
    own: dict[object, object] = {None: _BY_DTYPE, _GROUPED_MM: _GROUPED_OR_REFUSED}
    return {EXPERTS: own.get(given, given)}


def _is_grouped(module: nn.Module, hidden_ND: Tensor) -> bool:
    """Whether torch has a grouped product of these, forward and backward."""
    weights = [*module.parameters()]
    widths = (width for weight in weights for width in weight.shape[1:])
    aligned = all(width * hidden_ND.itemsize % _ALIGNED == 0 for width in widths)
    return aligned and hidden_ND.dtype in _GROUPED and not any(map(overlaps, weights))
