"""A loop that does not synchronize: the figures of a step arrive when the next step is launched."""

from __future__ import annotations

import json
import signal
import time
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

from ptrain.algebra.legality import require_runnable
from ptrain.errors import TrainingStopped
from ptrain.internals import process_groups
from ptrain.interpreter.program import Program, interpret
from ptrain.meters import holdings
from ptrain.runtime.world import World
from ptrain.spec.load import load
from ptrain.train import session
from ptrain.train.exchange import DeviceSums
from ptrain.train.finite import FiniteGuard
from ptrain.train.options import Options
from ptrain.train.rank_start import Interrupts
from tests.gloo.simulated_device import (
    SimulatedEvent,
    SimulatedQueue,
    record_reads,
    simulated_device,
)
from tests.models_poisoned import TENSOR
from tests.ranks import Ranks

pytestmark = pytest.mark.gloo

SMALL = (
    "model={layers: 2, hidden: 32, heads: 4, kv_heads: 2, ffn: 64, vocab: 260}",
    "batch.sequence=16",
    "batch.global=8",
    "batch.micro=2",
)
UNCLIPPED = "optimizer.clip=null"
FIRST, STEPS = 5, 8  # the meters run in steps 1 and 2 (from 0), a stopwatch in the third
nightly = pytest.mark.nightly
Values = dict[tuple[str, ...], torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class RankResult:
    """The result of a rank's training: exit code, output and final state, and the last computed
    state at the start of each step."""

    code: int
    text: str
    held: Values
    before: dict[int, Values]


def state_copy(program: Program) -> Values:
    parts = chain(holdings.parameters(program), holdings.optimizer_state(program))
    return {part.identity: part.tensor.clone() for part in parts}


def train_on_rank(
    words: tuple[str, ...], folder: str, is_played: bool, fault: int = -1, signal_in: int = -1
) -> RankResult:
    """Train on this rank. In step `fault` (from 0) the last reduced gradient of rank 1 is NaN; in
    step `signal_in` the rank receives a signal to stop."""
    before: dict[int, Values] = {}
    programs: list[Program] = []

    def observed(*args: Any, **kwargs: Any) -> Program:
        program = interpret(*args, **kwargs)
        programs.append(program)
        forward_backward, reduce_gradients = (
            program.forward_backward,
            program.wrapped.reduce_gradients,
        )
        ids: list[tuple[int, ...]] = []

        def noted(batch: Any, *rate: float) -> torch.Tensor:
            if batch.sample_ids not in ids:
                ids.append(batch.sample_ids)
                before[len(ids) - 1] = state_copy(program)
                if len(ids) - 1 == signal_in and program.world.rank == 1:
                    signal.raise_signal(signal.SIGTERM)
            return forward_backward(batch, *rate)

        def faulty() -> None:
            reduce_gradients()
            assert program.batch is not None
            if program.world.rank == 1 and ids.index(program.batch.sample_ids) == fault:
                targets = [target for group in program.wrapped.targets() for target in group]
                gradient = [t.gradient for t in targets if t.gradient is not None][-1]
                gradient.view(-1)[-1] = float("nan")

        program.forward_backward = noted  # type: ignore[method-assign, assignment]
        program.wrapped.reduce_gradients = faulty  # type: ignore[method-assign]
        return program

    with pytest.MonkeyPatch.context() as patch, simulated_device(is_played=is_played):
        patch.setattr(session, "interpret", observed)
        options = Options(
            spec=words[0],
            overrides=words[1:],
            run_dir=Path(folder),
            quiet=True,
            allow_import=True,
        )
        try:
            code, text = session.train_rank(options), ""
        except TrainingStopped as stopped:
            code, text = stopped.exit_code, str(stopped)
    return RankResult(code=code, text=text, held=state_copy(programs[0]), before=before)


def untimed_rows(folder: Path) -> list[dict[str, float]]:
    """Return the rows of steps without clock values."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    timed = ("seconds", "tokens_per_second", "counted_calls", "counted_sent_bytes")
    return [{k: v for k, v in json.loads(line).items() if k not in timed} for line in lines]


def checkpoint_steps(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").glob("step-*"))


def reads_by_step(words: tuple[str, ...], folder: str, is_played: bool) -> dict[int, list[str]]:
    options = Options(spec=words[0], overrides=words[1:], run_dir=Path(folder), quiet=True)
    with simulated_device(is_played=is_played), record_reads() as reads:
        session.train_rank(options)
    return {step: names for step, names in reads.by_step.items() if FIRST <= step < STEPS - 1}


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("ddp", ()),
        ("zero1", (UNCLIPPED,)),
        ("zero3", ()),
        ("pp-1f1b", ()),
        ("tp", ()),
        pytest.param("zero1", (), marks=nightly),
        pytest.param("zero2", ("precision.layout=fp16",), marks=nightly),
        pytest.param("ddp-zero-redundancy", (), marks=nightly),
        pytest.param("tp-zero3", (), marks=nightly),
    ],
)
def test_no_value_is_read_from_the_device_between_steps(
    ranks: Ranks, tmp_path: Path, name: str, more: tuple[str, ...]
) -> None:
    words = (name, *SMALL, f"train.steps={STEPS}", *more)
    size = load(name).spec.world_size
    for reads in ranks.run(size, reads_by_step, words, str(tmp_path / "run"), True):
        assert reads == {}


def test_the_loss_scale_is_read_with_the_other_figures(ranks: Ranks, tmp_path: Path) -> None:
    """The host waits for the loss, the norm, and whether the update is skipped."""
    words = ("muon", *SMALL, f"train.steps={STEPS}", "precision.layout=fp16")
    for reads in ranks.run(2, reads_by_step, words, str(tmp_path / "run"), True):
        assert reads == dict.fromkeys(range(FIRST, STEPS - 1), ["__float__"] * 3)


def sums_by_group() -> dict[str, int]:
    """Return the number of collectives per group that a reading of the figures makes."""
    program = interpret(require_runnable(load("hsdp", SMALL)), world=World.join())
    sums = DeviceSums(program, SimulatedQueue(program.world.device), Interrupts())
    groups = {name: group for group, name in process_groups.group_names().items()}
    before = {name: process_groups.count_collectives([group]) for name, group in groups.items()}
    sums.start_check(program.loss.share, None)
    issued = {name: process_groups.count_collectives([group]) for name, group in groups.items()}
    return {name: count - before[name] for name, count in issued.items() if count != before[name]}


def test_the_device_s_sums_need_no_group_but_that_of_all_ranks(ranks: Ranks) -> None:
    assert ranks.run(4, sums_by_group) == [{"0": 1}] * 4  # torch's name of the first group


def test_a_synchronizing_loop_is_detected_in_every_step(ranks: Ranks, tmp_path: Path) -> None:
    words = ("ddp", *SMALL, f"train.steps={STEPS}")
    for reads in ranks.run(2, reads_by_step, words, str(tmp_path / "run"), False):
        assert list(reads) == list(range(FIRST, STEPS - 1))


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("ddp", ("eval.every=3", "eval.batches=1", "checkpoint.every=4")),
        pytest.param("zero1", ("precision.layout=fp16", "checkpoint.every=4"), marks=nightly),
        pytest.param("zero3", ("optimizer.name=sgd", "optimizer.momentum=0.9"), marks=nightly),
        pytest.param("ddp-zero-redundancy", (), marks=nightly),
        pytest.param("ddp", ("model.preset=moe-tiny",), marks=nightly),
    ],
)
def test_rows_and_states_equal_those_of_a_synchronizing_loop(
    ranks: Ranks, tmp_path: Path, name: str, more: tuple[str, ...]
) -> None:
    words = (name, *SMALL, "train.steps=6", *more)
    waits = ranks.run(2, train_on_rank, words, str(tmp_path / "waits"), False)
    late = ranks.run(2, train_on_rank, words, str(tmp_path / "late"), True)
    assert {end.code for end in (*waits, *late)} == {0}
    assert untimed_rows(tmp_path / "late") == untimed_rows(tmp_path / "waits")
    assert [row["step"] for row in untimed_rows(tmp_path / "late") if "loss" in row] == [
        *range(1, 7)
    ]
    assert all(are_equal(its.held, mine.held) for its, mine in zip(late, waits, strict=True))
    assert checkpoint_steps(tmp_path / "late") == checkpoint_steps(tmp_path / "waits")


def are_equal(left: Values, right: Values) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("zero3", ()),
        ("ddp", (UNCLIPPED,)),
        pytest.param("zero1", ("optimizer.name=sgd", "optimizer.momentum=0.9"), marks=nightly),
        pytest.param("zero2", (UNCLIPPED, "precision.layout=zero16"), marks=nightly),
        pytest.param("ddp-zero-redundancy", (), marks=nightly),
        pytest.param("hsdp", (), marks=nightly),
        pytest.param("pp-1f1b", (UNCLIPPED,), marks=nightly),
        pytest.param("tp", (), marks=nightly),
        pytest.param("muon", (), marks=nightly),  # whose host waits
        pytest.param("zero-offload", (), marks=nightly),  # as well
        pytest.param("zero1", ("placement.dp_shard=R,S,O,R",), marks=nightly),
    ],
)
def test_a_non_finite_gradient_is_reported_late_and_stops_updates(
    ranks: Ranks, tmp_path: Path, name: str, more: tuple[str, ...]
) -> None:
    """The gradient of the third step; the fourth is launched before the host reads it."""
    words = (name, *SMALL, "train.steps=6", "checkpoint.every=2", *more)
    size = load(name).spec.world_size
    waits = ranks.run(size, train_on_rank, words, str(tmp_path / "waits"), False, 2)
    late = ranks.run(size, train_on_rank, words, str(tmp_path / "late"), True, 2)
    (text,) = {end.text for end in (*waits, *late)}
    assert text.startswith("step 3: the loss is 5.") and " in 1 of " in text
    assert "the parameters are those of step 2; step 3 was not saved" in text
    assert {end.code for end in late} == {TrainingStopped.exit_code}
    assert all(are_equal(end.held, end.before[2]) for end in late)
    assert not any(are_equal(end.before[2], end.before[1]) for end in late)
    assert (
        checkpoint_steps(tmp_path / "late")
        == checkpoint_steps(tmp_path / "waits")
        == ["step-00000002"]
    )
    assert untimed_rows(tmp_path / "late") == untimed_rows(tmp_path / "waits")
    is_late = name not in ("muon", "zero-offload") and "placement.dp_shard=R,S,O,R" not in more
    assert all((3 in end.before) is is_late for end in late)


def test_non_finite_values_are_reported_before_differences_between_ranks(
    ranks: Ranks, tmp_path: Path
) -> None:
    words = ("ddp", *SMALL, "train.steps=6", UNCLIPPED, "consistency_every=3")
    for is_played in (False, True):
        ends = ranks.run(2, train_on_rank, words, str(tmp_path / str(is_played)), is_played, 2)
        (text,) = {end.text for end in ends}
        assert text.startswith("step 3: the loss is 5.") and " in 1 of " in text


def test_a_gradient_that_is_finite_on_replay_is_reported_so(ranks: Ranks, tmp_path: Path) -> None:
    model = "model={target: tests.models_poisoned:necks, arguments: {at: 3, value: nan}}"
    sizes = ("batch.sequence=32", "batch.global=8", "batch.micro=4")
    words = ("zero3", model, *sizes, "train.steps=6")
    ends = ranks.run(2, train_on_rank, words, str(tmp_path / "run"), True)
    (text,) = {end.text for end in ends}
    assert text.startswith("step 3: the loss is 5.") and TENSOR not in text
    assert "but gradients are not finite\n" in text
    assert "recomputing the step gave finite values: a device may be faulty" in text
    assert all(are_equal(end.held, end.before[2]) for end in ends)


def test_an_interrupt_ends_a_training_with_the_step_that_was_launched_meanwhile(
    ranks: Ranks, tmp_path: Path
) -> None:
    words = ("zero1", *SMALL, "train.steps=9", "checkpoint.at_end=true")
    ends = ranks.run(2, train_on_rank, words, str(tmp_path / "run"), True, -1, 2)
    assert {end.code for end in ends} == {143}
    assert [row["step"] for row in untimed_rows(tmp_path / "run")] == [1, 2, 3, 4]
    assert checkpoint_steps(tmp_path / "run") == ["step-00000004"]


def test_an_exception_leaves_the_rows_of_steps_that_are_over(ranks: Ranks, tmp_path: Path) -> None:
    codes = ranks.run(1, stop_training, str(tmp_path / "run"))
    assert codes == ["broken off"]
    assert [row["step"] for row in untimed_rows(tmp_path / "run")] == [1, 2, 3]


def completed_event(queue: SimulatedQueue) -> SimulatedEvent:
    """Return an event that is completed at once."""
    mark = SimulatedEvent(time.perf_counter(), queue.under_way)
    mark.wait()
    return mark


def stop_training(folder: str) -> str:
    """Raise in the fourth step, after the device completed the third."""
    look, looks = FiniteGuard.start_check, iter(range(9))

    def breaking(guard: FiniteGuard, step: int, *others: Any) -> Any:
        if next(looks) == 3:
            raise KeyError("broken off")
        return look(guard, step, *others)

    words = ("mesh.dp_replicate=1", *SMALL, "train.steps=6")
    with pytest.MonkeyPatch.context() as patch, simulated_device():
        patch.setattr(FiniteGuard, "start_check", breaking)
        patch.setattr(SimulatedQueue, "mark", completed_event)
        try:
            session.train_rank(
                Options(spec="ddp", overrides=words, run_dir=Path(folder), quiet=True)
            )
        except KeyError as error:
            return str(error.args[0])
    return ""
