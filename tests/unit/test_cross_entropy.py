"""The cross entropy equals torch's and needs one buffer of the logits' size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ptrain.models.cross_entropy import IGNORED, token_loss_sum
from ptrain.models.numerics import widen
from ptrain.models.trace import Recording, StorageAllocated, StorageFreed
from ptrain.traces.record import record

SAMPLES, TOKENS, WORDS, HIDDEN = 2, 7, 53, 5


def of_torch(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    logits_NV, targets_N = widen(logits_BTV.flatten(0, 1)), targets_BT.flatten()
    return F.cross_entropy(logits_NV, targets_N, ignore_index=IGNORED, reduction="sum")


def random_logits(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Logits and targets, of which one counts for nothing."""
    torch.manual_seed(0)
    logits = 5 * torch.randn(SAMPLES, TOKENS, WORDS, dtype=torch.float64)
    targets = torch.randint(WORDS, (SAMPLES, TOKENS))
    targets[0, 2] = IGNORED
    return logits.to(dtype).requires_grad_(), targets


def gradients(loss_of: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype) -> list[Tensor]:
    """The loss, and the gradient of the logits of three losses."""
    logits, targets = random_logits(dtype)
    loss = loss_of(logits, targets)
    (gradient,) = torch.autograd.grad(3 * loss, logits)
    return [loss.detach(), gradient]


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 8e-3)],
)
def test_loss_and_gradient_are_those_of_torch(dtype: torch.dtype, tolerance: float) -> None:
    own, others = gradients(token_loss_sum, dtype), gradients(of_torch, dtype)
    assert [each.dtype for each in own] == [each.dtype for each in others]
    for one, other in zip(own, others, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


def test_an_impossible_word_adds_nothing_and_is_infinitely_wrong_as_a_target() -> None:
    logits, targets = random_logits(torch.float64)
    with torch.no_grad():
        logits[..., 4] = -torch.inf
    targets[targets == 4] = 5
    torch.testing.assert_close(token_loss_sum(logits, targets), of_torch(logits, targets))
    targets[1, 1] = 4
    assert token_loss_sum(logits, targets) == torch.inf


@pytest.mark.parametrize("wrong", [-1, WORDS])
def test_a_target_that_is_no_word_is_an_error(wrong: int) -> None:
    logits, targets = random_logits(torch.float32)
    targets[1, 3] = wrong
    with pytest.raises(RuntimeError, match=f"index {wrong} is out of bounds"):
        token_loss_sum(logits, targets)


def test_a_second_backward_pass_is_an_error_and_not_another_gradient() -> None:
    loss = token_loss_sum(*random_logits(torch.float32))
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dynamo_traces_it_whole(dtype: torch.dtype) -> None:
    torch._dynamo.reset()
    compiled: Any = torch.compile(token_loss_sum, fullgraph=True, backend="aot_eager")
    own, others = gradients(token_loss_sum, dtype), gradients(compiled, dtype)
    assert all(map(torch.equal, own, others))


@pytest.mark.parametrize(
    ("dtype", "forward", "backward"), [(torch.bfloat16, 6, 6), (torch.float32, 8, 4)]
)
def test_each_logit_takes_at_most_eight_bytes(
    dtype: torch.dtype, forward: int, backward: int
) -> None:
    """In bf16 logits and buffer (2 + 4), then the buffer and the gradient; a loop that keeps the
    logits has all three (8). In fp32 the buffer is the gradient."""
    tokens, words = 512, 2048
    model = nn.Sequential(nn.Linear(1, words, bias=False, dtype=dtype))
    x, targets = torch.ones(1, tokens, 1, dtype=dtype), torch.zeros(1, tokens, dtype=torch.int64)
    for keeps, more in ((False, 0), (True, dtype.itemsize)):
        kept: list[Tensor] = []

        def loss(kept: list[Tensor] = kept, keeps: bool = keeps) -> Tensor:
            logits = model(x)
            if keeps:
                kept.append(logits.detach())
            return token_loss_sum(logits, targets)

        recording = record(model, [("0",)], loss, x, targets)
        peaks = [peak / (tokens * words) for peak in peaks_of(recording)]
        # of each token five numbers of at most 8 bytes, and the head's gradient
        assert peaks == pytest.approx([forward, backward + more], abs=0.05)
        assert max(peaks) < 8.05


def peaks_of(recording: Recording) -> list[int]:
    """The most bytes at once of each pass."""
    now, peaks = 0, []
    for events in recording.passes.values():
        highest = now
        for event in events:
            if isinstance(event, StorageAllocated):
                now += recording.sizes[event.id]
            elif isinstance(event, StorageFreed):
                now -= recording.sizes[event.id]
            highest = max(highest, now)
        peaks.append(highest)
    return peaks


def test_padding_has_no_part_in_the_loss_and_no_gradient() -> None:
    logits, targets = random_logits(torch.float64)
    padded = torch.cat([logits.detach(), torch.full_like(logits, 9.0)[..., :3]], -1)
    padded.requires_grad_()
    loss, expected = token_loss_sum(padded, targets, 3), token_loss_sum(logits, targets)
    assert torch.equal(loss, expected)
    (gradient,), (other,) = torch.autograd.grad(loss, padded), torch.autograd.grad(expected, logits)
    assert not gradient[..., -3:].any() and torch.equal(gradient[..., :-3], other)
