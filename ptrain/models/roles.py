"""The roles of a model that is not built in, on the tensor axis: by the spec's `tensor.plan`, else
by the plan that the module itself carries: `tp_plan`, of the user's function or of transformers.

A plan maps patterns of module names to roles, in ptrain's words or in those of transformers. What
it says nothing about is whole on every rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import assert_never

from torch import nn

from ptrain.errors import refused
from ptrain.models.initialize import keeps_its_weights
from ptrain.spec.axis import Axis
from ptrain.spec.model import ExternalModel, HuggingFaceModel, ModelShape
from ptrain.spec.placement import R
from ptrain.spec.role import GIVEN, Role, Roles, fits
from ptrain.spec.spec import Spec

# transformers' words (4.56 to 5). None: whole on every rank, which is how between the sub-blocks
# everything is here.
_THEIRS: Mapping[str, Role | None] = {
    "colwise": Role.COLUMN,
    "rowwise": Role.ROW,
    "embedding_rowwise": Role.VOCABULARY,
    "colwise_rep": Role.HEAD,
    "colwise_gather_output": Role.HEAD,
    "replicated_with_grad_allreduce": Role.SHARED,
    "sequence_parallel": None,
    "replicate": None,
}
_GATHERED = ("colwise_rep", "colwise_gather_output")
_KINDS = {
    Role.COLUMN: nn.Linear,
    Role.ROW: nn.Linear,
    Role.HEAD: nn.Linear,
    Role.VOCABULARY: nn.Embedding,
}


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """`place` is whose it is; `theirs`: a model's of transformers, in which not every pattern need
    mean a module."""

    place: str
    entries: Mapping[str, str]
    theirs: bool


def roles_of_module(module: nn.Module, spec: Spec) -> Roles:
    """Patterns with roles; none where tp is not in the mesh, or where the module is built in.
    Raises SpecError where the plan cannot be followed."""
    if spec.degree(Axis.TP) == 1 or not keeps_its_weights(module):
        return ()
    plan = _plan_of(module, spec)
    _require_whole_tokens(spec)
    roles = tuple(_known(module, plan))
    if plan.theirs:
        roles = (*roles, *_whole_inputs(module, roles))
    roles = (*roles, *_tied(module, roles))
    for pattern, role in roles:
        for name in matching(module, pattern):
            _require(module.get_submodule(name), (name, role), plan.place, spec)
    _require_one_each(module, roles, plan.place)
    _require_all_within(module, roles, plan.place)
    _require_heads(module, spec)
    _require_no_dropout(module, plan.place)
    return roles


def matching(module: nn.Module, pattern: str) -> Iterator[str]:
    """The names of the modules that a pattern means."""
    return (name for name, _ in module.named_modules() if fits(pattern, name))


def _plan_of(module: nn.Module, spec: Spec) -> _Plan:
    place, name = _named(module, spec)
    if spec.tensor.roles:
        entries = {pattern: role.value for pattern, role in spec.tensor.roles}
        return _Plan(place="tensor.plan", entries=entries, theirs=False)
    is_theirs = hasattr(module, "_no_split_modules")
    own = _their_plan(module) if is_theirs else getattr(module, "tp_plan", None)
    if not own or not isinstance(own, Mapping):
        finding = f"{name} says nothing of how its modules are cut over tp"
        remedy = 'write tensor: {plan: {"layers.*.mlp.up": column, "layers.*.mlp.down": row, …}}'
        if not is_theirs:
            remedy += ", or give the module that attribute: tp_plan"
        raise refused(place, finding, remedy)
    entries = {str(pattern): str(word) for pattern, word in own.items()}
    return _Plan(place=place, entries=entries, theirs=is_theirs)


def _their_plan(module: nn.Module) -> dict[str, str]:
    """What the config says of the base model, what the class adds (the head), and what the module
    made of both: before 5.0 it leaves out the class's."""
    prefix = getattr(module, "base_model_prefix", "")
    base = getattr(getattr(module, "config", None), "base_model_tp_plan", None) or {}
    named = {f"{prefix}.{pattern}": word for pattern, word in base.items()}
    made = {
        pattern: word
        for pattern, word in (getattr(module, "_tp_plan", None) or {}).items()
        if pattern not in base
    }
    return {**named, **(getattr(type(module), "_tp_plan", None) or {}), **made}


def _named(module: nn.Module, spec: Spec) -> tuple[str, str]:
    """Where the spec says which model it is, and what it is called."""
    match spec.model:
        case HuggingFaceModel(hf=name):
            return "model.hf", name
        case ExternalModel(target=name):
            return "model.target", name
        case ModelShape():  # another module was given in its place
            return "model", type(module).__name__
        case model:
            assert_never(model)


def _known(module: nn.Module, plan: _Plan) -> Iterator[tuple[str, Role]]:
    for pattern, word in plan.entries.items():
        names = list(matching(module, pattern))
        is_head = any(module.get_submodule(name) is _head(module) for name in names)
        is_gathered = word in _GATHERED and not is_head
        if word not in (*GIVEN, *_THEIRS) or is_gathered:
            within = " of a module that is not the head" if is_gathered else ""
            finding = f"the plan's entry {pattern}: {word}{within} is none that ptrain knows"
            words = (*GIVEN, *_THEIRS)
            remedy = f"known are {', '.join(words)}; write a tensor.plan of your own"
            raise refused(plan.place, finding, remedy)
        if not names and not plan.theirs:
            finding = f"no module is called {pattern}"
            raise refused(plan.place, finding, f"this model has {_shown(module)}")
        role = Role(word) if word in GIVEN else _THEIRS[word]
        if names and role is not None:
            yield pattern, role


def _head(module: nn.Module) -> nn.Module | None:
    """The layer to the vocabulary, where the model says which it is."""
    ask = getattr(module, "get_output_embeddings", None)
    head = ask() if callable(ask) else None
    return head if isinstance(head, nn.Module) else None


def _shown(module: nn.Module) -> str:
    """The names of its layers, once for all blocks."""
    names = [name for name, child in module.named_modules() if isinstance(child, _LAYERS)]
    patterns = dict.fromkeys(
        ".".join("*" if part.isdigit() else part for part in name.split(".")) for name in names
    )
    return ", ".join(patterns) or "no linear layer and no embedding"


_LAYERS = (nn.Linear, nn.Embedding)


def _whole_inputs(module: nn.Module, roles: Roles) -> Iterator[tuple[str, Role]]:
    """The sub-blocks whose column operators share an input. A block is none: it adds to its own."""
    blocks = getattr(module, "_no_split_modules", None) or ()
    parents = dict.fromkeys(
        pattern.rpartition(".")[0] for pattern, role in roles if role is Role.COLUMN
    )
    for pattern in parents:
        found = [module.get_submodule(name) for name in matching(module, pattern)]
        if pattern and not any(type(each).__name__ in blocks for each in found):
            yield pattern, Role.WHOLE_INPUT


def _tied(module: nn.Module, roles: Roles) -> Iterator[tuple[str, Role]]:
    """What shares its weight with a module that is cut is cut alike."""
    owners: dict[int, list[str]] = {}
    for name, child in module.named_modules():
        if isinstance(child, _LAYERS):
            owners.setdefault(id(child.weight), []).append(name)
    cut = {
        name
        for pattern, role in roles
        if role in (Role.VOCABULARY, Role.HEAD)
        for name in matching(module, pattern)
    }
    for names in owners.values():
        if cut & set(names):
            for name in names:
                if name not in cut:
                    is_table = isinstance(module.get_submodule(name), nn.Embedding)
                    yield name, Role.VOCABULARY if is_table else Role.HEAD


def _require(child: nn.Module, named: tuple[str, Role], place: str, spec: Spec) -> None:
    """That a module can have its role on this many ranks."""
    (name, role), degree = named, spec.degree(Axis.TP)
    kind = _KINDS.get(role)
    if kind is not None and not isinstance(child, kind):
        finding = f"{name} is a {type(child).__name__}; {role} is a role of {kind.__name__}"
        raise refused(place, finding, "give it no role, or another one")
    match role:
        case Role.COLUMN | Role.ROW:
            assert isinstance(child, nn.Linear)
            is_column = role is Role.COLUMN
            size = child.out_features if is_column else child.in_features
            what = "outputs" if is_column else "inputs"
            _require_divisible(f"the {size} {what} of {name}", size, degree)
        case Role.HEAD:
            assert isinstance(child, nn.Linear)
            if child.out_features % degree and not spec.tensor.loss_parallel:
                finding = f"false: the {child.out_features} outputs of {name} are cut unequally"
                remedy = f"write true, or a vocabulary that is a multiple of {degree}"
                raise refused("tensor.loss_parallel", finding, remedy)


def _require_divisible(what: str, size: int, degree: int) -> None:
    if size % degree:
        divisors = [str(each) for each in range(1, size + 1) if size % each == 0]
        finding = f"tp={degree} does not divide {what}"
        raise refused("mesh.tp", finding, f"choose tp from {', '.join(divisors)}")


def _require_one_each(module: nn.Module, roles: Roles, place: str) -> None:
    seen: dict[str, Role] = {}
    for pattern, role in roles:
        for name in matching(module, pattern):
            if name in seen:
                finding = f"{name} has two roles, {seen[name]} and {role}"
                raise refused(place, finding, "give it one")
            seen[name] = role


def _require_all_within(module: nn.Module, roles: Roles, place: str) -> None:
    """What has parameters among the operators of a sub-block sees a slice of the features: without
    a role each rank would take its own part of a gradient for all of it."""
    named = {name: role for pattern, role in roles for name in matching(module, pattern)}
    parents = [name for name, role in named.items() if role is Role.WHOLE_INPUT]
    for name, child in module.named_modules():
        has_parameters = next(child.parameters(recurse=False), None) is not None
        is_within = any(name.startswith(f"{parent}.") for parent in parents)
        if is_within and has_parameters and name not in named:
            finding = f"{name} has parameters and stands among operators that are cut, but no role"
            raise refused(place, finding, f"write a tensor.plan that gives it one, as {_WITHIN}")


_WITHIN = "shared where it is used between a column and a row"


def _require_whole_tokens(spec: Spec) -> None:
    """The algebra refuses it where the spec says that the model is not built in."""
    for factor in spec.factors:
        if factor.axis is Axis.TP and factor.placement.activations != R:
            finding = f"not yet: {factor.placement.activations}, of a module that is not built in"
            raise refused("placement.tp.activations", finding, "write activations: R")


def _require_heads(module: nn.Module, spec: Spec) -> None:
    """A head is computed by one rank. Models of transformers say how many they have."""
    config = getattr(module, "config", None)
    for field in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, field, None)
        if isinstance(heads, int):
            _require_divisible(f"{field}: {heads}", heads, spec.degree(Axis.TP))


def _require_no_dropout(module: nn.Module, place: str) -> None:
    for name, child in module.named_modules():
        found = {key: value for key, value in vars(child).items() if "drop" in key}
        if isinstance(child, nn.Dropout):
            found["p"] = child.p
        for key, value in found.items():
            if isinstance(value, float) and value > 0.0:
                finding = f"not yet: {f'{name}.{key}'.lstrip('.')} is {value}, and dropout of cut "
                finding += "activations is known of built-in models only"
                raise refused(place, finding, "build it with a dropout of 0")
