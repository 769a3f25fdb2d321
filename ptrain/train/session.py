"""One rank of a training from start to end: load, join the group, wrap, resume, train, compare.

It also reports an emulated dtype, and records the routing counts of printed and measured steps by
layer, rank and micro-batch.
"""

from __future__ import annotations

import json
import platform
import shlex
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from ptrain.cost import Estimate
from ptrain.data.corpus import open_corpus
from ptrain.data.sampler import SampleSource, fingerprint_data, require_trainable_data
from ptrain.derivation.estimate import Derivation, by_counts, derive, step_tokens
from ptrain.errors import PtrainError, VerdictFailed, input_error
from ptrain.facts.parameters import count_weights
from ptrain.files import warn_if_unwritable, write_json, write_text
from ptrain.interpreter.program import Program, interpret
from ptrain.meters.measure import gather_estimates, join_estimates
from ptrain.meters.routing import RoutingMeter, sum_histograms, sum_routing
from ptrain.models.numerics import is_native
from ptrain.processor import cores
from ptrain.report.record import Check, compare_estimates, result_record, time_checks, verdict_word
from ptrain.report.routing import LayerRouting, is_routing_recorded, routing_rows
from ptrain.report.screen import next_line
from ptrain.report.summary import training_summary
from ptrain.runtime.queue import keep_freed_memory
from ptrain.runtime.world import World
from ptrain.selection.preflight import require_fit
from ptrain.selection.recompute import resolve_auto
from ptrain.spec.load import load
from ptrain.spec.precision import DType, Matmul
from ptrain.spec.routing import Histogram
from ptrain.spec.spec import Spec, ranks_over
from ptrain.traces.facts import facts_of
from ptrain.train import environment, manifest, rank_start
from ptrain.train.checkpoint import resume_training
from ptrain.train.exchange import Exchange
from ptrain.train.failure_point import FailurePoint, record_out_of_memory
from ptrain.train.folder import (
    ROOT,
    Claim,
    RunFolder,
    apply_agent_restart,
    display_path,
    mark_as_latest,
    open_run,
    require_resumable,
)
from ptrain.train.heading import announce_node, job_line, preflight_line, preflight_lines
from ptrain.train.journal import LOG, Journal, Trackers, is_shown, make_trackers, set_up_logging
from ptrain.train.loop import train
from ptrain.train.loop_inputs import Consistency, LoopInputs, Outcome, Probe
from ptrain.train.options import GUARDED, MakeGuard, Options, StepGuard, require_profiled_steps
from ptrain.train.saving import CheckpointSaver
from ptrain.train.tracker import require_trackers, tracker_names


class RoutingLog:
    """The routing counts of a training. Steps count from 0.

    Args:
        program: The program.
        exchange: The exchange of the ranks.
        folder: The run folder.
        is_measured: Returns True if the meters run in a step.

    Attributes:
        counted: The counts of measured steps.
    """

    def __init__(
        self,
        program: Program,
        exchange: Exchange,
        folder: RunFolder,
        is_measured: Callable[[int], bool],
    ) -> None:
        self._spec, self._exchange, self._folder = program.spec, exchange, folder
        self._meter = RoutingMeter(program)
        self._is_measured = is_measured
        self._last: tuple[int, Sequence[LayerRouting]] | None = None
        self.counted: dict[int, Histogram] = {}

    def step_context(
        self, step: int, watch: AbstractContextManager[object]
    ) -> AbstractContextManager[object]:
        """Return the context of a step, in which its routers are watched if necessary."""
        return self._watch_routers(watch) if self._is_due(step) else watch

    def step_routing(self, step: int) -> Sequence[LayerRouting]:
        """Return the counts of all ranks in a finished step; empty if it is not printed.

        All ranks call it.
        """
        if not self._is_due(step):
            return ()
        everyone = self._exchange.gather((self._meter.rows(), self._meter.choices()))
        if self._is_measured(step):
            self._write_counts(step, sum_histograms([choices for _, choices in everyone]))
        if not is_shown(self._spec, step + 1):
            return ()
        layers = sum_routing([of_rank for of_rank, _ in everyone])
        self._last = step, layers
        return layers

    def record(self) -> dict[str, object] | None:
        """Return the last printed step with counts (from 1) and its layers, None without one."""
        if self._last is None:
            return None
        step, layers = self._last
        ranks = ranks_over(self._spec, self._spec.expert_axes)
        return {"step": step + 1, "layers": routing_rows(layers, ranks)}

    @contextmanager
    def _watch_routers(self, watch: AbstractContextManager[object]) -> Iterator[None]:
        """Temporarily count the choices of routers, inside the context `watch`."""
        with watch, self._meter.watch():
            yield

    def _write_counts(self, step: int, counts: Histogram) -> None:
        """Keep the counts of a measured step, and write them to the run folder."""
        self.counted[step] = counts
        if self._exchange.world.is_first:
            file = self._folder.routing(step + 1)
            with warn_if_unwritable(file, LOG.warning):
                file.parent.mkdir(mode=0o700, exist_ok=True)
                write_text(file, json.dumps(counts.to_counts()) + "\n")

    def _is_due(self, step: int) -> bool:
        """Return True if the model routes and the step is printed or measured."""
        return is_routing_recorded(self._spec) and (
            is_shown(self._spec, step + 1) or self._is_measured(step)
        )


def emulated_line(spec: Spec, device: torch.device) -> str:
    """Return a line if this CPU emulates the dtype of the model's computation.

    Args:
        spec: The spec, for the dtype of parameters in use, or of matrix products in fp8.
        device: The device of this rank.

    Returns:
        The line; "" on other devices, or if the CPU has instructions for the dtype.
    """
    own = spec.precision
    dtype = DType.FP8 if own.matmul.is_fp8 else own.effective_layout.parameters
    if own.matmul is Matmul.AUTOCAST and not own.compute_fp64:
        dtype = DType.BF16
    if device.type != "cpu" or is_native(dtype):
        return ""
    return f"precision  {dtype} is emulated on this CPU and slow"


_TRACES = "trace the parts of the model"


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """The objects that exist for the duration of a training.

    Attributes:
        spec: The spec.
        options: The options of the training.
        world: The ranks.
        exchange: The exchange of the ranks.
        folder: The run folder.
        point: The observer for the record of a failed allocation.
        heading: The first printed line; "" until the model is built.
        trackers: The trackers; empty until the training begins, and on all ranks except 0.
    """

    spec: Spec
    options: Options
    world: World
    exchange: Exchange
    folder: RunFolder
    point: FailurePoint = field(default_factory=FailurePoint)
    heading: str = ""
    trackers: Trackers = field(default_factory=Trackers)


def train_rank(options: Options, guarded: MakeGuard | None = None) -> int:
    """Train on this rank and return the exit code.

    A process group that exists is used and not destroyed.

    Args:
        options: The options of the training.
        guarded: Creates the guard of the steps, for specs with `verify_every`.

    Raises:
        SpecError: The spec or an option is wrong.
        DoesNotFit: The prediction exceeds the device.
        TrainingStopped: A check stopped the training.
    """
    size = dist.get_world_size() if dist.is_initialized() else environment.world_size()
    spec = resolve_auto(load(options.spec, options.overrides, world_size=size))
    require_profiled_steps(spec)
    if spec.verify_every and guarded is None:
        finding = "this process cannot compare steps with a single device"
        raise input_error(
            "verify_every", finding, f"Use `-m {GUARDED}` instead of `-m ptrain.train`."
        )
    make_guard = guarded if spec.verify_every and guarded else StepGuard
    with rank_start.record_signals() as interrupts, ExitStack() as stack:
        world = World.join(spec.timeout, device=spec.device, backend=spec.backend)
        # Callbacks run in reverse order: the group of the exchange is destroyed before the default
        # group.
        stack.callback(world.close)
        if world.device.type == "cpu":
            keep_freed_memory()
        exchange = Exchange(world)
        stack.callback(exchange.close)
        if spec.deterministic:
            # The setting is global, and a notebook continues in this process.
            torch.use_deterministic_algorithms(True)
            stack.callback(torch.use_deterministic_algorithms, False)
        folder, options = _open_folder(spec, options, exchange, stack)
        session = Session(spec=spec, options=options, world=world, exchange=exchange, folder=folder)
        # With --json, standard output only holds the record.
        set_up_logging(folder, rank=world.rank, speaks=world.is_first and not options.json)
        if not options.json:
            announce_node(world.rank, world.size)
        # After this barrier each rank has opened its log, so rank 0 may remove the folder.
        exchange.barrier()
        # Pushed last, so it runs first: leaving the group may hang, or this rank be killed there.
        stack.push(_log_failure)
        with record_out_of_memory(folder, world) as point:
            return _run_training(replace(session, point=point), interrupts, make_guard)


def replace_device(spec: Spec, device: torch.device) -> Spec:
    """Return the spec for the device that it runs on, instead of the device of its cluster.

    Kernels, and with them predicted activations, depend on the kind of the device and on the
    compute capability of a GPU.
    """
    cluster = spec.cluster
    if device.type == "cuda" and cluster is not None:
        major, minor = torch.cuda.get_device_capability(device)
        cluster = replace(cluster, sm=10 * major + minor)
    return replace(spec, device=device.type, cluster=cluster)


def _log_failure(
    kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
) -> None:
    """Write the traceback of an unexpected error to the log of this rank."""
    if error is not None and not isinstance(error, PtrainError):
        LOG.debug("rank failed: %s", error, exc_info=error)


def _run_training(
    session: Session, interrupts: rank_start.Interrupts, make_guard: MakeGuard
) -> int:
    """Build the model, resume, train and compare. Returns the exit code."""
    spec, options, world = session.spec, session.options, session.world
    text = open_corpus(spec.data)
    require_trainable_data(text, spec)
    if not spec.data.is_of_files:  # a token file may be too large to digest
        LOG.debug("corpus  %s, digest %s", text.name, text.digest())
    program = interpret(spec, world=world, allow_import=options.allow_import)
    session.point.observe_program(program)
    placed = replace_device(spec, world.device)
    facts = facts_of(
        placed,
        allow_import=options.allow_import,
        share=partial(_run_on_first_rank, session.exchange),
        runs_fakes=False,
        progress=LOG.info,
    )
    require_trainable_data(text, spec, facts.vocabulary)  # again, with the logits per token
    derivation = derive(placed, facts)
    if not options.force:
        require_fit(placed, derivation.exact, facts)
    number = count_weights(facts)
    heading = job_line(spec, numel=number, backend=world.backend, device=world.device.type)
    session = replace(session, heading=heading)
    _announce(session, derivation.exact, program.whole_because)
    folder, exchange = session.folder, session.exchange
    if options.resume or spec.checkpoint.every or spec.checkpoint.at_end:
        program.data_prints = _fingerprint_on_first_rank(session, text)
    first = resume_training(program, folder, options.resume, exchange, options.accept_data)
    if world.is_first:
        trackers = make_trackers(spec, options, session.folder, derivation.exact, first=first)
        session = replace(session, trackers=trackers)
    with session.trackers:
        with _make_journal(session, first, bar=not (options.json or options.quiet)) as journal:
            record = journal.record_measurement
            probe = Probe(program, folder, first=first, every=options.measure, measured=record)
            resuming = partial(_resume_command, session)
            consistency = Consistency(program, session.exchange, resuming)
            routing = RoutingLog(program, session.exchange, session.folder, probe.is_measured)
            guard = make_guard(program, session.exchange, probe.is_measured, resuming)
            agree = consistency.require_agreement  # a save hides that replicas differ
            saver = CheckpointSaver(program, folder.checkpoints, exchange, interrupts, agree)
            parts = LoopInputs(
                corpus=text,
                exchange=session.exchange,
                interrupts=interrupts,
                journal=journal,
                watch=lambda step: guard.step_context(
                    step, consistency.step_context(step, routing.step_context(step, probe(step)))
                ),
                routing=routing.step_routing,
                check_step=guard.check_step,
                consistency=consistency,
                save=saver.save,
            )
            outcome = _run_steps(session, program, parts, saver, first)
        of_run = _make_predictions(derivation, probe, routing)
        return _conclude_run(session, of_run, probe.estimate, outcome, journal, routing.record())


def _run_steps(
    session: Session, program: Program, parts: LoopInputs, saver: CheckpointSaver, first: int
) -> Outcome:
    """Train, and wait for the last checkpoint."""
    if session.world.is_first:
        with warn_if_unwritable(ROOT / "latest", LOG.warning):
            mark_as_latest(session.folder)
    with saver:
        outcome = train(program, parts, first=first)
        saver.finish()
    return outcome


def _fingerprint_on_first_rank(
    session: Session, source: SampleSource
) -> dict[str, tuple[int, str, int]]:
    """Return the fingerprint of the training data, which rank 0 reads for all ranks."""
    read = partial(fingerprint_data, session.spec, source)
    return _run_on_first_rank(session.exchange, read, "read the training data")


@dataclass(frozen=True, slots=True, kw_only=True)
class Predictions:
    """The predictions that a run is compared with.

    Attributes:
        derivation: The derivation from the spec.
        counted: The derivation with the run's routing counts, if the first one assumes a routing.
    """

    derivation: Derivation
    counted: Estimate | None = None

    @property
    def verdict_prediction(self) -> Estimate:
        """The prediction that the verdict uses."""
        return self.counted or self.derivation.exact

    @property
    def columns(self) -> list[Estimate]:
        """All predictions, for the record."""
        columns = [self.derivation.paper, self.derivation.exact, self.counted]
        return [column for column in columns if column is not None]


def _make_predictions(derivation: Derivation, probe: Probe, routing: RoutingLog) -> Predictions:
    """Return the predictions, with the routing counts of the steady step if it has any."""
    if (histogram := routing.counted.get(probe.steady)) is None:
        return Predictions(derivation=derivation)
    counted = by_counts(derivation, histogram, probe.steady + 1)
    return Predictions(derivation=derivation, counted=counted)


def _run_on_first_rank(exchange: Exchange, trace: Callable[[], Any], what: str = _TRACES) -> Any:
    """Run `trace` on rank 0 and return its result on all ranks.

    If it fails, the error propagates on rank 0. The others return `{"problem": …}`, whose text
    names the action `what`.
    """
    answer = None
    try:
        if exchange.world.is_first:
            answer = trace()
    finally:
        if error := sys.exception():
            last = traceback.format_exception_only(error)[-1].strip()
            answer = {"problem": f"rank 0 could not {what}: {last}"}
        # In `finally`, because the other ranks wait for this answer even if rank 0 fails.
        answer = exchange.broadcast(answer)
    return answer


def _open_folder(
    spec: Spec, options: Options, exchange: Exchange, stack: ExitStack
) -> tuple[RunFolder, Options]:
    """Return the run folder and the options, with the checkpoint to continue from.

    The launcher has created the folder, or rank 0 creates it here and sends its choice to the
    others.
    """
    if options.prepared:
        assert options.run_dir is not None
        return RunFolder(options.run_dir), options
    chosen = {"path": "", "problem": "", "resume": options.resume}
    if exchange.world.is_first:
        try:
            goes_on = apply_agent_restart(options)
            require_resumable(spec, goes_on)
            require_trackers(tracker_names(spec, goes_on))
            claim = open_run(
                spec,
                given=goes_on.run_dir,
                resuming=goes_on.resume is not None,
                command=shlex.join(sys.orig_argv),
            )
            stack.callback(claim.lock.release)
            stack.push(partial(_withdraw_claim, claim))
            chosen |= {"path": str(claim.folder.path), "resume": goes_on.resume}
        except PtrainError as error:
            chosen["problem"] = str(error)
    # Also a problem: all ranks must raise, or the others would wait for rank 0.
    chosen = exchange.broadcast(chosen)
    if chosen["problem"]:
        raise PtrainError(chosen["problem"])
    folder = RunFolder(Path(chosen["path"]))
    # Rank 0 may have created the folder on another node, on a file system that is not shared.
    folder.log(0).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder, replace(options, resume=chosen["resume"])


def _withdraw_claim(claim: Claim, _: object, error: BaseException | None, trace: object) -> None:
    """Restore the folder if the run was rejected."""
    if isinstance(error, PtrainError) and error.exit_code == PtrainError.exit_code:
        claim.withdraw()


def _announce(session: Session, exact: Estimate, whole_because: str) -> None:
    """Print the job, its prediction and warnings.

    Args:
        session: The session.
        exact: The prediction.
        whole_because: The reason why each rank built the full model, "" if it did not.
    """
    LOG.info(session.heading)
    options = session.options
    words = (options.spec, *options.overrides)
    placed = replace_device(session.spec, session.world.device)
    for line in preflight_lines(placed, exact, words, allow_import=options.allow_import):
        LOG.info(line)
    if whole_because:
        LOG.info("weights  every rank built the full model first: %s", whole_because)
    for warning in exact.warnings:
        LOG.warning("warning: %s", warning)
    if emulation := emulated_line(session.spec, session.world.device):
        LOG.info(emulation)


def _make_journal(session: Session, first: int, *, bar: bool) -> Journal:
    """Return the journal of this rank."""
    if not session.world.is_first:
        return Journal(session.spec)
    quiet, sink = session.options.quiet, session.trackers
    return Journal(session.spec, session.folder, first=first, bar=bar, quiet=quiet, sink=sink)


def _conclude_run(
    session: Session,
    predictions: Predictions,
    estimate: Estimate | None,
    outcome: Outcome,
    journal: Journal,
    routing: Mapping[str, object] | None,
) -> int:
    """Compare, write summary.json, print the last lines, and return the exit code.

    The exit code is equal on all ranks.
    """
    # rank 0's median: the verdict, and so the exit code, must be equal on all ranks
    measured, seconds = None, session.exchange.broadcast(journal.step_seconds())
    if estimate is not None:
        measured = join_estimates(gather_estimates(session.world, estimate))
    checks: tuple[Check, ...] = ()
    if measured:
        step = predictions.verdict_prediction.step
        checks = (
            *compare_estimates(predictions.verdict_prediction, measured),
            *time_checks(session.spec, step, seconds),
        )
    if session.world.is_first:
        result = result_record(
            session.spec.name,
            [*predictions.columns, *([measured] if measured else [])],
            checks=checks,
            device=device_name(session.world),
            step_seconds={"measured": seconds} if seconds else None,
        )
        result["run"] = _run_figures(session, outcome, predictions.derivation)
        result["tokens_per_step"] = step_tokens(session.spec, predictions.derivation.facts)
        result |= {"routing": routing} if routing else {}
        with warn_if_unwritable(session.folder.summary, LOG.warning):
            write_json(session.folder.summary, result)
        session.trackers.conclude(_verdict_text(checks))
        if session.options.json:
            print(json.dumps(result), flush=True)
    # The launcher reads exit code 1 without a summary as a crash (launch._is_early_exit).
    session.exchange.barrier()
    if measured:
        text = training_summary(
            predictions.verdict_prediction,
            measured,
            checks,
            torch=torch.__version__,
            step_seconds=seconds,
        )
        LOG.info(text + _closing_line(session))
    else:
        LOG.info("no verdict: a run needs at least three steps" + _closing_line(session))
    if outcome.interrupt:
        _log_interrupted(session, outcome)
        return rank_start.exit_code(outcome.interrupt)
    if session.options.strict and checks and verdict_word(checks) != "holds":
        return VerdictFailed.exit_code
    return 0


def _verdict_text(checks: Sequence[Check]) -> str:
    """Return the verdict with its numbers, for trackers."""
    held = f" ({sum(check.holds for check in checks)} of {len(checks)})"
    return verdict_word(checks) + held if checks else "none"


def _closing_line(session: Session) -> str:
    """Return the end of the last lines: the run folder and the next command."""
    path = display_path(session.folder.path)
    allowed = " --allow-import" if session.options.allow_import else ""
    return f" · {path}\n\n{next_line(f'ptrain verify {path}{allowed}')}"


def _run_figures(session: Session, outcome: Outcome, derivation: Derivation) -> dict[str, object]:
    """Return the section `run` of the record."""
    data = session.spec.data
    return {
        "heading": session.heading,
        "preflight": preflight_line(derivation.spec, derivation.exact),
        "folder": str(session.folder.path),
        "steps": outcome.steps,
        "loss": outcome.loss,
        "held_out_loss": outcome.held_out_loss,
        "text_digest": None if data.is_of_files else open_corpus(data).digest(),
        "interrupted_by": outcome.interrupt.name if outcome.interrupt else None,
    }


def _log_interrupted(session: Session, outcome: Outcome) -> None:
    """Print the interrupt and the command that continues the run."""
    assert outcome.interrupt is not None
    command = _resume_command(session)
    remedy = (
        f"continue with `{command}`"
        if command
        else "nothing was saved, because checkpoints are off in the spec"
    )
    LOG.warning(
        "interrupted by %s after step %d/%d; %s",
        outcome.interrupt.name,
        outcome.steps,
        session.spec.train.steps,
        remedy,
    )


def _resume_command(session: Session) -> str:
    """Return the command that continues from the last checkpoint, "" without one."""
    if not manifest.complete_checkpoints(session.folder.checkpoints):
        return ""
    run = shlex.quote(display_path(session.folder.path))
    allowed = " --allow-import" if session.options.allow_import else ""
    return f"ptrain train {run}/spec.resolved.yaml --resume {run}{allowed}"


def device_name(world: World) -> str:
    """Return the name of this rank's device."""
    if world.device.type == "cuda":
        return torch.cuda.get_device_name(world.device)
    return f"cpu ({platform.machine()}, {cores()} cores)"
