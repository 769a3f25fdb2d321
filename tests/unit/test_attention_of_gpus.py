"""A CPU replaces a GPU's attention if it has the same kernel, and its norms; operator-by-operator
attention of a GPU is unknown."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ptrain.derivation import kernels
from ptrain.derivation.estimate import derive, facts_from_shape
from ptrain.models.kernels import AttentionCall, kernels_of
from ptrain.models.ledger import storage_of
from ptrain.spec.load import load
from ptrain.traces.attention_kernels import kernels_for
from ptrain.traces.record import Recorder
from tests.torch_release import is_since

BY_OPERATORS = "head_dim 8 in fp32, operator by operator on the CPU"


@dataclass(frozen=True)
class Keeping:
    """Of a GPU that keeps what a processor does, and whose grouped attention has no kernel."""

    def __call__(self, call: AttentionCall) -> Callable[[int], int]:
        return lambda size: size

    def goes_by_operators(self, call: AttentionCall) -> bool:
        return call.is_grouped


@pytest.mark.parametrize(
    ("query", "value", "noted"),
    [
        ((2, 3, 4, 8), (2, 3, 4, 8), []),
        ((2, 3, 4, 8), (2, 3, 4, 6), [BY_OPERATORS]),
        ((3, 4, 8), (3, 4, 8), [] if is_since("2.14") else [BY_OPERATORS]),
    ],
)
def test_attention_that_is_no_kernel_here_is_noted(query, value, noted):
    query, key, value = (torch.zeros(size, requires_grad=True) for size in (query, query, value))
    with kernels_of(is_for_cuda=True, keeping=Keeping()) as unknown:
        F.scaled_dot_product_attention(query, key, value, is_causal=True)
    assert [*unknown.attention] == noted, "from 2.14 on, torch adds the dimension of samples"


@pytest.mark.parametrize(("kept", "is_known"), [("M", False), ("O", True)])
def test_prediction_and_simulation_use_the_same_attention(kept, is_known, monkeypatch):
    """No GPU kernels are counted for offloaded activations, so any attention will do."""
    choice = {"80": {"fp32": [[8, 256, "flash"]]}, "90": {"fp32": []}}
    table = {"choice": choice, "ungrouped": []}
    monkeypatch.setattr(kernels, "_of_torch", lambda name, _torch: table[name])
    cluster = "cluster={preset: h100-8, sm: 90}"
    spec = load("ddp", (cluster, "precision.layout=fp32", f"activations={kept}")).spec
    exact = derive(spec, facts_from_shape(spec)).exact
    assert ("no known GPU attention kernel" not in exact.unclaimed.get("peak", "")) is is_known
    query = torch.zeros(2, 3, 40, 64, requires_grad=True)
    with kernels_for(spec) as unknown:
        F.scaled_dot_product_attention(query, query, query, is_causal=True)
    assert (not unknown.attention) is is_known


def test_attention_that_is_no_kernel_there_goes_operator_by_operator_here():
    query, key = torch.zeros(2, 4, 3, 8, requires_grad=True), torch.zeros(2, 2, 3, 8)
    recorder = Recorder(torch.nn.Identity(), ())
    with kernels_of(is_for_cuda=True, keeping=Keeping()) as unknown, recorder:
        F.scaled_dot_product_attention(query, key, key, is_causal=True, enable_gqa=True)
    assert [*unknown.attention] == ["head_dim 8 in fp32, fewer key heads"]
    assert 2 * 4 * 3 * 3 * 4 in recorder.recording().sizes.values()  # scores


def test_masked_attention_on_gpus_is_unknown():
    query, key = torch.zeros(2, 4, 3, 8, requires_grad=True), torch.zeros(2, 2, 3, 8)
    mask = torch.zeros(3, 3)
    with kernels_of(is_for_cuda=True, keeping=Keeping()) as unknown:
        F.scaled_dot_product_attention(query, key, key, mask, enable_gqa=True)
    assert [*unknown.attention] == ["head_dim 8 in fp32, a mask and fewer key heads"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_norm_keeps_its_rows_in_fp32_whatever_its_input_is(dtype):
    x, weight = torch.ones(5, 8, dtype=dtype, requires_grad=True), torch.ones(8, dtype=dtype)
    with kernels_of(is_for_cuda=True, keeping=Keeping()):
        y = F.layer_norm(x, (8,), weight)
    saved = (y.grad_fn._saved_result1, y.grad_fn._saved_result2)
    assert [storage_of(rows).nbytes() for rows in saved] == [5 * 4, 5 * 4]
    y.sum().backward()
    assert x.grad.dtype == dtype


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rms_norm_is_one_kernel_there_that_keeps_its_input_and_a_number_a_row(dtype):
    norm, x = nn.RMSNorm(8, dtype=dtype), torch.ones(5, 8, dtype=dtype, requires_grad=True)
    recorder = Recorder(torch.nn.Identity(), ())
    of_y = torch.ones(5, 8, dtype=dtype)
    with kernels_of(is_for_cuda=True), recorder:
        y = norm(x)
        kept = sorted(recorder.recording().sizes.values())
        y.backward(of_y)
    assert kept == [5 * 4, 5 * 8 * dtype.itemsize]
    backward = sorted(recorder.recording().sizes.values())
    assert backward == sorted([*kept, 8 * dtype.itemsize, 5 * 8 * dtype.itemsize])
    assert x.grad.shape == x.shape
    assert norm.weight.grad.dtype == dtype


def test_rms_norm_of_two_dtypes_is_no_kernel():
    norm, x = nn.RMSNorm(8), torch.ones(5, 8, dtype=torch.bfloat16)
    recorder = Recorder(torch.nn.Identity(), ())
    with kernels_of(is_for_cuda=True), recorder:
        norm(x)
    assert len(recorder.recording().sizes) > 2


def test_a_norm_of_other_features_than_its_input_has_fails_as_everywhere():
    with kernels_of(is_for_cuda=True), pytest.raises(RuntimeError):
        F.rms_norm(torch.zeros(4, 8), (7,))
