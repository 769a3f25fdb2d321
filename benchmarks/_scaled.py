"""A model in bf16 with full recomputation on many H100s, as words of the command."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

FULL = ("activations=M", "recompute=full", "precision.reduced=fp32")
PLACEMENT = {
    "pp": "[S, S, S, R]",
    "dp_shard": "zero3",
    "cp": "[S*, S, S, S]",
    "ep": "zero3",
    "tp": "[S, S, S, S]",
}
KEPT = "{gradients: last, reshard_after_forward: false, reshard_after_backward: false}"
SECONDS = 3600  # for the traces, where the machine is shared


def words(
    degrees: Mapping[str, int], model: Sequence[str], *, samples: int, sequence: int
) -> tuple[str, ...]:
    """Return a spec's name and overrides: axes with their degrees, outermost first, of which those
    of one rank are left out; `samples` a step, each a micro-batch."""
    mesh = ", ".join(f"{axis}: {degree}" for axis, degree in degrees.items() if degree > 1)
    placed = ", ".join(f"{axis}: {PLACEMENT[axis]}" for axis, n in degrees.items() if n > 1)
    return (
        "fsdp-mixed",
        *model,
        *FULL,
        f"mesh={{{mesh}}}",
        f"placement={{{placed}}}",
        f"batch={{global: {samples}, micro: 1, sequence: {sequence}}}",
        *((f"sync={KEPT}",) if degrees.get("pp", 1) > 1 else ()),
        "cluster.preset=h100-8",
        f"cluster.devices={math.prod(degrees.values())}",
        f"timeout.init={SECONDS}",
    )
