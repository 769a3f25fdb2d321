"""`interpret` takes the world as an argument: on fake ranks with fake tensors it does what was
predicted."""

from __future__ import annotations

import pytest
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from ptrain.cost import Estimate
from ptrain.data.corpus import open_corpus
from ptrain.data.sampler import LocalBatch, read_batch
from ptrain.derivation.estimate import derive
from ptrain.interpreter.program import interpret
from ptrain.meters.measure import measure
from ptrain.runtime.world import fake_world
from ptrain.spec.spec import Spec
from tests.gloo.cases import strategy_case
from tests.ranks import Ranks

STEADY = 2


def _run(spec: Spec, rank: int) -> Estimate:
    """Run three steps as rank `rank` of a world without other ranks or values."""
    world = fake_world(rank, spec.world_size)
    source = open_corpus(spec.data)
    with FakeTensorMode() as mode:
        program = interpret(spec, world=world)
        assert all(isinstance(held, FakeTensor) for _, held in program.storages())
        for step in range(STEADY + 1):
            real = read_batch(
                source,
                spec=spec,
                step=step,
                data_index=program.data_index,
                data_degree=spec.data_degree,
            )
            local = LocalBatch(
                tokens=mode.from_tensor(real.tokens),
                global_tokens=real.global_tokens,
                sample_ids=real.sample_ids,
            )
            if step < STEADY:
                program.forward_backward(local)
                program.step(1e-3)
            else:
                with measure(program) as measurement:
                    program.forward_backward(local)
                    program.step(1e-3)
    world.close()
    return measurement.estimate()


@pytest.mark.parametrize(("layout", "rank"), [("fp32", 3), ("zero16", 0)])
def test_zero3_on_fake_ranks_and_fake_tensors_runs_as_predicted(
    ranks: Ranks, layout: str, rank: int
) -> None:
    spec = strategy_case("zero3", 4, layout=layout, accumulate=2).spec()
    found = ranks.run(1, _run, spec, rank)[0]
    exact = derive(spec).exact
    assert set(found.traffic) == set(exact.traffic)
    expected = {row.state: row.device_bytes for row in exact.memory if row.rank == rank}
    assert {row.state: row.device_bytes for row in found.memory} == expected
