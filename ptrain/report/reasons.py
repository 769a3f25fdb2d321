"""Sentences about placements: why one is as it is, with the figures of its derivation, why another
is not the best, and the answer of the paper's Algorithm 1.

The lecture's procedure is fit, batch, throughput; the notes' recipe: gbs = mbs x grad_acc x dp.
Convergence sets the global batch; the micro-batch is the largest that fits; data ranks come before
accumulation, which fills the gap. Beyond some 512 data ranks the notes see throughput fall. Axes
are added by their cost: ZeRO-3, then tp within a node, then pp across nodes, then cp for sequences
and ep for experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ptrain.axes.context.attention import attention_of
from ptrain.axes.pipeline.catalogue import pipeline_of, schedule_of
from ptrain.axes.pipeline.simulate import simulate
from ptrain.codec import encode
from ptrain.cost import PLACED, Phase, Spent, State, busiest
from ptrain.derivation.estimate import Derivation
from ptrain.derivation.interconnect import link
from ptrain.derivation.paper import reconstruction_unit, state_sizes
from ptrain.errors import refused
from ptrain.selection.algorithm1 import STATE_BYTES, Advice, Answer, Thresholds
from ptrain.selection.fit import Fit, fit, host_bytes, host_text, room_text
from ptrain.selection.ranking import Ranked, SearchGoal
from ptrain.selection.where import recompute_of
from ptrain.spec.batch import batch_lines
from ptrain.spec.cluster import Cluster
from ptrain.spec.placement import (
    DATA_AXES,
    REDUCED_AXES,
    TOKEN_AXES,
    Axis,
    Factor,
    Placement,
    R,
    Tier,
)
from ptrain.spec.spec import Spec
from ptrain.units import format_bytes, format_count, format_memory, format_seconds

DATA_LIMIT = 512  # data ranks, about which the notes see throughput per device fall
_SHARDING = (Axis.DP_SHARD, *TOKEN_AXES)
_OF_TOKENS = {axis.value for axis in TOKEN_AXES}
_MODEL_STATES = (State.PARAMETERS, State.OPTIMIZER, State.GRADIENTS)


def reasons(derivation: Derivation) -> list[str]:
    """Return why a spec is as it is: the lecture's three steps with their figures, then each axis
    in the order in which to reach for it."""
    spec, memory_fit = derivation.spec, fit(derivation.spec, derivation.exact)
    return [
        _fit_reason(derivation, memory_fit),
        _batch_reason(spec),
        *batch_lines(spec.batch, spec.data_degree),
        *_throughput_reasons(derivation),
        *axis_reasons(derivation),
    ]


def _fit_reason(derivation: Derivation, memory_fit: Fit) -> str:
    """First: does one step fit, and what of it are states."""
    states = _states(derivation)
    if memory_fit.peak_bytes is None or memory_fit.device_memory is None:
        return f"fit: unknown; model states are {states} per rank"
    word = {True: "fits", False: "does not fit", None: f"unknown: {memory_fit.unknown}"}
    tight = ", but tight" if memory_fit.is_tight else ""
    host = f", {host_text(memory_fit)}" if host_text(memory_fit) else ""
    return (
        f"fit: {word[memory_fit.fits]}{tight}: peak "
        f"{format_memory(memory_fit.peak_bytes)}{room_text(memory_fit)}{host}; model states "
        f"are {states} per rank"
    )


def _batch_reason(spec: Spec) -> str:
    """Second: the global batch by data ranks before accumulation."""
    batch, ranks = spec.batch, spec.data_degree
    product = f"{batch.micro} micro × {batch.accumulate} accumulated × {ranks} data"
    if batch.accumulate == 1:
        rest = (
            "no gradient accumulation; more data-parallel ranks would need a smaller "
            "micro-batch or stay idle"
        )
    else:
        once = batch.accumulate * ranks
        rest = f"more data-parallel ranks would reduce accumulation; {once} ranks need none"
    return f"batch: {batch.global_samples} = {product}; {rest}"


def _throughput_reasons(derivation: Derivation) -> Iterator[str]:
    """Third: what keeps a rank from computing: the limit of data ranks, and the bubble."""
    spec = derivation.spec
    if spec.data_degree > DATA_LIMIT:
        yield (
            f"throughput: {spec.data_degree} data-parallel ranks exceed about {DATA_LIMIT}, "
            "above which the notes report falling throughput per device because ring latency "
            "grows with the ranks; tp and pp reduce this "
            f"number{_waits(derivation, *DATA_AXES)}"
        )
    if (pipeline := pipeline_of(spec)) is not None:
        simulation = simulate(schedule_of(spec))
        yield (
            f"throughput: {spec.pipeline.schedule} on {pipeline.ranks} ranks has a bubble of "
            f"{simulation.bubble_fraction:.1%} of the step with {pipeline.microbatches} "
            "micro-batches, if stages are equal"
        )


def axis_reasons(derivation: Derivation) -> list[str]:
    """Return a sentence for each axis in the order in which to reach for it: why it is there, or
    why it need not be, with what it sends per rank and step."""
    return [
        _sharding_reason(derivation),
        _tensor_reason(derivation),
        _stages_reason(derivation),
        *_context_reason(derivation),
    ]


def _sharding_reason(derivation: Derivation) -> str:
    spec = derivation.spec
    whole = sum(state_sizes(spec, derivation.facts).values())
    states = f"{format_memory(whole)} of states"
    sent = _sent(derivation, *REDUCED_AXES, of_activations=False)
    over = [f"{f.axis} {f.degree}" for f in spec.factors if f.axis in _SHARDING and _cuts(f)]
    if over:
        return (
            f"1. {' × '.join(over)}, the first choice: each rank holds {_states(derivation)} "
            f"of {states}; {sent}{_waits(derivation, *REDUCED_AXES, is_of_states=True)}"
        )
    room = spec.cluster.usable_memory if spec.cluster else 0
    if whole < room:
        usable = f"the {format_memory(room)} of usable device memory"
        return f"1. no dp_shard: {states} are less than {usable}; {sent}"
    return f"1. no dp_shard, although it is the first choice and would shard {states}; {sent}"


def _states(derivation: Derivation) -> str:
    """Return what a rank has of Θ, Ω and G on its device, and of what is on a host its share."""
    exact = derivation.exact
    device = format_memory(sum(exact.bytes_of(state) for state in _MODEL_STATES))
    hosted = host_bytes(exact, 1)
    return f"{device} and {format_memory(hosted)} on the host" if hosted else device


def _tensor_reason(derivation: Derivation) -> str:
    cluster, ranks = derivation.spec.cluster, derivation.spec.degree(Axis.TP)
    size = 2 * reconstruction_unit(derivation.facts)
    layer = f"a layer has {format_memory(size)} in 16-bit precision"
    if ranks == 1:
        share = f", {size / cluster.device_memory:.1%} of the device memory" if cluster else ""
        return f"2. no tp: {layer}{share}, and the all-reduces of tp would be on the critical path"
    return (
        f"2. tp {ranks}: {layer}, sharded by {ranks}; {_sent(derivation, Axis.TP)} on the "
        f"critical path, {_where(derivation, Axis.TP, cluster)}{_waits(derivation, Axis.TP)}"
    )


def _stages_reason(derivation: Derivation) -> str:
    spec, ranks = derivation.spec, derivation.spec.degree(Axis.PP)
    if ranks == 1:
        nodes = _nodes(spec)
        over = f"the other axes span {nodes} nodes" if nodes > 1 else "one node is enough"
        return f"3. no pp: {over}, and there is no bubble"
    micro = spec.batch.accumulate
    return (
        f"3. pp {ranks}: {_sent(derivation, Axis.PP)} between stages, "
        f"{_where(derivation, Axis.PP, spec.cluster)}; {micro} micro-batches, "
        f"{micro / ranks:g} per stage{_waits(derivation, Axis.PP)}"
    )


def _context_reason(derivation: Derivation) -> Iterator[str]:
    """Why there are slices of the tokens; nothing without them."""
    spec, step = derivation.spec, derivation.plan.context
    if step is None:
        return
    yield (
        f"4. {step.axis} {spec.degree(step.axis)}, {attention_of(spec)}: each rank holds "
        f"{derivation.plan.tokens} of the {step.sequence} tokens of a sample; in attention "
        f"{_sent(derivation, step.axis, of_activations=True)}, "
        f"{_where(derivation, step.axis, spec.cluster)}{_waits(derivation, step.axis)}"
    )


def _sent(derivation: Derivation, *axes: Axis, of_activations: bool | None = None) -> str:
    """Return what is sent over some of the axes; of activations alone, or of all but these, where
    that is said."""
    names = {axis.value for axis in axes}
    sent = sum(
        row.sent_bytes
        for row in busiest(derivation.exact.traffic)
        if row.key.phase is not Phase.SETUP
        and {*row.key.axes} <= names
        and of_activations in (None, row.key.state is State.ACTIVATIONS)
    )
    return f"{format_bytes(sent)} sent per step"


def _cuts(factor: Factor) -> bool:
    """Whether an axis cuts some of the states."""
    placement = factor.placement
    return {placement.parameters, placement.optimizer, placement.gradients} != {R}


def _waits(derivation: Derivation, *axes: Axis, is_of_states: bool = False) -> str:
    """Return how much of a step waits for what moves over the axes; empty where no rates say it.
    What moves over axes of tokens alone is attention's more than that of states."""
    if (step := derivation.exact.step) is None:
        return ""
    names = {axis.value for axis in axes}
    waited = sum(
        seconds
        for over, seconds in step.exposed().items()
        if {*over} <= names and not (is_of_states and {*over} <= _OF_TOKENS)
    )
    return f"; exposed communication takes {waited / step.seconds:.1%} of the step"


def _where(derivation: Derivation, axis: Axis, cluster: Cluster | None) -> str:
    over = link(derivation.spec, derivation.exact.traffic, axis)
    if over is None or cluster is None:
        return "over links of unknown bandwidth"
    if over.nodes == 1:
        return f"within a node at {format_bytes(cluster.intra_node_bandwidth)}/s"
    return f"over {over.nodes} nodes at {format_bytes(cluster.inter_node_bandwidth)}/s"


def _nodes(spec: Spec) -> int:
    return -(-spec.world_size // spec.cluster.devices_per_node) if spec.cluster else 1


def idea_of(spec: Spec) -> str:
    """Return the idea of a placement in the field's words: `pp × HSDP × tp, recompute full`."""
    factors = {factor.axis: factor for factor in spec.factors if factor.degree > 1}
    data = [factors[axis].placement for axis in DATA_AXES if axis in factors]
    words = [str(axis) for axis in factors if axis not in DATA_AXES]
    if data:
        words.insert(words[:1] == ["pp"], _data_idea(data))
    kept = recompute_of(spec)
    way = {"none": "", "offload": ", activations offloaded"}.get(kept, f", recompute {kept}")
    is_hosted = any(
        placement[state].tier is not Tier.DEVICE for placement in data for state in PLACED
    )
    return (" × ".join(words) or "one device") + ", states offloaded" * is_hosted + way


def _data_idea(data: Sequence[Placement]) -> str:
    """Return the name of what the data axes shard."""
    if any(placement.parameters != R for placement in data):
        return "FSDP" if all(placement.parameters != R for placement in data) else "HSDP"
    if any(placement.gradients != R for placement in data):
        return "ZeRO-2"
    return "ZeRO-1" if any(placement.optimizer != R for placement in data) else "DDP"


_LEAST = 0.001  # of the best's step: what takes less is no reason


def reason(row: Ranked | None, best: Ranked, objective: SearchGoal) -> str:
    """Return in a sentence why a choice is not the best one, by its figures and no others."""
    if row is None:
        return "its peak is unknown"
    memory = row.memory
    if memory.short_bytes > 0:
        return f"does not fit by {format_memory(memory.short_bytes)}"
    if memory.host_short_bytes > 0:
        return f"its host lacks {format_memory(memory.host_short_bytes)}"
    if not memory.fits:
        return "whether it fits is unknown"
    if row.figures == best.figures:
        return "is the best"
    if objective is SearchGoal.MEMORY:
        return f"needs {format_memory(row.peak_bytes - best.peak_bytes)} more"
    if best.step is None:
        return _of_bytes(row, best)
    if row.step is None:
        return f"its time is unknown: {row.why_untimed}"
    ratio = row.step.seconds / best.step.seconds - 1
    pace = f"{abs(ratio):.1%} {'slower' if ratio >= 0 else 'faster'}"
    less = best.peak_bytes - row.peak_bytes
    room = f"; {format_memory(abs(less))} {'smaller' if less > 0 else 'larger'}" if less else ""
    return f"{pace}{_more(row, best)}{room}"


def _of_bytes(row: Ranked, best: Ranked) -> str:
    said = []
    for name, mine, other in (
        ("between nodes", row.tiers.between, best.tiers.between),
        ("within a node", row.tiers.within, best.tiers.within),
    ):
        if mine != other:
            sign = "more" if mine > other else "less"
            said.append(f"sends {format_bytes(abs(mine - other))} {sign} {name}")
    return ", ".join(said) or "sends the same amount"


_SPENT = {
    Spent.COMPUTE: "compute",
    Spent.WRAPPERS: "wrappers on the host",
    Spent.LAUNCHES: "waiting for the host's launches",
    Spent.COPIES: "copies to and from the host",
    Spent.UPDATE: "optimizer update",
    Spent.BUBBLE: "pipeline bubble",
    Spent.INTERFERENCE: "compute slowed by collectives",
    Spent.STRAGGLERS: "stragglers and congestion",
}


def _more(row: Ranked, best: Ranked) -> str:
    """Return the two things on which a row spends most more than the best one."""
    mine, other = _parts(row), _parts(best)
    more = {name: seconds - other.get(name, 0.0) for name, seconds in mine.items()}
    least = _LEAST * sum(other.values())
    largest = sorted((name for name in more if more[name] > least), key=lambda name: -more[name])
    said = " and ".join(f"{format_seconds(more[name])} more {name}" for name in largest[:2])
    if recompute_of(row.spec) not in ("none", recompute_of(best.spec)):
        said = said.replace("more compute", "more compute with recomputation")
    return f", {said}" if said else ""


def _parts(row: Ranked) -> dict[str, float]:
    """Return the seconds of a step by what they go to; communication by axes."""
    assert row.step is not None, "a row that has a time"
    parts: dict[str, float] = {}
    for time in row.step.rows:
        axes = "+".join(time.key.axes)
        name = _SPENT.get(time.key.spent, f"exposed {axes} communication")
        parts[name] = parts.get(name, 0.0) + time.seconds
    return parts


# The answer of the paper's Algorithm 1, as text and as plain data.


def advice_lines(answer: Answer) -> list[str]:
    """Return the answer as text: the conditions with their figures, what follows, and what the
    algorithm does not see."""
    required = answer.requirements
    head = (
        f"Algorithm 1, thresholds {answer.thresholds.states:g} and {answer.thresholds.layer:g}: "
        f"P = {format_count(required.parameters)}, N = {required.devices}, "
        f"M_d = {format_memory(required.device_memory)}"
    )
    conditions = [
        f"  line {test.line}: {test.text}: {'yes' if test.is_true else 'no'}"
        for test in answer.tests
    ]
    return [head, *conditions, _conclusion(answer), *_remarks(answer)]


def advice_record(answer: Answer) -> dict[str, object]:
    """Return the answer as plain data: what was required, each condition, and the overrides that
    make a spec of it."""
    return {
        "algorithm": "algorithm1",
        "thresholds": encode(answer.thresholds),
        "requirements": encode(answer.requirements),
        "conditions": encode(answer.tests),
        "advice": None if answer.advice is Advice.NONE else str(answer.advice),
        "overrides": list(answer.overrides),
    }


def _conclusion(answer: Answer) -> str:
    if answer.advice is Advice.NONE:
        return "  no answer: line 11 returns a specification that was never set"
    tuples = " ⊗ ".join(f"{axis} {degree} ({modes})" for axis, degree, modes in answer.degrees)
    return f"  {answer.advice}: {tuples}"


def _remarks(answer: Answer) -> list[str]:
    """What a reader would else take for said: activations, and what a second axis changes."""
    required = answer.requirements
    share = STATE_BYTES * required.parameters / required.devices
    whole = format_memory(share)
    if answer.advice is Advice.NONE:
        if share < required.device_memory:
            rest = format_memory(required.device_memory - share)
            return [f"  the share of {whole} is less than the device memory; {rest} remain"]
        return [
            f"  the share of {whole} exceeds the device memory; more devices, fewer bytes "
            "per parameter or states on the host would help, but the algorithm considers "
            "none of them"
        ]
    if answer.advice is Advice.ADD_TENSOR:
        return [
            f"  with the same number of devices the states' share stays {whole}, which line "
            "5 rejected: tp reduces the all-gathered parameters, not the stored states",
            "  the paper does not define how tp is combined; ZeRO-3 over the nodes is assumed here",
        ]
    return [
        "  activations are in no condition; the threshold leaves them "
        f"{format_memory((1 - answer.thresholds.states) * required.device_memory)}"
    ]


def thresholds_of(text: str) -> Thresholds:
    """Return the thresholds that `0.7,0.3` writes. Raises SpecError for anything else: they are
    shares of a device's memory."""
    try:
        states, layer = (float(part) for part in text.split(","))
    except ValueError:
        states = layer = 0.0
    if not (0 < states <= 1 and 0 < layer <= 1):
        raise refused(
            "--thresholds",
            f"{text[:60]!r} is not two shares of a device's memory, for states and for a layer",
            "Use two numbers in 0..1, for example `--thresholds 0.7,0.3`.",
        )
    return Thresholds(states=states, layer=layer)
