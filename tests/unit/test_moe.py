"""Layers of experts compared with loops over tokens and with torch's grouped product."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ptrain.interpreter.construction import ExpertBalancer
from ptrain.models.moe import (
    Balance,
    ExpertPlaces,
    Gate,
    MoE,
    grouped_product,
    weight_router_losses,
)
from ptrain.runtime.comm import Mesh
from ptrain.runtime.world import World
from ptrain.spec.block import Activation, Router
from ptrain.spec.model import ModelShape
from ptrain.steps.step import BalanceExperts, CreateMesh
from ptrain.traces.facts import read_facts
from tests.gloo.expert_cases import expert_spec
from tests.pure.build import ODD_SHAPE

SHAPE = replace(
    ODD_SHAPE, experts=4, experts_per_token=2, expert_ffn=10, shared_experts=1, router_scale=1.5
)
SHAPES = {
    "two of four": SHAPE,
    "one of four": replace(SHAPE, experts_per_token=1, shared_experts=0),
    "ungated": replace(SHAPE, activation=Activation.RELU2),
    "each by itself": replace(SHAPE, router=Router.SIGMOID, router_norm=False, router_scale=None),
    "biased": replace(SHAPE, bias_update_rate=0.1),
    "of one group": replace(SHAPE, expert_groups=2, router=Router.SIGMOID),
    "of two groups, biased": replace(
        SHAPE, experts=6, expert_groups=3, groups_per_token=2, bias_update_rate=0.1
    ),
}
ENDS = torch.tensor([3, 3, 7, 8], dtype=torch.int32)  # the second group has no row


def layer_of(shape: ModelShape) -> MoE:
    layer = MoE(shape).double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(0.0, 0.5, generator=generator)
        if layer.router.bias_E is not None:
            layer.router.bias_E.normal_(0.0, 0.5, generator=generator)
    return layer


def tokens(shape: ModelShape) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(3, 7, shape.hidden, dtype=torch.float64, generator=generator)


def choice_of(layer: MoE, scores_E: Tensor) -> Tensor:
    """A token's experts, the best first, by sorting groups and then experts."""
    shape, biases_E = layer.shape, layer.router.bias_E
    worth = (scores_E if biases_E is None else scores_E + biases_E).tolist()
    allowed = range(len(worth))
    if shape.expert_groups is not None:
        size = len(worth) // shape.expert_groups
        groups = [range(first, first + size) for first in range(0, len(worth), size)]
        groups.sort(key=lambda own: -sum(sorted((worth[e] for e in own), reverse=True)[:2]))
        allowed = [expert for own in groups[: shape.groups_per_token] for expert in own]
    best = sorted(allowed, key=lambda expert: -worth[expert])
    return torch.tensor(best[: shape.experts_per_token])


def by_token(layer: MoE, x_BTC: Tensor, capacity: int) -> Tensor:
    """What a layer computes, one token and choice after the other."""
    shape, experts = layer.shape, layer.experts
    logits = x_BTC @ layer.router.weight.T
    scores = logits.softmax(-1) if shape.router is Router.SOFTMAX else logits.sigmoid()
    y_BTC = torch.zeros_like(x_BTC)
    for sample, x_TC in enumerate(x_BTC):
        taken = [0] * experts.num_experts
        ranked = torch.stack([choice_of(layer, scores_E) for scores_E in scores[sample]])
        for choice in range(shape.experts_per_token):
            for token, x_C in enumerate(x_TC):
                expert = int(ranked[token, choice])
                taken[expert] += 1
                if taken[expert] > capacity:
                    continue
                weight = scores[sample, token, expert]
                if shape.router_norm:
                    weight = weight / scores[sample, token, ranked[token]].sum()
                gated = experts.up if experts.gate is None else experts.gate
                h = experts.activate(gated.weight[expert] @ x_C)
                if experts.gate is not None:
                    h = h * (experts.up.weight[expert] @ x_C)
                factor = weight * (shape.router_scale or 1.0)
                y_BTC[sample, token] += factor * (experts.down.weight[expert] @ h)
    return y_BTC if layer.shared is None else y_BTC + layer.shared(x_BTC)


@pytest.mark.parametrize("factor", [None, 0.5, 1.0, 4.0])
@pytest.mark.parametrize("name", SHAPES)
def test_a_layer_computes_the_result_of_a_loop_over_its_tokens(name: str, factor: float | None):
    shape = replace(SHAPES[name], capacity_factor=factor)
    layer, x_BTC = layer_of(shape), tokens(shape).requires_grad_()
    capacity = x_BTC.shape[1] if factor is None else shape.capacity(x_BTC.shape[1])
    outputs = layer(x_BTC), by_token(layer, x_BTC, capacity)
    torch.testing.assert_close(*outputs, rtol=1e-12, atol=1e-12)
    inputs = [x_BTC, *layer.parameters()]
    ours, expected = (torch.autograd.grad(y.square().sum(), inputs) for y in outputs)
    # small elements are what large terms leave: processors round those each in their own way
    largest = max(float(other.abs().max()) for other in expected)
    for gradient, other in zip(ours, expected, strict=True):
        torch.testing.assert_close(gradient, other, rtol=0.0, atol=1e-14 * largest)


def test_first_choices_take_capacity_before_second_ones():
    chosen_BTK = torch.tensor([[[0, 1], [1, 0], [0, 1]]])
    places = ExpertPlaces(replace(SHAPE, experts=2, capacity_factor=0.6))  # two of each expert
    assert places(chosen_BTK).tolist() == [[0, 3], [2, 4], [1, 4]]  # 4: there is none


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_grouped_product_equals_torchs(dtype: torch.dtype):
    """For fp64 numbers that the narrower dtype represents: torch has no grouped product in fp64."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(8, 16, generator=generator).to(dtype)
    weights = torch.randn(4, 24, 16, generator=generator).to(dtype)
    gradient = torch.randn(8, 24, generator=generator).to(dtype)
    results = []
    for kind in (dtype, torch.float64):
        given = [x.to(kind).requires_grad_(), weights.to(kind).requires_grad_()]
        y = grouped_product(given[0], given[1].mT, ENDS)
        assert y.grad_fn is not None
        results.append([y, *torch.autograd.grad(y, given, gradient.to(kind))])
    assert F.grouped_mm(x, weights.mT, offs=ENDS).equal(results[0][0])
    bound = 1e-5 if dtype is torch.float32 else 4e-2  # of sums of up to 24 products
    for ours, wide in zip(*results, strict=True):
        torch.testing.assert_close(ours.double(), wide, rtol=bound, atol=bound)
    assert not results[1][2][1].any()  # no row came to the second


@pytest.mark.parametrize("factor", [None, 1.25])
@pytest.mark.parametrize("compute", [None, "fp64"])
def test_no_size_depends_on_where_tokens_go(factor: float | None, compute: str | None):
    shape = {"capacity_factor": factor} if factor else {}
    precision = {"layout": "fp32", **({"compute": compute} if compute else {})}
    facts = read_facts(expert_spec("top-2", shape=shape, precision=precision))
    assert not facts.by_data and not facts.untraced and facts.timeline is not None


def test_an_even_router_has_the_least_loss_with_its_weight():
    shape = replace(SHAPE, experts_per_token=1, aux_loss=0.25)
    scores_BTE = torch.full((2, 8, 4), 0.25, dtype=torch.float64)
    even_BTK = (torch.arange(8) % 4).expand(2, 8)[..., None]
    loss = Balance(shape)(scores_BTE, scores_BTE, even_BTK)
    assert float(loss) == pytest.approx(2 * 0.25)  # of two samples
    to_one = scores_BTE.new_tensor([1.0, 0.0, 0.0, 0.0]).expand_as(scores_BTE)
    assert float(Balance(shape)(to_one, to_one, even_BTK * 0)) == pytest.approx(2 * 0.25 * 4)


@pytest.mark.parametrize("samples", [1, 3])
def test_a_routers_losses_are_in_the_gradients_as_if_they_were_added(samples: int):
    """Beside the formulas, written for one sample; the layer's own output is what it was."""
    shape = replace(SHAPE, aux_loss=0.3, z_loss=0.2, shared_experts=0)
    layer, x_BTC = layer_of(shape), tokens(shape)[:samples]
    weight_router_losses(layer, 0.125)
    y_BTC = layer(x_BTC)
    assert torch.equal(y_BTC, layer.eval()(x_BTC))
    logits_BTE = x_BTC @ layer.router.weight.T
    extra = torch.zeros((), dtype=torch.float64)
    for logits_TE in logits_BTE:
        chosen = logits_TE.topk(shape.experts_per_token).indices.flatten()
        shares = torch.bincount(chosen, minlength=shape.experts) / len(chosen)
        uneven = shape.experts * (shares * logits_TE.softmax(-1).mean(0)).sum()
        extra = extra + 0.3 * uneven + 0.2 * logits_TE.logsumexp(-1).square().mean()
    weight = layer.router.weight
    (ours,) = torch.autograd.grad(y_BTC.square().sum(), weight)
    plain = layer.eval()(x_BTC).square().sum()
    (expected,) = torch.autograd.grad(plain + 0.125 * extra, weight)
    torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-10)


def test_balance_is_that_of_transformers_mixtral():
    """Over one sample; theirs counts a choice once, ours the share that it has of a token's."""
    mixtral = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    generator = torch.Generator().manual_seed(4)
    logits_TE = torch.randn(32, 4, dtype=torch.float64, generator=generator)
    theirs = mixtral.load_balancing_loss_func((logits_TE,), 4, 2)
    scores_TE = logits_TE.softmax(-1)
    chosen_TK = scores_TE.topk(2).indices
    ours = Balance(replace(SHAPE, aux_loss=1.0))(logits_TE[None], scores_TE[None], chosen_TK[None])
    assert float(ours) == pytest.approx(float(theirs) / 2, rel=1e-6)


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_the_choice_is_that_of_transformers_deepseek_v3(groups: int, monkeypatch):
    v3 = pytest.importorskip("transformers.models.deepseek_v3")
    monkeypatch.setattr(torch, "float32", torch.float64)  # theirs is computed in it by name
    config = v3.DeepseekV3Config(
        hidden_size=16, n_routed_experts=16, num_experts_per_tok=4, n_group=4, topk_group=groups
    )
    theirs = v3.modeling_deepseek_v3.DeepseekV3TopkRouter(config).double()
    limits = {} if groups == 4 else {"expert_groups": 4, "groups_per_token": groups}
    shape = replace(SHAPE, hidden=16, experts=16, experts_per_token=4, router=Router.SIGMOID)
    shape = replace(shape, router_scale=2.5, bias_update_rate=0.001, **limits)
    ours = Gate(shape).double()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        ours.weight.normal_(0.0, 1.0, generator=generator)
        ours.bias_E.normal_(-0.5, 0.5, generator=generator)  # many a sum is negative
        theirs.weight.copy_(ours.weight)
        theirs.e_score_correction_bias.copy_(ours.bias_E)
    x_BTC = torch.randn(2, 40, 16, dtype=torch.float64, generator=generator)
    weights_NK, chosen_NK = ours(x_BTC)
    _, their_weights, their_choice = theirs(x_BTC)
    placed = [w.new_zeros(80, 16).scatter(1, c, w) for w, c in (
        (weights_NK, chosen_NK), (their_weights, their_choice))]  # fmt: skip
    torch.testing.assert_close(*placed, rtol=1e-14, atol=0.0)


def test_choices_are_counted_once_a_token_and_in_training_alone():
    shape = replace(SHAPE, bias_update_rate=0.1)
    layer, x_BTC = layer_of(shape), tokens(shape).requires_grad_()
    with torch.no_grad():
        layer.eval()(x_BTC)
    assert layer.router.load_E.tolist() == [0] * 4
    layer.train()
    checkpoint(layer, x_BTC, use_reentrant=False).sum().backward()  # computed again in backward
    _, chosen_NK = layer.eval().router(x_BTC)
    assert layer.router.load_E.tolist() == chosen_NK.flatten().bincount(minlength=4).tolist()
    assert int(layer.router.load_E.sum()) == 3 * 7 * 2


def test_a_routing_bias_does_not_scale_experts_and_has_no_gradient():
    shape = replace(SHAPE, experts_per_token=3, bias_update_rate=0.1, router_norm=False)
    layer, x_BTC = layer_of(shape), tokens(shape)
    layer.router.bias_E.zero_()
    plain, chosen_NK = layer.router(x_BTC)
    layer.router.bias_E.fill_(7.0)  # of all alike: the choice is the same
    shifted, again_NK = layer.router(x_BTC)
    assert torch.equal(plain, shifted) and torch.equal(chosen_NK, again_NK)
    assert [name for name, _ in layer.router.named_parameters()] == ["weight"]
    assert "bias_E" in layer.router.state_dict() and "load_E" not in layer.router.state_dict()


@pytest.mark.parametrize("load", [[9, 3, 4, 8], [6, 6, 6, 6], [24, 0, 0, 0], [7, 6, 6, 5]])
def test_a_bias_moves_towards_the_mean_by_its_rate(load: list[int]):
    layer = MoE(replace(SHAPE, bias_update_rate=0.25))
    model = nn.ModuleDict({"mlp": layer})
    step = BalanceExperts(rate=0.25, choices=24, axes=())
    balancing = ExpertBalancer(step, [model], Mesh(CreateMesh(axes=(), degrees=()), World()))
    balancing.begin()
    layer.router.load_E += torch.tensor(load)
    balancing.update_biases()
    expected = [0.25 * ((own < 6) - (own > 6)) for own in load]
    assert balancing.state()["mlp.router.bias_E"].tolist() == expected
    assert layer.router.load_E.tolist() == [0] * 4
