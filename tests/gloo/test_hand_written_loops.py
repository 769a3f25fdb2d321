"""The hand-written loops of the benchmarks train the same model as ptrain."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import Tensor

from ptrain.models.cross_entropy import token_loss_sum
from tests.ranks import Ranks

pytestmark = pytest.mark.gloo

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
SMALL = (
    "model={layers: 2, hidden: 32, heads: 4, kv_heads: 2, ffn: 64, vocab: 260}",
    "batch={global: 4, micro: 2, sequence: 32}",
    "optimizer.lr=3e-3",
    "optimizer.clip=1e6",  # never reached: the sums of the norm are taken in another order
)


def losses_by_loop(name: str, steps: int) -> list[tuple[float, float]]:
    """Return this rank's loss shares of ptrain and of the hand-written loop."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        import _by_hand
        from _steps import legal, program_steps

        # torch's cross entropy rounds the sum of the exponentials differently
        patch.setattr(_by_hand, "_loss_of_targets", mean_loss)
        spec = legal(name, SMALL)
        own, other = program_steps(spec), _by_hand.by_hand(spec)
        return [(own(), other()) for _ in range(steps)]


def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return token_loss_sum(logits, targets) / targets.numel()


def test_masters_gathered_in_bf16_train_to_the_bit_as_fsdp2_by_hand(ranks: Ranks) -> None:
    of_ranks = ranks.run(2, losses_by_loop, "fsdp-mixed", 6)
    assert all(own == other for of_rank in of_ranks for own, other in of_rank)
    totals = [sum(own for own, _ in of_step) for of_step in zip(*of_ranks, strict=True)]
    assert totals[-1] < totals[0]
