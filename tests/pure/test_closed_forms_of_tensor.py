"""The closed forms of the tensor axis compared with the exact column: a rank's elements and
collectives, and the bytes of the loss and of sequence shards, over enumerated kinds and random
sizes."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product

import pytest

from ptrain.cost import Collective, Estimate, Phase, State
from ptrain.derivation.estimate import Derivation, derive
from ptrain.facts.parameters import facts
from ptrain.spec.model import ExternalModel, ModelShape
from ptrain.spec.placement import Axis
from ptrain.spec.spec import Spec
from ptrain.steps.step import Parallelize
from tests.oracles.expert import local_expert_elements, of_a_router
from tests.oracles.tensor import (
    CallKey,
    LayerSpan,
    Sent,
    all_layers,
    collectives,
    loss_peak_bytes,
    loss_saved_bytes,
    parameters,
    saved_slices_spare,
    scalars,
    traffic,
    whole_input_bytes,
)
from tests.pure.build import ODD_SHAPE
from tests.pure.pipeline_specs import legal

FAMILIES = ("llama", "gpt")
PLANS = ("R", "S", "S*", "naive")  # how activations are between the sub-blocks
LAYOUTS = ("fp32", "bf16", "fp16", "megatron18")


def random_spec(
    kind: tuple[object, ...], *, mesh: dict[str, int] | None = None, **sections
) -> Spec:
    """Return a legal spec of one kind (family, tied, plan, loss_parallel) with random sizes."""
    family, tied, plan, loss_parallel = kind
    draw = random.Random(repr((kind, mesh, sorted(sections))))
    degree, kv_heads, groups = draw.choice((2, 3, 4)), draw.choice((1, 2)), draw.choice((1, 2))
    kv_heads *= degree
    heads = kv_heads * (groups if family == "llama" else 1)
    vocab = draw.randrange(70, 200) * 2 * degree
    model = {
        "family": family,
        "tied": tied,
        "layers": draw.randrange(1, 5),
        "hidden": heads * draw.choice((4, 8)),
        "heads": heads,
        "kv_heads": kv_heads,
        "ffn": degree * draw.randrange(5, 30),
        # what is gathered, and what is cut once more, needs equal slices
        "vocab": vocab - (draw.randrange(degree) if loss_parallel and not mesh else 0),
    }
    settings = {
        "model": model,
        "precision": {"layout": draw.choice(LAYOUTS)},
        "batch": {
            "sequence": degree * draw.randrange(2, 9),
            "micro": draw.randrange(1, 4),
            "accumulate": draw.randrange(1, 4),
        },
        "optimizer": {"clip": draw.choice((None, 1.0))},
        "placement": {"tp": f"S,S,S,{'R' if plan == 'naive' else plan}"},
        "tensor": {"loss_parallel": loss_parallel} | ({"plan": "naive"} if plan == "naive" else {}),
    }
    data = {"dp_shard": "S*,S,S,R", "dp_replicate": "R,R,R,R", "ep": "R,R,R,R"}
    settings["placement"] |= {axis: data[axis] for axis in mesh or {}}
    merged = {
        name: {**settings.get(name, {}), **value} if isinstance(value, dict) else value
        for name, value in sections.items()
    }
    return legal({**(mesh or {}), "tp": degree}, **(settings | merged))


KINDS = list(product(FAMILIES, (False, True), PLANS, (True, False)))
every_kind = pytest.mark.parametrize("kind", KINDS, ids=str)


def shape_of(spec: Spec) -> ModelShape:
    assert isinstance(spec.model, ModelShape)
    return spec.model


def step_of(derivation: Derivation) -> Parallelize:
    assert derivation.plan.tensor is not None
    return derivation.plan.tensor


def traffic_over_tp(estimate: Estimate, rank: int = 0) -> dict[CallKey, Sent]:
    """Return a rank's traffic over tp in a step."""
    return {
        (row.key.collective, row.key.state, row.key.phase): (row.calls, row.payload_bytes)
        for row in estimate.of_rank(rank).traffic
        if row.key.axes == (Axis.TP,)
    }


def expected_over_tp(spec: Spec, step: Parallelize) -> dict[CallKey, Sent]:
    """Return the traffic over tp by the closed forms."""
    sent = traffic(spec, step, all_layers(shape_of(spec)))
    assert sent is not None
    norm = (Collective.ALL_REDUCE, State.GRADIENTS, Phase.UPDATE)
    return {**sent, **({norm: scalars(spec)} if scalars(spec)[0] else {})}


def peak(estimate: Estimate, phase: Phase, rank: int) -> int:
    """Return the peak above memory that lives for the full step."""
    lives = sum(
        estimate.bytes_of(state, rank) for state in (State.PARAMETERS, State.OPTIMIZER, State.OTHER)
    )
    (row,) = (row for row in estimate.peak if (row.phase, row.rank) == (phase, rank))
    return row.device_bytes - lives


@every_kind
def test_a_rank_stores_its_shards_and_the_replicated_tensors(kind):
    spec = random_spec(kind)
    exact, layout = derive(spec).exact, spec.precision.effective_layout
    degree = spec.degree(Axis.TP)
    for index in range(degree):
        elements = parameters(
            shape_of(spec),
            all_layers(shape_of(spec)),
            sequence=spec.batch.sequence,
            degree=degree,
            index=index,
        )
        assert exact.bytes_of(State.PARAMETERS, index) == elements * layout.parameters.itemsize
        assert exact.bytes_of(State.GRADIENTS, index) == elements * layout.gradients.itemsize


@pytest.mark.parametrize("shared", [0, 2])
@pytest.mark.parametrize("width", [None, 9])
def test_experts_count_in_the_layers_that_have_them(shared, width):
    shape = replace(
        ODD_SHAPE, experts=5, experts_per_token=2, shared_experts=shared, expert_ffn=width,
        dense_layers=1,
    )  # fmt: skip
    known = facts(shape, 16)
    inner = LayerSpan(start=1, end=2, layers=shape.layers)  # neither embedding nor head are its
    assert parameters(shape, inner, sequence=16) == sum(t.numel for t in known.units[1].tensors)
    assert parameters(shape, all_layers(shape), sequence=16) == known.numel


@pytest.mark.parametrize("dense", [0, 1])
@pytest.mark.parametrize("shared", [0, 2])
@pytest.mark.parametrize("plan", PLANS)
def test_experts_are_sharded_over_tp_and_summed_once_a_layer(plan, shared, dense):
    experts = {"experts": 3, "experts_per_token": 2, "expert_ffn": 60, "layers": 3}
    experts |= {"shared_experts": shared, "dense_layers": dense}
    spec = random_spec(("llama", False, plan, True), model=experts)
    derivation, shape, degree = derive(spec), shape_of(spec), spec.degree(Axis.TP)
    assert traffic_over_tp(derivation.exact) == expected_over_tp(spec, step_of(derivation))
    size = spec.precision.effective_layout.parameters.itemsize
    for index in range(degree):
        own = parameters(shape, all_layers(shape), sequence=16, degree=degree, index=index)
        assert derivation.exact.bytes_of(State.PARAMETERS, index) == own * size


@pytest.mark.parametrize("dense", [0, 1])
@pytest.mark.parametrize("shared", [0, 2])
@pytest.mark.parametrize("plan", ["R", "S", "S*"])
def test_of_experts_that_are_folded_slices_of_the_tokens_are_all_that_is_sent(plan, shared, dense):
    experts = {"experts": 24, "experts_per_token": 2, "expert_ffn": 60, "layers": 3}
    experts |= {"shared_experts": shared, "dense_layers": dense, "aux_loss": 0.1}
    spec = random_spec(
        ("llama", False, plan, True),
        mesh={"ep": 2},
        model=experts,
        tensor={"experts": "folded"},
    )
    derivation, shape, degree = derive(spec), shape_of(spec), spec.degree(Axis.TP)
    times = spec.batch.accumulate * (shape.layers - dense)
    expected = expected_over_tp(spec, step_of(derivation))
    for collective, phase, calls, size in of_a_router(spec, shape, 1):
        before, payload = expected.get((collective, State.ACTIVATIONS, phase), (0, 0))
        counts = size * degree // (2 * (degree - 1))  # a ring sends 2(t - 1)/t of them
        of_counts = before + times * calls, payload + times * counts
        expected[collective, State.ACTIVATIONS, phase] = of_counts
    assert traffic_over_tp(derivation.exact) == expected
    size, ranks = spec.precision.effective_layout.parameters.itemsize, 2 * degree
    for index in range(degree):
        own = parameters(
            shape,
            all_layers(shape),
            sequence=16,
            degree=degree,
            index=index,
            has_whole_experts=True,
        )
        own += (shape.layers - dense) * local_expert_elements(shape, ranks)
        assert derivation.exact.bytes_of(State.PARAMETERS, index) == own * size


@pytest.mark.parametrize("rank", [None, 7])
@pytest.mark.parametrize("plan", ["R", "S", "S*"])
def test_latent_attention_is_sharded_by_heads_and_shared_tensors_are_reduced(plan, rank):
    latent = {"kv_lora_rank": 11, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 8}
    latent |= {"layers": 3, "heads": 12, "kv_heads": 12, **({"q_lora_rank": rank} if rank else {})}
    spec = random_spec(("llama", False, plan, True), model=latent)
    derivation, shape, degree = derive(spec), shape_of(spec), spec.degree(Axis.TP)
    assert traffic_over_tp(derivation.exact) == expected_over_tp(spec, step_of(derivation))
    size = spec.precision.effective_layout.parameters.itemsize
    for index in range(degree):
        own = parameters(shape, all_layers(shape), sequence=16, degree=degree, index=index)
        assert derivation.exact.bytes_of(State.PARAMETERS, index) == own * size


@pytest.mark.parametrize("chunk", [None, 3, 10_000])
@every_kind
def test_operators_have_the_traffic_of_the_closed_form(kind, chunk):
    spec = random_spec(kind, loss={"chunk": chunk} if chunk else {})
    derivation = derive(spec)
    step = step_of(derivation)
    for rank in range(spec.world_size):
        assert traffic_over_tp(derivation.exact, rank) == expected_over_tp(spec, step)
    of_operators = [
        calls
        for (_, _, phase), (calls, _) in traffic_over_tp(derivation.exact).items()
        if phase is not Phase.UPDATE
    ]
    assert collectives(spec, step, all_layers(shape_of(spec))) == sum(of_operators)


@pytest.mark.parametrize("mesh", [{"dp_shard": 2}, {"dp_replicate": 2}], ids=str)
@pytest.mark.parametrize("kind", KINDS[::3], ids=str)
def test_data_axes_do_not_change_the_traffic_of_operators(kind, mesh):
    spec = random_spec(kind, mesh=mesh)
    derivation = derive(spec)
    for rank in range(spec.world_size):
        assert traffic_over_tp(derivation.exact, rank) == expected_over_tp(
            spec, step_of(derivation)
        )


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind[2] != "naive"], ids=str)
def test_a_block_that_is_computed_again_sends_all_of_forward_again_but_its_last_sum(kind):
    spec = random_spec(kind, activations="M")
    derivation = derive(spec)
    assert traffic_over_tp(derivation.exact) == expected_over_tp(spec, step_of(derivation))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_inputs_that_are_saved_as_slices_spare_the_other_ranks_parts(family, tied, layout):
    specs = [
        random_spec(
            (family, tied, "S", True),
            placement={"tp": f"S,S,S,{activations}"},
            precision={"layout": layout},
        )
        for activations in ("S", "S*")
    ]
    saved = [derive(spec).exact.bytes_of(State.ACTIVATIONS, 0) for spec in specs]
    shape, degree = shape_of(specs[0]), specs[0].degree(Axis.TP)
    assert saved[0] - saved[1] == saved_slices_spare(specs[0], shape, degree)
    assert degree * saved_slices_spare(specs[0], shape, degree) == (
        2 * shape.layers * (degree - 1) * whole_input_bytes(specs[0], shape)
    )


@pytest.mark.parametrize("layout", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", KINDS[: len(KINDS) // 2 : 2] + KINDS[1::4], ids=str)
def test_a_larger_vocabulary_adds_the_memory_of_the_loss(kind, layout):
    """With vocabularies so large that only the loss determines the forward peak."""
    few, many = (
        random_spec(
            kind,
            model={"vocab": vocab, "layers": 2},
            precision={"layout": layout},
            batch={"sequence": 24, "micro": 2, "accumulate": 2},
            loss={},
        )
        for vocab in (60_000, 120_000 - (1 if kind[3] else 0))
    )
    derivations = [derive(spec) for spec in (few, many)]
    for rank in range(few.world_size):
        less, more = (found.exact.bytes_of(State.ACTIVATIONS, rank) for found in derivations)
        assert more - less == closed_form_growth(loss_saved_bytes, derivations, (few, many), rank)
        less, more = (
            peak(found.exact, Phase.FORWARD, rank) - found.exact.bytes_of(State.GRADIENTS, rank)
            for found in derivations
        )
        assert more - less == closed_form_growth(loss_peak_bytes, derivations, (few, many), rank)


def closed_form_growth(
    closed_form, derivations: list[Derivation], specs: tuple[Spec, Spec], rank: int
) -> int:
    """Return how much larger the closed form is for the second spec."""
    few, many = (
        closed_form(spec, step_of(found), shape_of(spec), rank)
        for spec, found in zip(specs, derivations, strict=True)
    )
    return many - few


def test_a_loss_in_chunks_saves_no_logits():
    sizes = [
        derive(
            random_spec(("llama", False, "R", True), model={"vocab": vocab}, loss={"chunk": 4})
        ).exact.bytes_of(State.ACTIVATIONS, 0)
        for vocab in (6_000, 12_000)
    ]
    assert sizes[0] == sizes[1]
    spec = random_spec(("llama", False, "R", True), loss={"chunk": 4})
    assert loss_saved_bytes(spec, step_of(derive(spec)), shape_of(spec), 0) == 0


NO_CLOSED_FORM = ("M selective", "M attention", "a model that is not built in", "a loss in chunks")


@pytest.mark.parametrize("case", NO_CLOSED_FORM)
def test_settings_without_a_closed_form_return_none(case):
    spec = random_spec(("llama", False, "R", True))
    step, shape = step_of(derive(spec)), shape_of(spec)
    assert traffic(spec, step, all_layers(shape)) is not None
    match case:
        case "M selective" | "M attention":
            policy = case.partition(" ")[2]
            again = random_spec(("llama", False, "R", True), activations="M", recompute=policy)
            assert traffic(again, step, all_layers(shape)) is None
        case "a model that is not built in":
            own = replace(spec, model=ExternalModel(target="tests.models:own"))
            assert traffic(own, step, all_layers(shape)) is None
            assert collectives(own, step, all_layers(shape)) is None
        case _:
            chunked = random_spec(("llama", False, "R", True), loss={"chunk": 4})
            assert loss_peak_bytes(chunked, step, shape, 0) is None
