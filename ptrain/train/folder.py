"""The run folder: everything needed to rerun, resume and read a training. Torch-free.

runs/<time>-<name>/ spec.resolved.yaml env.json command.txt metrics.jsonl summary.json
                    logs/rank0.log … trace/ checkpoints/step-00000050/
runs/latest         a link to the newest

Folders are 0700, files 0600. A JSON file appears whole or not at all.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import yaml

from ptrain.errors import PtrainError
from ptrain.report.record import versions
from ptrain.spec.spec import Spec
from ptrain.train import environment

ROOT = Path("runs")


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Paths inside one run."""

    path: Path

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    @property
    def trace(self) -> Path:
        return self.path / "trace"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def log(self, rank: int) -> Path:
        return self.path / "logs" / f"rank{rank}.log"

    def error(self, rank: int) -> Path:
        """Written by torch's @record when the rank raises."""
        return self.path / "logs" / f"rank{rank}.error.json"


def open_run(
    spec: Spec, *, given: Path | None, resuming: bool, command: str, root: Path = ROOT
) -> RunFolder:
    """Make the folder and write what is known before the first step.

    Raises PtrainError where the folder cannot be written, or is used and not resumed.
    """
    try:
        path = _given(given, resuming) if given else _fresh(root, spec.name)
        folder = RunFolder(path)
        for part in ("logs", "checkpoints"):
            (path / part).mkdir(mode=0o700, exist_ok=True)
        folder.summary.unlink(missing_ok=True)  # of the run that is continued
        write_text(path / "spec.resolved.yaml", _resolved(spec))
        write_text(path / "command.txt", command + "\n")
        write_json(path / "env.json", _environment(spec.world_size))
        if path.parent == root.resolve():
            _point_latest_at(path)
    except OSError as error:
        raise PtrainError(
            f"run folder {given or root}: cannot write: {error.strerror or error}\n"
            "  remedy: choose another with --run-dir DIR, or change into a folder you may write"
        ) from error
    return folder


def write_text(path: Path, text: str) -> None:
    """Whole or not at all: a temporary neighbour, flushed to the disk, then renamed."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def write_json(path: Path, value: object) -> None:
    write_text(path, json.dumps(value, indent=1) + "\n")


def shown(path: Path) -> str:
    """As the user would type it: `runs/latest` where that is it, else relative if below here."""
    latest = ROOT / "latest"
    if latest.is_symlink() and latest.resolve() == path.resolve():
        return str(latest)
    here = Path.cwd()
    absolute = path.absolute()
    return str(absolute.relative_to(here)) if absolute.is_relative_to(here) else str(path)


def _given(path: Path, resuming: bool) -> Path:
    if path.is_symlink():
        raise PtrainError(f"run folder {path}: is a link; give the folder itself")
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not resuming and any(path.iterdir()):
        raise PtrainError(
            f"run folder {path}: is not empty\n"
            "  remedy: choose another, or continue this run with --resume auto"
        )
    return path.resolve()


def _fresh(root: Path, name: str) -> Path:
    """`<time>-<name>`; a number follows where another job took the name in the same second."""
    if root.is_symlink():
        raise PtrainError(f"{root}: is a link; give a folder with --run-dir DIR")
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    slug = re.sub(r"[^A-Za-z0-9._-]+", "-", name)[:64]
    stem = f"{time.strftime('%Y%m%d-%H%M%S')}-{slug}"
    for attempt in range(1, 1000):
        path = root / (stem if attempt == 1 else f"{stem}-{attempt}")
        try:
            path.mkdir(mode=0o700)
        except FileExistsError:
            continue
        return path.resolve()
    raise PtrainError(f"{root}: a thousand runs named {stem}")


def _point_latest_at(path: Path) -> None:
    temporary = path.parent / f".latest.{os.getpid()}"
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(path.name)
    temporary.replace(path.parent / "latest")


def _resolved(spec: Spec) -> str:
    return yaml.safe_dump(dict(spec.resolved), sort_keys=False, allow_unicode=True)


def _environment(num_ranks: int) -> Mapping[str, object]:
    """Versions, host and the allow-listed variables."""
    return {
        "python": sys.version.split()[0],
        "versions": {**versions(), "numpy": metadata.version("numpy")},
        "host": platform.node(),
        "platform": platform.platform(),
        "cores": environment.cores(),
        "threads_per_rank": environment.threads_per_rank(num_ranks),
        "git": _revision(),
        "environment": environment.recorded(),
    }


def _revision() -> str | None:
    """The commit of the folder that the command runs in, `+` where files differ from it."""
    try:
        found = subprocess.run(
            ["git", "describe", "--always", "--abbrev=40", "--dirty=+", "--exclude=*"],
            capture_output=True,
            text=True,
            timeout=5,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip()
