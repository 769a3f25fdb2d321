"""The pace of a cluster from measured rates, interpolated between measured sizes and shapes.

At measured points the pace is exact. Between points it is linear in logarithms, because time is a
power of size, whose exponent differs between sizes that dispatch bounds and sizes that memory
bounds.
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
from ptrain.rates.pace import Figures, LinkRate, Pace, UnknownRate, link_seconds, with_fp8
from ptrain.spec.cluster import CLIP, Cluster, Hook, LinkTier, OperatorKind, RateRow, Rates
from ptrain.spec.job import OPTIMIZERS
from ptrain.spec.precision import DType, Layout
from ptrain.spec.resolve_sections import expand_rates

Shape = tuple[int, ...]  # the dimensions of an operator, or (elements, tensors) of an update

# The exponent of inverse-distance weights. It must exceed the number of coordinates; otherwise the
# many distant points outweigh the near ones.
_SHARPNESS = 6


class Curve:
    """Seconds as a function of bytes.

    Below the smallest measured size the time is constant, because dispatch bounds it. Above the
    largest size the time per byte is constant.
    """

    def __init__(self, seconds: Mapping[int, float]) -> None:
        assert seconds, "the curve has no points"
        self.sizes = sorted(seconds)
        self.seconds = [seconds[size] for size in self.sizes]

    def interpolate(self, size: int) -> float:
        """Return the seconds of `size` bytes."""
        if size <= self.sizes[0]:
            return self.seconds[0]
        if size >= self.sizes[-1]:
            return self.seconds[-1] * size / self.sizes[-1]  # bandwidth bounds large sizes
        end = bisect_left(self.sizes, size)
        (low, high), (fast, slow) = self.sizes[end - 1 : end + 1], self.seconds[end - 1 : end + 1]
        part = math.log(size / low) / math.log(high / low)
        return float(fast * (slow / fast) ** part)

    @property
    def bandwidth(self) -> float:
        """The highest bytes per second of all measured sizes."""
        points = zip(self.sizes, self.seconds, strict=True)
        return max(size / taken for size, taken in points)


class Line:
    """Seconds as a function of a quantity: straight lines from (0, 0) through the measured points.

    Beyond the largest measured quantity the time is constant.
    """

    def __init__(self, seconds: Mapping[float, float]) -> None:
        self.points = [(0.0, 0.0), *sorted(seconds.items())]

    def interpolate(self, quantity: float) -> float:
        """Return the seconds of a quantity."""
        end = bisect_left(self.points, (quantity,))
        if end == len(self.points):
            return self.points[-1][1]
        if end == 0:
            return 0.0
        (low, fast), (high, slow) = self.points[end - 1 : end + 1]
        return fast + (slow - fast) * (quantity - low) / (high - low)


class Surface:
    """Seconds as a function of a shape.

    The result is the expected time of the shape, times the excess of measured shapes over their
    expected time. Each measured shape is weighted by its distance in logarithms of `coordinates`.
    If measured shapes of the same `kind` exist, only these count.

    Args:
        seconds: The measured seconds by shape.
        expected: Returns the expected seconds of a shape.
        coordinates: Returns the sizes that distances are computed from; by default the shape.
        kind: Returns the kind of a shape; by default all shapes are of one kind.
    """

    def __init__(
        self,
        seconds: Mapping[Shape, float],
        *,
        expected: Callable[[Shape], float],
        coordinates: Callable[[Shape], Sequence[int]] = tuple,
        kind: Callable[[Shape], object] = lambda _: None,
    ) -> None:
        assert seconds, "the surface has no points"
        self.known = dict(seconds)  # measured shapes, and a cache of interpolated ones
        self.expected, self.coordinates, self.kind = expected, coordinates, kind
        self.kinds: dict[object, list[tuple[tuple[float, ...], float]]] = {}
        for shape, taken in seconds.items():
            point = self._log_coordinates(shape), math.log(taken / expected(shape))
            self.kinds.setdefault(kind(shape), []).append(point)

    def interpolate(self, shape: Shape) -> float:
        """Return the seconds of a shape."""
        if shape not in self.known:
            self.known[shape] = self._interpolate(shape)
        return self.known[shape]

    def _interpolate(self, shape: Shape) -> float:
        """Return the interpolated seconds of a shape."""
        points = self.kinds.get(self.kind(shape)) or list(chain(*self.kinds.values()))
        here = self._log_coordinates(shape)
        total = excess = 0.0
        for there, more in points:
            distance = math.dist(here, there)
            if not distance:
                return self.expected(shape) * math.exp(more)
            # Shepard's method: the mean of the excess, weighted by a power of the inverse distance.
            weight = distance**-_SHARPNESS
            total += weight
            excess += weight * more
        return self.expected(shape) * math.exp(excess / total)

    def _log_coordinates(self, shape: Shape) -> tuple[float, ...]:
        """Return the logarithms of a shape's coordinates."""
        return tuple(math.log(size) for size in self.coordinates(shape))


_BF16 = 80  # the first compute capability with matrix units for bf16
# Tensor cores multiply fp16 and bf16 at one rate, and memory does not distinguish them.
_ALIKE = {DType.FP16: DType.BF16, DType.BF16: DType.FP16}
CALIBRATED = (DType.FP32, DType.BF16)  # dtypes that `ptrain calibrate` measures
_ALIGNED = 8  # elements; tensor cores are slow if a row is not a multiple of 16 bytes


def pace_of(cluster: Cluster | None, ranks: int) -> Pace | None:
    """Return the pace of a job's ranks on a cluster.

    Args:
        cluster: The cluster with its rates, or None.
        ranks: The number of ranks of the job; as many as possible are on each node.

    Returns:
        None if the rates were not measured for this number of ranks per node.
        `missing_rates_reason` returns the reason.
    """
    if cluster is None or cluster.rates is None or missing_rates_reason(cluster, ranks):
        return None
    return _cached_pace(cluster, _ranks_per_node(cluster, ranks))


def pace_while_others_wait(cluster: Cluster | None, ranks: int, busy: int) -> Pace | None:
    """Return the pace of `busy` ranks of a node while the job's other ranks wait.

    It is the pace of that number of ranks at once, if they were measured with as many threads per
    rank as the job's ranks have.

    Args:
        cluster: The cluster with its rates, or None.
        ranks: The number of ranks of the job.
        busy: The number of ranks of a node that compute.

    Returns:
        None if this was not measured, or the file has no numbers of threads.
    """
    if cluster is None or cluster.rates is None or not expand_rates(cluster.rates).threads:
        return None
    rates = expand_rates(cluster.rates)
    # An operator's time depends on its threads: a rank keeps as many when the others wait.
    threads = dict(zip(rates.at_once, rates.threads, strict=True))
    here = _ranks_per_node(cluster, ranks)
    return _cached_pace(cluster, busy) if threads.get(busy) == threads.get(here) else None


@lru_cache(maxsize=64)
def _cached_pace(cluster: Cluster, ranks: int) -> Pace:
    """Return a pace, cached, since a search needs the same one thousands of times."""
    assert cluster.rates is not None, "the cluster has no rates"
    return MeasuredPace(cluster, expand_rates(cluster.rates), ranks)


def missing_rates_reason(cluster: Cluster | None, ranks: int) -> str:
    """Return the reason why there is no pace, with the remedy; empty if there is one."""
    if cluster is None:
        return "the spec has no cluster. Add `cluster.preset=h100-8`, for example."
    if cluster.rates is None:
        return (
            f"the cluster {cluster.name} has no rates. Run `ptrain calibrate` to measure this "
            "machine, then add `cluster.preset=cluster.yaml`."
        )
    at_once, here = expand_rates(cluster.rates).at_once, _ranks_per_node(cluster, ranks)
    # Ranks on GPUs do not share compute units; ranks on CPUs share cores and memory bandwidth.
    if cluster.kind == "cuda" or here in at_once:
        return ""
    measured = ", ".join(map(str, at_once))
    remedy = _measure_command((*at_once, here), -(-ranks // here))
    return (
        f"{here} ranks of a node compute at the same time, but the rates of {cluster.name} "
        f"are measured for {measured}. Run {remedy}."
    )


def _measure_command(numbers: Sequence[int], nodes: int) -> str:
    """Return the command that measures numbers of ranks at once, the last one on `nodes` nodes."""
    if nodes == 1:
        return f"`ptrain calibrate --ranks {','.join(map(str, numbers))}`"
    return (
        f"`torchrun --nnodes {nodes} --nproc-per-node {numbers[-1]} -m ptrain.calibration` on each "
        "node"
    )


def _ranks_per_node(cluster: Cluster, ranks: int) -> int:
    """Return the number of a job's ranks on one node."""
    return min(ranks, cluster.devices_per_node or cluster.devices)


class MeasuredPace:
    """The pace of a cluster, from the measurements with one number of ranks per node."""

    def __init__(self, cluster: Cluster, rates: Rates, ranks: int) -> None:
        self.is_cuda = cluster.kind == "cuda"
        # A cluster file without a compute capability is assumed to be of a recent GPU.
        self.has_bf16 = cluster.sm is None or cluster.sm >= _BF16
        self.overlaps = self.is_cuda
        self.ranks = _ranks_per_node(cluster, ranks)
        # GPUs are measured one at a time (`at_once: [1]`), whatever the number on a node.
        last = len(rates.at_once) - 1
        column = rates.at_once.index(self.ranks) if self.ranks in rates.at_once else last
        self.curves = {
            key: Curve(points)
            for key, points in _group_by_prefix(_complete_figures(rates.operators, column)).items()
        }
        self.nearest: dict[tuple[OperatorKind, DType], Curve] = {}
        self.collectives = {
            key: Curve(points)
            for key, points in _group_by_prefix(_column_figures(rates.collectives, column)).items()
        }
        late = {key[0] * 1e-6: taken for key, taken in _column_figures(rates.lateness, column)}
        self.lateness = Line(late)
        self.copies = {
            key: Curve(points)
            for key, points in _group_by_prefix(_complete_figures(rates.copies, column)).items()
        }
        self.hooks = {key[0]: taken for key, taken in _column_figures(rates.hooks, column)}
        self.products = self._product_surfaces(
            _group_by_first(with_fp8(_column_figures(rates.products, column), cluster), 1)
        )
        self.attention = self._attention_surfaces(
            _group_by_first(_column_figures(rates.attention, column), 2)
        )
        self.updates = _update_surfaces(_group_by_first(_column_figures(rates.updates, column), 2))
        self.links = _link_rates(rates, cluster)

    # -------- operators

    def operator_seconds(self, operator: Operator) -> float:
        """Return the seconds of all `operator.times` operators; a view takes none."""
        match operator.kind:
            case OperatorKind.VIEW:
                return 0.0
            case OperatorKind.PRODUCT:
                surface = self._of_dtype(self.products, operator.kind, operator.dtype)
                return operator.times * surface.interpolate(operator.dimensions)
            case OperatorKind.ATTENTION | OperatorKind.ATTENTION_BACKWARD:
                by_dtype = {
                    (dtype,): surface
                    for (kind, dtype), surface in self.attention.items()
                    if kind is operator.kind
                }
                surface = self._of_dtype(by_dtype, operator.kind, operator.dtype)
                parts = 2 if operator.is_whole else 1  # causal attention is measured
                return parts * operator.times * surface.interpolate(operator.dimensions)
            case _:
                (size,) = operator.dimensions
                return operator.times * self._curve(operator.kind, operator.dtype).interpolate(size)

    def _of_dtype(
        self, surfaces: Mapping[tuple[Any, ...], Surface], kind: OperatorKind, dtype: DType
    ) -> Surface:
        """Return the surface of a dtype; on GPUs, fp16 and bf16 replace each other."""
        surface = surfaces.get((dtype,))
        is_alike = self.is_cuda and self.has_bf16 and dtype in _ALIKE
        if surface is None and is_alike:
            surface = surfaces.get((_ALIKE[dtype],))
        if surface is None:
            raise self._unknown_rate(f"{kind} in {dtype}", is_calibrated=dtype in CALIBRATED)
        return surface

    def _curve(self, kind: OperatorKind, dtype: DType) -> Curve:
        """Return the curve of a kind of operator and a dtype, cached."""
        if (kind, dtype) not in self.nearest:
            self.nearest[kind, dtype] = self._nearest_curve(kind, dtype)
        return self.nearest[kind, dtype]

    def _nearest_curve(self, kind: OperatorKind, dtype: DType) -> Curve:
        """Return the curve of the measured dtype with the nearest element size.

        Without a curve of this kind, the curves of copies are used: memory bounds both.
        """
        for like in dict.fromkeys((kind, OperatorKind.COPY)):
            measured = [known for of, known in self.curves if of is like]
            if measured:
                near = min(
                    measured,
                    key=lambda known: (known is not dtype, abs(known.itemsize - dtype.itemsize)),
                )
                return self.curves[like, near]
        raise self._unknown_rate(f"{kind} in {dtype}")

    def _product_surfaces(
        self, rows: Mapping[tuple[Any, ...], Mapping[Shape, float]]
    ) -> dict[tuple[Any, ...], Surface]:
        """Return the surface of matrix products for each dtype."""
        # The shortest product of any other dtype than fp8 is taken as the time of a dispatch.
        wide = (points for (dtype,), points in rows.items() if dtype is not DType.FP8)
        least = min((min(points.values()) for points in wide), default=0.0)
        return {
            (dtype,): Surface(
                points,
                expected=self._roofline(points, least, _product_flops, _product_bytes(dtype)),
                kind=lambda shape: self.is_cuda and all(size % _ALIGNED == 0 for size in shape[1:]),
            )
            for (dtype,), points in rows.items()
        }

    def _attention_surfaces(
        self, rows: Mapping[tuple[Any, ...], Mapping[Shape, float]]
    ) -> dict[tuple[Any, ...], Surface]:
        """Return the surface of fused attention for each pass and dtype."""
        least: dict[OperatorKind, float] = {}
        for (kind, _), points in rows.items():
            least[kind] = min(least.get(kind, math.inf), *points.values())
        return {
            (kind, dtype): Surface(
                points,
                expected=self._roofline(points, least[kind], math.prod, _attention_bytes(dtype)),
                coordinates=lambda shape: (shape[0] * shape[1], *shape[2:]),
            )
            for (kind, dtype), points in rows.items()
        }

    def _roofline(
        self,
        points: Mapping[Shape, float],
        least: float,
        work: Callable[[Shape], int],
        size: Callable[[Shape], int],
    ) -> Callable[[Shape], float]:
        """Return the roofline of measured shapes, as a function of a shape.

        An operator takes the longer of two times: its work at the best measured rate, or its bytes
        at the memory bandwidth. On a CPU the shortest measured time, which is a dispatch, is added.
        A GPU's host dispatches ahead, so the shortest time is only a lower bound there.

        Args:
            points: The measured seconds by shape.
            least: The shortest measured time, in seconds.
            work: Returns the operations of a shape.
            size: Returns the bytes of a shape.
        """
        # The peak rate of the machine, as far as any measured shape reached it.
        fastest = max(work(shape) / taken for shape, taken in points.items())
        copies = [curve.bandwidth for (kind, _), curve in self.curves.items()
                  if kind is OperatorKind.COPY]  # fmt: skip
        bandwidth = max(copies, default=math.inf)

        def seconds(shape: Shape) -> float:
            busy = max(work(shape) / fastest, size(shape) / bandwidth)
            return max(busy, least) if self.is_cuda else busy + least

        return seconds

    # -------- communication and copies

    def collective_seconds(
        self, collective: Collective, *, ranks: int, nodes: int, payload: int
    ) -> float:
        """Return the seconds of one collective, measured or by the rates of links."""
        if ranks == 1 or collective is Collective.RECV:  # a send has the time of the pair
            return 0.0
        curve = self.collectives.get((collective, ranks, nodes))
        if curve is not None:
            return curve.interpolate(payload)
        if (LinkTier.BETWEEN if nodes > 1 else LinkTier.WITHIN) not in self.links:
            where = "one node" if nodes == 1 else f"{nodes} nodes"
            raise self._unknown_rate(
                f"{collective} over {ranks} ranks on {where}",
                is_calibrated=nodes > 1 or self.ranks % ranks == 0,
                nodes=nodes,
            )
        return link_seconds(self.links, collective, ranks=ranks, nodes=nodes, payload=payload)

    def late_seconds(self, computed: float) -> float:
        """Return the additional seconds of a collective after computing; 0 if not measured."""
        return self.lateness.interpolate(computed)

    def copy_seconds(self, copy: Collective, size: int) -> float:
        """Return the seconds of a copy between tiers, if its kind was measured."""
        if (copy,) not in self.copies:
            raise self._unknown_rate(str(copy))
        return self.copies[copy,].interpolate(size)

    # -------- update and hooks

    def update_seconds(
        self, optimizer: str, layout: Layout, *, elements: int, tensors: int
    ) -> float:
        """Return the seconds of an optimizer step and its casts.

        A fused optimizer has measured times. Other optimizers have the times of their pointwise
        operators.
        """
        dtype, elements_per_tensor = layout.update_dtype, elements // max(1, tensors)
        row, surface = OPTIMIZERS[optimizer], self.updates.get((optimizer, dtype))
        operators = [
            Operator(OperatorKind.COPY, wide, (elements_per_tensor * both,))
            for wide, both in _update_casts(len(row.moments), layout)
        ]
        if surface is None and not row.operators:
            raise self._unknown_rate(
                f"the {optimizer} update in {dtype}",
                is_calibrated=row.is_fused and dtype in CALIBRATED,
            )
        if surface is None:  # an optimizer that is not fused takes the time of its operators
            operators += [
                Operator(
                    OperatorKind.POINTWISE, dtype, (number * elements_per_tensor * dtype.itemsize,)
                )
                for number in row.operators
            ]
        seconds = 0.0 if surface is None else surface.interpolate((elements, tensors))
        return seconds + sum(tensors * self.operator_seconds(operator) for operator in operators)

    def clip_seconds(self, layout: Layout, *, elements: int, tensors: int) -> float:
        """Return the seconds of clipping; on GPUs without a measurement, of its memory traffic."""
        dtype = layout.gradients
        surface = self.updates.get((CLIP, dtype))
        if surface is not None:
            return surface.interpolate((elements, tensors))
        if not self.is_cuda:
            raise self._unknown_rate(f"clipping in {dtype}", is_calibrated=dtype in CALIBRATED)
        size = elements * dtype.itemsize  # read for the norm; read and written to be scaled
        return sum(
            self.operator_seconds(Operator(kind, dtype, (times * size,)))
            for kind, times in ((OperatorKind.COPY, 1), (OperatorKind.POINTWISE, 2))
        )

    def hook_seconds(self, hook: Hook) -> float:
        """Return the host's seconds of a hook; 0 on GPUs without a measurement.

        The prediction then states that the host is assumed to run ahead.
        """
        if hook not in self.hooks and not self.is_cuda:
            raise self._unknown_rate(f"the hook {hook}")
        return self.hooks.get(hook, 0.0)

    def _unknown_rate(
        self, what: str, *, is_calibrated: bool = True, nodes: int = 1
    ) -> UnknownRate:
        """Return the error for a missing rate."""
        measures = f"Run {_measure_command((self.ranks,), nodes)}."
        who = measures if is_calibrated else "No calibration measures it yet."
        return UnknownRate(f"the cluster has no rate for {what}. {who}")


def _update_casts(moments: int, layout: Layout) -> Iterator[tuple[DType, int]]:
    """Yield the casts of an update: the wider dtype, and the bytes per element in both dtypes.

    Moments that are stored in another dtype than they are updated in are cast twice.
    """
    for dtype, times in (
        (layout.gradients, 1),
        (layout.moments, 2 * moments),
        (layout.parameters, 1),
    ):
        if dtype is not layout.update_dtype:
            wide = max(dtype, layout.update_dtype, key=lambda known: known.itemsize)
            for _ in range(times):
                yield wide, dtype.itemsize + layout.update_dtype.itemsize


def _product_flops(shape: Shape) -> int:
    """Return the operations of a product: a multiplication and an addition per element."""
    return 2 * math.prod(shape)


def _product_bytes(dtype: DType) -> Callable[[Shape], int]:
    """Return a function of the bytes that a product reads and writes."""

    def size(shape: Shape) -> int:
        matrices, rows, inner, columns = shape
        return dtype.itemsize * matrices * (rows * inner + inner * columns + rows * columns)

    return size


def _attention_bytes(dtype: DType) -> Callable[[Shape], int]:
    """Return a function of the bytes that fused attention reads and writes."""

    def size(shape: Shape) -> int:
        samples, heads, queries, keys, features = shape
        return dtype.itemsize * samples * heads * features * 2 * (queries + keys)

    return size


def _update_surfaces(
    rows: Mapping[tuple[Any, ...], Mapping[Shape, float]],
) -> dict[tuple[Any, ...], Surface]:
    """Return the surface of each optimizer and dtype, by elements and tensors.

    The expected time is the shortest measured time, plus the lowest measured time per element, plus
    the lowest measured time per additional tensor.
    """
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
        surfaces[key] = Surface(points, expected=_linear_cost(least, of_element, of_tensor))
    return surfaces


def _linear_cost(least: float, of_element: float, of_tensor: float) -> Callable[[Shape], float]:
    """Return the linear function of elements and tensors."""
    return lambda shape: least + of_element * shape[0] + of_tensor * (shape[1] - 1)


def _link_rates(rates: Rates, cluster: Cluster) -> dict[LinkTier, LinkRate]:
    """Return the rates of links: latencies, and bandwidths as shares of the cluster's."""
    bandwidths = {
        LinkTier.WITHIN: cluster.intra_node_bandwidth,
        LinkTier.BETWEEN: cluster.inter_node_bandwidth,
    }
    links = {}
    for (tier,), figures in rates.links:
        call, hop, share = (figure or 0.0 for figure in figures)
        links[tier] = LinkRate(call=call, hop=hop, bandwidth=share * bandwidths[tier])
    return links


def _column_figures(rows: Iterable[RateRow], column: int) -> Figures:
    """Return the figures of one column, measured with one number of ranks at once."""
    return [(row.key, taken) for row in rows if (taken := row.figures[column]) is not None]


def _complete_figures(rows: Sequence[RateRow], column: int) -> Figures:
    """Return the figures of a column, with estimates for sizes that were skipped for lack of time.

    A skipped size takes longer than with fewer ranks at once, by the factor of the largest size
    that was measured with both.
    """
    figures = dict(_column_figures(rows, column))
    for fewer in reversed(range(column)):  # the nearest number of ranks first
        of_fewer = dict(_column_figures(rows, fewer))
        for kind, sizes in _group_by_prefix(list(of_fewer.items())).items():
            if both := [size for size in sizes if (*kind, size) in figures]:
                most = max(both)
                longer = figures[(*kind, most)] / sizes[most]
                for size, taken in sizes.items():
                    figures.setdefault((*kind, size), longer * taken)
    return list(figures.items())


def _group_by_prefix(figures: Figures) -> dict[tuple[Any, ...], dict[int, float]]:
    """Return figures grouped by all parts of their keys but the last, the size."""
    grouped: dict[tuple[Any, ...], dict[int, float]] = defaultdict(dict)
    for (*first, size), taken in figures:
        grouped[tuple(first)][size] = taken
    return grouped


def _group_by_first(figures: Figures, count: int) -> dict[tuple[Any, ...], dict[Shape, float]]:
    """Return figures grouped by the first `count` parts of their keys."""
    grouped: dict[tuple[Any, ...], dict[Shape, float]] = defaultdict(dict)
    for key, taken in figures:
        grouped[key[:count]][key[count:]] = taken
    return grouped
