"""How far apart correct runs of one layout come to lie: references in other orders of summation.

A placement changes no term of any sum, only in which order, in which groups, and in between which
roundings the terms are added: data ranks and micro-batches one after the other or by rings,
the columns of a matrix product by several ranks, tokens by shapes that take another kernel. So
does a reference of which the seed permutes

- the micro-batches of a step, whose gradients are added in that order;
- the contraction of every matrix product, forward, backward and in the update (Muon): its terms
  are permuted and cut into 2, 4 or 8 groups, whose partial sums are rounded to the product's dtype
  and then added, as ranks of tp do;
- sums and means over a dimension (norms, weights' gradients), and the rows of an embedding's
  gradient.

What no placement cuts stays: the softmax and the core of attention of one head.

How far apart they come to lie, and what follows for a run under test, is in `tolerances`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ptrain.models.ledger import OperatorMode
from ptrain.spec.spec import Spec
from ptrain.verification.reference import Around, MicroBatch, Pass, ReferenceTraining, nothing

PARTS = (2, 4, 8)  # groups of a contraction: what degrees of tp make of it

aten = torch.ops.aten
Rule: TypeAlias = "Callable[..., Tensor]"
Dims: TypeAlias = "Sequence[int] | None"


class PermutedSums(OperatorMode):
    """Every operator that adds up, in an order that `generator` draws anew for each call."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.generator = generator
        self.rules: dict[Any, Rule] = {
            aten.mm.default: self._product,
            aten.bmm.default: self._product,
            aten.addmm.default: self._added_product,
            aten.baddbmm.default: self._added_product,
            aten.sum.dim_IntList: self._sum,
            aten.mean.dim: self._mean,
            aten.embedding_dense_backward.default: self._rows,
        }

    def operator(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        rule = self.rules.get(func)
        if rule is None or not args[0].is_floating_point():
            return func(*args, **kwargs)
        return rule(*args, **kwargs)

    def _drawn(self, size: int) -> tuple[Tensor, int]:
        """An order of `size` terms, and in how many groups they are."""
        choice = int(torch.randint(len(PARTS), (), generator=self.generator))
        return torch.randperm(size, generator=self.generator), PARTS[choice]

    def _product(self, left: Tensor, right: Tensor) -> Tensor:
        (first, its), *others = self._factors(left, right)
        total = first @ its
        for columns, rows in others:
            total.add_(columns @ rows)
        return total

    def _added_product(
        self, added: Tensor, left: Tensor, right: Tensor, *, beta: float = 1, alpha: float = 1
    ) -> Tensor:
        """The first group takes the addend along, in one rounding, as a kernel's end does."""
        add = torch.baddbmm if left.dim() == 3 else torch.addmm
        (first, its), *others = self._factors(left, right)
        total = add(added, first, its, beta=beta, alpha=alpha)
        for columns, rows in others:
            total.add_(columns @ rows, alpha=alpha)
        return total

    def _factors(self, left: Tensor, right: Tensor) -> Iterable[tuple[Tensor, Tensor]]:
        """Columns of the left and rows of the right that a partial sum is of."""
        order, parts = self._drawn(left.shape[-1])
        columns, rows = left.index_select(-1, order), right.index_select(-2, order)
        return zip(columns.chunk(parts, -1), rows.chunk(parts, -2), strict=True)

    def _sum(self, terms: Tensor, dims: Dims, keepdim: bool = False, **kwargs: Any) -> Tensor:
        along = max(dims or range(terms.dim()), key=lambda dim: terms.shape[dim], default=None)
        if along is None or terms.shape[along] < 2:
            return aten.sum.dim_IntList(terms, dims, keepdim, **kwargs)
        order, parts = self._drawn(terms.shape[along])
        first, *others = terms.index_select(along, order).chunk(parts, along)
        total = torch.sum(first, dims, keepdim, **kwargs)
        for group in others:
            total.add_(torch.sum(group, dims, keepdim, **kwargs))
        return total

    def _mean(self, terms: Tensor, dims: Dims, keepdim: bool = False, **kwargs: Any) -> Tensor:
        total = self._sum(terms, dims, keepdim, **kwargs)
        return total.div_(terms.numel() / total.numel())

    def _rows(self, gradient: Tensor, indices: Tensor, *others: Any) -> Tensor:
        """An embedding's gradient: rows that occur several times are added up."""
        rows = gradient.reshape(-1, gradient.shape[-1])
        order = torch.randperm(rows.shape[0], generator=self.generator)
        return aten.embedding_dense_backward(rows[order], indices.reshape(-1)[order], *others)


class Permuted(ReferenceTraining):
    """The reference with all its sums in an order that `seed` draws."""

    def __init__(self, spec: Spec, seed: int) -> None:
        super().__init__(spec)
        self.generator = torch.Generator().manual_seed(seed)

    def micro_batches(self, step: int) -> list[MicroBatch]:
        batches = list(super().micro_batches(step))
        order = torch.randperm(len(batches), generator=self.generator).tolist()
        return [batches[place] for place in order]

    def accumulate(self, step: int, around: Around = nothing) -> Pass:
        with PermutedSums(self.generator):
            return super().accumulate(step, around)

    def update(self, step: int, sums: Mapping[str, Tensor]) -> float:
        with PermutedSums(self.generator):
            return super().update(step, sums)
