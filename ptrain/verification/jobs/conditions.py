"""What must be so before two loops can be compared: a reference that is one device, the same on
every rank, a loop that does the same when it is run again, and losses that make up a global one."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ptrain.errors import PtrainError
from ptrain.models.ledger import OperatorMode
from ptrain.verification.jobs.job import Job, Known, Losses, Ranks

_WRAPPERS = (DistributedDataParallel, FSDPModule, FullyShardedDataParallel)
_COLLECTIVES = ("c10d", "_c10d_functional")


def require_plain(reference: Job) -> None:
    """Raises PtrainError for a reference that is wrapped."""
    for module in reference.model.modules():
        if isinstance(module, _WRAPPERS):
            raise PtrainError(
                f"verify: the reference is wrapped ({type(module).__name__})\n"
                "  remedy: give it the plain module, copied before it is wrapped"
            )
    if any(isinstance(parameter, DTensor) for parameter in reference.model.parameters()):
        raise PtrainError(
            "verify: the reference's parameters are DTensors\n"
            "  remedy: give it the plain module, copied before it is parallelised"
        )


def _refused_of_reference(words: str) -> PtrainError:
    return PtrainError(
        f"verify: the reference's {words}\n"
        "  remedy: give the reference a step without collectives: it has the whole batch"
    )


class Alone(OperatorMode):
    """Refuses collectives: the reference is one device, on every rank, and a rank that repeats
    something by itself would meet no other."""

    def __init__(self, refused: Callable[[str], Exception] = _refused_of_reference) -> None:
        super().__init__()
        self._refused = refused

    def operator(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if function.namespace in _COLLECTIVES:
            raise self._refused(f"step communicates ({function.__name__})")
        return function(*args, **kwargs)


def require_one_reference(ranks: Ranks, checksums: Mapping[str, str]) -> None:
    """Raises PtrainError on every rank where the reference's weights are other ones on some."""
    everyones = ranks.gather(dict(checksums))
    for rank, other in enumerate(everyones):
        for name, checksum in everyones[0].items():
            if other.get(name) != checksum:
                raise PtrainError(
                    f"verify: reference: {name} differs between rank 0 and rank {rank}\n"
                    "  remedy: seed every rank alike before the reference is built"
                )


def loss_dtype(loss: Any) -> torch.dtype | None:
    """Return the dtype that the loss itself is computed in: some models do that in fp32, whatever
    their own is. None where it is no tensor."""
    return loss.dtype if isinstance(loss, torch.Tensor) else None


def number(loss: Any, by: str = "a step") -> float | None:
    """A loss that was returned: None, a number, a tensor with one element, also a DTensor."""
    if loss is None:
        return None
    if isinstance(loss, DTensor):
        loss = loss.full_tensor()
    if isinstance(loss, torch.Tensor):
        if loss.numel() != 1:
            raise _no_loss(by, f"a tensor of {tuple(loss.shape)}")
        return float(loss.detach())
    try:
        return float(loss)
    except (TypeError, ValueError):
        raise _no_loss(by, f"{loss!r:.60}") from None


def _no_loss(by: str, what: str) -> PtrainError:
    return PtrainError(f"verify: {by} returned {what}\n  remedy: return the loss alone, or None")


def has_parameters(model: nn.Module) -> None:
    """Raises PtrainError where nothing can be trained."""
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise PtrainError(
            "verify: the reference has no parameter that requires a gradient\n"
            "  remedy: give it a module that trains: requires_grad_(True) of what should"
        )


@dataclass(frozen=True, slots=True)
class GlobalLoss:
    """How the ranks' losses make up the global one."""

    how: Losses
    ranks: Ranks

    def of(self, right: float | None, mine: float | None) -> float | None:
        """Return it, of the ranks that have one (of a pipeline the last stage alone); None where a
        side has none. All ranks call it."""
        losses = [loss for loss in self.ranks.gather(mine) if loss is not None]
        return None if right is None or not losses else self._made_up(self.how, right, losses)

    def ways(self, right: float, mine: float | None) -> dict[Known, float]:
        """Return what the global loss would be by each known way. All ranks call it."""
        losses = [loss for loss in self.ranks.gather(mine) if loss is not None]
        return {how: self._made_up(how, right, losses) for how in get_args(Known)}

    @staticmethod
    def _made_up(how: Losses, right: float, losses: Sequence[float]) -> float:
        match how:
            case "mean":
                return sum(losses) / len(losses)
            case "sum":
                return sum(losses)
            case "same":
                return max(losses, key=lambda loss: abs(loss - right))
            case reduce:
                total = number(reduce(losses), "Terms.loss")
                return math.nan if total is None else total
