"""Run a step of a program as the training loop does, without journal, checkpoints and signals, and
record it from outside: the outputs of its modules, their gradients, and every parameter's gradient
as the optimizer receives it.

While layers with experts or latent features run, a rank of tp has only an addend of some values.
The sum follows after these layers, once; until then the values differ from one device's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, TypeAlias

import torch
from torch import nn

from ptrain.axes.data.run.target import Named
from ptrain.cost import Phase
from ptrain.data.sampler import SampleSource
from ptrain.facts.model import prefixes
from ptrain.facts.stages import is_within
from ptrain.interpreter.program import Program
from ptrain.models.moe import MoE
from ptrain.models.watch import first_real
from ptrain.optimizers.build import tensor_of
from ptrain.spec.role import Role, Roles, fits
from ptrain.spec.spec import Spec
from ptrain.train.exchange import Exchange
from ptrain.train.loop import local_batch, seed_dropout
from ptrain.train.schedule import learning_rate
from ptrain.verification.parts import whole
from ptrain.verification.samples import TokensOfRank
from ptrain.verification.updates.repeat import UpdateRecorder, wholes

Key: TypeAlias = tuple[str, int]  # a module's path and a micro-batch


@dataclass(slots=True)
class Outputs:
    """Of modules by path and micro-batch, in the order in which they came. What a module returns
    beside its first floating tensor is not kept."""

    forward: dict[Key, torch.Tensor] = field(default_factory=dict)
    backward: dict[Key, torch.Tensor] = field(default_factory=dict)

    def keep(self, path: str, micro_batch: int, output: Any) -> None:
        """Keep the first output that came: a block that is computed again comes a second time."""
        key = path, micro_batch
        first = first_real(output)
        if first is None or key in self.forward:
            return
        self.forward[key] = first.detach().clone()
        if first.requires_grad:
            first.register_hook(partial(self._keep_gradient, key))

    def _keep_gradient(self, key: Key, gradient: torch.Tensor) -> None:
        self.backward[key] = gradient.detach().clone()


Patterns = tuple[str, ...]


def gives_addend(roles: Roles, module: str) -> bool:
    """Return whether the ranks' outputs of a module add up to one device's."""
    return any(fits(pattern, module) for pattern in _giving(roles))


def gets_addend(roles: Roles, module: str) -> bool:
    """Return whether the ranks' gradients of a module's output add up to one device's."""
    return any(fits(pattern, name) for pattern in _getting(roles) for name in prefixes(module))


@lru_cache(maxsize=16)
def _giving(roles: Roles) -> Patterns:
    """Return the modules whose inputs are cut, and those around them but the one that sums."""
    sums = tuple(pattern for pattern, role in roles if role is Role.EXPERTS)
    rows = (pattern for pattern, role in roles if role is Role.INNER_ROW)
    around = (name for row in rows for name in prefixes(row) if is_within(name, sums))
    return tuple(name for name in dict.fromkeys(around) if name not in sums)


@lru_cache(maxsize=16)
def _getting(roles: Roles) -> Patterns:
    """Return the modules that weigh a rank's addends, and those whose outputs all heads share, of
    which a rank has its own."""
    sums = tuple(pattern for pattern, role in roles if role is Role.EXPERTS)
    return tuple(
        name
        for name, role in roles
        if role is Role.LATENT or (role is Role.SHARED and is_within(name, sums))
    )


@contextmanager
def watched(
    named: Iterator[tuple[str, nn.Module]], outputs: Outputs, now: Callable[[], int | None]
) -> Iterator[None]:
    """Keeps what these modules return while `now()` is the number of a micro-batch. A module that
    hands on what it is given (Identity) is none."""
    with ExitStack() as hooks:
        for path, module in named:
            if isinstance(module, nn.Identity):
                continue

            def after(_: nn.Module, __: Any, output: Any, path: str = path) -> None:
                micro_batch = now()
                if micro_batch is not None:
                    outputs.keep(path, micro_batch, output)

            handle = module.register_forward_hook(after)
            hooks.callback(handle.remove)
        yield


class Capture:
    """One step of a program; `with Capture(program, {0}) as capture:` around it. Outputs are kept
    of these micro-batches.

    `updates` are what optimizers were given and left, by the number of a leaf. The gradients by
    name need collectives (`gradients()`), which all ranks call."""

    def __init__(self, program: Program, micro_batches: Collection[int]) -> None:
        self.program = program
        self.micro_batches = micro_batches
        self.outputs = Outputs()
        self._leaves = [(target, tensor_of(leaf)) for target, leaf in program.update.leaves()]
        leaves = {str(index): leaf for index, (_, leaf) in enumerate(self._leaves)}
        self.updates = UpdateRecorder(wholes(leaves))
        self._used: Named = {}  # parameters, as the first pass has them
        self._reduced: set[int] = set()  # which of the leaves there was a gradient for
        self.omitted: set[str] = set()  # parameters with a gradient that no optimizer takes
        self._now: int | None = None
        self._stack = ExitStack()

    def phase(self, phase: Phase, micro_batch: int) -> None:
        """Note where the program has come to: what runs again in backward is not kept."""
        is_kept = phase is Phase.FORWARD and micro_batch in self.micro_batches
        self._now = micro_batch if is_kept else None

    def __enter__(self) -> Capture:
        for observers in (self.program.observers, self.program.gradient_observers):
            observers.append(self)
            self._stack.callback(observers.remove, self)
        self._stack.enter_context(self._watched())
        for path, module in paths(self.program) if self.micro_batches else ():
            hook = module.register_forward_pre_hook(partial(self._before, path))
            self._stack.callback(hook.remove)
        self._stack.enter_context(self.updates)
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def _watched(self) -> AbstractContextManager[None]:
        return watched(paths(self.program), self.outputs, lambda: self._now)

    def reduced(self) -> None:
        """The gradients are where the optimizer is to find them."""
        for index, (target, _) in enumerate(self._leaves):
            if target.gradient is not None:
                self._reduced.add(index)

    def clipped(self, norm: torch.Tensor | None) -> None:
        """They are compared without it."""

    def _before(self, path: str, module: nn.Module, _: object) -> None:
        """What a module is about to compute with, gathered if it has to be."""
        for name, parameter in module._parameters.items() if self._now is not None else ():
            if parameter is not None:
                self._used.setdefault(f"{path}.{name}", parameter.detach().clone())

    @property
    def rates(self) -> set[float]:
        """The learning rates that optimizers used."""
        return self.updates.rates

    @property
    def used(self) -> Named:
        """The parameters, as the first pass has them, in the model's order. All ranks ask for
        it."""
        return self.program.order.canonical(self._used)

    def beside(self, expected: Outputs) -> Outputs:
        """Return what another device's modules give, as ranks hold what they give; nothing of what
        a rank has an addend of, or the rows of other ranks' tokens in, nor, where it has slices of
        the tokens, of what lies by expert."""
        program, tensor, experts = self.program, self.program.plan.tensor, self.program.plan.experts
        own, roles = TokensOfRank(program.spec, program.world.rank), tensor.roles if tensor else ()
        routes_slices = program.plan.context or (experts and experts.folded)
        apart = tuple(_of_rows(program)) if routes_slices else ()

        def held(
            outputs: dict[Key, torch.Tensor], is_addend: Callable[[Roles, str], bool]
        ) -> dict[Key, torch.Tensor]:
            return {
                (path, k): as_held(program, path, whole, own)
                for (path, k), whole in outputs.items()
                if not is_addend(roles, path)
                and not (experts and experts.is_inside(path))
                and not is_within(path, apart)
            }

        return Outputs(
            forward=held(expected.forward, gives_addend),
            backward=held(expected.backward, gets_addend),
        )

    def gradients(self, exchange: Exchange, clipped: float = 1.0) -> Named:
        """Return gradients by canonical name, full tensors or DTensors: zeros of what this rank's
        optimizer was given none of where others were; none of what nobody updates, or some rank's
        optimizer has left although there was one. They are without the factor by which this rank
        `clipped` them. All ranks call it."""
        given = {
            int(index): gradient
            for index, gradient in self.updates.gradients.items()
            if index in self.updates.updated
        }
        lacking = [index for index in range(len(self._leaves)) if index not in given]
        left = [index for index in lacking if index in self._reduced]
        stage = self.program.pieces[0].index  # the same where other ranks have the same layers
        everyone = exchange.gather([stage, lacking, left])
        alike = [(absent, its) for place, absent, its in everyone if place == stage]
        frozen = set(lacking).intersection(*(absent for absent, _ in alike))
        omitted = {index for _, its in alike for index in its}
        gradients: Named = {}
        for index, (target, leaf) in enumerate(self._leaves):
            if index in omitted:
                zeros = torch.zeros_like(target.value())
                self.omitted |= self.program.canonical(target.named(zeros)).keys()
            if index in frozen | omitted:
                continue
            if index in given:  # a leaf may be empty but for its update
                taken = self.updates.record.before.get(str(index))
                shape = leaf.shape if taken is None else taken.shape
                gradient = given[index].to(leaf.device).view(shape) / clipped
            else:
                gradient = torch.zeros_like(target.value())
            gradients.update(self.program.canonical(target.named(gradient)))
        return gradients

    def unclipped(self, exchange: Exchange, norm: float | None) -> dict[str, torch.Tensor]:
        """Return whole gradients by name, on the host, as they were before clipping by this norm.
        All ranks call it."""
        gradients = whole(self.gradients(exchange), exchange)
        if (factor := clipped_by(self.program.spec, norm)) == 1.0:
            return gradients
        return {name: gradient.double() / factor for name, gradient in gradients.items()}


def clipped_by(spec: Spec, norm: float | None) -> float:
    """Return what clipping multiplies gradients by (torch's clip_grad_norm_), if a program tells
    the true norm."""
    clip = spec.optimizer.clip
    if clip is None or norm is None or not math.isfinite(norm):
        return 1.0
    return min(1.0, clip / (norm + 1e-6))


def as_held(program: Program, path: str, whole: torch.Tensor, tokens: TokensOfRank) -> torch.Tensor:
    """Return what another device's module gives, of these tokens, with features in the order of the
    ranks."""
    return program.order.held_features(path, tokens.of_output(whole))


def _of_rows(program: Program) -> Iterator[str]:
    """Yield the modules whose outputs have samples and tokens in one dimension, the places of
    experts, or a loss: which of those of all tokens a slice's are, no shape tells."""
    for path, module in paths(program):
        if isinstance(module, MoE):
            yield from (f"{path}.{name}" for name in ("router", "experts"))


def modules(program: Program) -> list[nn.Module]:
    """The model, or this rank's stages of it, in which all names are the model's."""
    return [piece.module for piece in program.pieces]


def paths(program: Program) -> Iterator[tuple[str, nn.Module]]:
    """The modules that a rank runs; a stage is itself no module of the model."""
    for piece in program.pieces:
        for path, module in piece.module.named_modules():
            if path or piece.is_whole:
                yield path, module


def drive(program: Program, source: SampleSource, step: int) -> tuple[float, float | None]:
    """One update. Returns this rank's share of the loss, and the norm of the gradients (None where
    the spec does not clip)."""
    rate = learning_rate(program.spec.optimizer, step)
    seed_dropout(program, step)
    share = program.forward_backward(local_batch(program, source, step), rate)
    loss = float(share)
    norm = program.step(rate)
    return loss, None if norm is None else float(norm)


def drive_and_add(
    program: Program, source: SampleSource, step: int, exchange: Exchange
) -> tuple[float, float | None]:
    """The same, with the global mean loss, on all ranks alike."""
    share, norm = drive(program, source, step)
    return exchange.add([share])[0], norm
