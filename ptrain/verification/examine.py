"""The step-by-step comparison of a ptrain program with its single-device reference.

A program is a job with more evidence than a user's loop: activations, the loss, the gradient norm
and the samples of every step. Every rank runs the full reference, so ranks exchange only verdicts.
Both sides compute in fp64 (`precision.compute`): another order of a sum differs by 1e-15, and a
fault by more than TOLERANCE. Gradients are compared as they are before clipping; the norm is
compared separately.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import chain
from operator import attrgetter
from typing import Self

import torch
from torch import Tensor, nn

from ptrain.data.corpus import open_corpus
from ptrain.interpreter.program import Program
from ptrain.models.ledger import add_listeners, local_tensor
from ptrain.report.finding import Certainty, DifferenceKind, Mismatch, Moment, RootCause, Subject
from ptrain.spec.placement import Axis
from ptrain.spec.spec import coordinates
from ptrain.train.exchange import Exchange
from ptrain.train.loop_inputs import learning_rate
from ptrain.verification.capture import (
    LeafShard,
    TokenSelection,
    clip_factor,
    data_rank_index,
    is_gradient_addend,
    is_output_addend,
    leaf_shards,
    model_parts,
    module_paths,
    optimizer_gradients,
    run_training_step,
    sample_mismatches,
    shard_outputs,
)
from ptrain.verification.compare import Differences
from ptrain.verification.jobs.job import (
    TOLERANCES,
    Explain,
    Job,
    LoopVerdict,
    Terms,
    ranks_from_spec,
)
from ptrain.verification.jobs.modules import ModuleRecorder
from ptrain.verification.jobs.record import Buffers, StepRecorder, shared_buffers
from ptrain.verification.jobs.root_causes import (
    first_mismatch_cause,
    list_families,
    make_root_cause,
)
from ptrain.verification.jobs.run import Examiner
from ptrain.verification.jobs.shards import ParameterShard, local_part
from ptrain.verification.jobs.step import StepComparison
from ptrain.verification.parts import (
    Magnitude,
    factor_text,
    gather_full_tensors,
    local_cpu,
    number_difference,
    relative_difference,
    zero_shared_infinities,
)
from ptrain.verification.reference import ReferenceTraining
from ptrain.verification.updates.explain import UPDATED, explain_update

TOLERANCE = 1e-11  # relative, fp64: Adam amplifies 1e-15 to less than this; faults exceed 1e-6


def examine(program: Program, exchange: Exchange, steps: int = 3) -> LoopVerdict:
    """Compare steps of a program with its reference, until one differs.

    All ranks must call it.

    Args:
        program: The program, before its first step. Its spec should compute in fp64.
        exchange: The group of all ranks.
        steps: The number of steps to compare if none differs.

    Returns:
        The verdict, equal on all ranks, with the root cause of the first difference.
    """
    evidence = ProgramEvidence(program, exchange)
    reference = Job(model=evidence.reference.module, step=evidence.run_reference)
    loop = Job(model=program.model, step=evidence.run, evidence=evidence)
    terms = Terms(tolerance=TOLERANCES[torch.float64], loss="sum")
    return Examiner(reference, loop, terms).run(range(steps), range(steps), None)


class SideRecorder(StepRecorder):
    """A recorder of a step of either side, with its modules, loss and gradient norm.

    Attributes:
        loss: The mean loss of the global batch.
        norm: The gradient norm before clipping; None if it is not computed.
        modules: The recorder of the module passes.
        reached: The parameters with a gradient after the program has reduced gradients.
    """

    loss: float
    norm: float | None = None

    def __init__(
        self, model: nn.Module, holds: Mapping[str, ParameterShard], modules: ModuleRecorder
    ) -> None:
        super().__init__(model, holds)
        self.modules, self.reached = modules, set[str]()

    def __enter__(self) -> Self:
        self.enter_context(self.modules)
        return super().__enter__()

    def on_reduced(self) -> None:
        """Record the parameters whose reduced gradient is ready for the optimizer."""
        self.reached = {
            its.name
            for its in self.holds.values()
            if isinstance(its, LeafShard) and its.target.gradient is not None
        }

    def on_clipped(self, norm: Tensor | None) -> None:
        """Ignore clipping: gradients are compared as they are before it."""


class ProgramState:
    """A copy of a program's state dict and buffers."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._state = {
            kind: {name: tensor.clone() for name, tensor in tensors.items()}
            for kind, tensors in program.state_dict().items()
        }
        self._buffers = [
            (its, local_tensor(its.detach()).clone()) for its in program.model.buffers()
        ]

    @torch.no_grad()
    def restore(self, *, gradients: bool = True) -> None:
        """Restore the state, and clear the gradients, as between two steps."""
        self._program.load_state_dict(self._state)
        for buffer, copy in self._buffers:
            local_tensor(buffer.detach()).copy_(copy)
        self._program.wrapped.clear_gradients()


class ProgramEvidence:
    """The evidence about the steps of a program and of its single-device reference.

    Attributes:
        reference: The reference.
        source: The training samples.
        passes: The indices of the micro-batches whose activations are compared.
        ranks: The ranks and their mesh axes.
    """

    def __init__(self, program: Program, exchange: Exchange) -> None:
        self.program, self.exchange, self.spec = program, exchange, program.spec
        self.reference = ReferenceTraining(self.spec)
        self.source = open_corpus(self.spec.data)
        self.passes = {0, self.spec.batch.accumulate - 1}
        self.ranks, self._shards = ranks_from_spec(self.spec, exchange), leaf_shards(program)

    def recorders(
        self, wholes: Mapping[str, ParameterShard], holds: Mapping[str, ParameterShard]
    ) -> tuple[SideRecorder, SideRecorder]:
        """Return recorders of the next step: the reference's, and the program's.

        The reference runs the micro-batches of all data ranks; its recorder keeps those of this
        rank.
        """
        plain, model = self.reference.module, self.program.model
        modules = ModuleRecorder(plain, kept={self._first_pass_index + k for k in self.passes})
        self.expected = SideRecorder(plain, wholes, modules)
        modules = ModuleRecorder(model, modules=module_paths(self.program), kept=self.passes)
        self.seen = SideRecorder(model, holds, modules)
        return self.expected, self.seen

    def run_reference(self, number: int) -> float:
        """Run a step of the reference and return its global mean loss."""
        expected, its = self.expected, self.reference.accumulate(number)
        gradients = {name: gradient.flatten() for name, gradient in its.gradients.items()}
        expected.norm = self.reference.update(number, its.sums)
        expected.gradients, expected.loss = gradients, its.loss
        expected.clip = clip_factor(self.spec, expected.norm)
        return its.loss

    def run(self, number: int) -> float:
        """Run a step of the program and return this rank's share of the loss."""
        seen = self.seen
        observers = add_listeners(self.program.observers, seen.modules)
        with observers, add_listeners(self.program.gradient_observers, seen):
            share, seen.norm = run_training_step(self.program, self.source, number)
        seen.loss = self.exchange.sum_over_ranks([share])[0]
        seen.clip = clip_factor(self.spec, seen.norm)
        seen.gradients = optimizer_gradients(seen, seen.clip)
        seen.omitted = seen.reached - seen.updated
        seen.in_use = {}  # `compare_step` compares those that modules use
        return share

    def copy_state(self) -> ProgramState:
        return ProgramState(self.program)

    def shards(self) -> dict[str, ParameterShard]:
        return dict(self._shards)

    def parameter_values(self, holds: Mapping[str, ParameterShard]) -> dict[str, Tensor]:
        now = gather_full_tensors(self.program.state_dict()["model"], self.exchange)
        return {name: shard.select(now[name]).clone() for name, shard in holds.items()}

    def optimizer_state(self) -> dict[str, dict[str, Tensor]]:
        tensors = {id(target): its for target, its in self.program.update.tensors()}
        return {name: tensors[id(shard.target)] for name, shard in self._shards.items()}

    def buffers(self, reference: nn.Module) -> Buffers:
        own = TokenSelection(self.spec, self.program.world.rank)
        named = (its.named_modules() for its in model_parts(self.program))
        return shared_buffers(reference, chain.from_iterable(named), own.select_buffer)

    def compare_step(self, differences: Differences) -> None:
        program, step, expected, seen = self.program, differences.step, self.expected, self.seen
        ended = (path for path, ends in expected.modules.events if ends)
        differences.modules = {path: place for place, path in enumerate(ended)}
        assert program.batch is not None, "a step has a batch"
        samples = list(
            sample_mismatches(program.batch, self.reference, step, differences.rank, self.exchange)
        )
        differences.mismatches += samples
        size = math.inf if samples else 0.0
        differences.record((Moment.BATCH, Subject.BATCH), size, TOLERANCE)
        in_use = program.order.to_model_order(seen.modules.in_use), expected.modules.in_use
        self._compare_tensors(differences, Moment.FORWARD, Subject.PARAMETERS, in_use)
        for moment, what, is_addend in (
            (Moment.FORWARD, attrgetter("output"), is_output_addend),
            (Moment.BACKWARD, attrgetter("upstream"), is_gradient_addend),
        ):
            for k in sorted(self.passes):
                mine = seen.modules.pass_tensors(k, what)
                whole = expected.modules.pass_tensors(self._first_pass_index + k, what)
                both = mine, shard_outputs(program, whole, is_addend)
                self._compare_tensors(differences, moment, Subject.ACTIVATIONS, both, k)
        self._compare_number(differences, Moment.FORWARD, Subject.LOSS, seen.loss, expected.loss)
        base = learning_rate(self.spec.optimizer, step)
        rates = [base * rule.lr_factor for rule in self.reference.updater.optimizers]
        for actual in sorted(seen.rates):
            rate = min(rates, key=lambda each, actual=actual: abs(each - actual))  # type: ignore[misc]
            self._compare_number(differences, Moment.GRADIENTS, Subject.LEARNING_RATE, actual, rate)
        if seen.norm is not None and expected.norm is not None:
            both_skip = math.isinf(expected.norm) and not math.isfinite(seen.norm)
            norm = expected.norm if both_skip else seen.norm
            self._compare_number(differences, Moment.CLIP, Subject.NORM, norm, expected.norm)

    def explain(
        self, mismatches: Sequence[Mismatch], step: StepComparison, by_gradients: Explain
    ) -> RootCause:
        """Explain the first mismatch, by the gradients or by the update if these explain more.

        Args:
            mismatches: The mismatches of the step, at least one. The first one is explained.
            step: The comparison of the step in which they occurred.
            by_gradients: Explains mismatches of gradients; called if the first mismatch is one of
                gradients or loss.

        Returns:
            The root cause. If none is found, its certainty is `UNEXPLAINED` and it describes the
            first mismatch.
        """
        first, ranks, said = mismatches[0], self.ranks, None
        gradients = [its for its in mismatches if its.subject is Subject.GRADIENTS]
        is_gradient = first.moment in (Moment.BACKWARD, Moment.GRADIENTS)
        if first.moment is Moment.UPDATE or first.subject is Subject.LEARNING_RATE:
            said = self._explain_update(mismatches, step)
        elif gradients and (is_gradient or first.subject is Subject.LOSS):
            said = self._explain_missing_gradients(step, gradients) or by_gradients(gradients)
        is_clip = said is not None and said.state is Subject.NORM  # which is compared by itself
        if said is not None and said.certainty is not Certainty.UNEXPLAINED and not is_clip:
            return said
        return first_mismatch_cause(mismatches, ranks, said.tried if said else "")

    def _explain_update(
        self, mismatches: Sequence[Mismatch], step: StepComparison
    ) -> RootCause | None:
        """Return the root cause of mismatches after the update; None without any."""
        updated = [
            its
            for its in mismatches
            if its.moment is Moment.UPDATE and its.subject in UPDATED and not its.between
        ]
        everyones = self.ranks.gather(sorted(step.seen.omitted))
        omitted = sorted({name for its in everyones for name in its})
        if not (updated and omitted):
            return explain_update(updated, step.case, self.ranks) if updated else None
        return make_root_cause(
            updated, self.ranks, state=Subject.OPTIMIZER, factor="update skipped", names=omitted,
            who=[rank for rank, its in enumerate(everyones) if its],
            sentence=f"{list_families(omitted)}: a gradient is there, but no optimizer steps it on "
                     "these ranks.",
            fix="Give it to the optimizer, and step every shard's optimizer.",
        )  # fmt: skip

    def _explain_missing_gradients(
        self, step: StepComparison, mismatches: Sequence[Mismatch]
    ) -> RootCause | None:
        """Return the root cause of parameters that no gradient reaches; None without any.

        These have a gradient in the reference, and none or only zeros on every rank.
        """
        own = [name for name, its in step.seen.gradients.items() if bool(its.any())]
        reached = {n for its in self.ranks.gather([*own, *sorted(step.seen.omitted)]) for n in its}
        rights = step.expected.gradients.items()
        lost = [name for name, its in rights if name not in reached and bool(its.any())]
        if not lost:
            return None
        return make_root_cause(
            mismatches, self.ranks, state=Subject.GRADIENTS, factor="no gradient", names=lost,
            sentence=f"No gradient reaches {list_families(lost)}, and one does in the reference.",
            fix="Let backward reach these parameters, and hand their gradients to the optimizer.",
            tried="whether all other differences follow from it was not tested",
        )  # fmt: skip

    @property
    def _first_pass_index(self) -> int:
        """Index of this rank's first micro-batch among the reference's micro-batches."""
        return data_rank_index(self.spec, self.program.world.rank) * self.spec.batch.accumulate

    def _compare_tensors(
        self, differences: Differences, moment: Moment, subject: Subject,
        sides: tuple[Mapping[str, Tensor], Mapping[str, Tensor]], index: int = 0,
    ) -> None:  # fmt: skip
        """Compare the tensors of both sides by name, with this rank's part of the reference's.

        An activation without a known part is skipped: its layout differs on purpose.
        """
        actual, expected = sides
        shown = {n: zero_shared_infinities(its, its)[0] for n, its in expected.items()}
        scale, place = Magnitude.measure(shown), coordinates(self.spec, differences.rank)
        for name in (name for name in actual if name in expected):
            its = local_part(
                expected[name], actual[name], degree=self.spec.degree(Axis.TP),
                place=place.get(Axis.TP, 0),
            )  # fmt: skip
            if its is None and subject is Subject.ACTIVATIONS:
                continue
            way, size = DifferenceKind.SHAPE, math.inf
            if its is not None:
                own, its = zero_shared_infinities(local_cpu(actual[name]), its)
                way = DifferenceKind.VALUE if own.dtype == its.dtype else DifferenceKind.DTYPE
                size = relative_difference(own, its, scale.scale_of(shown[name], its))
            differences.compare(
                moment, subject, name, difference=size, tolerance=TOLERANCE, way=way, index=index,
                words="" if way is DifferenceKind.VALUE else f"another {way}",
            )  # fmt: skip

    def _compare_number(
        self, differences: Differences, moment: Moment, subject: Subject, actual: float,
        expected: float,
    ) -> None:  # fmt: skip
        words = f"{actual!r} for {expected!r}"
        if expected and actual / expected > 0:
            words += f", {factor_text(actual / expected, self.ranks.degrees, _EXACT)}"
        differences.compare(
            moment, subject, str(subject), words=words, tolerance=TOLERANCE,
            difference=0.0 if actual == expected else number_difference(expected, actual),
        )  # fmt: skip


_EXACT = 1e-6  # of a ratio
