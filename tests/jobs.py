"""Trainings as processes, as a user starts them: for tests of the launcher and of signals.

Each costs seconds (every rank imports torch), so a test module runs few of them and checks much on
each."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests.forked_jobs import Command

ROOT = Path(__file__).parents[1]
TINY = (
    "model.layers=1",
    "model.hidden=32",
    "model.heads=2",
    "model.kv_heads=1",
    "model.ffn=64",
    "batch.sequence=32",
    "batch.global=4",
    "batch.micro=1",
    "log.every=1",
)
SECONDS = 150.0  # for a whole job, on a busy machine


@dataclass
class Job:
    """A process and its output so far."""

    process: subprocess.Popen[str] | Command
    lines: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    _readers: list[threading.Thread] = field(default_factory=list)

    def __post_init__(self) -> None:
        for stream, sink in ((self.process.stdout, self.lines), (self.process.stderr, self.errors)):
            reader = threading.Thread(target=sink.extend, args=(stream,), daemon=True)
            reader.start()
            self._readers.append(reader)

    @property
    def output(self) -> str:
        return "".join(self.lines)

    @property
    def error(self) -> str:
        return "".join(self.errors)

    def until(self, text: str) -> None:
        """Wait until a line of the output contains `text`."""
        deadline = time.monotonic() + SECONDS
        while text not in self.output:
            alive = self.process.poll() is None
            assert alive, f"ended before {text!r}: {self.output}\n{self.error}"
            assert time.monotonic() < deadline, f"no {text!r} within {SECONDS:g} s: {self.output}"
            time.sleep(0.02)

    def wait(self, seconds: float = SECONDS) -> int:
        code = self.process.wait(seconds)
        for reader in self._readers:
            reader.join(10)
        return code

    def ranks(self) -> dict[int, int]:
        """Return the process ids of the descendants that are ranks, by rank."""
        found = {}
        for pid in descendants(self.process.pid):
            name, _, number = Path(f"/proc/{pid}/comm").read_text().strip().partition(" ")
            if name == "rank":  # a forked process, whose environment /proc does not show
                found[int(number)] = pid
            variables = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
            named = dict(each.split("=", 1) for each in variables if "=" in each)
            if "RANK" in named:
                found[int(named["RANK"])] = pid
        return found


@contextmanager
def job(
    arguments: Sequence[str],
    *,
    cwd: Path,
    module: str = "ptrain",
    first: Path | None = None,
    is_forked: bool = False,
) -> Iterator[Job]:
    """Run `python -m ptrain ARGUMENTS` and kill all its processes at the end of the block. Python
    searches the folder `first` before any other. A forked job (tests/forked_jobs.py) costs a fifth,
    for tests that do not concern the start of processes."""
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        variables.pop(name, None)
    folders = os.pathsep.join(map(str, [first, ROOT] if first else [ROOT]))
    variables |= {"PYTHONPATH": folders, "OMP_NUM_THREADS": "1"}
    process: subprocess.Popen[str] | Command
    if is_forked:
        assert first is None
        process = Command(arguments, module=module, cwd=cwd, variables=variables)
    else:
        process = _start_job([module, *arguments], cwd, variables)
    started = Job(process)
    try:
        yield started
    finally:
        remains = [process.pid, *descendants(process.pid)] if process.poll() is None else []
        for pid in remains:
            os.kill(pid, signal.SIGKILL)
        started.wait()
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()


def _start_job(words: Sequence[str], cwd: Path, variables: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", *words],
        cwd=cwd,
        env=variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=_hear_hang_ups,
    )


def _hear_hang_ups() -> None:
    """Restore the handling of SIGHUP: children inherit it if the tests run under nohup."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def run_job(
    arguments: Sequence[str],
    *,
    cwd: Path,
    module: str = "ptrain",
    first: Path | None = None,
    is_forked: bool = False,
) -> tuple[int, Job]:
    """Return the exit code and the output."""
    with job(arguments, cwd=cwd, module=module, first=first, is_forked=is_forked) as started:
        return started.wait(), started


def descendants(pid: int) -> list[int]:
    """Return the children, their children, …, of a living process (Linux)."""
    try:
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except OSError:
        return []
    children = [int(each) for each in text.split()]
    return [each for child in children for each in (child, *descendants(child))]


def listening_addresses(pid: int) -> set[str]:
    """Return the addresses on which a process and its descendants listen (Linux)."""
    inodes = set()
    for process in (pid, *descendants(pid)):
        with suppress(OSError):  # gone meanwhile
            for link in Path(f"/proc/{process}/fd").iterdir():
                inodes.add(os.readlink(link))
    addresses = set()
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in inodes:
                packed = bytes.fromhex(words[1].partition(":")[0])
                in_order = b"".join(packed[i : i + 4][::-1] for i in range(0, len(packed), 4))
                addresses.add(socket.inet_ntop(family, in_order))
    return addresses


def have_ended(pids: Sequence[int], seconds: float = 10.0) -> bool:
    """Return True if none of these processes runs any more after at most `seconds`."""
    deadline = time.monotonic() + seconds
    while any(_runs(pid) for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def losses(run_folder: Path) -> dict[int, float]:
    """Return the losses by step with all digits."""
    lines = (run_folder / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if "loss" in row]
    found = {row["step"]: row["loss"] for row in rows}
    assert len(found) == len(rows), "a step has several rows"
    return found


def _runs(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"
