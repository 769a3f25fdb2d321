"""Run the ranks of a calibration, and write the measured rates into a cluster file. Torch-free.

`calibrate` starts one job per number of ranks on this machine, prints a table, and writes the file.
The file names the machine; a busy machine is rejected.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ptrain.codec import decode
from ptrain.commands import add_arguments
from ptrain.cost import Collective
from ptrain.errors import SpecError, input_error
from ptrain.files import temporary_folder, write_text
from ptrain.installed import versions
from ptrain.processor import cores, gpus, physical_memory
from ptrain.rates.pace import bus_factor
from ptrain.spec.cluster import CALIBRATED, Cluster, Rates
from ptrain.spec.leaf import Leaf, section_keys
from ptrain.spec.load import load
from ptrain.spec.text import read
from ptrain.spec.write import section_mapping, to_yaml
from ptrain.train import environment
from ptrain.train.folder import RunFolder
from ptrain.train.launch import launch_ranks

SECONDS = 100.0
MOST_RANKS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationOptions:
    """The options of `ptrain calibrate`.

    Attributes:
        cluster: The cluster whose other fields the file keeps; None: fields of this machine.
        ranks: Numbers of ranks that compute at the same time, measured one after the other. Empty:
            1, 2 and 4 on CPUs, one per GPU on GPUs.
        out: The file to write.
        seconds: Time for all measurements.
        device: `cpu`, `cuda` or `auto`.
        brief: Measure a few small points only.
        force: Measure on a busy machine, replace other files, and write inconsistent rates.
        json: Print JSON.
        part: The file in which a rank leaves its measurements for the command that started it.
        until: End time of a rank, in seconds of the system's clock.
    """

    cluster: str | None = None
    ranks: tuple[int, ...] = ()
    out: Path = Path("cluster.yaml")
    seconds: float = SECONDS
    device: str = "auto"
    brief: bool = False
    force: bool = False
    json: bool = False
    part: Path | None = None
    until: float | None = None


def from_arguments(arguments: argparse.Namespace) -> CalibrationOptions:
    """Return the options of parsed arguments.

    Raises:
        SpecError: A number is out of range.
    """
    if not 0 < arguments.seconds < math.inf:
        raise input_error(
            "--seconds",
            f"must be greater than 0; got {arguments.seconds:g}",
            "Use `--seconds 100`.",
        )
    fields = vars(arguments) | {"ranks": _parse_ranks(arguments.ranks)}
    return CalibrationOptions(
        **{name: fields[name] for name in CalibrationOptions.__dataclass_fields__}
    )


def parse_options(argv: Sequence[str]) -> CalibrationOptions:
    """Parse the arguments of `ptrain calibrate`."""
    parser = argparse.ArgumentParser(prog="ptrain calibrate", allow_abbrev=False)
    add_arguments(parser, "calibrate")
    return from_arguments(parser.parse_args(argv))


def to_argv(options: CalibrationOptions) -> list[str]:
    """Return the arguments that `parse_options` reads as these options."""
    words = [options.cluster] if options.cluster else []
    if options.ranks:
        words += ["--ranks", ",".join(map(str, options.ranks))]
    words += ["--out", str(options.out), "--seconds", str(options.seconds)]
    words += ["--device", options.device]
    for name in ("brief", "force", "json"):
        words += [f"--{name}"] * getattr(options, name)
    for name in ("part", "until"):
        value = getattr(options, name)
        words += [] if value is None else [f"--{name}", str(value)]
    return words


def _parse_ranks(text: str) -> tuple[int, ...]:
    """Parse a list of numbers of ranks, such as `1,2,4`, into ascending order."""
    if not text:
        return ()
    words = text.split(",")
    if not all(re.fullmatch(r"[1-9]\d{0,3}", word.strip()) for word in words):
        raise input_error(
            "--ranks",
            f"{text!r} is not a list of numbers",
            f"Use numbers from 1 to {MOST_RANKS}, such as `--ranks 1,2,4`.",
        )
    ranks = tuple(sorted({int(word) for word in words}))
    if ranks[-1] > MOST_RANKS:
        raise input_error(
            "--ranks",
            f"{ranks[-1]} ranks",
            f"Use at most {MOST_RANKS}, the limit of ranks on one machine.",
        )
    return ranks


# Seconds between two reads of the ticks. Linux counts 100 per second, so one tick is 2 % of a core.
_LOOK = 0.5
_STAT = Path("/proc/stat")


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredPart:
    """The measurements of one number of ranks that computed at the same time.

    Attributes:
        ranks: Ranks of a node.
        nodes: Number of nodes.
        kind: Device type.
        spread: Median spread of all measurements.
        tables: Rows of each table, with the seconds of this number of ranks.
        device_memory: Bytes of a GPU's memory, None on CPUs.
        sm: Compute capability of a GPU, None on CPUs.
        name: Name of a GPU, "" on CPUs.
        spreads: Median spread of each table.
        left_out: Number of tables whose largest points were left out because time was short.
    """

    ranks: int
    nodes: int
    kind: str
    spread: float
    tables: dict[str, list[list[Any]]]
    device_memory: int | None = None
    sm: int | None = None
    name: str = ""
    spreads: dict[str, float] = field(default_factory=dict)
    left_out: int = 0


def busy_cores() -> float:
    """Return the number of cores that are busy now.

    Without /proc/stat, return the load average of the last minute.
    """
    if not _STAT.exists():
        return os.getloadavg()[0]
    before = _read_cpu_ticks()
    time.sleep(_LOOK)
    busy, idle = (after - first for after, first in zip(_read_cpu_ticks(), before, strict=True))
    return cores() * busy / max(1, busy + idle)


def _read_cpu_ticks() -> tuple[int, int]:
    """Return the busy and idle ticks of all cores; waiting for a disk counts as idle."""
    # user, nice, system, idle, iowait, irq, softirq, steal; guest time is part of user
    first = _STAT.read_text(encoding="ascii").splitlines()[0].split()[1:9]
    numbers = list(map(int, first))
    idle = numbers[3] + numbers[4]
    return sum(numbers) - idle, idle


def machine_name(part: MeasuredPart) -> str:
    """Return the name of the machine: GPU if any, CPU and number of cores."""
    processor = f"{_cpu_name()}, {cores()} cores"
    return f"{part.name}, {processor}" if part.name else processor


def _cpu_name() -> str:
    """Return the model name of the CPU."""
    information = Path("/proc/cpuinfo")
    if information.exists():
        for line in information.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


MOST_SPREAD = 0.25
_DIGITS, _WORST = 4, 2


def require_writable(options: CalibrationOptions) -> None:
    """Require an output that can be written and does not replace another kind of file.

    Raises:
        SpecError: The file cannot be written, or no calibration wrote it and `force` is not set.
    """
    out = options.out
    if not out.parent.is_dir():
        raise input_error(
            "--out",
            f"{out}: the folder {out.parent} does not exist",
            f"Run `mkdir -p {out.parent}` first.",
        )
    if out.is_dir():
        raise input_error("--out", f"{out} is a folder", "Use a file in this folder.")
    if not os.access(out.parent, os.W_OK):
        raise input_error("--out", f"{out} is not writable", "Use another file.")
    if out.exists() and not options.force and not _rates_source(out).startswith(CALIBRATED):
        raise input_error(
            "--out",
            f"{out} exists and was not written by a calibration",
            "Use another file, or add `--force`.",
        )


def _rates_source(path: Path) -> str:
    """Return the source of a file's rates, "" if it is not a cluster file."""
    try:
        return str(read(path).value_at(("rates", "source")))
    except SpecError:
        return ""


def _describe_existing(path: Path) -> str:
    """Describe the existing content of a file by its date, "" if there is no file."""
    if not path.exists():
        return ""
    try:
        date = read(path).value_at(("rates", "date"))
    except SpecError:
        date = None
    return f"the rates of {date} in" if date else "the content of"


def base_of(options: CalibrationOptions) -> Cluster | None:
    """Return the named cluster, whose fields are kept, or None if no cluster is named.

    Raises:
        SpecError: The cluster's file has errors.
    """
    if options.cluster is None:
        return None
    mapping: dict[str, object] = {
        "model": {"preset": "llama-tiny"},
        "mesh": {},
        "batch": {"micro": 1, "sequence": 8},
        "cluster": {"preset": options.cluster},
    }
    return load(mapping).spec.cluster


def report_rates(parts: Sequence[MeasuredPart], options: CalibrationOptions) -> int:
    """Print the rates, and write them unless the measurements differ too much; return 0.

    Raises:
        SpecError: The measurements differ too much and `force` is not set.
    """
    cluster = cluster_of(parts, options)
    assert cluster.rates is not None, "the rates are missing"
    # ranks beyond the number of cores share them, and their measurements differ on a quiet machine
    # too
    counted = [part for part in parts if part.ranks <= cores()] or parts
    widest = max(part.spread for part in counted)
    is_written = widest <= MOST_SPREAD or options.force
    replaced = f"replaced {dated}" if (dated := _describe_existing(options.out)) else "wrote"
    if is_written:
        write_cluster(cluster, options.out)
    if options.json:
        print(json.dumps(section_mapping(cluster.rates)))
    else:
        print(*_table_lines(parts, cluster.rates), sep="\n")
    if not is_written:
        raise input_error(
            "calibrate",
            f"repeated measurements differ by {widest:.0%} in the median, more than "
            f"{MOST_SPREAD:.0%}: other processes use this machine; no file was written",
            "Stop the other processes, or add `--force`.",
        )
    if not options.json:
        print(f"{replaced} {options.out}. To use it in a spec: cluster.preset={options.out}")
    return 0


def write_cluster(cluster: Cluster, path: Path) -> None:
    """Write a cluster file.

    Raises:
        SpecError: The file cannot be written.
    """
    head = "# Measured by `ptrain calibrate`.\n"
    try:
        write_text(path, head + to_yaml(section_mapping(cluster)))
    except OSError as error:
        raise input_error("--out", f"{path} is not writable: {error.strerror}") from None


def cluster_of(parts: Sequence[MeasuredPart], options: CalibrationOptions) -> Cluster:
    """Return the cluster with the measured rates."""
    rates = rates_of(parts, options)
    return replace(base_of(options) or _this_machine(parts, options), rates=rates)


def _threads_per_rank(parts: Sequence[MeasuredPart]) -> list[int]:
    """Return the threads per rank, by number of ranks, as training sets them; [] on GPUs."""
    if any(part.kind == "cuda" for part in parts):
        return []
    return [int(environment.threads_per_rank(part.ranks)) for part in parts]


def rates_of(parts: Sequence[MeasuredPart], options: CalibrationOptions) -> Rates:
    """Return the rates, with a column for each number of ranks."""
    known = versions()
    written: dict[str, Any] = {
        "source": f"{CALIBRATED}{' --brief' * options.brief}",
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine_name(parts[0]),
        "torch": known["torch"],
        "ptrain": known["ptrain"],
        "at_once": [part.ranks for part in parts],
        "threads": _threads_per_rank(parts),
        "spread": [_round_digits(part.spread) for part in parts],
        **_join_tables(parts),
    }
    checked: dict[str, Any] = {}
    for key, value in written.items():
        leaf = section_keys(Rates)[key][1]
        assert isinstance(leaf, Leaf), "the value is a table or a string"
        checked[key] = leaf.parse(value)
    return Rates(**checked)


def _join_tables(parts: Sequence[MeasuredPart]) -> dict[str, list[list[Any]]]:
    """Join the tables; a row has None for a number of ranks that did not measure it."""
    seconds: dict[str, dict[tuple[Any, ...], list[float | None]]] = {}
    for number, part in enumerate(parts):
        for table, rows in part.tables.items():
            for *key, taken in rows:
                empty: list[float | None] = [None] * len(parts)
                seconds.setdefault(table, {}).setdefault(tuple(key), empty)[number] = _round_digits(
                    taken
                )
    return {
        table: [[*key, *figures] for key, figures in sorted(rows.items(), key=lambda row: row[0])]
        for table, rows in seconds.items()
    }


def _round_digits(value: float) -> float:
    """Round to four significant digits."""
    return float(f"{value:.{_DIGITS}g}")


def _this_machine(parts: Sequence[MeasuredPart], options: CalibrationOptions) -> Cluster:
    """Return a cluster with the known fields of this machine.

    A node has the highest measured number of ranks. On CPUs, these ranks share the memory.
    """
    last = parts[-1]
    return Cluster(
        name=options.out.stem,
        devices=last.ranks * last.nodes,
        devices_per_node=last.ranks,
        device_memory=last.device_memory or physical_memory() // last.ranks,
        host_memory=physical_memory(),
        intra_node_bandwidth=_bus_bandwidth(last, is_within=True),
        inter_node_bandwidth=_bus_bandwidth(last, is_within=last.nodes == 1),
        kind=last.kind,
        sm=last.sm,
    )


def _bus_bandwidth(part: MeasuredPart, *, is_within: bool) -> float:
    """Return the bus bandwidth of the largest all-gather, in bytes/s.

    `is_within` selects groups within a node or between nodes.

    Without such a gather, return the bandwidth of the largest memory-bound operator.
    """
    gathers = [
        row
        for row in part.tables.get("collectives", ())
        if row[0] == Collective.ALL_GATHER and (row[2] == 1) is is_within
    ]
    if gathers:
        _, ranks, _, size, taken = max(gathers, key=lambda row: row[3])
        return float(round(size * bus_factor(Collective.ALL_GATHER, ranks) / taken))
    *_, size, taken = max(part.tables["operators"], key=lambda row: row[2])
    return float(round(size / taken))


def _describe_spread(part: MeasuredPart) -> str:
    """Describe the spread of all measurements, and of the tables with the largest spread."""
    worst = sorted(part.spreads.items(), key=lambda table: -table[1])[:_WORST]
    said = ", ".join(f"{table} {spread:.1%}" for table, spread in worst)
    return f"spread {part.spread:.1%}{f', largest {said}' if said else ''}"


def _table_lines(parts: Sequence[MeasuredPart], rates: Rates) -> Iterable[str]:
    """Yield the printed lines of all tables, with seconds by number of ranks."""
    yield f"{rates.machine}, torch {rates.torch}, {rates.date}"
    yield "ranks at the same time: " + ", ".join(
        f"{part.ranks} ({_describe_spread(part)})" for part in parts
    )
    if any(part.left_out for part in parts):
        yield (
            "the largest points of some tables were not measured for lack of time; raise --seconds"
        )
    for key, rows in section_mapping(rates).items():
        if isinstance(rows, list) and rows and isinstance(rows[0], list):
            yield f"\n{key}"
            number = len(parts)
            for row in rows:
                cells = (f"{taken:.3e}" if taken is not None else "-" for taken in row[-number:])
                yield f"  {' '.join(map(str, row[:-number])):<40} " + "  ".join(cells)


_BUSY = 0.15  # share of the cores that other processes may use
_SENDING = 1.5  # time of several ranks in units of a single rank's, because of collectives
_PROCESSORS = (1, 2, 4)
_ENDING = 2.0  # seconds for ranks to write their results, exit and be reaped


def calibrate(options: CalibrationOptions) -> int:
    """Measure, print and write; return the exit code.

    Raises:
        SpecError: A file cannot be used, or the machine is busy.
        RankFailed: A rank fails.
    """
    require_writable(options)
    base = base_of(options)
    if base is not None and options.device == "auto" and base.kind is not None:
        options = replace(options, device=base.kind)
    if not options.force:
        _require_idle_machine()
    parts: list[MeasuredPart] = []
    numbers = options.ranks or _default_ranks(options)
    # Not a monotonic clock: its origin may differ in the processes of the ranks.
    until = time.time() + options.seconds
    with temporary_folder(keeps_failure=True) as folder:
        for place, number in enumerate(numbers):
            part = folder / str(number) / "part.json"
            (part.parent / "logs").mkdir(mode=0o700, parents=True)
            end = _next_end(numbers[place:], until)
            code = launch_ranks(
                to_argv(replace(options, part=part, until=end, cluster=None)),
                num_ranks=number,
                folder=RunFolder(part.parent),
                module="ptrain.calibration",
            )
            if code:
                return code
            parts.append(decode(json.loads(part.read_text(encoding="utf-8")), MeasuredPart))
    return report_rates(parts, options)


def _default_ranks(options: CalibrationOptions) -> tuple[int, ...]:
    """Return the default numbers of ranks: one per GPU, or several numbers on CPUs."""
    number = gpus() if options.device != "cpu" else 0
    return (number,) if number else _PROCESSORS


def _next_end(numbers: tuple[int, ...], end: float) -> float:
    """Return the end time of the first of the remaining numbers of ranks.

    A single rank has no collectives, and ranks that share cores need longer for the same points.
    Every job also needs time to start and to end.
    """
    # The end of each job is set when it begins, so that time that one job leaves is used by the
    # next.
    weights = [max(1.0 if number == 1 else _SENDING, number / cores()) for number in numbers]
    now = time.time()
    return now + (end - now) * weights[0] / sum(weights) - _ENDING


def _require_idle_machine() -> None:
    """Require that other processes use at most `_BUSY` of the cores.

    Raises:
        SpecError: They use more.
    """
    busy, available = busy_cores(), cores()
    if busy > _BUSY * available:
        raise input_error(
            "calibrate",
            f"other processes use {busy:.1f} of {available} cores; nothing was measured",
            "Stop the other processes, or add `--force`.",
        )
