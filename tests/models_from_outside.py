"""Language models written without ptrain; some carry plans. Legend of shape suffixes: B samples, T
tokens, C hidden, H heads, D elements per head."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB, POSITIONS = 260, 64

# Roles on the tensor axis, of attention and MLP as below.
BLOCK_PLAN = {
    "h.*.ln_1": "norm",
    "h.*.attn": "whole input",
    "h.*.attn.q": "column",
    "h.*.attn.k": "column",
    "h.*.attn.v": "column",
    "h.*.attn.proj": "row",
    "h.*.ln_2": "norm",
    "h.*.mlp": "whole input",
    "h.*.mlp.up": "column",
    "h.*.mlp.down": "row",
    "ln_f": "last norm",
    "head": "head",
}

# A spec's plan for nanoGPT, which has none.
NANO_PLAN = {
    "transformer.wte": "vocabulary",
    "transformer.h.*.attn": "whole input",
    "transformer.h.*.attn.c_attn": "fused column",
    "transformer.h.*.attn.c_proj": "row",
    "transformer.h.*.attn.n_head": "count",
    "transformer.h.*.attn.n_embd": "count",
    "transformer.h.*.mlp": "whole input",
    "transformer.h.*.mlp.up": "column",
    "transformer.h.*.mlp.down": "row",
    "lm_head": "head",
}


class FusedAttention(nn.Module):
    """Attention with query, key and value in one projection, with sizes as attributes, as in
    nanoGPT."""

    def __init__(self, hidden: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.c_attn = nn.Linear(hidden, 3 * hidden)
        self.c_proj = nn.Linear(hidden, hidden)
        self.resid_dropout = nn.Dropout(dropout)
        self.n_head, self.n_embd, self.dropout = heads, hidden, dropout

    def forward(self, x_BTC: Tensor) -> Tensor:
        samples, tokens, width = x_BTC.size()
        q_BTC, k_BTC, v_BTC = self.c_attn(x_BTC).split(self.n_embd, dim=2)
        q_BHTD, k_BHTD, v_BHTD = (
            part.view(samples, tokens, self.n_head, width // self.n_head).transpose(1, 2)
            for part in (q_BTC, k_BTC, v_BTC)
        )
        y_BHTD = F.scaled_dot_product_attention(
            q_BHTD,
            k_BHTD,
            v_BHTD,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=True,
        )
        y_BTC = y_BHTD.transpose(1, 2).contiguous().view(samples, tokens, width)
        y: Tensor = self.resid_dropout(self.c_proj(y_BTC))
        return y


class SlicedAttention(nn.Module):
    """Attention with one projection for query, key and value, whose head count follows from its
    tensors."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=False)
        self.proj = nn.Linear(hidden, hidden, bias=False)
        self.head_dim = hidden // heads

    def forward(self, x_BTC: Tensor) -> Tensor:
        q_BTHD, k_BTHD, v_BTHD = (
            part.unflatten(-1, (-1, self.head_dim)) for part in self.qkv(x_BTC).chunk(3, dim=-1)
        )
        y_BHTD = F.scaled_dot_product_attention(
            q_BTHD.transpose(1, 2), k_BTHD.transpose(1, 2), v_BTHD.transpose(1, 2), is_causal=True
        )
        y: Tensor = self.proj(y_BHTD.transpose(1, 2).flatten(2))
        return y


class Attention(nn.Module):
    """Attention with three projections, whose head count follows from their outputs."""

    def __init__(self, hidden: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(hidden, hidden) for _ in range(3))
        self.proj = nn.Linear(hidden, hidden)
        self.head_dim, self.dropout = hidden // heads, dropout

    def forward(self, x_BTC: Tensor) -> Tensor:
        q_BHTD, k_BHTD, v_BHTD = (
            layer(x_BTC).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        dropout = self.dropout if self.training else 0.0
        y_BHTD = F.scaled_dot_product_attention(
            q_BHTD, k_BHTD, v_BHTD, dropout_p=dropout, is_causal=True
        )
        y: Tensor = self.proj(y_BHTD.transpose(1, 2).flatten(2))
        return y


class MLP(nn.Module):
    def __init__(self, hidden: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.up = nn.Linear(hidden, 4 * hidden)
        self.down = nn.Linear(4 * hidden, hidden)
        self.drop = nn.Dropout(dropout)

    def forward(self, x_BTC: Tensor) -> Tensor:
        y: Tensor = self.drop(self.down(F.gelu(self.up(x_BTC))))
        return y


class Block(nn.Module):
    def __init__(self, hidden: int, attn: nn.Module, dropout: float = 0.0) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(hidden)
        self.attn = attn
        self.ln_2 = nn.LayerNorm(hidden)
        self.mlp = MLP(hidden, dropout)

    def forward(self, x_BTC: Tensor) -> Tensor:
        x_BTC = x_BTC + self.attn(self.ln_1(x_BTC))
        x: Tensor = x_BTC + self.mlp(self.ln_2(x_BTC))
        return x


class NanoGpt(nn.Module):
    """nanoGPT's layout: all modules except the head are in `transformer`, and the head is tied. It
    returns logits; with `gives_loss` nanoGPT's pair of logits and loss, with the last token's
    logits only if there are no targets."""

    def __init__(self, hidden: int, layers: int, heads: int, dropout: float, gives_loss: bool):
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(VOCAB, hidden),
                "wpe": nn.Embedding(POSITIONS, hidden),
                "drop": nn.Dropout(dropout),
                "h": nn.ModuleList(
                    Block(hidden, FusedAttention(hidden, heads, dropout), dropout)
                    for _ in range(layers)
                ),
                "ln_f": nn.LayerNorm(hidden),
            }
        )
        self.lm_head = nn.Linear(hidden, VOCAB, bias=False)
        self.transformer.wte.weight = self.lm_head.weight
        self.gives_loss = gives_loss

    def forward(
        self, idx: Tensor, targets: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor | None]:
        positions_T = torch.arange(idx.size(1), device=idx.device)
        x_BTC = self.transformer.wte(idx) + self.transformer.wpe(positions_T)
        x_BTC = self.transformer.drop(x_BTC)
        for block in self.transformer.h:
            x_BTC = block(x_BTC)
        x_BTC = self.transformer.ln_f(x_BTC)
        if not self.gives_loss:
            logits: Tensor = self.lm_head(x_BTC)
            return logits
        if targets is None:
            return self.lm_head(x_BTC[:, [-1], :]), None
        logits = self.lm_head(x_BTC)
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Embeddings(nn.Module):
    """Token and position embeddings in one module."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, hidden)
        self.positions = nn.Embedding(POSITIONS, hidden)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        positions_T = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        x: Tensor = self.tokens(tokens_BT) + self.positions(positions_T)
        return x


class Nested(nn.Module):
    """Two embeddings in a module before the blocks, with a tied or untied head."""

    def __init__(self, hidden: int, blocks: list[Block], tied: bool) -> None:
        super().__init__()
        self.emb = Embeddings(hidden)
        self.h = nn.ModuleList(blocks)
        self.ln_f = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, VOCAB, bias=False)
        if tied:
            self.head.weight = self.emb.tokens.weight

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x_BTC = self.emb(tokens_BT)
        for block in self.h:
            x_BTC = block(x_BTC)
        logits: Tensor = self.head(self.ln_f(x_BTC))
        return logits


class ConvBlock(nn.Module):
    """A causal convolution, then a recurrent layer, then an MLP."""

    def __init__(self, hidden: int, width: int = 4) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(hidden)
        self.conv = nn.Conv1d(hidden, hidden, width, groups=hidden)
        self.ln_r = nn.LayerNorm(hidden)
        self.rnn = nn.GRU(hidden, hidden, batch_first=True)
        self.ln_2 = nn.LayerNorm(hidden)
        self.mlp = MLP(hidden)
        self.width = width

    def forward(self, x_BTC: Tensor) -> Tensor:
        padded_BCT = F.pad(self.ln_1(x_BTC).transpose(1, 2), (self.width - 1, 0))
        x_BTC = x_BTC + F.silu(self.conv(padded_BCT)).transpose(1, 2)
        x_BTC = x_BTC + self.rnn(self.ln_r(x_BTC))[0]
        x: Tensor = x_BTC + self.mlp(self.ln_2(x_BTC))
        return x


class ConvLM(nn.Module):
    """A model without attention."""

    def __init__(self, hidden: int, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, hidden)
        self.h = nn.ModuleList(ConvBlock(hidden) for _ in range(layers))
        self.ln_f = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, VOCAB, bias=False)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x_BTC = self.embed(tokens_BT)
        for block in self.h:
            x_BTC = block(x_BTC)
        logits: Tensor = self.head(self.ln_f(x_BTC))
        return logits


def nano(
    hidden: int = 32, layers: int = 4, heads: int = 4, dropout: float = 0.0, loss: bool = False
) -> NanoGpt:
    """Return nanoGPT without a plan."""
    return NanoGpt(hidden, layers, heads, dropout, loss)


def nested(
    hidden: int = 32, layers: int = 4, heads: int = 4, tied: bool = True, planned: bool = True
) -> Nested:
    """Return a model whose embeddings are in one module."""
    model = Nested(hidden, [Block(hidden, Attention(hidden, heads)) for _ in range(layers)], tied)
    if planned:
        model.pp_plan = ["emb", "h", "ln_f", "head"]
        model.tp_plan = BLOCK_PLAN
    return model


def fused(hidden: int = 32, layers: int = 4, heads: int = 4) -> Nested:
    """Return a model with a fused projection of query, key and value."""
    blocks = [Block(hidden, SlicedAttention(hidden, heads)) for _ in range(layers)]
    model = Nested(hidden, blocks, tied=False)
    columns = ("h.*.attn.q", "h.*.attn.k", "h.*.attn.v")
    plan = {name: word for name, word in BLOCK_PLAN.items() if name not in columns}
    model.tp_plan = plan | {"h.*.attn.qkv": "fused column"}
    return model


def dropping(hidden: int = 32, layers: int = 4, heads: int = 4, dropout: float = 0.1) -> Nested:
    """Return a model with dropout in attention and after the MLP."""
    blocks = [Block(hidden, Attention(hidden, heads, dropout), dropout) for _ in range(layers)]
    model = Nested(hidden, blocks, tied=False)
    model.tp_plan = BLOCK_PLAN
    return model


def conv(hidden: int = 32, layers: int = 4) -> ConvLM:
    """Return a model of convolutions and recurrence, whose MLPs can be sharded."""
    model = ConvLM(hidden, layers)
    model.tp_plan = {
        "h.*.mlp": "whole input",
        "h.*.mlp.up": "column",
        "h.*.mlp.down": "row",
        "head": "head",
    }
    return model


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the loss of a step that nanoGPT computes itself."""
    inputs_BT, targets_BT = batch
    _, loss = model(inputs_BT, targets_BT)
    return loss
