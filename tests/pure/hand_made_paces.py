"""Hand-written cost models: an operation takes a second, and the rest is set by a test."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ptrain.cost import Collective
from ptrain.facts.model import InnerCollective, LayerWork, ModelFacts, ModelWork, Operator, PassWork
from ptrain.spec.cluster import Hook, OperatorKind
from ptrain.spec.precision import DType, Layout
from ptrain.timeline import Boundary, Complete, Item, Mark, Run, Timeline
from tests.pure.build import make_facts


@dataclass(frozen=True, kw_only=True)
class HandPace:
    """A floating-point operation is `operation` seconds. `byte` are the seconds of a byte that an
    operator reads or writes, `sent` those of a byte of a collective, whatever it is, `copied` of a
    copy, and `element` those of an element that is updated; `clipped` of one that is clipped;
    `late` those of a second that was computed ahead of a collective."""

    overlaps: bool = True
    operation: float = 1.0
    byte: float = 0.0
    sent: float = 0.0
    copied: float = 0.0
    element: float = 0.0
    clipped: float = 0.0
    late: float = 0.0
    hooks: Mapping[Hook, float] = field(default_factory=dict)
    by_collective: Mapping[Collective, float] = field(default_factory=dict)

    def operator_seconds(self, operator: Operator) -> float:
        if operator.kind is OperatorKind.PRODUCT:
            return operator.times * operator.flops * self.operation
        return operator.times * self.byte * sum(operator.dimensions)  # none of a view

    def collective_seconds(
        self, collective: Collective, *, ranks: int, nodes: int, payload: int
    ) -> float:
        assert ranks > 1, "nobody is asked about one rank"
        return self.by_collective.get(collective, self.sent) * payload * nodes

    def late_seconds(self, computed: float) -> float:
        return self.late * computed

    def copy_seconds(self, copy: Collective, size: int) -> float:
        return self.copied * size

    def update_seconds(
        self, optimizer: str, layout: Layout, *, elements: int, tensors: int
    ) -> float:
        return self.element * elements

    def clip_seconds(self, layout: Layout, *, elements: int, tensors: int) -> float:
        return self.clipped * elements

    def hook_seconds(self, hook: Hook) -> float:
        return self.hooks.get(hook, 0.0)


def seconds(number: int) -> PassWork:
    """A pass of so many seconds, which is even: a multiplication is two operations."""
    assert number % 2 == 0
    return (Operator(OperatorKind.PRODUCT, DType.FP32, (1, 1, 1, number // 2)),) if number else ()


def layer(forward: int, backward: int, exchanges: tuple[InnerCollective, ...] = ()) -> LayerWork:
    """Work of so many seconds in each pass; of halves half each."""
    half = seconds(backward // 2)
    return LayerWork(
        forward=(*seconds(forward), *exchanges),
        backward=(*seconds(backward), *exchanges),
        inputs=half,
        weights=half,
    )


def model(
    forward: int,
    backward: int,
    *,
    layers: int = 2,
    front: tuple[int, int] = (0, 0),
    behind: tuple[int, int] = (0, 0),
) -> ModelWork:
    """Return identical layers with an embedding and a head."""
    alike = layer(forward, backward)
    return ModelWork(front=layer(*front), layers=(alike,) * layers, behind=layer(*behind))


def chain(blocks: int, numel: int) -> ModelFacts:
    """A model of so many blocks and a root, one tensor of `numel` elements each; gradients arrive
    backwards."""
    units = [((numel,),)] * (blocks + 1)
    facts, size = make_facts(*units), 4 * numel
    forward: list[Item] = [Boundary(Mark.ENTER, blocks)]
    backward: list[Item] = [Boundary(Mark.PRE_BACKWARD, blocks)]
    for block in range(blocks):
        forward += [Boundary(Mark.ENTER, block), Boundary(Mark.LEAVE, block)]
        last = blocks - 1 - block
        backward += [
            Boundary(Mark.PRE_BACKWARD, last),
            Run(size, size),
            Complete(f"blocks.{last}.0", size),
            Boundary(Mark.POST_BACKWARD, last),
        ]
    forward.append(Boundary(Mark.LEAVE, blocks))
    backward += [Run(size, size), Complete("root.0", size), Boundary(Mark.POST_BACKWARD, blocks)]
    timeline = Timeline(forward=tuple(forward), backward=tuple(backward))
    names = tuple(f"blocks.{block}" for block in range(blocks))
    return replace(facts, timeline=timeline, blocks=names)
