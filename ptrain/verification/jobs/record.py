"""Record one step of a loop through hooks, and compare the record with the reference's.

A record has the model's inputs, the gradient of each parameter as the optimizer receives it, and
the number of optimizer steps. `ModelState` restores the state before a step, so that it can run
again. Each rank compares its shards with the same elements of the reference's full tensors.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Self, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from ptrain.internals.autograd import is_in_backward
from ptrain.models.ledger import first_real, is_real, local_tensor
from ptrain.report.copies import Replica, find_differing_replicas
from ptrain.report.finding import DifferenceKind, Mismatch, Moment, Subject
from ptrain.verification.compare import Differences, ParameterMove
from ptrain.verification.jobs.job import Tolerance
from ptrain.verification.jobs.shards import ParameterShard
from ptrain.verification.parts import (
    QUIET,
    Magnitude,
    canonical_modules,
    difference,
    local_cpu,
    mean_size,
    norm,
    zero_shared_infinities,
)
from ptrain.verification.updates.repeat import UpdateRecorder


@dataclass(frozen=True, slots=True)
class ModelState:
    """Copies of a model's parameters, buffers and gradients.

    Buffers are kept by module and name, because a forward pass may assign another tensor.
    """

    tensors: tuple[tuple[Tensor, Tensor], ...]
    buffers: tuple[tuple[nn.Module, str, Tensor], ...]
    gradients: tuple[tuple[Tensor, Tensor | None], ...]

    @classmethod
    def copy_of(cls, model: nn.Module) -> ModelState:
        """Return copies of the current state of a model."""
        parameters = list(model.parameters())
        return cls(
            tuple((tensor, local_cpu(tensor).clone()) for tensor in parameters),
            tuple(
                (module, name, local_cpu(buffer).clone())
                for module in model.modules()
                for name, buffer in module.named_buffers(recurse=False)
            ),
            tuple(
                (parameter, None if parameter.grad is None else parameter.grad.detach().clone())
                for parameter in parameters
            ),
        )

    def gradient_rows(self, holds: Mapping[str, ParameterShard]) -> dict[str, Tensor]:
        """Return the copied gradients that are not None, flattened, by name."""
        known = {id(parameter): gradient for parameter, gradient in self.gradients}
        rows = {name: known.get(id(shard.parameter)) for name, shard in holds.items()}
        return {name: local_cpu(row).flatten() for name, row in rows.items() if row is not None}

    @torch.no_grad()
    def restore(self, *, gradients: bool = True) -> None:
        """Restore parameters and buffers, and with `gradients` the gradients too.

        Without `gradients`, the current ones stay.
        """
        for tensor, copy in self.tensors:
            local_tensor(tensor.detach()).copy_(copy)
        for module, name, copy in self.buffers:
            buffer = module.get_buffer(name)
            # In place if possible, because other objects may refer to the buffer.
            if buffer.shape == copy.shape:
                local_tensor(buffer.detach()).copy_(copy)
            else:
                setattr(module, name, copy.to(buffer.device))
        if not gradients:
            return
        for parameter, gradient in self.gradients:
            parameter.grad = None if gradient is None else gradient.clone()


def cuda_devices(model: nn.Module) -> list[int]:
    """Return the sorted indices of the GPUs that hold tensors of a model."""
    tensors = (*model.parameters(), *model.buffers())
    return sorted({tensor.get_device() for tensor in tensors if tensor.is_cuda})


@contextmanager
def reseed(model: nn.Module) -> Iterator[None]:
    """Temporarily seed torch's generators with 0, and restore their states on exit."""
    with torch.random.fork_rng(devices=cuda_devices(model)):
        torch.manual_seed(0)
        yield


@dataclass(slots=True)
class ForwardCall:
    """One forward pass of the model with gradients: a micro-batch.

    Attributes:
        args: Copies of the positional arguments.
        kwargs: Copies of the keyword arguments.
        autocast: The dtype of autocast, or None if it is disabled.
        upstream: Gradients of the loss with respect to the outputs, by leaf index of the output
            tree.
        output: A copy of the first floating tensor that was returned.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    autocast: torch.dtype | None
    upstream: dict[int, Tensor] = field(default_factory=dict)
    output: Tensor | None = None


class StepRecorder(UpdateRecorder):
    """The record of a step's update, forward passes and parameters in use.

    Args:
        model: The model, whose forward passes are recorded.
        holds: This rank's shards of its parameters, by name.

    Attributes:
        clip: The factor by which `gradients` are multiplied before the update.
        omitted: Parameters with a gradient that no optimizer took.
        calls: The forward passes of the model.
        in_use: Values of the parameters in the first forward pass.

    Use it as a context: `with StepRecorder(model, holds) as seen:`.
    """

    def __init__(self, model: nn.Module, holds: Mapping[str, ParameterShard]) -> None:
        super().__init__(holds)
        self.model = model
        self.clip = 1.0  # factor on `gradients` before the update
        self.omitted: set[str] = set()  # have a gradient that no optimizer took
        self.calls: list[ForwardCall] = []
        self.in_use: dict[str, Tensor] = {}

    def __enter__(self) -> Self:
        model = dict(canonical_modules(self.model))[""]
        begins = model.register_forward_pre_hook(
            self._before_forward, prepend=True, with_kwargs=True
        )
        self.callback(begins.remove)
        self.callback(model.register_forward_hook(self._after_forward).remove)
        return super().__enter__()

    @property
    def autocast(self) -> str:
        """The dtype of autocast in the first forward pass, or "the module's dtype"."""
        dtype = self.calls[0].autocast if self.calls else None
        return str(dtype).removeprefix("torch.") if dtype else "the module's dtype"

    def _before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Record the arguments of a forward pass, and the parameters in use if it is the first."""
        if is_recorded_forward():
            leaves = tree_leaves((args, kwargs))
            device = next((its.device.type for its in leaves if isinstance(its, Tensor)), "cpu")
            autocast = torch.is_autocast_enabled(device)
            dtype = torch.get_autocast_dtype(device) if autocast else None
            if not self.calls:
                self.in_use = {
                    name: shard.value().clone()
                    for name, shard in self.holds.items()
                    if shard.flat_index is None  # FSDP1 has all-gathered its flat parameter
                }
            kept_args, kept_kwargs = tree_map_only(
                Tensor, lambda its: its.detach().clone(), (args, kwargs)
            )
            self.calls.append(ForwardCall(kept_args, kept_kwargs, dtype))

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Return copies of the outputs that keep their gradient.

        The hook on a copy sees only the gradient of later uses of an output. A model that computes
        its loss internally uses the original. Copies also avoid FSDP2's warning about views.
        """
        if not (is_recorded_forward() and self.calls):
            return None
        call = self.calls[-1]
        first = first_real(output)
        if first is not None and not isinstance(first, DTensor):
            call.output = first.detach().clone()
        places = {
            id(leaf): place
            for place, leaf in enumerate(tree_leaves(output))
            # the gradient of a DTensor could not be passed to the single-device model
            if is_real(leaf) and leaf.requires_grad and not isinstance(leaf, DTensor)
        }

        def seen(leaf: Any) -> Any:
            if id(leaf) not in places:
                return leaf
            copy = leaf.clone()
            copy.register_hook(partial(_keep_upstream, call, places[id(leaf)]))
            return copy

        return tree_map(seen, output)


def _keep_upstream(call: ForwardCall, place: int, gradient: Tensor | None) -> None:
    # DDP with find_unused_parameters hands None back to an output that the loss does not use
    if gradient is not None:
        call.upstream[place] = gradient.detach().clone()


def is_recorded_forward() -> bool:
    """Return True in a forward pass that records gradients and is no recomputation."""
    return torch.is_grad_enabled() and not is_in_backward()


_SURE = 10  # times the gradient tolerance: below this share of its mean size, noise may decide
_ROUNDINGS = 16  # roundings of a parameter in its dtype by which an update may differ


def compare_start(
    differences: Differences,
    wholes: Mapping[str, Tensor],
    names: Iterable[str],
    values: Mapping[str, Tensor],
    holds: Mapping[str, ParameterShard],
    elsewhere: Collection[str] = (),
) -> None:
    """Compare names and values of the parameters before the first step.

    Values must be equal to the bit after the reference's are cast to the loop's dtype.

    Args:
        differences: Takes the mismatches.
        wholes: The reference's full parameters.
        names: Names of the loop's parameters.
        values: This rank's elements of the loop's parameters.
        holds: This rank's shards.
        elsewhere: Parameters that other ranks hold, as of other pipeline stages. This rank may lack
            them.
    """
    for name in wholes:
        if name not in holds and name not in elsewhere:
            differences.add_mismatch(
                Moment.START, Subject.PARAMETERS, name,
                "in the reference, but not in the loop's model", DifferenceKind.MISSING,
            )  # fmt: skip
    for name in names:
        if name not in wholes:
            differences.add_mismatch(
                Moment.START, Subject.PARAMETERS, name,
                "in the loop's model, but not in the reference", DifferenceKind.MISSING,
            )  # fmt: skip
    scale = Magnitude.measure(wholes)
    for name, shard in holds.items():
        value, expected = values[name], shard.select(wholes[name])
        if not torch.equal(value, expected.to(value)):
            size = difference(value, expected, scale.scale_of(wholes[name], expected))
            differences.compare(
                Moment.START, Subject.PARAMETERS, name, difference=size or math.inf, tolerance=0.0
            )


def compare_in_use(
    differences: Differences,
    sides: tuple[StepRecorder, StepRecorder],
    before: tuple[Mapping[str, Tensor], Mapping[str, Tensor]],
    holds: Mapping[str, ParameterShard],
    limit: Tolerance,
) -> None:
    """Compare the parameters of the first forward pass, if they were written since the step began.

    A checkpoint that is loaded within the step writes them. The difference is relative to the
    change by that write.

    Args:
        differences: Receives the differences.
        sides: The recorders of the step, the reference's first.
        before: The parameters at the start of the step by name: the reference's in full, then this
            rank's elements.
        holds: This rank's elements of each parameter.
        limit: The tolerance; `updates` applies.
    """
    reference, run = (side.in_use for side in sides)
    for name, value in run.items():
        if name not in reference:
            continue
        is_old = torch.equal(value, before[1][name])
        if is_old and torch.equal(reference[name], before[0][name]):
            continue
        right, earlier = (holds[name].select(whole) for whole in (reference[name], before[0][name]))
        size = relative_to_move(value, right, norm(right.double() - earlier.double()), limit)
        differences.compare(
            Moment.FORWARD, Subject.PARAMETERS, name, difference=size, tolerance=limit.updates
        )


def relative_to_move(
    own: Tensor, right: Tensor, way: float, limit: Tolerance, roundings: int = _ROUNDINGS
) -> float:
    """Return the difference relative to a parameter's change, or to its rounding.

    The larger of both lengths counts.

    Args:
        own: This rank's elements.
        right: The same elements in the reference.
        way: The 2-norm of the reference's change.
        limit: The tolerance; `updates` scales the rounding.
        roundings: The number of roundings in the dtype of `own` that are allowed.
    """
    rounding = roundings * torch.finfo(own.dtype).eps * norm(right)
    rounding = rounding / limit.updates if limit.updates else 0.0
    return difference(own, right, max(way, rounding))


def compare_gradients(
    differences: Differences,
    sides: tuple[StepRecorder, StepRecorder],
    holds: Mapping[str, ParameterShard],
    limit: Tolerance,
) -> None:
    """Compare gradients as the optimizers receive them. `sides` has the reference first.

    A missing gradient is a mismatch, unless the reference's is zero or rounding noise.

    Args:
        differences: Takes the mismatches.
        sides: The records of the reference and of the loop.
        holds: This rank's shards.
        limit: The tolerances.
    """
    wholes, own = (side.gradients for side in sides)
    expected = {name: gradient for name, gradient in wholes.items() if name in holds}
    scale = Magnitude.measure(expected)
    for name, shard in holds.items():
        gradient = own.get(name)
        whole = expected.get(name)
        if whole is None:
            if gradient is not None and bool(gradient.any()):
                differences.add_mismatch(
                    Moment.GRADIENTS, Subject.GRADIENTS, name,
                    "a gradient that the reference does not have", DifferenceKind.MISSING,
                )  # fmt: skip
            continue
        part = shard.select(whole.view(shard.shape))
        if gradient is None:
            if not scale.is_noise(part):
                differences.add_mismatch(
                    Moment.GRADIENTS, Subject.GRADIENTS, name,
                    "no gradient when the optimizer steps", DifferenceKind.MISSING,
                )  # fmt: skip
            continue
        size = difference(gradient, part, scale.scale_of(whole, part))
        differences.compare(
            Moment.GRADIENTS, Subject.GRADIENTS, name, difference=size, tolerance=limit.gradients
        )


def compare_update(
    differences: Differences,
    name: str,
    course: ParameterMove,
    *,
    is_noise: bool,
    limit: Tolerance,
) -> None:
    """Compare a parameter after the update, relative to its total change or to its rounding.

    Adam turns the sign of a gradient that is noise into a full step. Noisy tensors (`is_noise`),
    and elements outside of `course.sure`, therefore only need to be finite.

    Args:
        differences: Receives the difference and the move.
        name: The parameter's name.
        course: The parameter before and after the step, on both sides.
        is_noise: True if the whole gradient is noise.
        limit: The tolerance; `updates` applies.
    """
    if not course.after.is_floating_point():
        same = torch.equal(course.run_after, course.after.to(course.run_after.device))
        differences.compare(
            Moment.UPDATE, Subject.PARAMETERS, name, difference=0.0 if same else math.inf,
            tolerance=limit.updates,
        )  # fmt: skip
        return
    after, run_after = course.after[course.sure], course.run_after[course.sure]
    moved = norm(after.double() - course.origin[course.sure].double())
    size = 0.0 if is_noise else relative_to_move(run_after, after, moved, limit)
    size = size if bool(torch.isfinite(course.run_after).all()) else math.inf
    if course.is_unchanged and course.has_reference_moved:  # in 16 bits the limit would allow it
        size = max(size, 1.0)
    differences.compare(
        Moment.UPDATE, Subject.PARAMETERS, name, difference=size, tolerance=limit.updates
    )
    differences.moves[name] = course


def significant_elements(
    part: Tensor, gradient: Tensor | None, whole: Tensor, limit: Tolerance
) -> Tensor:
    """Return a mask of the gradient elements that exceed rounding, or are zero on both sides.

    Args:
        part: This rank's shard of the reference's gradient.
        gradient: This rank's gradient. None makes all elements sure.
        whole: The reference's full gradient, whose mean size is the scale.
        limit: The tolerances.
    """
    if gradient is None:
        return torch.ones_like(part, dtype=torch.bool)
    nothing = (part == 0) & (gradient.to(part.device) == 0)
    return (part.abs() > _SURE * limit.gradients * mean_size(whole)) | nothing


def compare_states(
    differences: Differences,
    reference: Mapping[str, Mapping[str, Tensor]],
    run: Mapping[str, Mapping[str, Tensor]],
    holds: Mapping[str, ParameterShard],
    limit: Tolerance,
) -> None:
    """Compare the optimizer state that both sides keep under the same key.

    State that is noise, such as that of a key's bias, which has no gradient, is compared relative
    to the state of the other parameters.

    Args:
        differences: Takes the mismatches.
        reference: The reference's state tensors, by parameter and key.
        run: The loop's, by parameter and key.
        holds: This rank's shards.
        limit: The tolerances.
    """
    scales = _state_scales(reference)
    for name, tensors in run.items():
        for key, state in tensors.items():
            whole = reference.get(name, {}).get(key)
            if whole is None or whole.shape != holds[name].shape:
                continue
            row = holds[name].select_state(state)
            if row is None:
                continue
            part = holds[name].select(whole)
            length = max(scales[key].scale_of(whole, part), QUIET * norm(whole))
            size = difference(row, part, length)
            differences.compare(
                Moment.UPDATE, Subject.OPTIMIZER, f"{name} · {key}", difference=size,
                tolerance=max(limit.updates, 10 * limit.gradients),
            )  # fmt: skip


def _state_scales(states: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Magnitude]:
    """Return the magnitude of each kind of state over all parameters."""
    kinds: dict[str, dict[str, Tensor]] = {}
    for name, tensors in states.items():
        for key, state in tensors.items():
            kinds.setdefault(key, {})[name] = state
    return {key: Magnitude.measure(tensors) for key, tensors in kinds.items()}


Buffers: TypeAlias = Iterator[tuple[str, Tensor, Tensor]]


def shared_buffers(
    reference: nn.Module,
    run: nn.Module | Iterable[tuple[str, nn.Module]],
    part: Callable[[str, Tensor], Tensor] = lambda name, whole: whole,
) -> Buffers:
    """Yield name, reference buffer and loop buffer of the floating buffers that both sides have.

    The tensors share memory with the buffers. Buffers of batch normalization are left out: they
    differ by rank.

    Args:
        reference: The single-device model.
        run: The loop's model, or its modules by path.
        part: Returns this rank's part of a reference buffer.
    """
    wrapped = dict(canonical_modules(run) if isinstance(run, nn.Module) else run)
    for path, module in canonical_modules(reference):
        if isinstance(module, nn.modules.batchnorm._BatchNorm) or path not in wrapped:
            continue
        theirs = dict(wrapped[path].named_buffers(recurse=False))
        for name, buffer in module.named_buffers(recurse=False):
            right, other = part(name, buffer), theirs.get(name)
            if other is not None and right.is_floating_point() and other.shape == right.shape:
                both = local_tensor(right.detach()), local_tensor(other.detach())
                yield (f"{path}.{name}" if path else name), *both


def compare_buffers(
    differences: Differences,
    buffers: Buffers,
    limit: Tolerance,
    moment: Moment = Moment.UPDATE,
) -> None:
    """Compare floating-point buffers.

    Args:
        differences: Receives the differences.
        buffers: Name, reference buffer and loop buffer, with equal shapes.
        limit: The tolerance: `outputs` at the start, otherwise `updates`.
        moment: The moment of the comparison.
    """
    bound = limit.outputs if moment is Moment.START else limit.updates
    for name, *both in buffers:
        own, right = zero_shared_infinities(*reversed([local_cpu(its) for its in both]))
        differences.compare(
            moment, Subject.BUFFERS, name, difference=difference(own, right, norm(right)),
            tolerance=bound,
        )  # fmt: skip


def shard_checksums(
    holds: Mapping[str, ParameterShard], rows: Mapping[str, Tensor]
) -> dict[str, list[str]]:
    """Return checksums of each parameter's element indices and of its values.

    Args:
        holds: This rank's elements of each parameter.
        rows: The values of these elements by name.

    Returns:
        Two checksums by name: of the indices ("" for a replicated parameter), and of the values.
    """
    return {
        name: ["" if holds[name].indices is None else checksum(holds[name].indices), checksum(row)]
        for name, row in rows.items()
    }


def checksum(tensor: Tensor | None) -> str:
    """Return a checksum of a tensor's bytes, or "" for None."""
    if tensor is None:
        return ""
    # The bytes, because numpy has no bfloat16.
    raw = tensor.detach().contiguous().flatten().cpu().view(torch.uint8).numpy()
    return hashlib.blake2b(raw.tobytes(), digest_size=12).hexdigest()


def compare_replicas(
    step: int, everyones: Sequence[Mapping[str, Sequence[str]]]
) -> Iterator[Mismatch]:
    """Yield a mismatch for each parameter part that several ranks hold with different bits."""
    when = Moment.UPDATE, Subject.PARAMETERS
    tables = [
        [Replica(*when, name, part, "", bits) for name, (part, bits) in mine.items()]
        for mine in everyones
    ]
    for mismatch in find_differing_replicas(tables, step):
        yield replace(mismatch, difference=math.inf, told="replicas differ")


def optimizer_states(
    run: StepRecorder, holds: Mapping[str, ParameterShard]
) -> dict[str, dict[str, Tensor]]:
    """Return the tensors of the optimizers' state that are not scalars, by parameter and key."""
    names = {id(shard.parameter): name for name, shard in holds.items()}
    return {
        names[id(parameter)]: {k: v for k, v in state.items() if isinstance(v, Tensor) and v.dim()}
        for optimizer in run.optimizers
        for parameter, state in optimizer.state.items()
        if id(parameter) in names
    }
