"""What operators compute and send, beside what they allocate: floating-point operations of the
matrix products (a multiplication and an addition each), as torch's own counter has them, and
collectives."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from ptrain.costs import Collective
from ptrain.models.recomputing import runs_again
from ptrain.models.trace import Recorder


class When(StrEnum):
    """Of a micro-batch."""

    FORWARD = "forward"
    BACKWARD = "backward"
    AGAIN = "again"  # of the forward pass, while backward runs


@dataclass(frozen=True, slots=True)
class OperatorWork:
    """`size` is in operations, or for a collective in bytes of the whole tensor."""

    when: When
    collective: Collective | None
    size: int


def matrix_products(name: str, args: Any) -> tuple[int, int]:
    """(number, operations of each) of an operator's matrix products; none of any other operator.
    Fused attention has two in forward (scores, and their product with the values) and in backward
    five: the scores again, and four gradients."""
    if name in ("mm", "addmm", "bmm", "baddbmm"):
        left, right = args[1:3] if "add" in name else args[:2]
        return 1, 2 * left.numel() * right.shape[-1]
    if "attention" in name and name.startswith("_scaled_dot_product"):
        is_backward = name.endswith("backward")
        query, key = args[1:3] if is_backward else args[:2]
        batch, heads, tokens, features = query.shape
        return (5 if is_backward else 2), 2 * batch * heads * tokens * key.shape[2] * features
    return 0, 0


_COLLECTIVES = {
    "all_reduce": (Collective.ALL_REDUCE, False),
    "all_gather_into_tensor": (Collective.ALL_GATHER, True),
    "reduce_scatter_tensor": (Collective.REDUCE_SCATTER, False),
    "all_to_all_single": (Collective.ALL_TO_ALL, False),
}


class WorkRecorder(Recorder):
    """Also writes down `works`, each with the number of events before it."""

    def __init__(self) -> None:
        super().__init__()
        self.works: list[tuple[int, OperatorWork]] = []
        self._running_again: set[nn.Module] = set()
        self._handles: list[RemovableHandle] = []

    def follow(self, model: nn.Module) -> None:
        """Modules of `model` that run while backward does run again. (Whether gradients are on
        does not tell: a collective within autograd runs without.)"""

        def enter(module: nn.Module, _: Any) -> None:
            if runs_again():
                self._running_again.add(module)

        def leave(module: nn.Module, *_: Any) -> None:
            self._running_again.discard(module)

        for module in model.modules():
            self._handles += [
                module.register_forward_pre_hook(enter, prepend=True),
                module.register_forward_hook(leave, always_call=True),
            ]

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        for handle in self._handles:
            handle.remove()

    def __torch_dispatch__(
        self,
        function: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = super().__torch_dispatch__(function, types, args, kwargs)
        if result is NotImplemented:
            return result
        name = function._schema.name.split("::")[-1]
        if function.namespace == "_c10d_functional" and name in _COLLECTIVES:
            collective, is_result = _COLLECTIVES[name]
            whole = result if is_result else args[0]
            self._note(collective, whole.numel() * whole.itemsize)
        number, size = matrix_products(name, args)
        for _ in range(number):
            self._note(None, size)
        return result

    def _note(self, collective: Collective | None, size: int) -> None:
        if self._running_again:
            when = When.AGAIN
        else:
            when = When.BACKWARD if runs_again() else When.FORWARD
        self.works.append((len(self.events), OperatorWork(when, collective, size)))


def repeated(recorder: WorkRecorder) -> tuple[tuple[str, int], ...]:
    """The collectives of forward that backward ran again, as a timeline has them."""
    return tuple(
        (work.collective.value, work.size)
        for _, work in recorder.works
        if work.when is When.AGAIN and work.collective is not None
    )
