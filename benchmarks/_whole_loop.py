"""Whole trainings beside loops of others: on the ranks of a pool `ptrain train` runs its own loop,
journal and checks included, and before each of its steps the others make one of theirs.

What ptrain takes goes from the end of the others' steps to the next time that its loop begins one.
Imported by its name in the ranks; torch only there.
"""

from __future__ import annotations

import contextlib
import io
import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

WARM_UP = 5  # rounds that are left out: the third step of a run is the one that meters look at


@dataclass(frozen=True, slots=True)
class Turns:
    """The turns of one contender on one rank: CPU seconds of each step over all threads, wall-clock
    seconds, and this rank's loss share; warm-up is excluded except for the losses."""

    processor: list[float] = field(default_factory=list)
    wall: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)


class Interlude:
    """A guard of a training that runs the other contenders' steps before each of its steps."""

    def __init__(self, others: Mapping[str, Callable[[], float]]) -> None:
        self.others = others
        self.turns = {name: Turns() for name in others}
        self.own = Turns()
        self.round = 0
        self._began: tuple[float, float] | None = None

    def __call__(self, *_: object) -> Interlude:
        """Return itself as the guard of any training."""
        return self

    def step_context(
        self, step: int, watch: AbstractContextManager[object]
    ) -> AbstractContextManager[object]:
        return self._around(watch)

    def check_step(self, *_: object) -> None:
        """Accept every step."""

    @contextmanager
    def _around(self, watch: AbstractContextManager[object]) -> Iterator[None]:
        if self._began is not None:
            self._note(self.own, self._began)
        names = list(self.others)
        shift = self.round % len(names) if names else 0
        for name in (*names[shift:], *names[:shift]):
            began = self._together()
            self.turns[name].losses.append(self.others[name]())
            self._note(self.turns[name], began)
        self.round += 1
        self._began = self._together()
        with watch:
            yield

    def _together(self) -> tuple[float, float]:
        import torch.distributed as dist

        dist.barrier()
        return time.process_time(), time.perf_counter()

    def _note(self, turns: Turns, began: tuple[float, float]) -> None:
        processor, wall = time.process_time() - began[0], time.perf_counter() - began[1]
        if self.round > WARM_UP:
            turns.processor.append(processor)
            turns.wall.append(wall)


def beside(
    strategy: str,
    words: tuple[str, ...],
    rounds: int,
    folder: str,
    others: Mapping[str, Callable[[], float]],
) -> tuple[Turns, dict[str, Turns]]:
    """Return the times of a spec's full training and of the other contenders on one rank in this
    many rounds."""
    from ptrain.train.options import Options
    from ptrain.train.session import train_rank

    interlude = Interlude(others)
    steps = WARM_UP + rounds + 1  # the last one's end is nobody's beginning
    options = Options(
        spec=strategy,
        overrides=(*words, f"train.steps={steps}", f"verify_every={10**9}"),
        run_dir=Path(folder),
        quiet=True,
        force=True,
    )
    with contextlib.redirect_stdout(io.StringIO()):
        train_rank(options, interlude)
    lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    rows: list[dict[str, Any]] = [json.loads(line) for line in lines]
    ranks = _num_ranks()
    interlude.own.losses.extend(row["loss"] / ranks for row in rows if "loss" in row)
    return interlude.own, interlude.turns


def _num_ranks() -> int:
    import torch.distributed as dist

    return int(dist.get_world_size())
