"""One rank of a calibration: measure all tables with the other ranks, and keep the mean.

The tables are: matrix products, attention, memory-bound operators, optimizer updates and gradient
clipping, with the shapes and calls of training; collectives on every process group that a mesh can
have; and copies between device and host.

On CPUs, where collectives share the cores with computation, computation delays them. This lateness
is measured too.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, cycle, product
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from ptrain.axes.data.run.flat import ParameterWrap
from ptrain.calibration.bench import (
    BRIEF,
    GPUS,
    PROCESSORS,
    AttentionShape,
    Bench,
    Benchmark,
    Points,
    ProductShape,
    Rows,
    Work,
    compute,
    count_factor_elements,
)
from ptrain.calibration.host import measure_hooks, measure_host_passes
from ptrain.calibration.write import (
    SECONDS,
    CalibrationOptions,
    MeasuredPart,
    base_of,
    report_rates,
    require_writable,
)
from ptrain.codec import encode
from ptrain.cost import Collective, State
from ptrain.files import write_json
from ptrain.interpreter.loss import global_norm, scale_down
from ptrain.models.numerics import TORCH_DTYPES
from ptrain.models.units import ROOT
from ptrain.optimizers.build import TorchOptimizerFactory
from ptrain.optimizers.update import TargetsUpdate
from ptrain.processor import cores
from ptrain.runtime.comm import Mesh, TagRegistry, all_gather, all_reduce, reduce_scatter
from ptrain.runtime.queue import keep_freed_memory
from ptrain.runtime.torch import Tiers, TorchRuntime
from ptrain.runtime.world import World
from ptrain.spec.cluster import CLIP, OperatorKind
from ptrain.spec.dials import ReduceScatterVia
from ptrain.spec.job import FUSED, OptimizerSpec
from ptrain.spec.placement import Tier
from ptrain.spec.precision import LAYOUTS, DType, Layout
from ptrain.steps.step import Clip, CreateMesh
from ptrain.train import environment

_WIDTH, _HEADS, _SAMPLES, _TOKENS = 128, 4, 2, 128
_BYTES = 64 * 2**10  # of the full tensor
_MAX_SHARED_POINTS = 2  # passes measured if ranks share cores


def measure_lateness(bench: Bench, points: Points) -> Rows:
    """Yield the delay of an all-gather of 64 KiB by computation; it represents every collective."""
    if bench.world.size == 1 or bench.device.type == "cuda":
        return
    group, registry = dist.group.WORLD, TagRegistry()
    assert group is not None, "several ranks"
    shard = torch.zeros(_BYTES // 4 // bench.world.size, device=bench.device)
    whole = torch.zeros(shard.numel() * bench.world.size, device=bench.device)
    layer = RepeatedLayer(bench.device)

    def gather() -> None:
        all_gather(whole, shard, group, registry)

    first = bench.meeting_seconds(gather)
    yield _lateness_row(bench, bench.busy_seconds(lambda: compute(bench.device)), 0.0)
    of_layer = bench.busy_seconds(layer)
    # If ranks share cores, the delay is a small part of the time of many passes, and lost in its
    # spread.
    passes = points.late_passes[:_MAX_SHARED_POINTS] if bench.is_shared else points.late_passes
    for times in bench.iter_in_time(passes, least=1):
        late = bench.meeting_seconds(gather, between=partial(layer, times)) - first
        yield _lateness_row(bench, times * of_layer, late)


def _lateness_row(bench: Bench, computed: float, late: float) -> tuple[tuple[int], float]:
    """Return rank 0's figures as a row: microseconds of computation, and seconds of delay.

    Negative delays are kept: a mean of values cut off at zero would be too high.
    """
    return (round(1e6 * bench.broadcast_value(computed)),), bench.broadcast_value(late)


class RepeatedLayer:
    """A layer's forward and backward passes, as a step has them between two collectives."""

    def __init__(self, device: torch.device) -> None:
        torch.manual_seed(0)
        self.layer = nn.TransformerEncoderLayer(
            _WIDTH, _HEADS, 4 * _WIDTH, dropout=0.0, batch_first=True, device=device
        )
        self.x = torch.ones(_SAMPLES, _TOKENS, _WIDTH, device=device, requires_grad=True)

    def __call__(self, times: int = 1) -> None:
        for _ in range(times):
            self.layer(self.x).sum().backward()


_ROUTES = {
    Tier.HOST: (Collective.DEVICE_TO_HOST, Collective.HOST_TO_DEVICE),
    Tier.FILE: (Collective.FILE_WRITE, Collective.FILE_READ),
}


def measure_copies(bench: Bench, point: tuple[int, Tier]) -> Rows:
    """Yield the seconds of copies to a tier and back.

    Files are in the system's temporary folder and in the page cache as far as the kernel keeps
    them.
    """
    size, tier = point
    here = torch.zeros(size // 4, device=bench.device)
    stored = Tiers(bench.device, TagRegistry()).copy_to_tier(here, tier, State.OPTIMIZER)
    there, back = _ROUTES[tier]
    for copy, target, source in ((there, stored, here), (back, here, stored)):
        yield (copy, size), bench.seconds(partial(target.copy_, source, non_blocking=True))


@dataclass(frozen=True, slots=True)
class PeerGroup:
    """A group of this rank; the groups of one size partition all ranks.

    Attributes:
        group: The group that contains this rank.
        ranks: Ranks of each group.
        nodes: Nodes that each group spans.
    """

    group: dist.ProcessGroup
    ranks: int
    nodes: int


def peers_of(world_size: int, ranks_per_node: int, rank: int) -> Iterator[PeerGroup]:
    """Yield this rank's groups.

    Within a node, there is one group of each size that divides the ranks of a node. Over several
    nodes, there is a group with one rank of each node, and a group of all ranks.

    Args:
        world_size: Number of ranks.
        ranks_per_node: Ranks of each node.
        rank: This rank.
    """
    nodes = world_size // ranks_per_node
    divisors = (size for size in range(2, ranks_per_node + 1) if ranks_per_node % size == 0)
    for size in divisors:
        lines = [list(range(first, first + size)) for first in range(0, world_size, size)]
        yield PeerGroup(_create_groups(lines, rank), size, 1)
    if nodes > 1:
        lines = [list(range(first, world_size, ranks_per_node)) for first in range(ranks_per_node)]
        yield PeerGroup(_create_groups(lines, rank), nodes, nodes)
        if ranks_per_node > 1:
            yield PeerGroup(_create_groups([list(range(world_size))], rank), world_size, nodes)


def _create_groups(lines: list[list[int]], rank: int) -> dist.ProcessGroup:
    """Create a group per line on every rank, and return the group of this rank."""
    groups = [dist.new_group(line) for line in lines]
    return next(group for group, line in zip(groups, lines, strict=True) if rank in line)


def measure_collectives(peers: list[PeerGroup], bench: Bench, size: int) -> Rows:
    """Yield the seconds of every group's collectives, and of messages between two neighbours."""
    for known in peers:
        whole = max(1, size // 4 // known.ranks) * known.ranks
        for collective, work in _collective_works(known, whole, bench.device):
            key = (collective, known.ranks, known.nodes, 4 * whole)
            yield key, bench.meeting_seconds(work)
        if known is _smallest_group(peers, known.nodes):
            # on a GPU a ring call is a send and a receive in one queue, so half of it is a message
            one_by_one = bench.device.type == "cuda"
            taken = bench.added_seconds(
                partial(_open_messages, known, whole, bench.device), parts=2 if one_by_one else 1
            )
            yield (Collective.SEND, 2, known.nodes, 4 * whole), taken


def _ends_first(sizes: Sequence[int]) -> Iterator[int]:
    """Yield the smallest size, then the others from the largest down.

    If time is short, sizes in between are left out. Without the largest, the seconds per byte of
    large tensors would be extrapolated from small ones.
    """
    yield sizes[0]
    yield from reversed(sizes[1:])


def _smallest_group(peers: list[PeerGroup], nodes: int) -> PeerGroup:
    """Return the smallest group on this many nodes: a pair if the number of ranks is even."""
    return min((known for known in peers if known.nodes == nodes), key=lambda known: known.ranks)


def _collective_works(
    peers: PeerGroup, numel: int, device: torch.device
) -> Iterator[tuple[Collective, Callable[[], object]]]:
    """Yield the collectives on a full tensor of `numel` elements."""
    group, registry = peers.group, TagRegistry()
    whole, other = torch.zeros(numel, device=device), torch.zeros(numel, device=device)
    shard = torch.zeros(numel // peers.ranks, device=device)
    yield Collective.ALL_REDUCE, lambda: all_reduce(whole, group)
    yield Collective.ALL_GATHER, lambda: all_gather(whole, shard, group, registry)
    yield (
        Collective.REDUCE_SCATTER,
        lambda: reduce_scatter(shard, whole, group, ReduceScatterVia.NATIVE, registry).wait(),
    )
    yield Collective.ALL_TO_ALL, lambda: dist.all_to_all_single(other, whole, group=group)
    yield Collective.BROADCAST, lambda: dist.broadcast(whole, group=group, group_src=0)


@contextmanager
def _open_messages(peers: PeerGroup, numel: int, device: torch.device) -> Iterator[Work]:
    """Open the messages of pipeline stages, which compute while messages are under way.

    Each call sends a message to the next rank, and waits for the message that the previous call
    sent and the one that it received.
    """
    group, place = peers.group, dist.get_rank(peers.group)
    pending: deque[tuple[dist.Work | None, torch.Tensor]] = deque()

    def send() -> None:
        sent = torch.zeros(numel, device=device)
        pending.append((dist.isend(sent, group=group, group_dst=(place + 1) % peers.ranks), sent))

    def receive() -> None:
        received = torch.empty(numel, device=device)
        source = (place - 1) % peers.ranks
        pending.append((dist.irecv(received, group=group, group_src=source), received))

    # on NCCL a ring in which all ranks send first would deadlock
    acts = (send, receive) if place % 2 == 0 else (receive, send)

    def wait(left: int) -> None:
        while len(pending) > left:
            work, _ = pending.popleft()
            assert work is not None, "the rank is in the group"
            work.wait()

    def work() -> None:
        for act in acts:
            act()
        wait(len(acts))

    yield work
    wait(0)


_VALUE = 0.01  # of parameters and gradients; the time does not depend on it


def measure_updates(bench: Bench, point: tuple[tuple[int, int], Layout]) -> Rows:
    """Yield the seconds of the update of every rule, and of clipping."""
    (elements, tensors), layout = point
    for name, work in _updates_work(layout, elements, tensors, bench.device):
        yield (name, layout.update_dtype, elements, tensors), bench.busy_seconds(work)


def _single_dtype_layouts(points: Points) -> Iterator[Layout]:
    """Yield the layouts with one dtype for all states.

    The casts of other layouts count as copies.
    """
    for layout in LAYOUTS.values():
        is_one = layout.parameters is layout.gradients is layout.moments and not layout.master
        if is_one and layout.parameters in points.side_lengths:
            yield layout


def _updates_work(
    layout: Layout, elements: int, tensors: int, device: torch.device
) -> Iterator[tuple[str, Work]]:
    """Yield the updates and the clipping of `elements` elements in `tensors` tensors."""
    dtype, own = TORCH_DTYPES[layout.update_dtype], elements // tensors
    mesh = Mesh(CreateMesh(axes=(), degrees=()), World(device=device))
    for rule in FUSED:
        model = nn.ParameterList(
            torch.full((own,), _VALUE, dtype=dtype, device=device) for _ in range(tensors)
        )
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, _VALUE)
        update = TargetsUpdate(
            ParameterWrap(model, ((ROOT,),)).targets(),
            OptimizerSpec(name=rule),
            layout,
            TorchRuntime(mesh, mesh.registry),
            TorchOptimizerFactory(),
        )
        yield rule, lambda update=update: update.step(1e-9)  # type: ignore[misc]
    step = Clip(max_norm=1.0, axes=())
    gradients = [torch.full((own,), _VALUE, dtype=dtype, device=device) for _ in range(tensors)]

    def clip() -> None:
        with torch.no_grad():
            scale_down(gradients, global_norm(gradients, step, mesh), step)

    yield CLIP, clip


Factors = tuple[torch.Tensor, torch.Tensor]

# Operators read from this many places, or from as many as hold this many elements, so that inputs
# are not in the caches.
_PLACES, _COLD_ELEMENTS = 16, 4 * 2**20
_COLD_BYTES = 4 * _COLD_ELEMENTS
_ROW = 256  # elements of a row for norms and embeddings


def _product_points(
    bench: Bench, points: Points
) -> Iterator[tuple[DType, ProductShape, torch.Tensor]]:
    """Yield dtype and shape of each product, and a tensor that its factors are taken from."""
    shapes = points.list_products()
    most = max(_COLD_ELEMENTS, *(count_factor_elements(shape) for _, shape in shapes))
    numbers = {
        dtype: torch.randn(most, dtype=TORCH_DTYPES[dtype], device=bench.device)
        for dtype in points.side_lengths
    }
    yield from ((dtype, shape, numbers[dtype]) for dtype, shape in shapes)


def measure_products(bench: Bench, point: tuple[DType, ProductShape, torch.Tensor]) -> Rows:
    """Yield the seconds of a product, the mean of its three layouts in a step.

    These are the forward product and the gradients of input and weight. Each call takes its factors
    from another place of the tensor.
    """
    dtype, shape, numbers = point
    size = count_factor_elements(shape)
    places = range(0, numbers.numel() - size + 1, size)[:_PLACES]
    layouts = [_factor_layouts(shape, numbers[place : place + size]) for place in places]
    works = [tuple(partial(torch.matmul, *pair) for pair in pairs) for pairs in layouts]
    work = _rotate_places(works, _COLD_ELEMENTS // size)
    yield (dtype, *shape), bench.busy_seconds(work, parts=3)


def _factor_layouts(shape: ProductShape, numbers: torch.Tensor) -> tuple[Factors, ...]:
    """Return the factors of a step's three products, as views of one 1-d tensor."""
    matrices, rows, inner, columns = shape
    batch = (matrices,) if matrices > 1 else ()
    end = matrices * rows * inner
    first, second = numbers[:end], numbers[end:]
    left, right = first.view(*batch, rows, inner), second.view(*batch, inner, columns)
    turned_left = first.view(*batch, inner, rows).mT
    turned_right = second.view(*batch, columns, inner).mT
    # forward with a transposed weight (as nn.Linear), gradient of the input, gradient of the weight
    return (left, turned_right), (left, right), (turned_left, right)


def measure_attention(bench: Bench, point: tuple[AttentionShape, DType]) -> Rows:
    """Yield the seconds of forward and of backward of causal attention."""
    shape, dtype = point
    samples, heads, tokens, features = shape
    query, key, value = parts = [
        torch.randn(shape, dtype=TORCH_DTYPES[dtype], device=bench.device, requires_grad=True)
        for _ in range(3)
    ]

    def forward() -> torch.Tensor:
        attended: torch.Tensor = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return attended

    output = forward()
    gradient = torch.randn_like(output)

    def backward() -> object:
        return torch.autograd.grad(output, parts, gradient, retain_graph=True)

    for kind, work in (
        (OperatorKind.ATTENTION, forward),
        (OperatorKind.ATTENTION_BACKWARD, backward),
    ):
        row = (kind, dtype, samples, heads, tokens, tokens, features)
        yield row, bench.busy_seconds(_rotate_places([(work,)], _COLD_ELEMENTS // query.numel()))


def measure_memory_bound(bench: Bench, point: tuple[int, DType]) -> Rows:
    """Yield the seconds of each kind of operator by the bytes that it reads and writes."""
    size, dtype = point
    num_places = min(_PLACES, max(1, _COLD_BYTES // size))
    places = [
        _memory_bound_works(size, TORCH_DTYPES[dtype], bench.device) for _ in range(num_places)
    ]
    for alike in zip(*places, strict=True):
        kind, times, works = alike[0]
        work = _rotate_places([works for *_, works in alike], num_places)
        yield (kind, dtype, times * size), bench.busy_seconds(work, parts=len(works))


def _rotate_places(places: Sequence[tuple[Work, ...]], num_kept: int) -> Work:
    """Return work that runs the operators of one place after the other, and keeps some results.

    In a step, neither input nor output is in the nearest cache. Both would be if one call were
    repeated.
    """
    turns = cycle(places)
    maxlen = min(_PLACES, max(1, num_kept))
    kept: deque[object] = deque(maxlen=maxlen)

    def work() -> None:
        kept.append([operator() for operator in next(turns)])

    # The first write to memory costs a page fault per 4 KiB, up to ten times as long as the
    # operator. From its second step on, training writes to memory that it used before.
    for _ in range(maxlen + 1):
        work()
    return work


Moved = tuple[OperatorKind, int, tuple[Work, ...]]


def _memory_bound_works(size: int, dtype: torch.dtype, device: torch.device) -> list[Moved]:
    """Return the memory-bound operators on tensors of `size` bytes.

    Each row has the kind, the bytes moved in multiples of `size`, and the calls.

    Their time includes autograd's records of a forward pass.
    """
    width = min(_ROW, size // dtype.itemsize)
    x = torch.randn(size // dtype.itemsize // width, width, dtype=dtype, device=device)
    other, scale = torch.randn_like(x), torch.ones(width, dtype=dtype, device=device)
    x.requires_grad_()
    numbers = torch.randint(len(x), (len(x),), device=device)
    turned = x.detach().view(2, -1, width // 2).transpose(0, 1)

    return [
        (OperatorKind.POINTWISE, 3, (lambda: x + other, lambda: x * other)),
        (OperatorKind.ACTIVATION, 2, (lambda: F.gelu(x), lambda: F.silu(x))),
        (OperatorKind.NORM, 2, (lambda: F.layer_norm(x, (width,), scale, scale),)),
        (OperatorKind.SOFTMAX, 2, (lambda: F.softmax(x, -1), lambda: F.log_softmax(x, -1))),
        (OperatorKind.COPY, 2, (x.clone, turned.contiguous)),
        (OperatorKind.INDEX, 2, (lambda: F.embedding(numbers, x),)),
        (OperatorKind.DRAW, 1, (lambda: torch.empty_like(other).bernoulli_(0.9),)),
    ]


# Time that a table leaves of its share is used by the tables after it. Collectives come last
# because their fewest points take longest: when they came first, tables of computation got only
# their smallest points on a slow machine.
_BENCHES = {
    "host": Benchmark(table="hooks", share=0.04, rows=measure_host_passes),
    "updates": Benchmark(
        table="updates",
        share=0.04,
        points=lambda _, points: product(points.updates, [*_single_dtype_layouts(points)]),
        least=8,  # with two layouts, four of each; some have several tensors
        rows=measure_updates,
    ),
    "copies": Benchmark(
        table="copies",
        share=0.01,
        points=lambda _, points: product(points.copy_sizes, _ROUTES),
        least=4,
        rows=measure_copies,
    ),
    "operators": Benchmark(
        table="operators",
        share=0.15,
        points=lambda _, points: points.operator_sizes(),
        least=6,  # three sizes of each dtype: bytes, not dispatch, decide the time of the third
        rows=measure_memory_bound,
    ),
    "attention": Benchmark(
        table="attention",
        share=0.08,
        points=lambda _, points: product(points.attention, points.side_lengths),
        least=4,
        rows=measure_attention,
    ),
    "products": Benchmark(
        table="products",
        share=0.2,
        points=_product_points,
        least=8,  # all dtypes together: a roofline needs two of each at least
        rows=measure_products,
    ),
    "hooks": Benchmark(table="hooks", share=0.13, rows=measure_hooks),
    "lateness": Benchmark(table="lateness", share=0.06, rows=measure_lateness),
}


def run_rank(options: CalibrationOptions) -> int:
    """Measure as one rank, and write or print the result; return the exit code."""
    world = World.join(device=options.device)
    if world.device.type == "cpu":
        keep_freed_memory()  # as training does
    # started by another launcher, so nothing was checked yet
    if options.part is None and world.is_first:
        require_writable(options)
        base_of(options)
    part = measure_tables(world, environment.num_ranks_of_node() or world.size, options)
    world.close()
    if part is None:
        return 0
    if options.part is not None:
        write_json(options.part, encode(part))
        return 0
    return report_rates([part], options)


def measure_tables(world: World, local: int, options: CalibrationOptions) -> MeasuredPart | None:
    """Measure all tables with the other ranks of this world, `local` of them on this node.

    The largest points come last, since they are left out if time is short.

    Returns:
        The mean over all ranks on rank 0, None on all others.
    """
    is_cuda = world.device.type == "cuda"
    points = BRIEF if options.brief else (GPUS if is_cuda else PROCESSORS)
    turns = 1.0 if is_cuda else max(1.0, local / cores())
    deadline = options.seconds if options.until is None else options.until - time.time()
    patience = max(1.0, options.seconds / SECONDS)
    bench = Bench(world, turns=turns, deadline=max(0.0, deadline), patience=patience)
    benches = dict(_BENCHES)
    if peers := list(peers_of(world.size, local, world.rank)):
        benches["collectives"] = Benchmark(
            table="collectives",
            share=0.35,
            points=lambda _, points: _ends_first(points.collective_sizes),
            least=3,
            rows=partial(measure_collectives, peers),
        )
    tables: dict[str, dict[tuple[Any, ...], float]] = {}
    shares = [known.share for known in benches.values()]
    for (name, known), until in zip(benches.items(), accumulate(shares), strict=True):
        bench.begin_table(name, until / sum(shares))
        for key, taken in known.measure_rows(bench, points):
            plain = tuple(str(cell) if isinstance(cell, str) else cell for cell in key)
            # differences can be zero or negative, but rates must be positive
            tables.setdefault(known.table, {})[plain] = max(taken, 1e-9)
    everyone = _gather_objects(tables, world)
    spreads = _gather_objects(bench.spreads, world)
    if not world.is_first:
        return None
    return MeasuredPart(
        ranks=local,
        nodes=world.size // local,
        kind=world.device.type,
        spread=statistics.median(s for rank in spreads for table in rank.values() for s in table),
        spreads={
            table: statistics.median(spread for rank in spreads for spread in rank[table])
            for table in spreads[0]
        },
        left_out=bench.left_out,
        tables={  # the mean over ranks
            table: [[*key, statistics.fmean(rank[table][key] for rank in everyone)] for key in rows]
            for table, rows in everyone[0].items()
        },
        device_memory=int(torch.cuda.mem_get_info(world.device)[1]) if is_cuda else None,
        sm=_compute_capability(world.device),
        name=torch.cuda.get_device_name(world.device) if is_cuda else "",
    )


def _gather_objects(value: Any, world: World) -> list[Any]:
    """Return the values of all ranks."""
    if world.size == 1:
        return [value]
    values: list[Any] = [None] * world.size
    dist.all_gather_object(values, value)
    return values


def _compute_capability(device: torch.device) -> int | None:
    """Return the compute capability of a GPU, such as 90."""
    if device.type != "cuda":
        return None
    major, minor = torch.cuda.get_device_capability(device)
    return int(10 * major + minor)
