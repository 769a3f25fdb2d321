"""The dropout masks of a rank's tokens are slices of the single-device mask."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ptrain.axes.context.run.slices import MicroBatchCut, SlicedMasks, masks_at
from ptrain.models.modes import dropout_by, switched_off
from ptrain.spec.placement import Axis
from ptrain.steps.step import ContextParallel

RATE, SEQUENCE, RANKS, SAMPLES, HIDDEN = 0.3, 24, 3, 2, 5
STEPS = {
    "ring": ContextParallel(axis=Axis.CP, ulysses=1, ring=RANKS, sequence=SEQUENCE),
    "zigzag": ContextParallel(
        axis=Axis.CP, ulysses=1, ring=RANKS, sequence=SEQUENCE, is_balanced=True
    ),
    "ulysses": ContextParallel(axis=Axis.CP, ulysses=RANKS, ring=1, sequence=SEQUENCE),
}


def masks_of(name: str, index: int, *, over_tp: int = 1) -> SlicedMasks:
    return masks_at(STEPS[name], index, MicroBatchCut(samples=SAMPLES, slices=RANKS * over_tp))


def slice_of_rank(masks: SlicedMasks, whole: Tensor) -> Tensor:
    return torch.cat([whole[:, first:behind] for first, behind in masks.spans], dim=1)


def hidden() -> Tensor:
    torch.manual_seed(1)
    return torch.randn(SAMPLES, SEQUENCE, HIDDEN, dtype=torch.float64)


def dropped(masks: SlicedMasks, x: Tensor, *, inplace: bool = False) -> Tensor:
    torch.manual_seed(0)
    with dropout_by(masks.drop):
        return F.dropout(x, RATE, training=True, inplace=inplace)


def by_one_device(x: Tensor) -> Tensor:
    torch.manual_seed(0)
    return F.dropout(x, RATE, training=True)


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("index", range(RANKS))
@pytest.mark.parametrize("name", STEPS)
def test_a_rank_drops_the_elements_of_its_tokens_that_one_device_drops(
    name: str, index: int, inplace: bool
) -> None:
    masks, x_BSC = masks_of(name, index), hidden()
    expected = slice_of_rank(masks, by_one_device(x_BSC))
    assert torch.equal(dropped(masks, slice_of_rank(masks, x_BSC), inplace=inplace), expected)


@pytest.mark.parametrize("index", range(RANKS))
def test_samples_and_tokens_in_one_dimension_are_dropped_like_on_one_device(index: int) -> None:
    masks, x_BSC = masks_of("zigzag", index), hidden()
    expected = slice_of_rank(masks, by_one_device(x_BSC.flatten(0, 1)).view_as(x_BSC)).flatten(0, 1)
    assert torch.equal(dropped(masks, slice_of_rank(masks, x_BSC).flatten(0, 1)), expected)


def test_tensors_without_tokens_are_dropped_equally() -> None:
    per_sample = torch.ones(SAMPLES, 1, 1)
    first, *others = (dropped(masks_of("ring", index), per_sample) for index in range(RANKS))
    assert all(torch.equal(first, other) for other in others)
    assert torch.equal(first, by_one_device(per_sample))


def test_slices_over_another_axis_have_masks_that_no_other_rank_has() -> None:
    """A rank of tp has half of them, and draws what the others do not."""
    torch.manual_seed(0)
    tokens = SEQUENCE // RANKS // 2
    ones = torch.ones(SAMPLES, tokens, HIDDEN, dtype=torch.float64)
    parts = [dropped(masks_of("zigzag", index, over_tp=2), ones) for index in range(RANKS)]
    whole = by_one_device(torch.ones(SAMPLES, tokens * RANKS, HIDDEN, dtype=torch.float64))
    assert torch.equal(torch.cat(parts, dim=1), whole)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_one_kernel_of_gpus_keeps_of_its_mask_the_part(dtype: torch.dtype) -> None:
    """It runs on a processor too, whose at::dropout does not take it."""
    masks, whole = masks_of("zigzag", 1), hidden().to(dtype)
    x_BTC = slice_of_rank(masks, whole).requires_grad_()
    torch.manual_seed(0)
    y_BSC, mask_BSC = torch.native_dropout(whole, RATE, True)
    torch.manual_seed(0)
    y_BTC = masks.drop_on_gpu(x_BTC, RATE)
    torch.testing.assert_close(y_BTC, slice_of_rank(masks, y_BSC))
    y_BTC.sum().backward()
    kept = slice_of_rank(masks, mask_BSC).to(dtype) / (1 - RATE)
    torch.testing.assert_close(x_BTC.grad, kept)


def test_disabled_dropout_draws_nothing() -> None:
    x_BTC = slice_of_rank(masks_of("ring", 0), hidden())
    with switched_off() as off:
        assert torch.equal(dropped(masks_of("ring", 0), x_BTC), x_BTC)
        assert off.drops
    assert not torch.equal(by_one_device(x_BTC), x_BTC)
