"""Memory and traffic of pipeline ranks, compared with the full model's derivation and hand-written
figures."""

from __future__ import annotations

from collections import Counter

import pytest

from ptrain.axes.pipeline.stage_facts import stage_facts, stages_of
from ptrain.cost import Collective, Phase, State, Traffic
from ptrain.derivation.estimate import Derivation, derive
from ptrain.derivation.interconnect import predicted_bytes
from ptrain.facts.model import ModelFacts
from ptrain.plan.lower import built_in_facts
from ptrain.spec.load import load
from ptrain.spec.pipeline import ScheduleName
from ptrain.spec.placement import Axis
from ptrain.spec.spec import Spec, indices_in_groups
from tests.pure.pipeline_specs import FULLY, SHAPE, every_model, legal

MICRO, SEQUENCE, K = 1, 32, 8  # of `pipeline_specs.spec`
HIDDEN, VOCAB = SHAPE["hidden"], SHAPE["vocab"]
FP32, ADAM_STATES, STEP = 4, 2, 4  # bytes, moments, bytes of a tensor's step
EVEN = {"vocab": 264, "kv_heads": 6}  # slices and shards are equal


def parts_of(spec: Spec) -> list[ModelFacts]:
    facts = built_in_facts(spec)
    return [stage_facts(spec, facts, stage) for stage in stages_of(spec, facts)]


def names(facts: ModelFacts) -> Counter[str]:
    return Counter(tensor.name for tensor in facts.tensors)


def held_bytes(found: Derivation, state: State, rank: int) -> int:
    return found.exact.bytes_of(state, rank)


def accounts(spec: Spec) -> tuple[tuple[Traffic, ...], ...]:
    """Return the account of the first rank at each pp coordinate."""
    exact, axes = derive(spec).exact, (Axis.PP,)
    ranks = {place: rank for rank, place in reversed([*enumerate(indices_in_groups(spec, axes))])}
    return tuple(exact.of_rank(ranks[place]).traffic for place in sorted(ranks))


def traffic_over(rows: tuple[Traffic, ...], axis: str, *phases: Phase) -> tuple[Traffic, ...]:
    return tuple(
        row for row in rows if row.key.axes == (axis,) and row.key.phase in (phases or (*Phase,))
    )


@every_model
@pytest.mark.parametrize("unit", ["block", "sub-block"])
def test_stages_have_every_tensor_once_and_of_a_tied_one_a_copy_on_the_last(model, unit):
    spec = legal({"pp": 4, "dp_shard": 2}, model=model, unit=unit)
    whole, parts = built_in_facts(spec), parts_of(spec)
    copy = {"head.weight": 1} if spec.model.tied else {}
    assert sum((names(part) for part in parts), Counter[str]()) == names(whole) + Counter(copy)
    for part in parts:
        assert part.unit_modules[-1] == ("",)
        assert sorted(part.gradient_order) == sorted(names(part).elements())


@every_model
def test_embedding_and_head_are_in_the_roots_of_the_end_stages(model):
    spec = legal({"pp": 4}, model=model)
    first, *middle, last = (
        {unit.name: [each.name for each in unit.tensors] for unit in part.units}
        for part in parts_of(spec)
    )
    is_gpt = "family" in model
    positions = ["positions.weight"] if is_gpt else []
    norm = ["norm.weight", "norm.bias"] if is_gpt else ["norm.weight"]
    assert [part[""] for part in middle] == [[], []]
    if spec.model.tied:
        assert (first["embed"], first[""]) == (["embed.weight"], positions)
        assert (last["head"], last[""]) == (["head.weight"], norm)
    else:
        assert (first[""], last[""]) == (["embed.weight", *positions], [*norm, "head.weight"])


@every_model
def test_gradients_of_a_stage_are_complete_in_the_order_of_the_whole_model(model):
    spec = legal({"pp": 4}, model=model)
    *others, last = parts_of(spec)
    whole = list(built_in_facts(spec).gradient_order)
    assert last.gradient_order[0] == "head.weight"
    rest = [*(last.gradient_order[1:] if spec.model.tied else last.gradient_order)]
    assert rest == [name for name in whole if name in rest]
    for part in others:
        assert list(part.gradient_order) == [n for n in whole if n in part.gradient_order]


@every_model
@pytest.mark.parametrize("name", ScheduleName)
def test_without_a_data_axis_a_rank_holds_only_its_stages(model, name):
    spec = legal({"pp": 2}, {"schedule": str(name)}, model=model)
    found, parts = derive(spec), parts_of(spec)
    step = found.plan.pipeline
    assert step is not None
    for rank in (0, 1):
        own = [parts[stage] for stage in step.stages_of(rank)]
        numel = sum(part.numel for part in own)
        tensors = sum(len(part.tensors) for part in own)
        assert held_bytes(found, State.PARAMETERS, rank) == FP32 * numel
        assert held_bytes(found, State.GRADIENTS, rank) == FP32 * numel
        assert (
            held_bytes(found, State.OPTIMIZER, rank) == ADAM_STATES * FP32 * numel + STEP * tensors
        )


def test_a_rank_has_buffers_for_each_stage_and_a_steps_tokens_once():
    one, two = (
        derive(legal({"pp": 2}, {"schedule": "zero-bubble", "stages": stages})) for stages in (2, 4)
    )
    tables = 2 * SEQUENCE * (HIDDEN // SHAPE["heads"] // 2) * FP32
    tokens, loss = K * MICRO * (SEQUENCE + 1) * 8, 4
    for rank in (0, 1):
        assert held_bytes(one, State.OTHER, rank) == tables + tokens + loss
        assert held_bytes(two, State.OTHER, rank) == 2 * tables + tokens + loss


@pytest.mark.parametrize("axes", [("pp", "dp_shard"), ("dp_shard", "pp")])
@pytest.mark.parametrize("tuple_", ["R,R,R,R", "R,S,R,R", "R,S,S,R", FULLY, "R,O,O,R", "S*,O,S,R"])
def test_the_data_axes_divide_each_stage_as_they_divide_a_model(axes, tuple_):
    """Over pp a state adds up to what a rank has without pp: no padding, and flat units have one
    root more, with a step of its own."""
    placement = {"pp": "S,S,S,R", "dp_shard": tuple_}
    model = {"model": SHAPE | EVEN, "unit": "block"}  # a small stage would be one unit
    apart = derive(
        legal({axis: 4 if axis == "pp" else 2 for axis in axes}, placement=placement, **model)
    )
    whole = derive(legal({"dp_shard": 2}, placement={"dp_shard": tuple_}, **model))
    for shard in (0, 1):
        places = [stage * 2 + shard if axes[0] == "pp" else shard * 4 + stage for stage in range(4)]
        for state in (State.PARAMETERS, State.GRADIENTS, State.OPTIMIZER):
            rows, (expected,) = (
                [row for row in found.exact.memory if row.state is state and row.rank in ranks]
                for found, ranks in ((apart, places), (whole, [shard]))
            )
            is_flat_optimizer = tuple_ not in (FULLY, "R,R,R,R") and state is State.OPTIMIZER
            total = expected.device_bytes + expected.host_bytes + STEP * is_flat_optimizer
            assert sum(row.device_bytes + row.host_bytes for row in rows) == total
            assert (sum(row.host_bytes for row in rows) > 0) is (expected.host_bytes > 0)


@pytest.mark.parametrize("name", ScheduleName)
def test_by_default_each_stage_gathers_once_and_reduces_each_micro_batch(name):
    spec = legal({"pp": 2, "dp_shard": 2}, {"schedule": str(name)})
    step = derive(spec).plan.pipeline
    assert step is not None
    for rank, rows in enumerate(accounts(spec)):
        roots = sum(stage in (0, step.stages - 1) for stage in step.stages_of(rank))
        units = sum(len(step.layers[stage]) for stage in step.stages_of(rank)) + roots
        calls = {
            (row.key.collective, row.key.phase): row.calls
            for row in traffic_over(rows, "dp_shard", Phase.FORWARD, Phase.BACKWARD)
        }
        assert calls == {
            (Collective.ALL_GATHER, Phase.FORWARD): units,
            (Collective.REDUCE_SCATTER, Phase.BACKWARD): K * units,
        }


def test_resharding_multiplies_the_gathers_by_the_micro_batches():
    sync = {"reshard_after_forward": True, "reshard_after_backward": True, "gradients": "last"}
    spec = legal({"pp": 2, "dp_shard": 2}, sync=sync)
    for rows in accounts(spec):
        gathered = [row for row in rows if row.key.collective is Collective.ALL_GATHER]
        assert {row.calls for row in gathered} == {K * 5}  # 4 blocks and a root, both passes
        assert {row.key.phase for row in gathered} == {Phase.FORWARD, Phase.BACKWARD}
    found = derive(spec).exact.notes
    assert any("gathered 8 times in forward and 8 times in backward" in note for note in found)
    assert any("gradients are R until the last micro-batch" in note for note in found)


@every_model
def test_replicas_sum_each_stages_gradients_once(model):
    """Over pp what DDP reduces is the whole model's, and a tied copy."""
    spec = legal({"pp": 4, "dp_replicate": 2}, model=model, optimizer={"clip": None})
    reduced = [
        row for rows in accounts(spec) for row in traffic_over(rows, "dp_replicate", Phase.BACKWARD)
    ]
    copy = VOCAB * HIDDEN if spec.model.tied else 0
    assert {row.key.collective for row in reduced} == {Collective.ALL_REDUCE}
    assert sum(row.payload_bytes for row in reduced) == FP32 * (built_in_facts(spec).numel + copy)


@pytest.mark.parametrize("name", ["1f1b", "interleaved"])
def test_the_norm_is_one_scalar_per_axis_however_many_stages_a_rank_has(name):
    spec = legal({"pp": 2, "dp_shard": 2}, {"schedule": name})
    for rows in accounts(spec):
        norms = [row for row in rows if row.key.phase is Phase.UPDATE]
        assert {row.key.axes: (row.calls, row.payload_bytes) for row in norms} == {
            ("pp",): (1, FP32),
            ("dp_shard",): (1, FP32),
        }


@every_model
@pytest.mark.parametrize("name", ScheduleName)
def test_everything_is_derived(model, name):
    found = derive(legal({"pp": 2}, {"schedule": str(name)}, model=model)).exact
    assert found.undefined.keys() == {"step_seconds"}  # of no cluster
    assert {row.state for row in found.memory} == {*State}
    assert len(found.peak) == 2 * 3  # ranks, phases


def test_each_rank_sends_its_shard_of_a_tied_head_with_unequal_shards():
    """Rank 1 of the shards has the shorter shard of an odd vocabulary, and so has rank 1 of tp."""
    model = SHAPE | {"tied": True, "vocab": 1001, "kv_heads": 6}
    sharded = derive(legal({"pp": 2, "dp_shard": 2}, model=model)).exact
    assert sharded.account_of == (0, 1, 2, 3)
    for rank, words in enumerate((501, 500, 501, 500)):
        (row,) = traffic_over(sharded.of_rank(rank).traffic, "pp", Phase.UPDATE)
        assert row.payload_bytes == words * HIDDEN * FP32 + FP32  # and of the norm
    cut = derive(legal({"dp_shard": 2, "pp": 2, "tp": 2}, model=model)).exact
    for rank in range(8):
        (row,) = traffic_over(cut.of_rank(rank).traffic, "pp", Phase.UPDATE)
        words = 501 if rank % 2 == 0 else 500
        shards = -(-words // 2), words // 2
        assert row.payload_bytes == shards[rank // 4] * HIDDEN * FP32 + FP32, rank


def test_unequal_ranks_and_tied_embeddings_are_reported_with_the_theorem():
    model = {"model": SHAPE | {"tied": True, "vocab": 1001}}
    spec = legal({"pp": 2}, {"split": [2, 6]}, **model)
    notes = derive(spec).exact.notes
    sizes = [f"{part.numel:,}" for part in parts_of(spec)]
    assert any(f"the ranks of pp have {' '.join(sizes)} parameters" in note for note in notes)
    assert any("96,096 parameters twice" in note for note in notes)


def test_a_unit_that_is_gathered_is_a_whole_layer_of_a_stage():
    """Theorem 1's s_unit: pp divides the layers, not a layer."""
    alone, beside = (
        derive(legal(mesh)).paper.bytes_of(State.TRANSIENT)
        for mesh in ({"dp_shard": 2}, {"pp": 2, "dp_shard": 2})
    )
    assert alone == beside


def test_the_traffic_of_a_step_is_the_traffic_of_one_rank():
    """Of two stages one sends activations, the other their gradients: K calls of a boundary, and a
    scalar of the norm."""
    found = load("pp-1f1b").spec
    boundary = found.batch.micro * found.batch.sequence * found.model.hidden * 4
    exact = derive(found).exact
    assert exact.sent_bytes() == found.batch.accumulate * boundary + 4
    assert [sum(row.sent_bytes for row in rows) for rows in exact.by_rank()] == [
        exact.sent_bytes()
    ] * 2
    assert predicted_bytes(exact, ("pp",)) == exact.sent_bytes()


BIASED = {
    "experts": 8,
    "experts_per_token": 2,
    "expert_ffn": 16,
    "dense_layers": 2,
    "router": "sigmoid",
    "bias_update_rate": 0.001,
}


def choices_summed(spec: Spec) -> list[int]:
    """Return the bytes of the all-reduce of routing choices by account."""
    return [
        sum(row.payload_bytes for row in rows if row.key.state is State.OTHER)
        for rows in derive(spec).exact.accounts
    ]


def test_a_stage_reduces_the_choices_of_its_layers_with_experts():
    shape = SHAPE | BIASED | {"layers": 5}
    made = legal({"pp": 3, "ep": 2}, {"split": [2, 1, 2]}, model=shape)
    row = 8 * shape["experts"]  # int64
    assert choices_summed(made) == [0, row, 2 * row]
    (first, *_), (last, *_) = (
        [row.device_bytes for row in derive(made).exact.memory if row.state is State.OTHER][at:]
        for at in (0, -1)
    )
    assert last - first == 2 * shape["experts"] * (FP32 + 8)  # biases and counts


def test_a_stage_of_deepseek_v3_with_one_expert_layer_reduces_2048_bytes():
    split = [4, 8, 8, 8, 8, 8, 8, 9]
    made = legal({"pp": 8, "ep": 8}, {"split": split}, model={"preset": "deepseek-v3"})
    summed = choices_summed(made)
    assert summed[0] == 2048 and max(summed) == 9 * 2048
    assert sum(sorted({*summed})) == (1 + 8 + 9) * 2048
