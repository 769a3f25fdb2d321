"""Legal shapes with experts, and the axes on which experts run."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from ptrain.algebra.legality import check, find_unsupported
from ptrain.axes.data.rules import DATA
from ptrain.axes.expert.form import experts_of
from ptrain.axes.expert.rules import EXPERT
from ptrain.derivation.estimate import token_operations
from ptrain.errors import Fault, SpecError
from ptrain.facts.model import ExpertLayers
from ptrain.facts.parameters import facts
from ptrain.spec.block import Bias
from ptrain.spec.job import OptimizerSpec
from ptrain.spec.keys import FOLDED as FOLDED_EXPERTS
from ptrain.spec.keys import NAIVE, TensorSpec
from ptrain.spec.load import load
from ptrain.spec.model import HuggingFaceModel
from ptrain.spec.placement import MODES, Axis, Placement, R, axes_named
from ptrain.spec.routing import parse_histogram
from ptrain.spec.spec import Spec
from ptrain.steps.experts import token_places
from tests.gloo.expert_cases import expert_spec
from tests.pure.build import GATHERED, ODD_SHAPE, WHOLE, make_spec, tuple_of

ADAMW, STATELESS = OptimizerSpec(name="adamw"), OptimizerSpec(name="sgd")
MUON = OptimizerSpec(name="muon", momentum=0.95)
TUPLES = [
    Placement(parameters=theta, optimizer=omega, gradients=gradients, activations=activations)
    for theta, omega, gradients, activations in product(MODES, repeat=4)
]
SHAPE = replace(ODD_SHAPE, experts=6, experts_per_token=2)
EVEN = replace(ODD_SHAPE, hidden=40, heads=2, kv_heads=2, ffn=8)  # which tp cuts in two
FOUR = replace(EVEN, experts=4)


@pytest.mark.parametrize(
    ("changes", "place", "finding", "remedy"),
    [
        ({"experts": 2, "experts_per_token": 3}, "model.experts_per_token",
         "3 experts per token, but a layer has only 2", "Use 2 or fewer."),
        ({"experts": 2, "dense_layers": 3}, "model.dense_layers",
         "3 dense layers leave no MoE layer: the model has 3 layers",
         "Use a number below 3, or remove `model.experts`."),
        ({"experts": 2, "bias": Bias.ALL}, "model.bias",
         "not supported yet: experts with biases",
         "Use `model.bias=none` or `model.bias=qkv`."),
        ({"capacity_factor": 1.0}, "model.capacity_factor", ("the model has no experts "
                                                            "(experts is not set)"),
         "Remove `model.capacity_factor`, or set `model.experts`."),
        ({"bias_update_rate": 1e-3}, "model.bias_update_rate", ("the model has no experts "
                                                               "(experts is not set)"),
         "Remove `model.bias_update_rate`, or set `model.experts`."),
        ({"experts": 2, "experts_per_token": 2, "bias_update_rate": 1e-3},
         "model.bias_update_rate", "each token goes to all 2 experts, so the bias has no effect",
         "Remove it, or use a smaller `model.experts_per_token`."),
        ({"experts": 8, "groups_per_token": 2}, "model.groups_per_token",
         "there are no expert groups (expert_groups is not set)",
         "Remove `model.groups_per_token`, or set `model.expert_groups`."),
        ({"experts": 12, "expert_groups": 5}, "model.expert_groups",
         "5 groups cannot split 12 experts into groups of two or more",
         "Use one of 2, 3, 4, 6."),
        ({"experts": 6, "expert_groups": 6}, "model.expert_groups",
         "6 groups cannot split 6 experts into groups of two or more",
         "Use one of 2, 3."),
        ({"experts": 5, "expert_groups": 5}, "model.expert_groups",
         "5 groups cannot split 5 experts into groups of two or more",
         "Remove it."),
        ({"experts": 8, "expert_groups": 4, "groups_per_token": 4}, "model.groups_per_token",
         "4 groups per token, but there are only 4",
         "Use a number below 4, or remove `model.expert_groups`."),
        ({"experts": 8, "expert_groups": 4, "experts_per_token": 5}, "model.groups_per_token",
         "5 experts per token, but 1 of 4 groups have only 2", "Use 3 or more."),
    ],
)  # fmt: skip
def test_impossible_experts_are_rejected(changes, place, finding, remedy):
    spec = make_spec({}, model=replace(ODD_SHAPE, **changes))
    assert check(spec) == (Fault(place=place, finding=finding, remedy=remedy),)


@pytest.mark.parametrize("model", ["capacity", "balanced"])
def test_routers_of_slices_of_the_tokens_are_legal(model):
    assert expert_spec(model, {"cp": "R,R,R,S"}).model == expert_spec(model).model


@pytest.mark.parametrize(
    ("factor", "tokens", "places"), [(1.0, 16, 8), (1.25, 16, 10), (1.0, 15, 8), (9.0, 16, 16)]
)
def test_an_expert_takes_its_share_of_a_samples_tokens(factor, tokens, places):
    shape = replace(ODD_SHAPE, experts=4, experts_per_token=2, capacity_factor=factor)
    assert shape.capacity(tokens) == places


def test_a_token_is_multiplied_with_the_experts_it_goes_to():
    """Qwen3-30B-A3B: of 30.5 billion parameters 3.3 are activated, by its authors' count, which has
    the embedding; 0.31 of them are looked up."""
    spec = load("zero3", ["model.preset=qwen3-30b-a3b"]).spec
    shape, known = spec.model, facts(spec.model, 1)
    per_token = token_operations(shape, known, 1, is_causal=True) / 6
    looked_up = shape.vocab * shape.hidden
    assert (per_token + looked_up) / 1e9 == pytest.approx(3.3, abs=0.06)


def test_muon_waits_for_matrices_that_share_a_tensor():
    with pytest.raises(SpecError) as refused:
        expert_spec("top-1", {"dp_shard": "muon"}, optimizer={"name": "muon", "lr": 1e-3})
    fault = refused.value.faults[0]
    assert fault.place == "optimizer.name" and "muon for experts" in fault.finding


# ---- the tuple on ep of all but the experts


@pytest.mark.parametrize(("optimizer", "legal"), [(STATELESS, 95), (ADAMW, 80), (MUON, 24)])
def test_95_of_625_tuples_are_legal_and_80_with_an_optimizer_that_keeps_state(optimizer, legal):
    kept = [legal for legal in TUPLES if not any(EXPERT.broken_rules(legal, optimizer))]
    assert len(TUPLES) == 625 and len(kept) == legal


@pytest.mark.parametrize("optimizer", [ADAMW, STATELESS, MUON])
def test_a_tuple_is_legal_on_ep_where_it_is_on_a_data_axis_and_a_is_whole(optimizer):
    for placement in TUPLES:
        is_legal = placement.activations == R and not any(DATA.broken_rules(placement, optimizer))
        assert is_legal is not any(EXPERT.broken_rules(placement, optimizer))


@pytest.mark.parametrize("optimizer", [ADAMW, STATELESS, MUON])
def test_the_nearest_tuple_on_ep_is_legal_and_a_legal_tuple_is_its_nearest(optimizer):
    for placement in TUPLES:
        nearest = EXPERT.nearest_legal(placement, optimizer)
        assert not any(EXPERT.broken_rules(nearest, optimizer))
        assert (nearest == placement) is not any(EXPERT.broken_rules(placement, optimizer))


@pytest.mark.parametrize("rule", EXPERT.tuples, ids=lambda rule: rule.name)
def test_every_rule_about_tuples_on_ep_rejects_some_tuple_alone(rule):
    assert any(
        [*EXPERT.broken_rules(placement, optimizer)] == [rule]
        for optimizer in (ADAMW, STATELESS, MUON)
        for placement in TUPLES
    )


def test_a_rejected_tuple_on_ep_names_its_theorem_and_the_nearest_tuple():
    for placement in TUPLES:
        spec = make_spec({Axis.EP: (2, placement)}, model=SHAPE, clip=None)
        faults = [fault for fault in check(spec) if fault.remedy.startswith("Use `placement.ep=")]
        broken = [*EXPERT.broken_rules(placement, ADAMW)]
        nearest = EXPERT.nearest_legal(placement, ADAMW)
        for rule, fault in zip(broken, faults, strict=True):
            said = f"({placement}) on ep: {rule.message} [{rule.theorem}]"
            assert (fault.place, fault.finding) == ("placement.ep", said)
            assert fault.remedy == f"Use `placement.ep={nearest}`."


def test_the_nearest_tuple_is_written_as_an_override_takes_it():
    for written in {str(EXPERT.nearest_legal(placement, ADAMW)) for placement in TUPLES}:
        overrides = ["model.preset=moe-tiny", "mesh={ep: 2}", "placement={ep: ddp}"]
        made = load("zero3", [*overrides, f"placement.ep={written}"]).spec
        assert str(made.factors[0].placement) == written


@pytest.mark.parametrize("kept", ["S", "S*", "M", "O"])
def test_activations_on_ep_belong_to_a_ranks_samples(kept):
    (fault,) = check(make_spec({Axis.EP: (2, tuple_of(f"R,R,R,{kept}"))}, model=SHAPE))
    assert fault.place == "placement.ep" and "Theorem 3" in fault.finding
    assert "at the top level, `activations=M`" in fault.finding
    assert fault.remedy == "Use `placement.ep=R,R,R,R`."


# ---- the degree, the mesh, the model


@pytest.mark.parametrize(
    ("model", "degree", "finding", "remedy"),
    [
        (SHAPE, 4, "4 ranks do not divide 6 experts", "Use one of 1, 2, 3, 6 for `mesh.ep`."),
        (SHAPE, 12, "12 ranks do not divide 6 experts", "Use one of 1, 2, 3, 6 for `mesh.ep`."),
        (ODD_SHAPE, 2, "ep needs experts, and the model has none",
         "Set `model.experts`, or use dp_shard instead of ep."),
    ],
)  # fmt: skip
def test_ranks_have_as_many_experts(model, degree, finding, remedy):
    spec = make_spec({Axis.EP: (degree, WHOLE)}, model=model)
    assert check(spec) == (Fault(place="mesh.ep", finding=finding, remedy=remedy),)


@pytest.mark.parametrize("degree", [1, 2, 3, 6])
def test_every_degree_that_divides_the_experts_is_legal(degree):
    assert check(make_spec({Axis.EP: (degree, WHOLE)}, model=SHAPE)) == ()


def test_a_token_goes_to_no_more_experts_than_there_are_whatever_ep_is():
    spec = make_spec({Axis.EP: (2, WHOLE)}, model=replace(SHAPE, experts_per_token=7))
    assert [fault.place for fault in check(spec)] == ["model.experts_per_token"]


@pytest.mark.parametrize("inner", [Axis.DP_REPLICATE, Axis.DP_SHARD, Axis.CP])
def test_ep_is_inside_the_axes_along_which_experts_are_summed(inner):
    placement = tuple_of("R,R,R,S") if inner is Axis.CP else WHOLE
    spec = make_spec({Axis.EP: (2, WHOLE), inner: (2, placement)}, model=SHAPE)
    assert not check(spec)
    assert [
        (fault.place, fault.remedy) for fault in find_unsupported(spec) if inner in fault.place
    ] == [(f"mesh.{inner}", f"Put {inner} before ep in `mesh` (outermost first).")]


def transformers_spec(tp: int = 1, **config: object) -> Spec:
    """Return a spec of a transformers model on ep."""
    model = HuggingFaceModel(hf="MixtralForCausalLM", config={"vocab_size": 259, **config})
    factors = {Axis.EP: (2, GATHERED), Axis.TP: (tp, tuple_of("S,S,S,R"))}
    return make_spec({axis: it for axis, it in factors.items() if it[0] > 1}, model=model)


def test_experts_of_a_user_model_are_sharded_but_not_with_tp():
    assert not (*check(transformers_spec()), *find_unsupported(transformers_spec()))
    (fault,) = (*check(transformers_spec(tp=2)), *find_unsupported(transformers_spec(tp=2)))
    assert fault.place == "mesh.ep" and "for custom models" in fault.finding


@pytest.mark.parametrize("written", ["eager", "batched_mm"])
def test_experts_of_transformers_run_group_by_group_on_ep_and_no_other_way(written):
    (fault,) = check(transformers_spec(experts_implementation=written))
    assert fault.place == "model.config.experts_implementation"
    assert f"got {written}" in fault.finding
    assert not check(transformers_spec(experts_implementation="grouped_mm"))


LAYERS = ExpertLayers(modules=("h.0.mlp.experts",), number=6, chosen=2, features=8)


def test_the_inspected_model_must_match_the_spec():
    spec = transformers_spec()
    step = experts_of(spec, (("h.0.mlp.experts",), ("h.0",), ("",)), LAYERS)
    assert step is not None and (step.number, step.chosen, step.features) == (6, 2, 8)
    assert step.modules == LAYERS.modules and step.places is None
    with pytest.raises(SpecError, match="2 ranks do not divide 3 experts"):
        experts_of(spec, (), LAYERS._replace(number=3))
    counts = parse_histogram({"h.1.mlp": [[[1] * 6]]})
    with pytest.raises(SpecError, match="routing: no counts for h\\.0\\.mlp"):
        experts_of(spec.with_fields(routing=counts), (), LAYERS)


# ---- tp, folded into ep

FOLDED = TensorSpec(experts=FOLDED_EXPERTS)


def folded_spec(ep: int = 2, tp: int = 2, *, model=FOUR, tensor=FOLDED, **sections):
    mesh = {Axis.EP: (ep, WHOLE), Axis.TP: (tp, tuple_of("S,S,S"))}
    return replace(make_spec(mesh, model=model, **sections), tensor=tensor)


@pytest.mark.parametrize(
    ("experts", "ep", "remedy"),
    [
        (6, 2, "Use one of 3 for `mesh.ep`, or `tensor.experts=cut`."),
        (6, 4, "Use one of 3 for `mesh.ep`."),
        (7, 2, "Use `model.experts=8`."),
        (20, 4, "Use one of 2, 5, 10 for `mesh.ep`, or `tensor.experts=cut`."),
        (4, 4, "Use one of 2 for `mesh.ep`, or `tensor.experts=cut`."),
    ],
)
def test_ranks_of_ep_and_a_folded_tp_have_as_many_experts(experts, ep, remedy):
    (fault,) = check(folded_spec(ep, model=replace(FOUR, experts=experts)))
    assert (fault.place, fault.remedy) == ("mesh.ep", remedy)
    assert fault.finding == f"{ep} × 2 ranks do not divide {experts} experts"


def test_full_experts_have_any_width_and_shared_ones_are_sharded():
    odd = replace(FOUR, expert_ffn=7)
    assert not check(folded_spec(model=odd))
    (cut,) = check(folded_spec(model=odd, tensor=TensorSpec()))
    (shared,) = check(folded_spec(model=replace(odd, shared_experts=1)))
    assert cut == shared and cut.finding == "tp=2 does not divide expert_ffn: 7"


@pytest.mark.parametrize(
    ("axes", "model", "place", "finding", "remedy"),
    [
        ([Axis.TP], FOUR, "tensor.experts",
         "folded has no effect: the mesh has no ep axis with two or more ranks",
         "Remove it, or use `mesh.ep=2` with `placement.ep=R,R,R,R`."),
        ([Axis.TP], EVEN, "tensor.experts",
         "folded has no effect: the model has no experts", "Remove it."),
        ([Axis.EP], FOUR, "tensor.experts",
         "has no effect: the mesh has no tp axis with two or more ranks",
         "Remove `tensor.experts`."),
        ([Axis.EP, Axis.TP], EVEN, "mesh.ep",
         "ep needs experts, and the model has none",
         "Set `model.experts`, or use dp_shard instead of ep."),
    ],
)  # fmt: skip
def test_folding_requires_both_axes_and_experts(axes, model, place, finding, remedy):
    tuples = {Axis.EP: "R,R,R", Axis.TP: "S,S,S"}
    spec = make_spec({axis: (2, tuple_of(tuples[axis])) for axis in axes}, model=model)
    spec = replace(spec, tensor=FOLDED)
    assert (*check(spec), *find_unsupported(spec)) == (
        Fault(place=place, finding=finding, remedy=remedy),
    )  # one of them


def test_a_folded_tp_routes_equal_slices_and_cuts_in_pairs():
    (fault,) = check(folded_spec(sequence=15))
    assert fault.place == "batch.sequence"
    assert fault.finding.startswith("15 tokens per rank cannot be split evenly over the 2 tp ranks")
    naive = TensorSpec(experts=FOLDED_EXPERTS, plan=NAIVE)
    (fault,) = (*check(folded_spec(tensor=naive)), *find_unsupported(folded_spec(tensor=naive)))
    assert fault.place == "tensor.plan" and "not supported yet: naive" in fault.finding


def test_a_group_of_both_axes_has_both_names():
    assert axes_named("ep_tp") == ("ep", "tp")
    assert axes_named("dp_shard") == ("dp_shard",) and axes_named("") == ("",)


def test_a_folded_rank_routes_its_slice_among_the_ranks_of_both_axes():
    spec = folded_spec()
    assert spec.expert_axes == (Axis.EP, Axis.TP)
    assert spec.routed_tokens == spec.own_tokens // 2
    assert token_places(spec) == (0, 1, 2, 3)
    assert token_places(replace(spec, tensor=TensorSpec())) == (0, 0, 1, 1)
