"""The pace of a cluster by measured rates, interpolated between measurements along one size and
between shapes: exact where something was measured and linear in logarithms between, since time
is a power of size whose exponent differs where memory and where a dispatch is the bound.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain
from typing import Any

from ptrain.cost import Collective
from ptrain.facts.model import Operator
from ptrain.rates.pace import LinkRate, Pace, UnknownRate, link_seconds
from ptrain.spec.cluster import Cluster
from ptrain.spec.optimizers import OPTIMIZERS
from ptrain.spec.precision import DType, Layout
from ptrain.spec.rates import CLIP, Hook, LinkTier, OperatorKind, RateRow, Rates
from ptrain.spec.resolve_sections import tables

Shape = tuple[int, ...]

# Of weights over distance: above the number of coordinates, or the many that are far decide.
_SHARPNESS = 6


class Curve:
    """Seconds by bytes. Below the smallest size the dispatch is all there is, and it takes as long
    as that; above the largest, each byte takes as long as its bytes do."""

    def __init__(self, seconds: Mapping[int, float]) -> None:
        assert seconds, "the curve has no points"
        self.sizes = sorted(seconds)
        self.seconds = [seconds[size] for size in self.sizes]

    def at(self, size: int) -> float:
        """Seconds of `size` bytes."""
        if size <= self.sizes[0]:
            return self.seconds[0]
        if size >= self.sizes[-1]:
            return self.seconds[-1] * size / self.sizes[-1]
        end = bisect_left(self.sizes, size)
        (low, high), (fast, slow) = self.sizes[end - 1 : end + 1], self.seconds[end - 1 : end + 1]
        part = math.log(size / low) / math.log(high / low)
        return float(fast * (slow / fast) ** part)

    @property
    def bandwidth(self) -> float:
        """The most bytes per second of all sizes."""
        points = zip(self.sizes, self.seconds, strict=True)
        return max(size / taken for size, taken in points)


class Line:
    """Seconds by a quantity, in straight lines from (0, 0) through what was measured; beyond the
    largest quantity they stay what they are there."""

    def __init__(self, seconds: Mapping[float, float]) -> None:
        self.points = [(0.0, 0.0), *sorted(seconds.items())]

    def at(self, quantity: float) -> float:
        """Seconds of `quantity`."""
        end = bisect_left(self.points, (quantity,))
        if end == len(self.points):
            return self.points[-1][1]
        if end == 0:
            return 0.0
        (low, fast), (high, slow) = self.points[end - 1 : end + 1]
        return fast + (slow - fast) * (quantity - low) / (high - low)


class Surface:
    """Seconds by shape: what is `expected` of a shape, times how much longer those that were
    measured took than that, each of them weighted by how near it is in the logarithms of its
    `coordinates`. Of the shapes that are of one `kind` with it, where there are any."""

    def __init__(
        self,
        seconds: Mapping[Shape, float],
        *,
        expected: Callable[[Shape], float],
        coordinates: Callable[[Shape], Sequence[int]] = tuple,
        kind: Callable[[Shape], object] = lambda _: None,
    ) -> None:
        assert seconds, "the surface has no points"
        self.known = dict(seconds)  # measured, and what was asked before
        self.expected, self.coordinates, self.kind = expected, coordinates, kind
        self.kinds: dict[object, list[tuple[tuple[float, ...], float]]] = {}
        for shape, taken in seconds.items():
            point = self._point(shape), math.log(taken / expected(shape))
            self.kinds.setdefault(kind(shape), []).append(point)

    def at(self, shape: Shape) -> float:
        """Seconds of a shape."""
        if shape not in self.known:
            self.known[shape] = self._between(shape)
        return self.known[shape]

    def _between(self, shape: Shape) -> float:
        points = self.kinds.get(self.kind(shape)) or list(chain(*self.kinds.values()))
        here = self._point(shape)
        total = excess = 0.0
        for there, more in points:
            distance = math.dist(here, there)
            if not distance:
                return self.expected(shape) * math.exp(more)
            weight = distance**-_SHARPNESS
            total += weight
            excess += weight * more
        return self.expected(shape) * math.exp(excess / total)

    def _point(self, shape: Shape) -> tuple[float, ...]:
        return tuple(math.log(size) for size in self.coordinates(shape))


_BF16 = 80  # the first compute capability with matrix units for bf16
# The tensor cores of GPUs multiply both at one pace, and neither has a path of its own in memory.
_ALIKE = {DType.FP16: DType.BF16, DType.BF16: DType.FP16}
CALIBRATED = (DType.FP32, DType.BF16)  # what `ptrain calibrate` measures
_ALIGNED = 8  # elements: the tensor cores' rows are whole 16 bytes, or slow


def pace_of(cluster: Cluster | None, ranks: int) -> Pace | None:
    """Return the pace of `ranks` ranks in all on a cluster, each beside as many as a node has; None
    where nobody measured it, and `lacking` says why."""
    if cluster is None or cluster.rates is None or lacking(cluster, ranks):
        return None
    return _pace(cluster, _on_a_node(cluster, ranks))


def pace_while_others_wait(cluster: Cluster | None, ranks: int, busy: int) -> Pace | None:
    """Return the pace of each of `busy` ranks of a job of `ranks`: that of so many at once which
    have as many threads as the job's have. None where nobody measured it, or says the threads."""
    if cluster is None or cluster.rates is None or not tables(cluster.rates).threads:
        return None
    rates = tables(cluster.rates)
    threads = dict(zip(rates.at_once, rates.threads, strict=True))
    here = _on_a_node(cluster, ranks)
    return _pace(cluster, busy) if threads.get(busy) == threads.get(here) else None


@lru_cache(maxsize=64)
def _pace(cluster: Cluster, ranks: int) -> Pace:
    """A search asks for the same one thousands of times."""
    assert cluster.rates is not None, "the cluster has no rates"
    return MeasuredPace(cluster, tables(cluster.rates), ranks)


def lacking(cluster: Cluster | None, ranks: int) -> str:
    """Why there is no pace, and what gives one; "" where there is."""
    if cluster is None:
        return "the spec has no cluster. Add `cluster.preset=h100-8`, for example."
    if cluster.rates is None:
        return (
            f"the cluster {cluster.name} has no rates. Run `ptrain calibrate` to measure this "
            "machine, then add `cluster.preset=cluster.yaml`."
        )
    at_once, here = tables(cluster.rates).at_once, _on_a_node(cluster, ranks)
    if cluster.kind == "cuda" or here in at_once:
        return ""
    measured = ", ".join(map(str, at_once))
    remedy = _measuring((*at_once, here), -(-ranks // here))
    return (
        f"{here} ranks of a node compute at the same time, but the rates of {cluster.name} "
        f"are measured for {measured}. Run {remedy}."
    )


def _measuring(numbers: Sequence[int], nodes: int) -> str:
    """The command that measures so many ranks at once, the last number of them over nodes."""
    if nodes == 1:
        return f"`ptrain calibrate --ranks {','.join(map(str, numbers))}`"
    return (
        f"`torchrun --nnodes {nodes} --nproc-per-node {numbers[-1]} -m ptrain.calibration` on each "
        "node"
    )


def _on_a_node(cluster: Cluster, ranks: int) -> int:
    return min(ranks, cluster.devices_per_node or cluster.devices)


class MeasuredPace:
    """The rates of a cluster whose nodes have one of the measured numbers of ranks at once."""

    def __init__(self, cluster: Cluster, rates: Rates, ranks: int) -> None:
        self.is_cuda = cluster.kind == "cuda"
        self.has_bf16 = cluster.sm is None or cluster.sm >= _BF16
        self.overlaps = self.is_cuda
        self.ranks = _on_a_node(cluster, ranks)
        last = len(rates.at_once) - 1
        column = rates.at_once.index(self.ranks) if self.ranks in rates.at_once else last
        self.curves = {
            key: Curve(points)
            for key, points in _by_last(_completed(rates.operators, column)).items()
        }
        self.nearest: dict[tuple[OperatorKind, DType], Curve] = {}
        self.collectives = {
            key: Curve(points)
            for key, points in _by_last(_figures(rates.collectives, column)).items()
        }
        late = {key[0] * 1e-6: taken for key, taken in _figures(rates.lateness, column)}
        self.lateness = Line(late)
        self.copies = {
            key: Curve(points) for key, points in _by_last(_completed(rates.copies, column)).items()
        }
        self.hooks = {key[0]: taken for key, taken in _figures(rates.hooks, column)}
        self.products = self._products(_by_first(_figures(rates.products, column), 1))
        self.attention = self._attention(_by_first(_figures(rates.attention, column), 2))
        self.updates = _updates(_by_first(_figures(rates.updates, column), 2))
        self.links = _links(rates, cluster)

    # -------- operators

    def operator_seconds(self, operator: Operator) -> float:
        match operator.kind:
            case OperatorKind.VIEW:
                return 0.0
            case OperatorKind.PRODUCT:
                surface = self._of_dtype(self.products, operator.kind, operator.dtype)
                return operator.times * surface.at(operator.dimensions)
            case OperatorKind.ATTENTION | OperatorKind.ATTENTION_BACKWARD:
                by_dtype = {
                    (dtype,): surface
                    for (kind, dtype), surface in self.attention.items()
                    if kind is operator.kind
                }
                surface = self._of_dtype(by_dtype, operator.kind, operator.dtype)
                parts = 2 if operator.is_whole else 1  # measured is causal attention
                return parts * operator.times * surface.at(operator.dimensions)
            case _:
                (size,) = operator.dimensions
                return operator.times * self._curve(operator.kind, operator.dtype).at(size)

    def _of_dtype(
        self, surfaces: Mapping[tuple[Any, ...], Surface], kind: OperatorKind, dtype: DType
    ) -> Surface:
        surface = surfaces.get((dtype,))
        is_alike = self.is_cuda and self.has_bf16 and dtype in _ALIKE
        if surface is None and is_alike:
            surface = surfaces.get((_ALIKE[dtype],))
        if surface is None:
            raise self._unknown(f"{kind} in {dtype}", is_calibrated=dtype in CALIBRATED)
        return surface

    def _curve(self, kind: OperatorKind, dtype: DType) -> Curve:
        if (kind, dtype) not in self.nearest:
            self.nearest[kind, dtype] = self._nearest_curve(kind, dtype)
        return self.nearest[kind, dtype]

    def _nearest_curve(self, kind: OperatorKind, dtype: DType) -> Curve:
        """Of the dtype that is nearest in size where that one was not measured, and of copies where
        that kind was not: memory bounds them all."""
        for like in dict.fromkeys((kind, OperatorKind.COPY)):
            measured = [known for of, known in self.curves if of is like]
            if measured:
                near = min(
                    measured,
                    key=lambda known: (known is not dtype, abs(known.itemsize - dtype.itemsize)),
                )
                return self.curves[like, near]
        raise self._unknown(f"{kind} in {dtype}")

    def _products(
        self, rows: Mapping[tuple[Any, ...], Mapping[Shape, float]]
    ) -> dict[tuple[Any, ...], Surface]:
        least = min((min(points.values()) for points in rows.values()), default=0.0)
        return {
            (dtype,): Surface(
                points,
                expected=self._expected(points, least, _product_flops, _product_bytes(dtype)),
                kind=lambda shape: self.is_cuda and all(size % _ALIGNED == 0 for size in shape[1:]),
            )
            for (dtype,), points in rows.items()
        }

    def _attention(
        self, rows: Mapping[tuple[Any, ...], Mapping[Shape, float]]
    ) -> dict[tuple[Any, ...], Surface]:
        least: dict[OperatorKind, float] = {}
        for (kind, _), points in rows.items():
            least[kind] = min(least.get(kind, math.inf), *points.values())
        return {
            (kind, dtype): Surface(
                points,
                expected=self._expected(points, least[kind], math.prod, _attention_bytes(dtype)),
                coordinates=lambda shape: (shape[0] * shape[1], *shape[2:]),
            )
            for (kind, dtype), points in rows.items()
        }

    def _expected(
        self,
        points: Mapping[Shape, float],
        least: float,
        work: Callable[[Shape], int],
        size: Callable[[Shape], int],
    ) -> Callable[[Shape], float]:
        """The roofline of what was measured: `work` at the best pace of all shapes, or the bytes at
        memory's, and a dispatch of `least` seconds. A processor does that first; the device of
        one that runs ahead waits for it only where it is done before."""
        fastest = max(work(shape) / taken for shape, taken in points.items())
        copies = [curve.bandwidth for (kind, _), curve in self.curves.items()
                  if kind is OperatorKind.COPY]  # fmt: skip
        bandwidth = max(copies, default=math.inf)

        def seconds(shape: Shape) -> float:
            busy = max(work(shape) / fastest, size(shape) / bandwidth)
            return max(busy, least) if self.is_cuda else busy + least

        return seconds

    # -------- what is sent and copied

    def collective_seconds(
        self, collective: Collective, *, ranks: int, nodes: int, payload: int
    ) -> float:
        if ranks == 1 or collective is Collective.RECV:
            return 0.0
        curve = self.collectives.get((collective, ranks, nodes))
        if curve is not None:
            return curve.at(payload)
        if (LinkTier.BETWEEN if nodes > 1 else LinkTier.WITHIN) not in self.links:
            where = "one node" if nodes == 1 else f"{nodes} nodes"
            raise self._unknown(
                f"{collective} over {ranks} ranks on {where}",
                is_calibrated=nodes > 1 or self.ranks % ranks == 0,
                nodes=nodes,
            )
        return link_seconds(self.links, collective, ranks=ranks, nodes=nodes, payload=payload)

    def late_seconds(self, computed: float) -> float:
        """Nothing where it was not measured."""
        return self.lateness.at(computed)

    def copy_seconds(self, copy: Collective, size: int) -> float:
        if (copy,) not in self.copies:
            raise self._unknown(str(copy))
        return self.copies[copy,].at(size)

    # -------- update and hooks

    def update_seconds(
        self, optimizer: str, layout: Layout, *, elements: int, tensors: int
    ) -> float:
        dtype, own = layout.updated, elements // max(1, tensors)
        row, surface = OPTIMIZERS[optimizer], self.updates.get((optimizer, dtype))
        operators = [
            Operator(OperatorKind.COPY, wide, (own * both,))
            for wide, both in _casts(len(row.moments), layout)
        ]
        if surface is None and not row.operators:
            raise self._unknown(
                f"the {optimizer} update in {dtype}",
                is_calibrated=row.is_fused and dtype in CALIBRATED,
            )
        if surface is None:  # what is not fused takes what its operators take
            operators += [
                Operator(OperatorKind.POINTWISE, dtype, (number * own * dtype.itemsize,))
                for number in row.operators
            ]
        seconds = 0.0 if surface is None else surface.at((elements, tensors))
        return seconds + sum(tensors * self.operator_seconds(operator) for operator in operators)

    def clip_seconds(self, layout: Layout, *, elements: int, tensors: int) -> float:
        dtype = layout.gradients
        surface = self.updates.get((CLIP, dtype))
        if surface is not None:
            return surface.at((elements, tensors))
        if not self.is_cuda:
            raise self._unknown(f"clipping in {dtype}", is_calibrated=dtype in CALIBRATED)
        size = elements * dtype.itemsize  # read for the norm; read and written to be scaled
        return sum(
            self.operator_seconds(Operator(kind, dtype, (times * size,)))
            for kind, times in ((OperatorKind.COPY, 1), (OperatorKind.POINTWISE, 2))
        )

    def hook_seconds(self, hook: Hook) -> float:
        """Nothing on GPUs where it was not measured: there a prediction says that its host is taken
        to run ahead."""
        if hook not in self.hooks and not self.is_cuda:
            raise self._unknown(f"the hook {hook}")
        return self.hooks.get(hook, 0.0)

    def _unknown(self, what: str, *, is_calibrated: bool = True, nodes: int = 1) -> UnknownRate:
        measures = f"Run {_measuring((self.ranks,), nodes)}."
        who = measures if is_calibrated else "No calibration measures it yet."
        return UnknownRate(f"the cluster has no rate for {what}. {who}")


def _casts(moments: int, layout: Layout) -> Iterator[tuple[DType, int]]:
    """What the update copies beside itself: the wider dtype, and the bytes of an element in both.
    Of moments that are kept in another dtype than they are updated in, there and back."""
    for dtype, times in (
        (layout.gradients, 1),
        (layout.moments, 2 * moments),
        (layout.parameters, 1),
    ):
        if dtype is not layout.updated:
            wide = max(dtype, layout.updated, key=lambda known: known.itemsize)
            for _ in range(times):
                yield wide, dtype.itemsize + layout.updated.itemsize


def _product_flops(shape: Shape) -> int:
    return 2 * math.prod(shape)


def _product_bytes(dtype: DType) -> Callable[[Shape], int]:
    def size(shape: Shape) -> int:
        matrices, rows, inner, columns = shape
        return dtype.itemsize * matrices * (rows * inner + inner * columns + rows * columns)

    return size


def _attention_bytes(dtype: DType) -> Callable[[Shape], int]:
    def size(shape: Shape) -> int:
        samples, heads, queries, keys, features = shape
        return dtype.itemsize * samples * heads * features * 2 * (queries + keys)

    return size


def _updates(
    rows: Mapping[tuple[Any, ...], Mapping[Shape, float]],
) -> dict[tuple[Any, ...], Surface]:
    """A step takes at least what the shortest does, and each element and each further tensor what
    they do where they take least."""
    surfaces = {}
    for key, points in rows.items():
        least = min(points.values())
        of_element = min(taken / elements for (elements, _), taken in points.items())
        of_tensor = min(
            (
                (taken - least) / (tensors - 1)
                for (_, tensors), taken in points.items()
                if tensors > 1
            ),
            default=0.0,
        )
        surfaces[key] = Surface(points, expected=_sum_of(least, of_element, of_tensor))
    return surfaces


def _sum_of(least: float, of_element: float, of_tensor: float) -> Callable[[Shape], float]:
    return lambda shape: least + of_element * shape[0] + of_tensor * (shape[1] - 1)


def _links(rates: Rates, cluster: Cluster) -> dict[LinkTier, LinkRate]:
    bandwidths = {
        LinkTier.WITHIN: cluster.intra_node_bandwidth,
        LinkTier.BETWEEN: cluster.inter_node_bandwidth,
    }
    links = {}
    for (tier,), figures in rates.links:
        call, hop, share = (figure or 0.0 for figure in figures)
        links[tier] = LinkRate(call=call, hop=hop, bandwidth=share * bandwidths[tier])
    return links


Figures = list[tuple[tuple[Any, ...], float]]


def _figures(rows: Iterable[RateRow], column: int) -> Figures:
    """What was measured with so many ranks at once."""
    return [(row.key, taken) for row in rows if (taken := row.figures[column]) is not None]


def _completed(rows: Sequence[RateRow], column: int) -> Figures:
    """The same of rows by size, some of which were left out for want of time: they take as much
    longer than with fewer ranks at once as the largest one does that was measured with both."""
    figures = dict(_figures(rows, column))
    for fewer in reversed(range(column)):
        of_fewer = dict(_figures(rows, fewer))
        for kind, sizes in _by_last(list(of_fewer.items())).items():
            if both := [size for size in sizes if (*kind, size) in figures]:
                most = max(both)
                longer = figures[(*kind, most)] / sizes[most]
                for size, taken in sizes.items():
                    figures.setdefault((*kind, size), longer * taken)
    return list(figures.items())


def _by_last(figures: Figures) -> dict[tuple[Any, ...], dict[int, float]]:
    grouped: dict[tuple[Any, ...], dict[int, float]] = defaultdict(dict)
    for (*first, size), taken in figures:
        grouped[tuple(first)][size] = taken
    return grouped


def _by_first(figures: Figures, count: int) -> dict[tuple[Any, ...], dict[Shape, float]]:
    grouped: dict[tuple[Any, ...], dict[Shape, float]] = defaultdict(dict)
    for key, taken in figures:
        grouped[key[:count]][key[count:]] = taken
    return grouped
