"""Run one step of both loops, and list every difference that this rank sees.

The loop's model draws random numbers, and one device repeats them after it, step by step: with the
loop's masks instead of its own, dropout is compared as tightly as a model without dropout.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ptrain.report.finding import POSSIBLE, Moment, RootCause, Subject
from ptrain.verification.compare import Differences, ParameterMove
from ptrain.verification.jobs.averages import Averages
from ptrain.verification.jobs.draws import DrawMode, EveryonesDraws, Key, RandomDraw
from ptrain.verification.jobs.job import Alone, Job, Ranks, SavedState, Terms, Tolerance
from ptrain.verification.jobs.record import (
    Buffers,
    ModelState,
    StepRecorder,
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
from ptrain.verification.jobs.shards import ParameterShard, held_by, values_of
from ptrain.verification.parts import COARSER, Magnitude, named, square
from ptrain.verification.updates.clip import UpdateCase, compare_masters, kept_squares


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
        self.loop = DrawMode(model, replace=self._stilled)
        return self.loop if self.draws else nullcontext()

    def exchange(self) -> None:
        """All ranks tell each other what they drew."""
        if not self.draws:
            return
        self.everyones = EveryonesDraws.gathered(self.loop, self.ranks)
        hidden = self.ranks.gather(sorted(self.loop.hidden))
        self.hidden |= {path for paths in hidden for path in paths}
        self.count = len(self.everyones.by_key)

    def replayed(self, *models: nn.Module, still: Collection[Key] = ()) -> Any:
        """Return what passes of the plain model are to run in: each sample is dropped out as on the
        rank that had it."""
        if not self.draws:
            return nullcontext()
        mode: DrawMode

        def instead(draw: RandomDraw) -> Tensor | None:
            if draw.path in self.still or (draw.path, draw.number) in still:
                return draw.stilled()
            place = draw.outer, draw.call
            return self.everyones.of(draw, mode.rows[place], mode.times[place])

        mode = DrawMode(*models, replace=instead)
        return mode

    def repeated(self, *models: nn.Module, alike: bool = False, still: Collection[Key] = ()) -> Any:
        """Return what passes of the loop's modules, or of plain ones on what these were given, are
        to run in: they draw what this rank's drew in its step. `alike`: ranks with the same samples
        draw what the first of them drew; and backward draws what forward drew."""
        if not self.draws:
            return nullcontext()
        own = {(draw.path, draw.number, draw.call): draw.value for draw in self.loop.draws}
        mode: DrawMode

        def instead(draw: RandomDraw) -> Tensor | None:
            if draw.path in self.still or (draw.path, draw.number) in still:
                return draw.stilled()
            value = own.get((draw.path, draw.number, draw.call))
            rows = mode.rows.get((draw.outer, draw.call), ())
            if alike and (first := self.everyones.of_first(draw, rows)) is not None:
                value = first
            return value if value is not None and value.shape == draw.value.shape else None

        mode = DrawMode(*models, replace=instead, keeps=alike)
        return mode

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

    def _stilled(self, draw: RandomDraw) -> Tensor | None:
        return draw.stilled() if draw.path in self.still else None


@contextmanager
def drawing_from(state: RandomState, model: nn.Module) -> Iterator[None]:
    """Draw from `state` on within, and go on afterwards from where the generators stand now."""
    with torch.random.fork_rng(devices=cuda_devices(model)):
        state.restore()
        yield


Rows = dict[str, Tensor]


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
        evidence = self.loop.evidence
        return evidence.values(self.holds) if evidence else values_of(self.holds)

    def kept(self, seen: StepRecorder) -> Mapping[str, Mapping[str, Tensor]]:
        """Return what the loop's optimizers keep beside each parameter."""
        evidence = self.loop.evidence
        return evidence.kept() if evidence else state_of(seen, self.holds)

    def buffers(self) -> Buffers:
        """Yield the buffers that both sides have."""
        evidence = self.loop.evidence
        both = self.reference.model, self.loop.model
        return evidence.buffers(both[0]) if evidence else shared_buffers(*both)

    def recorders(self) -> tuple[StepRecorder, StepRecorder]:
        """Return a recorder of the reference's step, and one of the loop's."""
        sides = (self.reference, self.wholes), (self.loop, self.holds)
        expected, seen = (
            job.recorder(holds) if job.recorder else StepRecorder(job.model, holds)
            for job, holds in sides
        )
        return expected, seen

    def states(self) -> tuple[SavedState, SavedState]:
        """Return copies of the state of both, the reference's first."""
        evidence = self.loop.evidence
        own = evidence.state() if evidence else ModelState.of(self.loop.model)
        return ModelState.of(self.reference.model), own


_CLIPPED = 1e-6  # of the squared norm: what it loses to clipping, beyond a rounding


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
    def is_clipped(self) -> bool:
        """Return whether the reference's gradients were made shorter before its update."""
        taken = sum(map(square, self.expected.gradients.values()))
        return sum(self.unclipped.values()) > taken * (1 + _CLIPPED)

    @property
    def clip(self) -> float | None:
        """Return what the reference multiplies all gradients by after backward; None where that is
        no one number, or where the recorders divide by it."""
        if self.expected.clip != 1.0 or self.seen.clip != 1.0:
            return None
        rows = {n: its for n, its in self.expected.gradients.items() if self.unclipped.get(n)}
        factors = [math.sqrt(square(its) / self.unclipped[name]) for name, its in rows.items()]
        rounding = max([_CLIPPED, *(torch.finfo(its.dtype).eps for its in rows.values())])
        if not factors or max(factors) - min(factors) > rounding * max(factors):
            return None if factors else 1.0
        taken = sum(map(square, rows.values()))
        return math.sqrt(taken / sum(self.unclipped[name] for name in rows))


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
    with drawing_from(random, plain), ExitStack() as stack:
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
        description = f"{seen.updates} updates, {expected.updates} in the reference"
        differences.add(Moment.START, Subject.COUNTER, "optimizer.step", description)
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
    ranks = drawing.ranks
    differing = _gathered(ranks, _differing(first[0], {"parameters": checksums_of(holds)}))
    if differing:
        return _not_reproducible(
            differing,
            0,
            "Built again, the loop has other weights.",
            "Seed its construction on every rank.",
        )
    for step, (share, expected) in enumerate(zip(shares, first[1:], strict=True)):
        with StepRecorder(job.model, holds) as seen, drawing.recorded(job.model):
            job.step(share)
        now = {"gradients": digests(holds, seen.gradients), "parameters": checksums_of(holds)}
        differing = _gathered(ranks, _differing(expected, now))
        if differing:
            return _not_reproducible(
                differing, step,
                "Run again from the same weights on the same batch, the loop gives other bits. "
                f"{POSSIBLE}an unseeded dropout or draw; a collective that is not waited for; an "
                "operator that is not deterministic.",
                "Seed what is drawn, wait for every collective, and set "
                "torch.use_deterministic_algorithms(True).",
            )  # fmt: skip
    return None


def checksums_of(holds: Mapping[str, ParameterShard]) -> dict[str, list[str]]:
    return digests(holds, {name: shard.value() for name, shard in holds.items()})


def _differing(expected: Sums, now: Sums) -> dict[str, list[str]]:
    """Return what differs, by kind; gradients before parameters."""
    return {
        kind: [name for name, checksum in sums.items() if expected[kind].get(name) != checksum]
        for kind, sums in now.items()
    }


def _gathered(ranks: Ranks, mine: dict[str, list[str]]) -> list[tuple[int, str, list[str]]]:
    """(rank, kind, names) of the first kind that differs on any rank."""
    everyones = ranks.gather(mine)
    for kind in mine:
        rows = [(rank, kind, its[kind]) for rank, its in enumerate(everyones) if its[kind]]
        if rows:
            return rows
    return []


def _not_reproducible(
    rows: Sequence[tuple[int, str, list[str]]], step: int, sentence: str, fix: str
) -> RootCause:
    names = dict.fromkeys(name for _, _, group in rows for name in group)
    return RootCause(
        state=Subject(rows[0][1]),
        axis="",
        factor="not reproducible",
        place=families(names),
        step=step,
        ranks=tuple(rank for rank, _, _ in rows),
        sentence=sentence,
        fix=fix,
    )
