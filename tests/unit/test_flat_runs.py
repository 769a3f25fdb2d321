"""The positions of sharded operators' tensors in a flat shard, compared with a buffer of flags."""

from __future__ import annotations

from itertools import groupby
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ptrain.axes.data.cuts import ShardLayout
from ptrain.axes.data.theta import Parameters
from ptrain.runtime.comm import TagRegistry
from ptrain.runtime.torch import TorchRuntime
from ptrain.spec.dials import ReduceScatterVia
from ptrain.spec.placement import Axis

REPLICATE, SHARD = Axis.DP_REPLICATE, Axis.DP_SHARD
SIZES = ((7, True), (1, False), (3, False), (12, True), (5, False), (0, True), (2, True))


def cuts_at(place: dict[Axis, int]) -> ShardLayout[torch.Tensor]:
    mesh: Any = SimpleNamespace(
        degrees={REPLICATE: 2, SHARD: 3},
        coordinate=place.__getitem__,
        world=SimpleNamespace(device=torch.device("cpu")),
    )
    numel = sum(size for size, _ in SIZES)
    room = TorchRuntime(mesh, TagRegistry())
    return ShardLayout(room, numel, (REPLICATE, SHARD), ReduceScatterVia.NATIVE)


@pytest.mark.parametrize("cut", [(), (SHARD,), (REPLICATE,), (REPLICATE, SHARD)])
@pytest.mark.parametrize("index", range(6))
def test_runs_are_those_of_a_buffer_of_flags(index: int, cut: tuple[Axis, ...]) -> None:
    cuts = cuts_at({REPLICATE: index // 3, SHARD: index % 3})
    members = SimpleNamespace(
        shapes=[(size,) for size, _ in SIZES], are_cut=[is_cut for _, is_cut in SIZES]
    )
    held: Any = SimpleNamespace(cuts=cuts, members=members)
    flags = torch.tensor([is_cut for size, is_cut in SIZES for _ in range(size)])
    padded = torch.cat([flags, flags[-1:].expand(cuts.padded - cuts.numel)])
    expected, start = [], 0
    for flag, run in groupby(cuts.take_part(padded, (), cut).tolist()):
        end = start + len(list(run))
        expected.append((start, end, flag))
        start = end
    assert [*Parameters.cut_runs(held, cut)] == expected
