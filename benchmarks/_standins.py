"""Small random replacements of the data and the model that public scripts download."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import MagicMock

import numpy as np
import torch
from torch.utils.data import DataLoader, TensorDataset
from transformers import BatchEncoding, BertConfig, BertForSequenceClassification

evaluate = transforms = MagicMock()
SAMPLES, TOKENS = 64, 12


def write_tokens(folder: Path) -> None:
    """Write the token file that nanoGPT reads."""
    folder.mkdir(parents=True)
    np.random.default_rng(0).integers(0, 256, 4096).astype(np.uint16).tofile(folder / "train.bin")


def digits(*_: object, **__: object) -> TensorDataset:
    """Return images and labels in the shapes of MNIST."""
    draws = torch.Generator().manual_seed(0)
    images = torch.randn(SAMPLES, 1, 28, 28, generator=draws)
    return TensorDataset(images, torch.randint(10, (SAMPLES,), generator=draws))


def sentences(batch_size: int) -> tuple[DataLoader[object], DataLoader[object]]:
    """Return loaders of token ids and labels, with as many positive labels as MRPC has (68 %)."""
    draws = torch.Generator().manual_seed(0)
    ids = torch.randint(32, (SAMPLES, TOKENS), generator=draws)
    labels = (torch.rand(SAMPLES, generator=draws) < 0.68).long()
    rows = [{"input_ids": row, "labels": label} for row, label in zip(ids, labels, strict=True)]

    def together(some: list[dict[str, torch.Tensor]]) -> BatchEncoding:
        return BatchEncoding({key: torch.stack([row[key] for row in some]) for key in some[0]})

    loader = DataLoader(rows, shuffle=True, batch_size=batch_size, collate_fn=together)
    return loader, loader


def bert() -> BertForSequenceClassification:
    """Return a model of the class with random weights."""
    small = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    return BertForSequenceClassification(BertConfig(vocab_size=32, intermediate_size=32, **small))
