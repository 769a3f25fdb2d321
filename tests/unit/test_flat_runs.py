"""Where in a flat shard the tensors of cut operators lie, against a buffer of flags."""

from __future__ import annotations

from itertools import groupby
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from ptrain.axes.data.run import flat_parameters
from ptrain.axes.data.run.flat_parameters import Parameters
from ptrain.axes.data.run.layout import FlatLayout
from ptrain.rooms.mesh import Mesh
from ptrain.rooms.registry import Registry
from ptrain.spec.axis import Axis
from ptrain.spec.batch import ReduceScatterVia

REPLICATE, SHARD = Axis.DP_REPLICATE, Axis.DP_SHARD
SIZES = ((7, True), (1, False), (3, False), (12, True), (5, False), (0, True), (2, True))


def layout_at(place: dict[Axis, int]) -> FlatLayout:
    degrees = {REPLICATE: 2, SHARD: 3}

    def size(axes: tuple[Axis, ...]) -> int:
        return int(torch.tensor([degrees[axis] for axis in axes]).prod()) if axes else 1

    mesh = SimpleNamespace(degrees=degrees, coordinate=place.__getitem__, size=size)
    numel = sum(size for size, _ in SIZES)
    axes = (REPLICATE, SHARD)
    return FlatLayout.over(cast(Mesh, mesh), numel, axes, Registry(), ReduceScatterVia.NATIVE)


@pytest.mark.parametrize("cut", [(), (SHARD,), (REPLICATE,), (REPLICATE, SHARD)])
@pytest.mark.parametrize("index", range(6))
def test_runs_are_those_of_a_buffer_of_flags(
    index: int, cut: tuple[Axis, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = layout_at({REPLICATE: index // 3, SHARD: index % 3})
    tensors = [SimpleNamespace(numel=lambda size=size: size, cut=is_cut) for size, is_cut in SIZES]
    monkeypatch.setattr(flat_parameters, "is_cut", lambda tensor: tensor.cut)
    held: Any = SimpleNamespace(layout=layout, named=[("", each) for each in tensors], _cut_runs={})
    flags = torch.tensor([is_cut for size, is_cut in SIZES for _ in range(size)])
    padded = torch.cat([flags, flags[-1:].expand(layout.padded - layout.numel)])
    expected, start = [], 0
    for flag, run in groupby(layout.take(padded, (), cut).tolist()):
        end = start + len(list(run))
        expected.append((start, end, flag))
        start = end
    assert Parameters.cut_runs(held, cut) == expected
