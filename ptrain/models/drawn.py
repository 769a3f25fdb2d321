"""Initial values that a constructor draws, reproduced tensor by tensor.

The constructor runs once without memory for its parameters. Every operator that writes to a
parameter is recorded with the state of its generator. Random operators run on a scratch tensor, so
that the generators advance as with real parameters. `DrawnWeights` then replays the record of one
parameter, bit for bit. A constructor that cannot be recorded raises NeedsValuesError, and the model
is built with real parameters instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from ptrain.internals.modules import replace_truncated_normal
from ptrain.models.ledger import OperatorMode
from ptrain.models.meta import (
    Build,
    NeedsValuesError,
    empty_parameter,
    has_memory,
    require_hollow,
    run_constructor,
    storage_key,
    without_values,
    written_tensors,
)
from ptrain.models.window import Window, narrow_to_window

MOST_KEPT = 2**26  # bytes of values without a record (as from a file), which are stored
_FEW = 2**20  # elements: `InspectionWeights` draws larger parameters from another source
_ATEN = torch.ops.aten
_EMPTY = {
    _ATEN.empty.memory_format,
    _ATEN.empty_strided.default,
    _ATEN.empty_like.default,
    _ATEN.new_empty.default,
    _ATEN.new_empty_strided.default,
}
_FILLING = {
    _ATEN.normal_.default,
    _ATEN.uniform_.default,
    _ATEN.zero_.default,
    _ATEN.fill_.Scalar,
}
_OVERWRITING = _FILLING | {_ATEN.copy_.default, _ATEN.index_put_.default, _ATEN.eye.m_out}
# They expose a tensor's memory to code whose writes are not torch operators.
_EXPOSING = {
    torch.Tensor.numpy,
    torch.Tensor.__array__,
    torch.Tensor.__dlpack__,
    torch.Tensor.data_ptr,
}
_IS_META, _DEVICE = torch.Tensor.is_meta.__get__, torch.Tensor.device.__get__


class _Scratch:
    """A buffer for drawn tensors, as large as the largest so far.

    One buffer is kept, because glibc does not reuse large blocks that are freed in between.
    """

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8, device="cpu")

    def buffer_for(self, storage: torch.UntypedStorage, dtype: torch.dtype) -> Tensor:
        """Return an uninitialized tensor of one dimension with the size of a storage."""
        if self._bytes.numel() < storage.nbytes():
            self._bytes = torch.empty(0, dtype=torch.uint8, device="cpu")  # the old one is freed
            self._bytes = torch.empty(storage.nbytes(), dtype=torch.uint8, device="cpu")
        return self._bytes[: storage.nbytes()].view(dtype)


@dataclass(slots=True)
class _History:
    """The writes to one parameter storage.

    Attributes:
        storage: The storage, kept alive so that no other one gets its key.
        dtype: Data type of its elements.
        base: Initial values, or the call that computes them; None if the first write covers them.
        calls: The writes in order.
    """

    storage: torch.UntypedStorage
    dtype: torch.dtype
    base: Tensor | _RecordedCall | None = None
    calls: list[_RecordedCall] = field(default_factory=list)

    def snapshot(self) -> _History:
        """Return a copy that later writes do not change."""
        return _History(self.storage, self.dtype, self.base, [*self.calls])

    def compute_values(self, scratch: _Scratch | None = None) -> Tensor:
        """Return all elements of the storage in one dimension, in `scratch` if given."""
        count = self.storage.nbytes() // self.dtype.itemsize
        if isinstance(self.base, _RecordedCall):
            flat = self.base.run().as_strided((count,), (1,), 0)
        elif self.base is not None:
            flat = self.base.clone()
        else:
            flat = (scratch or _Scratch()).buffer_for(self.storage, self.dtype)
        for call in self.calls:
            call.run(flat)
        return flat


@dataclass(frozen=True, slots=True)
class _ParameterView:
    """An operator argument that is a view: of the storage that the operator writes to, or of
    `source` as it was at the time of the call."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    source: _History | None

    def apply_to(self, flat: Tensor | None) -> Tensor:
        """Return this view of `flat`, the storage that is written to, or of its source's values."""
        values = flat if self.source is None else self.source.compute_values()
        assert values is not None, "the storage is written to"
        return values.as_strided(self.shape, self.strides, self.offset)


@dataclass(frozen=True, slots=True)
class _RecordedCall:
    """An operator with its arguments, and the `state` of the generator that it draws from."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    state: Tensor | None = None

    def run(self, flat: Tensor | None = None, *, repeats: bool = True) -> Any:
        """Run the operator on `flat`, with the recorded generator state if `repeats`, else the
        current one."""

        def real(value: Any) -> Any:
            if isinstance(value, torch.Generator) and repeats:
                assert self.state is not None
                # A new generator, because the recorded one has advanced.
                return torch.Generator().set_state(self.state)
            return value.apply_to(flat) if isinstance(value, _ParameterView) else value

        args, kwargs = tree_map(real, (self.args, self.kwargs))
        if self.state is None or not repeats:
            return self.function(*args, **kwargs)
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(self.state)
            return self.function(*args, **kwargs)


class _Recorder(OperatorMode):
    """The mode that records writes to parameters whose values `empty` has removed.

    `draws`: whether random operators run, which costs their full time. Without, the record gives
    other values than the constructor would draw.
    """

    def __init__(self, *, draws: bool) -> None:
        super().__init__()
        self.draws = draws
        self.histories: dict[int, _History] = {}
        self._blank: dict[int, torch.UntypedStorage] = {}  # allocated, and not written to since
        self._exposed: dict[int, torch.UntypedStorage] = {}
        self._kept = self._draws = 0
        self.scratch = _Scratch()

    def is_tracked(self, tensor: Tensor) -> bool:
        """Return True if the tensor's storage has a history."""
        return storage_key(tensor) in self.histories

    def mark_exposed(self, tensor: Tensor) -> None:
        """Mark a tensor's memory as visible to other code, whose writes are not recorded."""
        storage = tensor.untyped_storage()
        self._exposed[storage._cdata] = storage

    @torch.no_grad()
    def move_to_meta(self, parameter: nn.Parameter) -> None:
        """Move a parameter to meta as soon as a module registers it, and start its history.

        Raises:
            NeedsValuesError: Other code has the parameter's memory, or too many values must be
                stored.
        """
        if self.is_tracked(parameter) or not has_memory(parameter):
            return
        # Such code may write to the memory later, and nothing would record it.
        if storage_key(parameter) in self._exposed:
            raise NeedsValuesError("its constructor passes the memory of a parameter to other code")
        base = None
        if self._blank.pop(storage_key(parameter), None) is None:
            # The tensor had values before it became a parameter, for example from a file, which no
            # recorded operator reproduces.
            base = self._store_values(parameter.detach().clone())
            base = base.as_strided((base.untyped_storage().nbytes() // base.itemsize,), (1,), 0)
        empty_parameter(parameter)
        storage = parameter.untyped_storage()
        self.histories[storage._cdata] = _History(storage, parameter.dtype, base)

    def run_operator(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator, and record it if it reads or writes a tracked storage."""
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if any(self.is_tracked(tensor) for tensor in tensors):
            return self._record_write(function, args, kwargs)
        result = function(*args, **kwargs)
        for tensor in written_tensors(function, args, kwargs):
            self._blank.pop(storage_key(tensor), None)
        if function in _EMPTY and has_memory(result):
            storage = result.untyped_storage()
            self._blank[storage._cdata] = storage
        return result

    def _record_write(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record an operator that writes to a tracked storage, and run it unless it is random.

        An operator that fills the full storage replaces the previous history.

        Raises:
            NeedsValuesError: The write cannot be replayed.
        """
        written = [*written_tensors(function, args, kwargs)]
        keys = {storage_key(tensor) for tensor in written}
        if not keys:
            return self._record_result(function, args, kwargs)
        target = self.histories.get(key := keys.pop())
        if keys or target is None or any(tensor.dtype != target.dtype for tensor in written):
            raise NeedsValuesError(f"its constructor runs {function} on parameters")
        is_random = torch.Tag.nondeterministic_seeded in function.tags
        has_values = target.base is not None or target.calls
        if not (has_values or is_random or function in _OVERWRITING):
            raise NeedsValuesError(
                f"its constructor runs {function} on a parameter without known values"
            )
        call = self._make_call(function, args, kwargs, key, is_random=is_random)
        if function in _FILLING and written[0].numel() * target.dtype.itemsize == (
            target.storage.nbytes()
        ):
            # All elements are overwritten, so earlier writes cannot matter.
            target.base, target.calls = None, []
        target.calls.append(call)
        if not is_random:
            return function(*args, **kwargs)
        if self.draws:
            self.run_random(call, target)
        return written[0]

    def run_random(self, call: _RecordedCall, target: _History) -> None:
        """Run a random operator on a scratch tensor, so that the generator advances."""
        call.run(self.scratch.buffer_for(target.storage, target.dtype), repeats=False)

    def _record_result(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator that writes to nothing, and give its new result a history too."""
        if torch.Tag.nondeterministic_seeded in function.tags:
            raise NeedsValuesError(
                f"its constructor draws random numbers from parameters ({function})"
            )
        result = function(*args, **kwargs)
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        for output in outputs:
            if self.is_tracked(output):  # a view
                continue
            if len(outputs) > 1 or function in _EMPTY:
                raise NeedsValuesError(f"its constructor runs {function} on parameters")
            storage = output.untyped_storage()
            base = self._make_call(function, args, kwargs, None, is_random=False)
            self.histories[storage._cdata] = _History(storage, output.dtype, base)
        return result

    def _make_call(
        self,
        function: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        target: int | None,
        *,
        is_random: bool,
    ) -> _RecordedCall:
        """Return the recorded form of a call; `target` is the key of the storage that it writes
        to."""

        def kept(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            history = self.histories.get(key := storage_key(value))
            if history is None:
                if not has_memory(value):  # torch makes a number that is assigned a meta tensor
                    raise NeedsValuesError("its constructor assigns values from the meta device")
                return self._store_values(value.detach().clone())
            # A copy of the history: the source may be written to after this call.
            source = None if key == target else history.snapshot()
            return _ParameterView(
                tuple(value.shape), value.stride(), value.storage_offset(), source
            )

        leaves = tree_leaves((args, kwargs))
        own = [leaf for leaf in leaves if isinstance(leaf, torch.Generator)]
        generator = own[0] if own else torch.default_generator
        state = None
        if is_random:
            self._draws += 1
            if not self.draws:  # the generator does not advance: each draw gets a different seed
                generator = torch.Generator().manual_seed(self._draws)
            state = generator.get_state()
        own_args, own_kwargs = tree_map(kept, (args, kwargs))
        return _RecordedCall(function, own_args, own_kwargs, state)

    def _store_values(self, values: Tensor) -> Tensor:
        """Return values that must be stored.

        Raises:
            NeedsValuesError: The stored values exceed `MOST_KEPT` bytes in total.
        """
        self._kept += values.nbytes
        if self._kept > MOST_KEPT:
            raise NeedsValuesError(
                "its constructor computes values before it makes them parameters"
            )
        return values

    @contextmanager
    def record(self) -> Iterator[None]:
        """Temporarily record a constructor, to which parameters appear to be on the CPU."""
        with (
            without_values(self.move_to_meta),
            replace_truncated_normal(self._truncated_normal),
            self,
            _ReportCPU(self),
        ):
            yield

    @torch.no_grad()
    def _truncated_normal(self, original: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Record torch's truncated normal as one operator, because it reads its draws to reject
        some."""
        target = self.histories.get(key := storage_key(tensor))
        if target is None or tensor.dtype != target.dtype:
            result: Tensor = original(tensor, *args, **kwargs)
            return result
        tensor.zero_()  # a visible write, for modes that look for writes
        call = self._make_call(original, (tensor, *args), kwargs, key, is_random=True)
        if tensor.nbytes == target.storage.nbytes():
            target.base, target.calls = None, []
        target.calls.append(call)
        if self.draws:
            self.run_random(call, target)
        return tensor


class _ReportCPU(TorchFunctionMode):
    """The mode that reports tracked parameters as CPU tensors.

    Initialization code, torch's and the user's, skips tensors on meta.
    """

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self,
        function: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if function in (_IS_META, _DEVICE) and self._recorder.is_tracked(args[0]):
            return False if function == _IS_META else torch.device("cpu")
        if function in _EXPOSING:
            self._recorder.mark_exposed(args[0])
        return function(*args, **(kwargs or {}))


class DrawnWeights:
    """The initial values of a module on meta, as its constructor draws them."""

    def __init__(self, module: nn.Module, recorder: _Recorder) -> None:
        self._views: dict[str, tuple[_ParameterView, _History]] = {}
        self._scratch = recorder.scratch
        for name, parameter in module.named_parameters(remove_duplicate=False):
            history = recorder.histories.get(storage_key(parameter))
            if history is None or not (history.calls or history.base is not None):
                raise NeedsValuesError(f"its constructor assigns unknown values to {name}")
            size, strides = tuple(parameter.shape), parameter.stride()
            view = _ParameterView(size, strides, parameter.storage_offset(), None)
            self._views[name] = view, history

    def read_window(
        self, name: str, shape: Sequence[int], window: Window, part: Tensor, dtype: torch.dtype
    ) -> None:
        """Write a window of a parameter to `part`.

        Values are rounded to the constructor's dtype and then to `dtype`. The full parameter is
        drawn.

        Args:
            name: The dotted name of the parameter.
            shape: The shape of the full parameter.
            window: Offset and size along each dimension, in elements.
            part: Receives the values; its shape is the window's size. Nothing is drawn if it is
                empty.
            dtype: The dtype to which values are rounded; `part` may have a wider one.
        """
        if part.numel():
            view, history = self._views[name]
            part.copy_(
                narrow_to_window(view.apply_to(history.compute_values(self._scratch)), window).to(
                    dtype
                )
            )


class InspectionWeights:
    """The values for an inspection of a module before it is sharded.

    Small parameters get their drawn values. Large ones get normal values with standard deviation
    0.02, since drawing them by the record takes seconds.
    """

    def __init__(self, weights: DrawnWeights) -> None:
        self._weights = weights

    def read_window(
        self, name: str, shape: Sequence[int], window: Window, part: Tensor, dtype: torch.dtype
    ) -> None:
        """Write a window of a parameter to `part`; see `DrawnWeights.read_window`."""
        if torch.Size(shape).numel() <= _FEW:
            self._weights.read_window(name, shape, window, part, dtype)
        else:
            part.normal_(0.0, 0.02, generator=torch.Generator().manual_seed(part.numel()))


def build_drawn(build: Build, *, draws: bool = True) -> tuple[nn.Module, DrawnWeights]:
    """Build a module with its parameters on meta, and record the values that its constructor draws.

    Args:
        build: Builds the module and seeds the generator.
        draws: Whether random operators run. Without, the weights are drawn from other seeds.

    Raises:
        NeedsValuesError: The constructor needs real parameters, or raises.
    """
    recorder = _Recorder(draws=draws)
    with recorder.record():
        module = run_constructor(build, 0)
    require_hollow(module)
    return module, DrawnWeights(module, recorder)
