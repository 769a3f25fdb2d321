"""The units of a model: what is gathered, reduced and freed together."""

from __future__ import annotations

from torch import nn

ROOT = ""


def unit_modules(module: nn.Module) -> tuple[tuple[str, ...], ...]:
    """The modules of each unit: the elements of the ModuleList that holds most parameters, first to
    last, then the root.

    For a built-in model these are its blocks. Elements without parameters are no units; a model
    without such a list is one unit.
    """
    lists = {
        name: _numel(child)
        for name, child in module.named_modules()
        if isinstance(child, nn.ModuleList) and _numel(child)
    }
    if not lists:
        return ((ROOT,),)
    largest = max(lists, key=lambda name: lists[name])
    elements = module.get_submodule(largest).named_children()
    prefix = f"{largest}." if largest else ""
    return (*((f"{prefix}{name}",) for name, child in elements if _numel(child)), (ROOT,))


def _numel(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
