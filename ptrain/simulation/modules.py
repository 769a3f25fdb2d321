"""Where in the model a rank computes: the module whose forward pass runs."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

from torch import nn
from torch.utils.hooks import RemovableHandle

LOGITS = "logits"


class Modules:
    """While it is entered, `current` is the path of the innermost module that runs, None outside
    of all, `logits` in a head (a linear layer with `vocab` outputs)."""

    def __init__(self, model: nn.Module, vocab: int | None = None) -> None:
        self._model = model
        self._vocab = vocab
        self._running: list[str] = []
        self._handles: list[RemovableHandle] = []

    @property
    def current(self) -> str | None:
        return self._running[-1] if self._running else None

    def __enter__(self) -> Self:
        names = {
            module: LOGITS if self._is_head(module) else name
            for name, module in self._model.named_modules()
        }

        def enter(module: nn.Module, _: Any) -> None:
            self._running.append(names[module])

        def leave(*_: Any) -> None:
            self._running.pop()

        for module in names:
            self._handles += [
                module.register_forward_pre_hook(enter, prepend=True),
                module.register_forward_hook(leave, always_call=True),
            ]
        return self

    def _is_head(self, module: nn.Module) -> bool:
        return isinstance(module, nn.Linear) and module.out_features == self._vocab

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._running.clear()
