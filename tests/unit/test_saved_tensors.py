"""The tensors that forward leaves for backward, as polynomials of the model's dimensions. They are
read from the traces that the committed tables are made of, operator by operator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import pytest

from ptrain.derivation.archive import TablePart
from ptrain.derivation.tables import Monomial, Setting, monomials
from ptrain.models.trace import StorageAllocated
from ptrain.spec.activations import ATTENTION_ONLY, FULL, PLAIN, SELECTIVE, ActivationMode
from ptrain.spec.model import Attention, Family, ModelShape
from ptrain.spec.precision import DType
from ptrain.timeline import Boundary, Mark
from ptrain.traces.block_tables import LAYERS, CodedTrace, trace_model, with_layers
from ptrain.traces.settings import TableWriter, settings, symbols
from tests.pure.build import ODD_SHAPE, setting
from tests.saved_tensors import saved_bytes, saved_storages
from tests.timelines import model_timeline

LLAMA_8B = ModelShape(
    family=Family.LLAMA,
    layers=32,
    hidden=4096,
    heads=32,
    kv_heads=8,
    ffn=14336,
    vocab=128256,
)
GPT = ModelShape(
    family=Family.GPT, layers=4, hidden=64, heads=4, kv_heads=4, ffn=256, vocab=97, tied=True
)
DROPPED = replace(GPT, dropout=0.1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """One tensor that forward leaves for backward: its operator, and its size."""

    part: str  # before (the blocks), block, after
    operator: str
    size: Monomial


@cache
def trace_four_layers(
    whole: Setting, kept: ActivationMode = PLAIN, attention: Attention = Attention.SDPA
) -> tuple[CodedTrace, tuple[Monomial, ...]]:
    """Return the trace of four layers whose dimensions are primes, with the monomials of sizes."""
    part = TablePart.PASSES
    own = (whole.name(part), whole.way(part))
    known = next(other for other in settings() if (other.name(part), other.way(part)) == own)
    writer = TableWriter(tuple(symbols(known)))
    trace = trace_model(with_layers(known, LAYERS, attention), writer, kept=kept)
    for storage in saved_storages(trace.recording):
        trace.size(storage.id)
    return trace, monomials(writer.table())


def saved_by_forward(whole: Setting) -> tuple[Saved, ...]:
    """Return the tensors of a model; those of a block count once per layer."""
    trace, sizes = trace_four_layers(whole)
    alive = {*saved_storages(trace.recording)}
    before, *blocks, last = [
        [
            (event.operator.removeprefix("aten::"), sizes[trace.size(event.id)])
            for event in events
            if isinstance(event, StorageAllocated) and event in alive
        ]
        for _, events in trace.split("forward")
    ]
    number = len(before) - len(blocks[0])
    ends = before[number:], last[: len(blocks[0])]
    assert all(block == blocks[0] for block in (*blocks, *ends))
    parts = {"before": before[:number], "block": blocks[0], "after": last[len(blocks[0]) :]}
    return tuple(
        Saved(part=part, operator=operator, size=size)
        for part, tensors in parts.items()
        for operator, size in tensors
    )


def saved_of_block(
    whole: Setting, kept: ActivationMode, attention: Attention
) -> Sequence[Monomial]:
    """Return the sizes that a block's forward leaves on the device."""
    trace, sizes = trace_four_layers(whole, kept, attention)
    alive, events = {*saved_storages(trace.recording)}, trace.recording.forward
    unit = trace.units.index(("blocks.0",))
    own = events[
        events.index(Boundary(Mark.ENTER, unit)) : events.index(Boundary(Mark.LEAVE, unit))
    ]
    return [sizes[trace.size(e.id)] for e in own if isinstance(e, StorageAllocated) and e in alive]


def text(size: Monomial) -> str:
    """Return `2·e·batch·sequence`, with e for the bytes of an element."""
    unit = ("e",) if size.in_elements else ()
    powers = (s if e == 1 else f"{s}^{e}" for s, e in size.exponents)
    factors = (*((str(size.coefficient),) if size.coefficient != 1 else ()), *unit, *powers)
    return "·".join(factors) or "1"


@pytest.mark.parametrize(
    "shape",
    [LLAMA_8B, *(pytest.param(shape, marks=pytest.mark.nightly) for shape in (GPT, DROPPED))],
    ids=["llama", "gpt", "dropout"],
)
def test_the_total_is_the_sum_of_the_polynomials(shape):
    whole = setting(shape, DType.BF16, sequence=4096)
    total = sum(
        term.size.bytes(whole.values, 2) * (shape.layers if term.part == "block" else 1)
        for term in saved_by_forward(whole)
    )
    assert total == saved_bytes(model_timeline(whole))


def test_a_block_of_llama_in_full_precision_saves_these_polynomials():
    """Of hidden size: two products in each norm, queries, repeated keys and values, the output of
    attention, two residual sums. Of ffn size: gate, its silu, up, their product. Each norm's scale
    and attention's log-sum-exp."""
    terms = [text(t.size) for t in saved_by_forward(setting(ODD_SHAPE)) if t.part == "block"]
    hidden = "2·e·repeats·kv_heads·pairs·batch·sequence"
    assert terms.count(hidden) == 10
    assert terms.count("e·batch·sequence·ffn") == 4
    assert terms.count("e·batch·sequence") == 2
    assert terms.count("e·repeats·kv_heads·batch·sequence") == 1
    assert len(terms) == 17


def test_without_dropout_attention_saves_nothing_quadratic_in_the_sequence():
    for shape in (ODD_SHAPE, GPT):
        assert not any("sequence^2" in text(term.size) for term in saved_by_forward(setting(shape)))
    assert any("sequence^2" in text(term.size) for term in saved_by_forward(setting(DROPPED)))


@pytest.mark.nightly
def test_one_sample_alone_saves_less_than_a_batch_counts_for_it():
    for shape in (ODD_SHAPE, GPT):
        one, two = (len(saved_by_forward(setting(shape, batch=batch))) for batch in (1, 2))
        assert 0 < one <= two


@pytest.mark.parametrize("shape", [ODD_SHAPE, pytest.param(GPT, marks=pytest.mark.nightly)])
def test_eager_attention_alone_saves_scores_unless_they_are_recomputed(shape):
    def squares(attention: Attention, kept: ActivationMode = PLAIN) -> int:
        sizes = saved_of_block(setting(shape), kept, attention)
        return sum(("sequence", 2) in size.exponents for size in sizes)

    assert squares(Attention.EAGER) > 0
    assert squares(Attention.SDPA) == 0
    assert squares(Attention.EAGER, ActivationMode(policy=ATTENTION_ONLY)) == 0


@pytest.mark.parametrize("policy", [FULL, SELECTIVE, ATTENTION_ONLY], ids=str)
def test_recomputed_blocks_save_less_than_others(policy):
    whole = setting(GPT)

    def size(kept: ActivationMode) -> int:
        sizes = saved_of_block(whole, kept, Attention.EAGER)
        return sum(own.bytes(whole.values, 4) for own in sizes)

    assert size(ActivationMode(policy=policy)) < size(PLAIN)
    assert size(ActivationMode(policy=FULL)) == whole.batch * whole.sequence * GPT.hidden * 4
