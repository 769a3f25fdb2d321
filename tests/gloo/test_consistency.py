"""State consistency in running programs: a difference on one rank is reported by name, and no
difference is reported without one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ptrain.algebra.legality import require_runnable
from ptrain.errors import PtrainError
from ptrain.report.copies import DIFFERS, SHARED
from ptrain.report.finding import DifferenceKind, Moment, Subject
from ptrain.spec.load import load
from ptrain.spec.names import list_files
from ptrain.spec.placement import Axis
from ptrain.spec.precision import LAYOUTS
from ptrain.spec.spec import Spec
from tests.gloo import consistency_faults as faults
from tests.gloo import consistency_runs as runs
from tests.gloo.consistency_runs import (
    flip_bit,
    train_and_check,
    train_and_check_collectives,
    train_with_fault,
)
from tests.ranks import Ranks

pytestmark = pytest.mark.gloo

SMALL = (
    "model={layers: 2, hidden: 24, heads: 4, kv_heads: 2, ffn: 48, vocab: 260}",
    "batch={accumulate: 2, micro: 1, sequence: 32}",
)
REPLICAS = ("mesh={dp_replicate: 4}", *SMALL)


def consistency_spec(name: str, *overrides: str) -> Spec:
    return require_runnable(load(name, overrides or SMALL))


def strategies() -> list[Any]:
    """Yield one strategy with several kinds of replicas per wrapper; the others are nightly."""
    by_default = {"hsdp", "tp-dp"}
    return [
        pytest.param(name, marks=() if name in by_default else (pytest.mark.nightly,))
        for name in list_files("strategies")
    ]


def small_spec(name: str, *more: str) -> Spec:
    """Return the strategy's spec with a small model that has enough layers for all stages."""
    own = load(name).spec
    has_stages = own.degree(Axis.PP) > 1
    layers = 8 if has_stages else 2
    shape = f"{{layers: {layers}, hidden: 24, heads: 4, kv_heads: 2, ffn: 48, vocab: 260}}"
    accumulate = 4 if has_stages else min(own.batch.accumulate, 2)
    batch = f"{{accumulate: {accumulate}, micro: {2 if accumulate == 1 else 1}, sequence: 32}}"
    return require_runnable(load(name, (f"model={shape}", f"batch={batch}", *more)))


@pytest.mark.parametrize("name", strategies())
def test_a_correct_program_has_no_difference(ranks: Ranks, name: str) -> None:
    spec = small_spec(name)
    for seen in ranks.run(spec.world_size, train_and_check, spec, 3):
        assert not seen.mismatches
        assert seen.shared
        assert seen.steps == 3


@pytest.mark.nightly
@pytest.mark.parametrize("name", list_files("strategies"))
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "fp32"])
def test_nor_in_other_dtypes(ranks: Ranks, name: str, layout: str) -> None:
    try:
        spec = small_spec(name, f"precision.layout={layout}")
    except PtrainError:
        pytest.skip(f"{name} is not executed in {layout}")
    for seen in ranks.run(spec.world_size, train_and_check, spec, 3):
        assert not seen.mismatches


@pytest.mark.nightly
@pytest.mark.parametrize("name", list_files("strategies"))
def test_nor_where_something_is_dropped_out(ranks: Ranks, name: str) -> None:
    within = 0.0 if load(name).spec.degree(Axis.CP) > 1 else 0.1
    gpt = "model={family: gpt, layers: 8, hidden: 24, heads: 4, vocab: 260, dropout: 0.1, "
    spec = small_spec(name, f"{gpt}attention_dropout: {within}}}", "train.seed=3")
    for seen in ranks.run(spec.world_size, train_and_check, spec, 3):
        assert not seen.mismatches
        assert seen.draws


@pytest.mark.parametrize(
    "name", [pytest.param(each.values[0], marks=each.marks) for each in strategies()]
)
def test_the_ranks_of_a_group_call_and_get_the_same(ranks: Ranks, name: str) -> None:
    spec = small_spec(name)
    for seen in ranks.run(spec.world_size, train_and_check_collectives, spec, 2):
        assert not seen.mismatches
        assert seen.shared


@pytest.mark.parametrize(
    ("subject", "name", "bit"),
    [
        (Subject.PARAMETERS, "blocks.1.mlp.up.weight", 0),
        (Subject.OPTIMIZER, "embed.weight.exp_avg_sq", 31),
    ],
)
def test_a_flipped_bit_on_one_replica_is_named_with_tensor_and_rank(
    ranks: Ranks, subject: Subject, name: str, bit: int
) -> None:
    for seen in ranks.run(
        4, train_and_check, consistency_spec("ddp", *REPLICAS), 3, flip_bit(subject, name, bit, 2)
    ):
        (mismatch,) = seen.mismatches
        assert (mismatch.subject, mismatch.name, mismatch.rank) == (subject, name, 2)
        assert (mismatch.step, mismatch.moment) == (2, Moment.UPDATE)
        assert mismatch.between == (0, 1, 2, 3)
        assert seen.root_cause is not None
        assert (seen.root_cause.axis, seen.root_cause.factor) == ("dp_replicate", DIFFERS)
        assert seen.root_cause.ranks == (2,)


GPT = "model={family: gpt, layers: 2, hidden: 24, heads: 4, vocab: 260, dropout: 0.1}"


@pytest.mark.parametrize(
    ("name", "more", "tensor", "axis"),
    [
        ("hsdp", (), "blocks.0.attention.query.weight", "dp_replicate"),
        ("tp", (), "norm.weight", "tp"),
        ("pp-1f1b", (GPT,), "embed.weight", "pp"),  # a tied head's is on the last stage too
    ],
)
def test_the_axis_is_named_along_which_a_tensor_has_copies(
    ranks: Ranks, name: str, more: tuple[str, ...], tensor: str, axis: str
) -> None:
    spec = small_spec(name, *more)
    fault = flip_bit(Subject.PARAMETERS, tensor, 7, on=spec.world_size - 1)
    for seen in ranks.run(spec.world_size, train_and_check, spec, 3, fault):
        assert (
            len({mismatch.rank for mismatch in seen.mismatches}) == 2
        )  # two differing ranks do not identify the wrong one
        assert seen.root_cause is not None
        assert (seen.root_cause.axis, seen.root_cause.place) == (axis, tensor)


@pytest.mark.parametrize(
    ("fault", "subject", "factor", "more"),
    [
        (faults.change_learning_rate, Subject.LEARNING_RATE, "0.006 for 0.003", ()),
        (faults.decrement_step_counter, Subject.COUNTER, "1 for 2", ()),
        (faults.cast_parameter, Subject.PARAMETERS, "bfloat16 for float32", ()),
        (faults.change_buffer, Subject.BUFFERS, DIFFERS, ()),
        (faults.scale_summed_gradients, Subject.GRADIENTS, DIFFERS, ()),
        (
            faults.leave_stale_copy,
            Subject.PARAMETERS,
            "differs from the bfloat16 cast of its float32 master copy",
            ("precision.layout=zero16",),
        ),
        (faults.reset_seed, Subject.RANDOM, SHARED, (GPT,)),
    ],
)
def test_a_difference_is_named_by_state_and_factor(
    ranks: Ranks, fault: runs.Fault, subject: Subject, factor: str, more: tuple[str, ...]
) -> None:
    constant = "optimizer.schedule={warmup: 0}"
    spec = consistency_spec("ddp", *REPLICAS, constant, *more)
    for seen in ranks.run(4, train_and_check, spec, 3, fault):
        assert seen.root_cause is not None
        assert (seen.root_cause.state, seen.root_cause.factor) == (subject, factor)
        assert seen.root_cause.step == faults.STEP


PER_TENSOR = ("overlap=none", "bucket=per-tensor")


@pytest.mark.parametrize(
    ("fault", "told", "way"),
    [
        (runs.reduce_by_maximum, "MAX for SUM", DifferenceKind.VALUE),
        (runs.reduce_as_integers, "int32 for float32", DifferenceKind.DTYPE),
        (
            runs.reorder_buckets,
            "gradients embed.weight for gradients head.weight",
            DifferenceKind.VALUE,
        ),
    ],
)
def test_a_call_that_differs_on_one_rank_is_named(
    ranks: Ranks, fault: runs.Fault, told: str, way: DifferenceKind
) -> None:
    spec = consistency_spec("ddp", *REPLICAS, *PER_TENSOR)
    for seen in ranks.run(4, train_and_check_collectives, spec, 3, fault):
        first = seen.mismatches[0]
        assert (first.subject, first.rank, first.step) == (Subject.COLLECTIVE, 1, 2)
        assert (first.told, first.way) == (told, way)
        assert seen.root_cause is not None
        assert (seen.root_cause.axis, seen.root_cause.ranks) == ("dp_replicate", (1,))


def test_a_call_that_a_whole_group_leaves_out_is_named(ranks: Ranks) -> None:
    for seen in ranks.run(
        4, train_and_check_collectives, small_spec("tp-dp"), 3, runs.skip_first_sum
    ):
        assert seen.root_cause is not None
        assert (seen.root_cause.axis, seen.root_cause.factor) == ("dp_replicate", "is not called")
        assert seen.root_cause.ranks == (1, 3)
        assert "gradients" in seen.root_cause.place


def test_training_stops_before_saving_differing_replicas(ranks: Ranks, tmp_path: Path) -> None:
    fault = flip_bit(Subject.PARAMETERS, "head.weight", 12, on=2, after=3)
    every = ("train.steps=9", "checkpoint.every=2", "consistency_every=7", "eval.every=0")
    folder = tmp_path / "run"
    told = ranks.run(4, train_with_fault, (*REPLICAS, *every), folder, fault)
    assert {code for code, _ in told} == {4}
    (words,) = {words for _, words in told}
    assert "step 4: values that must be identical on the ranks differ" in words
    assert "parameters · axis dp_replicate · differs between replicas · head.weight" in words
    assert "rank 2" in words
    assert "--resume" in words
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step-00000002"]
