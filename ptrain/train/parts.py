"""What a training loop is given beside its program, and what it gives back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from signal import Signals

from ptrain.data.sampler import SampleSource
from ptrain.report.routing import LayerRouting
from ptrain.train.consistency import Consistency
from ptrain.train.exchange import Exchange
from ptrain.train.interrupt import Interrupts
from ptrain.train.journal import Journal


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What the loop uses beside the program. `watch(step)` surrounds a step with the meters and
    profilers that are due, `routing(step)` gives what its routers chose, where they were watched;
    `judge(step, loss, norm)` may stop the training, and so may `consistency` where it is due;
    `save(steps_done)` writes a checkpoint."""

    corpus: SampleSource
    exchange: Exchange
    interrupts: Interrupts
    journal: Journal
    watch: Callable[[int], AbstractContextManager[object]]
    routing: Callable[[int], Sequence[LayerRouting]]
    judge: Callable[[int, float, float | None], None]
    consistency: Consistency
    save: Callable[[int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """`steps` done altogether, `loss` of the last one; `interrupt` is what ended it early."""

    steps: int
    loss: float | None = None
    held_out_loss: float | None = None
    interrupt: Signals | None = None
