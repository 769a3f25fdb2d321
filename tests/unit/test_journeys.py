"""What is tried of rows that travel between ranks with experts of their own: where nothing is wrong
on the way, it is what one device's experts give."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ptrain.models.moe import MoE
from ptrain.spec.load import load
from ptrain.verification.causes import experts as causes
from ptrain.verification.causes.experts import RoutedLayer, _Group, _Places, _Rows

PLACES, TOKENS = (0, 1), 8  # shares of the batch that ranks have, tokens of each

BESIDE = {
    "mesh": {"ep": 2},
    "placement": {"ep": "ddp"},
    "batch": {"global": 2, "micro": 1, "sequence": TOKENS},
}


def group_of(monkeypatch: pytest.MonkeyPatch, own: int, **shape: Any) -> _Group:
    """A layer of four experts on two ranks, which each have a sample."""
    sizes = {"layers": 1, "hidden": 8, "heads": 2, "ffn": 16, "vocab": 16, "expert_ffn": 8}
    experts = {"family": "llama", "experts": 4, "experts_per_token": 2}
    layer = MoE(load(BESIDE | {"model": {**sizes, **experts, **shape}}).spec.model).double()
    torch.manual_seed(0)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    samples = [torch.randn(1, TOKENS, 8, dtype=torch.float64) for _ in PLACES]
    calls = [_calls(layer, x_BTC) for x_BTC in samples]
    scene: Any = SimpleNamespace(first=SimpleNamespace(index=0))

    def call_of(_: object, path: str, at: tuple[int, int] = (own, 0)) -> Any:
        return calls[at[0]][path.partition(".")[2]]

    monkeypatch.setattr(causes, "call_of", call_of)
    kind = _Places if layer.shape.capacity_factor is not None else _Rows
    return kind(scene, "mlp", RoutedLayer.of(scene, "mlp", layer), PLACES, own)


def _calls(layer: MoE, x_BTC: torch.Tensor) -> dict[str, Any]:
    """What the layer, its router and its experts are given and give."""
    calls: dict[str, Any] = {}
    named = {"": layer, "router": layer.router, "experts": layer.experts}
    hooks = [
        module.register_forward_hook(
            lambda _, args, output, name=name: calls.update({name: (args, output)})
        )
        for name, module in named.items()
    ]
    with torch.no_grad():
        layer(x_BTC)
    for hook in hooks:
        hook.remove()
    return calls


SHAPES = ({}, {"capacity_factor": 0.75})


@pytest.mark.parametrize("own", PLACES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_that_lie_as_they_should_are_one_devices(
    monkeypatch: pytest.MonkeyPatch, shape: dict[str, Any], own: int
) -> None:
    group = group_of(monkeypatch, own, **shape)
    right = group.returned(is_sorted_there=True, is_sorted_home=True)
    torch.testing.assert_close(right, group.routed.y)
    torch.testing.assert_close(group.moved(len(PLACES)), group.routed.y)


@pytest.mark.parametrize("own", PLACES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_whatever_is_tried_is_something_else(
    monkeypatch: pytest.MonkeyPatch, shape: dict[str, Any], own: int
) -> None:
    group = group_of(monkeypatch, own, **shape)
    tried = [*group.unsorted("ep"), *group.elsewhere("ep")]
    assert [explanation.factor for explanation, _ in tried] == [
        "rows of other tokens",
        "rows of other experts",
        "rows of other experts",
        "experts of another rank",
        "all-to-all left out",
    ]
    others = [group.routed.y, *(y for _, y in tried)]
    assert all(its.shape == others[0].shape for its in others)
    pairs = [(a, b) for i, a in enumerate(others) for b in others[:i]]
    assert not any(torch.allclose(a, b) for a, b in pairs)
