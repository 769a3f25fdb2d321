"""Probes of this machine: the GPUs, backends and compilers that torch and the driver find.

Another process imports torch, so that a broken installation ends that process only, and a command
that needs no torch otherwise does not import it. The driver is read through `nvidia-smi`.
"""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from itertools import permutations
from typing import NamedTuple

from ptrain.train.environment import ptrain_environment

_PROBE = "from ptrain.cli.machine import print_torch_facts; print_torch_facts()"
_IMPORT_SECONDS = 120  # a first import from a network file system takes most of a minute
_DRIVER_SECONDS = 20  # without persistence mode, the driver first initializes each GPU


class TorchFacts(NamedTuple):
    """The devices, backends and compilers that torch finds.

    Attributes:
        error: The reason why torch does not answer; empty if it does.
        gpus: The name and the memory in bytes of each GPU that CUDA_VISIBLE_DEVICES leaves.
        separate: The ordered pairs of GPUs of which the first cannot access the second's memory.
        toolkit: The CUDA or ROCm version that torch is built for; empty for a CPU build.
        has_gloo: True if torch has gloo.
        nccl: The version of NCCL; empty without it.
        has_compiler: True if inductor finds a C++ compiler.
        host_error: The reason why the name of this host has no address, which gloo resolves.
    """

    error: str = ""
    gpus: Sequence[tuple[str, int]] = ()
    separate: Sequence[tuple[int, int]] = ()
    toolkit: str = ""
    has_gloo: bool = False
    nccl: str = ""
    has_compiler: bool = False
    host_error: str = ""


class DriverGpu(NamedTuple):
    """A GPU that the NVIDIA driver lists: its name, its memory in bytes, the driver's version."""

    name: str
    memory: int
    driver: str


def start_probe() -> subprocess.Popen[str]:
    """Start the process that imports torch and prints its facts."""
    return subprocess.Popen(
        [sys.executable, "-P", "-c", _PROBE],
        env=ptrain_environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )


def finish_probe(process: subprocess.Popen[str]) -> TorchFacts:
    """Wait for a probe and return its facts, or the reason why there are none."""
    try:
        output, errors = process.communicate(timeout=_IMPORT_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return TorchFacts(error=f"does not answer within {_IMPORT_SECONDS} s")
    if process.returncode:
        last = (errors.strip().splitlines() or [f"exit code {process.returncode}"])[-1]
        return TorchFacts(error=f"fails: {last}")
    return TorchFacts(**json.loads(output.splitlines()[-1]))


def print_torch_facts() -> None:
    """Print the facts of this process's torch as one line of JSON."""
    import torch
    import torch.distributed as dist

    from ptrain.internals.compiled import lacks_compiler

    cuda = torch.cuda
    found = [cuda.get_device_properties(index) for index in range(cuda.device_count())]
    host_error = ""
    try:
        socket.getaddrinfo(socket.gethostname(), None)
    except OSError as error:
        host_error = error.strerror or str(error)
    has_nccl = dist.is_available() and dist.is_nccl_available()
    facts = TorchFacts(
        gpus=[(gpu.name, gpu.total_memory) for gpu in found],
        separate=[
            pair
            for pair in permutations(range(len(found)), 2)
            if not cuda.can_device_access_peer(*pair)
        ],
        toolkit=torch.version.cuda or torch.version.hip or "",
        has_gloo=dist.is_available() and dist.is_gloo_available(),
        # A build with NCCL has no version to ask for without a GPU's driver.
        nccl=".".join(map(str, cuda.nccl.version())) if has_nccl and found else "yes" * has_nccl,
        has_compiler=not lacks_compiler(),
        host_error=host_error,
    )
    print(json.dumps(facts._asdict()))


def driver_gpus() -> list[DriverGpu]:
    """Return the GPUs that the NVIDIA driver lists; empty without `nvidia-smi`."""
    fields = "--query-gpu=name,memory.total,driver_version"
    gpus = []
    for line in _nvidia_smi(fields, "--format=csv,noheader,nounits").splitlines():
        name, memory, driver = line.rsplit(", ", 2)
        # MiB; GPUs that share the host's memory report "[N/A]"
        gpus.append(DriverGpu(name, int(memory) * 2**20 if memory.isdecimal() else 0, driver))
    return gpus


def gpu_links() -> Counter[str]:
    """Return the number of pairs of GPUs by their link, in the words of `nvidia-smi topo -m`.

    `NV18` is 18 NVLinks; `PIX`, `PXB`, `PHB`, `NODE` and `SYS` are ways over PCIe, the fastest
    first.
    """
    lines = (line.split("\t") for line in _nvidia_smi("topo", "-m").splitlines())
    rows = [cells for cells in lines if cells[0].startswith("GPU") and cells[0][3:].isdecimal()]
    return Counter(rows[one][1 + other].strip() for one in range(len(rows)) for other in range(one))


def _nvidia_smi(*words: str) -> str:
    """Return the output of `nvidia-smi`, "" if it is missing, fails or does not end."""
    if program := shutil.which("nvidia-smi"):
        with suppress(OSError, subprocess.SubprocessError):
            return subprocess.run(
                [program, *words],
                capture_output=True,
                text=True,
                check=True,
                timeout=_DRIVER_SECONDS,
            ).stdout
    return ""
