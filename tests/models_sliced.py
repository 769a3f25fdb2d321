"""Models of a user's own that are given slices of the tokens, or would be."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.functional import dropout, scaled_dot_product_attention

from tests.models_external import Mixing, Pairs

HIDDEN, VOCAB, LONGEST = 16, 260, 64


class Placed(Pairs):
    """Positions have vectors, which it reads at those that it is given."""

    def __init__(self) -> None:
        super().__init__(HIDDEN, 2, VOCAB, tied=False)
        self.positions = nn.Embedding(LONGEST, HIDDEN)

    def forward(self, tokens_BT: Tensor, positions: Tensor | None = None) -> Tensor:
        if positions is None:
            positions = torch.arange(tokens_BT.shape[1], device=tokens_BT.device).unsqueeze(0)
        x_BTC = self.table(tokens_BT) + self.positions(positions)
        for layer in self.layers:
            x_BTC = layer(x_BTC)
        logits: Tensor = self.head(x_BTC)
        return logits


class Deaf(Placed):
    """It takes positions, and counts tokens itself."""

    def forward(self, tokens_BT: Tensor, positions: Tensor | None = None) -> Tensor:
        return super().forward(tokens_BT)


class Counting(Placed):
    """It is given no positions."""

    def forward(self, tokens_BT: Tensor) -> Tensor:
        return super().forward(tokens_BT)


class ByLength(Placed):
    """Logits that depend on how many tokens there are."""

    def forward(self, tokens_BT: Tensor, positions: Tensor | None = None) -> Tensor:
        return super().forward(tokens_BT, positions) * math.log(tokens_BT.shape[1] + 1)


class Late(Placed):
    """Logits that are others from the twelfth token of a pass on."""

    def forward(self, tokens_BT: Tensor, positions: Tensor | None = None) -> Tensor:
        count_T1 = torch.arange(tokens_BT.shape[1], device=tokens_BT.device).unsqueeze(1)
        return super().forward(tokens_BT, positions) * torch.where(count_T1 < 12, 1.0, 2.0)


class Drops(Placed):
    """Something is dropped out behind the embedding: by what `drop` does in training mode."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.drop = DROPS[kind]()

    def forward(self, tokens_BT: Tensor, positions: Tensor | None = None) -> Tensor:
        if positions is None:
            positions = torch.arange(tokens_BT.shape[1], device=tokens_BT.device).unsqueeze(0)
        x_BTC = self.drop(self.table(tokens_BT) + self.positions(positions))
        for layer in self.layers:
            x_BTC = F.dropout(layer(x_BTC), 0.1, self.training)
        logits: Tensor = self.head(x_BTC)
        return logits


class Dropped(nn.Module):
    """By a function, where it trains."""

    def forward(self, x_BTC: Tensor) -> Tensor:
        return self.dropped(x_BTC) if self.training else x_BTC

    def dropped(self, x_BTC: Tensor) -> Tensor:
        return dropout(x_BTC, 0.1)  # a name of the module's own


class DropsByItself(Dropped):
    def dropped(self, x_BTC: Tensor) -> Tensor:
        return x_BTC * (torch.rand_like(x_BTC) > 0.1)


class DropsFlat(Dropped):
    """What tokens there are of all samples, in one dimension."""

    def dropped(self, x_BTC: Tensor) -> Tensor:
        return F.dropout(x_BTC.flatten(0, 1), 0.1).view_as(x_BTC)


class DropsTokensFirst(Dropped):
    """Tokens are the first dimension."""

    def dropped(self, x_BTC: Tensor) -> Tensor:
        return F.dropout(x_BTC.transpose(0, 1).contiguous(), 0.1).transpose(0, 1)


class DropsPlaces(Dropped):
    """The same tokens of all samples."""

    def dropped(self, x_BTC: Tensor) -> Tensor:
        return x_BTC * F.dropout(torch.ones_like(x_BTC[:1]), 0.1)


class DropsLast(Dropped):
    """Tokens are the last dimension."""

    def dropped(self, x_BTC: Tensor) -> Tensor:
        return F.dropout(x_BTC.transpose(1, 2).contiguous(), 0.1).transpose(1, 2)


class DropsSamples(Dropped):
    """All tokens of a sample, or none."""

    def dropped(self, x_BTC: Tensor) -> Tensor:
        return x_BTC * F.dropout(x_BTC.new_ones(len(x_BTC), 1, 1), 0.1)


class DropsFeatures(Dropped):
    """The same features of all tokens, of which a sample has as many as a rank has tokens."""

    def dropped(self, x_BTC: Tensor) -> Tensor:
        return x_BTC * F.dropout(x_BTC.new_ones(len(x_BTC), 8), 0.1).repeat(1, 2).unsqueeze(1)


class DropsByPlace(Dropped):
    """The first tokens that it is given."""

    def dropped(self, x_BTC: Tensor) -> Tensor:
        first_T1 = F.dropout(x_BTC.new_ones(1, 2, 1), 0.5)
        return torch.cat((x_BTC[:, :2] * first_T1, x_BTC[:, 2:]), dim=1)


class Shifted(Mixing):
    """A token meets the one before it outside of attention."""

    def forward(self, x_BTC: Tensor) -> Tensor:
        return super().forward(x_BTC + F.pad(x_BTC, (0, 0, 1, -1)))


class Otherwise(Mixing):
    """Attention by a function that `attend` gives."""

    attend = staticmethod(partial(F.scaled_dot_product_attention, is_causal=True))

    def forward(self, x_BTC: Tensor) -> Tensor:
        query, key, value = (
            layer(x_BTC).view(*x_BTC.shape[:2], -1, self.head_dim).transpose(1, 2)
            for layer in (self.query, *self.key_value)
        )
        mixed = self.attend(query, key, value)
        output: Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return output


class Bound(Otherwise):
    """Attention by a name of the module's own, which nobody can put another in the place of."""

    attend = staticmethod(partial(scaled_dot_product_attention, is_causal=True))


class Open(Otherwise):
    """Attention to all tokens, later ones too."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:  # type: ignore[override]
        return F.scaled_dot_product_attention(query, key, value)


class Dropping(Otherwise):
    """Attention that drops scores."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:  # type: ignore[override]
        return F.scaled_dot_product_attention(query, key, value, dropout_p=0.1, is_causal=True)


class Windowed(Otherwise):
    """Attention to the last twelve tokens, by a mask where there are more."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:  # type: ignore[override]
        length = query.shape[-2]
        if length <= 12:
            return F.scaled_dot_product_attention(query, key, value, is_causal=True)
        ones = torch.ones(length, length, dtype=torch.bool, device=query.device)
        return F.scaled_dot_product_attention(query, key, value, ones.tril().triu(-11))


class Multihead(nn.Module):
    """torch's own module."""

    def __init__(self, hidden: int, head_dim: int) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(hidden, hidden // head_dim, batch_first=True)

    def forward(self, x_BTC: Tensor) -> Tensor:
        mask_TT = nn.Transformer.generate_square_subsequent_mask(
            x_BTC.shape[1], device=x_BTC.device, dtype=x_BTC.dtype
        )
        output: Tensor
        output, _ = self.inner(
            x_BTC, x_BTC, x_BTC, attn_mask=mask_TT, need_weights=False, is_causal=True
        )
        return output


class Twice(Mixing):
    """Attention to what it attended to."""

    def forward(self, x_BTC: Tensor) -> Tensor:
        return super().forward(super().forward(x_BTC))


DROPS: dict[str, Callable[[], nn.Module]] = {
    "module": lambda: nn.Dropout(0.1),
    "in-place": lambda: nn.Dropout(0.1, inplace=True),
    "bound": Dropped,
    "itself": DropsByItself,
    "flat": DropsFlat,
    "tokens-first": DropsTokensFirst,
    "places": DropsPlaces,
    "last": DropsLast,
    "samples": DropsSamples,
    "features": DropsFeatures,
    "place": DropsByPlace,
    "channels": lambda: nn.Dropout1d(0.1),
}
ATTENTION = {
    "multihead": Multihead,
    "twice": Twice,
    "shifted": Shifted,
    "bound": Bound,
    "open": Open,
    "dropping": Dropping,
    "windowed": Windowed,
}


def placed() -> Placed:
    """A target whose forward takes positions."""
    return Placed()


def deaf() -> Placed:
    """A target whose forward takes positions and does not read them."""
    return Deaf()


def counting() -> Placed:
    """A target whose forward takes tokens alone."""
    return Counting()


def by_length() -> Placed:
    """A target that depends on the number of tokens."""
    return ByLength()


def late() -> Placed:
    """A target that counts its tokens, and does otherwise where there are many."""
    return Late()


def dropping(kind: str = "module") -> Drops:
    """A target that drops out something."""
    return Drops(kind)


def with_attention(kind: str) -> Placed:
    """A target with attention of this kind."""
    model = Placed()
    for layer in model.layers:
        layer.mixing = ATTENTION[kind](HIDDEN, 4)
    return model
