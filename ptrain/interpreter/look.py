"""Build a model and inspect it before it is sharded: its facts, its stages and its plan.

A model that is not built in is inspected without its weights. Each parameter repeats a few numbers
of its file: a Hankel matrix, in which every row starts one number later, so that rows differ but
share memory. This is enough to find the operators that use it, and to check that its parts compute
the same as the full parameter. If the model's code does not run with such values, or would be
rejected, the real weights are read or drawn and decide. Writing into overlapping rows is an error.
Matrix products would copy an overlapping operand, so they run some columns at a time.

`ModuleFiller` gives a wrapped module its initial values, which are equal for every placement.
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
from ptrain.models.boundary import convert_exceptions, describe_error
from ptrain.models.drawn import DrawnWeights, InspectionWeights, build_drawn
from ptrain.models.facts import head_of, untraced_facts
from ptrain.models.initialize import (
    InitialValues,
    ModuleWeights,
    build_model,
    cast_module,
    named_tensors,
    read_module_weights,
    reset_buffers,
)
from ptrain.models.ledger import OperatorMode, local_tensor
from ptrain.models.meta import NeedsValuesError, build_on_meta
from ptrain.models.moe import weight_router_losses
from ptrain.models.numerics import TORCH_DTYPES
from ptrain.models.quantized import (
    QuantizedLinear,
    quantize_frozen,
    quantize_rows,
    quantized_linear,
)
from ptrain.models.units import ROOT
from ptrain.models.window import Window, has_overlapping_rows, select_rows
from ptrain.plan.lower import lower
from ptrain.spec.model import ModelShape
from ptrain.spec.spec import Spec
from ptrain.steps.step import Plan
from ptrain.units import ceil_div

_CPU = torch.device("cpu")


def build_module(
    spec: Spec, *, device: torch.device = _CPU, allow_import: bool = False
) -> nn.Module:
    """Build the spec's model in its dtypes.

    Built-in models are on the meta device, all others have real weights on the CPU.

    Args:
        spec: The spec.
        device: The device under a fake mode. Fake tensors take no memory, and a module of them
            cannot be moved later.
        allow_import: Allow the spec to import the user's code.
    """
    if detect_fake_mode() is None:
        device = torch.device("meta") if isinstance(spec.model, ModelShape) else _CPU
    with device:
        module = _build_from_spec(spec, allow_import=allow_import)
    if not isinstance(spec.model, ModelShape):
        read_module_weights(module, spec.model.pretrained)
    module = _cast_and_weigh(module, spec)
    quantize_frozen(module, spec)
    return module


def build_module_on_meta(
    spec: Spec, *, allow_import: bool = False, draws: bool = True
) -> tuple[nn.Module, ModuleWeights | DrawnWeights]:
    """Build a spec's model that is not built in, with its parameters on meta.

    Args:
        spec: The spec. The model starts from the weights in its folder, or from weights that it
            draws.
        allow_import: Allow the spec to import the user's code.
        draws: See `build_drawn`; for a model without a folder.

    Returns:
        The module, and its initial weights.

    Raises:
        NeedsValuesError: It cannot be built without values.
        SpecError: It cannot be built, or the folder does not belong to this model.
    """
    folder = spec.model.pretrained
    build_it = partial(_build_from_spec, spec, allow_import=allow_import)
    with _CPU:
        if folder is None:
            module, drawn = build_drawn(build_it, draws=draws)
            return _cast_and_weigh(module, spec), drawn
        module = build_on_meta(build_it)
    weights = ModuleWeights(module, folder)
    weights.read_into(module, only_buffers=True)
    return _cast_and_weigh(module, spec), weights


def _build_from_spec(spec: Spec, more: int = 0, *, allow_import: bool) -> nn.Module:
    """Build the model with the spec's seed plus `more`."""
    sequence, seed = spec.batch.sequence, spec.train.seed + more
    return build_model(spec.model, sequence=sequence, allow_import=allow_import, seed=seed)


def _cast_and_weigh(module: nn.Module, spec: Spec) -> nn.Module:
    """Cast a module to the spec's dtypes, and weight its routers' losses by 1 / global samples."""
    cast_module(module, TORCH_DTYPES[spec.precision.effective_layout.parameters])
    weight_router_losses(module, 1.0 / spec.batch.global_samples)
    return module


class ModuleFiller:
    """The initial values of a module on meta: this rank's part of every tensor."""

    def __init__(
        self,
        module: nn.Module,
        values: InitialValues,
        device: torch.device,
        copies: Mapping[str, str],
        order: FusedOrder,
    ) -> None:
        """Prepare to fill a module.

        Args:
            module: The module on meta.
            values: Its initial values.
            device: The rank's device.
            copies: Names of tensors that start as copies of other tensors of the model, by name.
            order: The order of features in fused projections.
        """
        self._module, self._values, self._device = module, values, device
        self._copies, self._order = copies, order
        # Read now, because `to_empty` gives every name a separate tensor.
        self._tied = [names for names, _ in named_tensors(module)]

    def fill_all(self) -> None:
        """Fill all parameters and buffers."""
        buffers = self._initialized_buffers()
        self._module.to_empty(device=self._device)
        self._restore_ties_and_buffers(buffers)
        for name, parameter in self._module.named_parameters():
            self._write_window(name, parameter, window_of(parameter), local_tensor(parameter))

    def fill_by_unit(self) -> RowWriter:
        """Fill the buffers, and leave the parameters without memory.

        Returns:
            A function that writes rows of a parameter's initial values to a given tensor.
        """
        buffers = self._initialized_buffers()
        for module in self._module.modules():
            module.to_empty(device=self._device, recurse=False)
            for parameter in module.parameters(recurse=False):
                # Module by module, so that at most one module's parameters have memory at once.
                local_tensor(parameter).untyped_storage().resize_(0)
        self._restore_ties_and_buffers(buffers)
        return self._write_rows

    def _initialized_buffers(self) -> dict[str, torch.Tensor]:
        """Return the buffers that have values already, by all their names."""
        named = self._module.named_buffers(remove_duplicate=False)
        return {name: buffer for name, buffer in named if not buffer.is_meta}

    def _restore_ties_and_buffers(self, buffers: Mapping[str, torch.Tensor]) -> None:
        """Tie parameters again, and restore buffers, after `to_empty` undid both."""
        for first, *others in self._tied:
            for name in others:
                setattr(*self._owner_and_leaf(name), getattr(*self._owner_and_leaf(first)))
        moved = {id(values): values.to(self._device) for values in buffers.values()}
        for name, values in buffers.items():
            owner, leaf = self._owner_and_leaf(name)
            owner._buffers[leaf] = moved[id(values)]
        # Tables that a module computes have no values on meta, so they are not among the restored
        # ones.
        reset_buffers(self._module)

    def _owner_and_leaf(self, name: str) -> tuple[nn.Module, str]:
        """Return the module that owns a tensor, and the tensor's name there."""
        owner, _, leaf = name.rpartition(".")
        return self._module.get_submodule(owner), leaf

    def _write_rows(self, name: str, stored: Parameter, first: int, part: torch.Tensor) -> None:
        """Write the initial values of rows of this rank's part, from `first` on."""
        parameter = whole_parameter(stored)
        self._write_window(
            name, parameter, select_rows(window_of(parameter), first, len(part)), part
        )

    @torch.no_grad()
    def _write_window(
        self, name: str, parameter: nn.Parameter, window: Window, part: torch.Tensor
    ) -> None:
        """Write the initial values of a window of a tensor."""
        name, shape = self._copies.get(name, name), parameter.shape
        linear = quantized_linear(self._module, name)
        for ordered, place in self._order.model_windows(name, shape, window, part):
            if linear is None:
                self._values.write_window(name, shape, ordered, place)
            else:
                self._write_quantized(name, linear, ordered, place)

    def _write_quantized(
        self, name: str, linear: QuantizedLinear, window: Window, part: torch.Tensor
    ) -> None:
        """Write a window of the bytes of a quantized weight. Full rows are read, because the scales
        of a row depend on all of its elements."""
        (rows, columns), shape = window, (linear.out_features, linear.in_features)
        values = torch.empty(rows[1], shape[1], dtype=self._values.dtype, device="cpu")
        self._values.write_window(name, shape, (rows, (0, shape[1])), values)
        assert linear.quantization is not None, "the weight is quantized"
        part.copy_(quantize_rows(values, linear.quantization).narrow(1, *columns))


MOST_COPIED = 2**23  # bytes of a matrix that are multiplied at once, about a CPU's cache


@contextmanager
def repeated_values(
    module: nn.Module, weights: ModuleWeights | InspectionWeights
) -> Iterator[None]:
    """Temporarily give the parameters of a module on meta repeated values, in their dtypes."""
    before = [
        (child, name, parameter)
        for child in module.modules()
        for name, parameter in child._parameters.items()
        if parameter is not None
    ]
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    stand_ins = {
        id(parameter): _repeated_parameter(names[id(parameter)], parameter, weights)
        for _, _, parameter in before
    }
    for child, name, parameter in before:
        child._parameters[name] = stand_ins[id(parameter)]
    try:
        with _ColumnwiseProducts():
            yield
    finally:
        for child, name, parameter in before:
            child._parameters[name] = parameter


def _repeated_parameter(
    name: str, parameter: nn.Parameter, weights: ModuleWeights | InspectionWeights
) -> nn.Parameter:
    """Return a parameter whose rows overlap, with values from the start of its file."""
    shape = parameter.shape
    # With stride 1 in every dimension, the last element is at the sum of the last indices.
    count = 1 + sum(size - 1 for size in shape) if parameter.numel() else 0
    window = _first_window(shape, count)
    read = torch.empty([size for _, size in window], dtype=parameter.dtype)
    weights.read_window(name, shape, window, read, parameter.dtype)
    values = read.flatten()[:count].clone()
    # stride 1 in every dimension: each row starts one number later
    stand_in = nn.Parameter(values.as_strided(shape, (1,) * len(shape)), parameter.requires_grad)
    # attributes that the model's code has set on the parameter
    vars(stand_in).update(vars(parameter))
    return stand_in


def _first_window(shape: Sequence[int], count: int) -> Window:
    """Return a window with at least `count` elements and few more.

    It covers the last dimensions first.
    """
    window: Window = ()
    for size in reversed(shape):
        taken = min(size, count)
        window, count = ((0, taken), *window), ceil_div(count, max(1, taken))
    return window


class _ColumnwiseProducts(OperatorMode):
    """The mode that computes products with overlapping matrices some columns at a time.

    The columns are copied to one buffer: glibc would not reuse freed copies.
    """

    def __init__(self) -> None:
        super().__init__()
        self._owner_and_leaf = torch.empty(MOST_COPIED, dtype=torch.uint8)

    def run_operator(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if function in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            *addends, left, right = args
            columns = MOST_COPIED // max(1, right.itemsize * right.shape[0])
            if has_overlapping_rows(right) and columns:
                product = partial(function, **kwargs)
                outputs = self._products_by_columns(product, addends, left, right.split(columns, 1))
                return torch.cat([*outputs], -1)
        return function(*args, **kwargs)

    def _products_by_columns(
        self,
        product: Callable[..., Tensor],
        addends: Sequence[Tensor],
        left: Tensor,
        parts: Sequence[Tensor],
    ) -> Iterator[Tensor]:
        """Yield the product of `left` with each part of a matrix, plus that part of the addends."""
        first = 0
        for part in parts:
            place = self._owner_and_leaf[: part.nbytes].view(part.dtype).view(part.shape)
            count = part.shape[1]
            added = [x.narrow(-1, first, count) if x.shape[-1] > 1 else x for x in addends]
            yield product(*added, left, place.copy_(part))
            first += count


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectedModel:
    """A model and the results of its inspection.

    Attributes:
        module: The model.
        facts: Its facts.
        stages: Its stages, None without pp.
        plan: Its plan.
        head: Name of the module that makes the logits.
        weights: Initial weights of a model on meta that is not built in.
        whole_because: The reason why it was built with all weights, "" if it was not.
    """

    module: nn.Module
    facts: ModelFacts
    stages: Stages | None
    plan: Plan
    head: str
    weights: ModuleWeights | DrawnWeights | None = None
    whole_because: str = ""


def inspect_module(module: nn.Module, spec: Spec) -> InspectedModel:
    """Inspect a model: facts, stages and plan.

    Raises:
        SpecError: The stages do not compute the model's function, or sharded tokens change its
            results.
    """
    facts = untraced_facts(module, spec)
    stages = stages_of_module(spec, module, facts)
    plan = lower(spec, facts)
    head = head_of(module, spec) if plan.loss else ROOT
    return InspectedModel(module=module, facts=facts, stages=stages, plan=plan, head=head)


def build_and_inspect(
    spec: Spec, device: torch.device, *, allow_import: bool = False
) -> InspectedModel:
    """Build the spec's model and inspect it, without its weights if possible.

    Args:
        spec: The spec.
        device: See `build_module`.
        allow_import: Allow the spec to import the user's code.

    Raises:
        SpecError: See `inspect_module`; or the model cannot be built, or its folder cannot be read.
    """
    because = ""
    if not isinstance(spec.model, ModelShape) and detect_fake_mode() is None:
        try:
            return _inspect_without_values(spec, allow_import=allow_import)
        # Not raised: with real weights the model may be accepted, and its errors are then true.
        except (NeedsValuesError, _RejectedError) as error:
            because = str(error)
    module = build_module(spec, device=device, allow_import=allow_import)
    return replace(inspect_module(module, spec), whole_because=because)


def full_build_reason(spec: Spec, *, allow_import: bool = False, looks: bool = True) -> str:
    """Return the reason why `build_and_inspect` builds all weights, "" if it does not.

    Large tensors are not drawn, and small ones are drawn from other seeds.

    Args:
        spec: The spec.
        allow_import: Allow the spec to import the user's code.
        looks: Inspect the model. Otherwise only the constructor runs, and reasons found by the
            inspection are missed.
    """
    if isinstance(spec.model, ModelShape):
        return ""
    try:
        with torch.random.fork_rng(devices=[]):
            if looks:
                _inspect_without_values(spec, allow_import=allow_import, draws=False)
            else:
                build_module_on_meta(spec, allow_import=allow_import, draws=False)
    except (NeedsValuesError, _RejectedError) as error:
        return str(error)
    return ""


class _RejectedError(Exception):
    """The finding for which a model without its weights was rejected."""


def _inspect_without_values(
    spec: Spec, *, allow_import: bool, draws: bool = True
) -> InspectedModel:
    """Build and inspect a model without its weights.

    Args:
        spec: The spec.
        allow_import: Allow the spec to import the user's code.
        draws: See `build_drawn`.

    Raises:
        NeedsValuesError: It cannot be built without values.
        _RejectedError: The inspection rejects it.
    """
    module, weights = build_module_on_meta(spec, allow_import=allow_import, draws=draws)

    def fault(error: BaseException) -> Fault:
        return Fault(
            place="model",
            finding=describe_error(error),
            remedy=("Build the model with its weights."),
        )

    try:
        looked_at = InspectionWeights(weights) if isinstance(weights, DrawnWeights) else weights
        with convert_exceptions(fault), repeated_values(module, looked_at):
            looked = inspect_module(module, spec)
    except PtrainError as error:
        raise _RejectedError(" ".join(_findings_of(error).split())) from error
    quantize_frozen(module, spec)  # after the inspection, which ran the module with other values
    return replace(looked, weights=weights)


def _findings_of(error: PtrainError) -> str:
    """Return the findings of an error.

    Place and remedy are left out, since the spec is not at fault here.
    """
    faults = error.faults if isinstance(error, SpecError) else ()
    return "; ".join(fault.finding for fault in faults) or str(error)
