"""Seconds that a rank's main thread waits for collectives, by axes, in one step.

Counted is the time inside the process group's calls and inside `Work.wait` (and the functional
collectives' `wait_tensor`); and where C++ waits, in DistributedDataParallel's reducer, the time
between the end of the backward pass's computing and the end of the reducer's own work after it.

What the figure is: gloo moves bytes in threads of its own, so what the main thread waits for is
what computing did not hide. A slower rank that is waited for is in it, and so is the time in which
the system runs another thread; the cycles that gloo's threads take from computing are not. NCCL's
calls do not block the host: there the step's trace (`profile`) shows what was not hidden. The
stopwatch slows an operator by some microseconds, which a step of small ones shows; other meters in
the same step would distort it far more.
"""

from __future__ import annotations

import itertools
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Self

import torch
import torch.distributed as dist

from ptrain.cost import Blocked
from ptrain.internals import process_groups
from ptrain.internals.autograd import at_end_of_backward, is_in_backward
from ptrain.meters.traffic import SILENT, group_of
from ptrain.models.ledger import OfStorages, OperatorMode

_CALLS = (
    "allreduce", "allreduce_coalesced", "_allgather_base", "all_gather_single", "allgather",
    "allgather_coalesced", "allgather_into_tensor_coalesced", "_reduce_scatter_base",
    "reduce_scatter_single", "reduce_scatter", "reduce_scatter_tensor_coalesced", "alltoall",
    "alltoall_base", "all_to_all_single", "broadcast", "reduce", "gather", "scatter", "send",
    "recv", "barrier",
)  # fmt: skip
_WORK = process_groups.Work
Axes = tuple[str, ...]


class Stopwatch(OperatorMode):
    """Adds up while it is entered, for the groups that have axes; on gloo. Elsewhere `absent` says
    why there are no rows."""

    sees_compiled = True

    def __init__(self, axes_by_group: Mapping[str, Axes], *, rank: int) -> None:
        super().__init__()
        self._rank, self._axes_by_group = rank, axes_by_group
        self.absent = _why_absent(axes_by_group)
        self._seconds: dict[Axes, float] = dict.fromkeys(axes_by_group.values(), 0.0)
        self._originals: dict[tuple[type, str], Any] = {}
        self._inside_call = False
        self._issued: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._unwaited: dict[int, Axes] = {}
        self._numbers = itertools.count(1)
        self._functional: OfStorages[Axes] = weakref.WeakKeyDictionary()
        self._has_callback = False
        self._began = self._waited_before = 0.0

    def rows(self) -> tuple[Blocked, ...]:
        """Seconds by axes, 0 where nothing was waited for."""
        if self.absent:
            return ()
        return tuple(
            Blocked(axes=axes, rank=self._rank, seconds=seconds)
            for axes, seconds in self._seconds.items()
        )

    def __enter__(self) -> Self:
        if not self.absent:
            for name in _CALLS:
                if name in vars(dist.ProcessGroup):
                    self._replace(dist.ProcessGroup, name, self._timed_call)
            self._replace(_WORK, "wait", self._timed_wait)
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        for (owner, name), original in self._originals.items():
            setattr(owner, name, original)
        self._originals.clear()

    def _replace(self, owner: type, name: str, timed: Callable[[Any], Callable[..., Any]]) -> None:
        self._originals[owner, name] = vars(owner)[name]  # as it is kept: getattr would unwrap it
        setattr(owner, name, timed(getattr(owner, name)))

    def _add(self, axes: Axes, seconds: float) -> None:
        self._seconds[axes] = self._seconds.get(axes, 0.0) + seconds

    def _axes(self, group: dist.ProcessGroup) -> Axes | None:
        """None for a group that is none of the program's: what the ranks say outside of it."""
        return self._axes_by_group.get(group.group_name)

    def _timed_call(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
            axes, outer = self._axes(group), self._inside_call
            if axes is None:
                return original(group, *args, **kwargs)
            began, self._inside_call = time.perf_counter(), True
            try:
                work = original(group, *args, **kwargs)
            finally:
                self._inside_call = outer
                if not outer:
                    self._add(axes, time.perf_counter() - began)
            if isinstance(work, _WORK):
                self._issued[work] = self._note_unwaited(axes)
            return work

        return call

    def _timed_wait(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
            axes = self._unwaited.pop(self._issued.get(work, -1), None)
            began = time.perf_counter()
            try:
                return original(work, *args, **kwargs)
            finally:
                if axes is not None:
                    self._add(axes, time.perf_counter() - began)

        return wait

    def _note_unwaited(self, axes: Axes) -> int:
        """A call whose wait is still to come; in a backward pass perhaps in C++, at its end."""
        number = next(self._numbers)  # a work that was waited for keeps its own
        self._unwaited[number] = axes
        if not self._has_callback and is_in_backward():
            self._has_callback = True
            at_end_of_backward(self._computed)
        return number

    def _computed(self) -> None:
        """The backward pass has computed all; the reducer's end, queued since, comes next, and
        what is queued here comes after it."""
        self._began, self._waited_before = time.perf_counter(), sum(self._seconds.values())
        at_end_of_backward(self._reduced)

    def _reduced(self) -> None:
        self._has_callback = False
        seconds = time.perf_counter() - self._began
        seconds -= sum(self._seconds.values()) - self._waited_before
        awaited = set(self._issued.values())  # later, by whoever still has the work
        here = [number for number in self._unwaited if number not in awaited]
        if here:
            self._add(self._unwaited[here[-1]], seconds)
        for number in here:
            del self._unwaited[number]

    def operator(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if function.namespace == "_c10d_functional":
            return self._dispatch_functional(function, args, kwargs)
        result = function(*args, **kwargs)
        if function.namespace != "c10d" or self._inside_call:
            return result
        if (axes := self._axes(group_of((args, kwargs)))) is not None:  # from C++: DDP's reducer
            self._note_unwaited(axes)
        return result

    def _dispatch_functional(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        outer, self._inside_call = self._inside_call, True
        began = time.perf_counter()
        try:
            result = function(*args, **kwargs)
        finally:
            self._inside_call = outer
        seconds = time.perf_counter() - began
        name = function._schema.name.split("::")[1]
        if name == "wait_tensor":
            axes = self._functional.pop(args[0].untyped_storage(), None)
            if axes is not None:
                self._add(axes, seconds)
        elif name not in SILENT and isinstance(result, torch.Tensor):
            axes = self._axes(group_of((args, kwargs)))
            if axes is not None:
                self._functional[result.untyped_storage()] = axes
        return result


def _why_absent(axes_by_group: Mapping[str, Axes]) -> str:
    for name in axes_by_group:
        group = process_groups.named(name)
        if (backend := dist.get_backend(group)) != "gloo":
            return f"{backend} does not block the host. See the trace that `profile` writes."
    return ""
