"""The mapping of shards to parts of the full tensor, and measures of how tensors differ.

The canonical mapping of TTrace (arXiv 2506.09280) gives a parameter one name, whatever wraps its
module, so that a shard is compared without an all-gather. A difference is measured relative to the
rounding of a dtype, in single elements or bits, or as a ratio with a cause: a multiple of another
tensor, a sum of others, or a fraction of a sum over an axis.

Computed in fp64, on full tensors or samples of their elements.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ptrain.models.ledger import local_tensor
from ptrain.train.exchange import Exchange

# What DistributedDataParallel, torch.compile, FSDP1, checkpoint_wrapper and Lightning Fabric (which
# also keeps the module that it was given) put into a path.
_WRAPPERS = {
    "module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module",
    "_forward_module", "_original_module",
}  # fmt: skip


def canonical_name(name: str) -> str:
    """Return a path without the parts that wrappers add: `module.block._orig_mod.weight` is
    `block.weight`. The path of the root module becomes ""."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def canonical_parameters(module: nn.Module) -> dict[str, Tensor]:
    """Return parameters by canonical name; a tied parameter has the first of its names."""
    return {canonical_name(name): tensor for name, tensor in module.named_parameters()}


def canonical_modules(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield modules by canonical path; the root is "". A wrapper and its module share a path, and
    the innermost module is yielded."""
    modules: dict[str, nn.Module] = {}
    for path, submodule in module.named_modules():
        modules[canonical_name(path)] = submodule
    yield from modules.items()


# An addend is missing from a sum if its coefficient is below this fraction of the largest.
ABSENT = 1e-3
# Eigenvalues of the basis below this share of the largest are rounding: gradients that are equal.
_RANK = 1e-9


@dataclass(frozen=True, slots=True)
class LeastSquares:
    """The least-squares fit of a target to a basis.

    `residual` is the 2-norm of the remainder over that of the target; it is infinite if the target
    is zero or not finite.
    """

    coefficients: tuple[float, ...]
    residual: float

    @property
    def factor(self) -> float:
        """The coefficient of a basis with one tensor."""
        (factor,) = self.coefficients
        return factor

    def is_within(self, tolerance: float) -> bool:
        """Return True if the residual is within the tolerance."""
        return self.residual <= tolerance


def fit_multiple(actual: Tensor, expected: Tensor) -> LeastSquares:
    """Fit actual = factor * expected, and return the fit."""
    return fit_combination(actual, [expected])


def fit_combination(target: Tensor, basis: Sequence[Tensor]) -> LeastSquares:
    """Fit target = sum of coefficient * basis, and return the fit.

    If there are several solutions, the shortest is returned, so that equal tensors get equal
    coefficients.

    Args:
        target: The tensor to fit, of any shape.
        basis: Tensors with as many elements as the target, at least one.

    Returns:
        The fit in fp64, with a coefficient per tensor of the basis. Coefficients are NaN if the
        target is zero or a value is not finite.
    """
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


def are_equal_on_ranks(parts: Sequence[Tensor] | Tensor, tolerance: float) -> bool:
    """Return True if all ranks have the same tensor, so that no sum over them is missing.

    Args:
        parts: The ranks' tensors, with equal shapes, at least one.
        tolerance: The largest 2-norm of a difference from the first one, relative to its 2-norm.
    """
    first = parts[0].double()
    length = float(torch.linalg.vector_norm(first))
    return all(
        float(torch.linalg.vector_norm(part.double() - first)) <= tolerance * length
        for part in parts[1:]
    )


def missing_sum_factor(
    parts: Tensor, truths: Tensor, groups: Sequence[Sequence[int]], tolerance: float
) -> float | None:
    """Return the factor that corrects the sum over each group: 1 if the sum is missing, 1/N if the
    mean is.

    Args:
        parts: The actual values by rank, [ranks, elements]; NaN for elements that a rank lacks.
        truths: The expected values in the same layout.
        groups: The groups of ranks.
        tolerance: The relative tolerance of the fit.

    Returns:
        The factor; None if it does not fit every group, or if the ranks of a group are equal
        already.
    """
    factors = []
    for group in groups:
        rows, right = parts[list(group)], truths[list(group)]
        has = ~rows.isnan().any(0)
        if not bool(has.any()):
            if bool((~rows.isnan()).any()):
                return None  # ranks with different elements: no sum
            continue
        rows, right = rows[:, has], right[:, has]
        fit = fit_multiple(right[0], rows.double().sum(0))
        if (
            are_equal_on_ranks(rows, 1e-6)
            or not are_equal_on_ranks(right, 1e-6)
            or not fit.is_within(tolerance)
        ):
            return None
        factors.append(fit.factor)
    return factors[0] if factors and is_even(factors, tolerance) else None


@dataclass(frozen=True, slots=True)
class DegreeProduct:
    """A ratio as a product of powers of degrees: (("dp", 1), ("K", -1)) is × dp ÷ K. The powers are
    1, 2, 1/2 and their negatives."""

    powers: tuple[tuple[str, float], ...]
    value: float

    @property
    def axes(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.powers)

    def __str__(self) -> str:
        """Return the number alone, since the axes are shown separately: `× 2`, `÷ 4`, `× 1/√2`."""
        inverse = 1 / self.value
        if len(self.powers) == 1 and abs(self.powers[0][1]) == 0.5:
            squared = round(max(self.value, inverse) ** 2)
            return f"× √{squared}" if self.value > 1 else f"× 1/√{squared}"
        if _is_integer(self.value):
            return f"× {round(self.value)}"
        return f"÷ {round(inverse)}" if _is_integer(inverse) else f"× {self.value:.4g}"


def _is_integer(value: float) -> bool:
    return abs(value - round(value)) <= 1e-6 * value


def matching_products(
    ratio: float, degrees: Mapping[str, int], tolerance: float = 1e-4
) -> tuple[DegreeProduct, ...]:
    """Return the products of degrees (`dp` -> 2, `K` -> 4, …) that equal `ratio`, simplest first.

    The order is: one degree, two together, a square, a root, one divided by another. Degrees of
    equal size give one product each.

    Args:
        ratio: The ratio to explain.
        degrees: The size of each axis and of the accumulation, by name.
        tolerance: The largest relative difference of a product from the ratio.
    """
    return tuple(
        product
        for product in _candidates({name: size for name, size in degrees.items() if size > 1})
        if abs(ratio / product.value - 1.0) <= tolerance and abs(product.value - 1.0) > tolerance
    )


def _candidates(degrees: Mapping[str, int]) -> Iterator[DegreeProduct]:
    """Yield the products of one or two degrees, simplest first."""
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
    """Return the simplest matching product as text (`× 2`), or the ratio with four digits.

    Args:
        ratio: The ratio.
        degrees: The degrees by name, as in `matching_products`.
        tolerance: The tolerance of `matching_products`.
    """
    fits = matching_products(ratio, degrees, tolerance)
    return str(fits[0]) if fits else f"× {ratio:.4g}"


def absent_addends(coefficients: Sequence[float]) -> tuple[int, ...]:
    """Return the indices of addends that a sum lacks.

    Args:
        coefficients: The coefficient of each addend, at least one.

    Returns:
        The indices of coefficients that are negligible relative to the largest one.
    """
    usual = max(abs(coefficient) for coefficient in coefficients)
    return tuple(
        i for i, coefficient in enumerate(coefficients) if abs(coefficient) <= ABSENT * usual
    )


def is_even(coefficients: Sequence[float], tolerance: float = 1e-3) -> bool:
    """Return True if all addends have the same coefficient, within the tolerance.

    Args:
        coefficients: The coefficients of the addends, at least one.
        tolerance: The largest allowed spread, relative to the largest absolute coefficient.
    """
    least, most = min(coefficients), max(coefficients)
    return most - least <= tolerance * max(abs(least), abs(most))


def local_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of the tensor on the CPU, where the reference is."""
    return local_tensor(tensor.detach()).cpu()


def norm(tensor: torch.Tensor) -> float:
    """Return the 2-norm, in fp64."""
    return float(torch.linalg.vector_norm(tensor.double()))


def squared_norm(tensor: torch.Tensor) -> float:
    """Return the sum of the squares of all elements, in fp64."""
    return float(tensor.detach().double().square().sum())


def relative_size(size: float, length: float) -> float:
    """Return a distance relative to a length.

    Args:
        size: The distance, 0 or more.
        length: The length, in the unit of `size`.

    Returns:
        size / length; 0 if `size` is 0. Infinite if `size` is not finite, or if only `length` is 0.
    """
    if size == 0.0:
        return 0.0
    return size / length if length and math.isfinite(size) else math.inf


def difference(actual: torch.Tensor, expected: torch.Tensor, length: float) -> float:
    """Return the 2-norm of the difference relative to `length`; infinite if it is not finite.

    Args:
        actual: The tensor to compare, on any device.
        expected: The right tensor, of the same shape.
        length: The length that the difference is divided by.
    """
    return relative_size(norm(actual.double() - expected.to(actual.device).double()), length)


def relative_difference(actual: torch.Tensor, expected: torch.Tensor, least: float = 0.0) -> float:
    """Return the 2-norm of the difference over the larger of `least` and the norm of `expected`.

    The result is infinite if both are zero and `actual` is not, or if a value is not finite.

    Args:
        actual: The tensor to compare.
        expected: The right tensor, of the same shape.
        least: The least length that the difference is divided by.
    """
    length = max(norm(expected), least)
    return difference(actual, expected, length) if math.isfinite(length) else math.inf


def root_mean_square(tensors: Collection[torch.Tensor]) -> float:
    """Return the root mean square of all elements of all tensors; 0 without tensors."""
    numel = sum(tensor.numel() for tensor in tensors)
    return math.sqrt(sum(map(squared_norm, tensors)) / numel) if numel else 0.0


def number_difference(right: float, measured: float) -> float:
    """Return the difference of a number from the single-device one, relative to the latter.

    Args:
        right: The number of the single-device reference.
        measured: The number to compare.

    Returns:
        |measured - right| / |right|; infinite if the difference is not finite, or if only `right`
        is 0.
    """
    return relative_size(abs(measured - right), abs(right))


def zero_shared_infinities(
    own: torch.Tensor, its: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both tensors with zeros where both are -inf, as in attention masks; the difference of
    equal infinities would be NaN."""
    hidden = (own == -math.inf) & (its == -math.inf)
    return own.masked_fill(hidden, 0), its.masked_fill(hidden, 0)


def gather_full_tensors(named: Mapping[str, Tensor], exchange: Exchange) -> dict[str, Tensor]:
    """Return full tensors by name, as copies on the CPU.

    A tensor that only some ranks have is broadcast from the first of them. All ranks must call it.

    Args:
        named: This rank's tensors, sharded or not. Ranks of one mesh have the same names in the
            same order.
        exchange: The group of all ranks.

    Returns:
        The full tensors of all ranks, on every rank.
    """
    own = {name: full_copy(tensor) for name, tensor in named.items()}
    described = {
        name: [list(tensor.shape), str(tensor.dtype).removeprefix("torch.")]
        for name, tensor in own.items()
    }
    everyone = exchange.gather(described)
    # From the last rank to the first, so that the first rank that has a tensor remains.
    sources = {name: rank for rank in range(len(everyone) - 1, -1, -1) for name in everyone[rank]}
    # Sorted: all ranks must broadcast in the same order.
    for name in sorted(sources):
        if all(name in its for its in everyone):
            continue
        shape, dtype = everyone[sources[name]][name]
        if name not in own:
            own[name] = torch.empty(shape, dtype=getattr(torch, dtype))
        dist.broadcast(own[name], src=sources[name], group=exchange.group)
    return own


def full_copy(tensor: Tensor) -> Tensor:
    """Return a copy of the full tensor on the CPU. All ranks of its mesh must call it."""
    every = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return every.detach().to("cpu", copy=True).contiguous()


# A tensor with a root mean square below this fraction of the model's is rounding. Example: softmax
# is invariant to the bias of keys, so its gradient is pure rounding, which Adam amplifies to
# lr * |g| / eps, and each order of summation gives other noise.
NOISE = 1e-6
# A rank's elements may be much smaller than the rest of a tensor but carry the same rounding, so
# their length is at least this fraction of the tensor's.
QUIET = 1e-2
# A scalar may be a sum that cancels (the bias before a loss), and its rounding is that of the
# addends.
_CANCELLED = 0.1


@dataclass(frozen=True, slots=True)
class Magnitude:
    """The usual size of the tensors of one kind: the root mean square of all their elements."""

    usual: float

    @classmethod
    def measure(cls, tensors: Mapping[Any, Tensor]) -> Magnitude:
        """Return the magnitude of these tensors."""
        return cls(root_mean_square(tensors.values()))

    def scale_of(self, whole: Tensor, part: Tensor) -> float:
        """Return the length to which a difference of a part is relative.

        Args:
            whole: The full tensor. If it is noise compared to the others, the usual length of as
                many elements counts.
            part: The elements to compare.

        Returns:
            A 2-norm, at least the one of `part`.
        """
        return max(norm(part), self.negligible_size(whole) * math.sqrt(part.numel()))

    def negligible_size(self, whole: Tensor) -> float:
        """Return the size below which an element of the tensor counts as negligible."""
        mean = mean_size(whole)
        least = _CANCELLED * self.usual if whole.numel() == 1 else 0.0
        return self.usual if mean <= NOISE * self.usual else max(QUIET * mean, least)

    def is_noise(self, whole: Tensor) -> bool:
        """Return True if the tensor is so small that it consists of rounding."""
        return mean_size(whole) <= NOISE * self.usual


def mean_size(tensor: Tensor) -> float:
    """Return the root mean square of the tensor's elements."""
    return norm(tensor) / math.sqrt(max(tensor.numel(), 1))


COARSER = (torch.bfloat16, torch.float16, torch.float32)


def is_representable(tensor: Tensor, dtype: torch.dtype) -> bool:
    """Return True if every element is exactly representable in `dtype`."""
    return torch.equal(tensor.to(dtype).to(tensor.dtype), tensor)


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's name without the prefix `torch.`."""
    return str(dtype).removeprefix("torch.")
