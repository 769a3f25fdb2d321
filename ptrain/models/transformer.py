"""The built-in models: a decoder of equal blocks, composed as its shape says.

Legend of shape suffixes: B samples, T tokens, C hidden, K rotation pairs, V vocabulary.

Note: a tied head reads the embedding's weight instead of sharing a Parameter, so that `to_empty`
cannot untie it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ptrain.facts.parameters import LOCAL, tables_of
from ptrain.models.block import Block
from ptrain.models.documents import documents_of
from ptrain.models.norm import norm_of
from ptrain.models.numerics import capped
from ptrain.models.rotary import fill_tables
from ptrain.spec.block import Positions
from ptrain.spec.model import ModelShape

Spans = tuple[tuple[int, int], ...]  # first position, and the one behind the last


class EmbeddingScale(nn.Module):
    """A multiplication by a number."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x_BTC: Tensor) -> Tensor:
        return x_BTC * self.factor


class LearnedPositions(nn.Embedding):
    """Positions with a vector each, added to what stands at them: at those of `spans`, or at the
    first ones."""

    spans: Spans = ()

    def forward(self, x_BTC: Tensor) -> Tensor:
        spans = self.spans or ((0, x_BTC.shape[1]),)
        parts = [self.weight[first:behind] for first, behind in spans]
        return x_BTC + (parts[0] if len(parts) == 1 else torch.cat(parts))


class CappedHead(nn.Linear):
    """Logits, bound by tanh within the head: whoever takes its place for a loss has them so."""

    def __init__(self, hidden: int, vocab: int, cap: float, *, bias: bool, **where: Any) -> None:
        super().__init__(hidden, vocab, bias=bias, **where)
        self.cap = cap

    def forward(self, x_BTC: Tensor) -> Tensor:
        return capped(super().forward(x_BTC), self.cap)


class Transformer(nn.Module):
    """`sequence` sizes the tables of positions and of windows; shorter inputs are fine, longer ones
    are not."""

    def __init__(self, shape: ModelShape, *, sequence: int) -> None:
        super().__init__()
        self.shape = shape
        self.spans: Spans = ()  # of its tables of angles; without: from 0
        scale, rate = shape.embedding_scale, shape.dropouts.embedding
        is_learned = shape.positions is Positions.LEARNED
        self.embed = nn.Embedding(shape.vocab, shape.hidden)
        self.scale = nn.Identity() if scale is None else EmbeddingScale(scale)
        self.positions = LearnedPositions(sequence, shape.hidden) if is_learned else nn.Identity()
        self.dropout = nn.Dropout(rate) if rate else nn.Identity()
        self.documents = documents_of(shape)
        self.blocks = nn.ModuleList(Block(shape, layer) for layer in range(shape.layers))
        self.norm = norm_of(shape, shape.hidden)
        self.head = None if shape.tied else self.new_head()
        for name, sizes in tables_of(shape, sequence).items():
            empty = torch.empty(*sizes, dtype=torch.float32)
            self.register_buffer(name, empty, persistent=False)
        self.reset_buffers()

    def new_head(self, **where: Any) -> nn.Linear:
        """Return a layer to the vocabulary; `where` as of nn.Linear, device and dtype."""
        shape, cap = self.shape, self.shape.logit_soft_cap
        sizes = (shape.hidden, shape.vocab)
        if cap is None:
            return nn.Linear(*sizes, bias=shape.head_bias, **where)
        return CappedHead(*sizes, cap, bias=shape.head_bias, **where)

    @torch.no_grad()
    def reset_buffers(self) -> None:
        """Fill the tables where they stand."""
        own = dict(self.named_buffers(recurse=False))
        for prefix in ("", LOCAL):
            if (cos_TK := own.get(f"{prefix}cos_TK")) is not None:
                sin_TK = own[f"{prefix}sin_TK"]
                angles = cos_TK, sin_TK
                fill_tables(self.shape, *angles, spans=self.spans, is_local=prefix == LOCAL)
        if (mask_TT := own.get(f"{LOCAL}TT")) is not None:
            assert self.shape.window is not None, "somebody has a window"
            ones_TT = torch.ones_like(mask_TT, dtype=torch.bool)
            hidden_TT = ones_TT.triu(1) | ones_TT.tril(-self.shape.window)
            mask_TT.zero_().masked_fill_(hidden_TT, float("-inf"))

    def place_tokens(self, spans: Spans) -> None:
        """From here on inputs are the tokens at these positions. What a window hides is that of
        whole sequences still."""
        self.spans = spans
        num_tokens = sum(behind - first for first, behind in spans)
        for name, table in list(self.named_buffers(recurse=False)):
            if name.endswith("_TK"):
                rows = table.new_empty(num_tokens, *table.shape[1:])
                self.register_buffer(name, rows, persistent=False)
        if isinstance(self.positions, LearnedPositions):
            self.positions.spans = spans
        self.reset_buffers()

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x_BTC = self.dropout(self.positions(self.scale(self.embed(tokens_BT))))
        documents = self.documents
        mask_B1TT = None if documents is None else documents(tokens_BT, x_BTC.dtype)
        tables = self._tables(x_BTC, mask_B1TT)
        for layer, block in enumerate(self.blocks):
            x_BTC = block(x_BTC, *tables[self.shape.is_local(layer)])
        x_BTC = self.norm(x_BTC)
        return self.logits(x_BTC)

    def logits(self, x_BTC: Tensor) -> Tensor:
        """Return the logits of normalized hidden states."""
        if self.head is None:
            return capped(F.linear(x_BTC, self.embed.weight), self.shape.logit_soft_cap)
        logits_BTV: Tensor = self.head(x_BTC)
        return logits_BTV

    def _tables(
        self, x_BTC: Tensor, mask_B1TT: Tensor | None = None
    ) -> tuple[tuple[Tensor | None, ...], ...]:
        """Return what blocks take beside the stream: those without a window, and those with one.
        One mask each, in the dtype of what attends, is there for all of them; `mask_B1TT` is that
        of documents."""
        own = dict(self.named_buffers(recurse=False))
        everywhere = (own["cos_TK"], own["sin_TK"]) if "cos_TK" in own else ()
        local = everywhere
        if f"{LOCAL}cos_TK" in own:
            local = (own[f"{LOCAL}cos_TK"], own[f"{LOCAL}sin_TK"])
        mask = mask_B1TT
        if f"{LOCAL}TT" in own:
            mask_TT = own[f"{LOCAL}TT"].to(x_BTC.dtype)
            mask = mask_TT if mask_B1TT is None else mask_TT + mask_B1TT
        return _with_mask(everywhere, mask_B1TT), _with_mask(local, mask)


def _with_mask(tables: tuple[Tensor, ...], mask: Tensor | None) -> tuple[Tensor | None, ...]:
    return tables if mask is None else (*(tables or (None, None)), mask)
