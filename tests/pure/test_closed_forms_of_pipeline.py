"""The closed forms of the pipeline axis compared with the schedules and the exact column: chunks in
flight, messages, and the parameters of each stage."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from ptrain.axes.pipeline.catalogue import make_schedule, size_of
from ptrain.axes.pipeline.cost import PipelineSize, stages_of
from ptrain.axes.pipeline.schedule import Action, Schedule
from ptrain.cost import Collective, Estimate, Phase, State
from ptrain.derivation.estimate import Derivation, derive
from ptrain.spec.pipeline import ScheduleName
from ptrain.spec.placement import Axis
from ptrain.spec.spec import Spec
from ptrain.steps.step import Pipeline
from ptrain.timeline import Kind
from tests.oracles.pipeline import (
    boundary_bytes,
    chunks_in_flight,
    forwards_first,
    messages_of_rank,
    rank_parameters,
    shared_elements,
    spans,
)
from tests.oracles.tensor import scalars, traffic, vocab_shard_size
from tests.pure.pipeline_specs import legal
from tests.pure.pipelines import GRID, most_held, pipeline, size_of_step, stages_per_rank
from tests.pure.test_closed_forms_of_tensor import PLANS, shape_of

LARGE = [
    (name, pipeline(ranks, per_rank, 2 * ranks * times))
    for name in ScheduleName
    for per_rank in stages_per_rank(name)
    for ranks in (5, 8)
    for times in (1, 3)
]
SIZES = [size_of(name, size) for name, size in [*GRID, *LARGE]]
every_schedule = pytest.mark.parametrize("name", ScheduleName)
HIDDEN, TOKENS, VOCAB = 96, 32, 259
LLAMA = {"hidden": HIDDEN, "heads": 6, "kv_heads": 6, "ffn": 240, "vocab": VOCAB}
MODELS = {
    "llama": LLAMA,
    "llama, tied": LLAMA | {"tied": True},
    "gpt": LLAMA | {"family": "gpt"},
    "gpt, untied": LLAMA | {"family": "gpt", "tied": False},
}
every_model = pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)


def sizes(name: ScheduleName) -> list[PipelineSize]:
    return [size for size in SIZES if size.schedule is name]


def schedule_of(size: PipelineSize) -> Schedule:
    return make_schedule(
        size.schedule, pipeline(size.ranks, size.stages_per_rank, size.microbatches)
    )


def actions(order: Schedule, rank: int) -> list[Action]:
    return [part for step in order.orders[rank] for part in step.parts]


def spec_of(
    name: str, ranks: int, split: list[int], *, tp: int = 1, accumulate: int = 8, **sections
) -> Spec:
    """A stage of so many layers each; `sections` of a spec's."""
    activations = sections.pop("activations_on_tp", "R")
    return legal(
        {"pp": ranks, "tp": tp} if tp > 1 else {"pp": ranks},
        {"schedule": str(name), "split": split},
        **{
            "model": sections.pop("model", LLAMA) | {"layers": sum(split)},
            "batch": {"sequence": TOKENS, "accumulate": accumulate},
            "placement": {"pp": "S,S,S,R"} | ({"tp": f"S,S,S,{activations}"} if tp > 1 else {}),
        }
        | sections,
    )


def random_split(stages: int, *key: object) -> list[int]:
    draw = random.Random(repr((stages, key)))
    return [draw.randrange(1, 4) for _ in range(stages)]


def step_of(derivation: Derivation) -> Pipeline:
    assert derivation.plan.pipeline is not None
    return derivation.plan.pipeline


def traffic_over(estimate: Estimate, axis: Axis, rank: int) -> dict[object, tuple[int, int]]:
    """Return a rank's calls and payload over an axis in a step."""
    return {
        (row.key.collective, row.key.state, row.key.phase): (row.calls, row.payload_bytes)
        for row in estimate.of_rank(rank).traffic
        if row.key.axes == (axis,) and row.key.phase is not Phase.SETUP and row.calls
    }


# -------- in flight


@every_schedule
def test_the_number_of_chunks_in_flight_matches_the_literature(name):
    for size in sizes(name):
        order = schedule_of(size)
        for rank in range(size.ranks):
            assert stages_of(size, rank) == order.stages_of(rank)
            most = now = 0
            for step in order.orders[rank]:
                now += sum(part.kind is Kind.FORWARD for part in step.parts)
                most = max(most, now)
                now -= sum(part.kind in (Kind.BACKWARD, Kind.WEIGHT) for part in step.parts)
            assert (size, rank, most) == (size, rank, chunks_in_flight(size, rank))
            assert most_held(order, rank) == most


@every_schedule
def test_warmup_lengths_match_the_literature(name):
    for size in sizes(name):
        order = schedule_of(size)
        for rank in range(size.ranks):
            kinds = [action.kind is Kind.FORWARD for action in actions(order, rank)]
            assert (size, rank, kinds.index(False)) == (size, rank, forwards_first(size, rank))


# -------- sends and receives


@pytest.mark.parametrize("ranks", [2, 3, 4])
@every_schedule
def test_a_rank_sends_and_receives_over_the_boundaries_of_its_stages(name, ranks):
    for per_rank in stages_per_rank(name):
        split = random_split(ranks * per_rank, name)
        spec = spec_of(name, ranks, split, accumulate=2 * ranks, optimizer={"clip": None})
        derivation = derive(spec)
        size = size_of_step(step_of(derivation), spec.batch.accumulate)
        assert (size.ranks, size.stages_per_rank) == (ranks, per_rank)
        for rank in range(ranks):
            rows = [row for row in derivation.exact.of_rank(rank).traffic if row.sent_bytes]
            assert {row.key.collective for row in rows} == {Collective.SEND}
            assert all(row.sent_bytes == row.payload_bytes for row in rows)
            assert traffic_over(derivation.exact, Axis.PP, rank) == {
                (collective, State.ACTIVATIONS, phase): (calls, calls * TOKENS * HIDDEN * 4)
                for (collective, phase), calls in messages_of_rank(size, rank).items()
            }


@pytest.mark.parametrize("loss_parallel", [True, False])
@pytest.mark.parametrize("plan", PLANS)
@every_model
def test_each_rank_has_the_traffic_of_its_layers_and_boundaries(model, plan, loss_parallel):
    """Over tp what the operators of its layers do; over pp, beside the boundaries, one number for
    the norm and one for overflows, and a tied head's gradient. Slices of words are unequal, but
    where logits are gathered."""
    turn = [*MODELS.values()].index(model) + PLANS.index(plan) + loss_parallel
    name, layout = (("1f1b", "fp32"), ("zbv", "bf16"), ("interleaved", "fp16"))[turn % 3]
    ranks, vocab = 2, VOCAB if loss_parallel else VOCAB + 1
    split = random_split(2 if name == "1f1b" else 4, plan, layout)
    spec = spec_of(
        name,
        ranks,
        split,
        tp=2,
        model=model | {"vocab": vocab},
        activations_on_tp="R" if plan == "naive" else plan,
        tensor={"loss_parallel": loss_parallel, "plan": "naive" if plan == "naive" else "paired"},
        precision={"layout": layout},
    )
    derivation = derive(spec)
    step, operators = step_of(derivation), derivation.plan.tensor
    size, shape = size_of_step(step, spec.batch.accumulate), shape_of(spec)
    assert operators is not None
    calls, payload = scalars(spec)
    norm = (Collective.ALL_REDUCE, State.GRADIENTS, Phase.UPDATE)
    for rank in range(ranks):
        for index in range(2):
            of_tp, of_pp = Counter[object](), Counter[object]()
            for stage in stages_of(size, rank):
                sent = traffic(spec, operators, spans(step)[stage])
                assert sent is not None
                for key, (number, total) in sent.items():
                    of_tp[key, "calls"] += number
                    of_tp[key, "bytes"] += total
            of_tp[norm, "calls"], of_tp[norm, "bytes"] = calls, payload
            shared = shared_elements(shape, size, rank, vocab_shard_size(vocab, 2, index))
            of_pp[norm, "calls"] = calls + (shared > 0)
            of_pp[norm, "bytes"] = (
                payload + shared * spec.precision.effective_layout.gradients.itemsize
            )
            for (collective, phase), number in messages_of_rank(size, rank).items():
                key = (collective, State.ACTIVATIONS, phase)
                of_pp[key, "calls"] = number
                of_pp[key, "bytes"] = number * boundary_bytes(spec, HIDDEN)
            for axis, expected in ((Axis.TP, of_tp), (Axis.PP, of_pp)):
                rows = traffic_over(derivation.exact, axis, 2 * rank + index)
                assert expected == {
                    (key, unit): number
                    for key, row in rows.items()
                    for unit, number in zip(("calls", "bytes"), row, strict=True)
                }


# -------- resident


@every_schedule
@every_model
def test_a_rank_stores_its_stages_layers_and_ends(model, name):
    tp = 1 + ([*ScheduleName].index(name) + [*MODELS.values()].index(model)) % 3
    per_rank = stages_per_rank(name)[-1]
    spec = spec_of(name, 2, random_split(2 * per_rank, name, tp), tp=tp, model=model)
    derivation = derive(spec)
    for rank in range(2):
        for index in range(tp):
            elements = rank_parameters(spec, shape_of(spec), step_of(derivation), rank, index)
            for state in (State.PARAMETERS, State.GRADIENTS):
                assert derivation.exact.bytes_of(state, rank * tp + index) == 4 * elements
