"""The run folder: its layout and lock, and the checkpoints that a training may resume from.

runs/<time>-<name>/ spec.resolved.yaml env.json command.txt metrics.jsonl summary.json
                    failures.jsonl logs/ trace/ routing/ trackers/ checkpoints/step-00000050/
runs/latest         a link to the newest run that has begun to train

Folders have mode 0700, files 0600. A JSON file is written atomically.

One training at a time writes into a folder. The kernel releases the lock when the last process that
holds it ends, however it ends. The launcher passes its lock to the ranks, so the folder stays
locked as long as one of them runs.

`--resume PATH|auto`: the parent rejects a checkpoint for all reasons that can be seen without
starting a rank. This module imports no torch.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import platform
import re
import shutil
import stat
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path

import yaml

from ptrain.errors import PtrainError, SpecError, input_error
from ptrain.files import remove_unfinished, write_bytes, write_json, write_text
from ptrain.installed import versions
from ptrain.processor import cores
from ptrain.spec.spec import Spec
from ptrain.spec.text import read_bytes
from ptrain.train import environment, manifest
from ptrain.train.manifest import Manifest
from ptrain.train.options import Options

LOCK_NAME = ".lock"
# Errors of file systems without locks, where a second training cannot be detected.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


@dataclass(slots=True)
class Lock:
    """The lock of a run folder. `descriptor` stays open until the release, which sets it to -1."""

    file: Path
    descriptor: int

    def release(self) -> None:
        """Release the lock and remove its file. May be called again."""
        if self.descriptor < 0:
            return
        with suppress(OSError):
            # Removed while locked: after the release, the file may belong to another training.
            if _is_same_file(self.file, self.descriptor):
                self.file.unlink()
        os.close(self.descriptor)
        self.descriptor = -1


def take_lock(folder: Path) -> Lock:
    """Take the lock of a folder.

    Raises:
        SpecError: Another training holds it. The message names its process.
    """
    file = folder / LOCK_NAME
    while True:
        # O_NOFOLLOW: through a link, the truncation below would destroy another file.
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 256, 0).decode(errors="replace").strip()
            os.close(descriptor)
            raise input_error(
                f"--run-dir {folder}",
                f"another training uses this folder: {holder or 'unknown process'}",
                "Wait until it ends, stop it, or use another folder.",
            ) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                os.close(descriptor)
                raise
        if _is_same_file(file, descriptor):  # else its holder removed it between open and flock
            break
        os.close(descriptor)
    # Only after locking: before, the text names the process that holds the lock.
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"process {os.getpid()} on {platform.node()}\n".encode(), 0)
    return Lock(file, descriptor)


def require_free(folder: Path) -> None:
    """Raise SpecError if a training holds the lock of a folder. Creates nothing."""
    if (folder / LOCK_NAME).exists():
        take_lock(folder).release()


def _is_same_file(file: Path, descriptor: int) -> bool:
    """Return True if a path leads to the open file."""
    try:
        return os.path.samestat(os.stat(file), os.fstat(descriptor))
    except OSError:
        return False


ROOT = Path("runs")
_MOST_RECORD = 16 * 2**20  # bytes of env.json, which names the checkpoints that existed
_PARTS = ("logs", "checkpoints", "trace", "routing", "trackers")
_ELSEWHERE = "Use another folder with `--run-dir DIR`, or change to a writable folder."


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The paths inside a run folder."""

    path: Path

    @property
    def resolved(self) -> Path:
        """The resolved spec, which continues the run under `ptrain train`."""
        return self.path / "spec.resolved.yaml"

    def identity(self, tracker: str) -> Path:
        """Return the file with the id that a tracker gave the run."""
        return self.path / "trackers" / tracker

    @property
    def metrics(self) -> Path:
        """The figures of each step, as JSON lines."""
        return self.path / "metrics.jsonl"

    @property
    def summary(self) -> Path:
        """The result record of a finished run."""
        return self.path / "summary.json"

    def routing(self, step: int) -> Path:
        """Return the file of a step's routing counts, which `routing` of a spec reads.

        Steps count from 1.
        """
        return self.path / "routing" / f"step-{step:08d}.json"

    @property
    def trace(self) -> Path:
        """The folder of the profiler's traces."""
        return self.path / "trace"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def log(self, rank: int) -> Path:
        return self.path / "logs" / f"rank{rank}.log"

    @property
    def failures(self) -> Path:
        return self.path / "failures.jsonl"

    def error(self, rank: int) -> Path:
        """Return the file to which torch's @record writes the exception of a rank."""
        return self.path / "logs" / f"rank{rank}.error.json"

    def memory_failure(self, rank: int) -> Path:
        """Return the record of a rank that ran out of memory."""
        return self.path / "logs" / f"rank{rank}.memory.json"

    def memory_failures(self) -> list[Path]:
        """Return the records of all ranks that ran out of memory."""
        return sorted(self.path.glob("logs/rank*.memory.json"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A folder that was opened for a run, and its content before.

    With it, a run that is rejected before its first step leaves no trace.

    Attributes:
        folder: The run folder.
        lock: The lock, which keeps other trainings out until it is released.
        folders: The folders that were created, innermost first.
        entries: The files and folders that existed.
        texts: The contents of existing files that are overwritten.
        latest: The target of `runs/latest`. None: there was no link.
    """

    folder: RunFolder
    lock: Lock
    folders: tuple[Path, ...]
    entries: frozenset[Path]
    texts: Mapping[Path, bytes]
    latest: str | None

    def withdraw(self) -> None:
        """Restore the folder unless a step was written, and release the lock last."""
        if _read_content(self.folder.metrics) == self.texts.get(self.folder.metrics, b""):
            self._restore_content()
        self.lock.release()
        # After the release, which removes the lock file from the folder.
        for folder in self.folders:
            with suppress(OSError):  # the folder is not empty
                folder.rmdir()

    def _restore_content(self) -> None:
        """Restore `latest`, remove new entries, and restore overwritten files."""
        path = self.folder.path
        if read_latest(path.parent) == path.name:
            _point_latest(path.parent, self.latest)
        for entry in _list_entries(path) - self.entries:
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry, ignore_errors=True)
            else:
                entry.unlink(missing_ok=True)
        for file, text in self.texts.items():
            if _read_content(file) != text:
                write_bytes(file, text)


def open_run(spec: Spec, *, given: Path | None, resuming: bool, command: str) -> Claim:
    """Create a run folder and write the files that are known before the first step.

    Args:
        spec: The spec.
        given: The folder of `--run-dir`. None: a new folder below `runs/`.
        resuming: True if the folder may contain a run.
        command: The command line, for command.txt.

    Raises:
        SpecError: The folder cannot be written, is not empty and not resumed, or another training
            holds its lock.
    """
    wanted = given or ROOT
    new_folders = [folder.absolute() for folder in (wanted, *wanted.parents) if not folder.exists()]
    claim = None
    try:
        path = _open_given(wanted, resuming) if given else _create_folder(ROOT, spec.name)
        claim = _record_claim(path, new_folders if given else [path, *new_folders], take_lock(path))
        _write_first_files(claim.folder, spec, command)
    except OSError as error:
        if claim:
            with suppress(OSError):  # report the first error
                claim.withdraw()
        raise input_error(
            f"run folder {wanted}", f"is not writable: {error.strerror or error}", _ELSEWHERE
        ) from error
    return claim


def require_run(path: Path) -> RunFolder:
    """Return the folder of a run.

    Raises:
        SpecError: The path is no run folder.
    """
    folder = RunFolder(path)
    if not os.path.isfile(folder.resolved):  # nor of a name that no file can have
        raise input_error(
            "RUN",
            f"{display_path(path)} is not a run folder: it has no {folder.resolved.name}",
            "Use a run folder, such as `runs/latest`.",
        )
    return folder


def mark_as_latest(folder: RunFolder, root: Path = ROOT) -> None:
    """Point `runs/latest` to this run, whose first step is next, if it is below `runs/`."""
    if folder.path.parent == root.resolve():
        _point_latest(folder.path.parent, folder.path.name)


def find_run_of_agent(agent: str) -> Path | None:
    """Return the newest run below `runs/` that this torch agent started, None without one."""
    runs = sorted((file.parent for file in ROOT.glob("*/env.json")), reverse=True)
    owned = (run for run in runs if not run.is_symlink() and is_run_of_agent(run, agent))
    return next(owned, None)


def is_run_of_agent(run: Path, agent: str) -> bool:
    """Return True if this torch agent started the run."""
    return bool(agent) and _read_environment(run).get("agent") == agent


def attempt_checkpoints(folder: RunFolder) -> list[Path]:
    """Return the checkpoints that the attempts of this run have written, newest first.

    Checkpoints that existed when the run began are left out.
    """
    before = _read_environment(folder.path).get("checkpoints")
    names = before if isinstance(before, list) else []
    return [
        path for path in manifest.complete_checkpoints(folder.checkpoints) if path.name not in names
    ]


def read_latest(root: Path) -> str | None:
    """Return the target of the link `latest`, None without one."""
    link = root / "latest"
    return os.readlink(link) if link.is_symlink() else None


def display_path(path: Path) -> str:
    """Return a path as a user would type it.

    It is `runs/latest` if the link leads there, else relative if it is below the current folder.
    """
    latest = ROOT / "latest"
    if latest.is_symlink() and latest.resolve() == path.resolve():
        return str(latest)
    here = Path.cwd()
    absolute = path.absolute()
    return str(absolute.relative_to(here)) if absolute.is_relative_to(here) else str(path)


def _write_first_files(folder: RunFolder, spec: Spec, command: str) -> None:
    """Write the files that are known before the first step."""
    path = folder.path
    remove_unfinished(path)
    for part in ("logs", "checkpoints"):
        (path / part).mkdir(mode=0o700, exist_ok=True)
    folder.summary.unlink(missing_ok=True)  # from an earlier attempt of this run
    recorded = {
        **_describe_environment(spec.world_size),
        "checkpoints": _checkpoints_before(folder),
    }
    write_text(
        folder.resolved, yaml.safe_dump(dict(spec.resolved), sort_keys=False, allow_unicode=True)
    )
    write_text(path / "command.txt", command + "\n")
    write_json(path / "env.json", recorded)


def _checkpoints_before(folder: RunFolder) -> object:
    """Return the names of the checkpoints that existed before the run's first attempt."""
    before = _read_environment(folder.path)
    if is_run_of_agent(folder.path, environment.agent_id()):
        return before.get("checkpoints", [])
    return [path.name for path in manifest.complete_checkpoints(folder.checkpoints)]


def _read_environment(run: Path) -> dict[str, object]:
    """Return the content of a run's env.json, {} without a readable one."""
    with suppress(OSError, ValueError):
        content = json.loads(read_bytes(run / "env.json", _MOST_RECORD))
        return content if isinstance(content, dict) else {}
    return {}


def _open_given(path: Path, resuming: bool) -> Path:
    """Return the folder of `--run-dir`, created if missing. Raises SpecError if it is unusable."""
    place = f"--run-dir {path}"
    if path.is_symlink():
        raise input_error(place, "is a symbolic link", "Use the folder itself.")
    if path.exists() and not path.is_dir():
        raise input_error(place, "is a file, not a folder", "Use a new or an empty folder.")
    if path.exists():
        _require_own(path)
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    require_free(path)
    if not resuming and any(entry.name != LOCK_NAME for entry in path.iterdir()):
        raise input_error(
            place,
            "is not empty",
            "Use another folder, or add `--resume auto` to continue this run.",
        )
    return path.resolve()


def _require_own(path: Path) -> None:
    """Raise SpecError if a run folder or a part of it is a symbolic link, or another user's, who
    may replace a file in it by a link."""
    for folder in (path, *(path / part for part in _PARTS)):
        with suppress(FileNotFoundError):
            status = folder.lstat()
            finding = f"{folder.name} is a symbolic link" if stat.S_ISLNK(status.st_mode) else ""
            if status.st_uid not in (os.geteuid(), 0):
                finding = f"{folder.name} belongs to another user (uid {status.st_uid})"
            if finding:
                remedy = "Use a new folder, and `--resume PATH` to continue the run in this one."
                raise input_error(f"--run-dir {path}", finding, remedy)


def _create_folder(root: Path, name: str) -> Path:
    """Create the folder `<time>-<name>`, with a number if the name exists."""
    if root.is_symlink():
        raise input_error(f"run folder {root}", "is a symbolic link", _ELSEWHERE)
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    slug = re.sub(r"[^A-Za-z0-9._-]+", "-", name)[:64]  # file names have at most 255 bytes
    stem = f"{time.strftime('%Y%m%d-%H%M%S')}-{slug}"
    for attempt in range(1, 1000):
        path = root / (stem if attempt == 1 else f"{stem}-{attempt}")
        try:
            path.mkdir(mode=0o700)
        except FileExistsError:
            continue
        return path.resolve()
    raise input_error(f"run folder {root}", f"contains a thousand runs named {stem}", _ELSEWHERE)


def _record_claim(path: Path, new_folders: Sequence[Path], taken: Lock) -> Claim:
    """Record the content of a folder before the run writes into it."""
    folder = RunFolder(path)
    written = ("spec.resolved.yaml", "command.txt", "env.json")
    files = (*(path / name for name in written), folder.summary, folder.metrics)
    return Claim(
        folder=folder,
        lock=taken,
        folders=tuple(new_folders),
        entries=frozenset(_list_entries(path)),
        texts={file: _read_content(file) for file in files if file.exists()},
        latest=read_latest(path.parent),
    )


def _list_entries(path: Path) -> set[Path]:
    """Return the entries of the folder and of its logs, where a run creates files before step 1."""
    return {entry for part in (path, path / "logs") if part.is_dir() for entry in part.iterdir()}


def _read_content(file: Path) -> bytes:
    """Return the content of a regular file, empty without one."""
    return file.read_bytes() if file.is_file() and not file.is_symlink() else b""


def _point_latest(root: Path, name: str | None) -> None:
    """Replace the link `latest` atomically. None: remove it."""
    if name is None:
        (root / "latest").unlink(missing_ok=True)
        return
    temporary = root / f".latest.{os.getpid()}"
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(name)
    try:
        temporary.replace(root / "latest")
    finally:
        temporary.unlink(missing_ok=True)  # if a folder has this name


def _describe_environment(num_ranks: int) -> Mapping[str, object]:
    """Return versions, host and allow-listed variables for env.json."""
    return {
        "python": sys.version.split()[0],
        "versions": {**versions(), "numpy": metadata.version("numpy")},
        "host": platform.node(),
        "platform": platform.platform(),
        "cores": cores(),
        "threads_per_rank": environment.threads_per_rank(num_ranks),
        "git": environment.find_commit(Path.cwd()),
        "agent": environment.agent_id(),
        "environment": environment.recorded_variables(),
    }


AUTO = "auto"


def resume_candidates(source: str, own: RunFolder) -> list[Path]:
    """Return the checkpoints to resume from, in the order in which they are tried (newest first).

    Args:
        source: `auto`, or the path of a checkpoint or run folder. `auto` only uses this run folder:
            other runs with its name may have another dataset, seed or learning rate.
        own: This run folder.
    """
    return (
        manifest.complete_checkpoints(own.checkpoints)
        if source == AUTO
        else _find_checkpoints(Path(source))
    )


def restart_source(before: str | None, own: RunFolder) -> str:
    """Return the `--resume` of restarted ranks.

    Args:
        before: The value of the first attempt.
        own: The run folder.

    Returns:
        `auto` once the run has written checkpoints, else `before`; `auto` if that is None.
    """
    return AUTO if attempt_checkpoints(own) else before or AUTO


def is_done(spec: Spec, own: RunFolder) -> bool:
    """Return True if the run has saved its last step."""
    return any(manifest.step_in_name(path) >= spec.train.steps for path in attempt_checkpoints(own))


def apply_agent_restart(options: Options) -> Options:
    """Return the options of a rank that a torch agent may have restarted.

    A restarted rank continues the run that the attempt before began. At the first attempt, the
    options are returned unchanged.

    TORCHELASTIC_RESTART_COUNT is not used: an agent does not count a restart of its ranks that was
    caused by a failure on another node.
    """
    agent = environment.agent_id()
    run = options.run_dir or find_run_of_agent(agent)
    if run is None or not is_run_of_agent(run, agent):
        return options
    return replace(options, run_dir=run, resume=restart_source(options.resume, RunFolder(run)))


def require_resumable(spec: Spec, options: Options) -> None:
    """Raise SpecError if manifests and file sizes show that a training cannot resume."""
    source, own = options.resume, RunFolder(options.run_dir or ROOT / "new")
    complaints: list[str] = []
    for path in resume_candidates(source, own) if source else ():
        try:
            checkpoint = manifest.read(path)
        except PtrainError as error:
            complaints.append(str(error))
            continue
        if damaged := manifest.find_wrong_sizes(path, checkpoint):
            complaints.append(f"checkpoint {display_path(path)}: {damaged[0]}")
            continue
        require_compatible(spec, source or "", path, checkpoint)
        return
    if source and (source != AUTO or complaints):
        raise no_checkpoint_error(source, complaints)


def require_compatible(spec: Spec, source: str, path: Path, checkpoint: Manifest) -> None:
    """Reject a checkpoint of a finished training or of another model.

    Args:
        spec: The spec of the training.
        source: The value of `--resume`.
        path: The checkpoint.
        checkpoint: Its manifest.

    Raises:
        SpecError: The training cannot continue from it.
    """
    if checkpoint.step >= spec.train.steps:
        raise input_error(
            _resume_option(source),
            f"already at step {checkpoint.step} of {spec.train.steps}",
            f"Set `train.steps` to more than {checkpoint.step}.",
        )
    if fault := manifest.model_fault(checkpoint.trained, spec):
        raise SpecError(fault._replace(source=f"checkpoint {display_path(path)}"))


def no_checkpoint_error(source: str, complaints: Sequence[str]) -> SpecError:
    """Return the error that no checkpoint exists, or that none is sound."""
    if not complaints:
        return input_error(
            _resume_option(source),
            "contains no checkpoint",
            "Train with `checkpoint.every=N` or `checkpoint.at_end=true`, or remove `--resume`.",
        )
    several = f"none of its {len(complaints)} checkpoints can be used"
    finding = several if len(complaints) > 1 else "its only checkpoint cannot be used"
    return input_error(
        _resume_option(source),
        f"{finding}: {'; '.join(complaints)}",
        "Continue from another checkpoint, or remove `--resume` to train from the start.",
    )


def _resume_option(source: str) -> str:
    """Return the option `--resume` as typed, for messages."""
    return f"--resume {source if source == AUTO else display_path(Path(source))}"


def _find_checkpoints(path: Path) -> list[Path]:
    """Return the checkpoints of a path, newest first.

    The path is a checkpoint, a run folder, or the folder `checkpoints/` of a run.
    """
    if (path / manifest.NAME).exists() or manifest.is_checkpoint_name(path.name):
        return [path]
    return manifest.complete_checkpoints(path / "checkpoints") or manifest.complete_checkpoints(
        path
    )
