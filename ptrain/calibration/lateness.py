"""How much longer a collective takes behind long computing than behind a little, on cores that do
both, whatever it is that makes it late. A GPU computes beside its links."""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from ptrain.calibration.bench import Bench, RateSheet
from ptrain.calibration.between import compute
from ptrain.calibration.points import Points
from ptrain.rooms.comm import all_gather
from ptrain.rooms.registry import Registry

_WIDTH, _HEADS, _SAMPLES, _TOKENS = 128, 4, 2, 128
_BYTES = 64 * 2**10  # of the full tensor
_MOST_IN_TURNS = 2  # of the points


def lateness(bench: Bench, sheet: RateSheet, points: Points) -> None:
    """Note it of a gather of 64 KiB by all ranks, which stands for every collective."""
    if bench.world.size == 1 or bench.device.type == "cuda":
        return
    group, registry = dist.group.WORLD, Registry()
    assert group is not None, "several ranks"
    shard = torch.zeros(_BYTES // 4 // bench.world.size, device=bench.device)
    whole = torch.zeros(shard.numel() * bench.world.size, device=bench.device)
    layer = Layer(bench.device)

    def gather() -> None:
        all_gather(whole, shard, group, registry)

    first = bench.meeting_seconds(gather)
    _note(bench, sheet, bench.busy_seconds(lambda: compute(bench.device)), 0.0)
    of_layer = bench.busy_seconds(layer)
    # Where ranks take turns it is a small part of what many passes take, and lost in their spread.
    passes = points.late[:_MOST_IN_TURNS] if bench.is_shared else points.late
    for times in bench.in_time(passes, least=1):
        late = bench.meeting_seconds(gather, between=partial(layer, times)) - first
        _note(bench, sheet, times * of_layer, late)


def _note(bench: Bench, sheet: RateSheet, computed: float, late: float) -> None:
    """Write one rank's figures down on all: a mean of what is cut off below nothing is too much."""
    microseconds = round(1e6 * bench.agreed(computed))
    sheet.note("lateness", microseconds, seconds=bench.agreed(late))


class Layer:
    """A layer's passes, as a step has them between two collectives."""

    def __init__(self, device: torch.device) -> None:
        torch.manual_seed(0)
        self.layer = nn.TransformerEncoderLayer(
            _WIDTH, _HEADS, 4 * _WIDTH, dropout=0.0, batch_first=True, device=device
        )
        self.x = torch.ones(_SAMPLES, _TOKENS, _WIDTH, device=device, requires_grad=True)

    def __call__(self, times: int = 1) -> None:
        for _ in range(times):
            self.layer(self.x).sum().backward()
