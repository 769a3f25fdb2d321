"""Run one rank of a job on fake ranks: the program that trains, from its wrapping to a steady step.

With fake tensors nothing is allocated and nothing computed; with real ones (a rehearsal) one device
does all that the rank would do, and only the other ranks are missing. Either way collectives move
nothing, so values are garbage; bytes, operations and their order are true.

Floating-point operations are those of the operators that a rank runs on its own tensors, by torch's
own formulas (`torch.utils.flop_counter`), forward, backward and recomputed. torch's counter itself
works above DTensor, where operators have the global shapes, and does not know fused attention on a
CPU, nor the fused loss; this one works below and does.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from ptrain.axes.expert.run.apply import StatedRouting
from ptrain.cost import Column, Estimate, Operations, Phase, add_traffic
from ptrain.data.sampler import blank_batch
from ptrain.derivation.allocator import AllocatedStep, AllocatorEvent, Reserved, reserved
from ptrain.derivation.workspaces import products
from ptrain.errors import RankFailed, refused
from ptrain.internals.fakes import READ
from ptrain.interpreter.program import Program, interpret
from ptrain.meters.traffic import TrafficMeter
from ptrain.models.ledger import OperatorMode
from ptrain.models.objective import StepBatch
from ptrain.models.watch import listening, runs_again, watching
from ptrain.models.work import products as product_sizes
from ptrain.report.simulation import MemoryHistory
from ptrain.rooms import pretence
from ptrain.rooms.patches import patched
from ptrain.rooms.world import World, fake_tensors, fake_world
from ptrain.simulation.choice import require_ranks
from ptrain.simulation.equal_blocks import FEWEST, LEAST, EqualBlocks, equal_blocks
from ptrain.simulation.living import LivingMeter, named
from ptrain.simulation.replay import StepRecord, replayed
from ptrain.spec.extras import require_eager
from ptrain.spec.model import HuggingFaceModel, ModelShape
from ptrain.spec.routing import Histogram
from ptrain.spec.spec import Spec
from ptrain.steps.experts import token_places
from ptrain.traces.attention_kernels import kernels_for
from ptrain.train.probe import FIRST_STEADY, set_up

_aten = torch.ops.aten
# An operator of processors -> the one whose formula counts it.
_ALIKE = {
    _aten._scaled_dot_product_flash_attention_for_cpu: _aten._scaled_dot_product_flash_attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        _aten._scaled_dot_product_flash_attention_backward
    ),
    _aten.addmm_: _aten.addmm,  # the fused loss adds up its weight's gradient in place
}
_ATTENTION = "aten::_scaled_dot_product_"
_GROUPED = "_grouped_mm"  # of torch, and of ours where torch has none
_FUSED = "torch_nn::_linear_cross_entropy_batch_chunked_no_reduction"


class OperationsMeter(OperatorMode):
    """Counts while it is entered; the program tells it the phase."""

    def __init__(self, *, rank: int) -> None:
        super().__init__()
        self._rank = rank
        self._phase = Phase.FORWARD
        self._forward = self._backward = self._again = 0
        self._attention: dict[str, None] = {}

    def phase(self, phase: Phase, micro_batch: int) -> None:
        self._phase = phase

    def ran(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        packet = getattr(function, "_overloadpacket", None)
        formula = flop_registry.get(_ALIKE.get(packet, packet))
        if self._phase is Phase.UPDATE:
            return
        if _ATTENTION in function._schema.name and self._phase is Phase.FORWARD:
            self._attention[function._schema.name.removeprefix(_ATTENTION)] = None
        if formula is not None:
            name, attends = function._schema.name, False
            if _ATTENTION in name:
                attends = "backward" not in name
                args = _with_equal_heads(args, is_backward=not attends)
            self._add(int(formula(*args, **kwargs, out_val=result)), attends=attends)
        elif function._schema.name.endswith(f"::{_GROUPED}"):  # torch has no formula of it
            self._add(2 * sum(map(math.prod, product_sizes(_GROUPED, args))))
        elif function._schema.name == _FUSED:
            self._add_logits(args[0], args[1])

    def _add_logits(self, x_NC: torch.Tensor, weight_VC: torch.Tensor) -> None:
        """Of a fused loss: its forward pass shows no operator inside, and its backward pass
        computes the logits again among operators of its own."""
        number = 2 * x_NC.numel() * weight_VC.shape[0]
        self._add(number)
        self._again += number
        self._backward -= number

    def _add(self, number: int, *, attends: bool = False) -> None:
        """`attends`: by a forward kernel of attention."""
        if runs_again() and (attends or torch.is_grad_enabled()):
            # A recomputation records its graph; the operators of a backward pass record none, nor
            # do those in a function with a backward pass of its own, as attention over cp is. Of a
            # chunk of the loss no module's hooks run again, so that modules cannot tell.
            self._again += number
        elif self._phase is Phase.FORWARD:
            self._forward += number
        else:
            self._backward += number

    def attention(self) -> tuple[str, ...]:
        """Return which kernels of attention ran: `cudnn_attention`; none of what is computed
        operator by operator."""
        return tuple(self._attention)

    def row(self) -> Operations:
        """Return the operations of the steps that it saw."""
        return Operations(
            rank=self._rank, forward=self._forward, backward=self._backward, again=self._again
        )


def _with_equal_heads(args: tuple[Any, ...], *, is_backward: bool) -> tuple[Any, ...]:
    """Shapes of keys and values of as many heads as the queries have, each of which meets its own:
    torch's formula asks for them up to 2.11."""
    first = 1 if is_backward else 0
    query, *others = args[first : first + 3]
    heads = query.shape[1]
    shapes = (torch.Size((len(x), heads, *x.shape[2:])) for x in others)
    return (*args[:first], query, *shapes, *args[first + 3 :])


SEGMENTS = {"default segments": False, "segments that expand": True}
_LR = 1e-3
_ROOM = "Remove `--rehearse`: fake tensors need no memory."


@dataclass(frozen=True, kw_only=True)
class Simulated:
    """What one rank would hold, send and compute. Seconds are those of the simulation. `replayed`:
    how many blocks of each stage stand in place of those that ran, None where all of them ran."""

    rank: int
    world_size: int
    device: str
    run: StepRecord
    seconds: dict[str, float]
    replayed: int | None = None

    @cached_property
    def estimate(self) -> Estimate:
        """Its figures, as a training's meters give them."""
        steady = add_traffic(self.run.calls)
        once = set_up(add_traffic(self.run.before), steady)
        return Estimate(
            column=Column.SIMULATED,
            world_size=self.world_size,
            memory=self.run.resident,
            peak=self.run.peaks,
            traffic=add_traffic((*steady, *once)),
            operations=(self.run.operations,),
            undefined={"wire": "fake ranks have no sockets"},
        )

    @cached_property
    def course(self) -> MemoryHistory:
        """Its memory over the step."""
        return self.run.stream.history(self.rank)

    def allocated(self, spec: Spec, *, is_lazy: bool = False) -> AllocatedStep:
        """Return what the allocator of the spec's GPUs sees: the step's storages, and what kernels
        take within themselves. What an optimizer keeps is made when a model is wrapped; `is_lazy`:
        with its first update, as torch's own optimizers do."""
        step = self.run.stream.allocated()
        kept = (AllocatorEvent(-1 - number, size) for number, size in enumerate(products(spec)))
        resident, moments = [*step.resident, *kept], step.moments
        if not is_lazy:
            resident, moments = [*resident, *moments], []
        return replace(step, resident=resident, moments=moments)

    def reserved(self, spec: Spec) -> dict[str, Reserved | None]:
        """Return what CUDA's caching allocator would reserve on the spec's GPUs, by kind of
        segments; None where it grows on, empty for other devices."""
        if not spec.is_for_cuda:
            return {}
        step = self.allocated(spec)
        return {name: reserved(step, expands=expands) for name, expands in SEGMENTS.items()}


def simulate(
    spec: Spec,
    rank: int = 0,
    *,
    rehearse: bool = False,
    allow_import: bool = False,
    every_block: bool = False,
) -> Simulated:
    """Rank `rank` of a legal spec, in this process, which must have no process group.

    Of many equal blocks a few run, and what repeats with them stands for the others
    (simulation/replay.py) unless `every_block`, or they differ after all. `rehearse`: with real
    tensors, on the spec's device, every block. Raises PtrainError for a torch that this was not
    written for, and whatever `interpret` raises.
    """
    require_ranks(spec, [str(rank)])
    require_eager(spec, "simulate")
    device = rehearsal_device(spec) if rehearse else fake_device(spec)
    began = time.perf_counter()
    if not rehearse and not every_block and not isinstance(spec.routing, Histogram):
        blocks = equal_blocks(spec, rank, fewest=FEWEST, least=LEAST)
        simulated = _with_few(blocks, rank, device, allow_import) if blocks else None
        if simulated is not None:
            return simulated
    tried = time.perf_counter() - began
    simulated = _every_block(spec, rank, device, allow_import=allow_import, rehearse=rehearse)
    return replace(simulated, seconds={"few blocks": tried, **simulated.seconds})


def _with_few(
    blocks: EqualBlocks, rank: int, device: torch.device, allow_import: bool
) -> Simulated | None:
    """By runs with few blocks; None where they do not tell what all of them do."""
    first, second, third = (
        _every_block(blocks.cut_to(FEWEST + more), rank, device, allow_import=allow_import)
        for more in range(3)
    )
    run = replayed(blocks.spec, (first.run, second.run, third.run), blocks.number - FEWEST)
    if run is None:
        return None
    seconds = {
        name: first.seconds[name] + second.seconds[name] + third.seconds[name]
        for name in first.seconds
    }
    return replace(first, run=run, seconds=seconds, replayed=blocks.number)


def _every_block(
    spec: Spec,
    rank: int,
    device: torch.device,
    *,
    allow_import: bool = False,
    rehearse: bool = False,
) -> Simulated:
    """As `simulate`, with every block of the model."""
    stands_in = spec.is_for_cuda and device.type == "cpu" and not rehearse
    world = fake_world(rank, spec.world_size, device, stands_in=stands_in)
    try:
        with (
            patched(spec.model),
            nullcontext() if rehearse else fake_tensors(),
            kernels_for(spec) if stands_in else nullcontext(),
            _refusing(spec, device),
        ):
            return _simulated(spec, world, allow_import=allow_import)
    finally:
        world.close()
        gc.collect()  # a program is a cycle, and what a rehearsed one holds is real
        if device.type == "cuda" and rehearse:
            torch.cuda.empty_cache()


def fake_device(spec: Spec) -> torch.device:
    """Return where fake tensors seem to live: on a GPU where the spec is for them and this process
    believes in one."""
    on_gpu = spec.is_for_cuda and pretence.is_on()
    return torch.device("cuda", 0) if on_gpu else torch.device("cpu")


def rehearsal_device(spec: Spec) -> torch.device:
    """The first GPU, unless there is none or the spec says cpu. Raises SpecError where the spec
    says cuda and there is none."""
    if torch.cuda.is_available() and spec.device != "cpu":
        return torch.device("cuda", 0)
    if spec.device == "cuda":
        raise refused(
            "device", "no GPU was found for --rehearse", "Use `device=cpu` or `device=auto`."
        )
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
        raise refused(
            "model",
            f"the model reads the value of a tensor ({_line(cause)}), but fake tensors "
            "have no values",
            "Add `--rehearse` to use real tensors.",
        ) from error


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:120]


def _simulated(spec: Spec, world: World, *, allow_import: bool) -> Simulated:
    began = time.perf_counter()
    program = interpret(spec, world=world, allow_import=allow_import)
    _follow_routing(program)
    wrapped = time.perf_counter()
    run = _steady_step(program, _batch(program))
    return Simulated(
        rank=world.rank,
        world_size=world.size,
        device=str(world.device),
        run=run,
        seconds={"interpret": wrapped - began, "steps": time.perf_counter() - wrapped},
    )


def _follow_routing(program: Program) -> None:
    """Let rows go to experts as the spec says; where it says nothing they go evenly."""
    if (loads := program.plan.loads) is None:
        return
    routing = StatedRouting(loads, token_places(program.spec)[program.world.rank])
    program.observers.append(routing)
    for piece in program.pieces:
        routing.lead(piece.module)


def _batch(program: Program) -> StepBatch:
    """Of the spec's shape; which samples does not matter."""
    return program.own_tokens(blank_batch(program.spec)).to(program.world.device)


def _steady_step(program: Program, batch: StepBatch) -> StepRecord:
    """The third step, and of the second what happens once: as a training measures them."""
    for _ in range(FIRST_STEADY - 1):
        _step(program, batch)
    before = _traffic_meter(program)
    with listening(program.observers, before), before:
        _step(program, batch)
    rank, device = program.world.rank, program.world.device.type
    traffic, operations = _traffic_meter(program), OperationsMeter(rank=rank)
    modules = named(program.model, _vocab(program.spec))
    with watching(modules, is_first=True) as running:
        memory = LivingMeter(program, running, rank=rank, device=device)
        observing = listening(program.observers, memory, traffic, operations)
        with observing, memory.listening(), memory, traffic, operations:
            _step(program, batch)
    stream = memory.stream()
    peaks = memory.peaks()
    if pretence.is_on():  # fakes are none of its allocator's
        peaks = tuple(replace(peak, allocator_bytes=0) for peak in peaks)
    assert {peak.phase: peak.device_bytes for peak in peaks} == stream.peaks(), "one step"
    return StepRecord(
        resident=memory.footprints(),
        peaks=peaks,
        operations=operations.row(),
        attention=operations.attention(),
        before=before.calls(),
        calls=traffic.calls(),
        stream=stream,
    )


def _vocab(spec: Spec) -> int | None:
    """None of a model that only its code knows."""
    match spec.model:
        case ModelShape(vocab=vocab):
            return vocab
        case HuggingFaceModel(config=config):
            given = config.get("vocab_size")
            return given if isinstance(given, int) else None
    return None


def _step(program: Program, batch: StepBatch) -> None:
    program.forward_backward(batch, _LR)
    program.step(_LR)


def _traffic_meter(program: Program) -> TrafficMeter:
    return TrafficMeter(
        program.registry, program.mesh.axes_by_group(), device=program.world.device.type
    )
