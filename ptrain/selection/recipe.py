"""The notes' recipe for a batch, and the lecture's procedure (fit, batch, throughput), as sentences
with the figures of one spec: why it is as it is.

gbs = mbs x grad_acc x dp. The global batch is convergence's; the micro-batch is the largest that
fits; data ranks come before accumulation, which fills the gap. Beyond some 512 data ranks the notes
see throughput fall. Axes are reached for by what they cost: ZeRO-3, then tp within a node, then pp
across nodes, then cp for sequences and ep for experts.
"""

from __future__ import annotations

from collections.abc import Iterator

from ptrain.axes.context.attention import attention_of
from ptrain.axes.pipeline.catalogue import pipeline_of, schedule_of
from ptrain.axes.pipeline.simulate import simulate
from ptrain.costs import Phase, State, busiest
from ptrain.derivation.estimate import Derivation
from ptrain.derivation.interconnect import link
from ptrain.derivation.paper import reconstruction_unit, state_sizes
from ptrain.selection.fit import Fit, fit, host_bytes, host_text, room_text
from ptrain.spec.batch import batch_lines
from ptrain.spec.cluster import Cluster
from ptrain.spec.placement import DATA_AXES, REDUCED_AXES, TOKEN_AXES, Axis, Factor, R
from ptrain.spec.spec import Spec
from ptrain.units import format_bytes

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
        return f"fit: nobody knows yet; a rank's states are {states}"
    word = {True: "fits", False: "does not fit", None: f"unknown: {memory_fit.unknown}"}
    tight = ", but is tight" if memory_fit.is_tight else ""
    host = f", {host_text(memory_fit)}" if host_text(memory_fit) else ""
    return (
        f"fit: {word[memory_fit.fits]}{tight}: peak {format_bytes(memory_fit.peak_bytes)}"
        f"{room_text(memory_fit)}{host}; a rank's states are {states}"
    )


def _batch_reason(spec: Spec) -> str:
    """Second: the global batch by data ranks before accumulation."""
    batch, ranks = spec.batch, spec.data_degree
    product = f"{batch.micro} micro × {batch.accumulate} accumulated × {ranks} data"
    if batch.accumulate == 1:
        rest = "nothing is accumulated: more data ranks would take a smaller micro-batch, or idle"
    else:
        once = batch.accumulate * ranks
        rest = f"data ranks compute at once what is else accumulated: {once} of them would do"
    return f"batch: {batch.global_samples} = {product}; {rest}"


def _throughput_reasons(derivation: Derivation) -> Iterator[str]:
    """Third: what keeps a rank from computing: the limit of data ranks, and the bubble."""
    spec = derivation.spec
    if spec.data_degree > DATA_LIMIT:
        yield (
            f"throughput: {spec.data_degree} data ranks are above some {DATA_LIMIT}, beyond which "
            "the notes see each device's throughput fall, for a ring's latency grows with them; tp "
            f"and pp take ranks off this axis{_waits(derivation, *DATA_AXES)}"
        )
    if bubble := _bubble(spec):
        yield f"throughput: {bubble}"


def _bubble(spec: Spec) -> str:
    """Return how long a pipeline waits if stages are equal; empty without one."""
    pipeline = pipeline_of(spec)
    if pipeline is None:
        return ""
    simulation = simulate(schedule_of(spec))
    return (
        f"{spec.pipeline.schedule} on {pipeline.ranks} ranks waits "
        f"{simulation.bubble_fraction:.1%} of the step with {pipeline.microbatches} micro-batches, "
        "if stages are equal"
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
    states = f"states of {format_bytes(whole)}"
    sent = _sent(derivation, *REDUCED_AXES, of_activations=False)
    over = [f"{f.axis} {f.degree}" for f in spec.factors if f.axis in _SHARDING and _cuts(f)]
    if over:
        return (
            f"1. {' × '.join(over)}, the first to reach for: of {states} a rank has "
            f"{_states(derivation)}; {sent}{_waits(derivation, *REDUCED_AXES, is_of_states=True)}"
        )
    room = spec.cluster.usable_memory if spec.cluster else 0
    if whole < room:
        usable = f"the usable {format_bytes(room)} of a device"
        return f"1. no dp_shard: {states} are below {usable}; {sent}"
    return f"1. no dp_shard, the first to reach for: it would cut {states}; {sent}"


def _states(derivation: Derivation) -> str:
    """Return what a rank has of Θ, Ω and G on its device, and of what is on a host its share."""
    exact = derivation.exact
    device = format_bytes(sum(exact.bytes_of(state) for state in _MODEL_STATES))
    hosted = host_bytes(exact, 1)
    return f"{device} and {format_bytes(hosted)} on the host" if hosted else device


def _tensor_reason(derivation: Derivation) -> str:
    cluster, ranks = derivation.spec.cluster, derivation.spec.degree(Axis.TP)
    size = 2 * reconstruction_unit(derivation.facts)
    layer = f"a layer is {format_bytes(size)} in 16 bits"
    if ranks == 1:
        share = f", {size / cluster.device_memory:.1%} of a device" if cluster else ""
        return f"2. no tp: {layer}{share}, and its sums would be on the critical path"
    return (
        f"2. tp {ranks}: {layer}, cut by {ranks}; {_sent(derivation, Axis.TP)} on the critical "
        f"path, {_where(derivation, Axis.TP, cluster)}{_waits(derivation, Axis.TP)}"
    )


def _stages_reason(derivation: Derivation) -> str:
    spec, ranks = derivation.spec, derivation.spec.degree(Axis.PP)
    if ranks == 1:
        nodes = _nodes(spec)
        over = f"{nodes} nodes are spanned by the other axes" if nodes > 1 else "one node is enough"
        return f"3. no pp: {over}, and nothing waits in a bubble"
    micro = spec.batch.accumulate
    return (
        f"3. pp {ranks}: {_sent(derivation, Axis.PP)} in sends, "
        f"{_where(derivation, Axis.PP, spec.cluster)}; {micro} micro-batches, "
        f"{micro / ranks:g} a stage{_waits(derivation, Axis.PP)}"
    )


def _context_reason(derivation: Derivation) -> Iterator[str]:
    """Why there are slices of the tokens; nothing without them."""
    spec, step = derivation.spec, derivation.plan.context
    if step is None:
        return
    yield (
        f"4. {step.axis} {spec.degree(step.axis)}, {attention_of(spec)}: of {step.sequence} tokens "
        f"of a sample a rank has {derivation.plan.tokens}; attention has "
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
    return f"{format_bytes(sent)} sent a step"


def _cuts(factor: Factor) -> bool:
    """Whether an axis cuts some of the states."""
    placement = factor.placement
    return {placement.parameters, placement.optimizer, placement.gradients} != {R}


def _waits(derivation: Derivation, *axes: Axis, is_of_states: bool = False) -> str:
    """Return how much of a step waits for what moves over the axes; empty where no rates say it.
    What moves over axes of tokens alone is attention's more than that of states."""
    step = derivation.exact.step
    if step is None:
        return ""
    names = {axis.value for axis in axes}
    waited = sum(
        seconds
        for over, seconds in step.exposed().items()
        if {*over} <= names and not (is_of_states and {*over} <= _OF_TOKENS)
    )
    return f", for which {waited / step.seconds:.1%} of the step waits"


def _where(derivation: Derivation, axis: Axis, cluster: Cluster | None) -> str:
    over = link(derivation.spec, derivation.exact.traffic, axis)
    if over is None or cluster is None:
        return "over links that nobody names"
    if over.nodes == 1:
        return f"within a node at {format_bytes(cluster.intra_node_bandwidth)}/s"
    return f"over {over.nodes} nodes at {format_bytes(cluster.inter_node_bandwidth)}/s"


def _nodes(spec: Spec) -> int:
    return -(-spec.world_size // spec.cluster.devices_per_node) if spec.cluster else 1
