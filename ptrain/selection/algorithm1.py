"""Algorithm 1 of the paper, verbatim: 16P, two thresholds, three answers, and cases without an
answer.

Points that the text leaves open are settled here and reported with the answer. A *layer* is the
largest block, and needs the bytes of s_unit (Definition 3), 2 per parameter. An interconnect is
*fast* from `FAST_LINK` on. *Within node* means all devices of a node. Line 11 does not state what
to combine TP with; by then lines 2 to 7 have rejected DP and ZeRO-3 alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from ptrain.derivation.paper import reconstruction_unit
from ptrain.facts.model import ModelFacts
from ptrain.spec.cluster import Cluster
from ptrain.spec.placement import S_STAR, Axis, Placement, R, S
from ptrain.units import format_memory

STATE_BYTES = 16  # per parameter: 2 parameter, 2 gradient, 12 Adam and master copy
LAYER_BYTES = 2  # per parameter, all-gathered for use: s_unit counts parameters only
FAST_LINK = 100e9  # bytes per second of a device: NVLink has 150 and more, PCIe 5 x16 64

DATA_PARALLEL = Placement(parameters=R, optimizer=R, gradients=R)
FULLY_SHARDED = Placement(parameters=S_STAR, optimizer=S, gradients=S)
TENSOR_PARALLEL = Placement(parameters=S, optimizer=S, gradients=S)


@dataclass(frozen=True, slots=True, kw_only=True)
class Thresholds:
    """The shares of a device's memory that model states, and a single layer, may use."""

    states: float = 0.7
    layer: float = 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class Requirements:
    """The inputs of the algorithm.

    Attributes:
        parameters: P.
        layer_parameters: Parameters of the largest block.
        device_memory: M_d in bytes.
        devices: N.
        devices_per_node: Devices of a node that are used; a divisor of N.
        has_fast_links: True if links within a node reach `FAST_LINK`.
    """

    parameters: int
    layer_parameters: int
    device_memory: int
    devices: int
    devices_per_node: int
    has_fast_links: bool


class Advice(StrEnum):
    """The strategy that the algorithm recommends, or no answer."""

    DATA_PARALLEL = "data parallelism"
    FULLY_SHARDED = "ZeRO-3"
    ADD_TENSOR = "add tensor parallelism within node"
    NONE = "no answer"


@dataclass(frozen=True, slots=True, kw_only=True)
class ThresholdTest:
    """A condition that was evaluated: its line in the algorithm, its text, and its value."""

    line: int
    text: str
    is_true: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The recommendation, with degree and placement of each axis and the evaluated conditions.

    Without an answer `degrees` is empty.
    """

    requirements: Requirements
    thresholds: Thresholds
    advice: Advice
    degrees: tuple[tuple[Axis, int, Placement], ...]
    tests: tuple[ThresholdTest, ...]

    @property
    def overrides(self) -> tuple[str, ...]:
        """The overrides that give any spec these axes; empty without an answer."""
        if not self.degrees:
            return ()
        mesh = ", ".join(f"{axis}: {degree}" for axis, degree, _ in self.degrees)
        tuples = ", ".join(f"{axis}: [{placement}]" for axis, _, placement in self.degrees)
        return f"mesh={{{mesh}}}", f"placement={{{tuples}}}"


def requirements(facts: ModelFacts, cluster: Cluster, devices: int) -> Requirements:
    """Return the algorithm's inputs for a model on `devices` devices of a cluster."""
    return Requirements(
        parameters=facts.numel,
        layer_parameters=reconstruction_unit(facts),
        device_memory=cluster.device_memory,
        devices=devices,
        # A tp group of all used devices of a node must divide the devices.
        devices_per_node=math.gcd(devices, cluster.devices_per_node),
        has_fast_links=cluster.intra_node_bandwidth >= FAST_LINK,
    )


def algorithm1(required: Requirements, thresholds: Thresholds | None = None) -> Answer:
    """Return the first answer whose condition holds, in the order of the text."""
    limits = thresholds or Thresholds()
    first, second, third = _tests(required, limits)
    devices, node = required.devices, required.devices_per_node
    degrees: tuple[tuple[Axis, int, Placement], ...]
    if first.is_true:
        advice, degrees = Advice.DATA_PARALLEL, ((Axis.DP_REPLICATE, devices, DATA_PARALLEL),)
    elif second.is_true:
        advice, degrees = Advice.FULLY_SHARDED, ((Axis.DP_SHARD, devices, FULLY_SHARDED),)
    elif third.is_true:
        rest = ((Axis.DP_SHARD, devices // node, FULLY_SHARDED),) if devices > node else ()
        advice, degrees = Advice.ADD_TENSOR, (*rest, (Axis.TP, node, TENSOR_PARALLEL))
    else:
        advice, degrees = Advice.NONE, ()
    until = 1 if first.is_true else 2 if second.is_true else 3
    return Answer(
        requirements=required,
        thresholds=limits,
        advice=advice,
        degrees=degrees,
        tests=(first, second, third)[:until],
    )


def _tests(
    required: Requirements, limits: Thresholds
) -> tuple[ThresholdTest, ThresholdTest, ThresholdTest]:
    """Return the three conditions, evaluated."""
    states = STATE_BYTES * required.parameters
    share, layer = states / required.devices, LAYER_BYTES * required.layer_parameters
    room = limits.states * required.device_memory
    most = limits.layer * required.device_memory
    fast = "are fast" if required.has_fast_links else "are not fast"
    return (
        ThresholdTest(
            line=2,
            text=f"16P = {format_memory(states)} < {limits.states:g} M_d = {format_memory(room)}",
            is_true=states < room,
        ),
        ThresholdTest(
            line=5,
            text=f"16P/N = {format_memory(share)} < {limits.states:g} M_d = {format_memory(room)}",
            is_true=share < room,
        ),
        ThresholdTest(
            line=8,
            text=f"a layer = {format_memory(layer)} > {limits.layer:g} M_d = "
            f"{format_memory(most)}, and the links in a node of {required.devices_per_node} {fast}",
            is_true=layer > most and required.has_fast_links and required.devices_per_node > 1,
        ),
    )
