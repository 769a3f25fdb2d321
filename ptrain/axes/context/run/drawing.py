"""What a forward pass draws, by dropout and by whatever else takes random numbers; and whether a
rank's pass, of its tokens, draws the slice of what the pass of all tokens drew."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_iter

from ptrain.axes.context.run.randomness import SlicedMasks
from ptrain.errors import SpecError
from ptrain.models.attending import AttentionWatch
from ptrain.models.dropout import DropoutCall, dropout_by
from ptrain.models.ledger import OperatorMode

_DROPOUT = "dropout"
_ATTENTION = "_scaled_dot_product"  # over cp it drops nothing, and draws nothing


@dataclass(frozen=True, slots=True)
class Draw:
    """Random numbers of this shape, which the code of `module` takes by an operator."""

    module: str
    operator: str
    shape: tuple[int, ...]


@contextmanager
def drawing(
    watch: AttentionWatch,
    *,
    drop: Callable[[Draw, DropoutCall], Tensor],
    meet: Callable[[Draw], None],
) -> Iterator[None]:
    """Within it `drop` is given each dropout, and `meet` each other draw."""
    draws = _Draws(watch, meet)

    def dropped(call: DropoutCall) -> Tensor:
        draw = Draw(watch.running, _DROPOUT, tuple(call.input.shape))
        with draws.hidden():
            return drop(draw, call)

    with draws, dropout_by(dropped):
        yield


class SlicedDraws:
    """A rank's draws, one after another, beside those of all tokens, which came `before`. Raises
    what `refuse` makes of one that is no slice by `masks`, and of why. `in_training`: the masks of
    a micro-batch, by which something of as many elements is taken for the rank's tokens."""

    def __init__(
        self,
        before: Sequence[Draw],
        masks: SlicedMasks,
        in_training: SlicedMasks,
        refuse: Callable[[Draw, str], SpecError],
    ) -> None:
        self._before, self._masks, self._in_training = deque(before), masks, in_training
        self._refuse = refuse

    def around(self, watch: AttentionWatch) -> AbstractContextManager[None]:
        """Return a context of the rank's pass."""
        return drawing(watch, drop=self._drop, meet=self._meet)

    def require_all(self) -> None:
        """Behind the pass: raises for what was drawn of all tokens alone."""
        if self._before:
            raise self._refuse(self._before[0], "draws random numbers of all tokens alone")

    def _drop(self, draw: Draw, call: DropoutCall) -> Tensor:
        before = self._next(draw)
        if draw.shape == before.shape:  # of no token: all ranks draw it alike
            if self._is_confused(draw.shape):
                what = f"drops out {_text(draw.shape)}, as many as a rank has tokens, and no tokens"
                raise self._refuse(draw, what)
            return call.by_before()
        if not self._masks.are_of(draw.shape) or self._masks.of_all(draw.shape) != before.shape:
            what = f"drops out {_text(before.shape)}, and of a rank's tokens {_text(draw.shape)}, "
            raise self._refuse(draw, f"{what}where ranks cut masks [samples, tokens, …]")
        return self._masks.drop(call)

    def _is_confused(self, shape: Sequence[int]) -> bool:
        first = self._in_training.samples if shape[0] == self._masks.samples else shape[0]
        return self._in_training.are_of((first, *shape[1:]))

    def _meet(self, draw: Draw) -> None:
        if draw.shape != self._next(draw).shape:
            what = f"draws random numbers by itself ({draw.operator}), others of a rank's tokens "
            raise self._refuse(draw, f"{what}than of all")

    def _next(self, draw: Draw) -> Draw:
        before = self._before.popleft() if self._before else None
        if before is None or (before.module, before.operator) != (draw.module, draw.operator):
            raise self._refuse(draw, "draws random numbers of a rank's tokens alone")
        return before


def _text(shape: Sequence[int]) -> str:
    return f"[{', '.join(map(str, shape))}]"


class _Draws(OperatorMode):
    """Sees operators that draw."""

    def __init__(self, watch: AttentionWatch, meet: Callable[[Draw], None]) -> None:
        super().__init__()
        self._watch, self._meet = watch, meet
        self._is_hidden = False

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Within it none is met."""
        self._is_hidden = True
        try:
            yield
        finally:
            self._is_hidden = False

    def operator(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = function(*args, **kwargs)
        name = function._schema.name.partition("::")[2]
        draws = torch.Tag.nondeterministic_seeded in function.tags
        if draws and not self._is_hidden and not name.startswith(_ATTENTION):
            shape = next(tuple(x.shape) for x in tree_iter(result) if isinstance(x, Tensor))
            self._meet(Draw(self._watch.running, name, shape))
        return result
