"""What a step computes, operator by operator: the vocabulary that traces write and clocks read.

An operator has a kind, a dtype and the dimensions that its time depends on; how long that takes on
a machine, the machine's rates say. A pass is a list of operators and of the collectives between
them, in the order of execution.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ptrain.costs import Collective
from ptrain.spec.precision import DType
from ptrain.spec.rates import OperatorKind


@dataclass(frozen=True, slots=True)
class Operator:
    """`times` operators of one kind, dtype and size: `dimensions` are its kind's. `is_whole`: of
    fused attention, no mask leaves out half of the scores."""

    kind: OperatorKind
    dtype: DType
    dimensions: tuple[int, ...]
    times: int = 1
    is_whole: bool = False

    @property
    def flops(self) -> int:
        """Floating-point operations of one of them, two for a multiplication and its addition: of
        fused attention two products forward and five backward (`models.work`), whole as if nothing
        were masked; 0 of what is bound by memory."""
        match self.kind:
            case OperatorKind.PRODUCT:
                return 2 * math.prod(self.dimensions)
            case OperatorKind.ATTENTION:
                return 4 * math.prod(self.dimensions)
            case OperatorKind.ATTENTION_BACKWARD:
                return 10 * math.prod(self.dimensions)
            case _:
                return 0


@dataclass(frozen=True, slots=True)
class InnerCollective:
    """A collective within a pass, over the axis that cuts operators or over one that is named, of
    so many neighbouring `ranks` of it (0: of all): bytes of the whole tensor. `beside`: how many
    entries of the pass behind it run before it is awaited."""

    collective: Collective
    payload: int
    times: int = 1
    axis: str = ""
    ranks: int = 0
    beside: int = 0


PassWork = tuple[Operator | InnerCollective, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWork:
    """What one layer, or what stands in front of the layers or behind them, computes of one
    micro-batch. `backward` holds what it computes again of forward; `inputs` and `weights` are its
    halves, where these are computed apart."""

    forward: PassWork
    backward: PassWork
    inputs: PassWork = ()
    weights: PassWork = ()

    def then(self, other: LayerWork) -> LayerWork:
        """Return both as one, the other behind it: in backward before it."""
        return LayerWork(
            forward=self.forward + other.forward,
            backward=other.backward + self.backward,
            inputs=other.inputs + self.inputs,
            weights=self.weights + other.weights,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelWork:
    """What a rank computes of one micro-batch, by layer (of all layers of the model, in their
    order). `front` is the embedding; `behind` the last norm, the head and the loss."""

    front: LayerWork
    layers: tuple[LayerWork, ...]
    behind: LayerWork


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkByKind:
    """A model's work with each kind of layer once: `order` says of which kind each layer is."""

    front: LayerWork
    kinds: tuple[LayerWork, ...]
    order: tuple[int, ...]
    behind: LayerWork

    @classmethod
    def of(cls, work: ModelWork) -> WorkByKind:
        """Return the same as a model's work."""
        numbers: dict[LayerWork, int] = {}
        order = tuple([numbers.setdefault(layer, len(numbers)) for layer in work.layers])
        return cls(front=work.front, kinds=tuple(numbers), order=order, behind=work.behind)

    @property
    def model(self) -> ModelWork:
        """The work of all layers; those that are alike share theirs."""
        layers = tuple([self.kinds[number] for number in self.order])
        return ModelWork(front=self.front, layers=layers, behind=self.behind)
