"""Loops with one fault in the update, from the first step on or later: optimizers with two groups,
clipping, master copies, and manually accumulated gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer

import ptrain
from ptrain.codec import encode
from ptrain.verification.jobs.job import LoopVerdict
from tests.gloo.own_loops import (
    MICRO_BATCHES,
    WRAPPERS,
    batches,
    build_model,
    local_rows,
    mean_loss,
)

CLIP = 0.05  # far below the norm of the first gradients
LATE = 2  # steps: moments have their history
STEPS = LATE + 1


def local_tensor(tensor: Any) -> Tensor:
    """Return the local shard of a tensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


class Loop:
    """The correct loop. A faulty loop overrides one of its methods, which receives the step
    number."""

    since = 0  # the step from which the fault is there

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.number = 0
        self.optimizer = self.built()

    def built(self) -> torch.optim.Optimizer:
        matrices = [p for p in self.model.parameters() if p.dim() > 1]
        vectors = [p for p in self.model.parameters() if p.dim() == 1]
        groups = [
            {"params": matrices, "weight_decay": 0.1},
            {"params": vectors, "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=1e-2)

    def backward(self, tokens: Tensor) -> Tensor:
        total = torch.zeros(())
        for micro in tokens.chunk(MICRO_BATCHES):
            loss = mean_loss(self.model, micro) / MICRO_BATCHES
            loss.backward()
            total = total + loss.detach()
        return total

    def clip(self) -> None:
        """Clip nothing."""

    def fault(self) -> None:
        """Plant nothing."""

    def after(self) -> None:
        """Do nothing after the update."""

    def step(self, tokens: Tensor) -> Tensor:
        total = self.backward(tokens)
        if self.number >= self.since:
            self.fault()
        self.clip()
        self.optimizer.step()
        self.after()
        self.model.zero_grad()
        self.number += 1
        return total

    @property
    def groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    def states(self) -> Iterator[dict[str, Any]]:
        yield from self.optimizer.state.values()


class Clipped(Loop):
    def clip(self) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)


class Resumed(Loop):
    since = LATE

    def fault(self) -> None:
        if self.number == self.since:
            self.optimizer = self.built()


class MomentsOfZeros(Loop):
    since = LATE

    def fault(self) -> None:
        if self.number == self.since and dist.get_rank() == 1:
            for state in self.states():
                local_tensor(state["exp_avg"]).zero_()


class StepLost(Loop):
    since = LATE

    def fault(self) -> None:
        if self.number == self.since:
            for state in self.states():
                state["step"].zero_()


class Swapped(Loop):
    def fault(self) -> None:
        decays = [group["weight_decay"] for group in self.groups]
        if self.number == self.since:
            for group, decay in zip(self.groups, reversed(decays), strict=True):
                group["weight_decay"] = decay


class SwappedLate(Swapped):
    since = LATE


class ClippedByGroup(Clipped):
    def clip(self) -> None:
        if self.number < self.since:
            return super().clip()
        for group in self.groups:
            nn.utils.clip_grad_norm_(group["params"], CLIP)
        return None


class ClippedByGroupLate(ClippedByGroup):
    since = LATE


class ClippedByAllCopies(Clipped):
    """A loop that sums the squares over ranks that hold copies of each other."""

    def clip(self) -> None:
        gradients = [p.grad for p in self.model.parameters()]
        total = sum(gradient.double().square().sum() for gradient in gradients)
        dist.all_reduce(total)
        nn.utils.clip_grads_with_norm_(self.model.parameters(), CLIP, total.sqrt())


class ClippedOnOneRank(Clipped):
    def clip(self) -> None:
        unclipped = [p.grad.clone() for p in self.model.parameters()]
        super().clip()  # its collectives are all ranks'
        if self.number >= self.since and dist.get_rank() == 1:
            for parameter, gradient in zip(self.model.parameters(), unclipped, strict=True):
                parameter.grad = gradient


class ClippedOnOneRankLate(ClippedOnOneRank):
    since = LATE


class OtherRateOnOneRank(Loop):
    def fault(self) -> None:
        if dist.get_rank() == 1:
            for group in self.groups:
                group["lr"] = 2e-2


class WrittenAfter(Loop):
    @torch.no_grad()
    def after(self) -> None:
        if self.number == LATE and dist.get_rank() == 1:
            local_tensor(self.model.get_parameter(self.name)).mul_(0.5)

    @property
    def name(self) -> str:
        return next(name for name, _ in self.model.named_parameters() if "head" in name)


class Masters(Loop):
    """A loop with a 16-bit model whose optimizer has 32-bit copies."""

    def built(self) -> torch.optim.Optimizer:
        self.masters = [p.detach().float() for p in self.model.parameters()]
        return torch.optim.AdamW(self.masters, lr=1e-4)

    def clip(self) -> None:
        for parameter, master in zip(self.model.parameters(), self.masters, strict=True):
            master.grad = parameter.grad.float()

    @torch.no_grad()
    def after(self) -> None:
        for parameter, master in zip(self.model.parameters(), self.masters, strict=True):
            parameter.copy_(master)


class RebuiltMasters(Masters):
    since = LATE

    @torch.no_grad()
    def fault(self) -> None:
        for parameter, master in zip(self.model.parameters(), self.masters, strict=True):
            master.copy_(parameter)


class SingleGroup(Loop):
    """A loop with one parameter group."""

    def built(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), lr=1e-2)


class ZeroOptimizer(Loop):
    """A loop in which each rank updates some parameters and broadcasts them."""

    rate = 1e-2

    def built(self) -> torch.optim.Optimizer:
        parameters = self.model.parameters()
        return ZeroRedundancyOptimizer(parameters, torch.optim.AdamW, lr=self.rate)


class ZeroOfOtherRate(ZeroOptimizer):
    rate = 2e-2


class NormalizedStep(torch.optim.Optimizer):
    """An optimizer that takes steps of equal length for every full tensor, which a shard does not
    determine."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                norm = parameter.grad.norm()
                norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
                parameter.sub_(parameter.grad * (group["lr"] / float(norm + 1e-3)))


class Even(Loop):
    rate = 1e-2

    def built(self) -> torch.optim.Optimizer:
        return NormalizedStep(self.model.parameters(), self.rate)


class EvenOfOtherRate(Even):
    rate = 2e-2


@dataclass(frozen=True)
class Case:
    """A pair of loops: `sound` on one device, `faulty` on the ranks."""

    faulty: Callable[[nn.Module], Loop]
    sound: Callable[[nn.Module], Loop] = Loop
    dtype: torch.dtype = torch.float64


CASES = {
    "sound": Case(Loop),
    "sound clipped": Case(Clipped, Clipped),
    "sound masters": Case(Masters, Masters, torch.bfloat16),
    "resumed": Case(Resumed),
    "moments of zeros": Case(MomentsOfZeros),
    "step lost": Case(StepLost),
    "swapped": Case(Swapped),
    "swapped late": Case(SwappedLate),
    "clip per group": Case(ClippedByGroup, Clipped),
    "clip per group late": Case(ClippedByGroupLate, Clipped),
    "clip on one rank": Case(ClippedOnOneRank, Clipped),
    "clip on one rank late": Case(ClippedOnOneRankLate, Clipped),
    "not clipped": Case(Loop, Clipped),
    "rebuilt masters": Case(RebuiltMasters, Masters, torch.bfloat16),
    "other rate on one rank": Case(OtherRateOnOneRank),
    "written after": Case(WrittenAfter),
}
# A rank's shard does not determine this update.
APART = {
    "clip by copies": Case(ClippedByAllCopies, Clipped),
    "zero": Case(ZeroOptimizer, SingleGroup),
    "zero of another rate": Case(ZeroOfOtherRate, SingleGroup),
    "by norm": Case(Even, Even),
    "by norm of another rate": Case(EvenOfOtherRate, Even),
}


def verify_case(way: str, name: str) -> LoopVerdict:
    case = (CASES | APART)[name]
    model = build_model(case.dtype)
    plain = copy.deepcopy(model)
    pair = case.sound(plain), case.faulty(WRAPPERS[way](model))
    jobs = [ptrain.Job(model=loop.model, step=loop.step) for loop in pair]
    terms = ptrain.Terms(examined=STEPS)
    return ptrain.verify(*jobs, batches(STEPS), share=local_rows(way), terms=terms)


def verdicts(way: str, names: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """Return the fields of each case's verdict that tests read, as plain data."""
    results = {}
    for name in names:
        verdict = verify_case(way, name)
        root_cause = verdict.root_cause
        results[name] = {
            "holds": verdict.holds,
            "text": str(verdict),
            "culprit": encode(root_cause),
        }
    return results
