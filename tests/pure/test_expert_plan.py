"""The plan of a spec with ep: experts by rank, exchanges, reductions, and the reason for equality
with one device."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ptrain.facts.parameters import expert_modules, facts
from ptrain.plan.composition import explain_compositions, theorem_3_of_experts
from ptrain.plan.lower import lower
from ptrain.plan.show import format_plan
from ptrain.spec.placement import Axis
from ptrain.spec.spec import Spec
from ptrain.steps.step import Plan
from tests.pure.build import GATHERED, ODD_SHAPE, WHOLE, make_spec, tuple_of

SHAPE = replace(ODD_SHAPE, experts=6, experts_per_token=2, expert_ffn=10, dense_layers=1)
FULL = replace(SHAPE, capacity_factor=1.5)
REPLICAS, SHARDS = {Axis.DP_REPLICATE: (2, WHOLE)}, {Axis.DP_SHARD: (2, GATHERED)}


def spec(ranks: int = 2, placement=WHOLE, *, around=None, inside=None, model=SHAPE) -> Spec:
    return make_spec({**(around or {}), Axis.EP: (ranks, placement), **(inside or {})}, model=model)


def plan_of(made: Spec) -> Plan:
    known = facts(made.model, made.batch.sequence, made.unit, expert_modules(made))
    return lower(made, known)


def lines(made: Spec, begin: str) -> list[str]:
    text = format_plan(made, plan_of(made))
    return [line for line in text.splitlines() if line.startswith(begin)]


def test_layers_without_experts_have_none_to_give():
    assert plan_of(spec()).experts.modules == ("blocks.1.mlp.experts", "blocks.2.mlp.experts")
    (step,) = lines(spec(), "  2. ")
    assert step == (
        "  2. distribute the experts of 2 layers over ep: each rank holds full experts with their "
        "Θ, Ω and G; tokens are dispatched to them and combined"
    )


def test_a_line_per_rank_lists_its_experts():
    assert lines(spec(3), "experts ") == [
        "experts  ep 0: 0-1 of 6",
        "experts  ep 1: 2-3 of 6",
        "experts  ep 2: 4-5 of 6",
    ]
    assert lines(spec(6), "experts ")[-1] == "experts  ep 5: 5 of 6"
    many = replace(SHAPE, experts=32)
    assert lines(spec(16, model=many), "experts ")[-2:] == [
        "experts  ep 7: 14-15 of 32",
        "experts  … 16 ranks of ep",
    ]


def test_rows_that_travel_are_as_many_as_are_routed_and_places_as_there_are():
    """2 samples of 16 tokens that go to 2 experts: 64 rows of 42 fp32 features. With a capacity
    each of 6 experts takes 1.5 x 2 x 16 / 6 tokens of a sample: 96 places."""
    (routed,) = lines(spec(3), "dispatch")
    assert routed.startswith("dispatch 64 rows of 42 features to their experts and back, per layer")
    assert "10.75 kB, 2/3 of it to other ranks if experts are chosen equally often" in routed
    (placed,) = lines(spec(3, model=FULL), "dispatch")
    assert placed.startswith("dispatch 96 places of 42 features to their experts and back")
    assert placed.endswith("16.13 kB, 2/3 of it to other ranks, independent of the routing")


@pytest.mark.parametrize(
    ("made", "summed", "wrapped"),
    [
        (spec(), "not reduced, because one rank has all their tokens; all other gradients over ep",
         "keep each unit in a flat buffer: Θ replicated"),
        (spec(around=SHARDS, placement=GATHERED),
         "over dp_shard; all other gradients over dp_shard × ep",
         "fully_shard each unit over dp_shard: Θ S*, Ω S, G S"),
        (spec(around=REPLICAS | SHARDS),
         "over dp_replicate × dp_shard; all other gradients over dp_replicate × dp_shard × ep",
         "keep each unit in a flat buffer over dp_replicate × dp_shard: Θ sharded over dp_shard"),
        (spec(around={Axis.CP: (2, tuple_of("R,R,R,S"))}),
         "over cp; all other gradients over cp × ep",
         "keep each unit in a flat buffer over cp: Θ replicated"),
        (spec(placement=GATHERED), "not reduced, because one rank has all their tokens; all other "
         "gradients over ep", "leave the units as they are: no data axis"),
    ],
    ids=["ep", "zero3", "hsdp", "cp", "alone"],
)  # fmt: skip
def test_experts_are_summed_and_wrapped_over_the_other_axes(made, summed, wrapped):
    assert lines(made, "reduced") == [f"reduced  gradients of experts {summed}"]
    (line,) = lines(made, "wrapped")
    assert line.startswith(f"wrapped  experts: {wrapped}")


def test_without_ep_the_plan_does_not_mention_experts():
    made = make_spec(SHARDS, model=SHAPE)
    assert not theorem_3_of_experts(made, plan_of(made))
    text = format_plan(made, plan_of(made))
    assert "experts" not in text.replace("mlp.experts", "")


# ---- why it computes what one device does


@pytest.mark.parametrize(
    "made",
    [
        spec(),
        spec(3),
        spec(around=SHARDS, placement=GATHERED),
        spec(around=REPLICAS | SHARDS),
        spec(inside={Axis.TP: (3, tuple_of("S,S,S,R"))}),
    ],
    ids=["2", "3", "zero3", "hsdp", "tp"],
)
def test_the_conditions_of_theorem_3_hold_for_ep(made):
    conditions = theorem_3_of_experts(made, plan_of(made))
    assert [condition.name for condition in conditions] == [
        "Theorem 3 of routed tokens",
        "Theorem 3 of experts' gradients",
        "Theorem 3 of the rest's gradients",
    ]
    assert all(condition.holds for condition in conditions)


def test_reducing_experts_over_ep_or_not_reducing_the_rest_fails():
    """Over ep different experts would be added, and replicated parameters would diverge."""
    made = spec(around=SHARDS, placement=GATHERED)
    plan = plan_of(made)
    nobody = plan.replace_steps(replace(plan.experts, modules=()))
    assert [c.holds for c in theorem_3_of_experts(made, nobody)] == [True, False, True]
    local = plan.replace_steps(plan.wrap.drop_axis(Axis.EP))
    assert [c.holds for c in theorem_3_of_experts(made, local)] == [True, True, False]


def test_the_conditions_of_ep_have_a_heading():
    made = spec(around=SHARDS, placement=GATHERED, inside={Axis.TP: (3, tuple_of("S,S,S,R"))})
    assert [heading for heading, _ in explain_compositions(made, plan_of(made))] == [
        "why ep computes the same as a single device",
        "why tp and data axes compose",
    ]
