"""The batch recipe: tokens become samples, the micro-batch is the largest that fits, and
accumulation follows."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ptrain.cost import Phase, Spent, StepTime, TimeKey, TimeRow
from ptrain.derivation.estimate import derive
from ptrain.errors import SpecError
from ptrain.report.reasons import axis_reasons, placement_reasons
from ptrain.selection.fit import fit
from ptrain.selection.recompute import resolve_auto
from ptrain.spec.batch import Batch, batch_lines, nearest_power_of_two
from ptrain.spec.load import load

NODE = ("8b-zero3", "batch.sequence=4096")


def batch_of(*overrides: str, name: str = "zero3") -> Batch:
    return load(name, ["batch.sequence=4096", "batch.global=4M tokens", *overrides]).spec.batch


def refusal(*overrides: str, name: str = "zero3") -> tuple[str, str]:
    with pytest.raises(SpecError) as caught:
        resolve_auto(load(name, overrides))
    (fault,) = caught.value.faults
    return fault.place, f"{fault.finding}; {fault.remedy}"


def test_4m_tokens_of_4096_are_976_samples_and_1024_to_a_power_of_two():
    batch = batch_of("mesh.dp_shard=1", "batch.micro=1")
    assert batch.written is not None
    assert (batch.written.samples, batch.global_samples) == (976, 1024)
    assert batch_of("mesh.dp_shard=1", "batch.micro=1", "batch.round=none").global_samples == 976


@pytest.mark.parametrize(("ranks", "accumulated"), [(128, 4), (512, 1), (256, 2)])
def test_128_devices_accumulate_4_and_512_nothing(ranks, accumulated):
    batch = batch_of(f"mesh.dp_shard={ranks}", "batch.micro=2", "cluster.devices=1024")
    assert (batch.global_samples, batch.accumulate) == (1024, accumulated)


def test_more_ranks_than_samples_take_one_micro_batch_each():
    batch = batch_of("mesh.dp_shard=1024", "batch.micro=2", "cluster.devices=1024")
    assert (batch.global_samples, batch.accumulate) == (2048, 1)


def test_ranks_that_make_up_no_power_of_two_take_the_nearest_multiple():
    batch = batch_of("mesh.dp_shard=6", "batch.micro=1", "cluster.devices=8")
    assert batch.global_samples == 978  # 163 x 6; 976 are made up


@pytest.mark.parametrize(
    ("number", "power"), [(1, 1), (2, 2), (3, 4), (5, 4), (6, 8), (976, 1024), (366, 256)]
)
def test_the_nearest_power_of_two_is_the_nearest_by_difference(number, power):
    assert nearest_power_of_two(number) == power


def test_a_rounding_of_samples_is_rejected():
    place, text = refusal("batch.round=none")
    assert place == "batch.round"
    assert "batch.global is not given in tokens" in text


@pytest.mark.parametrize("sequence", [2048, 8192])
def test_the_largest_micro_batch_that_fits_is_chosen_and_the_next_one_does_not_fit(sequence):
    words = ["batch.micro=auto", f"batch.sequence={sequence}", "batch.global=64"]
    spec = resolve_auto(load("8b-zero3", words))
    micro = spec.batch.micro
    assert spec.batch.accumulate == 8 // micro > 0
    assert fit(spec, derive(spec).exact).fits
    larger = load("8b-zero3", [*words[1:], f"batch.micro={2 * micro}"]).spec
    assert not fit(larger, derive(larger).exact).fits


def test_the_resolved_spec_repeats_the_chosen_batch():
    document = load("8b-zero3", ["batch.micro=auto"])
    assert document.spec.resolved["batch"] == {"global": 64, "micro": "auto", "sequence": 4096}
    assert load(document.spec.resolved).spec == document.spec
    spec = resolve_auto(document)
    assert spec.resolved["batch"] == {"global": 64, "micro": spec.batch.micro, "sequence": 4096}
    assert load(spec.resolved).spec == spec


def test_the_smallest_micro_batch_is_chosen_if_none_fits():
    spec = resolve_auto(load("70b-dp", ["batch.micro=auto", "batch.global=64"]))
    assert (spec.batch.micro, spec.batch.accumulate) == (1, 8)


def test_only_legal_micro_batches_are_tried():
    spec = resolve_auto(load("pp-1f1b", ["batch.micro=auto", "batch.global=16"]))
    assert (spec.batch.micro, spec.batch.accumulate) == (8, 2)  # as many as stages
    consumed = resolve_auto(load("optimizer-in-backward", ["batch.micro=auto", "batch.global=16"]))
    assert consumed.batch.accumulate == 1  # G = M


@pytest.mark.parametrize(
    ("overrides", "place", "text"),
    [
        (("batch={micro: auto, sequence: 64}",), "batch.micro", "Set `batch.global` too"),
        (
            ("batch.micro=auto", "batch.accumulate=4"),
            "batch.micro",
            ("auto determines batch.accumulate"),
        ),
        (("batch.micro=auto", "cluster=null"), "batch.micro", "name a cluster"),
        (
            ("batch.micro=auto", "recompute.budget=1 GiB", "activations=M"),
            "batch.micro",
            "not supported yet",
        ),
        (
            ("batch.micro=auto", "batch.global=15"),
            "batch.global",
            "`batch.global=14` or `batch.global=16`.",
        ),
        (("batch.micro=automatic",), "batch.micro", "or auto"),
    ],
)
def test_an_unknown_best_micro_batch_is_rejected(overrides, place, text):
    named, said = refusal(*overrides)
    assert named == place
    assert text in said


def test_a_micro_batch_that_python_has_not_chosen_is_not_derived():
    with pytest.raises(SpecError, match=r"ptrain\.resolve_auto"):
        derive(load("zero3", ["batch.micro=auto"]).spec)


def lines_of(*overrides: str, name: str = "8b-zero3") -> list[str]:
    spec = resolve_auto(load(name, overrides))
    return batch_lines(spec.batch, spec.data_degree)


def test_the_conversion_of_tokens_is_printed():
    to_power = (
        "batch.global: 4M tokens are 976 samples of 4096: rounded to 1024, the nearest power of two"
    )
    assert lines_of("batch.global=4M tokens") == [
        f"{to_power} (+4.9%); `batch.round=none` disables this"
    ]
    (nearest,) = lines_of("batch.global=4M tokens", "batch.round=none")
    assert nearest.endswith("using 976")
    (multiple,) = lines_of("batch.global=4M tokens", "batch.round=none", "batch.micro=6")
    assert multiple.endswith("rounded to 960, the nearest multiple of 48 (-1.6%)")
    (odd,) = lines_of("batch.global=4M tokens", "batch.micro=3")
    assert odd.endswith(
        "rounded to 984, the nearest multiple of 24 (+0.8%); "
        "1024 is not a multiple of 3 micro × 8 data"
    )
    (few,) = lines_of("batch.global=100k tokens", "batch.micro=8")
    assert few.endswith(
        "24 samples of 4096: rounded up to 64, the minimum for 8 data-parallel ranks (+166.7%)"
    )
    assert lines_of() == []


def test_a_chosen_micro_batch_is_printed():
    (fits,) = lines_of("batch.micro=auto")
    assert "auto is 2, the largest with a predicted peak that fits; `ptrain simulate" in fits
    (none,) = lines_of("batch.micro=auto", "batch.sequence=65536")
    assert "auto is 1, the smallest; none fits" in none
    (laptop,) = lines_of("batch.micro=auto", name="zero3")
    assert "rehearse" not in laptop


def reasons_of(name: str, *overrides: str) -> str:
    return "\n".join(placement_reasons(derive(load(name, overrides).spec)))


def test_the_reasons_are_fit_then_batch_then_throughput_then_axes_in_the_order_to_reach_for_them():
    text = reasons_of("70b-3d")
    starts = [line.partition(":")[0] for line in text.splitlines()]
    assert starts[:3] == ["fit", "batch", "throughput"]
    assert [start[:2] for start in starts[3:]] == ["1.", "2.", "3."]
    assert "1f1b on 4 ranks has a bubble of 15.8% of the step with 16 micro-batches" in text
    assert "tp 8: a layer has 1.594 GiB in 16-bit precision, sharded by 8" in text
    assert "within a node at 450 GB/s" in text and "over 4 nodes at 50 GB/s" in text


def test_accumulation_is_reported_as_unused_data_parallelism():
    assert "64 = 1 micro × 8 accumulated × 8 data; more data-parallel ranks" in reasons_of("8b-ddp")
    assert "; 64 ranks need none" in reasons_of("8b-ddp")
    assert "no gradient accumulation" in reasons_of("70b-zero3")


@pytest.mark.parametrize(("ranks", "is_said"), [(512, False), (1024, True)])
def test_more_than_512_data_ranks_are_reported(ranks, is_said):
    words = (f"mesh.dp_shard={ranks}", "cluster.preset=h100-1024", f"batch.global={ranks}")
    assert ("data-parallel ranks exceed about 512" in reasons_of("70b-zero3", *words)) is is_said


def test_a_missing_axis_has_a_reason():
    text = reasons_of("8b-zero3", "cluster.preset=h100-8")
    assert "2. no tp: a layer has 416 MiB in 16-bit precision, 0.5% of the device memory" in text
    assert "3. no pp: one node is enough" in text
    small = reasons_of("ddp")
    assert (
        "1. no dp_shard: 12.28 MiB of states are less than the 11.71 GiB of usable device memory"
        in small
    )
    assert "first choice and would shard 59.83 GiB of states" in reasons_of(
        "8b-ddp", "cluster.device_memory=40 GiB"
    )


def test_exposed_communication_is_a_share_of_the_step_if_known():
    derivation = derive(load("70b-3d").spec)
    rows = (
        TimeRow(key=TimeKey(Spent.COMPUTE, Phase.FORWARD), seconds=6.0),
        TimeRow(key=TimeKey(Spent.COLLECTIVES, Phase.FORWARD, ("tp",)), seconds=3.0),
        TimeRow(key=TimeKey(Spent.COLLECTIVES, Phase.BACKWARD, ("dp_shard",)), seconds=1.0),
    )
    timed = replace(derivation, exact=replace(derivation.exact, step=StepTime(rows=rows)))
    sharding, tensor, stages = axis_reasons(timed)
    assert sharding.endswith("exposed communication takes 10.0% of the step")
    assert tensor.endswith("exposed communication takes 30.0% of the step")
    assert stages.endswith("exposed communication takes 0.0% of the step")
    untimed = replace(derivation, exact=replace(derivation.exact, step=None))
    assert not any("exposed" in line for line in axis_reasons(untimed))


def test_a_plan_shows_the_chosen_batch(ptrain):
    text = ptrain("plan", "zero3", "batch.global=2k tokens", "batch.micro=auto")
    assert (
        "batch.global: 2k tokens are 15 samples of 128: rounded to 16, the nearest power of two"
    ) in text
    assert "batch.micro: auto is 8, the largest with a predicted peak that fits" in text


def test_states_on_a_host_are_counted_separately_from_devices():
    (first, *_), (plain, *_) = (reasons_of(name).splitlines() for name in ("zero-offload", "zero3"))
    assert first.endswith("model states are 1.535 MiB and 4.605 MiB on the host per rank")
    assert plain.endswith("model states are 6.142 MiB per rank")
