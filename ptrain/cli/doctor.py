"""The command `ptrain doctor`: list what this machine offers, and what will fail on it with a fix.

Nothing is trained, and nothing is left behind: folders are tested with a temporary file, ports by
binding them. Whether specs run correctly is the question of `ptrain selftest`.

Another process imports torch, so that a broken installation ends that process only. The driver is
read through `nvidia-smi`.
"""

from __future__ import annotations

import json
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib import metadata
from itertools import groupby, permutations
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

from ptrain.cli.arguments import print_json
from ptrain.errors import SpecError, VerdictFailed
from ptrain.facts import cache
from ptrain.files import missing_space
from ptrain.installed import require_torch, versions
from ptrain.processor import cores, gpus, physical_memory
from ptrain.report.screen import next_line, print_screen
from ptrain.train.environment import ptrain_environment, recorded_variables
from ptrain.units import format_bytes, format_memory, with_noun
from ptrain.version import TESTED_TORCH, TORCH_RANGE

_PROBE = "from ptrain.cli.doctor import print_torch_facts; print_torch_facts()"
_PROBE_SECONDS = 120  # a first import from a network file system takes most of a minute
_DRIVER_SECONDS = 20  # without persistence mode, the driver first initializes each GPU
_SHARED_MEMORY = Path("/dev/shm")
# NCCL's segments. 64 MiB is Docker's default; NCCL's documentation recommends `--shm-size=1g`.
_LEAST_SHARED, _ENOUGH_SHARED = 2**26, 2**30
_LEAST_DISK = 10**9  # bytes
_FILES = 1024  # the soft limit of most distributions; a rank keeps a socket per other rank
_OPTIONAL = {  # packages and the extra that installs them
    "transformers": "hf",
    "tokenizers": "data",
    "pyarrow": "data",
    "matplotlib": "report",
}


class Row(NamedTuple):
    """A property of the machine, and a finding if something will fail.

    Attributes:
        section: The title of the row's group.
        value: The value as text.
        finding: The problem, as a clause; empty without one.
        remedy: The fix of the finding.
        is_error: True if ptrain cannot work with the finding; otherwise it is a warning.
        figures: The value's numbers, for `--json`: sizes in bytes.
    """

    section: str
    name: str
    value: str
    finding: str = ""
    remedy: str = ""
    is_error: bool = False
    figures: Mapping[str, int] = {}


class TorchFacts(NamedTuple):
    """The devices, backends and compilers that torch finds.

    Attributes:
        error: The reason why torch does not answer; empty if it does.
        gpus: The name and the memory in bytes of each GPU that CUDA_VISIBLE_DEVICES leaves.
        separate: The ordered pairs of GPUs of which the first cannot access the second's memory.
        toolkit: The CUDA or ROCm version that torch is built for; empty for a CPU build.
        backends: The backends of collectives: gloo, nccl.
        has_compiler: True if inductor finds a C++ compiler.
        host_error: The reason why the name of this host has no address, which gloo resolves.
    """

    error: str = ""
    gpus: Sequence[tuple[str, int]] = ()
    separate: Sequence[tuple[int, int]] = ()
    toolkit: str = ""
    backends: Sequence[str] = ()
    has_compiler: bool = False
    host_error: str = ""


def run(args: Namespace) -> int:
    """Print the properties and findings; return 1 if a finding is an error, else 0."""
    version, torch = _torch_rows()
    listed = [
        *_version_rows(version),
        *_gpu_rows(torch),
        *_host_rows(args.ranks or len(torch.gpus) or 2, uses_gpus=bool(torch.gpus)),
        *_folder_rows(args.run_dir),
        *_network_rows(args.port, torch.host_error),
        *_library_rows(torch),
    ]
    rows = [row if row.finding else row._replace(remedy="", is_error=False) for row in listed]
    found = sorted((row for row in rows if row.finding), key=lambda row: not row.is_error)
    errors = sum(row.is_error for row in found)
    warnings = len(found) - errors
    if args.json:
        records = [row._asdict() for row in rows]
        print_json({"errors": errors, "warnings": warnings, "rows": records})
    else:
        counts = f"{with_noun(errors, 'error')}, {with_noun(warnings, 'warning')}"
        following = "ptrain help check-the-machine" if errors else "ptrain selftest --brief"
        print_screen(counts, *_screen_lines(rows, found), "", next_line(following))
    return VerdictFailed.exit_code if errors else 0


def _screen_lines(rows: Sequence[Row], found: Sequence[Row]) -> Iterator[str]:
    """Yield the findings with their fixes, then all rows below the titles of their sections."""
    for row in found:
        yield f"{'error' if row.is_error else 'warning'}: {row.name}: {row.finding}"
        yield f"  remedy: {row.remedy}"
    width = max(len(row.name) for row in rows)
    for title, group in groupby(rows, attrgetter("section")):
        yield f"\n{title}"
        yield from (f"  {row.name:<{width}}  {row.value}" for row in group)


def _torch_rows() -> tuple[list[Row], TorchFacts]:
    """Return the row of torch, and its facts if its version is supported."""
    ranges = f"supported {TORCH_RANGE} · tested {', '.join(TESTED_TORCH)}"
    row = Row("Versions", "torch", f"{versions()['torch']} · {ranges}", is_error=True)
    try:
        require_torch()
    except SpecError as error:
        finding, remedy = error.faults[0].finding, error.faults[0].remedy
        return [row._replace(finding=finding, remedy=remedy)], TorchFacts(error=finding)
    facts = probe_torch()
    remedy = "Run `python -c 'import torch'` to see the whole error, and install torch again."
    return [row._replace(finding=facts.error, remedy=remedy)], facts


def probe_torch() -> TorchFacts:
    """Return the facts of torch from another process, or the reason why it fails."""
    try:
        ended = subprocess.run(
            [sys.executable, "-P", "-c", _PROBE],
            env=ptrain_environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_PROBE_SECONDS,
            check=True,
        )
    except subprocess.TimeoutExpired:
        return TorchFacts(error=f"its import does not end within {_PROBE_SECONDS} s")
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip() or str(error)).splitlines()[-1]
        return TorchFacts(error=f"its import fails: {last}")
    return TorchFacts(**json.loads(ended.stdout.splitlines()[-1]))


def print_torch_facts() -> None:
    """Print the facts of this process's torch as one line of JSON."""
    import torch

    from ptrain.internals.compiled import lacks_compiler

    cuda, dist = torch.cuda, torch.distributed
    found = [cuda.get_device_properties(index) for index in range(cuda.device_count())]
    pairs = permutations(range(len(found)), 2)
    has_backends = {
        "gloo": dist.is_available() and dist.is_gloo_available(),
        "nccl": dist.is_available() and dist.is_nccl_available(),
    }
    facts = TorchFacts(
        gpus=[(gpu.name, gpu.total_memory) for gpu in found],
        separate=[pair for pair in pairs if not cuda.can_device_access_peer(*pair)],
        toolkit=torch.version.cuda or torch.version.hip or "",
        backends=[name for name, is_available in has_backends.items() if is_available],
        has_compiler=not lacks_compiler(),
        # Here, because a name server that does not answer takes seconds.
        host_error=_failure_of(socket.getaddrinfo, socket.gethostname(), None),
    )
    print(json.dumps(facts._asdict()))


def _failure_of(action: Callable[..., object], *arguments: object) -> str:
    """Call a function and return the reason why it fails, "" if it does not."""
    try:
        action(*arguments)
    except (OSError, OverflowError, RuntimeError) as error:  # a bad port; a user without a home
        return getattr(error, "strerror", None) or str(error)
    return ""


def _version_rows(torch: Sequence[Row]) -> list[Row]:
    """Return the versions of the system, of Python, of torch and of other packages."""
    title, numpy = "Versions", _package_version("numpy")
    others = {"system": platform.platform(), **versions()}
    return [
        *(Row(title, name, version) for name, version in others.items() if name != "torch"),
        *torch,
        Row(
            title,
            "numpy",
            numpy or "no",
            finding="is not installed; training needs it" * (not numpy),
            remedy="Run `pip install 'numpy>=1.26'`.",
            is_error=True,
        ),
        *(
            Row(title, name, _package_version(name) or f"no (pip install 'ptrain[{extra}]')")
            for name, extra in _OPTIONAL.items()
        ),
    ]


def _package_version(name: str) -> str:
    """Return the version of an installed package, "" if it is not installed."""
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(name)
    return ""


def _gpu_rows(torch: TorchFacts) -> list[Row]:
    """Return the GPUs that torch finds, else those of the driver, and the links between them."""
    title = "GPUs"
    driver = _nvidia_smi("--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
    found = [f"{name}, {format_memory(memory)}" for name, memory in torch.gpus]
    visible = recorded_variables().get("CUDA_VISIBLE_DEVICES")
    present = max(len(driver), gpus())
    is_unusable = present > 0 and not (found or torch.error or visible is not None)
    states = [f"{len(found)} in torch, {present} in the driver"]
    states += [f"driver {line.rpartition(', ')[2]}" for line in driver[:1]]
    states += [] if visible is None else [f"CUDA_VISIBLE_DEVICES={visible}"]
    # A row of the matrix is GPU0, its link to each GPU, its links to network cards, its cores.
    table = _nvidia_smi("topo", "-m") if len(found or driver) > 1 else []
    matrix = [line.split("\t") for line in table if re.match(r"GPU\d+\t", line)]
    links = Counter(row[1 + i].strip() for number, row in enumerate(matrix) for i in range(number))
    pairs = ", ".join(f"{one}→{other}" for one, other in torch.separate[:4])
    return [
        Row(
            title,
            "GPUs",
            " · ".join(states),
            finding=f"torch finds none of {with_noun(present, 'GPU')}" * is_unusable,
            remedy="Run `nvidia-smi`. Update the driver, or install a torch for an older CUDA."
            if torch.toolkit
            else f"This is a CPU build. Install a CUDA build of torch{TORCH_RANGE} (pytorch.org).",
            is_error=True,
            figures={"torch": len(found), "driver": present},
        ),
        *(Row(title, f"GPU {i}", value) for i, value in enumerate(found or driver)),
        Row(
            title,
            "links",
            ", ".join(f"{with_noun(n, 'pair')} {link}" for link, n in links.items()) or "–",
            finding=f"GPUs cannot access each other ({pairs}); NCCL copies through host memory"
            * bool(pairs),
            remedy="Read `nvidia-smi topo -p2p r`. A virtual machine or an IOMMU may block it.",
            figures=links,
        ),
    ]


def _nvidia_smi(*words: str) -> list[str]:
    """Return the lines that `nvidia-smi` prints; empty if it is missing, fails or does not end."""
    with suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(
            ["nvidia-smi", *words],
            capture_output=True,
            text=True,
            check=True,
            timeout=_DRIVER_SECONDS,
        ).stdout.splitlines()
    return []


def _host_rows(ranks: int, *, uses_gpus: bool) -> list[Row]:
    """Return cores, memory, shared memory and the limit of open files.

    Args:
        ranks: The number of ranks on this host.
        uses_gpus: The ranks use GPUs, so that several of them use NCCL.
    """
    title, memory = "Host", physical_memory()
    has_shared = _SHARED_MEMORY.is_dir()
    total, _, free = shutil.disk_usage(_SHARED_MEMORY) if has_shared else (0, 0, 0)
    files, uses_nccl = resource.getrlimit(resource.RLIMIT_NOFILE)[0], uses_gpus and ranks > 1
    needed = max(_FILES, 2 * ranks)
    is_small = free < _ENOUGH_SHARED if uses_nccl else free <= _LEAST_SHARED
    user = f"NCCL's buffers of {with_noun(ranks, 'rank')}" if uses_nccl else "DataLoader workers"
    return [
        Row(title, "cores", str(cores()), figures={"cores": cores()}),
        Row(title, "memory", format_memory(memory), figures={"memory": memory}),
        Row(
            title,
            "/dev/shm",
            f"{format_memory(total)}, {format_memory(free)} free",
            finding=f"{user} may need more than the {format_memory(free)} that are free" * is_small,
            remedy="In Docker, add `--shm-size=1g` or `--ipc=host`. In Kubernetes, mount an "
            "emptyDir with `medium: Memory`.",
            is_error=uses_nccl and free <= _LEAST_SHARED,
            figures={"total": total, "free": free},
        ),
        Row(
            title,
            "open files",
            "unlimited" if files == resource.RLIM_INFINITY else str(files),
            finding="the limit is low; a rank keeps a socket per other rank"
            * (files != resource.RLIM_INFINITY and files < needed),
            remedy=f"Run `ulimit -n {needed}` in the shell that starts the ranks.",
            figures={"limit": files},
        ),
    ]


def _folder_rows(run_dir: Path) -> list[Row]:
    """Return the folders that commands write: runs, temporary files and cached traces."""
    # Python finds no temporary folder if none can be written; a user may have no home.
    temporary = "/tmp" if _failure_of(tempfile.gettempdir) else tempfile.gettempdir()
    traces = Path("~/.cache") if _failure_of(cache.cache_folder) else cache.cache_folder()
    remedy = "Set PTRAIN_CACHE to another folder, or to `off`."
    return [
        _folder_row("run folder", run_dir, "Use another folder: `--run-dir DIR`.", is_error=True),
        _folder_row("temporary folder", Path(temporary), "Set TMPDIR.", is_error=True),
        Row("Folders", "cache folder", "off (PTRAIN_CACHE=off)")
        if cache.is_off()
        else _folder_row("cache folder", traces, remedy, is_error=False),
    ]


def _folder_row(name: str, folder: Path, remedy: str, *, is_error: bool) -> Row:
    """Return the row of a folder, which need not exist yet.

    Args:
        name: The name of the row.
        folder: The folder.
        remedy: The fix if it cannot be written or is nearly full.
        is_error: A folder that cannot be written is an error.
    """
    # Not Path.exists, which raises for a folder that this user may not search.
    there = next(place for place in (folder, *folder.absolute().parents) if os.path.exists(place))
    blocked, free = _failure_of(_write_file, there), shutil.disk_usage(there).free
    return Row(
        "Folders",
        name,
        f"{folder} · {format_bytes(free)} free",
        finding=f"cannot be written: {blocked}" if blocked else missing_space(there, _LEAST_DISK),
        remedy=remedy,
        is_error=is_error and bool(blocked),
        figures={"free": free},
    )


def _write_file(folder: Path) -> None:
    """Write a file without a name, which disappears when it is closed."""
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(b"ptrain")  # a full disk still creates empty files


def _network_rows(port: int, host_error: str) -> list[Row]:
    """Return the state of ports and of the name of this host."""
    title, taken = "Network", _failure_of(_bind_port, "", port)
    blocked = _failure_of(_bind_port, "127.0.0.1", 0)
    return [
        Row(
            title,
            "loopback",
            blocked or "ports can be bound",
            finding=f"no port of 127.0.0.1 can be bound: {blocked}" if blocked else "",
            remedy="Run `ip link set lo up`, or allow local sockets in the sandbox.",
            is_error=True,
        ),
        Row(
            title,
            f"port {port}",
            taken or "free",
            finding=f"`--rdzv-endpoint` cannot use it: {taken}" if taken else "",
            remedy=f"Use another port for several nodes: `--port {port % 60_000 + 1}`.",
        ),
        Row(
            title,
            "host name",
            socket.gethostname(),
            finding=f"gloo under torchrun cannot resolve it: {host_error}" if host_error else "",
            remedy="Set GLOO_SOCKET_IFNAME to an interface, such as `lo` on one node.",
        ),
    ]


def _bind_port(address: str, port: int) -> None:
    """Listen on a TCP port for a moment. Port 0 is any free port."""
    with socket.socket() as opened:
        # As torch's store: connections in TIME_WAIT do not matter.
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        opened.bind((address, port))
        opened.listen(1)  # fails if another socket with SO_REUSEADDR listens


def _library_rows(torch: TorchFacts) -> list[Row]:
    """Return the backends of collectives, and the parts that `compile` needs."""
    header, has_gpus = Path(sysconfig.get_path("include"), "Python.h"), bool(torch.gpus)
    triton, remedy = _package_version("triton"), "Install a torch of pytorch.org for this machine."
    compiler = "yes" * torch.has_compiler
    return [
        Row(
            "Libraries",
            name,
            value or "no",
            finding=f"is missing; {user} needs it" * (is_needed and not value),
            remedy=remedy,
            is_error=user != "compile",
        )
        for name, value, is_needed, user, remedy in (
            ("gloo", "yes" * ("gloo" in torch.backends), True, "a rank on a CPU", remedy),
            ("NCCL", "yes" * ("nccl" in torch.backends), has_gpus, "a rank on a GPU", remedy),
            ("C++ compiler", compiler, True, "compile", "Run `apt install g++`."),
            (
                "Python.h",
                str(header) * header.is_file(),
                True,
                "compile",
                "Run `apt install python3-dev`.",
            ),
            ("Triton", triton, has_gpus, "compile", "Run `pip install triton`."),
        )
        if not torch.error
    ]
