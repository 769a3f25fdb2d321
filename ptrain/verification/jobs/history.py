"""Which values the loop's parameters have had after each step, by checksum."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from ptrain.verification.jobs.compare import digest
from ptrain.verification.jobs.shards import ParameterShard
from ptrain.verification.jobs.step import StepComparison

_COARSER = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenValues:
    """What a parameter is that was written before a forward pass: the values after step `step` (-1:
    of the start), or one device's `rounded` to a dtype; neither where nothing tells."""

    step: int | None = None
    rounded: str = ""


@dataclass(slots=True)
class History:
    """Checksums of this rank's elements by parameter, of the start and after each step."""

    sums: dict[str, list[str]] = field(default_factory=dict)

    def begin(self, holds: Mapping[str, ParameterShard]) -> None:
        """Take those of the start."""
        self.sums = {name: [digest(shard.value())] for name, shard in holds.items()}

    def see(self, holds: Mapping[str, ParameterShard]) -> None:
        """Take those after a step."""
        for name, shard in holds.items():
            self.sums[name].append(digest(shard.value()))

    def seen(
        self, step: StepComparison, holds: Mapping[str, ParameterShard]
    ) -> dict[str, list[object]]:
        """Return what each parameter in use is: [step, rounded], as `WrittenValues` has them."""
        return {name: list(_plain(self._written(name, step, holds))) for name in step.seen.in_use}

    def _written(
        self, name: str, step: StepComparison, holds: Mapping[str, ParameterShard]
    ) -> WrittenValues:
        value = step.seen.in_use[name]
        checksum = digest(value)
        earlier = [n - 1 for n, its in enumerate(self.sums[name][:-1]) if its == checksum]
        if earlier:
            return WrittenValues(step=earlier[-1])
        right = holds[name].of(step.expected.in_use[name])
        for dtype in _COARSER:
            if torch.equal(value, right.to(dtype).to(value.dtype)):
                return WrittenValues(rounded=str(dtype).removeprefix("torch."))
        return WrittenValues()


def _plain(written: WrittenValues) -> tuple[int | None, str]:
    return written.step, written.rounded
