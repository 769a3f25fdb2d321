"""What a model is, as values that can be compared: classes, shapes of tensors and all attributes by
their paths, of its blocks and of what stands around them.

Where an attribute has no value to compare (a lock, an object with slots), nobody says what equals
what.
"""

from __future__ import annotations

import types
from collections.abc import Hashable, Iterator, Mapping, Sequence
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

Leaves = dict[str, Hashable]
_Leaf = tuple[str, Hashable]

_WALKED = ("_parameters", "_buffers", "_modules")  # by themselves
_PLAIN = (
    bool, int, float, complex, str, bytes, type(None), type, Enum, torch.dtype, torch.device,
    types.FunctionType, types.BuiltinFunctionType,
)  # fmt: skip


class Incomparable(Exception):
    """An attribute has no value."""


def structure_of(model: nn.Module, blocks: Sequence[str]) -> tuple[Leaves, list[Leaves]]:
    """Return what stands around the blocks, and each block. Raises Incomparable."""
    walk = _LeafWalk({f".{name}": model.get_submodule(name) for name in blocks})
    around = dict(walk.part(model))
    return around, [dict(walk.part(block)) for block in walk.blocks.values()]


def alike(blocks: Sequence[Leaves]) -> Leaves | None:
    """Return what the blocks are, of whose attributes some are the block's own index; None where
    they differ in any other."""
    first = blocks[0]
    if any(block.keys() != first.keys() for block in blocks):
        return None
    indices = [(int, index) for index in range(len(blocks))]
    leaves: Leaves = {}
    for path, leaf in first.items():
        of_all = [block[path] for block in blocks]
        is_index = of_all == indices
        if not is_index and any(other != leaf for other in of_all):
            return None
        leaves[path] = "its index" if is_index else leaf
    return leaves


def differ_in_layers_alone(first: Leaves, other: Leaves, layers: tuple[int, int]) -> bool:
    """Return whether nothing differs between two models but their number of layers."""
    counts = tuple((int, number) for number in layers)
    return first.keys() == other.keys() and all(
        leaf == other[path] or (leaf, other[path]) == counts for path, leaf in first.items()
    )


class _LeafWalk:
    """Walks over the parts of one model. What was met before is named by where; a list with the
    same entry for each block is as long as there are blocks."""

    def __init__(self, blocks: dict[str, nn.Module]) -> None:
        self.blocks = blocks
        self._number_of = {id(block): number for number, block in enumerate(blocks.values())}
        self._met: dict[int, tuple[int, str]] = {}
        self._kept: list[object] = []  # so that no other object gets its id
        self._part = 0

    def part(self, module: nn.Module) -> Iterator[_Leaf]:
        """Yield the leaves of the model without its blocks, or of a block."""
        self._part += 1
        self._number_of.pop(id(module), None)
        yield from self._of_module("", module)

    def _of_module(self, path: str, module: nn.Module) -> Iterator[_Leaf]:
        if self.blocks.get(path) is module:
            return
        if again := self._again(module, path):
            yield path, again
            return
        yield path, ("instance", type(module))
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                yield from self._of_tensor(f"{path}.{name}", tensor)
        for name, value in vars(module).items():
            if name not in _WALKED:
                yield from self._of(f"{path}.{name}", value)
        for name, child in module._modules.items():
            if child is not None:
                yield from self._of_module(f"{path}.{name}", child)

    def _of_tensor(self, path: str, tensor: Tensor) -> Iterator[_Leaf]:
        kind = (type(tensor), tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad)
        yield path, self._again(tensor, path) or kind

    def _of(self, path: str, value: object) -> Iterator[_Leaf]:
        match value:
            case _ if isinstance(value, _PLAIN):
                yield path, (type(value), value)
            case Tensor():
                yield from self._of_tensor(path, value)
            case nn.Module():
                yield from self._of_module(path, value)
            case types.MethodType():
                yield f"{path}()", value.__func__
                yield from self._of(path, value.__self__)
            case partial():
                yield f"{path}()", partial
                yield from self._of(path, (value.func, value.args, value.keywords))
            case Mapping():
                yield from self._of_mapping(path, value)
            case list() | tuple():
                yield from self._of_sequence(path, value)
            case set() | frozenset():
                yield path, (type(value), frozenset(value))
            case _:
                yield from self._of_object(path, value)

    def _of_mapping(self, path: str, value: Mapping[object, object]) -> Iterator[_Leaf]:
        """Hooks are under numbers that no two have."""
        are_hooks = "_hooks" in path.rpartition(".")[2]
        yield path, (type(value), len(value))
        for place, (key, entry) in enumerate(value.items()):
            yield from self._of(f"{path}[{place if are_hooks else repr(key)}]", entry)

    def _of_sequence(self, path: str, value: Sequence[object]) -> Iterator[_Leaf]:
        is_plain = all(isinstance(entry, _PLAIN) for entry in value)
        if is_plain and len(value) == len(self.blocks) and len({*value}) == 1:
            yield path, (type(value), "by block", value[0])
            return
        yield path, (type(value), len(value))
        for place, entry in enumerate(value):
            yield from self._of(f"{path}[{place}]", entry)

    def _of_object(self, path: str, value: object) -> Iterator[_Leaf]:
        if again := self._again(value, path):
            yield path, again
            return
        if not _says_all(value):
            raise Incomparable(f"{path} is {type(value).__name__}")
        yield path, ("instance", type(value))
        for name, entry in getattr(value, "__dict__", {}).items():
            yield from self._of(f"{path}.{name}", entry)

    def _again(self, value: object, path: str) -> Hashable:
        """Where it was met before; None where this is the first time."""
        if id(value) in self._number_of:
            return "block", self._number_of[id(value)]
        if id(value) in self._met:
            part, place = self._met[id(value)]
            return "here" if part == self._part else part, place
        self._met[id(value)] = self._part, path
        self._kept.append(value)
        return None


def _says_all(value: object) -> bool:
    """Whether `vars` is all there is of an object: pickle, which has to know, asks it for nothing
    else. One of a class of C's that keeps more has a way of its own, or none."""
    kind: Any = type(value)
    own_ways = ("__reduce__", "__reduce_ex__", "__getstate__")
    if any(getattr(kind, way) is not getattr(object, way) for way in own_ways):
        return False
    try:
        reduced: Any = object.__reduce_ex__(value, 2)
    except TypeError:
        return False
    state = reduced[2]
    return state is None or state is getattr(value, "__dict__", None)  # else it has slots
