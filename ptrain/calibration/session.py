"""One rank of a calibration: it measures all parts beside the others; rank 0 keeps the mean."""

from __future__ import annotations

import statistics
import time
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist

from ptrain.calibration.bench import BRIEF, GPUS, PROCESSORS, Bench, RateSheet
from ptrain.calibration.host import hooks, host
from ptrain.calibration.operators import (
    attention,
    collectives,
    copies,
    lateness,
    memory_bound,
    peers_of,
    products,
    updates,
)
from ptrain.calibration.write import (
    SECONDS,
    CalibrationOptions,
    MeasuredPart,
    base_of,
    conclude,
    require_writable,
)
from ptrain.codec import encode
from ptrain.processor import cores
from ptrain.rooms.queue import keep_freed_memory
from ptrain.rooms.world import World
from ptrain.train import environment
from ptrain.train.folder import write_json

_MEASURES = {
    "host": host,
    "updates": updates,
    "copies": copies,
    "operators": memory_bound,
    "attention": attention,
    "products": products,
    "hooks": hooks,
    "lateness": lateness,
}
# Of the time, by table: what one leaves is for those that follow. What ranks do together comes
# last, for of that the fewest points take longest: in front of them it left the tables of computing
# with their smallest points alone, on a machine that was slow.
_SHARES = {
    "host": 0.04,
    "updates": 0.04,
    "copies": 0.01,
    "operators": 0.15,
    "attention": 0.08,
    "products": 0.2,
    "hooks": 0.13,
    "lateness": 0.06,
    "collectives": 0.35,
}


def run(options: CalibrationOptions) -> int:
    """The whole life of a rank."""
    world = World.join(device=options.device)
    if world.device.type == "cpu":
        keep_freed_memory()  # as a training does
    if options.part is None and world.is_first:  # started by a launcher, not by our command
        require_writable(options)
        base_of(options)
    part = measured(world, environment.ranks_of_node() or world.size, options)
    world.close()
    if part is None:
        return 0
    if options.part is not None:
        write_json(options.part, encode(part))
        return 0
    return conclude([part], options)


def measured(world: World, local: int, options: CalibrationOptions) -> MeasuredPart | None:
    """Return what all ranks measured, on rank 0. What is large comes last: it is left out for want
    of time."""
    is_cuda = world.device.type == "cuda"
    points = BRIEF if options.brief else (GPUS if is_cuda else PROCESSORS)
    turns = 1.0 if is_cuda else max(1.0, local / cores())
    deadline = options.seconds if options.until is None else options.until - time.time()
    patience = max(1.0, options.seconds / SECONDS)
    bench = Bench(world, turns=turns, deadline=max(0.0, deadline), patience=patience)
    sheet = RateSheet()
    tables = dict(_MEASURES)
    if peers := list(peers_of(world.size, local, world.rank)):
        tables["collectives"] = partial(collectives, peers=peers)
    shares = [_SHARES[name] for name in tables]
    for (name, measure), until in zip(tables.items(), accumulate(shares), strict=True):
        bench.begin(name, until / sum(shares))
        measure(bench, sheet, points)
    sheets = _gathered(sheet, world)
    spreads = _gathered(bench.spreads, world)
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
        tables=_mean([rank.tables for rank in sheets]),
        device_memory=_memory(world.device),
        sm=_capability(world.device),
        name=torch.cuda.get_device_name(world.device) if is_cuda else "",
    )


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
