"""The stages of a rank, each with its own wrap, as one wrapped model; and the gradients of tensors
that the first and the last stage both have, summed over the two."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from ptrain.axes.data.run.target import Named, NamedTarget, gradients_of
from ptrain.axes.data.run.wrapped import WrappedModel
from ptrain.costs import State
from ptrain.facts.stages import Chain
from ptrain.rooms.mesh import Mesh
from ptrain.spec.job import OptimizerSpec
from ptrain.spec.precision import Layout
from ptrain.steps.step import Pipeline
from ptrain.timeline import Kind


@dataclass(frozen=True, slots=True)
class LocalStage:
    """One stage: its number, its module and what wraps it."""

    index: int
    module: nn.Module
    wrapped: WrappedModel


class Staged:
    """What the program needs of a rank's stages. The passes are the schedule's."""

    def __init__(
        self, parts: Sequence[LocalStage], step: Pipeline, mesh: Mesh, chain: Chain
    ) -> None:
        self.parts = parts
        self.chain = chain
        self.module = nn.ModuleList(part.module for part in parts)
        self.step = step
        self.mesh = mesh
        self._copies_of = {part.index: list(self._copied(part)) for part in parts}
        self._shared = [target for part in parts for target in self._of_ends(part)]
        self._twins = self._both_ends() if step.shared else None

    def micro_batch(self, is_last: bool) -> AbstractContextManager[None]:
        raise AssertionError("a schedule has the passes of a pipeline")

    def forward_pass(self) -> AbstractContextManager[None]:
        raise AssertionError("a schedule has the passes of a pipeline")

    def backward_pass(self, kind: Kind, is_last: bool) -> AbstractContextManager[None]:
        raise AssertionError("a schedule has the passes of a pipeline")

    def end_evaluation(self) -> None:
        for part in self.parts:
            part.wrapped.end_evaluation()

    def consume_with(self, update: Callable[[int], None]) -> None:
        groups = 0
        for part in self.parts:
            part.wrapped.consume_with(_from(update, groups))
            groups += len(part.wrapped.targets())

    @torch.no_grad()
    def reduce_gradients(self) -> None:
        for part in self.parts:
            part.wrapped.reduce_gradients()
        if self.step.shared:
            self._sum_shared()

    def finish_update(self) -> None:
        for part in self.parts:
            part.wrapped.finish_update()

    def clear_gradients(self) -> None:
        for part in self.parts:
            part.wrapped.clear_gradients()

    def targets(self) -> Sequence[Sequence[NamedTarget]]:
        return [group for part in self.parts for group in part.wrapped.targets()]

    def gradients(self) -> list[torch.Tensor]:
        """Of a stage that has copies, by target: those are not counted here."""
        return [
            gradient
            for part in self.parts
            for gradient in (
                gradients_of(part.wrapped.targets())
                if self._copies_of[part.index]
                else part.wrapped.gradients()
            )
        ]

    def own_update(self, optimizer: OptimizerSpec, layout: Layout) -> None:
        """The update is everybody's."""

    def storages(self) -> Iterator[tuple[State, torch.Tensor]]:
        for part in self.parts:
            yield from part.wrapped.storages()

    def copies(self) -> Sequence[NamedTarget]:
        """Return the targets of what the first stage has itself, where it is counted."""
        return [target for copies in self._copies_of.values() for target in copies]

    def canonical_name(self, name: str) -> str:
        for original, copied in self.step.shared:
            if name == copied or name.startswith(f"{copied}."):
                return original + name.removeprefix(copied)
        return name

    def own(self, named: Mapping[str, torch.Tensor]) -> Named:
        """Return the tensors by the model's names, and those of copies by the stages' names too."""
        copies = {copied: named[name] for name, copied in self.step.shared if name in named}
        return {**named, **copies}

    def _copied(self, part: LocalStage) -> Iterator[NamedTarget]:
        """Of a stage the targets of copies, each a unit of its own, that have gradients."""
        if part.index:
            targets = self._shared_targets(part, [copied for _, copied in self.step.shared])
            yield from (target for target in targets if not target.is_frozen)

    def _of_ends(self, part: LocalStage) -> Iterator[NamedTarget]:
        """Of the first stage the targets that the last one has a copy of, of the last one these."""
        names = {0: [name for name, _ in self.step.shared]}
        names[self.step.stages - 1] = [copied for _, copied in self.step.shared]
        yield from self._shared_targets(part, names.get(part.index, ()))

    def _shared_targets(self, part: LocalStage, names: Sequence[str]) -> Iterator[NamedTarget]:
        """To ask for a target's names may gather it over tp: before the first step only."""
        for group in part.wrapped.targets():
            for target in group:
                if any(name in target.export() for name in names):
                    yield target

    def _both_ends(self) -> dist.ProcessGroup | None:
        """The group of the first and the last stage's ranks, where they are two and this is one."""
        axis, ends = self.step.axis, (self.step.rank_of[0], self.step.rank_of[-1])
        if ends[0] == ends[1]:
            return None
        if self.mesh.degrees[axis] == 2:
            return self.mesh.group((axis,))
        return self.mesh.group_at(axis, ends)

    def _sum_shared(self) -> None:
        held = [g for target in self._shared if (g := target.gradient) is not None]
        if self._twins is not None:
            for gradient in held:
                self.mesh.registry.tag(gradient, State.GRADIENTS)
                dist.all_reduce(gradient, group=self._twins)
        elif held:
            first, last = held[: len(held) // 2], held[len(held) // 2 :]
            for one, other in zip(first, last, strict=True):
                other.copy_(one.add_(other))


def _from(update: Callable[[int], None], groups: int) -> Callable[[int], None]:
    return lambda index: update(groups + index)
