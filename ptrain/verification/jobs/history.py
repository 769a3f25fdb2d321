"""Which values the loop's parameters have had after each step, by checksum."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from ptrain.verification.jobs.compare import digest
from ptrain.verification.jobs.shards import ParameterShard
from ptrain.verification.jobs.step import StepComparison
from ptrain.verification.roundings import COARSER, named


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
        """Return what each parameter is that is in use: [the step after which it had these values
        (-1: the start; None: none), the dtype that one device's are rounded to, if any]."""
        return {name: self._written(name, step, holds) for name in step.seen.in_use}

    def _written(
        self, name: str, step: StepComparison, holds: Mapping[str, ParameterShard]
    ) -> list[object]:
        value = step.seen.in_use[name]
        checksum = digest(value)
        earlier = [n - 1 for n, its in enumerate(self.sums[name][:-1]) if its == checksum]
        if earlier:
            return [earlier[-1], ""]
        right = holds[name].of(step.expected.in_use[name])
        for dtype in COARSER:
            if torch.equal(value, right.to(dtype).to(value.dtype)):
                return [None, named(dtype)]
        return [None, ""]
