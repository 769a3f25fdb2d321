"""Floating-point operations as torch's own counter sees them run, pass by pass. Its registry leaves
out the fused attention of CPUs, which is counted here as it counts those of GPUs; the product that
is added in place, counted as the one that is not; and the forward pass of linear_cross_entropy,
which shows no operator inside: it has one product, the logits."""

from __future__ import annotations

import math
from collections import Counter
from importlib import import_module
from typing import Any

import torch
from torch.utils.flop_counter import (
    FlopCounterMode,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)

from ptrain.cost import Phase
from ptrain.data.sampler import LocalBatch
from ptrain.interpreter.program import Program
from ptrain.models.objective import can_fuse

Shape = tuple[int, ...]


def _attention(query: Shape, key: Shape, value: Shape, *_: Any, **__: Any) -> int:
    return sdpa_flop_count(query, key, value)


def _attention_backward(
    gradient: Shape, query: Shape, key: Shape, value: Shape, *_: Any, **__: Any
) -> int:
    return sdpa_backward_flop_count(gradient, query, key, value)


def _logits(hidden: Shape, weight: Shape, *_: Any, **__: Any) -> int:
    return 2 * math.prod(hidden) * weight[0]


def _addmm_flops(_: Shape, left: Shape, right: Shape, *__: Any, **___: Any) -> int:
    return 2 * math.prod(left) * right[1]


NOT_REGISTERED = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    torch.ops.aten.addmm_: _addmm_flops,
}
if can_fuse():
    import_module("torch.nn.modules.linear_cross_entropy")  # registers it, else at its first call
    _FUSED = torch.ops.torch_nn._linear_cross_entropy_batch_chunked_no_reduction
    NOT_REGISTERED[_FUSED] = _logits


class _ByPhase:
    """An observer of a program that records the count at the start of each phase."""

    def __init__(self, counter: FlopCounterMode) -> None:
        self.counter, self.known, self.now = counter, 0, Phase.SETUP
        self.found = Counter[Phase]()

    def phase(self, phase: Phase, micro_batch: int) -> None:
        total = self.counter.get_total_flops()
        self.found[self.now] += total - self.known
        self.known, self.now = total, phase


def count_step(program: Program, batch: LocalBatch, lr: float = 1e-3) -> Counter[Phase]:
    """Count one step of `program` and run it."""
    with FlopCounterMode(display=False, custom_mapping=NOT_REGISTERED) as counter:
        watch = _ByPhase(counter)
        program.observers.append(watch)
        try:
            program.forward_backward(batch, lr)
            program.step(lr)
        finally:
            program.observers.remove(watch)
        watch.phase(Phase.SETUP, 0)
    return watch.found
