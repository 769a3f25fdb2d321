"""Models wrapped by torch, measured from outside: the prediction of a spec holds, and a wrapper
that differs from the spec is reported at the first steady step."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from ptrain.algebra.legality import require_runnable
from ptrain.cost import Estimate, Phase, State
from ptrain.meters.measure import Measurement, measure
from ptrain.models.initialize import build_model, initialize
from ptrain.report.record import Check
from ptrain.spec.load import load
from ptrain.spec.spec import Spec
from ptrain.train.comparison import Comparison, compare, ranks_over_axes
from tests.ranks import Ranks

pytestmark = pytest.mark.gloo

STEPS = 3  # the third is steady
SIZES = (
    "model.preset=llama-tiny", "model.layers=2", "batch.micro=2", "batch.sequence=16",
    "optimizer.clip=null",
)  # fmt: skip


def foreign_spec(strategy: str, size: int, accumulate: int = 1) -> Spec:
    axes = {"ddp": ("dp_replicate",), "hsdp": ("dp_replicate", "dp_shard")}
    chosen = axes.get(strategy, ("dp_shard",))
    overrides = [*SIZES, f"batch.global={2 * size * accumulate}"]
    overrides += [f"mesh.{axis}={size if len(chosen) == 1 else 2}" for axis in chosen]
    return require_runnable(load(strategy, tuple(overrides)))


def wrap_with_torch(way: str, spec: Spec, size: int) -> nn.Module:
    """Wrap the model with torch only."""
    model = build_model(spec.model, sequence=spec.batch.sequence)
    initialize(model, 0)
    if way == "ddp":
        return DistributedDataParallel(model, gradient_as_bucket_view=True)
    mesh = init_device_mesh("cpu", (size,))
    if way == "hybrid":
        mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("outer", "inner"))
    after_forward = {"by itself": None, "kept": False}.get(way, True)
    if way != "root only":
        for block in model.blocks:
            fully_shard(block, mesh=mesh, reshard_after_forward=after_forward)
    return fully_shard(model, mesh=mesh, reshard_after_forward=after_forward)


def _checks(way: str, predicted: str, size: int, accumulate: int = 1) -> Comparison:
    measurement = _measure_steps(way, predicted, size, accumulate)
    return compare(foreign_spec(predicted, size, accumulate), measurement)


def _measure_steps(way: str, predicted: str, size: int, accumulate: int = 1) -> Measurement:
    spec = foreign_spec(predicted, size, accumulate)
    model = wrap_with_torch(way, spec, size)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step() -> None:
        for index in range(accumulate):
            if isinstance(model, DistributedDataParallel):
                model.require_backward_grad_sync = index == accumulate - 1
            rows = torch.randint(0, 200, (2, 17))
            loss = F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(STEPS - 1):
        step()
    with measure(model, optimizer=optimizer) as measurement:
        step()
    return measurement


def failed_checks(checks: Iterable[Check]) -> list[str]:
    return [check.name for check in checks if not check.holds]


@pytest.mark.parametrize(
    ("way", "predicted", "size", "accumulate"),
    [
        ("ddp", "ddp", 2, 1),
        ("ddp", "ddp", 2, 2),
        ("by block", "zero3", 2, 1),
        ("by block", "zero3", 4, 1),
        ("hybrid", "hsdp", 4, 1),
    ],
)
def test_a_model_wrapped_by_torch_is_predicted(
    ranks: Ranks, way: str, predicted: str, size: int, accumulate: int
) -> None:
    for rank, checks in enumerate(ranks.run(size, _checks, way, predicted, size, accumulate)):
        assert not [check for check in checks if not check.holds]
        for state in (State.PARAMETERS, State.OPTIMIZER, State.GRADIENTS):
            (check,) = (each for each in checks if each.name == f"memory {state} rank {rank}")
            assert check.measured


def test_replicas_instead_of_predicted_shards_are_reported(ranks: Ranks) -> None:
    for rank, checks in enumerate(ranks.run(2, _checks, "ddp", "zero3", 2)):
        failed = failed_checks(checks)
        for state in (State.PARAMETERS, State.OPTIMIZER, State.GRADIENTS):
            assert f"memory {state} rank {rank}" in failed
        assert "traffic dp_shard all_gather forward parameters calls" in failed
        assert "traffic dp_shard reduce_scatter backward gradients calls" in failed
        assert "traffic dp_shard all_reduce backward gradients sent" in failed
        assert checks.cause.startswith("every rank has the full model")


def test_one_unit_instead_of_predicted_blocks_is_reported(ranks: Ranks) -> None:
    for checks in ranks.run(2, _checks, "root only", "zero3", 2):
        failed = failed_checks(checks)
        assert "traffic dp_shard all_gather forward parameters calls" in failed
        assert "traffic dp_shard reduce_scatter backward gradients calls" in failed
        calls = {check.name: (check.predicted, check.measured) for check in checks}
        assert calls["traffic dp_shard reduce_scatter backward gradients calls"] == (3, 1)
        assert not any(name.startswith("memory") for name in failed)
        assert checks.cause.startswith("the full model is one unit; use `unit: model`")


def _compare_reshard_values(way: str, written: tuple[str, ...]) -> list[Comparison]:
    """Return the checks of one measurement by `zero3` with each value of `reshard`."""
    spec, measurement = foreign_spec("zero3", 2, 2), _measure_steps(way, "zero3", 2, 2)
    return [
        compare(load(spec.resolved, [f"reshard={value}"]).spec, measurement) for value in written
    ]


def test_the_default_reshard_of_fully_shard_is_named_non_root(ranks: Ranks) -> None:
    for given_back, non_root, kept in ranks.run(
        2, _compare_reshard_values, "by itself", ("true", "non-root", "false")
    ):
        backward = "traffic dp_shard all_gather backward parameters"
        assert failed_checks(given_back) == [
            f"{backward} {what}" for what in ("calls", "payload", "sent")
        ]
        for check in given_back:
            assert check.holds is not ("the root stays unsharded" in check.why)
            assert check.holds is not ("use `reshard: non-root`" in check.why)
        assert str(given_back).count("use `reshard: non-root`, which predicts every figure") == 1
        assert non_root and not failed_checks(non_root)
        assert all(check.predicted == check.measured and not check.why for check in non_root)
        assert all("non-root" in check.why for check in kept if not check.holds) and failed_checks(
            kept
        )


@pytest.mark.nightly
@pytest.mark.parametrize(("way", "value"), [("kept", "false"), ("by block", "true")])
def test_explicit_reshard_values_are_named(ranks: Ranks, way: str, value: str) -> None:
    for (wrong,) in ranks.run(2, _compare_reshard_values, way, ("non-root",)):
        assert failed_checks(wrong)
        assert all(f"reshard: {value}" in check.why for check in wrong if not check.holds)


def _failed_mixed_precision(reduced: torch.dtype, fault: str = "") -> list[str]:
    """Return the failed checks of FSDP2's mixed precision, by the spec of the layout that reduces
    in that dtype."""
    layout = "fsdp-mixed" if reduced is torch.bfloat16 else "megatron18"
    overrides = [*SIZES, "batch.global=4", f"precision.layout={layout}"]
    spec = require_runnable(load("fsdp-mixed", overrides))
    model = build_model(spec.model, sequence=spec.batch.sequence)
    initialize(model, 0)
    if fault == "narrow master":
        model = model.bfloat16()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduced)
    for part in (*model.blocks, model):
        fully_shard(part, reshard_after_forward=True, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), amsgrad=fault == "third moment")

    def step() -> None:
        rows = torch.randint(0, 200, (2, 17))
        logits = model(rows[:, :-1]).float()
        F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(STEPS - 1):
        step()
    with measure(model, optimizer=optimizer) as measurement:
        step()
    comparison = compare(spec, measurement)
    assert len(comparison) >= 11
    return failed_checks(comparison)


@pytest.mark.parametrize("reduced", [torch.bfloat16, torch.float32])
def test_shards_that_are_master_copies_hold_under_either_name(
    ranks: Ranks, reduced: torch.dtype
) -> None:
    assert ranks.run(2, _failed_mixed_precision, reduced) == [[], []]


@pytest.mark.parametrize("fault", ["third moment", "narrow master"])
def test_other_bytes_of_master_copies_or_moments_fail(ranks: Ranks, fault: str) -> None:
    for rank, names in enumerate(ranks.run(2, _failed_mixed_precision, torch.bfloat16, fault)):
        assert f"memory optimizer rank {rank}" in names


def _phases() -> Estimate:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        with measure(model, optimizer=optimizer) as measurement:
            for _ in range(2):
                model(torch.ones(4, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return measurement.estimate()


def test_an_unwrapped_model_has_states_and_phases() -> None:
    estimate = _phases()
    parameters = 4 * 2 * (64 + 8)
    assert [row.phase for row in estimate.peak] == [Phase.FORWARD, Phase.BACKWARD, Phase.UPDATE]
    for state in (State.PARAMETERS, State.OPTIMIZER, State.GRADIENTS):
        assert estimate.bytes_of(state) == parameters
    assert estimate.traffic == ()


def test_ranks_over_axes_match_a_row_major_mesh() -> None:
    mesh = ("mesh={dp_replicate: 2, dp_shard: 3}", "batch.global=12")
    spec = load("hsdp", (*SIZES, *mesh)).spec
    assert ranks_over_axes(spec, 4) == {
        ("dp_replicate",): (1, 4),
        ("dp_shard",): (3, 4, 5),
        ("dp_replicate", "dp_shard"): (0, 1, 2, 3, 4, 5),
    }
