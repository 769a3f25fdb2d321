"""Lay out a run folder, lock it, and find the checkpoints to resume from. Torch-free.

runs/<time>-<name>/ spec.resolved.yaml env.json command.txt metrics.jsonl summary.json
                    logs/rank0.log … trace/ routing/ trackers/ checkpoints/step-00000050/
runs/latest         a link to the newest run that began to train

Folders are 0700, files 0600. A JSON file appears complete or not at all.

One training at a time writes into a folder. The kernel releases the lock when the last process that
holds it ends, however it ends. The launcher passes its lock to the ranks, so no rank outlives it.

`--resume PATH|auto`: which checkpoints a training may continue from, and why a checkpoint is
rejected. The parent rejects here everything that can be seen without starting a rank.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import platform
import re
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path

import yaml

from ptrain.errors import PtrainError, SpecError, refused
from ptrain.installed import versions
from ptrain.processor import cores
from ptrain.spec.spec import Spec
from ptrain.train import environment, manifest
from ptrain.train.manifest import Manifest
from ptrain.train.options import Options

LOCK_NAME = ".lock"
# file systems that keep no locks, of which nobody can tell whether somebody else writes there
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


@dataclass(slots=True)
class Lock:
    """`descriptor` is held open for as long as the lock is; -1 once it is released."""

    file: Path
    descriptor: int

    def release(self) -> None:
        """Nothing is left of it. It may be released again."""
        if self.descriptor < 0:
            return
        with suppress(OSError):
            if _is(self.file, self.descriptor):
                self.file.unlink()
        os.close(self.descriptor)
        self.descriptor = -1


def take_lock(folder: Path) -> Lock:
    """Take the lock of `folder`. Raises SpecError where another training holds it, with its
    process."""
    file = folder / LOCK_NAME
    while True:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 256, 0).decode(errors="replace").strip()
            os.close(descriptor)
            raise refused(
                f"--run-dir {folder}",
                f"another training uses this folder: {holder or 'unknown process'}",
                "Wait until it ends, stop it, or use another folder.",
            ) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                os.close(descriptor)
                raise
        if _is(file, descriptor):  # not one that its holder has just taken away
            break
        os.close(descriptor)
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"process {os.getpid()} on {platform.node()}\n".encode(), 0)
    return Lock(file, descriptor)


def require_free(folder: Path) -> None:
    """Raises SpecError where a training holds the lock of `folder`; makes nothing."""
    if (folder / LOCK_NAME).exists():
        take_lock(folder).release()


def _is(file: Path, descriptor: int) -> bool:
    """Whether that is what the name leads to."""
    try:
        return os.path.samestat(os.stat(file), os.fstat(descriptor))
    except OSError:
        return False


ROOT = Path("runs")
_ELSEWHERE = "Use another folder with `--run-dir DIR`, or change to a writable folder."


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Paths inside one run."""

    path: Path

    @property
    def resolved(self) -> Path:
        return self.path / "spec.resolved.yaml"

    def identity(self, tracker: str) -> Path:
        """Where it has what a tracker calls the run."""
        return self.path / "trackers" / tracker

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    def routing(self, step: int) -> Path:
        """Where tokens went in a step, from 1: counts as a spec's `routing` takes them."""
        return self.path / "routing" / f"step-{step:08d}.json"

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A folder that was opened for a run, and what stood there before: a run that is refused before
    its first step leaves no trace. `folders` are those that were not there, innermost first.
    `lock` keeps other trainings out until it is released."""

    folder: RunFolder
    lock: Lock
    folders: tuple[Path, ...]
    entries: frozenset[Path]
    texts: Mapping[Path, bytes]
    latest: str | None

    def withdraw(self) -> None:
        """Unless a step was done, as it was before. The lock is released, the last of all: nobody
        else writes there until then."""
        if _content(self.folder.metrics) == self.texts.get(self.folder.metrics, b""):
            self._undo()
        self.lock.release()
        for folder in self.folders:
            with suppress(OSError):  # something is in it
                folder.rmdir()

    def _undo(self) -> None:
        path = self.folder.path
        if latest_of(path.parent) == path.name:
            _point_latest(path.parent, self.latest)
        for entry in _entries(path) - self.entries:
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry, ignore_errors=True)
            else:
                entry.unlink(missing_ok=True)
        for file, text in self.texts.items():
            if _content(file) != text:
                write_bytes(file, text)


def open_run(spec: Spec, *, given: Path | None, resuming: bool, command: str) -> Claim:
    """Make the folder and write what is known before the first step.

    Raises SpecError where the folder cannot be written, is used and not resumed, or another
    training writes there.
    """
    wanted = given or ROOT
    new_folders = [folder.absolute() for folder in (wanted, *wanted.parents) if not folder.exists()]
    claim = None
    try:
        path = _given(wanted, resuming) if given else _fresh(ROOT, spec.name)
        claim = _claim(path, new_folders if given else [path, *new_folders], take_lock(path))
        _fill(claim.folder, spec, command)
    except OSError as error:
        if claim:
            with suppress(OSError):
                claim.withdraw()
        raise refused(
            f"run folder {wanted}", f"is not writable: {error.strerror or error}", _ELSEWHERE
        ) from error
    return claim


def begin(folder: RunFolder, root: Path = ROOT) -> None:
    """The first step is next: `runs/latest` is this run."""
    if folder.path.parent == root.resolve():
        _point_latest(folder.path.parent, folder.path.name)


def run_of_agent(agent: str) -> Path | None:
    """The newest run below `ROOT` that this agent of torch has started, None without one."""
    runs = sorted((file.parent for file in ROOT.glob("*/env.json")), reverse=True)
    owned = (run for run in runs if not run.is_symlink() and is_of_agent(run, agent))
    return next(owned, None)


def is_of_agent(run: Path, agent: str) -> bool:
    """Return whether this agent of torch has started the run."""
    return bool(agent) and _recorded(run).get("agent") == agent


def saved_since(folder: RunFolder) -> list[Path]:
    """The checkpoints that the attempts at this run have written, newest first: not those that it
    found when it began."""
    before = _recorded(folder.path).get("checkpoints")
    names = before if isinstance(before, list) else []
    return [path for path in manifest.complete(folder.checkpoints) if path.name not in names]


def latest_of(root: Path) -> str | None:
    """Return what `latest` leads to, None where there is no such link."""
    link = root / "latest"
    return os.readlink(link) if link.is_symlink() else None


def write_text(path: Path, text: str) -> None:
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Whole or not at all: a temporary neighbour, flushed to the disk, then renamed."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def write_json(path: Path, value: object) -> None:
    write_text(path, json.dumps(value, indent=1) + "\n")


def shown(path: Path) -> str:
    """Return the path as the user would type it: `runs/latest` where that is it, else relative if
    below here."""
    latest = ROOT / "latest"
    if latest.is_symlink() and latest.resolve() == path.resolve():
        return str(latest)
    here = Path.cwd()
    absolute = path.absolute()
    return str(absolute.relative_to(here)) if absolute.is_relative_to(here) else str(path)


def _fill(folder: RunFolder, spec: Spec, command: str) -> None:
    path = folder.path
    for part in ("logs", "checkpoints"):
        (path / part).mkdir(mode=0o700, exist_ok=True)
    folder.summary.unlink(missing_ok=True)  # of the run that is continued
    recorded = {**_environment(spec.world_size), "checkpoints": _checkpoints_before(folder)}
    write_text(
        folder.resolved, yaml.safe_dump(dict(spec.resolved), sort_keys=False, allow_unicode=True)
    )
    write_text(path / "command.txt", command + "\n")
    write_json(path / "env.json", recorded)


def _checkpoints_before(folder: RunFolder) -> object:
    """The names of those that are there as the first of this run's attempts begins."""
    before = _recorded(folder.path)
    if is_of_agent(folder.path, environment.agent()):
        return before.get("checkpoints", [])
    return [path.name for path in manifest.complete(folder.checkpoints)]


def _recorded(run: Path) -> dict[str, object]:
    """What a run's env.json says; nothing where it is none."""
    with suppress(OSError, ValueError):
        content = json.loads((run / "env.json").read_text(encoding="utf-8"))
        return content if isinstance(content, dict) else {}
    return {}


def _given(path: Path, resuming: bool) -> Path:
    place = f"--run-dir {path}"
    if path.is_symlink():
        raise refused(place, "is a symbolic link", "Use the folder itself.")
    if path.exists() and not path.is_dir():
        raise refused(place, "is a file, not a folder", "Use a new or an empty folder.")
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    require_free(path)
    if not resuming and any(entry.name != LOCK_NAME for entry in path.iterdir()):
        raise refused(
            place,
            "is not empty",
            "Use another folder, or add `--resume auto` to continue this run.",
        )
    return path.resolve()


def _fresh(root: Path, name: str) -> Path:
    """`<time>-<name>`; a number follows where another job took the name in the same second."""
    if root.is_symlink():
        raise refused(f"run folder {root}", "is a symbolic link", _ELSEWHERE)
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
    raise refused(f"run folder {root}", f"contains a thousand runs named {stem}", _ELSEWHERE)


def _claim(path: Path, new_folders: Sequence[Path], taken: Lock) -> Claim:
    folder = RunFolder(path)
    written = ("spec.resolved.yaml", "command.txt", "env.json")
    files = (*(path / name for name in written), folder.summary, folder.metrics)
    return Claim(
        folder=folder,
        lock=taken,
        folders=tuple(new_folders),
        entries=frozenset(_entries(path)),
        texts={file: _content(file) for file in files if file.exists()},
        latest=latest_of(path.parent),
    )


def _entries(path: Path) -> set[Path]:
    """What a run adds to before its first step: the folder's own and the logs."""
    return {entry for part in (path, path / "logs") if part.is_dir() for entry in part.iterdir()}


def _content(file: Path) -> bytes:
    return file.read_bytes() if file.exists() else b""


def _point_latest(root: Path, name: str | None) -> None:
    """Replaced in one move; None: no link."""
    if name is None:
        (root / "latest").unlink(missing_ok=True)
        return
    temporary = root / f".latest.{os.getpid()}"
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(name)
    temporary.replace(root / "latest")


def _environment(num_ranks: int) -> Mapping[str, object]:
    """Versions, host and the allow-listed variables."""
    return {
        "python": sys.version.split()[0],
        "versions": {**versions(), "numpy": metadata.version("numpy")},
        "host": platform.node(),
        "platform": platform.platform(),
        "cores": cores(),
        "threads_per_rank": environment.threads_per_rank(num_ranks),
        "git": _revision(Path.cwd()),
        "agent": environment.agent(),
        "environment": environment.recorded(),
    }


def _revision(folder: Path) -> str | None:
    """Return the commit that the git repository around a folder has checked out, if any. `git` is
    not called: it runs programs that the repository configures, as `core.fsmonitor`. So it is
    unknown whether files differ from the commit."""
    with suppress(OSError, ValueError):  # unreadable files, or no text
        places = (parent / ".git" for parent in (folder, *folder.parents))
        return next((_head_commit(git) for git in places if git.exists()), None)
    return None


def _head_commit(git: Path) -> str | None:
    if git.is_file():  # of a worktree or a submodule
        git = git.parent / _first_line(git).removeprefix("gitdir: ")
    common = git / _first_line(git / "commondir")  # a worktree shares the branches of this folder
    text = _first_line(git / "HEAD")
    for _ in range(5):  # git follows as many symbolic references
        if not text.startswith("ref: refs/") or ".." in text:
            break
        name = text.removeprefix("ref: ")
        text = _first_line(git / name) or _first_line(common / name)
        if not text and (common / "packed-refs").is_file():
            lines = (common / "packed-refs").read_text().splitlines()
            text = next((line.partition(" ")[0] for line in lines if line.endswith(f" {name}")), "")
    return text if re.fullmatch("[0-9a-f]{40}|[0-9a-f]{64}", text) else None


def _first_line(path: Path) -> str:
    """Return the first line of a regular file, "" without one: a pipe would block."""
    return path.read_text().partition("\n")[0].strip() if path.is_file() else ""


AUTO = "auto"


def candidates(source: str, own: RunFolder) -> list[Path]:
    """Return the checkpoints in the order in which they are tried, the newest first.

    `auto` are those of this run folder and no other: a run beside it may be of another text, seed
    or learning rate, whatever its name. A path is a checkpoint or a run folder.
    """
    return manifest.complete(own.checkpoints) if source == AUTO else _given_specs(Path(source))


def again(before: str | None, own: RunFolder) -> str:
    """Return what ranks that are started anew continue from: the checkpoints that their run has
    written, and as long as there are none what the first attempt was told."""
    return AUTO if saved_since(own) else before or AUTO


def is_done(spec: Spec, own: RunFolder) -> bool:
    """Return whether the run has saved its last step, after which there is nothing to continue."""
    return any(manifest.step_of(path) >= spec.train.steps for path in saved_since(own))


def continued(options: Options) -> Options:
    """The options of a rank that torch's agent started anew: it goes on with the run that the
    attempt before began. As given where that agent has begun none: this is the first attempt.

    TORCHELASTIC_RESTART_COUNT does not tell: an agent whose own ranks lived, and are started anew
    because those of another node died, does not count that.
    """
    agent = environment.agent()
    run = options.run_dir or run_of_agent(agent)
    if run is None or not is_of_agent(run, agent):
        return options
    return replace(options, run_dir=run, resume=again(options.resume, RunFolder(run)))


def require_resumable(spec: Spec, options: Options) -> None:
    """Raises SpecError for a continuation that the manifests and the sizes of files rule out."""
    source, own = options.resume, RunFolder(options.run_dir or ROOT / "new")
    complaints: list[str] = []
    for path in candidates(source, own) if source else ():
        try:
            checkpoint = manifest.read(path)
        except PtrainError as error:
            complaints.append(str(error))
            continue
        if damaged := manifest.wrong_sizes(path, checkpoint):
            complaints.append(f"checkpoint {shown(path)}: {damaged[0]}")
            continue
        require_fitting(spec, source or "", path, checkpoint)
        return
    if source and (source != AUTO or complaints):
        raise none_sound(source, complaints)


def require_fitting(spec: Spec, source: str, path: Path, checkpoint: Manifest) -> None:
    """Raises SpecError for a checkpoint of a training that is done, or of another model."""
    if checkpoint.step >= spec.train.steps:
        raise refused(
            _place(source),
            f"already at step {checkpoint.step} of {spec.train.steps}",
            f"Set `train.steps` to more than {checkpoint.step}.",
        )
    if fault := manifest.other_model(checkpoint.trained, spec):
        raise SpecError(fault._replace(source=f"checkpoint {shown(path)}"))


def none_sound(source: str, complaints: Sequence[str]) -> SpecError:
    """Return the refusal that says that there is no checkpoint, or what is wrong with each."""
    if not complaints:
        return refused(
            _place(source),
            "contains no checkpoint",
            "Train with `checkpoint.every=N` or `checkpoint.at_end=true`, or remove `--resume`.",
        )
    several = f"none of its {len(complaints)} checkpoints can be used"
    finding = several if len(complaints) > 1 else "its only checkpoint cannot be used"
    return refused(
        _place(source),
        f"{finding}: {'; '.join(complaints)}",
        "Continue from another checkpoint, or remove `--resume` to train from the start.",
    )


def _place(source: str) -> str:
    return f"--resume {source if source == AUTO else shown(Path(source))}"


def _given_specs(path: Path) -> list[Path]:
    """A checkpoint, or those of a run folder or of its `checkpoints/`, newest first."""
    if (path / manifest.NAME).exists() or manifest.is_name(path.name):
        return [path]
    return manifest.complete(path / "checkpoints") or manifest.complete(path)
