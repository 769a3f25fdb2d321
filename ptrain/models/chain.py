"""Find the layers of a custom model that pipeline parallelism can split into stages, and the
modules before and after them.

The layers are those that the module names (transformers' `base_model_pp_plan` and `_pp_plan`, or
`pp_plan` of the user's function), else its blocks. A forward pass of a few tokens checks them: each
layer must receive the hidden states of the previous layer, and nothing else that carries gradients.
For this check each layer's input is a new autograd leaf. Every tensor computed between two layers
must then lead back to that leaf and to parameters of the layer in between. Modules that are neither
before nor after the layers (a rotary embedding, masks) run on every stage.

The check also covers random numbers that a model draws outside of its layers, because every stage
draws separately. A mask that is drawn once and used around several layers would differ between
stages, and so would the choice of layers that are skipped at random.

To find such draws the model runs forward under one seed, then under others, while every layer
returns its output of the first pass. Numbers drawn before the layers may then change only the first
hidden states, and numbers drawn after a layer only the next layer's input.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_iter, tree_map

from ptrain.errors import input_error
from ptrain.facts.stages import ENDS, Chain, Ends, is_within
from ptrain.models.contract import outcome_of
from ptrain.models.external import named_in_spec
from ptrain.models.ledger import first_real, is_real, watch_modules
from ptrain.models.modes import OutsideDraws, copied_buffers, fork_generators, in_mode, reseed
from ptrain.models.objective import SampleBatch, TokenPair, sample_batch, uses_of_leaves
from ptrain.models.roles import plan_of_module
from ptrain.models.transformer import Transformer
from ptrain.models.units import blocks_of, unit_modules
from ptrain.spec.placement import Axis
from ptrain.spec.spec import Spec
from ptrain.units import group_by_key

_SKIPS = "the model skips some layers at random"
_OWN = "random numbers are drawn outside of the layers, so stages would draw different ones"
# Extra passes with other seeds. A layer is rarely skipped, so a model whose forward pass
# draws by itself needs many to show that it skips layers.
_FEW, _MANY = 2, 8


class SeedComparison:
    """Repeats the forward pass `run` of a model under other seeds and compares it with the first
    pass."""

    def __init__(self, model: nn.Module, layers: Sequence[str], run: Callable[[], Tensor]) -> None:
        self._model, self._layers, self._run = model, layers, run
        self._gave: dict[str, Any] = {}
        self._given: dict[str, list[Any]] = {}
        self._visited: list[str] = []
        self._number, self._fault = 0, ""

    @torch.no_grad()
    def find_difference(self, *, draws_itself: bool) -> str:
        """Return the first difference between passes, or "" if there is none.

        `draws_itself`: the model's forward method draws random numbers itself, not only modules
        that it calls before the layers. Then more passes are made.
        """
        first = self._run_pass()
        for number in range(1, 1 + (_MANY if draws_itself else _FEW)):
            self._number = number
            output = self._run_pass()
            is_comparable = not self._fault and self._uses_first_seed(len(self._layers) - 1)
            if is_comparable and not _are_equal([first], [output]):
                self._fault = (
                    f"the output of the model depends on earlier random numbers, and {_OWN}"
                )
        return self._fault

    def _run_pass(self) -> Tensor:
        self._visited = []
        modules = ((name, self._model.get_submodule(name)) for name in self._layers)
        with (
            fork_generators(),
            copied_buffers(self._model),
            watch_modules(modules, before=self._on_enter, after=self._on_leave),
        ):
            reseed(self._number)
            output = self._run()
        if not self._fault and self._visited != [*self._layers]:
            self._fault = _SKIPS
        return output

    def _uses_first_seed(self, index: int) -> bool:
        """Return True if the draws after this layer use the first pass's seed: after every other
        layer, so that draws in between show in the input of the next one."""
        return (index + self._number) % 2 == 0

    def _on_enter(self, name: str, _: nn.Module, args: Any, kwargs: Any) -> None:
        self._visited.append(name)
        given = [*tree_iter(tree_map(_clone_tensor, (args, kwargs)))]
        if not self._number:
            self._given[name] = given
        elif not self._fault and (name not in self._given or not self._is_alike(name, given)):
            self._fault = f"the input of {name} depends on earlier random numbers, and {_OWN}"

    def _is_alike(self, name: str, given: list[Any]) -> bool:
        """Return True if a layer's inputs agree with the first pass, where they are comparable."""
        before, index = self._given[name], self._layers.index(name)
        if index == 0:  # hidden states may differ
            return _are_equal(_other_inputs(before), _other_inputs(given))
        return not self._uses_first_seed(index - 1) or _are_equal(before, given)

    def _on_leave(self, name: str, _: nn.Module, __: Any, output: Any) -> Any:
        """Replace a layer's output by its output of the first pass, and seed the draws that
        follow."""
        if not self._number:
            self._gave[name] = tree_map(_clone_tensor, output)
        reseed(0 if self._uses_first_seed(self._layers.index(name)) else self._number)
        return tree_map(_clone_tensor, self._gave.get(name, output))


def _clone_tensor(value: object) -> object:
    return value.clone() if isinstance(value, Tensor) else value


def _other_inputs(given: list[Any]) -> list[Any]:
    """Return all inputs except the first floating-point tensor, the hidden states."""
    hidden = next(x for x in given if isinstance(x, Tensor) and x.is_floating_point())
    return [value for value in given if value is not hidden]


def _are_equal(these: Sequence[Any], those: Sequence[Any]) -> bool:
    """Return True if tensors and numbers are equal pairwise; meta tensors are compared by shape and
    dtype only, other objects by type only."""
    return len(these) == len(those) and all(map(_is_equal, these, those))


def _is_equal(one: object, other: object) -> bool:
    """Return True if two values are equal; NaNs at equal positions count as equal."""
    match one, other:
        case Tensor(), Tensor():
            if one.shape != other.shape or one.dtype != other.dtype:
                return False
            if one.is_meta:
                return True
            return bool(((one == other) | ((one != one) & (other != other))).all())
        case int() | float(), int() | float():
            return one == other
    return type(one) is type(other)


_DRAWS = "the forward pass draws random numbers between its layers"


@dataclass(slots=True)
class LayerFlow:
    """The record of one forward pass through the layers of a model.

    Attributes:
        visited: Names of the layers in call order.
        shapes: Shape of the hidden states that each layer received.
        returns: Number of values in the tuple that each layer returned, 0 for a tensor.
        front: Outermost modules called before the first layer.
        behind: Outermost modules called after the last layer.
        used_in_front: Names of parameters that the inputs of the layers depend on.
        used_behind: Names of parameters that the output depends on after the last layer.
        is_written: True if the model writes into the output of a layer or of a module before them.
        draws: True if random numbers are drawn outside of the layers, before the last one.
        draws_itself: True if they are drawn before the layers by no module called there.
        faults: Violations of the rule that only hidden states pass from layer to layer.
    """

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
    """The hooks that record a LayerFlow during one forward pass with gradients.

    Call the model within `watch`, then pass its output to `finish`.
    """

    def __init__(self, model: nn.Module, layers: Sequence[str]) -> None:
        self.flow = LayerFlow()
        self._model, self._layers = model, layers
        self._names = {id(p): name for name, p in model.named_parameters()}
        self._leaves: dict[int, str] = {}  # id of a layer's hidden states: its name
        self._kept: list[Tensor] = []  # keeps ids unique while they are keys
        self._versions: list[tuple[Tensor, int]] = []  # outputs of layers and of modules before
        self._outside = OutsideDraws()
        self._drew_between = False

    @contextmanager
    def watch(self) -> Iterator[None]:
        self._outside = OutsideDraws()
        modules = ((n, module) for n, module in self._model.named_modules() if self._is_watched(n))
        with watch_modules(modules, before=self._on_begin, after=self._on_end):
            yield

    def finish(self, output: Any) -> LayerFlow:
        """Return the record, completed with the parameters that the model's output depends on."""
        flow = self.flow
        flow.front, flow.behind = _outermost_names(flow.front), _outermost_names(flow.behind)
        last = flow.visited[-1:]
        for tensor in _differentiable_tensors(output):
            self._require_from(last, tensor, "the output of the model", flow.used_behind)
        return flow

    def _is_watched(self, name: str) -> bool:
        """Return True for layers and for modules that neither contain a layer nor are inside
        one."""
        is_within_one = is_within(name, self._layers)
        is_around = any(is_within(layer, (name,)) for layer in self._layers)
        return name in self._layers or (bool(name) and not (is_within_one or is_around))

    def _on_begin(self, name: str, _: nn.Module, args: Any, kwargs: Any) -> Any:
        if self._outside.enter():
            self._drew_between |= bool(self.flow.visited)
            self.flow.draws_itself |= not self.flow.visited
        return self._enters_layer(name, (args, kwargs)) if name in self._layers else None

    def _on_end(self, name: str, module: nn.Module, _: Any, output: Any) -> None:
        self._outside.leave()
        if name in self._layers:
            self._outside.leave_layer()
            self.flow.returns.append(len(output) if isinstance(output, tuple | list) else 0)
            self._watch_writes(output)
        elif self.flow.visited:
            self.flow.behind.append(name)
        else:
            has_any = next(module.parameters(), None) is not None
            if has_any or next(_differentiable_tensors(output), None) is not None:
                self.flow.front.append(name)
                self._watch_writes(output)

    def _enters_layer(self, layer: str, given: Any) -> Any:
        """Check a layer's inputs, and return them with the hidden states replaced by a new autograd
        leaf."""
        if self._drew_between:
            self.flow.faults.append(f"{_DRAWS}: stages would draw different ones")
        self.flow.draws |= self._outside.enter_layer()
        before = self.flow.visited[-1:]
        self.flow.visited.append(layer)
        self.flow.is_written |= any(x._version != version for x, version in self._versions)
        self._versions.clear()
        # Only modules that are called after the last layer belong to the end.
        self.flow.behind.clear()
        hidden = first_real(given)
        if hidden is None:
            self.flow.faults.append(f"{layer} receives no floating-point tensor")
            return None
        self._require_alone(layer, hidden, given)
        self._require_from(before, hidden, f"the input of {layer}", self.flow.used_in_front)
        self.flow.shapes.append(tuple(hidden.shape))
        # A new leaf for each layer, so that a path in the graph ends at the last boundary that it
        # crossed.
        leaf = hidden.detach().requires_grad_()
        self._leaves[id(leaf)] = layer
        self._kept.append(leaf)
        return tree_map(lambda x: leaf if x is hidden else x, given)

    def _watch_writes(self, output: Any) -> None:
        self._versions += [(x, x._version) for x in tree_iter(output) if is_real(x)]

    def _require_alone(self, layer: str, hidden: Tensor, given: Any) -> None:
        more = [tensor for tensor in _differentiable_tensors(given) if tensor is not hidden]
        for tensor in more[:1]:
            finding = (
                f"{layer} receives a second tensor {list(tensor.shape)} with its "
                "hidden states, and "
            )
            self.flow.faults.append(f"{finding}both need gradients")

    def _require_from(
        self, before: Sequence[str], tensor: Tensor, what: str, used: set[str]
    ) -> None:
        """Report faults for graph edges to `tensor` that bypass the previous layer, `before`, and
        add the parameters outside of that layer that the tensor depends on to `used`."""
        is_output = used is self.flow.used_behind
        # the tensors that autograd would give gradients, once each
        for leaf in {id(leaf): leaf for leaf, _ in uses_of_leaves(tensor)}.values():
            origin = self._leaves.get(id(leaf))
            name = self._names.get(id(leaf), "")
            if origin is not None and origin not in before:
                self.flow.faults.append(
                    f"{what} depends on the input of {origin} directly, "
                    "not only through the layers between"
                )
            elif name and not is_within(name, before):
                if before and not is_output:
                    finding = f"{what} depends on {name} directly, not only through {before[0]}"
                    self.flow.faults.append(finding)
                used.add(name)


def _outermost_names(names: Sequence[str]) -> list[str]:
    """Return the names that are inside no other name, without duplicates, in order."""
    others = {*names}
    return [name for name in dict.fromkeys(names) if not is_within(name, others - {name})]


def _differentiable_tensors(values: Any) -> Iterator[Tensor]:
    return (x for x in tree_iter(values) if isinstance(x, Tensor) and x.requires_grad)


TOKENS = 4  # of one sample; shapes and call order do not depend on the number
_BUILT_IN = ("embed.weight", "head.weight")  # names of a built-in model's tied tensor
_ATTRIBUTE = (
    "`pp_plan`: the names of its modules in forward order, one of them the ModuleList of layers"
)


@dataclass(frozen=True, slots=True)
class _Layers:
    """The names of a model's layers. `plan` describes their source, `place` is the spec's place
    that names the model; `front` and `behind` are the modules that a plan lists before and after
    the layers, None without a plan."""

    place: str
    plan: str
    names: tuple[str, ...]
    front: tuple[str, ...] | None = None
    behind: tuple[str, ...] | None = None


def chain_of_module(module: nn.Module, spec: Spec) -> Chain | None:
    """Return the chain of layers that pipeline parallelism splits; None if the mesh has no pp axis.

    Runs a custom model forward on a few tokens.

    Raises:
        SpecError: The model cannot be split: more than hidden states passes from layer to layer, or
            its plan does not match its forward pass.
    """
    if spec.degree(Axis.PP) == 1:
        return None
    if isinstance(module, Transformer):
        return _of_ours(module)
    layers = _layers_of(module, spec)
    _require_whole_units(module, layers, spec)
    samples = probe_batch(module, spec)
    flow = _record_flow(module, layers, samples, spec)
    shape = _hidden_states(flow, layers, samples)
    ends = _find_ends(module, layers, flow)
    return Chain(
        layers=layers.names,
        ends=ends,
        hidden=shape[-1],
        positions=None if spec.data.function is None else shape[1:-1],
        tied=tuple(_tied_names(module, layers, ends)),
        returns=flow.returns[0],
        is_written=flow.is_written,
    )


def sample_tokens(module: nn.Module, spec: Spec) -> torch.Tensor:
    """Return a few tokens, all different: int64 [1, tokens]."""
    device = next(module.parameters()).device
    count = min(TOKENS, spec.batch.sequence)
    return torch.arange(1, 1 + count, device=device).unsqueeze(0)


def probe_batch(module: nn.Module, spec: Spec) -> SampleBatch:
    """Return the samples of a check: a few tokens with targets, or a micro-batch of a user's
    dataset."""
    tokens = sample_tokens(module, spec)
    if spec.data.function is None:
        return SampleBatch(TokenPair(tokens, tokens + 1))
    return sample_batch(spec, device=tokens.device)


def _of_ours(module: Transformer) -> Chain:
    shape = module.shape
    return Chain(
        layers=tuple(f"blocks.{index}" for index in range(shape.layers)),
        ends=ENDS,
        hidden=shape.hidden,
        tied=(_BUILT_IN,) if shape.tied else (),
    )


def _layers_of(module: nn.Module, spec: Spec) -> _Layers:
    place, name = named_in_spec(module, spec)
    is_theirs = hasattr(module, "_no_split_modules")
    with plan_of_module(module, "pp_plan", spec):
        names = (
            tuple(_their_names(module))
            if is_theirs
            else _plan_names(getattr(module, "pp_plan", ()))
        )
    if names:
        return _at_the_list(module, names, place, f"the pp_plan of {name}")
    if not (blocks := tuple(blocks_of(module, spec.model.blocks))):
        finding = f"{name} has no list of layers to split into stages"
        raise input_error(
            "mesh.pp", finding, f"Give the module an attribute {_ATTRIBUTE}. Or use `mesh.pp=1`."
        )
    return _Layers(place, f"the blocks of {name}", blocks)


def _plan_names(plan: object) -> tuple[str, ...]:
    """Return the module names of a plan: keys of transformers' mapping, or a plain list."""
    return tuple(map(str, plan)) if isinstance(plan, Iterable) else ()


def _their_names(module: nn.Module) -> Iterator[str]:
    """Yield the module names of transformers' plans: from the base model's config, with that
    model's prefix, then the names that the class adds (the head)."""
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


def _at_the_list(module: nn.Module, names: Sequence[str], place: str, plan: str) -> _Layers:
    known = dict(module.named_modules())
    if missing := [name for name in names if name not in known]:
        finding = f"{plan} has {missing[0]}, but the model has no such module"
        raise input_error(place, finding, "Use names of existing modules.")
    lists = [name for name in names if isinstance(known[name], nn.ModuleList)]
    if len(lists) != 1:
        named = ", ".join(lists) or "none"
        finding = f"{plan} must contain one ModuleList, the layers; it contains {named}"
        raise input_error(place, finding, f"Set {_ATTRIBUTE}.")
    at = names.index(lists[0])
    return _Layers(
        place,
        plan,
        names=tuple(f"{lists[0]}.{name}" for name, _ in known[lists[0]].named_children()),
        front=tuple(names[:at]),
        behind=tuple(names[at + 1 :]),
    )


def _require_whole_units(module: nn.Module, layers: _Layers, spec: Spec) -> None:
    for modules in unit_modules(module, spec.unit, spec.model.blocks)[:-1]:
        for name in modules:
            if not is_within(name, layers.names):
                finding = f"{name} is a wrap unit, but not a layer of {layers.plan}"
                raise input_error(layers.place, finding, "Add the list of its blocks to the plan.")


def _record_flow(module: nn.Module, layers: _Layers, samples: SampleBatch, spec: Spec) -> LayerFlow:
    """Run the model forward in training mode, and repeat the pass if it draws random numbers
    outside of its layers. Raise SpecError if its code raises, or if the layers are not a chain."""
    watch = FlowWatch(module, layers.names)
    with in_mode(module, training=True):
        with torch.enable_grad(), fork_generators(), copied_buffers(module), watch.watch():
            output = outcome_of(module, samples, spec)
        flow = watch.finish(output)
        _require_flow(flow, layers)
        if flow.draws:
            redraws = SeedComparison(
                module, layers.names, partial(outcome_of, module, samples, spec)
            )
            if fault := redraws.find_difference(draws_itself=flow.draws_itself):
                finding = f"{layers.plan} cannot be split into stages: {fault}"
                raise input_error(layers.place, finding, "Use `mesh.pp=1`.")
    return flow


def _require_flow(flow: LayerFlow, layers: _Layers) -> None:
    if flow.visited != [*layers.names]:
        finding = f"the forward pass does not call the layers of {layers.plan} one after the other"
        raise input_error(layers.place, finding, "Use `mesh.pp=1`.")
    if flow.faults:
        finding = f"{layers.plan} cannot be split into stages: {flow.faults[0]}"
        raise input_error(layers.place, finding, "Use `mesh.pp=1`.")


def _hidden_states(flow: LayerFlow, layers: _Layers, samples: SampleBatch) -> tuple[int, ...]:
    """Return the shape of the hidden states between layers: samples, tokens (if any), features."""
    if len({*flow.returns}) > 1:
        finding = f"the layers of {layers.plan} return different numbers of values"
        raise input_error(
            layers.place,
            finding,
            "Let each layer return the same number of values, or use `mesh.pp=1`.",
        )
    # The first layer's input crosses no stage boundary, so its shape may differ.
    (shape, *others) = sorted({*(flow.shapes[1:] or flow.shapes)})
    is_of_tokens = isinstance(samples.data, TokenPair)
    wanted = tuple(samples.inputs.shape) if is_of_tokens else (samples.rows,)
    is_unlike = len(shape) != 3 if is_of_tokens else len(shape) < 2
    if others or is_unlike or shape[: len(wanted)] != wanted:
        shapes = " or ".join(map(str, map(list, (shape, *others))))
        finding = (
            f"a layer receives {shapes} for {_describe_samples(samples)}; a stage can only pass on "
        )
        finding += "hidden states"
        raise input_error(layers.place, finding, "Use `mesh.pp=1`.")
    return shape


def _describe_samples(samples: SampleBatch) -> str:
    rows = "one sample" if samples.rows == 1 else f"{samples.rows} samples"
    is_of_tokens = isinstance(samples.data, TokenPair)
    return f"{rows} of {samples.inputs.shape[1]} tokens" if is_of_tokens else rows


def _find_ends(module: nn.Module, layers: _Layers, flow: LayerFlow) -> Ends:
    """Return the modules called before and after the layers, and parameters outside of them that
    are used there or that the plan lists there. Raise SpecError for a parameter that would be on
    every stage, or on two stages under one name."""
    both = {*flow.front} & {*flow.behind}
    front = [name for name in flow.front if name not in both and _is_there_alone(module, name)]
    behind = [name for name in flow.behind if name not in both]
    for name, _ in module.named_parameters(remove_duplicate=False):
        if is_within(name, (*front, *layers.names, *behind)):
            continue
        if name in flow.used_in_front or is_within(name, layers.front or ()):
            front.append(name)
        elif name in flow.used_behind or is_within(name, layers.behind or ()):
            behind.append(name)
        else:
            finding = f"{name} belongs to no module of {layers.plan}, so every stage would hold it"
            remedy = "Add its module to the plan, or use `mesh.pp=1`."
            raise input_error(layers.place, finding, remedy)
    ends = Ends(front=tuple(front), behind=tuple(behind))
    _require_as_planned(module, layers, ends)
    _require_at_one_end(module, layers, ends, flow)
    return ends


def _is_there_alone(module: nn.Module, name: str) -> bool:
    """Return True if the module has one name only; a placeholder for a shared one would replace all
    uses."""
    inner = module.get_submodule(name)
    return sum(child is inner for _, child in module.named_modules(remove_duplicate=False)) == 1


def _require_as_planned(module: nn.Module, layers: _Layers, ends: Ends) -> None:
    """Raise SpecError for a parameter used at an end of the model where the plan does not list
    it."""
    for named, used, place in (
        (layers.front, ends.front, "before"),
        (layers.behind, ends.behind, "after"),
    ):
        for name, _ in module.named_parameters(remove_duplicate=False):
            if named is not None and is_within(name, used) and not is_within(name, named):
                finding = f"{name} is used {place} the layers, but {layers.plan} does not list it "
                finding += "there, so every stage would hold it"
                raise input_error(
                    layers.place, finding, "Add its module to the plan, or use `mesh.pp=1`."
                )


def _require_at_one_end(module: nn.Module, layers: _Layers, ends: Ends, flow: LayerFlow) -> None:
    """Raise SpecError for a parameter used at both ends that has no name at the last one."""
    names = {first: [first, *others] for first, *others in names_of_parameters(module)}
    for name in sorted(flow.used_in_front & flow.used_behind):
        if not any(is_within(alias, ends.behind) for alias in names[name]):
            finding = (
                f"{name} is used before the layers, and again after them next to the output "
                "of the layers"
            )
            remedy = (
                "If the output head uses it, make the head a module that holds it (`head.weight = "
            )
            raise input_error(layers.place, finding, f"{remedy}embed.weight`). Or use `mesh.pp=1`.")


def _tied_names(module: nn.Module, layers: _Layers, ends: Ends) -> Iterator[tuple[str, str]]:
    """Yield the names of each parameter that the first and the last stage share. Raise SpecError
    for a parameter that belongs to two layers, or whose name at the last stage comes first."""
    places = (ends.front, *((layer,) for layer in layers.names), ends.behind)
    for first, *others in names_of_parameters(module):
        for other in others:
            if is_within(first, ends.front) and is_within(other, ends.behind):
                yield first, other
            elif is_within(first, ends.behind) and is_within(other, ends.front):
                finding = f"{first} is tied to {other}, but is defined before it in the model"
                raise input_error(layers.place, finding, "Define the embedding first.")
            elif not any(is_within(first, at) and is_within(other, at) for at in places):
                finding = f"{first} and {other} are the same tensor, but belong to two stages"
                raise input_error(layers.place, finding, "Use `mesh.pp=1`.")


def names_of_parameters(module: nn.Module) -> list[list[str]]:
    """Return the names of every parameter, grouped; a tied parameter has several."""
    named = module.named_parameters(remove_duplicate=False)
    return [*group_by_key((id(parameter), name) for name, parameter in named).values()]
