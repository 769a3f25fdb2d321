"""The blocking meter: seconds per step that a rank's main thread waits for collectives, by axes.

It adds the time inside process-group calls, inside `Work.wait` and inside the functional
collectives' `wait_tensor`. DistributedDataParallel's reducer waits in C++; its wait is the time
between the end of backward computation and the end of the reducer's callback.

gloo moves bytes in background threads, so a wait of the main thread is communication that did not
overlap with computation. The figure includes the time spent waiting for a slower rank and the time
in which the operating system runs another thread. It excludes the CPU cycles that gloo's threads
take from computation. NCCL calls do not block the host; use the trace that `profile` writes there.

The meter adds a few microseconds per operator, which is visible in steps of small operators. Run it
without the other meters: they would distort the wait far more.
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
from ptrain.internals.autograd import call_after_backward, is_in_backward
from ptrain.meters.traffic import SILENT, group_of
from ptrain.models.ledger import OfStorages, OperatorMode

# Methods of c10d::ProcessGroup under the names that torch releases use. `__enter__` skips those
# that the installed release does not define.
_CALLS = (
    "allreduce", "allreduce_coalesced", "_allgather_base", "all_gather_single", "allgather",
    "allgather_coalesced", "allgather_into_tensor_coalesced", "_reduce_scatter_base",
    "reduce_scatter_single", "reduce_scatter", "reduce_scatter_tensor_coalesced", "alltoall",
    "alltoall_base", "all_to_all_single", "broadcast", "reduce", "gather", "scatter", "send",
    "recv", "barrier",
)  # fmt: skip
_WORK = process_groups.Work
Axes = tuple[str, ...]


class WaitMeter(OperatorMode):
    """The meter that adds up waiting time per axes while it is entered.

    It measures gloo groups only. If a group has another backend, `absent` gives the reason and
    `rows` is empty.
    """

    sees_compiled = True

    def __init__(self, axes_by_group: Mapping[str, Axes], *, rank: int) -> None:
        """Prepare a measurement of the groups in `axes_by_group`.

        Args:
            axes_by_group: Axes of each process group, by group name. Other groups are ignored.
            rank: The rank that the rows are reported for.
        """
        super().__init__()
        self._rank, self._axes_by_group = rank, axes_by_group
        self.absent = _why_absent(axes_by_group)
        self._seconds: dict[Axes, float] = dict.fromkeys(axes_by_group.values(), 0.0)
        self._originals: dict[tuple[type, str], Any] = {}
        self._inside_call = False
        # Weak: a reference would keep a work and its tensors alive after the wait.
        self._issued: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._unwaited: dict[int, Axes] = {}
        self._numbers = itertools.count(1)
        self._functional: OfStorages[Axes] = weakref.WeakKeyDictionary()
        self._has_callback = False
        self._began_at = self._waited_before = 0.0

    def rows(self) -> tuple[Blocked, ...]:
        """Return the waiting seconds of each axes tuple; 0 if the rank did not wait."""
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
                    self._replace_method(dist.ProcessGroup, name, self._timed_call)
            self._replace_method(_WORK, "wait", self._timed_wait)
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        for (owner, name), original in self._originals.items():
            setattr(owner, name, original)
        self._originals.clear()

    def _replace_method(
        self, owner: type, name: str, timed: Callable[[Any], Callable[..., Any]]
    ) -> None:
        """Replace a method of `owner` by its timed version until the meter exits."""
        # the raw class attribute: getattr would unwrap it, and __exit__ restores it
        self._originals[owner, name] = vars(owner)[name]
        setattr(owner, name, timed(getattr(owner, name)))

    def _add_seconds(self, axes: Axes, seconds: float) -> None:
        self._seconds[axes] = self._seconds.get(axes, 0.0) + seconds

    def _axes_of(self, group: dist.ProcessGroup) -> Axes | None:
        """Return the axes of a group, or None for a group outside the program's mesh."""
        return self._axes_by_group.get(group.group_name)

    def _timed_call(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a process-group method: add its duration and remember the work that it returns."""

        def call(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
            # Only the outermost call is timed: its seconds contain those of calls inside.
            axes, outer = self._axes_of(group), self._inside_call
            if axes is None:
                return original(group, *args, **kwargs)
            began, self._inside_call = time.perf_counter(), True
            try:
                work = original(group, *args, **kwargs)
            finally:
                self._inside_call = outer
                if not outer:
                    self._add_seconds(axes, time.perf_counter() - began)
            if isinstance(work, _WORK):
                self._issued[work] = self._note_unwaited(axes)
            return work

        return call

    def _timed_wait(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `Work.wait`: add its duration to the axes of the call that issued the work."""

        def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
            # only the first wait of a work counts
            axes = self._unwaited.pop(self._issued.get(work, -1), None)
            began = time.perf_counter()
            try:
                return original(work, *args, **kwargs)
            finally:
                if axes is not None:
                    self._add_seconds(axes, time.perf_counter() - began)

        return wait

    def _note_unwaited(self, axes: Axes) -> int:
        """Return a number for an issued call that has not been waited for.

        In a backward pass the wait may happen in C++ at the end of the pass, so this also schedules
        the callback that measures it.
        """
        # never reused: a work that was waited for keeps its number in `_issued`
        number = next(self._numbers)
        self._unwaited[number] = axes
        if not self._has_callback and is_in_backward():
            self._has_callback = True
            call_after_backward(self._start_reducer_clock)
        return number

    def _start_reducer_clock(self) -> None:
        """Start the clock when backward computation has ended.

        Autograd runs queued callbacks in order: this one, the reducer's (queued by then), and
        `_stop_reducer_clock`, which is queued here and therefore runs after the reducer's.
        """
        self._began_at, self._waited_before = time.perf_counter(), sum(self._seconds.values())
        call_after_backward(self._stop_reducer_clock)

    def _stop_reducer_clock(self) -> None:
        """Add the reducer's waiting time, without the waits already counted meanwhile."""
        self._has_callback = False
        seconds = time.perf_counter() - self._began_at
        seconds -= sum(self._seconds.values()) - self._waited_before
        # these are waited for later, by the code that still holds the work
        awaited = set(self._issued.values())
        here = [number for number in self._unwaited if number not in awaited]
        # All unwaited calls ended within this one interval, so the last call's axes get it.
        if here:
            self._add_seconds(self._unwaited[here[-1]], seconds)
        for number in here:
            del self._unwaited[number]

    def run_operator(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator, and notice collectives that C++ issues past the Python methods."""
        if function.namespace == "_c10d_functional":
            return self._time_functional(function, args, kwargs)
        result = function(*args, **kwargs)
        if function.namespace != "c10d" or self._inside_call:
            return result
        # issued from C++ by DDP's reducer, past the Python methods
        if (axes := self._axes_of(group_of((args, kwargs)))) is not None:
            self._note_unwaited(axes)
        return result

    def _time_functional(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a functional collective and add the time of `wait_tensor` to the axes of its call."""
        outer, self._inside_call = self._inside_call, True
        began = time.perf_counter()
        try:
            result = function(*args, **kwargs)
        finally:
            self._inside_call = outer
        seconds = time.perf_counter() - began
        name = function._schema.name.split("::")[1]
        if name == "wait_tensor":
            # By storage, because the waiting code may have another tensor object of the result.
            axes = self._functional.pop(args[0].untyped_storage(), None)
            if axes is not None:
                self._add_seconds(axes, seconds)
        elif name not in SILENT and isinstance(result, torch.Tensor):
            axes = self._axes_of(group_of((args, kwargs)))
            if axes is not None:
                self._functional[result.untyped_storage()] = axes
        return result


def _why_absent(axes_by_group: Mapping[str, Axes]) -> str:
    """Return the reason why waits cannot be measured here, or ""."""
    for name in axes_by_group:
        group = process_groups.resolve_group(name)
        if (backend := dist.get_backend(group)) != "gloo":
            return f"{backend} does not block the host. See the trace that `profile` writes."
    return ""
