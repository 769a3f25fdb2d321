"""Read the facts that a prediction needs off a model that is not built in, its layers of experts
included.

A layer of experts holds all experts along the first dimension of each tensor and has `forward(rows
[N, D], experts [N, K], weights [N, K]) -> [N, D]`, as in transformers. Given tensors of fewer
experts it must compute the share of these; an attribute `num_experts` is then their number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ptrain.errors import Fault, refused
from ptrain.facts.model import ExpertLayers, ModelFacts, TensorFacts, UnitFacts
from ptrain.facts.parameters import expert_modules
from ptrain.models.attending import attending_of
from ptrain.models.boundary import boundary, said
from ptrain.models.chain import chain_of_module, sample
from ptrain.models.contract import logits_of
from ptrain.models.dropless import NUMBER
from ptrain.models.dropout import drops_out
from ptrain.models.huggingface import ignored_fields
from ptrain.models.ledger import storage_of
from ptrain.models.objective import can_fuse, sample_bytes
from ptrain.models.one_pass import OnePass
from ptrain.models.roles import cutting_of_module, named_in_spec, names_of_experts
from ptrain.models.transformer import Transformer
from ptrain.models.units import ROOT, blocks_of, unit_modules
from ptrain.spec.model import HuggingFaceModel, ModelShape
from ptrain.spec.placement import EXPERT_AXES
from ptrain.spec.spec import Spec

Made = dict[str, tuple[Tensor, int]]  # by module: what it returned, and in which version


def head_of(model: nn.Module, spec: Spec) -> str:
    """Return the name of the head; the root's, of a built-in model, which has a method for it.
    Raises SpecError where the loss cannot be computed in its place: where the model changes what
    its head gives, or torch has no operator for both. Runs a model that is not built in forward
    once."""
    if spec.loss.fused and not can_fuse():
        finding = f"torch {torch.__version__} has no linear_cross_entropy that goes by chunks"
        raise refused("loss.fused", finding, "remove it: chunks do without, or take torch 2.13")
    if isinstance(model, Transformer):
        return ROOT
    outputs: Made = {}
    tokens = sample(model, spec)
    handles = [
        module.register_forward_hook(_notes(outputs, name, tokens.shape))
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
    ]
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            logits = logits_of(model, tokens, spec)
    finally:
        for handle in handles:
            handle.remove()
    for name, (output, version) in outputs.items():
        if _is(logits, output, version):
            return name
    _, model_name = named_in_spec(model, spec)
    finding = f"{model_name} does not return what one of its nn.Linear makes of all its tokens: "
    finding += "other operators come behind, or are the head"
    raise refused("loss", finding, "leave the logits whole (remove loss), or end the model so")


def _notes(outputs: Made, name: str, shape: torch.Size) -> Callable[..., None]:
    def hook(_: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
        if inputs and inputs[0].shape[:-1] == shape:
            outputs[name] = output, output._version

    return hook


def _is(logits: Tensor, output: Tensor, version: int) -> bool:
    """The same tensor into which nobody wrote, or the same numbers in another dtype."""
    if output.shape != logits.shape or output._version != version:
        return False
    if output.dtype != logits.dtype:
        return torch.equal(output.double(), logits.double())
    return storage_of(output)._cdata == storage_of(logits)._cdata


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


_WIDE_BYTES = 4  # buffers of reals are fp32, or fp64 where everything is


def untraced_facts(model: nn.Module, spec: Spec) -> ModelFacts:
    """Return the facts that are read off the module itself."""
    roles, fusions = cutting_of_module(model, spec)
    experts = expert_layers_of(model, spec)
    apart = experts.modules if experts else expert_modules(spec)
    return ModelFacts(
        units=_units(model, unit_modules(model, spec.unit, spec.model.blocks, apart)),
        buffers=tuple((name, _nbytes(buffer)) for name, buffer in model.named_buffers()),
        roles=roles,
        fusions=fusions,
        chain=chain_of_module(model, spec),
        blocks=tuple(blocks_of(model, spec.model.blocks)),
        draws=drops_out(model),
        attending=attending_of(model, spec),
        experts=experts,
        sample_bytes=sample_bytes(spec),
        ignored=ignored_fields(spec.model) if isinstance(spec.model, HuggingFaceModel) else (),
    )


def _units(model: nn.Module, groups: tuple[tuple[str, ...], ...]) -> tuple[UnitFacts, ...]:
    """Each unit with the parameters that no unit before it has."""
    seen: set[int] = set()
    units = []
    for modules in groups:
        fresh = [
            (f"{name}." * bool(name) + path, parameter)
            for name in modules
            for path, parameter in model.get_submodule(name).named_parameters()
            if id(parameter) not in seen
        ]
        seen.update(id(parameter) for _, parameter in fresh)
        tensors = tuple(
            TensorFacts(name=n, shape=tuple(p.shape), is_frozen=not p.requires_grad)
            for n, p in fresh
        )
        units.append(UnitFacts(modules=modules, tensors=tensors))
    return tuple(units)


def _nbytes(buffer: torch.Tensor) -> int:
    """As it is stored beside parameters of at most fp32."""
    itemsize = _WIDE_BYTES if buffer.is_floating_point() else buffer.itemsize
    return buffer.numel() * itemsize
