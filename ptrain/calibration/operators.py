"""Measure matrix products, attention, memory-bound operators, the optimizer update and gradient
clipping, with the shapes and calls of a training.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import cycle, product

import torch
import torch.nn.functional as F
from torch import nn

from ptrain.axes.data.run.flat import ParameterWrap
from ptrain.calibration.bench import (
    AttentionShape,
    Bench,
    Points,
    ProductShape,
    RateSheet,
    Work,
    factors_of,
)
from ptrain.interpreter.clip import global_norm, scale_down
from ptrain.models.numerics import TORCH_DTYPES
from ptrain.models.units import ROOT
from ptrain.optimizers.torch import TorchRules
from ptrain.optimizers.update import TargetsUpdate
from ptrain.rooms.mesh import Mesh
from ptrain.rooms.torch import TorchRoom
from ptrain.rooms.world import World
from ptrain.spec.job import OptimizerSpec
from ptrain.spec.optimizers import FUSED
from ptrain.spec.precision import LAYOUTS, DType, Layout
from ptrain.spec.rates import CLIP, OperatorKind
from ptrain.steps.step import Clip, CreateMesh

_FEWEST = 4  # points, of which some have several tensors
_VALUE = 0.01  # of parameters and gradients: nothing depends on it


def updates(bench: Bench, sheet: RateSheet, points: Points) -> None:
    """Of layouts that keep every state in one dtype: what others cast beside it are copies."""
    for layout in _plain(points):
        for elements, tensors in bench.in_time(points.updates, least=_FEWEST):
            for name, work in _updates_work(layout, elements, tensors, bench.device):
                key = (name, layout.updated, elements, tensors)
                sheet.note("updates", *key, seconds=bench.busy_seconds(work))


def _plain(points: Points) -> Iterator[Layout]:
    for layout in LAYOUTS.values():
        is_one = layout.parameters is layout.gradients is layout.moments and not layout.master
        if is_one and layout.parameters in points.sides:
            yield layout


def _updates_work(
    layout: Layout, elements: int, tensors: int, device: torch.device
) -> Iterator[tuple[str, Work]]:
    dtype, own = TORCH_DTYPES[layout.updated], elements // tensors
    mesh = Mesh(CreateMesh(axes=(), degrees=()), World(device=device))
    for rule in FUSED:
        model = nn.ParameterList(
            torch.full((own,), _VALUE, dtype=dtype, device=device) for _ in range(tensors)
        )
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, _VALUE)
        wrapped = ParameterWrap(model, ((ROOT,),))
        update = TargetsUpdate(
            wrapped.targets(),
            OptimizerSpec(name=rule),
            layout,
            TorchRoom(mesh, mesh.registry),
            TorchRules(),
        )
        yield rule, lambda update=update: update.step(1e-9)  # type: ignore[misc]
    step = Clip(max_norm=1.0, axes=())
    gradients = [torch.full((own,), _VALUE, dtype=dtype, device=device) for _ in range(tensors)]

    def clip() -> None:
        with torch.no_grad():
            scale_down(gradients, global_norm(gradients, step, mesh), step)

    yield CLIP, clip


Factors = tuple[torch.Tensor, torch.Tensor]

# What operators read comes from so many places, or as many as there are in so many numbers.
_PLACES, _COLD_ELEMENTS = 16, 4 * 2**20
_COLD_BYTES = 4 * _COLD_ELEMENTS
_FEWEST_PRODUCTS = 8  # of all dtypes: a roofline has two of each at least
# Of all dtypes: in the third size the bytes decide, and no longer the dispatch.
_FEWEST_SIZES = 6
_ROW = 256  # elements of a row that is normed, or looked up by its number


def products(bench: Bench, sheet: RateSheet, points: Points) -> None:
    """Each shape by all three layouts of a step: forward, and the gradients of input and weight."""
    shapes = points.products()
    most = max(_COLD_ELEMENTS, *(factors_of(shape) for _, shape in shapes))
    numbers = {
        dtype: torch.randn(most, dtype=TORCH_DTYPES[dtype], device=bench.device)
        for dtype in points.sides
    }
    for dtype, shape in bench.in_time(shapes, least=_FEWEST_PRODUCTS):
        taken = bench.busy_seconds(_product(shape, numbers[dtype]), parts=3)
        sheet.note("products", dtype, *shape, seconds=taken)


def _product(shape: ProductShape, numbers: torch.Tensor) -> Work:
    """Each call takes its factors from another place of `numbers`."""
    size = factors_of(shape)
    places = range(0, numbers.numel() - size + 1, size)[:_PLACES]
    layouts = [_layouts(shape, numbers[place : place + size]) for place in places]
    works = [tuple(partial(torch.matmul, *pair) for pair in pairs) for pairs in layouts]
    return _in_turns(works, _COLD_ELEMENTS // size)


def _layouts(shape: ProductShape, numbers: torch.Tensor) -> tuple[Factors, ...]:
    """The factors, which stand one behind the other, as the three products of a step have them."""
    matrices, rows, inner, columns = shape
    batch = (matrices,) if matrices > 1 else ()
    end = matrices * rows * inner
    first, second = numbers[:end], numbers[end:]
    left, right = first.view(*batch, rows, inner), second.view(*batch, inner, columns)
    turned_left = first.view(*batch, inner, rows).mT
    turned_right = second.view(*batch, columns, inner).mT
    return (left, turned_right), (left, right), (turned_left, right)


def attention(bench: Bench, sheet: RateSheet, points: Points) -> None:
    for shape, dtype in bench.in_time(list(product(points.attention, points.sides)), least=4):
        _attention(bench, sheet, shape, dtype)


def _attention(bench: Bench, sheet: RateSheet, shape: AttentionShape, dtype: DType) -> None:
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
        measured = (kind, dtype, samples, heads, tokens, tokens, features)
        seconds = bench.busy_seconds(_in_turns([(work,)], _COLD_ELEMENTS // query.numel()))
        sheet.note("attention", *measured, seconds=seconds)


def memory_bound(bench: Bench, sheet: RateSheet, points: Points) -> None:
    """Each kind by the bytes that it reads and writes."""
    for size, dtype in bench.in_time(points.operator_sizes(), least=_FEWEST_SIZES):
        num_places = min(_PLACES, max(1, _COLD_BYTES // size))
        places = [_works(size, TORCH_DTYPES[dtype], bench.device) for _ in range(num_places)]
        for alike in zip(*places, strict=True):
            kind, times, works = alike[0]
            work = _in_turns([works for *_, works in alike], num_places)
            taken = bench.busy_seconds(work, parts=len(works))
            sheet.note("operators", kind, dtype, times * size, seconds=taken)


def _in_turns(places: Sequence[tuple[Work, ...]], num_kept: int) -> Work:
    """The operators of one place after the other, of which some turns' results stay: in a step
    neither what is read nor where it is written is in the nearest cache, and both would be if the
    same call came again."""
    turns = cycle(places)
    maxlen = min(_PLACES, max(1, num_kept))
    kept: deque[object] = deque(maxlen=maxlen)

    def work() -> None:
        kept.append([operator() for operator in next(turns)])

    # A process's first touch of memory costs a page fault for every 4 KiB, up to ten times as long
    # as the operator; from its second step on a training writes where others stood before.
    for _ in range(maxlen + 1):
        work()
    return work


Moved = tuple[OperatorKind, int, tuple[Work, ...]]


def _works(size: int, dtype: torch.dtype, device: torch.device) -> list[Moved]:
    """Operators on tensors of `size` bytes, by kind: each of one kind reads and writes so many
    times as many. What autograd notes of them in a forward pass is in their time."""
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
