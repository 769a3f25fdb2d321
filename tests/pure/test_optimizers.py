"""The resolved spec, prediction and time of an optimizer that is not fused follow from its row."""

from __future__ import annotations

import math

import pytest

from ptrain.derivation.ghosts.in_place import InPlace
from ptrain.derivation.ghosts.wrapping import WrapContext
from ptrain.facts.model import Operator
from ptrain.spec.cluster import OperatorKind
from ptrain.spec.job import OPTIMIZERS
from ptrain.spec.precision import FP32, LAYOUTS, DType
from tests.pure.changes import load_changed
from tests.pure.test_rates import pace
from tests.pure.test_wrapper_replay import FACTS, plan_spec

NAMES = [name for name, row in OPTIMIZERS.items() if row.temporaries]
BETAS = {"nadam": (0.9, 0.999), "lion": (0.9, 0.99)}  # of torch, and of Lion's authors
KEPT = {"nadam": (2, 2), "lion": (1, 0)}  # moments, and numbers in fp32
TEMPORARIES = {"nadam": 2, "lion": 1}


@pytest.mark.parametrize("name", NAMES)
def test_betas_are_those_that_users_of_the_optimizer_expect(name: str) -> None:
    assert load_changed(optimizer={"name": name}).optimizer.betas == BETAS[name]
    written = load_changed(optimizer={"name": name, "betas": [0.5, 0.25]})
    assert written.optimizer.betas == (0.5, 0.25)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=lambda layout: layout.name)
@pytest.mark.parametrize("name", NAMES)
def test_an_update_in_place_has_temporaries_of_its_largest_tensor(layout, name: str) -> None:
    spec, plan = plan_spec({}, layout=layout, optimizer=name)
    update = InPlace(WrapContext(spec=spec, plan=plan, facts=FACTS))
    moments, numbers = KEPT[name]
    master = layout.master.itemsize if layout.master else 0
    kept = FACTS.numel * (moments * layout.moments.itemsize + master)
    assert update.optimizer_bytes(0) == kept + 4 * numbers * len(FACTS.tensors)
    casts = (layout.gradients is not layout.update_dtype) + moments * (
        layout.moments is not layout.update_dtype
    )
    rises = [
        casts * unit.numel + TEMPORARIES[name] * max(map(math.prod, unit.shapes))
        for unit in FACTS.units[1:]
    ]
    expected = [rise * layout.update_dtype.itemsize for rise in rises]
    assert list(update.temporary_bytes(0)) == expected


@pytest.mark.parametrize("name", NAMES)
def test_an_update_takes_the_time_of_its_operators(name: str) -> None:
    known = pace()
    own = [
        known.operator_seconds(Operator(OperatorKind.POINTWISE, DType.FP32, (4 * 500 * number,)))
        for number in OPTIMIZERS[name].operators
    ]
    taken = known.update_seconds(name, FP32, elements=1000, tensors=2)
    assert taken == pytest.approx(2 * sum(own)) and len(own) >= 5
