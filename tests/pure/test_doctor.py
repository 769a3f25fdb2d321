"""`ptrain doctor` on machines that lack something: the finding, its fix, and the exit code."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import time
from collections import namedtuple
from pathlib import Path

import pytest

from ptrain import installed
from ptrain.cli import doctor
from ptrain.cli.doctor import TorchFacts
from ptrain.cli.main import main
from ptrain.units import format_memory

Disk = namedtuple("Disk", "total used free")
SOUND = TorchFacts(backends=["gloo"], has_compiler=True)
TWO_GPUS = SOUND._replace(
    gpus=[("NVIDIA H100", 80 * 2**30)] * 2, toolkit="13.0", backends=["gloo", "nccl"]
)
_NVIDIA_SMI, _PROBE = doctor._nvidia_smi, doctor.probe_torch


@pytest.fixture(autouse=True)
def _sound_machine(monkeypatch, tmp_path):
    """A machine without findings; tests take something away."""
    monkeypatch.setenv("PTRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(doctor, "_bind_port", lambda address, port: None)
    monkeypatch.setattr(doctor, "_nvidia_smi", lambda *words: [])
    monkeypatch.setattr(doctor, "gpus", lambda: 0)
    monkeypatch.setattr(doctor, "_package_version", lambda name: "1.0")
    monkeypatch.setattr(doctor.resource, "getrlimit", lambda limit: (4096, 4096))
    _with_shared_memory(monkeypatch, 2**34)
    _with_torch(monkeypatch, SOUND)


def _with_torch(monkeypatch, facts):
    monkeypatch.setattr(doctor, "probe_torch", lambda: facts)


def _with_shared_memory(monkeypatch, size):
    disk_usage = shutil.disk_usage

    def usage(path):
        return Disk(size, 0, size) if str(path) == "/dev/shm" else disk_usage(path)

    monkeypatch.setattr(shutil, "disk_usage", usage)


def _diagnose(capsys, *words):
    """Return the exit code, the rows by name, and the names of errors and of warnings."""
    code = main(["doctor", "--json", *words])
    record = json.loads(capsys.readouterr().out)
    found = [row for row in record["rows"] if row["finding"]]
    assert all(row["remedy"] for row in found)
    errors = [row["name"] for row in found if row["is_error"]]
    warnings = [row["name"] for row in found if not row["is_error"]]
    assert (record["errors"], record["warnings"]) == (len(errors), len(warnings))
    return code, {row["name"]: row for row in record["rows"]}, errors, warnings


def test_a_sound_machine_without_gpus_has_no_findings(capsys):
    code, rows, errors, warnings = _diagnose(capsys)
    assert (code, errors, warnings) == (0, [], [])
    assert rows["GPUs"]["figures"] == {"torch": 0, "driver": 0}
    assert rows["memory"]["value"] == format_memory(rows["memory"]["figures"]["memory"])


def test_without_torch_the_fix_is_printed_first_and_no_process_imports_it(monkeypatch, capsys):
    monkeypatch.setattr(installed, "torch_version", lambda: "")
    monkeypatch.setattr(installed, "find_spec", lambda name: None)
    monkeypatch.setattr(doctor, "probe_torch", lambda: pytest.fail("imported"))
    start = time.process_time()
    assert main(["doctor"]) == 1
    assert time.process_time() - start < 1
    first, error, remedy, *_ = capsys.readouterr().out.splitlines()
    assert first == "1 error, 0 warnings"
    assert error.startswith("error: torch: is not installed; ptrain needs >=")
    assert remedy.startswith("  remedy: Run `pip install 'torch>=")


def test_a_torch_that_cannot_be_imported_is_an_error_with_its_last_line(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "_PROBE", "raise OSError('libcudart.so.13: cannot open')")
    monkeypatch.setattr(doctor, "probe_torch", _PROBE)
    code, rows, errors, _ = _diagnose(capsys)
    assert (code, errors) == (1, ["torch"])
    finding = "its import fails: OSError: libcudart.so.13: cannot open"
    assert rows["torch"]["finding"] == finding


def test_a_torch_that_does_not_answer_is_ended(monkeypatch):
    monkeypatch.setattr(doctor, "_PROBE", "import time; time.sleep(60)")
    monkeypatch.setattr(doctor, "_PROBE_SECONDS", 0.1)
    assert _PROBE().error == "its import does not end within 0.1 s"


@pytest.mark.parametrize(
    ("size", "facts", "expected"),
    [
        (2**26, TWO_GPUS, (1, ["/dev/shm"], [])),
        (2**28, TWO_GPUS, (0, [], ["/dev/shm"])),
        (2**26, TWO_GPUS._replace(gpus=TWO_GPUS.gpus[:1]), (0, [], ["/dev/shm"])),
        (2**28, SOUND, (0, [], [])),
    ],
    ids=["64M-nccl", "256M-nccl", "64M-one-gpu", "256M-cpu"],
)
def test_a_small_shared_memory_fails_ranks_of_nccl_and_warns_others(
    size, facts, expected, monkeypatch, capsys
):
    _with_shared_memory(monkeypatch, size)
    _with_torch(monkeypatch, facts)
    code, rows, errors, warnings = _diagnose(capsys)
    assert (code, errors, warnings) == expected
    assert rows["/dev/shm"]["figures"] == {"total": size, "free": size}
    if errors:
        assert "2 ranks" in rows["/dev/shm"]["finding"]
        assert "--shm-size=1g" in rows["/dev/shm"]["remedy"]


@pytest.mark.parametrize(("toolkit", "fix"), [("", "CUDA build"), ("13.0", "driver")])
def test_gpus_that_torch_does_not_find_are_an_error(toolkit, fix, monkeypatch, capsys):
    monkeypatch.setattr(doctor, "_nvidia_smi", lambda *words: ["NVIDIA T4, 15360 MiB, 535.1"])
    _with_torch(monkeypatch, SOUND._replace(toolkit=toolkit))
    code, rows, errors, _ = _diagnose(capsys)
    assert (code, errors) == (1, ["GPUs"])
    assert fix in rows["GPUs"]["remedy"]
    assert rows["GPU 0"]["value"] == "NVIDIA T4, 15360 MiB, 535.1"
    assert rows["GPUs"]["value"] == "0 in torch, 1 in the driver · driver 535.1"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    code, rows, errors, _ = _diagnose(capsys)
    assert (code, errors) == (0, [])  # the user hides them
    assert rows["GPUs"]["value"].endswith("CUDA_VISIBLE_DEVICES=")


def test_gpus_without_access_to_each_other_or_nccl_are_found(monkeypatch, capsys):
    _with_torch(monkeypatch, TWO_GPUS._replace(separate=[(0, 1), (1, 0)], backends=["gloo"]))
    code, rows, errors, warnings = _diagnose(capsys)
    assert (code, errors, warnings) == (1, ["NCCL"], ["links"])
    assert "0→1, 1→0" in rows["links"]["finding"]


def test_folders_that_cannot_be_written_are_found(monkeypatch, tmp_path, capsys):
    (tmp_path / "file").touch()
    monkeypatch.setenv("PTRAIN_CACHE", str(tmp_path / "file" / "cache"))
    code, rows, errors, warnings = _diagnose(capsys, "--run-dir", str(tmp_path / "file" / "run"))
    assert (code, errors, warnings) == (1, ["run folder"], ["cache folder"])
    assert "cannot be written" in rows["run folder"]["finding"]
    monkeypatch.setattr(doctor, "_LEAST_DISK", 2**70)
    _, rows, errors, warnings = _diagnose(capsys, "--run-dir", str(tmp_path / "new" / "run"))
    assert errors == []
    assert warnings == ["run folder", "temporary folder", "cache folder"]
    assert not (tmp_path / "new").exists()


def test_a_port_in_use_is_a_warning_and_no_loopback_an_error(monkeypatch, capsys):
    monkeypatch.undo()
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = server.getsockname()[1]
        _, port, _ = doctor._network_rows(taken, "")
        assert port.value == "Address already in use"
    loopback, port, _ = doctor._network_rows(70_000, "")
    assert loopback.finding == "" and "0-65535" in port.finding

    def fail(address, port):
        raise OSError(99, "Cannot assign requested address")

    monkeypatch.setattr(doctor, "_bind_port", fail)
    rows = [*doctor._network_rows(29500, "")]
    assert [(row.name, row.is_error) for row in rows if row.finding] == [
        ("loopback", True),
        ("port 29500", False),
    ]


def test_low_limits_and_missing_compilers_are_warnings(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(doctor.resource, "getrlimit", lambda limit: (256, 4096))
    _with_torch(monkeypatch, TWO_GPUS._replace(has_compiler=False, host_error="Name unknown"))
    monkeypatch.setattr(doctor, "_package_version", lambda name: "" if name == "triton" else "1")
    code, rows, errors, warnings = _diagnose(capsys, "--ranks", "1024")
    assert (code, errors) == (0, [])
    assert warnings == ["open files", "host name", "C++ compiler", "Triton"]
    assert "ulimit -n 2048" in rows["open files"]["remedy"]


def test_gpus_and_links_are_read_from_nvidia_smi(monkeypatch, tmp_path):
    """Output of nvidia-smi, whose heading has codes that underline it."""
    program = tmp_path / "nvidia-smi"
    program.write_text(
        f"#!{sys.executable}\n"
        "import sys\n"
        "if sys.argv[1] == 'topo':\n"
        "    print('\\t\\x1b[4mGPU0\\tGPU1\\tGPU2\\tNIC0\\tCPU Affinity\\x1b[0m')\n"
        "    print('GPU0\\t X \\tNV18\\tSYS\\tPIX\\t0-7')\n"
        "    print('GPU1\\tNV18\\t X \\tSYS\\tPIX\\t0-7')\n"
        "    print('GPU2\\tSYS\\tSYS\\t X \\tPIX\\t0-7')\n"
        "    print('NIC0\\tPIX\\tPIX\\tPIX\\t X ')\n"
        "else:\n"
        "    print('NVIDIA H100 80GB HBM3, 81559 MiB, 570.86.10')\n"
        "    print('NVIDIA GB10, [N/A], 580.95')\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(doctor, "_nvidia_smi", _NVIDIA_SMI)
    counted, first, second, links = doctor._gpu_rows(TorchFacts(error="no"))
    assert counted.value == "0 in torch, 2 in the driver · driver 570.86.10"
    assert first.value == "NVIDIA H100 80GB HBM3, 81559 MiB, 570.86.10"
    assert second.value == "NVIDIA GB10, [N/A], 580.95"
    assert (links.value, links.figures) == ("1 pair NV18, 2 pairs SYS", {"NV18": 1, "SYS": 2})
    program.write_text(f"#!{sys.executable}\nraise SystemExit(9)")
    assert len(doctor._gpu_rows(SOUND)) == 2


def test_the_command_imports_no_torch():
    code = (
        "import sys, ptrain.cli.doctor\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", code], cwd=root, check=True, timeout=60)
