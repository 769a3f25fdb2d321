"""Permuted references: the same terms in another order, and the tolerances derived from them."""

from __future__ import annotations

import math
from dataclasses import fields, replace

import pytest
import torch

from ptrain.runtime.world import World
from ptrain.spec.load import load
from ptrain.spec.spec import Spec
from ptrain.train.exchange import Exchange
from ptrain.verification.reference import ReferenceTraining, Trajectory
from ptrain.verification.references import (
    PermutedReference,
    PermutedSums,
    Progress,
    ReferenceRequest,
    ReferenceRun,
    _assign_owners,
    is_order_sensitive,
    run_references,
)
from ptrain.verification.tolerances import (
    FEW,
    MANY,
    QUANTILES,
    RunTolerances,
    derive_fp64_tolerances,
    derive_own_tolerances,
    fixed_fp32_tolerances,
    plan_references,
)
from ptrain.verification.trajectory import LossCorridor, ProgramRun, trajectory_checks
from tests.jobs import TINY

ALONE = Exchange(World())


def tiny(name: str = "zero3", *overrides: str) -> Spec:
    return load(name, (*TINY, *overrides)).spec


def permuted_sums(seed: int = 0) -> PermutedSums:
    return PermutedSums(torch.Generator().manual_seed(seed))


def random_tensor(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)).to(dtype)


SUMS = {
    "mm": lambda x: x @ x.T,
    "bmm": lambda x: torch.stack([x, x]) @ torch.stack([x, x]).mT,
    "addmm": lambda x: torch.addmm(x @ x.T, x, x.T, beta=0.5, alpha=2.0),
    "baddbmm": lambda x: torch.baddbmm((x @ x.T)[None], x[None], x.T[None], beta=2.0),
    "linear": lambda x: torch.nn.functional.linear(x, x, x[:, 0]),
    "sum": lambda x: x.sum(0),
    "sum of two dimensions": lambda x: x.sum((0, 1), keepdim=True),
    "mean": lambda x: x.square().mean(-1, keepdim=True),
    "embedding": lambda x: torch.ops.aten.embedding_dense_backward(
        x, torch.arange(len(x)) % 3, 4, -1, False
    ),
}


@pytest.mark.parametrize("name", SUMS)
def test_a_permuted_sum_has_the_same_terms(name):
    x = random_tensor(33, 130, dtype=torch.float64)
    with permuted_sums():
        found = SUMS[name](x)
    assert torch.allclose(found, SUMS[name](x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", SUMS)
def test_and_another_order_of_them(name):
    x = random_tensor(33, 130, dtype=torch.bfloat16)
    with permuted_sums(0):
        one = SUMS[name](x)
    with permuted_sums(0):
        same = SUMS[name](x)
    with permuted_sums(1):
        other = SUMS[name](x)
    assert one.dtype == SUMS[name](x).dtype
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def test_backward_is_permuted_too():
    weight = torch.nn.Parameter(random_tensor(64, 64, dtype=torch.bfloat16))
    gradients = []
    for seed in (0, 1):
        with permuted_sums(seed):
            (
                random_tensor(32, 64, dtype=torch.bfloat16).detach() @ weight
            ).square().sum().backward()
        gradients.append(weight.grad)
        weight.grad = None
    assert not torch.equal(*gradients)


def test_a_permuted_reference_sees_every_micro_batch_once_in_another_order():
    spec = tiny("zero3", "batch.global=16")
    usual = [each.sample_ids for each in ReferenceTraining(spec).micro_batches(0)]
    found = [each.sample_ids for each in PermutedReference(spec, 3).micro_batches(0)]
    assert sorted(found) == sorted(usual)
    assert found != usual


def test_in_fp64_a_permuted_reference_is_the_reference_but_for_rounding():
    spec = tiny("zero3", "precision.compute=fp64")
    losses = []
    for device in (ReferenceTraining(spec), PermutedReference(spec, 0)):
        for step in range(2):
            found = device.accumulate(step)
            device.update(step, found.sums)
        losses.append(found.loss)
    assert losses[0] == pytest.approx(losses[1], rel=1e-13)


# -- what is allowed because of them


@pytest.mark.parametrize("degrees", QUANTILES)
def test_the_quantiles_are_students(degrees):
    def density(t: float) -> float:
        constant = math.gamma((degrees + 1) / 2) / math.gamma(degrees / 2)
        return (
            constant / math.sqrt(degrees * math.pi) * (1 + t * t / degrees) ** (-(degrees + 1) / 2)
        )

    steps = 20000  # Simpson's rule
    width = QUANTILES[degrees] / steps
    inner = sum((2 + 2 * (i % 2)) * density(i * width) for i in range(1, steps))
    half = (density(0.0) + inner + density(QUANTILES[degrees])) * width / 3
    assert 1 - 2 * half == pytest.approx(1e-4, rel=2e-3)


def reference_run(losses: tuple[float, ...], offset: float = 0.0) -> ReferenceRun:
    trajectory = Trajectory(
        losses=losses,
        gradient_norms=(1.0,) * len(losses),
        parameters={"a": torch.ones(3, dtype=torch.float64) + offset},
        moved_distance=1.0,
        repeated_loss=0.0,
    )
    return ReferenceRun(
        losses=losses, norms=trajectory.gradient_norms, owner=0, trajectory=trajectory
    )


def ran(solo: Trajectory | None) -> ProgramRun:
    """A program that did the same, up to its first step."""
    assert solo is not None
    return ProgramRun(**{its.name: getattr(solo, its.name) for its in fields(solo)}, stop_step=0)


def test_the_fixed_figures_hold_as_long_as_references_agree():
    runs = [reference_run((4.0, 3.0, 2.0)) for _ in range(FEW + 1)]
    own = derive_own_tolerances(tiny(), runs)
    assert (own.losses, own.explanation) == ((1e-4,) * 3, "")
    exact = derive_fp64_tolerances(runs, ALONE)
    assert exact.losses == (4e-12, 3e-12, 2e-12)
    assert exact.norms == (1e-11,) * 3
    assert (exact.parameters, exact.explanation) == (1e-9, "")


def test_accumulated_rounding_stays_allowed_with_the_step_reported():
    apart = (0.0, 1e-3, 0.0)
    runs = [reference_run((4.0, 3.0 + i * apart[1], 2.0), offset=float(i)) for i in range(FEW + 1)]
    own = derive_own_tolerances(tiny(), runs)
    assert own.losses[0] == 1e-4
    assert own.losses[1] == own.losses[2] > 1e-2
    assert "up to step 1;" in own.explanation
    exact = derive_fp64_tolerances(runs, ALONE)
    assert exact.losses[1] == own.losses[1]
    assert exact.parameters is not None and exact.parameters > 1e-9


def test_permuted_references_are_run_from_the_start_where_no_fixed_figure_is():
    fp32 = plan_references(tiny(), 3)
    assert fp32.required == (fp32.exact, fp32.own[0])
    sixteen = plan_references(tiny("zero3", "precision.layout=zero16"), 3)
    assert sixteen.required == (sixteen.exact, *sixteen.own)
    assert len(sixteen.own) == MANY + 1
    fp64 = plan_references(tiny("zero3", "precision.compute=fp64"), 3)
    assert fp64.required == (fp64.exact,)


def test_they_are_run_once_and_where_a_run_does_not_keep_to_the_fixed_figure():
    center = reference_run((4.0, 3.0, 2.0))
    number = 0

    def wider() -> RunTolerances:
        nonlocal number
        number += 1
        torch.manual_seed(number)
        return replace(fixed_fp32_tolerances(center), losses=(1e-3,) * 3, parameters=1e-3)

    within = LossCorridor(
        center=center.losses, allowed=fixed_fp32_tolerances(center), derive_wider=wider
    )
    before = torch.get_rng_state()
    assert within.contains(0, 4.0 + 9e-5) and number == 0
    assert within.contains(1, 3.0 + 9e-4) and number == 1
    assert not within.contains(2, 2.0 + 2e-3) and not within.contains(2, math.nan)
    assert number == 1
    assert torch.equal(torch.get_rng_state(), before)


def test_a_failure_of_fixed_tolerances_is_checked_against_references_first():
    center = reference_run((4.0,))
    grown = replace(fixed_fp32_tolerances(center), losses=(1.0,))
    within = LossCorridor(
        center=(4.0,), allowed=fixed_fp32_tolerances(center), derive_wider=lambda: grown
    )
    run = ran(reference_run((4.001,)).trajectory)
    fixed = {check.name: check for check in trajectory_checks(center, run, within.allowed, ALONE)}
    assert not fixed["loss of every step"].holds
    judged = within.check_with(lambda allowed: trajectory_checks(center, run, allowed, ALONE))
    by_name = {check.name: check for check in judged}
    assert by_name["loss of every step"].holds
    assert by_name["loss of every step"].tolerance == 1.0


def test_in_16_bits_only_references_determine_the_tolerance():
    spec = tiny("zero3", "precision.layout=zero16")
    runs = [reference_run((4.0 + i * 1e-3,), offset=i * 1e-3) for i in range(MANY + 1)]
    found = derive_own_tolerances(spec, runs)
    assert 1e-2 < found.losses[0] < 1e-1


def test_a_reference_that_is_no_number_allows_nothing():
    runs = [reference_run((4.0, math.nan, 2.0)) for _ in range(MANY + 1)]
    found = derive_own_tolerances(tiny("zero3", "precision.layout=bf16"), runs)
    assert found.losses[0] < 1e-4
    assert not any(allowed >= 1e-9 for allowed in found.losses[1:])


def test_which_layouts_need_many_references():
    assert not is_order_sensitive(tiny())
    assert not is_order_sensitive(
        tiny("zero3", "precision.layout=zero16", "precision.compute=fp64")
    )
    assert is_order_sensitive(tiny("zero3", "precision.layout=zero16"))
    assert is_order_sensitive(tiny("muon"))
    assert not is_order_sensitive(tiny("muon", "precision.compute=fp64"))
    assert len(plan_references(tiny(), 3).own) == FEW + 1
    assert len(plan_references(tiny("muon"), 3).own) == MANY + 1
    assert plan_references(tiny("zero3", "precision.compute=fp64"), 3).own == ()


# -- references that several specs share


def test_a_references_key_has_its_dependencies_without_the_mesh():
    key = ReferenceRequest(spec=tiny("zero3"), steps=3).key
    assert (
        key
        == ReferenceRequest(spec=tiny("ddp"), steps=3).key
        == ReferenceRequest(spec=tiny("tp"), steps=3).key
    )
    others = (
        ReferenceRequest(spec=tiny("zero3"), steps=4),
        ReferenceRequest(spec=tiny("zero3"), steps=3, seed=0),
        ReferenceRequest(spec=tiny("zero3", "train.seed=1"), steps=3),
        ReferenceRequest(spec=tiny("zero3", "optimizer.lr=1e-3"), steps=3),
        ReferenceRequest(spec=tiny("zero3", "batch.micro=2"), steps=3),
        ReferenceRequest(spec=tiny("zero3", "precision.compute=fp64"), steps=3),
        ReferenceRequest(spec=tiny("zero3", "model.ffn=65"), steps=3),
    )
    assert len({key, *(ask.key for ask in others)}) == len(others) + 1


def test_a_reference_is_the_same_for_all_specs_of_a_job():
    ask = ReferenceRequest(spec=tiny("zero3"), steps=3)
    first = run_references([ask, ask], ALONE, Progress())
    again = run_references([replace(ask, spec=tiny("ddp"))], ALONE, Progress())
    assert again[ask.key].losses == first[ask.key].losses
    one, other = first[ask.key].trajectory, again[ask.key].trajectory
    assert one is not None and other is not None
    assert (
        one.repeated_loss is not None and one.repeated_loss == other.repeated_loss < one.losses[0]
    )
    for name, parameter in one.parameters.items():
        assert torch.equal(parameter, other.parameters[name])


def test_ranks_share_references_by_their_durations() -> None:
    planned = plan_references(tiny("ddp"), 3)
    asks = (planned.exact, *planned.own)  # one in fp64; one and three permuted ones in fp32
    owners = _assign_owners(list({ask.key: ask for ask in asks}.values()), 2)
    loads = [
        sum({its.key: its.cost for its in asks if owners[its.key] == n}.values()) for n in (0, 1)
    ]
    assert max(loads) <= 1.2 * min(loads)
    assert set(owners) == {ask.key for ask in asks}
