"""What a paper, a blog and the lecture say of mixtures of experts on ranks of their own. Each claim
is worked out from predicted calls, legal tuples, parameters and the rates of an H100; nothing is
run."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from _claims import Said, claim
from _paper_composition import part
from _paper_digest import exact

from ptrain.algebra.legality import require_runnable
from ptrain.axes.expert.rules import EXPERT
from ptrain.cost import PLACED, Collective, Estimate, Phase, State, Traffic
from ptrain.facts.model import Operator
from ptrain.plan.lower import built_in_facts
from ptrain.rates.measured import pace_of
from ptrain.rates.pace import Pace
from ptrain.spec.cluster import OperatorKind
from ptrain.spec.job import OptimizerSpec
from ptrain.spec.load import load
from ptrain.spec.model import ModelShape
from ptrain.spec.placement import MODES, Placement
from ptrain.spec.precision import DType
from ptrain.spec.shorthand import fault_of_experts
from ptrain.spec.spec import Spec

RANKS, TOKENS, CAPACITY = 8, 4096, 1.25
_SCALAR = 1000  # bytes: the gradient's norm takes fewer
_FORWARD, _BACKWARD = Phase.FORWARD, Phase.BACKWARD
_MIXTRAL, _DEEPSEEK = "mixtral-8x7b", "deepseek-v3-shape"


def words(
    ranks: int, *more: str, preset: str = _MIXTRAL, capacity: float | None = CAPACITY
) -> list[str]:
    """Return the arguments of a model with experts over this many ranks of ep, one sample each,
    otherwise as in ZeRO-3."""
    return [
        f"model.preset={preset}",
        f"model.capacity_factor={'null' if capacity is None else capacity}",
        f"mesh={{ep: {ranks}}}" if ranks > 1 else "mesh={}",
        "placement={ep: zero3}" if ranks > 1 else "placement={}",
        f"batch={{global: {ranks}, micro: 1, sequence: {TOKENS}}}",
        f"cluster.preset=h100-{RANKS if ranks <= RANKS else 64}",
        *more,
    ]


def predicted(ranks: int, *more: str, capacity: float | None = CAPACITY) -> Estimate:
    return exact("8b-zero3", *words(ranks, *more, capacity=capacity))


def planned(*overrides: str) -> tuple[Spec, ModelShape]:
    spec = require_runnable(load("8b-zero3", list(overrides)))
    assert isinstance(spec.model, ModelShape), "a built-in model"
    return spec, spec.model


def exchanged(estimate: Estimate) -> list[Traffic]:
    """Return the traffic of tokens over ep."""
    return [row for row in estimate.traffic if row.key.collective is Collective.ALL_TO_ALL]


def _calls(capacity: float | None) -> tuple[int, ...]:
    """Return the calls of a layer and micro-batch, forward and backward."""
    _, shape = planned(*words(RANKS, capacity=capacity))
    rows = exchanged(predicted(RANKS, capacity=capacity))
    return tuple(
        sum(row.calls for row in rows if row.key.phase is phase) // shape.layers
        for phase in (_FORWARD, _BACKWARD)
    )


def _two_exchanges() -> Said:
    fixed, free = _calls(CAPACITY), _calls(None)
    text = (
        f"{fixed[0]} forward and {fixed[1]} backward a layer and micro-batch with a capacity; "
        f"{free[0]} and {free[1]} without"
    )
    return fixed == free == (2, 2), text


def _usually_elsewhere() -> Said:
    shares = {
        ranks: sum(row.sent_bytes for row in rows) / sum(row.payload_bytes for row in rows)
        for ranks in (2, 4, RANKS)
        for rows in [exchanged(predicted(ranks))]
    }
    text = ", ".join(f"{share:.1%} on ep {ranks}" for ranks, share in shares.items())
    return all(share > 0.5 for share in shares.values()), f"{text} of all rows leave their rank"


def _only_experts() -> Said:
    """Return the collectives over ep alone in ep-dp, and their tensors."""
    rows = [row for row in exact("ep-dp").traffic if row.sent_bytes > _SCALAR]
    alone = {str(row.key.collective) for row in rows if row.key.axes == ("ep",)}
    both = sorted(
        {f"{row.key.collective} of {row.key.state}" for row in rows if len(row.key.axes) > 1}
    )
    text = (
        f"over ep alone go {' and '.join(sorted(alone))} of tokens; over dp and ep together "
        f"{' and '.join(both)}"
    )
    return alone == {str(Collective.ALL_TO_ALL)}, text


def _redundant() -> Said:
    """Return the tokens of a rank's step, and the non-expert parameters, by their placement."""
    spec, _ = planned(*words(RANKS))
    rest = sum(
        unit.numel for unit in built_in_facts(spec).units if not _is_of_experts(unit.modules)
    )
    held = {
        label: predicted(RANKS, f"placement={{ep: {modes}}}").bytes_of(State.PARAMETERS)
        for label, modes in (("copies", "ddp"), ("shards", "zero3"))
    }
    tokens = spec.batch.global_samples * TOKENS // RANKS
    text = (
        f"each of {RANKS} ranks computes {tokens:,} of {RANKS * TOKENS:,} tokens; of "
        f"{rest / 1e9:.3g}e9 parameters beside the experts a rank has a copy in "
        f"{held['copies'] / 1e9:.4g} GB of Θ, a shard in {held['shards'] / 1e9:.4g} GB"
    )
    return spec.data_degree != RANKS, text


def _is_of_experts(modules: tuple[str, ...]) -> bool:
    return any(module.rpartition(".")[2] == "experts" for module in modules)


def _rows_and_columns() -> Said:
    """Return the groups of ep-dp's grid that communicate: a row is a dp coordinate, a column an ep
    coordinate."""
    places = {("dp_replicate",): "a column", ("ep",): "a row", ("dp_replicate", "ep"): "both"}
    what = {
        (State.GRADIENTS, "both"): "gradients of all but the experts",
        (State.GRADIENTS, "a column"): "gradients of experts",
        (State.ACTIVATIONS, "a row"): "tokens",
    }
    ways: dict[str, int] = {}
    for row in exact("ep-dp").traffic:
        if row.sent_bytes > _SCALAR:
            place = places[row.key.axes]
            name = f"{what[row.key.state, place]} go over {place}"
            ways[name] = ways.get(name, 0) + row.sent_bytes
    text = ", ".join(f"{name} ({size / 1e6:.3g} MB)" for name, size in ways.items())
    return "gradients of all but the experts go over a column" in text, text


def _large_and_cheap() -> Said:
    """Return parameters, and rows of a layer's experts, for eight times as many experts."""
    figures = []
    for experts in (8, 64):
        _, shape = planned(*words(RANKS, f"model.experts={experts}"))
        spec, _ = planned(*words(RANKS, f"model.experts={experts}"))
        figures.append((built_in_facts(spec).numel, experts * shape.capacity(TOKENS)))
    (few, rows), (many, more) = figures
    text = f"{many / few:.3g}× the parameters, {more / rows:.3g}× the rows through experts"
    return many > 4 * few and more <= 1.01 * rows, text


def _more_overhead() -> Said:
    def sent(ranks: int, experts: int) -> int:
        return sum(
            row.sent_bytes for row in exchanged(predicted(ranks, f"model.experts={experts}"))
        )

    by_ranks = {ranks: sent(ranks, 64) / sent(2, 64) for ranks in (4, 8, 64)}
    by_experts = sent(RANKS, 64) / sent(RANKS, 8)
    text = ", ".join(f"{ratio:.3g}× on ep {ranks}" for ranks, ratio in by_ranks.items())
    said = f"a rank sends, of what it does on ep 2, {text}; with 64 experts {by_experts:.3g}× of 8"
    return by_experts > 1.01, said


def _more_than_products() -> Said:
    """Return the time of a layer with experts, forward and backward, for a micro-batch of one
    sample."""
    texts, shares = [], []
    for preset, ranks in ((_MIXTRAL, RANKS), (_MIXTRAL, 16), (_DEEPSEEK, 64)):
        experts = ["model.experts=16"] if ranks == 16 else []
        spec, shape = planned(*words(ranks, *experts, preset=preset))
        pace = pace_of(spec.cluster, ranks)
        assert pace is not None, "rates of an H100"
        computing = sum(3 * pace.operator_seconds(item) for item in products(spec, shape))
        moving = 4 * _exchange(spec, shape, pace, ranks, Collective.ALL_TO_ALL)
        shares.append(moving / (moving + computing))
        nodes = max(1, ranks // RANKS)
        texts.append(
            f"{preset} of {shape.experts} experts on ep {ranks}, {nodes} "
            f"node{'s' * (nodes > 1)}: {1e3 * moving:.3g} ms of exchanges beside "
            f"{1e3 * computing:.3g} ms of products"
        )
    return all(share > 0.5 for share in shares), "; ".join(texts)


def products(spec: Spec, shape: ModelShape) -> Iterator[Operator]:
    """Yield the products of a layer's forward pass on one rank, without scores: of attention's
    projections, of the places of the experts it has, and of those that all tokens go to."""
    kind, bf16, rows = OperatorKind.PRODUCT, DType.BF16, spec.batch.micro * TOKENS
    assert shape.experts is not None, "a model with experts"
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    for inner, columns, times in (
        (shape.hidden, queries, 1),
        (shape.hidden, keys, 2),
        (queries, shape.hidden, 1),
    ):
        yield Operator(kind, bf16, (1, rows, inner, columns), times=times)
    own, width = shape.experts // spec.data_degree, shape.width_of_expert
    places = spec.data_degree * spec.batch.micro * shape.capacity(TOKENS)
    yield Operator(kind, bf16, (own, places, shape.hidden, width), times=3)
    if shape.shared_experts:
        wide = shape.shared_experts * width
        yield Operator(kind, bf16, (1, rows, shape.hidden, wide), times=3)


def _exchange(
    spec: Spec, shape: ModelShape, pace: Pace, ranks: int, collective: Collective
) -> float:
    """Return the seconds in which one collective over this many ranks exchanges all places of a
    layer."""
    assert shape.experts is not None, "a model with experts"
    places = shape.experts * shape.capacity(TOKENS) * spec.batch.micro
    payload = places * shape.hidden * spec.precision.effective_layout.parameters.itemsize
    nodes = max(1, ranks // RANKS)
    return pace.collective_seconds(collective, ranks=ranks, nodes=nodes, payload=payload)


def _topology() -> Said:
    """Return the slowdown of a collective from one node to eight with equal bytes per rank."""
    many = 8 * RANKS
    spec, shape = planned(*words(many, preset=_DEEPSEEK))
    pace = pace_of(spec.cluster, many)
    assert pace is not None, "rates of an H100"
    wide, narrow = (
        {
            collective: _exchange(spec, shape, pace, ranks, collective)
            for collective in (Collective.ALL_TO_ALL, Collective.ALL_REDUCE)
        }
        for ranks in (many, RANKS)
    )
    slower = {collective: wide[collective] / narrow[collective] for collective in wide}
    text = ", ".join(f"{collective} {ratio:.2g}×" for collective, ratio in slower.items())
    right = slower[Collective.ALL_TO_ALL] > 2 * slower[Collective.ALL_REDUCE]
    return right, f"as long on eight nodes as on one: {text}"


def _extension() -> Said:
    tuples = [
        Placement(**{str(state): mode for state, mode in zip(PLACED, modes, strict=True)})
        for modes in product(MODES, repeat=len(PLACED))
    ]
    stateless = OptimizerSpec(name="sgd")
    rest = sum(not [*EXPERT.broken_rules(placement, stateless)] for placement in tuples)
    experts = sum(fault_of_experts(placement) is None for placement in tuples)
    fixed, free = (
        sorted(exact("ep", f"model.capacity_factor={factor}").assumed)
        for factor in (CAPACITY, "null")
    )
    text = (
        f"{experts} × {rest} tuples are legal; of what is predicted data decide "
        f"{', '.join(fixed) or 'nothing'} with a capacity, without one {', '.join(free)}"
    )
    return bool(fixed), text


EXPERTS = (
    claim("Conditional routing needs another framework", find=_extension),
    claim("Two all-to-alls a layer", find=_two_exchanges),
    claim("A token's experts are usually elsewhere", find=_usually_elsewhere),
    claim("Only experts are on the axis", find=_only_experts),
    claim("All but the experts is computed again on each rank", find=_redundant),
    claim("Columns sum gradients, rows route tokens", find=_rows_and_columns),
    claim("More experts, as much work", find=_large_and_cheap),
    claim("Overhead grows with experts and workers", find=_more_overhead),
    claim("All-to-all feels the topology more than all-reduce", find=_topology),
    claim("Exchanges take longer than products", find=_more_than_products),
)


def section() -> str:
    """Return the page's part about experts."""
    return part("experts", EXPERTS, tokens=TOKENS, capacity=CAPACITY)
