"""The verification of a spec on the ranks of its mesh, stage by stage.

    preconditions -> examination -> trajectory in fp64 -> in the spec's own dtypes

Each stage presupposes those before it: a trajectory that differs proves nothing if the same run
twice differs, and a difference in step 1 is found in step 1. So the first stage that fails is the
last that runs, and the stages left out are listed. The examination runs all the same, because it
explains preconditions.

One rank of `ptrain verify` loads the spec, joins the other ranks, verifies and reports.
"""

from __future__ import annotations

import gc
import json
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import torch
import torch.distributed as dist

from ptrain.data.corpus import open_corpus
from ptrain.data.sampler import require_trainable_data as require_corpus
from ptrain.errors import VerdictFailed
from ptrain.files import write_json
from ptrain.interpreter.program import Program, interpret
from ptrain.models.contract import forward_once
from ptrain.report.record import Check
from ptrain.report.screen import print_lines, print_screen
from ptrain.report.verification import as_record, end_text, stage_text
from ptrain.runtime.world import World
from ptrain.selection.recompute import resolve_auto
from ptrain.spec.load import load
from ptrain.spec.spec import Spec, require_leave
from ptrain.train import environment
from ptrain.train.exchange import Exchange
from ptrain.train.folder import RunFolder
from ptrain.train.heading import announce_node, job_line
from ptrain.train.session import device_name
from ptrain.verification.examine import examine
from ptrain.verification.jobs.job import Verdict
from ptrain.verification.options import VerifyOptions
from ptrain.verification.preconditions import REPEATED, Make, StepObserver, check_preconditions
from ptrain.verification.reference import ReferenceTraining
from ptrain.verification.references import (
    NOTE,
    Progress,
    ReferenceRequest,
    ReferenceRun,
    disable_dropout,
    has_dropout,
    run_references,
    with_fp64,
    without_dropout,
)
from ptrain.verification.tolerances import (
    ReferencePlan,
    RunTolerances,
    derive_fp64_tolerances,
    derive_own_tolerances,
    fixed_fp32_tolerances,
    fixed_fp64_tolerances,
    plan_references,
)
from ptrain.verification.trajectory import (
    LossCorridor,
    ProgramRun,
    explain_dtypes,
    explain_reference,
    run_trajectory,
    trajectory_checks,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification(Verdict):
    """The verdict of all stages. The names of checks begin with the name of their stage.

    Attributes:
        seconds: The duration of each stage.
        trajectories: By stage, figures of every step: `losses` of the reference, `differences` of
            the run's losses from them, `allowed` differences, and `references`, the largest
            differences of permuted references (empty if none ran).
    """

    seconds: dict[str, float] = field(default_factory=dict)
    trajectories: dict[str, Mapping[str, tuple[float, ...]]] = field(default_factory=dict)


@dataclass(slots=True)
class VerificationContext:
    """The context of the stages.

    Attributes:
        request: The options of the verification.
        make: Builds a program.
        plan: The references that the trajectories may need; None before the first of them.
        references: The references that have run, by the key of their request.
    """

    spec: Spec
    world: World
    exchange: Exchange
    request: VerifyOptions
    make: Make
    progress: Progress = field(default_factory=Progress)
    plan: ReferencePlan | None = None
    references: dict[str, ReferenceRun] = field(default_factory=dict)

    def run_missing(self, asks: Sequence[ReferenceRequest]) -> list[ReferenceRun]:
        """Return the runs of these references, and run missing ones. All ranks call it."""
        missing = [ask for ask in asks if ask.key not in self.references]
        if missing:
            self.references |= run_references(missing, self.exchange, self.progress)
        return [self.references[ask.key] for ask in asks]


Stage: TypeAlias = "Callable[[VerificationContext], Verdict]"
Speak: TypeAlias = "Callable[[str, Sequence[Check], float], None]"


def interpret_spec(spec: Spec, world: World) -> Program:
    """Build a program as a training builds it."""
    return interpret(spec, world=world, allow_import=True)


def verify_on_ranks(
    spec: Spec,
    world: World,
    exchange: Exchange,
    request: VerifyOptions | None = None,
    *,
    make: Make = interpret_spec,
    speak: Speak | None = None,
    progress: Progress | None = None,
) -> Verification:
    """Verify a spec on the ranks of an open world. All ranks must call it.

    Args:
        spec: The spec.
        world: The ranks.
        exchange: The group of all ranks.
        request: The options; default: those of `ptrain verify` without flags.
        make: Builds the programs. Tests pass builders of faulty ones.
        speak: Called after each stage with its name, checks and seconds.
        progress: Called within long stages.

    Returns:
        The verdict, equal on all ranks.
    """
    context = VerificationContext(
        spec=spec, world=world, exchange=exchange, request=request or VerifyOptions(), make=make,
        progress=progress or Progress(),
    )  # fmt: skip
    quick = context.request.quick
    drops = without_dropout(spec) is not spec
    result = Verification(checks=(), notes=(*[NOTE] * drops, *[_QUICK] * quick))
    stages = {name: stage for name, stage in STAGES.items() if not quick or name in _OF_STEPS}
    names, failed = list(stages), ""
    for name, stage in stages.items():
        context.progress.begin(name)
        began = time.perf_counter()
        with nullcontext() if name in _WITH_DROPOUT else disable_dropout(spec):
            outcome = stage(context)
        gc.collect()  # programs are cycles, and hold the model several times
        seconds = time.perf_counter() - began
        result = _append_stage(result, name, outcome, seconds)
        if speak is not None:
            speak(name, outcome.checks, seconds)
        failed = failed or (name if outcome.has_failed else "")
        # A state or a counter that differs between ranks is explained by the comparison with one
        # device, if the run is a function of its spec.
        same = all(its.holds for its in outcome.checks if its.name.startswith(REPEATED))
        if failed and not (name == failed == names[0] and same):
            left = names[names.index(name) + 1 :]
            note = f"{failed} fails: {', '.join(left)} not checked"
            return replace(result, notes=(*result.notes, note)) if left else result
    return result


def _append_stage(
    result: Verification, name: str, outcome: Verdict, seconds: float
) -> Verification:
    steps = {name: outcome.trajectory} if outcome.trajectory else {}
    named = tuple(replace(check, name=f"{name}: {check.name}") for check in outcome.checks)
    return Verification(
        checks=(*result.checks, *named),
        mismatches=(*result.mismatches, *outcome.mismatches),
        root_cause=outcome.root_cause or result.root_cause,
        seconds=result.seconds | {name: seconds},
        trajectories=result.trajectories | steps,
        notes=(*result.notes, *outcome.notes),
    )


def _run_preconditions(context: VerificationContext) -> Verdict:
    """Check the preconditions, with the dtypes and the dropout of the spec."""
    every = context.request.every_collective
    outcome = check_preconditions(
        context.spec, context.world, context.exchange, context.make, every_collective=every
    )
    note = "the results of collectives are not hashed; use `--every-collective`"
    if context.world.size == 1:
        note = "a single rank shares nothing"
    return outcome if every and context.world.size > 1 else replace(outcome, notes=(note,))


def _run_examination(context: VerificationContext) -> Verdict:
    drops = has_dropout(context.spec, context.exchange)
    program = context.make(with_fp64(context.spec), context.world)
    examination = examine(program, context.exchange)
    return replace(examination, notes=(NOTE,)) if drops else examination


def _run_fp64_trajectory(context: VerificationContext) -> Verdict:
    """Compare the trajectory in fp64, after running the references that all trajectories need.

    These run in one call, so that the ranks share the work.
    """
    context.plan = plan_references(context.spec, context.request.steps)
    reference, permuted = context.run_missing(context.plan.required)[0], context.plan.permuted
    within = LossCorridor(
        center=reference.losses,
        allowed=fixed_fp64_tolerances(reference),
        derive_wider=lambda: derive_fp64_tolerances(
            [reference, *context.run_missing(permuted)], context.exchange
        ),
    )
    spec, exchange = with_fp64(context.spec), context.exchange
    run, outcome = _follow_trajectory(context, spec, reference, within)
    if run.stop_step is not None and outcome.root_cause is None:
        beside = examine(context.make(spec, context.world), exchange, run.stop_step + 1)
        outcome = replace(outcome, mismatches=beside.mismatches, root_cause=beside.root_cause)
    return replace(
        outcome,
        root_cause=outcome.root_cause or explain_reference(outcome.checks, context.world.size),
    )


def _run_own_trajectory(context: VerificationContext) -> Verdict:
    assert context.plan is not None, "the trajectory in fp64 comes before"
    asks, spec = context.plan.own, without_dropout(context.spec)
    if not asks:
        return Verdict(checks=(), notes=("own dtypes: they are fp64",))
    (reference,) = context.run_missing(asks[:1])

    def wider() -> RunTolerances:
        return derive_own_tolerances(spec, context.run_missing(asks))

    allowed = wider() if context.plan.is_order_sensitive else fixed_fp32_tolerances(reference)
    within = LossCorridor(center=reference.losses, allowed=allowed, derive_wider=wider)
    run, outcome = _follow_trajectory(context, spec, reference, within)
    size, layout = context.world.size, spec.precision.layout.name
    said = (
        outcome.root_cause
        or explain_reference(outcome.checks, size)
        or explain_dtypes(outcome.checks, run.stop_step, layout, size)
    )
    return replace(outcome, root_cause=said)


def _follow_trajectory(
    context: VerificationContext, spec: Spec, reference: ReferenceRun, within: LossCorridor
) -> tuple[ProgramRun, Verdict]:
    exchange = context.exchange
    program = context.make(spec, context.world)
    watch = StepObserver(program, exchange, every_collective=context.request.every_collective)
    run = run_trajectory(program, exchange, within, watch, context.progress)
    own_checks = within.check_with(
        lambda allowed: trajectory_checks(reference, run, allowed, exchange)
    )
    allowed = within.allowed
    notes = (allowed.explanation,) if allowed.explanation else ()
    steps = {
        "losses": reference.losses,
        "differences": tuple(
            abs(loss - its) for loss, its in zip(run.losses, within.center, strict=False)
        ),
        "allowed": allowed.losses,
        "references": allowed.references,
    }
    return run, Verdict(
        checks=(*own_checks, *watch.checks()), mismatches=watch.mismatches,
        root_cause=watch.root_cause, notes=notes, trajectory=steps,
    )  # fmt: skip


STAGES: dict[str, Stage] = {
    "preconditions": _run_preconditions,
    "examination": _run_examination,
    "trajectory in fp64": _run_fp64_trajectory,
    "trajectory in own dtypes": _run_own_trajectory,
}
_OF_STEPS = ("preconditions", "examination")  # single steps: what `quick` runs
_HINT = "--every-collective"  # in a note that states no limit of the verdict
_QUICK = "quick: no trajectory; use `--full` to run them"
_WITH_DROPOUT = ("preconditions",)  # it compares ranks, and a run with itself


def verify_on_rank(options: VerifyOptions) -> int:
    """Verify on this rank and return the exit code, which is equal on all ranks."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # nothing is half written: gone at once
    size = dist.get_world_size() if dist.is_initialized() else environment.world_size()
    spec = resolve_auto(load(options.spec, options.overrides, world_size=size))
    require_leave(spec, allow_import=options.allow_import)
    logits = _num_logits(spec)
    with ExitStack() as stack:
        world = World.join(spec.timeout, device=spec.device, backend=spec.backend)
        stack.callback(world.close)
        exchange = Exchange(world)
        stack.callback(exchange.close)
        require_corpus(open_corpus(spec.data), spec, logits)
        gc.freeze()  # what imports made is looked at by no collection after
        return _verify_and_report(spec, world, exchange, options)


def _num_logits(spec: Spec) -> int | None:
    """Return the number of logits per token of a model with user code; None for built-in ones.

    Raises:
        SpecError: The user's code, which runs here for the first time, fails.
    """
    if not spec.user_functions:
        return None
    model = ReferenceTraining(spec).module
    with torch.random.fork_rng(devices=[]):
        return forward_once(model, spec)


def _verify_and_report(spec: Spec, world: World, exchange: Exchange, options: VerifyOptions) -> int:
    heading = ""
    if world.is_first:
        numel = sum(its.numel() for its in ReferenceTraining(spec).parameters.values())
        heading = job_line(spec, numel=numel, backend=world.backend, device=world.device.type)
    speaks = world.is_first and not options.json
    progress = Progress(sys.stderr if speaks else None)

    if speaks:
        print_screen(heading)
    elif not options.json:
        announce_node(world.rank, world.size)
    verification = verify_on_ranks(
        spec, world, exchange, options, progress=progress,
        speak=(lambda *stage: print_screen(stage_text(*stage, verbose=options.verbose)))
        if speaks else None,
    )  # fmt: skip
    if world.is_first:
        result = as_record(
            spec.name,
            verification.checks,
            root_cause=verification.root_cause,
            mismatches=verification.mismatches,
            world_size=world.size,
            device=device_name(world),
            heading=heading,
            steps=options.steps,
            seconds=verification.seconds,
            trajectories=verification.trajectories,
            notes=list(verification.notes),
        )
        if options.folder is not None:
            write_json(RunFolder(options.folder).summary, result)
        if options.json and options.folder is None:
            print_lines(json.dumps(result, indent=2, ensure_ascii=False))
    if speaks:
        notes = [note for note in verification.notes if options.verbose or _HINT not in note]
        print_screen(
            end_text(
                verification.checks, torch=torch.__version__,
                root_cause=verification.root_cause, notes=notes,
            )
        )  # fmt: skip
    exchange.barrier()  # no rank ends with a failed verdict before the record is written
    return 0 if verification.holds else VerdictFailed.exit_code
