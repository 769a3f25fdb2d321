"""What a clock asks a machine: seconds of operators, collectives, copies, updates and hooks."""

from __future__ import annotations

from enum import StrEnum
from typing import Protocol

from ptrain.costs import Collective
from ptrain.facts.operators import Operator
from ptrain.spec.precision import Layout


class Hook(StrEnum):
    """What a wrapper's own code takes of the host beside what it sends, each time."""

    FSDP2_GATHER = "fsdp2_gather"  # a unit's all-gather: copy in, issue, copy out, as views
    FSDP2_REDUCE = "fsdp2_reduce"  # a unit's reduction and the shard's gradient
    DDP_BUCKET = "ddp_bucket"
    FLAT_GATHER = "flat_gather"
    FLAT_REDUCE = "flat_reduce"
    PIPELINE_PASS = "pipeline_pass"  # of a stage: a forward or a backward pass of a micro-batch
    TENSOR_SUM = "tensor_sum"  # a functional collective within a cut operator


class Pace(Protocol):
    """One machine's rates, of ranks that all compute at once."""

    overlaps: bool  # whether what is sent moves while the rank computes: not on a processor's cores

    def operator_seconds(self, operator: Operator) -> float:
        """Seconds of all `operator.times` of them."""
        ...

    def collective_seconds(
        self, collective: Collective, *, ranks: int, nodes: int, payload: int
    ) -> float:
        """Seconds of one collective of `ranks` ranks on `nodes` nodes, of a full tensor of
        `payload` bytes; of a send between two ranks, of its bytes."""
        ...

    def copy_seconds(self, copy: Collective, size: int) -> float:
        """Seconds of a copy of `size` bytes between two tiers."""
        ...

    def update_seconds(
        self, optimizer: str, layout: Layout, *, elements: int, tensors: int
    ) -> float:
        """Seconds of an optimizer's step over `tensors` tensors with together `elements`."""
        ...

    def hook_seconds(self, hook: Hook) -> float:
        """Seconds of the host's for one of a wrapper's own parts."""
        ...
