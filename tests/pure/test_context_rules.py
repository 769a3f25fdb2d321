"""Legal tuples and specs of the context axis, and the messages of rejections."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from ptrain.algebra.legality import check, find_unsupported
from ptrain.axes.context.attention import attention_of, context_of, explain_attention, kv_repeats
from ptrain.axes.context.rules import CONTEXT
from ptrain.axes.data.rules import DATA
from ptrain.derivation.estimate import derive
from ptrain.facts.model import ModelFacts
from ptrain.plan.lower import lower
from ptrain.plan.show import format_plan
from ptrain.spec.batch import ContextAttention, ContextSpec, Hybrid
from ptrain.spec.dials import ReduceScatterVia
from ptrain.spec.job import OptimizerSpec
from ptrain.spec.model import (
    Attention,
    ExternalModel,
    Family,
    HuggingFaceModel,
    ModelShape,
    UserFunction,
)
from ptrain.spec.placement import MODES, S_STAR, Axis, Placement, S
from ptrain.spec.spec import LossSpec, Spec
from tests.pure.build import GATHERED, WHOLE, make_spec, tuple_of

SHAPE = ModelShape(
    family=Family.LLAMA, layers=2, hidden=96, heads=12, kv_heads=4, ffn=64, vocab=260
)
ADAMW, STATELESS = OptimizerSpec(name="adamw"), OptimizerSpec(name="sgd")
MUON = OptimizerSpec(name="muon", momentum=0.95)
TUPLES = [
    Placement(parameters=theta, optimizer=omega, gradients=gradients, activations=activations)
    for theta, omega, gradients, activations in product(MODES, repeat=4)
]
RING, ZIGZAG = ContextAttention.RING, ContextAttention.ZIGZAG
GATHER, ULYSSES = ContextAttention.ALL_GATHER, ContextAttention.ULYSSES
TP = tuple_of("S,S,S,R")


def spec(
    ranks: int = 2,
    attention: ContextAttention | Hybrid | None = None,
    modes: str = "R,R,R,S",
    *,
    around=None,
    inside=None,
    sequence: int = 32,
    model=SHAPE,
) -> Spec:
    mesh = {**(around or {}), Axis.CP: (ranks, tuple_of(modes)), **(inside or {})}
    made = make_spec(mesh, model=model, sequence=sequence)
    return replace(made, context=ContextSpec(attention=attention) if attention else None)


def refusal(made: Spec) -> tuple[str, str, str]:
    """Return place, finding and fix of the only error."""
    (fault,) = (*check(made), *find_unsupported(made))
    return fault.place, fault.finding, fault.remedy


def is_legal(made: Spec) -> bool:
    return not check(made) and all(
        "the axis cp is not" in f.finding for f in find_unsupported(made)
    )


@pytest.mark.parametrize("way", [RING, ZIGZAG, GATHER, Hybrid(ulysses=2, ring=2), ULYSSES], ids=str)
def test_every_attention_separates_documents_and_on_cuda_only_ulysses(way):
    modes = "R,R,R,S*" if way is GATHER else "R,R,R,S"
    packed = spec(4, way, modes, model=replace(SHAPE, document_end=2))
    assert is_legal(packed)
    on_cuda = replace(packed, device="cuda")
    if way is ULYSSES:
        assert is_legal(on_cuda)
    else:
        place, finding, _ = refusal(on_cuda)
        assert place == "model.document_end" and f"document masks with {way} on CUDA" in finding


# ---- tuples


@pytest.mark.parametrize(("optimizer", "legal"), [(STATELESS, 190), (ADAMW, 160), (MUON, 48)])
def test_190_of_625_tuples_are_legal_and_160_with_an_optimizer_that_keeps_state(optimizer, legal):
    kept = [legal for legal in TUPLES if not any(CONTEXT.broken_rules(legal, optimizer))]
    assert len(TUPLES) == 625 and len(kept) == legal


@pytest.mark.parametrize("optimizer", [ADAMW, STATELESS, MUON])
def test_a_tuple_is_legal_where_its_triple_is_on_a_data_axis_and_a_is_a_slice(optimizer):
    for placement in TUPLES:
        on_data = replace(placement, activations=MODES[0])
        is_triple = not any(DATA.broken_rules(on_data, optimizer))
        is_legal = is_triple and placement.activations in (S, S_STAR)
        assert is_legal is not any(CONTEXT.broken_rules(placement, optimizer))


@pytest.mark.parametrize("optimizer", [ADAMW, STATELESS, MUON])
def test_the_nearest_tuple_is_legal_and_a_legal_tuple_is_its_nearest(optimizer):
    for placement in TUPLES:
        nearest = CONTEXT.nearest_legal(placement, optimizer)
        assert not any(CONTEXT.broken_rules(nearest, optimizer))
        assert (nearest == placement) is not any(CONTEXT.broken_rules(placement, optimizer))


@pytest.mark.parametrize("rule", CONTEXT.tuples, ids=lambda rule: rule.name)
def test_every_rule_about_tuples_rejects_some_tuple_alone(rule):
    assert any(
        [*CONTEXT.broken_rules(placement, optimizer)] == [rule]
        for optimizer in (ADAMW, STATELESS, MUON)
        for placement in TUPLES
    )


def test_whole_activations_are_rejected_since_every_token_would_count_again():
    place, finding, remedy = refusal(spec(modes="S*,S,S,R"))
    assert place == "placement.cp"
    assert "count each token once per rank" in finding and "Theorem 3" in finding
    assert remedy == "Use `placement.cp=S*,S,S,S`."


@pytest.mark.parametrize("mode", ["M", "O"])
def test_recomputed_and_offloaded_activations_belong_at_the_top(mode):
    _, finding, remedy = refusal(spec(modes=f"R,R,R,{mode}"))
    assert "at the top level, `activations=M`" in finding
    assert remedy == "Use `placement.cp=R,R,R,S`."


def test_slices_of_activations_on_a_data_axis_are_rejected_with_a_word_about_cp():
    place, finding, _ = refusal(make_spec({Axis.DP_SHARD: (2, tuple_of("R,R,R,S"))}))
    assert place == "placement.dp_shard"
    assert "To shard tokens, use cp (`mesh.cp=2`)" in finding


def test_gradient_options_apply_on_cp():
    used_up = replace(spec(modes="R,S,M,S"), optimizer=OptimizerSpec(name="adamw", clip=1.0))
    place, finding, _ = refusal(used_up)
    assert place == "placement.cp" and "clipping needs the norm" in finding


def test_an_axis_of_data_inside_cp_waits():
    outside = {Axis.CP: (2, tuple_of("R,R,R,S")), Axis.DP_SHARD: (2, GATHERED)}
    place, finding, remedy = refusal(make_spec(outside, model=SHAPE, sequence=32))
    assert (place, finding) == ("mesh.dp_shard", "not supported yet: dp_shard inside cp")
    assert remedy == "Put dp_shard before cp in `mesh` (outermost first)."


# ---- attention


@pytest.mark.parametrize(
    ("made", "attention", "reason"),
    [
        (spec(2, modes="R,R,R,S*"), GATHER, "activations on cp are S*"),
        (spec(2), ZIGZAG, "32 tokens split into two chunks on each of 2 ranks"),
        (spec(3, sequence=33), RING, "33 tokens do not split into two chunks on each of 3 ranks"),
        (spec(2, RING), RING, "as written"),
    ],
    ids=["gathered", "zigzag", "ring", "written"],
)
def test_defaults_are_derived_with_a_reason(made, attention, reason):
    assert is_legal(made)
    assert (attention_of(made), explain_attention(made)) == (attention, reason)


@pytest.mark.parametrize(
    ("attention", "modes", "shape"),
    [
        (RING, "R,R,R,S", (1, 4, False, False)),
        (ZIGZAG, "R,R,R,S", (1, 4, True, False)),
        (GATHER, "R,R,R,S*", (1, 4, False, True)),
        (ULYSSES, "R,R,R,S", (4, 1, False, False)),
        (Hybrid(ulysses=2, ring=2), "R,R,R,S", (2, 2, True, False)),
        (Hybrid(ulysses=4, ring=1), "R,R,R,S", (4, 1, False, False)),
    ],
    ids=str,
)
def test_an_attention_is_a_step_of_ulysses_and_a_ring(attention, modes, shape):
    made = spec(4, attention, modes)
    step = context_of(made)
    assert is_legal(made) and step is not None
    assert (step.ulysses, step.ring, step.is_balanced, step.gathers) == shape
    assert step.sequence == 32


def test_without_two_ranks_of_cp_there_is_no_step():
    assert context_of(make_spec({Axis.DP_SHARD: (2, GATHERED)})) is None


def test_attention_over_cp_without_cp_is_rejected():
    made = replace(make_spec({Axis.DP_SHARD: (2, GATHERED)}), context=ContextSpec(attention=RING))
    place, finding, _ = refusal(made)
    assert place == "context.attention" and finding.startswith("has no effect")
    assert is_legal(replace(make_spec({}), context=ContextSpec(attention=RING)))  # one device


def test_attention_and_tuple_must_agree():
    place, finding, remedy = refusal(spec(2, GATHER))
    assert place == "context.attention" and "activations on cp are S" in finding
    assert remedy == "Use `placement.cp.activations=S*`, or `context.attention=zigzag`."
    _, finding, remedy = refusal(spec(2, ULYSSES, "R,R,R,S*"))
    assert "ulysses saves shards only" in finding and remedy.endswith(
        "`context.attention=all-gather`."
    )


def test_a_hybrid_has_as_many_ranks_as_cp():
    place, finding, remedy = refusal(spec(4, Hybrid(ulysses=2, ring=4)))
    assert place == "context.attention"
    assert finding == "ulysses 2 × ring 4 = 8 ranks, but cp has 4"
    assert "{ulysses: 2, ring: 2}" in remedy


def test_of_keys_and_values_ulysses_takes_any_number_of_heads():
    assert is_legal(spec(6, ULYSSES, sequence=48))  # of 4 heads, each three times
    assert [kv_repeats(6, heads) for heads in (1, 2, 3, 4, 6, 12)] == [6, 3, 2, 3, 1, 1]


def test_how_slices_are_reduced_is_obeyed_where_gradients_of_gathered_keys_are():
    exchanged = {"reduce_scatter": ReduceScatterVia.ALL_TO_ALL}
    assert not [*check(replace(spec(2, GATHER, "R,R,R,S*"), **exchanged))]
    place, finding, _ = refusal(replace(spec(2, RING), **exchanged))
    assert place == "reduce_scatter" and "all-reduced, not reduce-scattered" in finding


def test_dropout_within_attention_is_rejected_and_elsewhere_it_is_not():
    for key, option in (("dropout", {"dropout": 0.1}), ("attention_dropout", {
        "attention_dropout": 0.2
    })):  # fmt: skip
        place, finding, _ = refusal(spec(model=replace(SHAPE, **option)))
        assert place == f"model.{key}" and "not reproducible over cp" in finding
    outside = replace(SHAPE, dropout=0.1, attention_dropout=0.0)
    assert is_legal(spec(model=outside))


@pytest.mark.parametrize("attention", [RING, ZIGZAG, GATHER, Hybrid(ulysses=2, ring=2)], ids=str)
@pytest.mark.parametrize(
    ("place", "option"),
    [
        ("attention", {"attention": Attention.EAGER}),
        ("model.window", {"window": 8}),
        ("model.attention_soft_cap", {"attention_soft_cap": 30.0}),
    ],
)
def test_joining_partial_attention_requires_plain_sdpa_except_for_ulysses(attention, place, option):
    modes = "R,R,R,S*" if attention is GATHER else "R,R,R,S"
    model = replace(SHAPE, **option)
    assert refusal(spec(4, attention, modes, model=model))[0] == place
    assert is_legal(spec(4, ULYSSES, model=model))


@pytest.mark.parametrize(("modes", "is_obeyed"), [("R,R,R,S*", True), ("R,R,R,S", False)])
def test_gradients_of_gathered_keys_are_reduced_as_the_option_requests(modes, is_obeyed):
    attention = GATHER if is_obeyed else RING
    exchanged = replace(spec(2, attention, modes), reduce_scatter=ReduceScatterVia.ALL_TO_ALL)
    assert [fault.place for fault in check(exchanged)] == ["reduce_scatter"] * (not is_obeyed)


def test_slices_of_tp_are_slices_of_those_of_cp():
    sliced = {Axis.TP: (4, tuple_of("S,S,S,S"))}
    place, finding, remedy = refusal(spec(2, RING, inside=sliced, sequence=36))
    assert place == "batch.sequence"
    assert finding == "18 tokens per rank of cp cannot be split evenly over 4 ranks of tp"
    assert remedy.startswith("Use `batch.sequence=32` or `batch.sequence=40`")
    assert is_legal(spec(2, RING, inside=sliced, sequence=40))


def test_functions_of_the_users_are_rejected():
    function = UserFunction(section="loss", target="mine:loss", arguments={})
    place, finding, _ = refusal(replace(spec(), loss=LossSpec(function=function)))
    assert place == "loss.target" and finding.startswith("mine:loss cannot compute the loss")
    function = replace(function, section="step")
    place, *_ = refusal(replace(spec(), loss=LossSpec(step=function)))
    assert place == "step.target"


HF = HuggingFaceModel(hf="LlamaForCausalLM", config={"vocab_size": 512})


@pytest.mark.parametrize("model", [HF, ExternalModel(target="mine:model")])
@pytest.mark.parametrize("attention", [RING, ZIGZAG, ULYSSES, Hybrid(ulysses=2, ring=1)])
def test_models_that_are_not_built_in_are_for_their_code_to_judge(model, attention):
    assert is_legal(spec(2, attention, model=model))


@pytest.mark.parametrize("kind", [Attention.EAGER, Attention.FLEX])
def test_attention_of_transformers_models_is_their_sdpa_call(kind):
    place, finding, remedy = refusal(spec(2, ULYSSES, model=replace(HF, attention=kind)))
    assert place == "attention" and "LlamaForCausalLM" in finding
    assert remedy == "Use `attention=sdpa`."


def test_one_token_a_rank_is_none_of_transformers_samples():
    place, _, remedy = refusal(spec(4, RING, model=HF, sequence=4))
    assert place == "batch.sequence" and remedy == "Use `batch.sequence=8` or more."
    assert is_legal(spec(4, RING, sequence=4))


# ---- plans


def plan_of(made: Spec):
    return lower(made, ModelFacts.of_units((("blocks.0",), ("blocks.1",), ("",))))


def test_a_plan_slices_tokens_after_tp_and_before_wrapping():
    made = spec(2, around={Axis.DP_SHARD: (2, GATHERED)}, inside={Axis.TP: (2, TP)},
                modes="S*,S,S,S")  # fmt: skip
    plan = plan_of(made)
    names = [type(step).__name__ for step in plan.steps]
    assert names[:4] == ["CreateMesh", "Parallelize", "ContextParallel", "FullyShard"]
    assert plan.wrap.reduced_axes == (Axis.DP_SHARD, Axis.CP)
    assert plan.clip.reduced_axes == (Axis.TP, Axis.DP_SHARD, Axis.CP)
    assert plan.sample_axes == (Axis.DP_SHARD,)


def test_replicas_over_cp_are_those_of_one_ddp():
    plan = plan_of(spec(2, around={Axis.DP_REPLICATE: (2, WHOLE)}))
    assert plan.wrap.axes == (Axis.DP_REPLICATE, Axis.CP)


def test_shards_over_data_and_cp_have_replicas_around_them():
    around = {Axis.DP_REPLICATE: (2, WHOLE), Axis.DP_SHARD: (2, GATHERED)}
    wrap = plan_of(spec(2, around=around, modes="S*,S,S,S")).wrap
    assert (wrap.replicate_axes, wrap.shard_axes) == (
        (Axis.DP_REPLICATE,),
        (Axis.DP_SHARD, Axis.CP),
    )


def test_a_plan_shows_the_tokens_of_each_rank_with_a_reason():
    made = spec(2, around={Axis.DP_SHARD: (2, GATHERED)})
    text = format_plan(made, plan_of(made))
    assert "tokens over cp: 16 of 32 per rank, an early and a late chunk" in text
    assert "context  zigzag: 32 tokens split into two chunks on each of 2 ranks" in text
    assert "tokens   cp 0: 0-7, 24-31\ntokens   cp 1: 8-15, 16-23\n" in text
    assert "composed Theorem 3 of samples holds" in text


@pytest.mark.parametrize(
    ("ulysses", "tuple_on_tp"), [(3, "S,S,S,R"), (2, "S,S,S,S"), (3, "S,S,S,S")]
)
def test_ranks_of_unlike_stretches_wait_where_their_positions_are_cut_again(ulysses, tuple_on_tp):
    gpt = ModelShape(
        family=Family.GPT, layers=2, hidden=96, heads=12, kv_heads=12, ffn=64, vocab=260
    )
    inside = {Axis.TP: (2, tuple_of(tuple_on_tp))}
    attention = Hybrid(ulysses=ulysses, ring=2)
    made = spec(2 * ulysses, attention, inside=inside, sequence=96, model=gpt)
    if ulysses % 2 and tuple_on_tp.endswith("S"):
        place, finding, _ = refusal(made)
        assert place == "context.attention" and finding.startswith("not supported yet: ")
    else:
        assert not (*check(made), *find_unsupported(made))


def test_the_paper_has_no_volume_of_cp_and_a_note_says_so():
    paper = derive(spec(2), is_timed=False).paper
    assert paper.undefined["traffic"] == (
        "the paper gives no volume for the axis cp; the paper leaves context parallelism, "
        "which needs a model of communication within attention, to future work"
    )
    assert not any("cp" in row.key.axes for row in paper.traffic)
