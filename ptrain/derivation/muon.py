"""What Muon allocates while it updates one matrix."""

from __future__ import annotations

from ptrain.derivation.tape import Tape
from ptrain.spec.precision import DType

_ITERATIONS = 5


def muon_temporaries(shape: tuple[int, ...], updated: DType, *, scaled: bool) -> int:
    """Bytes that are alive at once at most, beside the matrix, its gradient and its momentum: the
    Newton-Schulz iteration's operators, one after the other. `scaled`: of a scaled loss, where the
    gradient is divided and both outcomes are computed."""
    rows, columns = shape
    iterated = DType.FP64 if updated is DType.FP64 else DType.BF16
    whole, matrix = rows * columns * updated.itemsize, rows * columns * iterated.itemsize
    gram = min(rows, columns) ** 2 * iterated.itemsize
    tape = Tape()
    if scaled:
        tape.add(3 * whole)  # the gradient without its scale, the momentum and the matrix ahead
    tape.add(whole)  # the gradient ahead of its momentum
    cast = matrix if iterated is not updated else 0
    tape.add(cast)
    tape.spike(2 * iterated.itemsize)  # the norm, and its lower bound
    tape.add(iterated.itemsize)
    tape.add(matrix)  # of norm 1
    tape.add(-cast - iterated.itemsize)
    for iteration in range(_ITERATIONS):
        tape.add(gram)
        if iteration:
            tape.add(-gram)  # the one before
        tape.spike(gram + matrix)  # the polynomial of the gram, and the next matrix
    tape.add(-gram - whole)
    if scaled:
        tape.add(1)  # whether it is skipped
        tape.spike(whole)
    return tape.peak
