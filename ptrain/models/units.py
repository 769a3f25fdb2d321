"""The wrap units of a model: modules whose parameters are all-gathered, reduced and freed
together."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import assert_never

from torch import nn

from ptrain.errors import input_error
from ptrain.facts.model import LAST_UNIT
from ptrain.spec.dials import UnitKind, UnitSize
from ptrain.spec.placement import matches_pattern

ROOT = ""
_CONTAINERS = (nn.ModuleList, nn.ModuleDict)  # without forward, so their hooks never run

Units = tuple[tuple[str, ...], ...]
NamedUnit = tuple[tuple[str, ...], list[tuple[str, nn.Parameter]]]  # modules and named parameters


def unit_modules(
    module: nn.Module,
    unit: UnitSize | None = None,
    pattern: str | None = None,
    apart: Sequence[str] = (),
) -> Units:
    """Return the module names of each wrap unit, inner units before outer ones, the root last.

    Args:
        module: The model.
        unit: Size of the units in blocks; None means one block each.
        pattern: Names of the blocks; see `blocks_of`.
        apart: Modules that become separate units, each placed before the unit that contains it.

    Raises:
        SpecError: The pattern matches no valid blocks.
    """
    size = unit or UnitSize()
    names = blocks_of(module, pattern)
    match size.kind:
        case UnitKind.BLOCK | UnitKind.BLOCKS:
            starts = range(0, len(names), size.count)
            inner = [tuple(names[start : start + size.count]) for start in starts]
        case UnitKind.SUB_BLOCK:
            inner = [(name,) for block in names for name in (*_sub_blocks(module, block), block)]
        case UnitKind.ENDS:
            inner = [("embed",), *((name,) for name in names), LAST_UNIT]
        case UnitKind.MODEL:
            inner = []
        case kind:
            assert_never(kind)
    # An inner unit comes before the unit that contains it, because the outer one takes all
    # parameters that are left.
    units, left = [], list(apart)
    for modules in (*inner, (ROOT,)):
        own = [
            n for n in left if any(n.startswith(f"{outer}." if outer else "") for outer in modules)
        ]
        units += [*((name,) for name in own), modules]
        left = [name for name in left if name not in own]
    return tuple(units)


def named_units(model: nn.Module, units: Units) -> Iterator[NamedUnit]:
    """Yield each unit with its parameters, except earlier units'.

    Args:
        model: The model.
        units: The module names of each unit, as `unit_modules` returns them.
    """
    seen: set[int] = set()
    for modules in units:
        named = [
            (f"{name}." * bool(name) + local, parameter)
            for name in modules
            for local, parameter in model.get_submodule(name).named_parameters()
            # A tied parameter is in two units. The first one owns it, so that its gradient is
            # counted and reduced once.
            if id(parameter) not in seen
        ]
        seen.update(id(parameter) for _, parameter in named)
        yield modules, named


def blocks_of(module: nn.Module, pattern: str | None = None) -> list[str]:
    """Return the names of a model's blocks.

    Without a pattern they are the modules whose classes the model lists, as in transformers, else
    the elements of its largest ModuleList.

    Args:
        module: The model.
        pattern: Names with `*` for a number, from `model.blocks`.

    Raises:
        SpecError: The pattern matches nothing, a module without forward, or nested modules.
    """
    if pattern is not None:
        return _meant_blocks(module, pattern)
    return _named_blocks(module) or _listed_blocks(module)


def _meant_blocks(module: nn.Module, pattern: str) -> list[str]:
    """Return the modules that a pattern matches, after checks."""
    named = dict(module.named_modules())
    names = [name for name in named if name and matches_pattern(pattern, name)]
    remedy = (
        "Use the names of its blocks, with * for a number: "
        f"`model.blocks={_example_pattern(module)}`."
    )
    if not names:
        raise input_error("model.blocks", f"no module is named {pattern!r}", remedy)
    for name in names:
        if isinstance(named[name], _CONTAINERS):
            raise input_error(
                "model.blocks",
                f"{name} is {type(named[name]).__name__}, which has no forward call",
                remedy,
            )
        if outer := next((other for other in names if name.startswith(f"{other}.")), None):
            raise input_error(
                "model.blocks", f"{pattern!r} matches both {outer} and its submodule {name}", remedy
            )
    return names


def _example_pattern(module: nn.Module) -> str:
    """Return an example of a pattern, from the blocks found without one."""
    names = _named_blocks(module) or _listed_blocks(module)
    return re.sub(r"\d+", "*", names[0]) if names else "layers.*"


def _named_blocks(module: nn.Module) -> list[str]:
    """Return the outermost modules with parameters of the classes in `_no_split_modules`."""
    kinds = getattr(module, "_no_split_modules", None) or ()
    names: list[str] = []
    for name, child in module.named_modules():
        is_inner = bool(names) and name.startswith(f"{names[-1]}.")
        if type(child).__name__ in kinds and name and not is_inner and _count_elements(child):
            names.append(name)
    return names


def _listed_blocks(module: nn.Module) -> list[str]:
    """Return the elements with parameters of the ModuleList that holds most parameters.

    A built-in model's blocks are found in this way. Without a ModuleList with parameters the result
    is empty.
    """
    lists = {
        name: _count_elements(child)
        for name, child in module.named_modules()
        if isinstance(child, nn.ModuleList) and _count_elements(child)
    }
    if not lists:
        return []
    # By parameters and not by length: a list of small heads may be longer than the list of blocks.
    largest = max(lists, key=lambda name: lists[name])
    elements = module.get_submodule(largest).named_children()
    prefix = f"{largest}." if largest else ""
    return [f"{prefix}{name}" for name, child in elements if _count_elements(child)]


def _sub_blocks(module: nn.Module, block: str) -> Iterator[str]:
    """Yield a block's children that have children themselves: attention and mlp, but not a norm."""
    for name, child in module.get_submodule(block).named_children():
        is_composite = next(child.children(), None) is not None
        if is_composite and not isinstance(child, _CONTAINERS) and _count_elements(child):
            yield f"{block}.{name}"


def _count_elements(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
