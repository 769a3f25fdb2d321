"""The runtime of a pipeline: a rank's instructions, one after the other, and nothing else.

Passes of neighbouring stages on one rank hand each other the tensor itself. What is received lives
until the pass that takes it lets go of it, what is sent until its `Release`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch.distributed as dist
from torch import Tensor

from ptrain.axes.pipeline.instructions import (
    Instruction,
    Message,
    Receive,
    Release,
    Send,
    given,
    taken,
)
from ptrain.axes.pipeline.run.failure import Waits
from ptrain.axes.pipeline.run.stage import BoundaryTensor
from ptrain.axes.pipeline.schedule import Action
from ptrain.costs import State
from ptrain.rooms.registry import Registry

# A pass, and what another stage made for it -> what it makes for another stage.
Compute = Callable[[Action, Tensor | None], Tensor | None]


class Runtime:
    """Of the rank that has some of the stages; `rank_of` are the ranks of all stages in `group`.
    Raises RankFailed where a pass does, RuntimeError where a neighbour is gone or silent; what
    it waited for stands in `waits`."""

    def __init__(
        self,
        rank_of: tuple[int, ...],
        group: dist.ProcessGroup,
        boundary: BoundaryTensor,
        registry: Registry,
    ) -> None:
        self.rank_of, self.group = rank_of, group
        self.boundary, self.registry = boundary, registry
        self.waits = Waits(rank_of, group)
        self._here: dict[Message, Tensor] = {}  # received, or made by a pass, and not taken
        self._coming: dict[Message, dist.Work | None] = {}
        self._sent: dict[Message, tuple[Tensor, dist.Work | None]] = {}

    def run(self, instructions: Iterable[Instruction], compute: Compute) -> None:
        """All of them, with `compute` for the passes."""
        for held in (self._here, self._coming, self._sent):
            held.clear()  # a step before may have failed
        self.waits.clear()
        for instruction in instructions:
            match instruction:
                case Action():
                    self._compute(instruction, compute)
                case Receive(message):
                    self._receive(message)
                case Send(message):
                    self._send(message)
                case Release(message):
                    self._release(message)

    def _compute(self, action: Action, compute: Compute) -> None:
        needed, produced = taken(action, len(self.rank_of)), given(action, len(self.rank_of))
        result = compute(action, None if needed is None else self._take(needed))
        if produced is not None:
            # of an input that nothing depends on there is no gradient
            self._here[produced] = self.boundary.empty().zero_() if result is None else result

    def _take(self, message: Message) -> Tensor:
        if message in self._coming:
            self.waits.receives(message)
            _wait(self._coming.pop(message))
            self.waits.clear()
        return self._here.pop(message)

    def _receive(self, message: Message) -> None:
        self._here[message] = buffer = self.boundary.empty()
        self.registry.tag(buffer, State.ACTIVATIONS, phase=message.phase)
        self.waits.receives(message)
        source = self.rank_of[message.source]
        self._coming[message] = dist.irecv(buffer, group=self.group, group_src=source)
        self.waits.clear()

    def _send(self, message: Message) -> None:
        tensor = self._here.pop(message).contiguous()
        self.registry.tag(tensor, State.ACTIVATIONS, phase=message.phase)
        self.waits.sends(message)
        target = self.rank_of[message.target]
        self._sent[message] = tensor, dist.isend(tensor, group=self.group, group_dst=target)
        self.waits.clear()

    def _release(self, message: Message) -> None:
        self.waits.sends(message)
        _, work = self._sent.pop(message)
        _wait(work)
        self.waits.clear()


def _wait(work: dist.Work | None) -> None:
    """None is what torch returns to a rank that is not in the group."""
    if work is not None:
        work.wait()
