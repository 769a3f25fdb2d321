"""Faults of expert-parallel ranks: rows sent to wrong experts or returned to wrong tokens, and
gradients and norms that count experts as replicated."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from ptrain.interpreter.program import Program
from ptrain.report.finding import Subject
from ptrain.spec.placement import Axis
from tests.faults.fault import Fault, Setting
from tests.faults.of_experts import (
    bias_of_own_tokens,
    dropped_counted,
    dropped_passed_on,
    loss_left_out,
    loss_of_micro_batches,
    loss_over_own_samples,
    order_for_its_inverse,
    router_gradient_lost,
    weights_of_a_neighbour,
)
from tests.faults.of_updates import clipped_by_local_norm
from tests.faults.planting import after_reduction, replicated_gradients, units

EP = Setting(mesh={"ep": 2}, model="experts")
ONE_EACH = Setting(mesh={"ep": 4}, model="experts")
EP_ZERO2 = Setting(mesh={"ep": 2}, placement={"ep": "zero2"}, model="experts")
EP_DP = Setting(mesh={"dp_replicate": 2, "ep": 2}, model="experts")
EP_ZERO3 = Setting(
    mesh={"dp_shard": 2, "ep": 2}, placement={"dp_shard": "zero3", "ep": "zero3"}, model="experts"
)
EP_TP = Setting(mesh={"ep": 2, "tp": 2}, model="experts")
EP_TP_FOLDED = replace(EP_TP, sections={"tensor": {"experts": "folded"}})
EP_PP = Setting(mesh={"pp": 2, "ep": 2}, model="experts")
EP_PLACES = replace(EP, shape={"capacity_factor": 0.75})
EP_BALANCED = replace(EP, shape={"aux_loss": 0.1})
EP_BALANCED_PAIRS = replace(EP_BALANCED, micro=2)
EP_BIASED = replace(EP, shape={"bias_update_rate": 0.01})
EP_DP_BALANCED = replace(EP_DP, shape={"aux_loss": 0.1, "z_loss": 0.01})


def _gradients_of_experts(program: Program) -> list[Tensor]:
    """Return the local expert gradients."""
    of_units = [
        held
        for unit in units(program)
        if ".experts." in unit.state.members.names[0]
        for held in unit.gradients.live_tensors()
    ]
    return of_units or replicated_gradients(program, r"\.experts\.")


def _scaled(program: Program, factor: float) -> None:
    def act(_: int) -> None:
        torch._foreach_mul_(_gradients_of_experts(program), factor)

    after_reduction(program, act)


def experts_times_ep(program: Program) -> None:
    """Average a mean over local samples over ranks without dividing expert gradients, which already
    include the tokens of all ranks."""
    _scaled(program, program.mesh.group_size((Axis.EP,)))


def experts_over_ep(program: Program) -> None:
    """Divide expert gradients by the ranks of ep, as if each rank had a term of them."""
    _scaled(program, 1 / program.mesh.group_size((Axis.EP,)))


def experts_times_tp(program: Program) -> None:
    """Count each rank's shard of experts once per tp rank."""
    _scaled(program, program.mesh.group_size((Axis.TP,)))


def _reduced(program: Program, axis: Axis, divisor: int) -> None:
    def act(_: int) -> None:
        for gradient in _gradients_of_experts(program):
            dist.all_reduce(gradient, group=program.mesh.group((axis,)))
            gradient.div_(divisor)

    after_reduction(program, act)


def experts_summed_over_ep(program: Program) -> None:
    """Sum expert gradients over ep with the others: different experts are added."""
    _reduced(program, Axis.EP, 1)


def experts_averaged_over_ep(program: Program) -> None:
    """Average expert gradients over ep: different experts are mixed."""
    _reduced(program, Axis.EP, program.mesh.group_size((Axis.EP,)))


def slices_summed_over_tp(program: Program) -> None:
    """Sum different feature shards of the same experts over tp."""
    _reduced(program, Axis.TP, 1)


def experts_broadcast(program: Program) -> None:
    """Broadcast all parameters from the first rank in the wrapper's constructor, including
    experts."""
    group = program.mesh.group((Axis.EP,))
    for unit in units(program):
        if ".experts." in unit.state.members.names[0]:
            dist.broadcast(unit.parameters.stored, dist.get_global_rank(group, 0), group=group)


def experts_twice_in_norm(program: Program) -> None:
    """Sum the squares of experts over ep twice."""
    assert program.clipping is not None
    norm, group = program.clipping.norm, program.mesh.group((Axis.EP,))

    def counted(gradients: Sequence[Tensor], wrapped: object, scaling: object) -> Tensor:
        square = norm(gradients, wrapped, scaling).square()
        more = torch.stack([its.square().sum() for its in _gradients_of_experts(program)]).sum()
        dist.all_reduce(more, group=group)
        return (square + (group.size() - 1) * more).sqrt()

    program.clipping.norm = counted


def rest_twice_in_norm(program: Program) -> None:
    """Sum all squares over ep, including those of replicated parameters."""
    clipping = program.clipping
    assert clipping is not None
    clipping.step = replace(clipping.step, axes=clipping.step.reduced_axes, operator_axes=())


def _all_faults() -> Iterator[Fault]:
    times, divided = "experts' gradient times ep", "experts' gradient divided by ep"
    for name, setting, plant, axis, factor in (
        (times, EP, experts_times_ep, "ep", "× 2"),
        (f"{times}: one expert a rank", ONE_EACH, experts_times_ep, "ep", "× 4"),
        (f"{times}: replicas", EP_DP, experts_times_ep, "", "× 2"),
        (f"{times}: shards", EP_ZERO3, experts_times_ep, "", "× 2"),
        (f"{times}: stages", EP_PP, experts_times_ep, "", "× 2"),
        (divided, EP_ZERO2, experts_over_ep, "ep", "÷ 2"),
        (f"{divided}: shards", EP_ZERO3, experts_over_ep, "", "× 0.5"),
        ("experts' gradient times tp", EP_TP, experts_times_tp, "", "× 2"),
        ("folded experts' gradient times tp", EP_TP_FOLDED, experts_times_tp, "", "× 2"),
    ):
        yield Fault(
            name=name,
            setting=setting,
            plant=plant,
            subjects=(Subject.GRADIENTS,),
            axis=axis,  # none where two have as many ranks
            factor=factor,
            place=r"^blocks\.\*\.mlp\.experts\.gate\.weight, \S*up\.weight, \S*down\.weight$",
        )
    yield from _of_different_ones()
    yield from _of_norms()
    yield from _as_of_one_rank()


def _of_different_ones() -> Iterator[Fault]:
    gradients, experts = (Subject.GRADIENTS,), r"blocks\.0\.mlp\.experts\."
    for plant, factor, word in (
        (experts_summed_over_ep, "summed over ep", "summed"),
        (experts_averaged_over_ep, "averaged over ep", "averaged"),
    ):
        for setting, where in ((EP, ""), (EP_ZERO3, ": shards")):
            yield Fault(
                name=f"different experts {word} over ep{where}",
                setting=setting,
                plant=plant,
                subjects=gradients,
                axis="ep",
                factor=factor,
                place=experts,
            )
    for setting, name in (
        (EP_TP, "slices of experts summed over tp"),
        (EP_TP_FOLDED, "folded experts summed over tp"),
    ):
        yield Fault(
            name=name,
            setting=setting,
            plant=slices_summed_over_tp,
            subjects=gradients,
            axis="tp",
            factor="summed over tp",
            place=experts,
        )
    yield Fault(
        name="one rank's experts broadcast over ep",
        setting=EP,
        plant=experts_broadcast,
        subjects=(Subject.PARAMETERS,),
        axis="ep",
        factor="experts of ep rank 0",
        place=experts,
    )


def _of_norms() -> Iterator[Fault]:
    of_replicas, axes = "experts twice in the norm: replicas", "ep or dp_replicate"
    for plant, setting, name, axis, factor in (
        (experts_twice_in_norm, EP, "experts twice in the norm", "ep", "^experts × 2"),
        (experts_twice_in_norm, EP_DP, of_replicas, axes, "^experts × 2"),
        (rest_twice_in_norm, EP, "all but experts twice in the norm", "ep", "all but experts × 2"),
        (clipped_by_local_norm, EP, "norm of a rank's own experts", "ep", "all-reduce over ep"),
    ):
        yield Fault(
            name=name,
            setting=setting,
            plant=plant,
            subjects=(Subject.NORM,),
            axis=axis,
            factor=factor,
        )


def _as_of_one_rank() -> Iterator[Fault]:
    """Apply a single-rank fault to a rank with some of the experts."""
    layer = r"blocks\.0\.mlp$"
    for plant, setting, name, factor in (
        (weights_of_a_neighbour, EP, "weights of a neighbouring token", "weights of another token"),
        (order_for_its_inverse, EP, "order in place of its inverse", "rows of other tokens"),
        (
            dropped_counted,
            EP_PLACES,
            "dropped tokens given what lies last",
            "dropped tokens counted",
        ),
        (dropped_passed_on, EP_PLACES, "dropped tokens passed on twice", "dropped tokens counted"),
    ):
        yield Fault(
            name=f"{name} (ep)",
            setting=setting,
            plant=plant,
            subjects=(Subject.ACTIVATIONS,),
            factor=factor,
            place=layer,
        )
    for plant, setting, name, axis, factor in (
        (loss_over_own_samples, EP_BALANCED, "divided by a rank's own samples", "ep", "× 2"),
        (
            loss_over_own_samples,
            EP_DP_BALANCED,
            "divided by a rank's own samples, replicas",
            "dp_replicate|ep",
            "× 4",
        ),
        (loss_left_out, EP_BALANCED, "left out", "", "left out"),
        (loss_of_micro_batches, EP_BALANCED_PAIRS, "over full micro-batches", "", "micro-batches"),
    ):
        yield Fault(
            name=f"routers' losses {name} (ep)",
            setting=setting,
            plant=plant,
            subjects=(Subject.GRADIENTS, Subject.ACTIVATIONS),
            axis=axis,
            factor=factor,
            place=r"mlp\.router",
        )
    yield Fault(
        name="experts' biases moved by a rank's own tokens (ep)",
        setting=EP_BIASED,
        plant=bias_of_own_tokens,
        subjects=(Subject.BUFFERS,),
        place=r"blocks\.\d\.mlp\.router\.bias_E",
    )
    for setting, where in ((EP, "ep"), (EP_ZERO3, "ep, shards")):
        yield Fault(
            name=f"a router's gradient lost ({where})",
            setting=setting,
            plant=router_gradient_lost,
            subjects=(Subject.GRADIENTS,),
            factor="no gradient",
            place=r"blocks\.1\.mlp\.router\.weight",
        )


FAULTS = tuple(_all_faults())
