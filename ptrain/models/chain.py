"""What the pipeline axis cuts of a model that is not built in: by the plan that the module itself
carries, transformers' `base_model_pp_plan` with the `_pp_plan` of the class, or `pp_plan` of the
user's function.

A plan names the modules that a forward pass goes through, in its order: those in front of the
layers, the list of layers, those behind. All else (a rotary embedding, masks) every stage computes
for itself, so that it must not have parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ptrain.errors import refused
from ptrain.facts.stages import ENDS, Chain, Ends
from ptrain.models.contract import forward_of, require_logits
from ptrain.models.roles import named_in_spec, plan_of_module
from ptrain.models.transformer import Transformer
from ptrain.models.units import unit_modules
from ptrain.spec.axis import Axis
from ptrain.spec.spec import Spec

TOKENS = 4  # of one sample, to look at: shapes and order do not depend on how many
_BUILT_IN = ("embed.weight", "head.weight")  # what a tied head of ours takes
_ATTRIBUTE = "pp_plan: its modules' names in forward order, one of them the ModuleList of layers"


@dataclass(frozen=True, slots=True)
class _Named:
    """A module by its name in the model; `plan` is whose word it is, `place` where the spec says
    which model it is."""

    place: str
    plan: str
    names: tuple[str, ...]


def chain_of_module(module: nn.Module, spec: Spec) -> Chain | None:
    """None where pp is not in the mesh. Raises SpecError where the module says nothing of how it
    is cut, or something that it is not. Runs it forward once, on a few tokens."""
    if spec.degree(Axis.PP) == 1:
        return None
    if isinstance(module, Transformer):
        return _of_ours(module)
    plan = _plan_of(module, spec)
    chain = _cut_at_the_list(module, plan)
    _require_all_named(module, chain, plan)
    _require_whole_units(module, chain, spec, plan)
    hidden = _hidden(module, chain.layers, plan, spec)
    tied = tuple(_tied(module, chain, plan))
    return Chain(layers=chain.layers, ends=chain.ends, hidden=hidden, tied=tied)


def sample(module: nn.Module, spec: Spec) -> torch.Tensor:
    """A few tokens, all different: [1, tokens]."""
    device = next(module.parameters()).device
    count = min(TOKENS, spec.batch.sequence)
    return torch.arange(1, 1 + count, device=device).unsqueeze(0)


def _of_ours(module: Transformer) -> Chain:
    shape = module.shape
    return Chain(
        layers=tuple(f"blocks.{index}" for index in range(shape.layers)),
        ends=ENDS,
        hidden=shape.hidden,
        tied=(_BUILT_IN,) if shape.tied else (),
    )


def _plan_of(module: nn.Module, spec: Spec) -> _Named:
    place, name = named_in_spec(module, spec)
    is_theirs = hasattr(module, "_no_split_modules")
    with plan_of_module(module, "pp_plan", spec):
        names = tuple(_their_names(module)) if is_theirs else _names(getattr(module, "pp_plan", ()))
    if not names:
        finding = f"{name} says nothing of where it is cut into stages"
        if is_theirs:
            config = type(getattr(module, "config", None)).__name__
            finding += f": {config} has no base_model_pp_plan"
            remedy = "choose a model whose config has one (llama, qwen3, mistral …), or write no pp"
        else:
            remedy = f"give the module an attribute {_ATTRIBUTE}; or write no pp"
        raise refused("mesh.pp", finding, remedy)
    return _Named(place, f"the pp_plan of {name}", names)


def _names(plan: object) -> tuple[str, ...]:
    """Of a mapping as transformers has them, or of the names alone."""
    return tuple(map(str, plan)) if isinstance(plan, Iterable) else ()


def _their_names(module: nn.Module) -> Iterator[str]:
    """Yield the modules that the config of the base model names, wherever that model is, then those
    that the class adds (the head)."""
    base = getattr(getattr(module, "config", None), "base_model_pp_plan", None) or {}
    if not base:
        return
    inner = module.named_modules()
    prefixes = (
        name for name, child in inner if all(hasattr(child, attribute) for attribute in base)
    )
    prefix = next(prefixes, getattr(module, "base_model_prefix", ""))
    yield from (f"{prefix}.{name}" for name in base)
    yield from getattr(type(module), "_pp_plan", None) or ()


@dataclass(frozen=True, slots=True)
class _Parts:
    """A chain before it has run."""

    layers: tuple[str, ...]
    ends: Ends


def _cut_at_the_list(module: nn.Module, plan: _Named) -> _Parts:
    known = dict(module.named_modules())
    if missing := [name for name in plan.names if name not in known]:
        finding = f"{plan.plan} names {missing[0]}, and the model has no such module"
        raise refused(plan.place, finding, "name modules that are there")
    lists = [name for name in plan.names if isinstance(known[name], nn.ModuleList)]
    if len(lists) != 1:
        named = ", ".join(lists) or "none"
        finding = f"{plan.plan} must name one ModuleList, the layers; it names {named}"
        raise refused(plan.place, finding, f"write {_ATTRIBUTE}")
    at = plan.names.index(lists[0])
    return _Parts(
        layers=tuple(f"{lists[0]}.{name}" for name, _ in known[lists[0]].named_children()),
        ends=Ends(front=plan.names[:at], behind=plan.names[at + 1 :]),
    )


def _require_all_named(module: nn.Module, chain: _Parts, plan: _Named) -> None:
    named = (*chain.ends.front, *chain.layers, *chain.ends.behind)
    for name, _ in module.named_parameters(remove_duplicate=False):
        if not _is_within(name, named):
            finding = f"{name} belongs to no module of {plan.plan}: every stage would have it"
            raise refused(plan.place, finding, "name its module in the plan, or write no pp")


def _require_whole_units(module: nn.Module, chain: _Parts, spec: Spec, plan: _Named) -> None:
    for modules in unit_modules(module, spec.unit, spec.model.blocks)[:-1]:
        for name in modules:
            if not _is_within(name, chain.layers):
                finding = f"{name} is a unit of the model, and no layer of {plan.plan}"
                raise refused(plan.place, finding, "name the list of its blocks in the plan")


def _hidden(module: nn.Module, layers: Sequence[str], plan: _Named, spec: Spec) -> int:
    """The features that go from layer to layer. Raises SpecError where something else does."""
    seen: list[tuple[str, tuple[int, ...]]] = []

    def note(name: str, output: Any) -> None:
        first = output[0] if isinstance(output, tuple | list) and output else output
        seen.append((name, tuple(first.shape) if isinstance(first, torch.Tensor) else ()))

    handles = [
        module.get_submodule(name).register_forward_hook(
            lambda _, __, output, name=name: note(name, output)
        )
        for name in layers
    ]
    tokens = sample(module, spec)
    try:
        copies = {name: buffer.clone() for name, buffer in module.named_buffers()}
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            with forward_of(module, tokens, spec):
                output = torch.func.functional_call(module, copies, (tokens,))
            require_logits(output, module, tokens, spec)
    finally:
        for handle in handles:
            handle.remove()
    if [name for name, _ in seen] != [*layers]:
        finding = f"a forward pass does not go through the layers of {plan.plan} one by one"
        raise refused(plan.place, finding, "write no pp")
    shapes = {shape for _, shape in seen}
    (shape, *others) = sorted(shapes)
    if others or shape[:-1] != tuple(tokens.shape):
        finding = f"a layer gives {' or '.join(map(str, map(list, sorted(shapes))))} of one sample "
        finding += f"of {tokens.shape[1]} tokens, and the next stage waits for hidden states"
        raise refused(plan.place, finding, "write no pp")
    return shape[-1]


def _tied(module: nn.Module, chain: _Parts, plan: _Named) -> Iterator[tuple[str, str]]:
    """Tensors in front that a module behind has too. Those of layers must be a layer's own."""
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    for first, *others in names.values():
        for other in others:
            if _is_within(first, chain.ends.front) and _is_within(other, chain.ends.behind):
                yield first, other
            elif not _are_together(first, other, chain):
                finding = f"{first} and {other} are one tensor, and would be on two stages"
                raise refused(plan.place, finding, "write no pp")


def _are_together(first: str, other: str, chain: _Parts) -> bool:
    """Whether they are on one stage in any cut."""
    places = (chain.ends.front, *((layer,) for layer in chain.layers), chain.ends.behind)
    return any(_is_within(first, place) and _is_within(other, place) for place in places)


def _is_within(name: str, modules: Iterable[str]) -> bool:
    return any(f"{name}.".startswith(f"{module}.") for module in modules)
