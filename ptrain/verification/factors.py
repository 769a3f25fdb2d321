"""Ratios with a cause: one tensor as a multiple of another, as a sum of others, as a share of a
sum over an axis; and the products of degrees that such a ratio is.

All of it in fp64 on whole tensors or samples of their elements; torch only, no spec.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import torch
from torch import Tensor

# A rank counts as missing from a sum below this share of the usual coefficient.
ABSENT = 1e-3
# Eigenvalues of the basis below this share of the largest are rounding: gradients that are equal.
_RANK = 1e-9


@dataclass(frozen=True, slots=True)
class LeastSquares:
    """What a target is of its basis: least-squares coefficients, and the 2-norm of what is left
    over that of the target (infinite for a target that is zero or not finite)."""

    coefficients: tuple[float, ...]
    residual: float

    @property
    def factor(self) -> float:
        """The only coefficient."""
        (factor,) = self.coefficients
        return factor

    def holds(self, tolerance: float) -> bool:
        return self.residual <= tolerance


def multiple(actual: Tensor, expected: Tensor) -> LeastSquares:
    """Fit actual = factor * expected."""
    return combination(actual, [expected])


def combination(target: Tensor, basis: Sequence[Tensor]) -> LeastSquares:
    """Fit target = sum of coefficient * basis; of many solutions it is the shortest, so that
    tensors that are equal get equal coefficients."""
    vector = target.detach().double().flatten()
    matrix = torch.stack([tensor.detach().double().flatten() for tensor in basis], dim=1)
    if not (torch.isfinite(vector).all() and torch.isfinite(matrix).all()) or not vector.any():
        return LeastSquares((math.nan,) * len(basis), math.inf)
    sizes = torch.linalg.vector_norm(matrix, dim=0)
    usual = float(sizes.max()) or 1.0
    inverse = torch.linalg.pinv(matrix.cpu() / usual, rtol=_RANK)
    solution = inverse @ vector.cpu() / usual
    left = torch.linalg.vector_norm(matrix.cpu() @ solution - vector.cpu())
    return LeastSquares(
        tuple(solution.tolist()), float(left / torch.linalg.vector_norm(vector.cpu()))
    )


def are_alike(parts: Sequence[Tensor] | Tensor, tolerance: float) -> bool:
    """Return whether all ranks have the same: then nothing is missing from a sum over them."""
    first = parts[0].double()
    length = float(torch.linalg.vector_norm(first))
    return all(
        float(torch.linalg.vector_norm(part.double() - first)) <= tolerance * length
        for part in parts[1:]
    )


def missing_sum(
    parts: Tensor, truths: Tensor, groups: Sequence[Sequence[int]], tolerance: float
) -> float | None:
    """Return by what the sum of what each group's ranks have must be multiplied to be right: 1
    where the sum is missing, 1/N where the mean is. `parts`, and what they should be, by rank
    [ranks, elements], NaN of what one has not; None where some group's sum is not it, or its ranks
    have the same."""
    factors = []
    for group in groups:
        rows, right = parts[list(group)], truths[list(group)]
        has = ~rows.isnan().any(0)
        if not bool(has.any()):
            if bool((~rows.isnan()).any()):
                return None  # ranks with different elements: no sum
            continue
        rows, right = rows[:, has], right[:, has]
        fit = multiple(right[0], rows.double().sum(0))
        if are_alike(rows, 1e-6) or not are_alike(right, 1e-6) or not fit.holds(tolerance):
            return None
        factors.append(fit.factor)
    return factors[0] if factors and is_even(factors, tolerance) else None


@dataclass(frozen=True, slots=True)
class DegreeProduct:
    """A ratio as a product of powers of degrees: (("dp", 1), ("K", -1)) is × dp ÷ K. The powers
    are 1, 2, 1/2 and their negatives."""

    powers: tuple[tuple[str, float], ...]
    value: float

    @property
    def axes(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.powers)

    def __str__(self) -> str:
        """`× 2`, `÷ 4`, `× 1/√2`: the number alone, which the axes explain."""
        inverse = 1 / self.value
        if len(self.powers) == 1 and abs(self.powers[0][1]) == 0.5:
            squared = round(max(self.value, inverse) ** 2)
            return f"× √{squared}" if self.value > 1 else f"× 1/√{squared}"
        if _is_whole(self.value):
            return f"× {round(self.value)}"
        return f"÷ {round(inverse)}" if _is_whole(inverse) else f"× {self.value:.4g}"


def _is_whole(value: float) -> bool:
    return abs(value - round(value)) <= 1e-6 * value


def products(
    ratio: float, degrees: Mapping[str, int], tolerance: float = 1e-4
) -> tuple[DegreeProduct, ...]:
    """Return every product of degrees (`dp` -> 2, `K` -> 4, …) that `ratio` is, simplest first: one
    degree, two together, a square, a root, one by another. Two degrees of one size both count."""
    return tuple(
        product
        for product in _candidates({name: size for name, size in degrees.items() if size > 1})
        if abs(ratio / product.value - 1.0) <= tolerance and abs(product.value - 1.0) > tolerance
    )


def _candidates(degrees: Mapping[str, int]) -> Iterator[DegreeProduct]:
    singles = (((1.0,), 1), ((-1.0,), 1))
    together = (((1.0, 1.0), 2), ((-1.0, -1.0), 2))
    powers = (((2.0,), 1), ((-2.0,), 1), ((0.5,), 1), ((-0.5,), 1))
    against = (((1.0, -1.0), 2), ((-1.0, 1.0), 2))
    for exponents, count in (*singles, *together, *powers, *against):
        for chosen in combinations(degrees.items(), count):
            named = tuple((name, power) for (name, _), power in zip(chosen, exponents, strict=True))
            value = math.prod(degrees[name] ** power for name, power in named)
            yield DegreeProduct(named, value)


def factor_text(ratio: float, degrees: Mapping[str, int], tolerance: float = 1e-4) -> str:
    """Return the text of the simplest product that the ratio is (`× 2`), else four digits."""
    fits = products(ratio, degrees, tolerance)
    return str(fits[0]) if fits else f"× {ratio:.4g}"


def absent(coefficients: Sequence[float]) -> tuple[int, ...]:
    """Return which addends a sum does not have: their coefficients are nothing beside the
    largest."""
    usual = max(abs(coefficient) for coefficient in coefficients)
    return tuple(
        i for i, coefficient in enumerate(coefficients) if abs(coefficient) <= ABSENT * usual
    )


def lacking(own: Tensor, shares: Sequence[Tensor], tolerance: float) -> list[int]:
    """Return which of the shares a sum lacks, of those that are not zero; none where it is no sum
    of them."""
    known = [number for number, share in enumerate(shares) if bool(share.any())]
    fit = combination(own, [shares[number] for number in known])
    return [known[i] for i in absent(fit.coefficients)] if fit.holds(tolerance) else []


def is_even(coefficients: Sequence[float], tolerance: float = 1e-3) -> bool:
    """Return whether every addend counts alike."""
    least, most = min(coefficients), max(coefficients)
    return most - least <= tolerance * max(abs(least), abs(most))
