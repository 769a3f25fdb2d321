"""The command `ptrain doctor`: list what this machine offers, and what will fail on it with a fix.

Nothing is trained, and nothing is left behind: folders are tested with a temporary file, ports by
binding them. Whether specs run correctly is the question of `ptrain selftest`.
"""

from __future__ import annotations

import errno
import os
import platform
import resource
import shutil
import socket
import sysconfig
import tempfile
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path

from ptrain.cli.arguments import print_json
from ptrain.cli.machine import (
    DriverGpu,
    TorchFacts,
    driver_gpus,
    finish_probe,
    gpu_links,
    start_probe,
)
from ptrain.errors import SpecError, VerdictFailed, input_error
from ptrain.facts import cache
from ptrain.files import missing_space
from ptrain.installed import require_torch, versions
from ptrain.processor import cores, gpus, physical_memory
from ptrain.report.screen import next_line, print_screen
from ptrain.train.environment import recorded_variables
from ptrain.units import format_bytes, format_memory, with_noun
from ptrain.version import TESTED_TORCH, TORCH_RANGE

_SHARED_MEMORY = Path("/dev/shm")
# NCCL's segments. 64 MiB is Docker's default; NCCL's documentation recommends `--shm-size=1g`.
_LEAST_SHARED, _ENOUGH_SHARED = 2**26, 2**30
_LEAST_DISK = 10**9  # bytes
_LAST_PORT = 65535
_FILES = 1024  # the soft limit of most distributions; a rank keeps a socket per other rank
_OPTIONAL = {  # packages and the extra that installs them
    "transformers": "hf",
    "tokenizers": "data",
    "pyarrow": "data",
    "matplotlib": "report",
}
_INFINIBAND = Path("/sys/class/infiniband")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A row of the list: a property of the machine, and a finding if something will fail.

    Attributes:
        section: The title of the row's group.
        value: The value as text.
        figures: The value's numbers, for `--json`: sizes in bytes.
        finding: The problem, as a clause; empty without one.
        remedy: The fix.
        is_error: True if ptrain cannot work this way; otherwise the finding is a warning.
    """

    section: str
    name: str
    value: str
    figures: Mapping[str, int] = field(default_factory=dict)
    finding: str = ""
    remedy: str = ""
    is_error: bool = False

    def __str__(self) -> str:
        severity = "error" if self.is_error else "warning"
        return f"{severity}: {self.name}: {self.finding}\n  remedy: {self.remedy}"


def run(args: Namespace) -> int:
    """Print the properties and findings; return 1 if a finding is an error, else 0."""
    if args.port > _LAST_PORT:
        finding = f"must be a port, 1 to {_LAST_PORT}; got {args.port}"
        raise input_error("--port", finding, "Use `--port 29500`.")
    rows = [*_machine_rows(args)]
    found = sorted((row for row in rows if row.finding), key=lambda row: not row.is_error)
    errors = sum(row.is_error for row in found)
    if args.json:
        print_json(
            {
                "errors": errors,
                "warnings": len(found) - errors,
                "rows": [asdict(row) for row in rows],
            }
        )
    else:
        counts = f"{with_noun(errors, 'error')}, {with_noun(len(found) - errors, 'warning')}"
        following = "ptrain help check-the-machine" if errors else "ptrain selftest --brief"
        print_screen(counts, *map(str, found), *_listed_lines(rows), "", next_line(following))
    return VerdictFailed.exit_code if errors else 0


def _listed_lines(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the lines of all rows below the titles of their sections."""
    width = max(len(row.name) for row in rows)
    for section in dict.fromkeys(row.section for row in rows):
        yield f"\n{section}"
        for row in rows:
            if row.section == section:
                yield f"  {row.name:<{width}}  {row.value}"


def _machine_rows(args: Namespace) -> Iterator[Row]:
    """Yield all rows. Torch is imported by another process while this one asks the driver."""
    torch = _torch_row()
    probe = None if torch.is_error else start_probe()
    driver = driver_gpus()
    facts = finish_probe(probe) if probe else TorchFacts(error="is not imported")
    yield from _version_rows(torch, facts, answers=probe is not None)
    num_gpus = len(facts.gpus)
    yield from _gpu_rows(facts, driver)
    ranks = args.ranks or num_gpus or 2
    yield from _host_rows(ranks, has_gpus=num_gpus > 0)
    yield from _folder_rows(args.run_dir)
    yield from _network_rows(args.port, facts)
    if not facts.error:
        yield from _library_rows(facts)


def _torch_row() -> Row:
    """Return the row of torch, with an error if it is missing or not supported."""
    finding, remedy = "", ""
    try:
        require_torch()
    except SpecError as error:
        finding, remedy = error.faults[0].finding, error.faults[0].remedy
    parts = [versions()["torch"], f"supported {TORCH_RANGE}", f"tested {', '.join(TESTED_TORCH)}"]
    return Row(
        section="Versions",
        name="torch",
        value=" · ".join(parts),
        finding=finding,
        remedy=remedy,
        is_error=bool(finding),
    )


def _version_rows(torch: Row, facts: TorchFacts, *, answers: bool) -> Iterator[Row]:
    """Yield the versions of the system, of Python, of torch and of other packages."""
    title = "Versions"
    yield Row(section=title, name="system", value=platform.platform())
    for name in ("ptrain", "python"):
        yield Row(section=title, name=name, value=versions()[name])
    yield torch
    if answers and facts.error:
        yield Row(
            section=title,
            name="import torch",
            value="fails",
            finding=facts.error,
            remedy=f"Run `python -c 'import torch'`, or `pip install --force-reinstall "
            f"'torch{TORCH_RANGE}'`.",
            is_error=True,
        )
    numpy = _package_version("numpy")
    yield Row(
        section=title,
        name="numpy",
        value=numpy or "not installed",
        finding="" if numpy else "is not installed; training needs it",
        remedy="" if numpy else "Run `pip install 'numpy>=1.26'`.",
        is_error=not numpy,
    )
    for name, extra in _OPTIONAL.items():
        missing = f"not installed (optional: pip install 'ptrain[{extra}]')"
        yield Row(section=title, name=name, value=_package_version(name) or missing)


def _package_version(name: str) -> str:
    """Return the version of an installed package, "" if it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _gpu_rows(facts: TorchFacts, driver: Sequence[DriverGpu]) -> Iterator[Row]:
    """Yield the GPUs that torch finds, else those of the driver, and the links between them."""
    title, present = "GPUs", max(len(driver), gpus())
    version = driver[0].driver if driver else ""
    listed = facts.gpus or [(gpu.name, gpu.memory) for gpu in driver]
    for index, (name, memory) in enumerate(listed):
        parts = [name, format_memory(memory) * bool(memory), f"driver {version}" * bool(version)]
        yield Row(
            section=title,
            name=f"GPU {index}",
            value=" · ".join(filter(None, parts)),
            figures={"memory": memory},
        )
    visible = recorded_variables().get("CUDA_VISIBLE_DEVICES")
    parts = [f"{len(facts.gpus)} in torch, {present} in the driver"]
    parts += [] if visible is None else [f"CUDA_VISIBLE_DEVICES={visible}"]
    is_unusable = present > 0 and not facts.gpus and visible is None and not facts.error
    yield Row(
        section=title,
        name="GPUs",
        value=" · ".join(parts),
        figures={"torch": len(facts.gpus), "driver": present},
        finding=f"torch finds none of {with_noun(present, 'GPU')}" * is_unusable,
        remedy=_GPU_REMEDIES[bool(facts.toolkit)] * is_unusable,
        is_error=is_unusable,
    )
    if len(listed) > 1:
        links = gpu_links()
        counted = [f"{with_noun(number, 'pair')} {link}" for link, number in links.items()]
        pairs = ", ".join(f"{one}→{other}" for one, other in facts.separate[:4])
        yield Row(
            section=title,
            name="links",
            value=", ".join(counted) or "unknown",
            figures=links,
            finding=f"no direct access between GPUs ({pairs}); NCCL copies through host memory"
            if pairs
            else "",
            remedy="Read `nvidia-smi topo -p2p r`; a virtual machine or an IOMMU may block it."
            if pairs
            else "",
        )


_GPU_REMEDIES = {
    False: f"This is a CPU build. Install a CUDA build of `torch{TORCH_RANGE}` (pytorch.org).",
    True: "Run `nvidia-smi`. Update the driver, or install a torch built for an older CUDA.",
}


def _host_rows(ranks: int, *, has_gpus: bool) -> Iterator[Row]:
    """Yield cores, memory, shared memory and limits of this host."""
    title = "Host"
    yield Row(section=title, name="cores", value=str(cores()), figures={"cores": cores()})
    memory = physical_memory()
    yield Row(section=title, name="memory", value=format_memory(memory), figures={"memory": memory})
    yield _shared_memory_row(ranks, has_gpus=has_gpus)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = max(_FILES, 2 * ranks)
    is_low = soft != resource.RLIM_INFINITY and soft < needed
    yield Row(
        section=title,
        name="open files",
        value=_limit_text(soft),
        figures={"soft": soft, "hard": hard},
        finding=f"a process may open {soft}; ranks keep a socket per other rank" * is_low,
        remedy=f"Run `ulimit -n {needed}` in the shell that starts the ranks." * is_low,
    )
    if _INFINIBAND.is_dir() and any(_INFINIBAND.iterdir()):
        locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
        is_low = locked != resource.RLIM_INFINITY
        yield Row(
            section=title,
            name="locked memory",
            value=_limit_text(locked),
            figures={"soft": locked},
            finding="NCCL registers memory with InfiniBand, which this limit may stop" * is_low,
            remedy="Run `ulimit -l unlimited`; in Docker, add `--ulimit memlock=-1`." * is_low,
        )


def _limit_text(limit: int) -> str:
    """Return a resource limit as text."""
    return "unlimited" if limit == resource.RLIM_INFINITY else str(limit)


def _shared_memory_row(ranks: int, *, has_gpus: bool) -> Row:
    """Return the row of /dev/shm, in which NCCL and DataLoader workers exchange data."""
    disk = shutil.disk_usage(_SHARED_MEMORY) if _SHARED_MEMORY.is_dir() else None
    total, free = (disk.total, disk.free) if disk else (0, 0)
    uses_nccl = has_gpus and ranks > 1
    finding = ""
    if free < (_ENOUGH_SHARED if uses_nccl else _LEAST_SHARED + 1):
        user = (
            f"NCCL's buffers of {with_noun(ranks, 'rank')}"
            if uses_nccl
            else "workers of a DataLoader"
        )
        finding = f"{format_memory(free)} are free, which {user} may exceed"
    return Row(
        section="Host",
        name=str(_SHARED_MEMORY),
        value=f"{format_memory(total)}, {format_memory(free)} free",
        figures={"total": total, "free": free},
        finding=finding,
        remedy="In Docker, add `--shm-size=1g` or `--ipc=host`; in Kubernetes, mount an emptyDir "
        "with `medium: Memory`."
        if finding
        else "",
        is_error=uses_nccl and free <= _LEAST_SHARED,
    )


def _folder_rows(run_dir: Path) -> Iterator[Row]:
    """Yield the folders that commands write: runs, temporary files and cached traces."""
    yield _folder_row("run folder", run_dir, "Choose another folder with `--run-dir DIR`.")
    try:
        temporary = Path(tempfile.gettempdir())
    except OSError:  # no folder that can be written, not even the current one
        temporary = Path("/tmp")
    yield _folder_row("temporary folder", temporary, "Set TMPDIR to another folder.")
    if cache.is_off():
        yield Row(section="Folders", name="cache folder", value="off (PTRAIN_CACHE=off)")
        return
    try:
        folder = cache.cache_folder()
    except RuntimeError:  # a user without a home
        folder = Path("~/.cache/ptrain")
    remedy = "Set PTRAIN_CACHE to another folder, or to `off`."
    yield _folder_row("cache folder", folder, remedy, is_needed=False)


def _folder_row(name: str, folder: Path, remedy: str, *, is_needed: bool = True) -> Row:
    """Return the row of a folder.

    Args:
        name: The name of the row.
        folder: The folder, which need not exist yet.
        remedy: The fix if it cannot be written or is nearly full.
        is_needed: A folder that cannot be written is an error, not a warning.
    """
    # Not Path.exists, which raises for a folder that this user may not search.
    there = next(place for place in (folder, *folder.absolute().parents) if os.path.exists(place))
    blocked = ""
    try:
        with tempfile.TemporaryFile(dir=there) as file:
            file.write(b"ptrain")  # a full disk still creates empty files
    except OSError as error:
        blocked = f"{folder} cannot be written: {error.strerror}"
    free = shutil.disk_usage(there).free
    finding = blocked or missing_space(there, _LEAST_DISK)
    return Row(
        section="Folders",
        name=name,
        value=f"{folder} · {format_bytes(free)} free",
        figures={"free": free},
        finding=finding,
        remedy=remedy * bool(finding),
        is_error=is_needed and bool(blocked),
    )


def _network_rows(port: int, facts: TorchFacts) -> Iterator[Row]:
    """Yield whether ports can be bound, and whether this host's name has an address."""
    title = "Network"
    blocked = _binding_error("127.0.0.1", 0)
    yield Row(
        section=title,
        name="loopback",
        value=blocked or "ports can be bound",
        finding=f"no port of 127.0.0.1 can be bound: {blocked}" if blocked else "",
        remedy="Run `ip link set lo up`, or allow local sockets in the sandbox." * bool(blocked),
        is_error=bool(blocked),
    )
    taken = _binding_error("", port)
    yield Row(
        section=title,
        name=f"port {port}",
        value=taken or "free",
        finding=f"the port of `--rdzv-endpoint` cannot be bound: {taken}" if taken else "",
        remedy=f"Use another port for several nodes, such as {port + 1}." * bool(taken),
    )
    if not facts.error:
        yield Row(
            section=title,
            name="host name",
            value=facts.host_error or socket.gethostname(),
            finding=f"gloo cannot resolve it under torchrun: {facts.host_error}"
            if facts.host_error
            else "",
            remedy="Set GLOO_SOCKET_IFNAME to an interface, such as `lo` on one node."
            * bool(facts.host_error),
        )


def _binding_error(address: str, port: int) -> str:
    """Return the reason why a TCP port cannot be bound, "" if it can."""
    try:
        with socket.socket() as opened:
            # as torch's store: connections in TIME_WAIT do not matter
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            opened.bind((address, port))
            opened.listen(1)  # only now fails a port that another process listens on
    except OSError as error:
        return os.strerror(error.errno or errno.EIO)
    return ""


def _library_rows(facts: TorchFacts) -> Iterator[Row]:
    """Yield the backends of collectives, and the parts that `compile` needs."""
    title, has_gpus = "Libraries of torch", bool(facts.gpus)
    yield Row(
        section=title,
        name="gloo",
        value="yes" if facts.has_gloo else "no",
        finding="" if facts.has_gloo else "this torch has no gloo, which ranks on CPUs need",
        remedy="" if facts.has_gloo else "Install a torch of pytorch.org.",
        is_error=not facts.has_gloo,
    )
    is_missing = has_gpus and not facts.nccl
    yield Row(
        section=title,
        name="NCCL",
        value=facts.nccl or "no",
        finding="this torch has no NCCL, which ranks on GPUs need" * is_missing,
        remedy="Install a CUDA build of torch, or use `backend=gloo`." * is_missing,
        is_error=is_missing,
    )
    triton = _package_version("triton")
    header = Path(sysconfig.get_path("include"), "Python.h")
    for name, value, needs, remedy in (
        ("C++ compiler", "yes" * facts.has_compiler, True, "Install g++ (`apt install g++`)."),
        (
            "Python.h",
            str(header) * header.is_file(),
            True,
            "Install it (`apt install python3-dev`).",
        ),
        ("Triton", triton, has_gpus, "Run `pip install triton`."),
    ):
        is_missing = needs and not value
        yield Row(
            section=title,
            name=name,
            value=value or "no",
            finding="is missing; `compile` needs it" * is_missing,
            remedy=remedy * is_missing,
        )
