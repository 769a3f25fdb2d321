"""Faults of processes, checkpoints and hosts: are they noticed, named and survived?"""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from _script import Script, table

from ptrain.train import manifest
from ptrain.train.launch import STOPPED_FOR
from tests import jobs

SCRIPT = Script("fault_matrix")
TORCHRUN = "torch.distributed.run"
SAVING = (*jobs.TINY, "train.steps=30", "checkpoint.every=10")
FOREVER = (*jobs.TINY, "train.steps=1000000")
LIMIT = 4.0  # timeout.step of the jobs with a silent rank, in seconds
# Seconds within which a job ends: the launcher waits 5 s for a rank that is stopped.
LIMITS = {"SIGSTOP": STOPPED_FOR + 1, "sleep": LIMIT + 1}
FLIPS = 200
# A model whose rank 1 ends in the way that the variable names, in the forward pass of step 5.
MODEL = """
import ctypes, os, sys, time
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head, self.calls = nn.Embedding(261, 16), nn.Linear(16, 261), 0

    def forward(self, tokens):
        self.calls += 1
        if os.environ.get("RANK") == "1" and self.calls == 10:
            how = os.environ["FAULT"]
            if how == "raise": raise ValueError("a broken sample")
            if how == "exit": sys.exit(3)
            if how == "segfault": ctypes.string_at(0)
            if how == "abort": os.abort()
            if how == "sleep": time.sleep(600)
        return self.head(self.embed(tokens))

def build():
    return Model()
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Try:
    """One injected fault.

    Attributes:
        detected: The job noticed it, or it cannot be noticed and nothing was lost.
        named: The rank that failed was named; None if no rank failed.
        seconds: From the fault until the job ended, or until it resumed; None if it was not timed.
        recovered: The job went on by itself, or from its newest complete checkpoint, to losses that
            equal an uninterrupted run's to the bit; None if it should end.
        lost: The steps that were computed again.
        orphans: Processes of the job that were left.
        note: What else to know of a failed one.
    """

    detected: bool
    named: bool | None = None
    seconds: float | None = None
    recovered: bool | None = None
    lost: int | None = None
    orphans: int = 0
    note: str = ""


def mesh_of(size: int) -> str:
    return f"mesh.dp_shard={size}"


def count_orphans(pids: Sequence[int]) -> int:
    return 0 if jobs.have_ended(pids, 10.0) else len(pids)


def end_by_signal(folder: Path, size: int, rank: int, number: signal.Signals) -> Try:
    """Signal a rank of a training without restarts."""
    words = ["train", "zero3", *FOREVER, mesh_of(size), f"timeout.step={LIMIT:g}"]
    with jobs.job(words, cwd=folder) as job:
        job.until("step 3/")
        ranks = job.ranks()
        began = time.monotonic()
        os.kill(ranks[rank], number)
        code = job.wait(90)
        seconds = time.monotonic() - began
        left = count_orphans([*ranks.values()])
    named = f"rank {rank} was " in job.error
    return Try(detected=code == 3, named=named, seconds=seconds, orphans=left)


def restart_after_kill(folder: Path, size: int, rank: int, module: str, *more: str) -> Try:
    """Kill a rank of a training that may restart once, and compare all losses."""
    words = ["zero3", *SAVING, mesh_of(size), *more]
    whole = reference(folder, size)
    agent = ["--standalone", "--nproc-per-node", str(size), "--max-restarts", "1"]
    command = (
        ["train", *words, "--max-restarts", "1"]
        if module == "ptrain"
        else [*agent, "-m", "ptrain.train", *words]
    )
    with jobs.job(command, cwd=folder, module=module) as job:
        job.until("step 15/")
        ranks = job.ranks()
        began = time.monotonic()
        os.kill(ranks[rank], signal.SIGKILL)
        job.until("resume  step ")
        seconds = time.monotonic() - began
        code = job.wait(120)
        left = count_orphans([*ranks.values()])
    (run,) = {file.parent.resolve() for file in folder.rglob("metrics.jsonl")}
    text = job.output.partition("resume  step ")[2]
    lost = 15 - int(text.split()[0])
    named = f"rank {rank} was killed by SIGKILL" in job.error if module == "ptrain" else None
    return Try(
        detected=True, named=named, seconds=seconds, recovered=code == 0
        and jobs.losses(run) == whole, lost=max(0, lost), orphans=left,
    )  # fmt: skip


_REFERENCES: dict[int, dict[int, float]] = {}


def reference(folder: Path, size: int) -> dict[int, float]:
    """Return the losses of an uninterrupted run."""
    if size not in _REFERENCES:
        other = folder.with_name(f"{folder.name}-reference")
        other.mkdir()
        words = ["train", "zero3", *SAVING, mesh_of(size), "--run-dir", str(other / "run")]
        code, job = jobs.run_job(words, cwd=other)
        assert code == 0, job.error
        _REFERENCES[size] = jobs.losses(other / "run")
    return _REFERENCES[size]


def end_by_model(folder: Path, size: int, how: str) -> Try:
    """Let the model of rank 1 raise, exit, crash or sleep."""
    (folder / "faulty.py").write_text(MODEL)
    words = [
        "train", "zero3", f"model={{target: 'faulty:build', folder: '{folder}'}}",
        "batch.sequence=32",
        f"batch.global={2 * size}", "batch.micro=1", "log.every=1", "train.steps=50", mesh_of(size),
        f"timeout.step={LIMIT:g}", "--allow-import",
    ]  # fmt: skip
    os.environ["FAULT"] = how
    with jobs.job(words, cwd=folder) as job:
        job.until("step 2/")
        ranks = job.ranks()
        job.until("step 4/")
        began = time.monotonic()
        code = job.wait(90)
        seconds = time.monotonic() - began
        left = count_orphans([*ranks.values()])
    first = job.error.splitlines()[0] if job.error else ""
    return Try(detected=code == 3, named="rank 1" in first, seconds=seconds, orphans=left,
               note="" if "rank 1" in first else first[:100])  # fmt: skip


def kill_in_save(folder: Path, size: int, background: str) -> Try:
    """Kill all processes while checkpoints are saved after every step, and continue the run."""
    words = ["zero3", *jobs.TINY, "train.steps=400", "checkpoint.every=1", "checkpoint.keep=2",
             f"checkpoint.background={background}", mesh_of(size), "--run-dir", "run"]  # fmt: skip
    with jobs.job(["train", *words], cwd=folder) as job:
        job.until("step 3/")
        ranks = [*job.ranks().values()]
        time.sleep(random.uniform(0.0, 0.5))
        for pid in (job.process.pid, *ranks):
            os.kill(pid, signal.SIGKILL)
        job.wait()
        left = count_orphans(ranks)
    saved = folder / "run" / "checkpoints"
    steps = manifest.complete_checkpoints(saved)
    faults = [manifest.find_fault(path, hashes=True) for path in steps]
    last = manifest.step_in_name(steps[0]) if steps else 0
    more = ["train", *words, f"train.steps={last + 3}", "--resume", "auto"]
    code, job = jobs.run_job(more, cwd=folder)
    is_clean = not manifest.incomplete_checkpoints(saved)
    return Try(detected=not any(faults), recovered=code == 0 and is_clean
               and f"resume  step {last} " in job.output, orphans=left,
               note="; ".join(filter(None, faults)))  # fmt: skip


def flip_bits(folder: Path, size: int) -> Try:
    """Flip one bit of a checkpoint's files, many times."""
    words = ["train", "zero3", *jobs.TINY, "train.steps=3", "checkpoint.at_end=true"]
    code, job = jobs.run_job([*words, mesh_of(size), "--run-dir", "run"], cwd=folder)
    assert code == 0, job.error
    (path,) = manifest.complete_checkpoints(folder / "run" / "checkpoints")
    files, silent = sorted(path.iterdir()), 0
    for _ in range(FLIPS):
        file = random.choice(files)
        content = bytearray(file.read_bytes())
        place, bit = random.randrange(len(content)), random.randrange(8)
        content[place] ^= 1 << bit
        file.write_bytes(content)
        silent += not manifest.find_fault(path, hashes=True)
        content[place] ^= 1 << bit
        file.write_bytes(content)
    return Try(detected=silent == 0, note=f"{silent} of {FLIPS} flips unnoticed" * (silent > 0))


def stop_launcher(folder: Path, size: int) -> Try:
    """Stop the launcher by SIGTERM."""
    words = ["train", "zero3", *FOREVER, "checkpoint.every=1000000", mesh_of(size)]
    with jobs.job(words, cwd=folder) as job:
        job.until("step 3/")
        ranks, began = [*job.ranks().values()], time.monotonic()
        job.process.send_signal(signal.SIGTERM)
        code = job.wait(60)
        seconds = time.monotonic() - began
        left = count_orphans(ranks)
    saved = [*folder.rglob("step-*/manifest.json")]
    return Try(detected=code == 143, seconds=seconds, recovered=len(saved) == 1, orphans=left)


def kill_launcher(folder: Path, size: int) -> Try:
    """Kill the launcher, which cannot end its ranks."""
    with jobs.job(["train", "zero3", *FOREVER, mesh_of(size)], cwd=folder) as job:
        job.until("step 3/")
        ranks, began = [*job.ranks().values()], time.monotonic()
        job.process.kill()
        job.wait()
        left = count_orphans(ranks)
        seconds = time.monotonic() - began
    return Try(detected=left == 0, seconds=seconds, orphans=left)


def run_twice(folder: Path, size: int) -> Try:
    """Run two jobs at once, and compare their losses with one alone."""
    whole = reference(folder, size)
    words = ["train", "zero3", *SAVING, mesh_of(size), "--run-dir"]
    with (
        jobs.job([*words, "one"], cwd=folder) as one,
        jobs.job([*words, "two"], cwd=folder) as two,
    ):
        codes = [one.wait(), two.wait()]
    equal = all(jobs.losses(folder / name) == whole for name in ("one", "two"))
    return Try(detected=codes == [0, 0], recovered=equal)


Case = Callable[[Path, int], Try]
CASES: dict[str, Case] = {
    "F1 SIGKILL, the last rank": lambda f, n: end_by_signal(f, n, n - 1, signal.SIGKILL),
    "F2 SIGKILL of rank 0, restart": lambda f, n: restart_after_kill(f, n, 0, "ptrain"),
    "F2 SIGKILL of rank 1, restart": lambda f, n: restart_after_kill(f, n, 1, "ptrain"),
    "F2 SIGKILL, restart by torchrun": lambda f, n: restart_after_kill(f, n, 1, TORCHRUN),
    "F2 SIGKILL, background saves": lambda f, n: restart_after_kill(
        f, n, 1, "ptrain", "checkpoint.background=true"
    ),
    "F3 SIGSTOP": lambda f, n: end_by_signal(f, n, 1, signal.SIGSTOP),
    **{f"F4 {how} in a model": partial(end_by_model, how=how)
       for how in ("raise", "exit", "segfault", "abort", "sleep")},
    "F9 kill in a save": partial(kill_in_save, background="false"),
    "F9 kill in a background save": partial(kill_in_save, background="true"),
    f"F10 {FLIPS} flipped bits": flip_bits,
    "F13 SIGTERM of the launcher": stop_launcher,
    "F14 SIGKILL of the launcher": kill_launcher,
    "F18 two jobs at once": run_twice,
}  # fmt: skip


def attempt(name: str, size: int) -> Try:
    """Inject a fault once, in a folder of its own."""
    folder = Path(tempfile.mkdtemp(prefix="fault-"))
    try:
        return CASES[name](folder, size)
    except (AssertionError, OSError, ValueError, subprocess.TimeoutExpired) as error:  # on the page
        return Try(detected=False, note=f"{type(error).__name__}: {str(error)[:200]}")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def share(values: Sequence[bool | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{sum(known)} of {len(known)}" if known else ""


def rows(results: dict[str, list[Try]]) -> Iterator[list[str]]:
    for key, tries in results.items():
        timed = sorted(one.seconds for one in tries if one.seconds is not None)
        lost = [one.lost for one in tries if one.lost is not None]
        yield [
            *key.split(" | "), str(len(tries)),
            share([one.detected for one in tries]),
            share([one.named for one in tries]),
            f"{timed[len(timed) // 2]:.1f} ({timed[-1]:.1f})" if timed else "",
            share([one.recovered for one in tries]),
            f"{max(lost)}" if lost else "",
            str(sum(one.orphans for one in tries)),
        ]  # fmt: skip


def failures(results: dict[str, list[Try]]) -> Iterator[str]:
    for key, tries in results.items():
        for one in tries:
            wrong = [name for name in ("detected", "named", "recovered")
                     if getattr(one, name) is False]  # fmt: skip
            if wrong or one.orphans:
                yield f"{key}: not {' or '.join(wrong) or 'without orphans'} {one.note}".rstrip()
            limit = next((most for text, most in LIMITS.items() if text in key), math.inf)
            if (one.seconds or 0.0) > limit:
                yield f"{key}: {one.seconds:.1f} s, at most {limit:g}"


def main() -> int:
    parser = SCRIPT.parser()
    parser.add_argument("--tries", type=int, default=5, help="tries of each fault (default 5)")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="sizes of the jobs")
    parser.add_argument("--only", help="faults whose name contains this text")
    parser.add_argument(
        "--work",
        type=Path,
        required=True,
        help="file of the finished tries",
    )
    args = parser.parse_args()
    head = SCRIPT.head()
    known = json.loads(args.work.read_text()) if args.work.exists() else {}
    results = {key: [Try(**one) for one in tries] for key, tries in known.items()}
    for name in CASES:
        for size in args.ranks:
            tries = results.setdefault(f"{name} | {size}", [])
            while len(tries) < args.tries and (args.only or "") in name:
                tries.append(attempt(name, size))
                plain = {key: [*map(asdict, each)] for key, each in results.items()}
                args.work.write_text(json.dumps(plain))
                print(name, size, tries[-1], flush=True)
    results = {key: tries for key, tries in results.items() if tries}
    columns = ["fault", "ranks", "tries", "noticed", "right rank named",
               "seconds, median (most)", "continued with equal losses", "steps lost, at most",
               "processes left"]  # fmt: skip
    page = [*head, *SCRIPT.method(limit=f"{LIMIT:g}"), table(columns, rows(results))]
    return SCRIPT.conclude(page, list(failures(results)), args)


if __name__ == "__main__":
    sys.exit(main())
