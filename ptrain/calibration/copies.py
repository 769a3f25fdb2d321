"""Copies between a rank's tiers, into and out of tensors that are there."""

from __future__ import annotations

from functools import partial

import torch

from ptrain.calibration.bench import Bench, RateSheet
from ptrain.calibration.points import Points
from ptrain.costs import Collective, State
from ptrain.rooms.registry import Registry
from ptrain.rooms.tiers import Tiers
from ptrain.spec.placement import Tier

_ROUTES = {
    Tier.HOST: (Collective.DEVICE_TO_HOST, Collective.HOST_TO_DEVICE),
    Tier.FILE: (Collective.FILE_WRITE, Collective.FILE_READ),
}


def copies(bench: Bench, sheet: RateSheet, points: Points) -> None:
    """Files are in the system's temporary folder, and as warm as the kernel keeps them."""
    tiers = Tiers(bench.device, Registry())
    for tier, (there, back) in _ROUTES.items():
        for size in bench.in_time(points.copied):
            here = torch.zeros(size // 4, device=bench.device)
            stored = tiers.move(here, tier, State.OPTIMIZER)
            for copy, target, source in ((there, stored, here), (back, here, stored)):
                taken = bench.seconds(partial(target.copy_, source, non_blocking=True))
                sheet.note("copies", copy, size, seconds=taken)
