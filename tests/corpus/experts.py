"""Faults of expert parallelism by hand: a rank has one of two experts, and runs it on all tokens
that are routed to it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ptrain
from tests.corpus.collectives import GatherParts, ScatterSum, gathered
from tests.corpus.fault import NOT_REDUCED, TOO_LARGE, planted
from tests.corpus.parts import (
    average,
    axis,
    looped,
    my_rows,
    rank,
    regression_loss,
    row_batches,
    size,
)

EXPERTS = "ep|expert|rank"


class RowMixture(nn.Module):
    """A router, two experts of which each row takes one, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 2, bias=False)
        self.experts = nn.ModuleDict({str(expert): nn.Linear(8, 8) for expert in range(2)})
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        weight, choice = self.router(x).softmax(dim=-1).max(dim=-1)
        outputs = [
            expert(x) * (weight * (choice == int(number)))[:, None]
            for number, expert in self.experts.items()
        ]
        return self.head(F.gelu(self.combine(outputs)))

    def combine(self, outputs: list[Tensor]) -> Tensor:
        return torch.stack(outputs).sum(dim=0)


class SharedMixture(RowMixture):
    """The mixture with expert r on rank r."""

    def __init__(self, *, detaches: bool = False, reverses: bool = False, capacity: int = 99):
        super().__init__()
        del self.experts[str(1 - rank())]
        self.detaches, self.reverses, self.capacity = detaches, reverses, capacity

    def forward(self, x: Tensor) -> Tensor:
        weight, choice = self.router(x).softmax(dim=-1).max(dim=-1)
        is_own = gathered(choice, 0) == rank()
        is_own &= is_own.cumsum(0) <= self.capacity
        weights = gathered(weight.detach(), 0) if self.detaches else GatherParts.apply(weight, 0)
        outputs = self.experts[str(rank())](GatherParts.apply(x, 0)) * (weights * is_own)[:, None]
        y = ScatterSum.apply(outputs, 0)
        return self.head(F.gelu(y.flip(0) if self.reverses else y))


def mixture(**options: Any) -> RowMixture:
    torch.manual_seed(0)
    return SharedMixture(**options)


def whole_mixture() -> RowMixture:
    torch.manual_seed(0)
    return RowMixture()


def shared(
    *,
    skips: str | None = None,
    averages_experts: bool = False,
    expert_scale: float = 0.5,
    **options: Any,
) -> ptrain.Job:
    model = mixture(**options)

    def reduce() -> None:
        for name, parameter in model.named_parameters():
            if "experts" in name and not averages_experts:
                assert parameter.grad is not None
                parameter.grad *= expert_scale  # its tokens are all ranks', of a mean on each
            elif skips is None or skips not in name:
                average([parameter])

    return looped(model, before_update=reduce)


def compared(job: Any) -> Any:
    return ptrain.verify(
        lambda: looped(whole_mixture(), loss=regression_loss),
        job,
        row_batches(size=16),
        share=my_rows,
        terms=ptrain.Terms(mesh=axis("ep")),
    )


@planted(
    source="https://github.com/databricks/megablocks/pull/20",
    wrong=("gradients",), axis="ep", place="experts.*", step=0,
    sentence="gradients of the experts are twice what they should be: not divided by ep",
    right=(TOO_LARGE, "expert"),
    wrong_if=("not reduced", "router", "head.weight"),
)  # fmt: skip
def expert_gradients_not_divided(fault: bool) -> Any:
    return compared(lambda: shared(expert_scale=1.0 if fault else 1 / size()))


@planted(
    source="https://github.com/pytorch/torchtitan/pull/2416",
    wrong=("gradients",), axis="ep", place="router.weight", step=0,
    sentence="the router's gradient is not reduced over ep",
    right=(NOT_REDUCED, "ep|dp|rank", "router"),
    wrong_if=("experts.", "head.weight"),
)  # fmt: skip
def router_not_reduced(fault: bool) -> Any:
    return compared(lambda: shared(skips="router" if fault else None))


@planted(
    source="https://github.com/NVIDIA-NeMo/Automodel/pull/2995",
    wrong=("gradients",), axis="ep", place="router.weight", step=0,
    sentence="the router gets no gradient: the gather of its weights is not differentiable",
    right=("router", "no gradient|none|zero|0|not move|lack|missing|never|detach"),
    wrong_if=("experts.", "head.weight", "learning rate"),
)  # fmt: skip
def router_detached_by_the_gather(fault: bool) -> Any:
    return compared(lambda: shared(detaches=fault))


@planted(
    source="https://github.com/facebookresearch/fairseq/issues/4220",
    wrong=("gradients",), axis="ep", place="experts.*", step=0,
    sentence="gradients of different experts are averaged over ep as if they were replicas",
    right=("expert", "averag|mixed|other|reduced|differ|wrong|gradient"),
    wrong_if=("router", "head.weight", "not reduced"),
)  # fmt: skip
def experts_averaged_like_replicas(fault: bool) -> Any:
    return compared(lambda: shared(averages_experts=fault))


@planted(
    source="https://github.com/deepspeedai/DeepSpeed/pull/2058",
    wrong=("loss", "activations"), axis="ep", place="head", step=0,
    sentence="rows come back from the experts in another order than they were sent",
    right=("order|combine|head|expert|loss|activation|forward|output", EXPERTS + "|dp|head"),
    wrong_if=("not reduced", "learning rate"),
)  # fmt: skip
def rows_return_in_another_order(fault: bool) -> Any:
    return compared(lambda: shared(reverses=fault))


@planted(
    source="https://github.com/NVIDIA/Megatron-LM/issues/7452",
    wrong=("loss", "activations"), axis="ep", place="experts.*", step=0,
    sentence="experts drop rows over a capacity that one device does not have",
    right=("expert|row|token|sample|capacity|loss|activation|forward|output", "drop|lack|loss|"
           "activation|forward|output|missing|differ"),
    wrong_if=("not reduced", "learning rate"),
)  # fmt: skip
def rows_over_the_capacity_dropped(fault: bool) -> Any:
    return compared(lambda: shared(capacity=5 if fault else 99))
