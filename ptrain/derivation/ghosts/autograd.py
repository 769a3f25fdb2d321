"""Simulates autograd's AccumulateGrad: the first gradient is kept, later ones are added to it.

torch/csrc/autograd/functions/accumulate_grad.h: a gradient with no other reference is taken over
(stolen), any other one is cloned. A later gradient is added in place. The timeline of a model
states which gradients are cloned (`Complete.cloned`).

Two further parts of autograd are not simulated here, because they belong to a block instead of its
wrap. Copies of saved-tensor hooks are traced with the block (`traces`) and put into its timeline by
`derivation.blocks`. The allocations of DTensor's redistributions are traced too; their traffic is
in `derivation.tensor`.
"""

from __future__ import annotations

from ptrain.cost import Spent
from ptrain.derivation.tape import Tape
from ptrain.spec.precision import DType
from ptrain.spec.rates import OperatorKind
from ptrain.timeline import Complete


def kept_bytes(gradient: Complete) -> int:
    """Return the bytes that keeping a first gradient allocates: none if it is stolen."""
    # Case 1.1 (torch 2.13): a dense gradient without other references, in the layout of its
    # variable, is stolen. The runs of the timeline have already allocated it. Case 1.5 copies any
    # other one.
    return gradient.size if gradient.cloned else 0


def copy_bytes(gradient: Complete) -> int:
    """Return the bytes that keeping a first gradient allocates temporarily: a copy exists next to
    its source."""
    return gradient.beside + gradient.size if gradient.cloned else 0


def added_bytes(gradient: Complete) -> int:
    """Return the change in bytes when a gradient is added to the kept one. Negative is freed."""
    # Case 2.3: `variable_grad += new_grad` in place. The runs of the timeline allocate a gradient
    # that can be stolen. It is freed once it is added. The runs themselves free the source of a
    # clone.
    return 0 if gradient.cloned else -gradient.size


def time_copy(tape: Tape, dtype: DType, gradient: Complete) -> None:
    """Time the copy of a first gradient, unless it is stolen."""
    if gradient.cloned:
        tape.record_operator(OperatorKind.COPY, dtype, 2 * gradient.size, Spent.COMPUTE)


def time_addition(tape: Tape, dtype: DType, gradient: Complete) -> None:
    """Time the addition of a gradient, which reads two tensors and writes one."""
    tape.record_operator(OperatorKind.POINTWISE, dtype, 3 * gradient.size, Spent.COMPUTE)
