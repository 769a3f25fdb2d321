"""User losses, steps and datasets, correct and wrong ones."""

from __future__ import annotations

import os
import random
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

WRONG: dict[str, Any] = {
    "nothing": lambda logits: None,
    "a number": lambda logits: float(logits.detach().mean()),
    "by token": lambda logits: logits.mean(-1),
    "whole": lambda logits: logits.argmax(),
    "detached": lambda logits: logits.detach().mean(),
}


def z_loss(logits: Tensor, batch: tuple[Tensor, Tensor], weight: float = 1e-2) -> Tensor:
    """Return the cross entropy plus a term that keeps logits small."""
    entropy = F.cross_entropy(logits.flatten(0, 1), batch[1].flatten())
    return entropy + weight * logits.logsumexp(-1).square().mean()


def plain(logits: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return ptrain's default loss."""
    return F.cross_entropy(logits.flatten(0, 1), batch[1].flatten())


def viewed(logits: Tensor, batch: Any) -> Tensor:
    """Return the default loss for contiguous targets."""
    return F.cross_entropy(logits.view(-1, logits.shape[-1]), batch.targets.view(-1))


def viewed_step(model: Any, batch: Any) -> Tensor:
    """Return the default loss for contiguous inputs and targets."""
    return viewed(model(batch.inputs.view(-1).view(batch.targets.shape)), batch)


def of_pair(output: tuple[Tensor, Any], batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the default loss of a model that returns more than logits."""
    return plain(output[0], batch)


def wrong(logits: Tensor, batch: object, how: str) -> Any:
    return WRONG[how](logits)


def raises(logits: Tensor, batch: object) -> Tensor:
    raise ValueError("no such loss")


def wrong_step(model: nn.Module, batch: tuple[Tensor, Tensor], how: str) -> Any:
    return WRONG[how](model(batch[0]))


def later_wrong(logits: Tensor, batch: tuple[Tensor, Tensor], how: str, by: list[int]) -> Any:
    """Return a loss in the first `by[0]` calls, and None later."""
    by[0] -= 1
    return plain(logits, batch) if by[0] >= 0 else WRONG[how](logits)


def backward_step(model: nn.Module, batch: tuple[Tensor, Tensor], detached: bool) -> Tensor:
    """Run forward and backward in the step."""
    loss = plain(model(batch[0]), batch)
    loss.backward()
    return loss.detach() if detached else loss


def parts_step(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Run the model's modules instead of the model."""
    return plain(model.head(model.embed(batch[0])), batch)


def regularised_step(model: Any, batch: tuple[Tensor, Tensor], every: bool = False) -> Tensor:
    """Add a penalty on all or some weights."""
    weights = model.parameters() if every else [model.head.weight]
    return plain(model(batch[0]), batch) + sum(weight.square().sum() for weight in weights)


def twice_step(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Write into the output of one of two calls of the model."""
    logits = model(batch[0])
    logits[:, 0] += 1
    return plain(logits + model(batch[1]).flip(0), batch)


def step_that_raises(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    logits: Tensor = model(batch[0], batch[1])
    return logits


class Items:
    """Pairs of tokens, some of them invalid."""

    def __init__(self, how: str, count: int) -> None:
        self.how, self.count, self.reads = how, count, 0
        self.drawn = random.randrange(99) + int(np.random.randint(99))

    def __len__(self) -> int:
        if self.how == "lengthless":
            raise RuntimeError("nobody knows")
        return self.count

    def __getitem__(self, index: int) -> Any:
        self.reads += 1
        if self.how == "raising" and index == self.count - 1:
            raise OSError("disk is gone")
        length = 9 if self.how == "uneven" and index == self.count - 1 else 8
        tokens = torch.arange(length) + index
        match self.how:
            case "texts":
                return {"inputs": tokens, "caption": "a cat"}
            case "drifting":
                return tokens + self.reads, tokens
            case "augmented":
                return tokens + torch.randint(9, (8,)), tokens
            case "drawn":
                drawn = random.randrange(99) + int(np.random.randint(99)) + self.drawn
                return tokens + drawn, tokens
            case "by process":
                return tokens + os.getpid() * (index == self.count - 1), tokens
            case "unnamed":
                return {"image": tokens, "label": tokens}
        return tokens, tokens


def items(how: str = "", count: int = 40) -> Items:
    return Items(how, count)


def no_dataset() -> int:
    return 3


def no_data() -> Items:
    raise KeyError("no such split")
