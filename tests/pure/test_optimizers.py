"""The resolved spec, prediction and time of an optimizer that is not fused follow from its row."""

from __future__ import annotations

import math

import pytest

from ptrain.derivation.ghosts.in_place import InPlace
from ptrain.derivation.ghosts.wrapping import WrapContext
from ptrain.errors import SpecError
from ptrain.facts.model import Operator
from ptrain.optimizers.ghost import update_operators
from ptrain.spec.cluster import OperatorKind
from ptrain.spec.job import OPTIMIZERS
from ptrain.spec.load import load
from ptrain.spec.precision import FP32, LAYOUTS, DType
from ptrain.train.manifest import difference_lines, trained_sections
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


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=lambda layout: layout.name)
def test_adafactor_keeps_a_row_and_a_column_of_each_matrix_and_all_of_a_vector(layout) -> None:
    spec, plan = plan_spec({}, layout=layout, optimizer="adafactor")
    update = InPlace(WrapContext(spec=spec, plan=plan, facts=FACTS))
    shapes = [tensor.shape for tensor in FACTS.tensors]
    moments = sum(sum(shape) for shape in shapes)  # N + K, or N of a vector
    assert {len(shape) for shape in shapes} == {1, 2}
    master = layout.master.itemsize if layout.master else 0
    kept = moments * layout.moments.itemsize + master * FACTS.numel + 4 * len(shapes)
    assert update.optimizer_bytes(0) == kept


def test_adafactor_is_timed_as_operators_of_its_tensors() -> None:
    matrix = list(update_operators("adafactor", (6, 4), DType.FP32))
    assert Operator(OperatorKind.PRODUCT, DType.FP32, (1, 6, 1, 4)) in matrix
    vector = list(update_operators("adafactor", (6,), DType.FP32))
    assert all(operator.kind is not OperatorKind.PRODUCT for operator in vector)


@pytest.mark.parametrize(
    ("optimizer", "place"),
    [
        ({"name": "adafactor", "betas": [0.9, 0.99]}, "optimizer.betas"),
        ({"name": "adafactor", "eps": 1e-6}, "optimizer.eps"),
        ({"name": "adafactor", "momentum": 0.9}, "optimizer.momentum"),
        ({"name": "adamw", "beta2_decay": -0.5}, "optimizer.beta2_decay"),
        ({"name": "muon", "d": 2.0}, "optimizer.d"),
        ({"groups": [{"match": "head", "name": "adafactor", "eps": 0.1}]}, "optimizer.groups"),
    ],
)
def test_keys_of_other_optimizers_are_rejected_by_name(optimizer, place: str) -> None:
    with pytest.raises(SpecError, match="does not read") as error:
        load_changed(optimizer=optimizer)
    assert [fault.place for fault in error.value.faults] == [place]


FULL = {  # every section of the optimizer in a run folder of an earlier version
    "betas": [0.9, 0.95],
    "eps": 1e-8,
    "momentum": 0.0,
    "beta2_decay": -0.8,
    "eps2": 1e-3,
    "d": 1.0,
}
READ = {
    "adamw": {"betas", "eps"},
    "sgd": {"momentum"},
    "nadam": {"betas", "eps"},
    "lion": {"betas"},
    "muon": {"momentum", "betas", "eps"},  # AdamW updates all that are no matrices
    "adafactor": {"beta2_decay", "eps2", "d"},
}


@pytest.mark.parametrize("name", READ)
def test_a_resolved_spec_has_the_keys_that_its_optimizer_reads(name: str) -> None:
    written = load_changed(placement="ddp", mesh={"dp_replicate": 2}, optimizer={"name": name})
    section = written.resolved["optimizer"]
    assert isinstance(section, dict) and FULL.keys() & section.keys() == READ[name]
    assert load(written.resolved).spec == written


def test_a_group_with_another_optimizer_keeps_the_keys_of_both() -> None:
    groups = [{"match": "matrices", "name": "muon"}]
    written = load_changed(
        placement="ddp", mesh={"dp_replicate": 2}, optimizer={"name": "sgd", "groups": groups}
    )
    assert FULL.keys() & written.resolved["optimizer"].keys() == READ["sgd"] | READ["muon"]


def test_a_record_with_the_keys_of_all_optimizers_is_the_same_spec() -> None:
    now = load_changed()
    older = dict(now.resolved) | {"optimizer": {**FULL, **now.resolved["optimizer"]}}
    assert load(older).spec == now
    manifest = trained_sections(now) | {"optimizer": older["optimizer"]}
    assert not list(difference_lines(manifest, now))
    manifest["optimizer"] = older["optimizer"] | {"eps2": 0.5}
    assert [line.split(":")[0] for line in difference_lines(manifest, now)] == ["optimizer.eps2"]


def test_a_key_that_the_optimizer_does_not_read_is_written_if_it_was_set() -> None:
    written = load_changed(optimizer={"name": "sgd", "eps": 0.5}).resolved["optimizer"]
    assert written["eps"] == 0.5 and "betas" not in written
