"""The protocol: a spec on the ranks of its own mesh, against one device.

    preconditions -> examination -> consistency -> trajectory in fp64 -> in the spec's own dtypes
                  -> invariance

Each stage presupposes those before it: a trajectory that departs says nothing where the same run
twice does, and what departs in step 1 is found in step 1. So the first stage that fails is the last
that runs, and what was left out is said; but the examination explains preconditions.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TypeAlias

from ptrain.interpreter.program import Program, interpret
from ptrain.report.record import Check
from ptrain.rooms.world import World
from ptrain.spec.spec import Spec
from ptrain.train.exchange import Exchange
from ptrain.verification import invariance
from ptrain.verification.consistency import Watch, consistency
from ptrain.verification.examine import examine
from ptrain.verification.jobs.verdict import Verdict
from ptrain.verification.preconditions import REPEATED, Make, preconditions
from ptrain.verification.progress import Progress
from ptrain.verification.references import Ask, ReferenceRun, references
from ptrain.verification.tolerances import (
    Allowed,
    ReferencePlan,
    fixed_in_fp32,
    fixed_in_fp64,
    grows_in_proportion,
    in_fp64,
    in_own_dtypes,
    plan,
)
from ptrain.verification.trajectory import (
    Corridor,
    ProgramRun,
    anywhere,
    checks,
    follow,
    from_rank,
    of_dtypes,
    of_reference,
)
from ptrain.verification.variants import NOTE, dropping, exactly, undropped, without_dropout

Steps: TypeAlias = dict[str, tuple[float, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """`steps` of each trajectory; `quick`: without these. `every_collective`: what a collective
    leaves is hashed over its group. `folder` keeps references for other specs. `account` is where
    this run leaves what another mesh is compared with, `against` what another left."""

    steps: int = 100
    quick: bool = False
    every_collective: bool = False
    folder: Path | None = None
    account: Path | None = None
    against: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification(Verdict):
    """The verdict and what it rests on. `seconds` by stage, whose name each check's begins with;
    `trajectories` by stage, step by step: one device's losses, how far the run's were off, might
    be, and permuted references' were (empty: none was run)."""

    seconds: dict[str, float] = field(default_factory=dict)
    trajectories: dict[str, Steps] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowedStage(Verdict):
    """A stage of many steps."""

    steps: Steps


@dataclass(slots=True)
class Context:
    """What stages share: which references there may be, those that were run by their keys, and the
    run in fp64 with where it should be."""

    spec: Spec
    world: World
    exchange: Exchange
    request: Request
    make: Make
    progress: Progress = field(default_factory=Progress)
    plan: ReferencePlan | None = None
    references: dict[str, ReferenceRun] = field(default_factory=dict)
    exact: ProgramRun | None = None
    within: Corridor | None = None

    def runs(self, asks: Sequence[Ask]) -> list[ReferenceRun]:
        """Return these references; those that are not there yet are run. All ranks call it."""
        missing = [ask for ask in asks if ask.key not in self.references]
        if missing:
            self.references |= references(
                missing, self.exchange, self.request.folder, self.progress
            )
        return [self.references[ask.key] for ask in asks]


Stage: TypeAlias = "Callable[[Context], Verdict]"
Speak: TypeAlias = "Callable[[str, Sequence[Check], float], None]"


def interpreted(spec: Spec, world: World) -> Program:
    """Return the program as a training makes it."""
    return interpret(spec, world=world, allow_import=True)


def verify_here(
    spec: Spec,
    world: World,
    exchange: Exchange,
    request: Request | None = None,
    *,
    make: Make = interpreted,
    speak: Speak | None = None,
    progress: Progress | None = None,
) -> Verification:
    """Verify on every rank of a world that is up. `make` builds the programs; `speak` is called
    with each stage that is over, `progress` within the long ones."""
    context = Context(
        spec=spec, world=world, exchange=exchange, request=request or Request(), make=make,
        progress=progress or Progress(),
    )  # fmt: skip
    quick = context.request.quick
    result = Verification(checks=(), notes=(*_notes(spec), *([_QUICK] if quick else [])))
    stages = {name: stage for name, stage in STAGES.items() if not quick or name in _OF_STEPS}
    names, failed = list(stages), ""
    for name, stage in stages.items():
        context.progress.begin(name)
        began = time.perf_counter()
        with nullcontext() if name in _WITH_DROPOUT else undropped(spec):
            outcome = stage(context)
        gc.collect()  # programs are cycles, and hold the model several times
        seconds = time.perf_counter() - began
        result = _with(result, name, outcome, seconds)
        if speak is not None:
            speak(name, outcome.checks, seconds)
        failed = failed or (name if outcome.fails else "")
        if failed and not (name == failed and _asks_examination(name, outcome.checks)):
            left = names[names.index(name) + 1 :]
            note = f"{failed} fails: {', '.join(left)} not checked"
            return replace(result, notes=(*result.notes, note)) if left else result
    return result


def _asks_examination(name: str, checks: Sequence[Check]) -> bool:
    """A state or a counter that is not one device's is explained beside one device, if the run is a
    function of its spec."""
    is_first = name == next(iter(STAGES))
    return is_first and all(check.holds for check in checks if check.name.startswith(REPEATED))


def account_here(spec: Spec, world: World, exchange: Exchange, request: Request) -> None:
    """Run in fp64 alone, for another spec to be compared with."""
    context = Context(spec=spec, world=world, exchange=exchange, request=request, make=interpreted)
    program = context.make(exactly(spec), world)
    with undropped(spec):
        within, watch = anywhere(request.steps), _watch(context, program)
        run = follow(program, exchange, within, watch, context.progress)
    if request.account is not None and world.is_first:
        invariance.write(request.account, spec, run)
    exchange.barrier()


def _with(result: Verification, name: str, outcome: Verdict, seconds: float) -> Verification:
    steps = {name: outcome.steps} if isinstance(outcome, FollowedStage) else {}
    named = tuple(replace(check, name=f"{name}: {check.name}") for check in outcome.checks)
    return Verification(
        checks=(*result.checks, *named),
        departures=(*result.departures, *outcome.departures),
        culprit=result.culprit or outcome.culprit,
        seconds=result.seconds | {name: seconds},
        trajectories=result.trajectories | steps,
        notes=(*result.notes, *outcome.notes),
    )


def _notes(spec: Spec) -> tuple[str, ...]:
    if without_dropout(spec) is not spec:
        return (NOTE,)
    return ()


def _preconditions(context: Context) -> Verdict:
    return Verdict(
        checks=preconditions(context.spec, context.world, context.exchange, context.make)
    )


def _examination(context: Context) -> Verdict:
    drops = dropping(context.spec, context.exchange)
    program = context.make(exactly(context.spec), context.world)
    examination = examine(program, context.exchange)
    return replace(examination, notes=(NOTE,)) if drops else examination


def _consistency(context: Context) -> Verdict:
    """Check consistency with the spec's own dtypes and dropout."""
    program, request = context.make(context.spec, context.world), context.request
    every = request.every_collective
    outcome = _watched(consistency(program, context.exchange, every_collective=every))
    if context.world.size == 1:
        return replace(outcome, notes=("consistency: one rank shares nothing",))
    if every:
        return outcome
    note = "what each collective leaves is not hashed: --every-collective does"
    return replace(outcome, notes=(note,))


def _in_fp64(context: Context) -> Verdict:
    """Run the references that every trajectory needs first: that is what ranks share the work
    of."""
    context.plan = plan(context.spec, context.request.steps)
    reference = context.runs(context.plan.asks)[0]
    context.within = within = Corridor(
        center=reference.losses,
        allowed=fixed_in_fp64(reference),
        wider=partial(_grown, context, reference),
    )
    spec, exchange = exactly(context.spec), context.exchange
    context.exact, outcome = _followed(context, spec, reference, within)
    stopped = context.exact.stopped
    if stopped is not None and outcome.culprit is None:
        beside = examine(context.make(spec, context.world), exchange, stopped + 1)
        outcome = replace(outcome, departures=beside.departures, culprit=beside.culprit)
    return replace(
        outcome, culprit=outcome.culprit or of_reference(outcome.checks, context.world.size)
    )


def _grown(context: Context, reference: ReferenceRun) -> Allowed:
    """What training makes of a rounding in fp64."""
    assert context.plan is not None
    growth = context.runs(context.plan.growth)
    if not grows_in_proportion(growth):
        growth = [reference, *context.runs(context.plan.permuted)]
    return in_fp64(growth, reference, context.exchange)


def _in_own_dtypes(context: Context) -> Verdict:
    assert context.plan is not None, "the trajectory in fp64 comes before"
    asks, spec = context.plan.own, without_dropout(context.spec)
    if not asks:
        return Verdict(checks=(), notes=("own dtypes: they are fp64",))
    (reference,) = context.runs(asks[:1])

    def parted() -> Allowed:
        return in_own_dtypes(spec, context.runs(asks), context.exchange)

    within = (
        Corridor(center=reference.losses, allowed=parted())
        if context.plan.is_banded
        else Corridor(center=reference.losses, allowed=fixed_in_fp32(reference), wider=parted)
    )
    run, outcome = _followed(context, spec, reference, within)
    if outcome.culprit is not None:
        return outcome
    size, layout = context.world.size, spec.precision.layout.name
    of_one = of_reference(outcome.checks, size)
    return replace(outcome, culprit=of_one or of_dtypes(outcome.checks, run.stopped, layout, size))


def _followed(
    context: Context, spec: Spec, reference: ReferenceRun, within: Corridor
) -> tuple[ProgramRun, FollowedStage]:
    exchange = context.exchange
    program = context.make(spec, context.world)
    watch = _watch(context, program)
    run = follow(program, exchange, within, watch, context.progress)
    own_checks = within.judged(lambda allowed: checks(reference, run, allowed, exchange))
    allowed = within.allowed
    notes = (allowed.explanation,) if allowed.explanation else ()
    steps = {
        "losses": reference.losses,
        "differences": within.off(run.trajectory.losses),
        "allowed": allowed.losses,
        "references": allowed.references,
    }
    all_checks = (*own_checks, *watch.checks())
    return run, FollowedStage(
        checks=all_checks, departures=watch.departures, culprit=watch.culprit, notes=notes,
        steps=steps,
    )  # fmt: skip


def _watch(context: Context, program: Program) -> Watch:
    every = context.request.every_collective
    return Watch(program, context.exchange, every_collective=every)


def _watched(watch: Watch) -> Verdict:
    return Verdict(checks=watch.checks(), departures=watch.departures, culprit=watch.culprit)


def _invariance(context: Context) -> Verdict:
    run, within, exchange = context.exact, context.within, context.exchange
    assert run is not None and within is not None, "the trajectory in fp64 comes before"
    spec = exactly(context.spec)
    all_checks, note = invariance.in_micro_batches(spec, run, context.world, exchange, context.make)
    notes = [note]
    if (path := context.request.against) is not None:
        other = invariance.read(path) if exchange.world.is_first else None

        def beside(allowed: Allowed) -> tuple[Check, ...]:
            own = () if other is None else invariance.against(run, other, allowed.losses)
            return from_rank(0, list(own), exchange)

        said = within.allowed.explanation  # with the trajectory
        all_checks = (*all_checks, *within.judged(beside))
        notes.append(within.allowed.explanation.removeprefix(said))
    return Verdict(checks=all_checks, notes=tuple(filter(None, notes)))


STAGES: dict[str, Stage] = {
    "preconditions": _preconditions,
    "examination": _examination,
    "consistency": _consistency,
    "trajectory in fp64": _in_fp64,
    "trajectory in own dtypes": _in_own_dtypes,
    "invariance": _invariance,
}
_OF_STEPS = ("preconditions", "examination", "consistency")  # single steps: what `quick` runs
_QUICK = "quick: no trajectory and no other micro-batches, which --full runs"
_WITH_DROPOUT = ("preconditions", "consistency")  # stages that compare ranks, or a run with itself
