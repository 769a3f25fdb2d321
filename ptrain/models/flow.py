"""What a forward pass goes through: the modules in front of a model's layers, the layers one by
one, and the modules behind them; and by autograd's graph, whether anything but hidden states goes
from layer to layer.

Each layer is given its hidden states as a leaf of a graph of its own: what was computed between two
layers must then lead back to that leaf and to the parameters of the layer in between, and to
nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_iter, tree_map

from ptrain.facts.stages import is_within
from ptrain.models.arguments import is_real
from ptrain.models.generators import OutsideDraws
from ptrain.models.graph import uses_of_leaves

_DRAWS = "the forward pass draws random numbers of its own between its layers"


@dataclass(slots=True)
class Flow:
    """A forward pass. `visited`: the layers in their order; `shapes` of what they are given;
    `returns`: how many things each gave in a tuple, 0 for a tensor; `front` and `behind`: modules
    that were called there, outermost first; `used_in_front` and `used_behind`: names of parameters
    that the first layer's hidden states, or the output, depend on. `is_written`: the model writes
    into what a module in front gave, or a layer. `draws`: random numbers are drawn outside of the
    layers, before the last; `draws_itself`: in front of them by no module that is called there.
    `faults`: what else goes from layer to layer."""

    visited: list[str] = field(default_factory=list)
    shapes: list[tuple[int, ...]] = field(default_factory=list)
    returns: list[int] = field(default_factory=list)
    front: list[str] = field(default_factory=list)
    behind: list[str] = field(default_factory=list)
    used_in_front: set[str] = field(default_factory=set)
    used_behind: set[str] = field(default_factory=set)
    is_written: bool = False
    draws: bool = False
    draws_itself: bool = False
    faults: list[str] = field(default_factory=list)


class FlowWatch:
    """Hooks on a model that fill in a Flow: around one forward pass, with gradients, whose output
    is told to `end`."""

    def __init__(self, model: nn.Module, layers: Sequence[str]) -> None:
        self.flow = Flow()
        self._model, self._layers = model, layers
        self._names = {id(p): name for name, p in model.named_parameters()}
        self._leaves: dict[int, str] = {}  # by id of a layer's hidden states, the layer
        self._kept: list[Tensor] = []  # so that no other tensor gets its id
        self._versions: list[tuple[Tensor, int]] = []  # of what modules in front and layers gave
        self._outside = OutsideDraws()
        self._drew_between = False

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Around the forward pass."""
        self._outside = OutsideDraws()
        with ExitStack() as handles:
            for name, module in self._model.named_modules():
                if name in self._layers:
                    before = module.register_forward_pre_hook(self._enters(name), with_kwargs=True)
                    handles.callback(before.remove)
                    handles.callback(module.register_forward_hook(self._leaves_layer(name)).remove)
                elif name and not self._is_around_or_in_a_layer(name):
                    handles.callback(module.register_forward_pre_hook(self._calls).remove)
                    handles.callback(module.register_forward_hook(self._called(name)).remove)
            yield

    def end(self, output: Any) -> Flow:
        """Return what was seen, with what the model's output depends on."""
        flow = self.flow
        flow.front, flow.behind = _outermost(flow.front), _outermost(flow.behind)
        last = flow.visited[-1:]
        for tensor in _differentiable(output):
            self._require_from(last, tensor, "the model's output", flow.used_behind)
        return flow

    def _is_around_or_in_a_layer(self, name: str) -> bool:
        return is_within(name, self._layers) or any(
            is_within(layer, (name,)) for layer in self._layers
        )

    def _calls(self, *_: Any) -> None:
        if self._outside.enter():
            self._drew_between |= bool(self.flow.visited)
            self.flow.draws_itself |= not self.flow.visited

    def _called(self, name: str) -> Any:
        def hook(module: nn.Module, _: Any, output: Any) -> None:
            self._outside.leave()
            if not self.flow.visited:
                has_any = next(module.parameters(), None) is not None
                if has_any or next(_differentiable(output), None) is not None:
                    self.flow.front.append(name)
                    self._watch_writes(output)
            else:
                self.flow.behind.append(name)

        return hook

    def _enters(self, layer: str) -> Any:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            self._calls()
            if self._drew_between:
                self.flow.faults.append(f"{_DRAWS}: stages would draw others")
            self.flow.draws |= self._outside.enter_layer()
            before = self.flow.visited[-1:]
            self.flow.visited.append(layer)
            self.flow.is_written |= any(x._version != version for x, version in self._versions)
            self._versions.clear()
            self.flow.behind.clear()
            hidden = next((x for x in tree_iter((args, kwargs)) if is_real(x)), None)
            if hidden is None:
                self.flow.faults.append(f"{layer} is given no tensor of real numbers")
                return None
            self._require_alone(layer, hidden, (args, kwargs))
            self._require_from(before, hidden, f"what {layer} is given", self.flow.used_in_front)
            self.flow.shapes.append(tuple(hidden.shape))
            leaf = hidden.detach().requires_grad_()
            self._leaves[id(leaf)] = layer
            self._kept.append(leaf)
            return tree_map(lambda x: leaf if x is hidden else x, (args, kwargs))

        return hook

    def _watch_writes(self, output: Any) -> None:
        self._versions += [(x, x._version) for x in tree_iter(output) if is_real(x)]

    def _leaves_layer(self, layer: str) -> Any:
        def hook(_: nn.Module, __: Any, output: Any) -> None:
            self._outside.leave()
            self._outside.leave_layer()
            is_tuple = isinstance(output, tuple | list)
            self.flow.returns.append(len(output) if is_tuple else 0)
            self._watch_writes(output)

        return hook

    def _require_alone(self, layer: str, hidden: Tensor, given: Any) -> None:
        more = [tensor for tensor in _differentiable(given) if tensor is not hidden]
        for tensor in more[:1]:
            finding = f"{layer} is given {list(tensor.shape)} beside its hidden states, and "
            self.flow.faults.append(f"{finding}gradients flow into both")

    def _require_from(
        self, before: Sequence[str], tensor: Tensor, what: str, used: set[str]
    ) -> None:
        """`before`: the layer that it comes from, if it comes from one. `used` takes the
        parameters that belong to none, where some may."""
        is_output = used is self.flow.used_behind
        for leaf in _leaves_of(tensor):
            origin = self._leaves.get(id(leaf))
            name = self._names.get(id(leaf), "")
            if origin is not None and origin not in before:
                self.flow.faults.append(f"{what} depends on what {origin} was given, past layers")
            elif name and not is_within(name, before):
                if before and not is_output:
                    finding = f"{what} depends on {name}, past {before[0]}"
                    self.flow.faults.append(finding)
                used.add(name)


def _outermost(names: Sequence[str]) -> list[str]:
    """Return those that are in no other, once each, in their order."""
    others = {*names}
    return [name for name in dict.fromkeys(names) if not is_within(name, others - {name})]


def _leaves_of(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the tensors that autograd would give gradients, if it began at `tensor`, once each."""
    yield from {id(leaf): leaf for leaf, _ in uses_of_leaves(tensor)}.values()


def _differentiable(values: Any) -> Iterator[Tensor]:
    return (x for x in tree_iter(values) if isinstance(x, Tensor) and x.requires_grad)
