"""torch's private backward passes of a stage behave as documented."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining import _backward as theirs

from ptrain.axes.pipeline.run import passes


def stage() -> tuple[nn.Sequential, Tensor]:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 4))
    return module.double(), torch.randn(3, 4, dtype=torch.float64, requires_grad=True)


def autograd_passes(module: nn.Module, x: Tensor, gradient: Tensor | None) -> list[Tensor]:
    """autograd's own: of the input, then of the parameters."""
    output = module(x)
    root = output.square().sum() if gradient is None else output
    return list(torch.autograd.grad(root, [x, *module.parameters()], gradient))


@pytest.mark.parametrize("is_last", [False, True])
def test_a_whole_pass_and_its_two_halves_give_autograds_gradients(is_last):
    module, x = stage()
    gradient = None if is_last else torch.randn(3, 4, dtype=torch.float64)
    of_input, *of_parameters = autograd_passes(module, x, gradient)
    for in_halves in (False, True):
        module.zero_grad()
        output = module(x)
        root = output.square().sum() if is_last else output
        if in_halves:
            parameters = list(module.parameters())
            found, groups = passes.backward_input(root, gradient, x, parameters)
            assert all(parameter.grad is None for parameter in parameters)
            passes.backward_weight(parameters, groups)
        else:
            found = passes.backward(root, gradient, x)
        assert found is not None and torch.equal(found, of_input)
        x.grad = None
        for parameter, expected in zip(module.parameters(), of_parameters, strict=True):
            assert parameter.grad is not None
            torch.testing.assert_close(parameter.grad, expected, rtol=1e-14, atol=0)


class Transposed(nn.Module):
    """Multiplies with its matrices transposed, as experts with places do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 4, 4, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x + (x.expand(2, -1, -1) @ self.weight.mT).sum(0)


def test_the_weights_half_leaves_gradients_that_lie_as_parameters_do():
    """Fused optimizers read both by their places in memory."""
    module, (_, x) = Transposed(), stage()
    _, expected = autograd_passes(module, x, None)
    parameters = list(module.parameters())
    _, groups = passes.backward_input(module(x).square().sum(), None, x, parameters)
    passes.backward_weight(parameters, groups)
    assert module.weight.grad is not None
    assert module.weight.grad.stride() == module.weight.stride()
    torch.testing.assert_close(module.weight.grad, expected, rtol=1e-14, atol=0)


def test_the_weights_half_goes_in_the_models_order():
    module, x = stage()
    parameters = list(module.parameters())
    _, groups = passes.backward_input(module(x), torch.ones(3, 4).double(), x, parameters)
    for group in groups:  # against the order of addresses
        for key in ("intermediates", "grads"):
            group[key] = list(group[key])[::-1]  # up to torch 2.11 a set
    passes.in_model_order(groups, parameters)
    places = {theirs._get_grad_fn_or_grad_acc(each): n for n, each in enumerate(parameters)}
    assert groups
    for group in groups:
        order = [places[node] for node in group["params"]]
        assert order == sorted(order)
        numbers = [node._sequence_nr() for node in group["intermediates"]]
        assert numbers == sorted(numbers) and len(numbers) == len(group["grads"])


def test_tokens_have_no_gradient():
    table = nn.Embedding(5, 4)
    output = table(tokens := torch.arange(5))
    assert passes.backward(output, torch.ones_like(output), tokens) is None
    assert table.weight.grad is not None
