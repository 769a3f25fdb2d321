"""A rank that runs out of memory records where, and a step that does not leaves nothing."""

from __future__ import annotations

import json

import pytest
import torch

from ptrain.algebra.legality import require_runnable
from ptrain.codec import decode
from ptrain.cost import Phase, State
from ptrain.data.corpus import open_corpus
from ptrain.interpreter.program import Program, interpret
from ptrain.report.memory_failure import MemoryFailure
from ptrain.runtime.world import World
from ptrain.spec.load import load
from ptrain.train.folder import RunFolder
from ptrain.train.loop import local_batch
from ptrain.train.out_of_memory import record_memory_failure
from tests.jobs import TINY

TOO_LARGE = 2**50  # bytes


def program() -> Program:
    words = ["mesh.dp_shard=1", *(word for word in TINY if not word.startswith("log"))]
    return interpret(require_runnable(load("zero3", words)), world=World())


def run_step(made: Program, folder: RunFolder) -> None:
    with record_memory_failure(made, folder):
        made.forward_backward(local_batch(made, open_corpus(made.spec.data), 0))
        made.step(1e-3)


def allocate(*_: object) -> None:
    torch.empty(TOO_LARGE, dtype=torch.uint8)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "logs").mkdir()
    return RunFolder(tmp_path)


def recorded(folder: RunFolder) -> MemoryFailure:
    failure: MemoryFailure = decode(json.loads(folder.memory_failure(0).read_text()), MemoryFailure)
    return failure


def test_the_module_and_the_live_states_of_a_forward_pass_are_recorded(folder):
    made = program()
    block = made.model.get_submodule("blocks.0.mlp")
    block.register_forward_pre_hook(allocate)
    with pytest.raises(RuntimeError, match="can't allocate"):
        run_step(made, folder)
    failure = recorded(folder)
    assert (failure.phase, failure.module) == (Phase.FORWARD, "blocks.0.mlp")
    assert failure.requested_bytes == TOO_LARGE and failure.activation_bytes is None
    trained = sum(parameter.nbytes for parameter in made.model.parameters())
    assert failure.live[State.PARAMETERS] == trained
    assert not made.observers


def test_a_backward_pass_and_an_update_are_recorded_as_such(folder):
    for phase in (Phase.BACKWARD, Phase.UPDATE):
        made = program()
        if phase is Phase.BACKWARD:
            next(made.model.parameters()).register_hook(allocate)
        else:
            made.update.step = allocate
        with pytest.raises(RuntimeError, match="can't allocate"):
            run_step(made, folder)
        assert recorded(folder).phase is phase


def test_other_errors_and_steps_that_succeed_leave_no_record(folder):
    made = program()
    run_step(made, folder)
    made.update.step = lambda *_: (_ for _ in ()).throw(RuntimeError("shapes differ"))
    with pytest.raises(RuntimeError, match="shapes differ"):
        run_step(made, folder)
    assert not folder.memory_failure(0).exists()
