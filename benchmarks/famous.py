"""Ten popular jobs: the placement that `ptrain select` picks, and a public choice predicted by the
same model."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from _script import Script, table_head, table_row

from ptrain.units import format_memory, format_seconds

_LATER = 1.0 + 1e-6  # times as long: the figures of a record have so many digits
SCRIPT = Script("famous")
Record = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job, its public choice, and the parts that cannot be expressed. Without a `model` the job
    cannot be expressed."""

    name: str
    public: str
    source: str
    model: str = ""
    cluster: str = ""
    devices: int = 0
    words: list[str] = field(default_factory=list)
    placement: list[str] = field(default_factory=list)
    unlike: str = ""

    @property
    def select(self) -> list[str]:
        """Return the arguments that search the job."""
        cluster = ["--cluster", self.cluster, "--devices", str(self.devices)]
        return ["select", self.model, *self.words, *cluster, "--json", "--top", "1"]

    @property
    def predict(self) -> list[str]:
        """Return the arguments that derive the public choice."""
        strategy, *rest = self.placement
        preset = [f"model={{preset: {self.model}}}", f"cluster.preset={self.cluster}"]
        return ["predict", strategy, *preset, *self.words, *rest, "--json"]


def jobs() -> list[Job]:
    """Return the jobs of famous.yaml."""
    text = Path(__file__).with_name("famous.yaml").read_text(encoding="utf-8")
    return [Job(**job) for job in yaml.safe_load(text)]


def cpu_seconds() -> float:
    """Return the CPU seconds of the commands so far."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def record_of(arguments: Sequence[str], limit: float) -> tuple[Record | None, str, float]:
    """Return what a command prints, or why it prints nothing, and its CPU seconds."""
    command = [sys.executable, "-m", "ptrain", *arguments]
    before = cpu_seconds()
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False)
    except subprocess.TimeoutExpired:
        return None, f"not derived within {limit:.0f} s", cpu_seconds() - before
    used = cpu_seconds() - before
    record: Record = json.loads(ended.stdout)
    why = record.get("error", "").partition("\n")[0].removeprefix("error: ")
    return (None, why, used) if why else (record, "", used)


def headroom(spare: int, peak: int) -> str:
    """Return peak and headroom of a device."""
    sign = "−" if spare < 0 else ""
    return f"{format_memory(peak)} ({sign}{format_memory(abs(spare))} free)"


def selected(record: Record) -> tuple[str, str, float | None]:
    """Return the placement that a search picked, its memory and its time."""
    best = record["ranking"][0] if record["ranking"] else record["least"]
    text = f"{best['idea']}: `{best['placement']}`" if record["ranking"] else "nothing fits"
    return text, headroom(best["headroom_bytes"], best["peak_bytes"]), best["step_seconds"]


def derived(record: Record) -> tuple[str, float | None]:
    """Return the memory and the time of a public choice."""
    fit = record["fit"]
    rows = [row for row in record["step_seconds"] if row["column"] == "exact"]
    seconds = rows[0]["value"] if rows else None
    if fit["peak_bytes"] is None:
        return f"unknown: {fit['unknown']}", seconds
    usable = fit["device_memory"] - fit["reserve_bytes"]
    return headroom(usable - fit["peak_bytes"], fit["peak_bytes"]), seconds


def compared(job: Job, limit: float) -> tuple[list[str], str]:
    """Return the row of a job, and what fails: a public choice that fits, is faster, and was not
    picked."""
    if not job.model:
        return [job.name, "cannot be expressed", "", "", "", job.public, "", "", job.unlike], ""
    ours, why, used = record_of(job.select, limit)
    theirs, reason, _ = record_of(job.predict, limit)
    picked, memory, mine = (why, "", None) if ours is None else selected(ours)
    public, other = (reason, None) if theirs is None else derived(theirs)
    times = ["" if time is None else format_seconds(time) for time in (mine, other)]
    fits = theirs is not None and theirs["fit"]["fits"] is True and not theirs["fit"]["tight"]
    is_beaten = fits and mine is not None and other is not None and mine > other * _LATER
    ratio = "" if mine is None or other is None else f" ({other / mine - 1:+.1%})"
    row = [job.name, picked, memory, times[0], f"{used:.0f}", job.public, public]
    failed = f"{job.name}: the public choice fits and is faster" if is_beaten else ""
    return [*row, times[1] + ratio, job.unlike], failed


def lines_of(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the table and the sources."""
    yield from table_head(
        *(
            "job",
            "`select` picks",
            "peak",
            "step",
            "CPU s",
            "public choice",
            "its peak",
            "its step",
        ),
        "not expressed",
    )
    yield from (table_row(*(cell or "–" for cell in row)) for row in rows)
    timed = sum(bool(row[3]) and "(" in row[7] for row in rows)
    yield f"\nCompared: {timed} of {len(jobs())} jobs; the others lack a time on one side."
    yield ""
    yield from (f"- {job.name}: {job.public}, as in {job.source}." for job in jobs())


def main() -> int:
    parser = SCRIPT.parser()
    parser.add_argument("--only", default="", help="jobs whose name contains this text")
    parser.add_argument("--limit", type=float, default=900.0, help="seconds for each command")
    parser.add_argument("--into", type=Path, help="keep rows here, and go on from those that are")
    args = parser.parse_args()
    head = [*SCRIPT.head(), *SCRIPT.method(limit=f"{args.limit:.0f}")]
    known = json.loads(args.into.read_text()) if args.into and args.into.exists() else {}
    for job in jobs():
        if args.only in job.name and job.name not in known:
            known[job.name] = compared(job, args.limit)
            if args.into:
                args.into.write_text(json.dumps(known))
    results = [known[job.name] for job in jobs() if job.name in known]
    rows, failed = zip(*results, strict=True)
    missing = ", ".join(job.name for job in jobs() if job.name not in known)
    not_run = f"not run: {missing}" if missing else ""
    return SCRIPT.conclude([*head, *lines_of(rows)], [*filter(None, failed)], args, not_run)


if __name__ == "__main__":
    raise SystemExit(main())
