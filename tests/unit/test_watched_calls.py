"""Watched forward calls, and the registry of live storages."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch
from torch import nn

from ptrain.internals.part import replace_attributes
from ptrain.models.ledger import OfStorages, add_listeners, storage_of, watch_modules


class Raising(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise ValueError("no such width")


def test_the_paths_that_run_are_outermost_first_and_a_module_that_raises_is_none_of_them():
    model = nn.Sequential(nn.Sequential(nn.ReLU()), Raising())
    seen: list[list[str]] = []

    def before(*_: object) -> None:
        seen.append([*running])

    with watch_modules(model.named_modules(), before=before) as running:
        with pytest.raises(ValueError, match="no such width"):
            model(torch.ones(1))
        assert running == []
    assert seen == [[""], ["", "0"], ["", "0", "0.0"], ["", "1"]]


def test_a_returned_value_replaces_the_output_while_watched():
    layer = nn.Identity()

    def before(path: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
        return (args[0] + 1,), kwargs

    def after(path: str, module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        return output * 10

    with watch_modules([("layer", layer)], before=before, after=after):
        assert layer(torch.tensor(1)) == 20
    assert layer(torch.tensor(1)) == 1


def test_the_facts_of_a_storage_are_found_by_its_views_and_freed_with_it():
    known: OfStorages[str] = WeakKeyDictionary()
    tensor = torch.zeros(4)
    known[storage_of(tensor)] = "mine"
    view = tensor[1:]
    del tensor
    assert known[storage_of(view)] == "mine"
    del view
    assert not known and storage_of(torch.zeros(4)) not in known


def test_attributes_and_listeners_are_restored_after_an_exception():
    layer, listeners = nn.Identity(), ["first"]
    with (
        pytest.raises(ValueError, match="within"),
        replace_attributes(layer, training=False),
        add_listeners(listeners, "second"),
    ):
        assert not layer.training and listeners == ["first", "second"]
        raise ValueError("within")
    assert layer.training and listeners == ["first"]
