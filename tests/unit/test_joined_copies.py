"""An update casts and copies the tensors of a unit with one operator, to launch few kernels on a
GPU."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ptrain.data.corpus import open_corpus
from ptrain.interpreter.program import Program, interpret
from ptrain.runtime.world import fake_world
from ptrain.spec.load import load
from ptrain.train.loop import local_batch

SMALL = ("model.preset=gpt-tiny", "mesh.dp_replicate=2", "batch={global: 4, micro: 1, sequence: 8}")


class Operators(TorchDispatchMode):
    """Counts operators by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def train_three_steps(*words: str) -> tuple[Program, Counter[str]]:
    """Return a program after three steps, and the operators of the last update."""
    spec = load("ddp", (*SMALL, *words)).spec
    world = fake_world(0, 2)
    try:
        program, source = interpret(spec, world=world), open_corpus(spec.data)
        for step in range(3):
            program.forward_backward(local_batch(program, source, step))
            with Operators() as operators:
                program.step(1e-3)
    finally:
        world.close()
    return program, operators.counts


@pytest.mark.parametrize("layout", ["zero16", "fp16"])
def test_a_unit_s_gradients_are_cast_and_its_masters_copied_by_one_operator(layout: str) -> None:
    program, counts = train_three_steps(f"precision.layout={layout}")
    units = len(program.update.groups)
    assert units > 2
    assert counts["_foreach_copy_"] == 2 * units
    assert counts["copy_"] == counts["_to_copy"] == 0
    for target, tensors in program.update.tensors():
        value = target.value()
        assert torch.equal(value, tensors["master"].to(value.dtype)), target.name


def test_buckets_are_cleared_by_one_operator() -> None:
    program, counts = train_three_steps()
    assert counts["_foreach_zero_"] == 1 and counts["zero_"] == 0
    gradients = [parameter.grad for parameter in program.model.parameters()]
    assert all(gradient is not None and not gradient.any() for gradient in gradients)
