"""Tuples that no strategy names run like any other: drawn from Theta x Omega x G on the data axes.

The draw changes from run to run; its seed is in the test's name and PTRAIN_SEED sets it.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from itertools import product

import pytest

from ptrain.errors import SpecError
from ptrain.verification.compare import FP64
from ptrain.verification.compare import compare as compare_runs
from tests.gloo.cases import Case
from tests.gloo.outcomes import Runs
from tests.gloo.test_exact import failing, require_complete

pytestmark = pytest.mark.gloo

SEED = int(os.environ.get("PTRAIN_SEED") or random.randrange(10_000))
DRAWN = 12
TUPLES = tuple(product(("R", "S*"), ("R", "S"), ("R", "S")))
NAMED = {
    (("dp_replicate", ("R", "R", "R")),),  # ddp
    (("dp_replicate", ("R", "S", "R")),),  # ddp-zero-redundancy
    (("dp_shard", ("R", "S", "R")),),  # zero1
    (("dp_shard", ("R", "S", "S")),),  # zero2
    (("dp_shard", ("S*", "S", "S")),),  # zero3
    (("dp_replicate", ("R", "R", "R")), ("dp_shard", ("S*", "S", "S"))),  # hsdp
    (("dp_replicate", ("R", "S", "R")), ("dp_shard", ("S*", "S", "S"))),  # hsdp-full-optimizer
}
AXES = (("dp_replicate",), ("dp_shard",), ("dp_replicate", "dp_shard"))


def unnamed() -> Iterator[Case]:
    """Every legal one, with a size, layout and K of its own."""
    for axes in AXES:
        for tuples in product(TUPLES, repeat=len(axes)):
            placement = tuple(zip(axes, tuples, strict=True))
            if placement in NAMED:
                continue
            case = _case(placement)
            try:
                case.spec()
            except SpecError as error:
                assert all(fault.place.startswith("placement") for fault in error.faults), error
                continue
            yield case


def _case(placement: tuple[tuple[str, tuple[str, str, str]], ...]) -> Case:
    draw = random.Random(str(placement))
    states = ("parameters", "optimizer", "gradients")
    return Case(
        name="+".join(f"{axis}={','.join(tuple_)}" for axis, tuple_ in placement),
        placement=tuple(
            (axis, (*zip(states, tuple_, strict=True), ("activations", "R")))
            for axis, tuple_ in placement
        ),
        size=4 if len(placement) == 2 else draw.choice((2, 4)),
        layout=draw.choice(("fp32", "zero16")),
        accumulate=draw.choice((1, 4)),
        fp64=True,
    )


LEGAL = tuple(unnamed())
CHOSEN = set(random.Random(SEED).sample(LEGAL, DRAWN))


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            case,
            id=f"seed{SEED}-{case}" if case in CHOSEN else str(case),
            marks=() if case in CHOSEN else (pytest.mark.nightly,),
        )
        for case in LEGAL
    ],
)
def test_a_tuple_without_a_name_is_exact_and_equals_one_device(runs: Runs, case: Case) -> None:
    outcome = runs.of(case)
    require_complete(outcome)
    assert not failing(outcome.checks)
    assert not failing(compare_runs(runs.reference(case), outcome.trajectory, FP64))
