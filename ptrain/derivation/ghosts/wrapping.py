"""The interface of a model's wrap, in two halves. A `Wrapping` gives the memory and traffic of
ranks, and creates the player (`derivation.tape.Wrap`) that allocates along a timeline.

Each wrapper of torch has a simulation in a separate module, and so have flat units, which are part
of ptrain. `ghosts.table` selects one by the step of a plan. No other module distinguishes them.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import NamedTuple, Protocol

from ptrain.axes.data.cost import GatherCounts, count_gathers, count_reductions
from ptrain.cost import Footprint, State, Traffic
from ptrain.derivation.tape import Account, Scene, Tape, Wrap
from ptrain.facts.model import ModelFacts, UnitFacts
from ptrain.spec.dials import GradientSync, Reshard, SyncPolicy
from ptrain.spec.spec import Spec
from ptrain.steps.step import Plan
from ptrain.timeline import Boundary, Mark, Timeline
from ptrain.units import format_bytes

# The traffic of a unit does not depend on other units.
ALONE = Timeline(
    forward=(Boundary(Mark.ENTER, 0), Boundary(Mark.LEAVE, 0)),
    backward=(Boundary(Mark.PRE_BACKWARD, 0), Boundary(Mark.POST_BACKWARD, 0)),
)


class Times(Protocol):
    """A function that returns how often a unit is all-gathered in a step of a pipeline schedule."""

    def __call__(self, sync: SyncPolicy, *, is_root: bool) -> GatherCounts: ...


class Wrapped(NamedTuple):
    """A model, and the plan that wraps it."""

    spec: Spec
    plan: Plan
    facts: ModelFacts

    def scene(self, units: tuple[UnitFacts, ...], account: Account) -> Scene:
        """Return a scene of some units, whose traffic is recorded in an account."""
        facts = ModelFacts(units=units, buffers=self.facts.buffers)
        tape = Tape(account=account)
        return Scene(tape=tape, spec=self.spec, facts=facts, plan=self.plan, timeline=ALONE)


class Wrapping(Protocol):
    """How a plan wraps a model. A shard is a rank's place along `Plan.differing_axes`.

    `reach` is how many neighbouring units a unit affects. None is unknown.
    """

    wrapped: Wrapped
    reach: int | None

    def kind_of_shard(self, shard: int) -> Hashable:
        """Return a key that is equal for ranks with equal memory."""
        ...

    def footprints(self, shard: int) -> Iterator[Footprint]:
        """Yield the rows of parameters, optimizer state and gradients of the rank with this shard,
        as rank 0."""
        ...

    def sent(self, times: Times | None) -> Iterator[Traffic]:
        """Yield the traffic and copies of every rank for its units, at setup and in each step."""
        ...

    def scalars(self) -> Iterator[Traffic]:
        """Yield the copies between tiers that the norm and the loss scale need."""
        ...

    def kept_gradients(self, unit: UnitFacts) -> Iterator[int]:
        """Yield the elements of a unit's gradients between reduction and update, by shard. One
        number if all shards have as many."""
        ...

    def notes(self) -> Iterator[str]:
        """Yield a sentence for each effect of the wrap that no theorem covers."""
        ...

    def player(self, scene: Scene) -> Wrap:
        """Return the wrap that allocates and communicates along the scene's timeline."""
        ...


def rows(parameters: int, optimizer: int, gradients: int) -> Iterator[Footprint]:
    """Yield rows of these device bytes for rank 0."""
    sizes = {
        State.PARAMETERS: parameters,
        State.OPTIMIZER: optimizer,
        State.GRADIENTS: gradients,
    }
    for state, size in sizes.items():
        yield Footprint(state=state, rank=0, device_bytes=size)


def micro_batches(count: int) -> Iterator[tuple[bool, bool, int]]:
    """Yield (is first, is last, number of equal ones). All between the first and the last are
    equal."""
    yield True, count == 1, 1
    if count > 2:
        yield False, False, count - 2
    if count > 1:
        yield False, True, 1


# Notes on gathers and reductions by unit, for any wrap.


def accumulation(wrapped: Wrapped) -> Iterator[str]:
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


def kept_root(wrapped: Wrapped) -> Iterator[str]:
    """Yield a note on how often a root that stays all-gathered is gathered."""
    sync = wrapped.plan.wrap.policy
    if sync is not None and sync.reshard_after_forward is Reshard.NON_ROOT:
        times = count_gathers(sync, wrapped.plan.accumulate.micro_batches, is_root=True)
        root = sum(unit.numel for unit in wrapped.facts.units if unit.is_root)
        yield (
            f"the root, {root:,} of {wrapped.facts.numel:,} parameters, is not freed between "
            f"forward and backward: it is gathered {times.forward}× in forward and "
            f"{times.backward}× in backward"
        )
