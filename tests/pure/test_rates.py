"""The calibration tables of a cluster: grammar, and the cost model between measured points."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from ptrain.cost import Collective
from ptrain.errors import SpecError
from ptrain.facts.model import Operator
from ptrain.rates.measured import (
    Curve,
    Surface,
    missing_rates_reason,
    pace_of,
    pace_while_others_wait,
)
from ptrain.rates.pace import Pace, UnknownRate
from ptrain.spec.cluster import Cluster, Hook, OperatorKind
from ptrain.spec.load import load
from ptrain.spec.names import list_files
from ptrain.spec.precision import LAYOUTS, DType
from ptrain.spec.resolve_sections import expand_rates
from ptrain.spec.write import section_mapping, to_yaml

FP32 = LAYOUTS["fp32"]
# Two processors' figures, made up: of one rank, and of two at once.
RATES: dict[str, Any] = {
    "at_once": [1, 2],
    "date": "2026-11-24",
    "spread": [0.01, 0.02],
    "products": [
        ["fp32", 1, 8, 8, 8, 2e-6, 3e-6],
        ["fp32", 1, 128, 128, 128, 1e-4, 1.1e-4],
        ["fp32", 1, 512, 512, 512, 5e-3, 6e-3],
        ["fp32", 1, 512, 16, 512, 4e-4, 5e-4],
    ],
    "attention": [
        ["attention", "fp32", 2, 4, 64, 64, 32, 1e-4, 2e-4],
        ["attention", "fp32", 2, 4, 256, 256, 32, 1e-3, 2e-3],
        ["attention_backward", "fp32", 2, 4, 64, 64, 32, 3e-4, 4e-4],
    ],
    "operators": [
        ["copy", "fp32", 64, 1e-6, 1e-6],
        ["copy", "fp32", 6400, 2e-6, 2e-6],
        ["copy", "fp32", 6400000, 1e-3, 2e-3],
        ["pointwise", "fp32", 6400, 3e-6, 3e-6],
        ["pointwise", "bf16", 6400, 6e-6, 6e-6],
    ],
    "updates": [
        ["adamw", "fp32", 1000, 1, 2e-5, 2e-5],
        ["adamw", "fp32", 1000000, 1, 3e-3, 3e-3],
        ["adamw", "fp32", 1000, 10, 2e-4, 2e-4],
        ["clip", "fp32", 1000, 10, 1e-4, 1e-4],
    ],
    "collectives": [
        ["all_reduce", 2, 1, 64, None, 1e-4],
        ["all_reduce", 2, 1, 6400000, None, 1e-2],
    ],
    "lateness": [[1000, None, 1e-9], [6000, None, 5e-4]],
    "copies": [["host_to_device", 6400, 1e-5, 1e-5]],
    "hooks": [["ddp_bucket", 1e-5, 2e-5]],
}
CPU: dict[str, Any] = {
    "kind": "cpu",
    "devices": 4,
    "device_memory": "8 GiB",
    "intra_node_bandwidth": "1 GB/s",
}


def cluster(rates: dict[str, Any] | None = None, **fields: object) -> Cluster:
    written = CPU | fields | {"rates": RATES if rates is None else rates}
    spec = load(
        {
            "model": {"preset": "llama-tiny"},
            "mesh": {"dp_replicate": 2},
            "placement": "ddp",
            "batch": {"micro": 1, "sequence": 8},
            "cluster": written,
        }
    ).spec
    assert spec.cluster is not None
    return spec.cluster


def pace(ranks: int = 1, **fields: object) -> Pace:
    known = pace_of(cluster(**fields), ranks)  # type: ignore[arg-type]
    assert known is not None
    return known


def product(*dimensions: int, dtype: DType = DType.FP32, times: int = 1) -> Operator:
    return Operator(OperatorKind.PRODUCT, dtype, dimensions, times)


def test_measured_points_are_predicted_exactly():
    one, two = pace(1), pace(2)
    for dtype, *shape, alone, beside in RATES["products"]:
        operator = Operator(OperatorKind.PRODUCT, DType(dtype), tuple(shape))
        assert one.operator_seconds(operator) == alone
        assert two.operator_seconds(operator) == beside
    for kind, dtype, *shape, alone, _ in RATES["attention"] + RATES["operators"]:
        operator = Operator(OperatorKind(kind), DType(dtype), tuple(shape), times=3)
        assert one.operator_seconds(operator) == pytest.approx(3 * alone, rel=1e-12)
    for name, _, elements, tensors, alone, _ in RATES["updates"][:3]:
        taken = one.update_seconds(name, FP32, elements=elements, tensors=tensors)
        assert taken == alone
    assert one.clip_seconds(FP32, elements=1000, tensors=10) == 1e-4
    assert two.hook_seconds(Hook.DDP_BUCKET) == 2e-5
    assert one.copy_seconds(Collective.HOST_TO_DEVICE, 6400) == 1e-5
    all_reduce = two.collective_seconds(Collective.ALL_REDUCE, ranks=2, nodes=1, payload=64)
    assert all_reduce == 1e-4
    assert two.late_seconds(3.5e-3) == pytest.approx(2.5e-4, rel=1e-5)


def test_more_bytes_take_longer_and_never_less_than_a_dispatch():
    copies = [Operator(OperatorKind.COPY, DType.FP32, (2**power,)) for power in range(40)]
    seconds = list(map(pace().operator_seconds, copies))
    assert seconds == sorted(seconds)
    assert seconds[0] == 1e-6
    assert seconds[39] == pytest.approx(1e-3 * 2**39 / 6_400_000)


def test_between_two_sizes_time_is_a_power_of_the_size():
    curve = Curve({100: 1e-5, 10_000: 1e-3})
    assert curve.interpolate(1000) == pytest.approx(1e-4)
    assert curve.bandwidth == pytest.approx(1e7)


def test_a_shape_between_others_takes_as_much_longer_than_its_roofline_as_they_do():
    surface = Surface({(4, 4): 32.0, (400, 4): 3200.0}, expected=math.prod)
    assert surface.interpolate((40, 4)) == pytest.approx(320.0)
    assert surface.interpolate((40, 40)) == pytest.approx(3200.0)


def test_products_grow_with_each_of_their_dimensions():
    known = pace()
    seconds = [
        [known.operator_seconds(product(1, *shape)) for shape in shapes]
        for shapes in (
            [(rows, 256, 256) for rows in (32, 64, 256, 1024, 4096)],
            [(256, inner, 256) for inner in (32, 64, 256, 1024, 4096)],
            [(256, 256, columns) for columns in (32, 64, 256, 1024, 4096)],
        )
    ]
    assert all(row == sorted(row) for row in seconds)


def test_a_kind_that_was_not_measured_moves_bytes_as_a_copy_does():
    drawn = Operator(OperatorKind.DRAW, DType.FP32, (6400,))
    assert pace().operator_seconds(drawn) == 2e-6


def test_memory_bound_operators_are_of_the_dtype_that_is_nearest():
    def seconds(dtype: DType) -> float:
        return pace().operator_seconds(Operator(OperatorKind.POINTWISE, dtype, (6400,)))

    is_wide = {DType.FP64: True, DType.FP32: True}
    expected = {dtype: 3e-6 if is_wide.get(dtype) else 6e-6 for dtype in DType}
    assert {dtype: seconds(dtype) for dtype in DType} == expected


def test_an_update_in_other_dtypes_includes_its_casts():
    rates = RATES | {"operators": [["copy", "fp32", 6000, 7e-6, 7e-6]]}
    known = pace(rates=rates)
    mixed = LAYOUTS["fsdp-mixed"]  # gradients and moments in fp32 as the master: parameters alone
    assert known.update_seconds("adamw", mixed, elements=1000, tensors=1) == pytest.approx(2.7e-5)
    zero16 = LAYOUTS["zero16"]  # and gradients in bf16
    assert known.update_seconds("adamw", zero16, elements=1000, tensors=1) == pytest.approx(3.4e-5)


def unknown(act: Any) -> str:
    with pytest.raises(UnknownRate) as caught:
        act()
    return str(caught.value)


def test_unmeasured_rates_are_unknown_with_the_command_that_measures_them():
    two = pace(2)
    measures = "Run `ptrain calibrate --ranks 2`."
    lacks = "the cluster has no rate for"

    def gather() -> float:
        return two.collective_seconds(Collective.ALL_GATHER, ranks=2, nodes=1, payload=8)

    assert unknown(gather) == f"{lacks} all_gather over 2 ranks on one node. {measures}"
    assert (
        unknown(lambda: two.collective_seconds(Collective.ALL_GATHER, ranks=3, nodes=1, payload=8))
        == f"{lacks} all_gather over 3 ranks on one node. No calibration measures it yet."
    )
    half = product(1, 8, 8, 8, dtype=DType.BF16)
    assert unknown(lambda: two.operator_seconds(half)) == f"{lacks} product in bf16. {measures}"
    across = unknown(
        lambda: two.collective_seconds(Collective.ALL_GATHER, ranks=4, nodes=2, payload=8)
    )
    assert across == (
        f"{lacks} all_gather over 4 ranks on 2 nodes. Run `torchrun --nnodes 2 "
        "--nproc-per-node 2 -m ptrain.calibration` on each node."
    )
    double = product(1, 8, 8, 8, dtype=DType.FP64)
    nothing = "No calibration measures it yet."
    assert unknown(lambda: two.operator_seconds(double)) == f"{lacks} product in fp64. {nothing}"
    hook = unknown(lambda: two.hook_seconds(Hook.FLAT_GATHER))
    assert hook == f"{lacks} the hook flat_gather. {measures}"
    muon = unknown(lambda: two.update_seconds("muon", FP32, elements=8, tensors=1))
    assert muon == f"{lacks} the muon update in fp32. {nothing}"


def test_a_collective_of_one_rank_takes_no_time():
    assert pace().collective_seconds(Collective.ALL_GATHER, ranks=1, nodes=1, payload=8) == 0


def test_while_others_wait_a_rank_has_the_rates_of_as_many_threads_and_no_others():
    """On one core both sets are of one thread; on two, one rank alone was measured with both."""
    size = Operator(OperatorKind.COPY, DType.FP32, (6400000,))
    for threads, seconds in ([1, 1], 1e-3), ([2, 1], None), ([], None):
        known = cluster({**RATES, "threads": threads})
        pace = pace_while_others_wait(known, 2, 1)
        assert (None if pace is None else pace.operator_seconds(size)) == seconds


def test_rates_are_of_as_many_ranks_as_compute_at_once():
    assert pace_of(cluster(), 4) is None
    assert missing_rates_reason(cluster(), 4) == (
        "4 ranks of a node compute at the same time, but the rates of cluster are measured for "
        "1, 2. Run `ptrain calibrate --ranks 1,2,4`."
    )
    assert pace_of(cluster(devices_per_node=2), 4) is not None, "two nodes of two ranks"
    assert missing_rates_reason(cluster(devices_per_node=4, devices=16), 8).endswith(
        "`torchrun --nnodes 2 --nproc-per-node 4 -m ptrain.calibration` on each node."
    )
    assert pace_of(None, 1) is None
    assert missing_rates_reason(None, 1) == (
        "the spec has no cluster. Add `cluster.preset=h100-8`, for example."
    )
    bare = Cluster(devices=1, device_memory=1, intra_node_bandwidth=1.0, name="bare")
    assert missing_rates_reason(bare, 1) == (
        "the cluster bare has no rates. Run `ptrain calibrate` to measure this machine, then add "
        "`cluster.preset=cluster.yaml`."
    )


def test_gpus_share_nothing_and_overlap():
    assert not pace().overlaps
    on_gpus = pace(3, kind="cuda")
    assert on_gpus.overlaps
    assert on_gpus.operator_seconds(product(1, 8, 8, 8)) == 3e-6, "the last of all"
    assert on_gpus.hook_seconds(Hook.FLAT_GATHER) == 0.0


LINKS = [["within", 1e-5, 1e-6, 0.8], ["between", 2e-5, 5e-6, 1.0]]


def link_seconds(collective: Collective, ranks: int, nodes: int, payload: int) -> float:
    bandwidths = {"intra_node_bandwidth": "500 GB/s", "inter_node_bandwidth": "50 GB/s"}
    known = pace(1, rates={"links": LINKS}, kind="cuda", **bandwidths)
    return known.collective_seconds(collective, ranks=ranks, nodes=nodes, payload=payload)


@pytest.mark.parametrize(
    ("collective", "ranks", "nodes", "seconds"),
    [
        (Collective.ALL_GATHER, 8, 1, 1e-5 + 7e-6 + 7 / 8 * 1e9 / 4e11),
        (Collective.REDUCE_SCATTER, 8, 1, 1e-5 + 7e-6 + 7 / 8 * 1e9 / 4e11),
        (Collective.ALL_REDUCE, 8, 1, 1e-5 + 14e-6 + 14 / 8 * 1e9 / 4e11),
        (Collective.BROADCAST, 8, 1, 1e-5 + 7e-6 + 1e9 / 4e11),
        (Collective.SEND, 2, 1, 1e-5 + 1e-6 + 1e9 / 4e11),
        (Collective.SEND, 2, 2, 2e-5 + 5e-6 + 1e9 / 5e10),
        # One rank of each node: its own card.
        (Collective.ALL_GATHER, 4, 4, 2e-5 + 3 * 5e-6 + 3 / 4 * 1e9 / 5e10),
        # All eight of each: eight cards, which are as fast as what is within.
        (Collective.ALL_GATHER, 32, 4, 2e-5 + 28e-6 + 3 * 5e-6 + 31 / 32 * 1e9 / 4e11),
        # Four of each: four cards, of which each rank's ring is the fourth part.
        (Collective.ALL_GATHER, 16, 4, 2e-5 + 12e-6 + 3 * 5e-6 + 15 / 16 * 1e9 / 2e11),
        (Collective.ALL_TO_ALL, 32, 4, 2e-5 + 28e-6 + 3 * 5e-6 + 3 / 4 * 1e9 / 5e10),
        # A tree of 16 nodes is 4 high.
        (Collective.ALL_REDUCE, 16, 16, 2e-5 + 2 * 4 * 5e-6 + 30 / 16 * 1e9 / 5e10),
    ],
)
def test_a_published_link_bandwidth_gives_a_collective_time(collective, ranks, nodes, seconds):
    assert link_seconds(collective, ranks, nodes, 10**9) == pytest.approx(seconds, rel=1e-12)


def refusal(rates: dict[str, Any]) -> str:
    with pytest.raises(SpecError) as caught:
        cluster(rates=rates)
    return str(caught.value)


@pytest.mark.parametrize(
    ("rates", "text"),
    [
        (
            {"hooks": [["ddp_bucket", 0]]},
            "error: cluster.rates.hooks: row 1, seconds: must be a finite number > 0 and <= 1e+06, "
            "or null; got the number 0",
        ),
        (
            {"hooks": [["ddp_buckt", 1e-5]]},
            (
                "row 1, hook: must be one of fsdp2_gather, fsdp2_reduce, ddp_bucket, "
                "flat_gather, flat_reduce, pipeline_pass, cut_product, forward_operator, "
                "backward_operator, halves_operator, recomputed_operator, selected_operator, "
                "moved_operator; got the string 'ddp_buckt'\n  remedy: Did you mean 'ddp_bucket'?"
            ),
        ),
        (
            {"operators": [["product", "fp32", 8, 1e-5]]},
            "row 1, kind: must be one of pointwise, activation, norm",
        ),
        (
            {"products": [["fp32", 8, 8, 8, 1e-5]]},
            "row 1 must be [dtype, matrices, rows, inner, columns, seconds by ranks at once]; got "
            "['fp32', 8, 8, 8, 1e-05]",
        ),
        (
            {"hooks": [["ddp_bucket", 1e-5], ["ddp_bucket", 2e-5]]},
            "row 2 repeats row 1\n  remedy: Remove one of the two.",
        ),
        (
            {"at_once": [1, 2], "hooks": [["ddp_bucket", 1e-5]]},
            (
                "error: cluster.rates.hooks: row 1 has 1 figure, but at_once has 1, 2\n  remedy: "
                "Use one value per entry of `at_once`, or null if it was not measured."
            ),
        ),
        ({"at_once": [2, 1]}, "error: cluster.rates.at_once: [2, 1] is not in ascending order"),
        (
            {"spread": [0.1, 0.2]},
            "error: cluster.rates.spread: it has 2 figures, but at_once has 1",
        ),
        (
            {"links": [["within", 1e-5, 1e-6]]},
            "row 1 must be [tier, seconds of a call, seconds of a hop, share of the bandwidth]",
        ),
        *(
            (
                {"links": [row]},
                "row 1 has a null; the times per call, hop and byte are required",
            )
            for row in (["within", 1e-5, 1e-6, None], ["between", None, 1e-6, 0.9])
        ),
        (
            {"hooks": "fast"},
            "must be a list of rows [hook, seconds by ranks at once]; got the string",
        ),
        ({"hoks": []}, "unknown key 'hoks'\n  remedy: Did you mean 'hooks'?"),
        ({"preset": "h101"}, "cluster.rates.preset: there is no table of rates named 'h101'"),
        ({"date": "yesterday"}, "cluster.rates.date: must be a date, 2026-11-24; got the string"),
    ],
)
def test_a_row_that_is_no_measurement_is_rejected_by_its_place(rates, text):
    assert text in refusal(rates)


def test_rates_are_written_as_they_are_read():
    known = cluster().rates
    assert known is not None
    written = section_mapping(known)
    assert written["products"] == RATES["products"]
    assert cluster(written).rates == known


def test_a_rate_file_is_read_and_explicit_keys_override_it(tmp_path: Path):
    file = tmp_path / "rates.yaml"
    file.write_text(to_yaml(RATES), encoding="utf-8")
    known = cluster({"preset": str(file), "hooks": [["ddp_bucket", 7e-5, 8e-5]]})
    assert known.rates is not None and known.rates.preset is None
    assert expand_rates(known.rates).at_once == (1, 2)
    assert pace_of(known, 1).hook_seconds(Hook.DDP_BUCKET) == 7e-5  # type: ignore[union-attr]


@pytest.mark.parametrize("name", list_files("rates"))
def test_named_rates_stay_by_their_name(name):
    known = cluster({"preset": name}, kind="cuda")
    assert known.rates is not None
    assert section_mapping(known)["rates"] == {"preset": name}
    assert expand_rates(known.rates).products
    gathered = pace_of(known, 4)
    assert gathered is not None
    assert gathered.collective_seconds(Collective.ALL_GATHER, ranks=4, nodes=1, payload=8) > 0


def test_the_gpu_files_equal_the_output_of_their_generator(benchmark_module):
    writer = benchmark_module("cluster_rates")
    page = writer.PAGE.read_text(encoding="utf-8")
    for name in writer.GPUS:
        assert list_files("rates")[name].read_text(encoding="utf-8") == writer.text(name, page), (
            name
        )
    assert writer.leave_out(page) == 0


def test_another_gpu_takes_as_much_longer_than_its_peaks_as_the_measured_one():
    h100, a100 = (pace_of(cluster({"preset": name}, kind="cuda"), 1) for name in ("h100", "a100"))
    assert h100 is not None and a100 is not None

    def ratio(operator: Operator) -> float:
        return a100.operator_seconds(operator) / h100.operator_seconds(operator)

    large = product(1, 4096, 4096, 14336, dtype=DType.BF16)
    assert ratio(large) == pytest.approx(989 / 312, rel=1e-3)
    moved = Operator(OperatorKind.POINTWISE, DType.BF16, (3 * 2**30,))
    assert ratio(moved) == pytest.approx(3.35 / 2.039, rel=1e-3)
    dispatched = product(1, 512, 512, 512, dtype=DType.BF16)
    assert ratio(dispatched) == 1


def test_no_derived_gpu_product_is_closer_to_its_peak_than_measured_ones(benchmark_module):
    """Small products took the peak itself, and a hair less by rounding."""
    writer = benchmark_module("cluster_rates")
    shares = {}
    for name, gpu in writer.GPUS.items():
        known = pace_of(cluster({"preset": name}, kind="cuda"), 1)
        half = DType(gpu.half)
        shares[name] = max(
            2
            * size**3
            / gpu.flops[gpu.half]
            / known.operator_seconds(product(1, *3 * (size,), dtype=half))
            for size in (1024, 2048, 4096, 8192)
        )
    assert all(share < 0.8 for share in shares.values()), shares


def test_a_gpu_without_matrix_units_for_bf16_has_no_rate_of_it() -> None:
    """A V100's rates are of fp16, which an A100's stand for bf16 too."""
    product = Operator(OperatorKind.PRODUCT, DType.BF16, (1, 4096, 4096, 4096))
    for name, is_known in (("a100-8", True), ("v100-8", False)):
        known = load("zero3", [f"cluster.preset={name}"]).spec.cluster
        pace = pace_of(known, 1)
        assert pace is not None
        half = product._replace(dtype=DType.FP16)
        assert pace.operator_seconds(half) > 0
        if is_known:
            assert pace.operator_seconds(product) == pace.operator_seconds(half)
        else:
            with pytest.raises(UnknownRate, match="product in bf16"):
                pace.operator_seconds(product)
