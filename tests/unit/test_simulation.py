"""`ptrain simulate` runs the training program on fake ranks and fake tensors with the predicted
memory and traffic for every placement; its further output."""

import json
import re
from collections import Counter
from functools import cache
from itertools import pairwise

import pytest
import torch

from ptrain.cli.main import main
from ptrain.cost import Column, Phase, State
from ptrain.derivation.allocator import steady_reserved
from ptrain.derivation.estimate import derive
from ptrain.errors import SpecError
from ptrain.models.objective import can_fuse
from ptrain.report.simulation import GARBAGE
from ptrain.runtime import simulated_gpu
from ptrain.runtime.comm import Tag
from ptrain.selection.recompute import resolve_auto
from ptrain.simulation.choice import choose_ranks, rank_classes
from ptrain.simulation.execute import SimulatedRank, rehearsal_device, simulate
from ptrain.simulation.living import StorageLife, describe_storage
from ptrain.spec.load import load
from ptrain.spec.names import list_files
from ptrain.spec.spec import Spec
from ptrain.traces.facts import facts_of

SMALL = (
    "model.layers=2",
    "model.hidden=32",
    "model.heads=4",
    "model.kv_heads=4",
    "model.ffn=48",
    "model.vocab=261",
    "batch={global: 4, micro: 1, sequence: 16}",
)
TINY = (*SMALL, "model.layers=1", "batch.global=2")  # for what is said, not what is held
STRATEGIES = list_files("strategies")
BY_DEFAULT = ("ddp", "zero3", "tp-sp", "pp-zero3", "activation-offload")
WITHOUT = {"tp": ("batch.global=1",), "tp-sp": ("batch.global=1",)}  # accumulation


def small(strategy: str, *changes: str) -> Spec:
    return resolve_auto(load(strategy, (*SMALL, *WITHOUT.get(strategy, ()), *changes)))


@cache
def of_last_rank(strategy: str) -> SimulatedRank:
    spec = small(strategy)
    return simulate(spec, spec.world_size - 1)


def assert_equal(spec: Spec, found: SimulatedRank) -> None:
    """Resident state, what lives for a while, traffic, operations and peaks: no byte is off."""
    simulated = found.estimate
    exact = derive(spec, facts_of(spec)).exact.of_rank(found.rank)
    assert {row for row in simulated.memory if row.device_bytes} == {
        row for row in exact.memory if row.device_bytes
    }
    assert set(simulated.traffic) == set(exact.traffic)
    assert simulated.operations == exact.operations
    assert set(simulated.peak) == set(exact.peak)


@pytest.mark.parametrize("strategy", BY_DEFAULT)
def test_a_rank_on_fake_ranks_has_the_predicted_memory_traffic_and_operations(
    strategy: str,
) -> None:
    assert_equal(small(strategy), of_last_rank(strategy))


@pytest.mark.parametrize(
    "strategy",
    ["ddp", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("tp", "pp-gpipe"))],
)
def test_samples_of_one_token_have_targets_that_no_loss_copies(strategy: str) -> None:
    spec = small(strategy, "batch={accumulate: 1, micro: 3, sequence: 1}")
    assert_equal(spec, simulate(spec, 1))


@pytest.mark.parametrize("tied", ["false", pytest.param("true", marks=pytest.mark.nightly)])
@pytest.mark.parametrize("fused", ["false", "true"])
def test_a_chunk_of_the_loss_computes_its_logits_again(fused: str, tied: str) -> None:
    if fused == "true" and not can_fuse():
        pytest.skip("torch has no linear_cross_entropy")
    loss = f"loss={{chunk: 5, fused: {fused}}}"
    spec = small("zero3", "model.layers=1", f"model.tied={tied}", loss)
    assert_equal(spec, simulate(spec))


@pytest.mark.nightly
@pytest.mark.parametrize("kept", ["O", "R@file", "M"])
def test_a_sharded_stage_holds_the_gradient_of_its_output_all_along(kept: str) -> None:
    placement = "placement={pp: 'S,S,S,R', dp_shard: 'S*,S,S,R'}"
    mesh, batch = "mesh={pp: 3, dp_shard: 4}", "batch={accumulate: 3, micro: 1, sequence: 16}"
    changes = ("model.layers=3", mesh, placement, batch, f"activations={kept}")
    spec = small("pp-gpipe", *changes)
    assert_equal(spec, simulate(spec))


DROPPING = ("model.family=gpt", "model.dropout=0.1", "device=cuda")


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param((*DROPPING, "precision.layout=zero16"), id="zero16"),
        *(
            pytest.param((*DROPPING, *changes), marks=pytest.mark.nightly, id=changes[0])
            for changes in (
                ("activations=M", "recompute=selective"),
                ("attention=eager", "activations={'0': M, '1': O}"),
                ("loss={chunk: 5}", "model.tied=true"),
            )
        ),
    ],
)
def test_for_gpus_dropout_keeps_a_byte_an_element_and_no_scores(changes: tuple[str, ...]) -> None:
    spec = small("ddp", *changes)
    assert_equal(spec, simulate(spec))


@pytest.mark.parametrize(
    ("strategy", "rank", "changes"),
    [
        ("tp-sp", 1, ("precision.layout=zero16",)),
        ("pp-1f1b", 1, ()),
        *(
            pytest.param(*case, marks=pytest.mark.nightly)
            for case in (
                ("tp", 0, ()),
                ("tp-saved", 1, ()),
                ("tp-naive", 0, ("precision.layout=zero16",)),
                ("tp", 0, ("activations=M", "recompute=selective")),
                ("pp-zbv", 0, ("model.layers=4", "precision.layout=zero16")),
                ("pp-interleaved", 1, ("model.layers=4", "model.tied=true")),
                ("3d", 5, ("activations=M", "model.vocab=264")),
            )
        ),
    ],
)
def test_gpu_dropout_is_simulated_in_layers_and_sharded_operators(
    strategy: str, rank: int, changes: tuple[str, ...]
) -> None:
    spec = small(strategy, *DROPPING, *changes)
    assert_equal(spec, simulate(spec, rank))


@pytest.mark.parametrize("modes", [("S*", "S*", "S*"), ("R", "S", "R")])
@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.nightly), 3])
def test_flat_shards_within_tp_have_a_norm_for_each_piece(
    modes: tuple[str, ...], rank: int
) -> None:
    names = ("parameters", "optimizer", "gradients")
    states = ", ".join(f"{name}: {mode}" for name, mode in zip(names, modes, strict=True))
    change = f"placement.dp_shard={{{states}, activations: R}}"
    spec = small("tp-zero3", change, "batch.global=2")
    assert_equal(spec, simulate(spec, rank))


def test_muon_on_the_host_uses_no_device_memory() -> None:
    """Only gradients on the device are held by its update there."""
    states = "{parameters: R@host, optimizer: R@host, gradients: R, activations: R}"
    spec = small("ddp", f"placement.dp_replicate={states}", "optimizer.name=muon")
    assert_equal(spec, simulate(spec, 0))


@pytest.mark.nightly
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_distinct_rank_of_every_strategy_does(strategy: str) -> None:
    spec = resolve_auto(load(strategy))
    for rank in choose_ranks(spec, derive(spec).exact, ["all-distinct"]):
        assert_equal(spec, simulate(spec, rank))


@pytest.mark.parametrize("rank", [2, -1])
def test_a_rank_that_is_none_is_rejected_from_python_too(rank: int) -> None:
    with pytest.raises(SpecError, match="not a rank of a mesh with 2"):
        simulate(small("ddp"), rank)


@pytest.mark.parametrize("strategy", BY_DEFAULT)
def test_the_peak_is_the_sum_of_live_bytes(strategy: str) -> None:
    found = of_last_rank(strategy)
    course = found.memory_history
    highest = max(row.device_bytes for row in found.estimate.peak)
    assert course.peak.total == highest == sum(row.device_bytes for row in course.held)
    by_state = Counter[State]()
    for row in course.held:
        by_state[row.state] += row.device_bytes
    assert course.peak.device_bytes == tuple(by_state[state] for state in State)


def test_a_peak_is_listed_by_units_modules_and_temporaries() -> None:
    what = {row.what for row in of_last_rank("zero3").memory_history.held}
    assert {"parameters", "optimizer", "gradients", "unsharded root"} <= what
    assert any(each.startswith("blocks.*.mlp") for each in what)
    assert not any(character.isdigit() for each in what for character in each)


@pytest.mark.parametrize(
    ("life", "expected"),
    [
        (StorageLife("logits", Phase.FORWARD), "logits"),
        (StorageLife(None, Phase.FORWARD), "loss"),
        (StorageLife("", Phase.FORWARD), "the model itself"),
        (StorageLife("layers.3.fc1", Phase.FORWARD), "layers.*.fc1"),
        (StorageLife("layers.3.fc1", Phase.BACKWARD), "layers.*.fc1, recomputed"),
        (StorageLife(None, Phase.BACKWARD), "temporaries of backward"),
        (StorageLife(None, Phase.UPDATE), "temporaries of the optimizer"),
        (StorageLife(None, Phase.BACKWARD, unit="blocks.7"), "unsharded blocks.*"),
        (StorageLife(None, Phase.BACKWARD, Tag(State.PARAMETERS, name="root")), "unsharded root"),
        (
            StorageLife(None, Phase.BACKWARD, Tag(State.GRADIENTS, name="b.1")),
            "gradients to reduce: b.*",
        ),
        (
            StorageLife(None, None, Tag(State.GRADIENTS), State.GRADIENTS, is_declared=True),
            "gradient buckets",
        ),
    ],
)
def test_the_kind_of_a_storage_follows_from_its_allocation(
    life: StorageLife, expected: str
) -> None:
    assert describe_storage(life) == expected


def test_buffers_of_collectives_and_temporaries_are_transient() -> None:
    rows = of_last_rank("zero3").memory_history.held
    passing = {
        row.state for row in rows if row.what.startswith(("unsharded", "gradients to reduce"))
    }
    assert passing == {State.TRANSIENT}


@pytest.mark.parametrize("strategy", BY_DEFAULT)
def test_each_phase_names_its_peak(strategy: str) -> None:
    found = of_last_rank(strategy)
    highest = {phase: moment.total for phase, moment in found.memory_history.phase_peaks().items()}
    assert highest == {row.phase: row.device_bytes for row in found.estimate.peak}


def test_a_course_passes_through_the_phases_in_their_order() -> None:
    spec = small("zero3")
    moments = of_last_rank("zero3").memory_history.moments
    passes = [(moment.phase, moment.micro_batch) for moment in moments]
    order = [passes[0], *(after for before, after in pairwise(passes) if before != after)]
    each = [(phase, k) for k in range(spec.batch.accumulate) for phase in ("forward", "backward")]
    assert order == [*each, (Phase.UPDATE, 0)]


@pytest.mark.parametrize(
    "strategy",
    ["tp", *(pytest.param(each, marks=pytest.mark.nightly) for each in ("ddp", "pp-1f1b"))],
)
def test_a_rehearsal_with_real_tensors_holds_and_sends_the_same(strategy: str) -> None:
    spec = small(strategy, "device=cpu")
    fake, real = simulate(spec, 1), simulate(spec, 1, rehearse=True)
    assert real.estimate == fake.estimate
    assert real.memory_history.peak.device_bytes == fake.memory_history.peak.device_bytes


def test_a_rehearsal_uses_a_gpu_if_present_unless_the_spec_requests_a_cpu() -> None:
    wanted = "cuda" if torch.cuda.is_available() else "cpu"
    assert rehearsal_device(small("zero3")).type == wanted
    assert rehearsal_device(small("zero3", "device=cpu")).type == "cpu"


def test_ranks_are_of_one_kind_where_they_hold_the_same_at_the_same_place_along_pp() -> None:
    spec = small("pp-dp")
    assert rank_classes(spec, derive(spec).exact) == [(0, 1), (2, 3)]
    uneven = small("zero3", "mesh.dp_shard=4", "model.vocab=262")
    found = rank_classes(uneven, derive(uneven).exact)
    assert sorted(rank for ranks in found for rank in ranks) == [0, 1, 2, 3]
    assert len(found) == 2, "262 rows are 66, 66, 66 and 64"


def test_without_a_rank_the_first_is_simulated_and_the_one_that_needs_most() -> None:
    spec = small("pp-naive", "model.vocab=4096", "model.tied=false")
    exact = derive(spec).exact
    assert choose_ranks(spec, exact) == (0, 1), "the last stage has the logits"
    assert choose_ranks(spec, exact, ["1"]) == (1,)
    assert choose_ranks(spec, exact, ["all-distinct"]) == (0, 1)


@pytest.mark.parametrize("asked", [["0", "all-distinct"], ["all-distinct", "all-distinct"]])
def test_all_distinct_excludes_other_options(asked: list[str]) -> None:
    spec = small("zero3")
    with pytest.raises(SpecError, match="or `--rank all-distinct` alone"):
        choose_ranks(spec, derive(spec).exact, asked)


@pytest.mark.parametrize("wrong", ["2", "-1", "first", "1.5", "²"])
def test_an_invalid_rank_is_rejected(wrong: str) -> None:
    spec = small("zero3")
    with pytest.raises(SpecError, match="is not a rank of a mesh with 2 ranks") as refusal:
        choose_ranks(spec, derive(spec).exact, [wrong])
    assert "from 0 to 1, or `all-distinct`" in str(refusal.value)


def test_the_command_prints_both_columns_the_peak_and_that_values_are_garbage(capsys) -> None:
    assert main(["simulate", "zero3", *TINY, "--rank", "1"]) == 0
    text = capsys.readouterr().out
    assert "predicted" in text and "simulated" in text and "memory at the peak" in text
    assert re.search(r"^(\d+) of \1 figures are equal$", text, re.MULTILINE)
    assert GARBAGE in text
    assert "verdict" not in text


def test_the_record_has_the_column_and_no_verdict(capsys) -> None:
    assert main(["simulate", "zero3", *TINY, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["verdict"] is None and record["checks"] == []
    assert {row["column"] for row in record["memory"]} == {"paper", "exact", "simulated"}
    assert record["simulation"]["note"] == GARBAGE
    (rank,) = record["simulation"]["ranks"]
    assert rank["alike"] == 1, "261 rows of the vocabulary are 131 and 130"
    assert rank["reserved"] == {}, "a processor has no such allocator"
    assert sum(row["device_bytes"] for row in rank["held"]) == rank["peak"]["device_bytes"]
    simulated = [row for row in record["operations"] if row["column"] == Column.SIMULATED]
    assert simulated and simulated[0]["forward"] > 0
    assert {row["phase"] for row in rank["by_phase"]} == {"forward", "backward", "update"}


OF_PRODUCTS = 64 * 2**20  # on an H100, as long as a process lives


def test_the_allocator_reserve_of_a_gpu_is_shown(capsys, monkeypatch) -> None:
    monkeypatch.setattr(simulated_gpu, "missing_requirement", lambda: "it stays in this process")
    assert main(["simulate", "zero3", *TINY, "cluster.preset=h100-8", "--json"]) == 0
    (rank,) = json.loads(capsys.readouterr().out)["simulation"]["ranks"]
    for amount in rank["reserved"].values():
        assert amount["beyond"]["reduce_scatter_stream"] > 0
        assert amount["beyond"]["all_gather_copy_in_stream"] > 0
        beyond = sum(amount["beyond"].values())
        assert amount["device_bytes"] == amount["living"] + beyond
        assert amount["living"] == rank["peak"]["device_bytes"] + OF_PRODUCTS
    assert len(rank["reserved"]) == 2


@pytest.mark.parametrize("strategy", BY_DEFAULT)
def test_the_allocators_highest_live_memory_is_the_peak(strategy: str) -> None:
    simulated = of_last_rank(strategy)
    for expands in (False, True):
        amount = steady_reserved(simulated.run.stream.allocated_step(), expands=expands)
        assert amount is not None and amount.living == simulated.memory_history.peak.total
        assert amount.device_bytes > amount.living


def test_the_record_of_several_ranks_has_each_ranks_traffic(capsys) -> None:
    command = ["simulate", "pp-1f1b", *SMALL, "batch.global=2"]
    assert main([*command, "--rank", "all-distinct", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    first, last = (rank["traffic"] for rank in record["simulation"]["ranks"])
    assert first != last
    rows = [row for row in record["traffic"] if row["column"] == Column.SIMULATED]
    assert len({json.dumps(row) for row in rows}) == len(rows)


def test_a_rank_that_is_none_ends_with_2_and_nothing_is_simulated(capsys) -> None:
    assert main(["simulate", "zero3", *SMALL, "--rank", "7"]) == 2
    found = capsys.readouterr()
    assert "--rank" in found.err and "remedy" in found.err
    assert "simulated" not in found.out


def test_a_chart_is_of_one_spec(capsys, tmp_path) -> None:
    path = tmp_path / "memory.svg"
    sizes = "batch.micro=1,2"
    assert main(["simulate", "zero3", *TINY, sizes, "--chart", str(path)]) == 2
    assert not path.exists()
    assert main(["simulate", "zero3", *TINY, "--chart", str(path)]) == 0
    assert path.read_text().startswith("<svg")


@pytest.mark.parametrize(
    ("strategy", "changes"),
    [
        ("zero3", ("precision.layout=fp32",)),  # 16 tokens, and rows of 32
        ("tp-sp", ("precision.layout=bf16",)),
        pytest.param(
            "ddp",
            ("optimizer.name=sgd", "precision.layout=zero16", "precision.master=bf16"),
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            "zero1", ("optimizer.name=sgd", "precision.layout=bf16"), marks=pytest.mark.nightly
        ),
    ],
)
def test_without_a_stub_gpu_a_cpu_allocates_for_gpu_kernels(strategy, changes):
    of_gpus = "cluster={preset: h100-8, sm: 80}"
    spec = small(strategy, "model.hidden=64", of_gpus, *changes)
    simulated = simulate(spec, 0)
    assert_equal(spec, simulated)
    on_cpu = simulate(small(strategy, "model.hidden=64", *changes), 0).estimate
    more = [of.bytes_of(State.ACTIVATIONS, 0) for of in (simulated.estimate, on_cpu)]
    assert more[0] > more[1], "seed and offset"


def test_predict_shows_the_reserved_memory_on_request(capsys):
    words = ("predict", "zero3", *TINY, "cluster.preset=h100-8", "--reserved", "--json")
    assert main(words) == 0
    reserved_bytes = json.loads(capsys.readouterr().out)["fit"]["reserved"]
    assert reserved_bytes["rank"] == 0
    assert reserved_bytes["default segments"]["device_bytes"] >= 2 * 2**20
    assert main(words[:-1]) == 0
    text = capsys.readouterr().out
    assert "zero3: rank 0 of 2, the first of those predicted to need most, simulated" in text


def test_a_sweep_shows_the_reserved_memory_of_every_gpu_spec(capsys):
    words = ("predict", "zero3", *TINY, "cluster.preset=h100-8", "device=cuda,cpu", "--reserved")
    assert main(words) == 0
    text = capsys.readouterr().out
    assert "device=cuda: rank 0 of 2" in text and "device=cpu: nothing is reserved" in text
    assert main((*words, "--json")) == 0
    of_cuda, of_cpu = (record["fit"]["reserved"] for record in json.loads(capsys.readouterr().out))
    assert of_cuda["rank"] == 0 and of_cpu is None


@pytest.mark.parametrize(
    ("swept", "finding"),
    [((), "the spec is not for GPUs"), (("mesh.dp_shard=1,2",), "none of the specs is for GPUs")],
)
def test_reserved_memory_of_a_cpu_is_unknown(swept, finding, capsys):
    assert main(("predict", "zero3", *TINY, *swept, "--reserved")) == 2
    assert finding in capsys.readouterr().err
