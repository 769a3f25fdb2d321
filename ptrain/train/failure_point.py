"""The point at which a rank ran out of memory, and its record in the run folder.

Before a failure only the last phase is kept, one assignment per pass. All other facts are read from
the traceback, the autograd graph and the program after the failure.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from inspect import unwrap
from types import CodeType, FrameType, TracebackType
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import Node

from ptrain.codec import encode
from ptrain.cost import Phase, State
from ptrain.errors import RankFailed
from ptrain.files import write_json
from ptrain.internals.autograd import running_node
from ptrain.interpreter.program import Program, interpret
from ptrain.models.ledger import storage_of, tier_of
from ptrain.report.out_of_memory import OutOfMemory, is_out_of_memory, parse_request
from ptrain.runtime.world import World
from ptrain.spec.placement import Tier
from ptrain.train import checkpoint
from ptrain.train.folder import RunFolder
from ptrain.train.loop import train
from ptrain.train.saving import CheckpointSaver

# `unwrap`, because `torch.no_grad` gives all functions that it decorates the same code.
_ACTIVITIES: Mapping[CodeType, str] = {
    unwrap(function).__code__: activity
    for function, activity in (
        (interpret, "building the model"),
        (checkpoint.resume_training, "loading the checkpoint"),
        (CheckpointSaver.save, "saving a checkpoint"),
        (Program.evaluate, "evaluating"),
    )
}
# The local variables of torch's functions that hold the roots of a backward pass.
_ROOTS = {torch.autograd.backward.__code__: "tensors", torch.autograd.grad.__code__: "outputs"}


class FailurePoint:
    """An observer of a program that keeps the current phase and micro-batch (from 0)."""

    def __init__(self) -> None:
        self.program: Program | None = None
        self.current: tuple[Phase, int] | None = None

    def observe_program(self, program: Program) -> None:
        """Observe the phases of a program."""
        self.program = program
        program.observers.append(self)

    def phase(self, phase: Phase, micro_batch: int) -> None:
        """Note that `phase` begins for this micro-batch."""
        self.current = phase, micro_batch


@contextmanager
def record_out_of_memory(folder: RunFolder, world: World) -> Iterator[FailurePoint]:
    """Temporarily observe a training, and write a record if it runs out of memory.

    Args:
        folder: The run folder. Records of earlier attempts are removed.
        world: The ranks.

    Yields:
        The point, whose `observe_program` takes the program once it is built.
    """
    for file in folder.memory_failures():
        file.unlink(missing_ok=True)
    point = FailurePoint()
    try:
        yield point
    except (RuntimeError, MemoryError, RankFailed) as error:
        # A pipeline stage reports the exception of a pass as RankFailed.
        own = error.__cause__ or error
        message = f"{type(own).__name__}: {own}".splitlines()[0]
        if is_out_of_memory(message) or isinstance(own, torch.OutOfMemoryError | MemoryError):
            # The error itself matters more than its record.
            with suppress(OSError, RuntimeError, MemoryError, AttributeError, KeyError):
                record = describe_failure(point, error, message, world)
                write_json(folder.memory_failure(world.rank), encode(record))
        raise


def describe_failure(
    point: FailurePoint, error: BaseException, message: str, world: World
) -> OutOfMemory:
    """Return the record of a failed allocation.

    Args:
        point: The observer of the training.
        error: The exception, with its traceback.
        message: Its first line, with the name of its class.
        world: The ranks.
    """
    frames = [*_frames_of(error.__traceback__)]
    if error.__cause__ is not None:
        frames += _frames_of(error.__cause__.__traceback__)
    codes = [frame.f_code for frame in frames]
    activity = next((name for code, name in _ACTIVITIES.items() if code in codes), "training")
    in_loop = next((frame.f_locals for frame in frames if frame.f_code is train.__code__), {})
    phase, micro_batch = point.current or (None, 0)
    if activity != "training" or "step" not in in_loop:
        phase = None
    is_pass = phase in (Phase.FORWARD, Phase.BACKWARD)
    on_gpu = world.device.type == "cuda"
    return OutOfMemory(
        rank=world.rank,
        time=time.time(),
        message=message,
        requested_bytes=parse_request(message),
        activity=activity,
        step=in_loop["step"] + 1 if phase else None,
        phase=phase,
        micro_batch=micro_batch + 1 if is_pass else None,
        module=_running_module(point.program, frames) if point.program else "",
        live_bytes=_live_bytes(point.program, world.device) if point.program else {},
        reserved_bytes=torch.cuda.memory_reserved(world.device) if on_gpu else None,
        free_bytes=torch.cuda.mem_get_info(world.device)[0] if on_gpu else None,
    )


def _frames_of(trace: TracebackType | None) -> Iterator[FrameType]:
    """Yield the frames of a traceback, outermost first."""
    while trace is not None:
        yield trace.tb_frame
        trace = trace.tb_next


def _running_module(program: Program, frames: list[FrameType]) -> str:
    """Return the name of the module that ran, "" if unknown.

    In a backward pass, operators run without frames of modules, unless a block is recomputed. The
    graph then leads to the module by its parameters.
    """
    names = {
        id(module): program.wrapped.canonical_name(name)
        for piece in program.pieces
        for name, module in piece.module.named_modules()
    }
    for frame in reversed(frames):
        if local := _ROOTS.get(frame.f_code):
            if frame.f_locals["retain_graph"]:  # then no saved tensor is freed
                return ""
            tensors = frame.f_locals[local]
            roots = (tensors,) if isinstance(tensors, torch.Tensor) else tensors
            nodes = [running_node(root.grad_fn) for root in roots if root.grad_fn is not None]
            return _module_of_node(program, next(filter(None, nodes), None))
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module) and (name := names.get(id(module))):
            return name
    return ""


def _module_of_node(program: Program, node: Node | None) -> str:
    """Return the module of the parameter that is nearest to a node in the graph, "" without one."""
    names: dict[Any, str] = {}
    for piece in program.pieces:
        for name, parameter in piece.module.named_parameters():
            names[parameter] = program.wrapped.canonical_name(name)
    level = [node] if node is not None else []
    seen = set(level)
    while level:
        for reached in level:
            if name := names.get(getattr(reached, "variable", None)):
                return name.rpartition(".")[0]
        nexts = [after for reached in level for after, _ in reached.next_functions if after]
        level = [after for after in dict.fromkeys(nexts) if after not in seen]
        seen.update(level)
    return ""


def _live_bytes(program: Program, device: torch.device) -> dict[str, int]:
    """Return the live device bytes by state; activations only where an allocator counts them."""
    sizes, seen = dict.fromkeys(map(str, State), 0), set[int]()
    for state, tensor in program.storages():
        storage = storage_of(tensor)
        if storage._cdata not in seen and tier_of(storage, device.type) is Tier.DEVICE:
            sizes[str(state)] += storage.nbytes()
        seen.add(storage._cdata)
    del sizes[str(State.ACTIVATIONS)]
    if device.type == "cuda":
        others = torch.cuda.memory_allocated(device) - sum(sizes.values())
        sizes[str(State.ACTIVATIONS)] = others
    return sizes
