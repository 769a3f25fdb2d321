"""This rank's samples, row by row, beside one device's: whether the batch has them at all, whether
the model returned the same for them, and whether the loss asks the same of them. A batch that the
loop rearranges (padding, pieces of sequences) has other rows, and then nothing is told."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from ptrain.verification.jobs.compare import digest
from ptrain.verification.jobs.record import ForwardCall
from ptrain.verification.parts import difference, multiple, norm


@dataclass(frozen=True, slots=True)
class Row:
    """One sample: a checksum of its input, of whatever else was given with it, and what the model
    returned of it and the loss's gradient by that, where these have rows at all."""

    key: str
    others: tuple[str, ...]
    length: int
    output: Tensor | None
    gradient: Tensor | None


@dataclass(slots=True, kw_only=True)
class RowReport:
    """Of this rank's rows, how many: `count` in all; `sliced`: shorter or longer than one device's;
    `unknown`: not in the batch; `otherwise`: the same input, and something else given with it;
    `returned`: of which the model returned something else; `compared`: of which both losses are
    known to ask something; `asks_alike`: what this rank's asks of all of these is one multiple of
    what one device's does."""

    count: int = 0
    sliced: int = 0
    unknown: int = 0
    otherwise: int = 0
    returned: int = 0
    compared: int = 0
    asks_alike: bool = True


def rows_of_calls(calls: Sequence[ForwardCall]) -> Iterator[Row]:
    """Yield the rows of the first tensor that the model was given, pass by pass."""
    for call in calls:
        tensors = [
            leaf
            for leaf in tree_leaves((call.args, call.kwargs))
            if isinstance(leaf, Tensor) and leaf.dim() and not isinstance(leaf, DTensor)
        ]
        if not tensors:
            continue
        first, count = tensors[0], tensors[0].size(0)
        others = [tensor for tensor in tensors[1:] if tensor.size(0) == count]
        output, gradient = (
            _of_rows(tensor, count) for tensor in (call.output, call.upstream.get(0))
        )
        for place, row in enumerate(first):
            yield Row(
                key=digest(row.flatten()),
                others=tuple(digest(tensor[place].flatten()) for tensor in others),
                length=row.numel(),
                output=None if output is None else output[place],
                gradient=None if gradient is None else gradient[place],
            )


def _of_rows(tensor: Tensor | None, count: int) -> Tensor | None:
    has = tensor is not None and tensor.dim() and tensor.size(0) == count
    return tensor if has else None


def compare_rows(
    reference: Sequence[ForwardCall], run: Sequence[ForwardCall], tolerance: float
) -> RowReport:
    """Compare this rank's rows with one device's of the same input."""
    expected: dict[str, list[Row]] = {}
    lengths = set()
    for row in rows_of_calls(reference):
        expected.setdefault(row.key, []).append(row)
        lengths.add(row.length)
    report = RowReport()
    pairs: list[tuple[Tensor, Tensor]] = []
    for row in rows_of_calls(run):
        report.count += 1
        report.sliced += row.length not in lengths
        same = expected.get(row.key, [])
        if not same:
            report.unknown += 1
            continue
        right = next((other for other in same if other.others == row.others), None)
        if right is None:
            report.otherwise += len(row.others) == len(same[0].others)
            continue
        report.returned += _differ(row.output, right.output, tolerance)
        if (
            row.gradient is None
            or right.gradient is None
            or row.gradient.shape != right.gradient.shape
        ):
            continue
        pairs.append((row.gradient.flatten(), right.gradient.flatten()))
    report.compared = len(pairs)
    if pairs:
        own, truth = (torch.cat(rows) for rows in zip(*pairs, strict=True))
        report.asks_alike = multiple(own, truth).holds(tolerance)
    return report


def _differ(own: Tensor | None, right: Tensor | None, tolerance: float) -> bool:
    if own is None or right is None or own.shape != right.shape:
        return False
    return difference(own, right, norm(right)) > tolerance


@dataclass(frozen=True, slots=True)
class Samples:
    """Rows of the reference's inputs, from 0, that no rank saw, and that came more often than the
    others."""

    missing: tuple[int, ...]
    doubled: tuple[int, ...]
    count: int

    def __bool__(self) -> bool:
        return bool(self.missing or self.doubled)


def rows_of(calls: Sequence[ForwardCall]) -> list[str]:
    """Return a checksum of every row of the first tensor that the model was given, pass by pass."""
    return [row.key for row in rows_of_calls(calls)]


def ledger_of(reference: Sequence[str], everyones: Sequence[Sequence[str]]) -> Samples | None:
    """Ranks that share a batch all see it, so what counts is that no row comes more often than
    another. None where the rows cannot be compared."""
    expected = Counter(reference)
    seen = Counter(row for rows in everyones for row in rows)
    known = {row: seen[row] / times for row, times in expected.items() if seen[row]}
    if not known or set(seen) - set(expected):
        return None
    usual = Counter(known.values()).most_common(1)[0][0]
    return Samples(
        missing=tuple(i for i, row in enumerate(reference) if row not in known),
        doubled=tuple(i for i, row in enumerate(reference) if known.get(row, 0) > usual),
        count=len(reference),
    )
