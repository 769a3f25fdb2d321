"""Peaks by replay, on timelines small enough to follow by hand."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from ptrain.cost import Phase, State
from ptrain.derivation.estimate import derive
from ptrain.facts.model import ModelFacts
from ptrain.facts.parameters import facts as facts_of
from ptrain.plan.lower import lower
from ptrain.spec.dials import GradientSync, ReduceScatterVia, SyncPolicy
from ptrain.spec.model import ModelShape
from ptrain.spec.placement import Axis
from ptrain.spec.precision import ZERO16
from ptrain.spec.spec import Spec
from ptrain.timeline import Boundary, Complete, Item, Mark, Run, Timeline, run
from tests.pure.build import BY_HAND, GATHERED, WHOLE, ZERO_2, make_facts, make_spec
from tests.pure.replayed_steps import flight, resident, transient

SAVED, INSIDE = 1000, 5000  # bytes that each unit's forward leaves, and needs while it runs
ROOT = 2  # the unit after the two blocks


def small(numel: int = 100) -> ModelFacts:
    """Two blocks and a root, one tensor of `numel` elements each; gradients arrive backwards."""
    facts = make_facts(((numel,),), ((numel,),), ((numel,),))
    inner = [Run(INSIDE, SAVED)]
    forward: list[Item] = [Boundary(Mark.ENTER, ROOT)]
    for block in (0, 1):
        forward += [Boundary(Mark.ENTER, block), *inner, Boundary(Mark.LEAVE, block)]
    forward += [*inner, Boundary(Mark.LEAVE, ROOT)]
    gradient = 4 * numel
    backward: list[Item] = [Boundary(Mark.PRE_BACKWARD, ROOT), Run(gradient, gradient - SAVED)]
    for block in (1, 0):
        backward += [
            Boundary(Mark.PRE_BACKWARD, block),
            Run(gradient, gradient - SAVED),
            Complete(f"blocks.{block}.0", gradient),
            Boundary(Mark.POST_BACKWARD, block),
        ]
    backward += [
        Run(gradient, gradient),
        Complete("root.0", gradient),
        Run(0, -gradient),
        Boundary(Mark.POST_BACKWARD, ROOT),
    ]
    return replace(facts, timeline=Timeline(forward=tuple(forward), backward=tuple(backward)))


def peaks(spec: Spec, facts: ModelFacts, rank: int = 0) -> dict[Phase, int]:
    """Return the peaks above memory that lives for the full step."""
    plan = lower(spec, facts)
    base = sum(
        row.device_bytes
        for row in resident(spec, plan, facts)
        if row.rank == rank and row.state is not State.GRADIENTS
    )
    rows = flight(spec, facts).peaks
    return {row.phase: row.device_bytes - base for row in rows if row.rank == rank}


def test_a_segment_is_its_highest_level_and_its_remainder():
    assert run([5, -3, 4, -6]) == Run(6, 0)
    assert run([-3, 2]) == Run(0, -1)
    assert run([]) is None


def test_two_runs_after_one_another_are_one():
    assert run([5, -3]).followed_by(run([4, -6])) == run([5, -3, 4, -6])


def test_one_device_keeps_activations_and_gradients():
    spec = make_spec({}, clip=None, model=BY_HAND)
    found = peaks(spec, small())
    assert found[Phase.FORWARD] == 2 * SAVED + INSIDE
    assert found[Phase.BACKWARD] == 3 * SAVED + 400
    assert found[Phase.UPDATE] == 3 * 400


@pytest.mark.parametrize(
    ("mesh", "buffer"),
    [({}, 0), ({Axis.DP_REPLICATE: (2, WHOLE)}, 0), ({Axis.DP_SHARD: (2, ZERO_2)}, 400)],
)
def test_a_copied_gradient_coexists_with_its_source(mesh, buffer):
    """The copy is made 700 bytes above where it is complete, and is all that happens; a flat unit's
    buffer, to which it is written, is there before."""
    facts = small()
    backward: list[Item] = [Boundary(Mark.PRE_BACKWARD, ROOT)]
    backward += [Run(700, 0), Complete("root.0", 400, cloned=True, beside=700), Run(0, 0)]
    backward += [Boundary(Mark.POST_BACKWARD, ROOT)]
    facts = replace(facts, timeline=Timeline(forward=_quiet(facts), backward=tuple(backward)))
    spec = make_spec(mesh, clip=None, model=BY_HAND)
    quiet = peaks(spec, facts)[Phase.FORWARD]
    assert peaks(spec, facts)[Phase.BACKWARD] == quiet + buffer + 700 + 400


def test_later_micro_batches_add_to_gradients_that_live():
    spec = make_spec({}, clip=None, accumulate=2, model=BY_HAND)
    found = peaks(spec, small())
    assert found[Phase.FORWARD] == 3 * 400 + 2 * SAVED + INSIDE
    assert found[Phase.BACKWARD] == 3 * 400 + 3 * SAVED + 400
    assert found[Phase.UPDATE] == 3 * 400


def test_buckets_live_always_and_take_over_each_gradient():
    spec = make_spec({Axis.DP_REPLICATE: (2, WHOLE)}, clip=None, model=BY_HAND)
    found = peaks(spec, small())
    assert found[Phase.FORWARD] == 3 * 400 + 2 * SAVED + INSIDE
    assert found[Phase.UPDATE] == 3 * 400


def test_a_gathered_unit_is_a_buffer_and_a_copy_in_addition_to_the_root():
    """In forward: the root's 400 bytes, this block's copy and buffer, and for a moment the buffer
    of the block before; activations are kept small here."""
    spec = make_spec({Axis.DP_SHARD: (2, GATHERED)}, clip=None, model=BY_HAND)
    facts = small()
    assert facts.timeline is not None
    facts = replace(facts, timeline=facts.timeline._replace(forward=_quiet(facts)))
    assert peaks(spec, facts)[Phase.FORWARD] == 4 * 400


def _quiet(facts: ModelFacts) -> tuple[Item, ...]:
    """The boundaries of forward, with nothing between them."""
    assert facts.timeline is not None
    return tuple(item for item in facts.timeline.forward if isinstance(item, Boundary))


def test_backward_holds_the_next_gather_and_the_last_reductions_input():
    """With nothing but gradients in the timeline, the highest of 400-byte pieces: root, the block
    itself (or, once it is resharded, the reduction's input), the other block's buffer and the
    gradient; and the result of the reduction, half a piece."""
    spec = make_spec({Axis.DP_SHARD: (2, GATHERED)}, clip=None, model=BY_HAND)
    facts = small()
    backward: list[Item] = [Boundary(Mark.PRE_BACKWARD, ROOT)]
    for block in (1, 0):
        backward += [
            Boundary(Mark.PRE_BACKWARD, block),
            Run(400, 400),
            Complete(f"blocks.{block}.0", 400),
            Boundary(Mark.POST_BACKWARD, block),
        ]
    backward += [Run(400, 400), Complete("root.0", 400), Boundary(Mark.POST_BACKWARD, ROOT)]
    facts = replace(facts, timeline=Timeline(forward=_quiet(facts), backward=tuple(backward)))
    assert peaks(spec, facts)[Phase.BACKWARD] == 4 * 400 + 200
    assert peaks(spec, facts)[Phase.UPDATE] == 3 * 200


def test_an_exchange_needs_one_more_buffer_than_the_backends_reduction():
    native = make_spec({Axis.DP_SHARD: (2, ZERO_2)}, clip=None, model=BY_HAND)
    exchanged = replace(native, reduce_scatter=ReduceScatterVia.ALL_TO_ALL)
    facts = small(numel=4000)
    more = peaks(exchanged, facts)[Phase.BACKWARD] - peaks(native, facts)[Phase.BACKWARD]
    assert 0 < more <= 4 * 4000


def test_a_model_kept_gathered_after_forward_is_transient_at_its_end():
    kept = SyncPolicy(reshard_after_forward=False)
    facts = small()
    default = make_spec({Axis.DP_SHARD: (2, GATHERED)}, model=BY_HAND)
    assert transient(flight(default, facts)) == 0
    assert transient(flight(replace(default, sync=kept), facts)) == 3 * 400


def test_unreduced_gradients_are_whole_until_the_last_micro_batch():
    mesh = {Axis.DP_SHARD: (2, GATHERED)}
    every = make_spec(mesh, accumulate=4, clip=None, model=BY_HAND)
    last = replace(every, sync=SyncPolicy(gradients=GradientSync.LAST))
    facts = small()
    difference = peaks(last, facts)[Phase.FORWARD] - peaks(every, facts)[Phase.FORWARD]
    assert difference == 3 * 400 - 3 * 200


def test_many_micro_batches_peak_as_three_do():
    for mesh in ({}, {Axis.DP_SHARD: (2, GATHERED)}, {Axis.DP_SHARD: (2, ZERO_2)}):
        facts = small()
        three, many = (
            peaks(make_spec(mesh, accumulate=count, model=BY_HAND), facts) for count in (3, 100)
        )
        assert three == many


def test_a_master_copy_takes_its_gradients_one_unit_at_a_time():
    spec = make_spec({}, layout=ZERO16, clip=None, model=BY_HAND)
    facts = small()
    assert peaks(spec, facts)[Phase.UPDATE] == 3 * 400 + 100 * 4


def test_the_norm_takes_two_scalars_per_tensor_at_most_and_leaves_one():
    clipped = make_spec({}, clip=1.0, model=BY_HAND)
    free = make_spec({}, clip=None, model=BY_HAND)
    facts = small()
    more = peaks(clipped, facts)[Phase.UPDATE] - peaks(free, facts)[Phase.UPDATE]
    assert more == 4 * max(2 * 3, 3 + 1)


def test_ranks_differ_by_the_rows_that_they_hold():
    spec = make_spec({Axis.DP_SHARD: (2, GATHERED)}, layout=ZERO16, model=BY_HAND)
    facts = small(numel=101)
    first, second = (
        next(row.device_bytes for row in flight(spec, facts).peaks if row.rank == rank)
        for rank in (0, 1)
    )
    assert first - second == 3 * 12  # one row less in each of three tensors, 12 bytes of state


def test_a_foreign_model_without_a_trace_has_no_peak():
    spec = make_spec({}, model=BY_HAND)
    exact = derive(spec, make_facts(((4, 4),), ((4,),))).exact
    assert exact.peak_bytes() is None and "trace" in exact.undefined["peak"]


def test_80_layers_replay_in_at_most_30_milliseconds():
    spec = make_spec(
        {Axis.DP_SHARD: (8, GATHERED)}, layout=ZERO16, accumulate=8, sequence=4096, micro=1
    )
    assert isinstance(spec.model, ModelShape)
    model = replace(spec.model, layers=80, hidden=8192, heads=64, kv_heads=8, ffn=28672)
    spec = replace(spec, model=model)
    facts = facts_of(model, 4096)
    best = float("inf")
    for _ in range(5):
        start = time.process_time()
        flight(spec, facts)
        best = min(best, time.process_time() - start)
    assert best <= 0.030
