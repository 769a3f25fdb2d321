"""The bytes of a compiled block, as predicted, against torch's profiler of the real block.

The profiler reports each allocation of torch's CPU allocator and knows nothing of ptrain. It also
reports the scratch memory that a kernel (a matrix product, attention) allocates and frees within
one operator, which no dispatch mode sees and no prediction counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from shutil import which
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile

from ptrain.internals.compiled import silent_programs
from ptrain.models.compiled import compile_blocks
from ptrain.models.initialize import build_model
from ptrain.models.ledger import Ledger
from ptrain.models.numerics import TORCH_DTYPES
from ptrain.models.transformer import Transformer
from ptrain.spec.load import load
from ptrain.spec.model import ModelShape

NARROW = "model={layers: 1, hidden: 32, heads: 2, kv_heads: 2, ffn: 64, head_dim: 16, vocab: 64}"
BF16 = "precision.layout=bf16"
ATTENTION = "aten::_scaled_dot_product_flash_attention_for_cpu"


class Bytes(NamedTuple):
    """Live bytes after a pass, and the most during it, relative to those before forward."""

    live: int
    most: int


class Pass(NamedTuple):
    """A pass by the profiler: its bytes without the kernels' scratch memory, and with it, and the
    scratch memory of each operator at its largest."""

    bytes: Bytes
    with_scratch: Bytes
    scratch: dict[str, int]


class Operator(NamedTuple):
    name: str
    number: int


class LiveBytes(Ledger):
    def __init__(self) -> None:
        super().__init__()
        self.live = self.most = 0
        self._born: set[int] = set()

    def on_allocation(self, key: int, storage: torch.UntypedStorage, operator: str) -> None:
        self._born.add(key)
        self.live += storage.nbytes()
        self.most = max(self.most, self.live)

    def on_free(self, key: int, size: int) -> None:
        if key in self._born:
            self._born.discard(key)
            self.live -= size

    def take(self) -> Bytes:
        most, self.most = self.most, self.live
        return Bytes(self.live, most)


Run = Callable[[], Tensor]


def block_of(*overrides: str) -> tuple[nn.Module, Run, Tensor]:
    """Return a compiled block, its forward pass, and a gradient of its output."""
    spec = load("ddp", [*overrides, "batch.global=4"]).spec
    assert isinstance(spec.model, ModelShape)
    dtype = TORCH_DTYPES[spec.precision.effective_layout.parameters]
    model = build_model(spec.model, sequence=spec.batch.sequence, seed=0).to(dtype)
    assert isinstance(model, Transformer)
    compile_blocks(model, ["blocks.0"])
    block = model.blocks[0]
    shape = spec.batch.micro, spec.batch.sequence, spec.model.hidden
    x = torch.ones(shape, dtype=dtype, requires_grad=True)
    given = model._attention_tables(x)[0]

    def run() -> Tensor:
        x.grad = None
        block.zero_grad()
        y: Tensor = block(x, *given)
        return y

    run().backward(torch.ones_like(x))  # compiles both passes
    run()
    return block, run, torch.ones_like(x)


def predict_block(*overrides: str) -> tuple[Bytes, Bytes]:
    """Return the bytes of forward and backward, by programs whose kernels compute nothing."""
    with silent_programs():
        _, run, seed = block_of(*overrides)
        with LiveBytes() as ledger:
            y = run()
            forward = ledger.take()
            y.backward(seed)
            del y
            return forward, ledger.take()


def profile_block(*overrides: str) -> tuple[Pass, Pass]:
    """Return forward and backward, by torch's profiler."""
    torch._dynamo.reset()
    _, run, seed = block_of(*overrides)
    y = None
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as forward:
        y = run()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as backward:
        y.backward(seed)
        del y
    first = pass_of(forward, 0)
    return first, pass_of(backward, first.bytes.live)


def pass_of(profiler: Any, live: int) -> Pass:
    """Return the pass of a profile that starts with `live` bytes."""
    rows = [*allocations(profiler.profiler.kineto_results.experimental_event_tree())]
    # Memory that the operator that allocated it frees again.
    freed = {(operator, pointer) for operator, pointer, size in rows if operator and size < 0}
    scratch: dict[str, int] = {}
    held: dict[Operator, int] = {}
    now = most = Bytes(live, live)
    for operator, pointer, size in rows:
        if operator is None or (operator, pointer) not in freed:
            now = Bytes(now.live + size, now.most + size)
        else:
            held[operator] = held.get(operator, 0) + size
            scratch[operator.name] = max(scratch.get(operator.name, 0), held[operator])
            now = Bytes(now.live, now.most + size)
        most = Bytes(max(most.live, now.live), max(most.most, now.most))
    return Pass(Bytes(now.live, most.live), Bytes(now.most, most.most), scratch)


def allocations(events: Any) -> Iterator[tuple[Operator | None, int, int]]:
    """Yield the outermost ATen operator, the pointer and the size of each allocation of an event
    tree, in order. Frees have negative sizes."""
    found: list[tuple[int, Operator | None, int, int]] = []

    def visit(events: Any, operator: Operator | None) -> None:
        for event in events:
            kind, fields = event.typed
            if kind == _EventType.Allocation:
                found.append((event.start_time_ns, operator, fields.ptr, fields.alloc_size))
            is_operator = operator is None and event.name.startswith("aten::")
            visit(event.children, Operator(event.name, event.id) if is_operator else operator)

    visit(events, None)
    found.sort(key=lambda row: row[0])
    yield from (row[1:] for row in found)


WIDER = "model={layers: 1, hidden: 64, heads: 2, kv_heads: 2, ffn: 172, vocab: 64}"
CASES = [
    (NARROW, "batch={micro: 1, sequence: 32}"),
    pytest.param((WIDER, "batch={micro: 2, sequence: 32}"), marks=pytest.mark.nightly),
    pytest.param((), marks=pytest.mark.nightly),
    pytest.param((BF16,), marks=pytest.mark.nightly),
]


@pytest.mark.skipif(which("g++") is None, reason="inductor compiles with a C++ compiler")
@pytest.mark.nightly  # tests/gloo/test_compile.py measures peaks of compiled steps by default
@pytest.mark.parametrize("overrides", CASES)
def test_a_block_is_predicted_to_the_byte_but_for_scratch_memory(
    overrides: tuple[str, ...],
) -> None:
    with torch._inductor.config.patch(compile_threads=1):
        expected, passes = predict_block(*overrides), profile_block(*overrides)
    assert expected == tuple(a_pass.bytes for a_pass in passes)
    for a_pass in passes:
        assert {*a_pass.scratch} <= {"aten::mm", ATTENTION, f"{ATTENTION}_backward"}
        assert a_pass.with_scratch.live == a_pass.bytes.live
        further = a_pass.with_scratch.most - a_pass.bytes.most
        assert 0 <= further <= max(a_pass.scratch.values())
    if overrides == CASES[0]:  # the peak of backward is in attention
        backward = passes[1]
        further = backward.with_scratch.most - backward.bytes.most
        assert further == backward.scratch[f"{ATTENTION}_backward"]
        assert further == 8320 or torch.get_num_threads() > 1
