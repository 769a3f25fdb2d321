"""The bytes of quantized weights, and the placements that do not execute them."""

from __future__ import annotations

import pytest

import ptrain
from ptrain import installed
from ptrain.algebra.legality import find_unsupported
from ptrain.cost import State
from ptrain.derivation.estimate import token_operations
from ptrain.facts.parameters import count_weights
from ptrain.plan.lower import built_in_facts
from ptrain.spec.precision import Quantization
from ptrain.spec.spec import Spec

LORA = "model={preset: llama3-8b, lora_rank: 16}"
NF4 = "frozen.dtype=nf4"


def loaded(strategy: str, *words: str) -> Spec:
    return ptrain.load(strategy, words).spec


@pytest.mark.parametrize(
    ("kind", "columns", "size"),
    [
        (Quantization.NF4, 4096, 4096 // 2 + 64 * 4),
        (Quantization.NF4, 65, 2 * 32 + 2 * 4),  # padded to two blocks
        (Quantization.INT8, 4096, 4096 + 4),
    ],
)
def test_a_row_has_its_codes_and_its_scales(kind: Quantization, columns: int, size: int) -> None:
    assert kind.row_bytes(columns) == size


def test_a_base_in_nf4_takes_4_5_bits_per_weight_and_the_rest_keeps_its_dtype() -> None:
    spec = loaded("zero3", LORA, NF4, "precision.layout=bf16", "mesh.dp_shard=8")
    facts = built_in_facts(spec)
    hidden, ffn, kv, vocab, layers = 4096, 14336, 1024, 128256, 32
    linear = 2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * ffn
    widths = 4 * 2 * hidden + 2 * (hidden + kv - 2 * hidden) + 3 * (hidden + ffn)
    adapters = layers * 16 * widths
    others = 2 * vocab * hidden + (2 * layers + 1) * hidden
    assert count_weights(facts) == layers * linear + adapters + others
    assert facts.trained_numel == adapters
    assert facts.quantized_numel == layers * linear * 9 // 16
    stored = 2 * (adapters + others) + layers * linear * 9 // 16
    assert ptrain.derive(spec, facts).exact.bytes_of(State.PARAMETERS, 0) * 8 == stored
    assert ptrain.derive(spec, facts).paper.bytes_of(State.PARAMETERS, 0) * 8 == stored


def test_a_frozen_weight_has_four_operations_per_token() -> None:
    plain, adapted = (
        loaded("zero3", f"model={{preset: llama3-8b{more}}}") for more in ("", ", lora_rank: 1")
    )
    counts = [
        token_operations(spec.model, built_in_facts(spec), 1, is_causal=True)
        for spec in (plain, adapted)
    ]
    adapters = built_in_facts(adapted).trained_numel
    assert 1.5 * (counts[1] - 6 * adapters) == pytest.approx(counts[0], rel=1e-4)


@pytest.mark.parametrize(
    ("strategy", "words", "place", "where"),
    [
        ("tp", [LORA], "model.lora_rank", "with tp"),
        ("tp", [LORA, NF4], "frozen.dtype", "nf4 in sharded operators"),
        ("cp-ring", [LORA], "model.lora_rank", "with cp"),
        ("zero3", [LORA, "model.experts=8"], "model.lora_rank", "with experts"),
        ("zero3", [LORA, NF4, "compile=block"], "frozen.dtype", "nf4 in compiled programs"),
        (
            "zero3",
            [LORA, NF4, "precision.matmul=fp8-rowwise"],
            "frozen.dtype",
            "nf4 in fp8-rowwise products",
        ),
        ("ddp", [LORA, NF4, "frozen.dp_replicate=S*"], "frozen.dtype", "flat units that shard"),
        ("zero-offload", [LORA, NF4], "frozen.dtype", "flat units that shard or offload"),
    ],
)
def test_unsupported_placements_are_rejected_with_a_fix(
    strategy: str, words: list[str], place: str, where: str
) -> None:
    spec = ptrain.load(strategy, words).spec
    faults = {fault.place: fault for fault in find_unsupported(spec)}
    assert where in faults[place].finding and faults[place].finding.startswith("not supported yet")
    assert "`" in faults[place].remedy


def test_a_model_without_frozen_parameters_cannot_be_quantized() -> None:
    with pytest.raises(ptrain.errors.SpecError, match="the model has no frozen parameter"):
        ptrain.derive(loaded("zero3", NF4))


def test_a_torch_whose_fsdp2_would_cast_bytes_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = loaded("fsdp-mixed", LORA, NF4)
    monkeypatch.setattr(installed, "torch_minor", lambda: "2.13")
    assert not [*find_unsupported(spec)]
    monkeypatch.setattr(installed, "torch_minor", lambda: "2.11")
    (fault,) = find_unsupported(spec)
    assert "shards that FSDP2 of torch 2.11 casts" in fault.finding
    assert fault.remedy == "Use `precision.layout=bf16`."
