"""Compiled blocks: code before and within a program, and programs without computation."""

from __future__ import annotations

from collections.abc import Iterator
from shutil import which
from unittest import mock

import pytest
import torch
from torch import nn

from ptrain.derivation.estimate import derive
from ptrain.errors import SpecError
from ptrain.internals.compiled import silent_programs
from ptrain.models import compiled
from ptrain.models.compiled import ReadThrough, compile_blocks
from ptrain.models.watch import watch_modules
from ptrain.spec.load import load
from ptrain.traces.facts import facts_of


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.linear(self.norm(x)).relu()
        return y


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])


@pytest.fixture
def model() -> Iterator[Model]:
    torch.manual_seed(0)
    torch._dynamo.reset()
    yield Model()
    torch._dynamo.reset()


def compile_by(model: Model, backend: str) -> Block:
    with mock.patch.object(compiled, "BACKEND", backend):
        compile_blocks(model, ["blocks.0", "blocks.1"])
    block = model.blocks[0]
    assert isinstance(block, Block)
    return block


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
        return 2 * gradient


def test_a_program_reads_parameters_through_their_functions(model: Model) -> None:
    block, x = model.blocks[0], torch.randn(2, 8)
    ReadThrough(block.norm, Doubled.apply)
    block(x).sum().backward()
    expected = [parameter.grad.clone() for parameter in block.parameters()]
    block.zero_grad()
    compile_by(model, "aot_eager")
    block(x).sum().backward()
    assert all(map(torch.equal, expected, (parameter.grad for parameter in block.parameters())))
    assert [*block.norm._parameters] == ["weight", "bias"]
    assert all(isinstance(parameter, nn.Parameter) for parameter in block.norm.parameters())


def test_a_block_that_torch_runs_in_eager_mode_is_an_error(model: Model) -> None:
    block, x = compile_by(model, "aot_eager"), torch.randn(2, 8)
    with torch.no_grad():
        block(x)  # an evaluation has no program
    with torch._dynamo.config.patch(disable=True), pytest.raises(SpecError, match="compile=none"):
        block(x)


def test_hooks_are_seen_outside_of_programs_alone(model: Model) -> None:
    block = compile_by(model, "aot_eager")
    names: list[str] = []
    with watch_modules(model.named_modules(), before=lambda name, *_: names.append(name)):
        block(torch.randn(2, 8))
    assert names == ["blocks.0"]
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.skipif(which("g++") is None, reason="inductor compiles with a C++ compiler")
def test_a_program_recomputes_after_those_that_do_not(model: Model) -> None:
    x = torch.randn(2, 8)
    expected = model.blocks[0](x).detach()
    block = compile_by(model, "inductor")
    with torch._inductor.config.patch(compile_threads=1):
        with silent_programs():
            block(x).sum().backward()
        torch.testing.assert_close(block(x).detach(), expected)


LARGE = (
    "compile=block", "model.layers=2", "model.hidden=512", "model.ffn=1376", "model.heads=8",
    "model.kv_heads=8", "model.head_dim=64", "model.vocab=16384", "batch.sequence=16",
    "batch.micro=1", "cluster.preset=h100-8", "device=cpu",
)  # fmt: skip


@pytest.mark.nightly
def test_a_model_too_large_for_real_tensors_is_compiled_on_fake_ones_without_a_time() -> None:
    spec = load("ddp", LARGE).spec
    exact = derive(spec, facts_of(spec)).exact
    assert exact.peak and "peak" not in exact.undefined
    assert exact.step is None and "compiled programs" in exact.undefined["step_seconds"]
