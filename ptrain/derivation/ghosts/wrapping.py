"""What every wrap of a model answers: its interface, in two halves. A `Wrapping` says what ranks
keep and send, and makes the player (`derivation.tape.Wrap`) that allocates along a timeline.

Each part of torch that wraps a model has a ghost in a module of its own, and so have flat units,
which are ours; `ghosts.table` has them by step of a plan. Nobody else tells one from another.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import NamedTuple, Protocol

from ptrain.axes.data.cost import GatherCounts, gathers, reductions
from ptrain.cost import Footprint, State, Traffic
from ptrain.derivation.tape import Account, Scene, Tape, Wrap
from ptrain.facts.model import ModelFacts, UnitFacts
from ptrain.spec.dials import GradientSync, Reshard, SyncPolicy
from ptrain.spec.spec import Spec
from ptrain.steps.step import Plan
from ptrain.timeline import Boundary, Mark, Timeline
from ptrain.units import format_bytes

# What a rank sends for one unit depends on no other's turn.
ALONE = Timeline(
    forward=(Boundary(Mark.ENTER, 0), Boundary(Mark.LEAVE, 0)),
    backward=(Boundary(Mark.PRE_BACKWARD, 0), Boundary(Mark.POST_BACKWARD, 0)),
)


class Times(Protocol):
    """How often a unit is gathered in a step, where micro-batches do not go forward and backward
    one after the other."""

    def __call__(self, sync: SyncPolicy, *, is_root: bool) -> GatherCounts: ...


class Wrapped(NamedTuple):
    """A model, and the plan that wraps it."""

    spec: Spec
    plan: Plan
    facts: ModelFacts

    def scene(self, units: tuple[UnitFacts, ...], account: Account) -> Scene:
        """Return a scene of some of its units, whose sends go to an account."""
        facts = ModelFacts(units=units, buffers=self.facts.buffers)
        tape = Tape(account=account)
        return Scene(tape=tape, spec=self.spec, facts=facts, plan=self.plan, timeline=ALONE)


class Wrapping(Protocol):
    """How a plan wraps a model. A shard is a rank's place along the axes on which ranks differ
    (`Plan.differing_axes`)."""

    wrapped: Wrapped
    reach: int | None  # how many units next to a unit it acts on; None where nobody says

    def kind_of_shard(self, shard: int) -> Hashable:
        """Return what a rank keeps depends on: with equal ones ranks keep the same."""
        ...

    def footprints(self, shard: int) -> Iterator[Footprint]:
        """Yield Theta, Omega and G of the rank with this shard, as rank 0's: bytes by tier."""
        ...

    def sent(self, times: Times | None) -> Iterator[Traffic]:
        """Yield what every rank sends and copies for its units: once (setup) and in each step."""
        ...

    def scalars(self) -> Iterator[Traffic]:
        """Yield the copies between tiers that the norm and the scale of a loss need."""
        ...

    def kept_gradients(self, unit: UnitFacts) -> Iterator[int]:
        """Yield the elements of a unit's gradients as they are kept between reduction and update,
        on each shard; one number where all have as many."""
        ...

    def notes(self) -> Iterator[str]:
        """Yield a sentence for each thing that the wrap does and no theorem counts."""
        ...

    def player(self, scene: Scene) -> Wrap:
        """Return what allocates and sends along the scene's timeline."""
        ...


def rows(parameters: int, optimizer: int, gradients: int) -> Iterator[Footprint]:
    """Yield these device bytes as rows of rank 0."""
    sizes = {
        State.PARAMETERS: parameters,
        State.OPTIMIZER: optimizer,
        State.GRADIENTS: gradients,
    }
    for state, size in sizes.items():
        yield Footprint(state=state, rank=0, device_bytes=size)


def micro_batches(count: int) -> Iterator[tuple[bool, bool, int]]:
    """Yield (is first, is last, how many like this): after the first, all are alike but the
    last."""
    yield True, count == 1, 1
    if count > 2:
        yield False, False, count - 2
    if count > 1:
        yield False, True, 1


# Notes on what is gathered and reduced by unit, whoever does it.


def accumulation(wrapped: Wrapped) -> Iterator[str]:
    """Yield the factor per kind of call, where a step's micro-batches repeat what Theorem 2 has
    once."""
    plan, step = wrapped.plan, wrapped.plan.wrap
    num_micro, sync = plan.accumulate.micro_batches, step.policy
    if num_micro == 1 or sync is None:
        return
    times = gathers(sync, num_micro)
    factors = []
    if step.gathered_by_unit:
        factors += [f"all_gather forward {times.forward}×", f"backward {times.backward}×"]
    if step.reduced_by_unit:
        factors.append(f"reduction of gradients {reductions(sync, num_micro)}×")
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


def kept_root(wrapped: Wrapped) -> Iterator[str]:
    """Yield how often a root comes that stays gathered."""
    sync = wrapped.plan.wrap.policy
    if sync is not None and sync.reshard_after_forward is Reshard.NON_ROOT:
        times = gathers(sync, wrapped.plan.accumulate.micro_batches, is_root=True)
        root = sum(unit.numel for unit in wrapped.facts.units if unit.is_root)
        yield (
            f"the root, {root:,} of {wrapped.facts.numel:,} parameters, is not freed between "
            f"forward and backward: it is gathered {times.forward}× in forward and "
            f"{times.backward}× in backward"
        )
