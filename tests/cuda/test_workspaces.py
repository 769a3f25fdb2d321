"""Kernel workspaces equal the memory that the GPU's allocator holds during the kernel."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from ptrain.derivation.kernels import attention_backward, products, sum_of_rows
from ptrain.spec.load import load

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="kernels are a GPU's"),
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0),
        reason="the sizes are those of an H100",
    ),
]

UNSPLIT = 2**20  # the allocator splits off only larger remainders of a block
SMALL = 4096  # semaphores and the like, and their rounding
BATCH, HEADS, SEQUENCE = 2, 8, 1024


def workspace_bytes(operator: Callable[[], object]) -> int:
    """Return the bytes in full blocks that the allocator held in addition to memory before or after
    the call."""
    operator()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()  # so that no larger block is taken
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = operator()
    torch.cuda.synchronize()
    highest, after = torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()
    del result
    return highest - max(before, after)


@pytest.mark.parametrize(
    ("rows", "columns"),
    [(2048, 1024), (2048, 4096), (1024, 1024), (2048, 6400), (4096, 4096), (8192, 4096),
     (4096, 14336), (512, 1024), (2048, 50257), (65536, 64), (16384, 8192)],
)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_sum_over_rows_leaves_sums_of_parts(rows: int, columns: int, dtype: torch.dtype) -> None:
    matrix = torch.ones(rows, columns, device="cuda", dtype=dtype)
    expected = sum_of_rows(rows, columns)
    assert 0 <= workspace_bytes(lambda: matrix.sum(0)) - expected <= UNSPLIT + SMALL


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(
    ("backend", "kernel", "dtype"),
    [
        (SDPBackend.CUDNN_ATTENTION, "cudnn", torch.bfloat16),
        (SDPBackend.FLASH_ATTENTION, "flash", torch.bfloat16),
        (SDPBackend.EFFICIENT_ATTENTION, "efficient", torch.float32),
    ],
)
def test_attentions_backward_pass_has_the_documented_workspace(
    backend: SDPBackend, kernel: str, dtype: torch.dtype, head_dim: int
) -> None:
    shape = (BATCH, SEQUENCE, HEADS, head_dim)
    parts = [
        torch.randn(shape, device="cuda", dtype=dtype).transpose(1, 2).requires_grad_()
        for _ in range(3)
    ]
    with sdpa_kernel([backend]):
        output = F.scaled_dot_product_attention(*parts, is_causal=True)
    gradient = torch.ones_like(output)
    taken = attention_backward(
        kernel, dtype.itemsize, batch=BATCH, heads=HEADS, sequence=SEQUENCE, head_dim=head_dim
    )
    difference = workspace_bytes(
        lambda: torch.autograd.grad(output, parts, gradient, retain_graph=True)
    ) - sum(taken)
    assert 0 <= difference <= SMALL


def test_products_keep_a_workspace_per_thread() -> None:
    torch._C._cuda_clearCublasWorkspaces()
    before = torch.cuda.memory_allocated()
    weight = torch.ones(256, 256, device="cuda", requires_grad=True)
    bias = torch.ones(256, device="cuda", requires_grad=True)
    F.linear(F.linear(weight, weight, bias), weight).sum().backward()
    del weight, bias
    spec = load("ddp", ("model.preset=gpt2-124m", "cluster.preset=h100-8")).spec
    assert torch.cuda.memory_allocated() - before == sum(products(spec))
