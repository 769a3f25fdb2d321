"""A model in stages, under every schedule and within every other axis, computes the result of one
device at exactly the predicted cost."""

from __future__ import annotations

from functools import partial
from itertools import cycle
from typing import Any

import pytest

from tests.gloo.pipeline_cases import (
    DATA,
    MODELS,
    SCHEDULES,
    factorizations,
    layer_count,
    pipeline_spec,
)
from tests.gloo.pipeline_runs import MATRIX
from tests.ranks import Ranks

pytestmark = pytest.mark.gloo

nightly = partial(pytest.param, marks=pytest.mark.nightly)
TWO, FOUR = {"pp": 2}, {"pp": 4}
NO_CLIP = {"optimizer": {"clip": None}}
GIVE_BACK: dict[str, Any] = {
    "sync": {"reshard_after_forward": True, "reshard_after_backward": True}
}
FROM_FORWARD = {"sync": {"reshard_after_forward": True, "reshard_after_backward": False}}
NON_ROOT: dict[str, Any] = {
    "sync": {"reshard_after_forward": "non-root", "reshard_after_backward": True}
}
BOTH = {"sync": {**GIVE_BACK["sync"], "gradients": "last"}}
REDUCE_LAST = {"sync": {"gradients": "last"}}
STAGES: list[Any] = [
    ("gpt-tied", "naive", TWO, NO_CLIP),
    ("gqa", "gpipe", TWO, {"pipeline": {"split": [3, 1]}, "batch": {"micro": 2}}),
    ("llama-tied", "bfs", TWO, {}),
    ("gpt", "zero-bubble", TWO, {"pipeline": {"stages": 4}}),
    ("llama-tied", "dualpipev", TWO, {}),
    ("gpt-tied", "1f1b", FOUR, {"batch": {"accumulate": 3}}),
    nightly("gpt-tied", "1f1b", FOUR, {}),
    nightly("llama", "zero-bubble", FOUR, {}),
    nightly("gqa", "zbv", FOUR, {"batch": {"accumulate": 7}}),
    *(
        nightly(model, schedule, mesh, {"batch": {"accumulate": 8, "micro": micro}})
        for mesh, micro in ((TWO, 2), (FOUR, 1))
        for schedule, model in zip(SCHEDULES, cycle(MODELS), strict=False)
    ),
    nightly("llama", "interleaved", TWO, {"pipeline": {"split": [1, 2, 2, 1, 1, 1]}}),
    nightly("gpt-tied", "zbv", TWO, {"pipeline": {"split": [1, 1, 3, 3]}}),
    nightly("gqa", "bfs", TWO, {"pipeline": {"stages": 8}, **NO_CLIP}),
    nightly("gpt", "zero-bubble", FOUR, {"pipeline": {"stages": 8, "split": "layers"}}),
]
# Each factorization of four ranks in this order: data ranks, tp, tp and slices, ZeRO-1 to 3, none.
# By default each axis with pp once; ZeRO-3 with pp is in POLICIES, none in STAGES.
BY_DEFAULT = (0, 2, 4)
OF_FOUR: list[Any] = [
    ("gpt-tied", "1f1b", {}),
    ("gqa", "interleaved", {}),
    ("gpt-tied", "zbv", {}),
    ("llama", "zero-bubble", {}),
    ("gqa", "gpipe", NO_CLIP),
    ("gpt", "dualpipev", {}),
    ("llama-tied", "dualpipev", {"batch": {"accumulate": 8}}),
]
POLICIES: list[Any] = [
    ("1f1b", "zero3", GIVE_BACK),
    *(
        nightly(schedule, data, policy)
        for schedule in SCHEDULES
        for data, policy in (("zero2", REDUCE_LAST), ("zero3", REDUCE_LAST))
    ),
    *(
        nightly(schedule, "zero3", policy)
        for schedule in ("gpipe", "1f1b", "bfs", "interleaved")
        for policy in (
            GIVE_BACK,
            FROM_FORWARD,
            NON_ROOT,
            {"sync": {**GIVE_BACK["sync"], "gradients": "last"}},
        )
    ),
    nightly("1f1b", "S*,R,S,R", {}),
    nightly("zbv", "S*,R,S,R", {}),
    nightly("interleaved", "O,O,S,R", {}),
]
LAYOUTS: list[Any] = [
    nightly("gpt-tied", "zero16", "gpipe", {}),
    ("gqa", "fsdp-mixed", "zbv", {"dp_shard": 2}),
    nightly("llama", "fp32", "1f1b", {}),
    nightly("llama-tied", "bf16", "interleaved", {"dp_shard": 2}),
    nightly("gpt", "fp16", "dualpipev", {}),
    nightly("gpt-tied", "zero16", "1f1b", {"dp_shard": 2}),
    nightly("llama-tied", "zero16", "zero-bubble", {"dp_replicate": 2}),
    nightly("gpt", "bf16", "1f1b", {"tp": 2}),
]


def with_enough_layers(
    mesh: dict[str, int], schedule: str, changes: dict[str, Any]
) -> dict[str, Any]:
    """Return `changes` with at least one layer per stage."""
    said = changes.get("pipeline", {})
    split = said.get("split")
    stages = sum(split) if isinstance(split, list) else said.get("stages", 0)
    return {"shape": {"layers": max(stages, layer_count(mesh["pp"], schedule))}, **changes}


@pytest.mark.parametrize(("model", "schedule", "mesh", "changes"), STAGES, ids=str)
def test_stages_are_exact_and_equal_one_device(
    ranks: Ranks, model: str, schedule: str, mesh: dict[str, int], changes: dict[str, Any]
) -> None:
    given = with_enough_layers(mesh, schedule, changes)
    assert not MATRIX.differences(ranks, pipeline_spec(model, schedule, mesh=mesh, **given))


@pytest.mark.parametrize(
    ("product", "case"),
    [
        pytest.param(*pair, marks=() if place in BY_DEFAULT else pytest.mark.nightly)
        for place, pair in enumerate(zip(factorizations(4), OF_FOUR, strict=True))
    ],
    ids=str,
)
def test_every_factorization_of_four_ranks_with_pp_is_exact_and_equals_one_device(
    ranks: Ranks, product: tuple[dict[str, int], str, str], case: tuple[str, str, dict[str, Any]]
) -> None:
    (mesh, data, activations), (model, schedule, changes) = product, case
    given = with_enough_layers(mesh, schedule, changes)
    spec = pipeline_spec(model, schedule, mesh=mesh, data=data, activations=activations, **given)
    assert not MATRIX.differences(ranks, spec)


@pytest.mark.parametrize(
    ("mesh", "data", "schedule"),
    [
        ({"dp_shard": 2, "pp": 2}, "zero2", "interleaved"),
        nightly({"dp_replicate": 2, "pp": 2}, "ddp", "zbv"),
        *(nightly({"dp_shard": 2, "pp": 2}, data, "1f1b") for data in DATA),
        nightly({"dp_shard": 2, "pp": 2}, "zero3", "dualpipev"),
    ],
    ids=str,
)
def test_pp_inside_data_axes_of_remark_4_is_exact_and_equals_one_device(
    ranks: Ranks, mesh: dict[str, int], data: str, schedule: str
) -> None:
    assert not MATRIX.differences(ranks, pipeline_spec("gpt-tied", schedule, mesh=mesh, data=data))


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("mesh", "data", "schedule"),
    [
        *(({"dp_shard": 2, "pp": 2, "tp": 2}, data, "bfs") for data in ("zero1", "zero3")),
        ({"dp_replicate": 2, "pp": 4}, "ddp", "gpipe"),
    ],
    ids=str,
)
def test_pp_inside_data_axes_of_remark_4_on_eight_ranks_is_exact_and_equals_one_device(
    ranks: Ranks, mesh: dict[str, int], data: str, schedule: str
) -> None:
    assert not MATRIX.differences(ranks, pipeline_spec("gpt-tied", schedule, mesh=mesh, data=data))


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("product", "schedule"),
    [
        (product, schedule)
        for product, first in zip(factorizations(4), cycle(range(4)), strict=False)
        for schedule in (SCHEDULES[1 + first], SCHEDULES[4 + first])
    ],
    ids=str,
)
def test_other_schedules_on_four_ranks_are_exact_and_equal_one_device(
    ranks: Ranks, product: tuple[dict[str, int], str, str], schedule: str
) -> None:
    mesh, data, activations = product
    given = with_enough_layers(mesh, schedule, {"batch": {"accumulate": 8}})
    spec = pipeline_spec(
        "gpt-tied", schedule, mesh=mesh, data=data, activations=activations, **given
    )
    assert not MATRIX.differences(ranks, spec)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("product", "schedule", "model"),
    list(zip(factorizations(8), cycle(SCHEDULES[1:]), cycle(MODELS), strict=False)),
    ids=str,
)
def test_every_factorization_of_eight_ranks_with_pp_is_exact_and_equals_one_device(
    ranks: Ranks, product: tuple[dict[str, int], str, str], schedule: str, model: str
) -> None:
    mesh, data, activations = product
    needed = mesh["pp"] * (2 if schedule == "dualpipev" else 1)  # 1f1b too is full with as many
    given = with_enough_layers(mesh, schedule, {"batch": {"accumulate": max(4, needed)}})
    if mesh.get("tp", 1) > 2 and MODELS[model].get("kv_heads") == 2:
        given["shape"]["kv_heads"] = 4  # as many as there are ranks to cut them
    spec = pipeline_spec(model, schedule, mesh=mesh, data=data, activations=activations, **given)
    assert not MATRIX.differences(ranks, spec)


@pytest.mark.parametrize(("schedule", "data", "policy"), POLICIES, ids=str)
def test_every_sync_policy_with_pp_is_exact_and_equals_one_device(
    ranks: Ranks, schedule: str, data: str, policy: dict[str, Any]
) -> None:
    spec = pipeline_spec("gqa", schedule, mesh={"pp": 2, "dp_shard": 2}, data=data, **policy)
    assert not MATRIX.differences(ranks, spec)


@pytest.mark.parametrize(("model", "layout", "schedule", "beside"), LAYOUTS, ids=str)
def test_in_true_dtypes_bytes_are_exact_and_losses_within_their_band(
    ranks: Ranks, model: str, layout: str, schedule: str, beside: dict[str, int]
) -> None:
    precision, batch = {"layout": layout}, {"micro": 2}
    mesh = {"pp": 2, **beside}
    assert not MATRIX.differences(
        ranks, pipeline_spec(model, schedule, mesh=mesh, precision=precision, batch=batch)
    )


# Reductions that outlive their pass, and gathers that an update left to the next step.
BESIDE = {"overlap": "backward"}
LATE = {"gather_after_update": "next-forward"}
OVERLAPPED = (
    ("1f1b", "zero1", BESIDE | LATE),
    ("interleaved", "zero2", BESIDE),
    nightly("1f1b", "zero1", BESIDE),
    nightly("1f1b", "zero1", LATE),
    nightly("1f1b", "zero2", BESIDE | LATE),
    nightly("1f1b", "zero2", BESIDE | {"sync": {"gradients": "last"}}),
    nightly("interleaved", "zero1", BESIDE | LATE),
    nightly("zero-bubble", "zero1", BESIDE | LATE),
    nightly("zero-bubble", "zero2", BESIDE),
    nightly("zbv", "zero2", BESIDE | LATE),
    nightly("dualpipev", "zero1", BESIDE),
    nightly("gpipe", "R,R,R,R", BESIDE),
)


@pytest.mark.parametrize(("schedule", "data", "dials"), OVERLAPPED, ids=str)
def test_overlapped_collectives_change_no_figure(
    ranks: Ranks, schedule: str, data: str, dials: dict[str, Any]
) -> None:
    mesh = {"pp": 2, "dp_shard": 2}
    assert not MATRIX.differences(
        ranks, pipeline_spec("gpt-tied", schedule, mesh=mesh, data=data, **dials)
    )
