"""A program of one rank beside one device: what the checks and the evidence of a step are."""

from __future__ import annotations

from dataclasses import replace

import torch

from ptrain.data.sampler import LocalBatch
from ptrain.interpreter.program import Program, interpret
from ptrain.interpreter.world import World
from ptrain.selection.recompute import settled
from ptrain.spec.load import load
from ptrain.train.exchange import Exchange
from ptrain.verification.examine import examine

TINY = (
    "model.layers=1", "model.hidden=16", "model.heads=2", "model.kv_heads=1", "model.ffn=24",
    "batch.global=8", "batch.micro=2", "batch.sequence=8", "mesh={dp_shard: 1}",
    "precision.compute=fp64",
)  # fmt: skip


def program() -> Program:
    return interpret(settled(load("zero2", TINY)), world=World())


def test_micro_batches_in_another_order_fail_the_ledger_though_every_sum_is_right() -> None:
    swapped = program()
    run = swapped.forward_backward

    def forward_backward(batch: LocalBatch, lr: float | None = None) -> torch.Tensor:
        first, second, third, last = batch.tokens.split(2)
        return run(replace(batch, tokens=torch.cat([first, third, second, last])), lr)

    swapped.forward_backward = forward_backward  # type: ignore[method-assign]
    found = examine(swapped, Exchange(World()), 1)
    assert found.culprit is not None
    assert [check.name for check in found.checks if not check.holds] == ["samples"]
