"""What a model that is not built in must be to be cut over tp as its plan says: operators of the
right kind and sizes, paired, and every gradient summed by somebody."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import gcd

from torch import nn

from ptrain.errors import Fault, SpecError, refused
from ptrain.models.alike import require_alike
from ptrain.models.linear import features, is_linear
from ptrain.models.one_pass import OnePass
from ptrain.models.own_tokens import TokenSlices
from ptrain.models.slices import follow
from ptrain.models.transformer import Transformer
from ptrain.models.units import blocks_of
from ptrain.spec import slips
from ptrain.spec.axis import Axis
from ptrain.spec.role import COLUMNS, ROWS, Fusions, Role, Roles, fits, in_any_block
from ptrain.spec.spec import Spec

_LINEAR = (*COLUMNS, *ROWS)
_KINDS = {**dict.fromkeys((*_LINEAR, Role.HEAD), nn.Linear), Role.VOCABULARY: nn.Embedding}


def cutting(
    module: nn.Module, roles: Roles, blocks: Sequence[str], place: str, spec: Spec
) -> tuple[Roles, Fusions]:
    """Return roles of what is used on a rank's slice of the tokens, which it has in `blocks`, if
    any; and which column layers are several projections in one, as the model takes what they give
    apart. Raises SpecError where it cannot be cut; `place` is whose the plan is. Runs the model
    forward, whole."""
    named = {name: role for pattern, role in roles for name in matching(module, pattern)}
    _require_one_role(module, roles, place)
    _require_something_cut(named, place)
    _require_one_head(named, place)
    faults = (*_kinds(module, roles, place), *_sizes(module, roles, spec.degree(Axis.TP)))
    if faults := (*faults, *_unequal(module, named, spec)):
        raise SpecError(*faults)
    counted = frozenset(p.rpartition(".")[0] for p, role in roles if role is Role.COUNT)
    owners = frozenset(name for pattern in counted for name in matching(module, pattern))
    once = OnePass(module, spec)
    _require_counted(once, module, spec)
    tokens = TokenSlices(named, blocks, spec.batch.sequence)
    follower = follow(module, named, owners, tokens, once=once, is_naive=spec.tensor.is_naive)
    if follower.problem:
        raise refused(place, *follower.problem)
    lengths = {name: follower.projections.lengths(name) for name in named}
    _require_fused(named, lengths, place)
    if faults := tuple(_unequal_projections(lengths, spec.degree(Axis.TP))):
        raise SpecError(*faults)
    if blocks:
        _require_used_once(tokens.on_both, place)
        require_alike(module, named, blocks, place, spec)
    summed = tokens.modules - {n for n, role in named.items() if role is Role.SHARED}
    return tuple(_shared(module, summed)), tuple(_by_pattern(module, roles, lengths))


def _require_used_once(modules: set[str], place: str) -> None:
    if modules:
        finding = f"the parameters of {min(modules)} are used on a slice of the tokens and on all"
        raise refused(place, finding, "write placement.tp.activations=R")


def _shared(module: nn.Module, names: set[str]) -> Iterator[tuple[str, Role]]:
    """Yield the roles of modules by pattern, where all that it means are among them."""
    for pattern in dict.fromkeys(map(in_any_block, sorted(names))):
        alike = list(matching(module, pattern))
        patterns = [pattern] if names.issuperset(alike) else names.intersection(alike)
        yield from ((one, Role.SHARED) for one in sorted(patterns))


def _by_pattern(
    module: nn.Module, roles: Roles, lengths: dict[str, tuple[int, ...]]
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the lengths of fused projections, where all blocks have the same once for all."""
    for pattern, role in roles:
        if role in COLUMNS:
            names = list(matching(module, pattern))
            same = {lengths[name] for name in names}
            alike = [pattern] if len(same) == 1 else names
            yield from (
                (name, its) for name in alike if (its := lengths.get(name, lengths[names[0]]))
            )


def _require_fused(named: dict[str, Role], lengths: dict[str, tuple[int, ...]], place: str) -> None:
    for name, role in named.items():
        if role is Role.FUSED_COLUMN and not lengths[name]:
            finding = f"{name} is a fused column, and what it gives is not taken apart into "
            finding += "projections, one behind the other"
            raise refused(place, finding, "give it the role column, or none")


def _unequal_projections(lengths: dict[str, tuple[int, ...]], degree: int) -> Iterator[Fault]:
    for name, its in lengths.items():
        if any(length % degree for length in its):
            finding = f"tp={degree} does not divide the projections of {name}: "
            finding += ", ".join(map(str, its))
            common = gcd(*its)
            choices = (str(divisor) for divisor in range(1, common + 1) if common % divisor == 0)
            yield Fault(
                place="mesh.tp", finding=finding, remedy=f"choose tp from {', '.join(choices)}"
            )
            return


def matching(module: nn.Module, pattern: str) -> Iterator[str]:
    """The names of the modules that a pattern means."""
    return (name for name, _ in module.named_modules() if fits(pattern, name))


def _require_counted(once: OnePass, module: nn.Module, spec: Spec) -> None:
    """What cut operators send is counted by `batch.sequence`, of samples that are not tokens too:
    there it is what goes from block to block."""
    blocks = blocks_of(module, spec.model.blocks)
    if spec.data.function is None or not blocks:
        return
    count = once.vectors(blocks[0])
    if count is not None and count != spec.batch.sequence:
        finding = f"{spec.batch.sequence}, and {blocks[0]} gives {count} vectors of a sample, "
        finding += "which operators that are cut over tp send"
        raise refused("batch.sequence", finding, f"write batch.sequence={count}")


def _require_one_role(module: nn.Module, roles: Roles, place: str) -> None:
    seen: dict[str, Role] = {}
    for pattern, role in roles:
        for name in _meant(module, pattern, role):
            if name in seen:
                finding = f"{name} has two roles, {seen[name]} and {role}"
                raise refused(place, finding, "give it one")
            seen[name] = role


def _meant(module: nn.Module, pattern: str, role: Role) -> Iterator[str]:
    """The names of the modules that a pattern means, or of the attributes of such that count."""
    if role is not Role.COUNT:
        return matching(module, pattern)
    owner, _, attribute = pattern.rpartition(".")
    return (f"{name}.{attribute}" for name in matching(module, owner))


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
            is_fitting = is_linear(child) if role in _LINEAR else kind and isinstance(child, kind)
            if kind is not None and not is_fitting:
                actual = slips.a(type(child).__name__)
                finding = f"{name} is {actual}; {role} is a role of {kind.__name__}"
                yield Fault(place=place, finding=finding, remedy="give it no role, or another one")
                break


def _sizes(module: nn.Module, roles: Roles, degree: int) -> Iterator[Fault]:
    """Yield a fault for each size that the degree does not divide; the choices divide all that is
    cut."""
    sizes = {**_heads(module), **_counts(module, roles), **dict(_cut_sizes(module, roles))}
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


def _counts(module: nn.Module, roles: Roles) -> dict[str, int]:
    """Return the numbers that attributes count."""
    counts: dict[str, int] = {}
    for pattern, role in roles:
        owner, _, attribute = pattern.rpartition(".")
        for name in matching(module, owner) if role is Role.COUNT else ():
            size = getattr(module.get_submodule(name), attribute)
            counts.setdefault(f"{pattern}: {size}", size)
    return counts


def _cut_sizes(module: nn.Module, roles: Roles) -> Iterator[tuple[str, int]]:
    """Of layers of one size the first one's name."""
    seen: set[int] = set()
    for pattern, role in roles:
        for name in matching(module, pattern):
            child = module.get_submodule(name)
            if role not in _LINEAR or not is_linear(child):
                continue
            is_column = role in COLUMNS
            size = features(child)[is_column]
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
