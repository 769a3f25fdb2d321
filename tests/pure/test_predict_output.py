"""The output of `ptrain predict`: the paper's figures, ratios, sweeps, and the fit."""

from __future__ import annotations

import json
import re
import shlex

import pytest

import ptrain as package
from ptrain.derivation.estimate import derive
from ptrain.report.table import axes_text
from ptrain.spec.load import load
from ptrain.train.heading import preflight_line
from ptrain.units import format_memory, parse_bytes


def row(text: str, name: str) -> list[str]:
    """The cells of the line that begins with `name`."""
    line = next(line for line in text.splitlines() if line.startswith(name))
    return [cell for cell in re.split(r"  +", line.removeprefix(name).strip()) if cell]


def test_the_heading_shows_activation_modes_that_no_tuple_shows():
    def placed(name: str, *overrides: str) -> str:
        return axes_text(load(name, list(overrides)).spec)

    assert placed("zero3") == "dp_shard 2 (S*,S,S,R)"
    assert placed("checkpoint-full") == "dp_shard 2 (S*,S,S,M)"
    assert placed("zero3", "activations=M") == "dp_shard 2 (S*,S,S,R) · A M"
    every = placed("zero3", "activations=M", "recompute={every: 2}")
    assert every.endswith("· A M, {policy: full, every: 2}")


@pytest.mark.parametrize(
    ("spec", "memory", "sent"),
    [
        ("70b-dp", "1043 GiB", "245 GB"),
        ("70b-zero1", "358.6 GiB", "245 GB"),
        ("70b-zero2", "244.5 GiB", "122.5 GB"),
        ("70b-zero3", "130.4 GiB", "367.5 GB"),
    ],
)
def test_the_papers_figures_of_70b_on_8_devices_are_printed(ptrain, spec, memory, sent):
    text = ptrain("predict", spec, "--explain")
    assert row(text, "model states")[0] == memory
    assert row(text, "total")[0] == sent


@pytest.mark.parametrize("spec", ["70b-zero1", "70b-zero2"])
def test_exact_sends_245_gb_for_stages_1_and_2_with_a_reason(ptrain, spec):
    text = ptrain("predict", spec, "--explain")
    assert row(text, "total")[1] == "245 GB"
    assert "why exact is not paper" in text
    assert "updated parameters are all-gathered" in text


@pytest.mark.parametrize(
    ("spec", "factors"),
    [
        (("zero3",), "all_gather forward 4×, backward 4×, reduction of gradients 4×"),
        (("zero3", "sync.gradients=last"), "backward 4×, reduction of gradients 1×"),
        (("zero2",), "per unit are: reduction of gradients 4×"),
    ],
)
def test_micro_batches_are_a_reason_with_their_factor(ptrain, spec, factors):
    assert f"{factors}\n" in ptrain("predict", *spec, "--explain")
    assert "micro-batches make a step" not in ptrain("predict", *spec)
    alone = ptrain("predict", *spec, "batch.global=4", "--explain")
    assert "micro-batches make a step" not in alone


def test_dp_against_zero3_prints_8_and_1_5_times(ptrain):
    text = ptrain("predict", "70b-dp", "70b-zero3", "--explain")
    assert row(text, "model states, paper") == ["1043 GiB", "130.4 GiB", "8× less"]
    assert row(text, "model states, exact")[2] == "8× less"
    assert row(text, "traffic, paper") == ["245 GB", "367.5 GB", "1.5× more"]
    assert row(text, "traffic, exact")[2] == "1.5× more"
    assert "paper" not in ptrain("predict", "70b-dp", "70b-zero3")


def test_zero2_against_zero3_differs_in_one_mode(ptrain):
    text = ptrain("predict", "70b-zero2", "70b-zero3", "--explain")
    answers, settings, *_ = text.split("\n\n")
    assert answers.startswith("70b-zero2 → 70b-zero3\n70b-zero2: Does not fit by ")
    assert settings == "  parameters: R → S*"
    assert row(text, "traffic, paper")[2] == "3× more"
    assert row(text, "traffic, exact")[2] == "1.5× more"
    assert "gradients, exact" not in text  # equal values are not printed


def test_a_spec_without_a_cluster_is_answered_with_the_key(ptrain, tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(
        "model: {preset: llama-tiny}\nmesh: {dp_shard: 2}\nplacement: zero3\n"
        "batch: {global: 8, micro: 2, sequence: 64}\n",
        encoding="utf-8",
    )
    text = ptrain("predict", str(file))
    (advice,) = re.findall(r"Name a cluster to see whether it fits, for example (\S+)\.\n", text)
    assert "\nFits: " in ptrain("predict", str(file), advice)
    assert text.splitlines()[1].startswith("Peak ") and text.endswith(f" {advice}\n")


def test_three_specs_are_rows(ptrain):
    lines = ptrain("predict", "70b-zero1", "70b-zero2", "70b-zero3").splitlines()
    assert lines[0].startswith("None fits: 70b-zero3 needs the least memory")
    assert [line.split()[0] for line in lines[2:5]] == ["70b-zero1", "70b-zero2", "70b-zero3"]


def test_a_list_sweeps_one_row_per_value(ptrain):
    text = ptrain("predict", "zero3", "mesh.dp_shard=1,2,4")
    assert [line.split()[0] for line in text.splitlines()[1:4]] == [
        "mesh.dp_shard=1",
        "mesh.dp_shard=2",
        "mesh.dp_shard=4",
    ]


def test_a_sweep_counts_the_collectives_of_each_row(ptrain):
    text = ptrain("predict", "zero3", "unit=sub-block,block,model").splitlines()
    assert text[0].split()[-1] == "calls"
    calls = [int(line.split()[-1]) for line in text[1:4]]
    assert calls == sorted(set(calls), reverse=True)
    one = ptrain("predict", "zero3", "unit=model").splitlines()
    table = one[next(i for i, line in enumerate(one) if line.startswith("traffic")) + 1 :]
    rows = table[: next(i for i, line in enumerate(table) if line.startswith("total"))]
    assert calls[-1] == sum(int(line.split()[-3]) for line in rows)


def test_a_sweep_over_two_specs_names_the_spec_in_each_row(ptrain):
    lines = ptrain("predict", "zero3", "zero1", "mesh.dp_shard=2,4").splitlines()
    assert [" ".join(line.split()[:2]) for line in lines[1:5]] == [
        "zero3 mesh.dp_shard=2",
        "zero3 mesh.dp_shard=4",
        "zero1 mesh.dp_shard=2",
        "zero1 mesh.dp_shard=4",
    ]


def paper_bytes_per_parameter(record: dict) -> float:
    states = {}
    for each in record["memory"]:
        if each["column"] == "paper" and each["state"] != "transient":
            states[each["state"]] = each["device_bytes"]
    return sum(states.values()) / record["parameters"]


@pytest.mark.parametrize(
    ("spec", "limit"), [("7b5-dp", 16), ("7b5-zero1", 4), ("7b5-zero2", 2), ("7b5-zero3", 0)]
)
def test_bytes_per_parameter_go_to_16_4_2_and_0_in_a_sweep(ptrain, spec, limit):
    axis = "dp_replicate" if spec == "7b5-dp" else "dp_shard"
    values = ",".join(f"{8**power}" for power in range(1, 5))
    records = json.loads(
        ptrain(
            "predict", spec, f"mesh.{axis}={values}", "batch.global=4096", "batch.micro=1",
            "cluster.devices=4096", "--json",
        )
    )  # fmt: skip
    found = [paper_bytes_per_parameter(record) for record in records]
    assert found == sorted(found, reverse=True)
    assert found[-1] == pytest.approx(limit, abs=16 / 4096 + 1e-6)


def test_a_misfit_shows_the_missing_memory_and_up_to_three_variants_that_fit(ptrain):
    text = ptrain("predict", "70b-dp")
    assert re.search(r"^Does not fit by \d+ GiB: \d+ GiB of 74.12 GiB per GPU", text, re.MULTILINE)
    record = json.loads(ptrain("predict", "70b-dp", "--json"))
    assert record["fit"]["fits"] is False
    assert 0 < len(record["cheaper"]) <= 3
    for each in record["cheaper"]:
        assert each["peak_bytes"] < record["fit"]["peak_bytes"]
        assert each["fits"] is not True or each["spare_bytes"] >= 0


def test_an_offered_variant_equals_the_prediction_of_its_overrides(ptrain):
    record = json.loads(ptrain("predict", "70b-dp", "--json"))
    for offered in record["cheaper"]:
        variant = json.loads(ptrain("predict", "70b-dp", *offered["overrides"], "--json"))
        assert variant["fit"]["peak_bytes"] == offered["peak_bytes"]


def test_a_spec_that_fits_offers_nothing(ptrain):
    record = json.loads(ptrain("predict", "zero3", "--json"))
    assert record["fit"]["fits"] is True
    assert record["cheaper"] == []
    title, answer, *_ = ptrain("predict", "zero3").splitlines()
    assert title.startswith("zero3 · ") and answer.startswith("Fits: ")


def test_predict_gives_one_record_for_one_spec_and_a_list_for_several(ptrain):
    assert isinstance(json.loads(ptrain("predict", "zero3", "--json")), dict)
    records = json.loads(ptrain("predict", "zero3", "ddp", "--json"))
    assert [record["spec"] for record in records] == ["zero3", "ddp"]
    assert all(record["verdict"] is None for record in records)
    assert {row["column"] for row in records[0]["memory"]} == {"paper", "exact"}


def test_the_difference_of_two_specs_is_shown_without_defaults_in_yaml(ptrain):
    before = ptrain("predict", "zero3", "tp-zero3").split("\n\n")[1]
    assert "placement: " in before and "tensor" not in before
    assert "offload." not in ptrain("predict", "zero2", "zero-offload").split("\n\n")[1]
    assert "tensor.plan: – → naive" in ptrain("predict", "zero3", "tp-naive")
    keeps = ptrain("predict", "zero3", "zero3-keep")
    assert "sync.reshard_after_forward: true → false" in keeps


def test_ranks_of_a_pipeline_have_separate_rows(ptrain):
    """20 layers of 70B each, embedding and head at the ends; 1f1b has 4, 3, 2 and 1 in flight."""
    text = ptrain("predict", "70b-3d")
    assert row(text, "pp  ranks")[:4] == ["stages", "layers", "parameters", "optimizer"]
    ranks = ["[0 1 … 31]", "[32 33 … 63]", "[64 65 … 95]", "[96 97 … 127]"]
    told = [row(text, f"{place}   {own}") for place, own in enumerate(ranks)]
    assert [cells[:2] for cells in told] == [[str(place), "20"] for place in range(4)]
    layer = 8192 * (2 * 8192 + 2 * 1024 + 3 * 28672 + 2)
    end = 94464 * 8192
    middle, first = (2 * numel / 32 / 2**30 for numel in (20 * layer, 20 * layer + end))
    held = [float_of(cells[2]) for cells in told]
    assert held == pytest.approx([first, middle, middle, first], rel=1e-3)
    in_flight = [float_of(cells[5]) for cells in told]
    assert in_flight == sorted(in_flight, reverse=True)
    assert in_flight[1] / in_flight[2] == pytest.approx(3 / 2, rel=0.01)
    assert max((cells[-1] for cells in told), key=float_of) == row(text, "peak backward")[0]


def float_of(text: str) -> float:
    """Return a size in GiB."""
    return parse_bytes(text) / 2**30


def test_a_pipelines_record_has_every_state_of_every_rank(ptrain):
    record = json.loads(ptrain("predict", "70b-3d", "--json"))
    rows = [each for each in record["memory"] if each["column"] == "exact"]
    states = {each["state"] for each in rows}
    assert {"parameters", "optimizer", "gradients", "activations"} <= states
    assert sorted((each["state"], each["rank"]) for each in rows) == sorted(
        (state, rank) for state in states for rank in range(128)
    )
    assert {each["rank"] for each in record["peak"] if each["column"] == "exact"} == {*range(128)}


def test_without_pp_ranks_share_one_row(ptrain):
    assert "pp  ranks" not in ptrain("predict", "tp-zero3")


def test_recomputation_is_printed_with_the_operations(ptrain):
    line = "matrix products per rank and step: 1.846 GFLOP forward, 3.827 GFLOP backward"
    plain, again = ptrain("predict", "zero3"), ptrain("predict", "checkpoint-full")
    assert f"{line}\n" in plain
    assert f"{line}, 1.409 GFLOP recomputed\n" in again


@pytest.mark.parametrize("name", ["zero3", "tp", "pp-1f1b"])
def test_activations_are_unknown_for_attention_that_a_cpu_cannot_train(ptrain, monkeypatch, name):
    monkeypatch.setitem(vars(package), "read_facts", None)  # would trace it
    text = ptrain("predict", name, "attention=flex", "device=cuda", "--explain")
    reason = "torch's flex_attention has no backward pass on CPUs, where a trace would run"
    assert f"exact, activations: {reason}" in text and f"exact, peak: {reason}" in text
    assert " MiB without activations of " in text


def test_a_training_prints_no_peak_or_traffic_without_a_prediction():
    flex = {"model": {"preset": "llama-tiny"}, "mesh": {"tp": 2}, "placement": {"tp": "S,S,S,R"}}
    flex |= {"attention": "flex", "device": "cuda", "batch": {"global": 4, "sequence": 32}}
    plain, again = load(flex).spec, load(flex | {"activations": "M"}).spec
    line = preflight_line(plain, derive(plain).exact)
    assert line.startswith("preflight  peak unknown, resident without activations: ")
    assert "traffic" in line
    assert "traffic" not in preflight_line(again, derive(again).exact)


OWN_70B = (
    *("zero3", "model.preset=llama3-70b", "mesh.dp_shard=64", "cluster.preset=h100-64"),
    *("precision={layout: fsdp-mixed, reduced: fp32}", "activations=M", "prefetch=0"),
    "batch={global: 64, micro: 1, sequence: 4096}",
)


def test_a_dial_that_makes_a_step_much_faster_is_named_with_the_memory_that_it_needs(ptrain):
    lines = ptrain("predict", *OWN_70B).splitlines()
    (line,) = [line.strip() for line in lines if "would be" in line]
    command, _, rest = line.partition(" would be ")
    dials = shlex.split(command)
    changed = json.loads(ptrain("predict", *OWN_70B, *dials, "--json"))
    own = json.loads(ptrain("predict", *OWN_70B, "--json"))
    before, after = (record["step_seconds"][0]["value"] for record in (own, changed))
    peak = format_memory(changed["fit"]["peak_bytes"])
    assert rest.startswith(f"{before / after - 1:.0%} faster and needs {peak} of ")
    assert before / after > 1.05 and changed["fit"]["fits"]
    assert rest.endswith(" per GPU") and not changed["fit"]["tight"]
    (variant,) = own["faster"]
    assert variant["overrides"] == dials and variant["step_seconds"] == after
    assert not changed["faster"]


def test_a_faster_dial_that_leaves_little_memory_is_marked_tight(ptrain):
    lines = ptrain("predict", *OWN_70B, "cluster.device_memory=49GiB").splitlines()
    assert lines[1].startswith("Fits: ")
    assert [line for line in lines if "would be" in line and line.endswith(" per GPU (tight)")]


def test_no_faster_dial_is_named_where_none_brings_five_percent_or_nothing_fits(ptrain):
    fast = ("8b-zero3", "cluster.preset=h100-8", "batch.micro=2", "batch.global=64")
    assert "would be" not in ptrain("predict", *fast)
    assert "would be" not in ptrain("predict", "70b-zero3", "cluster.preset=h100-8")
