"""Which tokens notice another one is told by what is more than rounding."""

from __future__ import annotations

import torch
from ptrain.verification.jobs.slice_root_causes import noticed, seen_by_one
from torch import Tensor, nn

from ptrain.verification.jobs.record import ForwardCall

TOKENS = torch.tensor([[3, 1, 4, 1, 5, 0, 2, 6], [2, 0, 1, 0, 2, 4, 5, 0]])


class Decaying(nn.Module):
    """Logits are sums over the tokens before, whose weights decay, from the token `begin` on."""

    def __init__(self, decay: float, begin: int = 0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(7, 7)
        self.decay, self.begin = decay, begin

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.size(1))
        apart = (places[:, None] - places).float()
        weights = self.decay ** apart.clamp(min=0) * (apart >= 0) * (places >= self.begin)
        return weights @ self.embed(tokens)


def seen(model: nn.Module) -> Tensor:
    call = ForwardCall(args=(TOKENS,), kwargs={}, autocast=None)
    result = noticed(model, call, range(8), range(8))
    assert result is not None
    return result


def test_a_token_that_one_side_does_not_notice_is_told() -> None:
    whole, short = seen(Decaying(0.5)), seen(Decaying(0.5, begin=2))
    lacking = seen_by_one(whole, short)
    assert lacking[:2].sum() == 15 and not lacking[2:].any()  # 8 of token 0, 7 of token 1
    assert not seen_by_one(short, whole).any()


def test_what_rounds_away_is_noticed_by_chance_and_not_told() -> None:
    whole, short = seen(Decaying(0.02)), seen(Decaying(0.02, begin=2))
    by_chance = (whole > 0) & (short == 0)
    noticed = seen_by_one(whole, short)
    assert noticed[0, 0] and noticed[1, 1] and noticed.sum() < by_chance.sum()
