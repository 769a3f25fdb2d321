"""autograd's AccumulateGrad: it keeps a first gradient, and adds each later one to it.

torch/csrc/autograd/functions/accumulate_grad.h: a gradient that nobody else names is taken over
(stolen), any other is cloned; where one is kept already the new one is added in place. Which of
the two a model's own gradients are is in its timeline (`Complete.cloned`).

Two more things of autograd have no ghost, for they belong to what a block does and not to what
wraps it. What saved-tensor hooks move off the device and bring back is traced with the block
(`traces`) and laid over its timeline in `derivation.blocks`. DTensor's redistributions are traced
too, as allocations; what they send is `derivation.tensor`'s.
"""

from __future__ import annotations

from ptrain.cost import Spent
from ptrain.derivation.tape import Tape
from ptrain.spec.precision import DType
from ptrain.spec.rates import OperatorKind
from ptrain.timeline import Complete


def kept(gradient: Complete) -> int:
    """Return the bytes that come where a first gradient is kept: none if it is stolen."""
    return gradient.size if gradient.cloned else 0


def rise(gradient: Complete) -> int:
    """Return the bytes that come for a moment where a first gradient is kept: a copy stands beside
    what it is made of."""
    return gradient.beside + gradient.size if gradient.cloned else 0


def added(gradient: Complete) -> int:
    """Return the bytes that come (negative: go) where one is added to what is kept."""
    return 0 if gradient.cloned else -gradient.size


def keeps(tape: Tape, dtype: DType, gradient: Complete) -> None:
    """A first gradient is kept: copied, unless it is stolen."""
    if gradient.cloned:
        tape.computed(OperatorKind.COPY, dtype, 2 * gradient.size, Spent.COMPUTE)


def adds(tape: Tape, dtype: DType, gradient: Complete) -> None:
    """One is added to what is kept: both are read, and the sum is written."""
    tape.computed(OperatorKind.POINTWISE, dtype, 3 * gradient.size, Spent.COMPUTE)
