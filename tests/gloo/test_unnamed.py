"""Tuples without a strategy name run like any other: drawn from Theta x Omega x G on the data axes.

The draw changes from run to run; its seed is in the test's name and PTRAIN_SEED sets it."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator

import pytest

from ptrain.spec.load import load
from ptrain.spec.names import list_files
from ptrain.spec.placement import Placement
from tests.gloo.rows import DIALS, ROWS, Setting, default_setting
from tests.gloo.test_rows import differences
from tests.ranks import Ranks

pytestmark = pytest.mark.gloo

SEED = int(os.environ["PTRAIN_SEED"])
DRAWN, NIGHTLY = 1, 69
PARAMETERS = ("R", "S*", "M", "O", "R@host", "S*@file")
OPTIMIZER = ("R", "S", "S*", "O", "S@file", "R@host")
GRADIENTS = ("R", "S", "S*", "M", "O", "S@file")
AXES = (("dp_replicate",), ("dp_shard",), ("dp_replicate", "dp_shard"))


def named_tuples() -> set[tuple[tuple[str, Placement], ...]]:
    """Return the tuples of all strategies, by axis."""
    specs = [load(name).spec for name in list_files("strategies")]
    return {
        tuple((factor.axis.value, factor.placement) for factor in spec.factors) for spec in specs
    }


def unnamed_tuples(draw: random.Random) -> Iterator[Setting]:
    """Yield legal tuples without end, each with random legal options."""
    taken = named_tuples()
    seen: set[str] = set()
    while True:
        axes = draw.choice(AXES)
        placement = {
            axis: f"{draw.choice(PARAMETERS)},{draw.choice(OPTIMIZER)},{draw.choice(GRADIENTS)},R"
            for axis in axes
        }
        row = "+".join(f"{axis}={tuple_}" for axis, tuple_ in placement.items())
        if row in seen:
            continue
        seen.add(row)
        ROWS.setdefault(row, placement)
        setting = default_setting(row).with_dials(
            layout=draw.choice(DIALS["layout"]), clip=draw.choice((1.0, None)), fp64=True
        )
        if not setting.is_legal():
            continue
        if tuple((f.axis.value, f.placement) for f in setting.spec().factors) in taken:
            continue
        for name in draw.sample(list(DIALS), len(DIALS)):
            other = setting.with_dials(**{name: draw.choice(DIALS[name])})
            setting = other if other.is_legal() else setting
        yield setting


_DRAW = unnamed_tuples(random.Random(SEED))
_DRAWN: list[Setting] = []


def setting(place: int) -> Setting:
    """Return the setting of an index, drawn on first use: each takes a second."""
    while len(_DRAWN) <= place:
        _DRAWN.append(next(_DRAW))
    return _DRAWN[place]


@pytest.mark.parametrize(
    "place",
    [
        pytest.param(
            place,
            id=f"PTRAIN_SEED={SEED}-{place}",
            marks=() if place < DRAWN else (pytest.mark.nightly,),
        )
        for place in range(DRAWN + NIGHTLY)
    ],
)
def test_a_tuple_without_a_name_is_exact_and_equals_one_device(ranks: Ranks, place: int) -> None:
    found = differences(ranks, setting(place))
    assert not found, "\n".join(found)
