"""`ptrain select` of a model without tables ranks by the model's figures."""

from __future__ import annotations

import pytest

from ptrain.derivation.estimate import derive
from ptrain.facts.model import ModelFacts
from ptrain.report.selection import as_record, selection_text
from ptrain.selection.choose import select
from ptrain.selection.job import words_of
from ptrain.spec.dials import UnitKind
from ptrain.spec.load import load
from ptrain.spec.spec import Spec
from ptrain.traces.facts import read_facts
from tests.pure.test_traced_search import TINY


def test_the_winners_figures_are_those_of_its_spec():
    reads: list[Spec] = []

    def read(spec: Spec) -> ModelFacts:
        reads.append(spec)
        return read_facts(spec)

    where = ["tp=1", "pp=1", "micro<=2"]
    selection = select(
        "qwen3-0.6b", TINY, cluster="h100-8", devices=2, where=where, count=2, read=read
    )
    best = selection.best
    # at most one trace for each policy of recomputation: none, selective and full
    assert best is not None and 1 <= len(reads) <= 3
    source, *words = words_of(selection.job, best.spec)
    spec = load(source, words).spec
    exact = derive(spec, read_facts(spec)).exact
    assert exact.step is not None
    assert exact.peak_bytes() == best.peak_bytes
    assert exact.step.seconds == pytest.approx(best.seconds, rel=1e-9)
    text = selection_text(selection)
    assert "scored as blocks of a llama with about as many parameters" in text
    record = as_record(selection)
    assert record["scored_as"] == {"family": "llama", "heads": 2, "kv_heads": 2, "ffn": 64}
    assert any(lost.best or lost.closed for lost in selection.lost)


def test_a_transformers_class_is_ranked_by_its_figures():
    pytest.importorskip("transformers")
    config = "hidden_size: 32, intermediate_size: 48, num_hidden_layers: 2, vocab_size: 261"
    words = [f"model={{hf: LlamaForCausalLM, config: {{{config}, num_attention_heads: 2}}}}"]
    words += ["batch.sequence=16", "precision.layout=zero16"]
    words += ["batch.global=8", "batch.micro=auto", "mesh.dp_shard=auto", "placement=auto"]
    selection = select("zero3", words, cluster="h100-8", devices=2, count=2, read=read_facts)
    best = selection.best
    assert best is not None and best.spec.model.hf == "LlamaForCausalLM"
    source, *more = words_of(selection.job, best.spec)
    spec = load(source, more).spec
    exact = derive(spec, read_facts(spec)).exact
    assert exact.peak_bytes() == best.peak_bytes
    assert exact.step is not None
    assert exact.step.seconds == pytest.approx(best.seconds, rel=1e-9)


def test_units_without_tables_are_ranked_by_traces():
    words = ["unit=ends", "model.layers=2", "model.hidden=32", "model.ffn=64", "model.head_dim=16"]
    words += ["model.heads=2", "model.kv_heads=2", "batch={global: 8, sequence: 16}"]
    where = ["tp=1", "pp=1", "micro=1", "recompute=none"]
    selection = select(
        "llama-tiny", words, cluster="h100-8", devices=2, where=where, count=2, read=read_facts
    )
    best = selection.best
    assert best is not None and best.spec.unit_size.kind is UnitKind.ENDS
    exact = derive(best.spec, read_facts(best.spec)).exact
    assert exact.peak_bytes() == best.peak_bytes


def test_a_peak_without_a_capacity_is_ranked_with_the_routing_that_it_assumes():
    words = ["mesh.ep=auto", "model.capacity_factor=null"]
    ranking = select("ep", words, devices=2, where=["ep=2"], count=2)
    assert ranking.best is not None and ranking.best.memory.fits
    assert "spread evenly over the experts" in ranking.best.assumed
    assert "peaks with ep are predicted for tokens that" in selection_text(ranking)
