"""The interface of a model's wrap, in two halves. A `Wrapping` gives the memory and traffic of
ranks, and creates the player (`derivation.tape.Wrap`) that allocates along a timeline.

Each wrapper of torch has a simulation in a separate module, and so have flat units, which are part
of ptrain. `ghosts.table` selects one by the step of a plan. No other module distinguishes them.

All wraps clip gradients in the same way: with the norms of all gradients, their memory and their
traffic.

Autograd's AccumulateGrad keeps the first gradient and adds later ones to it
(torch/csrc/autograd/functions/accumulate_grad.h): a gradient with no other reference is taken over
(stolen), any other one is cloned. A later gradient is added in place. The timeline of a model
states which gradients are cloned (`Complete.cloned`).

Two further parts of autograd are not simulated here, because they belong to a block instead of its
wrap. Copies of saved-tensor hooks are traced with the block (`traces`) and put into its timeline by
`derivation.blocks`. The allocations of DTensor's redistributions are traced too; their traffic is
in `derivation.tensor`.

The resident bytes by state and rank are the `exact` column of Theorem 1. Parameters,
optimizer state and other memory are counted after the update, gradients at the end of the last
backward pass. Ranks differ only in the rows of a tensor that they hold without padding.

At start-up a rank builds its part of the initial parameters on the host (`startup_bytes`).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import chain
from math import inf
from typing import NamedTuple, Protocol

from ptrain.axes.context.attention import held_buffers, held_tokens
from ptrain.axes.data.cost import GatherCounts, count_gathers, count_reductions
from ptrain.axes.ring import Calls, group_over
from ptrain.by_rank import ByRank, KeyT, rows_by_rank
from ptrain.cost import Collective, Footprint, Peak, Phase, Spent, State, Traffic
from ptrain.derivation.tape import Account, PeakExceeded, Scene, Tape, Wrap
from ptrain.facts.model import LAST_UNIT, ModelFacts, UnitFacts
from ptrain.facts.parameters import COUNTS
from ptrain.spec.cluster import OperatorKind
from ptrain.spec.dials import GradientSync, Reshard, SyncPolicy
from ptrain.spec.placement import Axis
from ptrain.spec.precision import DType
from ptrain.spec.spec import Spec, ranks_over
from ptrain.steps.step import LONG_NORM, NORM_ROW, Plan
from ptrain.timeline import Boundary, Complete, Mark, Timeline
from ptrain.units import format_bytes

# The traffic of a unit does not depend on other units.
ALONE = Timeline(
    forward=(Boundary(Mark.ENTER, 0), Boundary(Mark.LEAVE, 0)),
    backward=(Boundary(Mark.PRE_BACKWARD, 0), Boundary(Mark.POST_BACKWARD, 0)),
)


class Times(Protocol):
    """A function that returns how often a unit is all-gathered in a step of a pipeline schedule."""

    def __call__(self, sync: SyncPolicy, *, is_root: bool) -> GatherCounts: ...


class WrapContext(NamedTuple):
    """A model, and the plan that wraps it."""

    spec: Spec
    plan: Plan
    facts: ModelFacts

    def make_scene(self, units: tuple[UnitFacts, ...], account: Account) -> Scene:
        """Return a scene of some units, whose traffic is recorded in an account.

        Args:
            units: The units that are simulated. They may be a subset of the model's.
            account: Collects the rows. It is changed in place.
        """
        facts = ModelFacts(units=units, buffers=self.facts.buffers)
        tape = Tape(account=account)
        return Scene(tape=tape, spec=self.spec, facts=facts, plan=self.plan, timeline=ALONE)


class Wrapping(Protocol):
    """The simulation of the wrap of a model. A shard is a rank's index along `Plan.differing_axes`.
    By default all ranks are equal, and the wrap communicates nothing.

    `reach` is the number of neighbouring units that a unit affects; None if unknown.
    """

    wrapped: WrapContext
    reach: int | None = None

    def kind_of_shard(self, shard: int) -> Hashable:
        """Return a key that is equal for ranks with equal memory.

        Args:
            shard: The rank's place along the plan's `differing_axes`, from 0.
        """
        return 0

    def footprints(self, shard: int) -> Iterator[Footprint]:
        """Yield the rows of parameters, optimizer state and gradients of one rank, as rank 0.

        Args:
            shard: The rank's place along the plan's `differing_axes`, from 0.
        """
        ...

    def traffic(self, times: Times | None) -> Iterator[Traffic]:
        """Yield the traffic and copies of every rank for its units, at setup and in each step.

        Args:
            times: Returns how often a pipeline schedule all-gathers a unit in a step. None without
                pp.
        """
        return iter(())

    def scalar_copies(self) -> Iterator[Traffic]:
        """Yield the copies between tiers that the norm and the loss scale need."""
        return iter(())

    def kept_gradients(self, unit: UnitFacts) -> Iterator[int]:
        """Yield the elements of a unit's gradients between reduction and update, by shard. One
        number if all shards have as many."""
        ...

    def notes(self) -> Iterator[str]:
        """Yield a sentence for each effect of the wrap that no theorem covers."""
        return iter(())

    def make_wrap(self, scene: Scene) -> Wrap:
        """Return the wrap that allocates and communicates along the scene's timeline."""
        ...


def state_rows(parameters: int, optimizer: int, gradients: int) -> Iterator[Footprint]:
    """Yield rows of these device bytes for rank 0.

    Args:
        parameters: Bytes of parameters.
        optimizer: Bytes of optimizer state.
        gradients: Bytes of gradients.
    """
    sizes = {
        State.PARAMETERS: parameters,
        State.OPTIMIZER: optimizer,
        State.GRADIENTS: gradients,
    }
    for state, size in sizes.items():
        yield Footprint(state=state, rank=0, device_bytes=size)


def micro_batches(count: int) -> Iterator[tuple[bool, bool, int]]:
    """Yield the micro-batches of a step, grouped if they are equal.

    Args:
        count: Micro-batches of a step, at least 1.

    Yields:
        (is first, is last, number of equal ones). All between the first and the last are equal.
    """
    yield True, count == 1, 1
    if count > 2:
        yield False, False, count - 2
    if count > 1:
        yield False, True, 1


# Notes on count_gathers and count_reductions by unit, for any wrap.


def accumulation_notes(wrapped: WrapContext) -> Iterator[str]:
    """Yield notes on collectives that a step's micro-batches repeat, while Theorem 2 counts them
    once."""
    plan, step = wrapped.plan, wrapped.plan.wrap
    num_micro, sync = plan.accumulate.micro_batches, step.policy
    if num_micro == 1 or sync is None:
        return
    times = count_gathers(sync, num_micro)
    factors = []
    if step.gathered_by_unit:
        factors += [f"all_gather forward {times.forward}×", f"backward {times.backward}×"]
    if step.reduced_by_unit:
        factors.append(f"reduction of gradients {count_reductions(sync, num_micro)}×")
    if factors:
        yield (
            f"a step has {num_micro} micro-batches, but the paper's step has one; with this "
            f"`sync`, collectives per unit are: {', '.join(factors)}"
        )
    if step.reduced_by_unit and sync.gradients is GradientSync.LAST:
        size = wrapped.facts.trained_numel * plan.update.layout.reduced.itemsize
        yield (
            "with sync.gradients=last, gradients are R until the last micro-batch is "
            f"reduced: each rank holds the full local sum, {format_bytes(size)}, for any "
            "number of ranks"
        )


def kept_root(wrapped: WrapContext) -> Iterator[str]:
    """Yield a note on how often a root that stays all-gathered is gathered."""
    sync = wrapped.plan.wrap.policy
    if sync is not None and sync.reshard_after_forward is Reshard.NON_ROOT:
        times = count_gathers(sync, wrapped.plan.accumulate.micro_batches, is_root=True)
        root = sum(unit.numel for unit in wrapped.facts.units if unit.stays_by_default)
        is_last = any(unit.modules == LAST_UNIT for unit in wrapped.facts.units)
        name = "the unit of the last norm and the head" if is_last else "the root"
        yield (
            f"{name}, {root:,} of {wrapped.facts.numel:,} parameters, is not freed between "
            f"forward and backward: it is gathered {times.forward}× in forward and "
            f"{times.backward}× in backward"
        )


def by_operator(scene: Scene, numels: Sequence[int]) -> list[list[int]]:
    """Return the elements of each tensor with a norm, by group of the norm (`Clip.groups`).

    Copies on a stage are counted on another stage.

    Args:
        scene: The scene, whose trained parameters have the gradients.
        numels: Elements of the gradient of each trained parameter, in order.
    """
    clip = scene.plan.clip
    tensors = zip(numels, scene.facts.trained, strict=True)
    sizes = [(numel, tensor) for numel, tensor in tensors if not tensor.is_copy]
    if clip is None or not clip.operator_axes:
        return [[numel for numel, _ in sizes]]
    groups: list[list[int]] = [[] for _ in clip.groups]
    group_of = cache(clip.group_of)
    for numel, tensor in sizes:
        groups[group_of(tensor.cut_over)].append(numel)
    return groups


def norm_bytes(scene: Scene, clipped: Iterable[list[list[int]] | None]) -> tuple[int, int]:
    """Return the bytes of the norm over all wraps of a rank.

    Args:
        scene: The scene, for the gradients' dtype and the device.
        clipped: `norm_groups` of each wrap. None for a wrap whose gradients are not on the device.

    Returns:
        The peak, and the bytes that live until the step ends.
    """
    norms = [groups for groups in clipped if groups is not None]
    if scene.plan.clip is None or not norms:
        return 0, 0
    groups = [list(chain.from_iterable(of_group)) for of_group in zip(*norms, strict=True)]
    return clip_bytes(scene, groups)


def clip_bytes(scene: Scene, groups: Sequence[Sequence[int]]) -> tuple[int, int]:
    """Return the bytes of the norm.

    A scalar of each group of tensors stays until all norms are computed, and one scalar until the
    step ends.

    Args:
        scene: The scene, for the gradients' dtype and the device.
        groups: The elements of each tensor, by group of the norm.

    Returns:
        The peak, and the bytes that live until the step ends.
    """
    # Squares are summed in fp32 at least: a bf16 sum of squares loses the small gradients.
    scalar = max(4, scene.plan.update.layout.gradients.itemsize)
    is_cpu = not scene.spec.is_for_cuda
    most = max(before + _norm_scalars(sizes, is_cpu=is_cpu) for before, sizes in enumerate(groups))
    return most * scalar, scalar


def _norm_scalars(sizes: Sequence[int], *, is_cpu: bool) -> int:
    """Return the maximum number of scalars that exist at once in the norm of a group.

    There is a norm of each short tensor and, on a CPU, of each row of a long tensor and of its
    rest. Norms in several tensors are joined for the total norm.
    """
    # A CPU adds a long tensor's squares row by row, for precision (`steps.step.LONG_NORM`). Each
    # row then has a scalar.
    long = [numel for numel in sizes if is_cpu and numel > LONG_NORM]
    short = len(sizes) - len(long) + sum(1 for numel in long if numel % NORM_ROW)
    norms = short + sum(numel // NORM_ROW for numel in long)
    is_joined = (short > 0) + len(long) > 1
    return max(2 * short, norms * (1 + is_joined) + 1)


def norm_traffic(wrapping: Wrapping) -> Iterator[Traffic]:
    """Yield the traffic of the norm.

    Each axis reduces one scalar: the squared norm in at least fp32. With loss scaling it also
    reduces an fp32 flag for overflow. Copies of scalars between tiers are included.
    """
    spec, plan = wrapping.wrapped.spec, wrapping.wrapped.plan
    calls = Calls(Collective.ALL_REDUCE, State.GRADIENTS, Phase.UPDATE)
    yield from (
        calls.traffic(group_over(spec, (axis,)), size) for axis, size in _summed_scalars(plan)
    )
    yield from wrapping.scalar_copies()


def _summed_scalars(plan: Plan) -> Iterator[tuple[Axis, int]]:
    """Yield the axis and the bytes of each scalar that is summed."""
    if plan.clip is not None:
        scalar = max(4, plan.update.layout.gradients.itemsize)
        yield from ((axis, scalar) for axis in plan.clip.reduced_axes)
    yield from ((axis, DType.FP32.itemsize) for axis in plan.update.scale_axes)


def time_clipping(scene: Scene, clipped: Iterable[list[list[int]] | None]) -> None:
    """Time the norm over all wraps of a rank, its all-reduce, and the scaling of gradients.

    Gradients on the host are the rank's shard of all gradients.

    Args:
        scene: The scene. Without a clock nothing is timed.
        clipped: `norm_groups` of each wrap. None for a wrap whose gradients are not on the device.
    """
    plan, tape = scene.plan, scene.tape
    if tape.clock is None:
        return
    for axis, size in _summed_scalars(plan):
        tape.clock.send_payload(Collective.ALL_REDUCE, (axis,), size).wait()
    if plan.clip is None:
        return
    numels: list[int] = []
    for groups in clipped:
        if groups is None and not plan.wrap.keeps_gradients_on_device and tape.clock.pace.overlaps:
            # The host reads the gradients twice, for the norm and for the scaling, and writes them
            # once.
            own = -(-scene.facts.trained_numel // scene.spec.degree(Axis.DP_SHARD))
            tape.clock.use_host(3 * own * plan.update.layout.gradients.itemsize)  # norm, scaling
        numels += chain.from_iterable(groups or ())
    tape.clock.run_clipping(plan.update.layout, numels)


def kept_bytes(gradient: Complete) -> int:
    """Return the bytes that keeping a first gradient allocates: none if it is stolen."""
    # Case 1.1 (torch 2.13): a dense gradient without other references, in the layout of its
    # variable, is stolen. The runs of the timeline have already allocated it. Case 1.5 copies any
    # other one.
    return gradient.size if gradient.cloned else 0


def copy_bytes(gradient: Complete) -> int:
    """Return the bytes that keeping a first gradient allocates temporarily: a copy exists next to
    its source."""
    return gradient.beside + gradient.size if gradient.cloned else 0


def added_bytes(gradient: Complete) -> int:
    """Return the change in bytes when a gradient is added to the kept one. Negative is freed."""
    # Case 2.3: `variable_grad += new_grad` in place. The runs of the timeline allocate a gradient
    # that can be stolen. It is freed once it is added. The runs themselves free the source of a
    # clone.
    return 0 if gradient.cloned else -gradient.size


def time_copy(tape: Tape, dtype: DType, gradient: Complete) -> None:
    """Time the copy of a first gradient, unless it is stolen.

    Args:
        tape: The tape, with or without a clock.
        dtype: The dtype of the gradient.
        gradient: The gradient. It is copied if `cloned`; a stolen one takes no time.
    """
    if gradient.cloned:
        tape.record_operator(OperatorKind.COPY, dtype, 2 * gradient.size, Spent.COMPUTE)


def time_addition(tape: Tape, dtype: DType, gradient: Complete) -> None:
    """Time the addition of a gradient, which reads two tensors and writes one.

    Args:
        tape: The tape, with or without a clock.
        dtype: The dtype of the gradient.
        gradient: The gradient that is added. Its size in bytes counts three times.
    """
    tape.record_operator(OperatorKind.POINTWISE, dtype, 3 * gradient.size, Spent.COMPUTE)


Rows = tuple[Footprint, ...]

_TOKEN_BYTES = 8  # int64
_DRAWN_BYTES = 4  # per element: initial values are drawn in fp32, on the CPU
_LOSS_BYTES = 4  # fp32
_SCALING_BYTES = 12  # loss scaling: the scale, the steps since it grew, the overflow flag


def by_shard(ghost: Wrapping) -> tuple[list[Rows], list[int]]:
    """Return the rows of each kind of rank, and the kind of each place along `differing_axes`."""
    spec, plan, facts = ghost.wrapped.spec, ghost.wrapped.plan, ghost.wrapped.facts
    other = Footprint(state=State.OTHER, rank=0, device_bytes=other_bytes(spec, facts))
    kinds = [*map(ghost.kind_of_shard, range(ranks_over(spec, plan.differing_axes)))]
    numbers = {kind: number for number, kind in enumerate(dict.fromkeys(kinds))}
    rows = [(*ghost.footprints(kinds.index(kind)), other) for kind in numbers]
    return rows, [*map(numbers.__getitem__, kinds)]


def other_bytes(spec: Spec, facts: ModelFacts) -> int:
    """Return the bytes of memory other than parameters, optimizer state, gradients and activations.

    These are the model's buffers, the samples of one step, the scalar that accumulates the loss,
    and the state of loss scaling. Reals are fp32, or fp64 if the model computes in fp64.
    """
    # `models.initialize` keeps floating-point buffers in fp32, and in fp64 for a model in fp64.
    scale = 2 if spec.precision.effective_layout.parameters is DType.FP64 else 1
    if (sample := facts.sample_bytes) is None:
        sample = held_tokens(spec) * _TOKEN_BYTES
    samples = spec.batch.accumulate * spec.batch.micro * sample
    counts = counts_bytes(facts)
    reals = sum(size for _, size in held_buffers(spec, facts.buffers)) - counts
    scaling = _SCALING_BYTES if spec.precision.effective_layout.scales_loss else 0
    return scale * (reals + _LOSS_BYTES) + counts + samples + scaling


def startup_bytes(spec: Spec, facts: ModelFacts) -> int:
    """Return the host bytes that a rank needs at start-up, in addition to the states that it keeps.

    Args:
        spec: The spec whose ranks start.
        facts: Its model. `facts.built_whole` is True if each rank builds the full model.

    Returns:
        The full model, if a rank builds it. Else the largest tensor, since a rank draws tensors one
        by one. Zero for a folder: its files are mapped a few MiB at a time.
    """
    if facts.built_whole:
        return facts.numel * _DRAWN_BYTES
    if spec.model.pretrained is not None:
        return 0
    shapes = {shape for unit in facts.units for shape in unit.shapes}
    return _DRAWN_BYTES * max(map(math.prod, shapes), default=0)


def ranks_per_node(spec: Spec) -> int:
    """Return the number of ranks on a node: all of them, if the spec names no cluster."""
    cluster = spec.cluster
    return min(spec.world_size, cluster.devices_per_node) if cluster else spec.world_size


# Peaks: memory that lives for the full step, plus the additional memory of a phase.


Phases = Mapping[Phase, int]

_BASE = (State.PARAMETERS, State.OPTIMIZER, State.OTHER)  # live for the full step


def always(base: ByRank[Footprint]) -> list[int]:
    """Return the device bytes that live for the full step, by rank."""
    return base.totals(lambda row: row.device_bytes if row.state in _BASE else 0)


def least_above(base: ByRank[Footprint], limit: float) -> float:
    """Return the largest peak above resident memory that fits on any rank.

    Args:
        base: Rows of resident memory by rank.
        limit: Bytes of device memory. Infinity for no limit.

    Raises:
        PeakExceeded: The resident memory of some rank exceeds `limit`.
    """
    if limit == inf:
        return inf
    lives = always(base)
    if max(lives) > limit:
        raise PeakExceeded
    return limit - min(lives)


def peaks(lives: Sequence[int], keys: Sequence[KeyT], above: Mapping[KeyT, Phases]) -> ByRank[Peak]:
    """Return each phase's peak by rank: resident bytes plus the additional bytes of the phase.

    Args:
        lives: Resident bytes of each rank.
        keys: The key of each rank in `above`.
        above: Additional bytes of each phase, by key. Ranks with equal keys share them.
    """
    first: dict[Hashable, KeyT] = {}
    like = {key: first.setdefault(tuple(phases.items()), key) for key, phases in above.items()}
    return rows_by_rank(
        zip(lives, map(like.__getitem__, keys), strict=True),
        lambda pair: [
            Peak(phase=phase, rank=0, device_bytes=pair[0] + more)
            for phase, more in above[pair[1]].items()
        ],
    )


# Cost of routers' balancing biases: ranks keep counts of choices, which are summed over ranks.


def counts_bytes(facts: ModelFacts) -> int:
    """Return the bytes of the routers' counts in a model or a part of it. All ranks with the part
    keep them."""
    return sum(size for name, size in facts.buffers if name.endswith(f".{COUNTS}"))


def expert_count_traffic(spec: Spec, plan: Plan, parts: Iterable[ModelFacts]) -> Iterator[Traffic]:
    """Yield the all-reduce of all counts that a rank with these parts of the model sends in a step.

    There is none without counts, or if all ranks have the same tokens.

    Args:
        spec: A resolved spec.
        plan: The plan, whose `balance` step defines the axes.
        parts: The rank's parts of the model, one for each of its stages.
    """
    size, step = sum(map(counts_bytes, parts)), plan.balance
    if step is not None and step.axes and size:
        calls = Calls(Collective.ALL_REDUCE, State.OTHER, Phase.UPDATE)
        yield calls.traffic(group_over(spec, step.axes), size)


def sum_in_time(plan: Plan, tape: Tape, parts: Iterable[ModelFacts]) -> None:
    """Time the all-reduce of `expert_count_traffic` on a tape with a clock.

    The compute on a few hundred numbers is not timed.

    Args:
        plan: The plan, whose `balance` step defines the axes.
        tape: The tape. Without a clock nothing is timed.
        parts: The rank's parts of the model, one for each of its stages.
    """
    size, step = sum(map(counts_bytes, parts)), plan.balance
    if tape.clock is not None and step is not None and step.axes and size:
        tape.clock.send_payload(Collective.ALL_REDUCE, step.axes, size).wait()
