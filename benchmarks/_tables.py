"""What the tables of the pages share: Markdown, strategies on as many ranks each, and their
tuples as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache

from ptrain.algebra.legality import require
from ptrain.spec.axis import DATA_AXES, Axis
from ptrain.spec.load import load
from ptrain.spec.spec import Spec

RANKS = 4
# The preset's two key-value heads are too few for as many ranks of tp, its four layers for two
# stages on each rank of pp.
MODEL = ("model.kv_heads=4", "model.layers=8")
# In one micro-batch: the paper knows no accumulation; what that repeats `sync` says. A pipeline has
# as many as the longest of its schedules needs.
SAMPLES, MICROBATCHES = 16, 8


def table(columns: Sequence[str], rows: Iterator[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join(f"| {' | '.join(cell or '–' for cell in line)} |\n" for line in lines)


@cache
def on_ranks(name: str) -> Spec:
    """A strategy on RANKS ranks, its axes of one degree; three axes of 2 are twice as many."""
    factors = load(name).spec.factors
    degree = round(RANKS ** (1 / len(factors)))
    mesh = ", ".join(f"{factor.axis}: {degree}" for factor in factors)
    data_degree = degree ** sum(factor.axis in DATA_AXES for factor in factors)
    times = MICROBATCHES if any(factor.axis is Axis.PP for factor in factors) else 1
    batch = [f"batch.global={SAMPLES}", f"batch.micro={SAMPLES // data_degree // times}"]
    return require(load(name, [f"mesh={{{mesh}}}", *MODEL, *batch]))


def tuples(spec: Spec) -> str:
    text = " ⊗ ".join(f"{factor.axis} {factor.placement}" for factor in spec.factors)
    return text.replace("*", r"\*")
