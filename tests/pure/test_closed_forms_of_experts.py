"""The closed forms of the expert axis compared with the derivation: the experts of each rank, and
the traffic between ranks."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from itertools import chain, product
from typing import Any

import pytest

from ptrain.axes.context.attention import all_spans
from ptrain.axes.expert.cost import expert_traffic
from ptrain.axes.expert.cost import rows_bytes as searched_rows
from ptrain.axes.expert.form import own_places, with_own_experts
from ptrain.cost import Phase, State
from ptrain.derivation.estimate import derive
from ptrain.facts.model import ModelFacts
from ptrain.facts.parameters import expert_modules, facts
from ptrain.plan.lower import lower
from ptrain.spec.activations import ActivationMode, Operators, Policy
from ptrain.spec.batch import ContextAttention, ContextSpec
from ptrain.spec.keys import FOLDED as FOLDED_EXPERTS
from ptrain.spec.keys import TensorSpec
from ptrain.spec.model import Family, ModelShape
from ptrain.spec.placement import Axis
from ptrain.spec.precision import LAYOUTS
from ptrain.spec.spec import Spec
from ptrain.steps.step import Plan
from tests.oracles.expert import (
    local_expert_elements,
    of_a_layer,
    of_a_router,
    ranks_of_experts,
    rows_bytes,
    trip_bytes,
)
from tests.pure.build import make_spec, tuple_of

SHAPE = ModelShape(
    family=Family.LLAMA,
    layers=3,
    hidden=10,
    heads=2,
    kv_heads=1,
    ffn=14,
    vocab=259,
    experts=12,
    experts_per_token=2,
)
SHAPES: Mapping[str, dict[str, Any]] = {
    "dropless": {},
    "capacity": {"capacity_factor": 1.0},
    "more than fits": {"capacity_factor": 1.1, "experts_per_token": 3},
    "no more than there are": {"capacity_factor": 9.0},
    "narrow": {"capacity_factor": 0.3, "expert_ffn": 6, "dense_layers": 1, "shared_experts": 1},
}
RANKS = (2, 3, 4, 12)
ZIGZAG = ContextAttention.ZIGZAG
BALANCED = {"aux_loss": 0.1, "z_loss": 0.1}


def spec_of(shape: ModelShape, ranks: int, **sections: Any) -> Spec:
    mesh = {Axis.DP_SHARD: (2, tuple_of("S*,S,S")), Axis.EP: (ranks, tuple_of("S*,S,S"))}
    return make_spec(mesh, model=shape, **sections)


def plan_spec(spec: Spec) -> tuple[Plan, ModelFacts]:
    shape = spec.model
    assert isinstance(shape, ModelShape)
    known = facts(shape, spec.batch.sequence, apart=expert_modules(spec))
    return lower(spec, known), known


def totals(spec: Spec, plan: Plan, axis: str = "ep") -> Counter[tuple[Any, ...]]:
    """Return calls and sent bytes of a step by collective and phase."""
    counted: Counter[tuple[Any, ...]] = Counter()
    for row in expert_traffic(spec, plan):
        assert row.key.axes == (axis,)
        counted[row.key.collective, row.key.phase, "calls"] += row.calls
        counted[row.key.collective, row.key.phase, "bytes"] += row.sent_bytes
    return counted


@pytest.mark.parametrize(("name", "ranks"), product(SHAPES, RANKS))
def test_traffic_is_a_layers_exchange_times_layers_and_micro_batches(name, ranks):
    shape = replace(SHAPE, **SHAPES[name])
    spec = spec_of(shape, ranks, accumulate=3, layout=LAYOUTS["fp32"])
    plan, _ = plan_spec(spec)
    expected: Counter[tuple[Any, ...]] = Counter()
    layers = 3 * sum(map(shape.has_experts, range(shape.layers)))  # of all micro-batches
    for collective, phase, calls, size in of_a_layer(spec, shape):
        expected[collective, phase, "calls"] += layers * calls
        expected[collective, phase, "bytes"] += layers * size
    assert totals(spec, plan) == expected


@pytest.mark.parametrize(
    ("name", "balance", "attention"),
    product(SHAPES, ({}, BALANCED, {"z_loss": 0.1}), (ContextAttention.RING, ZIGZAG)),
)
def test_routers_of_slices_count_over_them_in_each_layer_and_micro_batch(name, balance, attention):
    shape = replace(SHAPE, **SHAPES[name], **balance)
    mesh = {Axis.CP: (4, tuple_of("S*,S,S,S"))}
    spec = make_spec(mesh, model=shape, accumulate=3, layout=LAYOUTS["bf16"])
    spec = replace(spec, context=ContextSpec(attention=attention))
    plan, _ = plan_spec(spec)
    expected: Counter[tuple[Any, ...]] = Counter()
    layers = 3 * sum(map(shape.has_experts, range(shape.layers)))  # of all micro-batches
    stretches = 2 if attention is ZIGZAG else 1
    for collective, phase, calls, size in of_a_router(spec, shape, stretches):
        expected[collective, phase, "calls"] += layers * calls
        expected[collective, phase, "bytes"] += layers * size
    assert totals(spec, plan, "cp") == expected
    is_asked = shape.capacity_factor is not None or "aux_loss" in balance
    assert bool(expected) is is_asked, "of a mean each rank has its share"


SLICED = (None, ContextAttention.RING, ZIGZAG)
FOLDED = TensorSpec(experts=FOLDED_EXPERTS)
EVEN = replace(SHAPE, heads=6, kv_heads=6, hidden=24, ffn=18, vocab=258)  # which tp cuts
IN_FULL = {Axis.TP: tuple_of("S,S,S,R"), Axis.CP: tuple_of("S*,S,S,S"), Axis.EP: tuple_of("S*,S,S")}


def folded_spec(shape: ModelShape, attention: ContextAttention | None, **mesh: int) -> Spec:
    """Return a folded spec with 36 tokens, without attention over cp."""
    axes = {Axis(name): (degree, IN_FULL[Axis(name)]) for name, degree in mesh.items()}
    spec = make_spec(axes, model=shape, accumulate=3, sequence=36)
    context = ContextSpec(attention=attention) if attention else spec.context
    return replace(spec, tensor=FOLDED, context=context)


@pytest.mark.parametrize(("tp", "attention"), product((2, 3), SLICED))
def test_ranks_of_a_folded_tp_route_each_token_of_those_that_they_share_once(tp, attention):
    cp = {"cp": 3} if attention else {}
    spec = folded_spec(EVEN, attention, **cp, ep=2, tp=tp)
    plan, _ = plan_spec(spec)
    step = plan.experts
    assert step is not None and step.counting == ((Axis.CP, Axis.TP) if cp else (Axis.TP,))
    tokens = [[t for span in own for t in range(*span)] for own in step.spans]
    assert sorted(chain(*tokens)) == [*range(36)]
    assert {*map(len, tokens)} == {spec.routed_tokens}
    if plan.context is not None:
        for place, own in enumerate(all_spans(plan.context)):
            held = [t for span in own for t in range(*span)]
            assert [*chain(*tokens[place * tp : (place + 1) * tp])] == held, "in its order"


@pytest.mark.parametrize(("name", "tp", "attention"), product(SHAPES, (2, 3), SLICED))
def test_rows_of_a_folded_tp_go_over_both_axes_and_routers_count_over_all_slices(
    name, tp, attention
):
    shape = replace(EVEN, **SHAPES[name], **BALANCED)
    cp = {"cp": 3} if attention else {}
    spec = folded_spec(shape, attention, **cp, ep=2, tp=tp)
    plan, whole = plan_spec(spec)
    assert plan.experts is not None
    expected: Counter[tuple[Any, ...]] = Counter()
    layers = 3 * sum(map(shape.has_experts, range(shape.layers)))
    stretches = max(map(len, plan.experts.spans))
    over = {
        ("ep", "tp"): of_a_layer(spec, shape),
        plan.experts.counting: of_a_router(spec, shape, stretches),
    }
    for axes, rows in over.items():
        for collective, phase, calls, size in rows:
            expected[axes, collective, phase, "calls"] += layers * calls
            expected[axes, collective, phase, "bytes"] += layers * size
    counted: Counter[tuple[Any, ...]] = Counter()
    for row in expert_traffic(spec, plan):
        counted[row.key.axes, row.key.collective, row.key.phase, "calls"] += row.calls
        counted[row.key.axes, row.key.collective, row.key.phase, "bytes"] += row.sent_bytes
    assert counted == expected
    own = with_own_experts(whole, plan.experts, ranks_of_experts(spec))
    less = local_expert_elements(shape, 1) - local_expert_elements(shape, 2 * tp)
    assert whole.numel - own.numel == layers // 3 * less


def test_places_over_cp_are_those_of_whole_samples():
    """Of 16 tokens on two ranks an expert takes 8, which may all be on one of them: as many places
    as on one device, until a rank has fewer tokens than that."""
    shape = replace(SHAPE, experts=4, capacity_factor=1.0)
    row = 10 * 4
    for ranks, places in ((1, 8), (2, 8), (4, 4)):
        mesh = {Axis.CP: (ranks, tuple_of("S*,S,S,S")), Axis.EP: (2, tuple_of("S*,S,S"))}
        spec = make_spec(mesh, model=shape)
        assert rows_bytes(spec, shape) == spec.batch.micro * 4 * places * row
        assert own_places(spec, shape) == places


def test_a_fully_recomputed_layer_repeats_its_exchange():
    shape = replace(SHAPE, capacity_factor=1.0)
    spec = spec_of(shape, 2)
    plain, again, kept = (
        replace(spec, activations=replace(spec.activations, default=mode))
        for mode in (
            ActivationMode(),
            ActivationMode(policy=Policy()),
            ActivationMode(policy=Policy(keep=(Operators.COLLECTIVE,))),
        )
    )
    once, twice, stays = (totals(of, plan_spec(of)[0]) for of in (plain, again, kept))
    assert stays == once
    more = twice - once
    assert {key[1] for key in more} == {Phase.BACKWARD}
    assert sorted(more.values()) == [2 * 3, 3 * 2 * rows_bytes(spec, shape) // 2]


@pytest.mark.parametrize(("name", "ranks"), product(SHAPES, RANKS))
def test_each_rank_has_equally_many_experts_and_all_other_parameters(name, ranks):
    shape = replace(SHAPE, **SHAPES[name])
    plan, whole = plan_spec(spec_of(shape, ranks))
    assert plan.experts is not None
    own = with_own_experts(whole, plan.experts, ranks)
    layers = sum(map(shape.has_experts, range(shape.layers)))
    others = whole.numel - layers * local_expert_elements(shape, 1)
    assert own.numel == others + layers * local_expert_elements(shape, ranks)
    cut = {unit.modules for unit in own.units if any(t.is_cut for t in unit.tensors)}
    assert cut == {unit.modules for unit in own.units if plan.is_apart(unit.modules)}


def test_figures_worked_by_hand():
    """Two samples of 16 tokens, of which 2 of 4 experts take 8 each: 2 · 4 · 8 rows of 10 features
    in fp32, half of which are another rank's."""
    shape = replace(SHAPE, experts=4, capacity_factor=1.0)
    spec = spec_of(shape, 2)
    assert rows_bytes(spec, shape) == 2 * 4 * 8 * 10 * 4
    assert trip_bytes(spec, shape) == 2 * 2560
    sizes = [size for _, _, _, size in of_a_layer(spec, shape)]
    assert sizes == [2 * 1280, 2 * 1280]  # two trips of half of the rows


@pytest.mark.parametrize(("name", "ranks", "tp"), [*product(SHAPES, RANKS, (1, 2))])
def test_a_search_counts_the_rows_that_the_closed_form_does(name, ranks, tp):
    shape = replace(SHAPE, **SHAPES[name])
    mesh = {Axis.EP: (ranks, tuple_of("S*,S,S")), Axis.TP: (tp, tuple_of("S*,S,S,R"))}
    spec = make_spec(mesh, model=shape, layout=LAYOUTS["bf16"])
    for experts in (spec.tensor, TensorSpec(experts=FOLDED_EXPERTS)):
        spec = replace(spec, tensor=experts)
        assert searched_rows(spec, shape) == rows_bytes(spec, shape)


# (ep, dp_shard): 8 experts of 12 to 20 features. A rank of ep has 8/ep of them, over dp_shard.
FEW = replace(SHAPE, hidden=12, ffn=20, experts=8)
TUPLES = (
    (2, 2), (2, 3), (2, 4), (2, 5), (2, 12), (4, 2), (4, 5), (4, 6), (8, 2), (8, 3), (8, 4), (8, 7),
)  # fmt: skip


def elements(shape: tuple[int, ...], ranks: int) -> int:
    """Return the elements of a rank's part of a tensor: rows, rounded up, of as many rows as ranks
    or more; else the same part of all of it, if the ranks divide a later dimension."""
    number = math.prod(shape)
    if shape[0] < ranks and any(size % ranks == 0 for size in shape[1:]):
        return number // ranks
    return math.ceil(shape[0] / ranks) * (number // shape[0])


@pytest.mark.parametrize(("ep", "shards"), TUPLES)
def test_experts_are_sharded_by_a_dimension_that_has_enough_rows(ep, shards):
    mesh = {Axis.DP_SHARD: (shards, tuple_of("S*,S,S")), Axis.EP: (ep, tuple_of("S*,S,S"))}
    spec = make_spec(mesh, model=FEW)
    h, f, own = FEW.hidden, FEW.ffn, 8 // ep
    kv = h // 2  # one of two heads
    block = ((h,), (h, h), (kv, h), (kv, h), (h, h), (h,), (8, h))
    experts = ((own, f, h), (own, f, h), (own, h, f))
    ends = ((FEW.vocab, h), (h,), (FEW.vocab, h))
    of_rest = 3 * sum(elements(t, ep * shards) for t in block)
    of_rest += sum(elements(t, ep * shards) for t in ends)
    of_experts = 3 * sum(elements(t, shards) for t in experts)
    tensors = 3 * (len(block) + len(experts)) + len(ends)
    estimate = derive(spec).exact
    for state in (State.PARAMETERS, State.GRADIENTS):
        assert estimate.bytes_of(state) == 4 * (of_rest + of_experts)
    steps = 4 * tensors  # AdamW counts for each tensor by itself
    assert estimate.bytes_of(State.OPTIMIZER, 0) == 8 * (of_rest + of_experts) + steps
