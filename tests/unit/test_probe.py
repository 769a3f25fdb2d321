"""The choice of the steady step to measure, and the messages about the step before."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ptrain.algebra.legality import require_runnable
from ptrain.cost import State
from ptrain.data.corpus import open_corpus
from ptrain.data.sampler import read_batch
from ptrain.interpreter.program import interpret
from ptrain.runtime.world import World
from ptrain.spec.load import load
from ptrain.train.folder import RunFolder
from ptrain.train.loop_inputs import Probe, first_steady_step


@pytest.mark.parametrize(
    ("overrides", "steady"),
    [
        ((), 2),
        (("eval.every=2",), 2),
        (("gather_after_update=next-forward",), 2),
        (("gather_after_update=next-forward", "eval.every=2"), 3),
        (("gather_after_update=next-forward", "eval.every=2", "checkpoint.every=3"), 5),
        (("gather_after_update=next-forward", "eval.every=1"), 2),
    ],
)
def test_the_steady_step_begins_where_the_update_before_it_ended(overrides, steady):
    spec = require_runnable(load("zero1", overrides))
    assert first_steady_step(spec, 0) == steady


@pytest.mark.parametrize("is_wrong", [False, True])
def test_a_wrongly_declared_state_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, is_wrong: bool
):
    model = {"layers": 1, "hidden": 32, "heads": 2, "ffn": 48, "vocab": 259}
    job = {"model": model, "mesh": {}, "batch": {"sequence": 8}}
    spec = require_runnable(load(job | {"data": {"corpus": "python-docs", "tokenizer": "bytes"}}))
    program = interpret(spec, world=World())
    storages = program.storages

    def declared() -> Iterator[tuple[State, torch.Tensor]]:
        for state, tensor in storages():
            yield (State.PARAMETERS if state is State.GRADIENTS else state), tensor

    if is_wrong:
        program.storages = declared  # type: ignore[method-assign]
    probe = Probe(program, RunFolder(tmp_path), first=0, every=0, measured=lambda _: None)
    with caplog.at_level(logging.WARNING, logger="ptrain"):
        for step in range(3):
            local = read_batch(
                open_corpus(spec.data), spec=spec, step=step, data_index=0, data_degree=1
            )
            with probe(step):
                program.forward_backward(local)
                program.step(1e-3)
    said = [record.getMessage() for record in caplog.records]
    assert any("declared as parameters, but used as gradients" in line for line in said) is is_wrong
    assert is_wrong or not said
