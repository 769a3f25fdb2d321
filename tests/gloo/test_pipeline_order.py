"""The actions that pipeline ranks executed, compared with the schedule, and the activations that
were alive during each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from ptrain.axes.pipeline.catalogue import make_schedule, pipeline_of
from ptrain.axes.pipeline.run.stage import PipelinedPasses, StageRunner
from ptrain.axes.pipeline.schedule import Action, Schedule
from ptrain.axes.pipeline.stage_facts import count_in_flight
from ptrain.data.corpus import open_corpus
from ptrain.data.sampler import read_batch
from ptrain.interpreter.program import interpret
from ptrain.runtime.world import World
from ptrain.spec.spec import Spec
from ptrain.timeline import Kind
from tests.gloo.pipeline_cases import SCHEDULES, layer_count, pipeline_spec
from tests.pure.pipelines import most_held
from tests.ranks import Ranks

pytestmark = pytest.mark.gloo

Holding = dict[int, int]  # by stage: micro-batches whose activations live


@dataclass
class Recording:
    """The actions of one rank and the micro-batches in memory during each, including its current
    one."""

    log: list[tuple[Action, Holding]] = field(default_factory=list)
    made: dict[tuple[int, int], list[StorageWeakRef]] = field(default_factory=dict)

    def watch(self, stage: StageRunner) -> None:
        """Register hooks: a block's output lives as long as autograd needs it."""

        def keep(operator: nn.Module, given: Any, output: torch.Tensor) -> None:
            *_, latest = (made for where, made in self.made.items() if where[0] == stage.index)
            latest.append(StorageWeakRef(output.untyped_storage()))

        for name, module in stage.wrapped.module.named_modules():
            if "blocks." in name and list(module.parameters(recurse=False)):
                module.register_forward_hook(keep)
        stage.compute = partial(self._compute, stage.compute)  # type: ignore[method-assign]

    def holding(self) -> Holding:
        counts = dict.fromkeys([stage for stage, _ in self.made], 0)
        for (stage, _), storages in self.made.items():
            counts[stage] += not all(storage.expired() for storage in storages)
        return counts

    def _compute(self, run: Any, action: Action, *given: Any) -> Any:
        if action.kind is not Kind.FORWARD:
            self.log.append((action, self.holding()))
            return run(action, *given)
        self.made[action.stage, action.microbatch] = []
        output = run(action, *given)
        self.log.append((action, self.holding()))
        return output


def run_and_record(specs: Sequence[Spec]) -> list[list[tuple[Action, Holding]]]:
    """Run one step of each spec on this rank."""
    found = []
    for spec in specs:
        program = interpret(spec, world=World.join(spec.timeout))
        pipelined = program.passes
        assert isinstance(pipelined, PipelinedPasses)
        recording = Recording()
        for stage in pipelined.stages:
            recording.watch(stage)
        local = read_batch(open_corpus(spec.data), spec=spec, step=0, data_index=0, data_degree=1)
        program.forward_backward(local)
        assert not any(recording.holding().values()), "after the last backward"
        found.append(recording.log)
    return found


def expected_actions(made: Schedule, rank: int) -> list[tuple[Action, Holding]]:
    """Return the expected actions. The two actions of a pair run one after the other with the same
    activations in memory."""
    return [
        (action, holding)
        for step, holding in zip(made.orders[rank], count_in_flight(made, rank), strict=True)
        for action in step.parts
    ]


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.nightly)])
def test_every_rank_executes_its_order_with_the_expected_activations(
    ranks: Ranks, size: int
) -> None:
    specs = [
        pipeline_spec(
            "llama", name, mesh={"pp": size}, batch={"accumulate": 8}, shape={"layers": layers}
        )
        for name in SCHEDULES
        for layers in [layer_count(size, name)]
    ]
    accounts = ranks.run(size, run_and_record, specs)
    for index, spec in enumerate(specs):
        shape = pipeline_of(spec)
        assert shape is not None
        made = make_schedule(spec.pipeline.schedule, shape)
        for rank, account in enumerate(accounts):
            found, wanted = account[index], expected_actions(made, rank)
            assert [each for each, _ in found] == [each for each, _ in wanted], spec.name
            lived = [{**dict.fromkeys(made.stages_of(rank), 0), **each} for _, each in found]
            assert lived == [each for _, each in wanted], f"{spec.name}, rank {rank}"
            assert max(sum(each.values()) for each in lived) == most_held(made, rank)
