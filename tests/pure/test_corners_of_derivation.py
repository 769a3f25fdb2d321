"""Corner cases of the exact column that no other test covers."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from types import SimpleNamespace

from ptrain.axes.data.cuts import ShardLayout
from ptrain.cost import Collective, Column, Estimate, Phase, State, Traffic, TrafficKey
from ptrain.derivation import interconnect
from ptrain.derivation.estimate import derive, facts_from_shape
from ptrain.derivation.ghosts.table import make_wrapping
from ptrain.derivation.ghosts.wrapping import clip_bytes, micro_batches
from ptrain.derivation.interconnect import gloo_factor
from ptrain.derivation.layers import is_tabulated
from ptrain.derivation.tape import Scene, Tape
from ptrain.plan.lower import lower
from ptrain.runtime.ghost import GhostRuntime
from ptrain.spec.dials import ReduceScatterVia
from ptrain.spec.load import load
from ptrain.spec.placement import Axis, Tier
from ptrain.spec.precision import DType
from ptrain.spec.spec import Spec
from ptrain.steps.step import LONG_NORM, NORM_ROW
from ptrain.timeline import Boundary, Mark, Timeline
from tests.pure.build import make_facts, make_spec, tuple_of

FACTS = make_facts(((4, 6), (3,)), ((3, 5),), ((7,),))
SHARD, REPLICATE = Axis.DP_SHARD, Axis.DP_REPLICATE


def load_spec(**changes: object) -> Spec:
    base = {
        "model": {"preset": "llama-tiny"},
        "mesh": {"dp_shard": 2},
        "placement": {"dp_shard": "S*,S,S,R"},
        "batch": {"global": 8, "micro": 2, "sequence": 32},
    }
    return load(base | changes).spec


def estimate(*collectives: Collective) -> Estimate:
    rows = [
        Traffic(
            key=TrafficKey(
                axes=("dp",), collective=each, state=State.GRADIENTS, phase=Phase.BACKWARD
            ),
            calls=1,
            payload_bytes=8,
            sent_bytes=6,  # over four ranks
        )
        for each in collectives
    ]
    return Estimate(column=Column.EXACT, world_size=2, traffic=tuple(rows))


def test_gloo_doubles_only_a_reduce_scatter_on_the_wire():
    assert {Collective.REDUCE_SCATTER: Fraction(2)} == interconnect.GLOO
    assert interconnect.TOLERANCE == 0.001
    (row,) = estimate(Collective.REDUCE_SCATTER).traffic
    assert gloo_factor(row) == 2
    assert gloo_factor(replace(row, key=replace(row.key, via="all_to_all"))) == 1


def test_on_the_wire_two_ranks_exchange_halves_of_gradients():
    (row,) = estimate(Collective.REDUCE_SCATTER).traffic
    assert gloo_factor(pair := replace(row, sent_bytes=4)) == 1
    assert gloo_factor(replace(pair, key=replace(row.key, state=State.ACTIVATIONS))) == 2
    odd = replace(row, calls=3, payload_bytes=30)
    assert gloo_factor(replace(odd, sent_bytes=15 + 1)) == 1  # each call's share is rounded up
    assert gloo_factor(replace(odd, sent_bytes=20)) == 2  # over three ranks


def test_wire_factors_name_deviations_from_the_ring_model():
    told = {
        (Collective.ALL_GATHER,): "gloo: 1; mean over ranks",
        (Collective.REDUCE_SCATTER, Collective.ALL_REDUCE): (
            "gloo: reduce_scatter 2, all others 1; mean over ranks"
        ),
        (Collective.BROADCAST,): (
            "gloo: broadcast 1 (a tree: ranks differ), all others 1; mean over ranks"
        ),
    }
    assert {each: interconnect._factor(estimate(*each), ("dp",)) for each in told} == told


def test_facts_hash_equally_with_and_without_traced_stages():
    traced = replace(FACTS, stage_passes=([],))
    assert hash(traced) == hash(FACTS) and traced != FACTS
    assert FACTS.stage_passes == ()


def test_first_and_last_micro_batches_are_distinguished():
    assert list(micro_batches(1)) == [(True, True, 1)]
    assert list(micro_batches(2)) == [(True, False, 1), (False, True, 1)]
    assert list(micro_batches(5)) == [(True, False, 1), (False, False, 3), (False, True, 1)]


def test_units_are_ordered_by_the_requested_event():
    marks = [(Mark.ENTER, 2), (Mark.ENTER, 0), (Mark.LEAVE, 0), (Mark.ENTER, 1), (Mark.LEAVE, 1)]
    forward = tuple(Boundary(mark, unit) for mark, unit in [*marks, (Mark.LEAVE, 2)])
    spec = make_spec({})
    plan = lower(spec, FACTS)
    timeline = Timeline(forward=forward, backward=())
    scene = Scene(tape=Tape(), spec=spec, facts=FACTS, plan=plan, timeline=timeline)
    assert (scene.order(Mark.ENTER), scene.order(Mark.LEAVE)) == ((2, 0, 1), (0, 1, 2))


def test_norms_of_long_tensors_take_whole_bytes():
    spec = make_spec({})
    plan = lower(spec, FACTS)
    scene = SimpleNamespace(spec=replace(spec, device="cpu"), plan=plan)
    at_once, stays = clip_bytes(scene, [[LONG_NORM + NORM_ROW // 2 + 1, 7]])
    norms = LONG_NORM // NORM_ROW + 1 + 1  # of rows, of what is left, of the short one
    assert at_once == 4 * (2 * norms + 1)
    assert type(at_once) is int and stays == 4


def test_flat_buffers_are_those_of_rank_0():
    spec = make_spec({SHARD: (2, tuple_of("R,S,S"))})
    plan = lower(spec, FACTS)
    rows = list(make_wrapping(spec, plan, FACTS).footprints(0))
    assert [(row.rank, row.state.value) for row in rows] == [
        (0, "parameters"),
        (0, "optimizer"),
        (0, "gradients"),
    ]


def test_a_part_of_a_buffer_is_a_view_if_no_other_data_precedes_it():
    room = GhostRuntime(Tape(), {REPLICATE: 2, SHARD: 2}, {})
    cuts = ShardLayout(room, 64, (REPLICATE, SHARD), ReduceScatterVia.NATIVE)
    seen = {
        ((), (SHARD,)): True,
        ((), (REPLICATE,)): False,
        ((SHARD,), (REPLICATE,)): True,
        ((SHARD,), (SHARD, REPLICATE)): True,
        ((REPLICATE,), (SHARD,)): True,
        ((SHARD,), ()): True,
        ((), ()): True,
    }
    wholes = {
        had: room.new_empty(cuts.shard_numel(had), DType.FP32, Tier.DEVICE, State.OTHER)
        for had, _ in seen
    }
    parts = {(had, wanted): cuts.take_part(wholes[had], had, wanted) for had, wanted in seen}
    assert {key: part.storage is wholes[key[0]].storage for key, part in parts.items()} == seen


def test_the_fused_loss_in_fp16_has_no_table_and_is_read_from_the_model():
    fused = {"loss": {"kind": "fused", "chunk": 16}}
    half = load_spec(precision={"layout": "fp16"}, **fused)
    assert (is_tabulated(half), facts_from_shape(half)) == (False, None)
    for layout in ("fp32", "zero16"):
        known = load_spec(precision={"layout": layout}, **fused)
        assert is_tabulated(known) and facts_from_shape(known) is not None
    assert is_tabulated(load_spec(precision={"layout": "fp16"}))


def test_samples_of_one_token_are_in_no_table_and_are_traced():
    """Their targets are a contiguous column: the loss copies nothing."""
    column = load_spec(batch={"global": 8, "micro": 2, "sequence": 1})
    assert (is_tabulated(column), facts_from_shape(column)) == (False, None)
    for micro, sequence in ((1, 1), (2, 2)):
        known = load_spec(batch={"global": 8, "micro": micro, "sequence": sequence})
        assert is_tabulated(known)


def test_every_rank_has_its_operations():
    rows = derive(load_spec()).exact.operations
    assert [row.rank for row in rows] == [0, 1]


def test_a_norm_reduced_only_within_tp_moves_to_the_device_and_back():
    """Gradients are gathered for a full update, so no data axis has a part of the norm."""
    placements = {"dp_replicate": "R,R,S@file,R", "tp": "S,S,S,R"}
    of_degree = {
        degree: load_spec(mesh={"dp_replicate": 2, "tp": degree}, placement=placements)
        for degree in (1, 2)
    }
    for degree, spec in of_degree.items():
        assert spec.optimizer.clip is not None
        unclipped = replace(spec, optimizer=replace(spec.optimizer, clip=None))
        rows, without = (_copied_scalars(variant) for variant in (spec, unclipped))
        assert {kind: rows[kind] - without[kind] for kind in rows} == {
            Collective.HOST_TO_DEVICE: int(degree > 1),
            Collective.DEVICE_TO_HOST: int(degree > 1),
        }


def _copied_scalars(spec: Spec) -> dict[Collective, int]:
    """Calls that copy gradients, or scalars of theirs, in the update."""
    wanted = (Collective.HOST_TO_DEVICE, Collective.DEVICE_TO_HOST)
    return {
        row.key.collective: row.calls
        for row in derive(spec).exact.traffic
        if row.key.collective in wanted and row.key.state is State.GRADIENTS
    }


def test_rows_that_do_not_divide_and_states_gathered_for_the_update_are_noted():
    notes = " ".join(derive(load_spec()).exact.notes)  # 259 rows of the embedding on 2 ranks
    assert "ceil(d0 / 2) on every rank: 0.03% more than in the model" in notes
    even = load_spec(model={"preset": "llama-tiny", "vocab": 260})
    assert "cut by rows" not in " ".join(derive(even).exact.notes)
    gathered = " ".join(derive(load_spec(placement={"dp_shard": "R,S*,R,R"})).exact.notes)
    assert "optimizer state is all-gathered over dp_shard" in gathered
