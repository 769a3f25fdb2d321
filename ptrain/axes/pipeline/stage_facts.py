"""The stages that pp cuts a model into, by the model's facts, and what follows from the order of a
schedule alone: whose activations a rank holds, and what it sends and receives. A stage is a
model with fewer layers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from ptrain.axes.data.cost import GatherCounts
from ptrain.axes.pipeline.catalogue import stages_of as cut_as_said
from ptrain.axes.pipeline.schedule import Schedule
from ptrain.cost import Collective, Phase
from ptrain.facts.model import ModelFacts, TensorFacts, UnitFacts, prefixes
from ptrain.facts.stages import ENDS, Chain, Ends, Layers, Stage, is_within, layers_of
from ptrain.spec.dials import SyncPolicy
from ptrain.spec.model import ModelShape
from ptrain.spec.placement import Axis
from ptrain.spec.role import Role, Roles, fits
from ptrain.spec.spec import Spec
from ptrain.timeline import Kind

_LAST_USE = (Kind.BACKWARD, Kind.WEIGHT)  # a split backward needs activations until its weight half


def held(schedule: Schedule, rank: int) -> Iterator[dict[int, int]]:
    """While each step of a rank runs: of how many micro-batches it holds activations, by stage.

    A micro-batch counts from its forward to its whole backward or to its weight half, both of
    these steps included.
    """
    counts = dict.fromkeys(schedule.stages_of(rank), 0)
    for step in schedule.orders[rank]:
        for part in step.parts:
            counts[part.stage] += part.kind is Kind.FORWARD
        yield dict(counts)
        for part in step.parts:
            counts[part.stage] -= part.kind in _LAST_USE


def most_held_of(schedule: Schedule, stage: int) -> int:
    """The most micro-batches whose activations one stage holds at once."""
    return max(counts[stage] for counts in held(schedule, schedule.rank_of[stage]))


class Transfer(NamedTuple):
    """What one rank sends or receives over a boundary in a step: activations forward, gradients
    backward, one call a micro-batch. Boundary b is between the stages b and b + 1."""

    rank: int
    peer: int
    boundary: int
    collective: Collective
    phase: Phase
    calls: int


def transfers(schedule: Schedule) -> tuple[Transfer, ...]:
    """Return what the ranks send and receive over boundaries, by rank and boundary, forward before
    backward. A boundary within a rank has no transfer."""
    counts = Counter(
        (part.stage, part.kind)
        for order in schedule.orders
        for step in order
        for part in step.parts
    )
    rows = [row for b in range(schedule.stages - 1) for row in _over(schedule, b, counts)]
    return tuple(sorted(rows, key=lambda row: (row.rank, row.boundary)))


def _over(
    schedule: Schedule, boundary: int, counts: Counter[tuple[int, Kind]]
) -> Iterator[Transfer]:
    if not schedule.is_crossed(boundary):
        return
    before, after = schedule.rank_of[boundary], schedule.rank_of[boundary + 1]
    forward = counts[boundary, Kind.FORWARD]
    backward = counts[boundary + 1, Kind.BACKWARD] + counts[boundary + 1, Kind.INPUT]
    for phase, calls, sender, receiver in (
        (Phase.FORWARD, forward, before, after),
        (Phase.BACKWARD, backward, after, before),
    ):
        for rank, peer, collective in (
            (sender, receiver, Collective.SEND),
            (receiver, sender, Collective.RECV),
        ):
            yield Transfer(
                rank=rank,
                peer=peer,
                boundary=boundary,
                collective=collective,
                phase=phase,
                calls=calls,
            )


# How often a stage's units are gathered in a step: by the order of its schedule, and by when
# `sync` gives them back.
#
# Backward takes a unit's parameters for the gradients of its inputs: a whole backward or its input
# half; the weight half multiplies what forward and that half left, and takes none.


def stage_gathers(
    schedule: Schedule, stage: int, sync: SyncPolicy, *, is_root: bool = False
) -> GatherCounts:
    """Return how often each unit of a stage, or its root, is gathered in a step: where a pass finds
    it sharded, at first and after every reshard. With one micro-batch after the other it is
    `axes.data.cost.gathers`."""
    times = dict.fromkeys((Kind.FORWARD, Kind.BACKWARD), 0)
    gives_back = {
        Kind.FORWARD: bool(sync.after_forward(is_root=is_root)),
        Kind.BACKWARD: sync.reshard_after_backward,
    }
    is_sharded = True
    for kind in _passes(schedule, stage):
        times[kind] += is_sharded
        is_sharded = gives_back[kind]
        if not any(gives_back.values()):
            break  # whoever gathered it, it stays
    return GatherCounts(times[Kind.FORWARD], times[Kind.BACKWARD])


def _passes(schedule: Schedule, stage: int) -> Iterator[Kind]:
    """Forward and backward, in the order in which the stage's rank computes them."""
    for step in schedule.orders[schedule.rank_of[stage]]:
        for part in step.parts:
            if part.stage == stage and part.kind is not Kind.WEIGHT:
                yield Kind.FORWARD if part.kind is Kind.FORWARD else Kind.BACKWARD


# Of the built-in families: what a tied head takes, and its own name of it.
TIED = ("embed.weight", "head.weight")


def stages_of(spec: Spec, facts: ModelFacts) -> tuple[Stage, ...]:
    """The stages that the spec cuts the model into, first to last; none without pp. Raises
    SpecError where it has too few layers."""
    return () if spec.degree(Axis.PP) == 1 else cut_as_said(spec, layers(spec, facts))


def chain_of(spec: Spec, facts: ModelFacts) -> Chain:
    """Return what stages are cut from: of a built-in model by its family, else as its facts say."""
    if facts.chain is not None:
        return facts.chain
    model = spec.model
    assert isinstance(model, ModelShape), "the facts of another model have their chain"
    return Chain(
        layers=tuple(f"blocks.{index}" for index in range(model.layers)),
        ends=ENDS,
        hidden=model.hidden,
        tied=(TIED,) if model.tied else (),
    )


def layers(spec: Spec, facts: ModelFacts) -> Layers:
    """Return what may be cut: whole layers, however small the wrap's units are."""
    return _layers(facts, chain_of(spec, facts))


@lru_cache(maxsize=2**3)
def _layers(facts: ModelFacts, chain: Chain) -> Layers:
    *inner, root = facts.units
    within: dict[str, list[TensorFacts]] = {name: [] for name in chain.layers}
    for unit in inner:
        for name in prefixes(unit.name):
            if name in within:
                within[name] += unit.tensors
    blocks = tuple(
        UnitFacts(modules=(name,), tensors=tuple(tensors)) for name, tensors in within.items()
    )
    assert sum(block.numel for block in blocks) == sum(unit.numel for unit in inner)
    return layers_of((*blocks, root), front=chain.ends.front, tied=chain.tied)


def stage_facts(spec: Spec, facts: ModelFacts, stage: Stage) -> ModelFacts:
    """Return the facts of one stage's part: its units, what it shares with another stage in units
    of their own, the root with what it has of the ends, and the order in which its gradients are
    complete. A tied head's copy is complete when the head is."""
    return _stage_facts(facts, chain_of(spec, facts), stage)


@lru_cache(maxsize=2**5)  # who looks for what fits asks of the same model again and again
def _stage_facts(facts: ModelFacts, chain: Chain, stage: Stage) -> ModelFacts:
    tensors = {tensor.name: tensor for tensor in facts.tensors}
    for name, copy in stage.copied:
        tensors[copy] = tensors[name]._replace(name=copy, is_copy=True)
    modules_of = stage.units(facts.unit_modules)
    first: dict[str, int] = {}  # the unit that a module begins with, inner before outer
    for index, modules in enumerate(modules_of):
        for module in modules:
            first.setdefault(module, index)
    held: list[list[TensorFacts]] = [[] for _ in modules_of]
    for name in stage.tensors:
        held[min(first[module] for module in ("", *prefixes(name)) if module in first)].append(
            tensors[name]
        )
    units = [
        UnitFacts(modules=modules, tensors=tuple(own))
        for modules, own in zip(modules_of, held, strict=True)
    ]
    copies = [copy for _, copy in stage.copied if not tensors[copy].is_frozen]
    has = {*stage.tensors}
    order = [name for name in facts.gradient_order if name in has]
    lacking = chain.lacking(stage)
    return replace(
        facts,
        units=tuple(units),
        buffers=tuple(row for row in facts.buffers if not is_within(row[0], lacking)),
        gradient_order=(*copies, *order),
        timeline=None,
        stage_passes=(),
        stops=() if stage.index else facts.stops,  # what another stage gives has a gradient
    )


def stage_roles(roles: Roles, stage: Stage, stages: int, ends: Ends = ENDS) -> Roles:
    """Those of one stage's modules: of the ends only what it has. What it has its own copy of a cut
    table for is its head, whatever it was called before."""
    gone = (
        *(ends.front if stage.index else ()),
        *(ends.behind if stage.index < stages - 1 else ()),
    )
    kept = tuple(pair for pair in roles if not any(_means(pair[0], name) for name in gone))
    copied = {copy.rpartition(".")[0]: name.rpartition(".")[0] for name, copy in stage.copied}
    heads = tuple(
        (head, Role.HEAD)
        for head, table in copied.items()
        if any(fits(pattern, table) for pattern, _ in roles)
        and not any(fits(pattern, head) for pattern, _ in kept)
    )
    return (*kept, *heads)


def _means(pattern: str, module: str) -> bool:
    """Whether a role is one of a module, or of something in it."""
    return fits(pattern, module) or pattern.startswith(f"{module}.")
