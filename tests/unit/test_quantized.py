"""Quantized weights against independent references: the quantiles of the QLoRA paper, a search for
the nearest code, and a dense product in fp64."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import ptrain
from ptrain.facts.model import TensorFacts
from ptrain.models import quantized
from ptrain.models.quantized import QuantizedLinear, quantize_linear, quantize_rows
from ptrain.plan.lower import built_in_facts
from ptrain.spec.precision import Quantization
from ptrain.traces.facts import read_facts
from tests.published_folders import CASES

NF4, INT8 = Quantization.NF4, Quantization.INT8


def restored(weight: Tensor, kind: Quantization, dtype: torch.dtype = torch.float32) -> Tensor:
    pairs = quantized.byte_values() if kind is NF4 else None
    stored = quantize_rows(weight, kind)
    assert stored.shape == (len(weight), kind.row_bytes(weight.shape[1]))
    return quantized.dequantize_rows(stored, pairs, weight.shape[1], dtype)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_the_code_book_is_that_of_normal_quantiles() -> None:
    """QLoRA, section 3 and appendix E: quantiles of N(0, 1), eight of them from 0 down and nine
    from 0 up, with 0 once, divided by the largest."""
    normal_icdf = torch.distributions.Normal(0.0, 1.0).icdf
    offset = 0.9677083  # bitsandbytes, create_normal_map
    above = normal_icdf(torch.linspace(offset, 0.5, 9, dtype=torch.float64)[:-1])
    below = -normal_icdf(torch.linspace(offset, 0.5, 8, dtype=torch.float64)[:-1])
    values = torch.cat((above, below, torch.zeros(1))).sort().values
    torch.testing.assert_close(
        torch.tensor(quantized.NF4, dtype=torch.float64), values / values.max(), atol=2e-7, rtol=0
    )


@pytest.mark.parametrize("columns", [64, 192, 96, 30])
def test_each_element_becomes_the_nearest_code_of_its_block(columns: int) -> None:
    weight, codes = normal(5, columns), torch.tensor(quantized.NF4, dtype=torch.float64)
    for row, its in zip(weight.double(), restored(weight, NF4), strict=True):
        for block, values in zip(row.split(64), its.split(64), strict=True):
            largest = block.abs().max()
            nearest = ((block / largest)[:, None] - codes).abs().argmin(1)
            torch.testing.assert_close(values.double(), codes[nearest] * largest, rtol=1e-6, atol=0)


def test_the_error_is_at_most_half_a_gap_between_codes() -> None:
    weight = normal(16, 256)
    blocks = weight.unflatten(1, (-1, 64))
    error = (restored(weight, NF4).unflatten(1, (-1, 64)) - blocks).abs().amax(2)
    gap = max(high - low for low, high in zip(quantized.NF4, quantized.NF4[1:], strict=False))
    assert bool((error <= blocks.abs().amax(2) * gap / 2 * (1 + 1e-6)).all())
    rows = weight.abs().amax(1)
    assert bool(((restored(weight, INT8) - weight).abs().amax(1) <= rows / 254 * (1 + 1e-5)).all())


@pytest.mark.parametrize("kind", Quantization)
def test_a_row_of_zeros_stays_zero_and_codes_are_restored_exactly(kind: Quantization) -> None:
    weight = restored(normal(4, 128), kind)
    weight[1] = 0
    again = restored(weight, kind)
    torch.testing.assert_close(again, weight, rtol=1e-6, atol=0)


@pytest.mark.parametrize("kind", Quantization)
@pytest.mark.parametrize("bias", [False, True])
def test_product_and_gradient_equal_a_dense_layer_with_the_restored_weight(
    kind: Quantization, bias: bool
) -> None:
    linear = nn.Linear(96, 24, bias=bias).double().requires_grad_(False)
    dense = nn.Linear(96, 24, bias=bias).double().requires_grad_(False)
    dense.load_state_dict(linear.state_dict())
    dense.weight.data = restored(linear.weight, kind, torch.float64)
    quantize_linear(linear, kind)
    saved = list[Tensor]()
    inputs = [normal(2, 5, 96).double().requires_grad_() for _ in range(2)]
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        outputs = [linear(inputs[0]), dense(inputs[1])]
    for output in outputs:
        output.square().sum().backward()
    torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad, rtol=1e-13, atol=1e-12)
    own = linear.weight.untyped_storage().data_ptr()
    of_layer = [x for x in saved if x.dtype is torch.uint8]
    assert len(of_layer) == 1 and of_layer[0].untyped_storage().data_ptr() == own


def tensors(spec: str, *words: str) -> Iterator[tuple[TensorFacts, TensorFacts]]:
    loaded = ptrain.load(spec, words).spec
    pure, read = built_in_facts(loaded), read_facts(loaded)
    assert dict(pure.buffers) == dict(read.buffers)
    assert pure.gradient_order and sorted(pure.gradient_order) == sorted(read.gradient_order)
    yield from zip(pure.tensors, read.tensors, strict=True)


@pytest.mark.parametrize("more", [(), ("frozen.dtype=nf4",), ("frozen.dtype=int8",)])
@pytest.mark.parametrize(
    "model", ["{preset: llama-tiny, lora_rank: 4}", "{preset: gpt-tiny, lora_rank: 4}"]
)
def test_facts_of_a_model_with_adapters_are_those_of_its_module(
    model: str, more: tuple[str, ...]
) -> None:
    for pure, read in tensors("zero3", f"model={model}", "batch.sequence=16", *more):
        assert pure == read


def test_weights_of_a_pretrained_folder_are_quantized_as_they_are_read(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    prefix, sizes = CASES["llama"]
    torch.manual_seed(0)
    config = getattr(transformers, f"{prefix}Config")(**sizes)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    words = [f"model={{pretrained: {tmp_path}, lora_rank: 4}}", "frozen.dtype=nf4"]
    spec = ptrain.load("zero3", [*words, "mesh.dp_shard=1", "batch.sequence=16"]).spec
    program = ptrain.interpret(spec)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    state = program.state_dict()["model"]
    pairs = {
        "attention.query": model.model.layers[1].self_attn.q_proj,
        "mlp.down": model.model.layers[1].mlp.down_proj,
    }
    for name, published in pairs.items():
        stored = state[f"blocks.1.{name}.weight"]
        assert torch.equal(stored, quantize_rows(published.weight, NF4))
        assert not state[f"blocks.1.{name}.lora_B.weight"].any()
        assert state[f"blocks.1.{name}.lora_A.weight"].any()
    assert torch.equal(state["head.weight"], model.lm_head.weight)
    assert isinstance(program.model.get_submodule("blocks.1.mlp.down"), QuantizedLinear)
