"""Attention between its projections: causal `core(q, k, v)` modules, one per kernel kind of a spec.

Legend of shape suffixes: B samples, H heads, G key-value heads, R heads per key-value head, T
tokens, D elements per head.

A core has no parameters. Keys and values arrive with G heads, and a core repeats them by an
explicit copy, because not every kernel accepts fewer heads than queries have; with
`attention=sdpa-gqa` it does not, and torch selects among the kernels that do. A layer with a window
also passes a mask, which is added to the scores: 0 or -inf. For samples that hold several documents
the mask has one entry per sample: [B, 1, T, T].

In samples of several documents a token attends only to earlier tokens of its document and to
itself. Positions count from the start of the sample, not of the document. For rotary embeddings
both give identical scores, since scores depend on position differences.

Note: every tensor that eager attention saves for the backward pass has a size that is one product
of shape fields, and none is changed in place. A recomputation policy may therefore keep any of
them.
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

from ptrain.errors import input_error
from ptrain.internals.dispatch import disable_modes
from ptrain.models.numerics import cap_values, widen
from ptrain.spec.model import Attention, ExternalModel, ModelShape, ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """The transformations of attention scores before the softmax.

    Attributes:
        scale: Factor of the scores; None means D ** -0.5.
        cap: Bound of the scores, applied by tanh; None leaves them unbounded.
        window: Number of most recent tokens that a query attends to; None means all.
    """

    scale: float | None = None
    cap: float | None = None
    window: int | None = None


class SdpaCore(nn.Module):
    """Attention by torch's `scaled_dot_product_attention`, with the kernel that torch selects.

    Args:
        dropout: Probability with which a weight of a value is set to 0.
        scores: Changes of the scores.
        is_grouped: Keys and values keep their G heads (`enable_gqa`) and are not copied.
    """

    def __init__(
        self, dropout: float = 0.0, scores: Scores | None = None, *, is_grouped: bool = False
    ) -> None:
        super().__init__()
        self.dropout, self.scores, self.is_grouped = dropout, scores or Scores(), is_grouped

    def forward(
        self, q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, mask_TT: Tensor | None = None
    ) -> Tensor:
        repeats = 1 if self.is_grouped else q_BHTD.shape[1] // k_BGTD.shape[1]
        num_tokens = q_BHTD.shape[-2]
        if mask_TT is not None:
            mask_TT = mask_TT[..., :num_tokens, :num_tokens]
        return self.attend(
            q_BHTD, repeat_heads(k_BGTD, repeats), repeat_heads(v_BGTD, repeats), mask_TT
        )

    def attend(
        self, q_BHTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, mask_TT: Tensor | None
    ) -> Tensor:
        """Return the attention output [B, H, T, D] of queries, keys and values with equal head
        counts, or with fewer heads of keys and values if `is_grouped`.

        CPU kernels and the GPU's flash kernel need values as wide as queries, so narrower values
        are padded with zeros, and the padding is removed from the output.

        Args:
            q_BHTD: Queries [B, H, T, D].
            k_BHTD: Keys [B, H, T, D].
            v_BHTD: Values [B, H, T, at most D].
            mask_TT: Additive mask that broadcasts to [B, H, T, T]; None: causal attention.

        Returns:
            The output [B, H, T, width of the values].
        """
        narrow, wide = v_BHTD.shape[-1], q_BHTD.shape[-1]
        y_BHTD = F.scaled_dot_product_attention(
            q_BHTD,
            k_BHTD,
            v_BHTD if narrow == wide else F.pad(v_BHTD, (0, wide - narrow)),
            mask_TT,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=mask_TT is None,
            scale=self.scores.scale,
            enable_gqa=self.is_grouped,
        )
        return y_BHTD if narrow == wide else y_BHTD[..., :narrow]


class EagerCore(SdpaCore):
    """Attention operator by operator, with the softmax in at least fp32.

    Scores, probabilities and their dropout output have B·H·T·T elements each.
    """

    def attend(
        self, q_BHTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, mask_TT: Tensor | None
    ) -> Tensor:
        scale = self.scores.scale or q_BHTD.shape[-1] ** -0.5
        scores_BHTT = cap_values((q_BHTD * scale) @ k_BHTD.transpose(-2, -1), self.scores.cap)
        p_BHTT = _softmax(scores_BHTT, mask_TT)
        # Scores have as many elements as probabilities, and forward needs them no more.
        del scores_BHTT
        if self.dropout:
            p_BHTT = F.dropout(p_BHTT, self.dropout, self.training)
        return p_BHTT @ v_BHTD


class FlexCore(SdpaCore):
    """Attention by torch's `flex_attention` over the blocks that a causal mask keeps.

    It is compiled on CUDA only; on a CPU it has no backward pass. Dispatch modes are disabled
    during the call, because a memory ledger would see the result but not the allocations inside the
    compiled kernel.
    """

    def attend(
        self, q_BHTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, mask_TT: Tensor | None
    ) -> Tensor:
        flex: Any = _compile_flex_attention() if q_BHTD.is_cuda else flex_attention
        scores = self.scores
        change = None if scores.cap is None else _cap_score_mod(scores.cap)
        with disable_modes():
            mask = _causal_blocks(q_BHTD.shape[-2], scores.window, q_BHTD.device)
            y_BHTD: Tensor = flex(
                q_BHTD, k_BHTD, v_BHTD, score_mod=change, block_mask=mask, scale=scores.scale
            )
        return y_BHTD


def attention_core(shape: ModelShape, layer: int) -> SdpaCore:
    """Return the attention module of a layer.

    No kernel of torch's `scaled_dot_product_attention` caps scores, so models that cap them use
    `EagerCore`.

    Args:
        shape: The model.
        layer: Index of the layer, which decides if its attention has a window.

    Raises:
        SpecError: The model has attention dropout, which `flex_attention` does not support.
    """
    dropout = shape.dropouts.attention
    scores = Scores(
        scale=shape.attention_scale,
        cap=shape.attention_soft_cap,
        window=shape.window if shape.is_local(layer) else None,
    )
    match shape.attention:
        case Attention.SDPA | Attention.SDPA_GQA:
            if not shape.is_fused:
                return EagerCore(dropout, scores)
            return SdpaCore(dropout, scores, is_grouped=shape.is_grouped)
        case Attention.EAGER:
            return EagerCore(dropout, scores)
        case Attention.FLEX:
            if dropout:
                raise input_error(
                    "attention",
                    f"flex_attention has no dropout, but the model has dropout={dropout}",
                    "Use `attention=sdpa`, `attention=eager` or `model.dropout=0`.",
                )
            return FlexCore(scores=scores)
        case kind:
            assert_never(kind)


def is_trainable(model: ModelSpec, device: torch.device) -> bool:
    """Return True if the model's attention has a backward pass on this device."""
    is_flex = not isinstance(model, ExternalModel) and model.attention is Attention.FLEX
    return not is_flex or device.type == "cuda"


def require_trainable(model: ModelSpec, device: torch.device) -> None:
    """Raise SpecError if the model's attention has no backward pass on this device."""
    if not is_trainable(model, device):
        raise input_error(
            "attention",
            f"torch's flex_attention has no backward pass on {device.type}",
            "Use `attention=sdpa` or `attention=eager`, or train with `device=cuda`.",
        )


def repeat_heads(x_BGTD: Tensor, repeats: int) -> Tensor:
    """Return a copy with each head repeated `repeats` times in a row, even where G = 1 allows a
    view.

    Args:
        x_BGTD: Keys or values [B, G, T, D] of G heads.
        repeats: The number of query heads per head.

    Returns:
        The heads [B, G · repeats, T, D], or `x_BGTD` itself if `repeats` is 1.
    """
    if repeats == 1:
        return x_BGTD
    x_BTGRD = x_BGTD.transpose(1, 2).unsqueeze(3).expand(-1, -1, -1, repeats, -1)
    # Laid out by tokens and then by heads, as the output of a projection is, so that kernels see
    # one layout for queries, keys and values.
    x_BTHD = x_BTGRD.clone(memory_format=torch.contiguous_format).flatten(2, 3)
    return x_BTHD.transpose(1, 2)


def _softmax(scores_BHTT: Tensor, mask_TT: Tensor | None) -> Tensor:
    """Return probabilities of causal scores, or of scores to which a mask is added."""
    num_tokens = scores_BHTT.shape[-1]
    if mask_TT is not None:
        masked_BHTT = widen(scores_BHTT) + mask_TT
    else:
        ones_TT = torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=scores_BHTT.device)
        masked_BHTT = widen(scores_BHTT).masked_fill(ones_TT.triu(1), float("-inf"))
    return masked_BHTT.softmax(-1).to(scores_BHTT.dtype)


def _causal_mask_mod(_sample: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return query >= key


def _cap_score_mod(cap: float) -> Callable[..., Tensor]:
    """Return a `score_mod` for `flex_attention` that bounds scores by ±`cap`."""

    def change(
        score: Tensor, _sample: Tensor, _head: Tensor, _query: Tensor, _key: Tensor
    ) -> Tensor:
        return cap_values(score, cap)

    return change


@cache
def _causal_blocks(num_tokens: int, window: int | None, device: torch.device) -> BlockMask:
    """Return the block mask of causal attention, shared by all layers with this window.

    The mask depends on no tensor values, so it is cached.
    """

    def within(sample: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return _causal_mask_mod(sample, head, query, key) & (query - key < (window or 0))

    seen = _causal_mask_mod if window is None else within
    return create_block_mask(seen, None, None, num_tokens, num_tokens, device=str(device))


@cache
def _compile_flex_attention() -> Any:
    """Return the compiled `flex_attention`; the uncompiled one computes all T·T scores."""
    return torch.compile(flex_attention)


class DocumentMasks(nn.Module):
    """The module that finds the document boundaries of samples and masks attention across them.

    The token `edge` starts each document, or ends it if `ends` is True.
    """

    def __init__(self, edge: int, *, ends: bool) -> None:
        super().__init__()
        self.edge, self.ends = edge, ends

    def forward(self, tokens_BT: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the additive attention mask [B, 1, T, T]: 0, or -inf for tokens that are not
        attended to.

        Args:
            tokens_BT: Token ids [B, T].
            dtype: The dtype of the mask.
        """
        documents_BT = self.number_documents(tokens_BT == self.edge)
        return added_mask(documents_BT, documents_BT, dtype)

    def number_documents(self, edges_BT: Tensor) -> Tensor:
        """Return the index of each token's document within its sample, given where edge tokens
        are.

        Args:
            edges_BT: Boolean [B, T], True for tokens that mark the edge of a document.
        """
        begun_BT = edges_BT.cumsum(1)
        return begun_BT - edges_BT.to(begun_BT.dtype) if self.ends else begun_BT


def documents_of(shape: ModelShape) -> DocumentMasks | None:
    """Return the document module of a model; None if each sample is one document."""
    if shape.document_start is not None:
        return DocumentMasks(shape.document_start, ends=False)
    return None if shape.document_end is None else DocumentMasks(shape.document_end, ends=True)


def added_mask(
    queries_BT: Tensor, keys_BT: Tensor, dtype: torch.dtype, *, first: int = 0
) -> Tensor:
    """Return the additive causal mask [B, 1, queries, keys] for tokens with these document indices.

    Args:
        queries_BT: Document index of each query.
        keys_BT: Document index of each key.
        dtype: Data type of the mask.
        first: Index of the key that is the first query.
    """
    apart_BTT = are_apart(queries_BT, keys_BT)
    apart_BTT |= torch.ones_like(apart_BTT[0]).triu(1 + first)
    return additive_mask(apart_BTT, dtype)


def are_apart(queries_BT: Tensor, keys_BT: Tensor) -> Tensor:
    """Return True for each pair [B, queries, keys] whose query and key are in different
    documents.

    Args:
        queries_BT: The document of each query, int [B, queries].
        keys_BT: The document of each key, int [B, keys].

    Returns:
        Boolean [B, queries, keys].
    """
    return queries_BT[:, :, None] != keys_BT[:, None, :]


def additive_mask(hidden_BTT: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the additive mask [B, 1, queries, keys] that is -inf where `hidden_BTT` is True, else
    0.

    Args:
        hidden_BTT: Boolean [B, queries, keys], True for keys that a query must not attend to.
        dtype: The dtype of the mask.
    """
    mask_BTT = torch.zeros_like(hidden_BTT, dtype=dtype)
    return mask_BTT.masked_fill_(hidden_BTT, float("-inf")).unsqueeze(1)
