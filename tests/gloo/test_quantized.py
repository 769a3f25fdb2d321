"""Frozen weights in 4 or 8 bits: memory and traffic are exact, and training equals a single device
with the same quantized weights."""

from __future__ import annotations

import pytest

from tests.gloo.test_frozen import require_the_same_training
from tests.ranks import Ranks

pytestmark = pytest.mark.gloo
nightly = pytest.mark.nightly

PLACED = [
    ("ddp", "nf4"),
    ("zero3", "nf4"),
    ("zero1", "int8"),
    *(
        pytest.param(strategy, "nf4", marks=nightly)
        for strategy in ("zero1", "zero2", "hsdp", "fsdp-mixed", "pp-1f1b", "pp-zero3")
    ),
    *(pytest.param(strategy, "int8", marks=nightly) for strategy in ("ddp", "zero3")),
]


@pytest.mark.parametrize(("strategy", "dtype"), PLACED)
def test_quantized_weights_are_stored_and_gathered_as_bytes(
    ranks: Ranks, strategy: str, dtype: str
) -> None:
    require_the_same_training(ranks, strategy, "adapted", f"frozen.dtype={dtype}")
