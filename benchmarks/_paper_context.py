"""What a blog and the lecture say of sequences that are cut over ranks. Each claim is worked out
from the blocks of scores that ranks meet, from predicted calls and from the rates of an H100;
nothing is run."""

from __future__ import annotations

from functools import partial

from _claims import Said, claim
from _paper_composition import part
from _paper_digest import exact
from _paper_seconds import HIDDEN

from ptrain.algebra.legality import require_runnable
from ptrain.axes.context.attention import blocks_of, context_of, relative_scores
from ptrain.cost import Collective, Phase, State
from ptrain.derivation.clock import messages_of
from ptrain.facts.model import InnerCollective, Operator
from ptrain.rates.measured import pace_of
from ptrain.rates.pace import Pace
from ptrain.spec.cluster import OperatorKind
from ptrain.spec.load import load
from ptrain.spec.model import ModelShape
from ptrain.spec.precision import DType
from ptrain.spec.spec import Spec
from ptrain.steps.step import ContextParallel
from tests.oracles.context import keys_and_values

RANKS, TOKENS = 8, 131_072
_FORWARD, _BACKWARD = Phase.FORWARD, Phase.BACKWARD


def words(attention: str, tokens: int = TOKENS, states: str = "R,R,R") -> tuple[str, ...]:
    """Return the arguments of the 8B model on a node with its sequence sharded over all ranks."""
    return (
        f"mesh={{cp: {RANKS}}}",
        f"placement={{cp: '{states},S'}}",
        f"context.attention={attention}",
        "batch.global=1",
        f"batch.sequence={tokens}",
    )


def planned(*overrides: str) -> tuple[Spec, ContextParallel]:
    spec = require_runnable(load("8b-zero3", overrides))
    step = context_of(spec)
    assert step is not None, "the sequence is cut"
    return spec, step


def _steps() -> Said:
    spec, step = planned(*words("ring"))
    assert isinstance(spec.model, ModelShape), "a built-in model"
    hops = {
        phase: sum(
            row.calls
            for row in exact("8b-zero3", *words("ring")).traffic
            if row.key.collective is Collective.ALL_TO_ALL and row.key.phase is phase
        )
        // spec.model.layers
        for phase in (_FORWARD, _BACKWARD)
    }
    blocks = [len([*blocks_of(step, place)]) for place in range(RANKS)]
    text = (
        f"{min(blocks)} … {max(blocks)} products; {hops[_FORWARD]} hops forward, "
        f"{hops[_BACKWARD]} backward a layer on cp {RANKS}"
    )
    return hops == dict.fromkeys(hops, RANKS - 1), text


def _hidden() -> Said:
    texts, shares = [], []
    for tokens in (1024, TOKENS // RANKS):
        product, hops = _block_and_hop(tokens)
        shares += [waited / moving for moving, waited in hops.values()]
        ways = ", ".join(f"{1e3 * moving:.2g} ms {where}" for where, (moving, _) in hops.items())
        texts.append(f"{tokens:,} tokens a rank: {1e3 * product:.2g} ms a block, a hop {ways}")
    return all(share < HIDDEN for share in shares), "; ".join(texts)


def _block_and_hop(tokens: int) -> tuple[float, dict[str, tuple[float, float]]]:
    """Return the seconds of a full block of this many queries and keys and, by the location of the
    next rank, the transfer and the exposed time of an overlapped forward hop."""
    spec, step = planned(*words("ring", RANKS * tokens))
    shape, pace = spec.model, pace_of(spec.cluster, RANKS)
    assert isinstance(shape, ModelShape) and pace is not None, "rates of an H100"
    hop = InnerCollective(
        Collective.SEND, keys_and_values(spec, shape, step), axis=str(step.axis), beside=1
    )
    sizes = spec.batch.micro, shape.heads, tokens, tokens, shape.head_dim
    product = Operator(OperatorKind.ATTENTION, DType.BF16, sizes, is_whole=True)

    def on(nodes: int, item: InnerCollective, pace: Pace = pace) -> float:
        return pace.collective_seconds(item.collective, ranks=2, nodes=nodes, payload=item.payload)

    hops = {}
    for nodes, where in ((1, "in a node"), (2, "between nodes")):
        played = messages_of((hop, product), pace.operator_seconds, partial(on, nodes))
        ((_, message),) = played
        hops[where] = message.moving, message.waited
    return pace.operator_seconds(product), hops


def _uneven() -> Said:
    of_ring, of_zigzag = (relative_scores(planned(*words(name))[1]) for name in ("ring", "zigzag"))
    text = (
        f"scores over their mean: contiguous {float(min(of_ring)):.3g} on the first rank to "
        f"{float(max(of_ring)):.4g} on the last, zigzag {float(max(of_zigzag)):.4g} on all"
    )
    is_even = min(of_zigzag) == max(of_zigzag)
    return of_ring == tuple(sorted(of_ring)) and of_ring[0] < of_ring[-1] and is_even, text


def _summed() -> Said:
    estimate = exact("8b-zero3", *words("zigzag"))
    rows = [row for row in estimate.traffic if row.key.state is State.GRADIENTS]
    reduced = [row for row in rows if row.key.phase is _BACKWARD]
    size = sum(row.payload_bytes for row in reduced)
    gradients = estimate.bytes_of(State.GRADIENTS)
    names = {f"{row.key.collective} over {'+'.join(row.key.axes)}" for row in reduced}
    cut = exact("8b-zero3", *words("zigzag", states="S*,S,S"))
    others = {
        f"{row.key.collective} over {'+'.join(row.key.axes)}"
        for row in cut.traffic
        if row.key.state is State.GRADIENTS and row.key.phase is _BACKWARD
    }
    text = (
        f"{size / 1e9:.4g} GB by {', '.join(sorted(names))}; where cp shards Θ by "
        f"{', '.join(sorted(others))}"
    )
    return size == gradients and names == {"all_reduce over cp"}, text


CONTEXT = (
    claim("A ring takes N − 1 steps", find=_steps),
    claim("Hops are hidden by attention", find=_hidden),
    claim("Zigzag balances what contiguous slices do not", find=_uneven),
    claim("Gradients are all-reduced over cp", find=_summed),
)


def section() -> str:
    """Return the page's part about long sequences."""
    return part("context", CONTEXT, tokens=TOKENS, ranks=RANKS)
