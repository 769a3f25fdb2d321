"""The tensor-parallel roles of a model's layers.

They come from the spec's `tensor.plan`, else from the module's `tp_plan` (of the user's function or
of transformers), else from a table by transformers model type. If a user's function returns a
built-in model, it has the roles of its family.

A plan maps patterns of module names to roles, in ptrain's or transformers' words. Modules without a
role are replicated.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass

from torch import nn

from ptrain.errors import input_error
from ptrain.facts.parameters import roles_of
from ptrain.models.boundary import report_exceptions
from ptrain.models.cuttable import check_sharding, matching_names
from ptrain.models.external import named_in_spec
from ptrain.models.parting import is_transposed
from ptrain.models.transformer import Transformer
from ptrain.models.units import blocks_of
from ptrain.spec.model import ModelShape
from ptrain.spec.placement import (
    COLUMNS,
    GIVEN,
    Axis,
    Fusions,
    R,
    Role,
    Roles,
    in_any_block,
    matches_pattern,
)
from ptrain.spec.spec import Spec
from ptrain.units import group_by_key

KNOWN_PLANS: Mapping[str, Mapping[str, str]] = {
    "gpt2": {
        "transformer.h.*.attn.c_attn": Role.FUSED_COLUMN,
        "transformer.h.*.attn.split_size": Role.COUNT,
        "transformer.h.*.attn.c_proj": Role.ROW,
        "transformer.h.*.mlp.c_fc": Role.COLUMN,
        "transformer.h.*.mlp.c_proj": Role.ROW,
        "lm_head": Role.HEAD,
    },
}


# Roles in plans of transformers 4.56 to 5. None means replicated, as activations between sub-blocks
# are here without sequence parallelism.
_THEIRS: Mapping[str, Role | None] = {
    "colwise": Role.COLUMN,
    "rowwise": Role.ROW,
    "embedding_rowwise": Role.VOCABULARY,
    "colwise_rep": Role.HEAD,
    "colwise_gather_output": Role.HEAD,
    "replicated_with_grad_allreduce": Role.SHARED,
    "sequence_parallel": None,
    "replicate": None,
    "packed_colwise": Role.FUSED_COLUMN,
    "moe_tp_experts": None,
}
_OF_EXPERTS = (Role.EXPERTS.value, "moe_tp_experts")
_SEEN = (Role.NORM, Role.LAST_NORM)  # found by the forward pass: modules that run on token shards
_GATHERED = ("colwise_rep", "colwise_gather_output")


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """A tensor-parallel plan.

    Attributes:
        place: Place of the spec that holds the plan, for errors.
        entries: Role by pattern of module names, as written.
        theirs: True for a plan of transformers, whose patterns need not all match a module.
    """

    place: str
    entries: Mapping[str, str]
    is_from_transformers: bool


def module_roles(module: nn.Module, spec: Spec) -> tuple[Roles, Fusions]:
    """Return the roles of a custom model's modules, and the widths of fused projections.

    Returns:
        (pattern, role) pairs and (pattern, widths) pairs; both empty without tp, and for a built-in
            model without `tensor.plan`.

    Raises:
        SpecError: The model cannot be sharded by its plan.
    """
    if spec.degree(Axis.TP) == 1:
        return (), ()
    if isinstance(module, Transformer) and not spec.tensor.roles:
        if isinstance(spec.model, ModelShape):
            return (), ()
        place, roles, blocks = named_in_spec(module, spec)[0], roles_of(module.shape), []
    else:
        place, roles = _plan_roles(module, spec)
        is_whole = all(f.placement.activations == R for f in spec.factors if f.axis is Axis.TP)
        blocks = [] if is_whole else _block_names(module, place, spec)
    shared, fusions = check_sharding(module, roles, blocks, place, spec)
    cut = tuple(  # a fused projection is recognized by its widths
        (pattern, Role.COLUMN if role is Role.FUSED_COLUMN else role) for pattern, role in roles
    )
    return (*cut, *shared, *_block_roles(blocks)), fusions


def _block_names(module: nn.Module, place: str, spec: Spec) -> list[str]:
    """Return the names of the model's blocks; raise SpecError if it has none."""
    if not (names := blocks_of(module, spec.model.blocks)):
        raise input_error(
            place,
            "the model has no list of blocks, between which tokens could be sharded",
            "Set `model.blocks`, or use `placement.tp.activations=R`.",
        )
    return names


def _block_roles(blocks: list[str]) -> Iterator[tuple[str, Role]]:
    """Yield the roles of blocks, between which ranks hold token shards."""
    if blocks:
        yield from ((pattern, Role.BLOCK) for pattern in dict.fromkeys(map(in_any_block, blocks)))
        yield blocks[0], Role.FIRST_BLOCK
        yield blocks[-1], Role.LAST_BLOCK


def _plan_roles(module: nn.Module, spec: Spec) -> tuple[str, Roles]:
    """Return the place of the plan, and the roles from it."""
    plan = _plan_of(module, spec)
    roles = tuple(_translate_roles(module, plan))
    if plan.is_from_transformers:
        roles = (*roles, *_whole_inputs(module, roles))
    return plan.place, (*roles, *_tied_roles(module, roles))


def names_of_experts(module: nn.Module, spec: Spec) -> tuple[str, list[str]]:
    """Return the place of the plan, and the names of modules that hold a layer's experts.

    Args:
        module: The model, which may be on meta.
        spec: The spec, which names the model in messages.

    Returns:
        The key of the spec for messages about the plan, and the dotted names of all matching
        modules in the model's order.

    Raises:
        SpecError: No plan entry matches a module of experts.
    """
    plan = _given_plan(module, spec)
    meant = [pattern for pattern, word in plan.entries.items() if word in _OF_EXPERTS]
    names = [
        name for name, _ in module.named_modules() if any(matches_pattern(x, name) for x in meant)
    ]
    if not names:
        finding = f"{named_in_spec(module, spec)[1]} declares no module that holds all experts of "
        finding += f"a layer{f' (no module is named {meant[0]})' if meant else ''}"
        raise input_error(
            plan.place,
            finding,
            _missing_entries_remedy(f'"layers.*.experts": {Role.EXPERTS}', plan),
        )
    return plan.place, names


def _given_plan(module: nn.Module, spec: Spec) -> _Plan:
    """Return the model's plan, which may have no entries."""
    place, _ = named_in_spec(module, spec)
    if spec.tensor.roles:
        entries = {pattern: role.value for pattern, role in spec.tensor.roles}
        return _Plan(place="tensor.plan", entries=entries, is_from_transformers=False)
    is_theirs = hasattr(module, "_no_split_modules")
    with plan_of_module(module, "tp_plan", spec):
        own = _their_plan(module) if is_theirs else getattr(module, "tp_plan", None)
    written = own if isinstance(own, Mapping) else {}
    entries = {str(pattern): str(word) for pattern, word in written.items()}
    return _Plan(place=place, entries=entries, is_from_transformers=is_theirs)


def _plan_of(module: nn.Module, spec: Spec) -> _Plan:
    """Return the model's plan; raise SpecError if it has no entries."""
    plan = _given_plan(module, spec)
    if not plan.entries:
        _, name = named_in_spec(module, spec)
        finding = f"{name} has no tensor-parallel plan"
        entries = '"layers.*.mlp.up": column, "layers.*.mlp.down": row, …'
        raise input_error(plan.place, finding, _missing_entries_remedy(entries, plan))
    return plan


def _missing_entries_remedy(entries: str, plan: _Plan) -> str:
    """Return the remedy for a plan that lacks entries."""
    remedy = f"Add `tensor: {{plan: {{{entries}}}}}`."
    return (
        remedy
        if plan.is_from_transformers
        else (f"{remedy} Or set the attribute `tp_plan` of the module to this mapping.")
    )


def plan_of_module(module: nn.Module, attribute: str, spec: Spec) -> AbstractContextManager[None]:
    """Temporarily turn exceptions into SpecError while a plan attribute is read.

    The attribute may be a property that runs user code.

    Args:
        module: The model that has the attribute.
        attribute: Its name, for example `tp_plan`.
        spec: The spec, which names the model in the message.
    """
    place, name = named_in_spec(module, spec)
    return report_exceptions(
        place, f"{attribute} of {name}", "Correct the attribute, or remove it."
    )


def _their_plan(module: nn.Module) -> dict[str, str]:
    """Return the plan of a Transformers model, from a table by model type or from the model.

    The model's plan combines the entries of the base model's config, of the class (the head) and of
    the instance. Before transformers 5.0 the instance lacks the entries of the class.
    """
    prefix = getattr(module, "base_model_prefix", "")
    config = getattr(module, "config", None)
    if known := KNOWN_PLANS.get(getattr(config, "model_type", "")):
        return dict(known)
    base = getattr(config, "base_model_tp_plan", None) or {}
    named = {f"{prefix}.{pattern}": word for pattern, word in base.items()}
    own = {
        pattern: word
        for pattern, word in (getattr(module, "_tp_plan", None) or {}).items()
        if pattern not in base
    }
    # From the general to the specific, so that an entry of the instance replaces an entry of its
    # class.
    return {**named, **(getattr(type(module), "_tp_plan", None) or {}), **own}


def _translate_roles(module: nn.Module, plan: _Plan) -> Iterator[tuple[str, Role]]:
    """Yield the plan's (pattern, role) pairs in ptrain's roles; raise SpecError for an invalid
    entry."""
    for pattern, word in plan.entries.items():
        is_count = word == Role.COUNT
        names = list((_count_modules if is_count else matching_names)(module, pattern))
        is_head = any(module.get_submodule(name) is _output_head(module) for name in names)
        if word in _GATHERED and not is_head:
            finding = (
                f"the plan entry {pattern}: {word} all-gathers the output of a module "
                "that is not the "
            )
            finding += "head, which is not supported"
            remedy = (
                "Set a custom `tensor.plan`, in which a layer with several projections "
                "has the role "
            )
            raise input_error(
                plan.place, finding, f"{remedy}`fused column` and is followed by a `row`."
            )
        if word not in (*GIVEN, *_THEIRS):
            finding = f"the plan entry {pattern}: {word} is not a known role"
            words = (*GIVEN, *_THEIRS)
            raise input_error(
                plan.place, finding, f"Known roles: {', '.join(words)}. Set a custom `tensor.plan`."
            )
        if not names and not plan.is_from_transformers:
            finding = f"no {'integer attribute' if is_count else 'module'} is named {pattern}"
            raise input_error(
                plan.place,
                finding,
                f"Use one of the names of this model: {_describe_layers(module)}.",
            )
        role = Role(word) if word in GIVEN else _THEIRS[word]
        role = None if role in (*_SEEN, Role.EXPERTS) else role
        if names and role is not None:
            yield pattern, role if is_count else _as_stored(role, module.get_submodule(names[0]))


def _count_modules(module: nn.Module, pattern: str) -> Iterator[str]:
    """Yield the names of modules with the integer attribute that a pattern names."""
    owners, _, attribute = pattern.rpartition(".")
    for name in matching_names(module, owners):
        value = getattr(module.get_submodule(name), attribute, None)
        if isinstance(value, int) and not isinstance(value, bool):
            yield name


def _as_stored(role: Role, module: nn.Module) -> Role:
    """Return the role for a weight's storage layout: transposed for Conv1D."""
    match role:
        case Role.COLUMN | Role.FUSED_COLUMN:
            return Role.TRANSPOSED_COLUMN if is_transposed(module) else role
        case Role.ROW:
            return Role.TRANSPOSED_ROW if is_transposed(module) else role
        case _:
            return role


def _output_head(module: nn.Module) -> nn.Module | None:
    """Return the output head that the model names, or None."""
    ask = getattr(module, "get_output_embeddings", None)
    head = ask() if callable(ask) else None
    return head if isinstance(head, nn.Module) else None


def _describe_layers(module: nn.Module) -> str:
    """Return the patterns of the model's layers, for messages."""
    names = [name for name, child in module.named_modules() if isinstance(child, _LAYERS)]
    patterns = dict.fromkeys(map(in_any_block, names))
    return ", ".join(patterns) or "none (no linear layer, no embedding)"


_LAYERS = (nn.Linear, nn.Embedding)


def _whole_inputs(module: nn.Module, roles: Roles) -> Iterator[tuple[str, Role]]:
    """Yield the role whole input for each parent of column layers, whose input they share.

    A block gets no such role, because its input also enters the residual sum.
    """
    blocks = getattr(module, "_no_split_modules", None) or ()
    parents = dict.fromkeys(
        pattern.rpartition(".")[0] for pattern, role in roles if role in COLUMNS
    )
    for pattern in parents:
        modules = [module.get_submodule(name) for name in matching_names(module, pattern)]
        if pattern and not any(type(submodule).__name__ in blocks for submodule in modules):
            yield pattern, Role.WHOLE_INPUT


def _tied_roles(module: nn.Module, roles: Roles) -> Iterator[tuple[str, Role]]:
    """Yield the roles of embeddings and heads that share a weight with a sharded one."""
    owners = group_by_key(
        (id(child.weight), name)
        for name, child in module.named_modules()
        if isinstance(child, _LAYERS)
    )
    cut = {
        name
        for pattern, role in roles
        if role in (Role.VOCABULARY, Role.HEAD)
        for name in matching_names(module, pattern)
    }
    for names in owners.values():
        if cut & set(names):
            for name in names:
                # Both names of a tied weight need a role: otherwise one of them would read a
                # sharded tensor as a full one.
                if name not in cut:
                    is_table = isinstance(module.get_submodule(name), nn.Embedding)
                    yield name, Role.VOCABULARY if is_table else Role.HEAD
