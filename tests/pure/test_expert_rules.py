"""Which shapes with experts can be built, and where experts run."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from ptrain.algebra.legality import check, executed
from ptrain.axes.data.rules import DATA
from ptrain.axes.expert.form import experts_of
from ptrain.axes.expert.rules import EXPERT
from ptrain.cost import PLACED
from ptrain.derivation.throughput import token_operations
from ptrain.errors import Fault, SpecError
from ptrain.facts.model import ExpertLayers
from ptrain.facts.parameters import facts
from ptrain.spec.block import Bias
from ptrain.spec.job import OptimizerSpec
from ptrain.spec.load import load
from ptrain.spec.model import HuggingFaceModel
from ptrain.spec.placement import MODES, Axis, Placement, R, axes_named
from ptrain.spec.routing import histogram
from ptrain.spec.spec import Spec
from ptrain.spec.tensor import FOLDED as FOLDED_EXPERTS
from ptrain.spec.tensor import NAIVE, TensorSpec
from ptrain.steps.experts import token_places
from tests.gloo.expert_cases import spec_of
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
         "a token goes to 3 experts, of which a block has 2", "write 2 or fewer"),
        ({"experts": 2, "dense_layers": 3}, "model.dense_layers",
         "the first 3 layers have no experts, and there are 3",
         "write one below 3, or remove experts"),
        ({"experts": 2, "bias": Bias.ALL}, "model.bias",
         "not yet: experts with biases, of which a grouped product knows nothing",
         "write model.bias=none or model.bias=qkv"),
        ({"capacity_factor": 1.0}, "model.capacity_factor", "a block has no experts",
         "remove capacity_factor, or write model.experts"),
        ({"bias_update_rate": 1e-3}, "model.bias_update_rate", "a block has no experts",
         "remove bias_update_rate, or write model.experts"),
        ({"experts": 2, "experts_per_token": 2, "bias_update_rate": 1e-3},
         "model.bias_update_rate", "a token goes to all 2 experts, whatever a bias says",
         "remove it, or write a smaller experts_per_token"),
        ({"experts": 8, "groups_per_token": 2}, "model.groups_per_token",
         "experts make no groups", "remove groups_per_token, or write model.expert_groups"),
        ({"experts": 12, "expert_groups": 5}, "model.expert_groups",
         "5 groups of 12 experts: they do not divide them into groups of two or more",
         "choose from 2, 3, 4, 6"),
        ({"experts": 6, "expert_groups": 6}, "model.expert_groups",
         "6 groups of 6 experts: they do not divide them into groups of two or more",
         "choose from 2, 3"),
        ({"experts": 5, "expert_groups": 5}, "model.expert_groups",
         "5 groups of 5 experts: they do not divide them into groups of two or more",
         "remove it"),
        ({"experts": 8, "expert_groups": 4, "groups_per_token": 4}, "model.groups_per_token",
         "a token's experts are of 4 groups, of which there are 4",
         "write one below 4, or remove expert_groups"),
        ({"experts": 8, "expert_groups": 4, "experts_per_token": 5}, "model.groups_per_token",
         "a token goes to 5 experts, and 1 of 4 groups have 2", "write 3 or more"),
    ],
)  # fmt: skip
def test_experts_that_cannot_be_are_refused(changes, place, finding, remedy):
    spec = make_spec({}, model=replace(ODD_SHAPE, **changes))
    assert check(spec) == (Fault(place=place, finding=finding, remedy=remedy),)


@pytest.mark.parametrize("model", ["capacity", "balanced"])
def test_routers_of_slices_of_the_tokens_are_legal(model):
    assert spec_of(model, {"cp": "R,R,R,S"}).model == spec_of(model).model


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
        spec_of("top-1", {"dp_shard": "muon"}, optimizer={"name": "muon", "lr": 1e-3})
    fault = refused.value.faults[0]
    assert fault.place == "optimizer.name" and "muon for experts" in fault.finding


# ---- the tuple on ep of all but the experts


@pytest.mark.parametrize(("optimizer", "legal"), [(STATELESS, 95), (ADAMW, 80), (MUON, 24)])
def test_95_of_625_tuples_are_legal_and_80_with_an_optimizer_that_keeps_state(optimizer, legal):
    kept = [legal for legal in TUPLES if not any(EXPERT.broken(legal, optimizer))]
    assert len(TUPLES) == 625 and len(kept) == legal


@pytest.mark.parametrize("optimizer", [ADAMW, STATELESS, MUON])
def test_a_tuple_is_legal_on_ep_where_it_is_on_a_data_axis_and_a_is_whole(optimizer):
    for placement in TUPLES:
        is_legal = placement.activations == R and not any(DATA.broken(placement, optimizer))
        assert is_legal is not any(EXPERT.broken(placement, optimizer))


@pytest.mark.parametrize("optimizer", [ADAMW, STATELESS, MUON])
def test_the_nearest_tuple_on_ep_is_legal_and_a_legal_one_is_its_own(optimizer):
    for placement in TUPLES:
        nearest = EXPERT.nearest(placement, optimizer)
        assert not any(EXPERT.broken(nearest, optimizer))
        assert (nearest == placement) is not any(EXPERT.broken(placement, optimizer))


@pytest.mark.parametrize("rule", EXPERT.tuples, ids=lambda rule: rule.name)
def test_every_rule_about_tuples_on_ep_refuses_some_tuple_alone(rule):
    assert any(
        [*EXPERT.broken(placement, optimizer)] == [rule]
        for optimizer in (ADAMW, STATELESS, MUON)
        for placement in TUPLES
    )


def test_what_is_refused_on_ep_names_its_theorem_and_the_nearest_as_a_file_has_it():
    for placement in TUPLES:
        spec = make_spec({Axis.EP: (2, placement)}, model=SHAPE, clip=None)
        faults = [fault for fault in check(spec) if "nearest legal" in fault.remedy]
        broken = [*EXPERT.broken(placement, ADAMW)]
        nearest = EXPERT.nearest(placement, ADAMW)
        for rule, fault in zip(broken, faults, strict=True):
            said = f"({placement}) on ep: {rule.message}; it breaks {rule.theorem}"
            assert (fault.place, fault.finding) == ("placement.ep", said)
            written = fault.remedy.removeprefix("nearest legal: ep: ")
            assert written == as_mapping(nearest)


def test_the_nearest_tuple_is_written_as_a_file_may_have_it():
    for written in {as_mapping(EXPERT.nearest(placement, ADAMW)) for placement in TUPLES}:
        overrides = ["model.preset=moe-tiny", "mesh={ep: 2}", f"placement={{ep: {written}}}"]
        assert as_mapping(load("zero3", overrides).spec.factors[0].placement) == written


def as_mapping(placement: Placement) -> str:
    return f"{{{', '.join(f'{state}: {placement[state]}' for state in PLACED)}}}"


@pytest.mark.parametrize("kept", ["S", "S*", "M", "O"])
def test_activations_on_ep_are_those_of_a_ranks_own_samples(kept):
    (fault,) = check(make_spec({Axis.EP: (2, tuple_of(f"R,R,R,{kept}"))}, model=SHAPE))
    assert fault.place == "placement.ep" and "Theorem 3" in fault.finding
    assert "activations: M at the top of the spec" in fault.finding
    assert fault.remedy.endswith("ep: {parameters: R, optimizer: R, gradients: R, activations: R}")


# ---- the degree, the mesh, the model


@pytest.mark.parametrize(
    ("model", "degree", "finding", "remedy"),
    [
        (SHAPE, 4, "4 ranks do not divide 6 experts", "choose ep from 1, 2, 3, 6"),
        (SHAPE, 12, "12 ranks do not divide 6 experts", "choose ep from 1, 2, 3, 6"),
        (ODD_SHAPE, 2, "the model has no experts that ranks of ep could have",
         "write model.experts, or dp_shard in place of ep"),
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
    assert [(fault.place, fault.remedy) for fault in executed(spec) if inner in fault.place] == [
        (f"mesh.{inner}", f"write {inner} before ep: the mesh is outermost first")
    ]


def of_transformers(tp: int = 1, **config: object) -> Spec:
    """A model of transformers, on ep."""
    model = HuggingFaceModel(hf="MixtralForCausalLM", config={"vocab_size": 259, **config})
    factors = {Axis.EP: (2, GATHERED), Axis.TP: (tp, tuple_of("S,S,S,R"))}
    return make_spec({axis: it for axis, it in factors.items() if it[0] > 1}, model=model)


def test_experts_of_a_model_that_is_not_built_in_are_spread_but_not_beside_tp():
    assert not (*check(of_transformers()), *executed(of_transformers()))
    (fault,) = (*check(of_transformers(tp=2)), *executed(of_transformers(tp=2)))
    assert fault.place == "mesh.ep" and "of a model that is not built in" in fault.finding


@pytest.mark.parametrize("written", ["eager", "batched_mm"])
def test_experts_of_transformers_run_group_by_group_on_ep_and_no_other_way(written):
    (fault,) = check(of_transformers(experts_implementation=written))
    assert fault.place == "model.config.experts_implementation"
    assert f"{written}: on ep" in fault.finding
    assert not check(of_transformers(experts_implementation="grouped_mm"))


LAYERS = ExpertLayers(modules=("h.0.mlp.experts",), number=6, chosen=2, features=8)


def test_what_is_read_off_a_model_must_fit_the_spec():
    spec = of_transformers()
    step = experts_of(spec, (("h.0.mlp.experts",), ("h.0",), ("",)), LAYERS)
    assert step is not None and (step.number, step.chosen, step.features) == (6, 2, 8)
    assert step.modules == LAYERS.modules and step.places is None
    with pytest.raises(SpecError, match="2 ranks do not divide 3 experts"):
        experts_of(spec, (), LAYERS._replace(number=3))
    counts = histogram({"h.1.mlp": [[[1] * 6]]})
    with pytest.raises(SpecError, match=r"routing: no counts of h\.0\.mlp"):
        experts_of(spec.but(routing=counts), (), LAYERS)


# ---- tp, folded into ep

FOLDED = TensorSpec(experts=FOLDED_EXPERTS)


def folded(ep: int = 2, tp: int = 2, *, model=FOUR, tensor=FOLDED, **sections):
    mesh = {Axis.EP: (ep, WHOLE), Axis.TP: (tp, tuple_of("S,S,S"))}
    return replace(make_spec(mesh, model=model, **sections), tensor=tensor)


@pytest.mark.parametrize(
    ("experts", "ep", "remedy"),
    [
        (6, 2, "choose ep from 3, or write tensor.experts: cut"),
        (6, 4, "choose ep from 3"),
        (7, 2, "write model.experts=8"),
        (20, 4, "choose ep from 2, 5, 10, or write tensor.experts: cut"),
        (4, 4, "choose ep from 2, or write tensor.experts: cut"),
    ],
)
def test_ranks_of_ep_and_a_folded_tp_have_as_many_experts(experts, ep, remedy):
    (fault,) = check(folded(ep, model=replace(FOUR, experts=experts)))
    assert (fault.place, fault.remedy) == ("mesh.ep", remedy)
    assert fault.finding == f"{ep} × 2 ranks do not divide {experts} experts"


def test_experts_that_are_whole_have_any_width_and_shared_ones_are_cut():
    odd = replace(FOUR, expert_ffn=7)
    assert not check(folded(model=odd))
    (cut,) = check(folded(model=odd, tensor=TensorSpec()))
    (shared,) = check(folded(model=replace(odd, shared_experts=1)))
    assert cut == shared and cut.finding == "tp=2 does not divide expert_ffn: 7"


@pytest.mark.parametrize(
    ("axes", "model", "place", "finding", "remedy"),
    [
        ([Axis.TP], FOUR, "tensor.experts",
         "folded: ranks of tp join those of ep, which has no two",
         "leave it out, or write mesh.ep=2 with placement.ep=R,R,R,R"),
        ([Axis.TP], EVEN, "tensor.experts",
         "folded: the model has no experts that ranks of ep and tp could have", "leave it out"),
        ([Axis.EP], FOUR, "tensor.experts",
         "nothing obeys it: no operator is cut, since tp has no two ranks",
         "remove tensor.experts"),
        ([Axis.EP, Axis.TP], EVEN, "mesh.ep",
         "the model has no experts that ranks of ep could have",
         "write model.experts, or dp_shard in place of ep"),
    ],
)  # fmt: skip
def test_what_folds_needs_both_axes_and_experts(axes, model, place, finding, remedy):
    tuples = {Axis.EP: "R,R,R", Axis.TP: "S,S,S"}
    spec = make_spec({axis: (2, tuple_of(tuples[axis])) for axis in axes}, model=model)
    spec = replace(spec, tensor=FOLDED)
    assert (*check(spec), *executed(spec)) == (
        Fault(place=place, finding=finding, remedy=remedy),
    )  # one of them


def test_a_folded_tp_routes_equal_slices_and_cuts_in_pairs():
    (fault,) = check(folded(sequence=15))
    assert fault.place == "batch.sequence"
    assert fault.finding.startswith("15 tokens of a rank cannot be cut into 2 equal slices")
    naive = TensorSpec(experts=FOLDED_EXPERTS, plan=NAIVE)
    (fault,) = (*check(folded(tensor=naive)), *executed(folded(tensor=naive)))
    assert fault.place == "tensor.plan" and "not yet: naive" in fault.finding


def test_a_group_of_both_axes_is_named_by_both_and_others_by_themselves():
    assert axes_named("ep_tp") == ("ep", "tp")
    assert axes_named("dp_shard") == ("dp_shard",) and axes_named("") == ("",)


def test_a_folded_rank_routes_its_slice_among_the_ranks_of_both_axes():
    spec = folded()
    assert spec.expert_axes == (Axis.EP, Axis.TP)
    assert spec.routed_tokens == spec.own_tokens // 2
    assert token_places(spec) == (0, 1, 2, 3)
    assert token_places(replace(spec, tensor=TensorSpec())) == (0, 0, 1, 1)
