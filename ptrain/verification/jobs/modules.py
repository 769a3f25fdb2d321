"""Compare each module by itself: its inputs and outputs in a step with the plain module's results
for the same inputs. A module that agrees forward and backward is not where a step starts to differ,
so the fault is inside a module that does not agree.

The reference's model also runs on this rank's own micro-batches. The wrapped modules must return
its outputs. Its parameters' gradients are this rank's contribution to the global gradient, so the
optimizer's gradient can be expressed by ranks and micro-batches.

The position of a rank's slice of the tokens in one device's samples is found by the tokens, and so
is the same part of any tensor that one device has for all tokens.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from ptrain.errors import Fault
from ptrain.models.arguments import first_real, is_real
from ptrain.models.boundary import CodeRaised, boundary, said
from ptrain.report.finding import Moment
from ptrain.verification.capture import Key
from ptrain.verification.jobs.job import Tolerance
from ptrain.verification.jobs.record import ForwardCall, counts, cuda_devices, digest, pieces
from ptrain.verification.parts import (
    canonical_modules,
    canonical_parameters,
    difference,
    held,
    norm,
)

_MOST_PAIRS = 1 << 26  # of tokens that are compared, 5 bytes for each: 8k of 8k


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSlice:
    """`rows` [samples] and `columns` [tokens] of one device's tokens, whose shape is `whole`."""

    rows: Tensor
    columns: Tensor
    whole: torch.Size

    def of(self, tensor: Tensor | None, like: Tensor) -> Tensor | None:
        """Return this part of a tensor of one device: the tokens' dimension cut to the columns, the
        samples' to the rows; None where that does not give the shape of `like`."""
        if tensor is None or tensor.dim() != like.dim():
            return None
        for dim, size in enumerate(like.shape):
            if tensor.size(dim) == size:
                continue
            for index, whole in ((self.columns, self.whole[1]), (self.rows, self.whole[0])):
                if tensor.size(dim) == whole and size == index.numel():
                    tensor = tensor.index_select(dim, index.to(tensor.device))
                    break
            else:
                return None
        if len(set(self.whole)) == 1 and tensor.dim() > 1:
            return None  # samples and tokens cannot be told apart
        return tensor


def tokens_of(call: ForwardCall) -> Tensor | None:
    """Return what the model was given as tokens: [samples, tokens] of whole numbers."""
    leaves = tree_leaves((call.args, call.kwargs))
    return next(
        (
            leaf for leaf in leaves
            if isinstance(leaf, Tensor) and leaf.dim() == 2 and not leaf.is_floating_point()
            and not isinstance(leaf, DTensor)
        ),
        None,
    )  # fmt: skip


def slice_of(reference: Sequence[ForwardCall], run: Sequence[ForwardCall]) -> TokenSlice | None:
    """Return the slice that this rank's only pass has of one device's only pass; None where it has
    whole samples, or its tokens are not found there."""
    if len(reference) != 1 or len(run) != 1:
        return None
    whole, own = tokens_of(reference[0]), tokens_of(run[0])
    if whole is None or own is None or own.size(1) >= whole.size(1):
        return None
    count = own.size(0)
    for start in range(0, whole.size(0) - count + 1, count):
        columns = _columns(whole[start : start + count], own)
        if columns is not None:
            rows = torch.arange(start, start + count)
            return TokenSlice(rows=rows, columns=columns, whole=whole.shape)
    return None


def _columns(whole: Tensor, own: Tensor) -> Tensor | None:
    """Return which columns these are: those of a usual way to cut, where one fits, else the ones
    that follow each other where several are alike."""
    for columns in _usual_cuts(whole.size(1), own.size(1)):
        if torch.equal(whole[:, columns.to(whole.device)], own):
            return columns
    if whole.size(1) * own.size(1) > _MOST_PAIRS:
        return None
    alike = torch.ones(own.size(1), whole.size(1), dtype=torch.bool, device=own.device)
    for of_whole, of_own in zip(whole, own, strict=True):
        alike &= of_own[:, None] == of_whole
    if not bool(alike.any(1).all()):
        return None
    return _following(alike.cpu())


def _usual_cuts(whole: int, own: int) -> Iterator[Tensor]:
    """Yield columns: a slice in one piece; an early and a late one (zigzag), as rank r of n has
    the slices r and 2n - 1 - r; every n-th token."""
    if not own or whole % own:
        return
    count = whole // own
    tokens = torch.arange(whole)
    yield from tokens.chunk(count)
    if own % 2 == 0:
        chunks = tokens.chunk(2 * count)
        yield from (torch.cat([chunks[rank], chunks[-1 - rank]]) for rank in range(count))
    yield from (tokens[rank::count] for rank in range(count))


def _following(alike: Tensor) -> Tensor | None:
    """[own, whole]: which are alike."""
    runs = _longest_runs(alike)
    chosen: list[int] = []
    for place in range(alike.size(0)):
        following = chosen[-1] + 1 if chosen else -1
        fits = 0 <= following < alike.size(1) and bool(alike[place, following])
        chosen.append(following if fits else int(runs[place].argmax()))
    columns = torch.tensor(chosen)
    return columns if columns.unique().numel() == columns.numel() else None


def _longest_runs(alike: Tensor) -> Tensor:
    """[own, whole]: for how many columns from there on both go on alike."""
    runs = alike.int()
    for place in range(alike.size(0) - 2, -1, -1):
        runs[place, :-1] += torch.where(alike[place, :-1], runs[place + 1, 1:], 0)
    return runs


_NOT_USERS = ("torch", "ptrain")
_QUIET = 1e-6  # a tensor below this share of what it belongs to is rounding


@dataclass(slots=True, kw_only=True)
class ModuleCall:
    """One forward pass of one module: what it was given, the first floating tensor that it
    returned, the gradient of that (`upstream`) and the one of its first floating input that it
    handed back (`handed`). `place` is that input's among the leaves of `given`; `others`: what else
    it returned; `weights`: a checksum of its own parameters then; `called_at`: the file and line
    that called it."""

    given: tuple[tuple[Any, ...], dict[str, Any]]
    place: int | None
    weights: str = ""
    called_at: str = ""
    output: Tensor | None = None
    others: tuple[Tensor, ...] = ()
    upstream: Tensor | None = None
    handed: Tensor | None = None

    @property
    def kinds(self) -> list[object]:
        """Of what it was given: the dimensions of a tensor, with the number of features, and the
        type of whatever else."""
        return [
            (leaf.dim(), leaf.shape[-1:] if is_real(leaf) else ())
            if isinstance(leaf, Tensor)
            else type(leaf)
            for leaf in self._leaves
        ]

    @property
    def is_whole(self) -> bool:
        """No part of anything: one device could be given it."""
        return not any(isinstance(leaf, DTensor) for leaf in (*self._leaves, self.output))

    @property
    def _leaves(self) -> list[Any]:
        return tree_leaves(self.given)


Calls = dict[Key, ModuleCall]


class ModuleRecorder:
    """`with ModuleRecorder(model) as modules:` around a step, or around passes of a model."""

    def __init__(self, model: nn.Module) -> None:
        self.calls: Calls = {}
        self._model = model
        self._micro_batch = -1
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        keep = self._stack.callback
        for path, module in canonical_modules(self._model):
            if isinstance(module, nn.Identity):
                continue
            begins = module.register_forward_pre_hook(
                partial(self._begins, path), prepend=True, with_kwargs=True
            )
            keep(begins.remove)
            keep(module.register_forward_hook(partial(self._ends, path)).remove)
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def _begins(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if not counts():
            return None
        self._micro_batch += not path
        key = path, max(self._micro_batch, 0)
        if key in self.calls:
            return None
        leaves, spec = tree_flatten((args, kwargs))
        # one tensor that is given twice stays one: attention to itself is computed in another way
        copies = {id(leaf): leaf.detach().clone() for leaf in leaves if isinstance(leaf, Tensor)}
        kept = [copies.get(id(leaf), leaf) for leaf in leaves]
        place = next(
            (at for at, leaf in enumerate(leaves) if is_real(leaf) and leaf.requires_grad), None
        )
        own = [parameter.detach() for parameter in module.parameters(recurse=False)]
        weights = "".join(
            digest(held(parameter).clone()) for parameter in own
        )  # numpy pins storage
        call = ModuleCall(
            given=tree_unflatten(kept, spec), place=place, weights=weights, called_at=_caller()
        )
        self.calls[key] = call
        if place is None or isinstance(leaves[place], DTensor):
            return None
        # a node of its own: the gradient that this module hands back, without that of others that
        # take the same tensor
        first = leaves[place]
        node = first.view_as(first)
        node.register_hook(partial(_keep, call, "handed"))
        return tree_unflatten([node if leaf is first else leaf for leaf in leaves], spec)

    def _ends(self, path: str, module: nn.Module, args: Any, output: Any) -> None:
        call = self.calls.get((path, max(self._micro_batch, 0)))
        real = [leaf for leaf in tree_leaves(output) if is_real(leaf)]
        first = next(iter(real), None)
        if not counts() or call is None or call.output is not None or first is None:
            return
        call.output = first.detach().clone()
        call.others = tuple(leaf.detach().clone() for leaf in real[1:])
        if first.requires_grad:
            first.register_hook(partial(_keep, call, "upstream"))


def _caller() -> str:
    """Return the file and line of the innermost frame that is neither torch's nor ptrain's."""
    frame, here = sys._getframe(1), Path.cwd()
    while frame.f_back and str(frame.f_globals.get("__name__")).partition(".")[0] in _NOT_USERS:
        frame = frame.f_back
    file = Path(frame.f_code.co_filename)
    place = file.relative_to(here) if file.is_relative_to(here) else file.name
    return f"{place}:{frame.f_lineno}"


def _keep(call: ModuleCall, side: str, gradient: Tensor) -> None:
    setattr(call, side, gradient.detach().clone())


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """A module that does something else than the plain one with the same inputs, or hands another
    gradient back for the same gradient: how far off (relative), and both sides. `rewritten`: its
    parameters are not those of its first pass in the step."""

    path: str
    micro_batch: int
    moment: Moment
    difference: float
    expected: Tensor
    actual: Tensor
    rewritten: bool = False


@dataclass(slots=True)
class Violations:
    """Of one rank, and which modules could be run by themselves at all."""

    list: list[Violation] = field(default_factory=list)
    tested: set[str] = field(default_factory=set)


def violations(
    model: nn.Module, expected: Mapping[Key, ModuleCall], actual: Mapping[Key, ModuleCall],
    limit: Tolerance,
) -> Violations:  # fmt: skip
    """Run each plain module on what the loop's was given: the whole, or samples or tokens of it.
    One that the loop gives other features (a slice of the heads) cannot be run by itself."""
    result, first = Violations(), dict[str, str]()
    modules = dict(canonical_modules(model))
    with torch.random.fork_rng(devices=cuda_devices(model)):
        for key, call in actual.items():
            right = expected.get(key)
            if right is None or not _is_testable(call, right):
                continue
            its = _of_module(modules[key[0]], key, call, right, limit)
            if its is not None:
                rewritten = call.weights != first.setdefault(key[0], call.weights)
                result.tested.add(key[0])
                result.list += [replace(violation, rewritten=rewritten) for violation in its]
    return result


def _is_testable(call: ModuleCall, right: ModuleCall) -> bool:
    return (
        call.is_whole
        and call.output is not None
        and right.output is not None
        and call.kinds == right.kinds
    )


def _of_module(
    module: nn.Module, key: Key, call: ModuleCall, right: ModuleCall, limit: Tolerance
) -> list[Violation] | None:
    """Return what it does otherwise; None where it cannot be run by itself."""
    path, number = key
    try:
        with boundary(lambda error: Fault(place=path, finding=said(error))):
            output, handed = alone(module, call, right)
    except CodeRaised:  # some take no slice
        return None
    assert call.output is not None
    if output is None:
        return None
    for moment, truth, own in (
        (Moment.FORWARD, output, call.output),
        (Moment.BACKWARD, handed, call.handed),
    ):
        if truth is None or own is None:
            continue
        size = _apart(own, truth)
        if size > limit.outputs:
            return [  # what it hands back follows from what it returns
                Violation(
                    path=path, micro_batch=number, moment=moment, difference=size, expected=truth,
                    actual=own,
                )
            ]  # fmt: skip
    return []


def _apart(own: Tensor, truth: Tensor) -> float:
    """Return how far it is from the piece of the truth that fits best; 0 where it is no piece."""
    sizes = (
        difference(own, piece, max(norm(piece), _QUIET * norm(truth)))
        for piece in pieces(truth, own.shape)
    )
    return min(sizes, default=0.0)


def alone(
    module: nn.Module, call: ModuleCall, right: ModuleCall
) -> tuple[Tensor | None, Tensor | None]:
    """Return what a plain module returns for what the loop's was given, and the gradient that it
    hands back for the gradient that the loop's had: None where there is none, or the loop's output
    is only a part of it."""
    leaves, spec = tree_flatten(call.given)
    dtypes = [getattr(leaf, "dtype", None) for leaf in tree_leaves(right.given)]
    leaves = [
        leaf.to(dtype) if is_real(leaf) else leaf
        for leaf, dtype in zip(leaves, dtypes, strict=True)
    ]
    if call.place is not None:
        given = leaves[call.place]
        fresh = given.clone().requires_grad_()
        leaves = [fresh if leaf is given else leaf for leaf in leaves]
    args, kwargs = tree_unflatten(leaves, spec)
    with torch.enable_grad():
        output = module(*args, **kwargs)
    first = first_real(output)
    if first is None:
        return None, None
    upstream, place = call.upstream, call.place
    if (
        upstream is None
        or place is None
        or upstream.shape != first.shape
        or not first.requires_grad
    ):
        return first.detach(), None
    (handed,) = torch.autograd.grad(
        first, leaves[place], upstream.to(first.dtype), allow_unused=True
    )
    return first.detach(), handed


def innermost(paths: Sequence[str]) -> list[str]:
    """Return those of which no other is a part."""
    return [
        path
        for path in dict.fromkeys(paths)
        if not any(other != path and is_within(other, path) for other in paths)
    ]


def is_within(path: str, whole: str) -> bool:
    """Return whether a module's (or a parameter's) path is of this module or of one in it."""
    return not whole or path == whole or path.startswith(f"{whole}.")


@dataclass(slots=True)
class ProbeResult:
    """`gradients` by micro-batch and parameter; a micro-batch without is one that cannot be run on
    one device (inputs that are DTensors, outputs that no loss was computed of)."""

    modules: Calls = field(default_factory=dict)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)


def probed(model: nn.Module, calls: Sequence[ForwardCall]) -> ProbeResult:
    """Leaves the model as it was: no gradient is kept, buffers are put back."""
    with untouched(model), ModuleRecorder(model) as recorder:
        gradients = [_run(model, call) for call in calls]
    return ProbeResult(recorder.calls, gradients)


def _run(model: nn.Module, call: ForwardCall) -> dict[str, Tensor]:
    inputs = tree_leaves((call.args, call.kwargs))
    if any(isinstance(leaf, DTensor) for leaf in (*inputs, *call.upstream.values())):
        return {}
    with ExitStack() as stack:
        stack.enter_context(autocast_of([call]))
        stack.enter_context(torch.enable_grad())
        leaves = _leaves(model, call)
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
    gradients = torch.autograd.grad(
        list(wanted.values()),
        list(parameters.values()),
        [call.upstream[place].to(leaf.dtype) for place, leaf in wanted.items()],
        allow_unused=True,
    )
    return {n: g for n, g in zip(parameters, gradients, strict=True) if g is not None}


def _leaves(model: nn.Module, call: ForwardCall) -> list[Any]:
    """What the whole model returns; nothing where it cannot take what a stage of it is given."""
    try:
        with boundary(lambda error: Fault(place="model", finding=said(error))):
            return tree_leaves(model(*call.args, **call.kwargs))
    except CodeRaised:
        return []


def autocast_of(calls: Sequence[ForwardCall]) -> AbstractContextManager[object]:
    """Return the autocast under which the first of the loop's forward passes ran."""
    if not calls or calls[0].autocast is None:
        return nullcontext()
    leaves = tree_leaves((calls[0].args, calls[0].kwargs))
    device = next((leaf.device.type for leaf in leaves if isinstance(leaf, Tensor)), "cpu")
    return torch.autocast(device, dtype=calls[0].autocast)


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Put a model's buffers and torch's random state back."""
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    try:
        with torch.random.fork_rng(devices=cuda_devices(model)):
            yield
    finally:
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                buffer.copy_(buffers[name])
