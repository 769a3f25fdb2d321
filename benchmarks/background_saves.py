"""How long a save stops the training, at once and in the background."""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.multiprocessing as processes
from _script import Script, table

from ptrain.algebra.legality import require_runnable
from ptrain.data.corpus import open_corpus
from ptrain.interpreter.program import Program, interpret
from ptrain.optimizers.update import saved_bytes
from ptrain.runtime.queue import keep_freed_memory
from ptrain.runtime.world import World
from ptrain.spec.load import load
from ptrain.traces.facts import facts_of
from ptrain.train.exchange import Exchange
from ptrain.train.loop import local_batch
from ptrain.train.rank_start import Interrupts
from ptrain.train.saving import CheckpointSaver

RANKS, ROUNDS, WARM_UP, LIMIT = 2, 12, 2, 0.05
MODES = ("false", "true")  # of checkpoint.background
SHAPE = (
    "model.hidden=384", "model.layers=6", "model.heads=6", "model.kv_heads=6", "model.ffn=1056",
    "model.vocab=1024", "batch={global: 4, micro: 2, sequence: 64}",
)  # fmt: skip
SCRIPT = Script("background_saves", rounds=ROUNDS, ranks=RANKS, limit=f"{LIMIT:.0%}")
Row = dict[str, float]


def spec_of(mode: str) -> Any:
    words = [*SHAPE, f"mesh.dp_shard={RANKS}", f"checkpoint.background={mode}", "optimizer.lr=1e-5"]
    return require_runnable(load("zero3", words))


def run_step(program: Program, index: int) -> float:
    """Train one step and return its seconds."""
    start = time.perf_counter()
    program.forward_backward(local_batch(program, open_corpus(program.spec.data), index))
    program.step(1e-5)
    return time.perf_counter() - start


def measure_rank(rank: int, port: int, folder: str, results: Any) -> None:
    """Measure on one rank: rounds of steps, a save, and the steps while it is written."""
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in names.items()}, MASTER_ADDR="127.0.0.1")
    world = World.join(spec_of("true").timeout)
    keep_freed_memory()  # as `ptrain train` does on CPUs
    exchange = Exchange(world)
    programs = {mode: interpret(spec_of(mode), world=world) for mode in MODES}
    savers = {
        mode: CheckpointSaver(program, Path(folder) / mode, exchange, Interrupts(), lambda _: None)
        for mode, program in programs.items()
    }
    rows: list[tuple[str, Row]] = []
    for number in range(ROUNDS + WARM_UP):
        for mode in MODES if number % 2 else MODES[::-1]:
            program, saver = programs[mode], savers[mode]
            usual = statistics.median(run_step(program, index) for index in range(5))
            exchange.barrier()
            start = time.perf_counter()
            saver.save(number + 1)
            stopped = time.perf_counter() - start
            slowed, steps = 0.0, 0
            while mode == "true" and not exchange.broadcast(saver.is_idle):
                slowed += run_step(program, 5) - usual
                steps += 1
            saver.finish()
            if number >= WARM_UP:
                rows.append((mode, {"step": usual, "stop": stopped, "slowed": slowed, "n": steps}))
    if rank == 0:
        results.extend(rows)
    exchange.barrier()
    os._exit(0)  # the process groups are not needed any more


def medians(rows: list[tuple[str, Row]], mode: str) -> Row:
    chosen = [row for name, row in rows if name == mode]
    return {key: statistics.median(row[key] for row in chosen) for key in chosen[0]}


def page(rows: list[tuple[str, Row]], size: int) -> Iterator[str]:
    yield from SCRIPT.method(size=f"{size / 1e6:.0f}")
    columns = ["checkpoint.background", "step s", "save stops training for s", "steps meanwhile",
               "their delay in all s"]  # fmt: skip
    found = ((mode, medians(rows, mode)) for mode in MODES)
    yield table(
        columns,
        ([mode, f"{its['step']:.3f}", f"{its['stop']:.3f}", f"{its['n']:.0f}",
          f"{its['slowed']:.3f}"] for mode, its in found),
    )  # fmt: skip


def failures(rows: list[tuple[str, Row]]) -> Iterator[str]:
    at_once, aside = (medians(rows, mode)["stop"] for mode in MODES)
    if aside > LIMIT * at_once:
        yield f"in the background a save stops training for {aside / at_once:.1%} of the time"


def main() -> int:
    args = SCRIPT.parser().parse_args()
    head = SCRIPT.head()
    with tempfile.TemporaryDirectory() as folder, processes.Manager() as manager:
        results = manager.list()
        port = 20000 + os.getpid() % 20000
        processes.spawn(measure_rank, (port, folder, results), nprocs=RANKS)
        rows = list(results)
    spec = spec_of("true")
    size = saved_bytes(spec, facts_of(spec))
    return SCRIPT.conclude([*head, *page(rows, size)], list(failures(rows)), args)


if __name__ == "__main__":
    sys.exit(main())
