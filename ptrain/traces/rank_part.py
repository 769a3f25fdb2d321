"""What one rank runs of a model, traced as its plan leaves it: operators cut, activations kept, the
loss in chunks, and with pp its part of a stage. The tables of built-in models are made so, and what
the ranks have of any other model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ptrain.activations.run.apply import keep_traced
from ptrain.axes.context.run.apply import ContextGroups, parallelize_context
from ptrain.axes.context.run.randomness import MicroBatchCut
from ptrain.axes.context.run.slices import token_slices
from ptrain.axes.pipeline.run.cut import part_of
from ptrain.axes.pipeline.stage_facts import stage_roles
from ptrain.axes.tensor.run.apply import loss_inside, micro_batch, parallelize
from ptrain.facts.model import Attending
from ptrain.facts.stages import Chain, Stage
from ptrain.interpreter.loss import Loss
from ptrain.models.objective import SampleBatch, objective_of, of_tokens, sample_batch
from ptrain.models.selection import Extent
from ptrain.models.trace import Recording
from ptrain.models.units import ROOT
from ptrain.rooms.mesh import Mesh
from ptrain.rooms.registry import Registry
from ptrain.spec.dials import ReduceScatterVia
from ptrain.spec.role import Roles
from ptrain.spec.spec import Spec
from ptrain.steps.step import ChunkedLoss, ContextParallel, Keep, Parallelize
from ptrain.traces.layer_rows import Names, only, running_units
from ptrain.traces.record import TracedStage, Units, record, record_stage, run_unrecorded

_TEACHING = 2  # layers
Change = Callable[[nn.Module], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCuts:
    """The stages that pp cuts a model into, and what they are cut from."""

    stages: Sequence[Stage]
    chain: Chain


class ContextSlices:
    """Slices of the tokens over a mesh of which this process plays one rank."""

    def __init__(
        self,
        step: ContextParallel,
        mesh: Mesh,
        via: ReduceScatterVia,
        cut: MicroBatchCut,
        attending: Attending | None = None,
    ) -> None:
        self._groups = ContextGroups(step, mesh, cut, attending)
        self._apply = partial(parallelize_context, step=step, mesh=mesh, via=via)
        self.spans = self._groups.masks.spans

    def apply(self, module: nn.Module) -> None:
        """Change a module in place."""
        self._apply(module, groups=self._groups)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPart:
    """What a plan does to a model before a micro-batch of `batch` samples of `sequence` tokens runs
    through it. Operators are cut over `mesh`, of which this process plays one rank; `head` is the
    module that makes the logits of a model that is not built in; `extent` how much operators select
    by data. `context`: the rank has a slice of the tokens; `slices` of them it has one between the
    blocks. `experts` leaves a module the rank's own ones."""

    batch: int
    sequence: int
    tensor: Parallelize | None = None
    mesh: DeviceMesh | None = None
    context: ContextSlices | None = None
    experts: Callable[[nn.Module], None] | None = None
    slices: int = 1
    keep: Keep | None = None
    loss: ChunkedLoss | None = None
    head: str = ROOT
    spec: Spec | None = None  # whose samples and loss they are, where these are not ours
    has_learnt: bool = False  # torch, on a part with the same operators
    extent: Extent = Extent.GIVEN

    def trace(self, model: nn.Module, units: Units, alike: Names = ()) -> Recording:
        """Return the recording of a whole model, which is changed in place. Of layers that are
        `alike` torch learns from two: the second is given what all behind it are."""
        return self.traces(model, units, alike)[0]

    def traces(
        self, model: nn.Module, units: Units, alike: Names = (), *changes: Change
    ) -> list[Recording]:
        """Return the same, and another recording after each of `changes` to the model."""
        loss = self._prepared(model, self.tensor.roles if self.tensor else ())
        samples = self._samples()

        def forward() -> Tensor:
            return loss.run(model, samples) / samples.rows

        with micro_batch(self.tensor)():
            run = partial(record, model, units, forward, *samples.tensors, extent=self.extent)
            taught = alike[:_TEACHING]
            learn = partial(run_unrecorded, model, running_units(units, alike, taught), forward)
            recordings = [self._when_learnt(run, learn, partial(only, model, alike, taught))]
            for change in changes:
                change(model)
                recordings.append(run())
            return recordings

    def trace_stage(
        self,
        model: nn.Module,
        units: Units,
        cuts: StageCuts,
        index: int,
        alike: Names = (),
        *changes: Change,
        in_halves: bool,
    ) -> list[Recording]:
        """Return the recording of a stage's passes, and where its backward pass runs `in_halves`
        that of the halves; the same after each of `changes` to its part; `alike` as of `trace`. The
        model is not changed; its part may be on meta, and is then made of nothing in particular."""
        stages, ends = cuts.stages, cuts.chain.ends
        is_last = index == len(stages) - 1
        part = part_of(model, stages, index, cuts.chain)
        roles = self.tensor.roles if self.tensor else ()
        loss = self._prepared(
            part, stage_roles(roles, stages[index], len(stages), ends), has_loss=is_last
        )
        _make_real(part)
        samples = self._samples()
        dtype = next(part.parameters()).dtype
        stage = TracedStage(
            module=part,
            units=units,
            hidden=torch.zeros(self.batch, *self._boundary(cuts.chain), dtype=dtype),
            samples=samples,
            is_first=index == 0,
            forward=partial(_forward, loss, samples),
            loss=partial(_mean, loss, samples) if is_last else None,
            around=partial(loss.given, samples),
            extent=self.extent,
        )
        with micro_batch(self.tensor)():
            recordings, runs, taught = [], [], alike[:_TEACHING]
            short = replace(stage, units=running_units(units, alike, taught))
            for halves in (False, True) if in_halves else (False,):
                run = partial(record_stage, stage, in_halves=halves)
                learn = partial(record_stage, short, in_halves=halves)
                few = partial(only, part, alike, taught)
                recordings.append(self._when_learnt(run, learn, few))
                runs.append(run)
            for change in changes:
                change(part)
                recordings += [run() for run in runs]
            return recordings

    def _when_learnt(
        self,
        run: Callable[[], Recording],
        learn: Callable[[], object],
        few: Callable[[], AbstractContextManager[None]],
    ) -> Recording:
        """What happens when torch has learnt what each operator is cut to: it computes that on
        tensors, the first time. `learn` runs the same operators, within `few` as many layers as it
        takes."""
        if (self.mesh or self.experts) and not self.has_learnt:
            with few():
                learn()
        return run()

    def _prepared(self, module: nn.Module, roles: Roles, *, has_loss: bool = True) -> Loss:
        """Change a module in place, and return how it gives its loss."""
        if self.tensor is not None:
            assert self.mesh is not None, "operators are cut over ranks"
            parallelize(module, replace(self.tensor, roles=roles), self.mesh, Registry())
        if self.context is not None:
            self.context.apply(module)
        if self.experts is not None:
            self.experts(module)
        keep_traced(module, self.keep)
        is_inside = has_loss and self.loss is not None
        objective = objective_of(self.spec.loss) if self.spec else None
        inside = loss_inside(self.loss, self.tensor) if is_inside and self.loss else None
        loss = Loss(objective, inside)
        loss.attach(module, self.head)
        return loss

    def _samples(self) -> SampleBatch:
        if self.context is not None:
            return token_slices(of_tokens(self._tokens()), self.context.spans)
        if self.spec is not None:
            return sample_batch(self.spec)
        return of_tokens(self._tokens())

    def _tokens(self) -> Tensor:
        return torch.zeros(self.batch, self.sequence + 1, dtype=torch.int64)

    def _boundary(self, chain: Chain) -> tuple[int, ...]:
        """The shape of a sample's hidden states that the rank has between the blocks."""
        return chain.sample_shape(self.sequence, self.slices)


def _mean(loss: Loss, samples: SampleBatch, output: Tensor) -> Tensor:
    return loss.of_forward(output, samples) / samples.rows


def _forward(loss: Loss, samples: SampleBatch, model: Any) -> Tensor:
    return loss.forward(model, samples)


@torch.no_grad()
def _make_real(part: nn.Module) -> None:
    """No size depends on what is in a parameter."""
    if any(parameter.is_meta for parameter in part.parameters()):
        part.to_empty(device="cpu")
        for parameter in part.parameters():
            parameter.zero_()
