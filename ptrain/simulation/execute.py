"""Run one rank of a job on fake ranks: the training program, from its wrapping to a steady step.

With fake tensors nothing is allocated and nothing is computed. With real tensors (a rehearsal) one
device does all the work of the rank, and only the other ranks are missing. In both cases
collectives move nothing, so values are garbage; bytes, operations and their order are correct.

Floating-point operations are counted for the operators that a rank runs on its local tensors,
forward, backward and recomputed, by torch's formulas (`torch.utils.flop_counter`). torch's counter
itself runs above DTensor, where operators have global shapes, and it lacks formulas for fused
attention on a CPU and for the fused loss. `OperationsMeter` runs below DTensor and has both.
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
from ptrain.derivation.allocator import AllocatedStep, AllocatorEvent, Reserved, steady_reserved
from ptrain.derivation.kernels import products
from ptrain.errors import RankFailed, input_error
from ptrain.internals.fakes import READ
from ptrain.interpreter.program import Program, interpret
from ptrain.meters.traffic import TrafficMeter
from ptrain.models.compiled import silent_blocks
from ptrain.models.ledger import OperatorMode, add_listeners, is_recomputing, watch_modules
from ptrain.models.objective import StepBatch
from ptrain.models.work import matrix_products
from ptrain.report.simulation import MemoryHistory
from ptrain.runtime import simulated_gpu
from ptrain.runtime.patches import patch_torch
from ptrain.runtime.world import World, fake_tensors, fake_world
from ptrain.simulation.choice import require_ranks
from ptrain.simulation.equal_blocks import FEWEST, LEAST, EqualBlocks, equal_blocks
from ptrain.simulation.living import AllocationMeter, named_modules
from ptrain.simulation.replay import StepRecord, extrapolate_run
from ptrain.spec.dials import Compiled
from ptrain.spec.model import HuggingFaceModel, ModelShape
from ptrain.spec.routing import Histogram
from ptrain.spec.spec import Spec
from ptrain.steps.experts import token_places
from ptrain.steps.step import Plan
from ptrain.traces.attention_kernels import kernels_for
from ptrain.traces.facts import why_not_compiled
from ptrain.train.loop_inputs import FIRST_STEADY, setup_traffic

_aten = torch.ops.aten
# A CPU operator, or an in-place one, to the operator whose formula counts it.
_ALIKE = {
    _aten._scaled_dot_product_flash_attention_for_cpu: _aten._scaled_dot_product_flash_attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        _aten._scaled_dot_product_flash_attention_backward
    ),
    _aten.addmm_: _aten.addmm,  # the fused loss accumulates its weight's gradient in place
}
_ATTENTION = "aten::_scaled_dot_product_"
_GROUPED = "_grouped_mm"  # torch's operator, or ptrain's if torch has none
# ptrain's operator of fp8 products on CPUs; torch has a formula for its own operator.
_SCALED = "scaled_mm"
_FUSED = "torch_nn::_linear_cross_entropy_batch_chunked_no_reduction"


class OperationsMeter(OperatorMode):
    """A counter of floating-point operations, while it is entered; the program calls `phase`."""

    sees_compiled = True

    def __init__(self, *, rank: int) -> None:
        super().__init__()
        self._rank = rank
        self._phase = Phase.FORWARD
        self._forward = self._backward = self._again = 0
        self._attention: dict[str, None] = {}

    def phase(self, phase: Phase, micro_batch: int) -> None:
        """Set the current phase."""
        self._phase = phase

    def on_operator(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        """Count the operations of an operator that has run; updates are not counted.

        Args:
            function: The operator, as a dispatch mode gets it.
            args: Its positional arguments.
            kwargs: Its keyword arguments.
            result: Its result.
        """
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
        elif (name := function._schema.name.partition("::")[2]) in (_GROUPED, _SCALED):
            # torch has no formula of these
            self._add(2 * sum(map(math.prod, matrix_products(name, args))))
        elif function._schema.name == _FUSED:
            self._add_logits(args[0], args[1])

    def _add_logits(self, x_NC: torch.Tensor, weight_VC: torch.Tensor) -> None:
        """Count the logits of a fused loss.

        Its forward pass shows no inner operators. Its backward pass recomputes the logits with
        visible operators, which are counted as backward, so they are moved from backward to
        recomputation.
        """
        number = 2 * x_NC.numel() * weight_VC.shape[0]
        self._add(number)
        self._again += number
        self._backward -= number

    def _add(self, number: int, *, attends: bool = False) -> None:
        """Count operations as forward, backward or recomputed.

        Args:
            number: The floating-point operations.
            attends: True for a forward kernel of attention, which is recomputed even if gradients
                are off.
        """
        if is_recomputing() and (attends or torch.is_grad_enabled()):
            # A recomputation records a graph. Operators of a backward pass do not, nor do operators
            # in an autograd.Function such as attention over cp. Module hooks cannot detect every
            # recomputation: for a chunk of the loss none run again.
            self._again += number
        elif self._phase is Phase.FORWARD:
            self._forward += number
        else:
            self._backward += number

    def attention(self) -> tuple[str, ...]:
        """Return the attention kernels that ran, for example `cudnn_attention`.

        The result is empty if attention ran operator by operator.
        """
        return tuple(self._attention)

    def to_operations(self) -> Operations:
        """Return the operations of the steps since the meter was created."""
        return Operations(
            rank=self._rank, forward=self._forward, backward=self._backward, again=self._again
        )


def _with_equal_heads(args: tuple[Any, ...], *, is_backward: bool) -> tuple[Any, ...]:
    """Return arguments of attention with the shapes of keys and values expanded to the query heads.

    torch's formula requires equal numbers of heads up to torch 2.11.
    """
    first = 1 if is_backward else 0
    query, *others = args[first : first + 3]
    heads = query.shape[1]
    shapes = (torch.Size((len(x), heads, *x.shape[2:])) for x in others)
    return (*args[:first], query, *shapes, *args[first + 3 :])


# The two configurations of PYTORCH_CUDA_ALLOC_CONF that change how segments are reserved.
SEGMENTS = {"default segments": False, "segments that expand": True}
_LR = 1e-3  # any value: no figure depends on it
_PROGRAMS_OF_GPUS = "a GPU's compiled programs, which Triton makes, are not simulated"
_IN_PROGRAMS = "a compiled program does not mark the operators that it recomputes"
# Products of both passes run in an autograd.Function, where no gradients are enabled.
_IN_FP8 = "a recomputed fp8 product looks like one of the backward pass"
_ROOM = "Remove `--rehearse`: fake tensors need no memory."


@dataclass(frozen=True, kw_only=True)
class SimulatedRank:
    """The memory, traffic and operations of one simulated rank.

    Attributes:
        device: The device of the tensors.
        run: The record of the steady step.
        seconds: The wall time of each part of the simulation.
        replayed: The number of blocks of each stage of which only a few ran; None if all ran.
        why_uncounted: The reason why operations are not counted; empty if they are.
    """

    rank: int
    world_size: int
    device: str
    run: StepRecord
    seconds: dict[str, float]
    replayed: int | None = None
    why_uncounted: str = ""

    @cached_property
    def estimate(self) -> Estimate:
        """The figures, in the form of a training's measurement."""
        steady = add_traffic(self.run.calls)
        once = setup_traffic(add_traffic(self.run.before), steady)
        return Estimate(
            column=Column.SIMULATED,
            world_size=self.world_size,
            memory=self.run.resident,
            peak=self.run.peaks,
            traffic=add_traffic((*steady, *once)),
            operations=() if self.why_uncounted else (self.run.operations,),
            undefined={
                "wire": "fake ranks have no sockets",
                **({"operations": self.why_uncounted} if self.why_uncounted else {}),
            },
        )

    @cached_property
    def memory_history(self) -> MemoryHistory:
        """The course of memory over the step."""
        return self.run.stream.history(self.rank)

    def allocated_step(self, spec: Spec, *, is_lazy: bool = False) -> AllocatedStep:
        """Return the step as the allocator of the spec's GPUs handles it.

        It has the step's storages and the internal allocations of kernels.

        Args:
            spec: The simulated spec.
            is_lazy: Optimizer state is allocated in the first update, as torch's optimizers do. By
                default it is allocated when the model is wrapped.
        """
        step = self.run.stream.allocated_step()
        products_held = (
            AllocatorEvent(-1 - number, size) for number, size in enumerate(products(spec))
        )
        # cuBLAS keeps its workspaces from the first product on, so they are resident in every
        # steady step.
        resident, moments = [*step.resident, *products_held], step.moments
        if not is_lazy:
            resident, moments = [*resident, *moments], []
        return replace(step, resident=resident, moments=moments)

    def reserved_memory(self, spec: Spec) -> dict[str, Reserved | None]:
        """Return the memory that CUDA's caching allocator would reserve, by kind of segments.

        Returns:
            None for a kind that keeps growing; empty for a spec that is not for GPUs.
        """
        if not spec.is_for_cuda:
            return {}
        step = self.allocated_step(spec)
        return {name: steady_reserved(step, expands=expands) for name, expands in SEGMENTS.items()}


def _why_not_simulated(spec: Spec) -> str:
    """Return the reason why compiled programs are not simulated. Empty if they are, or if nothing
    is compiled."""
    is_compiled = spec.compile is not Compiled.NONE
    return why_not_compiled(spec) or (_PROGRAMS_OF_GPUS if is_compiled and spec.is_for_cuda else "")


def simulate(
    spec: Spec,
    rank: int = 0,
    *,
    rehearse: bool = False,
    allow_import: bool = False,
    every_block: bool = False,
) -> SimulatedRank:
    """Simulate one rank of a legal spec in this process, which must not have a process group.

    If many blocks are equal, a few run and the rest is inferred (`simulation.replay`), unless they
    turn out to differ.

    Args:
        spec: A resolved spec.
        rank: The rank to play.
        rehearse: Use real tensors on the spec's device, and run every block.
        allow_import: Allow the import of the user's code.
        every_block: Run every block.

    Raises:
        SpecError: If the rank is not of the mesh, a rehearsal has too little memory, the model
            reads values of fake tensors, or compiled programs are not predicted for the spec.
        PtrainError: If this version of torch is not supported, or the program cannot be built.
    """
    require_ranks(spec, [str(rank)])
    if not rehearse and (why := _why_not_simulated(spec)):
        other = ", or `device=cpu`" if why == _PROGRAMS_OF_GPUS else ""
        raise input_error("compile", why, f"Use `compile=none`{other}.")
    device = rehearsal_device(spec) if rehearse else fake_device(spec)
    began = time.perf_counter()
    # A histogram states the loads of each layer, so its blocks are not equal.
    if not rehearse and not every_block and not isinstance(spec.routing, Histogram):
        blocks = equal_blocks(spec, rank, fewest=FEWEST, least=LEAST)
        simulated = _simulate_few_blocks(blocks, rank, device, allow_import) if blocks else None
        if simulated is not None:
            return simulated
    tried = time.perf_counter() - began
    simulated = _simulate_every_block(
        spec, rank, device, allow_import=allow_import, rehearse=rehearse
    )
    return replace(simulated, seconds={"few blocks": tried, **simulated.seconds})


def _simulate_few_blocks(
    blocks: EqualBlocks, rank: int, device: torch.device, allow_import: bool
) -> SimulatedRank | None:
    """Return the simulation from three runs with few blocks.

    Args:
        blocks: The equal blocks of the rank.
        rank: The rank to play.
        device: The device of the fake tensors.
        allow_import: Allow the import of the user's code.

    Returns:
        None if the three runs do not determine the run with all blocks.
    """
    first, second, third = (
        _simulate_every_block(blocks.cut_to(FEWEST + more), rank, device, allow_import=allow_import)
        for more in range(3)
    )
    run = extrapolate_run(blocks.spec, (first.run, second.run, third.run), blocks.number - FEWEST)
    if run is None:
        return None
    seconds = {
        name: first.seconds[name] + second.seconds[name] + third.seconds[name]
        for name in first.seconds
    }
    return replace(first, run=run, seconds=seconds, replayed=blocks.number)


def _simulate_every_block(
    spec: Spec,
    rank: int,
    device: torch.device,
    *,
    allow_import: bool = False,
    rehearse: bool = False,
) -> SimulatedRank:
    """Return the simulation with every block of the model.

    Args:
        spec: The resolved spec, perhaps with fewer blocks.
        rank: The rank to play.
        device: The device of the tensors. Fake tensors on a CPU stand in for a GPU's.
        allow_import: Allow the import of the user's code.
        rehearse: Use real tensors.
    """
    stands_in = spec.is_for_cuda and device.type == "cpu" and not rehearse
    world = fake_world(rank, spec.world_size, device, stands_in=stands_in)
    try:
        with (
            patch_torch(spec.model),
            nullcontext() if rehearse else fake_tensors(),
            kernels_for(spec) if stands_in else nullcontext(),
            nullcontext() if rehearse else silent_blocks(spec.compile),
            _translate_errors(spec, device),
        ):
            return _run_program(spec, world, allow_import=allow_import)
    finally:
        world.close()
        gc.collect()  # a program is a reference cycle, and a rehearsal's holds real memory
        if device.type == "cuda" and rehearse:
            torch.cuda.empty_cache()


def fake_device(spec: Spec) -> torch.device:
    """Return the device of fake tensors.

    It is a GPU if the spec is for GPUs and this process pretends to have one.
    """
    on_gpu = spec.is_for_cuda and simulated_gpu.is_on()
    return torch.device("cuda", 0) if on_gpu else torch.device("cpu")


def rehearsal_device(spec: Spec) -> torch.device:
    """Return the first GPU, or the CPU if there is none or the spec has `device: cpu`.

    Raises:
        SpecError: If the spec has `device: cuda` and there is no GPU.
    """
    if torch.cuda.is_available() and spec.device != "cpu":
        return torch.device("cuda", 0)
    if spec.device == "cuda":
        raise input_error(
            "device", "no GPU was found for --rehearse", "Use `device=cpu` or `device=auto`."
        )
    return torch.device("cpu")


@contextmanager
def _translate_errors(spec: Spec, device: torch.device) -> Iterator[None]:
    """Temporarily turn errors of models that cannot be simulated into SpecError.

    A pipeline wraps an error of a stage, so its cause is examined.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise input_error(
            "--rehearse", f"{device} has too little memory: {error}", _ROOM
        ) from error
    except (*READ, RankFailed) as error:
        cause = error.__cause__ if isinstance(error, RankFailed) else error
        if not isinstance(cause, READ):
            raise
        raise input_error(
            "model",
            f"the model reads the value of a tensor ({' '.join(str(cause).split())[:120]}), "
            "but fake tensors have no values",
            "Add `--rehearse` to use real tensors.",
        ) from error


def _run_program(spec: Spec, world: World, *, allow_import: bool) -> SimulatedRank:
    """Build the program, run it to a steady step, and return the result."""
    began = time.perf_counter()
    program = interpret(spec, world=world, allow_import=allow_import)
    _follow_routing(program)
    wrapped = time.perf_counter()
    # a batch of the spec's shape, whose values do not matter
    batch = program.own_tokens(blank_batch(program.spec)).to(program.world.device)
    run = _steady_step(program, batch)
    return SimulatedRank(
        rank=world.rank,
        world_size=world.size,
        device=str(world.device),
        run=run,
        seconds={"interpret": wrapped - began, "steps": time.perf_counter() - wrapped},
        why_uncounted=_uncounted_reason(program.plan),
    )


def _uncounted_reason(plan: Plan) -> str:
    """Return why recomputed operations of a plan cannot be counted; empty if they can."""
    if plan.keep is None:
        return ""
    if plan.compiled is not None:
        return _IN_PROGRAMS
    return _IN_FP8 if plan.quantize is not None and plan.quantize.recipe.is_fp8 else ""


def _follow_routing(program: Program) -> None:
    """Route tokens to experts as the spec states; without a statement they are routed evenly."""
    if (loads := program.plan.loads) is None:
        return
    routing = StatedRouting(loads, token_places(program.spec)[program.world.rank])
    program.observers.append(routing)
    for piece in program.pieces:
        routing.route_layers(piece.module)


def _steady_step(program: Program, batch: StepBatch) -> StepRecord:
    """Return the record of the third step, with the collectives of the second.

    A training measures the same steps. Set-up traffic appears in the second step and not in the
    third.
    """
    # The first steps allocate optimizer state and rebuild DDP's buckets.
    for _ in range(FIRST_STEADY - 1):
        _run_step(program, batch)
    before = _traffic_meter(program)
    with add_listeners(program.observers, before), before:
        _run_step(program, batch)
    rank, device = program.world.rank, program.world.device.type
    traffic, operations = _traffic_meter(program), OperationsMeter(rank=rank)
    modules = named_modules(program.model, _vocabulary_size(program.spec))
    with watch_modules(modules, is_first=True) as running:
        memory = AllocationMeter(program, running, rank=rank, device=device)
        observing = add_listeners(program.observers, memory, traffic, operations)
        with observing, memory.record_tags(), memory, traffic, operations:
            _run_step(program, batch)
    stream = memory.stream()
    peaks = memory.peaks()
    if simulated_gpu.is_on():  # CUDA's allocator does not hold fake tensors
        peaks = tuple(replace(peak, allocator_bytes=0) for peak in peaks)
    # The meter and the stream count independently, and must agree.
    assert {peak.phase: peak.device_bytes for peak in peaks} == stream.peaks(), "one step"
    return StepRecord(
        resident=memory.footprints(),
        peaks=peaks,
        operations=operations.to_operations(),
        attention=operations.attention(),
        before=before.calls(),
        calls=traffic.calls(),
        stream=stream,
    )


def _vocabulary_size(spec: Spec) -> int | None:
    """Return the size of the vocabulary; None for a model that only its code describes."""
    match spec.model:
        case ModelShape(vocab_rows=rows):
            return rows
        case HuggingFaceModel(config=config):
            size = config.get("vocab_size")
            return size if isinstance(size, int) else None
    return None


def _run_step(program: Program, batch: StepBatch) -> None:
    """Run one training step."""
    program.forward_backward(batch, _LR)
    program.step(_LR)


def _traffic_meter(program: Program) -> TrafficMeter:
    """Return a meter of the program's collectives."""
    return TrafficMeter(
        program.registry, program.mesh.axes_by_group(), device=program.world.device.type
    )
