"""Files are private, complete and never written through a link; killed processes leave nothing."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from ptrain import files
from ptrain.errors import SpecError
from ptrain.files import LineFile, missing_space, temporary_folder, write_bytes
from ptrain.spec.load import load
from ptrain.train import folder
from ptrain.train.folder import open_run


@pytest.fixture
def victim(tmp_path: Path) -> Iterator[Path]:
    """Yield a file outside of the run folder, which must not change."""
    path = tmp_path / "victim"
    path.write_text("mine")
    yield path
    assert path.read_text() == "mine"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Yield a file system of 64 KiB."""
    place = tmp_path / "disk"
    place.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", "size=64k", "ptrain-test", str(place)]
    if os.geteuid() or subprocess.run(words, capture_output=True).returncode:
        pytest.skip("mounting a small file system needs root")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def open_own(path: Path, *, resuming: bool = True) -> None:
    spec = load("zero3").spec
    open_run(spec, given=path, resuming=resuming, command="ptrain train").lock.release()


def test_no_file_is_written_through_a_link(tmp_path, victim):
    link = tmp_path / "link"
    link.symlink_to(victim)
    with pytest.raises(OSError, match="symbolic links"):
        files.open_private(link, os.O_WRONLY | os.O_APPEND)
    write_bytes(link, b"new")  # replaces the link
    assert link.read_bytes() == b"new" and not link.is_symlink()


@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_only_regular_files_are_opened(tmp_path, kind):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with pytest.raises(OSError, match=r"No such device|not a regular file"):
        files.open_private(path if kind == "pipe" else Path("/dev/zero"), os.O_WRONLY)


@pytest.mark.parametrize("name", ["logs", "checkpoints", "trace", "routing", "trackers"])
def test_a_linked_part_of_a_run_folder_is_rejected(tmp_path, name):
    run, other = tmp_path / "run", tmp_path / "other"
    run.mkdir()
    other.mkdir()
    (run / name).symlink_to(other)
    with pytest.raises(SpecError, match=f"{name} is a symbolic link"):
        open_own(run)
    assert not list(other.iterdir())


@pytest.mark.parametrize("part", [".", "logs"])
def test_a_run_folder_of_another_user_is_rejected(tmp_path, part, monkeypatch):
    (tmp_path / "logs").mkdir()
    if os.geteuid() == 0:
        os.chown(tmp_path / part, 12345, -1)
    else:
        monkeypatch.setattr(folder.os, "geteuid", lambda: 12345)
    with pytest.raises(SpecError, match="belongs to another user"):
        open_own(tmp_path)


def test_a_link_planted_for_a_log_is_not_followed(tmp_path, victim):
    run = tmp_path / "run"
    (run / "logs").mkdir(parents=True)
    (run / "logs" / "rank0.log").symlink_to(victim)
    (run / "metrics.jsonl").symlink_to(victim)
    open_own(run)
    warnings: list[str] = []
    for name in ("logs/rank0.log", "metrics.jsonl"):
        LineFile(run / name, warnings.append).write("text\n")
    assert len(warnings) == 2


def test_unfinished_files_of_a_killed_run_are_removed(tmp_path):
    (tmp_path / ".summary.json.0123abcd.tmp").touch()
    open_own(tmp_path)
    assert not list(tmp_path.glob(".*.tmp"))


def test_a_full_disk_gives_one_warning_and_no_torn_line(small_disk):
    warnings: list[str] = []
    lines = LineFile(small_disk / "log", warnings.append)
    for number in range(3000):
        lines.write(f"{number:>40}\n")
    assert len(warnings) == 1 and "No space left" in warnings[0]
    lines.close()
    text = (small_disk / "log").read_text()
    assert text.endswith("\n") and {len(line) for line in text.splitlines()} == {40}
    with pytest.raises(OSError, match="No space left"):
        write_bytes(small_disk / "summary.json", bytes(9000))
    assert [path.name for path in small_disk.iterdir()] == ["log"]


def test_missing_space_is_stated_before_anything_is_written(small_disk):
    assert missing_space(small_disk / "new" / "folder", 1 << 20) == (
        "1.049 MB are needed, but 65.54 kB are free"
    )
    assert missing_space(small_disk, 1000) == ""


def test_a_file_system_that_reports_no_size_is_written(tmp_path, monkeypatch):
    nothing = SimpleNamespace(total=0, used=0, free=0)
    monkeypatch.setattr(files.shutil, "disk_usage", lambda _: nothing)
    assert missing_space(tmp_path, 1 << 40) == ""


_HOLD = """
import sys, time
from ptrain.files import temporary_folder
with temporary_folder() as folder:
    (folder / "secret").touch()
    print(folder, flush=True)
    time.sleep(60)
"""


def test_the_folder_of_a_killed_process_is_removed_by_the_next_one(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    words = [sys.executable, "-c", _HOLD]
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment) as holding:
        assert holding.stdout is not None
        held = Path(holding.stdout.readline().strip())
        assert stat.S_IMODE(held.stat().st_mode) == 0o700
        with temporary_folder():
            assert (held / "secret").exists()  # in use
        holding.send_signal(signal.SIGKILL)
    assert held.exists()
    with temporary_folder() as own:
        assert list(tmp_path.iterdir()) == [own]


def test_logs_of_a_failure_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(ValueError), temporary_folder(keeps_failure=True) as kept:
        (kept / "log").touch()
        raise ValueError
    with pytest.raises(ValueError), temporary_folder(keeps_failure=True):
        raise ValueError
    with temporary_folder():
        pass
    assert list(tmp_path.iterdir()) == [kept]


def test_a_folder_named_latest_stays(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "latest").mkdir(parents=True)
    claim = open_run(load("zero3").spec, given=None, resuming=False, command="ptrain train")
    with pytest.raises(OSError, match="directory"):  # which a training reports as a warning
        folder.mark_as_latest(claim.folder)
    claim.lock.release()
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {
        "latest", claim.folder.path.name,
    }  # fmt: skip
