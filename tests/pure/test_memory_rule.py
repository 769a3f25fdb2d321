"""One memory rule for all commands: peak plus reserve against device memory, and the bytes of a
node's ranks against host memory."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from ptrain.algebra.legality import require_runnable
from ptrain.cli.main import main
from ptrain.cli.train import load_checked
from ptrain.derivation.estimate import derive
from ptrain.errors import SpecError
from ptrain.selection.choose import select
from ptrain.selection.fit import fit
from ptrain.selection.preflight import require_fit
from ptrain.selection.recompute import with_largest_micro
from ptrain.spec.cluster import Cluster
from ptrain.spec.load import load
from ptrain.spec.names import list_files
from ptrain.spec.spec import Spec
from ptrain.train import heading, options
from ptrain.train.heading import preflight_lines

GB, GIB = 10**9, 2**30
OFFLOADED = (
    "zero3",
    "model.preset=llama3.1-70b",
    "mesh.dp_shard=8",
    "placement=fsdp-offload",
    "cluster.preset=h100-8",
)
UNSTATED = "cluster={devices: 8, device_memory: 79.1 GiB, intra_node_bandwidth: 450 GB/s}"
# torch's "total capacity" in reports of CUDA out-of-memory errors: the least and the largest
CAPACITIES = {"a100": (79.15, 79.35), "b200": (178.34, 178.36), "h100": (79.09, 79.21)}
CAPACITIES |= {"h200": (139.72, 139.81), "a10": (22.19, 22.21), "l40s": (44.4, 44.53)}
CAPACITIES |= {"mi300x": (191.4, 191.99), "v100": (31.73, 31.75)}
CAPACITIES |= {"rtx3090": (23.68, 23.71), "rtx4090": (23.52, 23.68)}
# of which no report is known: below the data sheet's GB
CAPACITIES |= {
    "a6000": (47.0, 48.0),
    "mi250x": (63.9, 64.0),
    "b300": (260.0, 275040 / 1024),
    "l4": (22.0, 24e9 / GIB),
}
HOSTS = {
    "a100": 2e12,
    "b200": 2e12,
    "b300": 2e12,
    "h100": 2e12,
    "h200": 2e12,
    "v100": 512e9,
    "mi250x": 512e9,
}


def cluster_of(spec: Spec) -> Cluster:
    assert spec.cluster is not None
    return spec.cluster


def with_cluster(spec: Spec, **changes: object) -> Spec:
    return replace(spec, cluster=replace(cluster_of(spec), **changes))


# -- devices


@pytest.mark.parametrize("name", list_files("clusters"))
def test_a_preset_states_the_capacity_that_torch_reports(name):
    cluster = cluster_of(load("zero3", [f"cluster.preset={name}"]).spec)
    card = name.split("-")[0]
    if cluster.kind == "cuda":
        low, high = CAPACITIES[card]
        assert low <= cluster.device_memory / GIB <= high
        assert cluster.host_memory == (None if name == "h200-1" else HOSTS.get(card))
    else:
        assert cluster.device_memory < cluster.host_memory == 16 * GIB


def test_a_reserve_is_the_kinds_unless_it_is_written():
    cluster = cluster_of(load("zero3", ["cluster.preset=h100-8"]).spec)
    assert cluster.reserved_bytes == 3 * GIB + cluster.device_memory // 40
    assert replace(cluster, kind=None).reserved_bytes == cluster.reserved_bytes
    assert replace(cluster, kind="cpu").reserved_bytes == 300 * 2**20
    assert replace(cluster, reserve=0).usable_memory == cluster.device_memory
    written = load("zero3", ["cluster.preset=h100-8", "cluster.reserve=7GiB"]).spec
    assert cluster_of(written).reserved_bytes == 7 * GIB


@pytest.mark.parametrize("peak", [82_800 * 10**6, 84 * GB])
def test_a_peak_without_space_for_the_runtime_does_not_fit(peak):
    """Both fit 85.9 GB, as 80 GiB were taken for."""
    spec = load("8b-zero3").spec
    exact = derive(spec).exact
    found = fit(spec, exact)._replace(peak_bytes=peak)
    assert found.fits is False
    assert found.short_bytes == peak + cluster_of(spec).reserved_bytes - found.device_memory
    bare = found._replace(reserve_bytes=0)
    assert bare.fits is True and bare.is_tight


def test_a_fit_is_tight_if_less_than_a_twentieth_is_left():
    spec = load("8b-zero3").spec
    found = fit(spec, derive(spec).exact)
    assert found.fits is True and not found.is_tight
    left = found.device_memory // 20
    assert not found._replace(peak_bytes=found.usable_memory - left - 1).is_tight
    tight = found._replace(peak_bytes=found.usable_memory - left + 1)
    assert tight.fits is True and tight.is_tight
    assert not found._replace(peak_bytes=found.usable_memory + 1).is_tight


def test_predict_prints_the_reserve_and_records_it(ptrain):
    peak = derive(require_runnable(load("8b-zero3"))).exact.peak_bytes()
    memory = f"cluster.device_memory={peak + 4 * GIB + peak // 40}"
    tight = ptrain("predict", "8b-zero3", memory)
    assert "\nFits, but tight: " in tight and " less a reserve of 4." in tight
    assert "a reserve of 0 B" in ptrain("predict", "8b-zero3", memory, "cluster.reserve=0")
    record = json.loads(ptrain("predict", "8b-zero3", memory, "--json"))["fit"]
    assert record["fits"] is True and record["tight"] is True
    assert record["reserve_bytes"] == 3 * GIB + record["device_memory"] // 40
    assert "Does not fit by " in ptrain("predict", "8b-zero3", f"cluster.device_memory={peak}")


def test_a_sweep_has_the_rule_of_a_single_spec(ptrain):
    peak = derive(require_runnable(load("8b-zero3"))).exact.peak_bytes()
    sizes = [peak, peak + 4 * GIB + peak // 40, 2 * peak]
    words = f"cluster.device_memory={','.join(map(str, sizes))}"
    rows = ptrain("predict", "8b-zero3", words, "--csv").splitlines()
    names = rows[0].split(",")
    cells = [dict(zip(names, row.split(","), strict=True)) for row in rows[1:]]
    assert [cell["fits"] for cell in cells] == ["false", "true", "true"]
    assert [cell["tight"] for cell in cells] == ["false", "true", "false"]
    table = ptrain("predict", "8b-zero3", words).splitlines()[2:5]
    assert [word for row in table for word in row.split() if word in ("no", "tight", "yes")] == [
        "no",
        "tight",
        "yes",
    ]


def test_the_best_of_select_fits_in_predict_and_train():
    constraints = ["pp=1", "tp=1", "cp=1", "dp_shard=8", "micro>=2"]
    found = select("llama3-8b", cluster="h100-8", devices=8, where=constraints, count=20)
    spec = found.ranking[0].spec
    exact = derive(spec).exact
    assert fit(spec, exact).fits is True
    assert max(row.peak_bytes for row in found.ranking) <= cluster_of(spec).usable_memory
    require_fit(spec, exact)
    bare = select(
        "llama3-8b",
        ["cluster.reserve=0"],
        cluster="h100-8",
        devices=8,
        where=constraints,
        count=20,
        margin=0.0,
    )
    assert bare.ranking[0].peak_bytes > cluster_of(spec).usable_memory  # the fastest of these


def test_the_largest_micro_batch_leaves_the_reserve():
    words = ["batch.micro=auto", "batch.sequence=8192"]
    fitting = with_largest_micro(load("8b-zero3", words).spec)
    bare = with_largest_micro(load("8b-zero3", [*words, "cluster.reserve=0"]).spec)
    hosted = ["placement.dp_shard=S*,O,O,R", UNSTATED, "cluster.kind=cuda"]
    assert "fits" in with_largest_micro(load("8b-zero3", [*words, *hosted]).spec).batch.micro_choice
    peak = derive(fitting).exact.peak_bytes()
    assert peak <= cluster_of(fitting).usable_memory
    assert bare.batch.micro >= fitting.batch.micro


# -- hosts


def test_offloaded_states_are_compared_with_the_host_of_the_preset(ptrain):
    text = ptrain("predict", *OFFLOADED)
    assert "1051 GiB of 1863 GiB on a node's host" in text and "\nFits: " in text
    small = ptrain("predict", *OFFLOADED, "cluster.host_memory=1 TB")
    assert "Does not fit by 120 GiB: " in small and "1051 GiB of 931.3 GiB" in small


def test_an_unknown_host_is_not_unlimited(ptrain):
    words = [*OFFLOADED[:-1], UNSTATED]
    text = ptrain("predict", *words)
    assert "`cluster.host_memory` is missing, and a node's host holds" in text
    assert "1051 GiB on a node's host (memory unknown)" in text
    assert "\nFits: " not in text and "\nUnknown whether it fits: " in text
    assert "`cluster.host_memory=2TB`" in text
    assert "\nFits: " in ptrain("predict", *words, "cluster.host_memory=2TB")
    record = json.loads(ptrain("predict", *words, "--json"))["fit"]
    assert record["fits"] is None and record["host_bytes"] == record["host_needed_bytes"] > 10**12
    sweep = ptrain("predict", *words, "batch.sequence=64,128")
    head, *rows = sweep.splitlines()
    assert "host memory" in head and all("unknown" in r and "1051 GiB" in r for r in rows[:2])
    assert sweep.count("unknown whether it fits: `cluster.host_memory` is missing") == 1
    spec = load(words[0], words[1:]).spec
    exact = derive(spec).exact
    require_fit(spec, exact)  # an unknown peak is no reason for a rejection
    assert "`cluster.host_memory=2TB`" in preflight_lines(spec, exact)[-1]


def test_nothing_is_unknown_of_a_host_that_holds_no_states():
    spec = load("zero3", [UNSTATED, "mesh.dp_shard=8", "batch.global=16"]).spec
    assert fit(spec, derive(spec).exact).fits is True


def test_ranks_on_cpus_share_the_memory_of_their_host():
    spec = load("zero3").spec
    exact = derive(spec).exact
    found = fit(spec, exact)
    assert found.shared_bytes == 2 * (exact.peak_bytes() + 300 * 2**20)
    assert fit(with_cluster(spec, host_memory=found.shared_bytes), exact).fits is True
    less = fit(with_cluster(spec, host_memory=found.shared_bytes - 1), exact)
    assert less.fits is False and less.host_short_bytes == 1


def test_bytes_of_the_start_are_compared_with_the_host():
    spec = load("8b-zero3").spec
    exact = derive(spec).exact
    host = cluster_of(spec).host_memory
    assert fit(spec, replace(exact, startup_bytes=host // 8)).fits is True
    found = fit(spec, replace(exact, startup_bytes=host // 8 + 1))
    assert found.fits is False and found.host_short_bytes == 8


def test_a_search_names_the_key_if_only_offloaded_states_fit(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(
        "kind: cuda\nsm: 90\ndevices: 2\ndevice_memory: 79.1 GiB\nintra_node_bandwidth: 450 GB/s\n"
    )
    job = {"cluster": str(file), "where": ["pp=1", "tp=1", "cp=1", "recompute=full"], "count": 20}
    with pytest.raises(SpecError, match=r"cluster: .*host(.|\n)*`cluster\.host_memory=2TB`"):
        select("llama3-70b", **job)
    found = select("llama3-70b", ["cluster.host_memory=2TB"], **job)
    assert found.best is not None and found.best.memory.host_bytes > 10**11


# -- this host


@pytest.fixture
def _small_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heading, "physical_memory", lambda: 16 * GIB)
    monkeypatch.setattr(heading, "gpus", lambda: 0)


@pytest.mark.usefixtures("_small_host")
@pytest.mark.parametrize("command", ["train", "validate"])
def test_ranks_that_this_host_cannot_hold_are_rejected_before_any_starts(
    command, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    first = ["zero3"] if command == "validate" else []  # which does not start either
    assert main([command, *first, "8b-zero3", "train.seed=1"]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and "Traceback" not in captured.err
    assert "8 ranks of 8b-zero3 on the CPU need 310.5 GiB of memory" in captured.err
    assert "this host has 16 GiB" in captured.err
    assert "`ptrain simulate 8b-zero3 train.seed=1`" in captured.err
    assert not [*tmp_path.iterdir()]


@pytest.mark.usefixtures("_small_host")
def test_remote_or_forced_ranks_are_accepted(monkeypatch):
    words = ["8b-zero3", "train.steps=4"]
    assert load_checked(options.parse_options([*words, "--force"])).name == "8b-zero3"
    with pytest.raises(SpecError, match="8 ranks of 8b-zero3"):
        load_checked(options.parse_options(words))
    spec = load(words[0]).spec
    exact = derive(spec).exact
    heading.require_ranks_fit_host(replace(spec, device="cuda"), exact, "8b-zero3")
    monkeypatch.setattr(heading, "gpus", lambda: 8)
    heading.require_ranks_fit_host(spec, exact, "8b-zero3")
    with pytest.raises(SpecError, match="on the CPU"):
        heading.require_ranks_fit_host(replace(spec, device="cpu"), exact, "8b-zero3")


@pytest.mark.usefixtures("_small_host")
def test_the_need_of_this_host_is_that_of_its_ranks():
    spec = load("zero3").spec
    exact = derive(spec).exact
    peaks = [max(row.device_bytes for row in exact.peak if row.rank == rank) for rank in range(2)]
    assert heading.needed_bytes(exact) == sum(peaks) > 0
    heading.require_ranks_fit_host(spec, exact, "zero3")
    with pytest.raises(SpecError, match="2 ranks of zero3"):
        whole = replace(exact, startup_bytes=9 * GIB)
        heading.require_ranks_fit_host(spec, whole, "zero3")
    large = require_runnable(load("8b-zero3", ["device=cpu"]))
    with pytest.raises(SpecError, match="2 ranks of 8b-zero3"):
        heading.require_ranks_fit_host(large, derive(large).exact, "8b-zero3", nodes=4)


def test_a_container_has_the_memory_of_its_limit(tmp_path: Path, monkeypatch):
    from ptrain import processor

    whole = processor.physical_memory()
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(processor, "_LIMIT", limit)
    limit.write_text("max\n")
    assert processor.physical_memory() >= whole
    limit.write_text("4096\n")
    assert processor.physical_memory() == 4096


def test_no_answer_contradicts_the_outcome_of_a_published_job(benchmark_module):
    published = benchmark_module("published_fits")
    outcomes = {job.name: job.trained for job in published.JOBS}
    assert list(outcomes.values()).count(False) >= 5, "jobs that ran out of memory"
    assert {job.name: published.predict_fit(job).fits for job in published.JOBS} == outcomes


def test_a_search_names_the_host_if_it_is_too_small(tmp_path, capsys):
    file = tmp_path / "mine.yaml"
    file.write_text(
        "name: mine\nmodel: {preset: llama3-8b}\nmesh: auto\nplacement: auto\n"
        "batch: {global: 16, micro: 1, sequence: 4096}\n"
        "cluster: {devices: 2, device_memory: 24 GiB, intra_node_bandwidth: 25 GB/s, "
        "kind: cuda, sm: 89, host_memory: 20 GB}\n"
    )
    assert main(["select", str(file)]) == 2
    message = capsys.readouterr().err
    assert "cluster.host_memory: no candidate fits" in message and "--exact" not in message
