"""Run one step of the loop and of the reference, and list every difference that this rank sees.

The loop's step runs first, and its random draws are recorded. The reference then replays them
sample by sample. With the loop's masks, dropout is compared as tightly as a model without dropout.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ptrain.report.finding import POSSIBLE, Moment, RootCause, Subject
from ptrain.verification.compare import Differences, ParameterMove
from ptrain.verification.jobs.draws import AllDraws, DrawRecorder, Key, RandomDraw
from ptrain.verification.jobs.job import Average, Job, NoComms, Ranks, SavedState, Terms, Tolerance
from ptrain.verification.jobs.record import (
    Buffers,
    ModelState,
    StepRecorder,
    checksum,
    compare_buffers,
    compare_gradients,
    compare_in_use,
    compare_states,
    compare_update,
    cuda_devices,
    optimizer_states,
    relative_to_move,
    shard_checksums,
    shared_buffers,
    significant_elements,
)
from ptrain.verification.jobs.root_causes import list_families
from ptrain.verification.jobs.shards import ParameterShard, copy_values, dtensor_shard, find_shards
from ptrain.verification.parts import (
    COARSER,
    Magnitude,
    canonical_name,
    difference,
    dtype_name,
    norm,
)
from ptrain.verification.updates.clip import (
    UpdateCase,
    common_factor,
    compare_masters,
    record_squares,
)


@dataclass(frozen=True, slots=True)
class UnattributedDraws(Exception):
    """The error for random draws that cannot be attributed to samples. All ranks raise it.

    `paths` are the modules that draw them. Both loops must run again with these draws disabled.
    """

    paths: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RandomState:
    """A copy of torch's generator states: the CPU's, and those of the GPUs that a model is on."""

    cpu: Tensor
    gpus: dict[int, Tensor]

    @classmethod
    def read(cls, model: nn.Module) -> RandomState:
        """Return the current states for the CPU and for the GPUs of the model."""
        gpus = {device: torch.cuda.get_rng_state(device) for device in cuda_devices(model)}
        return cls(torch.get_rng_state(), gpus)

    def restore(self) -> None:
        """Set the generators to these states."""
        torch.set_rng_state(self.cpu)
        for device, state in self.gpus.items():
            torch.cuda.set_rng_state(state, device)


class DrawReplay:
    """The recorder of the loop's random draws, and their replay in the reference.

    All ranks call `exchange` after the loop's step, before the reference's.

    Args:
        ranks: The ranks that exchange their draws.
        still: Paths of the modules whose draws are disabled on both sides.
        draws: Whether the reference replays the loop's draws. Without, both sides draw
            independently, and all contexts are empty.
    """

    def __init__(self, ranks: Ranks, still: Collection[str] = (), *, draws: bool = True) -> None:
        self.ranks, self.still = ranks, frozenset(still)
        self.everyones = AllDraws()
        self.loop = DrawRecorder()
        self.hidden: set[str] = set()
        self.count = 0
        self.draws = draws

    @property
    def has_draws(self) -> bool:
        """True if the loop or the reference draws random numbers."""
        return bool(self.everyones.by_key or self.everyones.alone)

    def record(self, model: nn.Module) -> Any:
        """Return a context for the loop's step that records its draws."""
        self.loop = DrawRecorder(
            model, replace=lambda draw: draw.neutral_value() if draw.path in self.still else None
        )
        return self.loop if self.draws else nullcontext()

    def gather_draws(self) -> None:
        """All-gather the recorded draws. All ranks call it."""
        self.everyones = AllDraws.gather(self.loop, self.ranks)
        hidden = self.ranks.gather(sorted(self.loop.hidden))
        self.hidden |= {path for paths in hidden for path in paths}
        self.count = len(self.everyones.by_key)

    def replay(self, *models: nn.Module, still: Collection[Key] = ()) -> Any:
        """Return a context in which plain models replay the loop's draws, sample by sample.

        Each sample gets the mask that it had on the rank that processed it. Draws in `still` are
        disabled.
        """

        def value(draw: RandomDraw, mode: DrawRecorder) -> Tensor | None:
            place = draw.outer, draw.call
            return self.everyones.value_for(draw, mode.rows[place], mode.times[place])

        return self._replace_draws(models, still, value)

    def repeat(self, *models: nn.Module, alike: bool = False, still: Collection[Key] = ()) -> Any:
        """Return a context in which models draw the numbers that this rank's loop drew in its step.

        Args:
            models: The loop's modules, or plain ones that run on this rank's inputs.
            alike: Whether ranks with the same samples take the draws of the first of them, and
                backward takes those of forward.
            still: Draws that are disabled.
        """
        own = {(draw.path, draw.number, draw.call): draw.value for draw in self.loop.draws}

        def value(draw: RandomDraw, mode: DrawRecorder) -> Tensor | None:
            its = own.get((draw.path, draw.number, draw.call))
            rows = mode.rows.get((draw.outer, draw.call), ())
            if alike and (first := self.everyones.first_rank_value(draw, rows)) is not None:
                its = first
            return its if its is not None and its.shape == draw.value.shape else None

        return self._replace_draws(models, still, value, keeps=alike)

    def disable(self, model: nn.Module) -> Any:
        """Return a context in which the model's draws are disabled."""
        neutral = RandomDraw.neutral_value
        return DrawRecorder(model, replace=neutral) if self.draws else nullcontext()

    def require_attributed(self) -> None:
        """Raise UnattributedDraws on all ranks if a draw has no source. All ranks call it.

        Call it after the reference's step, which looks up the draws.
        """
        if not self.has_draws:
            return
        mine = sorted(self.everyones.lost)
        paths = {path for paths in self.ranks.gather(mine) for path in paths}
        if paths:
            raise UnattributedDraws(tuple(sorted(paths | self.still)))

    def notes(self) -> Iterator[str]:
        """Yield notes on the draws that were replayed, and on those that were not."""
        if self.everyones.by_key:
            yield (
                f"the random draws of the model in {self.count} "
                f"place{'s' * (self.count != 1)} (dropout masks) are replayed in the "
                "reference, sample by sample"
            )
        if self.still:
            yield (
                f"compared without the draws of {list_families(sorted(self.still))}: they are "
                "drawn for shards of samples, by stages or for several samples at once, and "
                "cannot be attributed to samples. Set its rate to 0 on both sides, or draw one "
                "row per sample"
            )
        if self.hidden:
            yield (
                "compared without dropout within attention "
                f"({list_families(sorted(self.hidden))}): a fused kernel shows no mask. Use "
                "torch.nn.attention.sdpa_kernel(SDPBackend.MATH) to compare with it"
            )

    def _replace_draws(
        self, models: Sequence[nn.Module], still: Collection[Key],
        value: Callable[[RandomDraw, DrawRecorder], Tensor | None], *, keeps: bool = False,
    ) -> Any:  # fmt: skip
        """Return a context in which draws take the result of `value`, or are disabled if still."""
        mode: DrawRecorder

        def instead(draw: RandomDraw) -> Tensor | None:
            is_still = draw.path in self.still or (draw.path, draw.number) in still
            return draw.neutral_value() if is_still else value(draw, mode)

        mode = DrawRecorder(*models, replace=instead, keeps=keeps)
        return mode if self.draws else nullcontext()


Rows = dict[str, Tensor]

_ROUNDINGS = 4  # roundings of an average in its dtype that are allowed
_LARGE = 0.05  # share of its change: a fault is larger, even if rounding is a part of the change

# This rank's elements of the loop's average and of the reference's, by parameter.
Both = dict[str, tuple[Tensor, Tensor]]


class Averages:
    """The loop's and the reference's moving averages of the parameters.

    An average is a torch.optim.swa_utils.AveragedModel, or a mapping of tensors by name. Call
    `save` and `compare` around every step.
    """

    def __init__(self, reference: Job, loop: Job, holds: Mapping[str, ParameterShard]) -> None:
        self._reference, self._loop, self._holds = reference, loop, holds
        self._origin, self._before = Both(), Both()

    def save(self) -> None:
        """Copy the averages before a step. The first call also sets the origin of their change."""
        self._before = self._copy_values()
        self._origin = self._origin or self._before

    def compare(self, differences: Differences, limit: Tolerance) -> None:
        """Add a mismatch for each average that differs from the reference's.

        The difference is relative to the average's total change, or to its rounding if it hardly
        moved. An average that did not change although most elements of the reference's moved
        differs by 1.
        """
        now = self._copy_values()
        for name, (own, right) in now.items():
            was, its = self._before[name]
            way = norm(right.double() - self._origin[name][1].double())
            # second limit: _LARGE of the change, even if `limit.updates` allows more (16 bits); for
            # an average that hardly moved, _LARGE of the length that makes `eps` that share
            eps = torch.finfo(own.dtype).eps * _ROUNDINGS * norm(right)
            size = max(
                relative_to_move(own, right, way, limit, _ROUNDINGS),
                difference(own, right, max(way, eps / _LARGE)) * limit.updates / _LARGE,
            )
            if torch.equal(own, was) and 2 * int((right != its).sum()) > right.numel():
                size = max(size, 1.0)
            differences.compare(
                Moment.UPDATE, Subject.AVERAGE, name, difference=size, tolerance=limit.updates
            )

    def _copy_values(self) -> Both:
        """Return copies of the elements that this rank has of both averages, by name."""
        rights, rows = dict(_tensors(self._reference.average)), Both()
        for name, tensor in _tensors(self._loop.average):
            if name not in rights or name not in self._holds:
                continue
            shard = _shard(name, tensor, rights[name].shape, self._holds[name])
            rows[name] = shard.value().clone(), shard.select(rights[name].detach()).clone()
        return rows


def _shard(
    name: str, tensor: Tensor, shape: torch.Size, parameter: ParameterShard
) -> ParameterShard:
    """Return the shard of the full tensor that an average holds.

    A DTensor shows it, a tensor of full shape is replicated, and any other is sharded as the
    parameter.
    """
    if isinstance(tensor, DTensor):
        return dtensor_shard(name, tensor, shape)
    if tensor.shape == shape:
        return ParameterShard(name, tensor, shape)
    return replace(parameter, parameter=tensor, flat_index=None)


def _tensors(average: Average | None) -> Iterator[tuple[str, Tensor]]:
    """Yield the floating tensors of an average by canonical parameter name."""
    if average is None:
        return
    rows = average.named_parameters() if isinstance(average, nn.Module) else average.items()
    for name, tensor in rows:
        if tensor.is_floating_point():
            yield canonical_name(name), tensor


@dataclass(slots=True, kw_only=True)
class LoopPair:
    """The loop and its reference, with the parameters of both.

    Attributes:
        reference: The single-device job.
        loop: The job to verify.
        holds: This rank's shards of the loop's parameters, by name.
        wholes: The reference's full parameters, by name.
        origin: The reference's parameter values before the first step.
        sure: For each parameter, the elements whose gradient exceeded rounding in every step.
        averages: The moving averages of both.
    """

    reference: Job
    loop: Job
    holds: dict[str, ParameterShard]
    wholes: dict[str, ParameterShard]
    origin: Rows = field(default_factory=dict)
    sure: Rows = field(default_factory=dict)
    averages: Averages = field(init=False)

    def __post_init__(self) -> None:
        self.averages = Averages(self.reference, self.loop, self.holds)
        self.origin = copy_values(self.wholes)

    def copy_values(self) -> Rows:
        """Return copies of this rank's elements of the loop's parameters, flattened, by name."""
        its = self.loop.evidence
        return its.parameter_values(self.holds) if its else copy_values(self.holds)

    def optimizer_states(self, seen: StepRecorder) -> Mapping[str, Mapping[str, Tensor]]:
        """Return the state of the loop's optimizers, by parameter and key."""
        its = self.loop.evidence
        return its.optimizer_state() if its else optimizer_states(seen, self.holds)

    def buffers(self) -> Buffers:
        """Yield the buffers that both sides have: name, the reference's, the loop's."""
        plain, its = self.reference.model, self.loop.evidence
        return its.buffers(plain) if its else shared_buffers(plain, self.loop.model)

    def recorders(self) -> tuple[StepRecorder, StepRecorder]:
        """Return recorders of one step: the reference's, the loop's."""
        if self.loop.evidence:
            return self.loop.evidence.recorders(self.wholes, self.holds)
        plain = StepRecorder(self.reference.model, self.wholes)
        return plain, StepRecorder(self.loop.model, self.holds)

    def copy_states(self) -> tuple[SavedState, SavedState]:
        """Return copies of the states of both sides: the reference's, the loop's."""
        its = self.loop.evidence
        own = its.copy_state() if its else ModelState.copy_of(self.loop.model)
        return ModelState.copy_of(self.reference.model), own


CLIPPED = 1e-6  # relative: clip factors of parameters may differ by this, beyond a rounding


@dataclass(frozen=True, slots=True, kw_only=True)
class StepComparison:
    """The result of one step on both sides.

    Attributes:
        differences: The differences that this rank sees.
        expected: The record of the reference's step.
        seen: The record of the loop's step.
        losses: The return values of the reference's and of this rank's step.
        reference_state: The reference's state before the step.
        loop_state: The loop's state before the step.
        random: The generator states before the step.
        values: This rank's elements of the loop's parameters after the step.
        case: The update, for explanations and repetitions.
        unclipped: Squared norms of the reference's gradients after backward, before clipping. Empty
            for a job with evidence.
    """

    differences: Differences
    expected: StepRecorder
    seen: StepRecorder
    losses: tuple[Any, Any]
    reference_state: SavedState
    loop_state: SavedState
    random: RandomState
    values: Rows
    case: UpdateCase
    unclipped: dict[str, float]

    @property
    def clip_factor(self) -> float | None:
        """The factor by which the reference multiplies all gradients after backward.

        None if there is no common factor, or if a recorder already divides by it.
        """
        if self.expected.clip != 1.0 or self.seen.clip != 1.0:
            return None
        rows = self.expected.gradients
        rounding = max([CLIPPED, *(torch.finfo(its.dtype).eps for its in rows.values())])
        return common_factor(self.unclipped, rows, rounding)


Watches = Sequence[AbstractContextManager[object]]


def run_both_sides(
    pair: LoopPair, batch: Any, share: Any, drawing: DrawReplay,
    within: tuple[Watches, Watches] = ((), ()),
) -> tuple[Any, Any]:  # fmt: skip
    """Run the loop's step, then the reference's with the loop's draws; return both losses.

    `within` has contexts for both steps. The reference comes first there and in the result.
    """
    loop, plain = pair.loop.model, pair.reference.model
    random, (of_reference, of_loop) = RandomState.read(loop), within
    with ExitStack() as stack:
        for context in (*of_loop, drawing.record(loop)):
            stack.enter_context(context)
        loss = pair.loop.step(share)
    drawing.gather_draws()
    # the reference starts from the same states, and must not advance the loop's generators
    with torch.random.fork_rng(devices=cuda_devices(plain)), ExitStack() as stack:
        random.restore()
        # NoComms is slow: it dispatches every operator in Python
        alone = nullcontext() if pair.loop.evidence else NoComms()
        for context in (*of_reference, drawing.replay(plain), alone):
            stack.enter_context(context)
        return pair.reference.step(batch), loss


def run_step(
    pair: LoopPair, number_: int, batch: Any, share: Any, limit: Tolerance, drawing: DrawReplay
) -> StepComparison:
    """Run step `number_` (from 0) on both sides, and compare gradients, parameters and state."""
    random = RandomState.read(pair.loop.model)
    began = pair.copy_states()
    # Copies, because both steps update the parameters in place.
    before, run_before = copy_values(pair.wholes), pair.copy_values()
    pair.averages.save()
    expected, seen = pair.recorders()
    unclipped: dict[str, float] = {}
    # a program's reference runs backward per micro-batch: no single pass leaves their sum
    kept = nullcontext() if pair.loop.evidence else record_squares(pair.wholes, unclipped)
    watches = (expected, kept), (seen,)
    right, loss = run_both_sides(pair, batch, share, drawing, watches)
    differences = Differences(step=number_, rank=drawing.ranks.rank)
    if seen.max_updates != expected.max_updates:
        differences.add_mismatch(
            Moment.START, Subject.COUNTER, "optimizer.step",
            f"{seen.max_updates} updates, {expected.max_updates} in the reference",
        )  # fmt: skip
    sides = expected, seen
    own = {name: shard for name, shard in pair.holds.items() if name not in seen.omitted}
    own = locally_updated(seen.updated, own, drawing.ranks)
    compare_gradients(differences, sides, own, limit)
    compare_in_use(differences, sides, (before, run_before), pair.holds, limit)
    scale, run_after = Magnitude.measure(expected.gradients), pair.copy_values()
    for name, shard in pair.holds.items():
        gradient = expected.gradients.get(name)
        if gradient is not None:
            part = shard.select(gradient.view(shard.shape))
            now = significant_elements(part, seen.gradients.get(name), gradient, limit)
            pair.sure[name] = pair.sure[name] & now if name in pair.sure else now
        course = ParameterMove(
            parameter=shard.parameter,
            origin=shard.select(pair.origin[name]),
            before=shard.select(before[name]),
            after=shard.select(pair.wholes[name].value()),
            run_before=run_before[name],
            run_after=run_after[name],
            sure=pair.sure.get(name, torch.ones_like(run_before[name], dtype=torch.bool)),
        )
        quiet = gradient is not None and scale.is_noise(gradient)
        compare_update(differences, name, course, is_noise=quiet, limit=limit)
    case = UpdateCase(
        verdict=differences, reference=expected, run=seen, holds=pair.holds, limit=limit
    )
    states = optimizer_states(expected, pair.wholes), pair.optimizer_states(seen)
    compare_states(differences, *states, pair.holds, limit)
    compare_buffers(differences, pair.buffers(), limit)
    if pair.loop.evidence:
        pair.loop.evidence.compare_step(differences)
    else:
        compare_masters(differences, case)
        pair.averages.compare(differences, limit)
    return StepComparison(
        differences=differences, expected=expected, seen=seen, losses=(right, loss),
        reference_state=began[0], loop_state=began[1], random=random, values=run_after,
        case=case, unclipped=unclipped,
    )  # fmt: skip


def locally_updated(
    updated: Collection[str], holds: Mapping[str, ParameterShard], ranks: Ranks
) -> dict[str, ParameterShard]:
    """Return the shards whose gradients must be reduced to this rank. All ranks call it.

    A full parameter that only other ranks' optimizers update is left out.
    """
    everyones = ranks.gather(sorted(updated))
    elsewhere = {name for its in everyones for name in its}.difference(updated)
    return {name: s for name, s in holds.items() if s.indices is not None or name not in elsewhere}


def step_checksums(pair: LoopPair, step: StepComparison) -> dict[str, dict[str, list[str]]]:
    """Return checksums of this rank's parameters and gradients after a step."""
    return {
        "parameters": shard_checksums(pair.holds, step.values),
        "gradients": shard_checksums(pair.holds, step.seen.gradients),
    }


def are_finite(gradients: Mapping[str, Tensor], holds: Mapping[str, ParameterShard]) -> bool:
    """Return True if all gradients and parameters are finite."""
    values = (*gradients.values(), *(shard.value() for shard in holds.values()))
    return all(bool(torch.isfinite(tensor).all()) for tensor in values)


def describe_written(
    step: StepComparison, holds: Mapping[str, ParameterShard],
    sums: Sequence[Mapping[str, Sequence[str]]],
) -> dict[str, tuple[str, str]]:  # fmt: skip
    """Describe the values of the parameters in use, if they are known ones.

    Args:
        step: The step, whose forward pass used the parameters.
        holds: This rank's shards.
        sums: Checksums of the parameters at the start, and after each step before the last.

    Returns:
        A factor and a phrase by parameter: values of an earlier step, or the reference's in a
            coarser dtype. Both are "" if neither applies.
    """
    kinds = {}
    for name, value in step.seen.in_use.items():
        bits, right = checksum(value), holds[name].select(step.expected.in_use[name])
        earlier = [number for number, its in enumerate(sums) if its[name][1] == bits]
        coarse = [d for d in COARSER if torch.equal(value, right.to(d).to(value.dtype))]
        kinds[name] = "", ""
        if earlier:
            when = f"step {earlier[-1] - 1}" if earlier[-1] else "the start"
            kinds[name] = f"values of {when}", f"has its values of {when}"
        elif coarse:
            dtype = dtype_name(coarse[0])
            kinds[name] = f"rounded to {dtype}", f"is the reference rounded to {dtype}"
    return kinds


Sums = dict[str, dict[str, list[str]]]


def check_repeated_run(
    job: Job, wholes: Mapping[str, Tensor], terms: Terms, *, shares: Sequence[Any],
    first: Sequence[Sums], drawing: DrawReplay, tied: Mapping[str, str],
) -> RootCause | None:  # fmt: skip
    """Run a loop again, and return a root cause if its bits differ, or None.

    Args:
        job: The loop, built again.
        wholes: The reference's parameter values before the first step.
        terms: The options of the verification.
        shares: This rank's share of each batch.
        first: Checksums of the first run: those of the start, then those of each step. As many
            steps are run.
        drawing: Records the draws.
        tied: First name of each tied parameter, by its other names.
    """
    holds = find_shards(job.model, wholes, terms.part, tied=tied, padded=terms.padded)
    now = {"parameters": value_checksums(holds)}
    for step, expected in enumerate(first):
        if step:
            with StepRecorder(job.model, holds) as seen, drawing.record(job.model):
                job.step(shares[step - 1])
            # gradients first: the first kind that differs is reported
            now = {
                "gradients": shard_checksums(holds, seen.gradients),
                "parameters": value_checksums(holds),
            }
        mine = {
            kind: [name for name, bits in sums.items() if expected[kind].get(name) != bits]
            for kind, sums in now.items()
        }
        everyones = drawing.ranks.gather(mine)
        kind = next((its for its in now if any(of_rank[its] for of_rank in everyones)), None)
        if kind is not None:
            return RootCause(
                state=Subject(kind), axis="", factor="not reproducible", step=max(step - 1, 0),
                place=list_families(name for its in everyones for name in its[kind]),
                ranks=tuple(rank for rank, its in enumerate(everyones) if its[kind]),
                sentence="Run again from the same weights on the same batch, the loop gives other "
                f"bits. {POSSIBLE}an unseeded dropout or draw; a collective that is not waited "
                "for; an operator that is not deterministic."
                if step
                else "Built again, the loop has other weights.",
                fix="Seed what is drawn, wait for every collective, and set "
                "torch.use_deterministic_algorithms(True)."
                if step
                else "Seed its construction on every rank.",
            )  # fmt: skip
    return None


def value_checksums(holds: Mapping[str, ParameterShard]) -> dict[str, list[str]]:
    """Return checksums of the current parameter values of this rank, by name."""
    return shard_checksums(holds, {name: shard.value() for name, shard in holds.items()})
