"""One rank of a calibration: it measures all parts beside the others; rank 0 keeps the mean."""

from __future__ import annotations

import statistics
from typing import Any

import torch
import torch.distributed as dist

from ptrain.calibration.bench import Bench, RateSheet
from ptrain.calibration.collectives import collectives, peers_of
from ptrain.calibration.copies import copies
from ptrain.calibration.hooks import hooks
from ptrain.calibration.host import host
from ptrain.calibration.machine import MeasuredPart, write_part
from ptrain.calibration.operators import attention, memory_bound, products
from ptrain.calibration.options import CalibrationOptions
from ptrain.calibration.points import BRIEF, GPUS, PROCESSORS, Points
from ptrain.calibration.updates import updates
from ptrain.calibration.write import base_of, conclude, require_writable
from ptrain.rooms.world import World
from ptrain.train import environment


def run(options: CalibrationOptions) -> int:
    """The whole life of a rank."""
    world = World.join(device=options.device)
    if options.part is None and world.is_first:  # started by a launcher, not by our command
        require_writable(options)
        base_of(options)
    local = environment.ranks_of_node() or world.size
    part = measured(world, local, options)
    world.close()
    if part is None:
        return 0
    if options.part is not None:
        write_part(options.part, part)
        return 0
    return conclude([part], options)


def measured(world: World, local: int, options: CalibrationOptions) -> MeasuredPart | None:
    """Return what all ranks measured, on rank 0. What is large comes last: it is left out for want
    of time."""
    is_cuda = world.device.type == "cuda"
    points = BRIEF if options.brief else (GPUS if is_cuda else PROCESSORS)
    is_shared = not is_cuda and local > environment.cores()
    bench, sheet = Bench(world, is_shared=is_shared, deadline=options.seconds), RateSheet()
    if world.size > 1:
        peers = list(peers_of(world.size, local, world.rank))
        collectives(bench, sheet, points, peers)
    hooks(bench, sheet, points)
    if not is_cuda:  # a GPU's host runs ahead of it
        host(bench, sheet)
    _computed(bench, sheet, points)
    sheets = _gathered(sheet, world)
    spreads = _gathered(bench.spreads, world)
    if not world.is_first:
        return None
    return MeasuredPart(
        ranks=local,
        nodes=world.size // local,
        kind=world.device.type,
        spread=statistics.median(spread for rank in spreads for spread in rank),
        tables=_mean([rank.tables for rank in sheets]),
        device_memory=_memory(world.device),
        sm=_capability(world.device),
        name=torch.cuda.get_device_name(world.device) if is_cuda else "",
    )


def _computed(bench: Bench, sheet: RateSheet, points: Points) -> None:
    updates(bench, sheet, points)
    copies(bench, sheet, points)
    memory_bound(bench, sheet, points)
    attention(bench, sheet, points)
    products(bench, sheet, points)


def _gathered(value: Any, world: World) -> list[Any]:
    if world.size == 1:
        return [value]
    values: list[Any] = [None] * world.size
    dist.all_gather_object(values, value)
    return values


def _mean(ranks: list[dict[str, dict[tuple[Any, ...], float]]]) -> dict[str, list[list[Any]]]:
    """The rows of all tables, of as many ranks as computed at once the mean."""
    return {
        table: [
            [*key, statistics.fmean(rank[table][key] for rank in ranks)] for key in ranks[0][table]
        ]
        for table in ranks[0]
    }


def _memory(device: torch.device) -> int | None:
    return int(torch.cuda.mem_get_info(device)[1]) if device.type == "cuda" else None


def _capability(device: torch.device) -> int | None:
    if device.type != "cuda":
        return None
    major, minor = torch.cuda.get_device_capability(device)
    return int(10 * major + minor)
