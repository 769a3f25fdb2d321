"""Optimizers that are not fused are predicted to the byte, including peaks, and compute the result
of their reference on one device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ptrain.algebra.legality import require_runnable
from ptrain.cost import Phase
from ptrain.spec.job import OPTIMIZERS
from ptrain.spec.load import load
from ptrain.spec.spec import Spec
from tests.gloo import pipeline_cases, tensor_cases
from tests.gloo.outcomes import MEASURED_STEP, Outcome
from tests.gloo.rows import ROWS, default_setting
from tests.gloo.runs import train_on_rank
from tests.gloo.test_exact import failed_checks
from tests.gloo.test_flat_state import require_a_move
from tests.ranks import Ranks
from tests.trajectories import FP64, compare, one_device

pytestmark = pytest.mark.gloo

STEPS = 4
NAMES = tuple(name for name, row in OPTIMIZERS.items() if row.temporaries)


def row_spec(row: str, *, optimizer: Mapping[str, Any]) -> Spec:
    mapping = default_setting(row).with_dials(fp64=True).mapping()
    return require_runnable(load(mapping | {"optimizer": mapping["optimizer"] | optimizer}))


def case_spec(spec_of: Callable[..., Spec], *, optimizer: Mapping[str, Any]) -> Spec:
    return spec_of(optimizer={"lr": 3e-3, "schedule": {"warmup": 2}, **optimizer})


CASES: Mapping[str, Callable[..., Spec]] = {
    **{row: partial(row_spec, row) for row in ROWS if row != "muon"},
    **{
        f"tp-{name}": partial(
            case_spec, partial(tensor_cases.tensor_spec, activations="S", data={"dp_shard": name})
        )
        for name in ("zero1", "zero3")
    },
    **{
        f"pp-{schedule}": partial(
            case_spec,
            partial(pipeline_cases.pipeline_spec, schedule=schedule, mesh={"pp": 2, "dp_shard": 2}),
        )
        for schedule in ("interleaved", "zbv")
    },
    "tp": partial(case_spec, partial(tensor_cases.tensor_spec, activations="S*")),
    "pp": partial(case_spec, partial(pipeline_cases.pipeline_spec, mesh={"pp": 2})),
}
BY_DEFAULT = {
    ("nadam", "zero1"), ("nadam", "zero3"), ("nadam", "ddp-zero-redundancy"),
    ("lion", "zero-offload-ds"), ("lion", "tp"), ("lion", "pp"),
}  # fmt: skip


def mismatches(ranks: Ranks, spec: Spec) -> list[str]:
    """Return differences from the prediction (peaks to the byte) and from one device."""
    outcome = Outcome(spec, ranks.run(spec.world_size, train_on_rank, spec, STEPS, MEASURED_STEP))
    against = compare(one_device(spec, STEPS), outcome.trajectory, FP64)
    return [*failed_checks(outcome.checks), *inexact_peaks(outcome), *failed_checks(against)]


def inexact_peaks(outcome: Outcome) -> list[str]:
    """Return peaks that differ from the prediction, apart from the loss copy that `train` keeps
    during the update."""
    copy = 8 if outcome.spec.precision.compute_fp64 else 4
    measured = {(peak.phase, peak.rank): peak.device_bytes for peak in outcome.measured.peak}
    return [
        f"peak {peak.phase} of rank {peak.rank}: predicted {peak.device_bytes}, measured {taken}"
        for peak in outcome.exact.peak
        if (taken := measured[peak.phase, peak.rank])
        != peak.device_bytes + copy * (peak.phase is Phase.UPDATE)
    ]


@pytest.mark.parametrize(
    ("name", "case"),
    [
        pytest.param(name, case, marks=() if (name, case) in BY_DEFAULT else pytest.mark.nightly)
        for name in NAMES
        for case in CASES
    ],
)
def test_an_unfused_optimizer_is_exact_and_equals_one_device(
    ranks: Ranks, name: str, case: str
) -> None:
    assert not mismatches(ranks, CASES[case](optimizer={"name": name}))


FACTORED = {"zero1": "R,S*,R,R", "zero3": "S*,S*,S*,R", "fsdp-offload": "S*@host,S*@host,S*@host,R"}


@pytest.mark.parametrize(
    ("row", "layout"),
    [
        pytest.param(
            row, layout, marks=() if (row, layout) == ("ddp", "fp32") else pytest.mark.nightly
        )
        for row in ("ddp", *FACTORED)
        for layout in ("fp32", "bf16", "fp16", "zero16", "fsdp-mixed")
    ],
)
def test_adafactor_of_full_tensors_is_exact_and_in_fp32_equals_one_device(
    ranks: Ranks, row: str, layout: str
) -> None:
    setting = default_setting(row).with_dials(fp64=layout == "fp32", layout=layout)
    mapping = setting.mapping()
    if row in FACTORED:
        mapping |= {"placement": {"dp_shard": FACTORED[row]}}
    mapping["optimizer"] |= {"name": "adafactor"}
    spec = require_runnable(load(mapping))
    if layout == "fp32":
        assert not mismatches(ranks, spec)
        return
    outcome = Outcome(spec, ranks.run(spec.world_size, train_on_rank, spec, STEPS, MEASURED_STEP))
    assert not [*failed_checks(outcome.checks), *inexact_peaks(outcome)]


@pytest.mark.nightly
@pytest.mark.parametrize("layout", ["bf16", "fp16", "zero16", "fsdp-mixed"])
@pytest.mark.parametrize("row", ["ddp", "ddp-zero-redundancy", "zero1", "zero3", "zero-offload"])
@pytest.mark.parametrize("name", NAMES)
def test_an_unfused_optimizer_in_16_bits_is_exact(
    ranks: Ranks, name: str, row: str, layout: str
) -> None:
    mapping = default_setting(row).with_dials(fp64=False, layout=layout).mapping()
    spec = require_runnable(load(mapping | {"optimizer": mapping["optimizer"] | {"name": name}}))
    outcome = Outcome(spec, ranks.run(spec.world_size, train_on_rank, spec, STEPS, MEASURED_STEP))
    assert not [*failed_checks(outcome.checks), *inexact_peaks(outcome)]
    losses = outcome.trajectory.losses
    assert losses[-1] < losses[0]


MOVES = {
    ("nadam", "ddp-zero-redundancy", "nvme"): (),
    ("nadam", "nvme", "zero3"): pytest.mark.nightly,
    ("nadam", "zero3", "ddp-zero-redundancy"): pytest.mark.nightly,
    ("lion", "zero3", "zero-offload"): pytest.mark.nightly,
}


@pytest.mark.parametrize(
    ("name", "before", "after"), [pytest.param(*move, marks=MOVES[move]) for move in MOVES]
)
def test_the_state_of_an_unfused_optimizer_moves_to_another_placement(
    ranks: Ranks, tmp_path: Path, name: str, before: str, after: str
) -> None:
    one, other = (CASES[case](optimizer={"name": name}) for case in (before, after))
    require_a_move(ranks, tmp_path, one, other)
