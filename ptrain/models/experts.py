"""How transformers' layers of experts compute where a spec says nothing: as transformers itself
chooses, by torch's grouped product, whose sizes depend on no token. Where torch has none (in fp64,
and of rows that do not fill 16 bytes) expert by expert, for the tokens that are routed to each.

Legend of shape suffixes: N tokens, D hidden. transformers is imported where it is needed.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

EXPERTS = "experts_implementation"  # a setting of every config, which no config writes down
_BY_DTYPE = "ptrain_by_dtype"
_ALIGNED = 16  # bytes of a row
_GROUPED = (torch.float32, torch.bfloat16, torch.float16)


def experts_setting() -> dict[str, str]:
    """Return the setting of a config; nothing of a transformers without that choice."""
    try:
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward
    except ImportError:
        return {}

    def experts(module: nn.Module, hidden_ND: Tensor, *routing: Tensor) -> Tensor:
        by_expert = type(module).forward.__wrapped__
        run = grouped_mm_experts_forward if _is_grouped(module, hidden_ND) else by_expert
        output_ND: Tensor = run(module, hidden_ND, *routing)
        return output_ND

    ALL_EXPERTS_FUNCTIONS.register(_BY_DTYPE, experts)
    return {EXPERTS: _BY_DTYPE}


def _is_grouped(module: nn.Module, hidden_ND: Tensor) -> bool:
    """Whether torch has a grouped product of these, forward and backward."""
    widths = (width for weight in module.parameters() for width in weight.shape[1:])
    aligned = all(width * hidden_ND.itemsize % _ALIGNED == 0 for width in widths)
    return aligned and hidden_ND.dtype in _GROUPED
