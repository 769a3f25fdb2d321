"""Run one step of both loops, and list every difference that this rank sees.

The loop's model draws random numbers, and one device repeats them after it, step by step: with the
loop's masks instead of its own, dropout is compared as tightly as a model without dropout.
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
from ptrain.verification.jobs.draws import DrawMode, EveryonesDraws, Key, RandomDraw
from ptrain.verification.jobs.job import Alone, Average, Job, Ranks, SavedState, Terms, Tolerance
from ptrain.verification.jobs.record import (
    Buffers,
    ModelState,
    StepRecorder,
    beside_way,
    compare_buffers,
    compare_gradients,
    compare_in_use,
    compare_states,
    compare_update,
    cuda_devices,
    digest,
    digests,
    shared_buffers,
    state_of,
    sure_of,
)
from ptrain.verification.jobs.root_causes import families
from ptrain.verification.jobs.shards import ParameterShard, held_by, shard_of, values_of
from ptrain.verification.parts import COARSER, Magnitude, canonical_name, difference, named, norm
from ptrain.verification.updates.clip import (
    UpdateCase,
    common_factor,
    compare_masters,
    kept_squares,
)


@dataclass(frozen=True, slots=True)
class Unattributed(Exception):
    """All ranks raise it: what these modules draw cannot be told by samples, and is to be stilled
    when both loops are run anew."""

    paths: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RandomState:
    """Torch's generators: the CPU's, and those of the GPUs that a model is on."""

    cpu: Tensor
    gpus: dict[int, Tensor]

    @classmethod
    def of(cls, model: nn.Module) -> RandomState:
        gpus = {device: torch.cuda.get_rng_state(device) for device in cuda_devices(model)}
        return cls(torch.get_rng_state(), gpus)

    def restore(self) -> None:
        """Let them go on from here."""
        torch.set_rng_state(self.cpu)
        for device, state in self.gpus.items():
            torch.cuda.set_rng_state(state, device)


class Drawing:
    """All ranks call `exchange` after the loop's step, before one device's. `still`: modules whose
    draws are stilled on both sides. `draws`: what the loop's model draws is given to the
    reference; else both draw by themselves in every step, and are compared by it."""

    def __init__(self, ranks: Ranks, still: Collection[str] = (), *, draws: bool = True) -> None:
        self.ranks, self.still = ranks, frozenset(still)
        self.everyones = EveryonesDraws()
        self.loop = DrawMode()
        self.hidden: set[str] = set()
        self.count = 0
        self.draws = draws

    @property
    def any(self) -> bool:
        return bool(self.everyones.by_key or self.everyones.alone)

    def recorded(self, model: nn.Module) -> Any:
        """Return what the loop's step is to run in."""
        self.loop = DrawMode(
            model, replace=lambda draw: draw.stilled() if draw.path in self.still else None
        )
        return self.loop if self.draws else nullcontext()

    def exchange(self) -> None:
        """All ranks tell each other what they drew."""
        self.everyones = EveryonesDraws.gathered(self.loop, self.ranks)
        hidden = self.ranks.gather(sorted(self.loop.hidden))
        self.hidden |= {path for paths in hidden for path in paths}
        self.count = len(self.everyones.by_key)

    def replayed(self, *models: nn.Module, still: Collection[Key] = ()) -> Any:
        """Return what passes of the plain model are to run in: each sample is dropped out as on the
        rank that had it."""

        def value(draw: RandomDraw, mode: DrawMode) -> Tensor | None:
            place = draw.outer, draw.call
            return self.everyones.of(draw, mode.rows[place], mode.times[place])

        return self._instead(models, still, value)

    def repeated(self, *models: nn.Module, alike: bool = False, still: Collection[Key] = ()) -> Any:
        """Return what passes of the loop's modules, or of plain ones on what these were given, are
        to run in: they draw what this rank's drew in its step. `alike`: ranks with the same samples
        draw what the first of them drew; and backward draws what forward drew."""
        own = {(draw.path, draw.number, draw.call): draw.value for draw in self.loop.draws}

        def value(draw: RandomDraw, mode: DrawMode) -> Tensor | None:
            its = own.get((draw.path, draw.number, draw.call))
            rows = mode.rows.get((draw.outer, draw.call), ())
            if alike and (first := self.everyones.of_first(draw, rows)) is not None:
                its = first
            return its if its is not None and its.shape == draw.value.shape else None

        return self._instead(models, still, value, keeps=alike)

    def stilled(self, model: nn.Module) -> Any:
        """Return what passes are to run in that are to draw nothing."""
        return DrawMode(model, replace=RandomDraw.stilled) if self.draws else nullcontext()

    def require_attributed(self) -> None:
        """Raises Unattributed on every rank where what one device draws is not told. All ranks call
        it, when one device has done its step too."""
        if not self.any:
            return
        mine = sorted(self.everyones.lost)
        paths = {path for paths in self.ranks.gather(mine) for path in paths}
        if paths:
            raise Unattributed(tuple(sorted(paths | self.still)))

    def notes(self) -> Iterator[str]:
        """Say what was replayed, and what was not."""
        if self.everyones.by_key:
            yield (
                f"the random draws of the model in {self.count} "
                f"place{'s' * (self.count != 1)} (dropout masks) are replayed in the "
                "reference, sample by sample"
            )
        if self.still:
            yield (
                f"compared without the draws of {families(sorted(self.still))}: they are "
                "drawn for shards of samples, by stages or for several samples at once, and "
                "cannot be attributed to samples. Set its rate to 0 on both sides, or draw one "
                "row per sample"
            )
        if self.hidden:
            yield (
                "compared without dropout within attention "
                f"({families(sorted(self.hidden))}): a fused kernel shows no mask. Use "
                "torch.nn.attention.sdpa_kernel(SDPBackend.MATH) to compare with it"
            )

    def _instead(
        self, models: Sequence[nn.Module], still: Collection[Key],
        value: Callable[[RandomDraw, DrawMode], Tensor | None], *, keeps: bool = False,
    ) -> Any:  # fmt: skip
        """Return what passes are to run in that draw these values, and nothing where it is
        `still`."""
        mode: DrawMode

        def instead(draw: RandomDraw) -> Tensor | None:
            is_still = draw.path in self.still or (draw.path, draw.number) in still
            return draw.stilled() if is_still else value(draw, mode)

        mode = DrawMode(*models, replace=instead, keeps=keeps)
        return mode if self.draws else nullcontext()


Rows = dict[str, Tensor]

_ROUNDINGS = 4  # of an average, in its own dtype
_LARGE = 0.05  # of its way: a fault is larger, even where its way is not much more than roundings

# This rank's elements of the loop's average and of one device's.
Both = dict[str, tuple[Tensor, Tensor]]


class Averages:
    """Moving averages of the parameters (torch.optim.swa_utils.AveragedModel, or a copy by hand)
    beside one device's: `before` and `compare` around every step."""

    def __init__(self, reference: Job, loop: Job, holds: Mapping[str, ParameterShard]) -> None:
        self._reference, self._loop, self._holds = reference, loop, holds
        self._origin, self._before = Both(), Both()

    def before(self) -> None:
        """Take the averages before a step."""
        self._before = self._values()
        self._origin = self._origin or self._before

    def compare(self, differences: Differences, limit: Tolerance) -> None:
        """Add a mismatch of each average that is not one device's."""
        now = self._values()
        for name, (own, right) in now.items():
            was, its = self._before[name]
            way = norm(right.double() - self._origin[name][1].double())
            # relative to its way or to its roundings
            eps = torch.finfo(own.dtype).eps * _ROUNDINGS * norm(right)
            size = max(
                beside_way(own, right, way, limit, _ROUNDINGS),
                difference(own, right, max(way, eps / _LARGE)) * limit.updates / _LARGE,
            )
            if torch.equal(own, was) and 2 * int((right != its).sum()) > right.numel():
                size = max(size, 1.0)
            differences.compare(
                Moment.UPDATE, Subject.AVERAGE, name, difference=size, tolerance=limit.updates
            )

    def _values(self) -> Both:
        rights, rows = dict(_tensors(self._reference.average)), Both()
        for name, tensor in _tensors(self._loop.average):
            if name not in rights or name not in self._holds:
                continue
            shard = _shard(name, tensor, rights[name].shape, self._holds[name])
            rows[name] = shard.value().clone(), shard.of(rights[name].detach()).clone()
        return rows


def _shard(
    name: str, tensor: Tensor, shape: torch.Size, parameter: ParameterShard
) -> ParameterShard:
    """Return which elements of the whole an average is: as it says itself, all, or those that the
    rank has of the parameter."""
    if isinstance(tensor, DTensor):
        return shard_of(name, tensor, shape)
    if tensor.shape == shape:
        return ParameterShard(name, tensor, shape)
    return replace(parameter, parameter=tensor, within=None)


def _tensors(average: Average | None) -> Iterator[tuple[str, Tensor]]:
    if average is None:
        return
    rows = average.named_parameters() if isinstance(average, nn.Module) else average.items()
    for name, tensor in rows:
        if tensor.is_floating_point():
            yield canonical_name(name), tensor


@dataclass(slots=True, kw_only=True)
class LoopPair:
    """Both loops, what this rank holds of the loop's parameters and of the reference's, and where
    these were at the start. `sure`: of each parameter the elements whose gradients were more than
    rounding in every step."""

    reference: Job
    loop: Job
    holds: dict[str, ParameterShard]
    wholes: dict[str, ParameterShard]
    origin: Rows = field(default_factory=dict)
    sure: Rows = field(default_factory=dict)
    averages: Averages = field(init=False)

    def __post_init__(self) -> None:
        self.averages = Averages(self.reference, self.loop, self.holds)
        self.origin = values_of(self.wholes)

    def values(self) -> Rows:
        """Return copies of this rank's elements of the loop's parameters."""
        its = self.loop.evidence
        return its.values(self.holds) if its else values_of(self.holds)

    def kept(self, seen: StepRecorder) -> Mapping[str, Mapping[str, Tensor]]:
        """Return what the loop's optimizers keep beside each parameter."""
        return self.loop.evidence.kept() if self.loop.evidence else state_of(seen, self.holds)

    def buffers(self) -> Buffers:
        """Yield the buffers that both sides have."""
        plain, its = self.reference.model, self.loop.evidence
        return its.buffers(plain) if its else shared_buffers(plain, self.loop.model)

    def recorders(self) -> tuple[StepRecorder, StepRecorder]:
        """Return a recorder of the reference's step, and one of the loop's."""
        if self.loop.evidence:
            return self.loop.evidence.recorders(self.wholes, self.holds)
        plain = StepRecorder(self.reference.model, self.wholes)
        return plain, StepRecorder(self.loop.model, self.holds)

    def states(self) -> tuple[SavedState, SavedState]:
        """Return copies of the state of both, the reference's first."""
        own = self.loop.evidence.state() if self.loop.evidence else ModelState.of(self.loop.model)
        return ModelState.of(self.reference.model), own


CLIPPED = 1e-6  # relative: by what factors of clipping may differ, beyond a rounding


@dataclass(frozen=True, slots=True, kw_only=True)
class StepComparison:
    """`losses`: the reference's and this rank's, as the steps returned them; `reference_state` and
    `loop_state`: what both models had before, `random` the loop's generators; `values`: its
    parameters after the step; `unclipped`: squares of the reference's gradients as its backward
    pass left them, nothing of a job with evidence."""

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
    def clip(self) -> float | None:
        """Return what the reference multiplies all gradients by after backward; None where that is
        no one number, or where the recorders divide by it."""
        if self.expected.clip != 1.0 or self.seen.clip != 1.0:
            return None
        rows = self.expected.gradients
        rounding = max([CLIPPED, *(torch.finfo(its.dtype).eps for its in rows.values())])
        return common_factor(self.unclipped, rows, rounding)


Watches = Sequence[AbstractContextManager[object]]


def both_losses(
    pair: LoopPair, batch: Any, share: Any, drawing: Drawing,
    within: tuple[Watches, Watches] = ((), ()),
) -> tuple[Any, Any]:  # fmt: skip
    """Run the loop's step first, then the reference's, which draws what the loop drew, `within` the
    contexts of each; return what both return. Of either pair the reference's is first."""
    loop, plain = pair.loop.model, pair.reference.model
    random, (of_reference, of_loop) = RandomState.of(loop), within
    with ExitStack() as stack:
        for context in (*of_loop, drawing.recorded(loop)):
            stack.enter_context(context)
        loss = pair.loop.step(share)
    drawing.exchange()
    with torch.random.fork_rng(devices=cuda_devices(plain)), ExitStack() as stack:
        random.restore()
        alone = nullcontext() if pair.loop.evidence else Alone()  # slow: it sees every operator
        for context in (*of_reference, drawing.replayed(plain), alone):
            stack.enter_context(context)
        return pair.reference.step(batch), loss


def run_step(
    pair: LoopPair, number_: int, batch: Any, share: Any, limit: Tolerance, drawing: Drawing
) -> StepComparison:
    """Run a step of both, and compare all that they do."""
    random = RandomState.of(pair.loop.model)
    began = pair.states()
    before, run_before = values_of(pair.wholes), pair.values()
    pair.averages.before()
    expected, seen = pair.recorders()
    unclipped: dict[str, float] = {}
    # of a program's reference each micro-batch has a backward pass, and none leaves their sum
    kept = nullcontext() if pair.loop.evidence else kept_squares(pair.wholes, unclipped)
    watches = (expected, kept), (seen,)
    right, loss = both_losses(pair, batch, share, drawing, watches)
    differences = Differences(step=number_, rank=drawing.ranks.rank)
    if seen.updates != expected.updates:
        differences.add(
            Moment.START, Subject.COUNTER, "optimizer.step",
            f"{seen.updates} updates, {expected.updates} in the reference",
        )  # fmt: skip
    sides = expected, seen
    own = {name: shard for name, shard in pair.holds.items() if name not in seen.omitted}
    own = of_own_optimizers(seen.updated, own, drawing.ranks)
    compare_gradients(differences, sides, own, limit)
    compare_in_use(differences, sides, (before, run_before), pair.holds, limit)
    scale, run_after = Magnitude.of(expected.gradients), pair.values()
    for name, shard in pair.holds.items():
        gradient = expected.gradients.get(name)
        if gradient is not None:
            part = shard.of(gradient.view(shard.shape))
            now = sure_of(part, seen.gradients.get(name), gradient, limit)
            pair.sure[name] = pair.sure[name] & now if name in pair.sure else now
        course = ParameterMove(
            parameter=shard.parameter,
            origin=shard.of(pair.origin[name]),
            before=shard.of(before[name]),
            after=shard.of(pair.wholes[name].value()),
            run_before=run_before[name],
            run_after=run_after[name],
            sure=pair.sure.get(name, torch.ones_like(run_before[name], dtype=torch.bool)),
        )
        quiet = gradient is not None and scale.is_noise(gradient)
        compare_update(differences, name, course, is_noise=quiet, limit=limit)
    case = UpdateCase(
        verdict=differences, reference=expected, run=seen, holds=pair.holds, limit=limit
    )
    states = state_of(expected, pair.wholes), pair.kept(seen)
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


def of_own_optimizers(
    updated: Collection[str], holds: Mapping[str, ParameterShard], ranks: Ranks
) -> dict[str, ParameterShard]:
    """Return what this rank holds without whole parameters that only other ranks' optimizers
    update: their gradients need not be reduced to this rank. All ranks call it."""
    everyones = ranks.gather(sorted(updated))
    elsewhere = {name for its in everyones for name in its}.difference(updated)
    return {name: s for name, s in holds.items() if s.at is not None or name not in elsewhere}


def checksums(pair: LoopPair, step: StepComparison) -> dict[str, dict[str, list[str]]]:
    """Return checksums of what this rank has after a step, bit by bit."""
    return {
        "parameters": digests(pair.holds, step.values),
        "gradients": digests(pair.holds, step.seen.gradients),
    }


def is_finite(gradients: Mapping[str, Tensor], holds: Mapping[str, ParameterShard]) -> bool:
    """Return whether gradients and parameters are numbers at all."""
    values = (*gradients.values(), *(shard.value() for shard in holds.values()))
    return all(bool(torch.isfinite(tensor).all()) for tensor in values)


def written(
    step: StepComparison, holds: Mapping[str, ParameterShard],
    sums: Sequence[Mapping[str, Sequence[str]]],
) -> dict[str, tuple[str, str]]:  # fmt: skip
    """Return, as a factor and in words, what each parameter is that is in use: its values of an
    earlier time, or the reference's in a coarser dtype; nothing where it is neither. `sums`:
    checksums of the start and after each step before the last."""
    kinds = {}
    for name, value in step.seen.in_use.items():
        bits, right = digest(value), holds[name].of(step.expected.in_use[name])
        earlier = [number for number, its in enumerate(sums) if its[name][1] == bits]
        coarse = [d for d in COARSER if torch.equal(value, right.to(d).to(value.dtype))]
        kinds[name] = "", ""
        if earlier:
            when = f"step {earlier[-1] - 1}" if earlier[-1] else "the start"
            kinds[name] = f"values of {when}", f"has its values of {when}"
        elif coarse:
            dtype = named(coarse[0])
            kinds[name] = f"rounded to {dtype}", f"is the reference rounded to {dtype}"
    return kinds


Sums = dict[str, dict[str, list[str]]]


def repeated(
    job: Job,
    wholes: Mapping[str, Tensor],
    terms: Terms,
    *,
    shares: Sequence[Any],
    first: Sequence[Sums],
    drawing: Drawing,
    tied: Mapping[str, str],
) -> RootCause | None:
    """Return why a loop that is run again gives other bits; None where it does not. Runs as many
    steps as `first` has checksums of, which begins with those of the start."""
    holds = held_by(job.model, wholes, terms.part, tied=tied, padded=terms.padded)
    now = {"parameters": checksums_of(holds)}
    for step, expected in enumerate(first):
        if step:
            with StepRecorder(job.model, holds) as seen, drawing.recorded(job.model):
                job.step(shares[step - 1])
            # gradients before parameters
            now = {"gradients": digests(holds, seen.gradients), "parameters": checksums_of(holds)}
        mine = {
            kind: [name for name, bits in sums.items() if expected[kind].get(name) != bits]
            for kind, sums in now.items()
        }
        everyones = drawing.ranks.gather(mine)
        kind = next((its for its in now if any(of_rank[its] for of_rank in everyones)), None)
        if kind is not None:
            return RootCause(
                state=Subject(kind), axis="", factor="not reproducible", step=max(step - 1, 0),
                place=families(name for its in everyones for name in its[kind]),
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


def checksums_of(holds: Mapping[str, ParameterShard]) -> dict[str, list[str]]:
    return digests(holds, {name: shard.value() for name, shard in holds.items()})
