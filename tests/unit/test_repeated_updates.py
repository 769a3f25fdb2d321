"""An optimizer step is repeated bitwise from its record; a difference from one device is named only
if a replay confirms it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ptrain
from ptrain.report.finding import Certainty, RootCause
from ptrain.verification.jobs.record import StepRecorder
from ptrain.verification.jobs.shards import ParameterShard
from ptrain.verification.updates.repeat import CannotRepeat, repeat_updates

Optimizers = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


class Heavy(torch.optim.Optimizer):
    """Somebody's own: momentum in a buffer that is no state, with a setting of its own."""

    def __init__(self, params: Any, lr: float, drag: float = 0.9) -> None:
        super().__init__(params, {"lr": lr})
        self.drag = drag
        self.buffers = {p: torch.zeros_like(p) for g in self.param_groups for p in g["params"]}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                self.buffers[p].mul_(self.drag).add_(p.grad)
                p.sub_(self.buffers[p], alpha=group["lr"])


class Decaying(torch.optim.AdamW):
    """A step that calls its base class's."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        super().step()
        for group in self.param_groups:
            torch._foreach_mul_(group["params"], 0.99)


def adamw(**settings: Any) -> Optimizers:
    return lambda parameters: torch.optim.AdamW(parameters, **{"lr": 1e-2, **settings})


KINDS: dict[str, Optimizers] = {
    "adamw": adamw(foreach=False),
    "foreach": adamw(foreach=True),
    "fused": adamw(fused=True),
    "amsgrad": adamw(amsgrad=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, lr_decay=0.1),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
    "muon": lambda p: torch.optim.Muon([q for q in p if q.dim() == 2], lr=0.1),
    "own": lambda p: Heavy(p, lr=0.1),
    "of a base class": lambda p: Decaying(p, lr=0.1),
}


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def rows(count: int = 6) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return list(torch.randn(count, 4, 6, generator=generator, dtype=torch.float64))


def train_steps(net: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> None:
    net.zero_grad()
    net(batch).square().mean().backward()
    optimizer.step()


@pytest.mark.parametrize("kind", KINDS)
def test_a_recorded_step_repeats_to_the_bit_and_leaves_the_optimizer_alone(kind: str) -> None:
    net = model()
    optimizer = KINDS[kind](list(net.parameters()))
    torch.optim.lr_scheduler.LinearLR(optimizer)  # puts a step of its own on the optimizer
    holds = {name: ParameterShard(name, p, p.shape) for name, p in net.named_parameters()}
    for batch in rows(2):
        with StepRecorder(net, holds) as seen:
            train_steps(net, optimizer, batch)
    assert seen.max_updates == 1
    after = {name: p.detach().clone() for name, p in net.named_parameters()}
    state = copy.deepcopy(optimizer.state_dict())
    record = seen.record
    outcomes = repeat_updates(record.before)
    assert outcomes
    for name, outcome in outcomes.items():
        assert torch.equal(outcome.value, record.after[name].value), name
        assert torch.equal(outcome.value.view_as(after[name]), after[name]), name
        assert not torch.equal(outcome.value, record.before[name].value), name
        for key, value in outcome.state.items():
            assert torch.equal(
                torch.as_tensor(value), torch.as_tensor(record.after[name].state[key])
            )
    assert all(torch.equal(p, after[name]) for name, p in net.named_parameters())
    assert str(optimizer.state_dict()) == str(state)


def test_a_step_that_needs_a_closure_is_not_repeated() -> None:
    net = model()
    optimizer = torch.optim.LBFGS(net.parameters())
    holds = {name: ParameterShard(name, p, p.shape) for name, p in net.named_parameters()}

    def closure() -> Tensor:
        net.zero_grad()
        loss = net(rows(1)[0]).square().mean()
        loss.backward()
        return loss

    with StepRecorder(net, holds) as seen:
        optimizer.step(closure)
    with pytest.raises(CannotRepeat, match="LBFGS cannot be replayed"):
        repeat_updates(seen.record.before)


Act = Callable[[nn.Module, torch.optim.Optimizer], None]


def no_fault(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Leave the loop unchanged."""


def verify_update(own: Optimizers, other: Optimizers, late: Act = no_fault) -> RootCause | None:
    """`late` is done once, before the update of the step 3."""
    net = model()

    def job(net: nn.Module, kind: Optimizers, act: Act) -> ptrain.Job:
        optimizer, count = kind(list(net.parameters())), iter(range(99))

        def step(batch: Tensor) -> Tensor:
            net.zero_grad()
            loss = net(batch).square().mean()
            loss.backward()
            if next(count) == 3:
                act(net, optimizer)
            optimizer.step()
            return loss

        return ptrain.Job(model=net, step=step)

    jobs = job(copy.deepcopy(net), other, no_fault), job(net, own, late)
    return ptrain.verify(*jobs, rows(), terms=ptrain.Terms(examined=6)).root_cause


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-2, momentum=0.9)


SETTINGS = [
    (adamw(weight_decay=0.0), adamw(), "weight_decay 0 for 0.01", 0),
    (adamw(betas=(0.5, 0.9)), adamw(), "betas (0.5, 0.9) for (0.9, 0.999)", 0),
    (adamw(eps=1e-4), adamw(), "eps 0.0001 for 1e-08", 0),
    (adamw(lr=2e-2, fused=True), adamw(foreach=True), "× 2", 0),
    (adamw(), adamw(amsgrad=True), "amsgrad False for True", 1),
    (adamw(lr=2e-2, weight_decay=0.3), adamw(), "× 2 and weight_decay 0.3 for 0.01", 0),
    (lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.5), sgd, "momentum 0.5 for 0.9", 1),
    (lambda p: torch.optim.Adagrad(p, lr=2e-2), lambda p: torch.optim.Adagrad(p), "× 2", 0),
]


@pytest.mark.parametrize(("own", "other", "factor", "step"), SETTINGS)
def test_a_setting_is_named_after_the_update_was_repeated_with_one_devices(
    own: Optimizers, other: Optimizers, factor: str, step: int
) -> None:
    root_cause = verify_update(own, other)
    assert root_cause is not None
    assert (root_cause.factor, root_cause.step, root_cause.certainty) == (
        factor,
        step,
        Certainty.PROVEN,
    )
    assert root_cause.tried.startswith("the update replayed with ")


def test_moments_and_momentum_that_are_lost_are_named() -> None:
    def forget(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.state.clear()

    for kind in (adamw(), sgd):
        root_cause = verify_update(kind, kind, forget)
        assert root_cause is not None
        assert (root_cause.factor, root_cause.certainty) == ("moments lost", Certainty.PROVEN)


def test_moments_of_other_values_are_not_called_lost() -> None:
    def double(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for state in optimizer.state.values():
            state["exp_avg"].mul_(2)

    root_cause = verify_update(adamw(), adamw(), double)
    assert root_cause is not None
    assert (root_cause.factor, root_cause.certainty) == ("exp_avg 1 off", Certainty.PROVEN)


def test_a_buffer_that_no_trial_exchanges_is_not_explained() -> None:
    def forget(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        assert isinstance(optimizer, Heavy)
        for buffer in optimizer.buffers.values():
            buffer.zero_()

    def kind(parameters: Any) -> torch.optim.Optimizer:
        return Heavy(parameters, 1e-2)

    root_cause = verify_update(kind, kind, forget)
    assert root_cause is not None
    assert root_cause.certainty is Certainty.UNEXPLAINED
    assert "to the bit" in root_cause.tried
    assert "Not explained".lower() in str(root_cause)


def test_writes_of_hooks_within_a_step_are_distinguished_from_settings() -> None:
    def hooked(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        optimizer = adamw()(parameters)

        def halve(*_: object) -> None:
            with torch.no_grad():
                torch._foreach_mul_(parameters, 0.99)

        optimizer.register_step_post_hook(halve)
        return optimizer

    root_cause = verify_update(hooked, adamw())
    assert root_cause is not None
    assert (root_cause.factor, root_cause.certainty) == (
        "written within the step",
        Certainty.PROVEN,
    )


def test_another_class_is_named_and_a_derived_step_counts_one_update() -> None:
    root_cause = verify_update(lambda p: Decaying(p, lr=1e-2), adamw())
    assert root_cause is not None
    assert root_cause.certainty is Certainty.UNEXPLAINED
    assert "the loop steps by Decaying, the reference by AdamW" in root_cause.tried


def test_state_written_after_the_step_is_distinguished_from_state_before() -> None:
    net = model()

    def job(net: nn.Module, is_faulty: bool) -> ptrain.Job:
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)

        def step(batch: Tensor) -> Tensor:
            train_steps(net, optimizer, batch)
            if is_faulty:
                for state in optimizer.state.values():
                    state["exp_avg"].mul_(2)
            return net(batch).square().mean().detach()

        return ptrain.Job(model=net, step=step)

    verdict = ptrain.verify(job(copy.deepcopy(net), False), job(net, True), rows(1))
    assert verdict.root_cause is not None
    assert verdict.root_cause.factor == "differs after the update"
    assert verdict.root_cause.certainty is Certainty.PROVEN


def test_a_parameter_frozen_on_one_side_is_named() -> None:
    def first_alone(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return adamw()(parameters[:2])

    root_cause = verify_update(adamw(), first_alone)
    assert root_cause is not None
    assert root_cause.certainty is Certainty.UNEXPLAINED
    assert "no torch.optim.Optimizer of the reference has" in root_cause.tried
    root_cause = verify_update(first_alone, adamw())
    assert root_cause is not None
    assert (root_cause.factor, root_cause.certainty) == ("not updated", Certainty.PROVEN)
