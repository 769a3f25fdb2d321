"""Models with data-dependent sizes, and some that only seem so. Legend of shape suffixes: B
samples, T tokens, C hidden, N = B·T."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB, HIDDEN, EXPERTS = 260, 16, 4


class Moe(nn.Module):
    """A router and experts as separate modules; every token goes to one of them."""

    def __init__(self, by: str) -> None:
        super().__init__()
        self.by = by
        self.router = nn.Linear(HIDDEN, EXPERTS)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(HIDDEN, 2 * HIDDEN), nn.GELU(), nn.Linear(2 * HIDDEN, HIDDEN))
            for _ in range(EXPERTS)
        )

    def forward(self, x_BTC: Tensor) -> Tensor:
        x_NC = x_BTC.reshape(-1, HIDDEN)
        share_N, chosen_N = self.router(x_NC).softmax(-1).max(-1)
        if self.by == "unique":
            share_N = share_N + chosen_N.unique().numel()
        y_NC = torch.zeros_like(x_NC)
        for index, expert in enumerate(self.experts):
            y_NC = y_NC + self._run(expert, x_NC, share_N, chosen_N == index)
        return y_NC.view_as(x_BTC)

    def _run(self, expert: nn.Module, x_NC: Tensor, share_N: Tensor, own_N: Tensor) -> Tensor:
        y_NC = torch.zeros_like(x_NC)
        if self.by == "mask":
            y_NC[own_N] = share_N[own_N, None] * expert(x_NC[own_N])
            return y_NC
        (rows,) = torch.where(own_N)
        if self.by == "skipping" and not len(rows):
            return y_NC
        if self.by == "masked_select":
            share = share_N.masked_select(own_N)
            rows = rows[: len(share)]
        else:
            share = share_N[rows]
        return y_NC.index_add(0, rows, share[:, None] * expert(x_NC[rows]))


class Block(nn.Module):
    """Half a transformer's layer."""

    def __init__(self, by: str) -> None:
        super().__init__()
        self.norm, self.moe = nn.LayerNorm(HIDDEN), Moe(by)

    def forward(self, x_BTC: Tensor) -> Tensor:
        y: Tensor = x_BTC + self.moe(self.norm(x_BTC))
        return y


class Routed(nn.Module):
    """Embedding, blocks, head."""

    block: ClassVar[type[nn.Module]] = Block

    def __init__(self, by: str) -> None:
        super().__init__()
        self.emb = nn.Embedding(VOCAB, HIDDEN)
        self.h = nn.ModuleList(self.block(by) for _ in range(2))
        self.head = nn.Linear(HIDDEN, VOCAB)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x_BTC = self.emb(tokens_BT)
        for block in self.h:
            x_BTC = block(x_BTC)
        logits: Tensor = self.head(x_BTC)
        return logits


class AllExperts(nn.Module):
    """All experts of a layer, as the role `experts` requires: each has an index in both tensors.
    They run one by one on the rows that chose them, or `by` row, each with its matrix."""

    def __init__(self, by: str) -> None:
        super().__init__()
        self.by, self.num_experts = by, EXPERTS
        self.up = nn.Parameter(torch.randn(EXPERTS, 2 * HIDDEN, HIDDEN) / 4)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, 2 * HIDDEN) / 4)

    def forward(self, x_NC: Tensor, chosen_NK: Tensor, weights_NK: Tensor) -> Tensor:
        if self.by == "row":
            h_NKF = F.gelu((self.up[chosen_NK] @ x_NC[:, None, :, None]).squeeze(-1))
            y_NKC = (self.down[chosen_NK] @ h_NKF[..., None]).squeeze(-1)
            return (y_NKC * weights_NK[..., None]).sum(1)
        y_NC = torch.zeros_like(x_NC)
        for expert in range(self.num_experts):
            rows, places = torch.where(chosen_NK == expert)
            h_MF = F.gelu(x_NC[rows] @ self.up[expert].mT)
            y_MC = h_MF @ self.down[expert].mT * weights_NK[rows, places, None]
            y_NC = y_NC.index_add(0, rows, y_MC)
        return y_NC


class AllExpertsBlock(nn.Module):
    """Half a transformer's layer; every token goes to two experts."""

    def __init__(self, by: str) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.experts = AllExperts(by)

    def forward(self, x_BTC: Tensor) -> Tensor:
        x_NC = self.norm(x_BTC).flatten(0, 1)
        weights_NK, chosen_NK = self.router(x_NC).softmax(-1).topk(2)
        y_NC: Tensor = self.experts(x_NC, chosen_NK, weights_NK)
        return x_BTC + y_NC.view_as(x_BTC)


class Planned(Routed):
    """A routed model with a plan that names the modules of a layer's experts."""

    block: ClassVar[type[nn.Module]] = AllExpertsBlock
    tp_plan: ClassVar[dict[str, str]] = {"h.*.experts": "experts"}


class Padded(nn.Module):
    """A model without data-dependent sizes."""

    def __init__(self, masks: bool, positions: bool) -> None:
        super().__init__()
        self.masks, self.positions = masks, positions
        self.emb = nn.Embedding(VOCAB, HIDDEN, padding_idx=3)
        self.h = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(2))
        self.head = nn.Linear(HIDDEN, VOCAB)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x_BTC = self.emb(tokens_BT)
        if self.masks:
            x_BTC = x_BTC * (tokens_BT != 3)[..., None]
            x_BTC = torch.where((tokens_BT > 5)[..., None], x_BTC, 0.0)
            x_BTC = x_BTC.masked_fill((tokens_BT == 7)[..., None], 0.0)
        if self.positions:
            even_T = torch.arange(tokens_BT.shape[1], device=tokens_BT.device) % 2 == 0
            x_BTC = x_BTC + x_BTC[:, even_T].sum(1, keepdim=True)
        for layer in self.h:
            x_BTC = F.gelu(layer(x_BTC))
        logits: Tensor = self.head(x_BTC)
        return logits


class Reading(Padded):
    """A model with a second pass if the tokens differ, or, if it only `logs`, a note."""

    def __init__(self, by: str, *, logs: bool) -> None:
        super().__init__(masks=False, positions=False)
        self.by, self.logs = by, logs
        self.noted = False

    def forward(self, tokens_BT: Tensor) -> Tensor:
        logits = super().forward(tokens_BT)
        self.noted = self._is_mixed(tokens_BT)
        if self.noted and not self.logs:
            logits = logits + super().forward(tokens_BT)
        return logits

    def _is_mixed(self, tokens_BT: Tensor) -> bool:
        if self.by == "equal":
            return not torch.equal(tokens_BT, tokens_BT[:1, :1].expand_as(tokens_BT))
        is_other_BT = tokens_BT != tokens_BT[0, 0]
        match self.by:
            case "tolist":
                return any(map(any, is_other_BT.tolist()))
            case "numpy":
                return bool(is_other_BT.numpy().any())
            case "asarray":
                return bool(np.asarray(is_other_BT).any())
        return bool(is_other_BT.any())


class OneHot(nn.Module):
    """A model without an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.h = nn.ModuleList((nn.Linear(VOCAB, HIDDEN), nn.Linear(HIDDEN, HIDDEN)))
        self.head = nn.Linear(HIDDEN, VOCAB)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        if int(tokens_BT.max()) >= VOCAB:
            raise ValueError("no such token")
        x_BTC = F.one_hot(tokens_BT, VOCAB).to(self.head.weight.dtype)
        for layer in self.h:
            x_BTC = F.gelu(layer(x_BTC))
        logits: Tensor = self.head(x_BTC)
        return logits


class Sentences:
    """Tokens with their number, which differs between samples except for `alike` ones."""

    def __init__(self, *, alike: bool) -> None:
        self.alike = alike

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        length = 4 if self.alike else 4 + index % 4
        tokens = (torch.arange(9) * 7 + index) % VOCAB
        return {"inputs": tokens[:-1], "targets": tokens[1:], "length": torch.tensor(length)}


def moe(*, by: str = "where") -> nn.Module:
    return Routed(by)


def planned(*, by: str = "row") -> nn.Module:
    return Planned(by)


def padded(*, masks: bool = False, positions: bool = False) -> nn.Module:
    return Padded(masks, positions)


def reading(*, by: str = "any", logs: bool = False) -> nn.Module:
    return Reading(by, logs=logs)


def one_hot() -> nn.Module:
    return OneHot()


def sentences(*, alike: bool = False) -> Sentences:
    return Sentences(alike=alike)


def trimming(model: nn.Module, batch: dict[str, Tensor], most: int = 8) -> Tensor:
    """Run a step that removes positions that no sample of the micro-batch has."""
    length = int(batch["length"].max())
    if length > most:
        raise ValueError(f"a sentence of {length} tokens")
    logits_BTV = model(batch["inputs"][:, :length])
    return F.cross_entropy(logits_BTV.flatten(0, 1), batch["targets"][:, :length].flatten())
