"""What the ranks of a pipeline really computed, action by action, against the schedule; and whose
activations lived while they did."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from ptrain.axes.pipeline.form import pipeline_of
from ptrain.axes.pipeline.holdings import held, most_held
from ptrain.axes.pipeline.known import schedule
from ptrain.axes.pipeline.run.apply import Pipelined
from ptrain.axes.pipeline.run.stage import Stage
from ptrain.axes.pipeline.schedule import Action, Schedule
from ptrain.data.corpus import corpus
from ptrain.data.sampler import batch
from ptrain.interpreter.program import interpret
from ptrain.rooms.world import World
from ptrain.spec.spec import Spec
from ptrain.timeline import Kind
from tests.gloo.pipeline_cases import SCHEDULES, layers_of, spec_of
from tests.ranks import Ranks

pytestmark = pytest.mark.gloo

Holding = dict[int, int]  # by stage: micro-batches whose activations live


@dataclass
class Recording:
    """The actions of one rank and what it held while each ran, its own micro-batch included.
    `each_time` micro-batches go through torch's schedule at once."""

    each_time: int
    log: list[tuple[Action, Holding]] = field(default_factory=list)
    made: dict[tuple[int, int], list[StorageWeakRef]] = field(default_factory=dict)

    def watch(self, stage: Stage) -> None:
        """What the operators of a block give lives as long as autograd needs it. (The logits live
        a little longer: torch's loop has them until the next forward returns.)"""

        def keep(operator: nn.Module, given: Any, output: torch.Tensor) -> None:
            *_, latest = (
                made for where, made in self.made.items() if where[0] == stage.stage_index
            )
            latest.append(StorageWeakRef(output.untyped_storage()))

        for name, module in stage.wrapped.module.named_modules():
            if "blocks." in name and list(module.parameters(recurse=False)):
                module.register_forward_hook(keep)
        for name, run in (
            ("forward_one_chunk", self._forward),
            ("backward_one_chunk", self._backward),
            ("backward_weight_one_chunk", self._weight),
        ):
            setattr(stage, name, partial(run, stage, getattr(stage, name)))

    def holding(self) -> Holding:
        counts = dict.fromkeys([stage for stage, _ in self.made], 0)
        for (stage, _), storages in self.made.items():
            counts[stage] += not all(storage.expired() for storage in storages)
        return counts

    def _note(self, kind: Kind, stage: Stage, chunk: int) -> None:
        done = [
            each for each, _ in self.log if (each.kind, each.stage) == (kind, stage.stage_index)
        ]
        number = chunk + len(done) // self.each_time * self.each_time
        self.log.append((Action(kind, stage.stage_index, number), self.holding()))

    def _forward(self, stage: Stage, run: Any, chunk: int, *args: Any, **options: Any) -> Any:
        number = sum(where == stage.stage_index for where, _ in self.made)
        self.made[stage.stage_index, number] = []
        output = run(chunk, *args, **options)
        self._note(Kind.FORWARD, stage, chunk)
        return output

    def _backward(self, stage: Stage, run: Any, chunk: int, **options: Any) -> None:
        whole = options.get("full_backward", True)
        self._note(Kind.BACKWARD if whole else Kind.INPUT, stage, chunk)
        run(chunk, **options)

    def _weight(self, stage: Stage, run: Any, chunk: int, **options: Any) -> None:
        self._note(Kind.WEIGHT, stage, chunk)
        run(chunk, **options)


def executed(specs: Sequence[Spec]) -> list[list[tuple[Action, Holding]]]:
    """Of each spec one step on this rank."""
    found = []
    for spec in specs:
        program = interpret(spec, world=World.join(spec.timeout))
        pipelined = program.passes
        assert isinstance(pipelined, Pipelined)
        recording = Recording(pipelined.each_time)
        for stage in pipelined.stages:
            recording.watch(stage)
        local = batch(corpus(spec.data), spec=spec, step=0, data_index=0, data_degree=1)
        program.forward_backward(local)
        assert not any(recording.holding().values()), "after the last backward"
        found.append(recording.log)
    return found


def expected(made: Schedule, rank: int) -> list[tuple[Action, Holding]]:
    """Of a pair, whose actions run one after the other, both happen while it holds the same."""
    return [
        (action, holding)
        for step, holding in zip(made.orders[rank], held(made, rank), strict=True)
        for action in step.parts
    ]


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.nightly)])
def test_every_rank_computes_its_order_and_holds_what_is_said(ranks: Ranks, size: int) -> None:
    specs = [
        spec_of("llama", name, mesh={"pp": size}, batch={"accumulate": 8}, shape={"layers": layers})
        for name in SCHEDULES
        for layers in [layers_of(size, name)]
    ]
    accounts = ranks.run(size, executed, specs)
    for index, spec in enumerate(specs):
        shape = pipeline_of(spec)
        assert shape is not None
        made = schedule(spec.pipeline.schedule, shape)
        for rank, account in enumerate(accounts):
            found, wanted = account[index], expected(made, rank)
            assert [each for each, _ in found] == [each for each, _ in wanted], spec.name
            lived = [{**dict.fromkeys(made.stages_of(rank), 0), **each} for _, each in found]
            assert lived == [each for _, each in wanted], f"{spec.name}, rank {rank}"
            assert max(sum(each.values()) for each in lived) == most_held(made, rank)
