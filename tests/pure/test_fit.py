"""`fits` is decided only if the peak for the executing device is known; otherwise it is unknown,
with the reason and the command that measures it."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace

import pytest

from ptrain.algebra.legality import require_runnable
from ptrain.cost import State
from ptrain.derivation.estimate import derive
from ptrain.errors import DoesNotFit, SpecError
from ptrain.selection.fit import Fit, fit, resident_bytes
from ptrain.selection.preflight import find_changes, require_fit
from ptrain.selection.recompute import resolve_auto
from ptrain.spec.load import load
from ptrain.spec.names import list_files
from ptrain.spec.spec import Spec
from ptrain.train.heading import preflight_lines

H100 = ("model.preset=gpt2-124m", "mesh.dp_shard=8", "batch={global: 64, micro: 8, sequence: 1024}")
ON_H100 = (*H100, "cluster.preset=h100-8")
ON_A100 = (*H100, "cluster.preset=a100-8")  # on which nobody has seen what dropout keeps
DROPS = "model.dropout=0.1"
# flex attention has no backward pass where a trace would run
UNTOLD = ("model.preset=llama3-8b", "attention=flex")


def fit_of(*overrides: str, name: str = "zero3") -> Fit:
    spec = load(name, list(overrides)).spec
    return fit(spec, derive(spec).exact)


def with_device_memory(spec: Spec, memory: int) -> Spec:
    assert spec.cluster is not None
    return replace(spec, cluster=replace(spec.cluster, device_memory=memory))


def line_of(text: str, start: str) -> str:
    (line,) = (line for line in text.splitlines() if line.startswith(start))
    return line


def command_in(text: str) -> list[str]:
    """Return the arguments of the suggested command, split as a shell does."""
    (line,) = (line for line in text.splitlines() if line.startswith("Next: ptrain simulate "))
    assert f": {line.removeprefix('Next: ')}\n" in text, "below the answer, too"
    return shlex.split(line.removeprefix("Next: "))


def test_without_a_peak_the_fit_is_unknown():
    found = fit_of(*UNTOLD, "mesh.dp_shard=16", "batch.global=32", "cluster.preset=h100-64")
    assert found.fits is None and found.peak_bytes is None
    assert 0 < found.resident_bytes < found.device_memory
    assert found.why


def test_resident_memory_above_the_capacity_does_not_fit_without_a_peak():
    found = fit_of(*UNTOLD, "cluster.preset=laptop")
    assert found.fits is False and found.peak_bytes is None
    assert found.short_bytes == found.resident_bytes - found.usable_memory > 0


def test_a_known_peak_is_compared_as_ever():
    found = fit_of()
    assert found.fits is True and found.peak_bytes and not found.why


def test_without_a_cluster_there_is_nothing_to_fit():
    assert fit_of("cluster=null").fits is None


@pytest.mark.parametrize("name", list_files("strategies", "node"))
def test_resident_memory_is_at_most_the_peak(name):
    spec = require_runnable(load(name))
    exact = derive(spec).exact
    peak = exact.peak_bytes()
    if peak is None:  # specs without a table are traced, with torch
        assert exact.undefined["peak"]
        return
    assert 0 < resident_bytes(exact) <= peak


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_cpu_kernels_with_dropout_do_not_predict_a_gpu(attention):
    kept = f"attention={attention}"
    assert fit_of(*ON_A100, kept, "batch.micro=1").fits is True
    dropped = fit_of(*ON_A100, kept, "batch.micro=1", DROPS)
    assert dropped.fits is None and dropped.peak_bytes is None and "dropout" in dropped.why
    on_cpu = fit_of(*ON_A100, kept, "batch.micro=1", DROPS, "device=cpu")
    assert on_cpu.fits is True and on_cpu.peak_bytes


@pytest.mark.parametrize(
    ("cluster", "device", "is_known"),
    [
        ("cluster.preset=laptop", "device=auto", True),
        ("cluster.preset=laptop", "device=cuda", False),
        ("cluster.preset=a100-8", "device=auto", False),
        ("cluster.preset=a100-8", "device=cpu", True),
        (
            "cluster={devices: 8, device_memory: 80 GiB, intra_node_bandwidth: 1 GB/s}",
            "device=auto",
            False,
        ),
        (
            "cluster={devices: 8, device_memory: 80 GiB, intra_node_bandwidth: 1 GB/s, kind: cpu}",
            "device=auto",
            True,
        ),
    ],
)
def test_the_spec_names_its_target_by_device_and_cluster(cluster, device, is_known):
    found = fit_of(*H100, "batch.micro=1", DROPS, cluster, device)
    assert (found.peak_bytes is not None) is is_known


def test_with_dropout_states_that_are_too_large_for_a_gpu_do_not_fit():
    spec = with_device_memory(load("zero3", [*ON_A100, DROPS]).spec, 2**20)
    exact = derive(spec).exact
    found = fit(spec, exact)
    assert found.fits is False
    assert found.resident_bytes < exact.bytes_of(State.ACTIVATIONS)  # which are not counted


def test_on_a_gpu_dropout_is_warned_of_and_recorded_as_not_claimed(ptrain):
    text = ptrain("predict", "zero3", *ON_A100, DROPS)
    warning = line_of(text, "warning: ")
    assert "not claimed" in warning and "CPU" in warning
    assert "to spare" not in text and "Fits" not in text
    record = json.loads(ptrain("predict", "zero3", *ON_A100, DROPS, "--json"))
    assert {"activations", "peak"} == set(record["unclaimed"]["exact"])
    assert record["fit"]["fits"] is None and record["fit"]["peak_bytes"] is None
    plain = json.loads(ptrain("predict", "zero3", *ON_A100, "--json"))
    assert plain["unclaimed"] == {} and plain["fit"]["fits"] is True
    assert "not claimed" not in ptrain("predict", "zero3", *ON_A100)


@pytest.mark.parametrize(
    ("words", "is_claimed"),
    [((), True), (("attention=eager",), False), (("cluster={preset: h100-8, sm: 100}",), False)],
)
def test_dropout_is_claimed_where_a_device_has_confirmed_it(ptrain, words, is_claimed):
    record = json.loads(ptrain("predict", "zero3", *ON_H100, DROPS, *words, "--json"))
    assert (record["unclaimed"] == {}) is is_claimed
    assert (record["fit"]["peak_bytes"] is not None) is is_claimed


def test_on_a_gpu_the_peak_of_offloaded_activations_is_not_claimed(ptrain):
    """They come back on a stream of their own, ahead of their use."""
    offloaded = ("activations=O", "model.layers=4")
    record = json.loads(ptrain("predict", "zero3", *ON_H100, *offloaded, "--json"))
    assert set(record["unclaimed"]["exact"]) == {"activations", "peak"}
    assert record["fit"]["fits"] is None
    on_cpu = ("zero3", *offloaded, "device=cpu")
    assert json.loads(ptrain("predict", *on_cpu, "--json"))["unclaimed"] == {}


def test_the_command_for_dropout_rehearses_on_a_gpu(ptrain):
    text = ptrain("predict", "zero3", *ON_A100, DROPS)
    assert line_of(text, "Unknown whether it fits: ")
    words = ["ptrain", "simulate", "zero3", *ON_A100, DROPS, "device=cuda", "--rehearse"]
    assert command_in(text) == words
    record = json.loads(ptrain("predict", "zero3", *ON_A100, DROPS, "device=cuda", "--json"))
    said = shlex.split(record["fit"]["command"])
    assert said.count("device=cuda") == 1 and said[-1] == "--rehearse"


def test_the_command_repeats_the_typed_arguments(ptrain):
    typed = ("zero3", *UNTOLD, "cluster.preset=h100-8")
    text = ptrain("predict", *typed)
    assert line_of(text, "  torch's flex_attention has no backward pass")
    assert command_in(text) == ["ptrain", "simulate", *typed, "device=cuda", "--rehearse"]
    several = ("tp-dp", *UNTOLD, "cluster.preset=h100-8")
    assert command_in(ptrain("predict", *several))[-3:-1] == ["--rank", "all-distinct"]


def test_flex_attention_is_rehearsed_for_fake_ranks_have_no_backward_pass_of_it(ptrain):
    text = ptrain("predict", "zero3", "attention=flex")
    words = ["ptrain", "simulate", "zero3", "attention=flex", "device=cuda", "--rehearse"]
    assert command_in(text) == words


def test_a_record_passes_no_resident_sum_off_as_a_peak(ptrain):
    record = json.loads(ptrain("predict", "zero3", *UNTOLD, "cluster.preset=h100-8", "--json"))
    found = record["fit"]
    assert found["fits"] is None and found["peak_bytes"] is None
    assert 64 * 10**9 < found["resident_bytes"] < found["device_memory"]
    assert found["unknown"] and found["command"].startswith("ptrain simulate zero3 ")
    assert record["cheaper"] == []
    known = json.loads(ptrain("predict", "zero3", "--json"))["fit"]
    assert known["unknown"] is None and known["command"] is None
    assert 0 < known["resident_bytes"] < known["peak_bytes"]


def test_a_sweep_has_no_peak_without_a_prediction_with_a_reason(ptrain):
    meshes = ("mesh.dp_shard=8,16", "batch.global=32")
    text = ptrain("predict", "zero3", *UNTOLD, *meshes, "cluster.preset=h100-64")
    titles, *rows = text.splitlines()[:3]
    assert titles.split()[2] == "peak" and [each.split()[2] for each in rows] == ["–", "–"]
    told = [line for line in text.splitlines() if line.startswith("peak unknown: mesh.dp_shard=")]
    assert len(told) == 2 and all("flex_attention" in line for line in told)


def test_a_comparison_has_no_peak_of_a_cpu_for_a_gpu(ptrain, tmp_path):
    file = tmp_path / "dropped.yaml"
    spec = load("zero3", [*ON_A100, DROPS]).spec
    file.write_text(json.dumps(spec.resolved), encoding="utf-8")
    plain = tmp_path / "plain.yaml"
    plain.write_text(json.dumps(load("zero3", list(ON_A100)).spec.resolved), encoding="utf-8")
    text = ptrain("predict", str(plain), str(file))
    cells = line_of(text, "peak  ").split("  ")
    assert cells[-1].strip() == "–"


def test_nothing_is_offered_on_a_peak_that_is_none():
    spec = with_device_memory(load("zero3", [*ON_A100, DROPS]).spec, 2**20)
    assert find_changes(spec).variants == ()
    with pytest.raises(DoesNotFit, match="states alone are") as refused:
        require_fit(spec, derive(spec).exact)
    assert "fits" not in str(refused.value)
    assert "closest" not in str(refused.value)


def test_a_training_with_an_unknown_fit_is_accepted_with_a_note():
    spec = load("zero3", [*ON_A100, DROPS]).spec
    exact = derive(spec).exact
    require_fit(spec, exact)
    first, second = preflight_lines(spec, exact, ("runs/one/spec.resolved.yaml",))
    assert first.startswith("preflight  peak unknown, resident without activations: ")
    assert "+ reserve 4.981 GiB of 79.25 GiB per rank" in first and "traffic" in first
    assert second.startswith("unknown: ") and "dropout" in second
    assert "ptrain simulate runs/one/spec.resolved.yaml device=cuda --rehearse" in second


def test_no_policy_is_chosen_for_a_budget_by_peaks_of_another_device():
    said = ("activations=M", "recompute={budget: 60 GiB}")
    resolve_auto(load("zero3", [*ON_A100, *said]))
    resolve_auto(load("zero3", [*ON_A100, *said, DROPS, "device=cpu"]))
    with pytest.raises(SpecError, match=r"recompute\.budget: .*dropout"):
        resolve_auto(load("zero3", [*ON_A100, *said, DROPS]))
