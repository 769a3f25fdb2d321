"""A composed model computes what transformers' class of the same config does, in fp64: weights are
copied by name, and logits compared. Where theirs computes in fp32 whatever the dtype (rotations,
norms, softmax), torch's fp32 is made fp64 while it runs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from ptrain.models.initialize import build_model, cast_module
from ptrain.spec.load import load
from ptrain.spec.model import ModelShape
from tests.unit.composed_cases import (
    BIAS,
    CASES,
    GPT2,
    SEQUENCE,
    SIZES,
    THEIR_SIZES,
    TURNING,
    VOCAB,
    Names,
)

transformers = pytest.importorskip("transformers")

_FUSED = re.compile(r"blocks\.(\d+)\.attention\.(query|key|value)\.(weight|bias)")
_THIRDS = ("query", "key", "value")


def shape_of(fields: Mapping[str, Any], attention: str = "sdpa") -> ModelShape:
    model = load("ddp", [f"model={SIZES | dict(fields)}", f"attention={attention}"]).spec.model
    assert isinstance(model, ModelShape)
    return model


def theirs(name: str, config: Mapping[str, Any]) -> nn.Module:
    """A class of transformers, with weights of which none is 0 or 1."""
    kind = getattr(transformers, name)
    sizes = THEIR_SIZES if name != "GPT2LMHeadModel" else {"vocab_size": VOCAB}
    model = kind(kind.config_class(**{**sizes, **config, "attn_implementation": "eager"}))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.1, 0.3, generator=generator)
        for name, buffer in model.named_buffers():
            if name.endswith(BIAS):
                buffer.normal_(0.0, 0.3, generator=generator)
    return model.eval()


def copy_weights(model: nn.Module, source: nn.Module, names: Names) -> None:
    """Put the weights of a class of transformers into a model of ours."""
    tensors = dict(source.named_parameters(remove_duplicate=False))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(_theirs(name, tensors, names))
        for name, buffer in model.named_buffers():
            if name.endswith(".bias_E"):
                layer = name.split(".")[1]
                buffer.copy_(source.get_buffer(f"model.layers.{layer}.mlp.gate.{BIAS}"))


def _theirs(name: str, tensors: Mapping[str, Any], names: Names) -> Any:
    fused = _FUSED.fullmatch(name)
    if fused and names is GPT2:
        number, part, kind = fused.groups()
        whole = tensors[f"transformer.h.{number}.attn.c_attn.{kind}"]
        third = whole.chunk(3, dim=-1)[_THIRDS.index(part)]
        return third.T if kind == "weight" else third
    module, _, kind = name.rpartition(".")
    if ".mlp.experts." in module:
        return _of_experts(module, tensors)
    number = next(iter(re.findall(r"\d+", module)), "")
    tensor = tensors[f"{names[re.sub(r'[0-9]+', '{}', module)].format(number)}.{kind}"]
    if module.endswith((".query_up", ".kv_down")):
        return _turning_in_halves(module, tensor)
    is_transposed = names is GPT2 and "blocks." in name and tensor.dim() > 1
    return tensor.T if is_transposed else tensor


def _turning_in_halves(module: str, tensor: torch.Tensor) -> torch.Tensor:
    """What turns is behind in theirs, the two of a pair side by side; in ours a head has it in
    front, the first ones of all pairs ahead of the second ones."""
    heads = THEIR_SIZES["num_attention_heads"] if module.endswith("up") else 1
    by_head = tensor.unflatten(0, (heads, -1))
    still, turning = by_head.tensor_split((by_head.shape[1] - TURNING,), dim=1)
    halves = torch.cat((turning[:, 0::2], turning[:, 1::2]), dim=1)
    parts = (halves, still) if heads > 1 else (still, halves)
    return torch.cat(parts, dim=1).flatten(0, 1)


def _of_experts(module: str, tensors: Mapping[str, Any]) -> Any:
    """Theirs have gate and up in one tensor, the gates first."""
    _, layer, *_, kind = module.split(".")
    prefix = f"model.layers.{layer}.mlp.experts"
    if kind == "down":
        return tensors[f"{prefix}.down_proj"]
    gate, up = tensors[f"{prefix}.gate_up_proj"].chunk(2, dim=1)
    return gate if kind == "gate" else up


@contextmanager
def in_fp64() -> Iterator[None]:
    """Within it what is fp32 by name is fp64."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "float32", torch.float64)
        patch.setattr(torch, "float", torch.float64)
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(torch.FloatTensor.dtype)


def tokens() -> torch.Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.randint(0, VOCAB, (2, SEQUENCE), generator=generator)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_composed_model_computes_the_result_of_the_transformers_class(case, attention):
    name, config, fields, names = CASES[case]
    module = build_model(shape_of(fields, attention), sequence=SEQUENCE)
    cast_module(module, torch.float64)
    with in_fp64():
        reference = theirs(name, config)
        expected = reference(tokens(), use_cache=False).logits.detach()
    assert expected.dtype is torch.float64
    copy_weights(module, reference, names)
    logits = module.eval()(tokens()).detach()
    assert expected.std() > 0.1
    assert (logits - expected).abs().max() <= 1e-10 * expected.abs().max()
