"""Hooks into a running program: its batches, passes, reductions and updates.

All hooks are set on the sabotaged instance, so that no state remains."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from itertools import chain, count
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ptrain.axes.data.run.flat import FlatWrap
from ptrain.axes.data.run.target import NamedTarget, ParameterTarget
from ptrain.axes.data.units import UnitRuntime
from ptrain.data.sampler import LocalBatch
from ptrain.interpreter.program import Program
from ptrain.spec.placement import Axis

FAULTY_STEP = 1  # what happens once happens in the second step
FAULTY_RANK = 1


def is_faulty(program: Program) -> bool:
    return program.world.rank == FAULTY_RANK


def change_batches(program: Program, change: Callable[[int, LocalBatch], LocalBatch]) -> None:
    """Replace each step's batch by `change(step, batch)`."""
    run, steps = program.forward_backward, count()

    def forward_backward(batch: LocalBatch, lr: float | None = None) -> torch.Tensor:
        return run(change(next(steps), batch), lr)

    program.forward_backward = forward_backward


def before_forward(program: Program, act: Callable[[int], None]) -> None:
    """Call `act(step)` before every step's passes."""

    def change(step: int, batch: LocalBatch) -> LocalBatch:
        act(step)
        return batch

    change_batches(program, change)


def after_reduction(program: Program, act: Callable[[int], None]) -> None:
    """Call `act(step)` after the reduction of gradients, before clipping."""
    reduce_gradients, steps = program.wrapped.reduce_gradients, count()

    def reduced() -> None:
        reduce_gradients()
        act(next(steps))

    program.wrapped.reduce_gradients = reduced


def around_update(
    program: Program, before: Callable[[int], Any], after: Callable[[int, Any], None]
) -> None:
    """Call `after(step, before(step))` around every `program.step`."""
    run, steps = program.step, count()

    def step(lr: float) -> torch.Tensor | None:
        number = next(steps)
        kept = before(number)
        norm = run(lr)
        with torch.no_grad():
            after(number, kept)
        return norm

    program.step = step


def after_update(program: Program, act: Callable[[int], None]) -> None:
    """Call `act(step)` after each step."""
    around_update(program, lambda _: None, lambda step, _: act(step))


def after_update_once(program: Program, act: Callable[[], None], step: int = FAULTY_STEP) -> None:
    """Call the function after one step."""
    after_update(program, lambda number: act() if number == step else None)


def targets(program: Program) -> Iterator[NamedTarget]:
    return chain.from_iterable(program.wrapped.targets())


def tensor_target(program: Program, name: str) -> ParameterTarget:
    """Return the update target of a parameter that stays in its module."""
    for target in targets(program):
        if isinstance(target, ParameterTarget) and target.name == name:
            return target
    raise AssertionError(f"no target {name}")


def local_parameter(program: Program, name: str) -> torch.Tensor:
    """Return the rank's shard of a parameter as it is stored."""
    return tensor_target(program, name).value()


def units(program: Program) -> list[UnitRuntime]:
    """Return the flat units of a program."""
    wraps = [piece.wrapped for piece in program.pieces]
    return [unit for wrap in wraps if isinstance(wrap, FlatWrap) for unit in wrap.units.trained]


def unit(program: Program, module: str) -> UnitRuntime:
    """Return the flat unit of a module."""
    for found in units(program):
        if found.state.members.names[0].startswith(f"{module}."):
            return found
    raise AssertionError(f"no unit {module}")


def modules(program: Program, pattern: str) -> list[nn.Module]:
    """Return the modules by canonical path."""
    found = [
        module
        for name, module in program.model.named_modules()
        if re.fullmatch(pattern, re.sub(r"^module\.", "", name))
    ]
    assert found, f"no module {pattern}"
    return found


def replicated_gradients(program: Program, pattern: str) -> list[torch.Tensor]:
    """Return local gradients of parameters that stay in their modules, by name."""
    found = [
        target.gradient
        for target in targets(program)
        if isinstance(target, ParameterTarget) and re.search(pattern, target.name)
    ]
    assert found, f"no gradient {pattern}"
    return [gradient for gradient in found if gradient is not None]


def remove_hooks(module: nn.Module, owner: str) -> int:
    """Remove the forward hooks that `owner` (a class) has set on a module, and return their
    number."""
    removed = 0
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for key, hook in list(hooks.items()):
            if getattr(hook, "__qualname__", "").startswith(f"{owner}."):
                del hooks[key]
                removed += 1
    return removed


def owner_of_hook(module: nn.Module, kind: type) -> Any:
    """Return the instance of `kind` that a module's forward hook closes over or is a method of."""
    for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
        cells = getattr(hook, "__closure__", None) or ()
        owners = [getattr(hook, "__self__", None), *(cell.cell_contents for cell in cells)]
        for owner in owners:
            if isinstance(owner, kind):
                return owner
    raise AssertionError(f"no hook of {kind.__name__}")


def flip_bit(tensor: torch.Tensor, bit: int, index: int = 0) -> None:
    """Flip one bit of one element, counted from the lowest; negative from the highest (-1: the
    sign)."""
    flat = tensor.detach().view(-1)[index : index + 1]
    as_integer = flat.view(_INTEGERS[flat.element_size()])
    width = 8 * flat.element_size()
    as_integer.bitwise_xor_(_mask(bit % width, width))


_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def _mask(bit: int, width: int) -> int:
    return 1 << bit if bit < width - 1 else -(1 << bit)


def next_ranks_value(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the tensor of the next rank of a group."""
    parts = [torch.empty_like(tensor) for _ in range(group.size())]
    dist.all_gather(parts, tensor.contiguous(), group=group)
    return parts[(group.rank() + 1) % group.size()]


def data_group(program: Program) -> dist.ProcessGroup:
    axes = [axis for axis in (Axis.DP_REPLICATE, Axis.DP_SHARD) if axis in program.mesh.axes]
    return program.mesh.group(axes)


def stored_tensors(program: Program) -> list[torch.Tensor]:
    """Return this rank's parameters and optimizer state."""
    wanted = ("parameters", "optimizer")
    return [tensor.detach() for state, tensor in program.storages() if state in wanted]
