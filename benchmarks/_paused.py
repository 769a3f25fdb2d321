"""Two trainings of a spec that take turns: both are alive, but only one runs at a time; signals
stop the processes of the other until a number of steps is done."""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _machine import environment

WARM_UP = 3  # steps before the first turn
STEPS = 4  # of a turn; in the first of them the training was stopped, and it does not count
PATIENCE = 300.0  # seconds until a training has done its next steps


@dataclass(frozen=True, slots=True)
class Turn:
    """The seconds per step in a turn: wall clock and CPU."""

    wall: float
    cpu: float


class Training:
    """A `ptrain train SPEC` of one tree with all its processes."""

    def __init__(self, root: Path, spec: str, folder: Path) -> None:
        self.root, self.metrics = root, folder / "runs" / "latest" / "metrics.jsonl"
        self.process = subprocess.Popen(
            [sys.executable, "-m", "ptrain", "train", spec, "train.steps=100000"],
            cwd=folder,
            env=environment(root),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def steps(self) -> list[dict[str, Any]]:
        """Return the number of finished steps in metrics.jsonl."""
        if not self.metrics.is_file():
            return []
        text = self.metrics.read_text(encoding="utf-8")
        lines = text[: text.rfind("\n") + 1].splitlines()  # the last may still be written
        return [row for row in map(json.loads, lines) if "seconds" in row]

    def run_to(self, count: int) -> None:
        """Wait until this many steps are done. Raises RuntimeError if the training ends or takes
        too long."""
        ends = time.monotonic() + PATIENCE
        while len(self.steps()) < count:
            if self.process.poll() is not None or time.monotonic() > ends:
                raise RuntimeError(f"{self.root}: {len(self.steps())} of {count} steps")
            time.sleep(0.02)

    def take_turn(self) -> Turn:
        """Run the steps of a turn and return their times; the training is stopped before and
        after."""
        before, spent = len(self.steps()), self.cpu_seconds()
        self.send(signal.SIGCONT)
        self.run_to(before + STEPS)
        self.send(signal.SIGSTOP)
        rows = self.steps()[before:]
        wall = statistics.median(row["seconds"] for row in rows[1:STEPS])
        return Turn(wall, (self.cpu_seconds() - spent) / len(rows))

    def cpu_seconds(self) -> float:
        """Return the CPU time, user and system, of all its processes and their threads."""
        ticks = 0
        for pid in family(self.process.pid):
            ticks += sum(int(field) for field in _fields(pid)[11:13])
        return ticks / os.sysconf("SC_CLK_TCK")

    def send(self, number: signal.Signals) -> None:
        """Send a signal to every process of the training, starting with the command."""
        for pid in family(self.process.pid):
            try:
                os.kill(pid, number)
            except ProcessLookupError:  # it ended meanwhile
                continue


def family(pid: int) -> list[int]:
    """Return a process and all its descendants."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        if fields := _fields(int(folder.name)):
            children.setdefault(int(fields[1]), []).append(int(folder.name))
    members = [pid]
    for member in members:
        members += children.get(member, [])
    return members


def _fields(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat after the name, from the state on; none if the process
    ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return []
    return text.rpartition(")")[2].split()


@contextmanager
def training(root: Path, spec: str) -> Iterator[Training]:
    """Temporarily run a training that is killed with all its processes at the end."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        running = Training(root, spec, Path(folder))
        try:
            yield running
        finally:
            running.send(signal.SIGKILL)
            running.process.wait()


Pairs = tuple[tuple[list[Turn], list[Turn]], tuple[list[float], list[float]]]


def in_pairs(roots: Sequence[Path], spec: str, pairs: int) -> Pairs:
    """Return the turns of the trainings of two trees, and the losses of the common steps; the order
    alternates."""
    mine, its = roots
    with training(mine, spec) as first, training(its, spec) as second:
        both = (first, second)
        for run in both:
            run.run_to(WARM_UP)
        for run in both:
            run.send(signal.SIGSTOP)
        turns: tuple[list[Turn], list[Turn]] = ([], [])
        for number in range(pairs):
            for place in (0, 1) if number % 2 else (1, 0):
                turns[place].append(both[place].take_turn())
        losses = [[row["loss"] for row in run.steps()] for run in both]
    common = min(map(len, losses))
    return turns, (losses[0][:common], losses[1][:common])
