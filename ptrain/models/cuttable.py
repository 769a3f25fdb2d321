"""Check that tensor parallelism can shard a custom model as its plan states: operators of the right
kind and size, in column-row pairs, with every gradient summed.

For sequence parallelism the check also covers the modules between sub-blocks, which must compute
each token independently. One sample is computed shard by shard, as the ranks would, and compared
with the pass over all tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from math import gcd
from typing import Any

import torch
from torch import Tensor, nn

from ptrain.errors import Fault, SpecError, input_error
from ptrain.internals.fakes import detect_fake_mode
from ptrain.models.boundary import convert_exceptions, describe_error
from ptrain.models.contract import OnePass, least_embeddings
from ptrain.models.ledger import watch_modules, with_first
from ptrain.models.modes import in_mode
from ptrain.models.parting import is_linear, linear_features, standing_alone
from ptrain.models.slices import TokenSlices, follow_pass
from ptrain.models.transformer import Transformer
from ptrain.models.units import blocks_of
from ptrain.spec import slips
from ptrain.spec.placement import (
    COLUMNS,
    ROWS,
    Axis,
    Fusions,
    Role,
    Roles,
    in_any_block,
    matches_pattern,
)
from ptrain.spec.spec import Spec

Named = Mapping[str, Role]
_STRIDE = 7  # distance of consecutive tokens, so that tokens differ from positions
_REMEDY = "Use `placement.tp.activations=R`."


@dataclass(frozen=True, slots=True)
class _Boundary:
    """A module input or output at which a rank takes its shard of the tokens, or all-gathers
    them."""

    name: str
    of_input: bool
    gathers: bool


class _AllTokens:
    """The tensors that cross each boundary in the pass over all tokens, in call order."""

    def __init__(self) -> None:
        self.tensors: dict[_Boundary, list[Tensor]] = {}

    def cross(self, at: _Boundary, tensor: Tensor) -> Tensor:
        """Record a tensor at a boundary, and return it unchanged."""
        self.tensors.setdefault(at, []).append(tensor)
        return tensor


@dataclass
class _ShardPass:
    """A pass over one shard of the tokens.

    It compares each tensor that would be all-gathered with the matching shard of the full pass,
    then continues with the full tensor. `problem` describes the first difference.
    """

    whole: _AllTokens
    tokens: slice
    problem: str = ""
    calls: dict[_Boundary, int] = field(default_factory=dict)

    def cross(self, at: _Boundary, tensor: Tensor) -> Tensor:
        """Return the tensor that a rank continues with after a boundary."""
        if not at.gathers:
            return tensor[:, self.tokens]
        number = self.calls.get(at, 0)
        self.calls[at] = number + 1
        whole = self.whole.tensors[at][number]
        if not self.problem and not _is_close(tensor, whole[:, self.tokens]):
            verb = "receives" if at.of_input else "returns"
            self.problem = f"{at.name} {verb} other values for a shard of the tokens than "
            self.problem += (
                "for all tokens: a module between the sub-blocks does not "
                "compute each token independently"
            )
        # Each difference is reported once: the pass continues with correct values.
        return whole


def require_equal_shards(
    module: nn.Module, named: Named, blocks: Sequence[str], place: str, spec: Spec
) -> None:
    """Raise SpecError if the model computes other values on shards of the tokens than on all
    tokens.

    The model is left unchanged. Models on meta or under fake tensors are not checked.

    Args:
        module: The model.
        named: Role of each module.
        blocks: Names of the blocks between which ranks hold token shards.
        place: Place of the spec that errors name.
        spec: Gives the tp degree and the sequence length.
    """
    if detect_fake_mode() is not None or next(module.parameters()).is_meta:
        return
    once = OnePass(module, spec)
    if spec.data.function is None:
        _fill_distinct_tokens(once, module)
    whole = _AllTokens()
    degree, sequence = spec.degree(Axis.TP), spec.batch.sequence
    parts = [
        _ShardPass(whole, slice(sequence * index // degree, sequence * (index + 1) // degree))
        for index in range(degree)
    ]

    def fault(error: BaseException) -> Fault:
        return Fault(
            place=place,
            finding=f"the model cannot run on a shard of the tokens: {describe_error(error)}",
            remedy=_REMEDY,
        )

    with torch.no_grad(), in_mode(module, training=False), convert_exceptions(fault):
        # The pass over all tokens comes first: the others compare with its tensors.
        runs: list[_AllTokens | _ShardPass] = [whole, *parts]
        for tensors in runs:
            with _watch_boundaries(module, named, blocks, tensors), once.prepare() as run:
                run()
    if problem := next((part.problem for part in parts if part.problem), ""):
        raise input_error(place, problem, _REMEDY)


def _fill_distinct_tokens(once: OnePass, module: nn.Module) -> None:
    """Give each position of the sample a different token, as far as the vocabulary allows."""
    count = least_embeddings(module) or 1
    for tokens in once.samples.tensors:
        numbers = torch.arange(tokens.shape[-1], device=tokens.device)
        # A prime distance reaches every token of a vocabulary that it does not divide before one
        # repeats.
        tokens.copy_((numbers * _STRIDE % count).expand_as(tokens))


def _is_close(tensor: Tensor, expected: Tensor) -> bool:
    """Return True if tensors are equal up to rounding: sums of other shapes may round
    differently."""
    size = float(expected.abs().max()) if expected.numel() else 0.0
    tolerance = float(torch.finfo(expected.dtype).eps ** 0.5) * size
    return tensor.shape == expected.shape and torch.allclose(tensor, expected, 0.0, tolerance)


@contextmanager
def _watch_boundaries(
    module: nn.Module, named: Named, blocks: Sequence[str], tensors: _AllTokens | _ShardPass
) -> Iterator[None]:
    """Temporarily pass every tensor that crosses a boundary through `tensors`."""
    boundaries = {(at.name, at.of_input): at for at in _iter_boundaries(module, named, blocks)}

    def enter(name: str, _: nn.Module, args: Any, kwargs: Any) -> Any:
        if (at := boundaries.get((name, True))) is None:
            return None
        return with_first(args, kwargs, partial(tensors.cross, at))

    def leave(name: str, _: nn.Module, __: object, output: Any) -> Any:
        if (at := boundaries.get((name, False))) is None:
            return None
        if isinstance(output, tuple):
            first, *others = output
            return (tensors.cross(at, first), *others)
        return tensors.cross(at, output)

    modules = {name: module.get_submodule(name) for name, _ in boundaries}
    with watch_modules(modules.items(), before=enter, after=leave):
        yield


def _iter_boundaries(module: nn.Module, named: Named, blocks: Sequence[str]) -> Iterator[_Boundary]:
    """Yield the boundaries: the blocks' ends, inputs of sub-blocks and outputs of row layers."""
    yield _Boundary(blocks[0], of_input=True, gathers=False)
    alone = standing_alone(named.items())
    for name, role in named.items():
        if not any(name.startswith(f"{block}.") for block in blocks):
            continue
        if role is Role.WHOLE_INPUT or (role in COLUMNS and name in alone):
            yield _Boundary(name, of_input=True, gathers=True)
        elif role in ROWS:
            yield _Boundary(name, of_input=False, gathers=False)
    yield _Boundary(blocks[-1], of_input=False, gathers=True)


_LINEAR = (*COLUMNS, *ROWS)
_KINDS = {**dict.fromkeys((*_LINEAR, Role.HEAD), nn.Linear), Role.VOCABULARY: nn.Embedding}


def check_sharding(
    module: nn.Module, roles: Roles, blocks: Sequence[str], place: str, spec: Spec
) -> tuple[Roles, Fusions]:
    """Check that the plan's roles shard the model correctly. Runs the full model forward.

    Args:
        module: The model.
        roles: Roles by pattern of module names.
        blocks: Names of the blocks, if ranks hold token shards between sub-blocks; else empty.
        place: Place of the spec that holds the plan, for errors.
        spec: Gives degree, batch and tensor-parallel options.

    Returns:
        The roles of modules that are used on token shards, whose gradients must be summed; and the
            widths of the projections of each column layer that fuses several.

    Raises:
        SpecError: The model cannot be sharded by this plan.
    """
    named = {name: role for pattern, role in roles for name in matching_names(module, pattern)}
    _require_one_role(module, roles, place)
    _require_something_cut(named, place)
    _require_one_head(named, place)
    faults = (
        *_class_faults(module, roles, place),
        *_size_faults(module, roles, spec.degree(Axis.TP)),
    )
    if faults := (*faults, *_uneven_head_faults(module, named, spec)):
        raise SpecError(*faults)
    counted = frozenset(p.rpartition(".")[0] for p, role in roles if role is Role.COUNT)
    owners = frozenset(name for pattern in counted for name in matching_names(module, pattern))
    # One object for the two passes below, so that both have the same sample.
    once = OnePass(module, spec)
    _require_counted(once, module, spec)
    tokens = TokenSlices(named, blocks, spec.batch.sequence)
    follower = follow_pass(module, named, owners, tokens, once=once, is_naive=spec.tensor.is_naive)
    if follower.problem:
        raise input_error(place, *follower.problem)
    lengths = {name: follower.projections.projection_widths(name) for name in named}
    _require_fused(named, lengths, place)
    if faults := tuple(_unequal_projections(lengths, spec.degree(Axis.TP))):
        raise SpecError(*faults)
    if blocks:
        if tokens.on_both:
            raise input_error(
                place,
                f"the parameters of {min(tokens.on_both)} are used on a shard of the tokens and on "
                "all tokens",
                "Use `placement.tp.activations=R`.",
            )
        require_equal_shards(module, named, blocks, place, spec)
    summed = tokens.modules - {n for n, role in named.items() if role is Role.SHARED}
    return tuple(_shared_modules(module, summed)), tuple(_by_pattern(module, roles, lengths))


def _shared_modules(module: nn.Module, names: set[str]) -> Iterator[tuple[str, Role]]:
    """Yield (pattern, SHARED) pairs for modules; single names where the pattern matches others
    too."""
    for pattern in dict.fromkeys(map(in_any_block, sorted(names))):
        alike = list(matching_names(module, pattern))
        patterns = [pattern] if names.issuperset(alike) else names.intersection(alike)
        yield from ((one, Role.SHARED) for one in sorted(patterns))


def _by_pattern(
    module: nn.Module, roles: Roles, lengths: dict[str, tuple[int, ...]]
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the projection widths of fused column layers, by pattern if all blocks agree."""
    for pattern, role in roles:
        if role in COLUMNS:
            names = list(matching_names(module, pattern))
            same = {lengths[name] for name in names}
            alike = [pattern] if len(same) == 1 else names
            yield from (
                (name, its) for name in alike if (its := lengths.get(name, lengths[names[0]]))
            )


def _require_fused(named: dict[str, Role], lengths: dict[str, tuple[int, ...]], place: str) -> None:
    """Raise SpecError if a layer with the role fused column is not split into projections."""
    for name, role in named.items():
        if role is Role.FUSED_COLUMN and not lengths[name]:
            finding = f"{name} has the role fused column, but its output is not split into "
            finding += "consecutive projections"
            raise input_error(place, finding, "Give it the role `column`, or no role.")


def _unequal_projections(lengths: dict[str, tuple[int, ...]], degree: int) -> Iterator[Fault]:
    """Yield a fault for the first fused layer with a projection that the degree does not divide."""
    for name, its in lengths.items():
        if any(length % degree for length in its):
            finding = f"tp={degree} does not divide the projections of {name}: "
            finding += ", ".join(map(str, its))
            common = gcd(*its)
            choices = (str(divisor) for divisor in range(1, common + 1) if common % divisor == 0)
            yield Fault(
                place="mesh.tp",
                finding=finding,
                remedy=f"Use one of {', '.join(choices)} for `mesh.tp`.",
            )
            return


def matching_names(module: nn.Module, pattern: str) -> Iterator[str]:
    """Return the names of the modules that match a pattern.

    Args:
        module: The module whose submodules are searched.
        pattern: A dotted name, in which `*` matches an index.
    """
    return (name for name, _ in module.named_modules() if matches_pattern(pattern, name))


def _require_counted(once: OnePass, module: nn.Module, spec: Spec) -> None:
    """Raise SpecError if a user's sample has another number of vectors than `batch.sequence`.

    Tensor-parallel traffic is computed from `batch.sequence`, also for samples that are not tokens;
    there the output of the first block gives the number of vectors.
    """
    blocks = blocks_of(module, spec.model.blocks)
    if spec.data.function is None or not blocks:
        return
    count = once.count_vectors(blocks[0])
    if count is not None and count != spec.batch.sequence:
        finding = f"{spec.batch.sequence}, but {blocks[0]} returns {count} vectors per sample, "
        finding += "and tensor-parallel traffic is counted by batch.sequence"
        raise input_error("batch.sequence", finding, f"Use `batch.sequence={count}`.")


def _require_one_role(module: nn.Module, roles: Roles, place: str) -> None:
    """Raise SpecError if two patterns give one module or attribute different roles."""
    seen: dict[str, Role] = {}
    for pattern, role in roles:
        for name in _names_of_role(module, pattern, role):
            if name in seen:
                raise input_error(
                    place, f"{name} has two roles, {seen[name]} and {role}", "Give it one role."
                )
            seen[name] = role


def _names_of_role(module: nn.Module, pattern: str, role: Role) -> Iterator[str]:
    """Return the names of the modules that a pattern matches, or of attributes for the role
    count."""
    if role is not Role.COUNT:
        return matching_names(module, pattern)
    owner, _, attribute = pattern.rpartition(".")
    return (f"{name}.{attribute}" for name in matching_names(module, owner))


def _require_something_cut(named: dict[str, Role], place: str) -> None:
    """Raise SpecError if no module has a role that shards it."""
    if not set(_KINDS) & set(named.values()):
        words = ", ".join(_KINDS)
        raise input_error(
            place,
            f"the plan shards nothing: no module has one of the roles {words}",
            "Give roles to the layers, or use `mesh.tp=1`.",
        )


def _require_one_head(named: dict[str, Role], place: str) -> None:
    """Raise SpecError if several modules have the role head."""
    heads = [name for name, role in named.items() if role is Role.HEAD]
    if len(heads) > 1:
        raise input_error(
            place,
            f"{heads[0]} and {heads[1]} both have the role head; a model has one output head",
            "Give the others the role `column`, or another role.",
        )


def _class_faults(module: nn.Module, roles: Roles, place: str) -> Iterator[Fault]:
    """Yield one fault per pattern, for its first module whose class does not fit the role."""
    for pattern, role in roles:
        for name in matching_names(module, pattern):
            child, kind = module.get_submodule(name), _KINDS.get(role)
            is_fitting = is_linear(child) if role in _LINEAR else kind and isinstance(child, kind)
            if kind is not None and not is_fitting:
                actual = slips.with_article(type(child).__name__)
                yield Fault(
                    place=place,
                    finding=f"{name} is {actual}; the role {role} needs {kind.__name__}",
                    remedy=("Remove its role, or use another one."),
                )
                break


def _size_faults(module: nn.Module, roles: Roles, degree: int) -> Iterator[Fault]:
    """Yield a fault for each size that the degree does not divide; remedies list common
    divisors."""
    sizes = {
        **_head_counts(module),
        **_count_attributes(module, roles),
        **dict(_cut_sizes(module, roles)),
    }
    common = gcd(*sizes.values())
    choices = ", ".join(str(divisor) for divisor in range(1, common + 1) if common % divisor == 0)
    for what, size in sizes.items():
        if size % degree:
            yield Fault(
                place="mesh.tp",
                finding=f"tp={degree} does not divide {what}",
                remedy=f"Use one of {choices} for `mesh.tp`.",
            )


def _head_counts(module: nn.Module) -> dict[str, int]:
    """Return the numbers of attention heads, which the degree must divide, by description.

    They come from the shape of a built-in model or the config of a Transformers model.
    """
    if isinstance(module, Transformer):
        shape = module.shape
        return {f"heads: {shape.heads}": shape.heads, f"kv_heads: {shape.kv_heads}": shape.kv_heads}
    config = getattr(module, "config", None)
    fields = ("num_attention_heads", "num_key_value_heads")
    counts = {field: getattr(config, field, None) for field in fields}
    return {f"{field}: {size}": size for field, size in counts.items() if isinstance(size, int)}


def _count_attributes(module: nn.Module, roles: Roles) -> dict[str, int]:
    """Return the values of attributes with the role count, by description."""
    counts: dict[str, int] = {}
    for pattern, role in roles:
        owner, _, attribute = pattern.rpartition(".")
        for name in matching_names(module, owner) if role is Role.COUNT else ():
            size = getattr(module.get_submodule(name), attribute)
            counts.setdefault(f"{pattern}: {size}", size)
    return counts


def _cut_sizes(module: nn.Module, roles: Roles) -> Iterator[tuple[str, int]]:
    """Yield description and size of each distinct sharded width, with the first layer that has
    it."""
    seen: set[int] = set()
    for pattern, role in roles:
        for name in matching_names(module, pattern):
            child = module.get_submodule(name)
            if role not in _LINEAR or not is_linear(child):
                continue
            is_column = role in COLUMNS
            if (size := linear_features(child)[is_column]) not in seen:
                seen.add(size)
                yield f"the {size} {'outputs' if is_column else 'inputs'} of {name}", size


def _uneven_head_faults(module: nn.Module, named: dict[str, Role], spec: Spec) -> Iterator[Fault]:
    """Yield a fault for each head whose output the degree does not divide, without loss
    parallelism."""
    degree = spec.degree(Axis.TP)
    for name, role in named.items():
        child = module.get_submodule(name)
        is_head = role is Role.HEAD and isinstance(child, nn.Linear)
        if is_head and child.out_features % degree and not spec.tensor.loss_parallel:
            yield Fault(
                place="tensor.loss_parallel",
                finding=(
                    f"false: the {child.out_features} outputs of {name} are not a "
                    f"multiple of tp={degree}"
                ),
                remedy=(
                    "Use `tensor.loss_parallel=true`, or a vocabulary that is a multiple "
                    f"of {degree}."
                ),
            )
