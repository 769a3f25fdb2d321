"""Tensors on the host and in files: accounting, the cost of a move, and cleanup."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ptrain.cost import State
from ptrain.errors import SpecError
from ptrain.models.ledger import tier_of
from ptrain.runtime.comm import TagRegistry
from ptrain.runtime.torch import Tiers, cast
from ptrain.spec.placement import Tier

OFF_DEVICE = (Tier.HOST, Tier.FILE)


@pytest.fixture
def tiers(tmp_path: Path) -> Tiers:
    return Tiers(torch.device("cpu"), TagRegistry(), str(tmp_path))


def place(tensor: torch.Tensor) -> Tier:
    return tier_of(tensor.untyped_storage())


@pytest.mark.parametrize("tier", Tier)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_tensor_moves_to_any_tier_and_back_unchanged(tiers, tier, dtype):
    original = torch.randn(1003).to(dtype)
    there = tiers.copy_to_tier(original, tier, State.OPTIMIZER)
    assert place(there) is tier
    assert there.untyped_storage().nbytes() == 1003 * dtype.itemsize
    assert torch.equal(tiers.copy_to_tier(there, Tier.DEVICE, State.OPTIMIZER), original)


@pytest.mark.parametrize("tier", OFF_DEVICE)
def test_a_scalar_moves_like_any_tensor(tiers, tier):
    there = tiers.copy_to_tier(torch.tensor(3.0), tier, State.OPTIMIZER)
    assert place(there) is tier
    assert there.shape == () and there.item() == 3.0


@pytest.mark.parametrize("tier", OFF_DEVICE)
def test_a_tensor_on_a_tier_belongs_to_its_state(tiers, tier):
    tag = tiers.registry.tag_of(tiers.empty(8, torch.float32, tier, State.GRADIENTS))
    assert tag is not None and tag.state is State.GRADIENTS


def test_a_cast_stays_on_its_tier_and_one_of_a_file_is_in_memory(tiers):
    values = torch.randn(16)
    on_host = tiers.copy_to_tier(values, Tier.HOST, State.OPTIMIZER)
    on_file = tiers.copy_to_tier(values, Tier.FILE, State.OPTIMIZER)
    assert cast(on_host, torch.float32) is on_host
    assert place(cast(on_host, torch.bfloat16)) is Tier.HOST
    assert place(cast(on_file, torch.bfloat16)) is Tier.HOST
    assert place(cast(values, torch.bfloat16)) is Tier.DEVICE


def test_files_have_no_name_and_take_no_descriptor(tiers, tmp_path):
    before = len(os.listdir("/proc/self/fd"))
    tensor = tiers.copy_to_tier(torch.ones(4096), Tier.FILE, State.PARAMETERS)
    tiers.prefetch(tensor)
    tiers.prefetch(tensor[100:])
    assert not list(tmp_path.iterdir())
    assert len(os.listdir("/proc/self/fd")) == before
    tensor.add_(1)
    assert tensor.sum().item() == 8192


def test_the_bytes_of_a_file_are_given_back_with_its_tensor(tiers):
    def mappings() -> int:
        return Path("/proc/self/maps").read_text().count("ptrain-")

    before = mappings()
    tensor = tiers.copy_to_tier(torch.ones(4096), Tier.FILE, State.PARAMETERS)
    assert mappings() == before + 1
    del tensor
    gc.collect()
    assert mappings() == before


def test_a_view_keeps_its_file(tiers):
    part = tiers.copy_to_tier(torch.arange(10.0), Tier.FILE, State.PARAMETERS)[4:]
    gc.collect()
    assert part.tolist() == [4, 5, 6, 7, 8, 9]
    assert place(part) is Tier.FILE


def test_a_missing_folder_is_reported_with_its_path(tmp_path):
    missing = tmp_path / "nowhere"
    tiers = Tiers(torch.device("cpu"), TagRegistry(), str(missing))
    with pytest.raises(SpecError, match=rf"offload.path: {missing}: no such folder") as caught:
        tiers.empty(8, torch.float32, Tier.FILE, State.OPTIMIZER)
    assert caught.value.faults[0].remedy


def test_a_full_folder_is_rejected_before_writing(tiers):
    free = os.statvfs(tiers.path)
    elements = free.f_bavail * free.f_frsize  # four times what there is
    with pytest.raises(SpecError, match=r"offload.path: .*"):
        tiers.empty(elements, torch.float32, Tier.FILE, State.OPTIMIZER)
    assert not os.listdir(tiers.path)


@pytest.mark.parametrize("tier", OFF_DEVICE)
def test_fake_tensors_have_tiers_and_no_files(tiers, tier):
    with FakeTensorMode():
        made = tiers.copy_to_tier(torch.empty(64), tier, State.OPTIMIZER)
        tiers.prefetch(made)
        assert place(made) is tier
