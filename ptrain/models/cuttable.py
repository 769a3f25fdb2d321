"""What a model that is not built in must be to be cut over tp as its plan says: operators of the
right kind and sizes, paired, and every gradient summed by somebody."""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd

from torch import nn

from ptrain.errors import Fault, SpecError, refused
from ptrain.models.dropout import dropouts
from ptrain.models.slices import misplaced
from ptrain.models.transformer import Transformer
from ptrain.spec import slips
from ptrain.spec.axis import Axis
from ptrain.spec.placement import R
from ptrain.spec.role import Role, Roles, fits
from ptrain.spec.spec import Spec

_KINDS = {
    Role.COLUMN: nn.Linear,
    Role.ROW: nn.Linear,
    Role.HEAD: nn.Linear,
    Role.VOCABULARY: nn.Embedding,
}


def require_cuttable(module: nn.Module, roles: Roles, place: str, spec: Spec) -> None:
    """Raises SpecError; `place` is whose the plan is. Runs the model forward once, whole."""
    named = {name: role for pattern, role in roles for name in matching(module, pattern)}
    _require_whole_tokens(spec)
    _require_one_role(module, roles, place)
    _require_something_cut(named, place)
    _require_one_head(named, place)
    faults = (*_kinds(module, roles, place), *_sizes(module, roles, spec.degree(Axis.TP)))
    if faults := (*faults, *_unequal(module, named, spec)):
        raise SpecError(*faults)
    _require_no_dropout(module, place)
    sequence, is_naive = spec.batch.sequence, spec.tensor.is_naive
    if problem := misplaced(module, named, sequence=sequence, is_naive=is_naive):
        raise refused(place, *problem)


def matching(module: nn.Module, pattern: str) -> Iterator[str]:
    """The names of the modules that a pattern means."""
    return (name for name, _ in module.named_modules() if fits(pattern, name))


def _require_whole_tokens(spec: Spec) -> None:
    """The algebra refuses it where the spec says that the model is not built in."""
    for factor in spec.factors:
        if factor.axis is Axis.TP and factor.placement.activations != R:
            finding = f"not yet: {factor.placement.activations}, of a module that is not built in"
            raise refused("placement.tp.activations", finding, "write activations: R")


def _require_one_role(module: nn.Module, roles: Roles, place: str) -> None:
    seen: dict[str, Role] = {}
    for pattern, role in roles:
        for name in matching(module, pattern):
            if name in seen:
                finding = f"{name} has two roles, {seen[name]} and {role}"
                raise refused(place, finding, "give it one")
            seen[name] = role


def _require_something_cut(named: dict[str, Role], place: str) -> None:
    if not set(_KINDS) & set(named.values()):
        words = ", ".join(_KINDS)
        finding = f"the plan cuts nothing: it gives no module a role that cuts ({words})"
        raise refused(place, finding, "give roles to the layers, or write no tp")


def _require_one_head(named: dict[str, Role], place: str) -> None:
    heads = [name for name, role in named.items() if role is Role.HEAD]
    if len(heads) > 1:
        finding = f"{heads[0]} and {heads[1]} are head; the layer to the vocabulary is one"
        raise refused(place, finding, "give the others column, or another role")


def _kinds(module: nn.Module, roles: Roles, place: str) -> Iterator[Fault]:
    """Yield for each pattern a fault of the first module of another kind than the role's."""
    for pattern, role in roles:
        for name in matching(module, pattern):
            child, kind = module.get_submodule(name), _KINDS.get(role)
            if kind is not None and not isinstance(child, kind):
                actual = slips.a(type(child).__name__)
                finding = f"{name} is {actual}; {role} is a role of {kind.__name__}"
                yield Fault(place=place, finding=finding, remedy="give it no role, or another one")
                break


def _sizes(module: nn.Module, roles: Roles, degree: int) -> Iterator[Fault]:
    """Yield a fault for each size that the degree does not divide; the choices divide all that is
    cut."""
    sizes = {**_heads(module), **dict(_cut_sizes(module, roles))}
    common = gcd(*sizes.values())
    choices = ", ".join(str(divisor) for divisor in range(1, common + 1) if common % divisor == 0)
    for what, size in sizes.items():
        if size % degree:
            finding = f"tp={degree} does not divide {what}"
            yield Fault(place="mesh.tp", finding=finding, remedy=f"choose tp from {choices}")


def _heads(module: nn.Module) -> dict[str, int]:
    """Return the numbers of heads, each of which one rank computes. Models of transformers, and
    ours, say how many they have."""
    if isinstance(module, Transformer):
        shape = module.shape
        return {f"heads: {shape.heads}": shape.heads, f"kv_heads: {shape.kv_heads}": shape.kv_heads}
    config = getattr(module, "config", None)
    fields = ("num_attention_heads", "num_key_value_heads")
    counts = {field: getattr(config, field, None) for field in fields}
    return {f"{field}: {size}": size for field, size in counts.items() if isinstance(size, int)}


def _cut_sizes(module: nn.Module, roles: Roles) -> Iterator[tuple[str, int]]:
    """Of layers of one size the first one's name."""
    seen: set[int] = set()
    for pattern, role in roles:
        for name in matching(module, pattern):
            child = module.get_submodule(name)
            if role not in (Role.COLUMN, Role.ROW) or not isinstance(child, nn.Linear):
                continue
            is_column = role is Role.COLUMN
            size = child.out_features if is_column else child.in_features
            if size not in seen:
                seen.add(size)
                yield f"the {size} {'outputs' if is_column else 'inputs'} of {name}", size


def _unequal(module: nn.Module, named: dict[str, Role], spec: Spec) -> Iterator[Fault]:
    degree = spec.degree(Axis.TP)
    for name, role in named.items():
        child = module.get_submodule(name)
        is_head = role is Role.HEAD and isinstance(child, nn.Linear)
        if is_head and child.out_features % degree and not spec.tensor.loss_parallel:
            yield Fault(
                place="tensor.loss_parallel",
                finding=f"false: the {child.out_features} outputs of {name} are cut unequally",
                remedy=f"write true, or a vocabulary that is a multiple of {degree}",
            )


def _require_no_dropout(module: nn.Module, place: str) -> None:
    for name, value in dropouts(module):
        finding = (
            f"not yet: {name} is {value}, and dropout of cut activations is known of built-in "
        )
        finding += "models only"
        raise refused(place, finding, "build it with a dropout of 0")
