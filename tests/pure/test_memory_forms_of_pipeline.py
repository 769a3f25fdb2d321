"""The closed forms of pipeline activations and peaks, compared with the exact column and the ranks'
instructions."""

from __future__ import annotations

import pytest

from ptrain.axes.pipeline.cost import PipelineSize, round_size, stages_of
from ptrain.axes.pipeline.stage_facts import (
    Message,
    Receive,
    Release,
    Send,
    input_message,
    training_instructions,
)
from ptrain.cost import Phase, State
from ptrain.derivation.estimate import Derivation, derive
from ptrain.spec.pipeline import ScheduleName
from ptrain.timeline import Kind
from tests.oracles.pipeline import (
    boundary_bytes,
    chunks_between,
    held_behind,
    held_bytes,
    kept_at_boundaries,
    least_held_bytes,
    peak_beyond_naive,
)
from tests.pure.pipeline_specs import legal
from tests.pure.pipelines import VEES, size_of_step, stages_per_rank
from tests.pure.test_closed_forms_of_pipeline import (
    HIDDEN,
    TOKENS,
    VOCAB,
    every_model,
    every_schedule,
    random_split,
    schedule_of,
    sizes,
    spec_of,
    step_of,
)
from tests.pure.test_closed_forms_of_tensor import peak

HALVES = (ScheduleName.ZERO_BUBBLE, *VEES)
ALL_IN_FLIGHT = (ScheduleName.GPIPE, ScheduleName.BFS)


def held_by_rank(derivation: Derivation) -> list[int]:
    """Bytes of activations by rank of pp."""
    exact = derivation.exact
    return [exact.bytes_of(State.ACTIVATIONS, rank) for rank in range(exact.world_size)]


def held_by(
    name: str, ranks: int, split: list[int], accumulate: int
) -> tuple[PipelineSize, int, list[int]]:
    """A pipeline's size, the bytes of a boundary, and each rank's activations."""
    spec = spec_of(name, ranks, split, accumulate=accumulate)
    derivation = derive(spec)
    size = size_of_step(step_of(derivation), accumulate)
    return size, boundary_bytes(spec, HIDDEN), held_by_rank(derivation)


def chunks_of(split: list[int], **sections) -> list[int]:
    """Bytes of one micro-batch on each stage: what naive ranks of a stage each hold, but for the
    gradient that comes."""
    spec = spec_of("naive", len(split), split, accumulate=1, **sections)
    *others, last = held_by_rank(derive(spec))
    return [size - boundary_bytes(spec, HIDDEN) for size in others] + [last]


@pytest.mark.parametrize("layout", ["fp32", "bf16"])
@every_model
def test_stages_hold_the_model_and_both_ends_of_their_boundaries(model, layout):
    split = [1, 3, 2]
    precision = {"precision": {"layout": layout}}
    spec = legal(
        {"tp": 1}, model=model | {"layers": 6}, batch={"sequence": TOKENS, "accumulate": 1},
        **precision,
    )  # fmt: skip
    itemsize = spec.precision.effective_layout.parameters.itemsize
    logits, boundary = TOKENS * VOCAB * itemsize, boundary_bytes(spec, HIDDEN)
    more = kept_at_boundaries(3, boundary, logits, is_wide=layout == "fp32")
    whole = derive(spec).exact.bytes_of(State.ACTIVATIONS)
    assert sum(chunks_of(split, model=model, **precision)) == whole + more


EXACT = [name for name in ScheduleName if name not in HALVES]


def is_known(size: PipelineSize, rank: int) -> bool:
    """Whether what a rank of equal chunks holds has a closed form: the first and the last rank of
    interleaved stages are neighbours, too."""
    is_round = size.schedule is ScheduleName.INTERLEAVED and size.stages_per_rank > 1
    return not (is_round and rank in (0, size.ranks - 1))


@pytest.mark.parametrize("is_even", [True, False])
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("name", EXACT)
def test_a_rank_holds_its_chunks_in_flight_and_boundary_tensors(name, ranks, is_even):
    """1f1b: micro-batches that fill the stages, and those that do not come back before all went;
    interleaved: rounds of p, and of a few more."""
    per_rank = stages_per_rank(name)[-1] if is_even else stages_per_rank(name)[0]
    stages = ranks * per_rank
    split = [2] * stages if is_even else random_split(stages, name, ranks)
    chunks = chunks_of(split)
    for accumulate in (ranks, ranks + 1, 2 * ranks - 1, 4 * ranks):
        size, boundary, bytes_held = held_by(name, ranks, split, accumulate)
        for rank, most in enumerate(bytes_held):
            of_rank = [chunks[stage] for stage in stages_of(size, rank)]
            closed = held_bytes(size, rank, of_rank, boundary)
            assert closed == (most if is_known(size, rank) else None), (accumulate, rank)


def most_listed(size: PipelineSize, rank: int, chunk: int) -> int:
    """The most that a rank holds as a backward pass begins, by its instructions: of a chunk so much
    and of a message 1. What a forward takes and gives is its chunk's."""
    instructions = training_instructions(schedule_of(size))[rank]
    came, went = set[Message | None](), set[Message]()
    in_flight = most = 0
    for instruction in instructions:
        match instruction:
            case Receive(message):
                came.add(message)
            case Send(message):
                went |= {message} if message.phase is Phase.BACKWARD else set()
            case Release(message):
                went.discard(message)
            case action:
                if action.kind is Kind.BACKWARD:
                    most = max(most, in_flight * chunk + len(came) + len(went))
                in_flight += 1 if action.kind is Kind.FORWARD else -1
                came.discard(input_message(action, size.stages))
    assert not came | went and not in_flight
    return most


@pytest.mark.parametrize("name", EXACT)
def test_between_two_ranks_lie_the_chunks_that_the_one_before_has_more_in_flight(name):
    for size in [size for size in sizes(name) if size.ranks > 1]:
        for rank in range(size.ranks):
            chunks, most = [100] * size.stages_per_rank, most_listed(size, rank, 100)
            closed = held_bytes(size, rank, chunks, 1)
            assert closed == (most if is_known(size, rank) else None), (size, rank)
            early = most - least_held_bytes(size, rank, chunks, 1)
            assert 0 <= early <= round_size(size), (size, rank)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_interleaved_chunks_of_any_size_add_at_most_one_rounds_messages(ranks):
    """Between two ranks that are neighbours only once, the closed form is an upper bound."""
    for per_rank in (2, 3):
        split = random_split(ranks * per_rank, ranks)
        chunks = chunks_of(split)
        for accumulate in (ranks, 2 * ranks - 1, 3 * ranks):
            size, boundary, bytes_held = held_by("interleaved", ranks, split, accumulate)
            for rank, most in enumerate(bytes_held):
                of_rank = [chunks[stage] for stage in stages_of(size, rank)]
                early = most - least_held_bytes(size, rank, of_rank, boundary)
                is_inner = is_known(size, rank)
                limit = chunks_between(size, rank) if is_inner else round_size(size)
                assert 0 <= early <= limit * boundary, (accumulate, rank)


@pytest.mark.parametrize("ranks", [2, 3])
@every_schedule
def test_a_further_micro_batch_leaves_nothing_when_it_has_gone(name, ranks):
    """What is held grows with the chunks in flight alone."""
    for per_rank in {stages_per_rank(name)[0], stages_per_rank(name)[-1]}:
        split = random_split(ranks * per_rank, name, ranks)
        chunks = chunks_of(split)
        few, many = (
            derive(spec_of(name, ranks, split, accumulate=times * ranks)) for times in (4, 6)
        )
        size, boundary = size_of_step(step_of(few), 4 * ranks), TOKENS * HIDDEN * 4
        for rank, (less, more) in enumerate(
            zip(held_by_rank(few), held_by_rank(many), strict=True)
        ):
            of_rank = [chunks[stage] for stage in stages_of(size, rank)]
            grown = 2 * ranks * sum(of_rank) if name in ALL_IN_FLIGHT else 0
            assert more - less == grown, rank
            for phase in (Phase.FORWARD, Phase.BACKWARD):
                assert peak(many.exact, phase, rank) - peak(few.exact, phase, rank) == grown
            assert least_held_bytes(size, rank, of_rank, boundary) <= less


def long_batch(accumulate: int) -> dict[str, int]:
    """Micro-batches of so many tokens that a chunk is more than its stage's gradients."""
    return {"sequence": 256, "accumulate": accumulate}


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_peaks_equal_one_micro_batch_plus_the_chunks_in_flight(name, ranks):
    split = [2] * ranks
    of_one = spec_of("naive", ranks, split, batch=long_batch(1 if name == "gpipe" else 2))
    alone = derive(of_one)
    boundary = boundary_bytes(of_one, HIDDEN)
    *others, last = held_by_rank(alone)
    chunks = [*(size - boundary for size in others), last]
    for accumulate in (ranks, ranks + 1, 2 * ranks, 3 * ranks):
        derivation = derive(spec_of(name, ranks, split, batch=long_batch(accumulate)))
        size = size_of_step(step_of(derivation), accumulate)
        for rank in range(ranks):
            for phase in (Phase.FORWARD, Phase.BACKWARD):
                beyond = peak_beyond_naive(size, rank, chunks[rank], boundary)
                is_filled = name == "gpipe" or accumulate > ranks - rank
                assert (beyond is not None) is is_filled
                if beyond is not None:
                    more = peak(derivation.exact, phase, rank) - peak(alone.exact, phase, rank)
                    assert more == beyond, (accumulate, rank, phase)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_gpipe_peaks_at_the_start_of_a_backward_pass(ranks):
    """Stages of more parameters than activations: the second backward pass has one chunk less, its
    gradients, and the gradient that the first one sent."""
    split = [2] * ranks
    chunks, boundary = chunks_of(split), TOKENS * HIDDEN * 4
    alone = [derive(spec_of("naive", ranks, split, accumulate=times)).exact for times in (1, 2)]
    for accumulate in (1, 2, 2 * ranks):
        derivation = derive(spec_of("gpipe", ranks, split, accumulate=accumulate))
        size = size_of_step(step_of(derivation), accumulate)
        for rank in range(ranks):
            begins = [
                peak(alone[done > 0], Phase.BACKWARD, rank)
                - alone[0].bytes_of(State.ACTIVATIONS, rank)
                + held_behind(size, rank, chunks[rank], boundary, done)
                for done in range(accumulate)
            ]
            assert accumulate == 1 or max(begins) > begins[0]
            assert peak(derivation.exact, Phase.BACKWARD, rank) == max(begins), rank


@pytest.mark.parametrize("name", HALVES)
def test_memory_between_two_half_passes_has_no_closed_form(name):
    size = sizes(name)[-1]
    chunks = [10] * size.stages_per_rank
    assert {held_bytes(size, rank, chunks, 1) for rank in range(size.ranks)} == {None}
