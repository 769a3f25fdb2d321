"""Whether a model computes of slices of the tokens what it computes of all of them, as it does
where what stands between its sub-blocks takes each token by itself. It is tried on one sample, the
tokens of one rank after the other, before anything is cut."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ptrain.errors import Fault, refused
from ptrain.internals.fakes import detect_fake_mode
from ptrain.models.arguments import with_first
from ptrain.models.boundary import boundary, said
from ptrain.models.modes import in_mode
from ptrain.models.one_pass import OnePass
from ptrain.models.other_samples import least_embeddings
from ptrain.models.sub_blocks import standing_alone
from ptrain.spec.axis import Axis
from ptrain.spec.role import COLUMNS, ROWS, Role
from ptrain.spec.spec import Spec

Named = Mapping[str, Role]
_STRIDE = 7  # so that a token is not its place
_REMEDY = "write placement.tp.activations=R"


@dataclass(frozen=True, slots=True)
class _Boundary:
    """Where a rank takes its own tokens of what a module is given or gives, or gathers all."""

    name: str
    of_input: bool
    gathers: bool


class _AllTokens:
    """What the tensors at the boundaries are where all tokens are there, call by call."""

    def __init__(self) -> None:
        self.tensors: dict[_Boundary, list[Tensor]] = {}

    def crossed(self, at: _Boundary, tensor: Tensor) -> Tensor:
        self.tensors.setdefault(at, []).append(tensor)
        return tensor


@dataclass
class _Part:
    """The same where only a slice of the tokens is there: all that is gathered of them is compared,
    and all of it given."""

    whole: _AllTokens
    tokens: slice
    problem: str = ""
    calls: dict[_Boundary, int] = field(default_factory=dict)

    def crossed(self, at: _Boundary, tensor: Tensor) -> Tensor:
        if not at.gathers:
            return tensor[:, self.tokens]
        number = self.calls.get(at, 0)
        self.calls[at] = number + 1
        whole = self.whole.tensors[at][number]
        if not self.problem and not _is_alike(tensor, whole[:, self.tokens]):
            verb = "is given" if at.of_input else "gives"
            self.problem = f"what {at.name} {verb} of a slice of the tokens is not what it {verb} "
            self.problem += "of all: a forward between the sub-blocks does not take each by itself"
        return whole


def require_alike(
    module: nn.Module, named: Named, blocks: Sequence[str], place: str, spec: Spec
) -> None:
    """Raises SpecError, of `place`, where the model cannot run on slices of the tokens, or gives
    something else there. The model is left as it was; one without values is not tried."""
    if detect_fake_mode() is not None or next(module.parameters()).is_meta:
        return
    once = OnePass(module, spec)
    if spec.data.function is None:
        _tell_apart(once, module)
    whole = _AllTokens()
    degree, sequence = spec.degree(Axis.TP), spec.batch.sequence
    parts = [
        _Part(whole, slice(sequence * index // degree, sequence * (index + 1) // degree))
        for index in range(degree)
    ]

    def fault(error: BaseException) -> Fault:
        finding = f"it cannot run on a slice of the tokens: {said(error)}"
        return Fault(place=place, finding=finding, remedy=_REMEDY)

    with torch.no_grad(), in_mode(module, training=False), boundary(fault):
        runs: list[_AllTokens | _Part] = [whole, *parts]
        for tensors in runs:
            with _crossing(module, named, blocks, tensors), once.prepared() as run:
                run()
    if problem := next((part.problem for part in parts if part.problem), ""):
        raise refused(place, problem, _REMEDY)


def _tell_apart(once: OnePass, module: nn.Module) -> None:
    """Give each of a sample's tokens another number, as far as there are so many."""
    count = least_embeddings(module) or 1
    for tokens in once.samples.tensors:
        numbers = torch.arange(tokens.shape[-1], device=tokens.device)
        tokens.copy_((numbers * _STRIDE % count).expand_as(tokens))


def _is_alike(tensor: Tensor, expected: Tensor) -> bool:
    """Equal but for rounding: sums of other shapes have another order."""
    size = float(expected.abs().max()) if expected.numel() else 0.0
    tolerance = float(torch.finfo(expected.dtype).eps ** 0.5) * size
    return tensor.shape == expected.shape and torch.allclose(tensor, expected, 0.0, tolerance)


@contextmanager
def _crossing(
    module: nn.Module, named: Named, blocks: Sequence[str], tensors: _AllTokens | _Part
) -> Iterator[None]:
    """While entered, what crosses a boundary goes through `tensors`."""
    handles: list[Any] = []
    for at in _boundaries(module, named, blocks):
        child = module.get_submodule(at.name)
        if at.of_input:
            handles.append(child.register_forward_pre_hook(_enter(at, tensors), with_kwargs=True))
        else:
            handles.append(child.register_forward_hook(_leave(at, tensors)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _boundaries(module: nn.Module, named: Named, blocks: Sequence[str]) -> Iterator[_Boundary]:
    yield _Boundary(blocks[0], of_input=True, gathers=False)
    alone = standing_alone(named.items())
    for name, role in named.items():
        if not any(name.startswith(f"{block}.") for block in blocks):
            continue
        if role is Role.WHOLE_INPUT or (role in COLUMNS and name in alone):
            yield _Boundary(name, of_input=True, gathers=True)
        elif role in ROWS:
            yield _Boundary(name, of_input=False, gathers=False)
    yield _Boundary(blocks[-1], of_input=False, gathers=True)


def _enter(at: _Boundary, tensors: _AllTokens | _Part) -> Any:
    def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return with_first(args, kwargs, lambda tensor: tensors.crossed(at, tensor))

    return enter


def _leave(at: _Boundary, tensors: _AllTokens | _Part) -> Any:
    def leave(_: nn.Module, __: object, output: Any) -> Any:
        if isinstance(output, tuple):
            first, *others = output
            return (tensors.crossed(at, first), *others)
        return tensors.crossed(at, output)

    return leave
