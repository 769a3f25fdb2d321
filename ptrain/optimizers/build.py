"""torch's optimizers, and ours beside them, by a rule's name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from ptrain.errors import Fault, SpecError
from ptrain.optimizers.muon import Muon
from ptrain.optimizers.sgd import SGD
from ptrain.spec.job import OptimizerSpec


def has_own_rule_for_matrices(rule: str) -> bool:
    """Return whether the rule is for matrices within a model alone, and another for the rest."""
    return rule == "muon"


def is_left_out_in_place(rule: str) -> bool:
    """Return whether a flag on the device leaves its update out at no cost of memory: torch's fused
    kernels look at it, and Muon computes both outcomes."""
    return rule != "muon"


def _decayed(spec: OptimizerSpec) -> dict[str, float]:
    return {"lr": spec.lr, "momentum": spec.momentum, "weight_decay": spec.weight_decay}


Leaves = Sequence[torch.Tensor] | Sequence[dict[str, list[torch.Tensor]]]


def _tensors(leaves: Leaves) -> Iterator[torch.Tensor]:
    """Of all groups, where torch hands over groups."""
    for leaf in leaves:
        yield from leaf["params"] if isinstance(leaf, dict) else (leaf,)


def build_optimizer(
    rule: str, leaves: Leaves, spec: OptimizerSpec, *, stands_in: bool = False
) -> torch.optim.Optimizer:
    """torch's optimizer of `leaves`, tensors or groups of them, by a rule's name; `stands_in`: they
    are on a processor for those of a GPU."""
    on_cpu = [leaf for leaf in _tensors(leaves) if leaf.is_cpu and not stands_in]
    needs_own = any(leaf.itemsize == 2 for leaf in on_cpu)
    match rule:
        case "adamw":
            return torch.optim.AdamW(
                leaves,
                lr=spec.lr,
                betas=spec.betas,
                eps=spec.eps,
                weight_decay=spec.weight_decay,
                fused=True,
            )
        case "sgd" if needs_own:
            return SGD(leaves, **_decayed(spec))
        case "sgd":
            return torch.optim.SGD(leaves, **_decayed(spec), fused=True)
        case "muon":
            return Muon(leaves, **_decayed(spec))
        case name:
            raise SpecError(
                Fault(
                    place="optimizer.name",
                    finding=f"{name} is not executed yet",
                    remedy="use adamw, sgd or muon",
                )
            )
