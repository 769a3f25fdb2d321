"""`derive`: what a spec costs, by the paper (`paper`) and as it runs (`exact`), and its plan."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ptrain.algebra.layout import ranks_over
from ptrain.axes.data.costs import gathers, reductions
from ptrain.costs import Column, Estimate, Footprint, State
from ptrain.derivation.facts import ModelFacts
from ptrain.derivation.flat_memory import flat_buffers
from ptrain.derivation.memory import elements, resident
from ptrain.derivation.paper import paper
from ptrain.derivation.parameters import facts as facts_of
from ptrain.derivation.timeline import Replay, replay
from ptrain.derivation.traffic import sent
from ptrain.errors import Fault, SpecError
from ptrain.plan.lower import lower
from ptrain.plan.step import FlatUnits, FullyShard, Plan
from ptrain.spec.model import ModelShape
from ptrain.spec.spec import Spec

_NOT_TRACED = "the model's activations are known only from a trace, and these facts hold none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Derivation:
    """Both predictions of one spec, and the plan that the second one is about."""

    paper: Estimate
    exact: Estimate
    plan: Plan


def derive(spec: Spec, facts: ModelFacts | None = None) -> Derivation:
    """The costs of a legal spec. A built-in model needs no `facts`; any other model's are read off
    the model itself."""
    facts = own_facts(spec) if facts is None else facts
    plan = lower(spec, facts.unit_modules)
    return Derivation(paper=paper(spec, facts), exact=exact(spec, plan, facts), plan=plan)


def own_facts(spec: Spec) -> ModelFacts:
    """The facts of a built-in model, from its shape."""
    if not isinstance(spec.model, ModelShape):
        raise SpecError(
            Fault(
                place="model",
                finding="the sizes of this model are known only to its code",
                remedy="allow the import (--allow-import), or use a preset or a shape",
            )
        )
    return facts_of(spec.model, spec.batch.sequence, spec.unit)


def exact(spec: Spec, plan: Plan, facts: ModelFacts) -> Estimate:
    """Memory per state and rank, peaks per phase, traffic per axes x collective x state x phase."""
    memory = resident(spec, plan, facts)
    estimate = Estimate(
        column=Column.EXACT,
        world_size=spec.world_size,
        memory=memory,
        traffic=sent(spec, plan, facts),
        notes=tuple(_notes(spec, plan, facts)),
    )
    if facts.timeline is None and not isinstance(spec.model, ModelShape):
        return replace(estimate, undefined=dict.fromkeys(("activations", "peak"), _NOT_TRACED))
    played = replay(spec, facts, plan, memory)
    return replace(estimate, memory=_with_passing(memory, played), peak=played.peaks)


def _with_passing(memory: tuple[Footprint, ...], played: Replay) -> tuple[Footprint, ...]:
    """The rows of each rank, and what lives at the end of the last forward only."""
    passing = (
        (State.ACTIVATIONS, played.saved_bytes),
        (State.TRANSIENT, played.transient_bytes),
    )
    ranks = dict.fromkeys(row.rank for row in memory)
    return (
        *memory,
        *(
            Footprint(state=state, rank=rank, device_bytes=size)
            for rank in ranks
            for state, size in passing
        ),
    )


def _notes(spec: Spec, plan: Plan, facts: ModelFacts) -> Iterator[str]:
    wrap = plan.wrap
    if isinstance(wrap, FlatUnits | FullyShard):
        yield from _accumulation_notes(wrap, plan.accumulate.micro_batches)
    if isinstance(wrap, FlatUnits):
        yield from _update_notes(wrap)
        padded = sum(size * times for size, times in flat_buffers(spec, wrap, facts).items())
        if more := padded - facts.numel:
            elements_more = f"{more} element{'' if more == 1 else 's'} more"
            yield f"flat units are padded: {elements_more} than the model has"
    if isinstance(wrap, FullyShard):
        ranks = ranks_over(spec, wrap.shard_axes)
        padded = ranks * elements(spec, plan, facts, 0).parameters
        if padded > facts.numel:
            yield (
                f"each tensor is cut by rows, ceil(d0 / {ranks}) on every rank: "
                f"{padded / facts.numel - 1:.2%} more than the model has"
            )


def _accumulation_notes(wrap: FlatUnits | FullyShard, num_micro: int) -> Iterator[str]:
    """The factor per kind of call, where a step's micro-batches repeat what Theorem 2 has once."""
    if num_micro == 1:
        return
    gathered = wrap.shard_axes if isinstance(wrap, FullyShard) else wrap.parameters
    reduced = wrap.shard_axes if isinstance(wrap, FullyShard) else wrap.gradients
    times = gathers(wrap.sync, num_micro)
    factors = []
    if gathered:
        factors += [f"all_gather forward {times.forward}×", f"backward {times.backward}×"]
    if reduced:
        factors.append(f"reduction of gradients {reductions(wrap.sync, num_micro)}×")
    if factors:
        yield (
            f"{num_micro} micro-batches make a step, and the paper's step has one; by `sync` a "
            f"unit moves: {', '.join(factors)}"
        )


def _update_notes(wrap: FlatUnits) -> Iterator[str]:
    axes = [axis.value for axis in wrap.optimizer if axis not in wrap.parameters]
    if axes:
        yield (
            f"parameters are whole and the optimizer is a shard on {', '.join(axes)}: each rank "
            "updates its part, so the updated parameters must be gathered, r|Θ| that Theorem 2 "
            "as printed leaves out"
        )
    late = [axis.value for axis in wrap.optimizer if axis not in wrap.gradients]
    if late:
        yield (
            f"gradients are R and the optimizer is a shard on {', '.join(late)}: a reduce-scatter "
            "before the update replaces the all-reduce, r|G| instead of 2r|G|; gradients keep "
            "their full size, and only the rank's own part of them holds the sum"
        )
