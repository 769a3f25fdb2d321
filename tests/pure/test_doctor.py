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
from ptrain.cli import doctor, machine
from ptrain.cli.machine import DriverGpu, TorchFacts
from ptrain.cli.main import main
from ptrain.units import format_memory

Disk = namedtuple("Disk", "total used free")
SOUND = TorchFacts(has_gloo=True, has_compiler=True)
TWO_GPUS = SOUND._replace(gpus=[("NVIDIA H100", 80 * 2**30)] * 2, toolkit="13.0", nccl="2.28.9")


@pytest.fixture(autouse=True)
def _sound_machine(monkeypatch, tmp_path):
    """A machine without findings; tests take something away."""
    monkeypatch.setenv("PTRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(doctor, "_binding_error", lambda address, port: "")
    monkeypatch.setattr(doctor, "driver_gpus", list)
    monkeypatch.setattr(doctor, "gpus", lambda: 0)
    monkeypatch.setattr(doctor, "gpu_links", lambda: {"NV18": 1})
    monkeypatch.setattr(doctor, "_package_version", lambda name: "1.0")
    monkeypatch.setattr(doctor.resource, "getrlimit", lambda limit: (4096, 4096))
    monkeypatch.setattr(doctor, "_INFINIBAND", tmp_path / "no-infiniband")
    _with_shared_memory(monkeypatch, 2**34)
    _with_torch(monkeypatch, SOUND)


def _with_torch(monkeypatch, facts):
    monkeypatch.setattr(doctor, "start_probe", object)
    monkeypatch.setattr(doctor, "finish_probe", lambda probe: facts)


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
    monkeypatch.setattr(doctor, "start_probe", lambda: pytest.fail("started"))
    start = time.process_time()
    assert main(["doctor"]) == 1
    assert time.process_time() - start < 1
    first, error, remedy, *_ = capsys.readouterr().out.splitlines()
    assert first == "1 error, 0 warnings"
    assert error.startswith("error: torch: is not installed; ptrain needs >=")
    assert remedy.startswith("  remedy: Run `pip install 'torch>=")


def test_a_torch_that_cannot_be_imported_is_an_error_with_its_last_line(monkeypatch, capsys):
    monkeypatch.setattr(machine, "_PROBE", "raise OSError('libcudart.so.13: cannot open')")
    monkeypatch.setattr(doctor, "start_probe", machine.start_probe)
    monkeypatch.setattr(doctor, "finish_probe", machine.finish_probe)
    code, rows, errors, _ = _diagnose(capsys)
    assert (code, errors) == (1, ["import torch"])
    assert rows["import torch"]["finding"] == "fails: OSError: libcudart.so.13: cannot open"


def test_a_torch_that_does_not_answer_is_ended(monkeypatch):
    monkeypatch.setattr(machine, "_PROBE", "import time; time.sleep(60)")
    monkeypatch.setattr(machine, "_IMPORT_SECONDS", 0.1)
    process = machine.start_probe()
    assert machine.finish_probe(process).error == "does not answer within 0.1 s"
    assert process.returncode is not None


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
    monkeypatch.setattr(doctor, "driver_gpus", lambda: [DriverGpu("NVIDIA T4", 2**34, "535.1")])
    _with_torch(monkeypatch, SOUND._replace(toolkit=toolkit))
    code, rows, errors, _ = _diagnose(capsys)
    assert (code, errors) == (1, ["GPUs"])
    assert fix in rows["GPUs"]["remedy"]
    assert rows["GPU 0"]["value"] == "NVIDIA T4 · 16 GiB · driver 535.1"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    code, rows, errors, _ = _diagnose(capsys)
    assert (code, errors) == (0, [])  # the user hides them
    assert rows["GPUs"]["value"].endswith("CUDA_VISIBLE_DEVICES=")


def test_gpus_without_access_to_each_other_or_nccl_are_found(monkeypatch, capsys):
    _with_torch(monkeypatch, TWO_GPUS._replace(separate=[(0, 1), (1, 0)], nccl=""))
    code, rows, errors, warnings = _diagnose(capsys)
    assert (code, errors, warnings) == (1, ["NCCL"], ["links"])
    assert rows["links"]["value"] == "1 pair NV18"
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
        taken = doctor._binding_error("", server.getsockname()[1])
    assert taken == "Address already in use"
    assert doctor._binding_error("127.0.0.1", 0) == ""
    monkeypatch.setattr(doctor, "_binding_error", lambda address, port: taken)
    rows = [*doctor._network_rows(29500, SOUND)]
    assert [(row.name, row.is_error) for row in rows if row.finding] == [
        ("loopback", True),
        ("port 29500", False),
    ]


def test_low_limits_and_missing_compilers_are_warnings(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(doctor.resource, "getrlimit", lambda limit: (256, 4096))
    (tmp_path / "infiniband" / "mlx5_0").mkdir(parents=True)
    monkeypatch.setattr(doctor, "_INFINIBAND", tmp_path / "infiniband")
    _with_torch(monkeypatch, TWO_GPUS._replace(has_compiler=False, host_error="Name unknown"))
    monkeypatch.setattr(doctor, "_package_version", lambda name: "" if name == "triton" else "1")
    code, rows, errors, warnings = _diagnose(capsys, "--ranks", "1024")
    assert (code, errors) == (0, [])
    assert warnings == ["open files", "locked memory", "host name", "C++ compiler", "Triton"]
    assert "ulimit -n 2048" in rows["open files"]["remedy"]


def test_a_port_above_the_last_is_rejected(capsys):
    assert main(["doctor", "--port", "70000"]) == 2
    assert "--port: must be a port, 1 to 65535; got 70000" in capsys.readouterr().err


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
        "    print('NVIDIA H100 80GB HBM3, 81559, 570.86.10')\n"
        "    print('NVIDIA GB10, [N/A], 580.95')\n"
    )
    program.chmod(0o755)
    monkeypatch.setattr(shutil, "which", lambda name: str(program))
    assert machine.driver_gpus() == [
        DriverGpu("NVIDIA H100 80GB HBM3", 81559 * 2**20, "570.86.10"),
        DriverGpu("NVIDIA GB10", 0, "580.95"),
    ]
    assert machine.gpu_links() == {"NV18": 1, "SYS": 2}
    program.write_text(f"#!{sys.executable}\nraise SystemExit(9)")
    assert machine.driver_gpus() == []


def test_the_command_imports_no_torch():
    code = (
        "import sys, ptrain.cli.doctor\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", code], cwd=root, check=True, timeout=60)
