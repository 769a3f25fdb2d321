"""Identical layers: facts of a few executed layers equal the facts of all."""

from __future__ import annotations

import pytest

from ptrain.facts.model import ModelFacts
from ptrain.spec.load import load
from ptrain.spec.spec import Spec
from ptrain.traces import rank_part, tensor_parts
from ptrain.traces.facts import facts_of
from tests.forked import nothing, patch_processes

nightly = pytest.mark.nightly

# An odd number of tokens, or a norm of its own, has no table: such a model is traced.
MODEL = (
    "model={family: llama, layers: 7, hidden: 32, heads: 4, kv_heads: 2, ffn: 48, vocab: 64, "
    "qk_norm: true}"
)
EXPERTS = (
    "model={family: llama, layers: 7, hidden: 32, heads: 4, kv_heads: 2, ffn: 48, vocab: 64, "
    "experts: 4, experts_per_token: 2, shared_experts: 1}"
)
OVER_EXPERTS = ("mesh={dp_shard: 1, ep: 2}", "placement={dp_shard: zero3, ep: zero3}")
OVER_BOTH = ("mesh={cp: 2, tp: 2}", "placement={cp: [S*, S, S, S], tp: tp-sp}")


def spec_of(strategy: str, *changes: str) -> Spec:
    batch = "batch={global: 16, micro: 1, sequence: 16}"
    return load(strategy, [MODEL, batch, "device=cpu", *changes]).spec


def with_all_layers(spec: Spec, monkeypatch: pytest.MonkeyPatch) -> ModelFacts:
    """Facts of which every layer has run, here and in the processes that play the ranks."""
    monkeypatch.setattr(rank_part, "block_kinds", nothing)
    monkeypatch.setattr(tensor_parts, "Popen", patch_processes(rank_part__block_kinds=nothing))
    monkeypatch.setattr(tensor_parts, "_played_here", lambda request: [])
    tensor_parts._request_answers.cache_clear()
    return facts_of(spec)


@pytest.mark.parametrize(
    ("strategy", "changes"),
    [
        ("zero3", ()),
        ("zero3", ("activations=M", "recompute=selective", "loss.chunk=8")),
        ("zero3", ("unit=sub-block", "activations=M")),
        ("pp-1f1b", ("model.layers=13", "activations=M")),
        pytest.param("pp-1f1b", ("model.layers=13", "model.tied=true"), marks=nightly),
        pytest.param(
            "pp-1f1b",
            ("mesh.pp=4", "model.layers=11", "pipeline.schedule=zero-bubble"),
            marks=nightly,
        ),
        pytest.param("pp-1f1b", ("mesh.pp=4", "model.layers=9", "activations=O"), marks=nightly),
        pytest.param(
            "pp-1f1b",
            (
                *(EXPERTS, "model.layers=10", "model.dense_layers=1"),
                *("pipeline={schedule: dualpipev}", "batch.global=32"),
                *("mesh={pp: 2, ep: 2}", "placement={pp: pp-1f1b, ep: zero3}"),
            ),
            marks=nightly,
        ),
        pytest.param("fsdp-mixed", (*OVER_BOTH, "activations=M", "recompute=full"), marks=nightly),
        ("zero3", (EXPERTS, "model.capacity_factor=1.5")),
        ("zero3", (EXPERTS, *OVER_EXPERTS, "activations=M", "model.dense_layers=1")),
        pytest.param("zero3", (EXPERTS, "precision.compute=fp64"), marks=nightly),
        pytest.param(
            "pp-1f1b",
            (
                *(EXPERTS, "model.layers=14", "model.dense_layers=1"),
                *("mesh={pp: 2, ep: 2}", "placement={pp: pp-1f1b, ep: zero3}"),
            ),
            marks=nightly,
        ),
        pytest.param("fsdp-mixed", (*OVER_BOTH, "context.attention=ulysses"), marks=nightly),
        pytest.param(
            "pp-1f1b",
            (
                "model.layers=26",
                "mesh={pp: 4, cp: 2, tp: 2}",
                "placement={pp: pp-1f1b, cp: [S*, S, S, S], tp: tp-saved}",
                "activations=M",
            ),
            marks=nightly,
        ),
    ],
)
def test_a_few_layers_determine_all_identical_ones(
    strategy: str, changes: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = spec_of(strategy, *changes)
    few = facts_of(spec)
    assert few.timeline is not None and few.work is not None
    whole = with_all_layers(spec, monkeypatch)
    for name in ModelFacts.__dataclass_fields__:
        assert getattr(few, name) == getattr(whole, name), name
