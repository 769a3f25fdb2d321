"""DDP's buckets are those that torch's own assignment gives."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.parallel import distributed

from ptrain.axes.data.costs import bucket_caps, bucket_sizes
from ptrain.spec.dials import STOCK_BUCKET_BYTES

numels = st.lists(st.integers(min_value=1, max_value=400), min_size=1, max_size=40)
caps = st.lists(st.integers(min_value=4, max_value=2000), min_size=1, max_size=2)


@given(numels, caps)
def test_buckets_close_as_in_torch(numel, limits):
    tensors = [torch.empty(size) for size in numel]
    indices = list(range(len(tensors)))  # given, so that torch keeps the order
    assigned, _ = dist._compute_bucket_assignment_by_size(
        tensors, limits, [False] * len(tensors), indices
    )
    expected = [sum(4 * numel[index] for index in bucket) for bucket in assigned]
    assert bucket_sizes((4 * size for size in numel), limits) == expected


def test_the_first_cap_holds_once_and_the_last_for_all_that_follow():
    assert bucket_sizes([6, 6, 6, 6, 6, 6, 6], (10, 20)) == [12, 24, 6]


@pytest.mark.skipif(
    not hasattr(distributed, "_BucketCapacityConfig"), reason="torch 2.11 has no name for its caps"
)
@pytest.mark.parametrize("megabytes", [None, 1, 40])
def test_caps_are_those_that_torch_hands_its_reducer(megabytes):
    config = distributed._BucketCapacityConfig.create(megabytes, None, False)
    torchs = (config.first_bucket_bytes_cap, config.bucket_bytes_cap)
    ours = bucket_caps(STOCK_BUCKET_BYTES if megabytes is None else megabytes * 2**20)
    assert (ours[0], ours[-1]) == torchs


def test_no_tensors_make_no_bucket():
    assert bucket_sizes([], (10,)) == []
