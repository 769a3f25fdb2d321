"""Parts of user models, traced by processes that each act as one rank."""

from __future__ import annotations

import gc
import json
from dataclasses import replace
from datetime import date
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist

from ptrain.algebra.legality import require_runnable
from ptrain.derivation.estimate import derive
from ptrain.errors import PtrainError
from ptrain.plan.lower import built_in_facts
from ptrain.spec.job import Timeout
from ptrain.spec.load import load
from ptrain.spec.spec import Spec
from ptrain.traces import tensor_parts
from ptrain.traces.facts import facts_of, module_facts
from ptrain.traces.tensor_parts import by_place, trace_parts
from ptrain.train.session import _run_on_first_rank
from tests.models_external import pairs


@pytest.fixture(autouse=True)
def forked_traces() -> None:
    """Here the processes are started as a user's are."""


def spec_of(function: str, tp: int = 2, **arguments: Any) -> Spec:
    target = f"tests.models_external:{function}"
    mapping: dict[str, Any] = {
        "name": "parts",
        "model": {"target": target, "arguments": arguments},
        "mesh": {"tp": tp},
        "placement": {"tp": "S,S,S,R"},
        "batch": {"global": 2, "micro": 1, "sequence": 16},
    }
    return require_runnable(load(mapping))


@pytest.mark.nightly
def test_ranks_with_slices_of_the_same_shapes_have_one_timeline():
    spec = spec_of("pairs", tp=4, vocab=261)
    facts = facts_of(spec)  # 66 rows of the vocabulary on each rank but the last, which has 63
    (stage,) = facts.stage_passes
    first, *others = stage
    assert others[:2] == [first, first] and others[2] != first
    assert {row.rank for row in derive(spec, facts).exact.peak} == {0, 1, 2, 3}


def test_without_a_trace_of_the_parts_peaks_are_left_open():
    spec = spec_of("pairs")
    exact = derive(spec, module_facts(pairs(), spec)).exact
    assert "peak" in exact.undefined and not exact.peak
    assert exact.traffic


@pytest.mark.nightly
def test_an_unshardable_model_is_reported():
    spec = spec_of("stubborn")
    with pytest.raises(PtrainError, match=r"model runs, but the sharded model does not(.|\n)*-1"):
        facts_of(spec)


def test_a_trace_that_takes_too_long_is_ended_and_reported(monkeypatch: pytest.MonkeyPatch):
    # Where two processes import torch within the seconds of reading, there would be an answer.
    monkeypatch.setattr(tensor_parts, "_READING", 0.01)
    spec = replace(spec_of("pairs", hidden=24), timeout=Timeout(init=0.01))
    with pytest.raises(
        PtrainError, match=r"timeout.init: .* longer than 0.01 s(.|\n)*Use a larger"
    ):
        facts_of(spec)


def test_arguments_that_cannot_be_sent_to_a_process_are_rejected():
    spec = spec_of("pairs", layers=date(2026, 1, 1))
    found = trace_parts(spec, module_facts(pairs(), spec), allow_import=True)
    assert "model.arguments" in found["problem"] and "type date" in found["problem"]


class Shared:
    """An exchange that rank 0 has with itself."""

    world = SimpleNamespace(is_first=True)

    def __init__(self) -> None:
        self.told: list[dict[str, str]] = []

    def broadcast(self, value: dict[str, str]) -> dict[str, str]:
        self.told.append(value)
        return value


@pytest.mark.parametrize("error", [TypeError("a set"), OSError("none"), BrokenPipeError()])
def test_a_failure_of_the_first_rank_stops_the_others(error):
    exchange = Shared()

    def trace() -> dict[str, str]:
        raise error

    with pytest.raises(type(error)):
        _run_on_first_rank(exchange, trace)  # type: ignore[arg-type]
    (told,) = exchange.told
    with pytest.raises(PtrainError, match=rf"rank 0 .*{type(error).__name__}"):
        by_place(told)
    assert _run_on_first_rank(exchange, lambda: told) is told  # type: ignore[arg-type]


def test_the_processes_import_only_allowed_modules():
    spec = spec_of("pairs", layers=1)
    found = trace_parts(spec, module_facts(pairs(layers=1), spec), allow_import=False)
    assert "--allow-import" in found["problem"]


class _Silent:
    """A process that answers with its question's ranks; `at_once` says how many there were of it at
    the same time."""

    running: ClassVar[set[_Silent]] = set()
    at_once: ClassVar[list[int]] = []
    returncode = 0

    def __init__(self, *command: Any, **pipes: Any) -> None:
        self._ranks = [-1]
        self.stdin: Any = SimpleNamespace(write=self._ask, close=lambda: None)
        self.running.add(self)
        self.at_once.append(len(self.running))

    def _ask(self, question: str) -> None:
        self._ranks = json.loads(question)[1]

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        self.running.discard(self)
        return f"{self._ranks}\n", ""

    def kill(self) -> None:
        pass


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> type[_Silent]:
    monkeypatch.setattr(tensor_parts, "Popen", _Silent)
    monkeypatch.setattr(tensor_parts, "_played_here", lambda request: [])
    monkeypatch.setattr(_Silent, "at_once", [])
    tensor_parts._request_answers.cache_clear()
    return _Silent


def over_cp(attention: Any, degree: int) -> dict[str, Any]:
    """As `timelines` which rank is traced in the place of each."""
    mapping: dict[str, Any] = {
        "name": "parts",
        "model": {"family": "gpt", "layers": 2, "hidden": 48, "heads": 24, "vocab": 261},
        "mesh": {"cp": degree},
        "placement": {"cp": "R,R,R,S"},
        "context": {"attention": attention},
        "batch": {"global": 2, "micro": 1, "sequence": 96},
    }
    spec = require_runnable(load(mapping))
    return trace_parts(spec, built_in_facts(spec), allow_import=False)


def test_ranks_traced_in_this_process_leave_no_state(monkeypatch, capsys):
    tensor_parts._request_answers.cache_clear()
    monkeypatch.setattr(tensor_parts, "Popen", None)  # no other process
    gc.freeze()  # as a program does before it forks workers
    try:
        frozen, state = gc.get_freeze_count(), torch.get_rng_state()
        (first, second) = over_cp("ulysses", 2)["timelines"]
        assert gc.get_freeze_count() > frozen / 2  # some of the objects are gone by then
    finally:
        gc.unfreeze()
    assert first == second
    assert torch.equal(torch.get_rng_state(), state)
    assert not dist.is_initialized()
    assert capsys.readouterr().out == ""


def test_no_more_processes_trace_at_once_than_there_are_cores(monkeypatch, silent):
    monkeypatch.setattr(tensor_parts, "cores", lambda: 3)
    assert over_cp("ring", 16) == {"timelines": [*range(16)]}
    assert silent.at_once == [1, 2, 3] and not silent.running


@pytest.mark.parametrize(
    ("attention", "degree", "players"),
    [
        ("ulysses", 8, [0] * 8),
        ("zigzag", 4, [0, 1, 2, 3]),  # as much work, of other kernels
        ({"ulysses": 2, "ring": 2}, 4, [0, 0, 2, 2]),
        ({"ulysses": 3, "ring": 2}, 6, [0, 1, 0, 3, 4, 3]),  # the middle has two stretches
    ],
)
def test_identical_ranks_of_cp_are_traced_once(silent, attention, degree, players):
    assert over_cp(attention, degree) == {"timelines": players}


def test_a_model_that_does_not_run_on_slices_gets_a_message_about_tokens(monkeypatch, silent):
    monkeypatch.setattr(silent, "returncode", 1)
    problem = over_cp("zigzag", 2)["problem"]
    assert "mesh.cp: the full model runs, but the sharded model does not" in problem
    assert "number of tokens" in problem and "tensor.plan" not in problem
