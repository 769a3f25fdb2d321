"""One rank of a job on fake ranks: the program that trains, from its wrapping to a steady step.

With fake tensors nothing is allocated and nothing computed; with real ones (a rehearsal) one device
does all that the rank would do, and only the other ranks are missing. Either way collectives move
nothing, so that values are garbage: bytes, operations and the order of things are what is true.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch

from ptrain.costs import Column, Estimate, add_traffic
from ptrain.data.sampler import LocalBatch
from ptrain.derivation.allocator import AllocatedStep
from ptrain.errors import RankFailed, refused
from ptrain.interpreter.program import Observer, Program, interpret
from ptrain.meters.traffic import TrafficMeter
from ptrain.models.dropout import kernels_of
from ptrain.models.fake_values import READ
from ptrain.report.composition import MemoryHistory
from ptrain.rooms.fake import fake_tensors, fake_world
from ptrain.rooms.patches import patched
from ptrain.rooms.world import World
from ptrain.simulation.living import LivingMeter
from ptrain.simulation.modules import Modules
from ptrain.simulation.operations import OperationsMeter
from ptrain.spec.model import HuggingFaceModel, ModelShape
from ptrain.spec.spec import Spec
from ptrain.train.probe import FIRST_STEADY, set_up

_LR = 1e-3
_ROOM = "leave --rehearse out: fake tensors take none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """What one rank would hold, send and compute. Seconds are those of the simulation."""

    rank: int
    device: str
    estimate: Estimate
    course: MemoryHistory
    allocated: AllocatedStep
    seconds: dict[str, float]


def simulate(
    spec: Spec, rank: int = 0, *, rehearse: bool = False, allow_import: bool = False
) -> Simulated:
    """Rank `rank` of a legal spec, in this process, which must have no process group.

    `rehearse`: with real tensors, on the spec's device. Raises PtrainError for a torch that this
    was not written for, and whatever `interpret` raises.
    """
    device = rehearsal_device(spec) if rehearse else torch.device("cpu")
    world = fake_world(rank, spec.world_size, device)
    try:
        with (
            patched(spec.model),
            kernels_of(is_for_cuda=spec.is_for_cuda and not rehearse),
            nullcontext() if rehearse else fake_tensors(),
            _refusing(spec, device),
        ):
            return _simulated(spec, world, allow_import=allow_import)
    finally:
        world.close()
        gc.collect()  # a program is a cycle, and what a rehearsed one holds is real
        if device.type == "cuda":
            torch.cuda.empty_cache()


def rehearsal_device(spec: Spec) -> torch.device:
    """The first GPU, unless there is none or the spec says cpu. Raises SpecError where the spec
    says cuda and there is none."""
    if torch.cuda.is_available() and spec.device != "cpu":
        return torch.device("cuda", 0)
    if spec.device == "cuda":
        raise refused("device", "no GPU was found to rehearse on", "write device: cpu, or auto")
    return torch.device("cpu")


@contextmanager
def _refusing(spec: Spec, device: torch.device) -> Iterator[None]:
    """What cannot be simulated, in words; a pipeline wraps what its stages raise."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise refused("--rehearse", f"{device} has too little memory: {error}", _ROOM) from error
    except (*READ, RankFailed) as error:
        cause = error.__cause__ if isinstance(error, RankFailed) else error
        if not isinstance(cause, READ):
            raise
        finding = f"the model reads a value off a tensor ({_line(cause)}), and fake ones have none"
        raise refused("model", finding, "rehearse it with real tensors: --rehearse") from error


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:120]


def _simulated(spec: Spec, world: World, *, allow_import: bool) -> Simulated:
    began = time.perf_counter()
    program = interpret(spec, world=world, allow_import=allow_import)
    wrapped = time.perf_counter()
    estimate, memory = _steady_step(program, _batch(program))
    return Simulated(
        rank=world.rank,
        device=str(world.device),
        estimate=estimate,
        course=memory.course(),
        allocated=memory.step,
        seconds={"interpret": wrapped - began, "steps": time.perf_counter() - wrapped},
    )


def _batch(program: Program) -> LocalBatch:
    """Of the spec's shape; which tokens does not matter."""
    spec = program.spec
    rows = spec.batch.accumulate * spec.batch.micro
    tokens = torch.zeros(rows, spec.batch.sequence + 1, dtype=torch.int64)
    return LocalBatch(
        tokens=tokens.to(program.world.device), global_tokens=spec.batch.tokens, sample_ids=()
    )


def _steady_step(program: Program, batch: LocalBatch) -> tuple[Estimate, LivingMeter]:
    """The third step, and of the second what happens once: as a training measures them."""
    for _ in range(FIRST_STEADY - 1):
        _step(program, batch)
    before = _traffic_meter(program)
    with _observing(program, before), before:
        _step(program, batch)
    rank, device = program.world.rank, program.world.device.type
    modules, traffic = Modules(program.model, _vocab(program.spec)), _traffic_meter(program)
    memory = LivingMeter(program, modules, rank=rank, device=device)
    operations = OperationsMeter(rank=rank)
    with (
        _observing(program, memory, traffic, operations),
        memory.listening(),
        modules,
        memory,
        traffic,
        operations,
    ):
        _step(program, batch)
    rows = traffic.rows()
    estimate = Estimate(
        column=Column.SIMULATED,
        world_size=program.world.size,
        memory=memory.footprints(),
        peak=memory.peaks(),
        traffic=add_traffic((*rows, *set_up(before.rows(), rows))),
        operations=(operations.row(),),
        undefined={"wire": "fake ranks have no sockets"},
    )
    return estimate, memory


def _vocab(spec: Spec) -> int | None:
    """None of a model that only its code knows."""
    match spec.model:
        case ModelShape(vocab=vocab):
            return vocab
        case HuggingFaceModel(config=config):
            given = config.get("vocab_size")
            return given if isinstance(given, int) else None
    return None


def _step(program: Program, batch: LocalBatch) -> None:
    program.forward_backward(batch, _LR)
    program.step(_LR)


def _traffic_meter(program: Program) -> TrafficMeter:
    return TrafficMeter(
        program.registry, program.mesh.axes_by_group(), device=program.world.device.type
    )


@contextmanager
def _observing(program: Program, *observers: Observer) -> Iterator[None]:
    program.observers.extend(observers)
    try:
        yield
    finally:
        for observer in observers:
            program.observers.remove(observer)
