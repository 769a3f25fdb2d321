"""Small shapes of both families, tied and untied, none of whose sizes is round."""

from __future__ import annotations

from dataclasses import replace

from ptrain.spec.model import Family, ModelShape
from tests.pure.build import ODD_SHAPE

SMALL_GPT = ModelShape(
    family=Family.GPT, layers=2, hidden=30, heads=3, kv_heads=3, ffn=120, vocab=61, tied=True
)
SHAPES = [
    ODD_SHAPE,
    replace(ODD_SHAPE, tied=True),
    replace(ODD_SHAPE, kv_heads=3, layers=1),
    SMALL_GPT,
    replace(SMALL_GPT, tied=False, ffn=77, layers=4),
    replace(SMALL_GPT, layers=1, heads=1, kv_heads=1),
]
