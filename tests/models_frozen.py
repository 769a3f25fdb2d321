"""Models of which some parameters are trained and the others frozen."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.models_external import Necks

HIDDEN = 32


class Adapted(nn.Module):
    """A frozen residual layer with a trained adapter of two small matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 2 * HIDDEN), nn.Linear(2 * HIDDEN, HIDDEN)
        self.requires_grad_(False)
        self.narrow = nn.Linear(HIDDEN, 3, bias=False)
        self.widen = nn.Linear(3, 2 * HIDDEN, bias=False)

    def forward(self, x_BTC: Tensor) -> Tensor:
        normed = self.norm(x_BTC)
        return x_BTC + self.down(torch.relu(self.up(normed) + self.widen(self.narrow(normed))))


class AdaptedLayers(Necks):
    """Adapted layers between a frozen table and a frozen head."""

    def __init__(self, layers: int, vocab: int) -> None:
        super().__init__(HIDDEN, 0, vocab)
        self.requires_grad_(False)
        self.layers = nn.ModuleList(Adapted() for _ in range(layers))


def adapted(
    layers: int = 3, vocab: int = 259, without: int = 0, is_tied: bool = False
) -> AdaptedLayers:
    """Return the model of `{target: tests.models_frozen:adapted}`. The adapters of the first
    `without` layers are frozen; if `is_tied`, the head is the table."""
    model = AdaptedLayers(layers, vocab)
    for layer in model.layers[:without]:
        layer.requires_grad_(False)
    if is_tied:
        model.head.weight = model.table.weight
    return model


class Logits(nn.Module):
    """A transformers model that returns logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens_BT: Tensor) -> Tensor:
        logits: Tensor = self.model(input_ids=tokens_BT).logits
        return logits


def lora(rank: int = 2, folder: str | None = None) -> Logits:
    """Add peft's adapters to queries and values of a small Llama with given initial weights, or of
    the one in `folder`."""
    from peft import LoraConfig, inject_adapter_in_model
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        num_hidden_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        vocab_size=259,
        max_position_embeddings=64,
        use_cache=False,
    )
    adapters = LoraConfig(r=rank, lora_alpha=8, target_modules=["q_proj", "v_proj"])
    base = LlamaForCausalLM.from_pretrained(folder) if folder else LlamaForCausalLM(config)
    return Logits(inject_adapter_in_model(adapters, base))
