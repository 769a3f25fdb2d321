"""Programs that torch.compile generates (torch/_inductor/codegen/wrapper.py): how a dispatch mode
sees what they allocate.

Dynamo compiles and runs a region under a mode that declares `ignore_compile_internals`. Under any
other mode it runs the region operator by operator, or raises with `fullgraph=True`. Operators that
a generated program calls (products, attention, collectives) reach the mode. Its buffers do not:
they come from C functions that pass the dispatcher by.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch._dynamo
import torch._functorch.config
import torch._inductor.config
from torch._guards import TracingContext
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode

from ptrain.internals.part import PrivatePart, replaced

_DEVICES = ("cpu", "cuda")
_KERNELS = ("cpp_pybinding", "cpp", "triton")
_guards: Any = torch._C._dynamo.guards

PARTS = (
    PrivatePart(owner=torch._dynamo.config, members=("optimize_ddp", "recompile_limit")),
    PrivatePart(owner=_guards, members=("_reinterpret_tensor", "assert_size_stride")),
    PrivatePart(owner=TorchDispatchMode, members=("ignore_compile_internals",)),
    PrivatePart(owner=TracingContext, members=("try_get",)),
    PrivatePart(owner=HigherOrderOperator, members=("name",)),
    PrivatePart(owner=_guards, members=tuple(f"_empty_strided_{device}" for device in _DEVICES)),
)


# Distinct blocks of all programs of a process, at most: torch raises beyond it, since a block has
# one program for each set of shapes, dtypes and modes that it is called with.
_PROGRAMS = 256


def compile_whole(function: Callable[..., Any], backend: str, *, draws: bool) -> Callable[..., Any]:
    """Return `function` as one program of torch.compile without graph breaks, for static shapes.

    With `draws` random numbers are those of the operators one by one; inductor's own generator
    has others. DDP's own splitting of programs at buckets is switched off: a block's gradients
    are smaller than a bucket, and its second fake mode fails on fake tensors.
    """
    torch._dynamo.config.optimize_ddp = False
    torch._dynamo.config.recompile_limit = max(_PROGRAMS, torch._dynamo.config.recompile_limit)
    options = {"fallback_random": True} if draws and backend == "inductor" else None
    compiled: Callable[..., Any] = torch.compile(
        function, fullgraph=True, dynamic=False, backend=backend, options=options
    )
    return compiled


def is_compiling() -> bool:
    """Return whether Dynamo reads the caller, whose Python then does not run."""
    compiling: bool = torch.compiler.is_dynamo_compiling()
    return compiling


def is_higher_order(function: Any) -> bool:
    """Return whether an operator takes functions, as `run_and_save_rng_state` does."""
    return isinstance(function, HigherOrderOperator)


def is_tracing() -> bool:
    """Return whether the compiler runs operators on fake tensors, to trace or lower a region."""
    return TracingContext.try_get() is not None


_CACHES = ("fx_graph_cache", "fx_graph_remote_cache", "autotune_local_cache")
_CHECKS = ("size_asserts", "alignment_asserts", "cpp_wrapper")


@contextmanager
def silent_programs() -> Iterator[None]:
    """Temporarily make programs whose kernels compute nothing. What such a program allocates,
    reuses and frees, and the operators that it calls, are those of the program that would run; no
    C++ compiler is needed. What is compiled within it is gone behind it, and what was compiled
    before: torch keeps programs by their text, in which kernels are names."""
    # Imported here, since it may start worker processes of Triton; so it is not among PARTS.
    from torch._inductor.async_compile import AsyncCompile

    options = dict.fromkeys((*_CACHES, *_CHECKS), False)
    _forget_programs()
    try:
        with (
            replaced(AsyncCompile, **dict.fromkeys(_KERNELS, _silent)),
            replaced(_guards, _reinterpret_tensor=_reinterpreted, assert_size_stride=_unchecked),
            torch._inductor.config.patch(**options),
            torch._functorch.config.patch(enable_autograd_cache=False),
        ):
            yield
    finally:
        _forget_programs()


def _forget_programs() -> None:
    torch._dynamo.reset()
    if codecache := sys.modules.get("torch._inductor.codecache"):
        codecache.PyCodeCache.cache_clear()


class _SilentKernel:
    def __call__(self, *_: Any, **__: Any) -> None: ...

    def run(self, *_: Any, **__: Any) -> None: ...


def _silent(*_: Any, **__: Any) -> _SilentKernel:
    return _SilentKernel()


def _unchecked(*_: Any) -> None: ...


@torch.no_grad()
def _reinterpreted(x: torch.Tensor, size: Any, stride: Any, offset: int = 0) -> torch.Tensor:
    """The same by an operator, which fake tensors know."""
    return x.as_strided(size, stride, x.storage_offset() + offset)


Allocate = Callable[[Any, Any, torch.dtype], torch.Tensor]


@contextmanager
def seen_buffers() -> Iterator[None]:
    """Temporarily make generated programs allocate by `torch.empty_strided`, which modes see.

    A program binds the C function as a global when it is loaded. So the loaded programs change, and
    the name from which later ones take it; at the end both change back.
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
        with replaced(_Buffers, are_born=True):
            return torch.empty_strided(size, stride, dtype=dtype, device=device)

    return allocate


class _Buffers:
    are_born = False


def is_buffer() -> bool:
    """Return whether the operator that runs allocates a buffer of a generated program."""
    return _Buffers.are_born


def _bind(old: dict[str, Any], new: dict[str, Any]) -> None:
    for device, function in new.items():
        setattr(_guards, f"_empty_strided_{device}", function)
    codecache = sys.modules.get("torch._inductor.codecache")  # absent if nothing was compiled
    for program in codecache.PyCodeCache.modules if codecache else ():
        for device, function in new.items():
            name = f"empty_strided_{device}"
            if getattr(program, name, None) is old[device]:
                setattr(program, name, function)
