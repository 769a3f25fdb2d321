"""Stages of a model known only by its facts, and the traffic of a tied tensor's reduction."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ptrain.axes.pipeline.stage_facts import stage_facts, stage_roles, stages_of
from ptrain.cost import Collective, State, Traffic
from ptrain.derivation.estimate import derive
from ptrain.facts.model import ModelFacts, TensorFacts, UnitFacts, passes_of_stage
from ptrain.facts.stages import Chain, Ends, Stage
from ptrain.spec.model import HuggingFaceModel
from ptrain.spec.placement import Role
from ptrain.spec.spec import Spec
from ptrain.timeline import Boundary, Complete, Item, Kind, Mark, Run
from tests.pure.pipeline_specs import SHAPE, legal

HIDDEN, VOCAB, LAYERS, FP32 = 12, 50, 4, 4
TABLE, HEAD = "base.table.weight", "head.weight"


def facts(*, tied: bool = False) -> ModelFacts:
    layers = tuple(f"base.h.{index}" for index in range(LAYERS))
    ends = Ends(front=("base.table",), behind=("base.last", "head"))
    table = TensorFacts(name=TABLE, shape=(VOCAB, HIDDEN))
    behind = [TensorFacts(name="base.last.weight", shape=(HIDDEN,))]
    if not tied:
        behind.append(TensorFacts(name=HEAD, shape=(VOCAB, HIDDEN)))
    units = tuple(
        UnitFacts(modules=(name,), tensors=(TensorFacts(name=f"{name}.w", shape=(HIDDEN, HIDDEN)),))
        for name in layers
    )
    order = [tensor.name for unit in units for tensor in unit.tensors]
    return ModelFacts(
        units=(*units, UnitFacts(modules=("",), tensors=(table, *behind))),
        buffers=(("base.turns", 8), ("base.table.scale", 4), *((f"{n}.mask", 16) for n in layers)),
        gradient_order=(TABLE, *order, *(each.name for each in behind))[::-1],
        chain=Chain(layers=layers, ends=ends, hidden=HIDDEN, tied=((TABLE, HEAD),) if tied else ()),
    )


def spec(mesh: dict[str, int] | None = None, **sections: object) -> Spec:
    made = legal(mesh or {"pp": 2}, batch={"sequence": 16, "accumulate": 4}, **sections)
    return replace(made, model=HuggingFaceModel(hf="other", config={}))


@pytest.mark.parametrize("tied", [False, True])
def test_its_stages_have_its_names(tied):
    first, last = stages_of(spec(), facts(tied=tied))
    assert first.layers == ("base.h.0", "base.h.1")
    assert first.tensors[0] == TABLE
    assert {*last.tensors} == {"base.h.2.w", "base.h.3.w", "base.last.weight", HEAD}
    assert last.copied == (((TABLE, HEAD),) if tied else ())


def test_a_stage_has_only_its_buffers():
    known = facts()
    stages = stages_of(spec(), known)
    first, last = (dict(stage_facts(spec(), known, stage).buffers) for stage in stages)
    assert {*first} == {"base.turns", "base.table.scale", "base.h.0.mask", "base.h.1.mask"}
    assert {*last} == {"base.turns", "base.h.2.mask", "base.h.3.mask"}


def test_boundary_tensors_have_the_size_of_hidden_states():
    (size,) = {
        row.payload_bytes // row.calls
        for row in derive(spec(), facts()).exact.traffic
        if row.key.collective is Collective.SEND and row.calls
    }
    assert size == 16 * HIDDEN * FP32


def test_without_traces_in_flight_memory_is_unknown():
    undefined = derive(spec(), facts()).exact.undefined.keys()
    assert undefined == {"activations", "peak", "step_seconds"}


def passes(
    known: ModelFacts, stage: Stage, *, saved: int, output: int, given: int
) -> dict[Kind, tuple[Item, ...]]:
    """Every layer leaves `saved` bytes for backward, and completes its gradients in fp32; `output`
    is handed on, and so is the gradient of what was `given`."""
    part = stage_facts(spec(), known, stage)
    num, root = len(part.units), len(part.units) - 1
    forward: list[Item] = [Boundary(Mark.ENTER, root)]
    backward: list[Item] = [Boundary(Mark.PRE_BACKWARD, root)]
    for unit in range(num - 1):
        forward += [Boundary(Mark.ENTER, unit), Run(saved, saved), Boundary(Mark.LEAVE, unit)]
    for unit in reversed(range(num)):
        done = [Complete(each.name, each.numel * FP32) for each in part.units[unit].tensors]
        grown = sum(each.size for each in done)
        freed = saved if unit < root else 0
        marks = (Boundary(Mark.PRE_BACKWARD, unit),) if unit < root else ()
        backward += [*marks, Run(grown, grown - freed), *done]
        if unit < root:
            backward.append(Boundary(Mark.POST_BACKWARD, unit))
    forward += [Run(output, output), Boundary(Mark.LEAVE, root)]
    backward += [Run(given, given), Boundary(Mark.POST_BACKWARD, root)]
    return {Kind.FORWARD: tuple(forward), Kind.BACKWARD: tuple(backward)}


def in_flight(saved: int) -> list[int]:
    known, wide = facts(), 16 * HIDDEN * FP32
    first, last = stages_of(spec(), known)
    ahead = passes(known, first, saved=saved, output=wide, given=0)
    behind = passes(known, last, saved=saved, output=VOCAB, given=wide)
    traced = (
        (passes_of_stage(ahead, is_first=True, output=wide, hidden=0),),
        (passes_of_stage(behind, is_first=False, output=VOCAB, hidden=wide),),
    )
    found = derive(spec(), replace(known, stage_passes=traced)).exact
    assert found.undefined.keys() == {"step_seconds"}  # of no cluster
    return [found.bytes_of(State.ACTIVATIONS, rank) for rank in range(2)]


def test_traced_stages_count_their_micro_batches_in_flight():
    """Two on the first stage and one on the last, each of two layers."""
    grown = [more - less for less, more in zip(in_flight(100), in_flight(1100), strict=True)]
    assert grown == [2 * 2 * 1000, 2 * 1000]


def test_the_second_half_frees_the_memory_the_first_half_leaves():
    """700 live after forward, of them 16 an output; a full pass leaves 4 beyond the gradient of its
    input (16), the halves leave 304."""
    whole = {Kind.FORWARD: (Run(700, 700),), Kind.BACKWARD: (Run(0, -664),)}
    halves = {Kind.INPUT: (Run(0, -264),), Kind.WEIGHT: (Run(0, -100),)}
    found = passes_of_stage(whole | halves, is_first=False, output=16, hidden=16)
    assert found.items[Kind.WEIGHT] == (Run(0, -100), Run(0, -300))


ROLES = (
    ("base.table", Role.VOCABULARY),
    ("base.h.*.up", Role.COLUMN),
    ("head", Role.HEAD),
)


def test_a_stage_has_the_roles_of_its_embedding_or_head():
    known = facts()
    assert known.chain is not None
    ends = known.chain.ends
    first, last = stages_of(spec(), known)
    assert stage_roles(ROLES, first, 2, ends) == ROLES[:2]
    assert stage_roles(ROLES, last, 2, ends) == ROLES[1:]


def test_a_copy_of_a_cut_table_is_cut_as_a_head_and_of_a_whole_one_is_whole():
    known = facts(tied=True)
    assert known.chain is not None
    last = stages_of(spec(), known)[-1]
    assert stage_roles(ROLES[:2], last, 2, known.chain.ends) == (ROLES[1], ("head", Role.HEAD))
    assert stage_roles(ROLES[1:2], last, 2, known.chain.ends) == ROLES[1:2]


def reductions_over_pp(
    mesh: dict[str, int], pipeline: dict[str, object] | None = None, **tuples: str
) -> Traffic:
    """Return the reductions over pp without the norm."""
    placed = {"pp": "S,S,S,R", "tp": "S,S,S,R"} | tuples
    made = legal(
        mesh,
        pipeline,
        model=SHAPE | {"tied": True, "kv_heads": 6},
        placement={axis: placed[axis] for axis in mesh},
    )
    rows = {
        row.payload_bytes: row
        for row in derive(made).exact.traffic
        if row.key.axes == ("pp",) and row.key.collective is Collective.ALL_REDUCE
    }
    return rows[max(rows)]


TIED = 259 * 96 * FP32  # of `pipeline_specs.SHAPE`


@pytest.mark.parametrize("ranks", [2, 4])
def test_first_and_last_stage_sum_a_tied_gradient_once_a_step(ranks):
    found = reductions_over_pp({"pp": ranks})
    assert (found.calls, found.payload_bytes) == (2, TIED + FP32)


def test_a_v_has_both_on_one_rank_and_sends_nothing():
    found = reductions_over_pp({"pp": 2}, {"schedule": "zbv"})
    assert (found.calls, found.payload_bytes) == (1, FP32)


def test_ranks_with_slices_sum_their_slices():
    assert reductions_over_pp({"pp": 2, "tp": 2}).payload_bytes == 130 * 96 * FP32 + FP32
    of_rows = reductions_over_pp({"pp": 2, "dp_shard": 2}, dp_shard="S*,S,S,R")
    assert of_rows.payload_bytes == 130 * 96 * FP32 + FP32
    flat = reductions_over_pp({"pp": 2, "dp_shard": 2}, dp_shard="R,S,S,R")
    assert flat.payload_bytes == TIED // 2 + FP32
    whole = reductions_over_pp({"pp": 2, "dp_replicate": 2}, dp_replicate="R,R,R,R")
    assert whole.payload_bytes == TIED + FP32
