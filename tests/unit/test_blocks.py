"""The allocations of a block by activation mode: the tables, inserted into a model's timeline,
equal a trace to the byte for any shape and mixture."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from ptrain.derivation import blocks
from ptrain.models.initialize import build_model, cast_module
from ptrain.models.trace import to_timeline
from ptrain.models.units import unit_modules
from ptrain.spec.activations import PLAIN, ActivationMode
from ptrain.spec.model import Attention, ModelShape
from ptrain.spec.precision import DType
from ptrain.steps.step import Keep
from ptrain.timeline import Run, Timeline
from ptrain.traces.rank_part import RankPart
from tests.pure.build import ODD_SHAPE, setting
from tests.saved_tensors import saved_bytes
from tests.timelines import model_timeline
from tests.unit.shapes import SMALL_GPT

VARIANTS = dict(blocks.VARIANTS)
EAGER = Attention.EAGER
TORCH = {DType.FP32: torch.float32, DType.BF16: torch.bfloat16}
GQA = replace(ODD_SHAPE, layers=3)
DROPOUT = replace(SMALL_GPT, dropout=0.1, layers=3)
ALIKE = [(kept,) * 3 for kept in VARIANTS.values()]
MIXED = [
    (VARIANTS["full"], PLAIN, VARIANTS["offload"]),
    (PLAIN, VARIANTS["full-offload"], VARIANTS["selective"]),
    (VARIANTS["attention"], VARIANTS["offload"], VARIANTS["full"]),
]


def name_of(kept: tuple[ActivationMode, ...]) -> str:
    names = [next(name for name, other in VARIANTS.items() if other == each) for each in kept]
    return names[0] if len(set(names)) == 1 else "+".join(names)


def trace_blocks(
    shape: ModelShape, kept: tuple[ActivationMode, ...], compute: DType, batch: int, sequence: int
) -> Timeline:
    model = build_model(shape, sequence=sequence)
    cast_module(model, TORCH[compute])
    named = tuple((f"blocks.{index}", each) for index, each in enumerate(kept))
    step = Keep(blocks=tuple(pair for pair in named if not pair[1].is_plain))
    part = RankPart(batch=batch, sequence=sequence, keep=step)
    return to_timeline(part.traces(model, unit_modules(model))[0])


def levels(items: tuple[object, ...]) -> list[int]:
    """Live bytes at each boundary, and the most between two; of gradients none are kept."""
    found, level, highest = [], 0, 0
    for item in items:
        if isinstance(item, Run):
            highest = max(highest, level + item.rise)
            level += item.net
        else:
            found += [highest, level]
            highest = level
    return [*found, highest, level]


CASES = [
    pytest.param(
        replace(shape, attention=attention),
        kept,
        compute,
        id=f"{shape.family}-{attention}-{compute}-{name_of(kept)}",
        marks=() if kept in MIXED else pytest.mark.nightly,  # every variant is in a mixture
    )
    for shape, attention, compute, kept in itertools.product(
        (GQA, DROPOUT), (Attention.SDPA, EAGER), TORCH, [*ALIKE, *MIXED]
    )
]


@pytest.mark.parametrize(("shape", "kept", "compute"), CASES)
def test_the_tables_of_blocks_give_the_trace_of_another_shape_to_the_byte(shape, kept, compute):
    for batch, sequence in ((2, 16), (1, 9)):
        found = trace_blocks(shape, kept, compute, batch, sequence)
        whole = setting(shape, compute, batch=batch, sequence=sequence)
        derived = model_timeline(whole, kept=kept)
        assert saved_bytes(derived) == saved_bytes(found)
        assert sorted(derived.moved) == sorted(found.moved)
        assert max(levels(derived.forward)) == max(levels(found.forward))
        assert max(levels(derived.backward)) == max(levels(found.backward))
        assert levels(derived.backward)[-1] == levels(found.backward)[-1]
