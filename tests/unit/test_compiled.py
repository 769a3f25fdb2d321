"""Compiled blocks: what is in front of a program and in it, and programs that compute nothing."""

from __future__ import annotations

from collections.abc import Iterator
from shutil import which
from unittest import mock

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

import ptrain
from ptrain.algebra.legality import is_sound
from ptrain.cost import Estimate
from ptrain.derivation.estimate import derive
from ptrain.derivation.work import model_work
from ptrain.errors import SpecError
from ptrain.facts.model import Operator
from ptrain.internals.compiled import (
    ProgramKernel,
    _SilentKernel,
    _UnknownKernel,
    observe_kernels,
    silent_programs,
)
from ptrain.models import compiled
from ptrain.models.compiled import ReadThrough, compile_blocks
from ptrain.models.ledger import watch_modules
from ptrain.models.work import kernel_sizes
from ptrain.runtime.world import fake_tensors
from ptrain.simulation.execute import simulate
from ptrain.spec.cluster import OperatorKind
from ptrain.spec.load import load
from ptrain.spec.placement import Axis
from ptrain.spec.precision import DType
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
def test_a_program_computes_again_behind_those_that_do_not(model: Model) -> None:
    x = torch.randn(2, 8)
    expected = model.blocks[0](x).detach()
    block = compile_by(model, "inductor")
    with torch._inductor.config.patch(compile_threads=1):
        with silent_programs():
            block(x).sum().backward()
        torch.testing.assert_close(block(x).detach(), expected)


KERNEL = """
extern "C" void kernel(float* in_out_ptr0, const float* in_ptr0, float* out_ptr0, const int64_t n)
{ float tmp_acc0 = 0; in_out_ptr0[0] = tmp_acc0; }
"""


def test_a_kernel_reads_and_writes_each_argument_once() -> None:
    kernels: list[ProgramKernel | None] = []
    changed, given, made = torch.zeros(2), torch.zeros(4, 8), torch.zeros(8, dtype=torch.bfloat16)
    kernel = _SilentKernel(["float*", "const float*", "bfloat16*", "const int64_t"], KERNEL)
    with observe_kernels(kernels.append):
        kernel(changed, given, made, 3)
        _UnknownKernel("triton").run(made)
    kernel(changed, given, made, 3)
    run, unknown = kernels
    assert unknown is None and run is not None
    assert [*run.inputs] == [changed, given] and [*run.outputs] == [changed, made]
    sizes = kernel_sizes(run)
    assert sizes.kind is OperatorKind.NORM and sizes.dtype is DType.FP32
    assert sizes.operator.dimensions == (2 * 8 + 128 + 16,)
    exponential = kernel_sizes(run._replace(source="tmp1 = tmp0.exp();"))
    assert exponential.kind is OperatorKind.ACTIVATION


def operators_of(name: str, *overrides: str) -> tuple[list[Operator], Estimate]:
    """Return the operators of a layer, forward and backward, and the prediction."""
    spec = load(name, overrides).spec
    facts = facts_of(spec)
    derived = derive(spec, facts)
    work = model_work(spec, derived.plan, facts)
    assert work is not None
    passes = (*work.layers[-1].forward, *work.layers[-1].backward)
    return [item for item in passes if isinstance(item, Operator)], derived.exact


def flops(operators: list[Operator]) -> int:
    return sum(item.times * item.flops for item in operators)


def launches(operators: list[Operator]) -> int:
    return sum(item.times for item in operators if item.kind is not OperatorKind.VIEW)


def moved_bytes(operators: list[Operator]) -> int:
    return sum(item.times * item.dimensions[0] for item in operators if item.kind.is_of_bytes)


SMALL = ("cluster.preset=h100-8", "model.layers=2", "precision.layout=zero16")


@pytest.mark.skipif(which("g++") is None, reason="inductor compiles with a C++ compiler")
def test_a_compiled_step_launches_fewer_kernels_moves_fewer_bytes_and_takes_less_time() -> None:
    (eager, plain), (compiled, exact) = (
        operators_of("ddp", *SMALL, f"compile={part}") for part in ("none", "block")
    )
    assert flops(compiled) == flops(eager) > 0
    assert launches(compiled) < launches(eager) / 2
    assert moved_bytes(compiled) < moved_bytes(eager) / 2
    assert plain.step and exact.step and exact.step.seconds < plain.step.seconds
    assert any("CPU program" in sentence for sentence in exact.step.assumed)
    assert "CPU program" in exact.unclaimed["peak"] and not plain.unclaimed
    # No collected step was predicted from a program.
    assert exact.step.interval is None and plain.step.interval is not None


def test_programs_of_gpus_are_not_simulated() -> None:
    with pytest.raises(SpecError, match="which Triton makes") as caught:
        simulate(load("ddp", [*SMALL, "compile=block"]).spec, 0)
    assert "device=cpu" in str(caught.value)


@pytest.mark.skipif(which("g++") is None, reason="inductor compiles with a C++ compiler")
@pytest.mark.parametrize(
    "words",
    [pytest.param("compile=block", marks=pytest.mark.nightly), "precision.matmul=fp8-rowwise"],
)
def test_a_search_ranks_compiled_blocks_and_fp8_products(words: str) -> None:
    # Neither supports recomputed blocks over tp; fp8 products support no tp at all.
    space = ("mesh={dp: auto, tp: auto}", "activations=M", "recompute=full")
    wanted = load("zero3", [*SMALL, words]).spec
    ranking = ptrain.select(
        "zero3", [*SMALL, words, *space], cluster="h100-8", devices=2, count=2, read=facts_of
    )
    best = ranking.best
    assert best is not None and not ranking.unknown
    assert best.step == derive(best.spec, facts_of(best.spec)).exact.step
    for row in ranking.ranking:
        assert (row.spec.compile, row.spec.precision) == (wanted.compile, wanted.precision)
        assert is_sound(row.spec) and row.spec.degree(Axis.TP) == 1


LARGE = (
    "model.layers=2", "model.hidden=512", "model.ffn=1376", "model.heads=8",
    "model.kv_heads=8", "model.head_dim=64", "model.vocab=16384", "batch.sequence=16",
    "batch.micro=1", "cluster.preset=h100-8", "device=cpu",
)  # fmt: skip


@pytest.mark.nightly
def test_a_model_too_large_for_real_tensors_is_compiled_on_fake_ones() -> None:
    (eager, _), (compiled, exact) = (
        operators_of("ddp", *LARGE, f"compile={part}") for part in ("none", "block")
    )
    assert exact.peak and exact.step and "peak" not in exact.undefined
    assert flops(compiled) == flops(eager) and launches(compiled) < launches(eager)


@pytest.mark.skipif(which("g++") is None, reason="inductor compiles with a C++ compiler")
def test_a_program_under_fake_tensors_allocates_no_real_ones() -> None:
    with fake_tensors(), torch._inductor.config.patch(compile_threads=1), silent_programs():
        block = compile_by(Model(), "inductor")
        assert isinstance(block(torch.randn(2, 8)), FakeTensor)
