"""What attention computes between its projections: `core(q, k, v)`, causal, by the spec's kind.

Legend of shape suffixes: B samples, H heads, G key-value heads, R heads per key-value head, T
tokens, D elements per head. A core has no parameters; it is given keys and values of as many heads
as they have, and repeats them by an explicit copy: not every kernel takes fewer. Where a layer has
a window it is given a mask too, whose elements are added to scores: 0, or -inf; where samples are
of documents one of each sample [B, 1, T, T].

In samples of several documents a token attends to those of its own document alone, up to itself.
Positions are those in the sample: they do not begin anew with a document. Rotary ones are the same
either way, since scores depend on their differences.

Note: of eager attention every tensor that is saved for the backward pass has a size that is one
product of shape fields, and none is changed in place, so that a policy may keep any of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, assert_never

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from ptrain.errors import refused
from ptrain.internals.dispatch import without_modes
from ptrain.models.numerics import capped, widen
from ptrain.spec.model import Attention, ExternalModel, ModelShape, ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """What becomes of scores. `scale`: None for D ** -0.5; `cap` bounds them; `window`: tokens that
    a query attends to, None for all."""

    scale: float | None = None
    cap: float | None = None
    window: int | None = None


class Core(nn.Module):
    """torch's scaled_dot_product_attention, whatever kernel it takes."""

    def __init__(self, dropout: float = 0.0, scores: Scores | None = None) -> None:
        super().__init__()
        self.dropout, self.scores = dropout, scores or Scores()

    def forward(
        self, q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, mask_TT: Tensor | None = None
    ) -> Tensor:
        repeats, num_tokens = q_BHTD.shape[1] // k_BGTD.shape[1], q_BHTD.shape[-2]
        if mask_TT is not None:
            mask_TT = mask_TT[..., :num_tokens, :num_tokens]
        return self.attend(q_BHTD, repeated(k_BGTD, repeats), repeated(v_BGTD, repeats), mask_TT)

    def attend(
        self, q_BHTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, mask_TT: Tensor | None
    ) -> Tensor:
        """Return the values that each query attends to, of as many heads each. The fused kernels of
        processors, and flash's of GPUs, take values as wide as queries: narrower ones are filled up
        with zeros."""
        narrow, wide = v_BHTD.shape[-1], q_BHTD.shape[-1]
        y_BHTD = F.scaled_dot_product_attention(
            q_BHTD,
            k_BHTD,
            v_BHTD if narrow == wide else F.pad(v_BHTD, (0, wide - narrow)),
            mask_TT,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=mask_TT is None,
            scale=self.scores.scale,
        )
        return y_BHTD if narrow == wide else y_BHTD[..., :narrow]


class EagerCore(Core):
    """Operator by operator: scores, probabilities and what dropout leaves of them are B·H·T·T
    elements each. The softmax is computed in at least fp32."""

    def attend(
        self, q_BHTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, mask_TT: Tensor | None
    ) -> Tensor:
        scale = self.scores.scale or q_BHTD.shape[-1] ** -0.5
        scores_BHTT = capped((q_BHTD * scale) @ k_BHTD.transpose(-2, -1), self.scores.cap)
        p_BHTT = _softmax(scores_BHTT, mask_TT)
        del scores_BHTT
        if self.dropout:
            p_BHTT = F.dropout(p_BHTT, self.dropout, self.training)
        return p_BHTT @ v_BHTD


class FlexCore(Core):
    """torch's flex_attention over the blocks that a causal mask leaves, compiled where it trains:
    on a processor it has no backward pass. Nothing is compiled while a dispatch mode watches: a
    ledger sees what it returns, not what it allocates in between."""

    def attend(
        self, q_BHTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, mask_TT: Tensor | None
    ) -> Tensor:
        flex: Any = _compiled() if q_BHTD.is_cuda else flex_attention
        scores = self.scores
        change = None if scores.cap is None else _capping(scores.cap)
        with without_modes():
            mask = _causal_blocks(q_BHTD.shape[-2], scores.window, q_BHTD.device)
            y_BHTD: Tensor = flex(
                q_BHTD, k_BHTD, v_BHTD, score_mod=change, block_mask=mask, scale=scores.scale
            )
        return y_BHTD


def attention_core(shape: ModelShape, layer: int) -> Core:
    """The core of a layer's attention. No kernel that torch's scaled_dot_product_attention may take
    bounds scores: where they are, it goes operator by operator."""
    dropout = shape.dropouts.attention
    scores = Scores(
        scale=shape.attention_scale,
        cap=shape.attention_soft_cap,
        window=shape.window if shape.is_local(layer) else None,
    )
    match shape.attention:
        case Attention.SDPA:
            return Core(dropout, scores) if shape.is_fused else EagerCore(dropout, scores)
        case Attention.EAGER:
            return EagerCore(dropout, scores)
        case Attention.FLEX:
            if dropout:
                raise refused(
                    "attention",
                    f"flex_attention has no dropout, but the model has dropout={dropout}",
                    "Use `attention=sdpa`, `attention=eager` or `model.dropout=0`.",
                )
            return FlexCore(scores=scores)
        case kind:
            assert_never(kind)


def is_trainable(model: ModelSpec, device: torch.device) -> bool:
    """Return whether the model's attention has a backward pass on this device."""
    is_flex = not isinstance(model, ExternalModel) and model.attention is Attention.FLEX
    return not is_flex or device.type == "cuda"


def require_trainable(model: ModelSpec, device: torch.device) -> None:
    """Raises SpecError for attention that has no backward pass on this device."""
    if not is_trainable(model, device):
        raise refused(
            "attention",
            f"torch's flex_attention has no backward pass on {device.type}",
            "Use `attention=sdpa` or `attention=eager`, or train with `device=cuda`.",
        )


def repeated(x_BGTD: Tensor, repeats: int) -> Tensor:
    """Return each head `repeats` times in a row: a copy, even where G = 1 allows a view."""
    if repeats == 1:
        return x_BGTD
    x_BTGRD = x_BGTD.transpose(1, 2).unsqueeze(3).expand(-1, -1, -1, repeats, -1)
    x_BTHD = x_BTGRD.clone(memory_format=torch.contiguous_format).flatten(2, 3)
    return x_BTHD.transpose(1, 2)


def _softmax(scores_BHTT: Tensor, mask_TT: Tensor | None) -> Tensor:
    """Of every token over itself and those before it, or those that a mask leaves."""
    num_tokens = scores_BHTT.shape[-1]
    if mask_TT is not None:
        masked_BHTT = widen(scores_BHTT) + mask_TT
    else:
        ones_TT = torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=scores_BHTT.device)
        masked_BHTT = widen(scores_BHTT).masked_fill(ones_TT.triu(1), float("-inf"))
    return masked_BHTT.softmax(-1).to(scores_BHTT.dtype)


def _causal(_sample: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return query >= key


def _capping(cap: float) -> Callable[..., Tensor]:
    """Return what flex_attention makes of a score."""

    def change(
        score: Tensor, _sample: Tensor, _head: Tensor, _query: Tensor, _key: Tensor
    ) -> Tensor:
        return capped(score, cap)

    return change


@cache
def _causal_blocks(num_tokens: int, window: int | None, device: torch.device) -> BlockMask:
    """One for all layers with this window: it depends on no value."""

    def within(sample: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return _causal(sample, head, query, key) & (query - key < (window or 0))

    seen = _causal if window is None else within
    return create_block_mask(seen, None, None, num_tokens, num_tokens, device=str(device))


@cache
def _compiled() -> Any:
    """Uncompiled it would compute every score."""
    return torch.compile(flex_attention)


class Documents(nn.Module):
    """The documents of samples, each of which begins with the token `edge`, or, if that `ends`
    them, ends with it."""

    def __init__(self, edge: int, *, ends: bool) -> None:
        super().__init__()
        self.edge, self.ends = edge, ends

    def forward(self, tokens_BT: Tensor, dtype: torch.dtype) -> Tensor:
        """Return what is added to scores of every head [B, 1, T, T]: 0, or -inf of what a token
        does not attend to."""
        documents_BT = self.numbered(tokens_BT == self.edge)
        return added_mask(documents_BT, documents_BT, dtype)

    def numbered(self, edges_BT: Tensor) -> Tensor:
        """Return which document of its sample each token is in, by where edges are."""
        begun_BT = edges_BT.cumsum(1)
        return begun_BT - edges_BT.to(begun_BT.dtype) if self.ends else begun_BT


def documents_of(shape: ModelShape) -> Documents | None:
    """Return the documents of a model's samples; None where each sample is one."""
    if shape.document_start is not None:
        return Documents(shape.document_start, ends=False)
    return None if shape.document_end is None else Documents(shape.document_end, ends=True)


def added_mask(
    queries_BT: Tensor, keys_BT: Tensor, dtype: torch.dtype, *, first: int = 0
) -> Tensor:
    """Return the mask [B, 1, queries, keys] of tokens by the number of their document; the first
    query is the key at `first`."""
    apart_BTT = are_apart(queries_BT, keys_BT)
    apart_BTT |= torch.ones_like(apart_BTT[0]).triu(1 + first)
    return hiding(apart_BTT, dtype)


def are_apart(queries_BT: Tensor, keys_BT: Tensor) -> Tensor:
    """Return of tokens by the number of their document whether queries and keys [B, queries, keys]
    are of two."""
    return queries_BT[:, :, None] != keys_BT[:, None, :]


def hiding(hidden_BTT: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what is added to scores of every head [B, 1, queries, keys]: -inf where hidden."""
    mask_BTT = torch.zeros_like(hidden_BTT, dtype=dtype)
    return mask_BTT.masked_fill_(hidden_BTT, float("-inf")).unsqueeze(1)
