"""CUDA's kernels without a GPU: a process in which torch believes in one, for fake tensors alone.

A CUDA build of torch chooses its kernels by what the runtime says of the device. `runtime.c` and
`driver.c` stand in for both libraries: they are compiled where they are needed, and loaded into a
process that is started for it. What its operators allocate, forward and backward, is then what they
allocate on a GPU of that compute capability; what kernels take within themselves, nobody sees. An
H100 has confirmed it with torch 2.11 (`benchmarks/gpu.sh`), and no other GPU.
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
from ptrain.output import standard_output

_SOURCES = Path(__file__).parent / "cuda"
_SM = "PTRAIN_SM"  # the runtime reads it too
_NAME = "a GPU that is not there"  # as runtime.c calls it
_HEADERS = ("cuda.h", "driver_types.h", "crt/host_defines.h")  # wheels have the last in another
_OF_TRITON = "backends/nvidia"


class Uncompiled(PtrainError):
    """What stands in for CUDA's libraries does not compile here."""


def is_on() -> bool:
    """Return whether this process is one of those."""
    if _SM not in os.environ or not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_name(0) == _NAME


def capability() -> str:
    """Return the compute capability of the GPU that it believes in: `90`."""
    return os.environ[_SM]


def lacking() -> str | None:
    """Return what is not there to ask CUDA's kernels, with the way to it; None where all is."""
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
    if not _compiler():
        return "there is no C compiler. Install gcc or clang."
    if _headers() is None:
        return (
            f"some headers of CUDA {_major()} are missing. Install the packages "
            "nvidia-cuda-runtime and nvidia-cuda-crt of this version, or the CUDA toolkit."
        )
    return None


def run(words: Sequence[str], sm: int) -> int:
    """Run `python WORDS` with a GPU of compute capability `sm` to believe in; return its exit code.
    SIGTERM is passed on; ask `lacking` first. Raises Uncompiled where the libraries do not compile,
    and PtrainError where a signal ended the process."""
    with tempfile.TemporaryDirectory(prefix="ptrain-") as folder, standard_output() as output:
        runtime = _compiled("runtime", Path(folder, "runtime.so"))
        driver = _compiled("driver", Path(folder, "libcuda.so.1"))
        preloaded = [str(runtime), *os.environ.get("LD_PRELOAD", "").split()]
        searched = [str(driver.parent), os.environ.get("LD_LIBRARY_PATH", "")]
        environment = {
            **os.environ,
            _SM: str(sm),
            "LD_PRELOAD": " ".join(preloaded),
            "LD_LIBRARY_PATH": ":".join(filter(None, searched)),
            "CUDA_VISIBLE_DEVICES": "0",
        }
        with subprocess.Popen([sys.executable, *words], env=environment, stdout=output) as child:
            code = _awaited(child)
    if code < 0:
        raise PtrainError(
            "error: the process that queries the CUDA kernels was ended by "
            f"{signal.Signals(-code).name}\n  remedy: Use a build of torch without CUDA, "
            "which predicts with the kernels of the CPU."
        )
    return code


def _awaited(child: subprocess.Popen[bytes]) -> int:
    if threading.current_thread() is not threading.main_thread():
        return child.wait()
    before = signal.signal(signal.SIGTERM, lambda *_: child.terminate())
    try:
        return child.wait()
    finally:
        signal.signal(signal.SIGTERM, before)


def _compiled(name: str, library: Path) -> Path:
    command = [*_compiler(), "-shared", "-fPIC", "-w", f"-Wl,-soname,{library.name}"]
    command += [f"-I{headers}"] if (headers := _headers()) else []
    ended = subprocess.run(
        [*command, str(_SOURCES / f"{name}.c"), "-o", str(library)],
        capture_output=True,
        text=True,
        check=False,
    )
    if ended.returncode:
        said = " ".join(ended.stderr.split())[:200]
        raise Uncompiled(
            f"{name}.c, which replaces the CUDA {name}, does not compile: {said}. Set CC to "
            "another compiler."
        )
    return library


def _compiler() -> list[str]:
    """The words that call it; none where there is none."""
    choices = map(shlex.split, (os.environ.get("CC", ""), "cc", "gcc", "clang"))
    return next((words for words in choices if words and shutil.which(words[0])), [])


def _version(headers: Path) -> str | None:
    """CUDA's major version, as its headers say: `13`."""
    text = (headers / "cuda.h").read_text(errors="replace")
    said = re.search(r"#define CUDA_VERSION (\d+)\d{3}\b", text)
    return said.group(1) if said else None


def _headers() -> Path | None:
    """The folder of CUDA's headers of torch's own version: of the wheels that torch's build for
    CUDA comes with, of a toolkit, or of triton (whose version may be another: 3.6 has 12's beside
    a torch for 13)."""
    roots: list[Path] = []
    for name, inner in (("nvidia", ("cuda_runtime", f"cu{_major()}")), ("triton", (_OF_TRITON,))):
        spec = find_spec(name)
        places = spec.submodule_search_locations or () if spec else ()
        roots += [Path(place, folder) for place in places for folder in inner]
    roots.append(Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")))
    folders = [root / "include" for root in roots]
    whole = [folder for folder in folders if all((folder / name).exists() for name in _HEADERS)]
    return next((folder for folder in whole if _version(folder) == _major()), None)


def _major() -> str:
    """The version of CUDA that torch is built for: `13`."""
    return str(torch.version.cuda).partition(".")[0]
