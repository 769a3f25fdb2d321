"""Record inputs, outputs and output gradients of all modules, and replace them by the reference's.

The reference's model also runs on this rank's micro-batches (`probe_model`). The loop's modules
must return the same outputs. The gradients of its parameters are this rank's contributions, so that
the optimizer's gradient can be expressed by ranks and micro-batches.

The position of a rank's sequence shard is found by its tokens. It locates the same part in any
tensor that the reference has for all tokens.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Self, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from ptrain.cost import Phase
from ptrain.errors import Fault
from ptrain.models.boundary import UserCodeError, convert_exceptions, describe_error
from ptrain.models.ledger import IN_PROGRAMS, is_real
from ptrain.verification.jobs.record import ForwardCall, cuda_devices, is_recorded_forward
from ptrain.verification.jobs.shards import FUSED, local_part
from ptrain.verification.parts import (
    canonical_modules,
    canonical_parameters,
    difference,
    local_cpu,
    norm,
)

Key: TypeAlias = tuple[str, int]  # a module's path and a micro-batch


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSlice:
    """The position of a rank's tokens in the reference's tokens.

    Attributes:
        rows: Indices of the samples.
        columns: Indices of the tokens in each sample.
        whole: Shape of the reference's tokens, [samples, tokens].
    """

    rows: Tensor
    columns: Tensor
    whole: torch.Size

    def indices(self, whole: int, own: int) -> Iterator[Tensor]:
        """Yield index tensors that shard a dimension to this rank's size.

        Args:
            whole: The size of the dimension in the reference.
            own: The size of the dimension on this rank.

        Yields:
            Indices (1-d, of length `own`), if the dimension may be tokens, samples, or both
            flattened.
        """
        both = self.rows[:, None] * self.whole[1] + self.columns
        for index, size in (
            (self.columns, self.whole[1]), (self.rows, self.whole[0]),
            (both.flatten(), self.whole.numel()),
        ):  # fmt: skip
            if (size, index.numel()) == (whole, own):
                yield index


def input_tokens(call: ForwardCall) -> Tensor | None:
    """Return the first input that is an integer tensor of shape [samples, tokens], or None."""
    leaves = tree_leaves((call.args, call.kwargs))
    return next(
        (
            leaf for leaf in leaves
            if isinstance(leaf, Tensor) and leaf.dim() == 2 and not leaf.is_floating_point()
            and not isinstance(leaf, DTensor)
        ),
        None,
    )  # fmt: skip


def find_token_slice(
    reference: Sequence[ForwardCall], run: Sequence[ForwardCall]
) -> TokenSlice | None:
    """Return the position of this rank's tokens in the reference's, or None.

    Both sides must run one forward pass. None also means that the rank has full samples, or that
    its tokens are not found.
    """
    if len(reference) != 1 or len(run) != 1:
        return None
    whole, own = input_tokens(reference[0]), input_tokens(run[0])
    if whole is None or own is None or own.size(1) >= whole.size(1):
        return None
    count = own.size(0)
    for start in range(0, whole.size(0) - count + 1, count):
        rows = torch.arange(start, start + count)
        windows = torch.arange(whole.size(1)).unfold(0, own.size(1), 1)
        for columns in (*shard_indices(whole.size(1), own.size(1)), *windows):
            if torch.equal(whole[start : start + count, columns.to(whole.device)], own):
                return TokenSlice(rows=rows, columns=columns, whole=whole.shape)
    return None


def shard_indices(whole: int, own: int) -> Iterator[Tensor]:
    """Yield the indices of each shard, for all usual ways to shard a dimension.

    They are contiguous chunks, also of each part of a fused projection; zigzag, where rank r of n
    has the chunks r and 2n - 1 - r; and every n-th index.

    Args:
        whole: The size of the dimension in the reference.
        own: The size of one shard. Nothing is yielded unless it divides `whole`.

    Yields:
        Indices (1-d, of length `own`), rank by rank.
    """
    if not own or whole % own:
        return
    count, every = whole // own, torch.arange(whole)
    for fused in FUSED:
        if own % fused == 0:
            parts = every.view(fused, count, own // fused)
            yield from (parts[:, rank].flatten() for rank in range(count))
    if own % 2 == 0:
        chunks = every.chunk(2 * count)
        yield from (torch.cat([chunks[rank], chunks[-1 - rank]]) for rank in range(count))
    yield from (every[rank::count] for rank in range(count))


def candidate_parts(whole: Tensor, own: Tensor, part: TokenSlice | None = None) -> Iterator[Tensor]:
    """Yield all parts of the reference's tensor that this rank's tensor may correspond to.

    A DTensor has one part, by its placements. A plain tensor corresponds to the full tensor, or to
    a shard along one or two dimensions.

    Args:
        whole: The reference's tensor.
        own: This rank's tensor.
        part: The position of this rank's tokens. If it is None or fits no dimension, all usual ways
            to shard a dimension are tried.

    Yields:
        A part of `whole` with the local shape of `own`. Nothing if more than two dimensions differ
        in size.
    """
    if isinstance(own, DTensor):
        if (its := local_part(whole, own)) is not None:
            yield its
        return
    sizes = list(enumerate(zip(whole.shape, own.shape, strict=False)))
    cut = [(dim, *both) for dim, both in sizes if both[0] != both[1]]
    if whole.dim() != own.dim() or len(cut) > 2:
        return
    ways = [
        [(dim, index) for index in (part and [*part.indices(*both)]) or shard_indices(*both)]
        for dim, *both in cut
    ]
    for chosen in product(*ways):
        result = whole
        for dim, index in chosen:
            result = result.index_select(dim, index.to(whole.device))
        yield result


_SAME_ROWS = 1e-4  # relative: sorted sums of equal rows differ by less


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorFit:
    """A tensor of a module's pass and the corresponding part of the reference's.

    Attributes:
        number: Index of the micro-batch.
        leaf: Index among the leaves of the module's inputs; 0 for outputs.
        size: Relative difference.
        own: This rank's tensor.
        truth: The part of the reference's tensor.
        place: Index of the reference's pass, and of the part.
    """

    number: int
    leaf: int
    size: float
    own: Tensor
    truth: Tensor
    place: tuple[int, int]  # (pass, part) of the reference

    @property
    def is_reordered(self) -> bool:
        """True if the rows are the reference's in another order, judged by weighted row sums."""
        own, truth = (_row_sums(local_cpu(side)) for side in (self.own, self.truth))
        return self.own.dim() > 1 and difference(own, truth, norm(truth)) <= _SAME_ROWS


def _row_sums(tensor: Tensor) -> Tensor:
    """Return the sorted weighted sums of the rows."""
    rows = tensor.double().flatten(0, -2) if tensor.dim() > 1 else tensor.double()[None]
    # unequal weights, so that rows with permuted elements differ
    return (rows @ torch.linspace(1, 2, rows.size(-1), dtype=rows.dtype)).sort().values


@dataclass(slots=True, kw_only=True)
class ModuleCall:
    """The first pass of one module in a micro-batch.

    Attributes:
        given: Copies of the arguments and keyword arguments.
        times: Number of passes of the module in the micro-batch.
        is_written: Whether its direct parameters have changed since its first pass in the step.
        called_at: File and line of the call in user code.
        output: The first floating tensor that it returned.
        others: Further floating tensors that it returned.
        upstream: Gradient of the loss with respect to `output`.
    """

    given: tuple[tuple[Any, ...], dict[str, Any]]
    times: int = 1
    is_written: bool = False
    called_at: str = ""
    output: Tensor | None = None
    others: tuple[Tensor, ...] = ()
    upstream: Tensor | None = None


Calls = dict[Key, ModuleCall]
Event = tuple[str, bool]  # a module's path, and whether its pass ends (else it begins)


@dataclass(slots=True, kw_only=True)
class ForcedValues:
    """The values that replace those of a module's pass.

    Attributes:
        given: Inputs, by leaf index.
        output: The first floating output.
        upstream: The gradient of that output.
    """

    given: dict[int, Tensor] = field(default_factory=dict)
    output: Tensor | None = None
    upstream: Tensor | None = None


class ReplaceValues(torch.autograd.Function):
    """An operator that replaces a tensor's values, and passes the gradient on to that tensor."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, other: Tensor) -> Tensor:
        return _cast_like(own, other)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def _cast_like(own: Tensor, other: Tensor) -> Tensor:
    """Return the values of `other` with the dtype, device and placements of `own`."""
    local = other.to(local_cpu(own).dtype).to(own.device).clone()
    if not isinstance(own, DTensor):
        return local
    return DTensor.from_local(
        local, own.device_mesh, own.placements, run_check=False, shape=own.shape,
        stride=own.stride(),
    )  # fmt: skip


class ModuleRecorder:
    """A recorder of module passes around a step, or around passes of a model: `with
    ModuleRecorder(...)`.

    Args:
        model: The model whose modules are recorded.
        forced: Values that replace those of passes. `calls` has the values from before.
        modules: Modules by path to record instead. The pre-hooks then run
            after existing ones.
        kept: The micro-batches to record. Default: all.

    Attributes:
        calls: The passes, by module path and micro-batch.
        events: Begin and end of the passes of the first recorded micro-batch, in order.
        in_use: Parameter values at the first pass of their module.
    """

    def __init__(
        self, model: nn.Module, forced: Mapping[Key, ForcedValues] | None = None, *,
        modules: Iterable[tuple[str, nn.Module]] | None = None,
        kept: Collection[int] | None = None,
    ) -> None:  # fmt: skip
        self.calls: Calls = {}
        self.events: list[Event] = []
        self.in_use: dict[str, Tensor] = {}
        self._forced, self._kept, self._is_first = forced or {}, kept, modules is None
        self._modules = dict(canonical_modules(model) if modules is None else modules)
        self._micro_batch = -1
        self._runs: dict[str, int] = {}  # runs per module, if the root never runs
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        keep = self._stack.callback
        for path, module in self._modules.items():
            if isinstance(module, nn.Identity) or module in IN_PROGRAMS:  # no hook runs in there
                continue
            begins = module.register_forward_pre_hook(
                partial(self._before_forward, path), prepend=self._is_first, with_kwargs=True
            )
            keep(begins.remove)
            keep(module.register_forward_hook(partial(self._after_forward, path)).remove)
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def _before_forward(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Record the inputs of a module's first pass in a micro-batch; return the forced inputs."""
        if not is_recorded_forward():
            return None
        # A pass of the root (path "") starts a micro-batch; a program gives its number by `phase`.
        self._micro_batch += self._is_first and not path
        self._runs[path] = self._runs.get(path, -1) + 1
        key = self._current_key(path)
        if key in self.calls:
            self.calls[key].times += 1
        if key in self.calls or (self._kept is not None and key[1] not in self._kept):
            return None
        leaves, spec = tree_flatten((args, kwargs))
        kept = [leaf.detach().clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        is_written = False
        for name, parameter in module.named_parameters(path, recurse=False):
            if name not in self.in_use:
                self.in_use[name] = parameter.detach().clone()
            is_written |= not torch.equal(local_cpu(self.in_use[name]), local_cpu(parameter))
        self.calls[key] = ModuleCall(
            given=tree_unflatten(kept, spec), is_written=is_written, called_at=_caller()
        )
        self._record_event(key, False)
        given = self._forced[key].given if key in self._forced else {}
        if not given:
            return None
        put = [
            leaf if at not in given
            else ReplaceValues.apply(leaf, given[at]) if is_real(leaf)
            else _cast_like(leaf, given[at])
            for at, leaf in enumerate(leaves)
        ]  # fmt: skip
        return tree_unflatten(put, spec)

    def pass_tensors(
        self, number: int, what: Callable[[ModuleCall], Tensor | None]
    ) -> dict[str, Tensor]:
        """Return a tensor of each module's pass in a micro-batch, by path; None is left out."""
        its = {path: what(call) for (path, n), call in self.calls.items() if n == number}
        return {path: tensor for path, tensor in its.items() if tensor is not None}

    def phase(self, phase: Phase, micro_batch: int) -> None:
        """Take the number of the micro-batch from a program, whose stages have no root."""
        if phase is Phase.FORWARD:
            self._micro_batch = micro_batch

    def _current_key(self, path: str) -> Key:
        """Return the key of a module's current pass.

        Its number is the micro-batch, or the module's run if the root does not run.
        """
        return path, self._runs[path] if self._micro_batch < 0 else self._micro_batch

    def _record_event(self, key: Key, ends: bool) -> None:
        """Record an event of the first recorded micro-batch."""
        if key[1] == min(self._kept or (0,)):
            self.events.append((key[0], ends))

    def _after_forward(self, path: str, module: nn.Module, args: Any, output: Any) -> Any:
        """Record the outputs of a pass and hook their gradient; return the forced outputs."""
        key = self._current_key(path) if path in self._runs else (path, 0)
        call = self.calls.get(key)
        real = [leaf for leaf in tree_leaves(output) if is_real(leaf)]
        first = next(iter(real), None)
        if not is_recorded_forward() or call is None or call.output is not None or first is None:
            return None
        call.output = first.detach().clone()
        call.others = tuple(leaf.detach().clone() for leaf in real[1:])
        self._record_event(key, True)
        forced = self._forced.get(key, ForcedValues())
        other = first if forced.output is None else ReplaceValues.apply(first, forced.output)
        if forced.upstream is not None and other is first:
            other = first.clone()
        if other.requires_grad:
            other.register_hook(partial(_keep_upstream, call))
            if forced.upstream is not None:
                truth = forced.upstream
                other.register_hook(lambda gradient: _cast_like(gradient, truth))
        if other is first:
            return None
        return tree_map(lambda leaf: other if leaf is first else leaf, output)


_NOT_USERS = ("torch", "ptrain")


def _caller() -> str:
    """Return the file and line of the innermost frame that is neither torch's nor ptrain's."""
    frame, here = sys._getframe(1), Path.cwd()
    while frame.f_back and str(frame.f_globals.get("__name__")).partition(".")[0] in _NOT_USERS:
        frame = frame.f_back
    file = Path(frame.f_code.co_filename)
    place = file.relative_to(here) if file.is_relative_to(here) else file.name
    return f"{place}:{frame.f_lineno}"


def _keep_upstream(call: ModuleCall, gradient: Tensor) -> None:
    call.upstream = gradient.detach().clone()


def innermost_paths(paths: Sequence[str]) -> list[str]:
    """Return the paths that contain no other of these paths."""
    return [
        path
        for path in dict.fromkeys(paths)
        if not any(other != path and is_within(other, path) for other in paths)
    ]


def is_within(path: str, whole: str) -> bool:
    """Return True if a module or parameter path is `whole`, or inside of it. "" contains all."""
    return not whole or path == whole or path.startswith(f"{whole}.")


@dataclass(slots=True)
class ProbeResult:
    """The record of passes of the reference's model on given micro-batches.

    Attributes:
        modules: The passes of all modules.
        events: Begin and end of module passes of the first micro-batch.
        gradients: Parameter gradients, by micro-batch. Empty for one that cannot run on a single
            device: its inputs are DTensors, or no loss uses its outputs.
    """

    modules: Calls = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)


def probe_model(model: nn.Module, calls: Sequence[ForwardCall]) -> ProbeResult:
    """Run a model on recorded micro-batches, and return the record.

    The model stays unchanged: gradients are not accumulated, and buffers are restored.
    """
    with preserve_model(model), ModuleRecorder(model) as recorder:
        gradients = [_run_micro_batch(model, call) for call in calls]
    return ProbeResult(recorder.calls, recorder.events, gradients)


def _run_micro_batch(model: nn.Module, call: ForwardCall) -> dict[str, Tensor]:
    """Return the parameter gradients of one micro-batch, or {} if the model cannot run it."""
    inputs = tree_leaves((call.args, call.kwargs))
    if any(isinstance(leaf, DTensor) for leaf in (*inputs, *call.upstream.values())):
        return {}
    with ExitStack() as stack:
        stack.enter_context(recorded_autocast([call]))
        stack.enter_context(torch.enable_grad())
        leaves = _output_leaves(model, call)
    if any(place >= len(leaves) for place in call.upstream):
        return {}
    wanted = {place: leaves[place] for place in call.upstream if is_real(leaves[place])}
    alike = all(leaf.shape == call.upstream[place].shape for place, leaf in wanted.items())
    if not wanted or not alike:
        return {}
    parameters = {
        n: parameter
        for n, parameter in canonical_parameters(model).items()
        if parameter.requires_grad
    }
    # Not backward(), which would accumulate into `.grad`.
    gradients = torch.autograd.grad(
        list(wanted.values()),
        list(parameters.values()),
        [call.upstream[place].to(leaf.dtype) for place, leaf in wanted.items()],
        allow_unused=True,
    )
    return {n: g for n, g in zip(parameters, gradients, strict=True) if g is not None}


def _output_leaves(model: nn.Module, call: ForwardCall) -> list[Any]:
    """Return the leaves of the model's output, or [] if the forward pass raises.

    A full model cannot take the inputs of a pipeline stage, for example.
    """
    try:
        with convert_exceptions(lambda error: Fault(place="model", finding=describe_error(error))):
            return tree_leaves(model(*call.args, **call.kwargs))
    except UserCodeError:
        return []


def recorded_autocast(calls: Sequence[ForwardCall]) -> AbstractContextManager[object]:
    """Return a context with the autocast of the first forward pass."""
    if not calls or calls[0].autocast is None:
        return nullcontext()
    leaves = tree_leaves((calls[0].args, calls[0].kwargs))
    device = next((leaf.device.type for leaf in leaves if isinstance(leaf, Tensor)), "cpu")
    return torch.autocast(device, dtype=calls[0].autocast)


@contextmanager
def preserve_model(model: nn.Module) -> Iterator[None]:
    """Temporarily use a model; restore its buffers and torch's generators on exit."""
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    try:
        with torch.random.fork_rng(devices=cuda_devices(model)):
            yield
    finally:
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                buffer.copy_(buffers[name])
