"""What an optimizer keeps of what it updates."""

from __future__ import annotations

from dataclasses import dataclass

from ptrain.axes.data.rules import is_elementwise, keeps_state
from ptrain.facts.model import TensorFacts, UnitFacts
from ptrain.spec.job import OptimizerSpec
from ptrain.spec.precision import DType, Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerTensor:
    """One tensor of optimizer state: like what is updated, or one number."""

    dtype: DType
    is_scalar: bool = False


def needs_whole_tensors(optimizer: OptimizerSpec) -> bool:
    """Return whether the update of a slice is not the slice of the update."""
    return not is_elementwise(optimizer)


def kept_tensors(
    optimizer: OptimizerSpec, layout: Layout, *, is_hidden: bool = False
) -> tuple[OptimizerTensor, ...]:
    """Moments and step counter of one tensor, in the order in which they are made; without the
    master copy. `is_hidden`: a matrix within the model, which Muon is for."""
    moment = OptimizerTensor(dtype=layout.moments)
    if optimizer.name == "sgd":
        return (moment,) if keeps_state(optimizer) else ()
    if needs_whole_tensors(optimizer) and is_hidden:
        return (moment,)
    return (moment, moment, OptimizerTensor(dtype=DType.FP32, is_scalar=True))


def optimizer_itemsize(optimizer: OptimizerSpec, layout: Layout) -> int:
    """Bytes of optimizer state per updated element: 12 for AdamW with a master copy in fp32."""
    moments = (1 if optimizer.name == "sgd" else 2) if keeps_state(optimizer) else 0
    master = layout.master.itemsize if layout.master else 0
    return master + moments * layout.moments.itemsize


def is_hidden(unit: UnitFacts, tensor: TensorFacts) -> bool:
    """Return whether Muon updates a tensor: a matrix within the model, no embedding and no head."""
    return len(tensor.shape) == 2 and unit.modules != ("",)
