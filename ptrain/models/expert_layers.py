"""The layers with experts of a model that is not built in: its plan says which modules hold them,
and a forward pass what they are given.

Such a module has all experts of a layer, one at each place of every tensor's first dimension, and
`forward(rows [N, D], experts [N, K], weights [N, K]) -> [N, D]` gives of each row the sum of what
its K experts make of it, by weight: as in transformers. What it computes with tensors of fewer
experts is the rank's share; where it has a number of experts of its own, `num_experts`, this is the
rank's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ptrain.errors import Fault, refused
from ptrain.facts.model import ExpertLayers
from ptrain.models.boundary import boundary, said
from ptrain.models.one_pass import OnePass
from ptrain.models.roles import named_in_spec, names_of_experts
from ptrain.models.routed_rows import NUMBER
from ptrain.spec.axis import EXPERT_AXES
from ptrain.spec.model import ModelShape
from ptrain.spec.spec import Spec

_FORM = "forward(rows [N, D], experts [N, K], weights [N, K]) -> [N, D]"
_REMEDY = (
    "let one module have all experts of a layer, an expert at each place of every tensor's first "
    f"dimension, and {_FORM}; or write dp_shard in place of ep"
)


@dataclass(frozen=True, slots=True)
class _Call:
    """What the experts of a layer are given for one sample: `rows` of so many `features`, each for
    so many of them (`chosen`)."""

    rows: int
    features: int
    chosen: int


def expert_layers_of(module: nn.Module, spec: Spec) -> ExpertLayers | None:
    """Return a model's layers with experts; None where no axis gives ranks some each, or the model
    is built in. Runs the model forward on a sample, without its experts. Raises SpecError where
    nothing says which they are, and for modules that are none."""
    if not spec.is_cut_over(EXPERT_AXES) or isinstance(spec.model, ModelShape):
        return None
    place, names = names_of_experts(module, spec)
    numbers = [_number(module.get_submodule(name), name, place) for name in names]
    calls = _calls(module, names, place, spec)
    sizes = [(n, call.chosen, call.features) for n, call in zip(numbers, calls, strict=True)]
    _require_alike(place, sizes)
    number, chosen, features = sizes[0]
    return ExpertLayers(modules=tuple(names), number=number, chosen=chosen, features=features)


def _number(experts: nn.Module, name: str, place: str) -> int:
    """Return how many experts a module has."""
    sizes = {path: tuple(tensor.shape) for path, tensor in experts.named_parameters()}
    firsts = {shape[:1] for shape in sizes.values()}
    if len(firsts) != 1 or firsts == {()}:
        shown = ", ".join(f"{path} {list(shape)}" for path, shape in [*sizes.items()][:3])
        finding = f"{name} is not all experts of a layer, one at each place: it has {shown}"
        raise refused(place, finding, _REMEDY)
    ((number,),) = firsts
    own = getattr(experts, NUMBER, number)
    if own != number:
        finding = f"{name}.{NUMBER} is {own}, and the first dimension of its tensors {number}"
        raise refused(place, finding, _REMEDY)
    return number


def _require_alike(place: str, layers: Sequence[tuple[int, int, int]]) -> None:
    if len({*layers}) > 1:
        kinds = dict.fromkeys(layers)
        shown = " and ".join(f"{n} experts, {k} of a token, {d} features" for n, k, d in kinds)
        finding = f"not yet: layers with experts that differ, of {shown}"
        raise refused(place, finding, "write dp_shard in place of ep")


def _calls(module: nn.Module, names: Sequence[str], place: str, spec: Spec) -> list[_Call]:
    """Return what the experts of each layer are given for a sample."""
    once, calls = OnePass(module, spec), {name: list[_Call]() for name in names}
    given, called = named_in_spec(module, spec)

    def fault(error: BaseException) -> Fault:
        finding = f"{called}, run forward without its experts, raised {said(error)}"
        return Fault(place=given, finding=finding, remedy=_REMEDY)

    with (
        torch.no_grad(),
        torch.random.fork_rng(devices=[]),
        _noted(module, calls, place),
        boundary(fault),
        once.prepared() as run,
    ):
        run()
    return [_one_call(name, of_layer, place, spec) for name, of_layer in calls.items()]


@contextmanager
def _noted(module: nn.Module, calls: dict[str, list[_Call]], place: str) -> Iterator[None]:
    """Within it experts note what they are given, and give zeros."""

    def note(name: str, *args: Any, **named: Any) -> Tensor:
        sizes = [tuple(x.shape) for x in (*args, *named.values()) if isinstance(x, Tensor)]
        is_one = len(args) == 3 == len(sizes) and not named
        if not is_one or len(sizes[0]) != 2 or sizes[1] != (len(args[0]), *sizes[2][1:]):
            shown = ", ".join(str(list(size)) for size in sizes) or "no tensors"
            finding = f"{name} is given {shown}; what travels is rows, and what is said of each: "
            raise refused(place, f"{finding}{_FORM}", _REMEDY)
        (rows, features), (_, chosen) = sizes[:2]
        calls[name].append(_Call(rows, features, chosen))
        return torch.zeros_like(args[0])

    modules = {name: module.get_submodule(name) for name in calls}
    for name, experts in modules.items():
        vars(experts)["forward"] = partial(note, name)  # before nn.Module looks at its class
    try:
        yield
    finally:
        for experts in modules.values():
            del vars(experts)["forward"]


def _one_call(name: str, calls: Sequence[_Call], place: str, spec: Spec) -> _Call:
    """Return the call of a layer's experts. A micro-batch's rows are those of `batch.sequence`
    tokens of each of its samples."""
    tokens = spec.batch.sequence
    if len(calls) != 1 or calls[0].rows != tokens:
        rows = " and ".join(str(call.rows) for call in calls) or "no"
        finding = f"{name} is given {rows} rows of a sample of {tokens} tokens; what travels is "
        finding += "predicted for one of each token, in one call"
        raise refused(place, finding, "write dp_shard in place of ep")
    return calls[0]
