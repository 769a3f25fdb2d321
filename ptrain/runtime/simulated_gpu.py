"""CUDA kernel selection without a GPU: a process whose torch detects a GPU, for fake tensors only.

A CUDA build of torch selects kernels by the runtime's description of the device. `runtime.c` and
`driver.c` replace the two CUDA libraries. They are compiled on demand and preloaded into a new
process. The forward and backward operators in this process allocate the same bytes as on a GPU of
the given compute capability; memory that kernels use internally is not seen. The allocations were
confirmed on an H100 with torch 2.11 (`benchmarks/gpu.sh`), and on no other GPU.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import torch

from ptrain.errors import PtrainError
from ptrain.files import temporary_folder
from ptrain.output import standard_output

_SOURCES = Path(__file__).parent / "cuda"
_SM = "PTRAIN_SM"  # runtime.c reads it too
_NAME = "a GPU that is not there"  # the device name in runtime.c
# the wheels have the last one in a separate package
_HEADERS = ("cuda.h", "driver_types.h", "crt/host_defines.h")
_TRITON_FOLDER = "backends/nvidia"


class StubsNotCompiled(PtrainError):
    """The replacements of CUDA's libraries do not compile on this machine."""


def is_on() -> bool:
    """Return True if this process runs with the replaced libraries."""
    if _SM not in os.environ or not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_name(0) == _NAME


def compute_capability() -> str:
    """Return the compute capability of the simulated GPU, such as `90`."""
    return os.environ[_SM]


def missing_requirement() -> str | None:
    """Return the first missing requirement and its fix, None if CUDA's kernels can be queried."""
    if not sys.platform.startswith("linux"):
        return "CUDA kernels can only be queried on Linux"
    if torch.version.cuda is None:
        return (
            f"torch {torch.__version__} is built without CUDA. Install a CUDA build; no "
            "GPU is needed."
        )
    if _SM in os.environ:
        return "torch does not detect the simulated GPU"
    if set(tempfile.gettempdir()) & set(" :"):
        return (
            "the folder of temporary files has a space or a colon in its path. Set TMPDIR "
            "to another folder."
        )
    if not _compiler_command():
        return "there is no C compiler. Install gcc or clang."
    if _cuda_headers() is None:
        return (
            f"some headers of CUDA {_torch_cuda_major()} are missing. Install the packages "
            "nvidia-cuda-runtime and nvidia-cuda-crt of this version, or the CUDA toolkit."
        )
    return None


def run_python(words: Sequence[str], sm: int) -> int:
    """Run `python WORDS` with a simulated GPU, and return its exit code.

    SIGTERM is passed on to the process. Call `missing_requirement` first.

    Args:
        words: Arguments of the Python interpreter.
        sm: Compute capability of the GPU, such as 90.

    Raises:
        StubsNotCompiled: The libraries do not compile.
        PtrainError: A signal ended the process.
    """
    with temporary_folder() as folder, standard_output() as output:
        runtime = _compile_library("runtime", folder / "runtime.so")
        driver = _compile_library("driver", folder / "libcuda.so.1")
        preloaded = [str(runtime), *os.environ.get("LD_PRELOAD", "").split()]
        searched = [str(driver.parent), os.environ.get("LD_LIBRARY_PATH", "")]
        environment = {
            **os.environ,
            _SM: str(sm),
            "LD_PRELOAD": " ".join(preloaded),
            "LD_LIBRARY_PATH": ":".join(filter(None, searched)),
            "CUDA_VISIBLE_DEVICES": "0",
        }
        # A new process, because LD_PRELOAD is read when a process starts.
        with subprocess.Popen([sys.executable, *words], env=environment, stdout=output) as child:
            code = _wait_for(child)
    if code < 0:
        raise PtrainError(
            "error: the process that queries the CUDA kernels was ended by "
            f"{signal.Signals(-code).name}\n  remedy: Use a build of torch without CUDA, "
            "which predicts with the kernels of the CPU."
        )
    return code


def _wait_for(child: subprocess.Popen[bytes]) -> int:
    """Wait for the process and return its exit code; pass SIGTERM on if this is the main thread."""
    # signal.signal works in the main thread only.
    if threading.current_thread() is not threading.main_thread():
        return child.wait()
    before = signal.signal(signal.SIGTERM, lambda *_: child.terminate())
    try:
        return child.wait()
    finally:
        signal.signal(signal.SIGTERM, before)


def _compile_library(name: str, library: Path) -> Path:
    """Compile one of the replacements to a shared library."""
    command = [*_compiler_command(), "-shared", "-fPIC", "-w", f"-Wl,-soname,{library.name}"]
    command += [f"-I{headers}"] if (headers := _cuda_headers()) else []
    ended = subprocess.run(
        [*command, str(_SOURCES / f"{name}.c"), "-o", str(library)],
        capture_output=True,
        text=True,
        check=False,
    )
    if ended.returncode:
        said = " ".join(ended.stderr.split())[:200]
        raise StubsNotCompiled(
            f"{name}.c, which replaces the CUDA {name}, does not compile: {said}. Set CC to "
            "another compiler."
        )
    return library


def _compiler_command() -> list[str]:
    """Return the command of the C compiler, split into words; empty if there is none."""
    choices = map(shlex.split, (os.environ.get("CC", ""), "cc", "gcc", "clang"))
    return next((words for words in choices if words and shutil.which(words[0])), [])


def _cuda_version(headers: Path) -> str | None:
    """Return CUDA's major version from its headers, such as `13`, None if it is not found."""
    text = (headers / "cuda.h").read_text(errors="replace")
    said = re.search(r"#define CUDA_VERSION (\d+)\d{3}\b", text)
    return said.group(1) if said else None


def _cuda_headers() -> Path | None:
    """Return the folder of CUDA's headers of the version that torch was built for, None if missing.

    It searches the wheels that torch's CUDA builds depend on, triton, and a toolkit. triton's
    headers may have another version: triton 3.6 has headers of CUDA 12 even with a torch for CUDA
    13.
    """
    roots: list[Path] = []
    for name, inner in (
        ("nvidia", ("cuda_runtime", f"cu{_torch_cuda_major()}")),
        ("triton", (_TRITON_FOLDER,)),
    ):
        spec = find_spec(name)
        places = spec.submodule_search_locations or () if spec else ()
        roots += [Path(place, folder) for place in places for folder in inner]
    roots.append(Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")))
    folders = [root / "include" for root in roots]
    whole = [folder for folder in folders if all((folder / name).exists() for name in _HEADERS)]
    return next((folder for folder in whole if _cuda_version(folder) == _torch_cuda_major()), None)


def _torch_cuda_major() -> str:
    """Return the major version of CUDA that torch was built for, such as `13`."""
    return str(torch.version.cuda).partition(".")[0]
