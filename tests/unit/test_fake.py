"""The interpreter on fake ranks and fake tensors: the program of gloo and NCCL, executed by one
process without allocating."""

import pytest
import torch

from ptrain.cost import Phase
from ptrain.data.sampler import LocalBatch
from ptrain.derivation.estimate import derive
from ptrain.interpreter.program import interpret
from ptrain.meters.measure import measure
from ptrain.models.ledger import OperatorMode
from ptrain.runtime.world import fake_tensors, fake_world
from ptrain.spec.load import load

ODD = [
    "model.layers=2",
    "model.hidden=42",
    "model.heads=3",
    "model.kv_heads=1",
    "model.ffn=101",
    "model.vocab=259",
    "batch.sequence=16",
    "batch.micro=2",
]


@pytest.fixture
def world():
    world = fake_world(rank=1, size=4)
    yield world
    world.close()


ZERO16 = "precision.layout=zero16"
CASES = {
    "smaller groups": ["zero3", "mesh.dp_shard=4", ZERO16, "reshard=2"],
    "buckets": ["ddp", "mesh.dp_replicate=4", "bucket=0.05 MB"],
    "no overlap": ["ddp", "mesh.dp_replicate=4", "overlap=none"],
    "zero redundancy": ["ddp-zero-redundancy", "mesh.dp_replicate=4"],
}


# by default gloo shows what buckets and overlap cost (test_dials.py, test_exact.py)
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=() if case == "smaller groups" else pytest.mark.nightly)
        for case in CASES
    ],
)
def test_a_step_on_fake_ranks_and_fake_tensors_has_the_predicted_cost(case, world):
    strategy, *changes = CASES[case]
    spec = load(strategy, [*ODD, "batch.global=16", *changes]).spec
    rows = spec.batch.accumulate * spec.batch.micro
    with fake_tensors():
        program = interpret(spec, world=world)
        batch = LocalBatch(
            tokens=torch.zeros(rows, spec.batch.sequence + 1, dtype=torch.int64),
            global_tokens=spec.batch.tokens,
            sample_ids=(),
        )
        for _ in range(2):
            program.forward_backward(batch)
            program.step(1e-2)
        with measure(program) as measurement:
            program.forward_backward(batch)
            program.step(1e-2)
    simulated, exact = measurement.estimate(), derive(spec).exact
    steady = {row for row in exact.traffic if row.key.phase is not Phase.SETUP}
    assert set(simulated.memory) == {row for row in exact.memory if row.rank == 1}
    assert set(simulated.peak) == {row for row in exact.peak if row.rank == 1}
    assert set(simulated.traffic) == steady


def test_modes_do_not_see_that_a_fake_tensors_device_is_read():
    names = set()

    class SeenOperators(OperatorMode):
        def on_operator(self, function, args, kwargs, result):
            names.add(function._schema.name)

    with fake_tensors(), SeenOperators():
        x = torch.ones(2, requires_grad=True)
        x.exp().sum().backward()
        device = torch.ops.prim.device.default(x)
    assert device == x.grad.device == torch.device("cpu")
    assert {"aten::exp", "aten::sum", "aten::mul"} <= names
    assert "prim::device" not in names
