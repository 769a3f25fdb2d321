"""The context axis' closed forms against what the derivation sends, and its balance of work against
scores that are counted one by one."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from fractions import Fraction
from itertools import product
from random import Random

import pytest

from ptrain.axes.context.attention import (
    all_spans,
    blocks_of,
    computed_scores,
    context_of,
    relative_scores,
)
from ptrain.axes.context.cost import attention_traffic
from ptrain.axes.context.draw import balance_text
from ptrain.cost import Collective, Phase
from ptrain.facts.model import ModelFacts
from ptrain.plan.lower import lower
from ptrain.spec.activations import ActivationMode, Operators, Policy
from ptrain.spec.batch import ContextAttention, ContextSpec, Hybrid
from ptrain.spec.model import ExternalModel, Family, ModelShape
from ptrain.spec.placement import Axis, Tier
from ptrain.spec.precision import LAYOUTS
from ptrain.spec.spec import Spec
from tests.oracles.context import (
    document_traffic,
    gathered_bytes,
    keys_and_values,
    layer_exchange,
    queries,
    slowest,
    tokens,
)
from tests.pure.build import make_spec, tuple_of

ATTENTIONS = (*ContextAttention, Hybrid(ulysses=2, ring=2), Hybrid(ulysses=2, ring=3))
PLAIN = ActivationMode(policy=None, tier=Tier.DEVICE)
AGAIN = ActivationMode(policy=Policy(), tier=Tier.DEVICE)
ARRIVED = ActivationMode(policy=Policy(keep=(Operators.COLLECTIVE,)), tier=Tier.DEVICE)


def random_shapes(attention, ranks: int, tp: int, layout: str) -> Spec:
    """Yield shapes whose heads and tokens the ranks divide."""
    draw = Random(f"{attention} {ranks} {tp} {layout}")
    kv_heads = tp * draw.choice((1, 2, 3, 4))  # which Ulysses repeats where it does not divide them
    heads = kv_heads * ranks * draw.choice((1, 3))
    shape = ModelShape(
        family=Family.LLAMA, layers=3, hidden=heads * draw.choice((4, 8)), heads=heads,
        kv_heads=kv_heads, ffn=tp * 20, vocab=tp * 130,
    )  # fmt: skip
    modes = "R,R,R,S*" if attention is ContextAttention.ALL_GATHER else "R,R,R,S"
    mesh = {Axis.CP: (ranks, tuple_of(modes))}
    if tp > 1:
        mesh[Axis.TP] = tp, tuple_of("S,S,S,R")
    spec = make_spec(
        mesh, model=shape, layout=LAYOUTS[layout], accumulate=draw.choice((1, 3)),
        micro=draw.choice((1, 2)), sequence=2 * ranks * draw.choice((3, 8)),
    )  # fmt: skip
    return replace(spec, context=ContextSpec(attention=attention))


def settings():
    for attention, tp, layout in product(ATTENTIONS, (1, 2), ("fp32", "bf16", "zero16")):
        several = [attention.ulysses * attention.ring] if isinstance(attention, Hybrid) else [2, 4]
        for ranks in several:
            yield random_shapes(attention, ranks, tp, layout)


FACTS = ModelFacts.of_units((("blocks.0",), ("blocks.1",), ("blocks.2",), ("",)))


@pytest.mark.parametrize(
    "kept",
    [(PLAIN,) * 3, (PLAIN, AGAIN, AGAIN), (ARRIVED, AGAIN, ARRIVED)],
    ids=["plain", "again", "again but for what arrived"],
)
def test_traffic_is_a_layers_exchange_times_layers_and_micro_batches(kept):
    for spec in settings():
        plan = lower(spec, FACTS)
        layer = layer_exchange(spec, plan.context)
        expected: Counter[tuple[Collective, Phase]] = Counter()
        calls: Counter[tuple[Collective, Phase]] = Counter()
        for (collective, phase), (number, size) in layer.items():
            for when, layers in ((phase, 3), (Phase.BACKWARD, _again(phase, kept))):
                expected[collective, when] += layers * spec.batch.accumulate * size
                calls[collective, when] += layers * spec.batch.accumulate * number
        counted: Counter[tuple[Collective, Phase]] = Counter()
        counted_calls: Counter[tuple[Collective, Phase]] = Counter()
        for row in attention_traffic(spec, plan, kept):
            assert row.key.axes == ("cp",)
            counted[row.key.collective, row.key.phase] += row.sent_bytes
            counted_calls[row.key.collective, row.key.phase] += row.calls
        assert +counted == +expected and +counted_calls == +calls, spec.context


def test_document_starts_are_gathered_once_per_micro_batch():
    for spec in settings():
        packed = replace(spec, model=replace(spec.model, document_start=1))
        plain, more = (
            Counter(attention_traffic(of, lower(of, FACTS), (PLAIN, AGAIN, PLAIN)))
            for of in (spec, packed)
        )
        ((row, number),) = (more - plain).items()
        assert number == 1 and not plain - more
        assert (row.key.collective, row.key.phase) == (Collective.ALL_GATHER, Phase.FORWARD)
        assert (row.calls, row.sent_bytes) == document_traffic(packed, context_of(packed)), (
            spec.context
        )


def _again(phase: Phase, kept: tuple[ActivationMode, ...]) -> int:
    """Layers that are computed again in backward, of what is sent in forward."""
    return kept.count(AGAIN) if phase is Phase.FORWARD else 0


def spec_of(attention, ranks: int, sequence: int, *, kv_heads: int = 2, layout: str = "bf16"):
    shape = ModelShape(
        family=Family.LLAMA, layers=3, hidden=64, heads=8, kv_heads=kv_heads, ffn=20, vocab=260
    )
    modes = "R,R,R,S*" if attention is ContextAttention.ALL_GATHER else "R,R,R,S"
    spec = make_spec({Axis.CP: (ranks, tuple_of(modes))}, model=shape, layout=LAYOUTS[layout],
                     micro=1, sequence=sequence)  # fmt: skip
    return replace(spec, context=ContextSpec(attention=attention))


def traffic_in_kappa(attention, ranks: int, **options) -> tuple[Fraction, Fraction]:
    """Return a rank's traffic in forward and in backward, in units of kappa."""
    spec = spec_of(attention, ranks, 64, **options)
    step = context_of(spec)
    kappa = keys_and_values(spec, spec.model, step)
    layer = layer_exchange(spec, step)
    forward, backward = (
        sum(size for (_, when), (_, size) in layer.items() if when is phase)
        for phase in (Phase.FORWARD, Phase.BACKWARD)
    )
    return Fraction(forward, kappa), Fraction(backward, kappa)


def test_figures_are_those_that_kernel_counters_gave_on_four_ranks():
    # measured: 3.01 / 7.02 in fp32, 3.08 / 11.19 in bf16, 1.51 / 1.51 with as many heads of keys
    assert traffic_in_kappa(ContextAttention.RING, 4, layout="fp32") == (3, 7)
    assert traffic_in_kappa(ContextAttention.ZIGZAG, 4) == (3, 11)
    assert traffic_in_kappa(ContextAttention.ALL_GATHER, 4) == (3, 3)
    assert traffic_in_kappa(ContextAttention.ULYSSES, 4, kv_heads=8) == (Fraction(3, 2),) * 2


def test_a_hybrid_sends_like_ulysses_plus_a_shorter_ring():
    spec = spec_of(Hybrid(ulysses=2, ring=2), 4, 64, layout="fp32")
    step = context_of(spec)
    theta, kappa = (f(spec, spec.model, step) for f in (queries, keys_and_values))
    layer = layer_exchange(spec, step)
    exchange = (2 * theta + kappa) // 2
    assert layer[Collective.ALL_TO_ALL, Phase.FORWARD] == (4 + 1, exchange + kappa)
    assert layer[Collective.ALL_TO_ALL, Phase.BACKWARD] == (4 + 3, exchange + 3 * kappa)


def test_gathered_keys_and_values_are_kept_and_those_of_a_ring_are_not():
    spec = spec_of(ContextAttention.ALL_GATHER, 4, 64)
    step = context_of(spec)
    assert gathered_bytes(spec, spec.model, step) == 4 * keys_and_values(spec, spec.model, step)
    ring = spec_of(ContextAttention.RING, 4, 64)
    assert gathered_bytes(ring, ring.model, context_of(ring)) == 0


def test_ulysses_sends_keys_as_often_as_ranks_need_them():
    few, many = (spec_of(ContextAttention.ULYSSES, 4, 64, kv_heads=heads) for heads in (2, 4))
    assert layer_exchange(few, context_of(few)) == layer_exchange(many, context_of(many))
    ring = (spec_of(ContextAttention.RING, 4, 64, kv_heads=heads) for heads in (2, 4))
    once, twice = (keys_and_values(each, each.model, context_of(each)) for each in ring)
    assert twice == 2 * once


def test_of_another_model_nothing_is_known():
    spec = replace(spec_of(ContextAttention.RING, 2, 64), model=ExternalModel(target="a:b"))
    assert layer_exchange(spec, context_of(spec)) is None


@pytest.mark.parametrize("attention", ATTENTIONS, ids=str)
@pytest.mark.parametrize("sequence", [24, 48, 96])
def test_the_balance_of_work_is_that_of_scores_counted_one_by_one(attention, sequence):
    ranks = attention.ulysses * attention.ring if isinstance(attention, Hybrid) else 4
    step = context_of(spec_of(attention, ranks, sequence))
    own = [[token for span in spans for token in range(*span)] for spans in all_spans(step)]
    assert {*map(len, own)} == {tokens(step)}
    counts = [sum(token + 1 for token in its) for its in own]
    # the ranks of a Ulysses group have all tokens of the group, of some of the heads
    scores = [sum(counts[at : at + step.ulysses]) for at in range(0, ranks, step.ulysses)]
    mean = Fraction(sequence * (sequence + 1), 2 * step.ring)
    assert Fraction(max(scores)) / mean == slowest(step)
    assert sum(scores) == sequence * (sequence + 1) // 2
    of_rank = [score for score in scores for _ in range(step.ulysses)]
    assert relative_scores(step) == tuple(float(score / mean) for score in of_rank)


def test_contiguous_slices_of_long_sequences_leave_the_last_rank_nearly_twice_the_work():
    step = context_of(spec_of(ContextAttention.RING, 8, 2**20))
    assert float(slowest(step)) == pytest.approx(15 / 8, rel=1e-5)
    assert "cp 7 computes 1.87 times the mean number of scores, cp 0 0.125 times" in balance_text(
        step
    )


@pytest.mark.parametrize("attention", ATTENTIONS, ids=str)
def test_blocks_that_are_met_have_every_score_of_the_causal_mask_once(attention):
    ranks = attention.ulysses * attention.ring if isinstance(attention, Hybrid) else 4
    step = context_of(spec_of(attention, ranks, 48))
    scores = [
        (query, key)
        for place in range(step.ring)
        for block in blocks_of(step, place)
        for query, key in product(range(*block.queries), range(*block.keys))
        if key <= query or not block.is_causal
    ]
    assert sorted(scores) == [(query, key) for query in range(48) for key in range(query + 1)]


def test_a_contiguous_ring_multiplies_one_block_more_at_each_place():
    step = context_of(spec_of(ContextAttention.RING, 4, 32))
    assert computed_scores(step) == (64, 128, 192, 256)
    assert computed_scores(
        context_of(spec_of(ContextAttention.ALL_GATHER, 4, 32))
    ) == computed_scores(step)


def test_an_early_and_a_late_chunk_multiply_half_a_block_at_every_hop():
    step = context_of(spec_of(ContextAttention.ZIGZAG, 4, 32))
    assert computed_scores(step) == (64 + 3 * 32,) * 4


def test_ulysses_multiplies_all_tokens_of_a_part_of_the_heads():
    step = context_of(spec_of(ContextAttention.ULYSSES, 4, 32, kv_heads=4))
    assert computed_scores(step) == (32 * 32 // 4,) * 4
    assert balance_text(step) == (
        "all ranks of cp compute the same number of causal attention scores"
    )
