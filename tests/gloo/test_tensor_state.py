"""State that ranks of tp share outside of operators: checkpoints, overflows, norms and token
counts."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from ptrain.axes.tensor.cost import cut_dims
from ptrain.interpreter.program import Program, interpret
from ptrain.models.ledger import local_tensor
from ptrain.runtime.world import World
from ptrain.spec.placement import Axis
from ptrain.spec.spec import Spec
from ptrain.train import saving
from ptrain.train.exchange import Exchange
from tests.gloo.tensor_cases import tensor_spec
from tests.gloo.test_checkpoint import STEPS, full_state, load_saved, step
from tests.ranks import Ranks

pytestmark = pytest.mark.gloo

nightly = partial(pytest.param, marks=pytest.mark.nightly)
PLACEMENTS: dict[str, dict[str, Any]] = {
    "tp": {"degree": 2},
    "tp-4": {"degree": 4, "activations": "S"},
    "tp-zero3": {"data": {"dp_shard": "zero3"}},
    "tp-zero1": {"data": {"dp_shard": "zero1"}, "activations": "S*"},
    "tp-ddp": {"data": {"dp_replicate": "ddp"}},
}
# By default one pair within data ranks.
PAIRS = [
    nightly("tp-zero3", "tp-4"),
    ("tp-zero1", "tp-ddp"),
    nightly("tp", "tp-zero3"),
    nightly("tp-4", "tp-zero1"),
]


def program_of(spec: Spec) -> Program:
    return interpret(spec, world=World.join(spec.timeout))


def placed_spec(name: str, layout: str) -> Spec:
    return tensor_spec("gpt-untied", precision={"layout": layout}, accumulate=1, **PLACEMENTS[name])


def save_on_ranks(spec: Spec, folder: str) -> dict[str, torch.Tensor]:
    program = program_of(spec)
    for index in range(STEPS):
        step(program, index)
    saving.save_checkpoint(program, Path(folder), STEPS, Exchange(program.world))
    return full_state(program)


def load_on_ranks(spec: Spec, folder: str) -> dict[str, torch.Tensor]:
    return load_saved(program_of(spec), folder)


@pytest.mark.parametrize("layout", [nightly("fp32"), "zero16"])
@pytest.mark.parametrize(("saved", "loaded"), PAIRS)
def test_a_checkpoint_is_bitwise_the_same_on_another_mesh(
    ranks: Ranks, tmp_path: Path, saved: str, loaded: str, layout: str
) -> None:
    first, second = placed_spec(saved, layout), placed_spec(loaded, layout)
    before = ranks.run(first.world_size, save_on_ranks, first, str(tmp_path))[0]
    after = ranks.run(second.world_size, load_on_ranks, second, str(tmp_path))[0]
    assert before.keys() == after.keys()
    assert not [name for name in before if not torch.equal(before[name], after[name])]


def overflow_on_the_last_rank(spec: Spec) -> dict[str, Any]:
    """Train two steps, the second with an infinite gradient on the last rank only."""
    program = program_of(spec)
    assert program.scaling is not None
    program.scaling.scale.fill_(1024.0)
    step(program, 0)
    before = full_state(program)
    is_last = program.world.rank == program.world.size - 1
    reduce = program.wrapped.reduce_gradients

    def reduce_and_explode() -> None:
        """Plant the value after the reduction, so that no other rank receives it."""
        reduce()
        if is_last:
            program.gradients()[-1].view(-1)[0] = float("inf")

    program.wrapped.reduce_gradients = reduce_and_explode  # type: ignore[method-assign]
    step(program, 1)
    after = full_state(program)
    return {
        "changed": [name for name in before if not torch.equal(before[name], after[name])],
        "scale": float(program.scaling.scale),
    }


@pytest.mark.parametrize("name", [*map(nightly, ("tp-zero1", "tp", "tp-4", "tp-zero3"))])
def test_an_overflow_on_the_last_rank_skips_the_step_on_all_ranks(ranks: Ranks, name: str) -> None:
    spec = placed_spec(name, "fp16")
    for seen in ranks.run(spec.world_size, overflow_on_the_last_rank, spec):
        assert seen["changed"] == ["scaling.scale", "scaling.growth_tracker"]
        assert seen["scale"] == 512.0


def oversized_gradients(spec: Spec) -> list[str]:
    """Return the parameters whose gradients keep more storage than the rank's shard."""
    program = program_of(spec)
    source: list[str] = []
    program.step = lambda *_: None  # type: ignore[method-assign, assignment, return-value]
    step(program, 0)
    for name, parameter in program.model.named_parameters():
        gradient = parameter.grad
        local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        assert local is not None
        if local.untyped_storage().nbytes() != local.numel() * local.itemsize:
            source.append(name)
    return source


@pytest.mark.parametrize("name", ["tp-4", nightly("tp")])
def test_no_gradient_keeps_more_than_its_shard(ranks: Ranks, name: str) -> None:
    """Of the full vocabulary's gradient that backward computes, only a rank's rows stay in
    memory."""
    spec = placed_spec(name, "fp32")
    assert ranks.run(spec.world_size, oversized_gradients, spec) == [[]] * spec.world_size


def replicated_tensors(spec: Spec) -> dict[str, torch.Tensor]:
    """Return this rank's copies of the tensors replicated over tp, after three steps."""
    program = program_of(spec)
    for index in range(3):
        step(program, index)
    assert program.plan.tensor is not None
    values = program.state_dict()["model"]
    cut = cut_dims(program.plan.tensor, ((name, tuple(v.shape)) for name, v in values.items()))
    return {
        name: local_tensor(value).detach().clone()
        for name, value in values.items()
        if name not in cut
    }


@pytest.mark.parametrize("layout", ["fp32", nightly("zero16")])
@pytest.mark.parametrize(
    "name", [nightly("tp"), "tp-4", "tp-zero1", nightly("tp-zero3"), nightly("tp-ddp")]
)
def test_replicated_tensors_stay_bitwise_equal(ranks: Ranks, name: str, layout: str) -> None:
    spec = placed_spec(name, layout)
    held = ranks.run(spec.world_size, replicated_tensors, spec)
    assert len(held[0]) == 15  # of 5 norms weight and bias, positions, 4 biases of row operators
    degree = spec.degree(Axis.TP)
    for rank, mine in enumerate(held):
        first = held[rank - rank % degree]
        assert not [name for name in first if not torch.equal(first[name], mine[name])]
