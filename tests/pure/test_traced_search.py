"""A search over a model without tables: its substitute, and the traces it requests."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ptrain.errors import SpecError, input_error
from ptrain.facts.model import LayerWork, ModelFacts, ModelWork, Operator, TensorFacts, UnitFacts
from ptrain.plan.lower import built_in_facts
from ptrain.selection.choose import Chooser, select
from ptrain.selection.deriver import TracedCuts
from ptrain.selection.job import block_size, dense, searched_job, stand_in, with_heads
from ptrain.spec.cluster import OperatorKind
from ptrain.spec.load import load
from ptrain.spec.model import ModelShape
from ptrain.spec.names import list_files
from ptrain.spec.precision import DType
from ptrain.spec.spec import Spec

TINY = (
    *("model.layers=2", "model.hidden=32", "model.heads=4", "model.kv_heads=2", "model.ffn=48"),
    *("model.head_dim=16", "model.vocab=261", "batch.sequence=16", "batch.global=8"),
)


def shapes() -> dict[str, ModelShape]:
    """The presets that no table tells of."""
    models = {
        name: load("zero3", [f"model={{preset: {name}}}"]).spec.model
        for name in list_files("models")
    }
    return {
        name: model
        for name, model in models.items()
        if isinstance(model, ModelShape) and model.tabulated is None
    }


def test_the_substitute_of_a_preset_has_tables_and_equal_parameters_per_block():
    assert len(shapes()) > 10
    for name, shape in shapes().items():
        like = stand_in(shape)
        assert like.tabulated is not None, name
        assert block_size(like) == pytest.approx(block_size(dense(shape)), rel=0.01), name
        assert (like.layers, like.hidden, like.vocab) == (shape.layers, shape.hidden, shape.vocab)


def test_tp_shards_the_substitute_of_qwen_like_qwens_blocks():
    """5120 features are 40 heads of 128; qwen's 64 heads are 8192."""
    shape = shapes()["qwen3-32b"]
    like = stand_in(shape)
    assert (like.heads, like.kv_heads, like.head_dim) == (40, 8, 128)
    assert like.ffn > shape.ffn


def test_attention_of_the_substitute_has_the_models_heads():
    """Of 32k tokens the scores of 64 heads are half of qwen3-32b's operations, and 40 are 1.6 times
    less; cut in two on tp each rank has half of them."""
    shape = shapes()["qwen3-32b"]
    like = stand_in(shape)
    product = Operator(OperatorKind.PRODUCT, DType.BF16, (8, 8, 8))
    attention = Operator(OperatorKind.ATTENTION, DType.BF16, (1, 20, 32768, 32768, 128))
    layer = LayerWork(forward=(product, attention), backward=(attention, product))
    work = ModelWork(front=layer, layers=(layer,), behind=layer)
    cut = attention._replace(dimensions=(1, 32, 32768, 32768, 128))
    changed = with_heads(work, shape, like)
    assert changed.layers == (LayerWork(forward=(product, cut), backward=(cut, product)),)
    assert (changed.front, changed.behind) == (layer, layer)


def test_a_model_with_tables_is_scored_directly():
    job = searched_job("llama3-8b", cluster="h100-8")
    assert job.stand_in is None and job.scored is job.base


# -- models that are not built in

OWN = "{target: 'somewhere:build'}"


def facts_of_own(layers: int, hidden: int, vocab: int, block: int) -> ModelFacts:
    """Blocks of one matrix each, and an embedding that is tied to the head."""
    tensors = [(f"blocks.{at}", (block // hidden, hidden)) for at in range(layers)]
    units = [
        UnitFacts(modules=(name,), tensors=(TensorFacts(name=f"{name}.w", shape=shape),))
        for name, shape in tensors
    ]
    root = UnitFacts(modules=("",), tensors=(TensorFacts(name="table", shape=(vocab, hidden)),))
    return ModelFacts(units=(*units, root), blocks=tuple(name for name, _ in tensors))


def test_a_llama_with_equal_blocks_substitutes_a_users_model():
    read: list[Spec] = []

    def facts(spec: Spec) -> ModelFacts:
        read.append(spec)
        return facts_of_own(layers=6, hidden=256, vocab=1000, block=256 * 4096)

    words = [f"model={OWN}", "mesh=auto", "placement=auto", "batch.micro=auto", "batch.global=64"]
    job = searched_job("zero3", words, cluster="h100-8", read=facts)
    like = job.stand_in
    assert len(read) == 1 and read[0].world_size == 1
    assert like is not None and like.tabulated is not None
    assert (like.layers, like.hidden, like.vocab) == (6, 256, 1000)
    step = block_size(replace(like, ffn=like.ffn + 64)) - block_size(like)
    assert abs(block_size(like) - 256 * 4096) <= step / 2
    assert job.base.model.target == "somewhere:build" and job.sized.model == like


def test_a_model_without_repeated_blocks_is_rejected_with_the_key_that_names_them():
    facts = replace(facts_of_own(layers=1, hidden=8, vocab=9, block=64), blocks=())
    words = [f"model={OWN}", "mesh=auto", "batch.global=64"]
    with pytest.raises(SpecError, match="repeated blocks") as raised:
        searched_job("zero3", words, cluster="h100-8", read=lambda spec: facts)
    assert "model.blocks" in str(raised.value)


# -- cuts


def spec_of(*words: str) -> Spec:
    return load("zero3", words).spec


def cuts(reads: list[Spec], most: int = 1) -> TracedCuts:
    def read(spec: Spec) -> ModelFacts:
        reads.append(spec)
        return built_in_facts(spec)

    return TracedCuts(read, most=most)


def test_specs_that_differ_on_the_data_axes_are_one_cut_which_is_read_once():
    reads: list[Spec] = []
    traced = cuts(reads)
    assert traced.of(spec_of()) is traced.of(spec_of("mesh.dp_shard=4"))
    assert len(reads) == 1
    other = traced.cut(spec_of("batch.micro=1"))
    assert not traced.may_fit(other, 0.0), "another cut is one too many"


def test_the_excess_of_sharding_over_its_closed_form_is_subtracted_from_the_budget():
    spec = spec_of()
    room = 1e9
    traced = replace(cuts([]), room=room)
    traced.of(spec)
    cut = traced.cut(spec)
    assert traced.may_fit(cut, room)
    traced.excess[cut] = 3_000_000 - 1e6
    assert traced.may_fit(cut, room - 2e6) and not traced.may_fit(cut, room - 1e6)


def test_sharding_that_cannot_be_traced_is_excluded():
    traced = cuts([], most=2)
    cut, other = traced.cut(spec_of()), traced.cut(spec_of("batch.micro=1"))
    traced.refusals[cut] = input_error("mesh.tp", "its heads")
    assert not traced.may_fit(cut, 0.0) and traced.may_fit(other, 0.0)


def test_where_nothing_can_be_traced_the_reason_is_the_answer():
    def read(spec: Spec) -> ModelFacts:
        raise input_error("torch", "is not installed")

    where = ["tp=1", "pp=1", "micro=1"]
    with pytest.raises(SpecError, match="is not installed"):
        select("qwen3-0.6b", TINY, cluster="h100-8", devices=2, where=where, read=read)


def test_a_cut_that_may_not_fit_by_another_is_tried_when_a_third_is_closer_to_its_estimate():
    job = searched_job("qwen3-0.6b", TINY, cluster="h100-8", devices=2)
    chooser = Chooser(job, count=9, read=built_in_facts)
    traced, room = chooser.cuts, job.room
    assert traced is not None
    by_cut = {
        traced.cut(scored.candidate.spec(job.base)): scored
        for scored in chooser.search.run(job.where).best
    }
    far, large, near = (
        replace(scored, peak=peak)
        for scored, peak in zip(by_cut.values(), (0.5 * room, 0.9 * room, 0.1 * room), strict=False)
    )
    tried = chooser._tried([far, large, near], 9, lambda: False)
    assert next(tried) == far
    traced.excess[traced.cut(far.candidate.spec(job.base))] = 0.2 * room
    assert next(tried) == near
    traced.excess[traced.cut(near.candidate.spec(job.base))] = 0.0
    assert list(tried) == [large]


def test_an_incomplete_trace_key_is_detected():
    traced = cuts([])
    assert traced.cut(spec_of()) == traced.cut(spec_of("mesh.dp_shard=4"))
    with pytest.raises(AssertionError, match="is in the key"):
        traced.cut(spec_of("model.ffn=64"))
