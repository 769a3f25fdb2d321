"""The time of a step, on timelines and machines small enough to follow by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ptrain.costs import Phase, Spent, StepTime
from ptrain.derivation.clock import Clock
from ptrain.derivation.computing import Timing
from ptrain.derivation.ghosts.table import wrapping
from ptrain.derivation.network import Network
from ptrain.derivation.timeline import replay
from ptrain.facts.operators import ModelWork
from ptrain.plan.lower import lower
from ptrain.spec.axis import Axis
from ptrain.spec.spec import Spec
from tests.pure.build import BY_HAND, GATHERED, WHOLE, ZERO_1, ZERO_2, make_spec
from tests.pure.paces import HandPace, model
from tests.pure.test_timeline import small

SHARD, REPLICATE = Axis.DP_SHARD, Axis.DP_REPLICATE
NUMEL = 100  # of each of two blocks and the root; a unit has 400 bytes
UNIT = 4 * NUMEL
WORK = model(10, 20, front=(2, 4), behind=(6, 12))
COMPUTE = 2 * (10 + 20) + (2 + 4) + (6 + 12)


def step(spec: Spec, pace: HandPace, work: ModelWork = WORK) -> StepTime:
    facts = replace(small(NUMEL), blocks=("blocks.0", "blocks.1"))
    plan = lower(spec, tuple(unit.modules for unit in facts.units))
    timing = Timing(clock=Clock(pace, Network(spec)), work=work)
    time = replay(wrapping(spec, plan, facts), timing=timing).step
    assert time is not None
    return time


def spec(mode=None, axis: Axis = SHARD, **dials) -> Spec:
    mesh = {} if mode is None else {axis: (2, mode)}
    given = {name: dials.pop(name) for name in ("overlap", "prefetch") if name in dials}
    return replace(make_spec(mesh, clip=None, model=BY_HAND, **dials), **given)


def waits(time: StepTime) -> float:
    return sum(time.exposed().values())


def test_one_device_computes_and_updates():
    time = step(spec(), HandPace(element=0.5))
    assert time.seconds == COMPUTE + 0.5 * 3 * NUMEL
    assert time.spent(Spent.COMPUTE) == COMPUTE
    assert time.spent(Spent.UPDATE) == time.of_phase(Phase.UPDATE) == 150
    assert time.of_phase(Phase.FORWARD) == 2 * 10 + 2 + 6
    assert time.of_phase(Phase.BACKWARD) == 2 * 20 + 4 + 12


@pytest.mark.parametrize("mode", [WHOLE, GATHERED, ZERO_1, ZERO_2], ids=str)
def test_a_network_that_takes_no_time_leaves_what_is_computed(mode):
    axis = REPLICATE if mode is WHOLE else SHARD
    assert step(spec(mode, axis), HandPace()).seconds == COMPUTE
