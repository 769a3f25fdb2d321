"""Whether random numbers that a model draws outside of its layers stay where they are drawn. Every
stage of a pipeline draws its own: a mask that is drawn once and used around several layers would be
another on each stage, and layers that are skipped at random others.

The model runs forward under one seed, then under others, where every layer gives again what it gave
at first. Numbers drawn in front of the layers may then show in the first hidden states alone, and
numbers drawn behind a layer in what the next is given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_iter, tree_map

from ptrain.models.buffers import copied_buffers
from ptrain.models.generators import forked, reseed

_SKIPS = "the model skips some at random"
_OWN = "random numbers are drawn outside of the layers: stages would draw others"
_FEW, _MANY = 2, 8  # runs; of those that skip layers many, since a layer is rarely skipped


class Redraws:
    """The forward passes of a model, `run`, that are held against the first one."""

    def __init__(self, model: nn.Module, layers: Sequence[str], run: Callable[[], Tensor]) -> None:
        self._model, self._layers, self._run = model, layers, run
        self._gave: dict[str, Any] = {}
        self._given: dict[str, list[Any]] = {}
        self._visited: list[str] = []
        self._number, self._fault = 0, ""

    @torch.no_grad()
    def fault(self, *, draws_itself: bool) -> str:
        """Return what differs, if anything; `draws_itself`: the model's own forward draws, not
        only modules that it calls in front of the layers."""
        first = self._pass()
        for number in range(1, 1 + (_MANY if draws_itself else _FEW)):
            self._number = number
            output = self._pass()
            is_comparable = not self._fault and self._repeats(len(self._layers) - 1)
            if is_comparable and not _are_alike([first], [output]):
                self._fault = f"the model's output depends on what it drew before, and {_OWN}"
        return self._fault

    def _pass(self) -> Tensor:
        self._visited = []
        with forked(), copied_buffers(self._model), self._watching():
            reseed(self._number)
            output = self._run()
        if not self._fault and self._visited != [*self._layers]:
            self._fault = _SKIPS
        return output

    def _repeats(self, index: int) -> bool:
        """Whether what is drawn behind a layer is what the first pass drew there: behind every
        other one, so that what was drawn before shows in what the next is given."""
        return (index + self._number) % 2 == 0

    @contextmanager
    def _watching(self) -> Iterator[None]:
        with ExitStack() as handles:
            for index, name in enumerate(self._layers):
                layer = self._model.get_submodule(name)
                enters = layer.register_forward_pre_hook(self._enters(index), with_kwargs=True)
                handles.callback(enters.remove)
                handles.callback(layer.register_forward_hook(self._leaves(index)).remove)
            yield

    def _enters(self, index: int) -> Any:
        name = self._layers[index]

        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._visited.append(name)
            given = [*tree_iter(tree_map(_copied, (args, kwargs)))]
            if not self._number:
                self._given[name] = given
            elif not self._fault and (name not in self._given or not self._is_alike(index, given)):
                self._fault = f"what {name} is given depends on what was drawn before, and {_OWN}"

        return hook

    def _is_alike(self, index: int, given: list[Any]) -> bool:
        before = self._given[self._layers[index]]
        if index == 0:  # hidden states may differ
            return _are_alike(_beside_hidden(before), _beside_hidden(given))
        return not self._repeats(index - 1) or _are_alike(before, given)

    def _leaves(self, index: int) -> Any:
        name = self._layers[index]

        def hook(_: nn.Module, __: Any, output: Any) -> Any:
            if not self._number:
                self._gave[name] = tree_map(_copied, output)
            reseed(0 if self._repeats(index) else self._number)
            return tree_map(_copied, self._gave.get(name, output))

        return hook


def _copied(value: object) -> object:
    return value.clone() if isinstance(value, Tensor) else value


def _beside_hidden(given: list[Any]) -> list[Any]:
    hidden = next(x for x in given if isinstance(x, Tensor) and x.is_floating_point())
    return [value for value in given if value is not hidden]


def _are_alike(these: Sequence[Any], those: Sequence[Any]) -> bool:
    """Whether tensors and numbers are equal; of other things, and of tensors
    without values, nobody can tell."""
    return len(these) == len(those) and all(map(_is_equal, these, those))


def _is_equal(one: object, other: object) -> bool:
    match one, other:
        case Tensor(), Tensor():
            if one.shape != other.shape or one.dtype != other.dtype:
                return False
            if one.is_meta:
                return True
            return bool(((one == other) | ((one != one) & (other != other))).all())
        case int() | float(), int() | float():
            return one == other
    return type(one) is type(other)
