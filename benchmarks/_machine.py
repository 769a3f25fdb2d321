"""The header of every result (machine, versions, commit, load) and its end. Only stdlib."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # of each benchmark: `tests`, and `ptrain` of this tree
RESULTS = ROOT / "benchmarks" / "results"
_PACKAGES = ("torch", "numpy", "PyYAML", "rich")


def header(title: str, command: Sequence[str]) -> str:
    """Return the title and a table of the conditions of the figures."""
    rows = {
        "date": time.strftime("%Y-%m-%d %H:%M %Z"),
        "command": f"`{shlex.join(command)}`",
        "machine": f"{processor()}, {cores()} cores, {memory()}",
        "accelerator": accelerator(),
        "system": platform.platform(),
        "load before": " ".join(f"{load:.2f}" for load in os.getloadavg()),
        "Python": platform.python_version(),
        "packages": ", ".join(f"{name} {version(name)}" for name in _PACKAGES),
        "commit": commit(),
    }
    table = [f"| {name} | {value} |" for name, value in rows.items()]
    return "\n".join([f"# {title}", "", "| | |", "|---|---|", *table, ""])


def cores() -> int:
    """Return the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def processor() -> str:
    """Return the CPU's name if the system reports it."""
    information = Path("/proc/cpuinfo")
    if information.exists():
        for line in information.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def memory() -> str:
    """Return the physical memory."""
    pages, page = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return f"{pages * page / 2**30:.0f} GiB"


def accelerator() -> str:
    """Return the GPUs with their drivers, or none."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    return (_output(query) or "none").replace("\n", "; ")


def version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def commit(root: Path = ROOT) -> str:
    """Return the commit, with a + if files differ from it."""
    return _output(["git", "-C", str(root), "describe", "--always", "--dirty=+"]) or "unknown"


def hardware() -> str:
    """Return the hardware part of file names: `cpu2` or the GPU's short name."""
    gpu = accelerator()
    return f"cpu{cores()}" if gpu == "none" else gpu.split(",")[0].split()[-1].lower()


def conclude(
    theme: str,
    lines: Sequence[str],
    *,
    failed: Sequence[str],
    not_covered: str,
    is_saved: bool,
    unproven: Sequence[str] = (),
) -> int:
    """Print a result and its verdict, save it on request, and return the exit code. `failed` names
    violations of the claim with their figures; `unproven` figures without a measurement."""
    text = "\n".join([*lines, "", verdict(failed, unproven), "", f"Not covered: {not_covered}"])
    print(text)
    if is_saved:
        print(f"\nwritten: {save(theme, text).relative_to(ROOT)}")
    return 1 if failed or unproven else 0


def verdict(failed: Sequence[str], unproven: Sequence[str] = ()) -> str:
    """Return the verdict: holds, fails with the reasons, or unproven."""
    if not failed and not unproven:
        return "Verdict: holds."
    rows = [f"- {each}" for each in failed] + [f"- unproven: {each}" for each in unproven]
    return "\n".join([f"Verdict: {'fails' if failed else 'unproven'}.", "", *rows])


def save(theme: str, text: str) -> Path:
    """Write `results/<theme>_<hardware>_<date>.md`."""
    path = fresh(result_path(theme, "md"))
    with path.open("x", encoding="utf-8") as file:
        file.write(text.rstrip() + "\n")
    return path


def fresh(path: Path) -> Path:
    """Return the path, or, for a second result of a day, one with the time: no result is
    overwritten."""
    return path.with_stem(f"{path.stem}_{time.strftime('%H%M')}") if path.exists() else path


def result_path(theme: str, suffix: str) -> Path:
    """Return `results/<theme>_<hardware>_<date>.<suffix>` for a page or its data."""
    RESULTS.mkdir(exist_ok=True)
    return RESULTS / f"{theme}_{hardware()}_{time.strftime('%Y-%m-%d')}.{suffix}"


def environment(root: Path = ROOT) -> dict[str, str]:
    """Return the environment of a child process: the package of this repository, or of another
    tree; one thread, byte code stored as for a user."""
    kept = {name: text for name, text in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return kept | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}


def this_command() -> list[str]:
    """Return how the benchmark was called, relative to the repository; of other folders only the
    names."""
    script = Path(sys.argv[0]).resolve()
    name = script.relative_to(ROOT) if script.is_relative_to(ROOT) else script.name
    told = [Path(each).name if Path(each).is_absolute() else each for each in sys.argv[1:]]
    return ["python", str(name), *told]


def _output(command: Sequence[str]) -> str:
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return found.stdout.strip()
