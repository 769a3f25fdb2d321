"""Compilation of a model's blocks, and of its loss, with torch.compile.

Equal blocks share one program, whose inputs are the parameters. Only a block's `forward` is
compiled, so hooks of wrappers (DDP, fully_shard, flat units) run outside of the program. Without
gradients, as in an evaluation, blocks run eagerly, because a second program would have to be
compiled for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ptrain.errors import input_error
from ptrain.internals.compiled import compile_whole, is_compiling, silent_programs
from ptrain.internals.functional_collectives import AsyncCollectiveTensor
from ptrain.models.cross_entropy import fusible_loss_sum
from ptrain.models.ledger import IN_PROGRAMS
from ptrain.models.modes import drops_out
from ptrain.spec.dials import Compiled

BACKEND = "inductor"


def silent_blocks(compiled: Compiled) -> AbstractContextManager[None]:
    """Temporarily compile blocks to programs that compute nothing; see `silent_programs`."""
    return nullcontext() if compiled is Compiled.NONE else silent_programs()


def compile_blocks(module: nn.Module, names: Iterable[str]) -> None:
    """Compile the named blocks in place.

    Args:
        module: A model or the part of a pipeline stage.
        names: The paths of blocks; paths that the module lacks, and blocks without parameters, are
            skipped.
    """
    known = dict(module.named_modules())
    for name in names:
        block = known.get(name)
        if block is not None and next(block.parameters(), None) is not None:
            block.forward = CompiledForward(block)
            IN_PROGRAMS.update(set(block.modules()) - {block})


LossProgram = Callable[[Tensor, Tensor], Tensor]  # of hidden states and targets


class ReadThrough:
    """Hooks that replace a module's parameters by `through(parameter)` while its forward runs.

    The parameters stay registered, so optimizers and wrappers keep them.
    """

    def __init__(self, module: nn.Module, through: Callable[[Tensor], Any]) -> None:
        self.names = [name for name, _ in module.named_parameters(recurse=False)]
        self._through = through
        self._hooks = (
            module.register_forward_pre_hook(self._enter),
            module.register_forward_hook(self._leave, always_call=True),
        )

    def tensors(self, module: nn.Module) -> list[Tensor]:
        """Return the replaced parameters, in the order of `names`."""
        return [self._through(module.get_parameter(name)) for name in self.names]

    def remove(self) -> None:
        """Remove the hooks; the caller then passes `tensors` to the module itself."""
        for hook in self._hooks:
            hook.remove()

    def _enter(self, module: nn.Module, _: object) -> None:
        # Attribute lookup finds the instance's __dict__ before nn.Module.__getattr__ searches
        # _parameters.
        module.__dict__.update(zip(self.names, self.tensors(module), strict=True))

    def _leave(self, module: nn.Module, *_: object) -> None:
        for name in self.names:
            module.__dict__.pop(name, None)


class CompiledForward:
    """A block's forward pass, compiled.

    Tensors of `ReadThrough` become inputs of the program: Dynamo does not see an attribute that
    shadows a parameter, and the collectives of these functions in backward stay outside of the
    program.
    """

    def __init__(self, block: nn.Module) -> None:
        self._forward = block.forward
        self._readers = [*_readers(block)]
        for _, reader in self._readers:
            reader.remove()
        self._program = compile_whole(self._run_in_program, BACKEND, draws=drops_out(block))

    def __call__(self, x: Tensor, *given: Any) -> Any:
        read = [reader.tensors(module) for module, reader in self._readers]
        if not torch.is_grad_enabled():
            return self._run(read, x, *given)
        if isinstance(x, AsyncCollectiveTensor):
            x = _Awaited.apply(x)
        return self._program(read, x, *given)

    def _run_in_program(self, read: list[list[Tensor]], x: Tensor, *given: Any) -> Any:
        """Run the block inside the program.

        Raises:
            SpecError: torch runs the function eagerly because compilation is disabled.
        """
        _require_program("a block")
        return self._run(read, x, *given)

    def _run(self, read: list[list[Tensor]], x: Tensor, *given: Any) -> Any:
        """Run the block with these tensors in the place of parameters."""
        held = []
        for (module, reader), tensors in zip(self._readers, read, strict=True):
            for name, tensor in zip(reader.names, tensors, strict=True):
                held.append((module, name, module._parameters[name]))
                # Dynamo reads parameters from this dictionary. Assigned here, the tensors become
                # inputs of the program.
                module._parameters[name] = tensor
        output = self._forward(x, *given)
        for module, name, parameter in held:
            module._parameters[name] = parameter
        return output


def compile_loss(logits_of: Callable[[Tensor], Tensor], padding: int) -> LossProgram:
    """Compile the logits and their summed cross entropy, as one program.

    The program needs one buffer of the logits in their dtype. Backward overwrites it with their
    gradient.

    Args:
        logits_of: Returns the logits [B, T, V] of hidden states; its parameters become inputs.
        padding: Number of last logits that belong to no token.

    Returns:
        The function of hidden states and targets, whose first call compiles it.
    """

    def compute_loss(x_BTC: Tensor, targets_BT: Tensor) -> Tensor:
        _require_program("the loss")
        return fusible_loss_sum(logits_of(x_BTC), targets_BT, padding)

    return compile_whole(compute_loss, BACKEND, draws=False)


def _require_program(part: str) -> None:
    """Raise SpecError if torch runs the caller eagerly because compilation is disabled."""
    if not is_compiling():
        raise input_error(
            "compile",
            f"torch ran {part} operator by operator in place of its compiled program",
            "Unset TORCH_COMPILE_DISABLE and TORCHDYNAMO_DISABLE, or use `compile=none`.",
        )


def _readers(block: nn.Module) -> Iterator[tuple[nn.Module, ReadThrough]]:
    """Yield the modules of a block that have `ReadThrough` hooks, with these."""
    for module in block.modules():
        for hook in module._forward_pre_hooks.values():
            if isinstance(reader := getattr(hook, "__self__", None), ReadThrough):
                yield module, reader


class _Awaited(torch.autograd.Function):
    """The wait for an asynchronous collective, with a gradient.

    torch 2.13 computes no gradient for an input of a compiled program that is still wrapped as an
    AsyncCollectiveTensor, because it is a view whose base needs none.
    """

    @staticmethod
    def forward(ctx: Any, x: AsyncCollectiveTensor) -> Tensor:
        arrived: Tensor = x.trigger_wait()
        return arrived

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient
