"""Undo one possible cause within a step that runs again, and measure what is left of the
difference: of the gradients, of the loss, and of the update repeated with these gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Self
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ptrain.models.ledger import OperatorMode
from ptrain.report.finding import RootCause
from ptrain.verification.parts import held, multiple

Context = AbstractContextManager[object]


@dataclass(frozen=True, slots=True)
class Trial:
    """How far a step is from the reference's over all ranks, relative: its gradients, which were
    `before` away; `others`: what else still differs, or could not be tried, in words."""

    gradients: float
    before: float
    others: str

    def is_near(self, limit: float, loosest: float = 0.1) -> bool:
        """Return whether the gradients are right but for roundings: the same addends in another
        order, and a tenth of what differed."""
        return self.gradients <= min(10 * limit, max(limit, loosest), 0.1 * self.before)

    def of(self, blamed: RootCause, words: str) -> RootCause:
        """Return a root cause that was undone in these words, and put the gradients right: it is
        proven where loss and update are right then too."""
        tried = f"{words} the gradients match the reference to {self.gradients:.1e}"
        return blamed.proven(tried) if not self.others else blamed.fits(f"{tried}{self.others}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A possible cause: what is said of it, in words what undoes it, and the trial that does."""

    blamed: RootCause
    words: str
    run: Callable[[], Trial | None]


class Waited(OperatorMode):
    """While entered, every collective is waited for where it starts; what is sent or received by
    itself is not, as two ranks that send to each other would wait forever."""

    def operator(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = function(*args, **kwargs)
        name = function._schema.name
        if name.startswith("c10d::") and not any(word in name for word in ("send", "recv")):
            work = result[-1] if isinstance(result, tuple) else result
            if isinstance(work, torch.ScriptObject):
                dist.Work.unbox(work).wait()
        return result


@contextmanager
def without_cast_cache() -> Iterator[None]:
    """Let autocast cast a weight wherever it is used."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


def copied_for_backward() -> Context:
    """Keep copies of what forward saves: nothing that is written meanwhile reaches backward."""
    return torch.autograd.graph.saved_tensors_hooks(lambda own: own.clone(), lambda copy: copy)


@contextmanager
def around_backward(begins: Callable[[Any], Callable[[], None]]) -> Iterator[None]:
    """Call `begins` with what each backward pass starts from, and afterwards what it returns."""
    run = torch.autograd.backward

    def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
        ends = begins(tensors)
        run(tensors, *args, **kwargs)
        ends()

    with patch.object(torch.autograd, "backward", backward):
        yield


def kept_in_backward(model: nn.Module) -> Context:
    """Undo what modules write to their buffers when they run within backward: a part that is
    recomputed writes once."""

    def begins(tensors: Any) -> Callable[[], None]:
        kept = [(its, held(its).clone()) for its in model.buffers()]
        return partial(put, kept)

    return around_backward(begins)


@torch.no_grad()
def put(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Write the second of each pair to the first."""
    for tensor, value in pairs:
        held(tensor).copy_(value)


class AsBackwardLeft:
    """While entered, optimizers step with the gradients that the last backward pass left. `factor`:
    of which those that they would have taken are a multiple; None where they are none."""

    def __init__(self, model: nn.Module) -> None:
        self.factor: float | None = None
        self._parameters = list(model.parameters())
        self._left: dict[int, Tensor] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        self._stack.enter_context(around_backward(lambda tensors: self._keep))
        self._stack.callback(register_optimizer_step_pre_hook(self._put_back).remove)
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def _keep(self) -> None:
        gradients = {id(its): its.grad for its in self._parameters if its.grad is not None}
        self._left = {key: gradient.detach().clone() for key, gradient in gradients.items()}

    def _put_back(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        pairs = [
            (its, its.grad, self._left.pop(id(its)))
            for its in self._parameters
            if id(its) in self._left and its.grad is not None
        ]
        if pairs:
            own, left = (
                torch.cat([held(pair[side]).double().flatten() for pair in pairs])
                for side in (1, 2)
            )  # fmt: skip
            fit = multiple(own, left)
            self.factor = fit.factor if fit.holds(1e-3) else None
        for parameter, _, left in pairs:
            parameter.grad = left
