"""What a module of one device would give, or its gradient be, if something were otherwise: the
departing micro-batch run again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.hooks import RemovableHandle

from ptrain.models.attention import Core
from ptrain.verification.capture import watched
from ptrain.verification.causes.scene import Investigation
from ptrain.verification.outputs import Outputs
from ptrain.verification.reference import MicroBatch

Heads = tuple[Tensor, Tensor, Tensor]  # queries, keys, values: [samples, heads, tokens, features]


def output_with(scene: Investigation, tensors: Mapping[str, Tensor]) -> Tensor | None:
    """Return the whole output of the departing module, with these in the place of the model's
    parameters and buffers."""
    path, k = scene.first.name, scene.first.index
    outputs, module = Outputs(), scene.reference.module
    for micro_batch in _departing(scene):
        named = iter([(path, module.get_submodule(path))])
        with torch.no_grad(), watched(named, outputs, lambda: k):
            functional_call(module, dict(tensors), (micro_batch.samples.inputs,))
    return outputs.forward.get((path, k))


def gradient_with(
    scene: Investigation, path: str, attend: Callable[[Core, Heads, Tensor | None], Tensor]
) -> Tensor | None:
    """Return the whole gradient of the departing module's output, with another computation in the
    core `path`."""
    first, module, outputs = scene.first, scene.reference.module, Outputs()
    objective, scale = scene.reference.objective, scene.reference.updater.scale
    core = module.get_submodule(path)

    def instead(core: Any, args: tuple[Any, ...], _: Tensor) -> Tensor:
        return attend(core, args[:3], _mask(args))

    with ExitStack() as hooks:
        hooks.callback(core.register_forward_hook(instead).remove)
        named = iter([(first.name, module.get_submodule(first.name))])
        hooks.enter_context(watched(named, outputs, lambda: first.index))
        for micro_batch in _departing(scene):
            loss = micro_batch.loss(objective, module) * scale
            parameters = [tensor for tensor in module.parameters() if tensor.requires_grad]
            torch.autograd.grad(loss, parameters, allow_unused=True)
    return outputs.backward.get((first.name, first.index))


def inputs_of(scene: Investigation, path: str) -> tuple[Heads, Tensor | None]:
    """Return what the core `path` attends with on one device, and its mask."""
    args, _ = call_of(scene, path)
    return args[:3], _mask(args)


def call_of(
    scene: Investigation, path: str, at: tuple[int, int] | None = None
) -> tuple[tuple[Any, ...], Any]:
    """Return what a module of one device is given in the departing micro-batch, at its first call,
    and what it returns; or in that of another share of the batch and another number, `at`."""
    module, calls = scene.reference.module, []

    def keep(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        calls.append((args, output))

    _run(scene, module.get_submodule(path).register_forward_hook(keep), at)
    return calls[0]


def _run(scene: Investigation, watch: RemovableHandle, at: tuple[int, int] | None = None) -> None:
    """Run the departing micro-batch, or that `at` another place, forward on one device, under a
    hook that is removed then."""
    try:
        with torch.no_grad():
            for micro_batch in _departing(scene, at):
                scene.reference.module(micro_batch.samples.inputs)
    finally:
        watch.remove()


def core_of(scene: Investigation) -> str:
    """Return the path of the core that the departing module is, or that stands beside it; "" where
    there is none."""
    module, path = scene.reference.module, scene.first.name
    if isinstance(module.get_submodule(path), Core):
        return path
    parent = path.rpartition(".")[0]
    cores = (
        f"{parent}.{name}"
        for name, child in module.get_submodule(parent).named_children()
        if isinstance(child, Core)
    )
    return next(cores, "")


def _departing(scene: Investigation, at: tuple[int, int] | None = None) -> Iterator[MicroBatch]:
    """Yield the one in which this rank departs, or the one `at` a share of the batch and number."""
    place, number = at or (None, scene.first.index)
    yield from (its for its in scene.own_micro_batches(place) if its.k == number)


def _mask(args: tuple[Any, ...]) -> Tensor | None:
    return args[3] if len(args) > 3 else None
