"""A small vision transformer with a user's data and losses, written without ptrain. Legend of shape
suffixes: B samples, N patches and the class token, C hidden."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

SIZE, PATCH, CLASSES = 12, 4, 10
VECTORS = (SIZE // PATCH) ** 2 + 1  # patches and the class token


class Attention(nn.Module):
    """Full attention between patches."""

    def __init__(self, hidden: int, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.query = nn.Linear(hidden, hidden)
        self.key = nn.Linear(hidden, hidden)
        self.value = nn.Linear(hidden, hidden)
        self.project = nn.Linear(hidden, hidden)

    def forward(self, x_BNC: Tensor) -> Tensor:
        query, key, value = (
            layer(x_BNC).view(*x_BNC.shape[:2], -1, self.head_dim).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(query, key, value)
        output: Tensor = self.project(mixed.transpose(1, 2).flatten(2))
        return output


class Mlp(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(hidden, 2 * hidden), nn.Linear(2 * hidden, hidden)

    def forward(self, x_BNC: Tensor) -> Tensor:
        output: Tensor = self.down(F.gelu(self.up(x_BNC)))
        return output


class EncoderBlock(nn.Module):
    def __init__(self, hidden: int, head_dim: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.attention = Attention(hidden, head_dim)
        self.mlp = Mlp(hidden)

    def forward(self, x_BNC: Tensor) -> Tensor:
        x_BNC = x_BNC + self.attention(self.norm_1(x_BNC))
        output: Tensor = x_BNC + self.mlp(self.norm_2(x_BNC))
        return output


class ViT(nn.Module):
    """`forward(images [B, 3, SIZE, SIZE]) -> logits [B, CLASSES]`."""

    def __init__(self, hidden: int, layers: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, hidden, kernel_size=PATCH, stride=PATCH)
        self.class_token = nn.Parameter(torch.randn(1, 1, hidden) * 0.02)
        self.positions = nn.Parameter(torch.randn(1, VECTORS, hidden) * 0.02)
        self.blocks = nn.ModuleList(EncoderBlock(hidden, 8) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        patches_BNC = self.patches(images).flatten(2).transpose(1, 2)
        token = self.class_token.expand(len(images), -1, -1)
        x_BNC = torch.cat((token, patches_BNC), dim=1) + self.positions
        for block in self.blocks:
            x_BNC = block(x_BNC)
        logits: Tensor = self.head(self.norm(x_BNC)[:, 0])
        return logits


VIT_PLAN = {
    "blocks.*.attention": "whole input",
    "blocks.*.attention.query": "column",
    "blocks.*.attention.key": "column",
    "blocks.*.attention.value": "column",
    "blocks.*.attention.project": "row",
    "blocks.*.norm_1": "norm",
    "blocks.*.norm_2": "norm",
    "blocks.*.mlp": "whole input",
    "blocks.*.mlp.up": "column",
    "blocks.*.mlp.down": "row",
}


def vit(hidden: int = 32, layers: int = 2) -> ViT:
    """Return the model of a spec's target."""
    model = ViT(hidden, layers)
    model.tp_plan = VIT_PLAN  # type: ignore[assignment]
    return model


class RandomImages(Dataset[Any]):
    """Random images with labels, each a function of its index."""

    def __init__(self, count: int, *, named: bool) -> None:
        self.count, self.named = count, named

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        drawn = torch.Generator().manual_seed(index)
        label = index * 7 % CLASSES
        image = torch.randn(3, SIZE, SIZE, generator=drawn) + label / CLASSES
        return {"image": image, "label": label} if self.named else (image, label)


def images(count: int = 200, named: bool = False) -> RandomImages:
    """Return the data of a spec: pairs of an image and a label, or a dictionary of them."""
    return RandomImages(count, named=named)


def label_loss(logits: Tensor, batch: tuple[Tensor, Tensor], smoothing: float = 0.0) -> Tensor:
    """Return the loss of a spec."""
    return F.cross_entropy(logits, batch[1], label_smoothing=smoothing)


def step(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Run the step of a spec, which passes the images to the model."""
    loss: Tensor = F.cross_entropy(model(batch["image"]), batch["label"])
    return loss
