"""Slowdowns of a step (collectives during compute, many nodes, host updates), and published step
times compared with predictions."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ptrain.cost import Collective, Phase, Spent, StepTime, TimeKey, TimeRow
from ptrain.derivation.clock import Clock, with_stragglers
from ptrain.derivation.estimate import best_collected_mfu, derive, step_family, with_interval
from ptrain.derivation.interconnect import Network
from ptrain.rates.pace import UnknownRate
from ptrain.report.record import time_checks
from ptrain.report.step_time import time_lines
from ptrain.spec.cluster import Cluster, Hook, Rates
from ptrain.spec.load import load
from ptrain.spec.placement import Axis
from ptrain.spec.spec import Spec
from tests.pure.hand_made_paces import HandPace, seconds

GATHER = Collective.ALL_GATHER
TWO_SECONDS = TimeRow(key=TimeKey(Spent.COMPUTE, Phase.FORWARD), seconds=2.0)


def spec_of(**fields: object) -> Spec:
    known = {"devices_per_node": 8, "kind": "cuda", **fields}
    cluster = Cluster(devices=64, device_memory=1, intra_node_bandwidth=1.0, **known)
    mesh = ["mesh.dp_shard=64", "batch.global=64", "batch.micro=1"]
    return replace(load("zero3", mesh).spec, cluster=cluster)


def clock_of(**fields: object) -> Clock:
    return Clock(HandPace(by_collective={GATHER: 0.125}), Network(spec_of(**fields)))


def compute(clock: Clock, number: int) -> None:
    clock.compute(clock.pass_seconds(seconds(number), Hook.FORWARD_OPERATOR))


def interference_seconds(clock: Clock) -> float:
    return sum(row.seconds for row in clock.time_rows() if row.key.spent is Spent.INTERFERENCE)


def test_compute_slows_down_during_an_overlapped_collective():
    clock = clock_of(interference=1.0)
    clock.send_payload(GATHER, (Axis.DP_SHARD,), 10)  # 10 s on 8 nodes, in which 5 s are computed
    compute(clock, 20)
    assert interference_seconds(clock) == 5.0 and clock.now == 25.0
    compute(clock, 20)
    assert interference_seconds(clock) == 5.0, "it is over"


def test_a_collective_slows_no_more_than_is_computed():
    clock = clock_of(interference=0.5)
    clock.send_payload(GATHER, (Axis.DP_SHARD,), 100)
    compute(clock, 20)
    assert interference_seconds(clock) == 10.0


def test_a_collective_that_could_start_earlier_slows_earlier_compute():
    clock = clock_of(interference=1.0)
    compute(clock, 20)
    clock.send_payload(
        GATHER, (Axis.DP_SHARD,), 10, since=8.0
    )  # from 8 to 18, beside 5 s of compute
    assert interference_seconds(clock) == 5.0


def test_a_collective_that_is_awaited_at_once_slows_nothing():
    clock = clock_of(interference=1.0)
    clock.send_payload(GATHER, (Axis.DP_SHARD,), 10).wait()
    compute(clock, 20)
    assert interference_seconds(clock) == 0.0


def test_a_step_takes_longer_with_each_doubling_of_the_nodes():
    rows = (TimeRow(key=TimeKey(Spent.COMPUTE, Phase.FORWARD), seconds=100.0),)
    longer = with_stragglers(rows, Network(spec_of(stragglers=0.02)))
    assert sum(row.seconds for row in longer) == pytest.approx(106.0), "8 nodes"
    assert with_stragglers(rows, Network(spec_of(stragglers=0.0))) == rows
    assert with_stragglers(rows, Network(spec_of(kind="cpu"))) == rows


def test_only_gpus_have_factors_by_default():
    on_gpus, on_cpus = (spec_of(kind=kind).cluster for kind in ("cuda", "cpu"))
    assert on_gpus and on_gpus.slowdown_beside_collectives > 0 < on_gpus.slowdown_per_doubling
    assert on_cpus and on_cpus.slowdown_beside_collectives == on_cpus.slowdown_per_doubling == 0


def test_more_ranks_lose_more_than_their_collectives_take():
    """The notes' decline beyond 512 ranks has a term with a note about its uncertainty."""
    words = ["model.preset=llama3-70b", "batch={micro: 4, sequence: 8192}", "activations=M"]
    sizes = (64, 1024)
    steps = [
        derive(
            load(
                "fsdp-mixed",
                [*words, f"mesh.dp_shard={n}", f"batch.global={4 * n}", "cluster.preset=h100-1024"],
            ).spec
        ).exact.step
        for n in sizes
    ]
    few, many = (step for step in steps if step is not None)
    assert many.seconds > 1.04 * few.seconds
    assert any("beyond that they are unknown" in sentence for sentence in many.assumed)
    assert not any("unknown" in sentence for sentence in few.assumed)


def test_the_host_updates_at_half_the_bandwidth_of_its_memory():
    clock = clock_of(host_bandwidth=280.0)  # of which a rank of 8 has 35
    rows = {"optimizer.clip": "null", "placement.dp_shard": "zero-offload"}
    clock.phase = Phase.UPDATE
    spec = load("zero3", [f"{key}={value}" for key, value in rows.items()]).spec
    clock.update_on_host("adamw", spec.precision.layout.update_dtype, [(5, 5)])
    (row,) = clock.time_rows()
    assert row.key == TimeKey(Spent.UPDATE, Phase.UPDATE)
    assert row.seconds == pytest.approx(25 * 28 / 17.5)
    with pytest.raises(UnknownRate, match="host_bandwidth"):
        clock_of().update_on_host("adamw", spec.precision.layout.update_dtype, [(5, 5)])


@pytest.mark.parametrize(
    ("words", "family"),
    [
        (["8b-zero3"], "GPU with data axes"),
        (["8b-tp"], "GPU with tp or pp"),
        (["8b-zero3", "placement.dp_shard=zero-offload"], ""),
        (["8b-zero3", "activations=O"], ""),
        (["cp-ring", "cluster.preset=h100-8"], ""),
        (["8b-zero3", "precision.layout=fp32"], ""),
        (["8b-zero3", "model.experts=8"], ""),
        (["zero3"], "CPU"),
        (["zero3", "model.experts=8"], ""),
    ],
)
def test_steps_are_compared_with_those_of_their_kind(words, family):
    spec = load(words[0], words[1:]).spec
    assert step_family(spec) == family
    step = with_interval(spec, StepTime((TWO_SECONDS,)))
    assert (step.interval is not None) == bool(family)
    if step.interval is not None:
        assert step.interval[0] < step.interval[1]


@pytest.mark.parametrize("preset", ["h200-8", "b200-8", "rtx4090-8", "mi250x-8"])
def test_devices_on_which_no_collected_step_ran_have_no_interval(preset):
    spec = load("8b-zero3", [f"cluster.preset={preset}"]).spec
    derivation = derive(spec)
    assert derivation.exact.step and derivation.exact.step.interval is None
    assert any(line.startswith("no published steps") for line in time_lines(derivation))


def test_the_screen_names_the_collected_steps():
    line = "published bf16 steps of dense models on A100 and H100: "
    assert any(line in shown for shown in time_lines(derive(load("8b-zero3", []).spec)))


def test_an_mfu_above_the_best_published_one_is_warned_of():
    slow, fast = (
        time_lines(derive(load("8b-zero3", words).spec))
        for words in ([], ["cluster.flops=312e12"])  # the A100's peak with the H100's rates
    )
    assert any("devices with this peak (H200): MFU" in line for line in slow)
    assert not any(line.startswith("warning:") for line in slow)
    assert any(line.startswith("warning:") for line in fast)
    assert best_collected_mfu(None) is None


def test_the_step_time_is_judged_on_a_calibrated_machine_alone():
    step = StepTime((TWO_SECONDS,), interval=(1.8, 2.4))
    calibrated = spec_of(kind="cpu", rates=Rates(source="ptrain calibrate"))
    fast, usual, slow = (
        check for taken in (1.7, 1.9, 2.5) for check in time_checks(calibrated, step, taken)
    )
    assert [fast.holds, usual.holds, slow.holds] == [True, True, False], "only slow steps fail"
    assert fast.why == "measured is below 1.8 to 2.4 s" and not usual.why
    assert slow.why == "measured is above 1.8 to 2.4 s"
    measured_on_gpus = spec_of(kind="cuda", rates=Rates(source="ptrain calibrate"))
    for spec, known, taken in (
        (replace(measured_on_gpus, device="cpu"), step, 2.5),
        (spec_of(rates=Rates(source="a data sheet")), step, 1.9),
        (calibrated, step._replace(interval=None), 1.9),
        (calibrated, None, 1.9),
        (calibrated, step, None),
    ):
        assert not [*time_checks(spec, known, taken)]


def test_published_rows_are_specs_of_sources_that_build_or_score(benchmark_module):
    script = benchmark_module("published_seconds")
    uses: dict[str, set[str]] = {}
    for row in script.published():
        spec = load(row.words[0], row.words[1:]).spec
        uses.setdefault(row.source, set()).add(row.use)
        assert spec.cluster and spec.cluster.devices >= spec.world_size, row.name
        assert (row.tokens is None) is not (row.seconds is None), row.name
    assert all(len(of_source) == 1 for of_source in uses.values())
    assert {"build", "score"} == set().union(*uses.values())
