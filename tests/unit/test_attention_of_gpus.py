"""A processor stands in for a GPU's attention where it has a kernel too; where it goes operator by
operator, nobody knows what the GPU does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from ptrain.derivation import attention
from ptrain.derivation.estimate import derive, facts_from_shape
from ptrain.models.kernels import kernels_of
from ptrain.spec.load import load
from ptrain.traces.gpu_kernels import kernels_for


def keeping(*_: object, **__: object) -> Callable[[int], int]:
    return lambda size: size


@pytest.mark.parametrize(
    ("query", "value", "noted"),
    [
        ((2, 3, 4, 8), (2, 3, 4, 8), []),
        ((2, 3, 4, 8), (2, 3, 4, 6), ["head_dim 8 in fp32, operator by operator on a processor"]),
        ((3, 4, 8), (3, 4, 8), ["head_dim 8 in fp32, operator by operator on a processor"]),
    ],
)
def test_attention_that_is_no_kernel_here_is_noted(query, value, noted):
    query, key, value = (torch.zeros(size, requires_grad=True) for size in (query, query, value))
    with kernels_of(is_for_cuda=True, keeping=keeping) as unknown:
        F.scaled_dot_product_attention(query, key, value, is_causal=True)
    assert [*unknown.attention] == noted


@pytest.mark.parametrize(("kept", "is_known"), [("M", False), ("O", True)])
def test_what_is_derived_and_what_is_simulated_know_the_same_attention(kept, is_known, monkeypatch):
    """Of activations that leave GPUs no GPU's kernels are counted, so that any will do."""
    choice = {"80": {"fp32": [[8, 256, "flash"]]}, "90": {"fp32": []}}
    monkeypatch.setattr(attention, "_choice", lambda: choice)
    cluster = "cluster={preset: h100-8, sm: 90}"
    spec = load("ddp", (cluster, "precision.layout=fp32", f"activations={kept}")).spec
    exact = derive(spec, facts_from_shape(spec)).exact
    assert ("no kernel that is known" not in exact.unclaimed.get("peak", "")) is is_known
    query = torch.zeros(2, 3, 40, 64, requires_grad=True)
    with kernels_for(spec) as unknown:
        F.scaled_dot_product_attention(query, query, query, is_causal=True)
    assert (not unknown.attention) is is_known
