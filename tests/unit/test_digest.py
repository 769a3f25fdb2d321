"""A digest tells any two tensors apart that differ in one bit, wherever it is, and says the same of
equal bytes wherever they lie."""

from __future__ import annotations

import pytest
import torch

from ptrain.meters.replicas import compute_digests, describe_tensor

DTYPES = (
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
)
ROW = 4096  # bytes


def random_bytes(dtype: torch.dtype, num_bytes: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(num_bytes)
    data = torch.randint(0, 256, (num_bytes,), generator=generator, dtype=torch.uint8)
    return data.view(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_bit_of_an_element_of_every_dtype_counts(dtype):
    tensor = random_bytes(dtype, 2 * ROW + 64)
    before = compute_digests([tensor])
    size = tensor.element_size()
    for first in (0, ROW + 8 * 5, 2 * ROW, 2 * ROW + 64 - size):  # rows, and what is left over
        for bit in range(8 * size):
            data = tensor.view(torch.uint8)
            data[first + bit // 8] ^= 1 << bit % 8
            assert compute_digests([tensor]) != before, f"bit {bit} of byte {first}"
            data[first + bit // 8] ^= 1 << bit % 8
    assert compute_digests([tensor]) == before


@pytest.mark.parametrize("num_bytes", [1, 7, 8, 9, ROW - 1, ROW, ROW + 1])
def test_every_bit_of_a_tensor_of_any_size_counts(num_bytes):
    tensor = random_bytes(torch.uint8, num_bytes)
    found = compute_digests([tensor])
    for byte in {*range(min(num_bytes, 20)), num_bytes - 1}:
        for bit in range(8):
            tensor[byte] ^= 1 << bit
            found += compute_digests([tensor])
            tensor[byte] ^= 1 << bit
    assert len(set(found)) == len(found)


def test_elements_that_change_places_count():
    tensor = torch.arange(4 * ROW, dtype=torch.float32)
    swapped = [(0, 1), (0, 2), (0, ROW // 4), (5, 3 * ROW), (1, ROW // 4 + 2)]
    for one, other in swapped:
        moved = tensor.clone()
        moved[one], moved[other] = tensor[other], tensor[one]
        assert compute_digests([moved]) != compute_digests([tensor]), (one, other)


def test_zeros_of_different_sign_differ_and_nans_of_equal_bits_agree():
    assert compute_digests([torch.tensor([0.0])]) != compute_digests([torch.tensor([-0.0])])
    nan = torch.tensor([float("nan")])
    assert compute_digests([nan]) == compute_digests([nan.clone()])


def test_where_the_bytes_lie_does_not_count():
    tensor = torch.randn(33, 65)
    shifted = torch.randn(33 * 65 + 1)[1:].view(33, 65).copy_(tensor)
    transposed = tensor.t().contiguous().t()
    assert len(set(compute_digests([tensor, tensor.clone(), shifted, transposed]))) == 1


def test_an_empty_tensor_has_a_digest_with_its_kind():
    assert compute_digests([]) == []
    assert len(set(compute_digests([torch.empty(0), torch.empty(0, dtype=torch.int8)]))) == 1
    assert describe_tensor(torch.empty(0, 3, dtype=torch.bfloat16)) == "bfloat16[0, 3]"
