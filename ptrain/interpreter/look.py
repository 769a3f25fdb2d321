"""Inspect a model before it is cut: its facts, its stages and its plan.

A model that is not built in is inspected without its weights. Each parameter repeats a few numbers
of its file (a Hankel matrix: every row starts one number later, so rows differ but share memory),
which is enough to see which operators use it and whether its parts compute what the whole does.
Where the model's code does not run with such values, or would be refused, the real weights are read
or drawn and decide. Rows overlap: writing into them is an error, and products are computed some
columns at a time, since they would copy an overlapping operand.

From a spec's model to a wrapped module with values: the same weights whatever the placement.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ptrain.axes.data.run.flat_target import RowWriter
from ptrain.axes.data.run.target import Parameter, whole_parameter, window_of
from ptrain.axes.tensor.run.apply import FusedOrder
from ptrain.errors import Fault, PtrainError, SpecError
from ptrain.facts.model import ModelFacts
from ptrain.internals.fakes import detect_fake_mode
from ptrain.interpreter.construction import Stages, stages_of_module
from ptrain.models.boundary import boundary, said
from ptrain.models.drawn import DrawnWeights, LookedWeights, build_drawn
from ptrain.models.facts import head_of, untraced_facts
from ptrain.models.initialize import (
    InitialValues,
    ModuleWeights,
    build,
    cast,
    named_tensors,
    read_module_weights,
    reset_buffers,
)
from ptrain.models.ledger import OperatorMode, local
from ptrain.models.meta import NeedsValues, hollow
from ptrain.models.moe import weigh
from ptrain.models.numerics import TORCH_DTYPES
from ptrain.models.units import ROOT
from ptrain.models.window import Window, overlaps, rows
from ptrain.plan.lower import lower
from ptrain.spec.model import ModelShape
from ptrain.spec.spec import Spec
from ptrain.steps.step import Plan
from ptrain.units import ceil_div

_CPU = torch.device("cpu")


def build_module(
    spec: Spec, *, device: torch.device = _CPU, allow_import: bool = False
) -> nn.Module:
    """The spec's model in its dtypes: on the meta device where ptrain gives the weights, else real
    on the CPU. Fake tensors are built where they are to live, on `device`: they take no memory
    anyway, and no module of them can be moved."""
    if detect_fake_mode() is None:
        device = torch.device("meta") if isinstance(spec.model, ModelShape) else _CPU
    with device:
        module = _built(spec, allow_import=allow_import)
    if not isinstance(spec.model, ModelShape):
        read_module_weights(module, spec.model.pretrained)
    return _prepared(module, spec)


def build_hollow(
    spec: Spec, *, allow_import: bool = False, draws: bool = True
) -> tuple[nn.Module, ModuleWeights | DrawnWeights]:
    """Build the spec's model, which is not built in, with its parameters on meta.

    Args:
        spec: The model begins with the weights in its folder, or with those that it draws.
        allow_import: Whether a function of the user's may be imported.
        draws: As of `build_drawn`, for a model without a folder.

    Returns:
        The module, and its initial weights.

    Raises:
        NeedsValues: It cannot be built without values.
        SpecError: It cannot be built, or the folder is not of this model.
    """
    folder = spec.model.pretrained
    build_it = partial(_built, spec, allow_import=allow_import)
    with _CPU:
        if folder is None:
            module, drawn = build_drawn(build_it, draws=draws)
            return _prepared(module, spec), drawn
        module = hollow(build_it)
    weights = ModuleWeights(module, folder)
    weights.read(module, only_buffers=True)
    return _prepared(module, spec), weights


def _built(spec: Spec, more: int = 0, *, allow_import: bool) -> nn.Module:
    """`more`: than the spec's seed."""
    sequence, seed = spec.batch.sequence, spec.train.seed + more
    return build(spec.model, sequence=sequence, allow_import=allow_import, seed=seed)


def _prepared(module: nn.Module, spec: Spec) -> nn.Module:
    cast(module, TORCH_DTYPES[spec.precision.effective.parameters])
    weigh(module, 1.0 / spec.batch.global_samples)
    return module


class Filling:
    """What makes a module on meta real on `device`, with this rank's part of every initial tensor.
    `copies`: tensors that begin as others of the model; `order`: in which those of fused
    projections are held."""

    def __init__(
        self,
        module: nn.Module,
        values: InitialValues,
        device: torch.device,
        copies: Mapping[str, str],
        order: FusedOrder,
    ) -> None:
        self._module, self._values, self._device = module, values, device
        self._copies, self._order = copies, order
        self._tied = [names for names, _ in named_tensors(module)]

    def all(self) -> None:
        """Fill everything."""
        buffers = self._computed()
        self._module.to_empty(device=self._device)
        self._restore(buffers)
        for name, parameter in self._module.named_parameters():
            self._write(name, parameter, window_of(parameter), local(parameter))

    def by_unit(self) -> RowWriter:
        """Give parameters no memory for now, and fill all else. What is returned writes rows of
        them to where they will be."""
        buffers = self._computed()
        for module in self._module.modules():
            module.to_empty(device=self._device, recurse=False)
            for parameter in module.parameters(recurse=False):
                local(parameter).untyped_storage().resize_(0)
        self._restore(buffers)
        return self._write_rows

    def _computed(self) -> dict[str, torch.Tensor]:
        """Return the buffers that have values already, by all their names."""
        named = self._module.named_buffers(remove_duplicate=False)
        return {name: buffer for name, buffer in named if not buffer.is_meta}

    def _restore(self, buffers: Mapping[str, torch.Tensor]) -> None:
        """Undo what becoming real did beside: ties are cut, and buffers empty."""
        for first, *others in self._tied:
            for name in others:
                setattr(*self._place(name), getattr(*self._place(first)))
        moved = {id(values): values.to(self._device) for values in buffers.values()}
        for name, values in buffers.items():
            owner, leaf = self._place(name)
            owner._buffers[leaf] = moved[id(values)]
        reset_buffers(self._module)

    def _place(self, name: str) -> tuple[nn.Module, str]:
        """Return whose tensor it is, and how it is called there."""
        owner, _, leaf = name.rpartition(".")
        return self._module.get_submodule(owner), leaf

    def _write_rows(self, name: str, stored: Parameter, first: int, part: torch.Tensor) -> None:
        parameter = whole_parameter(stored)
        self._write(name, parameter, rows(window_of(parameter), first, len(part)), part)

    @torch.no_grad()
    def _write(
        self, name: str, parameter: nn.Parameter, window: Window, part: torch.Tensor
    ) -> None:
        name, shape = self._copies.get(name, name), parameter.shape
        for ordered, place in self._order.pieces(name, shape, window, part):
            self._values.write(name, shape, ordered, place)


MOST_COPIED = 2**23  # bytes of a matrix at once: what a processor's cache may hold


@contextmanager
def repeated_values(module: nn.Module, weights: ModuleWeights | LookedWeights) -> Iterator[None]:
    """Within it the parameters of a module on meta have such values, in their dtypes; behind it
    they are those that they were before."""
    before = [
        (child, name, parameter)
        for child in module.modules()
        for name, parameter in child._parameters.items()
        if parameter is not None
    ]
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    stand_ins = {
        id(parameter): _repeated(names[id(parameter)], parameter, weights)
        for _, _, parameter in before
    }
    for child, name, parameter in before:
        child._parameters[name] = stand_ins[id(parameter)]
    try:
        with _ByColumns():
            yield
    finally:
        for child, name, parameter in before:
            child._parameters[name] = parameter


def _repeated(
    name: str, parameter: nn.Parameter, weights: ModuleWeights | LookedWeights
) -> nn.Parameter:
    shape = parameter.shape
    count = 1 + sum(size - 1 for size in shape) if parameter.numel() else 0
    window = _first(shape, count)
    read = torch.empty([size for _, size in window], dtype=parameter.dtype)
    weights.read_window(name, shape, window, read, parameter.dtype)
    values = read.flatten()[:count].clone()
    stand_in = nn.Parameter(values.as_strided(shape, (1,) * len(shape)), parameter.requires_grad)
    vars(stand_in).update(vars(parameter))
    return stand_in


def _first(shape: Sequence[int], count: int) -> Window:
    """Return a window of at least so many elements, and few more: of the last dimensions first."""
    window: Window = ()
    for size in reversed(shape):
        taken = min(size, count)
        window, count = ((0, taken), *window), ceil_div(count, max(1, taken))
    return window


class _ByColumns(OperatorMode):
    """Computes a product with a matrix whose rows overlap some columns at a time, each copied to
    the same place: of places that are freed in between, glibc takes none again."""

    def __init__(self) -> None:
        super().__init__()
        self._place = torch.empty(MOST_COPIED, dtype=torch.uint8)

    def operator(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if function in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            *addends, left, right = args
            columns = MOST_COPIED // max(1, right.itemsize * right.shape[0])
            if overlaps(right) and columns:
                product = partial(function, **kwargs)
                outputs = self._by_columns(product, addends, left, right.split(columns, 1))
                return torch.cat([*outputs], -1)
        return function(*args, **kwargs)

    def _by_columns(
        self,
        product: Callable[..., Tensor],
        addends: Sequence[Tensor],
        left: Tensor,
        parts: Sequence[Tensor],
    ) -> Iterator[Tensor]:
        """Yield the product with each part of a matrix, to which something may be added."""
        first = 0
        for part in parts:
            place = self._place[: part.nbytes].view(part.dtype).view(part.shape)
            count = part.shape[1]
            added = [x.narrow(-1, first, count) if x.shape[-1] > 1 else x for x in addends]
            yield product(*added, left, place.copy_(part))
            first += count


@dataclass(frozen=True, slots=True, kw_only=True)
class Looked:
    """A model, and what is known of it. `weights`: those of one without values that is not built
    in; `whole_because`: why it has values all the same."""

    module: nn.Module
    facts: ModelFacts
    stages: Stages | None
    plan: Plan
    head: str
    weights: ModuleWeights | DrawnWeights | None = None
    whole_because: str = ""


def look_at(module: nn.Module, spec: Spec) -> Looked:
    """Raises SpecError for a model whose stages are not the model, or that is not on slices of the
    tokens what it is on all."""
    facts = untraced_facts(module, spec)
    stages = stages_of_module(spec, module, facts)
    plan = lower(spec, facts)
    head = head_of(module, spec) if plan.loss else ROOT
    return Looked(module=module, facts=facts, stages=stages, plan=plan, head=head)


def look_at_built(spec: Spec, device: torch.device, *, allow_import: bool = False) -> Looked:
    """Build the spec's model and look at it. `device` as of `build_module`. Raises SpecError as
    `look_at`, and for a model or a folder that is none."""
    because = ""
    if not isinstance(spec.model, ModelShape) and detect_fake_mode() is None:
        try:
            return _look_without_values(spec, allow_import=allow_import)
        except (NeedsValues, _Refused) as error:
            because = str(error)
    module = build_module(spec, device=device, allow_import=allow_import)
    return replace(look_at(module, spec), whole_because=because)


def why_built_whole(spec: Spec, *, allow_import: bool = False, looks: bool = True) -> str:
    """Return why `look_at_built` builds the whole model; empty if it does not.

    Large tensors are not drawn, and small ones are drawn from other seeds. Without `looks` only
    the constructor runs, so that a reason that the look finds is missed.
    """
    if isinstance(spec.model, ModelShape):
        return ""
    try:
        with torch.random.fork_rng(devices=[]):
            if looks:
                _look_without_values(spec, allow_import=allow_import, draws=False)
            else:
                build_hollow(spec, allow_import=allow_import, draws=False)
    except (NeedsValues, _Refused) as error:
        return str(error)
    return ""


class _Refused(Exception):
    """A model that is refused without its weights; the message is the finding."""


def _look_without_values(spec: Spec, *, allow_import: bool, draws: bool = True) -> Looked:
    """`draws` as of `build_hollow`. Raises NeedsValues or _Refused."""
    module, weights = build_hollow(spec, allow_import=allow_import, draws=draws)

    def fault(error: BaseException) -> Fault:
        return Fault(
            place="model", finding=said(error), remedy=("Build the model with its weights.")
        )

    try:
        looked_at = LookedWeights(weights) if isinstance(weights, DrawnWeights) else weights
        with boundary(fault), repeated_values(module, looked_at):
            looked = look_at(module, spec)
    except PtrainError as error:
        raise _Refused(" ".join(_finding(error).split())) from error
    return replace(looked, weights=weights)


def _finding(error: PtrainError) -> str:
    """Return what an error finds, without its place and remedy: it is no fault of the spec here."""
    faults = error.faults if isinstance(error, SpecError) else ()
    return "; ".join(fault.finding for fault in faults) or str(error)
