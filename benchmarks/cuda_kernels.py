"""CUDA's kernels against a CPU's and against `exact`, without a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from _gpu_cases import BLOCKS, CAPABILITIES, class_cases
from _script import Script, table_row

from ptrain.runtime import simulated_gpu
from ptrain.spec.load import load
from ptrain.spec.names import list_files
from ptrain.spec.placement import Tier

SCRIPT = Script("cuda_kernels")


@dataclass(frozen=True, slots=True)
class Measured:
    """The memory of one rank at its peak by kind of storage, the part missing in `exact`, and the
    executed kernels."""

    kernels: str
    peak: int
    held: dict[str, int]
    beyond_exact: int
    is_claimed: bool
    differing: tuple[str, ...]


def simulated(*words: str) -> Measured:
    ended = subprocess.run(
        [sys.executable, "-m", "ptrain", "simulate", *words, "--json"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    record: dict[str, Any] = json.loads(ended.stdout)
    ranks: list[dict[str, Any]] = record["simulation"]["ranks"]
    rank = max(ranks, key=lambda row: row["peak"]["device_bytes"])
    held: dict[str, int] = {}
    for row in rank["held"]:
        held[row["what"]] = held.get(row["what"], 0) + row["device_bytes"]
    phase = f"peak {rank['peak']['phase']} rank {rank['rank']}"
    at_peak = [row for row in rank["differing"] if row["name"] == phase]
    return Measured(
        beyond_exact=sum(row["simulated"] - row["exact"] for row in at_peak),
        is_claimed="peak" not in record["unclaimed"].get("exact", {}),
        kernels=(rank["kernels"] or "").rpartition(": ")[2],
        peak=rank["peak"]["device_bytes"],
        held=held,
        differing=tuple(row["name"] for one in ranks for row in one["differing"]),
    )


def differences(mine: Measured, cpu: Measured) -> str:
    """Return the kinds of storage at the peak that have other sizes than on a CPU."""
    kinds = dict.fromkeys((*cpu.held, *mine.held))
    more = {kind: mine.held.get(kind, 0) - cpu.held.get(kind, 0) for kind in kinds}
    return ", ".join(f"{kind} {size:+,}" for kind, size in more.items() if size) or "–"


def named() -> Iterator[str]:
    """Yield the named specs for GPUs that claim their peak."""
    for folder in ("node", "paper"):
        for name in sorted(list_files(folder)):
            spec = load(name).spec
            is_offloaded = any(kept.tier is Tier.HOST for kept in spec.activations.modes)
            if spec.is_for_cuda and not is_offloaded:
                yield name


def row(*cells: object) -> str:
    """Return a table row and print it at once."""
    line = table_row(*cells)
    print(line, flush=True)
    return line


def of_blocks() -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield a line and its failures for built-in models compared with a CPU's kernels."""
    yield "| model | sm | attention | peak, bytes | beside `exact` | beside a CPU | of it |", ()
    yield "|---|---|---|---|---|---|---|", ()
    for name, words in BLOCKS.items():
        cpu = simulated(*words, "device=cpu")
        for sm in CAPABILITIES:
            on_gpu = simulated(*words, f"cluster={{preset: h100-8, sm: {sm}}}")
            line = row(
                name, sm, on_gpu.kernels.replace("_", " "), f"{on_gpu.peak:,}",
                f"{on_gpu.beyond_exact:+,}", f"{on_gpu.peak - cpu.peak:+,}",
                differences(on_gpu, cpu),
            )  # fmt: skip
            yield line, tuple(f"{name}, sm {sm}: {figure}" for figure in on_gpu.differing)


def of_classes() -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield lines and failures for classes of transformers."""
    head = "class | placement | dtype | sm | attention | peak, bytes | beside `exact` | figures off"
    yield f"| {head} | claimed |", ()
    yield "|---|---|---|---|---|---|---|---|---|", ()
    for case in class_cases():
        on_gpu = simulated(*case.words)
        line = row(
            case.name, case.placement, case.dtype, case.sm, on_gpu.kernels.replace("_", " "),
            f"{on_gpu.peak:,}", f"{on_gpu.beyond_exact:+,}", len(on_gpu.differing),
            "yes" if on_gpu.is_claimed else "no",
        )  # fmt: skip
        where = f"{case.name}, {case.placement}, {case.dtype}, sm {case.sm}"
        yield line, tuple(f"{where}: {figure}" for figure in on_gpu.differing)


def of_named() -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield lines and failures for named specs."""
    yield "| spec | peak, bytes | attention | figures off |", ()
    yield "|---|---|---|---|", ()
    for name in named():
        on_gpu = simulated(name)
        line = row(
            name, f"{on_gpu.peak:,}", on_gpu.kernels.replace("_", " "), len(on_gpu.differing)
        )
        yield line, tuple(f"{name}: {figure}" for figure in on_gpu.differing)


PARTS = {"blocks": of_blocks, "hf": of_classes, "named": of_named}


def main() -> int:
    parser = SCRIPT.parser()
    parser.add_argument("--only", choices=PARTS, help="one part of it; default: all")
    args = parser.parse_args()
    if why := simulated_gpu.missing_requirement():
        print(f"CUDA's kernels cannot be asked: {why}", file=sys.stderr)
        return 2
    lines = SCRIPT.head()
    failed: list[str] = []
    left_out = [name for name in PARTS if args.only not in (None, name)]
    for name, part in PARTS.items():
        if name in left_out:
            continue
        lines.append("")
        for line, faults in part():
            lines.append(line)
            failed += faults
    return SCRIPT.conclude(lines, failed, args, "; ".join(left_out))


if __name__ == "__main__":
    raise SystemExit(main())
