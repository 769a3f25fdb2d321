"""Sentences about placements: the reasons for one, and the reasons why another is not the best.

The reasons of a placement are the figures of its derivation. The module also writes the answer of
the paper's Algorithm 1.

The lecture's procedure is fit, batch, throughput; the notes' recipe: gbs = mbs x grad_acc x dp.
Convergence sets the global batch. The micro-batch is the largest that fits; data-parallel ranks
come before gradient accumulation, which makes up the rest. Above about 512 data-parallel ranks the
notes report falling throughput. Axes are added by their cost: ZeRO-3, then tp within a node, then
pp across nodes, then cp for long sequences and ep for experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ptrain.axes.context.attention import attention_of
from ptrain.axes.pipeline.catalogue import pipeline_of, schedule_of
from ptrain.axes.pipeline.simulate import simulate
from ptrain.codec import encode
from ptrain.cost import PLACED, Phase, Spent, State, busiest
from ptrain.derivation.estimate import Derivation
from ptrain.derivation.interconnect import axis_link
from ptrain.derivation.paper import reconstruction_unit, state_sizes
from ptrain.errors import input_error
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

DATA_LIMIT = (
    512  # data-parallel ranks; above about this number the notes report lower throughput per device
)
_SHARDING = (Axis.DP_SHARD, *TOKEN_AXES)
_OF_TOKENS = {axis.value for axis in TOKEN_AXES}
_MODEL_STATES = (State.PARAMETERS, State.OPTIMIZER, State.GRADIENTS)


def placement_reasons(derivation: Derivation) -> list[str]:
    """Return the reasons for a placement: fit, batch, throughput, and then each axis.

    Axes are in the order in which to add them (`axis_reasons`).
    """
    spec, memory_fit = derivation.spec, fit(derivation.spec, derivation.exact)
    return [
        _fit_reason(derivation, memory_fit),
        _batch_reason(spec),
        *batch_lines(spec.batch, spec.data_degree),
        *_throughput_reasons(derivation),
        *axis_reasons(derivation),
    ]


def _fit_reason(derivation: Derivation, memory_fit: Fit) -> str:
    """Return step 1: does a training step fit, and how large are the model states."""
    states = _states_text(derivation)
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
    """Return step 2: the global batch as a product, data-parallel ranks before accumulation."""
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
    """Yield step 3, the limits of throughput: data-parallel ranks and the pipeline bubble."""
    spec = derivation.spec
    if spec.data_degree > DATA_LIMIT:
        yield (
            f"throughput: {spec.data_degree} data-parallel ranks exceed about {DATA_LIMIT}, "
            "above which the notes report falling throughput per device because ring latency "
            "grows with the ranks; tp and pp reduce this "
            f"number{_exposed_text(derivation, *DATA_AXES)}"
        )
    if (pipeline := pipeline_of(spec)) is not None:
        simulation = simulate(schedule_of(spec))
        yield (
            f"throughput: {spec.pipeline.schedule} on {pipeline.ranks} ranks has a bubble of "
            f"{simulation.bubble_fraction:.1%} of the step with {pipeline.microbatches} "
            "micro-batches, if stages are equal"
        )


def axis_reasons(derivation: Derivation) -> list[str]:
    """Return a sentence for each axis, in the order in which to add axes.

    A sentence gives the reason why the axis is used or not needed, and the bytes that it sends per
    rank and step.
    """
    return [
        _sharding_reason(derivation),
        _tensor_reason(derivation),
        _stages_reason(derivation),
        *_context_reason(derivation),
    ]


def _sharding_reason(derivation: Derivation) -> str:
    """Return the sentence on sharding the model states, dp_shard before other axes."""
    spec = derivation.spec
    total = sum(state_sizes(spec, derivation.facts).values())
    states = f"{format_memory(total)} of states"
    traffic = _sent_text(derivation, *REDUCED_AXES, of_activations=False)
    over = [
        f"{f.axis} {f.degree}" for f in spec.factors if f.axis in _SHARDING and _shards_states(f)
    ]
    if over:
        return (
            f"1. {' × '.join(over)}, the first choice: each rank holds {_states_text(derivation)} "
            f"of {states}; {traffic}{_exposed_text(derivation, *REDUCED_AXES, is_of_states=True)}"
        )
    room = spec.cluster.usable_memory if spec.cluster else 0
    if total < room:
        usable = f"the {format_memory(room)} of usable device memory"
        return f"1. no dp_shard: {states} are less than {usable}; {traffic}"
    return f"1. no dp_shard, although it is the first choice and would shard {states}; {traffic}"


def _states_text(derivation: Derivation) -> str:
    """Return the size of the model states on a rank's device, and of its share on the host."""
    exact = derivation.exact
    device = format_memory(sum(exact.bytes_of(state) for state in _MODEL_STATES))
    hosted = host_bytes(exact, 1)
    return f"{device} and {format_memory(hosted)} on the host" if hosted else device


def _tensor_reason(derivation: Derivation) -> str:
    """Return the sentence on tp, with the size of a layer in 16-bit precision."""
    cluster, ranks = derivation.spec.cluster, derivation.spec.degree(Axis.TP)
    size = 2 * reconstruction_unit(derivation.facts)  # 2 bytes per element
    layer = f"a layer has {format_memory(size)} in 16-bit precision"
    if ranks == 1:
        share = f", {size / cluster.device_memory:.1%} of the device memory" if cluster else ""
        return f"2. no tp: {layer}{share}, and the all-reduces of tp would be on the critical path"
    return (
        f"2. tp {ranks}: {layer}, sharded by {ranks}; {_sent_text(derivation, Axis.TP)} on "
        f"the critical path, {_link_text(derivation, Axis.TP, cluster)}"
        f"{_exposed_text(derivation, Axis.TP)}"
    )


def _stages_reason(derivation: Derivation) -> str:
    """Return the sentence on pp."""
    spec, ranks = derivation.spec, derivation.spec.degree(Axis.PP)
    if ranks == 1:
        nodes = -(-spec.world_size // spec.cluster.devices_per_node) if spec.cluster else 1
        over = f"the other axes span {nodes} nodes" if nodes > 1 else "one node is enough"
        return f"3. no pp: {over}, and there is no bubble"
    micro = spec.batch.accumulate
    return (
        f"3. pp {ranks}: {_sent_text(derivation, Axis.PP)} between stages, "
        f"{_link_text(derivation, Axis.PP, spec.cluster)}; {micro} micro-batches, "
        f"{micro / ranks:g} per stage{_exposed_text(derivation, Axis.PP)}"
    )


def _context_reason(derivation: Derivation) -> Iterator[str]:
    """Yield the sentence on the axis that shards the tokens of a sample; nothing without one."""
    spec, step = derivation.spec, derivation.plan.context
    if step is None:
        return
    yield (
        f"4. {step.axis} {spec.degree(step.axis)}, {attention_of(spec)}: each rank holds "
        f"{derivation.plan.tokens} of the {step.sequence} tokens of a sample; in attention "
        f"{_sent_text(derivation, step.axis, of_activations=True)}, "
        f"{_link_text(derivation, step.axis, spec.cluster)}{_exposed_text(derivation, step.axis)}"
    )


def _sent_text(derivation: Derivation, *axes: Axis, of_activations: bool | None = None) -> str:
    """Return the bytes sent over the axes in a step, as text.

    Args:
        axes: Calls are counted if all of their axes are among these.
        of_activations: True: only activations; False: all other states; None: all traffic.
    """
    names = {axis.value for axis in axes}
    sent_bytes = sum(
        row.sent_bytes
        for row in busiest(derivation.exact.traffic)
        if row.key.phase is not Phase.SETUP
        and {*row.key.axes} <= names
        and of_activations in (None, row.key.state is State.ACTIVATIONS)
    )
    return f"{format_bytes(sent_bytes)} sent per step"


def _shards_states(factor: Factor) -> bool:
    """Return True if an axis shards any of the model states."""
    placement = factor.placement
    return {placement.parameters, placement.optimizer, placement.gradients} != {R}


def _exposed_text(derivation: Derivation, *axes: Axis, is_of_states: bool = False) -> str:
    """Return the share of exposed communication over the axes, as text; empty without a step time.

    Args:
        axes: Communication is counted if all of its axes are among these.
        is_of_states: Leave out communication over token axes alone, most of which is attention's.
    """
    if (step := derivation.exact.step) is None:
        return ""
    names = {axis.value for axis in axes}
    waited = sum(
        seconds
        for over, seconds in step.exposed_seconds().items()
        if {*over} <= names and not (is_of_states and {*over} <= _OF_TOKENS)
    )
    return f"; exposed communication takes {waited / step.seconds:.1%} of the step"


def _link_text(derivation: Derivation, axis: Axis, cluster: Cluster | None) -> str:
    """Return the links that an axis uses: within a node or across nodes, and their bandwidth."""
    over = axis_link(derivation.spec, derivation.exact.traffic, axis)
    if over is None or cluster is None:
        return "over links of unknown bandwidth"
    if over.nodes == 1:
        return f"within a node at {format_bytes(cluster.intra_node_bandwidth)}/s"
    return f"over {over.nodes} nodes at {format_bytes(cluster.inter_node_bandwidth)}/s"


def placement_idea(spec: Spec) -> str:
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
    """Return the field's name for the states that the data axes shard: DDP, ZeRO-1, ZeRO-2, HSDP,
    FSDP.
    """
    if any(placement.parameters != R for placement in data):
        return "FSDP" if all(placement.parameters != R for placement in data) else "HSDP"
    if any(placement.gradients != R for placement in data):
        return "ZeRO-2"
    return "ZeRO-1" if any(placement.optimizer != R for placement in data) else "DDP"


_LEAST = 0.001  # share of the best row's step; smaller differences are not named as reasons


def losing_reason(row: Ranked | None, best: Ranked, objective: SearchGoal) -> str:
    """Return a sentence that explains why a choice is not the best one.

    Args:
        row: The choice; None if its peak is unknown.
        best: The first row of the ranking.
        objective: The goal of the ranking; by MEMORY only peaks are compared.
    """
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
        return _traffic_difference(row, best)
    if row.step is None:
        return f"its time is unknown: {row.why_untimed}"
    ratio = row.step.seconds / best.step.seconds - 1
    pace = f"{abs(ratio):.1%} {'slower' if ratio >= 0 else 'faster'}"
    less = best.peak_bytes - row.peak_bytes
    room = f"; {format_memory(abs(less))} {'smaller' if less > 0 else 'larger'}" if less else ""
    return f"{pace}{_largest_excess(row, best)}{room}"


def _traffic_difference(row: Ranked, best: Ranked) -> str:
    """Return the differences in traffic, for rows without a step time."""
    parts = []
    for name, mine, other in (
        ("between nodes", row.tiers.between, best.tiers.between),
        ("within a node", row.tiers.within, best.tiers.within),
    ):
        if mine != other:
            sign = "more" if mine > other else "less"
            parts.append(f"sends {format_bytes(abs(mine - other))} {sign} {name}")
    return ", ".join(parts) or "sends the same amount"


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


def _largest_excess(row: Ranked, best: Ranked) -> str:
    """Return the two parts of a step on which a row spends more than the best row does."""
    mine, other = _seconds_by_part(row), _seconds_by_part(best)
    more = {name: seconds - other.get(name, 0.0) for name, seconds in mine.items()}
    least = _LEAST * sum(other.values())
    largest = sorted((name for name in more if more[name] > least), key=lambda name: -more[name])
    largest_text = " and ".join(f"{format_seconds(more[name])} more {name}" for name in largest[:2])
    if recompute_of(row.spec) not in ("none", recompute_of(best.spec)):
        largest_text = largest_text.replace("more compute", "more compute with recomputation")
    return f", {largest_text}" if largest_text else ""


def _seconds_by_part(row: Ranked) -> dict[str, float]:
    """Return the seconds of a step by part; communication by the axes it uses."""
    assert row.step is not None, "a row that has a time"
    parts: dict[str, float] = {}
    for time in row.step.rows:
        axes = "+".join(time.key.axes)
        name = _SPENT.get(time.key.spent, f"exposed {axes} communication")
        parts[name] = parts.get(name, 0.0) + time.seconds
    return parts


# The answer of the paper's Algorithm 1, as text and as plain data.


def advice_lines(answer: Answer) -> list[str]:
    """Return Algorithm 1's answer as text: conditions with their figures, the conclusion, and
    remarks.
    """
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
    return [head, *conditions, _conclusion_line(answer), *_remark_lines(answer)]


def advice_record(answer: Answer) -> dict[str, object]:
    """Return Algorithm 1's answer as plain data, with the overrides that turn it into a spec."""
    return {
        "algorithm": "algorithm1",
        "thresholds": encode(answer.thresholds),
        "requirements": encode(answer.requirements),
        "conditions": encode(answer.tests),
        "advice": None if answer.advice is Advice.NONE else str(answer.advice),
        "overrides": list(answer.overrides),
    }


def _conclusion_line(answer: Answer) -> str:
    """Return the line of the answer: the advised degrees, or a statement that there is none."""
    if answer.advice is Advice.NONE:
        return "  no answer: line 11 returns a specification that was never set"
    tuples = " ⊗ ".join(f"{axis} {degree} ({modes})" for axis, degree, modes in answer.degrees)
    return f"  {answer.advice}: {tuples}"


def _remark_lines(answer: Answer) -> list[str]:
    """Return remarks on facts that the algorithm ignores: activations, and the effect of a second
    axis.
    """
    required = answer.requirements
    share = STATE_BYTES * required.parameters / required.devices
    share_text = format_memory(share)
    if answer.advice is Advice.NONE:
        if share < required.device_memory:
            rest = format_memory(required.device_memory - share)
            return [f"  the share of {share_text} is less than the device memory; {rest} remain"]
        return [
            f"  the share of {share_text} exceeds the device memory; more devices, fewer bytes "
            "per parameter or states on the host would help, but the algorithm considers "
            "none of them"
        ]
    if answer.advice is Advice.ADD_TENSOR:
        return [
            f"  with the same number of devices the states' share stays {share_text}, which line "
            "5 rejected: tp reduces the all-gathered parameters, not the stored states",
            "  the paper does not define how tp is combined; ZeRO-3 over the nodes is assumed here",
        ]
    return [
        "  activations are in no condition; the threshold leaves them "
        f"{format_memory((1 - answer.thresholds.states) * required.device_memory)}"
    ]


def parse_thresholds(text: str) -> Thresholds:
    """Parse thresholds such as `0.7,0.3`: shares of a device's memory for states and for a layer.

    Raises:
        SpecError: If the text is not two numbers in (0, 1].
    """
    try:
        states, layer = (float(part) for part in text.split(","))
    except ValueError:
        states = layer = 0.0
    if not (0 < states <= 1 and 0 < layer <= 1):
        raise input_error(
            "--thresholds",
            f"{text[:60]!r} is not two shares of a device's memory, for states and for a layer",
            "Use two numbers in 0..1, for example `--thresholds 0.7,0.3`.",
        )
    return Thresholds(states=states, layer=layer)
