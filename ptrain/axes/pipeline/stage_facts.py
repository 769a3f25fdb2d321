"""The facts of each pipeline stage, and the results of a schedule's order alone.

These results are the micro-batches whose activations a rank holds, and its sends and receives. A
stage is described as a model with fewer layers.

Also the instructions of a rank in a step: computation, receives, sends, and waits for sends. They
are executed, and predictions are derived from the same list.

Receives and sends are in one order of the full pipeline: the order of a step in which a forward
takes one unit of time, a backward two and a message none. Every rank has its part of this order, so
both ends reach a message after the same earlier messages. No two ranks can wait for each other,
even if a backend holds a send until it is received, or transfers one message at a time between two
ranks (NCCL does both). A receive allocates its buffer when the sender sends.

A sent tensor is freed

- before the pass that takes a later message of the receiver: that message proves that the send is
  over;
- otherwise before the next message of its kind to the same rank, if nothing else holds the tensor.
  In training, a stage's backward pass holds its output, with or without the send.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import itemgetter
from typing import NamedTuple

from ptrain.axes.data.cost import GatherCounts
from ptrain.axes.pipeline.catalogue import stages_of as cut_as_said
from ptrain.axes.pipeline.schedule import Action, Schedule, Step, forward_only
from ptrain.axes.pipeline.simulate import simulate
from ptrain.cost import Collective, Phase
from ptrain.facts.model import ModelFacts, TensorFacts, UnitFacts, module_prefixes
from ptrain.facts.stages import ENDS, Chain, Ends, Layers, Stage, is_within, layers_of
from ptrain.spec.dials import SyncPolicy
from ptrain.spec.model import ModelShape
from ptrain.spec.placement import Axis, Role, Roles, matches_pattern
from ptrain.spec.spec import Spec
from ptrain.timeline import Kind

_LAST_USE = (Kind.BACKWARD, Kind.WEIGHT)  # a split backward needs activations until its weight half


def count_in_flight(schedule: Schedule, rank: int) -> Iterator[dict[int, int]]:
    """Yield the number of micro-batches in flight on a rank's stages.

    A stage holds the activations of a micro-batch from its forward to its full backward or its
    weight half, both included.

    Args:
        schedule: The schedule of one step.
        rank: The rank along pp, from 0.

    Yields:
        During each step of the rank, the number of micro-batches by stage.
    """
    counts = dict.fromkeys(schedule.stages_of(rank), 0)
    for step in schedule.orders[rank]:
        for part in step.parts:
            counts[part.stage] += part.kind is Kind.FORWARD
        yield dict(counts)
        for part in step.parts:
            counts[part.stage] -= part.kind in _LAST_USE


def most_held_of(schedule: Schedule, stage: int) -> int:
    """Return the highest number of micro-batches whose activations one stage holds.

    Args:
        schedule: The schedule of one step.
        stage: The stage, from 0.
    """
    return max(counts[stage] for counts in count_in_flight(schedule, schedule.rank_of[stage]))


class Transfer(NamedTuple):
    """The messages of one rank over one boundary in one direction of a step.

    Activations are sent forward, gradients backward, with one call per micro-batch.

    Attributes:
        rank: The rank that sends or receives.
        boundary: Boundary b is between the stages b and b + 1.
        collective: SEND or RECV.
        phase: FORWARD or BACKWARD.
        calls: Number of calls in a step.
    """

    rank: int
    boundary: int
    collective: Collective
    phase: Phase
    calls: int


def list_transfers(schedule: Schedule) -> tuple[Transfer, ...]:
    """Return the messages over boundaries between ranks, by rank and boundary, forward first."""
    counts = Counter(
        (part.stage, part.kind)
        for order in schedule.orders
        for step in order
        for part in step.parts
    )
    rows = [
        row for b in range(schedule.stages - 1) for row in _boundary_transfers(schedule, b, counts)
    ]
    return tuple(sorted(rows, key=lambda row: (row.rank, row.boundary)))


def _boundary_transfers(
    schedule: Schedule, boundary: int, counts: Counter[tuple[int, Kind]]
) -> Iterator[Transfer]:
    """Yield the messages over one boundary."""
    if not schedule.is_crossed(boundary):
        return
    before, after = schedule.rank_of[boundary], schedule.rank_of[boundary + 1]
    forward = counts[boundary, Kind.FORWARD]
    backward = counts[boundary + 1, Kind.BACKWARD] + counts[boundary + 1, Kind.INPUT]
    for phase, calls, sender, receiver in (
        (Phase.FORWARD, forward, before, after),
        (Phase.BACKWARD, backward, after, before),
    ):
        for rank, collective in ((sender, Collective.SEND), (receiver, Collective.RECV)):
            yield Transfer(
                rank=rank,
                boundary=boundary,
                collective=collective,
                phase=phase,
                calls=calls,
            )


# All-gathers of a stage's units in a step depend on its schedule and on `sync`. Backward needs a
# unit's parameters for the gradients of its inputs: in a full backward or an input half. The weight
# half multiplies tensors that forward and the input half left, and needs no parameters.


def stage_gathers(
    schedule: Schedule, stage: int, sync: SyncPolicy, *, is_root: bool = False
) -> GatherCounts:
    """Return the numbers of all-gathers of a stage's unit in a step.

    A unit is gathered in each pass that finds it sharded: at first, and after every reshard. For
    one micro-batch after the other the result equals `axes.data.cost.count_gathers`.

    Args:
        schedule: The pipeline's schedule.
        stage: The stage.
        sync: When units are resharded.
        is_root: The unit is the root, which `non-root` keeps gathered.
    """
    times = dict.fromkeys((Kind.FORWARD, Kind.BACKWARD), 0)
    gives_back = {
        Kind.FORWARD: bool(sync.after_forward(is_root=is_root)),
        Kind.BACKWARD: sync.reshard_after_backward,
    }
    is_sharded = True
    for kind in _stage_passes(schedule, stage):
        times[kind] += is_sharded
        is_sharded = gives_back[kind]
        if not any(gives_back.values()):
            break  # never freed: it stays gathered after its first pass
    return GatherCounts(times[Kind.FORWARD], times[Kind.BACKWARD])


def _stage_passes(schedule: Schedule, stage: int) -> Iterator[Kind]:
    """Yield forward and backward passes of a stage in order; weight halves do not count."""
    for step in schedule.orders[schedule.rank_of[stage]]:
        for part in step.parts:
            if part.stage == stage and part.kind is not Kind.WEIGHT:
                yield Kind.FORWARD if part.kind is Kind.FORWARD else Kind.BACKWARD


# In built-in models: the tied table, and the head's name for it.
TIED = ("embed.weight", "head.weight")


def stages_of(spec: Spec, facts: ModelFacts) -> tuple[Stage, ...]:
    """Return the stages of a model, first to last; () without pp.

    Raises:
        SpecError: The model has too few layers.
    """
    return () if spec.degree(Axis.PP) == 1 else cut_as_said(spec, stage_layers(spec, facts))


def chain_of(spec: Spec, facts: ModelFacts) -> Chain:
    """Return the chain of modules that stages are cut from.

    For a built-in model it follows from the shape, else it is in the facts.
    """
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


def stage_layers(spec: Spec, facts: ModelFacts) -> Layers:
    """Return the layers that stages are made of, independent of the units of the wrap."""
    return _group_layers(facts, chain_of(spec, facts))


@lru_cache(maxsize=2**3)
def _group_layers(facts: ModelFacts, chain: Chain) -> Layers:
    """Group the tensors of units by layer, cached."""
    *inner, root = facts.units
    within: dict[str, list[TensorFacts]] = {name: [] for name in chain.layers}
    for unit in inner:
        for name in module_prefixes(unit.name):
            if name in within:
                within[name] += unit.tensors
    blocks = tuple(
        UnitFacts(modules=(name,), tensors=tuple(tensors)) for name, tensors in within.items()
    )
    assert sum(block.numel for block in blocks) == sum(unit.numel for unit in inner)
    return layers_of((*blocks, root), front=chain.ends.front, tied=chain.tied)


def stage_facts(spec: Spec, facts: ModelFacts, stage: Stage) -> ModelFacts:
    """Return the facts of one stage's part of the model.

    These are its units, with shared tensors in separate units, the root with its part of the ends,
    and the order in which gradients are complete. The copy of a tied head is complete when the head
    is.

    Args:
        spec: The spec.
        facts: The facts of the full model.
        stage: The stage.
    """
    return _stage_facts(facts, chain_of(spec, facts), stage)


@lru_cache(maxsize=2**5)  # a search needs the same model many times
def _stage_facts(facts: ModelFacts, chain: Chain, stage: Stage) -> ModelFacts:
    """Return the facts of one stage, cached."""
    tensors = {tensor.name: tensor for tensor in facts.tensors}
    for name, copy in stage.copied:
        tensors[copy] = tensors[name]._replace(name=copy, is_copy=True)
    modules_of = stage.stage_units(facts.unit_modules)
    first: dict[str, int] = {}  # index of the first unit with this module, inner before outer
    for index, modules in enumerate(modules_of):
        for module in modules:
            first.setdefault(module, index)
    held: list[list[TensorFacts]] = [[] for _ in modules_of]
    for name in stage.tensors:
        held[
            min(first[module] for module in ("", *module_prefixes(name)) if module in first)
        ].append(tensors[name])
    units = [
        UnitFacts(modules=modules, tensors=tuple(own))
        for modules, own in zip(modules_of, held, strict=True)
    ]
    copies = [copy for _, copy in stage.copied if not tensors[copy].is_frozen]
    has = {*stage.tensors}
    order = [name for name in facts.gradient_order if name in has]
    lacking = chain.absent_names(stage)
    return replace(
        facts,
        units=tuple(units),
        buffers=tuple(row for row in facts.buffers if not is_within(row[0], lacking)),
        gradient_order=(*copies, *order),
        timeline=None,
        stage_passes=(),
        stops=() if stage.index else facts.stops,  # the inputs from another stage have gradients
    )


def stage_roles(roles: Roles, stage: Stage, stages: int, ends: Ends = ENDS) -> Roles:
    """Return the roles of one stage's modules, without the ends that it lacks.

    A table that the stage has a copy of is its head, independent of its role elsewhere.

    Args:
        roles: The roles of the full model.
        stage: The stage.
        stages: Number of stages.
        ends: The modules before and after the layers.
    """
    gone = (
        *(ends.front if stage.index else ()),
        *(ends.behind if stage.index < stages - 1 else ()),
    )
    kept = tuple(
        (pattern, role)
        for pattern, role in roles
        # a pattern may be for a module, or for a part of it
        if not any(
            matches_pattern(pattern, name) or pattern.startswith(f"{name}.") for name in gone
        )
    )
    copied = {copy.rpartition(".")[0]: name.rpartition(".")[0] for name, copy in stage.copied}
    heads = tuple(
        (head, Role.HEAD)
        for head, table in copied.items()
        if any(matches_pattern(pattern, table) for pattern, _ in roles)
        and not any(matches_pattern(pattern, head) for pattern, _ in kept)
    )
    return (*kept, *heads)


class Message(NamedTuple):
    """A tensor of one micro-batch that crosses a stage boundary.

    It is the output of stage `source` for the next stage (forward), or the gradient of its input
    for the previous one (backward).
    """

    phase: Phase
    source: int
    microbatch: int

    @property
    def target(self) -> int:
        """The stage that takes the message."""
        return self.source + (1 if self.phase is Phase.FORWARD else -1)


@dataclass(frozen=True, slots=True)
class Receive:
    """Allocate a buffer and post its receive; the pass that takes the message waits for it."""

    message: Message


@dataclass(frozen=True, slots=True)
class Send:
    """Post the send; the tensor is held until `Release`."""

    message: Message


@dataclass(frozen=True, slots=True)
class Release:
    """Wait until the message is sent, and drop its tensor."""

    message: Message


Instruction = Action | Receive | Send | Release


@lru_cache(maxsize=16)  # most variants that a command tries have the same schedule
def training_instructions(schedule: Schedule) -> tuple[tuple[Instruction, ...], ...]:
    """Return the instructions of a training step by rank.

    It takes O(n log n) for n actions. A single rank sends nothing.

    Raises:
        BrokenSchedule: The schedule is not the work of a step.
    """
    if schedule.ranks == 1:
        return (tuple(part for step in schedule.orders[0] for part in step.parts),)
    return _ordered_instructions(schedule)


def evaluation_instructions(
    rank_of: tuple[int, ...], microbatches: int
) -> tuple[tuple[Instruction, ...], ...]:
    """Return the instructions of forward passes only, one micro-batch after the other.

    Args:
        rank_of: The rank of each stage along pp, first stage to last.
        microbatches: The number of micro-batches.

    Returns:
        The instructions by rank.
    """
    return _ordered_instructions(forward_only(rank_of, microbatches))


def input_message(action: Action, stages: int) -> Message | None:
    """Return the message that a pass takes from another stage.

    Args:
        action: The pass: stage, kind and micro-batch.
        stages: The number of stages of the pipeline.

    Returns:
        The message; None if the pass needs none, such as the first stage's forward or a weight
        half.
    """
    stage, microbatch = action.stage, action.microbatch
    match action.kind:
        case Kind.FORWARD if stage > 0:
            return Message(Phase.FORWARD, stage - 1, microbatch)
        case Kind.BACKWARD | Kind.INPUT if stage < stages - 1:
            return Message(Phase.BACKWARD, stage + 1, microbatch)
        case _:
            return None


def output_message(action: Action, stages: int) -> Message | None:
    """Return the message that a pass makes for another stage.

    Args:
        action: The pass: stage, kind and micro-batch.
        stages: The number of stages of the pipeline.

    Returns:
        The message; None if the pass makes none, such as the last stage's forward or a weight half.
    """
    stage, microbatch = action.stage, action.microbatch
    match action.kind:
        case Kind.FORWARD if stage < stages - 1:
            return Message(Phase.FORWARD, stage, microbatch)
        case Kind.BACKWARD | Kind.INPUT if stage > 0:
            return Message(Phase.BACKWARD, stage, microbatch)
        case _:
            return None


# A position in the order of the full pipeline. At equal times, messages come before the passes that
# begin, and gradients before outputs: a rank that takes an output has released the gradient that it
# sent.
_Position = tuple[float, int, int, int]
_Moment = tuple[_Position, Step | Receive | Send]


def _ordered_instructions(schedule: Schedule) -> tuple[tuple[Instruction, ...], ...]:
    """Return the instructions of each rank in the common order."""
    moments: list[list[_Moment]] = [[] for _ in schedule.orders]
    sends: dict[Message, _Position] = {}
    rank_of, stages = schedule.rank_of, schedule.stages
    for rank, spans in enumerate(simulate(schedule).timeline):
        for number, span in enumerate(spans):
            moments[rank].append(((span.start, 1, rank, number), span.step))
            for part in span.step.parts:
                message = output_message(part, stages)
                if message is None or (receiver := rank_of[message.target]) == rank:
                    continue
                # One position for both ends: the sender posts its send and the receiver its receive
                # at the same point of the common order.
                place = (span.end, 0, int(message.phase is Phase.FORWARD), rank)
                sends[message] = place
                moments[rank].append((place, Send(message)))
                moments[receiver].append((place, Receive(message)))
    order = {message: number for number, message in enumerate(sorted(sends, key=sends.__getitem__))}
    return tuple(
        tuple(_with_releases(schedule, order, sorted(of_rank, key=itemgetter(0))))
        for of_rank in moments
    )


def _with_releases(
    schedule: Schedule, order: Mapping[Message, int], moments: Iterable[_Moment]
) -> Iterator[Instruction]:
    """Yield a rank's instructions with its releases."""
    sent: defaultdict[tuple[int, Phase], deque[Message]] = defaultdict(deque)  # by receiving rank
    rank_of, stages = schedule.rank_of, schedule.stages
    for _, moment in moments:
        match moment:
            case Send(message):
                others = sent[rank_of[message.target], message.phase]
                if message.phase is Phase.BACKWARD or schedule.is_forward_only:
                    yield from map(Release, others)
                    others.clear()
                others.append(message)
                yield moment
            case Receive():
                yield moment
            case step:
                for part in step.parts:
                    came = input_message(part, stages)
                    if came is not None and came in order:
                        peer, number = rank_of[came.source], order[came]
                        for others in (sent[peer, Phase.FORWARD], sent[peer, Phase.BACKWARD]):
                            # sent before the taken message
                            while others and order[others[0]] < number:
                                yield Release(others.popleft())
                    yield part
    # The last messages of a step have no later message that would prove their arrival.
    for others in sent.values():
        yield from map(Release, others)
