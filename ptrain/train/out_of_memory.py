"""The record of a rank that runs out of memory, for `ptrain why-oom`.

Everything is found in the exception when it is raised: the frames of its traceback name the step
and the innermost module whose Python code ran. Steps that succeed only note their phase.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import torch
from torch import nn

from ptrain.codec import encode
from ptrain.cost import Phase, State
from ptrain.files import warn_if_unwritable, write_json
from ptrain.interpreter.program import Program
from ptrain.report.memory_failure import MemoryFailure
from ptrain.train.folder import RunFolder
from ptrain.train.journal import LOG
from ptrain.train.loop import train

# The CPU's allocator raises RuntimeError (c10/core/impl/alloc_cpu.cpp, torch 2.13).
_MESSAGE = re.compile(r"out of memory|can't allocate memory|not enough memory")
# `allocate 20.00 MiB` of CUDA's allocator, `you tried to allocate 1024 bytes` of the CPU's.
_REQUEST = re.compile(r"tried to allocate ([\d.]+) (bytes|KiB|MiB|GiB)", re.IGNORECASE)
_UNITS = {"bytes": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30}


class PhaseNote:
    """An observer that notes the phase of a program."""

    def __init__(self) -> None:
        self.latest = Phase.SETUP, 0

    def phase(self, phase: Phase, micro_batch: int) -> None:
        """Note that a phase begins."""
        self.latest = phase, micro_batch


@contextmanager
def record_memory_failure(program: Program, folder: RunFolder) -> Iterator[None]:
    """Temporarily write a record into the run folder if this rank runs out of memory.

    Args:
        program: The program that is trained.
        folder: The run folder.
    """
    program.observers.append(note := PhaseNote())
    try:
        yield
    except (RuntimeError, MemoryError) as error:  # OutOfMemoryError is a RuntimeError
        if is_out_of_memory(error):
            file = folder.memory_failure(program.world.rank)
            with warn_if_unwritable(file, LOG.warning):
                write_json(file, encode(describe_failure(program, error, note)))
        raise
    finally:
        program.observers.remove(note)


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if an error reports that memory could not be allocated."""
    return isinstance(error, MemoryError) or bool(_MESSAGE.search(str(error)))


def describe_failure(program: Program, error: BaseException, note: PhaseNote) -> MemoryFailure:
    """Return the state of this rank when it ran out of memory.

    Args:
        program: The program that was trained.
        error: The error, with its traceback.
        note: The phase in which it was raised.
    """
    (phase, micro_batch), world, frames = note.latest, program.world, [*_frames(error)]
    loops = [frame for frame in frames if frame.f_code is train.__code__]
    names = {id(module): name for name, module in program.model.named_modules() if name}
    running = [names.get(id(frame.f_locals.get("self"))) for frame in frames]
    modules = [name for name in running if name]
    is_gpu = world.device.type == "cuda"
    return MemoryFailure(
        rank=world.rank,
        error=(str(error).splitlines() or [type(error).__name__])[0][:500],
        step=int(loops[-1].f_locals["step"]) + 1 if loops else 0,
        phase=phase,
        micro_batch=micro_batch,
        module=program.wrapped.canonical_name(modules[-1]) if modules else "",
        requested_bytes=_requested_bytes(str(error)),
        live=_live_bytes(program),
        allocated_bytes=torch.cuda.memory_allocated(world.device) if is_gpu else None,
        device_memory=torch.cuda.mem_get_info(world.device)[1] if is_gpu else None,
    )


def _frames(error: BaseException) -> Iterator[FrameType]:
    """Yield the frames of an error's traceback, outermost first."""
    trace = error.__traceback__
    while trace is not None:
        yield trace.tb_frame
        trace = trace.tb_next


def _requested_bytes(text: str) -> int | None:
    """Return the bytes that an allocator's message says were requested, None without them."""
    match = _REQUEST.search(text)
    return round(float(match[1]) * _UNITS[match[2].lower()]) if match else None


def _live_bytes(program: Program) -> dict[State, int]:
    """Return the bytes on the device by state, without activations."""
    sizes: dict[State, dict[int, int]] = {}
    for state, tensor in program.storages():
        if tensor.device == program.world.device and not isinstance(tensor, nn.UninitializedBuffer):
            storage = tensor.untyped_storage()
            sizes.setdefault(state, {})[storage.data_ptr()] = storage.nbytes()
    return {state: sum(by_storage.values()) for state, by_storage in sizes.items()}
