"""Faults of layers of experts: the router's gradient, weights and rows of tokens, dropped tokens,
and the scale of router losses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from ptrain.interpreter.program import Program
from ptrain.models.moe import Balance, Journey, MoE, run_dropless
from ptrain.report.finding import Subject
from ptrain.spec.placement import Axis
from ptrain.verification.capture import module_paths
from tests.faults.fault import Fault, Setting
from tests.faults.planting import modules

DDP_EXPERTS = Setting(mesh={"dp_replicate": 2}, model="experts")
ZERO2_EXPERTS = Setting(mesh={"dp_shard": 2}, model="experts")
ZERO3_EXPERTS = Setting(
    mesh={"dp_shard": 2}, placement={"dp_shard": "zero3"}, model="experts", micro=2
)
WITH_PLACES = Setting(mesh={"dp_shard": 2}, model="experts", shape={"capacity_factor": 0.75})
BALANCED = Setting(mesh={"dp_shard": 2}, model="experts", shape={"aux_loss": 0.1})
HSDP_BALANCED = Setting(
    mesh={"dp_replicate": 2, "dp_shard": 2},
    placement={"dp_shard": "zero3"},
    model="experts",
    shape={"aux_loss": 0.1, "z_loss": 0.01},
)

SLICED_BALANCED = Setting(mesh={"cp": 2}, model="experts", shape={"aux_loss": 0.1})
BIASED = Setting(mesh={"dp_shard": 2}, model="experts", shape={"bias_update_rate": 0.01})

# (weights [N, K], what experts give [M, C], rows of tokens [N, K, C], order [M]) -> weights, rows
Combine = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def router_gradient_lost(program: Program) -> None:
    """Detach one router's weights from the graph."""
    for path, module in module_paths(program):
        if path == "blocks.1.mlp.router":
            module.register_forward_hook(lambda _, __, output: (output[0].detach(), output[1]))


def layer_of(program: Program, block: int) -> MoE:
    (layer,) = modules(program, rf"blocks\.{block}\.mlp")
    assert isinstance(layer, MoE), "it has experts"
    return layer


def replace_combination(program: Program, combine: Combine) -> None:
    """Replace how one layer combines its experts' outputs, if no token is dropped."""
    layer = layer_of(program, 0)

    def forward(x_BTC: Tensor) -> Tensor:
        x_NC = x_BTC.flatten(0, 1)
        weights_NK, chosen_NK = layer.router(x_BTC)
        num_experts = layer.experts.num_experts
        rows_NKC = run_dropless(x_NC, chosen_NK, num_experts, layer.journey(), layer.experts)
        order_M = chosen_NK.flatten().argsort(stable=True)
        y_MC = rows_NKC.flatten(0, 1)[order_M]
        weights_NK, rows_NKC = combine(weights_NK, y_MC, rows_NKC, order_M)
        return (rows_NKC * weights_NK[..., None]).sum(1).view_as(x_BTC)

    layer.forward = forward


def weights_of_a_neighbour(program: Program) -> None:
    """Weight a token's expert outputs by the previous token's scores."""
    replace_combination(program, lambda weights, _, rows, __: (weights.roll(1, 0), rows))


def weights_of_the_other_choice(program: Program) -> None:
    """Swap the weights of the first and the second choice."""
    replace_combination(program, lambda weights, _, rows, __: (weights.flip(1), rows))


def order_for_its_inverse(program: Program) -> None:
    """Restore rows by the sorting order instead of its inverse."""
    replace_combination(program, lambda weights, y, rows, order: (weights, y[order].view_as(rows)))


def rows_not_put_back(program: Program) -> None:
    """Add rows in expert order."""
    replace_combination(program, lambda weights, y, rows, _: (weights, y.view_as(rows)))


def dropped_counted(program: Program) -> None:
    """Give a dropped choice the row of the last place: an index is clamped."""
    layer = layer_of(program, 0)
    in_places, given = layer._run_with_capacity, []
    layer.experts.register_forward_hook(lambda _, __, output: given.append(output))

    def clamped(journey: Journey, x_NC: Tensor, places_NK: Tensor, num_places: int) -> Tensor:
        rows_NKC = in_places(journey, x_NC, places_NK, num_places)
        last_C = given.pop().flatten(0, 1)[-1]
        return torch.where((places_NK == num_places)[..., None], last_C, rows_NKC)

    layer._run_with_capacity = clamped


def dropped_passed_on(program: Program) -> None:
    """Return the token for a dropped choice, in addition to the residual stream."""
    layer = layer_of(program, 0)
    in_places = layer._run_with_capacity

    def passed_on(journey: Journey, x_NC: Tensor, places_NK: Tensor, num_places: int) -> Tensor:
        rows_NKC = in_places(journey, x_NC, places_NK, num_places)
        return torch.where((places_NK == num_places)[..., None], x_NC[:, None], rows_NKC)

    layer._run_with_capacity = passed_on


def _weighed(program: Program, factor: float) -> None:
    for module in program.model.modules():
        if isinstance(module, Balance):
            module.weight *= factor


def loss_over_own_samples(program: Program) -> None:
    """Average router losses over local samples on each rank, and sum them over ranks."""
    _weighed(program, program.spec.data_degree)


def loss_over_own_tokens(program: Program) -> None:
    """Average router losses over local tokens on each rank of cp, and sum them over ranks."""
    _weighed(program, program.spec.degree(Axis.CP))


def loss_left_out(program: Program) -> None:
    """Compute the router losses without adding them."""
    _weighed(program, 0.0)


def loss_of_micro_batches(program: Program) -> None:
    """Balance the local tokens of all samples together."""
    for module in program.model.modules():
        if isinstance(module, Balance):
            module.forward = partial(_of_local_tokens, module.forward)


def _of_local_tokens(loss: Callable[..., Tensor], *routing_BT: Tensor) -> Tensor:
    samples = routing_BT[0].shape[0]
    return samples * loss(*(x_BT.flatten(0, 1).unsqueeze(0) for x_BT in routing_BT))


def bias_of_own_tokens(program: Program) -> None:
    """Update the biases by local counts without a reduction."""
    balancing = program.balancing
    assert balancing is not None, "routers have biases"
    balancing._group = None
    own = program.spec.data_degree
    balancing.step = replace(balancing.step, choices=balancing.step.choices // own)


def bias_moved_away(program: Program) -> None:
    """Favour experts that are chosen often."""
    balancing = program.balancing
    assert balancing is not None, "routers have biases"
    balancing.step = replace(balancing.step, rate=-balancing.step.rate)


FAULTS = (
    Fault(
        name="a router's gradient lost",
        setting=ZERO2_EXPERTS,
        plant=router_gradient_lost,
        subjects=(Subject.GRADIENTS,),
        factor="no gradient",
        place=r"blocks\.1\.mlp\.router\.weight",
    ),
    Fault(
        name="a router's gradient lost among replicas",
        setting=DDP_EXPERTS,
        plant=router_gradient_lost,
        subjects=(Subject.GRADIENTS,),
        factor="no gradient",
        place=r"blocks\.1\.mlp\.router\.weight",
    ),
    Fault(
        name="a router's gradient lost under fully_shard",
        setting=ZERO3_EXPERTS,
        plant=router_gradient_lost,
        subjects=(Subject.GRADIENTS,),
        factor="no gradient",
        place=r"blocks\.1\.mlp\.router\.weight",
    ),
    Fault(
        name="experts weighed by what a neighbouring token was given",
        setting=DDP_EXPERTS,
        plant=weights_of_a_neighbour,
        subjects=(Subject.ACTIVATIONS,),
        factor="weights of another token",
        place=r"blocks\.0\.mlp$",
    ),
    Fault(
        name="experts weighed by what another choice was given",
        setting=ZERO3_EXPERTS,
        plant=weights_of_the_other_choice,
        subjects=(Subject.ACTIVATIONS,),
        factor="weights of another choice",
        place=r"blocks\.0\.mlp$",
    ),
    Fault(
        name="rows put back by the order in place of its inverse",
        setting=ZERO3_EXPERTS,
        plant=order_for_its_inverse,
        subjects=(Subject.ACTIVATIONS,),
        factor="rows of other tokens",
        place=r"blocks\.0\.mlp$",
    ),
    Fault(
        name="rows not put back from their experts",
        setting=ZERO2_EXPERTS,
        plant=rows_not_put_back,
        subjects=(Subject.ACTIVATIONS,),
        factor="rows of other tokens",
        place=r"blocks\.0\.mlp$",
    ),
    Fault(
        name="dropped tokens counted: given what lies in the last place",
        setting=WITH_PLACES,
        plant=dropped_counted,
        subjects=(Subject.ACTIVATIONS,),
        factor="dropped tokens counted",
        place=r"blocks\.0\.mlp$",
    ),
    Fault(
        name="dropped tokens counted: passed on twice",
        setting=WITH_PLACES,
        plant=dropped_passed_on,
        subjects=(Subject.ACTIVATIONS,),
        factor="dropped tokens counted",
        place=r"blocks\.0\.mlp$",
    ),
    Fault(
        name="routers' losses divided by a rank's own samples",
        setting=BALANCED,
        plant=loss_over_own_samples,
        subjects=(Subject.GRADIENTS, Subject.ACTIVATIONS),
        axis="dp_shard",
        factor="× 2",
        place=r"mlp\.router",
    ),
    Fault(
        name="routers' losses divided by a rank's own samples under HSDP",
        setting=HSDP_BALANCED,
        plant=loss_over_own_samples,
        subjects=(Subject.GRADIENTS, Subject.ACTIVATIONS),
        axis="dp_replicate|dp_shard",
        factor="× 4",
        place=r"mlp\.router",
    ),
    Fault(
        name="routers' losses divided by a rank's own tokens over cp",
        setting=SLICED_BALANCED,
        plant=loss_over_own_tokens,
        subjects=(Subject.GRADIENTS, Subject.ACTIVATIONS),
        axis="cp",
        factor="× 2",
        place=r"mlp\.router",
    ),
    Fault(
        name="experts' biases moved by a rank's own tokens",
        setting=BIASED,
        plant=bias_of_own_tokens,
        subjects=(Subject.BUFFERS,),
        place=r"blocks\.\d\.mlp\.router\.bias_E",
    ),
    Fault(
        name="experts' biases moved away from the mean",
        setting=BIASED,
        plant=bias_moved_away,
        subjects=(Subject.BUFFERS,),
        place=r"blocks\.\d\.mlp\.router\.bias_E",
    ),
    Fault(
        name="router losses left out",
        setting=BALANCED,
        plant=loss_left_out,
        subjects=(Subject.GRADIENTS, Subject.ACTIVATIONS),
        factor="left out",
        place=r"mlp\.router",
    ),
)
