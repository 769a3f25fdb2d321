"""Contenders in turns, on the ranks of a pool: all live there and take a step each, round after
round, in an order that rotates. Imported by its name in the ranks; torch only there."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ptrain.spec.spec import Spec

WARM_UP = 3  # rounds that are left out

Turns = dict[str, tuple[list[float], list[float]]]


def in_turns(specs: Mapping[str, Spec], rounds: int) -> Turns:
    """On one rank: seconds of each step and this rank's share of its loss, by contender."""
    import torch.distributed as dist

    contenders = {name: _Contender(spec) for name, spec in specs.items()}
    found: Turns = {name: ([], []) for name in specs}
    names = list(specs)
    for turn in range(-WARM_UP, rounds):
        shift = turn % len(names)
        for name in (*names[shift:], *names[:shift]):
            local = contenders[name].batch()
            dist.barrier()
            began = time.perf_counter()
            loss = contenders[name].step(local)
            seconds = time.perf_counter() - began
            if turn >= 0:
                found[name][0].append(seconds)
                found[name][1].append(loss)
    return found


class _Contender:
    """A program with its own data, always the same samples."""

    def __init__(self, spec: Spec) -> None:
        from ptrain.data.corpus import corpus
        from ptrain.interpreter.program import interpret
        from ptrain.rooms.world import World

        self.spec = spec
        self.program = interpret(spec, world=World.join(spec.timeout))
        self.source, self.number = corpus(spec.data), 0

    def batch(self) -> object:
        from ptrain.data.sampler import batch

        self.number += 1
        return batch(
            self.source,
            spec=self.spec,
            step=self.number,
            data_index=self.program.data_index,
            data_degree=self.spec.data_degree,
        )

    def step(self, local: object) -> float:
        loss = self.program.forward_backward(local)
        self.program.step(1e-4)
        return float(loss)
