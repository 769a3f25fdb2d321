"""The command `ptrain checkpoints RUN`: list the checkpoints of a run, and verify their files.

The sizes and digests are those of each checkpoint's manifest. This module imports no torch.
"""

from __future__ import annotations

from argparse import Namespace
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from ptrain.cli.arguments import print_json
from ptrain.errors import PtrainError
from ptrain.report.screen import command_line, next_line, print_screen
from ptrain.report.table import Importance, TableColumn, name_column, render_table, text_or_dash
from ptrain.train import manifest
from ptrain.train.folder import display_path, require_run
from ptrain.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedStep:
    """A checkpoint of a run.

    Attributes:
        step: The number of finished steps.
        path: The folder.
        files: The number of its files.
        bytes: The size of its files on disk.
        time: The time of the last change of its manifest, in UTC and as ISO 8601; None without
            one.
        tensor_bytes: The bytes of the tensors in it. None: unknown, in old manifests.
        seconds: The time of the save. None: unknown, in old manifests.
        state: "complete" (sizes compared), "sound" (digests compared) or "damaged".
        fault: The first fault of a damaged one, else "".
    """

    step: int
    path: str
    files: int
    bytes: int
    time: str | None
    tensor_bytes: int | None
    seconds: float | None
    state: str
    fault: str


def run(args: Namespace) -> int:
    """Print the checkpoints; return 1 if `--verify` finds a damaged one, else 0."""
    folder = require_run(Path(args.run))
    paths = manifest.complete_checkpoints(folder.checkpoints)
    examined = (_examine_checkpoint(path, verifies=args.verify) for path in paths)
    rows = [row for row in examined if row]
    unfinished = [path.name for path in manifest.incomplete_checkpoints(folder.checkpoints)]
    if args.json:
        print_json(
            {
                "run": str(folder.path),
                "checkpoints": [asdict(row) for row in rows],
                "unfinished": unfinished,
            }
        )
    else:
        name = display_path(folder.path)
        lines = [
            _checkpoint_table(rows),
            *(f"step {row.step}: {row.fault}" for row in rows if row.fault),
        ]
        if unfinished:
            lines.append(
                f"unfinished saves or removals: {', '.join(unfinished)}; the next training in "
                "this folder deletes them."
            )
        resume = command_line("train", [display_path(folder.resolved), "--resume", name])
        continues = not folder.summary.exists() and any(not row.fault for row in rows)
        print_screen(
            *(lines if rows or unfinished else [f"{name} has no checkpoint."]),
            *(["", next_line(resume)] if continues else []),
        )
    return int(args.verify and any(row.fault for row in rows))


def _examine_checkpoint(path: Path, *, verifies: bool) -> SavedStep | None:
    """Return the row of a checkpoint, None if a training has removed it meanwhile."""
    stats = {}
    with suppress(OSError):  # of a folder that cannot be read, which `find_fault` reports
        stats = {file.name: file.stat() for file in path.iterdir() if file.is_file()}
    own = stats.get(manifest.NAME)
    fault = manifest.find_fault(path, hashes=verifies)
    if not path.exists():
        return None
    stored = None
    with suppress(PtrainError):  # `fault` has the reason
        stored = manifest.read(path)
    return SavedStep(
        step=manifest.step_in_name(path),
        path=str(path),
        files=len(stats),
        bytes=sum(stat.st_size for stat in stats.values()),
        time=own and datetime.fromtimestamp(own.st_mtime, UTC).isoformat(timespec="seconds"),
        tensor_bytes=stored.tensor_bytes if stored else None,
        seconds=stored.seconds if stored else None,
        state="damaged" if fault else "sound" if verifies else "complete",
        fault=fault,
    )


def _checkpoint_table(rows: list[SavedStep]) -> str:
    """Return the table of the checkpoints, newest first."""
    times = [row.time and datetime.fromisoformat(row.time).astimezone() for row in rows]
    tensors = [text_or_dash(row.tensor_bytes, format_bytes) for row in rows]
    seconds = [text_or_dash(row.seconds, "{:.2f}".format) for row in rows]
    saved = [f"{time:%Y-%m-%d %H:%M:%S}" if time else "–" for time in times]
    return render_table(
        [
            name_column("step", [str(row.step) for row in rows]),
            TableColumn("saved", cells=saved),
            TableColumn("files", Importance.DETAIL, [str(row.files) for row in rows]),
            TableColumn("size", cells=[format_bytes(row.bytes) for row in rows]),
            TableColumn("tensors", Importance.DETAIL, tensors),
            TableColumn("seconds", Importance.DETAIL, seconds),
            TableColumn("state", Importance.RESULT, [row.state for row in rows], left=True),
        ]
    )
