"""The operations of a rank by operator, compared with an independent count and hand-written
figures."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import product
from typing import Any

import pytest

from ptrain.cost import Collective, Phase
from ptrain.derivation.estimate import Derivation, derive
from ptrain.derivation.work import model_work, why_unknown
from ptrain.facts.model import (
    InnerCollective,
    LayerWork,
    ModelWork,
    Operator,
    PassWork,
    WorkByKind,
)
from ptrain.spec.cluster import OperatorKind
from ptrain.spec.load import load
from ptrain.spec.placement import Axis
from ptrain.spec.precision import DType
from ptrain.spec.spec import Spec

SHAPE = {"layers": 3, "hidden": 64, "heads": 8, "ffn": 48, "vocab": 264}
MODELS = {
    "llama": {"family": "llama", "kv_heads": 4},
    "llama-mha": {"family": "llama", "kv_heads": 8, "tied": True},
    "gpt": {"family": "gpt"},
    "gpt-dropout": {"family": "gpt", "dropout": 0.1, "tied": True},
}
KEPT = {
    "R": {},
    "O": {"activations": "O"},
    "full": {"activations": "M"},
    "selective": {"activations": "M", "recompute": "selective"},
    "attention": {"activations": "M", "recompute": "attention"},
    "mixture": {"activations": {"0": "M", "1": "O", "2-": "R"}},
    "chunk": {"loss": {"chunk": 5}},
    "one-chunk": {"activations": "M", "loss": {"chunk": 1000}},
}
CUTS: dict[str, dict[str, Any]] = {
    "whole": {"mesh": {"dp_replicate": 1}},
    "tp": {"mesh": {"tp": 2}, "placement": {"tp": ["S", "S", "S", "R"]}},
    "tp-naive": {
        "mesh": {"tp": 2},
        "placement": {"tp": ["S", "S", "S", "R"]},
        "tensor": {"plan": "naive"},
    },
    "tp-sp": {"mesh": {"tp": 4}, "placement": {"tp": ["S", "S", "S", "S"]}},
    "tp-saved": {"mesh": {"tp": 2}, "placement": {"tp": ["S", "S", "S", "S*"]}},
    "tp-gathered": {
        "mesh": {"tp": 2},
        "placement": {"tp": ["S", "S", "S", "S"]},
        "tensor": {"loss_parallel": False},
    },
    "pp": {
        "mesh": {"pp": 3},
        "placement": {"pp": ["S", "S", "S", "R"]},
        "pipeline": {"schedule": "1f1b"},
    },
}


def spec_of(model: str, kept: str, cut: str, *, attention: str = "sdpa", **more: Any) -> Spec:
    mapping = {
        "name": f"{model}-{kept}-{cut}",
        "model": SHAPE | MODELS[model],
        "attention": attention,
        "precision": {"layout": "fp32"},
        "batch": {"accumulate": 3, "micro": 2, "sequence": 16},
        "optimizer": {"name": "adamw", "lr": 1e-3},
        "data": {"corpus": "synthetic", "tokenizer": "bytes"},
    }
    return load(mapping | KEPT[kept] | CUTS[cut] | more).spec


def work_of(derivation: Derivation, index: int = 0) -> ModelWork:
    work = model_work(derivation.spec, derivation.plan, derivation.facts, index)
    assert work is not None
    return work


def flops(passes: Iterable[PassWork]) -> int:
    listed = (item for one_pass in passes for item in one_pass)
    return sum(item.flops * item.times for item in listed if isinstance(item, Operator))


def with_known_work(cut: str, kept: Iterable[str]) -> list[str]:
    """Of a naive plan no table holds what a loss in chunks computes."""
    return [name for name in kept if (cut, name) != ("tp-naive", "chunk")]


def parts(work: ModelWork) -> Iterator[LayerWork]:
    yield from (work.front, *work.layers, work.behind)


def second_opinion(derivation: Derivation) -> tuple[int, int]:
    """Forward and backward operations of a step on the first rank of tp, of all stages together."""
    spec = derivation.spec
    rows = derivation.exact.operations[:: spec.degree(Axis.TP)]  # tp is within pp
    assert len(rows) == spec.degree(Axis.PP)
    return sum(row.forward for row in rows), sum(row.backward + row.again for row in rows)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("cut", CUTS)
def test_operators_have_the_operations_of_the_second_opinion(cut: str, attention: str):
    ways = KEPT if cut == "whole" else ("selective", "mixture", "chunk")
    for model, kept in product(MODELS, with_known_work(cut, ways)):
        derivation = derive(spec_of(model, kept, cut, attention=attention))
        work, times = work_of(derivation), derivation.plan.accumulate.micro_batches
        forward = times * flops(part.forward for part in parts(work))
        backward = times * flops(part.backward for part in parts(work))
        assert (forward, backward) == second_opinion(derivation), (model, kept)


def test_of_a_layer_that_is_kept_as_another_one_there_is_one_work():
    work = work_of(derive(spec_of("llama", "mixture", "whole")))
    first, second, third = work.layers
    assert first is not second and second is third  # copies between tiers are no operators
    assert work_of(derive(spec_of("llama", "mixture", "whole"))).layers[0] is first


def test_a_cut_block_awaits_its_sums_in_their_places():
    """Behind attention and behind the feed-forward part, and in backward in front of them; of a
    sequence in slices what each needs is gathered, and its sum scattered."""
    hidden = 2 * 16 * 64 * 4

    def sent(work: PassWork) -> list[tuple[Collective, int]]:
        return [
            (item.collective, item.payload)
            for item in work
            if isinstance(item, InnerCollective)
            for _ in range(item.times)
        ]

    layer, *_ = work_of(derive(spec_of("llama", "R", "tp"))).layers
    assert sent(layer.forward) == 2 * [(Collective.ALL_REDUCE, hidden)]
    assert sent(layer.backward) == 2 * [(Collective.ALL_REDUCE, hidden)]
    layer, *_ = work_of(derive(spec_of("llama", "R", "tp-sp"))).layers
    gathered, scattered = (Collective.ALL_GATHER, hidden), (Collective.REDUCE_SCATTER, hidden)
    assert sent(layer.forward) == 2 * [gathered, scattered]


@pytest.mark.parametrize("cut", [name for name in CUTS if name.startswith("tp")])
def test_collectives_within_the_passes_are_those_of_the_exact_column(cut: str):
    for model, kept in product(
        ("llama", "gpt-dropout"), with_known_work(cut, ("R", "full", "chunk"))
    ):
        derivation = derive(spec_of(model, kept, cut))
        work, times = work_of(derivation), derivation.plan.accumulate.micro_batches
        payload: dict[Collective, int] = {}
        for part in parts(work):
            for item in (*part.forward, *part.backward):
                if isinstance(item, InnerCollective):
                    more = times * item.payload * item.times
                    payload[item.collective] = payload.get(item.collective, 0) + more
        expected: dict[Collective, int] = {}
        for row in derivation.exact.traffic:
            if row.key.axes == (Axis.TP,) and row.key.phase in (Phase.FORWARD, Phase.BACKWARD):
                key = row.key.collective
                expected[key] = expected.get(key, 0) + row.payload_bytes
        assert payload == expected, (model, kept)


def test_the_dtype_is_the_models_and_wide_where_the_model_widens():
    wide, narrow = (
        work_of(derive(spec_of("llama", "R", "whole", precision={"layout": layout})))
        for layout in ("fp32", "bf16")
    )
    assert {item.dtype for item in wide.layers[0].forward if isinstance(item, Operator)} == {
        DType.FP32
    }
    products, norms = (
        {
            item.dtype
            for item in narrow.layers[0].forward
            if isinstance(item, Operator) and item.kind is kind
        }
        for kind in (OperatorKind.PRODUCT, OperatorKind.NORM)
    )
    assert products == {DType.BF16} and norms == {DType.FP32}


def test_both_halves_of_a_backward_pass_multiply_as_much_as_the_whole_one():
    work = work_of(derive(spec_of("llama", "R", "pp")))
    for part in (*work.layers, work.behind):
        assert flops([part.inputs, part.weights]) == flops([part.backward])
    assert work.front.weights == work.front.backward and not work.front.inputs


def test_unknown_operations_are_reported():
    derivation = derive(spec_of("llama", "R", "whole", loss={"chunk": 5, "fused": True}))
    of = derivation.spec, derivation.plan, derivation.facts
    assert "fused loss" in why_unknown(*of) and model_work(*of) is None
    derivation = derive(spec_of("llama", "R", "whole", attention="flex"))
    of = derivation.spec, derivation.plan, derivation.facts
    assert "no table and no trace" in why_unknown(*of) and model_work(*of) is None


def test_kinds_of_layers_are_kept_once():
    work = work_of(derive(spec_of("gpt", "mixture", "whole")))
    kept = WorkByKind.from_model(work)
    assert kept.order == (0, 1, 1) and kept.to_model == work
