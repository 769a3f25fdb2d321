"""Theorem 7 and Remark 4, checked on the traffic meter's records: the ranks of equal stages, the
reduced gradients, and the senders and receivers of activations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist

from ptrain.axes.pipeline.run.stage import StagedModel
from ptrain.cost import Collective, State, Traffic
from ptrain.data.corpus import open_corpus
from ptrain.derivation.estimate import derive
from ptrain.interpreter.program import interpret
from ptrain.meters.measure import Measurement, measure
from ptrain.meters.traffic import group_of
from ptrain.plan.composition import are_consecutive, are_within, have_one_of_each, theorem_7
from ptrain.runtime.world import World
from ptrain.spec.spec import Spec
from ptrain.train.loop import local_batch
from tests.gloo.pipeline_cases import SIZES, pipeline_spec
from tests.ranks import Ranks

pytestmark = pytest.mark.gloo

nightly = partial(pytest.param, marks=pytest.mark.nightly)
STEPS = 3  # DDP and FSDP2 are steady in the third
SCALAR = 8  # bytes
BETWEEN = (Collective.SEND, Collective.RECV)
Groups = list[tuple[int, ...]]


@dataclass(frozen=True, kw_only=True)
class Call:
    """A metered call with the ranks of its group, and the peer of a message."""

    traffic: Traffic
    ranks: tuple[int, ...]
    peer: int | None

    @property
    def is_message(self) -> bool:
        return self.traffic.key.collective in BETWEEN

    @property
    def is_sum_of_gradients(self) -> bool:
        """Return True for a gradient reduction; clipping sums scalars."""
        is_gradient = self.traffic.key.state is State.GRADIENTS
        return is_gradient and self.traffic.payload_bytes > SCALAR


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One rank's record of a steady step."""

    rank: int
    stages: tuple[int, ...]
    calls: tuple[Call, ...]


def record_step(spec: Spec) -> StepRecord:
    """Train some steps on this rank with the meters on the last of them."""
    program = interpret(spec, world=World.join(spec.timeout))
    for step in range(STEPS):
        local = local_batch(program, open_corpus(spec.data), step)
        with measure(program) if step == STEPS - 1 else nullcontext() as measurement:
            ends = _group_and_peer(measurement) if measurement else []
            program.forward_backward(local)
            program.step(1e-3)
    assert measurement is not None
    assert isinstance(program.wrapped, StagedModel)
    counted = zip(measurement.traffic.calls(), ends, strict=True)
    return StepRecord(
        rank=program.world.rank,
        stages=tuple(part.index for part in program.wrapped.parts),
        calls=tuple(Call(traffic=row, ranks=ranks, peer=peer) for row, (ranks, peer) in counted),
    )


def _group_and_peer(measurement: Measurement) -> list[tuple[tuple[int, ...], int | None]]:
    """Record the group's ranks and the peer of each metered call."""
    found: list[tuple[tuple[int, ...], int | None]] = []
    count: Callable[..., None] = measurement.traffic._record_collective

    def count_and_note(name: str, args: tuple[Any, ...], kwargs: Any, result: Any) -> None:
        count(name, args, kwargs, result)
        group = group_of((args, kwargs))
        is_message = name in ("send", "recv_")  # (tensors, group, the peer's place in it, tag)
        peer = dist.get_global_rank(group, args[2]) if is_message else None
        found.append((tuple(sorted(dist.get_process_group_ranks(group))), peer))

    measurement.traffic._record_collective = count_and_note  # type: ignore[method-assign]
    return found


def replicas(seen: Sequence[StepRecord]) -> Groups:
    """Return the ranks that have the same stages."""
    found: dict[tuple[int, ...], list[int]] = {}
    for each in seen:
        found.setdefault(each.stages, []).append(each.rank)
    return sorted(map(tuple, found.values()))


def sums_of_gradients(seen: Sequence[StepRecord]) -> Groups:
    return sorted({call.ranks for each in seen for call in each.calls if call.is_sum_of_gradients})


def pipelines(seen: Sequence[StepRecord]) -> Groups:
    """Return the groups of ranks that are connected by messages."""
    of_rank = {each.rank: {each.rank} for each in seen}
    for one, other in messages(seen):
        joined = of_rank[one] | of_rank[other]
        of_rank.update(dict.fromkeys(joined, joined))
    return sorted({tuple(sorted(group)) for group in of_rank.values()})


def messages(seen: Sequence[StepRecord]) -> Iterator[tuple[int, int]]:
    for each in seen:
        for call in each.calls:
            if call.peer is not None:
                yield each.rank, call.peer


def follow(stages: Sequence[int], others: Sequence[int]) -> bool:
    return any(abs(stage - other) == 1 for stage in stages for other in others)


def breaks_7_1(seen: Sequence[StepRecord]) -> bool:
    return not are_consecutive(replicas(seen))


def breaks_7_2(seen: Sequence[StepRecord]) -> bool:
    groups = sums_of_gradients(seen)
    return not groups or not are_within(groups, replicas(seen))


def breaks_7_3(seen: Sequence[StepRecord]) -> bool:
    """Return violations of condition 3: messages are activations between neighbours of one
    pipeline."""
    calls = [call for each in seen for call in each.calls if call.is_message]
    stages = {each.rank: each.stages for each in seen}
    return (
        not calls
        or any(call.traffic.key.state is not State.ACTIVATIONS for call in calls)
        or not all(follow(stages[one], stages[other]) for one, other in messages(seen))
        or not have_one_of_each(pipelines(seen), replicas(seen))
    )


def names_of_conditions(spec: Spec) -> list[str]:
    conditions = theorem_7(spec, derive(spec).plan)
    assert all(each.holds for each in conditions)
    return [each.name for each in conditions]


PP_OUTSIDE = [
    ({"pp": 2, "dp_replicate": 2}, "ddp", "1f1b"),
    nightly({"pp": 2, "dp_shard": 2}, "zero3", "zbv"),
]
PP_INSIDE = [
    nightly({"dp_replicate": 2, "pp": 2}, "ddp", "1f1b"),
    nightly({"dp_shard": 2, "pp": 2}, "zero2", "interleaved"),
]


@pytest.mark.parametrize(("mesh", "data", "schedule"), PP_OUTSIDE, ids=str)
def test_with_pp_outside_all_conditions_hold_of_the_calls_that_ran(
    ranks: Ranks, mesh: dict[str, int], data: str, schedule: str
) -> None:
    spec = pipeline_spec("gqa", schedule, mesh=mesh, data=data)
    seen: list[StepRecord] = ranks.run(4, record_step, spec)
    assert replicas(seen) == sums_of_gradients(seen) == [(0, 1), (2, 3)]
    assert pipelines(seen) == [(0, 2), (1, 3)]
    assert not breaks_7_1(seen) and not breaks_7_2(seen) and not breaks_7_3(seen)
    assert names_of_conditions(spec) == ["Theorem 7.1", "Theorem 7.2", "Theorem 7.3"]
    across = [_with_groups(each, (0, 1, 2, 3)) for each in seen]
    assert breaks_7_2(across)
    sideways = [_with_peers(each, {0: 1, 1: 0, 2: 3, 3: 2}) for each in seen]
    assert breaks_7_3(sideways)


@pytest.mark.parametrize(("mesh", "data", "schedule"), PP_INSIDE, ids=str)
def test_with_pp_inside_as_in_remark_4_the_first_condition_alone_does_not_hold(
    ranks: Ranks, mesh: dict[str, int], data: str, schedule: str
) -> None:
    spec = pipeline_spec("gqa", schedule, mesh=mesh, data=data)
    seen: list[StepRecord] = ranks.run(4, record_step, spec)
    assert replicas(seen) == sums_of_gradients(seen) == [(0, 2), (1, 3)]
    assert pipelines(seen) == [(0, 1), (2, 3)]
    assert breaks_7_1(seen) and not breaks_7_2(seen) and not breaks_7_3(seen)
    assert names_of_conditions(spec) == ["Remark 4", "Theorem 7.2", "Theorem 7.3"]


@pytest.mark.parametrize(
    ("schedule", "mesh", "ends"),
    [
        ("1f1b", {"pp": 4}, [(0, 3)]),
        nightly("gpipe", {"dp_replicate": 2, "pp": 2}, [(0, 1), (2, 3)]),
        nightly("zbv", {"pp": 2, "dp_replicate": 2}, []),
    ],
    ids=str,
)
def test_only_the_gradient_of_a_tied_tensor_crosses_stages(
    ranks: Ranks, schedule: str, mesh: dict[str, int], ends: Groups
) -> None:
    """In a V schedule both ends are on one rank, and no gradient crosses."""
    seen: list[StepRecord] = ranks.run(
        4, record_step, pipeline_spec("gpt-tied", schedule, mesh=mesh)
    )
    crossing = [
        call
        for each in seen
        for call in each.calls
        if call.is_sum_of_gradients and not are_within([call.ranks], replicas(seen))
    ]
    tied = SIZES["vocab"] * SIZES["hidden"] * 8  # of the embedding, in fp64
    assert sorted({call.ranks for call in crossing}) == ends
    assert {call.traffic.payload_bytes for call in crossing} <= {tied}
    assert len(crossing) == 2 * len(ends), "once, on either end"
    assert not breaks_7_3(seen)


@pytest.mark.nightly
def test_theorems_6_and_7_hold_together_on_eight_ranks(ranks: Ranks) -> None:
    mesh = {"pp": 2, "dp_shard": 2, "tp": 2}
    seen: list[StepRecord] = ranks.run(
        8, record_step, pipeline_spec("gqa", mesh=mesh, activations="S")
    )
    tensor = sorted({c.ranks for each in seen for c in each.calls if c.traffic.key.axes == ("tp",)})
    data = sorted(
        {c.ranks for each in seen for c in each.calls if c.traffic.key.axes == ("dp_shard",)}
    )
    assert tensor == [(0, 1), (2, 3), (4, 5), (6, 7)] and are_consecutive(tensor)
    assert have_one_of_each(data, tensor) and are_within(data, replicas(seen))
    assert replicas(seen) == [(0, 1, 2, 3), (4, 5, 6, 7)] and not breaks_7_1(seen)
    assert pipelines(seen) == [(0, 4), (1, 5), (2, 6), (3, 7)] and not breaks_7_3(seen)


def _with_groups(seen: StepRecord, ranks: tuple[int, ...]) -> StepRecord:
    """Return records in which every sum has these groups."""
    calls = tuple(c if c.is_message else replace(c, ranks=ranks) for c in seen.calls)
    return replace(seen, calls=calls)


def _with_peers(seen: StepRecord, peers: dict[int, int]) -> StepRecord:
    calls = tuple(replace(c, peer=peers[seen.rank]) if c.is_message else c for c in seen.calls)
    return replace(seen, calls=calls)
