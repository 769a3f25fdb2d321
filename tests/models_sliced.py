"""User models that receive token slices, or would."""

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
    """A model that reads position vectors at the given positions."""

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
    """A model that takes positions but counts tokens itself."""

    def forward(self, tokens_BT: Tensor, positions: Tensor | None = None) -> Tensor:
        return super().forward(tokens_BT)


class Counting(Placed):
    """A model that takes no positions."""

    def forward(self, tokens_BT: Tensor) -> Tensor:
        return super().forward(tokens_BT)


class ByLength(Placed):
    """A model whose logits depend on the number of tokens."""

    def forward(self, tokens_BT: Tensor, positions: Tensor | None = None) -> Tensor:
        return super().forward(tokens_BT, positions) * math.log(tokens_BT.shape[1] + 1)


class Late(Placed):
    """A model whose logits change from the twelfth token of a pass on."""

    def forward(self, tokens_BT: Tensor, positions: Tensor | None = None) -> Tensor:
        count_T1 = torch.arange(tokens_BT.shape[1], device=tokens_BT.device).unsqueeze(1)
        return super().forward(tokens_BT, positions) * torch.where(count_T1 < 12, 1.0, 2.0)


class Drops(Placed):
    """A model with dropout after the embedding, by `drop` in training mode."""

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
    """A model with functional dropout in training."""

    def forward(self, x_BTC: Tensor) -> Tensor:
        return self.dropped(x_BTC) if self.training else x_BTC

    def dropped(self, x_BTC: Tensor) -> Tensor:
        return dropout(x_BTC, 0.1)  # a name of the module's own


class DropsByItself(Dropped):
    def dropped(self, x_BTC: Tensor) -> Tensor:
        return x_BTC * (torch.rand_like(x_BTC) > 0.1)


class DropsFlat(Dropped):
    """A model with dropout of the tokens of all samples in one dimension."""

    def dropped(self, x_BTC: Tensor) -> Tensor:
        return F.dropout(x_BTC.flatten(0, 1), 0.1).view_as(x_BTC)


class DropsTokensFirst(Dropped):
    """A model with dropout whose first dimension is the tokens."""

    def dropped(self, x_BTC: Tensor) -> Tensor:
        return F.dropout(x_BTC.transpose(0, 1).contiguous(), 0.1).transpose(0, 1)


class DropsPlaces(Dropped):
    """A model that drops the same positions of all samples."""

    def dropped(self, x_BTC: Tensor) -> Tensor:
        return x_BTC * F.dropout(torch.ones_like(x_BTC[:1]), 0.1)


class DropsLast(Dropped):
    """A model with dropout whose last dimension is the tokens."""

    def dropped(self, x_BTC: Tensor) -> Tensor:
        return F.dropout(x_BTC.transpose(1, 2).contiguous(), 0.1).transpose(1, 2)


class DropsSamples(Dropped):
    """A model that drops full samples."""

    def dropped(self, x_BTC: Tensor) -> Tensor:
        return x_BTC * F.dropout(x_BTC.new_ones(len(x_BTC), 1, 1), 0.1)


class DropsFeatures(Dropped):
    """A model that drops the same features of all tokens, with as many features as a rank has
    tokens."""

    def dropped(self, x_BTC: Tensor) -> Tensor:
        return x_BTC * F.dropout(x_BTC.new_ones(len(x_BTC), 8), 0.1).repeat(1, 2).unsqueeze(1)


class DropsByPlace(Dropped):
    """A model that drops its first tokens."""

    def dropped(self, x_BTC: Tensor) -> Tensor:
        first_T1 = F.dropout(x_BTC.new_ones(1, 2, 1), 0.5)
        return torch.cat((x_BTC[:, :2] * first_T1, x_BTC[:, 2:]), dim=1)


class Shifted(Mixing):
    """A model in which a token sees the previous one outside of attention."""

    def forward(self, x_BTC: Tensor) -> Tensor:
        return super().forward(x_BTC + F.pad(x_BTC, (0, 0, 1, -1)))


class Otherwise(Mixing):
    """A model whose attention is the function `attend`."""

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
    """A model whose attention is bound to a module name, which cannot be replaced."""

    attend = staticmethod(partial(scaled_dot_product_attention, is_causal=True))


class Open(Otherwise):
    """A model with attention to all tokens, including later ones."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:  # type: ignore[override]
        return F.scaled_dot_product_attention(query, key, value)


class Dropping(Otherwise):
    """A model whose attention drops scores."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:  # type: ignore[override]
        return F.scaled_dot_product_attention(query, key, value, dropout_p=0.1, is_causal=True)


class Windowed(Otherwise):
    """A model with attention to the last twelve tokens, by a mask if there are more."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:  # type: ignore[override]
        length = query.shape[-2]
        if length <= 12:
            return F.scaled_dot_product_attention(query, key, value, is_causal=True)
        ones = torch.ones(length, length, dtype=torch.bool, device=query.device)
        return F.scaled_dot_product_attention(query, key, value, ones.tril().triu(-11))


class Multihead(nn.Module):
    """A model with torch's attention module."""

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
    """A model with attention to the output of attention."""

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
    """Return a model whose forward takes positions."""
    return Placed()


def deaf() -> Placed:
    """Return a model whose forward takes positions and ignores them."""
    return Deaf()


def counting() -> Placed:
    """Return a model whose forward takes only tokens."""
    return Counting()


def by_length() -> Placed:
    """Return a model that depends on the number of tokens."""
    return ByLength()


def late() -> Placed:
    """Return a model that counts its tokens and behaves differently if there are many."""
    return Late()


def dropping(kind: str = "module") -> Drops:
    """Return a model with dropout."""
    return Drops(kind)


def with_attention(kind: str) -> Placed:
    """Return a model with this kind of attention."""
    model = Placed()
    for layer in model.layers:
        layer.mixing = ATTENTION[kind](HIDDEN, 4)
    return model
