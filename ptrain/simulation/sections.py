"""The operators of a model's forward pass, in sections: what runs before the first block, and from
the entry of a block to that of the next. The last section has what is behind the blocks, too.

A tensor is named by the section that it came from, as seen from where it is used, so that two
sections are equal where they do the same with the same neighbours.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ptrain.models.ledger import OperatorMode

Section = list[Hashable]
_IN_FRONT = -1


class SectionRecorder(OperatorMode):
    """Records while it is entered, behind a mode of fake tensors. `entered` are the blocks, in the
    order in which they ran."""

    def __init__(self, model: nn.Module, blocks: Sequence[str]) -> None:
        super().__init__()
        self.sections: list[Section] = [[]]
        self.entered: list[int] = []
        self._blocks = [model.get_submodule(name) for name in blocks]
        self._births = 0  # in this section
        self._origins: dict[int, tuple[int, str | int]] = {}
        self._kept: list[Tensor] = []  # so that no other tensor gets its id
        for place, module in ((_IN_FRONT, model), *enumerate(self._blocks)):
            for name, tensor in (*module.named_parameters(), *module.named_buffers()):
                self._origins[id(tensor)] = place, name

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Within it a forward pass of the model is recorded."""
        hooks = [
            block.register_forward_pre_hook(partial(self._enter, index))
            for index, block in enumerate(self._blocks)
        ]
        try:
            with self:
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def _enter(self, index: int, *_: object) -> None:
        self.entered.append(index)
        self.sections.append([])
        self._births = 0

    def operator(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = self._named(args), self._named(kwargs)
        result = function(*args, **kwargs)
        self.sections[-1].append((function, *given, torch.is_grad_enabled(), self._named(result)))
        return result

    def _named(self, value: Any) -> Hashable:
        match value:
            case Tensor():
                layout = value.shape, value.stride(), value.dtype, value.device
                return *self._origin(value), *layout, value.requires_grad
            case list() | tuple():
                return type(value), *map(self._named, value)
            case dict():
                return tuple((key, self._named(entry)) for key, entry in value.items())
            case _:
                return type(value), value

    def _origin(self, tensor: Tensor) -> tuple[str, int, str | int]:
        """Return where a tensor is from, as seen from here: a tensor that nobody has seen is born
        here."""
        here = len(self.sections) - 1 + _IN_FRONT
        if id(tensor) not in self._origins:
            self._origins[id(tensor)] = here, self._births
            self._births += 1
            self._kept.append(tensor)
        place, name = self._origins[id(tensor)]
        if place == _IN_FRONT:
            return "in front", 0, name
        return "blocks ago", here - place, name
