"""The pipeline axis' closed forms against the schedules' orders and the exact column: chunks in
flight, sends and receives, what each stage has, and the activations that a rank holds."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from ptrain.axes.pipeline.cost import (
    PipelineSize,
    boundary_bytes,
    chunks_in_flight,
    crossings,
    forwards_first,
    held_behind,
    held_bytes,
    held_growth,
    kept_at_boundaries,
    least_held_bytes,
    peak_beyond_naive,
    rank_parameters,
    round_size,
    shared_elements,
    size_of,
    spans,
    stages_of,
)
from ptrain.axes.pipeline.holdings import most_held
from ptrain.axes.pipeline.known import schedule
from ptrain.axes.pipeline.schedule import Action, Schedule
from ptrain.axes.tensor.cost import scalars, traffic, words
from ptrain.costs import Collective, Estimate, Phase, State
from ptrain.derivation.estimate import Derivation, derive
from ptrain.spec.axis import Axis
from ptrain.spec.pipeline import ScheduleName
from ptrain.spec.spec import Spec
from ptrain.steps.step import Pipeline
from ptrain.timeline import Kind
from tests.pure.piped import legal
from tests.pure.pipelines import GRID, VEES, pipeline, stages_per_rank
from tests.pure.test_closed_forms_of_tensor import PLANS, peak, shape_of

LARGE = [
    (name, pipeline(ranks, per_rank, 2 * ranks * times))
    for name in ScheduleName
    for per_rank in stages_per_rank(name)
    for ranks in (5, 8)
    for times in (1, 3)
]
SIZES = [
    PipelineSize(
        schedule=name,
        ranks=size.ranks,
        stages_per_rank=size.stages_per_rank,
        microbatches=size.microbatches,
    )
    for name, size in [*GRID, *LARGE]
]
every_schedule = pytest.mark.parametrize("name", ScheduleName)
HALVES = (ScheduleName.ZERO_BUBBLE, *VEES)
ALL_IN_FLIGHT = (ScheduleName.GPIPE, ScheduleName.BFS)
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
    return schedule(size.schedule, pipeline(size.ranks, size.stages_per_rank, size.microbatches))


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


def drawn_split(stages: int, *key: object) -> list[int]:
    draw = random.Random(repr((stages, key)))
    return [draw.randrange(1, 4) for _ in range(stages)]


def step_of(derivation: Derivation) -> Pipeline:
    assert derivation.plan.pipeline is not None
    return derivation.plan.pipeline


def over(estimate: Estimate, axis: Axis, rank: int) -> dict[object, tuple[int, int]]:
    """What a rank sends over an axis in a step: calls and payload."""
    return {
        (row.key.collective, row.key.state, row.key.phase): (row.calls, row.payload_bytes)
        for row in estimate.of_rank(rank).traffic
        if row.key.axes == (axis,) and row.key.phase is not Phase.SETUP and row.calls
    }


# -------- in flight


@every_schedule
def test_chunks_in_flight_are_as_many_as_the_literature_says(name):
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
def test_a_rank_warms_up_as_the_literature_says(name):
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
        split = drawn_split(ranks * per_rank, name)
        spec = spec_of(name, ranks, split, accumulate=2 * ranks, optimizer={"clip": None})
        derivation = derive(spec)
        size = size_of(step_of(derivation), spec.batch.accumulate)
        assert (size.ranks, size.stages_per_rank) == (ranks, per_rank)
        for rank in range(ranks):
            rows = [row for row in derivation.exact.of_rank(rank).traffic if row.sent_bytes]
            assert {row.key.collective for row in rows} == {Collective.SEND}
            assert all(row.sent_bytes == row.payload_bytes for row in rows)
            assert over(derivation.exact, Axis.PP, rank) == {
                (collective, State.ACTIVATIONS, phase): (calls, calls * TOKENS * HIDDEN * 4)
                for (collective, phase), calls in crossings(size, rank).items()
            }


@pytest.mark.parametrize("loss_parallel", [True, False])
@pytest.mark.parametrize("plan", PLANS)
@every_model
def test_each_rank_sends_what_its_stages_operators_and_ends_do(model, plan, loss_parallel):
    """Over tp what the operators of its layers do; over pp, beside the boundaries, one number for
    the norm and one for overflows, and a tied head's gradient. Slices of words are unequal, but
    where logits are gathered."""
    turn = [*MODELS.values()].index(model) + PLANS.index(plan) + loss_parallel
    name, layout = (("1f1b", "fp32"), ("zbv", "bf16"), ("interleaved", "fp16"))[turn % 3]
    ranks, vocab = 2, VOCAB if loss_parallel else VOCAB + 1
    split = drawn_split(2 if name == "1f1b" else 4, plan, layout)
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
    size, shape = size_of(step, spec.batch.accumulate), shape_of(spec)
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
            shared = shared_elements(shape, size, rank, words(vocab, 2, index))
            of_pp[norm, "calls"] = calls + (shared > 0)
            of_pp[norm, "bytes"] = payload + shared * spec.precision.effective.gradients.itemsize
            for (collective, phase), number in crossings(size, rank).items():
                key = (collective, State.ACTIVATIONS, phase)
                of_pp[key, "calls"] = number
                of_pp[key, "bytes"] = number * boundary_bytes(spec, HIDDEN)
            for axis, expected in ((Axis.TP, of_tp), (Axis.PP, of_pp)):
                rows = over(derivation.exact, axis, 2 * rank + index)
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
    spec = spec_of(name, 2, drawn_split(2 * per_rank, name, tp), tp=tp, model=model)
    derivation = derive(spec)
    for rank in range(2):
        for index in range(tp):
            elements = rank_parameters(spec, shape_of(spec), step_of(derivation), rank, index)
            for state in (State.PARAMETERS, State.GRADIENTS):
                assert derivation.exact.bytes_of(state, rank * tp + index) == 4 * elements


# -------- activations


def held(derivation: Derivation) -> list[int]:
    """Bytes of activations by rank of pp."""
    exact = derivation.exact
    return [exact.bytes_of(State.ACTIVATIONS, rank) for rank in range(exact.world_size)]


def held_by(
    name: str, ranks: int, split: list[int], accumulate: int
) -> tuple[PipelineSize, int, list[int]]:
    """A pipeline's size, the bytes of a boundary, and what each rank holds."""
    spec = spec_of(name, ranks, split, accumulate=accumulate)
    derivation = derive(spec)
    size = size_of(step_of(derivation), accumulate)
    return size, boundary_bytes(spec, HIDDEN), held(derivation)


def chunks_of(split: list[int], **sections) -> list[int]:
    """Bytes of one micro-batch on each stage: what naive ranks of a stage each hold, but for the
    gradient that comes."""
    spec = spec_of("naive", len(split), split, accumulate=1, **sections)
    *others, last = held(derive(spec))
    return [size - boundary_bytes(spec, HIDDEN) for size in others] + [last]


@pytest.mark.parametrize("layout", ["fp32", "bf16"])
@every_model
def test_stages_hold_what_the_model_does_and_both_ends_of_their_boundaries(model, layout):
    split = [1, 3, 2]
    precision = {"precision": {"layout": layout}}
    spec = legal(
        {"tp": 1}, model=model | {"layers": 6}, batch={"sequence": TOKENS, "accumulate": 1},
        **precision,
    )  # fmt: skip
    itemsize = spec.precision.effective.parameters.itemsize
    logits, boundary = TOKENS * VOCAB * itemsize, boundary_bytes(spec, HIDDEN)
    more = kept_at_boundaries(3, boundary, logits, is_wide=layout == "fp32")
    whole = derive(spec).exact.bytes_of(State.ACTIVATIONS)
    assert sum(chunks_of(split, model=model, **precision)) == whole + more


EXACT = [name for name in ScheduleName if name not in HALVES]


@pytest.mark.parametrize("is_even", [True, False])
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("name", EXACT)
def test_a_rank_holds_its_chunks_in_flight_and_what_crosses(name, ranks, is_even):
    """1f1b: micro-batches that fill the stages, and those that do not come back before all went;
    interleaved: rounds of p, and of a few more."""
    per_rank = stages_per_rank(name)[-1] if is_even else stages_per_rank(name)[0]
    stages = ranks * per_rank
    split = [2] * stages if is_even else drawn_split(stages, name, ranks)
    chunks = chunks_of(split)
    for accumulate in (ranks, ranks + 1, 2 * ranks - 1, 4 * ranks):
        size, boundary, bytes_held = held_by(name, ranks, split, accumulate)
        for rank, most in enumerate(bytes_held):
            of_rank = [chunks[stage] for stage in stages_of(size, rank)]
            closed = held_bytes(size, rank, of_rank, boundary)
            is_unknown = name == "interleaved" and per_rank > 1 and rank == ranks - 1
            assert closed == (None if is_unknown else most), (accumulate, rank)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_interleaved_chunks_of_any_sizes_hold_no_more_than_a_rounds_inputs_beside(ranks):
    for per_rank in (2, 3):
        split = drawn_split(ranks * per_rank, ranks)
        chunks = chunks_of(split)
        for accumulate in (ranks, 2 * ranks - 1, 3 * ranks):
            size, boundary, bytes_held = held_by("interleaved", ranks, split, accumulate)
            for rank, most in enumerate(bytes_held):
                of_rank = [chunks[stage] for stage in stages_of(size, rank)]
                early = most - least_held_bytes(size, rank, of_rank, boundary)
                assert 0 <= early <= round_size(size) * boundary, (accumulate, rank)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", [name for name in ScheduleName if name not in ALL_IN_FLIGHT])
def test_a_further_micro_batch_leaves_what_it_sent_and_its_loss(name, ranks):
    for per_rank in {stages_per_rank(name)[0], stages_per_rank(name)[-1]}:
        split = drawn_split(ranks * per_rank, name, ranks)
        chunks = chunks_of(split)
        few, many = (
            derive(spec_of(name, ranks, split, accumulate=times * ranks)) for times in (4, 6)
        )
        size, boundary = size_of(step_of(few), 4 * ranks), TOKENS * HIDDEN * 4
        for rank, (less, more) in enumerate(zip(held(few), held(many), strict=True)):
            grown = 2 * ranks * held_growth(size, rank, boundary)
            assert more - less == grown, rank
            for phase in (Phase.FORWARD, Phase.BACKWARD):
                assert peak(many.exact, phase, rank) - peak(few.exact, phase, rank) == grown
            of_rank = [chunks[stage] for stage in stages_of(size, rank)]
            assert least_held_bytes(size, rank, of_rank, boundary) <= less


def long_batch(accumulate: int) -> dict[str, int]:
    """Micro-batches of so many tokens that a chunk is more than its stage's gradients."""
    return {"sequence": 256, "accumulate": accumulate}


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_peaks_are_those_of_one_micro_batch_and_what_is_in_flight_beside_it(name, ranks):
    split = [2] * ranks
    of_one = spec_of("naive", ranks, split, batch=long_batch(1 if name == "gpipe" else 2))
    alone = derive(of_one)
    boundary = boundary_bytes(of_one, HIDDEN)
    *others, last = held(alone)
    chunks = [*(size - boundary for size in others), last]
    for accumulate in (ranks, ranks + 1, 2 * ranks, 3 * ranks):
        derivation = derive(spec_of(name, ranks, split, batch=long_batch(accumulate)))
        size = size_of(step_of(derivation), accumulate)
        for rank in range(ranks):
            for phase in (Phase.FORWARD, Phase.BACKWARD):
                beyond = peak_beyond_naive(size, rank, phase, chunks[rank], boundary)
                is_filled = name == "gpipe" or accumulate > ranks - rank
                assert (beyond is not None) is is_filled
                if beyond is not None:
                    more = peak(derivation.exact, phase, rank) - peak(alone.exact, phase, rank)
                    assert more == beyond, (accumulate, rank, phase)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_gpipe_peaks_as_it_begins_a_backward_pass_before_or_beside_gradients(ranks):
    """Stages of more parameters than activations: the second backward pass has one chunk less, its
    gradients, and what the first one leaves to the step's end."""
    split = [2] * ranks
    chunks, boundary = chunks_of(split), TOKENS * HIDDEN * 4
    alone = [derive(spec_of("naive", ranks, split, accumulate=times)).exact for times in (1, 2)]
    for accumulate in (1, 2, 2 * ranks):
        derivation = derive(spec_of("gpipe", ranks, split, accumulate=accumulate))
        size = size_of(step_of(derivation), accumulate)
        for rank in range(ranks):
            begins = [
                peak(alone[done > 0], Phase.BACKWARD, rank)
                - alone[0].bytes_of(State.ACTIVATIONS, rank)
                + held_behind(size, rank, [chunks[rank]], boundary, done)
                for done in range(accumulate)
            ]
            assert accumulate == 1 or max(begins) > begins[0]
            assert peak(derivation.exact, Phase.BACKWARD, rank) == max(begins), rank


@pytest.mark.parametrize("name", HALVES)
def test_what_is_held_between_two_halves_has_no_closed_form(name):
    size = sizes(name)[-1]
    chunks = [10] * size.stages_per_rank
    assert {held_bytes(size, rank, chunks, 1) for rank in range(size.ranks)} == {None}


@pytest.mark.parametrize("name", ALL_IN_FLIGHT)
def test_what_grows_with_all_micro_batches_is_not_their_sends(name):
    with pytest.raises(ValueError, match="all micro-batches in flight"):
        held_growth(sizes(name)[-1], 0, 1)
