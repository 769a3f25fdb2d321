"""The units of a model: what is gathered, reduced and freed together."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import assert_never

from torch import nn

from ptrain.errors import refused
from ptrain.spec.dials import UnitKind, UnitSize
from ptrain.spec.role import fits

ROOT = ""
_CONTAINERS = (nn.ModuleList, nn.ModuleDict)  # they have no forward: nothing calls their hooks

Units = tuple[tuple[str, ...], ...]


def unit_modules(
    module: nn.Module,
    unit: UnitSize | None = None,
    pattern: str | None = None,
    apart: Sequence[str] = (),
) -> Units:
    """The modules of each unit, inner before outer: made of the blocks as `unit` says (one block
    each, where it is not given), then the root. Those that are kept `apart` are units of their own,
    before that which they are a part of. `pattern` as of `blocks_of`."""
    size = unit or UnitSize()
    names = blocks_of(module, pattern)
    match size.kind:
        case UnitKind.BLOCK | UnitKind.BLOCKS:
            starts = range(0, len(names), size.count)
            inner = [tuple(names[start : start + size.count]) for start in starts]
        case UnitKind.SUB_BLOCK:
            inner = [(name,) for block in names for name in (*_parts(module, block), block)]
        case UnitKind.MODEL:
            inner = []
        case kind:
            assert_never(kind)
    units, left = [], list(apart)
    for modules in (*inner, (ROOT,)):
        own = [
            n for n in left if any(n.startswith(f"{outer}." if outer else "") for outer in modules)
        ]
        units += [*((name,) for name in own), modules]
        left = [name for name in left if name not in own]
    return tuple(units)


def blocks_of(module: nn.Module, pattern: str | None = None) -> list[str]:
    """Those whose names the spec's pattern fits; without one those that the model itself names, as
    transformers' do; else those of its longest list. Raises SpecError where the pattern means no
    blocks."""
    if pattern is not None:
        return _meant_blocks(module, pattern)
    return _named_blocks(module) or _listed_blocks(module)


def _meant_blocks(module: nn.Module, pattern: str) -> list[str]:
    named = dict(module.named_modules())
    names = [name for name in named if name and fits(pattern, name)]
    remedy = f"Use the names of its blocks, with * for a number: `model.blocks={_example(module)}`."
    if not names:
        raise refused("model.blocks", f"no module is named {pattern!r}", remedy)
    for name in names:
        if isinstance(named[name], _CONTAINERS):
            raise refused(
                "model.blocks",
                f"{name} is {type(named[name]).__name__}, which has no forward call",
                remedy,
            )
        if outer := next((other for other in names if name.startswith(f"{other}.")), None):
            raise refused(
                "model.blocks", f"{pattern!r} matches both {outer} and its submodule {name}", remedy
            )
    return names


def _example(module: nn.Module) -> str:
    """A pattern of blocks that would be found without one."""
    names = _named_blocks(module) or _listed_blocks(module)
    return re.sub(r"\d+", "*", names[0]) if names else "layers.*"


def _named_blocks(module: nn.Module) -> list[str]:
    """Return the outermost modules with parameters of the classes in `_no_split_modules`."""
    kinds = getattr(module, "_no_split_modules", None) or ()
    names: list[str] = []
    for name, child in module.named_modules():
        is_inner = bool(names) and name.startswith(f"{names[-1]}.")
        if type(child).__name__ in kinds and name and not is_inner and _numel(child):
            names.append(name)
    return names


def _listed_blocks(module: nn.Module) -> list[str]:
    """The elements of the ModuleList that holds most parameters, first to last. For a built-in
    model these are its blocks. Elements without parameters are none; a model without such a list
    has none."""
    lists = {
        name: _numel(child)
        for name, child in module.named_modules()
        if isinstance(child, nn.ModuleList) and _numel(child)
    }
    if not lists:
        return []
    largest = max(lists, key=lambda name: lists[name])
    elements = module.get_submodule(largest).named_children()
    prefix = f"{largest}." if largest else ""
    return [f"{prefix}{name}" for name, child in elements if _numel(child)]


def _parts(module: nn.Module, block: str) -> Iterator[str]:
    """A block's children that have children of their own: attention and mlp, but not a norm."""
    for name, child in module.get_submodule(block).named_children():
        is_composite = next(child.children(), None) is not None
        if is_composite and not isinstance(child, _CONTAINERS) and _numel(child):
            yield f"{block}.{name}"


def _numel(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
