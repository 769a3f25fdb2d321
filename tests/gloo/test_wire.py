"""Bytes on the wire: the kernel's counts of the ranks' sockets, by axis, equal the backend's
prediction within 0.1 % for tensors larger than 1 MiB."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from ptrain.algebra.legality import require_runnable
from ptrain.cost import Column, Estimate
from ptrain.derivation.estimate import derive
from ptrain.derivation.interconnect import TOLERANCE, wire_rows
from ptrain.meters.measure import WireMeter, join_estimates
from ptrain.report.record import compare_estimates, result_record
from ptrain.runtime.comm import Mesh
from ptrain.runtime.world import World
from ptrain.spec.load import load
from ptrain.spec.placement import Axis
from ptrain.spec.spec import Spec
from ptrain.steps.step import CreateMesh
from ptrain.traces.facts import facts_of
from tests.gloo.runs import expected_estimates, train_on_rank
from tests.ranks import Ranks

pytestmark = pytest.mark.gloo

MEASURED_STEP = 2
# Units of 3 MiB and a root of 8.
LARGE = (
    "model.preset=llama-tiny", "model.layers=2", "model.hidden=256", "model.heads=4",
    "model.ffn=683", "model.vocab=4096",
    "batch.micro=1", "batch.sequence=16",
)  # fmt: skip
CONTEXT = ("cp-ring", "cp-zigzag", "cp-all-gather", "cp-ulysses", "cp-hybrid")
AXES = {
    "ddp": ("dp_replicate",),
    "hsdp": ("dp_shard", "dp_replicate"),
    **dict.fromkeys(CONTEXT, ("cp",)),
}


def wire_spec(strategy: str, size: int, via: str) -> Spec:
    axes = AXES.get(strategy, ("dp_shard",))
    overrides = [*LARGE, f"batch.global={size}", f"reduce_scatter={via}"]
    if strategy in CONTEXT:  # 512 KiB of keys and of values on a rank
        overrides += ["batch.global=1", "batch.sequence=2048"]
    overrides += [f"mesh.{axis}={size if len(axes) == 1 else 2}" for axis in axes]
    return require_runnable(load(strategy, tuple(overrides)))


@pytest.mark.parametrize(
    ("strategy", "size", "via"),
    [
        ("ddp", 2, "native"),
        ("zero1", 4, "native"),
        pytest.param("zero2", 2, "native", marks=pytest.mark.nightly),
        ("zero2", 4, "all_to_all"),
        ("zero3", 4, "native"),
        pytest.param("zero3", 2, "all_to_all", marks=pytest.mark.nightly),
        pytest.param("zero3", 4, "all_to_all", marks=pytest.mark.nightly),
        ("hsdp", 4, "native"),
        *(pytest.param(name, 4, "native", marks=pytest.mark.nightly) for name in CONTEXT),
    ],
)
def test_the_kernel_counts_the_predicted_bytes(
    ranks: Ranks, strategy: str, size: int, via: str
) -> None:
    spec = wire_spec(strategy, size, via)
    reports = ranks.run(size, train_on_rank, spec, MEASURED_STEP + 1, MEASURED_STEP)
    measured = join_estimates([report.measured for report in reports if report.measured])
    assert not measured.undefined
    exact = derive(spec, facts_of(spec)).exact
    assert not [check for check in compare_estimates(exact, measured) if not check.holds]
    rows = wire_rows(exact, measured)
    assert {row.axes for row in rows} == {(axis,) for axis in AXES.get(strategy, ("dp_shard",))}
    for row in rows:
        assert row.predicted_bytes > 2**20
        assert 0 < row.measured_bytes / row.predicted_bytes - 1 < TOLERANCE, row
    is_doubled = strategy not in {"ddp", "hsdp", *CONTEXT} - {"cp-all-gather"} and size > 2
    assert any("reduce_scatter 2" in row.factor for row in rows) == (is_doubled and via == "native")
    recorded = result_record("wire", [exact, measured])["wire"]
    assert isinstance(recorded, list) and len(recorded) == len(rows)


# Two layers of 2048 tokens a rank, each of which chooses two of eight experts on four ranks: 4 MiB
# of rows set out at once, and about a quarter of them goes to each rank.
ROUTED = (
    "model.preset=moe-tiny", "model.layers=2", "model.hidden=256", "model.heads=4",
    "model.expert_ffn=512", "model.experts=8", "model.experts_per_token=2", "model.vocab=4096",
    "batch={global: 4, micro: 1, sequence: 2048}", "data.tokenizer=bytes", "mesh.ep=4",
)  # fmt: skip


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("strategy", "more"),
    [
        ("ep", ("model.capacity_factor=null",)),
        ("ep-zero3", ("model.capacity_factor=null", "mesh.dp_shard=1")),
        ("ep", ("model.capacity_factor=1.25",)),
    ],
)
def test_the_kernel_counts_the_predicted_bytes_of_expert_rows(
    ranks: Ranks, strategy: str, more: tuple[str, ...]
) -> None:
    """Without a capacity the prediction uses the routing of the measured step."""
    spec = require_runnable(load(strategy, (*ROUTED, *more)))
    reports = ranks.run(4, train_on_rank, spec, MEASURED_STEP + 1, MEASURED_STEP)
    measured = join_estimates([report.measured for report in reports if report.measured])
    assert not measured.undefined
    exact = expected_estimates(derive(spec, facts_of(spec)), reports, MEASURED_STEP)
    rows = wire_rows(exact, measured)
    assert [row.axes for row in rows] == [("ep",)]
    assert 0 < rows[0].measured_bytes / rows[0].predicted_bytes - 1 < TOLERANCE


def _sent_over_one_axis(size: int) -> tuple[dict[tuple[str, ...], int], str]:
    world = World.join()
    axes = (Axis.DP_REPLICATE, Axis.DP_SHARD)
    mesh = Mesh(CreateMesh(axes=axes, degrees=(2, 2)), world)
    tensor = torch.ones(size, dtype=torch.uint8)
    with WireMeter(mesh.axes_by_group(), rank=world.rank) as meter:
        dist.all_reduce(tensor, group=mesh.group((Axis.DP_SHARD,)))
    return {row.axes: row.sent_bytes for row in meter.rows()}, meter.absent


def test_bytes_are_attributed_to_the_axis_of_their_group(ranks: Ranks) -> None:
    for sent, absent in ranks.run(4, _sent_over_one_axis, 2**20):
        assert not absent
        assert sent[("dp_replicate",)] == 0
        assert sent[("dp_shard",)] == pytest.approx(2**20, rel=TOLERANCE)


def _count_closed_group() -> tuple[int, str]:
    group = dist.new_group()
    with WireMeter({group.group_name: ("world",)}, rank=dist.get_rank()) as meter:
        dist.destroy_process_group(group)
        del group
    return len(meter.rows()), meter.absent


def test_a_closed_connection_is_reported_and_not_counted(ranks: Ranks) -> None:
    for rows, absent in ranks.run(2, _count_closed_group):
        assert rows == 0
        assert "closed" in absent


def test_unmeasured_axes_have_no_row() -> None:
    exact = derive(spec := wire_spec("ddp", 2, "native"), facts_of(spec)).exact
    reason = {"wire": "nccl does not use sockets"}
    measured = Estimate(column=Column.MEASURED, world_size=2, undefined=reason)
    assert wire_rows(exact, measured) == ()
    told = result_record("wire", [exact, measured])
    assert told["wire"] == []
    assert told["undefined"]["measured"] == reason and "wire" not in told["undefined"]["exact"]
