"""A user's decoder that loads a folder under any placement, with fused projections, a tied head, a
shared table that no file has, and experts."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB, HEADS, LONGEST, EXPERTS = 260, 4, 64, 4


class Attention(nn.Module):
    def __init__(self, hidden: int, turns: Tensor) -> None:
        super().__init__()
        self.width, self.head_dim = hidden, hidden // HEADS
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.out = nn.Linear(hidden, hidden, bias=False)
        self.register_buffer("turns", turns, persistent=False)

    def forward(self, x_BTC: Tensor, positions: Tensor) -> Tensor:
        parts = self.qkv(x_BTC).split(self.width, -1)
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in parts)
        turns_TD = self.turns[positions[0]]
        y = F.scaled_dot_product_attention(q * turns_TD, k * turns_TD, v, is_causal=True)
        out: Tensor = self.out(y.transpose(1, 2).flatten(2))
        return out


class Feed(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(hidden, 2 * hidden), nn.Linear(2 * hidden, hidden)

    def forward(self, x_BTC: Tensor) -> Tensor:
        y: Tensor = self.down(F.silu(self.up(x_BTC)))
        return y


class AllExperts(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.num_experts = EXPERTS
        self.up = nn.Parameter(torch.randn(EXPERTS, hidden, hidden) / 8)
        self.down = nn.Parameter(torch.randn(EXPERTS, hidden, hidden) / 8)

    def forward(self, x_NC: Tensor, chosen_NK: Tensor, weights_NK: Tensor) -> Tensor:
        y_NC = torch.zeros_like(x_NC)
        for expert in range(self.num_experts):
            share_N1 = (weights_NK * (chosen_NK == expert)).sum(1, keepdim=True)
            y_NC = y_NC + torch.tanh(x_NC @ self.up[expert]) @ self.down[expert] * share_N1
        return y_NC


class Routed(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(hidden, EXPERTS), AllExperts(hidden)

    def forward(self, x_BTC: Tensor) -> Tensor:
        x_NC = x_BTC.flatten(0, 1)
        weights_NK, chosen_NK = self.router(x_NC).softmax(-1).topk(2)
        y_NC: Tensor = self.experts(x_NC, chosen_NK, weights_NK)
        return y_NC.view_as(x_BTC)


class Layer(nn.Module):
    def __init__(self, hidden: int, turns: Tensor, *, routed: bool) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.LayerNorm(hidden), Attention(hidden, turns)
        self.mlp_norm = nn.LayerNorm(hidden)
        self.mlp = Routed(hidden) if routed else Feed(hidden)

    def forward(self, x_BTC: Tensor, positions: Tensor) -> Tensor:
        x_BTC = x_BTC + self.attention(self.attention_norm(x_BTC), positions)
        y_BTC: Tensor = x_BTC + self.mlp(self.mlp_norm(x_BTC))
        return y_BTC


class Decoder(nn.Module):
    """A decoder. `beside` names a non-parameter that its constructor makes: nothing, a random
    table, or a table of a parameter's values."""

    tp_plan: ClassVar[dict[str, str]] = {
        "embed": "vocabulary",
        "layers.*.attention": "whole input",
        "layers.*.attention.qkv": "fused column",
        "layers.*.attention.width": "count",
        "layers.*.attention.out": "row",
        "layers.*.mlp": "whole input",
        "layers.*.mlp.up": "column",
        "layers.*.mlp.down": "row",
        "head": "head",
    }

    def __init__(self, hidden: int, layers: int, *, routed: bool, tied: bool, beside: str) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, hidden)
        places = torch.arange(LONGEST).unsqueeze(1) / (1 + torch.arange(hidden // HEADS))
        turns = places.cos()  # one tensor, which every layer has
        kinds = (Layer(hidden, turns, routed=routed) for _ in range(layers))
        self.layers = nn.ModuleList(kinds)
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        if routed:
            self.tp_plan = {"layers.*.mlp.experts": "experts"}
        self.register_buffer("scale", torch.full((hidden,), 0.5))
        table = torch.ones(hidden)
        if beside == "drawn":
            table = torch.rand(hidden)
        if beside == "of values":
            table = table * float(self.embed.weight.detach().abs().max())
        self.register_buffer("table", table, persistent=False)

    def forward(self, tokens_BT: Tensor, positions: Tensor | None = None) -> Tensor:
        if positions is None:
            positions = torch.arange(tokens_BT.shape[1], device=tokens_BT.device).unsqueeze(0)
        x_BTC = self.embed(tokens_BT) * self.scale * self.table
        for layer in self.layers:
            x_BTC = layer(x_BTC, positions)
        logits_BTV: Tensor = self.head(self.norm(x_BTC))
        return logits_BTV


def build(
    hidden: int = 32,
    layers: int = 2,
    *,
    routed: bool = False,
    tied: bool = True,
    beside: str = "",
) -> nn.Module:
    return Decoder(hidden, layers, routed=routed, tied=tied, beside=beside)


def save_decoder(folder: Path, arguments: str = "") -> Path:
    """Save a folder of a decoder built with these arguments; all tensors differ from their initial
    values."""
    import yaml
    from safetensors.torch import save_file

    folder.mkdir()
    given = yaml.safe_load(f"{{{arguments}}}")
    torch.manual_seed(1)
    state = build(**given).state_dict()
    if given.get("tied", True):
        del state["head.weight"]
    other = {name: tensor + torch.randn(tensor.shape) / 8 for name, tensor in state.items()}
    save_file(other, folder / "model.safetensors")
    return folder


def build_in_half() -> nn.Module:
    return build().bfloat16()


class Counting(Decoder):
    """A decoder that counts its tokens itself."""

    def forward(self, tokens_BT: Tensor, positions: Tensor | None = None) -> Tensor:
        return super().forward(tokens_BT)


class Passing(Decoder):
    """A decoder with a value without gradient that bypasses its layers."""

    def forward(self, tokens_BT: Tensor, positions: Tensor | None = None) -> Tensor:
        logits_BTV = super().forward(tokens_BT, positions)
        return logits_BTV * (1 + self.embed(tokens_BT).detach().abs().mean())


def counting() -> nn.Module:
    return Counting(32, 2, routed=False, tied=True, beside="")


def passing() -> nn.Module:
    return Passing(32, 2, routed=False, tied=True, beside="")
