"""Checks of the preconditions of Theorem 5: the run continues, and it is a function of its spec, so
that two runs are bitwise equal. Ranks exchange only digests.

State consistency (Theorem 4) is checked while a program runs. Replicas must be bitwise equal at the
start, in each step's gradients, norm and learning rate, and after the update; on request also the
result of every collective over its group.

Dropout: copies of an activation need the same mask; different samples, token shards and heads need
different masks. For each module that draws random numbers, the ranks compare digests of its input
and of the generator's state. Ranks of cp draw the masks of all tokens and take their part.

The masks themselves are not compared: fused attention does not expose them, small ones are equal by
chance, and comparing the generator's state costs nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ptrain.cost import Phase
from ptrain.data.corpus import open_corpus
from ptrain.interpreter.program import Program
from ptrain.meters.replicas import (
    ReplicaMeter,
    compute_digests,
    gather_coordinates,
    generator_digest,
)
from ptrain.meters.traffic import CollectiveLedger
from ptrain.models.ledger import add_listeners, watch_modules
from ptrain.models.modes import drops_out, own_dropouts
from ptrain.report.copies import (
    SHARED,
    explain_replica_mismatches,
    find_equal_generators,
    format_ranks,
)
from ptrain.report.finding import Mismatch, Moment, RootCause, Subject
from ptrain.report.record import Check
from ptrain.runtime.world import World
from ptrain.spec.placement import TOKEN_AXES
from ptrain.spec.spec import Spec, rank_groups
from ptrain.train.exchange import Exchange
from ptrain.verification.capture import module_paths, run_training_step
from ptrain.verification.compare import count_check
from ptrain.verification.jobs.job import Verdict
from ptrain.verification.jobs.record import checksum
from ptrain.verification.parts import local_cpu

DIFFERENT = "differs where it must be shared"
UNLIKE = "differs where shards of one mask are needed"
EVALUATES = "evaluates while others train"
Seen = tuple[str, str, bool]  # digest of a module's input, generator state, training mode


class MaskObserver:
    """The observer of modules that draw random numbers: their inputs and the generator's state.

    Enter `MaskObserver(program).observe()` around a step; then all ranks call `check`.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self._seen: dict[str, Seen] = {}
        self._now: int | None = None

    @contextmanager
    def observe(self) -> Iterator[MaskObserver]:
        """Temporarily record the inputs of modules that draw, and the state of the generator."""
        drawing = (
            (path, its) for path, its in module_paths(self.program) if any(own_dropouts(its))
        )
        with (
            add_listeners(self.program.observers, self),
            watch_modules(drawing, before=self._record_input),
        ):
            yield self

    def phase(self, phase: Phase, micro_batch: int) -> None:
        """Record only forward passes; a pass that is recomputed in backward repeats its draws."""
        self._now = micro_batch if phase is Phase.FORWARD else None

    def _record_input(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._now is not None:
            given = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
            what, state = (
                " ".join(compute_digests([*given])),
                generator_digest(self.program.world.device),
            )
            self._seen.setdefault(f"{path} {self._now}", (what, state, module.training))

    def check(self, exchange: Exchange, step: int) -> tuple[Mismatch, ...]:
        """Return the mismatches between ranks, in the order in which the modules run."""
        everyone: list[dict[str, Seen]] = exchange.gather(self._seen)
        spec = self.program.spec
        lines = {rank: group for group in rank_groups(spec, TOKEN_AXES) for rank in group}
        mismatches: list[Mismatch] = []
        for key in dict.fromkeys(key for its in everyone for key in its):
            path, _, micro_batch = key.rpartition(" ")
            seen = {rank: its[key] for rank, its in enumerate(everyone) if key in its}
            mismatches += (
                replace(mismatch, step=step, name=path, index=int(micro_batch))
                for mismatch in find_mask_mismatches(seen, lines)
            )
        return tuple(mismatches)

    def root_cause(self, mismatches: Sequence[Mismatch]) -> RootCause | None:
        """Return the root cause of the mismatches: the ranks with wrong masks; None without
        mismatches."""
        same = [its for its in mismatches if its.told == mismatches[0].told]
        cause = explain_replica_mismatches(same, gather_coordinates(self.program))
        if cause is None:
            return None
        first, ranks = same[0], cause.ranks
        if first.told != EVALUATES:  # all of them are involved
            alike = (mismatch for mismatch in same if mismatch.name == first.name)
            ranks = tuple(sorted({rank for mismatch in alike for rank in mismatch.between}))
        what, fix = _REMEDIES[first.told]
        sentence = f"Dropout in {first.place} on {format_ranks(ranks)} {what}."
        return replace(
            cause, factor=first.told, place=first.place, ranks=ranks, sentence=sentence, fix=fix
        )


_REMEDIES = {
    DIFFERENT: (
        "draws different masks for copies of one activation", "Seed these ranks identically."
    ),
    UNLIKE: ("draws different masks for shards of one mask", "Seed these ranks identically."),
    SHARED: (
        "draws the same mask for different activations",
        "Seed by the coordinates of the activations on each rank.",
    ),
    EVALUATES: ("is in evaluation mode", "Call model.train() there."),
}  # fmt: skip


def find_mask_mismatches(
    seen: Mapping[int, Seen], lines: Mapping[int, Sequence[int]]
) -> Iterator[Mismatch]:
    """Yield the mismatches of one module's pass.

    Args:
        seen: The record of each rank that runs the module.
        lines: For each rank, the ranks with shards of the same samples' tokens, itself included.
    """
    still = [rank for rank, (_, _, trains) in seen.items() if not trains]
    if 0 < len(still) < len(seen):
        yield from (_mismatch(rank, seen, EVALUATES) for rank in still)
        return
    groups: dict[str, list[int]] = {}
    for rank in seen:
        whole = " ".join(seen[other][0] for other in lines[rank] if other in seen)
        groups.setdefault(whole, []).append(rank)
    for group in groups.values():
        usual, _ = Counter(seen[rank][1] for rank in group).most_common(1)[0]
        for rank in group:
            given, state, _ = seen[rank]
            copies = (its for its in group if seen[its][0] == given and its not in lines[rank])
            if state != usual:
                is_copy = any(seen[its][1] != state for its in copies)
                yield _mismatch(rank, group, DIFFERENT if is_copy else UNLIKE)
    places = {rank: (whole, seen[rank][1]) for whole, group in groups.items() for rank in group}
    if not still:  # who evaluates draws nothing
        yield from find_equal_generators(
            [places.get(rank) for rank in range(len(lines))], Moment.FORWARD, 0
        )


def _mismatch(rank: int, between: Iterable[int], fault: str) -> Mismatch:
    return Mismatch(
        step=0, moment=Moment.FORWARD, subject=Subject.RANDOM, name="", rank=rank,
        between=tuple(between), told=fault,
    )  # fmt: skip


EVERY = 10  # steps of a trajectory


class StepObserver:
    """The observer of a program's steps, which keeps the first mismatches between ranks.

    All ranks must observe the same steps.

    Args:
        program: The program.
        exchange: The group of all ranks.
        every_collective: True to compare the result of each collective over its group.

    Attributes:
        mismatches: The first mismatches; empty if all ranks agree.
        root_cause: Their root cause, if it is known.
        looks: The number of observations of each kind.
    """

    def __init__(self, program: Program, exchange: Exchange, *, every_collective: bool) -> None:
        self.program, self.exchange = program, exchange
        self.replicas = ReplicaMeter(program, exchange)
        self.every_collective = every_collective
        self.mismatches: tuple[Mismatch, ...] = ()
        self.root_cause: RootCause | None = None
        self.draws = any(exchange.gather(drops_out(program.model)))
        self.looks = {"state that ranks share": 0, "masks of dropout": 0, "collectives": 0}
        self.failed = ""
        self.broken = ""  # the reason why a step did not finish
        self.bits: list[dict[str, str]] = []  # digests after each step, by name

    def check_start(self) -> None:
        """Check the state before the first step."""
        self._add_result(
            "state that ranks share", self.replicas, self.replicas.check(0, Moment.START)
        )

    @contextmanager
    def observe_step(self, step: int) -> Iterator[None]:
        """Observe one step; when the block ends, compare the ranks."""
        with ExitStack() as stack:
            stack.enter_context(self.replicas.record_gradients())
            masks = (
                stack.enter_context(MaskObserver(self.program).observe()) if self.draws else None
            )
            ledger = (
                stack.enter_context(CollectiveLedger(self.program))
                if self.every_collective
                else None
            )
            yield
        if self.broken:  # on some rank the step has not ended, and its state cannot be read
            return
        if masks is not None:
            self._add_result("masks of dropout", masks, masks.check(self.exchange, step))
        if ledger is not None:
            self._add_result("collectives", ledger, ledger.check(self.exchange, step))
        self._add_result("state that ranks share", self.replicas, self.replicas.check(step))

    def _add_result(
        self,
        name: str,
        by: ReplicaMeter | CollectiveLedger | MaskObserver,
        mismatches: tuple[Mismatch, ...],
    ) -> None:
        self.looks[name] += self.exchange.world.size > 1  # one rank shares nothing
        if mismatches and not self.mismatches:
            self.mismatches, self.root_cause, self.failed = (
                mismatches,
                by.root_cause(mismatches),
                name,
            )

    def checks(self) -> tuple[Check, ...]:
        """Return a check per kind of observation, with the number of observations and of those that
        passed."""
        why = ""
        if self.failed:
            first = self.mismatches[0]
            ranks = ", ".join(map(str, first.between or (first.rank,)))
            why = f"step {first.step}: {first.subject} {first.name} differs between ranks {ranks}"
        return tuple(
            count_check(name, looks, int(name == self.failed), why if name == self.failed else "")
            for name, looks in self.looks.items()
            if looks
        )


STEPS = 3
REPEATED = "the same run twice"
Make: TypeAlias = "Callable[[Spec, World], Program]"


def observe_run(program: Program, exchange: Exchange, *, every_collective: bool) -> StepObserver:
    """Run STEPS observed steps, or fewer if one shows a mismatch or raises.

    All ranks must call it.

    Args:
        program: The program, in its initial state.
        exchange: The group of all ranks.
        every_collective: True to compare the result of each collective over its group.

    Returns:
        The observer with the first mismatches and a checksum of the state after each step. It no
        longer refers to the program, whose memory can be freed.
    """
    source = open_corpus(program.spec.data)
    watch = StepObserver(program, exchange, every_collective=every_collective)
    watch.check_start()
    for step in range(STEPS):
        if watch.mismatches:
            break
        broken, share = "", 0.0
        with watch.observe_step(step):
            try:
                share, _ = run_training_step(program, source, step)
            # A fault of the program, such as a missing gradient, may end a step on some ranks only;
            # all ranks must reach the next exchange.
            except (RuntimeError, TypeError) as error:
                words = str(error).strip().partition("\n")[0]
                broken = f"step {step} stops: {type(error).__name__}: {words}"
            watch.broken = next(filter(None, exchange.gather(broken)), "")
        if watch.broken:
            break
        state = program.state_dict().items()
        left = {f"{kind} {name}": its for kind, named in state for name, its in named.items()}
        watch.bits.append(
            {"loss": repr(share)} | {n: checksum(local_cpu(its)) for n, its in left.items()}
        )
    del watch.program, watch.replicas  # the next program may need the memory
    return watch


def check_preconditions(
    spec: Spec, world: World, exchange: Exchange, make: Make, *, every_collective: bool = False
) -> Verdict:
    """Run two programs of the spec for STEPS steps each, and compare replicas and the two runs.

    All ranks must call it, and all get the same verdict.

    Args:
        spec: The spec, unchanged.
        world: The ranks.
        exchange: The group in which ranks exchange digests.
        make: Builds a program.
        every_collective: True to compare the result of each collective over its group.

    Returns:
        The verdict. If a step raises, it has only the check of steps that end.
    """
    # Without it, atomic additions on a GPU differ between two runs of a right program.
    with use_deterministic_algorithms():
        first = observe_run(make(spec, world), exchange, every_collective=every_collective)
        if first.broken:
            left = STEPS - len(first.bits)
            return Verdict(checks=(count_check("steps that end", STEPS, left, first.broken),))
        again = observe_run(make(spec, world), exchange, every_collective=False)
        if again.broken:
            why = f"of the second run, {again.broken}"
            left = STEPS - len(again.bits)
            return Verdict(checks=(count_check("steps that end", STEPS, left, why),))
    differing = [
        [step, name]
        for step, (mine, its) in enumerate(zip(first.bits, again.bits, strict=False))
        for name in mine | its
        if mine.get(name) != its.get(name)
    ]
    everyones = exchange.gather(differing)
    wrong = min(((*its[0], rank) for rank, its in enumerate(everyones) if its), default=None)
    why = ""
    if wrong is not None:
        why = (
            f"step {wrong[0]}: {wrong[1]} has other bits on rank {wrong[2]}: something is not a "
            "function of the spec (an operator, an order of arrival, the random state)"
        )
    number = min(len(first.bits), len(again.bits))
    same = count_check(REPEATED, number, number - wrong[0] if wrong else 0, why)
    seen = again if again.mismatches and not first.mismatches else first
    return Verdict(
        checks=(same, *seen.checks()), mismatches=seen.mismatches, root_cause=seen.root_cause
    )


@contextmanager
def use_deterministic_algorithms() -> Iterator[None]:
    """Temporarily set torch's deterministic algorithms, as with `deterministic: true` in a spec."""
    before = torch.are_deterministic_algorithms_enabled()
    only_warned = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=only_warned)
