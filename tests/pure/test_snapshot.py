"""The predictions of every spec equal tests/pure/snapshot.json.xz. To change a figure, `python
benchmarks/snapshot.py --write` stores the new value and lists the changes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ptrain.spec.load import load
from tests.adversary import covering_specs as draw

ROOT = Path(__file__).parents[2]
NAMES = [
    path.stem
    for folder in ("strategies", "node", "paper")
    for path in sorted((ROOT / "specs" / folder).glob("*.yaml"))
]
DRAWN, AT_ONCE = 300, 10


@pytest.fixture(scope="module")
def modules(benchmark_module: Callable[[str], ModuleType]) -> dict[str, ModuleType]:
    return {name: benchmark_module(name) for name in ("snapshot", "_predictions")}


@pytest.fixture(scope="module")
def snapshot(modules: dict[str, ModuleType]) -> ModuleType:
    return modules["snapshot"]


@pytest.fixture(scope="module")
def frozen(snapshot: ModuleType) -> dict[str, Any]:
    return snapshot.frozen()


def test_the_snapshot_has_every_spec_with_a_file_and_300_that_were_drawn(snapshot, frozen):
    assert set(frozen["named"]) == {*NAMES, *snapshot.WIDE} == set(snapshot.named())
    assert list(frozen["drawn"]) == [f"drawn-{number:03}" for number in range(DRAWN)]


@pytest.mark.parametrize("name", [*NAMES, "405b-4096"])
def test_a_spec_with_a_file_keeps_its_prediction(snapshot, frozen, name):
    changed = snapshot.lines(name, frozen["named"][name], snapshot.predicted(name))
    assert not changed, "\n".join(["", *changed])


@pytest.mark.parametrize("first", range(0, DRAWN, AT_ONCE))
def test_a_random_spec_keeps_its_prediction(snapshot, frozen, first):
    changed = []
    for number in range(first, first + AT_ONCE):
        name = f"drawn-{number:03}"
        row = frozen["drawn"][name]
        predicted = snapshot.predicted_of_drawn(row["written"])
        changed += snapshot.lines(name, row["predicted"], predicted)
    assert not changed, "\n".join(["", *changed])


def test_the_random_specs_cover_every_mode_tier_layout_optimizer_option_and_schedule(frozen):
    specs = [row["written"] for row in frozen["drawn"].values()]
    assert not draw.rare(specs, draw.choices(), draw.labels)


@pytest.mark.nightly
def test_specs_can_be_drawn_again_from_the_current_grammar():
    specs = draw.random_specs()
    assert len(specs) == DRAWN
    assert not draw.rare(specs, draw.choices(), draw.labels)
    assert not draw.rare(specs, draw.consequences(), draw.consequences_of)


CHANGED: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "memory": (
        lambda exact: exact["ranks"][0][1].update({"memory parameters host": 5}),
        "x: exact memory parameters host, ranks 0–1: 0 -> 5",
    ),
    "peak": (
        lambda exact: exact["ranks"][0][1].pop("peak update"),
        "x: exact peak update, ranks 0–1: {} -> –",
    ),
    "note": (lambda exact: exact["notes"].append("y"), "x: exact notes: {} -> {}"),
    "undefined": (
        lambda exact: exact["undefined"].update(peak="y"),
        "x: exact undefined peak: – -> y",
    ),
    "traffic": (
        lambda exact: exact["traffic"].update({"traffic z": [[1, 2, 3]]}),
        "x: exact traffic z: – -> [[1, 2, 3]]",
    ),
}


@pytest.mark.parametrize("kind", CHANGED)
def test_a_figure_that_changed_is_named_with_its_ranks_and_both_values(snapshot, frozen, kind):
    before = frozen["named"]["zero1"]
    after = copy.deepcopy(before)
    change, expected = CHANGED[kind]
    change(after["exact"])
    peak = before["exact"]["ranks"][0][1]["peak update"]
    notes = before["exact"]["notes"], after["exact"]["notes"]
    words = (str(peak),) if kind == "peak" else tuple(map(str, notes))
    assert snapshot.lines("x", before, after) == [expected.format(*words)]
    assert not snapshot.lines("x", before, before)


def test_a_differing_rank_is_named(modules):
    table = modules["_predictions"]
    before = {"exact": {"ranks": [[table.progressions(range(4096)), {"peak update": 1}]]}}
    others = [rank for rank in range(4096) if rank % 8 != 3]
    differing = [[table.progressions([*range(3, 4096, 8)]), {"peak update": 2}]]
    after = {"exact": {"ranks": [[table.progressions(others), {"peak update": 1}], *differing]}}
    assert list(table.changes(before, after)) == [
        ("exact peak update, ranks 3–4091 by 8", 1, 2)
    ]  # fmt: skip


@pytest.mark.parametrize("ranks", [[0], [0, 1, 2], [3, 5, 7, 8, 9, 30], [*range(1, 4096, 8)]])
def test_ranks_are_kept_as_progressions_and_read_back(modules, ranks):
    table = modules["_predictions"]
    runs = table.progressions(ranks)
    assert table.ranks_in(runs) == ranks
    assert len(runs) <= len(ranks)


def test_a_mesh_keeps_its_order(frozen):
    meshes = {tuple(row["written"]["mesh"]) for row in frozen["drawn"].values()}
    assert ("pp", "dp_shard", "tp") in meshes
    for row in frozen["drawn"].values():
        spec = load(row["written"]).spec
        axes = [axis for axis, degree in row["written"]["mesh"].items() if degree > 1]
        assert [factor.axis.value for factor in spec.factors] == axes
