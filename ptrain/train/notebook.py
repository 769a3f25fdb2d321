"""Training as a function call, for notebooks and scripts: `ptrain.run(spec, nproc=2)`.

The job is `ptrain train` in another process, so it leaves no process group and no signal handler in
this one. This module imports no torch.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ptrain.cost import Column
from ptrain.derivation.estimate import derive
from ptrain.errors import DoesNotFit, PtrainError, RankFailed, TrainingStopped, input_error
from ptrain.files import temporary_folder
from ptrain.installed import require_torch
from ptrain.report.recorded import decode_record
from ptrain.report.summary import training_summary
from ptrain.selection.recompute import resolve_auto
from ptrain.spec.load import load
from ptrain.spec.model import ModelShape
from ptrain.spec.spec import Spec
from ptrain.train import environment
from ptrain.train.heading import require_ranks_fit_host
from ptrain.wording import NotebookOutput, data_frame

_ERRORS = {error.exit_code: error for error in (PtrainError, RankFailed, TrainingStopped)}
_INTERRUPTED = (130, 143)


@dataclass(frozen=True, slots=True)
class Run(NotebookOutput):
    """A finished training: its folder and its result record."""

    folder: Path
    record: dict[str, Any]

    @property
    def metrics(self) -> list[dict[str, float]]:
        """One mapping per row of metrics.jsonl: step, loss, lr, seconds, …"""
        lines = (self.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines]

    def to_pandas(self) -> Any:
        """Return the rows of metrics.jsonl as a pandas DataFrame.

        Raises:
            SpecError: pandas is not installed.
        """
        return data_frame(self.metrics, "Run.to_pandas")

    @property
    def heading(self) -> str:
        """The job: strategy, model, ranks, batch."""
        return str(self.record["run"]["heading"])

    @property
    def preflight(self) -> str:
        """The predicted peak and the memory of a device; "" for a record without them."""
        return str(self.record["run"].get("preflight", ""))

    @property
    def holds(self) -> bool:
        """True if the verdict holds."""
        return bool(self.record["verdict"] == "holds")

    def __str__(self) -> str:
        account = decode_record(self.record)
        if (measured := account.estimates.get(Column.MEASURED)) is None:
            return "no verdict: a run needs at least three steps"
        return training_summary(
            account.predicted,
            measured,
            account.checks,
            torch=self.record["versions"]["torch"],
            wire=account.wire,
            step_seconds=account.step_seconds,
        )


def run(
    spec: str | Path | Mapping[str, object] | Spec,
    overrides: Sequence[str] = (),
    *,
    nproc: int | None = None,
    run_dir: Path | None = None,
    allow_import: bool = False,
) -> Run:
    """Train a spec in subprocesses of this machine and return the result.

    It works in scripts and notebooks. Under a launcher such as torchrun, use `ptrain train`
    instead.

    Args:
        spec: A name, a path, a mapping or a loaded spec.
        overrides: Overrides as on the command line.
        nproc: The number of ranks. Default: the size of the mesh.
        run_dir: The folder of the run. Default: a new folder below `runs/`.
        allow_import: Allow the spec to import your code.

    Returns:
        The run: its folder, its record and its metrics. Printed, it is the table of predicted and
        measured figures.

    Raises:
        SpecError: The spec is wrong, or this torch version is not supported.
        DoesNotFit: The predicted peak exceeds the memory of a device.
        RankFailed: A rank raised an error, died or hung.
        TrainingStopped: A check stopped the training.

    Example:
        >>> import ptrain
        >>> result = ptrain.run("zero3", ["train.steps=4"], nproc=2)  # doctest: +SKIP
        >>> result.holds  # doctest: +SKIP
        True
    """
    require_torch()
    _require_no_launcher()
    resolved = load_trainable(spec, overrides, nproc=nproc).resolved
    with temporary_folder() as folder:
        file = folder / "spec.yaml"
        # The resolved spec: `spec` may be a mapping or object, which no command line can pass.
        file.write_text(yaml.safe_dump(dict(resolved), sort_keys=False), encoding="utf-8")
        return _run_training(file, run_dir=run_dir, allow_import=allow_import)


def load_trainable(
    source: str | Path | Mapping[str, object] | Spec,
    overrides: Sequence[str] = (),
    *,
    nproc: int | None = None,
    words: str = "",
) -> Spec:
    """Load a spec whose ranks fit into this host's memory.

    Args:
        source: A name, a path, a mapping or a loaded spec.
        overrides: Overrides as on the command line.
        nproc: The number of ranks. Default: the size of the mesh.
        words: The spec and overrides as typed, for messages.

    Raises:
        SpecError: The spec is wrong, or its ranks need more memory than this host has.
    """
    written = source.resolved if isinstance(source, Spec) else source
    spec = resolve_auto(load(written, overrides, world_size=nproc))
    if isinstance(spec.model, ModelShape):  # any other model's sizes are known to its code only
        name = str(source) if isinstance(source, str | Path) else spec.name
        words = words or shlex.join([name, *overrides])
        require_ranks_fit_host(spec, derive(spec).exact, words)
    return spec


def _require_no_launcher() -> None:
    """Raise SpecError under a launcher, where each rank would start a training."""
    if (started := environment.world_size()) > 1:
        raise input_error(
            "WORLD_SIZE",
            f"a launcher started {started} ranks, but this training starts its own ranks",
            "Start it without a launcher. Under a launcher, use `ptrain train SPEC --strict`.",
        )


def run_command(*words: str) -> subprocess.CompletedProcess[str]:
    """Run a command of ptrain in another process and return its output."""
    return subprocess.run(
        [sys.executable, "-P", "-m", "ptrain", *words],
        env=environment.ptrain_environment(),
        # A notebook's kernel has no terminal, and a script's input is not for the command.
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )


def _run_training(file: Path, *, run_dir: Path | None, allow_import: bool) -> Run:
    """Run `ptrain train` on a file. Raises the error of its exit code."""
    words = ["train", str(file), "--json", "--quiet"]
    words += ["--run-dir", str(run_dir)] if run_dir else []
    words += ["--allow-import"] if allow_import else []
    ended = run_command(*words)
    if ended.returncode in _INTERRUPTED:
        raise KeyboardInterrupt
    if ended.returncode:
        raise _error_of_code(ended.returncode, ended.stderr.strip())
    record: dict[str, Any] = json.loads(ended.stdout)
    return Run(Path(record["run"]["folder"]), record)


def _error_of_code(code: int, message: str) -> PtrainError:
    """Return the error of an exit code."""
    if "does not fit" in message:  # DoesNotFit shares its exit code with PtrainError
        return DoesNotFit(message)
    return _ERRORS.get(code, RankFailed)(message or f"the training ended with exit code {code}")
