"""Programs that torch.compile generates (torch/_inductor/codegen/wrapper.py), and how a dispatch
mode sees their allocations.

Dynamo compiles and runs a region under a mode that declares `ignore_compile_internals`. Under any
other mode it runs the region eagerly, or raises with `fullgraph=True`. Operators that a generated
program calls (matrix products, attention, collectives) reach the mode. Its buffers do not, because
C functions allocate them and bypass the dispatcher.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch._dynamo
import torch._functorch.config
import torch._inductor.config
from torch._guards import TracingContext
from torch._ops import HigherOrderOperator, OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from ptrain.internals.part import PrivatePart, replace_attributes

_DEVICES = ("cpu", "cuda")
_KERNELS = ("cpp", "triton")
_guards: Any = torch._C._dynamo.guards

PARTS = (
    PrivatePart(owner=torch._dynamo.config, members=("optimize_ddp", "recompile_limit")),
    PrivatePart(owner=_guards, members=("_reinterpret_tensor", "assert_size_stride")),
    PrivatePart(owner=TorchDispatchMode, members=("ignore_compile_internals",)),
    PrivatePart(owner=TracingContext, members=("try_get",)),
    PrivatePart(owner=HigherOrderOperator, members=("name",)),
    PrivatePart(owner=_guards, members=tuple(f"_empty_strided_{device}" for device in _DEVICES)),
)


# The recompile limit of a process. torch raises above it, and a block has one program for each set
# of shapes, dtypes and modes with which it is called.
_PROGRAMS = 256


def compile_whole(function: Callable[..., Any], backend: str, *, draws: bool) -> Callable[..., Any]:
    """Compile a function without graph breaks, for static shapes.

    DDP's splitting of programs at buckets is switched off, because a block's gradients are smaller
    than a bucket, and DDPOptimizer's second fake mode fails on fake tensors.

    Args:
        function: The function.
        backend: The backend of torch.compile.
        draws: True if the function draws random numbers. Then inductor uses eager generators
            (`fallback_random`), so that the numbers equal the ones of eager mode.

    Returns:
        The compiled function.
    """
    torch._dynamo.config.optimize_ddp = False
    torch._dynamo.config.recompile_limit = max(_PROGRAMS, torch._dynamo.config.recompile_limit)
    options = {"fallback_random": True} if draws and backend == "inductor" else None
    compiled: Callable[..., Any] = torch.compile(
        function, fullgraph=True, dynamic=False, backend=backend, options=options
    )
    return compiled


def is_compiling() -> bool:
    """Return True if Dynamo traces the caller, so that its Python code does not run."""
    compiling: bool = torch.compiler.is_dynamo_compiling()
    return compiling


def is_higher_order(function: Any) -> bool:
    """Return True if an operator takes functions, as `run_and_save_rng_state` does."""
    # The class is abstract, so that `isinstance` takes five times as long as comparing types.
    return type(function) is not OpOverload and isinstance(function, HigherOrderOperator)


def is_tracing() -> bool:
    """Return True if the compiler runs operators on fake tensors to trace or lower a region."""
    return TracingContext.try_get() is not None


# A cache would return a program with real kernels, or keep a silent one for later runs.
_CACHES = ("fx_graph_cache", "fx_graph_remote_cache", "autotune_local_cache")
_CHECKS = ("size_asserts", "alignment_asserts", "cpp_wrapper")


@contextmanager
def silent_programs() -> Iterator[None]:
    """Temporarily compile programs whose kernels compute nothing.

    Such a program allocates, reuses and frees the same buffers and calls the same operators as the
    real one, and builds no kernels. All programs are dropped before and after: torch caches
    programs by their text, in which kernels are only names, so silent and real ones would mix.
    """
    # Imported here and not listed in PARTS, because the import may start Triton's worker processes.
    from torch._inductor.async_compile import AsyncCompile

    options = dict.fromkeys((*_CACHES, *_CHECKS), False)
    _forget_programs()
    try:
        with (
            replace_attributes(
                AsyncCompile, cpp_pybinding=_SilentKernel, **dict.fromkeys(_KERNELS, _UnknownKernel)
            ),
            replace_attributes(
                _guards, _reinterpret_tensor=_reinterpret_tensor, assert_size_stride=_skip_check
            ),
            torch._inductor.config.patch(**options),
            torch._functorch.config.patch(enable_autograd_cache=False),
            seen_buffers(),  # under fake tensors the C functions would allocate real ones
        ):
            yield
    finally:
        _forget_programs()


def lacks_compiler() -> bool:
    """Return True if inductor finds no C++ compiler.

    On CPUs it needs one even to generate a program, because it builds a test for each of the
    processor's instruction sets (torch/_inductor/cpu_vec_isa.py, 2.13).
    """
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return True
    return False


def _forget_programs() -> None:
    torch._dynamo.reset()
    if codecache := sys.modules.get("torch._inductor.codecache"):
        # `torch._dynamo.reset` drops Dynamo's programs, and inductor's loaded modules stay in this
        # cache.
        codecache.PyCodeCache.cache_clear()


class ProgramKernel(NamedTuple):
    """A run of a fused kernel of a generated program.

    Attributes:
        inputs: The tensors that it reads.
        outputs: The tensors that it writes; tensors that it changes in place are in both.
        source: Its source code.
    """

    inputs: Sequence[torch.Tensor]
    outputs: Sequence[torch.Tensor]
    source: str


NoteKernel = Callable[[ProgramKernel | None], None]
_observers: list[NoteKernel] = []


@contextmanager
def observe_kernels(note: NoteKernel) -> Iterator[None]:
    """Temporarily call `note` with each run of a silent kernel; None if its arguments are
    unknown."""
    _observers.append(note)
    try:
        yield
    finally:
        _observers.remove(note)


class _SilentKernel:
    """A kernel of a CPU that computes nothing.

    inductor declares tensors that a kernel changes in place first, then its inputs, which are
    const, then its outputs (torch/_inductor/codegen/common.py, KernelArgs, 2.13).
    """

    def __init__(self, types: Sequence[str], source: str) -> None:
        self._types, self._source = types, source
        self._in_place = len(set(re.findall(r"\bin_out_ptr\d+", source)))

    def __call__(self, *arguments: Any) -> None:
        inputs, outputs = [], []
        for place, (kind, argument) in enumerate(zip(self._types, arguments, strict=True)):
            if isinstance(argument, torch.Tensor):  # others are sizes
                if kind.startswith("const") or place < self._in_place:
                    inputs.append(argument)
                if not kind.startswith("const"):
                    outputs.append(argument)
        for note in _observers:
            note(ProgramKernel(inputs, outputs, self._source))


class _UnknownKernel:
    """A kernel that computes nothing and does not show its arguments."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __call__(self, *_: Any, **__: Any) -> None:
        for note in _observers:
            note(None)

    run = __call__


def _skip_check(*_: Any) -> None: ...


@torch.no_grad()
def _reinterpret_tensor(x: torch.Tensor, size: Any, stride: Any, offset: int = 0) -> torch.Tensor:
    """Replace the C function by an operator, because fake tensors support only operators."""
    # The C function counts the offset from the tensor's first element, and `as_strided` from that
    # of the storage.
    with replace_attributes(_Buffers, are_born=True):
        return x.as_strided(size, stride, x.storage_offset() + offset)


Allocate = Callable[[Any, Any, torch.dtype], torch.Tensor]


@contextmanager
def seen_buffers() -> Iterator[None]:
    """Temporarily make generated programs allocate by `torch.empty_strided`, which modes see.

    A program binds the C function as a global when it is loaded. So the globals of loaded programs
    are patched, and the attribute that later programs import; both are restored at the end.
    """
    plain = {device: getattr(_guards, f"_empty_strided_{device}") for device in _DEVICES}
    seen = {device: _by_operator(device) for device in _DEVICES}
    _bind(plain, seen)
    try:
        yield
    finally:
        _bind(seen, plain)


def _by_operator(device: str) -> Allocate:
    def allocate(size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
        # torch.empty_strided is also called by code that is not generated, hence a flag and not the
        # operator's name.
        with replace_attributes(_Buffers, are_born=True):
            return torch.empty_strided(size, stride, dtype=dtype, device=device)

    return allocate


class _Buffers:
    are_born = False


def is_buffer() -> bool:
    """Return True if the current operator replaces a C function of a generated program, which
    allocates a buffer or returns a view of one."""
    return _Buffers.are_born


def _bind(old: dict[str, Any], new: dict[str, Any]) -> None:
    """Replace the allocation functions by device, in torch and in all loaded programs."""
    for device, function in new.items():
        setattr(_guards, f"_empty_strided_{device}", function)
    codecache = sys.modules.get("torch._inductor.codecache")  # absent if nothing was compiled
    for program in codecache.PyCodeCache.modules if codecache else ():
        for device, function in new.items():
            name = f"empty_strided_{device}"
            # A program of another device has no such global, and other code may have replaced it.
            if getattr(program, name, None) is old[device]:
                setattr(program, name, function)
