"""The X-ray's inference on hand-written observations: mesh axes, kinds, placements and traps."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from ptrain.cli.arguments import CommandParser
from ptrain.cli.main import main
from ptrain.cli.xray import infer_xray
from ptrain.codec import decode, encode
from ptrain.cost import Collective, Footprint, Phase, State
from ptrain.errors import PtrainError
from ptrain.spec.load import load
from ptrain.xray.findings import compare_with_spec
from ptrain.xray.hook import StepCounter
from ptrain.xray.infer import Inference, MeshAxis
from ptrain.xray.observation import (
    DDP,
    CallFact,
    GroupFact,
    ModuleFact,
    Observation,
    TensorFact,
    WrapperFact,
)

FORWARD, BACKWARD, UPDATE = Phase.FORWARD, Phase.BACKWARD, Phase.UPDATE
STATES = (State.PARAMETERS, State.OPTIMIZER, State.GRADIENTS)


def tensors(digest: str = "same", **more: Any) -> tuple[TensorFact, ...]:
    """One weight of 64 bytes with its optimizer state and gradient."""
    keys = {State.OPTIMIZER: "exp_avg"}
    return tuple(
        TensorFact(
            state=state, name="weight", key=keys.get(state, ""), shape=(4, 4), nbytes=64,
            digest=digest, **more,
        )
        for state in STATES
    )  # fmt: skip


def call(
    ranks: Sequence[int], kind: Collective, state: State, phase: Phase, **more: Any
) -> CallFact:
    return CallFact(ranks=tuple(ranks), collective=kind, state=state, phase=phase, **more)


def rank_of(rank: int, size: int = 2, **facts: Any) -> Observation:
    """A rank of a job with one group of all ranks, one pass and no recomputation."""
    given: dict[str, Any] = {
        "groups": (GroupFact(ranks=tuple(range(size))),),
        "inputs": (f"batch {rank}",),
        "modules": (ModuleFact(path="layer"),),
        "forwards": 1,
        "backwards": 1,
        "steps": (3, 5),
    }
    return Observation(rank=rank, world_size=size, **given | facts)


def of_all(make: Callable[[int], Observation], size: int = 2) -> Inference:
    return Inference([make(rank) for rank in range(size)])


def modes(job: Inference) -> list[tuple[str, ...]]:
    return [(axis.label, axis.kind, *axis.modes) for axis in job.axes]


def reduction(ranks: Sequence[int] = (0, 1), **more: Any) -> CallFact:
    return call(ranks, Collective.ALL_REDUCE, State.GRADIENTS, BACKWARD, sent_bytes=64, **more)


def ddp(rank: int, **facts: Any) -> Observation:
    return rank_of(rank, **{"tensors": tensors(), "calls": (reduction(),)} | facts)


def codes(*observations: Observation) -> list[str]:
    return [finding.code for finding in infer_xray(list(observations)).findings]


def compare_axes(observations: Sequence[Observation], *words: str) -> list[str]:
    spec = load(words[0], words[1:]).spec
    return [finding.code for finding in compare_with_spec(Inference(observations), spec)]


def sharded_rank(rank: int, gathered: str = "float32", **facts: Any) -> Observation:
    """A rank of FSDP2."""
    calls = (
        call((0, 1), Collective.ALL_GATHER, State.PARAMETERS, FORWARD, dtype=gathered),
        call((0, 1), Collective.REDUCE_SCATTER, State.GRADIENTS, BACKWARD),
    )
    held = tensors(f"shard {rank}", placements=("S",), mesh=((0, 1),))
    return rank_of(rank, **{"tensors": held, "calls": calls} | facts)


def test_equal_bytes_with_reduced_gradients_are_data_parallelism():
    assert modes(of_all(ddp)) == [("world", "data", "R", "R", "R", "R")]


def test_shards_that_are_gathered_for_use_are_zero_3():
    assert modes(of_all(sharded_rank)) == [("world", "data", "S*", "S", "S", "R")]


def test_shards_that_are_gathered_in_another_dtype_are_master_copies():
    job = of_all(lambda rank: sharded_rank(rank, "bfloat16"))
    assert modes(job) == [("world", "data", "M", "S", "S", "R")]


def test_recomputed_modules_are_materialized_activations():
    again = (ModuleFact(path="layers.0.up", recomputations=1), ModuleFact(path="layers.0"))
    job = of_all(lambda rank: ddp(rank, modules=(*again, ModuleFact(path="head"))))
    assert job.axes[0].activations == "M"
    assert job.recomputed == ["layers.*"], "its only child is recomputed"


def test_optimizer_state_of_other_tensors_on_each_rank_is_zero_1():
    def rank(number: int) -> Observation:
        held = [t for t in tensors() if t.state is not State.OPTIMIZER]
        state = TensorFact(
            state=State.OPTIMIZER, name=f"weight.{number}", key="m", nbytes=64, digest="a"
        )
        return ddp(number, tensors=(*held, state))

    assert modes(of_all(rank)) == [("world", "data", "R", "S", "R", "R")]


def tensor_parallel(rank: int, *kinds: Collective) -> Observation:
    calls = tuple(call((0, 1), kind, State.ACTIVATIONS, FORWARD) for kind in kinds)
    return rank_of(rank, tensors=tensors(f"part {rank}"), calls=calls, inputs=("batch",))


def test_different_weights_with_summed_activations_are_tensor_parallelism():
    job = of_all(lambda rank: tensor_parallel(rank, Collective.ALL_REDUCE))
    assert modes(job) == [("world", "tensor", "S", "S", "S", "R")]


def test_scattered_activations_of_a_tensor_axis_are_sharded():
    kinds = Collective.ALL_GATHER, Collective.REDUCE_SCATTER
    job = of_all(lambda rank: tensor_parallel(rank, *kinds))
    assert modes(job) == [("world", "tensor", "S", "S", "S", "S")]


def test_sends_between_ranks_with_different_weights_are_a_pipeline():
    def rank(number: int) -> Observation:
        kind = Collective.SEND if number == 0 else Collective.RECV
        held = tuple(replace(t, name=f"layers.{number}") for t in tensors(f"{number}"))
        return rank_of(
            number, tensors=held, calls=(call((0, 1), kind, State.ACTIVATIONS, FORWARD),)
        )

    assert modes(of_all(rank)) == [("world", "pipeline", "S", "S", "S", "R")]


def test_replicas_that_diverge_in_a_ring_of_sends_are_not_called_a_pipeline():
    send = call((0, 1), Collective.SEND, State.ACTIVATIONS, FORWARD)
    job = of_all(lambda rank: rank_of(rank, tensors=tensors(f"{rank}"), calls=(send,)))
    assert modes(job) == [("world", *["unknown"] * 5)]


@pytest.mark.parametrize(("held", "mode"), [(32, "S"), (64, "unknown")])
def test_flat_gradients_are_sharded_unless_full_ones_may_be_held(held, mode):
    def rank(number: int) -> Observation:
        weight = tensors()[:1]
        flat = TensorFact(
            state=State.GRADIENTS, name="optimizer.0.0", nbytes=32, digest=f"{number}"
        )
        memory = (Footprint(state=State.GRADIENTS, rank=number, device_bytes=held),)
        return ddp(number, tensors=(*weight, flat), memory=memory)

    assert [axis.gradients for axis in of_all(rank).axes] == [mode]


def test_exchanged_tokens_with_equal_weights_are_context_parallelism():
    exchange = call((0, 1), Collective.ALL_TO_ALL, State.ACTIVATIONS, FORWARD)
    job = of_all(lambda rank: ddp(rank, calls=(reduction(), exchange)))
    assert modes(job) == [("world", "context", "R", "R", "R", "S")]


def test_gathered_activations_over_a_data_axis_leave_its_kind_unknown():
    """Synchronized norms, a loss over all samples and context parallelism look the same."""
    gather = call((0, 1), Collective.ALL_GATHER, State.ACTIVATIONS, FORWARD)
    job = of_all(lambda rank: ddp(rank, calls=(reduction(), gather)))
    assert modes(job) == [("world", "unknown", "R", "R", "R", "unknown")]


def test_ranks_that_communicate_nothing_and_differ_are_unknown():
    job = of_all(lambda rank: rank_of(rank, tensors=tensors(f"own {rank}")))
    assert modes(job) == [("world", "unknown", "unknown", "unknown", "unknown", "unknown")]


def test_tensors_of_equal_elements_prove_nothing():
    job = of_all(lambda rank: ddp(rank, tensors=tensors("")))
    assert modes(job) == [("world", "unknown", "unknown", "unknown", "unknown", "unknown")]


def test_an_all_reduce_leaves_gradients_of_equal_elements_on_every_rank():
    held = [t for t in tensors() if t.state is not State.GRADIENTS]
    zeros = replace(tensors("")[-1], digest="")
    job = of_all(lambda rank: ddp(rank, tensors=(*held, zeros)))
    assert job.axes[0].gradients == "R"


def test_a_rank_that_was_not_observed_leaves_its_axis_unknown():
    job = Inference([ddp(0)])
    assert job.axes[0].modes == ("unknown",) * 4


def mesh_of_four(rank: int, *names: str, **facts: Any) -> Observation:
    """A rank of a 2 x 2 mesh: ranks 0 and 1 are the first group of the inner axis."""
    inner = (rank // 2 * 2, rank // 2 * 2 + 1)
    outer = (rank % 2, rank % 2 + 2)
    groups = (
        GroupFact(ranks=(0, 1, 2, 3)),
        GroupFact(ranks=outer, axis=names[0]),
        GroupFact(ranks=inner, axis=names[1]),
    )
    return rank_of(rank, 4, **{"groups": groups} | facts)


def test_axes_of_a_mesh_are_ordered_from_the_outermost():
    axes = of_all(lambda rank: mesh_of_four(rank, "dp", "tp"), 4).axes
    assert [(axis.name, axis.ranks) for axis in axes] == [
        ("dp", ((0, 2), (1, 3))),
        ("tp", ((0, 1), (2, 3))),
    ]


def test_groups_without_names_are_axes_if_they_move_state():
    def rank(number: int) -> Observation:
        inner = (number // 2 * 2, number // 2 * 2 + 1)
        held = tensors(f"part {number % 2}")
        calls = (
            reduction((number % 2, number % 2 + 2)),
            call(inner, Collective.ALL_REDUCE, State.ACTIVATIONS, FORWARD),
        )
        return mesh_of_four(number, "", "", tensors=held, calls=calls)

    assert modes(of_all(rank, 4)) == [
        ("ranks 0,2", "data", "R", "R", "R", "R"),
        ("ranks 0,1", "tensor", "S", "S", "S", "R"),
    ]


def test_ranks_that_no_group_separates_form_the_remaining_axis():
    def rank(number: int) -> Observation:
        seen = mesh_of_four(number, "", "tp", tensors=tensors(), calls=(reduction((0, 1, 2, 3)),))
        return replace(seen, groups=tuple(g for g in seen.groups if g.axis or len(g.ranks) == 4))

    assert [axis.ranks for axis in of_all(rank, 4).axes] == [((0, 2), (1, 3)), ((0, 1), (2, 3))]


def test_a_mesh_whose_gradients_are_reduced_over_tp_is_named():
    def rank(number: int) -> Observation:
        calls = (reduction((0, 1, 2, 3)),)
        return mesh_of_four(number, "dp", "tp", tensors=tensors(), calls=calls)

    found = infer_xray([rank(number) for number in range(4)]).findings
    assert [finding.code for finding in found] == ["tensor-as-data"]
    assert found[0].text.startswith("tp = 2 runs as data parallelism")


def test_an_axis_without_collectives_is_named():
    def rank(number: int) -> Observation:
        calls = (reduction((number % 2, number % 2 + 2)),)
        return mesh_of_four(number, "dp", "cp", tensors=tensors(), calls=calls)

    found = infer_xray([rank(number) for number in range(4)]).findings
    assert [finding.text for finding in found] == [
        "cp = 2 has no effect: no collective ran over it."
    ]


def test_a_job_that_only_averages_its_loss_shares_no_state():
    loss = call((0, 1), Collective.ALL_REDUCE, State.OTHER, UPDATE)
    (found,) = infer_xray(
        [rank_of(r, tensors=tensors(f"{r}"), calls=(loss,)) for r in (0, 1)]
    ).findings
    assert found.text.startswith("world = 2 shares no training state")


def test_an_all_reduce_in_every_micro_batch_is_named_with_its_bytes():
    calls = tuple(reduction(micro_batch=number) for number in range(3))
    ranks = [ddp(rank, calls=calls, forwards=3, backwards=3) for rank in range(2)]
    (finding,) = infer_xray(ranks).findings
    assert finding.code == "accumulation-reduces"
    assert "would send 128 B less per rank" in finding.text


def test_an_all_reduce_in_the_last_micro_batch_is_no_finding():
    calls = (reduction(micro_batch=2),)
    assert not codes(*(ddp(rank, calls=calls, forwards=3, backwards=3) for rank in range(2)))


def test_parameters_of_ddp_without_gradients_are_named():
    extra = TensorFact(state=State.PARAMETERS, name="unused", nbytes=8, digest="u")
    unit = WrapperFact(kind=DDP, ranks=(0, 1))
    ranks = [ddp(rank, tensors=(*tensors(), extra), wrappers=(unit,)) for rank in range(2)]
    (finding,) = infer_xray(ranks).findings
    assert finding.text.startswith("unused got no gradient") and "8 B" in finding.text


def test_parameters_that_no_optimizer_has_are_named():
    held = tuple(replace(tensor, is_updated=False) for tensor in tensors())
    assert codes(*(ddp(rank, tensors=held) for rank in range(2))) == ["no-optimizer"]


def test_flat_master_copies_stand_for_parameters_without_optimizer():
    held = tuple(replace(t, is_updated=False) for t in tensors() if t.state is State.PARAMETERS)

    def rank(number: int) -> Observation:
        flat = [
            TensorFact(state=state, name="optimizer.0.0", key=key, nbytes=32, digest=f"{number}")
            for state, key in ((State.OPTIMIZER, "master"), (State.GRADIENTS, ""))
        ]
        return ddp(number, tensors=(*held, *flat))

    job = of_all(rank)
    assert modes(job) == [("world", "data", "R", "S", "S", "R")]
    assert not codes(*job.observations)


def test_equal_inputs_on_a_data_axis_are_named():
    assert codes(*(ddp(rank, inputs=("batch",)) for rank in range(2))) == ["equal-samples"]


def test_replicated_optimizer_state_of_sharded_parameters_is_named():
    def rank(number: int) -> Observation:
        shards = [t for t in sharded_rank(number).tensors if t.state is not State.OPTIMIZER]
        state = [t for t in tensors() if t.state is State.OPTIMIZER]
        return sharded_rank(number, tensors=(*shards, *state))

    assert codes(rank(0), rank(1)) == ["optimizer-replicated"]


@pytest.mark.parametrize(("gathered", "size"), [("float32", 64), ("bfloat16", 32)])
def test_a_unit_that_stays_gathered_is_named_with_its_bytes(gathered, size):
    unit = WrapperFact(kind="FSDP2", ranks=(0, 1), nbytes=32, reshards=False)
    ranks = [sharded_rank(rank, gathered, wrappers=(unit,)) for rank in range(2)]
    (finding,) = infer_xray(ranks).findings
    assert f"{size} B stay all-gathered" in finding.text


def test_a_job_equals_the_spec_of_its_placement_and_differs_from_others():
    ranks = [sharded_rank(rank) for rank in range(2)]
    assert not compare_axes(ranks, "zero3", "batch.global=4")
    assert "spec-placement" in compare_axes(ranks, "ddp", "batch.global=4")
    assert "spec-axis" in compare_axes(ranks, "tp", "batch.global=4", "mesh.tp=4")


def test_gradients_in_another_dtype_than_the_spec_are_named():
    ranks = [sharded_rank(rank, "bfloat16") for rank in range(2)]
    assert compare_axes(ranks, "fsdp-mixed", "batch.global=4") == ["spec-dtype"]


def test_the_record_has_the_placement_by_state():
    record = infer_xray([ddp(0), ddp(1)]).as_record()
    (axis,) = record["axes"]
    assert axis["ranks"] == [[0, 1]] and axis["size"] == 2 and axis["kind"] == "data"
    assert [axis[str(state)] for state in (*STATES, State.ACTIVATIONS)] == ["R"] * 4
    assert record["accumulation"] == 1 and record["recomputation"] == []
    assert record["dtypes"]["reduced"] == "float32"
    json.dumps(record)


def test_the_spec_of_the_same_placement_is_written():
    text = infer_xray([sharded_rank(0), sharded_rank(1)]).spec
    assert "mesh: {dp_shard: 2}" in text
    assert "dp_shard: {parameters: S*, optimizer: S, gradients: S, activations: R}" in text


def test_an_unknown_placement_has_no_spec_and_a_reason():
    result = infer_xray([rank_of(rank, tensors=tensors(f"{rank}")) for rank in range(2)])
    assert not result.spec and "not fully known" in result.no_spec


def test_the_screen_begins_with_the_placement():
    lines = list(infer_xray([ddp(0), ddp(1)]).screen_lines())
    assert lines[2].split()[:4] == ["axis", "size", "kind", "parameters"]


def test_an_observation_survives_its_file():
    seen = ddp(0, wrappers=(WrapperFact(kind=DDP),))
    assert decode(json.loads(json.dumps(encode(seen))), Observation) == seen


def test_words_after_the_separator_belong_to_the_job():
    words = ["--json", "--", "torchrun", "train.py", "--model.dim", "4", "--", "--json"]
    parsed = CommandParser("xray").parse_words(words)
    assert parsed.json and parsed.command == words[2:]


def test_an_unknown_option_before_the_separator_is_rejected():
    with pytest.raises(PtrainError, match="unknown option --steps"):
        CommandParser("xray").parse_words(["--steps", "3", "--", "python", "train.py"])


def test_a_label_names_the_axis_or_its_ranks():
    assert MeshAxis(ranks=((0, 1),)).label == "world"
    assert MeshAxis(ranks=((0, 1), (2, 3))).label == "ranks 0,1"


def run_job(*words: str) -> int:
    return main(["xray", *words])


def test_a_job_without_torch_is_one_message_and_leaves_nothing(capfd, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    assert run_job("--", sys.executable, "-c", "print(1)") == 2
    assert "no Python process of the job imported torch" in capfd.readouterr().err
    assert not list(tmp_path.iterdir())


def test_the_exit_code_of_a_failed_job_is_passed_on(capfd):
    assert run_job("--", sys.executable, "-c", "raise SystemExit(7)") == 7
    assert "failed with exit code 7 after 0 optimizer steps" in capfd.readouterr().err


def test_a_job_that_cannot_start_is_one_message(capfd):
    assert run_job("--", "./no-such-command") == 2
    assert "cannot start ./no-such-command" in capfd.readouterr().err


def test_a_missing_command_is_one_message(capfd):
    assert run_job("--json") == 2
    assert "Write it after `--`" in capfd.readouterr().err


def test_another_sitecustomize_runs_as_usual(capfd, tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text("print('mine')", encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    run_job("--", sys.executable, "-c", "import sitecustomize; print(sitecustomize.__file__)")
    assert capfd.readouterr().out.splitlines() == ["mine", str(tmp_path / "sitecustomize.py")]


def test_an_optimizer_cycle_ends_with_its_last_optimizer(tmp_path):
    counter = StepCounter(str(tmp_path), first=100)
    counter._watch = SimpleNamespace(end_step=lambda seconds: None)
    first, last = object(), object()
    steps = []
    for optimizer in (first, last) * 3:
        counter.on_step(optimizer)
        steps.append(counter.steps)
    assert steps == [1, 1, 1, 2, 2, 3]


def test_an_error_of_the_meters_ends_the_watch_and_not_the_job(tmp_path):
    counter = StepCounter(str(tmp_path), first=2)
    counter._watch = SimpleNamespace(end_step=lambda seconds: 1 / 0, detach_meters=lambda: None)
    optimizer = object()
    for _ in range(4):
        counter.on_step(optimizer)
    counter.write_status()
    (status,) = (json.loads(path.read_text()) for path in tmp_path.iterdir())
    assert status["error"] == "ZeroDivisionError: division by zero" and status["steps"] == 2


def test_a_missing_separator_before_the_command_is_named(capsys):
    assert main(["xray", "torchrun", "--nproc-per-node", "2", "train.py"]) == 2
    assert "Write the command of the job after `--`" in capsys.readouterr().err
    assert main(["xray", "--frist", "4", "python", "train.py"]) == 2
    assert "Did you mean `--first`?" in capsys.readouterr().err
