"""Where units begin and end in a pass: hooks that write it into a recorder, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ptrain.models.leaving import has_gradient, when_left
from ptrain.models.recomputing import runs_again
from ptrain.timeline import Boundary, Mark


class Notes(Protocol):
    """What boundaries and gradients are written into, as a recorder is."""

    events: list[Any]

    def complete(self, name: str, gradient: Tensor) -> None:
        """A gradient is in place."""


class Marker:
    """Hooks that write a unit's boundaries into a recorder, where FSDP2's hooks would run. What
    runs again in backward has none."""

    def __init__(self, recorder: Notes, model: nn.Module, units: Sequence[tuple[str, ...]]) -> None:
        self._recorder = recorder
        self._begun: set[int] = set()
        self._ended: set[int] = set()
        places = {
            name: place
            for place, (name, _) in enumerate(model.named_modules(remove_duplicate=False))
        }
        self._outer_first = sorted(range(len(units)), key=lambda index: places[units[index][0]])
        self._handles: list[Any] = []
        for index, modules in enumerate(units):
            first, last = model.get_submodule(modules[0]), model.get_submodule(modules[-1])
            self._handles += [
                first.register_forward_pre_hook(self._enter(index), with_kwargs=True),
                last.register_forward_hook(self._leave(index)),
            ]
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue
            hook = parameter.register_post_accumulate_grad_hook(self._complete(name))
            self._handles.append(hook)

    def remove(self) -> None:
        """Takes the hooks off the model."""
        for handle in self._handles:
            handle.remove()

    def _mark(self, mark: Mark, unit: int) -> None:
        self._recorder.events.append(Boundary(mark, unit))

    def _enter(self, unit: int) -> Callable[..., Any]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> Any:
            if runs_again():
                return None
            self._mark(Mark.ENTER, unit)
            return when_left((args, kwargs), lambda: self._end(unit))

        return hook

    def _leave(self, unit: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if not runs_again():
                self._mark(Mark.LEAVE, unit)
                tree_map(lambda x: self._watch_output(unit, x), output)

        return hook

    def _watch_output(self, unit: int, output: Any) -> None:
        if has_gradient(output):
            output.register_hook(lambda _: self._begin(unit))

    def _begin(self, unit: int) -> None:
        if not self._begun:
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)
        if unit not in self._begun:
            self._begun.add(unit)
            self._mark(Mark.PRE_BACKWARD, unit)

    def _end(self, unit: int) -> None:
        if unit not in self._ended:
            self._ended.add(unit)
            self._mark(Mark.POST_BACKWARD, unit)

    def _finish(self) -> None:
        """Units whose inputs need no gradient end with the backward pass, outer before inner."""
        for index in self._outer_first:
            self._end(index)

    def _complete(self, name: str) -> Callable[[Tensor], None]:
        def hook(parameter: Tensor) -> None:
            assert parameter.grad is not None
            self._recorder.complete(name, parameter.grad)

        return hook
